// Element types, and what lets one source serve as a loop on a host thread and as a grid on CUDA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "runtime.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define HD __host__ __device__
#define DEV __device__
#else
#define HD
#define DEV
#endif

namespace tb {

struct bf16 {
  uint16_t bits;

  bf16() = default;
  HD bf16(float value) {  // NOLINT: converts like a number
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));  // one instruction for the code below
    return;
#endif
    uint32_t raw;
    memcpy(&raw, &value, 4);
    if ((raw & 0x7fffffff) > 0x7f800000) bits = static_cast<uint16_t>(raw >> 16 | 0x40);
    else bits = static_cast<uint16_t>((raw + 0x7fff + (raw >> 16 & 1)) >> 16);  // to nearest, ties to even
  }
  HD operator float() const {
    uint32_t raw = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &raw, 4);
    return value;
  }
};

enum class Type : int { f32, bf16, f64, i64, i32, u8 };
size_t size_of(Type type);

// Calls `use` with a null pointer to the C++ type.
template <class F>
void with_float(Type type, const char* name, F use) {
  if (type == Type::f32) use(static_cast<float*>(nullptr));
  else if (type == Type::bf16) use(static_cast<bf16*>(nullptr));
  else throw std::runtime_error(std::string("testbed: ") + name + " takes float32 and bfloat16 only");
}

#if defined(TESTBED_CUDA) && defined(__CUDACC__)

// The threads of one block that work on one row together.
struct Team {
  float* shared;

  template <class F>
  __device__ void each(size_t n, F f) const {
    for (size_t k = threadIdx.x; k < n; k += blockDim.x) f(k);
  }
  template <class F>
  __device__ float sum(size_t n, F f) const {
    float total = 0;
    for (size_t k = threadIdx.x; k < n; k += blockDim.x) total += f(k);
    return all(total, [](float a, float b) { return a + b; });
  }
  template <class F>
  __device__ float max(size_t n, F f) const {
    float top = -INFINITY;
    for (size_t k = threadIdx.x; k < n; k += blockDim.x) top = fmaxf(top, f(k));
    return all(top, [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ bool first() const { return threadIdx.x == 0; }
  __device__ float total(float mine) const {
    return all(mine, [](float a, float b) { return a + b; });
  }
  __device__ float top(float mine) const {
    return all(mine, [](float a, float b) { return fmaxf(a, b); });
  }

 private:
  template <class Op>
  __device__ float all(float value, Op op) const {  // the same tree for every thread, so every run gives the same bits
    for (int step = 16; step; step /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float total = shared[0];
    for (unsigned k = 1; k < blockDim.x / 32; ++k) total = op(total, shared[k]);
    __syncthreads();
    return total;
  }
};

template <class F>
__global__ void each_kernel(size_t n, F f) {
  for (size_t k = blockIdx.x * size_t{blockDim.x} + threadIdx.x; k < n; k += size_t{gridDim.x} * blockDim.x) f(k);
}

template <class F>
__global__ void rows_kernel(size_t rows, F f) {
  __shared__ float shared[32];
  Team team{shared};
  for (size_t row = blockIdx.x; row < rows; row += gridDim.x) f(team, row);
}

// Sums of columns: a block has 32 columns; each of its 32 groups of threads takes every 32nd row, eight rows at once.
constexpr int kGroups = 32;
template <class F, class G>
__global__ void columns_kernel(size_t num_rows, size_t num_cols, F f, G store) {
  __shared__ float part[kGroups][33];
  size_t col = blockIdx.x * size_t{32} + threadIdx.x;
  float total = 0;
  if (col < num_cols) {
    size_t row = threadIdx.y;
    for (; row + 7 * kGroups < num_rows; row += 8 * kGroups) {
      float some[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) some[k] = f(row + k * kGroups, col);
#pragma unroll
      for (int k = 0; k < 8; ++k) total += some[k];
    }
    for (; row < num_rows; row += kGroups) total += f(row, col);
  }
  part[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && col < num_cols) {
    for (int k = 1; k < kGroups; ++k) total += part[k][threadIdx.x];
    store(col, total);
  }
}

inline void check_launch(const char* name) {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("testbed: ") + name + ": " + cudaGetErrorString(error));
}

template <class F>
void each(Stream stream, const char* name, size_t n, F f) {
  if (!n) return;
  Piece piece(stream, Work::compute, name);
  size_t blocks = (n + 255) / 256;
  each_kernel<<<static_cast<unsigned>(blocks < 16384 ? blocks : 16384), 256, 0, static_cast<cudaStream_t>(stream)>>>(n, f);
  check_launch(name);
}

template <class F>
void rows(Stream stream, const char* name, size_t num_rows, size_t num_cols, F f, unsigned threads = 0) {
  if (!num_rows) return;
  Piece piece(stream, Work::compute, name);
  if (!threads) threads = num_cols <= 64 ? 32 : num_cols <= 1024 ? 128 : num_cols <= 8192 ? 256 : 1024;
  unsigned blocks = static_cast<unsigned>(num_rows < 65535 ? num_rows : 65535);
  rows_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(num_rows, f);
  check_launch(name);
}

// store(col, sum over rows of f(row, col))
template <class F, class G>
void columns(Stream stream, const char* name, size_t num_rows, size_t num_cols, F f, G store) {
  if (!num_cols) return;
  Piece piece(stream, Work::compute, name);
  unsigned blocks = static_cast<unsigned>((num_cols + 31) / 32);
  columns_kernel<<<blocks, dim3(32, kGroups), 0, static_cast<cudaStream_t>(stream)>>>(num_rows, num_cols, f, store);
  check_launch(name);
}

#elif !defined(TESTBED_CUDA)

struct Team {
  template <class F>
  void each(size_t n, F f) const {
    for (size_t k = 0; k < n; ++k) f(k);
  }
  template <class F>
  float sum(size_t n, F f) const {
    float total = 0;
    for (size_t k = 0; k < n; ++k) total += f(k);
    return total;
  }
  template <class F>
  float max(size_t n, F f) const {
    float top = -INFINITY;
    for (size_t k = 0; k < n; ++k) top = fmaxf(top, f(k));
    return top;
  }
  bool first() const { return true; }
};

template <class F>
void each(Stream stream, const char* name, size_t n, F f) {
  enqueue(stream, Work::compute, name, [=] {
    for (size_t k = 0; k < n; ++k) f(k);
  });
}

template <class F>
void rows(Stream stream, const char* name, size_t num_rows, size_t, F f) {
  enqueue(stream, Work::compute, name, [=] {
    for (size_t row = 0; row < num_rows; ++row) f(Team{}, row);
  });
}

// store(col, sum over rows of f(row, col))
template <class F, class G>
void columns(Stream stream, const char* name, size_t num_rows, size_t num_cols, F f, G store) {
  enqueue(stream, Work::compute, name, [=] {
    for (size_t col = 0; col < num_cols; ++col) {
      float total = 0;
      for (size_t row = 0; row < num_rows; ++row) total += f(row, col);
      store(col, total);
    }
  });
}

#endif

}  // namespace tb
