// Device functions for models other than transformers: plain loops, which are correct but not fast.
#pragma once
#include "math.h"

namespace tb {

// A window that slides over images in the layout [images, channels, height, width].
struct Window2d {
  int64_t images, channels, height, width;           // input
  int64_t out_channels, out_height, out_width;       // output
  int64_t kernel_height, kernel_width, step_y, step_x, pad_y, pad_x, spread_y, spread_x, groups;
};

void k_conv(Stream s, Type type, Window2d at, const void* x, const void* w, void* y);
void k_conv_grad_x(Stream s, Type type, Window2d at, const void* w, const void* dy, void* dx);
void k_conv_grad_w(Stream s, Type type, Window2d at, const void* x, const void* dy, void* dw);

// The first largest value of a window; or its mean, over the part inside the image (`exclusive`) or the whole window.
struct Pool2d {
  bool largest, exclusive, adaptive;
};
void k_pool(Stream s, Type type, Window2d at, Pool2d how, const void* x, void* y);
void k_pool_grad(Stream s, Type type, Window2d at, Pool2d how, const void* x, const void* y, const void* dy, void* dx);

// x is [images, channels, size]; with `known` it is normalised by the running statistics, which stay as they are.
struct BatchNorm {
  size_t images, channels, size;
  float momentum, epsilon;
  bool known;
};
void k_batch_norm(Stream s, Type type, BatchNorm at, const void* x, const float* scale, const float* bias, void* y, float* mean,
                  float* variance, float* saved_mean, float* saved_scale);
void k_batch_norm_grad(Stream s, Type type, BatchNorm at, const void* x, const float* scale, const float* mean, const float* variance,
                       const float* saved_mean, const float* saved_scale, const void* dy, void* dx, float* dscale, float* dbias);

// `seed` and an element's number determine whether it is kept; kept elements are multiplied by `factor`.
void k_dropout(Stream s, Type type, const void* x, void* y, uint8_t* mask, size_t n, uint64_t seed, float probability, float factor);
void k_dropout_grad(Stream s, Type type, const void* dy, const uint8_t* mask, void* dx, size_t n, float factor);

enum class Order : int { less, less_equal, greater, greater_equal, equal, not_equal };
void k_compare(Stream s, Order order, Type type, const void* x, const void* y, bool one_y, uint8_t* out, size_t n);

// Along rows: the index of the largest value (the first if several are equal), and the sum of a value and all before it.
void k_argmax(Stream s, Type type, const void* x, int64_t* out, size_t rows, size_t cols);
void k_cumsum(Stream s, Type type, const void* x, void* out, size_t outer, size_t size, size_t inner);  // over the middle dimension
void k_one_hot(Stream s, const int64_t* ids, float* out, size_t n, size_t classes);

void k_momentum(Stream s, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* velocity, const float* rate,
                float mu, float decay, float rescale, bool nesterov, size_t n);

struct Lamb {
  float beta1, beta2, epsilon, decay;
  bool adapt;
};
// `step` has n elements.
void k_lamb(Stream s, Lamb how, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* moment1, float* moment2,
            const float* rate, const float* power1, const float* power2, float* step, size_t n);

}  // namespace tb
