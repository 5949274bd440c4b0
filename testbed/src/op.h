// What every kernel does at its start and end: it takes memory of its stream, and records which blocks it touched.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"

namespace tb {

using phi::DataType;
using phi::DenseTensor;
using phi::IntArray;
using phi::Scalar;
using Dims = std::vector<int64_t>;
using Optional = paddle::optional<DenseTensor>;

[[noreturn]] void refuse(const std::string& op, const std::string& why);
Type type_of(const DenseTensor& tensor);
Type type_of(DataType type);
Dims dims_of(const DenseTensor& tensor);
inline size_t bytes_of(const DenseTensor& tensor) { return tensor.numel() * phi::SizeOf(tensor.dtype()); }
inline int64_t product(const Dims& dims, size_t from, size_t to) {
  int64_t all = 1;
  for (size_t k = from; k < to; ++k) all *= dims[k];
  return all;
}

// A kernel that is being issued. At its destruction, all its work has been issued on its stream.
class Op {
 public:
  Op(const phi::CustomContext& context, const char* name, std::initializer_list<const DenseTensor*> reads);
  Op(const phi::CustomContext& context, const char* name, const std::vector<const DenseTensor*>& reads);
  ~Op();

  // Memory for an output: its present memory if that is large enough (in-place), otherwise a block of this stream.
  void* out(DenseTensor* tensor) { return out(tensor, tensor->dtype()); }
  void* out(DenseTensor* tensor, DataType type);
  void* scratch(size_t size);  // memory of this stream until the kernel has been issued
  void reads(const DenseTensor& tensor) { touched_.push_back(&tensor); }

  const char* const name;
  const Stream stream;

 private:
  long number_ = 0;
  const phi::CustomContext& context_;
  std::vector<const DenseTensor*> touched_;
  std::vector<phi::Allocator::AllocationPtr> scratch_;
};

// Writes `x`, of floating-point numbers, to `out`, broadcast to `dims`.
void spread_to(Op& op, const DenseTensor& x, const Dims& dims, void* out);

}  // namespace tb

#define TB_KERNEL(name, function, ...) PD_REGISTER_PLUGIN_KERNEL(name, testbed, ALL_LAYOUT, tb::function, __VA_ARGS__)
#define TB_FLOATS float, phi::dtype::bfloat16
#define TB_ALL float, double, int, int64_t, bool, uint8_t, phi::dtype::bfloat16
