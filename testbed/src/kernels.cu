#include "kernels.h"
#include "packs.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

namespace tb {

size_t size_of(Type type) {
  static const size_t sizes[] = {4, 2, 8, 8, 4, 1};
  return sizes[static_cast<int>(type)];
}

namespace {

template <class T>
void fill(Stream s, T* out, size_t n, T value) {
  each(s, "full", n, [=] DEV(size_t k) { out[k] = value; });
}

template <class T>
void arange(Stream s, T* out, size_t n, double start, double step) {
  each(s, "arange", n, [=] DEV(size_t k) { out[k] = static_cast<T>(static_cast<float>(start + step * static_cast<double>(k))); });
}

template <>
void arange<int64_t>(Stream s, int64_t* out, size_t n, double start, double step) {
  int64_t first = static_cast<int64_t>(start), by = static_cast<int64_t>(step);
  each(s, "arange", n, [=] DEV(size_t k) { out[k] = first + by * static_cast<int64_t>(k); });
}

template <class A, class B>
struct Convert {
  static HD B of(A value) { return static_cast<B>(value); }
};
template <class B>
struct Convert<bf16, B> {
  static HD B of(bf16 value) { return static_cast<B>(static_cast<float>(value)); }
};
template <class A>
struct Convert<A, bf16> {
  static HD bf16 of(A value) { return bf16(static_cast<float>(value)); }
};
template <>
struct Convert<bf16, bf16> {
  static HD bf16 of(bf16 value) { return value; }
};

template <class A, class B>
void cast(Stream s, const A* x, B* out, size_t n) {
  if (packable(n, {x, out})) {
    auto* from = reinterpret_cast<const Pack<A>*>(x);
    auto* to = reinterpret_cast<Pack<B>*>(out);
    each(s, "cast", n / kPack, [=] DEV(size_t k) {
      Pack<A> a = from[k];
      Pack<B> b;
      for (int i = 0; i < kPack; ++i) b.v[i] = Convert<A, B>::of(a.v[i]);
      to[k] = b;
    });
  } else {
    each(s, "cast", n, [=] DEV(size_t k) { out[k] = Convert<A, B>::of(x[k]); });
  }
}

template <class A>
void cast_from(Stream s, const A* x, Type to, void* out, size_t n) {
  switch (to) {
    case Type::f32: return cast(s, x, static_cast<float*>(out), n);
    case Type::bf16: return cast(s, x, static_cast<bf16*>(out), n);
    case Type::f64: return cast(s, x, static_cast<double*>(out), n);
    case Type::i64: return cast(s, x, static_cast<int64_t*>(out), n);
    case Type::i32: return cast(s, x, static_cast<int32_t*>(out), n);
    case Type::u8: return cast(s, x, static_cast<uint8_t*>(out), n);
  }
}

HD float silu_slope(float x) { return sigmoid(x) * (1.f + x * (1.f - sigmoid(x))); }
HD float gelu_slope(float x) { return .5f * (1.f + erff(x * .70710678f)) + x * .39894228f * expf(-.5f * x * x); }
HD float gelu_inner(float x) { return .79788456f * (x + .044715f * x * x * x); }
HD float tangent(float x) {  // tanh by one exponential, several times as fast on CUDA; near 0 it is the library's, for precision
#ifdef __CUDA_ARCH__
  if (fabsf(x) > .25f) return 1.f - quotient(2.f, 1.f + exponential(2.f * x));
#endif
  return tanhf(x);
}
HD float gelu_by_tanh(float x) { return .5f * x * (1.f + tangent(gelu_inner(x))); }
HD float gelu_tanh_slope(float x) {
  float t = tangent(gelu_inner(x));
  return .5f * (1.f + t) + .5f * x * (1.f - t * t) * .79788456f * (1.f + .134145f * x * x);
}

#define X(name, value)                                                                     \
  struct Map_##name {                                                                      \
    static constexpr const char* label = #name;                                            \
    static HD float of(float x, float y, float a, float b) { return (void)a, (void)b, (void)y, value; } \
  };
TB_MAPS(X)
#undef X

template <class M, class T>
void map(Stream s, const T* x, const T* y, T* out, size_t n, float a, float b) {
  if (packable(n, {x, y, out})) {
    auto *px = reinterpret_cast<const Pack<T>*>(x), *py = reinterpret_cast<const Pack<T>*>(y);
    auto* to = reinterpret_cast<Pack<T>*>(out);
    each(s, M::label, n / kPack, [=] DEV(size_t k) {
      Pack<T> u = px[k], v = py ? py[k] : u;
      for (int i = 0; i < kPack; ++i) u.v[i] = M::of(u.v[i], v.v[i], a, b);
      to[k] = u;
    });
  } else {
    each(s, M::label, n, [=] DEV(size_t k) { out[k] = M::of(x[k], y ? static_cast<float>(y[k]) : 0.f, a, b); });
  }
}

struct At {
  uint32_t x, y;
};
HD At locate(const Layout& at, uint32_t index) {
  At found{0, 0};
  for (int d = at.num_dims - 1; d >= 0; --d) {
    uint32_t here = index % at.dims[d];
    index /= at.dims[d];
    found.x += here * at.x[d];
    found.y += here * at.y[d];
  }
  return found;
}

// The same layout with fewer dimensions: without those of one element, and with contiguous ones merged.
Layout merged(const Layout& at) {
  Layout made;
  for (int d = 0; d < at.num_dims; ++d) {
    if (at.dims[d] == 1) continue;
    int last = made.num_dims - 1;
    if (last >= 0 && made.x[last] == at.dims[d] * at.x[d] && made.y[last] == at.dims[d] * at.y[d]) {
      made.dims[last] *= at.dims[d], made.x[last] = at.x[d], made.y[last] = at.y[d];
      continue;
    }
    made.dims[made.num_dims] = at.dims[d], made.x[made.num_dims] = at.x[d], made.y[made.num_dims] = at.y[d];
    ++made.num_dims;
  }
  if (!made.num_dims) made.num_dims = 1, made.dims[0] = 1;
  return made;
}

// `locate` for x alone, with the number of dimensions known at compile time, so that the compiler can unroll it.
template <int N>
struct Located {
  uint32_t dims[N], x[N];
  explicit Located(const Layout& at) {
    for (int d = 0; d < N; ++d) dims[d] = at.dims[d], x[d] = at.x[d];
  }
  HD uint32_t of(uint32_t index) const {
    uint32_t found = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int d = N - 1; d > 0; --d) {
      uint32_t rest = index / dims[d];
      found += (index - rest * dims[d]) * x[d];
      index = rest;
    }
    return found + index * x[0];
  }
};
template <class Go>
void with_located(const Layout& at, Go go) {
  if (at.num_dims == 1) go(Located<1>(at));
  else if (at.num_dims == 2) go(Located<2>(at));
  else if (at.num_dims == 3) go(Located<3>(at));
  else if (at.num_dims == 4) go(Located<4>(at));
  else go(Located<kMaxDims>([&] {
    Layout padded;
    int more = kMaxDims - at.num_dims;
    for (int d = 0; d < kMaxDims; ++d) padded.dims[d] = d < more ? 1 : at.dims[d - more], padded.x[d] = d < more ? 0 : at.x[d - more];
    return padded;
  }()));
}

