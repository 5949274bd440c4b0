// Functions of whole rows (softmax, norms, loss) and sums of columns; on CUDA with rows in registers and accesses of 16 bytes.
#include <algorithm>
#include <map>
#include <mutex>

#include "fused.h"
#include "kernels.h"
#include "packs.h"

namespace tb {
namespace {

// ---- sums of columns: N sums at once; f(row, col, sums) adds the terms of one element, store(n, col, total) stores a sum

#ifdef TESTBED_CUDA

constexpr int kSplits = 64, kRowGroups = 8, kBlockPacks = 32, kBlockCols = kBlockPacks * kPack;

// Partial sums for the column sums of a stream; its next column sum only overwrites them after they have been read.
float* partials(Stream stream, size_t count) {
  static std::mutex mutex;
  static auto* all = new std::map<Stream, std::pair<void*, size_t>>;
  std::lock_guard<std::mutex> guard(mutex);
  auto& [address, size] = (*all)[stream];
  if (size < count * sizeof(float)) {  // the smaller buffer is not freed, as running work may use it
    size = std::max(2 * count * sizeof(float), size_t{1} << 22);
    address = device_allocate(size);
    if (!address) throw std::runtime_error("testbed: no device memory for sums of columns");
  }
  return static_cast<float*>(address);
}

template <int N, class F>
__global__ void __launch_bounds__(kBlockPacks * kRowGroups) part_columns_kernel(size_t num_rows, size_t cols, F f, float* part) {
  __shared__ float shared[N][kRowGroups][kBlockCols];
  float sums[N][kPack] = {};
  size_t col = blockIdx.x * size_t{kBlockCols} + threadIdx.x * kPack;
  if (col < cols)
#pragma unroll 4
    for (size_t row = blockIdx.y * kRowGroups + threadIdx.y; row < num_rows; row += gridDim.y * kRowGroups) f(row, col, sums);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < kPack; ++i) shared[n][threadIdx.y][threadIdx.x * kPack + i] = sums[n][i];
  __syncthreads();
  int mine = threadIdx.y * kBlockPacks + threadIdx.x;  // as many threads as columns
  size_t at = blockIdx.x * size_t{kBlockCols} + mine;
  if (at >= cols) return;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float total = 0;
#pragma unroll
    for (int g = 0; g < kRowGroups; ++g) total += shared[n][g][mine];
    part[(n * size_t{gridDim.y} + blockIdx.y) * cols + at] = total;
  }
}

template <int N, class G>
__global__ void join_columns_kernel(const float* part, int splits, size_t cols, G store) {
  __shared__ float shared[N][8][32];
  size_t col = blockIdx.x * size_t{32} + threadIdx.x;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float total = 0;
    if (col < cols)
      for (int s = threadIdx.y; s < splits; s += 8) total += part[(n * static_cast<size_t>(splits) + s) * cols + col];
    shared[n][threadIdx.y][threadIdx.x] = total;
  }
  __syncthreads();
  if (threadIdx.y || col >= cols) return;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float total = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) total += shared[n][g][threadIdx.x];
    store(n, col, total);
  }
}

static_assert(kBlockCols == kBlockPacks * kRowGroups, "a thread a column");

template <int N, class F, class G>
void column_sums(Stream stream, const char* name, size_t num_rows, size_t cols, F f, G store) {
  Piece piece(stream, Work::compute, name);
  auto s = static_cast<cudaStream_t>(stream);
  size_t wide = (cols + kBlockCols - 1) / kBlockCols;
  int splits = static_cast<int>(std::min<size_t>(kSplits, std::max<size_t>(1, num_rows / (2 * kRowGroups))));
  float* part = partials(stream, static_cast<size_t>(N) * splits * cols);
  part_columns_kernel<N><<<dim3(static_cast<unsigned>(wide), splits), dim3(kBlockPacks, kRowGroups), 0, s>>>(num_rows, cols, f, part);
  join_columns_kernel<N><<<static_cast<unsigned>((cols + 31) / 32), dim3(32, 8), 0, s>>>(part, splits, cols, store);
  check_launch(name);
}

