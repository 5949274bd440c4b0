// Device functions of Paddle's fused operators: rms_norm, swiglu, rotary embedding.
#pragma once
#include "math.h"

namespace tb {

void k_rms_norm(Stream s, Type type, const void* x, Type weight_type, const void* w, void* y, float* inverse, size_t rows, size_t cols,
                float epsilon);
void k_rms_norm_grad(Stream s, Type type, const void* x, Type weight_type, const void* w, const float* inverse, const void* dy, void* dx,
                     void* dw, size_t rows, size_t cols);
// silu(x) y; without y, both are halves of each row of x. `cols` is the width of one half.
void k_swiglu(Stream s, Type type, const void* x, const void* y, void* out, size_t rows, size_t cols);
void k_swiglu_grad(Stream s, Type type, const void* x, const void* y, const void* grad, void* dx, void* dy, size_t rows, size_t cols);

// A tensor [batch, seq, heads, size], or [seq, batch, heads, size]; pairs are (2k, 2k + 1), or (k, k + size / 2).
struct Rotary {
  size_t batch, seq, heads, size;
  bool seq_first, adjacent;
};
void k_rotary(Stream s, Type type, const void* x, const void* sines, const void* cosines, void* out, Rotary shape, bool back);

}  // namespace tb