// How many consecutive elements share one element of an operand that is dense otherwise; 0 for any other layout.
size_t run_of(const Layout& at, const uint32_t* strides) {
  size_t run = 1, inner = 1;
  int d = at.num_dims - 1;
  for (; d >= 0 && (strides[d] == 0 || at.dims[d] == 1); --d) run *= at.dims[d];
  for (; d >= 0; --d) {
    if (at.dims[d] != 1 && strides[d] != inner) return 0;
    inner *= at.dims[d];
  }
  return run;
}

// The period of an operand that is repeated along the leading dimensions; 0 for any other layout.
size_t period_of(const Layout& at, const uint32_t* strides) {
  size_t inner = 1;
  int d = at.num_dims - 1;
  for (; d >= 0 && (strides[d] == inner || at.dims[d] == 1); --d) inner *= at.dims[d];
  for (; d >= 0; --d)
    if (strides[d] != 0 && at.dims[d] != 1) return 0;
  return inner;
}

// Both operands are dense and repeat as a whole: packs of eight elements, two divisions for each.
template <class M, class T>
void map_periodic(Stream s, const T* x, const T* y, T* out, size_t n, size_t x_period, size_t y_period) {
  auto *px = reinterpret_cast<const Pack<T>*>(x), *py = reinterpret_cast<const Pack<T>*>(y);
  auto* to = reinterpret_cast<Pack<T>*>(out);
  uint32_t nx = static_cast<uint32_t>(x_period / kPack), ny = static_cast<uint32_t>(y_period / kPack);
  each(s, M::label, n / kPack, [=] DEV(size_t k) {
    Pack<T> u = px[static_cast<uint32_t>(k) % nx], v = py[static_cast<uint32_t>(k) % ny];
    for (int i = 0; i < kPack; ++i) u.v[i] = M::of(u.v[i], v.v[i], 0, 0);
    to[k] = u;
  });
}