template <class T>
__device__ Pack<T> pack_at(const T* x, size_t k) { return *reinterpret_cast<const Pack<T>*>(x + k); }

#endif

template <class T, class O>
void sum_columns(Stream s, Sum sum, const T* x, const T* y, O* out, size_t num_rows, size_t cols, float scale) {
#ifdef TESTBED_CUDA
  if (packable(cols, {x, y})) {
    auto store = [=] DEV(int, size_t c, float total) { out[c] = total * scale; };
    auto term = [=] DEV(size_t row, size_t c, float(&sums)[1][kPack]) {
      Pack<T> a = pack_at(x, row * cols + c), b = sum == Sum::product ? pack_at(y, row * cols + c) : a;
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        sums[0][i] += sum == Sum::plain ? static_cast<float>(a.v[i]) : static_cast<float>(a.v[i]) * static_cast<float>(b.v[i]);
    };
    column_sums<1>(s, "sum_columns", num_rows, cols, term, store);
    return;
  }
#endif
  columns(s, "sum_columns", num_rows, cols, [=] DEV(size_t r, size_t c) {
    float a = x[r * cols + c];
    return sum == Sum::plain ? a : a * (sum == Sum::squares ? a : static_cast<float>(y[r * cols + c]));
  }, [=] DEV(size_t c, float total) { out[c] = total * scale; });
}

// ---- softmax

#ifdef TESTBED_CUDA
template <int P, int G, class T>
void softmax_crews(Stream s, const T* x, T* out, size_t num_rows, size_t cols) {
  crews<G>(s, "softmax", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    Row<P, G, T> r(x + row * cols, packs, -INFINITY);
    float top = crew.max(r.fold(-INFINITY, [](float a, float b, int, int) { return fmaxf(a, b); }));
    float part = 1.f / crew.sum(r.fold(0.f, [=](float a, float b, int, int) { return a + exponential(b - top); }));
    r.store(out + row * cols, packs, live, [=](float a, int, int) { return exponential(a - top) * part; });
  });
}
#endif

template <class T>
void softmax(Stream s, const T* x, T* out, size_t num_rows, size_t cols) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {x, out}, [=](auto p, auto g) { softmax_crews<p.value, g.value>(s, x, out, num_rows, cols); })) return;
#endif
  rows(s, "softmax", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T* from = x + row * cols;
    T* to = out + row * cols;
    float top = team.max(cols, [=](size_t k) { return static_cast<float>(from[k]); });
    float total = team.sum(cols, [=](size_t k) { return expf(static_cast<float>(from[k]) - top); });
    team.each(cols, [=](size_t k) { to[k] = expf(static_cast<float>(from[k]) - top) / total; });
  });
}

#ifdef TESTBED_CUDA
template <int P, int G, class T>
void softmax_grad_crews(Stream s, const T* y, const T* dy, T* dx, size_t num_rows, size_t cols) {
  crews<G>(s, "softmax_grad", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    Row<P, G, T> a(y + row * cols, packs), b(dy + row * cols, packs);
    float total = crew.sum(a.fold(0.f, [&](float sum, float here, int q, int i) { return sum + here * b.at(q, i); }));
    b.store(dx + row * cols, packs, live, [&](float here, int q, int i) { return a.at(q, i) * (here - total); });
  });
}
#endif

template <class T>
void softmax_grad(Stream s, const T* y, const T* dy, T* dx, size_t num_rows, size_t cols) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {y, dy, dx}, [=](auto p, auto g) { softmax_grad_crews<p.value, g.value>(s, y, dy, dx, num_rows, cols); })) return;
#endif
  rows(s, "softmax_grad", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T *a = y + row * cols, *b = dy + row * cols;
    T* to = dx + row * cols;
    float total = team.sum(cols, [=](size_t k) { return static_cast<float>(a[k]) * static_cast<float>(b[k]); });
    team.each(cols, [=](size_t k) { to[k] = static_cast<float>(a[k]) * (static_cast<float>(b[k]) - total); });
  });
}

// ---- norms: layer_norm, and rms_norm, which takes no mean

