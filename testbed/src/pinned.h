// Pinned host memory: buffers cut from a few large allocations, each a slab, or one allocation each (`pinned_slab=0`).
#pragma once
#include <memory>

#include "paddle/phi/core/allocator.h"
#include "runtime.h"

namespace tb {

struct PinnedNumbers {
  size_t used, peak;             // bytes of the buffers in use
  size_t buffers;                // buffers ever made in memory that no buffer had before
  size_t free;                   // bytes taken from the host that no buffer in use has
  size_t reserved, allocations;  // bytes taken from the host, and in how many allocations; none is ever given back
};
PinnedNumbers pinned_numbers();
void pinned_reset_peak();

// A copy says that it uses a buffer, and by which stream.
std::shared_ptr<phi::Allocation> pinned_make(size_t size);
void pinned_copied(const void* address, Stream stream);
void pinned_wait(const void* address, Stream stream);

}  // namespace tb