// One operand is dense, the other has one element for each run.
template <class M, class T>
void map_runs(Stream s, const T* x, const T* y, T* out, size_t n, uint32_t x_run, uint32_t y_run) {
  auto *px = reinterpret_cast<const Pack<T>*>(x), *py = reinterpret_cast<const Pack<T>*>(y);
  auto* to = reinterpret_cast<Pack<T>*>(out);
  uint32_t nx = x_run / kPack, ny = y_run / kPack;
  each(s, M::label, n / kPack, [=] DEV(size_t k) {
    uint32_t at = static_cast<uint32_t>(k);
    Pack<T> u, v;
    if (nx) {
      T one = x[at / nx];
      for (int i = 0; i < kPack; ++i) u.v[i] = one;
    } else {
      u = px[at];
    }
    if (ny) {
      T one = y[at / ny];
      for (int i = 0; i < kPack; ++i) v.v[i] = one;
    } else {
      v = py[at];
    }
    for (int i = 0; i < kPack; ++i) u.v[i] = M::of(u.v[i], v.v[i], 0, 0);
    to[k] = u;
  });
}

template <class M, class T>
void map_broadcast(Stream s, const T* x, const T* y, T* out, size_t n, Layout at) {
  size_t rx = run_of(at, at.x), ry = run_of(at, at.y);
  bool one_dense = (rx == 1 && ry && ry % kPack == 0) || (ry == 1 && rx && rx % kPack == 0);
  if (one_dense && packable(n, {out}) && packable(kPack, {rx == 1 ? x : y})) {
    map_runs<M>(s, x, y, out, n, rx == 1 ? 0 : static_cast<uint32_t>(rx), ry == 1 ? 0 : static_cast<uint32_t>(ry));
    return;
  }
  size_t nx = period_of(at, at.x), ny = period_of(at, at.y);
  if (nx && ny && nx % kPack == 0 && ny % kPack == 0 && packable(n, {x, y, out})) {
    map_periodic<M>(s, x, y, out, n, nx, ny);
    return;
  }
  each(s, M::label, n, [=] DEV(size_t k) {
    At from = locate(at, static_cast<uint32_t>(k));
    out[k] = M::of(x[from.x], y[from.y], 0, 0);
  });
}

template <class T>
void map_any(Stream s, Map which, const T* x, const T* y, T* out, size_t n, float a, float b) {
  switch (which) {
#define X(name, value) \
  case Map::name: return map<Map_##name>(s, x, y, out, n, a, b);
    TB_MAPS(X)
#undef X
  }
}