#ifdef TESTBED_CUDA
template <int P, int G, class T, class W>
void layer_norm_crews(Stream s, const T* x, const W* w, const W* b, T* y, float* mean, float* variance, size_t num_rows, size_t cols,
                     float epsilon) {
  crews<G>(s, "layer_norm", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    using Mine = Row<P, G, T>;
    size_t packs = cols / kPack;
    Mine r(x + row * cols, packs);
    float m = crew.sum(r.fold(0.f, [](float a, float v, int, int) { return a + v; })) / cols;
    float v = crew.sum(r.fold(0.f, [=](float a, float here, int q, int) {
                return Mine::has(q, packs) ? a + (here - m) * (here - m) : a;
              })) / cols;
    float scale = 1.f / sqrtf(v + epsilon);
    if (live && crew.lane() == 0) mean[row] = m, variance[row] = v;
    r.store(y + row * cols, packs, live, [&](float here, int q, int i) {
      size_t k = (q * G + crew.lane()) * kPack + i;
      return (here - m) * scale * (w ? static_cast<float>(w[k]) : 1.f) + (b ? static_cast<float>(b[k]) : 0.f);
    });
  });
}
#endif

template <class T, class W>
void layer_norm(Stream s, const T* x, const W* w, const W* b, T* y, float* mean, float* variance, size_t num_rows, size_t cols, float epsilon) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {x, w, b, y}, [=](auto p, auto g) { layer_norm_crews<p.value, g.value>(s, x, w, b, y, mean, variance, num_rows, cols, epsilon); })) return;
#endif
  rows(s, "layer_norm", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T* from = x + row * cols;
    float m = team.sum(cols, [=](size_t k) { return static_cast<float>(from[k]); }) / cols;
    float v = team.sum(cols, [=](size_t k) { return (static_cast<float>(from[k]) - m) * (static_cast<float>(from[k]) - m); }) / cols;
    float r = 1.f / sqrtf(v + epsilon);
    if (team.first()) mean[row] = m, variance[row] = v;
    team.each(cols, [=](size_t k) {
      float z = (static_cast<float>(from[k]) - m) * r;
      y[row * cols + k] = z * (w ? static_cast<float>(w[k]) : 1.f) + (b ? static_cast<float>(b[k]) : 0.f);
    });
  });
}

#ifdef TESTBED_CUDA
template <int P, int G, class T, class W>
void layer_norm_grad_crews(Stream s, const T* x, const W* w, const float* mean, const float* variance, const T* dy, T* dx, size_t num_rows,
                          size_t cols, float epsilon) {
  crews<G>(s, "layer_norm_grad", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    float m = mean[row], r = 1.f / sqrtf(variance[row] + epsilon);
    Row<P, G, T> z(x + row * cols, packs, m), d(dy + row * cols, packs);
    auto weighted = [&](float here, int q, int i) {
      size_t k = (q * G + crew.lane()) * kPack + i;
      return w && k < cols ? here * static_cast<float>(w[k]) : here;
    };
    float a = crew.sum(d.fold(0.f, [&](float sum, float here, int q, int i) { return sum + weighted(here, q, i); })) / cols;
    float b = crew.sum(d.fold(0.f, [&](float sum, float here, int q, int i) {
                return sum + weighted(here, q, i) * (z.at(q, i) - m);
              })) * r / cols;
    d.store(dx + row * cols, packs, live, [&](float here, int q, int i) {
      return r * (weighted(here, q, i) - a - (z.at(q, i) - m) * r * b);
    });
  });
}
#endif

template <class T, class W>
void layer_norm_grad_dx(Stream s, const T* x, const W* w, const float* mean, const float* variance, const T* dy, T* dx, size_t num_rows,
                        size_t cols, float epsilon) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {x, w, dy, dx}, [=](auto p, auto g) { layer_norm_grad_crews<p.value, g.value>(s, x, w, mean, variance, dy, dx, num_rows, cols, epsilon); })) return;
