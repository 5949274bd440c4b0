#include "zoo.h"

namespace tb {
namespace {

// Bounds of a window's rows or columns in the input.
struct Span {
  int64_t begin, end;
};
HD Span span(int64_t out, int64_t step, int64_t pad, int64_t kernel, int64_t size, int64_t outs, bool adaptive) {
  if (adaptive) return {out * size / outs, ((out + 1) * size + outs - 1) / outs};
  int64_t begin = out * step - pad, end = begin + kernel;
  return {begin < 0 ? 0 : begin, end > size ? size : end};
}

template <class T>
T* as(void* address, T*) { return static_cast<T*>(address); }
template <class T>
const T* as(const void* address, T*) { return static_cast<const T*>(address); }

HD uint64_t draw(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

// ---- convolution, one element of the result at a time

template <class T>
void conv(Stream s, Window2d at, const T* x, const T* w, T* y) {
  each(s, "conv2d", at.images * at.out_channels * at.out_height * at.out_width, [=] DEV(size_t k) {
    int64_t column = k % at.out_width, row = k / at.out_width % at.out_height, out = k / at.out_width / at.out_height % at.out_channels;
    int64_t image = k / at.out_width / at.out_height / at.out_channels;
    int64_t depth = at.channels / at.groups, first = out / (at.out_channels / at.groups) * depth;
    float total = 0;
    for (int64_t c = 0; c < depth; ++c)
      for (int64_t a = 0; a < at.kernel_height; ++a)
        for (int64_t b = 0; b < at.kernel_width; ++b) {
          int64_t i = row * at.step_y - at.pad_y + a * at.spread_y, j = column * at.step_x - at.pad_x + b * at.spread_x;
          if (i < 0 || i >= at.height || j < 0 || j >= at.width) continue;
          total += static_cast<float>(x[((image * at.channels + first + c) * at.height + i) * at.width + j]) *
                   static_cast<float>(w[((out * depth + c) * at.kernel_height + a) * at.kernel_width + b]);
        }
    y[k] = static_cast<T>(total);
  });
}

template <class T>
void conv_grad_x(Stream s, Window2d at, const T* w, const T* dy, T* dx) {
  each(s, "conv2d_grad_x", at.images * at.channels * at.height * at.width, [=] DEV(size_t k) {
    int64_t j = k % at.width, i = k / at.width % at.height, channel = k / at.width / at.height % at.channels;
    int64_t image = k / at.width / at.height / at.channels, depth = at.channels / at.groups, outs = at.out_channels / at.groups;
    float total = 0;
    for (int64_t o = 0; o < outs; ++o)
      for (int64_t a = 0; a < at.kernel_height; ++a)
        for (int64_t b = 0; b < at.kernel_width; ++b) {
          int64_t row = i + at.pad_y - a * at.spread_y, column = j + at.pad_x - b * at.spread_x, out = channel / depth * outs + o;
          if (row < 0 || column < 0 || row % at.step_y || column % at.step_x) continue;
          row /= at.step_y, column /= at.step_x;
          if (row >= at.out_height || column >= at.out_width) continue;
          total += static_cast<float>(dy[((image * at.out_channels + out) * at.out_height + row) * at.out_width + column]) *
                   static_cast<float>(w[((out * depth + channel % depth) * at.kernel_height + a) * at.kernel_width + b]);
        }
    dx[k] = static_cast<T>(total);
  });
}

template <class T>
void conv_grad_w(Stream s, Window2d at, const T* x, const T* dy, T* dw) {
  int64_t depth = at.channels / at.groups;
  each(s, "conv2d_grad_w", at.out_channels * depth * at.kernel_height * at.kernel_width, [=] DEV(size_t k) {
    int64_t b = k % at.kernel_width, a = k / at.kernel_width % at.kernel_height, c = k / at.kernel_width / at.kernel_height % depth;
    int64_t out = k / at.kernel_width / at.kernel_height / depth, channel = out / (at.out_channels / at.groups) * depth + c;
    float total = 0;
    for (int64_t image = 0; image < at.images; ++image)
      for (int64_t row = 0; row < at.out_height; ++row)
        for (int64_t column = 0; column < at.out_width; ++column) {
          int64_t i = row * at.step_y - at.pad_y + a * at.spread_y, j = column * at.step_x - at.pad_x + b * at.spread_x;
          if (i < 0 || i >= at.height || j < 0 || j >= at.width) continue;
          total += static_cast<float>(x[((image * at.channels + channel) * at.height + i) * at.width + j]) *
                   static_cast<float>(dy[((image * at.out_channels + out) * at.out_height + row) * at.out_width + column]);
        }
    dw[k] = static_cast<T>(total);
  });
}

void k_conv(Stream s, Type type, Window2d at, const void* x, const void* w, void* y) {
  with_float(type, "conv2d", [=](auto* t) { conv(s, at, as(x, t), as(w, t), as(y, t)); });
}
void k_conv_grad_x(Stream s, Type type, Window2d at, const void* w, const void* dy, void* dx) {
  with_float(type, "conv2d_grad", [=](auto* t) { conv_grad_x(s, at, as(w, t), as(dy, t), as(dx, t)); });
}
void k_conv_grad_w(Stream s, Type type, Window2d at, const void* x, const void* dy, void* dw) {
  with_float(type, "conv2d_grad", [=](auto* t) { conv_grad_w(s, at, as(x, t), as(dy, t), as(dw, t)); });
}

// ---- pooling, forward one element at a time, backward one plane

template <class T>
void pool(Stream s, Window2d at, Pool2d how, const T* x, T* y) {
  each(s, "pool2d", at.images * at.channels * at.out_height * at.out_width, [=] DEV(size_t k) {
    int64_t column = k % at.out_width, row = k / at.out_width % at.out_height;
    const T* plane = x + k / at.out_width / at.out_height * at.height * at.width;
    Span i = span(row, at.step_y, at.pad_y, at.kernel_height, at.height, at.out_height, how.adaptive);
    Span j = span(column, at.step_x, at.pad_x, at.kernel_width, at.width, at.out_width, how.adaptive);
    float total = how.largest ? -INFINITY : 0;
    for (int64_t a = i.begin; a < i.end; ++a)
      for (int64_t b = j.begin; b < j.end; ++b) {
        float value = static_cast<float>(plane[a * at.width + b]);
        total = how.largest ? fmaxf(total, value) : total + value;
      }
    bool inside = how.exclusive || how.adaptive;
    int64_t count = inside ? (i.end - i.begin) * (j.end - j.begin) : at.kernel_height * at.kernel_width;
    y[k] = static_cast<T>(how.largest ? total : total / static_cast<float>(count));
  });
}

template <class T>
void pool_grad(Stream s, Window2d at, Pool2d how, const T* x, const T* y, const T* dy, T* dx) {
  each(s, "pool2d_grad", at.images * at.channels, [=] DEV(size_t k) {
    size_t from = k * at.height * at.width, to = k * at.out_height * at.out_width;
    for (int64_t n = 0; n < at.height * at.width; ++n) dx[from + n] = static_cast<T>(0.f);
    for (int64_t n = 0; n < at.out_height * at.out_width; ++n) {
      Span i = span(n / at.out_width, at.step_y, at.pad_y, at.kernel_height, at.height, at.out_height, how.adaptive);
      Span j = span(n % at.out_width, at.step_x, at.pad_x, at.kernel_width, at.width, at.out_width, how.adaptive);
      bool inside = how.exclusive || how.adaptive, given = false;
      float count = static_cast<float>(inside ? (i.end - i.begin) * (j.end - j.begin) : at.kernel_height * at.kernel_width);
      float grad = static_cast<float>(dy[to + n]), top = static_cast<float>(y[to + n]);
      for (int64_t a = i.begin; a < i.end; ++a)
        for (int64_t b = j.begin; b < j.end; ++b) {
          size_t place = from + a * at.width + b;
          bool here = !how.largest || (!given && static_cast<float>(x[place]) == top);
          given = given || here;
          if (here) dx[place] = static_cast<T>(static_cast<float>(dx[place]) + (how.largest ? grad : grad / count));
        }
    }
  });
}

void k_pool(Stream s, Type type, Window2d at, Pool2d how, const void* x, void* y) {
  with_float(type, "pool2d", [=](auto* t) { pool(s, at, how, as(x, t), as(y, t)); });
}
void k_pool_grad(Stream s, Type type, Window2d at, Pool2d how, const void* x, const void* y, const void* dy, void* dx) {
  with_float(type, "pool2d_grad", [=](auto* t) { pool_grad(s, at, how, as(x, t), as(y, t), as(dy, t), as(dx, t)); });
}

// ---- batch norm, one channel at a time

template <class T>
void batch_norm(Stream s, BatchNorm at, const T* x, const float* scale, const float* bias, T* y, float* mean, float* variance,
                float* saved_mean, float* saved_scale) {
  size_t count = at.images * at.size;
  rows(s, "batch_norm", at.channels, count, [=] DEV(const Team& team, size_t c) {
    auto place = [=](size_t k) { return (k / at.size * at.channels + c) * at.size + k % at.size; };
    float middle = mean[c], spread = variance[c];
    if (!at.known) {
      middle = team.sum(count, [=](size_t k) { return static_cast<float>(x[place(k)]); }) / count;
      spread = team.sum(count, [=](size_t k) {
        float away = static_cast<float>(x[place(k)]) - middle;
        return away * away;
      }) / count;
    }
    float factor = 1.f / sqrtf(spread + at.epsilon), weight = scale ? scale[c] : 1.f, shift = bias ? bias[c] : 0.f;
    team.each(count, [=](size_t k) { y[place(k)] = static_cast<T>((static_cast<float>(x[place(k)]) - middle) * factor * weight + shift); });
    if (!team.first()) return;
    saved_mean[c] = middle, saved_scale[c] = factor;
    if (at.known) return;
    mean[c] = mean[c] * at.momentum + middle * (1.f - at.momentum);
    variance[c] = variance[c] * at.momentum + spread * (1.f - at.momentum);
  });
}

template <class T>
void batch_norm_grad(Stream s, BatchNorm at, const T* x, const float* scale, const float* mean, const float* variance,
                     const float* saved_mean, const float* saved_scale, const T* dy, T* dx, float* dscale, float* dbias) {
  size_t count = at.images * at.size;
  rows(s, "batch_norm_grad", at.channels, count, [=] DEV(const Team& team, size_t c) {
    auto place = [=](size_t k) { return (k / at.size * at.channels + c) * at.size + k % at.size; };
    float middle = at.known ? mean[c] : saved_mean[c], factor = at.known ? 1.f / sqrtf(variance[c] + at.epsilon) : saved_scale[c];
    float total = team.sum(count, [=](size_t k) { return static_cast<float>(dy[place(k)]); });
    float along = team.sum(count, [=](size_t k) {
      return static_cast<float>(dy[place(k)]) * (static_cast<float>(x[place(k)]) - middle) * factor;
    });
    float weight = (scale ? scale[c] : 1.f) * factor;
    if (dx)
      team.each(count, [=](size_t k) {
        float away = (static_cast<float>(x[place(k)]) - middle) * factor, grad = static_cast<float>(dy[place(k)]);
        dx[place(k)] = static_cast<T>(weight * (at.known ? grad : grad - total / count - away * along / count));
      });
    if (!team.first()) return;
    if (dscale) dscale[c] = along;
    if (dbias) dbias[c] = total;
  });
}

void k_batch_norm(Stream s, Type type, BatchNorm at, const void* x, const float* scale, const float* bias, void* y, float* mean,
                  float* variance, float* saved_mean, float* saved_scale) {
  with_float(type, "batch_norm", [=](auto* t) { batch_norm(s, at, as(x, t), scale, bias, as(y, t), mean, variance, saved_mean, saved_scale); });
}
void k_batch_norm_grad(Stream s, Type type, BatchNorm at, const void* x, const float* scale, const float* mean, const float* variance,
                       const float* saved_mean, const float* saved_scale, const void* dy, void* dx, float* dscale, float* dbias) {
  with_float(type, "batch_norm_grad", [=](auto* t) {
    batch_norm_grad(s, at, as(x, t), scale, mean, variance, saved_mean, saved_scale, as(dy, t), as(dx, t), dscale, dbias);
  });
}

// ---- dropout

template <class T>
void dropout(Stream s, const T* x, T* y, uint8_t* mask, size_t n, uint64_t seed, float probability, float factor) {
  each(s, "dropout", n, [=] DEV(size_t k) {
    bool stays = static_cast<float>(draw(seed ^ draw(k)) >> 40) * 0x1p-24f >= probability;
    mask[k] = stays;
    y[k] = static_cast<T>(stays ? static_cast<float>(x[k]) * factor : 0.f);
  });
}

void k_dropout(Stream s, Type type, const void* x, void* y, uint8_t* mask, size_t n, uint64_t seed, float probability, float factor) {
  with_float(type, "dropout", [=](auto* t) { dropout(s, as(x, t), as(y, t), mask, n, seed, probability, factor); });
}
template <class T>
void dropout_grad(Stream s, const T* dy, const uint8_t* mask, T* dx, size_t n, float factor) {
  each(s, "dropout_grad", n, [=] DEV(size_t k) { dx[k] = static_cast<T>(mask[k] ? static_cast<float>(dy[k]) * factor : 0.f); });
}
void k_dropout_grad(Stream s, Type type, const void* dy, const uint8_t* mask, void* dx, size_t n, float factor) {
  with_float(type, "dropout_grad", [=](auto* t) { dropout_grad(s, as(dy, t), mask, as(dx, t), n, factor); });
}

// ---- comparison

template <class T>
void compare(Stream s, Order order, const T* x, const T* y, bool one_y, uint8_t* out, size_t n) {
  each(s, "compare", n, [=] DEV(size_t k) {
    auto a = x[k], b = y[one_y ? 0 : k];
    switch (order) {
      case Order::less: out[k] = a < b; break;
      case Order::less_equal: out[k] = a <= b; break;
      case Order::greater: out[k] = a > b; break;
      case Order::greater_equal: out[k] = a >= b; break;
      case Order::equal: out[k] = a == b; break;
      case Order::not_equal: out[k] = a != b; break;
    }
  });
}

void k_compare(Stream s, Order order, Type type, const void* x, const void* y, bool one_y, uint8_t* out, size_t n) {
  if (type == Type::i64) return compare(s, order, static_cast<const int64_t*>(x), static_cast<const int64_t*>(y), one_y, out, n);
  with_float(type, "comparison", [=](auto* t) { compare(s, order, as(x, t), as(y, t), one_y, out, n); });
}

// ---- gates of experts

template <class T>
void argmax(Stream s, const T* x, int64_t* out, size_t rows, size_t cols) {
  each(s, "argmax", rows, [=] DEV(size_t row) {
    size_t best = 0;
    for (size_t k = 1; k < cols; ++k)
      if (static_cast<float>(x[row * cols + k]) > static_cast<float>(x[row * cols + best])) best = k;
    out[row] = static_cast<int64_t>(best);
  });
}
void k_argmax(Stream s, Type type, const void* x, int64_t* out, size_t rows, size_t cols) {
  with_float(type, "argmax", [=](auto* t) { argmax(s, as(x, t), out, rows, cols); });
}

template <class T>
void cumsum(Stream s, const T* x, T* out, size_t outer, size_t size, size_t inner) {
  each(s, "cumsum", outer * inner, [=] DEV(size_t k) {
    size_t at = k / inner * size * inner + k % inner;
    float total = 0;
    for (size_t j = 0; j < size; ++j) out[at + j * inner] = static_cast<T>(total += static_cast<float>(x[at + j * inner]));
  });
}
void k_cumsum(Stream s, Type type, const void* x, void* out, size_t outer, size_t size, size_t inner) {
  with_float(type, "cumsum", [=](auto* t) { cumsum(s, as(x, t), as(out, t), outer, size, inner); });
}

void k_one_hot(Stream s, const int64_t* ids, float* out, size_t n, size_t classes) {
  each(s, "one_hot", n * classes, [=] DEV(size_t k) { out[k] = ids[k / classes] == static_cast<int64_t>(k % classes) ? 1.f : 0.f; });
}

// ---- optimizers

template <class T, class G>
void momentum(Stream s, T* parameter, float* master, const G* grad, float* velocity, const float* rate, float mu, float decay, float rescale,
              bool nesterov, size_t n) {
  each(s, "momentum", n, [=] DEV(size_t k) {
    float value = master ? master[k] : static_cast<float>(parameter[k]), g = static_cast<float>(grad[k]) * rescale + decay * value;
    float v = velocity[k] = mu * velocity[k] + g;
    value -= (nesterov ? g + mu * v : v) * *rate;
    if (master) master[k] = value;
    parameter[k] = static_cast<T>(value);
  });
}

void k_momentum(Stream s, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* velocity, const float* rate,
                float mu, float decay, float rescale, bool nesterov, size_t n) {
  with_float(type, "momentum", [=](auto* t) {
    with_float(grad_type, "momentum",
               [=](auto* u) { momentum(s, as(parameter, t), master, as(grad, u), velocity, rate, mu, decay, rescale, nesterov, n); });
  });
}

template <class T, class G>
void lamb(Stream s, Lamb how, T* parameter, float* master, const G* grad, float* moment1, float* moment2, const float* rate,
          const float* power1, const float* power2, float* step, size_t n) {
  rows(s, "lamb", 1, n, [=] DEV(const Team& team, size_t) {
    auto value = [=](size_t k) { return master ? master[k] : static_cast<float>(parameter[k]); };
    float left1 = 1.f - *power1, left2 = 1.f - *power2;
    team.each(n, [=](size_t k) {
      float g = static_cast<float>(grad[k]);
      float m = moment1[k] = how.beta1 * moment1[k] + (1.f - how.beta1) * g;
      float v = moment2[k] = how.beta2 * moment2[k] + (1.f - how.beta2) * g * g;
      step[k] = m / left1 / (sqrtf(v / left2) + how.epsilon) + how.decay * value(k);
    });
    float size = sqrtf(team.sum(n, [=](size_t k) { return value(k) * value(k); }));
    float length = sqrtf(team.sum(n, [=](size_t k) { return step[k] * step[k]; }));
    bool adapt = how.adapt || how.decay > 0.f;
    float trust = *rate * (adapt && size > 0.f && length > 0.f ? size / length : 1.f);
    team.each(n, [=](size_t k) {
      float now = value(k) - trust * step[k];
      if (master) master[k] = now;
      parameter[k] = static_cast<T>(now);
    });
  });
}

void k_lamb(Stream s, Lamb how, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* moment1, float* moment2,
            const float* rate, const float* power1, const float* power2, float* step, size_t n) {
  with_float(type, "lamb", [=](auto* t) {
    with_float(grad_type, "lamb", [=](auto* u) {
      lamb(s, how, as(parameter, t), master, as(grad, u), moment1, moment2, rate, power1, power2, step, n);
    });
  });
}

}  // namespace tb
