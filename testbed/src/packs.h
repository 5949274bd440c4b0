// Packs of eight elements that are loaded and stored together, and rows that groups of threads keep in registers.
#pragma once
#include <initializer_list>
#include <type_traits>

#include "math.h"

namespace tb {

constexpr int kPack = 8;
template <class T>
struct alignas(kPack * sizeof(T) < 16 ? kPack * sizeof(T) : 16) Pack {
  T v[kPack];
};
static_assert(sizeof(Pack<bf16>) == 16, "eight bfloat16 are one load");
static_assert(sizeof(Pack<uint8_t>) == 8, "a pack has no gap behind it");

inline bool packable(size_t n, std::initializer_list<const void*> addresses) {
  bool fits = n % kPack == 0;
  for (const void* each : addresses) fits = fits && reinterpret_cast<uintptr_t>(each) % 16 == 0;
  return fits;
}

template <class T>
T* as(void* address, T*) { return static_cast<T*>(address); }
template <class T>
const T* as(const void* address, T*) { return static_cast<const T*>(address); }

// e^x and x / y by the device's fast instructions: exact to a few units in the last place of float32, plus one for each unit of |x|.
HD inline float exponential(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return expf(x);
#endif
}
HD inline float quotient(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);
#else
  return x / y;
#endif
}
HD inline float sigmoid(float x) { return quotient(1.f, 1.f + exponential(-x)); }

#if defined(TESTBED_CUDA) && defined(__CUDACC__)

constexpr int kCrewBlock = 256;

// G threads that work on one row; a block has kCrewBlock / G such crews, which go from row to row together.
template <int G>
struct Crew {
  float* shared;
  int turn = 0;

  __device__ int lane() const { return threadIdx.x % G; }
  template <class Op>
  __device__ float all(float value, Op op) {  // the same tree for every thread, so every run gives the same bits
#pragma unroll
    for (int step = 16; step; step /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (G == 32) return value;
    float* here = shared + (turn ^= 1) * (kCrewBlock / 32);  // two places in turn, so that a reduction needs only one barrier
    if (threadIdx.x % 32 == 0) here[threadIdx.x / 32] = value;
    __syncthreads();
    int first = threadIdx.x / G * (G / 32);
    value = here[first];
#pragma unroll
    for (int k = 1; k < G / 32; ++k) value = op(value, here[first + k]);
    return value;
  }
  __device__ float sum(float value) {
    return all(value, [](float a, float b) { return a + b; });
  }
  __device__ float max(float value) {
    return all(value, [](float a, float b) { return fmaxf(a, b); });
  }
};

// The part of a row that one thread of a crew holds: P packs, as in memory.
template <int P, int G, class T>
struct Row {
  Pack<T> v[P];

  __device__ Row(const T* row, size_t packs, float empty = 0.f) {
    int lane = threadIdx.x % G;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (p * G + lane < packs) {
        v[p] = reinterpret_cast<const Pack<T>*>(row)[p * G + lane];
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) v[p].v[i] = T(empty);
      }
    }
  }
  __device__ float at(int p, int i) const { return v[p].v[i]; }
  static __device__ bool has(int p, size_t packs) { return p * G + threadIdx.x % G < packs; }
  template <class F>
  __device__ float fold(float from, F f) const {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < kPack; ++i) from = f(from, at(p, i), p, i);
    return from;
  }
  template <class F>
  __device__ void store(T* row, size_t packs, bool live, F f) const {
    int lane = threadIdx.x % G;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!live || p * G + lane >= packs) continue;
      Pack<T> made;
#pragma unroll
      for (int i = 0; i < kPack; ++i) made.v[i] = T(f(at(p, i), p, i));
      reinterpret_cast<Pack<T>*>(row)[p * G + lane] = made;
    }
  }
};

template <int G, class F>
__global__ void __launch_bounds__(kCrewBlock) crew_kernel(size_t num_rows, F f) {
  __shared__ float shared[2 * kCrewBlock / 32];
  Crew<G> crew{shared};
  constexpr size_t crews = kCrewBlock / G;
  for (size_t first = blockIdx.x * crews; first < num_rows; first += gridDim.x * crews) {
    size_t row = first + threadIdx.x / G;
    bool live = row < num_rows;
    f(crew, live ? row : num_rows - 1, live);
  }
}

// Calls f(crew, row, whether the row is the crew's own); every crew of a block calls it equally often.
template <int G, class F>
void crews(Stream stream, const char* name, size_t num_rows, F f) {
  if (!num_rows) return;
  Piece piece(stream, Work::compute, name);
  size_t blocks = (num_rows + kCrewBlock / G - 1) / (kCrewBlock / G);
  crew_kernel<G><<<static_cast<unsigned>(blocks < 65535 ? blocks : 65535), kCrewBlock, 0, static_cast<cudaStream_t>(stream)>>>(num_rows, f);
  check_launch(name);
}

// Calls `go(P, G)` if rows of T fit: with at most 128 bytes per thread, and no more threads than necessary.
template <class T, class Go>
bool in_registers(size_t cols, std::initializer_list<const void*> addresses, Go go) {
  constexpr int most = 128 / sizeof(Pack<T>);
  size_t packs = cols / kPack;
  if (!packable(cols, addresses) || cols < 64 || packs > size_t{most} * kCrewBlock) return false;
  if (packs <= 2 * 32) go(std::integral_constant<int, 2>(), std::integral_constant<int, 32>());
  else if (packs <= most * 32) go(std::integral_constant<int, most>(), std::integral_constant<int, 32>());
  else if (packs <= most * 64) go(std::integral_constant<int, most>(), std::integral_constant<int, 64>());
  else if (packs <= most * 128) go(std::integral_constant<int, most>(), std::integral_constant<int, 128>());
  else go(std::integral_constant<int, most>(), std::integral_constant<int, 256>());
  return true;
}

#endif

}  // namespace tb