#endif
  rows(s, "layer_norm_grad", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T *a = x + row * cols, *g = dy + row * cols;
    float m = mean[row], r = 1.f / sqrtf(variance[row] + epsilon);
    auto weighted = [=](size_t k) { return static_cast<float>(g[k]) * (w ? static_cast<float>(w[k]) : 1.f); };
    float p = team.sum(cols, weighted) / cols;
    float q = team.sum(cols, [=](size_t k) { return weighted(k) * (static_cast<float>(a[k]) - m) * r; }) / cols;
    team.each(cols, [=](size_t k) { dx[row * cols + k] = r * (weighted(k) - p - (static_cast<float>(a[k]) - m) * r * q); });
  });
}

template <class T, class W>
void layer_norm_grad(Stream s, const T* x, const W* w, const float* mean, const float* variance, const T* dy, T* dx, W* dw, W* db,
                     size_t num_rows, size_t cols, float epsilon) {
  if (dx) layer_norm_grad_dx(s, x, w, mean, variance, dy, dx, num_rows, cols, epsilon);
#ifdef TESTBED_CUDA
  if (dw && db && packable(cols, {x, dy})) {
    auto term = [=] DEV(size_t row, size_t c, float(&sums)[2][kPack]) {
      Pack<T> a = pack_at(x, row * cols + c), g = pack_at(dy, row * cols + c);
      float m = mean[row], r = rsqrtf(variance[row] + epsilon);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        float here = g.v[i];
        sums[0][i] += (static_cast<float>(a.v[i]) - m) * r * here;
        sums[1][i] += here;
      }
    };
    column_sums<2>(s, "layer_norm_grad_wb", num_rows, cols, term, [=] DEV(int n, size_t c, float total) { (n ? db : dw)[c] = total; });
    return;
  }
#endif
  if (dw)
    columns(s, "layer_norm_grad_w", num_rows, cols, [=] DEV(size_t row, size_t c) {
      float z = (static_cast<float>(x[row * cols + c]) - mean[row]) / sqrtf(variance[row] + epsilon);
      return z * static_cast<float>(dy[row * cols + c]);
    }, [=] DEV(size_t c, float total) { dw[c] = total; });
  if (db) sum_columns(s, Sum::plain, dy, dy, db, num_rows, cols, 1.f);
}

#ifdef TESTBED_CUDA
template <int P, int G, class T, class W>
void rms_norm_crews(Stream s, const T* x, const W* w, T* y, float* inverse, size_t num_rows, size_t cols, float epsilon) {
  crews<G>(s, "rms_norm", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    Row<P, G, T> r(x + row * cols, packs);
    float v = crew.sum(r.fold(0.f, [](float a, float here, int, int) { return a + here * here; })) / cols;
    float scale = 1.f / sqrtf(v + epsilon);
    if (live && crew.lane() == 0) inverse[row] = scale;
    r.store(y + row * cols, packs, live, [&](float here, int q, int i) {
      return here * scale * (w ? static_cast<float>(w[(q * G + crew.lane()) * kPack + i]) : 1.f);
    });
  });
}
#endif

template <class T, class W>
void rms_norm(Stream s, const T* x, const W* w, T* y, float* inverse, size_t num_rows, size_t cols, float epsilon) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {x, w, y}, [=](auto p, auto g) { rms_norm_crews<p.value, g.value>(s, x, w, y, inverse, num_rows, cols, epsilon); })) return;
#endif
  rows(s, "rms_norm", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T* from = x + row * cols;
    float v = team.sum(cols, [=](size_t k) { return static_cast<float>(from[k]) * static_cast<float>(from[k]); }) / cols;
    float r = 1.f / sqrtf(v + epsilon);
    if (team.first()) inverse[row] = r;
    team.each(cols, [=](size_t k) { y[row * cols + k] = static_cast<float>(from[k]) * r * (w ? static_cast<float>(w[k]) : 1.f); });
  });
}

