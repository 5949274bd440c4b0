// Paddle's own allocator for a stream's pool, run without memory: what it takes from the device for given allocations and frees.

#include <cstdint>
#include <memory>
#include <vector>

#include "control.h"
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

 protected:
  phi::Allocation* AllocateImpl(size_t size) override {
    auto* made = new Chunk(reinterpret_cast<void*>(next_), size);
    taken_ += size, next_ += size + kGap;
    return made;
  }
  void FreeImpl(phi::Allocation* chunk) override { delete chunk; }

 private:
  size_t next_, taken_ = 0;
};

}  // namespace
}  // namespace tb

// Arguments and results as of `best_fit` in interlace/scheduler/memory/pools.py.
TB_EXPORT void tb_best_fit(const int64_t* order, const int64_t* size, const int64_t* pool, int64_t count, int64_t num_pools, int64_t num_steps,
                           int64_t* taken) {
  std::vector<std::shared_ptr<tb::Addresses>> devices;
  std::vector<std::shared_ptr<paddle::memory::allocation::AutoGrowthBestFitAllocator>> pools;
  for (int64_t k = 0; k < num_pools; ++k) {
    devices.push_back(std::make_shared<tb::Addresses>(k));
    pools.push_back(std::make_shared<paddle::memory::allocation::AutoGrowthBestFitAllocator>(devices.back(), tb::kAlign));
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
