// Ranks of one host meet in a file that all of them map. Each communication is a piece of work of its stream's thread: it blocks
// that stream, never the host, and ends only when all ranks of the ring have taken part, as on a GPU.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "ccl.h"

namespace tb {
namespace {

constexpr size_t kSlot = size_t{1} << 20;  // bytes that a rank writes at once

struct Shared {
  std::atomic<uint32_t> arrived;
  char pad[60];
  std::atomic<uint64_t> kind[64];  // what each rank says it is doing, so that a mix-up causes an error and no wrong result
};

// Sleep until another process wakes the waiters at `word`, at most a second; return at once if the word has changed since it was `seen`.
void sleep_at(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec most{1, 0};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
}
void wake_all_at(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

double timeout_s() {
  const char* given = getenv("INTERLACE_TIMEOUT_S");
  return given ? atof(given) : 300.;
}

[[noreturn]] void stop(const std::string& why) {
  fprintf(stderr, "testbed: %s\n", why.c_str());
  fflush(stderr);
  _exit(70);  // nobody would catch an exception of a device thread
}

}  // namespace

struct Ring {
  std::string id;
  int size, rank;
  Shared* shared;
  char* slots;
  uint32_t phases = 0;

  // Work of one ring runs in the order in which the host issued it, on whatever streams, as with NCCL.
  std::mutex mutex;
  std::condition_variable turn;
  uint64_t given = 0, done = 0;

  char* slot(int rank) const { return slots + rank * kSlot; }

  void meet(const char* name) {
    uint32_t until = ++phases * size;
    if (++shared->arrived == until) return wake_all_at(shared->arrived);
    auto start = std::chrono::steady_clock::now();
    for (uint32_t seen; (seen = shared->arrived) < until;) {
      sleep_at(shared->arrived, seen);
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > timeout_s())
        stop(std::string(name) + " on ring " + id + ": rank " + std::to_string(rank) + " of " + std::to_string(size) +
             " waited " + std::to_string(static_cast<int>(timeout_s())) + " s for the others");
    }
  }

  void announce(const char* name, size_t bytes) {
    uint64_t hash = bytes + 1;
    for (const char* c = name; *c; ++c) hash = hash * 31 + *c;
    shared->kind[rank] = hash;
    meet(name);
    for (int r = 0; r < size; ++r)
      if (shared->kind[r] != hash)
        stop(std::string(name) + " of " + std::to_string(bytes) + " bytes on ring " + id + ": rank " + std::to_string(r) +
             " is in another communication than rank " + std::to_string(rank) + "; the ranks issue this ring's work in different orders");
    meet(name);
  }
};

namespace {

void queue(Ring* ring, Stream stream, const char* name, size_t bytes, std::function<void()> run) {
  if (again_at_launches([=] { queue(ring, stream, name, bytes, run); })) return;
  uint64_t mine;
  {
    std::lock_guard<std::mutex> guard(ring->mutex);
    mine = ring->given++;
  }
  enqueue(stream, Work::collective, name, [=, run = std::move(run)] {
    {
      std::unique_lock<std::mutex> lock(ring->mutex);
      ring->turn.wait(lock, [&] { return ring->done == mine; });
    }
    ring->announce(name, bytes);
    run();
    {
      std::lock_guard<std::mutex> guard(ring->mutex);
      ++ring->done;
    }
    ring->turn.notify_all();
  });
}

template <class T>
float combine(float a, T b, Reduction reduction) {
  float value = static_cast<float>(b);
  switch (reduction) {
    case Reduction::maximum: return std::max(a, value);
    case Reduction::minimum: return std::min(a, value);
    case Reduction::product: return a * value;
    default: return a + value;
  }
}

// In the order of ranks, so that every rank gets the same bits.
template <class T>
void fold(const Ring* ring, size_t offset, T* out, size_t n, Reduction reduction) {
  for (size_t k = 0; k < n; ++k) {
    float total = static_cast<float>(reinterpret_cast<const T*>(ring->slot(0))[offset + k]);
    for (int r = 1; r < ring->size; ++r) total = combine(total, reinterpret_cast<const T*>(ring->slot(r))[offset + k], reduction);
    if (reduction == Reduction::average) total /= ring->size;
    out[k] = static_cast<T>(total);
  }
}

void fold_any(const Ring* ring, Type type, size_t offset, void* out, size_t n, Reduction reduction) {
  switch (type) {
    case Type::f32: return fold(ring, offset, static_cast<float*>(out), n, reduction);
    case Type::bf16: return fold(ring, offset, static_cast<bf16*>(out), n, reduction);
    case Type::i64: return fold(ring, offset, static_cast<int64_t*>(out), n, reduction);
    case Type::i32: return fold(ring, offset, static_cast<int32_t*>(out), n, reduction);
    default: stop("no reduction of this element type");
  }
}

const char* at(const void* start, size_t bytes) { return static_cast<const char*>(start) + bytes; }
char* at(void* start, size_t bytes) { return static_cast<char*>(start) + bytes; }

}  // namespace

void ccl_new_id(char* id) { memset(id, 0, kCclIdSize); }

int ccl_size(const Ring* ring) { return ring->size; }

Ring* ccl_join(const char* id, int size, int rank) {
  if (size > 64) throw std::runtime_error("testbed: a ring of local processes has up to 64 ranks");
  size_t bytes = sizeof(Shared) + size * kSlot;
  int file = open(id, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) throw std::runtime_error(std::string("testbed: cannot make ring file ") + id);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error(std::string("testbed: cannot map ring file ") + id);
  auto* ring = new Ring;
  ring->id = id, ring->size = size, ring->rank = rank;
  ring->shared = static_cast<Shared*>(mapped), ring->slots = static_cast<char*>(mapped) + sizeof(Shared);
  return ring;
}

void ccl_all_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction) {
  size_t e = size_of(type), step = kSlot / e;
  queue(ring, stream, "all_reduce", n * e, [=] {
    for (size_t k = 0; k < n; k += step) {
      size_t m = std::min(step, n - k);
      memcpy(ring->slot(ring->rank), at(x, k * e), m * e);
      ring->meet("all_reduce");
      fold_any(ring, type, 0, at(out, k * e), m, reduction);
      ring->meet("all_reduce");
    }
  });
}