#ifdef TESTBED_CUDA
template <int P, int G, class T, class W>
void rms_norm_grad_crews(Stream s, const T* x, const W* w, const float* inverse, const T* dy, T* dx, size_t num_rows, size_t cols) {
  crews<G>(s, "rms_norm_grad", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    float r = inverse[row];
    Row<P, G, T> a(x + row * cols, packs), d(dy + row * cols, packs);
    auto weighted = [&](float here, int q, int i) {
      size_t k = (q * G + crew.lane()) * kPack + i;
      return w && k < cols ? here * static_cast<float>(w[k]) : here;
    };
    float b = crew.sum(d.fold(0.f, [&](float sum, float here, int q, int i) {
                return sum + weighted(here, q, i) * a.at(q, i);
              })) * r * r / cols;
    d.store(dx + row * cols, packs, live, [&](float here, int q, int i) { return r * (weighted(here, q, i) - a.at(q, i) * b); });
  });
}
#endif

template <class T, class W>
void rms_norm_grad_dx(Stream s, const T* x, const W* w, const float* inverse, const T* dy, T* dx, size_t num_rows, size_t cols) {
#ifdef TESTBED_CUDA
  if (in_registers<T>(cols, {x, w, dy, dx}, [=](auto p, auto g) { rms_norm_grad_crews<p.value, g.value>(s, x, w, inverse, dy, dx, num_rows, cols); })) return;
#endif
  rows(s, "rms_norm_grad", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const T *a = x + row * cols, *g = dy + row * cols;
    float r = inverse[row];
    auto weighted = [=](size_t k) { return static_cast<float>(g[k]) * (w ? static_cast<float>(w[k]) : 1.f); };
    float b = team.sum(cols, [=](size_t k) { return weighted(k) * static_cast<float>(a[k]); }) * r * r / cols;
    team.each(cols, [=](size_t k) { dx[row * cols + k] = r * (weighted(k) - static_cast<float>(a[k]) * b); });
  });
}

template <class T, class W>
void rms_norm_grad(Stream s, const T* x, const W* w, const float* inverse, const T* dy, T* dx, W* dw, size_t num_rows, size_t cols) {
  if (dx) rms_norm_grad_dx(s, x, w, inverse, dy, dx, num_rows, cols);
  if (!dw) return;
#ifdef TESTBED_CUDA
  if (packable(cols, {x, dy})) {
    auto term = [=] DEV(size_t row, size_t c, float(&sums)[1][kPack]) {
      Pack<T> a = pack_at(x, row * cols + c), g = pack_at(dy, row * cols + c);
      float r = inverse[row];
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[0][i] += static_cast<float>(a.v[i]) * r * static_cast<float>(g.v[i]);
    };
    column_sums<1>(s, "rms_norm_grad_w", num_rows, cols, term, [=] DEV(int, size_t c, float total) { dw[c] = total; });
    return;
  }
#endif
  columns(s, "rms_norm_grad_w", num_rows, cols, [=] DEV(size_t row, size_t c) {
    return static_cast<float>(x[row * cols + c]) * inverse[row] * static_cast<float>(dy[row * cols + c]);
  }, [=] DEV(size_t c, float total) { dw[c] = total; });
}

// ---- swiglu: silu(x) y, of two tensors or of the two halves of each row of one

template <class T>
struct Gate {
  const T *x, *y;
  size_t cols, pitch;  // width of one operand's row, and distance of rows
  HD size_t at(size_t k) const { return pitch == cols ? k : k / cols * pitch + k % cols; }
};

template <class T>
Gate<T> gate_of(const T* x, const T* y, size_t cols) {
  if (y) return {x, y, cols, cols};
  return {x, x + cols, cols, 2 * cols};
}

HD inline void swiglu_back(float x, float y, float g, float* dx, float* dy) {
  float share = sigmoid(x);
  *dx = g * y * share * (1.f + x * (1.f - share));
  *dy = g * x * share;
}

template <class T>
void swiglu(Stream s, const T* x, const T* y, T* out, size_t num_rows, size_t cols) {
  Gate<T> in = gate_of(x, y, cols);
  size_t n = num_rows * cols;
  if (packable(cols, {x, y, out})) {
    auto* to = reinterpret_cast<Pack<T>*>(out);
    each(s, "swiglu", n / kPack, [=] DEV(size_t k) {
      size_t at = in.at(k * kPack);
      Pack<T> a = *reinterpret_cast<const Pack<T>*>(in.x + at), b = *reinterpret_cast<const Pack<T>*>(in.y + at);
      for (int i = 0; i < kPack; ++i) a.v[i] = static_cast<float>(a.v[i]) * sigmoid(a.v[i]) * static_cast<float>(b.v[i]);
      to[k] = a;
    });
    return;
  }
  each(s, "swiglu", n, [=] DEV(size_t k) {
    size_t at = in.at(k);
    float a = in.x[at];
    out[k] = a * sigmoid(a) * static_cast<float>(in.y[at]);
  });
}

