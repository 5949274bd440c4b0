// Device functions, all asynchronous on a stream. Floating-point arithmetic is in float32 for all element types.
#pragma once
#include "math.h"

namespace tb {

constexpr int kMaxDims = 8;
// Sizes of dimensions, and strides of two tensors: an element is at the sum of index * stride, in elements.
struct Layout {
  int num_dims = 0;
  uint32_t dims[kMaxDims] = {};
  uint32_t x[kMaxDims] = {}, y[kMaxDims] = {};
};

// name, value of f(x, y); for functions of one operand y is the gradient or unused; a and b are constants
#define TB_MAPS(X)                                                                                             \
  X(scale, a * x + b) X(copy, x) X(sqrt, sqrtf(x)) X(rsqrt, 1.f / sqrtf(x)) X(square, x * x)                   \
  X(sin, sinf(x)) X(cos, cosf(x)) X(tanh, tanhf(x)) X(exp, expf(x)) X(silu, x * sigmoid(x))              \
  X(gelu, .5f * x * (1.f + erff(x * .70710678f))) X(gelu_tanh, gelu_by_tanh(x)) X(relu, fmaxf(x, 0.f))         \
  X(tanh_grad, (1.f - x * x) * y) X(rsqrt_grad, -.5f * y * x * x * x) X(square_grad, 2.f * x * y)              \
  X(sqrt_grad, .5f * y / x) X(silu_grad, silu_slope(x) * y) X(gelu_grad, gelu_slope(x) * y)                    \
  X(gelu_tanh_grad, gelu_tanh_slope(x) * y) X(relu_grad, x > 0.f ? y : 0.f)                                    \
  X(add, x + y) X(subtract, x - y) X(multiply, x * y) X(divide, x / y) X(maximum, fmaxf(x, y))                 \
  X(minimum, fminf(x, y)) X(power, powf(x, y)) X(floor_divide, floorf(x / y))
enum class Map : int {
#define X(name, value) name,
  TB_MAPS(X)
#undef X
};

void k_fill(Stream s, Type type, void* out, size_t n, double value);
void k_arange(Stream s, Type type, void* out, size_t n, double start, double step);
void k_cast(Stream s, Type from, const void* x, Type to, void* out, size_t n);
void k_map(Stream s, Map map, Type type, const void* x, const void* y, void* out, size_t n, float a = 0, float b = 0);
void k_map_broadcast(Stream s, Map map, Type type, const void* x, const void* y, void* out, size_t n, Layout at);
void k_spread(Stream s, Type type, const void* x, void* out, size_t n, Layout at, float scale);  // out[i] = scale x[at(i)]
void k_triangle(Stream s, Type type, const void* x, void* out, size_t n, size_t rows, size_t cols, int diagonal, bool upper);

// The sum of f over the reduced indices, for each kept index; f is x, x y or x x.
enum class Sum : int { plain, product, squares };
void k_sum_rows(Stream s, Sum sum, Type type, const void* x, const void* y, Type to, void* out, size_t rows, size_t cols, float scale);
void k_sum_columns(Stream s, Sum sum, Type type, const void* x, const void* y, void* out, size_t rows, size_t cols, float scale);
// `kept` is the layout of the kept indices, `reduced` that of the reduced ones, in x and (for product) y.
void k_sum(Stream s, Sum sum, Type type, const void* x, const void* y, void* out, size_t n, Layout kept, size_t m, Layout reduced, float scale);

void k_permute(Stream s, const void* x, void* out, size_t n, Layout at, size_t element);
void k_copy_2d(Stream s, const void* x, size_t x_pitch, void* out, size_t out_pitch, size_t width, size_t rows);  // sizes in bytes
void k_gemm(Stream s, Type type, bool tx, bool ty, int64_t m, int64_t n, int64_t k, const void* x, const void* y, void* out,
            int64_t batch, int64_t step_x, int64_t step_y, int64_t step_out);
void k_softmax(Stream s, Type type, const void* x, void* out, size_t rows, size_t cols);
void k_softmax_grad(Stream s, Type type, const void* y, const void* dy, void* dx, size_t rows, size_t cols);
void k_layer_norm(Stream s, Type type, const void* x, Type weight_type, const void* w, const void* b, void* y, float* mean, float* variance,
                  size_t rows, size_t cols, float epsilon);
void k_layer_norm_grad(Stream s, Type type, const void* x, Type weight_type, const void* w, const float* mean, const float* variance,
                       const void* dy, void* dx, void* dw, void* db, size_t rows, size_t cols, float epsilon);
void k_embedding(Stream s, Type type, const int64_t* ids, const void* w, void* out, size_t n, size_t vocab, size_t width);
void k_embedding_grad(Stream s, Type type, const int64_t* ids, const void* dy, void* dw, size_t n, size_t vocab, size_t width);
void k_cross_entropy(Stream s, const float* x, const int64_t* labels, float* softmax, float* loss, size_t rows, size_t cols, int64_t ignored);
void k_cross_entropy_grad(Stream s, const float* softmax, const int64_t* labels, const float* dloss, float* dx, size_t rows, size_t cols,
                          int64_t ignored);

struct AdamW {
  float beta1, beta2, epsilon, coefficient, rate_ratio;
  bool decay;
};
// `master` is the float32 parameter if the parameter itself is bfloat16; the two powers have one element each.
void k_adamw(Stream s, AdamW how, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* moment1,
             float* moment2, const float* rate, const float* power1, const float* power2, size_t n);
void k_sgd(Stream s, Type type, void* parameter, float* master, Type grad_type, const void* grad, const float* rate, size_t n);

}  // namespace tb
