// Paddle's own allocator for a stream's pool, run without memory: what it takes from the device for given allocations and frees.

#include <cstdint>
#include <memory>
#include <vector>

#include "control.h"
#include "memory.h"
#include "paddle/phi/core/memory/allocation/auto_growth_best_fit_allocator.h"

namespace tb {
namespace {

namespace allocation = paddle::memory::allocation;

constexpr size_t kAlign = 256;
constexpr size_t kGap = 1 << 20;  // chunks are not neighbours

class Chunk : public allocation::Allocation {
 public:
  Chunk(void* address, size_t size) : Allocation(address, size, phi::CPUPlace()) {}
};

// Addresses that nobody reads or writes.
class Addresses : public allocation::Allocator {
 public:
  explicit Addresses(size_t number) : next_((number + 1) << 44) {}
  size_t taken() const { return taken_; }
  void* next(size_t size) { return taken_ += size, next_ += size, reinterpret_cast<void*>(next_ - size); }

 protected:
  phi::Allocation* AllocateImpl(size_t size) override {
    next_ += kGap;
    return new Chunk(next(size), size);
  }
  void FreeImpl(phi::Allocation* chunk) override { delete chunk; }

 private:
  size_t next_, taken_ = 0;
};

// The free blocks of the testbed's pools. Chunks are neighbours, and must not merge.
class Own : public phi::Allocator {
 public:
  explicit Own(std::shared_ptr<Addresses> device) : device_(std::move(device)) {}
  AllocationPtr Allocate(size_t size) override {
    void* address = free_.take(size);
    if (!address) free_.add_chunk(address = device_->next(size), size);
    auto give = [](phi::Allocation* block) { static_cast<Part*>(block)->give(); };
    return AllocationPtr(new Part(this, address, size), give);
  }

 private:
  struct Part : phi::Allocation {
    Part(Own* own, void* address, size_t size) : phi::Allocation(address, size, phi::CPUPlace()), own(own) {}
    void give() { own->free_.give(ptr(), size()), delete this; }
    Own* own;
  };
  std::shared_ptr<Addresses> device_;
  FreeBlocks free_;
};

}  // namespace
}  // namespace tb

// Arguments and results as of `best_fit` in interlace/scheduler/memory/pools.py; by Paddle's allocator or, with `own`, by the testbed's.
TB_EXPORT void tb_best_fit(const int64_t* order, const int64_t* size, const int64_t* pool, int64_t count, int64_t num_pools, int64_t num_steps,
                           bool own, int64_t* taken) {
  std::vector<std::shared_ptr<tb::Addresses>> devices;
  std::vector<std::shared_ptr<phi::Allocator>> pools;
  for (int64_t k = 0; k < num_pools; ++k) {
    devices.push_back(std::make_shared<tb::Addresses>(k));
    if (own) pools.push_back(std::make_shared<tb::Own>(devices.back()));
    else pools.push_back(std::make_shared<paddle::memory::allocation::AutoGrowthBestFitAllocator>(devices.back(), tb::kAlign));
  }
  std::vector<phi::Allocator::AllocationPtr> held(count);
  for (int64_t step = 0; step < num_steps; ++step)
    for (int64_t k = 0; k < 2 * count; ++k) {
      int64_t block = order[k] % count;
      held[block].reset();
      if (order[k] < count) held[block] = pools[pool[block]]->Allocate(size[block]);
    }
  held.clear();
  for (int64_t k = 0; k < num_pools; ++k) taken[k] = devices[k]->taken();
}