template <class T>
void map_broadcast_any(Stream s, Map which, const T* x, const T* y, T* out, size_t n, Layout at) {
  switch (which) {
    case Map::add: return map_broadcast<Map_add>(s, x, y, out, n, at);
    case Map::subtract: return map_broadcast<Map_subtract>(s, x, y, out, n, at);
    case Map::multiply: return map_broadcast<Map_multiply>(s, x, y, out, n, at);
    case Map::divide: return map_broadcast<Map_divide>(s, x, y, out, n, at);
    case Map::maximum: return map_broadcast<Map_maximum>(s, x, y, out, n, at);
    case Map::minimum: return map_broadcast<Map_minimum>(s, x, y, out, n, at);
    case Map::power: return map_broadcast<Map_power>(s, x, y, out, n, at);
    case Map::floor_divide: return map_broadcast<Map_floor_divide>(s, x, y, out, n, at);
    default: throw std::runtime_error("testbed: this function does not broadcast");
  }
}

template <class T, class From>
void spread_packs(Stream s, const T* x, Pack<T>* out, size_t n, From from, float scale) {
  each(s, "spread", n, [=] DEV(size_t k) {
    T one = T(scale * static_cast<float>(x[from.of(static_cast<uint32_t>(k))]));
    Pack<T> all;
    for (int i = 0; i < kPack; ++i) all.v[i] = one;
    out[k] = all;
  });
}

template <class T, class From>
void spread_each(Stream s, const T* x, T* out, size_t n, From from, float scale) {
  each(s, "spread", n, [=] DEV(size_t k) { out[k] = scale * static_cast<float>(x[from.of(static_cast<uint32_t>(k))]); });
}

template <class T>
void spread(Stream s, const T* x, T* out, size_t n, Layout at, float scale) {
  at = merged(at);
  int last = at.num_dims - 1;
  if (at.x[last] == 0 && at.dims[last] % kPack == 0 && packable(n, {out})) {
    at.dims[last] /= kPack;
    auto* to = reinterpret_cast<Pack<T>*>(out);
    with_located(at, [=](auto from) { spread_packs(s, x, to, n / kPack, from, scale); });
    return;
  }
  with_located(at, [=](auto from) { spread_each(s, x, out, n, from, scale); });
}

template <class T>
void triangle(Stream s, const T* x, T* out, size_t n, size_t rows, size_t cols, int diagonal, bool upper) {
  each(s, upper ? "triu" : "tril", n, [=] DEV(size_t k) {
    int64_t row = static_cast<int64_t>(k / cols % rows), col = static_cast<int64_t>(k % cols);
    bool kept = upper ? col - row >= diagonal : col - row <= diagonal;
    out[k] = kept ? x[k] : T(0.f);
  });
}

template <class T>
struct Term {
  Sum sum;
  const T *x, *y;
  HD float of(size_t i, size_t j) const {
    float a = x[i];
    return sum == Sum::plain ? a : sum == Sum::squares ? a * a : a * static_cast<float>(y[j]);
  }
};

template <class T, class O>
void sum_rows(Stream s, Term<T> term, O* out, size_t num_rows, size_t cols, float scale) {
  rows(s, "sum_rows", num_rows, cols, [=] DEV(const Team& team, size_t row) {
    float total = team.sum(cols, [=](size_t k) { return term.of(row * cols + k, row * cols + k); });
    if (team.first()) out[row] = total * scale;
  });
}

template <class T>
void sum_any(Stream s, Term<T> term, T* out, size_t n, Layout kept, size_t m, Layout reduced, float scale) {
  rows(s, "sum", n, m, [=] DEV(const Team& team, size_t k) {
    At base = locate(kept, static_cast<uint32_t>(k));
    float total = team.sum(m, [=](size_t j) {
      At more = locate(reduced, static_cast<uint32_t>(j));
      return term.of(base.x + more.x, base.y + more.y);
    });
    if (team.first()) out[k] = total * scale;
  });
}

template <class T, class From>
void permute_from(Stream s, const T* x, T* out, size_t n, From from) {
  each(s, "transpose", n, [=] DEV(size_t k) { out[k] = x[from.of(static_cast<uint32_t>(k))]; });
}

template <class T>
void permute(Stream s, const T* x, T* out, size_t n, Layout at) {
  with_located(merged(at), [=](auto from) { permute_from(s, x, out, n, from); });
}

