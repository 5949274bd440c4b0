// The switch `trap`, host threads only: an operation that meets poison says so, and what became of that memory.
#pragma once
#include "runtime.h"

namespace tb {

// What happens to a block, in host order. `reader`: the stream for whose reads a freed block is held; null for none.
void trap_made(const void* address, Stream owner);
void trap_touched(const void* address, Stream stream, const char* op, long number);
void trap_freed(const void* address, Stream reader);

// Looks at `n` values when their stream comes so far, and reports the first few that are poison on stderr.
void trap_look(Stream stream, const char* op, long number, const char* what, const void* values, size_t n, size_t element);

}  // namespace tb