void ccl_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction, int root) {
  size_t e = size_of(type), step = kSlot / e;
  queue(ring, stream, "reduce", n * e, [=] {
    for (size_t k = 0; k < n; k += step) {
      size_t m = std::min(step, n - k);
      memcpy(ring->slot(ring->rank), at(x, k * e), m * e);
      ring->meet("reduce");
      if (ring->rank == root) fold_any(ring, type, 0, at(out, k * e), m, reduction);
      ring->meet("reduce");
    }
  });
}

void ccl_all_gather(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n) {
  size_t bytes = n * size_of(type);
  queue(ring, stream, "all_gather", bytes, [=] {
    for (size_t k = 0; k < bytes; k += kSlot) {
      size_t m = std::min(kSlot, bytes - k);
      memcpy(ring->slot(ring->rank), at(x, k), m);
      ring->meet("all_gather");
      for (int r = 0; r < ring->size; ++r) memcpy(at(out, r * bytes + k), ring->slot(r), m);
      ring->meet("all_gather");
    }
  });
}

void ccl_reduce_scatter(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction) {
  size_t e = size_of(type), step = kSlot / e / ring->size;
  queue(ring, stream, "reduce_scatter", n * e, [=] {
    for (size_t k = 0; k < n; k += step) {
      size_t m = std::min(step, n - k);
      for (int r = 0; r < ring->size; ++r) memcpy(ring->slot(ring->rank) + r * step * e, at(x, (r * n + k) * e), m * e);
      ring->meet("reduce_scatter");
      fold_any(ring, type, ring->rank * step, at(out, k * e), m, reduction);
      ring->meet("reduce_scatter");
    }
  });
}

void ccl_all_to_all(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n) {
  size_t bytes = n * size_of(type), step = kSlot / ring->size / 256 * 256;
  queue(ring, stream, "all_to_all", bytes, [=] {
    for (size_t k = 0; k < bytes; k += step) {
      size_t m = std::min(step, bytes - k);
      for (int r = 0; r < ring->size; ++r) memcpy(ring->slot(ring->rank) + r * step, at(x, r * bytes + k), m);
      ring->meet("all_to_all");
      for (int r = 0; r < ring->size; ++r) memcpy(at(out, r * bytes + k), ring->slot(r) + ring->rank * step, m);
      ring->meet("all_to_all");
    }
  });
}

void ccl_broadcast(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, int root) {
  size_t bytes = n * size_of(type);
  queue(ring, stream, "broadcast", bytes, [=] {
    for (size_t k = 0; k < bytes; k += kSlot) {
      size_t m = std::min(kSlot, bytes - k);
      if (ring->rank == root) memcpy(ring->slot(root), at(x, k), m);
      ring->meet("broadcast");
      if (out != x || ring->rank != root) memmove(at(out, k), ring->slot(root), m);
      ring->meet("broadcast");
    }
  });
}

}  // namespace tb