template <class T>
void swiglu_grad(Stream s, const T* x, const T* y, const T* grad, T* dx, T* dy, size_t num_rows, size_t cols) {
  Gate<T> in = gate_of(x, y, cols);
  if (!y && dx) dy = dx + cols;
  size_t n = num_rows * cols;
  if (packable(cols, {x, y, grad, dx, dy})) {
    auto* from = reinterpret_cast<const Pack<T>*>(grad);
    each(s, "swiglu_grad", n / kPack, [=] DEV(size_t k) {
      size_t at = in.at(k * kPack);
      Pack<T> a = *reinterpret_cast<const Pack<T>*>(in.x + at), b = *reinterpret_cast<const Pack<T>*>(in.y + at), g = from[k];
      for (int i = 0; i < kPack; ++i) {
        float u, v;
        swiglu_back(a.v[i], b.v[i], g.v[i], &u, &v);
        a.v[i] = u, b.v[i] = v;
      }
      if (dx) *reinterpret_cast<Pack<T>*>(dx + at) = a;
      if (dy) *reinterpret_cast<Pack<T>*>(dy + at) = b;
    });
    return;
  }
  each(s, "swiglu_grad", n, [=] DEV(size_t k) {
    size_t at = in.at(k);
    float u, v;
    swiglu_back(in.x[at], in.y[at], grad[k], &u, &v);
    if (dx) dx[at] = u;
    if (dy) dy[at] = v;
  });
}

// ---- rotary embedding: rotates pairs of a row's elements by the angle of the row's position, or back

// The order of rows is [batch, seq, heads] or [seq, batch, heads].
struct Position {
  uint32_t heads, inner;
  bool seq_first;
  explicit Position(const Rotary& r)
      : heads(static_cast<uint32_t>(r.heads)), inner(static_cast<uint32_t>(r.seq_first ? r.batch : r.seq)), seq_first(r.seq_first) {}
  HD uint32_t of(uint32_t row) const { return seq_first ? row / heads / inner : row / heads % inner; }
};

template <class T>
void rotary(Stream s, const T* x, const T* sines, const T* cosines, T* out, Rotary shape, bool back) {
  uint32_t size = static_cast<uint32_t>(shape.size), half = size / 2;
  Position position(shape);
  float sign = back ? -1.f : 1.f;
  size_t num_rows = shape.batch * shape.seq * shape.heads;
  if (!shape.adjacent && half % kPack == 0 && packable(kPack, {x, sines, cosines, out})) {
    uint32_t packs = half / kPack;
    each(s, "rotary", num_rows * packs, [=] DEV(size_t k) {
      uint32_t row = static_cast<uint32_t>(k) / packs, part = static_cast<uint32_t>(k) % packs, at = position.of(row);
      auto* from = reinterpret_cast<const Pack<T>*>(x + size_t{row} * size) + part;
      auto* to = reinterpret_cast<Pack<T>*>(out + size_t{row} * size) + part;
      auto* c = reinterpret_cast<const Pack<T>*>(cosines + size_t{at} * size) + part;
      auto* d = reinterpret_cast<const Pack<T>*>(sines + size_t{at} * size) + part;
      Pack<T> low = from[0], high = from[packs], c0 = c[0], c1 = c[packs], s0 = d[0], s1 = d[packs];
      for (int i = 0; i < kPack; ++i) {  // forward: low with s0, high with s1; backward: the transpose
        float a = low.v[i], b = high.v[i];
        low.v[i] = a * static_cast<float>(c0.v[i]) - sign * b * static_cast<float>(back ? s1.v[i] : s0.v[i]);
        high.v[i] = b * static_cast<float>(c1.v[i]) + sign * a * static_cast<float>(back ? s0.v[i] : s1.v[i]);
      }
      to[0] = low, to[packs] = high;
    });
    return;
  }
  bool adjacent = shape.adjacent;
  each(s, "rotary", num_rows * half, [=] DEV(size_t k) {
    uint32_t row = static_cast<uint32_t>(k / half), part = static_cast<uint32_t>(k % half), at = position.of(row);
    uint32_t i = adjacent ? 2 * part : part, j = adjacent ? i + 1 : i + half;
    const T *from = x + size_t{row} * size, *c = cosines + size_t{at} * size, *d = sines + size_t{at} * size;
    float a = from[i], b = from[j];
    out[size_t{row} * size + i] = a * static_cast<float>(c[i]) - sign * b * static_cast<float>(d[back ? j : i]);
    out[size_t{row} * size + j] = b * static_cast<float>(c[j]) + sign * a * static_cast<float>(d[back ? i : j]);
  });
}