template <class T>
void copy_2d(Stream s, const T* x, size_t x_pitch, T* out, size_t out_pitch, size_t width, size_t num_rows) {
  each(s, "copy_2d", width * num_rows, [=] DEV(size_t k) { out[k / width * out_pitch + k % width] = x[k / width * x_pitch + k % width]; });
}

#ifdef TESTBED_CUDA
constexpr int kHolders = 256;
// One block per row of the table: it scans the ids, 256 at once, and sums the gradients of its row in their order.
constexpr int kColumnsHeld = 16;
template <class T>
__global__ void embedding_grad_kernel(const int64_t* ids, const T* dy, T* dw, size_t n, size_t vocab, size_t width) {
  __shared__ int hits[kHolders];
  __shared__ unsigned warps[kHolders / 32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (size_t row = blockIdx.x; row < vocab; row += gridDim.x)
    for (size_t from = 0; from < width; from += kHolders * kColumnsHeld) {
      float sums[kColumnsHeld] = {};
      for (size_t start = 0; start < n; start += kHolders) {
        size_t k = start + threadIdx.x;
        bool hit = k < n && ids[k] == static_cast<int64_t>(row);
        if (!__syncthreads_or(hit)) continue;
        unsigned mask = __ballot_sync(0xffffffffu, hit);
        if (lane == 0) warps[warp] = __popc(mask);
        __syncthreads();
        int before = 0, all = 0;
        for (unsigned w = 0; w < kHolders / 32; ++w) {
          if (static_cast<int>(w) < warp) before += warps[w];
          all += warps[w];
        }
        if (hit) hits[before + __popc(mask & ((1u << lane) - 1))] = static_cast<int>(k);
        __syncthreads();
        for (int each = 0; each < all; ++each) {
          const T* source = dy + hits[each] * width;
#pragma unroll
          for (int c = 0; c < kColumnsHeld; ++c) {
            size_t col = from + c * kHolders + threadIdx.x;
            if (col < width) sums[c] += static_cast<float>(source[col]);
          }
        }
        __syncthreads();
      }
#pragma unroll
      for (int c = 0; c < kColumnsHeld; ++c) {
        size_t col = from + c * kHolders + threadIdx.x;
        if (col < width) dw[row * width + col] = T(sums[c]);
      }
    }
}
#endif

// An id outside the table gives NaN, so that poisoned ids show in the loss and break nothing else.
template <class T>
void embedding(Stream s, const int64_t* ids, const T* w, T* out, size_t n, size_t vocab, size_t width) {
  each(s, "embedding", n * width, [=] DEV(size_t k) {
    int64_t id = ids[k / width];
    out[k] = id >= 0 && id < static_cast<int64_t>(vocab) ? w[id * width + k % width] : T(NAN);
  });
}

template <class T>
void embedding_grad(Stream s, const int64_t* ids, const T* dy, T* dw, size_t n, size_t vocab, size_t width) {
#ifdef TESTBED_CUDA
  Piece piece(s, Work::compute, "embedding_grad");
  unsigned blocks = static_cast<unsigned>(vocab < 65535 ? vocab : 65535);
  embedding_grad_kernel<<<blocks, kHolders, 0, static_cast<cudaStream_t>(s)>>>(ids, dy, dw, n, vocab, width);
  check_launch("embedding_grad");
#else
  enqueue(s, Work::compute, "embedding_grad", [=] {
    std::vector<float> sums(vocab * width);
    for (size_t k = 0; k < n; ++k)
      for (size_t c = 0; c < width; ++c)
        if (ids[k] >= 0 && ids[k] < static_cast<int64_t>(vocab)) sums[ids[k] * width + c] += static_cast<float>(dy[k * width + c]);
    for (size_t k = 0; k < vocab * width; ++k) dw[k] = T(sums[k]);
  });
#endif
}

template <class T, class G>
void adamw(Stream s, AdamW how, T* parameter, float* master, const G* grad, float* moment1, float* moment2, const float* rate,
           const float* power1, const float* power2, size_t n) {
  each(s, "adamw", n, [=] DEV(size_t k) {
    float lr = *rate * how.rate_ratio, p = master ? master[k] : static_cast<float>(parameter[k]), g = static_cast<float>(grad[k]);
    if (how.decay) p *= 1.f - lr * how.coefficient;
    float m = how.beta1 * moment1[k] + (1.f - how.beta1) * g, v = how.beta2 * moment2[k] + (1.f - how.beta2) * g * g;
    moment1[k] = m, moment2[k] = v;
    float below = sqrtf(v) / sqrtf(1.f - *power2) + how.epsilon;
    p -= lr / (1.f - *power1) * m / below;
    if (master) master[k] = p;
    parameter[k] = p;
  });
}

template <class T, class G>
void sgd(Stream s, T* parameter, float* master, const G* grad, const float* rate, size_t n) {
  each(s, "sgd", n, [=] DEV(size_t k) {
    float p = (master ? master[k] : static_cast<float>(parameter[k])) - *rate * static_cast<float>(grad[k]);
    if (master) master[k] = p;
    parameter[k] = p;
  });
}

}  // namespace

