// Communication by NCCL. It is declared here, so that its headers need not be installed.
#include <cstdlib>

#include "ccl.h"
#include "library.h"

namespace tb {
namespace {

struct UniqueId {
  char bytes[kCclIdSize];
};
using Comm = void*;
using GetId = int(UniqueId*);
using Init = int(Comm*, int, UniqueId, int);
using AllReduce = int(const void*, void*, size_t, int, int, Comm, void*);
using Rooted = int(const void*, void*, size_t, int, int, int, Comm, void*);
using Broadcast = int(const void*, void*, size_t, int, int, Comm, void*);
using AllGather = int(const void*, void*, size_t, int, Comm, void*);
using Send = int(const void*, size_t, int, int, Comm, void*);
using Receive = int(void*, size_t, int, int, Comm, void*);
using Group = int();

const Library& nccl() {
  static const Library found("TESTBED_NCCL", "libnccl.so.2");
  return found;
}

void must(int status, const char* what) {
  if (!status) return;
  auto* text = nccl().find<const char*(int)>("ncclGetErrorString");
  throw std::runtime_error(std::string("testbed: ") + what + ": " + text(status));
}

int element_of(Type type) {  // ncclDataType_t
  switch (type) {
    case Type::f32: return 7;
    case Type::bf16: return 9;
    case Type::f64: return 8;
    case Type::i64: return 4;
    case Type::i32: return 2;
    default: return 1;
  }
}
int reduction_of(Reduction reduction) {  // ncclRedOp_t
  static const int known[] = {0, 4, 2, 3, 1};
  return known[static_cast<int>(reduction)];
}

}  // namespace

struct Ring {
  Comm comm;
  int size, rank;
};

int ccl_size(const Ring* ring) { return ring->size; }

void ccl_new_id(char* id) { must(nccl().find<GetId>("ncclGetUniqueId")(reinterpret_cast<UniqueId*>(id)), "ncclGetUniqueId"); }

Ring* ccl_join(const char* id, int size, int rank) {
  UniqueId unique;
  memcpy(unique.bytes, id, kCclIdSize);
  auto* ring = new Ring{nullptr, size, rank};
  must(nccl().find<Init>("ncclCommInitRank")(&ring->comm, size, unique, rank), "ncclCommInitRank");
  return ring;
}

void ccl_all_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction) {
  static auto* const call = nccl().find<AllReduce>("ncclAllReduce");
  Piece piece(stream, Work::collective, "all_reduce");
  must(call(x, out, n, element_of(type), reduction_of(reduction), ring->comm, stream), "ncclAllReduce");
}

void ccl_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction, int root) {
  static auto* const call = nccl().find<Rooted>("ncclReduce");
  Piece piece(stream, Work::collective, "reduce");
  must(call(x, out, n, element_of(type), reduction_of(reduction), root, ring->comm, stream), "ncclReduce");
}

void ccl_all_gather(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n) {
  static auto* const call = nccl().find<AllGather>("ncclAllGather");
  Piece piece(stream, Work::collective, "all_gather");
  must(call(x, out, n, element_of(type), ring->comm, stream), "ncclAllGather");
}

void ccl_reduce_scatter(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction) {
  static auto* const call = nccl().find<AllReduce>("ncclReduceScatter");
  Piece piece(stream, Work::collective, "reduce_scatter");
  must(call(x, out, n, element_of(type), reduction_of(reduction), ring->comm, stream), "ncclReduceScatter");
}

void ccl_all_to_all(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n) {
  static auto* const start = nccl().find<Group>("ncclGroupStart");
  static auto* const end = nccl().find<Group>("ncclGroupEnd");
  static auto* const send = nccl().find<Send>("ncclSend");
  static auto* const receive = nccl().find<Receive>("ncclRecv");
  Piece piece(stream, Work::collective, "all_to_all");
  size_t bytes = n * size_of(type);
  must(start(), "ncclGroupStart");
  for (int r = 0; r < ring->size; ++r) {
    must(send(static_cast<const char*>(x) + r * bytes, n, element_of(type), r, ring->comm, stream), "ncclSend");
    must(receive(static_cast<char*>(out) + r * bytes, n, element_of(type), r, ring->comm, stream), "ncclRecv");
  }
  must(end(), "ncclGroupEnd");
}

// A send and a receive between two ranks, as Paddle's own point-to-point operators issue them on the GPU place.
void ccl_pass(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, int root) {
  static auto* const send = nccl().find<Send>("ncclSend");
  static auto* const receive = nccl().find<Receive>("ncclRecv");
  if (ring->rank != root) return must(receive(out, n, element_of(type), root, ring->comm, stream), "ncclRecv");
  must(send(x, n, element_of(type), 1 - root, ring->comm, stream), "ncclSend");
  if (out != x) copy_async(stream, out, x, n * size_of(type), Copy::device_to_device);
}

void ccl_broadcast(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, int root) {
  static auto* const call = nccl().find<Broadcast>("ncclBroadcast");
  static const bool passes = !getenv("TESTBED_P2P_BROADCAST");
  Piece piece(stream, Work::collective, "broadcast");
  if (ring->size == 2 && passes) return ccl_pass(ring, stream, type, x, out, n, root);
  must(call(x, out, n, element_of(type), root, ring->comm, stream), "ncclBroadcast");
}

}  // namespace tb