#ifdef TESTBED_CUDA
template <int P, int G>
void cross_entropy_crews(Stream s, const float* x, const int64_t* labels, float* out, float* loss, size_t num_rows, size_t cols,
                        int64_t ignored) {
  crews<G>(s, "cross_entropy", num_rows, [=] __device__(Crew<G>& crew, size_t row, bool live) {
    size_t packs = cols / kPack;
    int64_t label = labels[row];
    bool known = label >= 0 && label < static_cast<int64_t>(cols);
    float here = known ? x[row * cols + label] : NAN;
    Row<P, G, float> r(x + row * cols, packs, -INFINITY);
    float top = crew.max(r.fold(-INFINITY, [](float a, float b, int, int) { return fmaxf(a, b); }));
    float total = crew.sum(r.fold(0.f, [=](float a, float b, int, int) { return a + exponential(b - top); }));
    if (live && crew.lane() == 0) loss[row] = label == ignored ? 0.f : logf(total) + top - here;
    r.store(out + row * cols, packs, live, [=](float a, int, int) { return exponential(a - top) / total; });
  });
}
#endif

}  // namespace

void k_sum_columns(Stream s, Sum sum, Type type, const void* x, const void* y, void* out, size_t num_rows, size_t cols, float scale) {
  with_float(type, "sum", [=](auto* t) { sum_columns(s, sum, as(x, t), as(y, t), as(out, t), num_rows, cols, scale); });
}

void k_softmax(Stream s, Type type, const void* x, void* out, size_t num_rows, size_t cols) {
  with_float(type, "softmax", [=](auto* t) { softmax(s, as(x, t), as(out, t), num_rows, cols); });
}

void k_softmax_grad(Stream s, Type type, const void* y, const void* dy, void* dx, size_t num_rows, size_t cols) {
  with_float(type, "softmax", [=](auto* t) { softmax_grad(s, as(y, t), as(dy, t), as(dx, t), num_rows, cols); });
}

void k_layer_norm(Stream s, Type type, const void* x, Type weight_type, const void* w, const void* b, void* y, float* mean, float* variance,
                  size_t num_rows, size_t cols, float epsilon) {
  with_float(type, "layer_norm", [=](auto* t) {
    with_float(weight_type, "layer_norm",
               [=](auto* u) { layer_norm(s, as(x, t), as(w, u), as(b, u), as(y, t), mean, variance, num_rows, cols, epsilon); });
  });
}

void k_layer_norm_grad(Stream s, Type type, const void* x, Type weight_type, const void* w, const float* mean, const float* variance,
                       const void* dy, void* dx, void* dw, void* db, size_t num_rows, size_t cols, float epsilon) {
  with_float(type, "layer_norm", [=](auto* t) {
    with_float(weight_type, "layer_norm", [=](auto* u) {
      layer_norm_grad(s, as(x, t), as(w, u), mean, variance, as(dy, t), as(dx, t), as(dw, u), as(db, u), num_rows, cols, epsilon);
    });
  });
}

void k_rms_norm(Stream s, Type type, const void* x, Type weight_type, const void* w, void* y, float* inverse, size_t num_rows, size_t cols,
                float epsilon) {
  with_float(type, "rms_norm", [=](auto* t) {
    with_float(weight_type, "rms_norm", [=](auto* u) { rms_norm(s, as(x, t), as(w, u), as(y, t), inverse, num_rows, cols, epsilon); });
  });
}

