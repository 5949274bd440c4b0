// Matrix products on host threads: plain loops with a fixed order of sums.
#include "kernels.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace tb {
namespace {

template <class T>
void gemm(bool tx, bool ty, int64_t m, int64_t n, int64_t k, const T* x, const T* y, T* out) {
  std::vector<float> row(n);
  for (int64_t i = 0; i < m; ++i) {
    std::fill(row.begin(), row.end(), 0.f);
    for (int64_t l = 0; l < k; ++l) {
      float a = x[tx ? l * m + i : i * k + l];
      if (ty)
        for (int64_t j = 0; j < n; ++j) row[j] += a * static_cast<float>(y[j * k + l]);
      else
        for (int64_t j = 0; j < n; ++j) row[j] += a * static_cast<float>(y[l * n + j]);
    }
    for (int64_t j = 0; j < n; ++j) out[i * n + j] = row[j];
  }
}

template <class T>
void batched(Stream s, bool tx, bool ty, int64_t m, int64_t n, int64_t k, const T* x, const T* y, T* out, int64_t batch, int64_t step_x,
             int64_t step_y, int64_t step_out) {
  enqueue(s, Work::compute, "gemm", [=] {
    for (int64_t b = 0; b < batch; ++b) gemm(tx, ty, m, n, k, x + b * step_x, y + b * step_y, out + b * step_out);
  });
}

}  // namespace

void k_gemm(Stream s, Type type, bool tx, bool ty, int64_t m, int64_t n, int64_t k, const void* x, const void* y, void* out,
            int64_t batch, int64_t step_x, int64_t step_y, int64_t step_out) {
  with_float(type, "matmul", [=](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    batched(s, tx, ty, m, n, k, static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out), batch, step_x, step_y, step_out);
  });
}

}  // namespace tb