void k_fill(Stream s, Type type, void* out, size_t n, double value) {
  switch (type) {
    case Type::f32: return fill(s, static_cast<float*>(out), n, static_cast<float>(value));
    case Type::bf16: return fill(s, static_cast<bf16*>(out), n, bf16(static_cast<float>(value)));
    case Type::f64: return fill(s, static_cast<double*>(out), n, value);
    case Type::i64: return fill(s, static_cast<int64_t*>(out), n, static_cast<int64_t>(value));
    case Type::i32: return fill(s, static_cast<int32_t*>(out), n, static_cast<int32_t>(value));
    case Type::u8: return fill(s, static_cast<uint8_t*>(out), n, static_cast<uint8_t>(value));
  }
}

void k_arange(Stream s, Type type, void* out, size_t n, double start, double step) {
  if (type == Type::i64) arange(s, static_cast<int64_t*>(out), n, start, step);
  else if (type == Type::i32) arange(s, static_cast<int32_t*>(out), n, start, step);
  else if (type == Type::f32) arange(s, static_cast<float*>(out), n, start, step);
  else throw std::runtime_error("testbed: arange takes int32, int64 and float32 only");
}

void k_cast(Stream s, Type from, const void* x, Type to, void* out, size_t n) {
  switch (from) {
    case Type::f32: return cast_from(s, static_cast<const float*>(x), to, out, n);
    case Type::bf16: return cast_from(s, static_cast<const bf16*>(x), to, out, n);
    case Type::f64: return cast_from(s, static_cast<const double*>(x), to, out, n);
    case Type::i64: return cast_from(s, static_cast<const int64_t*>(x), to, out, n);
    case Type::i32: return cast_from(s, static_cast<const int32_t*>(x), to, out, n);
    case Type::u8: return cast_from(s, static_cast<const uint8_t*>(x), to, out, n);
  }
}

void k_map(Stream s, Map which, Type type, const void* x, const void* y, void* out, size_t n, float a, float b) {
  with_float(type, "map", [=](auto* t) { map_any(s, which, as(x, t), as(y, t), as(out, t), n, a, b); });
}

void k_map_broadcast(Stream s, Map which, Type type, const void* x, const void* y, void* out, size_t n, Layout at) {
  with_float(type, "map", [=](auto* t) { map_broadcast_any(s, which, as(x, t), as(y, t), as(out, t), n, at); });
}

void k_spread(Stream s, Type type, const void* x, void* out, size_t n, Layout at, float scale) {
  with_float(type, "spread", [=](auto* t) { spread(s, as(x, t), as(out, t), n, at, scale); });
}

void k_triangle(Stream s, Type type, const void* x, void* out, size_t n, size_t num_rows, size_t cols, int diagonal, bool upper) {
  with_float(type, "triu", [=](auto* t) { triangle(s, as(x, t), as(out, t), n, num_rows, cols, diagonal, upper); });
}