void k_rms_norm_grad(Stream s, Type type, const void* x, Type weight_type, const void* w, const float* inverse, const void* dy, void* dx,
                     void* dw, size_t num_rows, size_t cols) {
  with_float(type, "rms_norm", [=](auto* t) {
    with_float(weight_type, "rms_norm",
               [=](auto* u) { rms_norm_grad(s, as(x, t), as(w, u), inverse, as(dy, t), as(dx, t), as(dw, u), num_rows, cols); });
  });
}

void k_swiglu(Stream s, Type type, const void* x, const void* y, void* out, size_t num_rows, size_t cols) {
  with_float(type, "swiglu", [=](auto* t) { swiglu(s, as(x, t), as(y, t), as(out, t), num_rows, cols); });
}

void k_swiglu_grad(Stream s, Type type, const void* x, const void* y, const void* grad, void* dx, void* dy, size_t num_rows, size_t cols) {
  with_float(type, "swiglu", [=](auto* t) { swiglu_grad(s, as(x, t), as(y, t), as(grad, t), as(dx, t), as(dy, t), num_rows, cols); });
}

void k_rotary(Stream s, Type type, const void* x, const void* sines, const void* cosines, void* out, Rotary shape, bool back) {
  with_float(type, "rotary", [=](auto* t) { rotary(s, as(x, t), as(sines, t), as(cosines, t), as(out, t), shape, back); });
}

// The softmax may overwrite x, so the loss reads x first.
void k_cross_entropy(Stream s, const float* x, const int64_t* labels, float* out, float* loss, size_t num_rows, size_t cols, int64_t ignored) {
#ifdef TESTBED_CUDA
  if (in_registers<float>(cols, {x, out}, [=](auto p, auto g) { cross_entropy_crews<p.value, g.value>(s, x, labels, out, loss, num_rows, cols, ignored); })) return;
#endif
  rows(s, "cross_entropy", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    const float* from = x + row * cols;
    int64_t label = labels[row];
    bool known = label >= 0 && label < static_cast<int64_t>(cols);
    float here = known ? from[label] : NAN;
    float top = team.max(cols, [=](size_t k) { return from[k]; });
    float total = logf(team.sum(cols, [=](size_t k) { return expf(from[k] - top); }));
    if (team.first()) loss[row] = label == ignored ? 0.f : total + top - here;
    team.each(cols, [=](size_t k) { out[row * cols + k] = expf(from[k] - top - total); });
  });
}

namespace {
struct Slope {
  int64_t ignored;
  HD float of(float share, int64_t label, float slope, size_t k) const {
    return label == ignored ? 0.f : slope * (share - (static_cast<int64_t>(k) == label ? 1.f : 0.f));
  }
};
}  // namespace

void k_cross_entropy_grad(Stream s, const float* softmax, const int64_t* labels, const float* dloss, float* dx, size_t num_rows, size_t cols,
                          int64_t ignored) {
  Slope one{ignored};
  if (packable(cols, {softmax, dx}) && num_rows * cols < (size_t{1} << 32)) {
    auto* from = reinterpret_cast<const Pack<float>*>(softmax);
    auto* to = reinterpret_cast<Pack<float>*>(dx);
    uint32_t packs = static_cast<uint32_t>(cols / kPack);
    each(s, "cross_entropy_grad", num_rows * packs, [=] DEV(size_t k) {
      uint32_t row = static_cast<uint32_t>(k) / packs, part = static_cast<uint32_t>(k) % packs;
      Pack<float> a = from[k];
      for (int i = 0; i < kPack; ++i) a.v[i] = one.of(a.v[i], labels[row], dloss[row], part * kPack + i);
      to[k] = a;
    });
    return;
  }
  rows(s, "cross_entropy_grad", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    team.each(cols, [=](size_t k) { dx[row * cols + k] = one.of(softmax[row * cols + k], labels[row], dloss[row], k); });
  });
}

}  // namespace tb
