// Communication on streams: between local processes through shared memory (ccl_local.cc), or by NCCL (ccl_nccl.cc).
#pragma once
#include <cstddef>

#include "math.h"

namespace tb {

enum class Reduction : int { sum = 0, average, maximum, minimum, product };
constexpr size_t kCclIdSize = 128;

struct Ring;
void ccl_new_id(char* id);
Ring* ccl_join(const char* id, int size, int rank);
int ccl_size(const Ring* ring);

// All run on `stream`; `n` counts the elements of one rank's part.
void ccl_all_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction);
void ccl_reduce(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction, int root);
void ccl_all_gather(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n);
void ccl_reduce_scatter(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, Reduction reduction);
void ccl_all_to_all(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n);
void ccl_broadcast(Ring* ring, Stream stream, Type type, const void* x, void* out, size_t n, int root);

}  // namespace tb