void k_sum_rows(Stream s, Sum sum, Type type, const void* x, const void* y, Type to, void* out, size_t num_rows, size_t cols, float scale) {
  with_float(type, "sum", [=](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    Term<T> term{sum, as(x, t), as(y, t)};
    if (to == Type::f32) sum_rows(s, term, static_cast<float*>(out), num_rows, cols, scale);
    else sum_rows(s, term, static_cast<bf16*>(out), num_rows, cols, scale);
  });
}

void k_sum(Stream s, Sum sum, Type type, const void* x, const void* y, void* out, size_t n, Layout kept, size_t m, Layout reduced, float scale) {
  with_float(type, "sum", [=](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    sum_any(s, Term<T>{sum, as(x, t), as(y, t)}, as(out, t), n, kept, m, reduced, scale);
  });
}

// If the last dimension stays last, whole groups of 16 bytes are moved.
bool widen(Layout& at, size_t* n, size_t element, const void* x, const void* out) {
  int last = at.num_dims - 1;
  size_t group = 16 / element;
  bool fits = last >= 0 && at.x[last] == 1 && at.dims[last] % group == 0 && packable(*n, {x, out});
  for (int d = 0; d < last && fits; ++d) fits = at.x[d] % group == 0;
  if (!fits) return false;
  at.dims[last] /= static_cast<uint32_t>(group);
  for (int d = 0; d < last; ++d) at.x[d] /= static_cast<uint32_t>(group);
  *n /= group;
  return true;
}

void k_permute(Stream s, const void* x, void* out, size_t n, Layout at, size_t element) {
  if (widen(at, &n, element, x, out)) permute(s, static_cast<const Pack<bf16>*>(x), static_cast<Pack<bf16>*>(out), n, at);
  else if (element == 4) permute(s, static_cast<const uint32_t*>(x), static_cast<uint32_t*>(out), n, at);
  else if (element == 2) permute(s, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), n, at);
  else if (element == 8) permute(s, static_cast<const uint64_t*>(x), static_cast<uint64_t*>(out), n, at);
  else permute(s, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(out), n, at);
}

void k_copy_2d(Stream s, const void* x, size_t x_pitch, void* out, size_t out_pitch, size_t width, size_t num_rows) {
  size_t all = x_pitch | out_pitch | width | reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
  auto go = [&](auto* t) {
    size_t e = sizeof *t;
    copy_2d(s, as(x, t), x_pitch / e, as(out, t), out_pitch / e, width / e, num_rows);
  };
  if (all % 16 == 0) go(static_cast<Pack<bf16>*>(nullptr));
  else if (all % 4 == 0) go(static_cast<uint32_t*>(nullptr));
  else if (all % 2 == 0) go(static_cast<uint16_t*>(nullptr));
  else go(static_cast<uint8_t*>(nullptr));
}

void k_embedding(Stream s, Type type, const int64_t* ids, const void* w, void* out, size_t n, size_t vocab, size_t width) {
  with_float(type, "embedding", [=](auto* t) { embedding(s, ids, as(w, t), as(out, t), n, vocab, width); });
}

void k_embedding_grad(Stream s, Type type, const int64_t* ids, const void* dy, void* dw, size_t n, size_t vocab, size_t width) {
  with_float(type, "embedding", [=](auto* t) { embedding_grad(s, ids, as(dy, t), as(dw, t), n, vocab, width); });
}

void k_adamw(Stream s, AdamW how, Type type, void* parameter, float* master, Type grad_type, const void* grad, float* moment1,
             float* moment2, const float* rate, const float* power1, const float* power2, size_t n) {
  with_float(type, "adamw", [=](auto* t) {
    with_float(grad_type, "adamw",
               [=](auto* u) { adamw(s, how, as(parameter, t), master, as(grad, u), moment1, moment2, rate, power1, power2, n); });
  });
}

void k_sgd(Stream s, Type type, void* parameter, float* master, Type grad_type, const void* grad, const float* rate, size_t n) {
  with_float(type, "sgd", [=](auto* t) {
    with_float(grad_type, "sgd", [=](auto* u) { sgd(s, as(parameter, t), master, as(grad, u), rate, n); });
  });
}

}  // namespace tb
