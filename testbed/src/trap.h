// The switch `trap`, with host threads only: an operation that meets poison reports it, with the history of that memory.
#pragma once
#include "runtime.h"

namespace tb {

// Record what happens to a block, in host order. `reader` is the stream whose reads a freed block waits for; null for none.
void trap_made(const void* address, Stream owner);
void trap_touched(const void* address, Stream stream, const char* op, long number);
void trap_freed(const void* address, Stream reader);

// Checks `n` values when their stream gets there, and reports the first poisoned ones on stderr.
void trap_look(Stream stream, const char* op, long number, const char* what, const void* values, size_t n, size_t element);

}  // namespace tb
