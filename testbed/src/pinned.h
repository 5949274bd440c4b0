// Pinned host memory: buffers are parts of a few large allocations (slabs), or an allocation each (`pinned_slab=0`).
#pragma once
#include <memory>

#include "paddle/phi/core/allocator.h"
#include "runtime.h"

namespace tb {

struct PinnedNumbers {
  size_t used, peak;             // bytes of the buffers in use
  size_t buffers;                // buffers made in memory that no buffer had used before
  size_t free;                   // bytes taken from the host that no buffer uses
  size_t reserved, allocations;  // bytes taken from the host, and number of allocations; they are never returned
};
PinnedNumbers pinned_numbers();
void pinned_reset_peak();

// `pinned_copied` records that a copy on this stream uses a buffer.
std::shared_ptr<phi::Allocation> pinned_make(size_t size);
void pinned_copied(const void* address, Stream stream);
void pinned_wait(const void* address, Stream stream);

}  // namespace tb
