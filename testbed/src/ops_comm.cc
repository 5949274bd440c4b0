// Collectives. The executor gives a kernel the context of its ring and stream; tb_ring_make creates rings.
#include "ccl.h"
#include "op.h"
#include "paddle/phi/core/distributed/comm_context_manager.h"
#include "paddle/phi/core/distributed/xccl_comm_context.h"
#include "paddle/phi/core/memory/allocation/allocator_facade.h"

namespace tb {
namespace {

using phi::distributed::CommContextManager;
using phi::distributed::XCCLCommContext;

Ring* ring_of(const phi::CustomContext& c, const char* name) {
  auto* found = static_cast<XCCLCommContext*>(c.GetCommContext());
  if (!found) refuse(name, "its ring has no communicator on this stream");
  return static_cast<Ring*>(found->GetXcclComm());
}

// Paddle gives a ring's context no device context, although its executor reads it.
void attach_context(XCCLCommContext* ring, const phi::CustomPlace& place) {
  auto context = std::make_unique<phi::CustomContext>(place);
  context->PartialInitWithoutAllocator();
  auto& memory = paddle::memory::allocation::AllocatorFacade::Instance();
  phi::CPUPlace host;
  context->SetAllocator(Pool::of(place.GetDeviceId(), context->stream()));
  context->SetHostAllocator(memory.GetAllocator(host).get());
  context->SetZeroAllocator(memory.GetZeroAllocator(place).get());
  context->SetHostZeroAllocator(memory.GetZeroAllocator(host).get());
  context->SetPinnedAllocator(memory.GetAllocator(host).get());
  context->PartialInitWithAllocator();
  ring->SetDevContext(std::move(context));
}

Reduction reduction_of(int type) {  // paddle.distributed.ReduceOp
  static const Reduction known[] = {Reduction::sum, Reduction::maximum, Reduction::minimum, Reduction::product, Reduction::average};
  return known[type];
}

}  // namespace

template <typename T, typename Context>
void AllReduceKernel(const Context& c, const DenseTensor& x, int type, DenseTensor* out) {
  Op op(c, "all_reduce", {&x});
  op.out(out, x.dtype());
  ccl_all_reduce(ring_of(c, op.name), op.stream, type_of(x), x.data(), out->data(), x.numel(), reduction_of(type));
}

template <typename T, typename Context>
void ReduceKernel(const Context& c, const DenseTensor& x, int root, int type, DenseTensor* out) {
  Op op(c, "reduce", {&x});
  op.out(out, x.dtype());
  ccl_reduce(ring_of(c, op.name), op.stream, type_of(x), x.data(), out->data(), x.numel(), reduction_of(type), root);
}

template <typename T, typename Context>
void AllGatherKernel(const Context& c, const DenseTensor& x, int, DenseTensor* out) {
  Op op(c, "all_gather", {&x});
  op.out(out, x.dtype());
  ccl_all_gather(ring_of(c, op.name), op.stream, type_of(x), x.data(), out->data(), x.numel());
}

template <typename T, typename Context>
void ReduceScatterKernel(const Context& c, const DenseTensor& x, int, DenseTensor* out) {
  Op op(c, "reduce_scatter", {&x});
  op.out(out, x.dtype());
  ccl_reduce_scatter(ring_of(c, op.name), op.stream, type_of(x), x.data(), out->data(), out->numel(), Reduction::sum);
}

template <typename T, typename Context>
void AllToAllKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  Op op(c, "all_to_all", {&x});
  op.out(out, x.dtype());
  Ring* ring = ring_of(c, op.name);
  ccl_all_to_all(ring, op.stream, type_of(x), x.data(), out->data(), x.numel() / ccl_size(ring));
}

template <typename T, typename Context>
void BroadcastKernel(const Context& c, const DenseTensor& x, int root, DenseTensor* out) {
  Op op(c, "broadcast", {&x});
  op.out(out, x.dtype());
  ccl_broadcast(ring_of(c, op.name), op.stream, type_of(x), x.data(), out->data(), x.numel(), root);
}

}  // namespace tb

#define TB_SENT float, int, int64_t, phi::dtype::bfloat16
TB_KERNEL(all_reduce, AllReduceKernel, TB_SENT) {}
TB_KERNEL(reduce, ReduceKernel, TB_SENT) {}
TB_KERNEL(all_gather, AllGatherKernel, TB_SENT) {}
TB_KERNEL(reduce_scatter, ReduceScatterKernel, TB_SENT) {}
TB_KERNEL(all_to_all, AllToAllKernel, TB_SENT) {}
TB_KERNEL(broadcast, BroadcastKernel, TB_SENT) {}

// `id` has kCclIdSize bytes, the same on all ranks. Returns 0, or 1 with the reason on stderr.
TB_EXPORT int tb_ring_make(const char* key, int device, int rank, int size, const char* id) {
  using namespace tb;
  try {
    CommContextManager& manager = CommContextManager::GetInstance();
    if (manager.Has(key)) return 0;
    phi::CustomPlace place("testbed", device);
    phi::ccl::CCLRootId root(id, id + kCclIdSize);
    auto made = std::make_unique<XCCLCommContext>(place, rank, size, root);
    attach_context(made.get(), place);
    manager.Emplace(key, std::move(made));
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "testbed: ring %s: %s\n", key, error.what());
    return 1;
  }
}

TB_EXPORT void tb_ccl_new_id(char* id) { tb::ccl_new_id(id); }
