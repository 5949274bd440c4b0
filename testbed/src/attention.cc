// Attention by plain loops, for dry runs and tests: not fast.
#include <algorithm>
#include <vector>

#include "attention.h"

namespace tb {
namespace {

// Element (batch, row, head, 0) of a tensor [batch, rows, heads, size].
struct View {
  int64_t rows, heads, size;
  size_t at(int64_t b, int64_t row, int64_t h) const { return ((b * rows + row) * heads + h) * size; }
};

template <class T>
float dot(const T* a, const T* b, int64_t n) {
  float total = 0;
  for (int64_t k = 0; k < n; ++k) total += static_cast<float>(a[k]) * static_cast<float>(b[k]);
  return total;
}

struct Problem : Attention {
  View queries_view, keys_view;
  explicit Problem(const Attention& a) : Attention(a), queries_view{a.queries, a.heads, a.size}, keys_view{a.keys, a.kv_heads, a.size} {}
  int64_t kv_head(int64_t h) const { return h / (heads / kv_heads); }
  int64_t seen(int64_t row) const { return causal ? std::min(keys, row + 1) : keys; }
  template <class F>
  void each_row(F f) const {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t row = 0; row < queries; ++row) f(b, h, row);
  }
};

template <class T>
void forward(const Problem& p, const T* q, const T* k, const T* v, T* out, float* lse) {
  std::vector<float> weights(p.keys), sums(p.size);
  p.each_row([&](int64_t b, int64_t h, int64_t row) {
    int64_t n = p.seen(row), g = p.kv_head(h);
    float top = -INFINITY, total = 0;
    for (int64_t j = 0; j < n; ++j) {
      weights[j] = p.scale * dot(q + p.queries_view.at(b, row, h), k + p.keys_view.at(b, j, g), p.size);
      top = std::isnan(weights[j]) ? weights[j] : std::max(top, weights[j]);
    }
    for (int64_t j = 0; j < n; ++j) total += weights[j] = expf(weights[j] - top);
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < p.size; ++d) sums[d] += weights[j] / total * static_cast<float>(v[p.keys_view.at(b, j, g) + d]);
    for (int64_t d = 0; d < p.size; ++d) out[p.queries_view.at(b, row, h) + d] = T(sums[d]);
    lse[(b * p.heads + h) * p.queries + row] = top + logf(total);
  });
}

template <class T>
void backward(const Problem& p, const T* q, const T* k, const T* v, const T* out, const float* lse, const T* dout, T* dq, T* dk, T* dv) {
  size_t num_q = p.batch * p.queries * p.heads * p.size, num_k = p.batch * p.keys * p.kv_heads * p.size;
  std::vector<float> sum_q(num_q), sum_k(num_k), sum_v(num_k);
  p.each_row([&](int64_t b, int64_t h, int64_t row) {
    size_t at_q = p.queries_view.at(b, row, h);
    float mean = dot(out + at_q, dout + at_q, p.size);
    for (int64_t j = 0; j < p.seen(row); ++j) {
      size_t at_k = p.keys_view.at(b, j, p.kv_head(h));
      float weight = expf(p.scale * dot(q + at_q, k + at_k, p.size) - lse[(b * p.heads + h) * p.queries + row]);
      float slope = weight * (dot(dout + at_q, v + at_k, p.size) - mean) * p.scale;
      for (int64_t d = 0; d < p.size; ++d) {
        sum_q[at_q + d] += slope * static_cast<float>(k[at_k + d]);
        sum_k[at_k + d] += slope * static_cast<float>(q[at_q + d]);
        sum_v[at_k + d] += weight * static_cast<float>(dout[at_q + d]);
      }
    }
  });
  for (size_t i = 0; i < num_q; ++i) dq[i] = T(sum_q[i]);
  for (size_t i = 0; i < num_k; ++i) dk[i] = T(sum_k[i]), dv[i] = T(sum_v[i]);
}

}  // namespace

void k_attention(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, void* out, float* lse,
                 const Scratch&) {
  with_float(type, "attention", [=](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    enqueue(s, Work::compute, "attention", [=] {
      forward(Problem(shape), static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out), lse);
    });
  });
}

void k_attention_grad(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, const void* out,
                      const float* lse, const void* dout, void* dq, void* dk, void* dv, const Scratch&) {
  with_float(type, "attention", [=](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    enqueue(s, Work::compute, "attention_grad", [=] {
      backward(Problem(shape), static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<const T*>(out), lse,
               static_cast<const T*>(dout), static_cast<T*>(dq), static_cast<T*>(dk), static_cast<T*>(dv));
    });
  });
}

}  // namespace tb
