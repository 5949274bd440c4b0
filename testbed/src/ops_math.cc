// Creation, copies, elementwise functions, reductions, shapes.
#include <algorithm>
#include <numeric>

#include "capture.h"
#include "op.h"

namespace tb {
namespace {

size_t axis_of(int64_t axis, size_t num_dims) { return static_cast<size_t>(axis < 0 ? axis + static_cast<int64_t>(num_dims) : axis); }

void check_dims(const char* name, size_t num_dims, int64_t numel) {
  if (num_dims > kMaxDims || numel >= int64_t{1} << 32) refuse(name, "takes up to 8 dimensions and 2^32 elements");
}

Dims strides_of(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t k = dims.size(); k-- > 1;) strides[k - 1] = strides[k] * dims[k];
  return strides;
}

// Strides of a tensor that is broadcast to `num_dims` dimensions: 0 for dimensions of one element.
Dims broadcast_strides(Dims dims, size_t num_dims) {
  dims.insert(dims.begin(), num_dims - dims.size(), 1);
  Dims strides = strides_of(dims);
  for (size_t k = 0; k < num_dims; ++k)
    if (dims[k] == 1) strides[k] = 0;
  return strides;
}

Layout layout(const Dims& dims, const Dims& x, const Dims& y) {
  Layout made;
  made.num_dims = static_cast<int>(dims.size());
  for (size_t k = 0; k < dims.size(); ++k) {
    made.dims[k] = static_cast<uint32_t>(dims[k]);
    made.x[k] = static_cast<uint32_t>(x[k]);
    made.y[k] = static_cast<uint32_t>(y[k]);
  }
  return made;
}

void unary(const phi::CustomContext& c, const char* name, Map map, const DenseTensor& x, DenseTensor* out, float a = 0, float b = 0) {
  Op op(c, name, {&x});
  op.out(out, x.dtype());
  k_map(op.stream, map, type_of(x), x.data(), nullptr, out->data(), out->numel(), a, b);
}

void slope(const phi::CustomContext& c, const char* name, Map map, const DenseTensor& x, const DenseTensor& grad, DenseTensor* out) {
  Op op(c, name, {&x, &grad});
  op.out(out, x.dtype());
  k_map(op.stream, map, type_of(x), x.data(), grad.data(), out->data(), out->numel());
}

// out = map(x, y) on values of `type` at the three places, with the shapes of the tensors.
void combine(Op& op, const char* name, Map map, Type type, const DenseTensor& x, const void* from_x, const DenseTensor& y, const void* from_y,
             const DenseTensor& out, void* to) {
  if (x.numel() == out.numel() && y.numel() == out.numel()) {
    k_map(op.stream, map, type, from_x, from_y, to, out.numel());
    return;
  }
  Dims dims = dims_of(out);
  check_dims(name, dims.size(), out.numel());
  Layout at = layout(dims, broadcast_strides(dims_of(x), dims.size()), broadcast_strides(dims_of(y), dims.size()));
  k_map_broadcast(op.stream, map, type, from_x, from_y, to, out.numel(), at);
}

void binary(const phi::CustomContext& c, const char* name, Map map, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  Op op(c, name, {&x, &y});
  if (x.dtype() != y.dtype()) refuse(name, "both operands must have one element type");
  op.out(out, x.dtype());
  combine(op, name, map, type_of(x), x, x.data(), y, y.data(), *out, out->data());
}

// Sums over the dimensions of `dims` that `reduced` marks; x and y have the given strides.
void sum_marked(Stream s, Sum sum, Type type, const void* x, const Dims& at_x, const void* y, const Dims& at_y, const Dims& dims,
                const std::vector<bool>& reduced, void* out, float scale) {
  Dims kept_dims, kept_x, kept_y, gone_dims, gone_x, gone_y;
  for (size_t k = 0; k < dims.size(); ++k) {
    (reduced[k] ? gone_dims : kept_dims).push_back(dims[k]);
    (reduced[k] ? gone_x : kept_x).push_back(at_x[k]);
    (reduced[k] ? gone_y : kept_y).push_back(at_y[k]);
  }
  size_t n = product(kept_dims, 0, kept_dims.size()), m = product(gone_dims, 0, gone_dims.size());
  bool dense = true;  // a dimension of one element may have any stride
  Dims plain = strides_of(dims);
  for (size_t k = 0; k < dims.size(); ++k)
    if (dims[k] != 1) dense = dense && at_x[k] == plain[k] && (sum != Sum::product || at_y[k] == plain[k]);
  std::vector<bool> marks;
  for (size_t k = 0; k < dims.size(); ++k)
    if (dims[k] != 1) marks.push_back(reduced[k]);
  bool tail = std::is_sorted(marks.begin(), marks.end()), head = std::is_sorted(marks.rbegin(), marks.rend());
  if (dense && tail) k_sum_rows(s, sum, type, x, y, type, out, n, m, scale);
  else if (dense && head) k_sum_columns(s, sum, type, x, y, out, m, n, scale);
  else k_sum(s, sum, type, x, y, out, n, layout(kept_dims, kept_x, kept_y), m, layout(gone_dims, gone_x, gone_y), scale);
}

void reduce(const phi::CustomContext& c, const char* name, const DenseTensor& x, const Dims& axes, bool mean, DenseTensor* out) {
  Op op(c, name, {&x});
  if (out->dtype() != x.dtype() && out->dtype() != DataType::UNDEFINED) refuse(name, "cannot change the element type");
  op.out(out, x.dtype());
  Dims dims = dims_of(x);
  check_dims(name, dims.size(), x.numel());
  std::vector<bool> reduced(dims.size(), axes.empty());
  for (int64_t axis : axes) reduced[axis_of(axis, dims.size())] = true;
  float scale = mean ? static_cast<float>(out->numel()) / static_cast<float>(x.numel()) : 1.f;
  Dims at = strides_of(dims);
  sum_marked(op.stream, Sum::plain, type_of(x), x.data(), at, nullptr, at, dims, reduced, out->data(), scale);
}

// The gradient of a broadcast operand: `grad` (times `other`) summed over the dimensions in which it was repeated.
void reduce_like(Op& op, const DenseTensor& grad, const DenseTensor* other, const DenseTensor& like, DenseTensor* out) {
  op.out(out, like.dtype());
  Dims dims = dims_of(grad), own = dims_of(like);
  check_dims(op.name, dims.size(), grad.numel());
  own.insert(own.begin(), dims.size() - own.size(), 1);
  std::vector<bool> reduced(dims.size());
  for (size_t k = 0; k < dims.size(); ++k) reduced[k] = own[k] == 1 && dims[k] != 1;
  Dims at_y = other ? broadcast_strides(dims_of(*other), dims.size()) : strides_of(dims);
  sum_marked(op.stream, other ? Sum::product : Sum::plain, type_of(grad), grad.data(), strides_of(dims), other ? other->data() : nullptr, at_y,
             dims, reduced, out->data(), 1.f);
}

void same(Op& op, const DenseTensor& x, DenseTensor* out) {  // out = x, of any shape
  op.out(out, x.dtype());
  if (out->data() != x.data()) copy_async(op.stream, out->data(), x.data(), bytes_of(x), Copy::device_to_device);
}

void side_of_sum(Op& op, const DenseTensor& grad, const DenseTensor& like, float sign, DenseTensor* out) {
  if (!out) return;
  if (like.numel() != grad.numel()) reduce_like(op, grad, nullptr, like, out);
  else same(op, grad, out);
  if (sign != 1.f) k_map(op.stream, Map::scale, type_of(*out), out->data(), nullptr, out->data(), out->numel(), sign, 0);
}

void side_of_product(Op& op, const DenseTensor& grad, const DenseTensor& other, const DenseTensor& like, DenseTensor* out) {
  if (!out) return;
  if (like.numel() != grad.numel()) {
    reduce_like(op, grad, &other, like, out);
    return;
  }
  op.out(out, like.dtype());
  if (other.numel() == grad.numel()) {
    k_map(op.stream, Map::multiply, type_of(grad), grad.data(), other.data(), out->data(), out->numel());
    return;
  }
  Dims dims = dims_of(grad);
  check_dims(op.name, dims.size(), grad.numel());
  Layout at = layout(dims, strides_of(dims), broadcast_strides(dims_of(other), dims.size()));
  k_map_broadcast(op.stream, Map::multiply, type_of(grad), grad.data(), other.data(), out->data(), out->numel(), at);
}

void permute(const phi::CustomContext& c, const char* name, const DenseTensor& x, const std::vector<int>& axes, DenseTensor* out) {
  Op op(c, name, {&x});
  Dims dims = dims_of(x), strides = strides_of(dims), to(dims.size()), at(dims.size());
  check_dims(name, dims.size(), x.numel());
  for (size_t k = 0; k < dims.size(); ++k) {
    size_t from = axis_of(axes[k], dims.size());
    to[k] = dims[from], at[k] = strides[from];
  }
  op.out(out, x.dtype());
  k_permute(op.stream, x.data(), out->data(), out->numel(), layout(to, at, at), phi::SizeOf(x.dtype()));
}

// Copies pieces of `x` along an axis, from the first, to `parts`.
void cut(Op& op, const DenseTensor& x, int64_t axis, const std::vector<DenseTensor*>& parts) {
  Dims dims = dims_of(x);
  size_t at = axis_of(axis, dims.size()), element = phi::SizeOf(x.dtype());
  size_t rows = product(dims, 0, at), inner = product(dims, at + 1, dims.size()) * element, offset = 0;
  for (DenseTensor* part : parts) {
    if (!part) refuse(op.name, "a part without a place");
    size_t width = dims_of(*part)[at] * inner;
    op.out(part, x.dtype());
    k_copy_2d(op.stream, static_cast<const char*>(x.data()) + offset, dims[at] * inner, part->data(), width, width, rows);
    offset += width;
  }
}

void join(Op& op, const std::vector<const DenseTensor*>& parts, size_t rows, size_t element, DenseTensor* out) {
  op.out(out, parts[0]->dtype());
  size_t pitch = out->numel() / rows * element, offset = 0;
  for (const DenseTensor* part : parts) {
    size_t width = part->numel() / rows * element;
    k_copy_2d(op.stream, part->data(), width, static_cast<char*>(out->data()) + offset, pitch, width, rows);
    offset += width;
  }
}

struct Window {
  size_t rows, pitch, width, offset;  // all except rows in bytes
};
Window window_of(const char* name, const DenseTensor& x, const Dims& axes, const IntArray& starts, int64_t numel) {
  if (axes.size() != 1) refuse(name, "cuts one axis only");
  Dims dims = dims_of(x);
  size_t at = axis_of(axes[0], dims.size()), element = phi::SizeOf(x.dtype());
  size_t rows = product(dims, 0, at), inner = product(dims, at + 1, dims.size()) * element;
  int64_t start = starts.GetData()[0];
  if (start < 0) start += dims[at];
  return {rows, dims[at] * inner, numel / rows * element, start * inner};
}

// A slice along several axes, copied by the strides of x.
void slice_any(Op& op, const DenseTensor& x, const Dims& axes, const IntArray& starts, DenseTensor* out) {
  Dims dims = dims_of(x), strides = strides_of(dims), to = dims;
  size_t offset = 0;
  int64_t inner = out->numel();
  for (size_t k = 0; k < axes.size(); ++k) {
    size_t at = axis_of(axes[k], dims.size());
    int64_t start = starts.GetData()[k];
    offset += (start < 0 ? start + dims[at] : start) * strides[at];
  }
  Dims left = dims_of(*out);
  if (left.size() == dims.size()) to = left;
  else
    for (int64_t axis : axes) to[axis_of(axis, dims.size())] = 1;  // axes that the slice reduces to one element and drops
  if (product(to, 0, to.size()) != inner) refuse(op.name, "drops axes that keep more than one element");
  check_dims(op.name, dims.size(), x.numel());
  size_t element = phi::SizeOf(x.dtype());
  k_permute(op.stream, static_cast<const char*>(x.data()) + offset * element, out->data(), inner, layout(to, strides, strides), element);
}

void to_host(Op& op, const DenseTensor& x, bool pinned, DenseTensor* out) {
  size_t size = bytes_of(x);
  if (pinned) {  // the variable's buffer of the previous step is reused, as on the GPU place
    bool kept = switches.pinned_kept && out->Holder() && out->Holder()->size() >= size && is_pinned(out->Holder()->ptr());
    if (!kept) out->ResetHolder(pinned_make(size));
    out->set_type(x.dtype());
  }
  copy_async(op.stream, out->data(), x.data(), size, Copy::device_to_host);
  if (pinned) pinned_copied(out->data(), op.stream);
}

}  // namespace

void spread_to(Op& op, const DenseTensor& x, const Dims& dims, void* out) {
  check_dims(op.name, dims.size(), product(dims, 0, dims.size()));
  Dims at = broadcast_strides(dims_of(x), dims.size());
  k_spread(op.stream, type_of(x), x.data(), out, product(dims, 0, dims.size()), layout(dims, at, at), 1.f);
}

// ---- creation

template <typename T, typename Context>
void FullKernel(const Context& c, const IntArray& shape, const Scalar& value, DataType type, DenseTensor* out) {
  Op op(c, "full", {});
  out->Resize(common::make_ddim(shape.GetData()));
  op.out(out, phi::CppTypeToDataType<T>::Type());
  k_fill(op.stream, type_of(*out), out->data(), out->numel(), value.to<double>());
}

template <typename T, typename Context>
void FullLikeKernel(const Context& c, const DenseTensor&, const Scalar& value, DataType, DenseTensor* out) {
  Op op(c, "full_like", {});
  op.out(out, phi::CppTypeToDataType<T>::Type());
  k_fill(op.stream, type_of(*out), out->data(), out->numel(), value.to<double>());
}

template <typename T, typename Context>
void EmptyKernel(const Context& c, const IntArray& shape, DataType type, DenseTensor* out) {
  Op op(c, "empty", {});
  out->Resize(common::make_ddim(shape.GetData()));
  op.out(out, type);
}

template <typename T, typename Context>
void ArangeKernel(const Context& c, const Scalar& start, const Scalar& end, const Scalar& step, DenseTensor* out) {
  Op op(c, "arange", {});
  double from = start.to<double>(), by = step.to<double>();
  out->Resize({static_cast<int64_t>(std::ceil((end.to<double>() - from) / by))});
  op.out(out, phi::CppTypeToDataType<T>::Type());
  k_arange(op.stream, type_of(*out), out->data(), out->numel(), from, by);
}

template <typename T, typename Context>
void TriuKernel(const Context& c, const DenseTensor& x, int diagonal, DenseTensor* out) {
  Op op(c, "triu", {&x});
  op.out(out, x.dtype());
  Dims dims = dims_of(x);
  k_triangle(op.stream, type_of(x), x.data(), out->data(), x.numel(), dims[dims.size() - 2], dims.back(), diagonal, true);
}

template <typename T, typename Context>
void CastKernel(const Context& c, const DenseTensor& x, DataType type, DenseTensor* out) {
  Op op(c, "cast", {&x});
  Type from = type_of(x);
  const void* source = x.data();
  bool in_place = out->initialized() && out->Holder() == x.Holder() && size_of(from) != size_of(type_of(type));
  if (in_place) {  // writing narrower elements would overwrite wider ones that are still to be read
    void* kept = op.scratch(bytes_of(x));
    copy_async(op.stream, kept, source, bytes_of(x), Copy::device_to_device);
    source = kept;
  }
  op.out(out, type);
  k_cast(op.stream, from, source, type_of(type), out->data(), out->numel());
}

// ---- copies

template <typename T, typename Context>
void AssignKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  Op op(c, "assign", {&x});
  same(op, x, out);
}

template <typename T, typename Context>
void ShareDataKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  Op op(c, "share_data", {&x});
  out->ShareDataWith(x);
}

// Only establishes an order: sharding with overlap puts one after its last collective.
template <typename T, typename Context>
void NopKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  Op op(c, "nop", {&x});
  out->ShareDataWith(x);
}

enum Destination { kPinned = 1, kResult = 2 };  // kResult: the host may wait for the copy while the step continues

template <typename T, typename Context>
void MemcpyD2HKernel(const Context& c, const DenseTensor& x, int to, DenseTensor* out) {
  Op op(c, "memcpy_d2h", {&x});
  bool pinned = (to == kPinned && !switches.pageable) || to == kResult;
  if (!pinned) c.template HostAlloc<T>(out);
  to_host(op, x, pinned, out);
  if (to == kResult) return capture_result(op.stream);
  if (!pinned || switches.d2h_blocks) stream_sync(op.stream);
}

// Makes the host wait for this stream, whatever `nosync` says about the ends of jobs.
template <typename T, typename Context>
void SyncStreamKernel(const Context& c, const DenseTensor& x, DenseTensor*) {
  Op op(c, "sync_calc_stream", {&x});
  if (switches.sync_waits) stream_sync(op.stream);
}

template <typename T, typename Context>
void MemcpyH2DKernel(const Context& c, const DenseTensor& x, int, DenseTensor* out) {
  Op op(c, "memcpy_h2d", {});
  op.reads(x);
  op.out(out, x.dtype());
  bool on_host = phi::is_cpu_place(x.place());
  bool pinned = on_host && is_pinned(x.data());
  if (pinned && switches.copy_order) pinned_wait(x.data(), op.stream);
  copy_async(op.stream, out->data(), x.data(), bytes_of(x), on_host ? Copy::host_to_device : Copy::device_to_device);
  if (pinned) pinned_copied(x.data(), op.stream);
}

template <typename T, typename Context>
void SetTensorValueKernel(const Context& c, const DenseTensor& x, const DenseTensor& value, const IntArray&, const IntArray&,
                          const IntArray&, const Dims& axes, const Dims&, const Dims&, DenseTensor* out) {
  Op op(c, "set_value_with_tensor", {&x, &value});
  if (!axes.empty()) refuse(op.name, "sets whole tensors only");
  op.out(out, x.dtype());
  Dims dims = dims_of(*out);
  if (value.numel() == out->numel()) {
    copy_async(op.stream, out->data(), value.data(), bytes_of(value), Copy::device_to_device);
    return;
  }
  Dims at = broadcast_strides(dims_of(value), dims.size());
  k_spread(op.stream, type_of(value), value.data(), out->data(), out->numel(), layout(dims, at, at), 1.f);
}

// ---- elementwise

template <typename T, typename Context>
void ScaleKernel(const Context& c, const DenseTensor& x, const Scalar& scale, const Scalar& bias, bool after, DenseTensor* out) {
  float a = scale.to<float>(), b = bias.to<float>();
  if (x.dtype() != DataType::INT64) return unary(c, "scale", Map::scale, x, out, a, after ? b : a * b);
  Op op(c, "scale", {&x});  // integers below 2^24, such as positions and tokens
  auto* wide = op.scratch(x.numel() * sizeof(float));
  op.out(out, x.dtype());
  k_cast(op.stream, Type::i64, x.data(), Type::f32, wide, x.numel());
  k_map(op.stream, Map::scale, Type::f32, wide, nullptr, wide, x.numel(), a, after ? b : a * b);
  k_cast(op.stream, Type::f32, wide, Type::i64, out->data(), x.numel());
}

#define TB_UNARY(Name, map)                                                   \
  template <typename T, typename Context>                                     \
  void Name##Kernel(const Context& c, const DenseTensor& x, DenseTensor* out) { \
    unary(c, #map, Map::map, x, out);                                         \
  }
TB_UNARY(Sqrt, sqrt) TB_UNARY(Rsqrt, rsqrt) TB_UNARY(Square, square) TB_UNARY(Sin, sin) TB_UNARY(Cos, cos) TB_UNARY(Tanh, tanh)
TB_UNARY(Exp, exp) TB_UNARY(Silu, silu) TB_UNARY(Relu, relu)

#define TB_SLOPE(Name, map)                                                                              \
  template <typename T, typename Context>                                                                \
  void Name##Kernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, DenseTensor* out) {   \
    slope(c, #map, Map::map, x, grad, out);                                                              \
  }
TB_SLOPE(RsqrtGrad, rsqrt_grad) TB_SLOPE(SquareGrad, square_grad) TB_SLOPE(SqrtGrad, sqrt_grad) TB_SLOPE(TanhGrad, tanh_grad)
TB_SLOPE(ReluGrad, relu_grad)

template <typename T, typename Context>
void SiluGradKernel(const Context& c, const DenseTensor& x, const DenseTensor&, const DenseTensor& grad, DenseTensor* out) {
  slope(c, "silu_grad", Map::silu_grad, x, grad, out);
}

template <typename T, typename Context>
void GeluKernel(const Context& c, const DenseTensor& x, bool approximate, DenseTensor* out) {
  unary(c, "gelu", approximate ? Map::gelu_tanh : Map::gelu, x, out);
}

template <typename T, typename Context>
void GeluGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, bool approximate, DenseTensor* out) {
  slope(c, "gelu_grad", approximate ? Map::gelu_tanh_grad : Map::gelu_grad, x, grad, out);
}

#define TB_BINARY(Name, map)                                                                         \
  template <typename T, typename Context>                                                            \
  void Name##Kernel(const Context& c, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {  \
    binary(c, #map, Map::map, x, y, out);                                                            \
  }
TB_BINARY(Add, add) TB_BINARY(Subtract, subtract) TB_BINARY(Multiply, multiply) TB_BINARY(Divide, divide) TB_BINARY(Maximum, maximum)
TB_BINARY(Minimum, minimum) TB_BINARY(ElementwisePow, power)

template <typename T, typename Context>
void FloorDivideKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  Op op(c, "floor_divide", {&x, &y});  // integers below 2^24, such as positions and tokens
  auto *from_x = op.scratch(x.numel() * sizeof(float)), *from_y = op.scratch(y.numel() * sizeof(float));
  op.out(out, x.dtype());
  auto* wide = op.scratch(out->numel() * sizeof(float));
  k_cast(op.stream, Type::i64, x.data(), Type::f32, from_x, x.numel());
  k_cast(op.stream, Type::i64, y.data(), Type::f32, from_y, y.numel());
  combine(op, "floor_divide", Map::floor_divide, Type::f32, x, from_x, y, from_y, *out, wide);
  k_cast(op.stream, Type::f32, wide, Type::i64, out->data(), out->numel());
}

template <typename T, typename Context>
void ExpandKernel(const Context& c, const DenseTensor& x, const IntArray&, DenseTensor* out) {  // the result has its shape already
  Op op(c, "expand", {&x});
  op.out(out, x.dtype());
  spread_to(op, x, dims_of(*out), out->data());
}

template <typename T, typename Context>
void ExpandGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, const IntArray&, DenseTensor* dx) {
  Op op(c, "expand_grad", {&grad});
  side_of_sum(op, grad, x, 1.f, dx);
}

template <typename T, typename Context>
void AddGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& grad, int, DenseTensor* dx,
                   DenseTensor* dy) {
  Op op(c, "add_grad", {&grad});
  side_of_sum(op, grad, y, 1.f, dy);  // dx may overwrite the gradient, so it comes last
  side_of_sum(op, grad, x, 1.f, dx);
}

template <typename T, typename Context>
void SubtractGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& grad, int, DenseTensor* dx,
                        DenseTensor* dy) {
  Op op(c, "subtract_grad", {&grad});
  side_of_sum(op, grad, y, -1.f, dy);
  side_of_sum(op, grad, x, 1.f, dx);
}

template <typename T, typename Context>
void MultiplyGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& grad, int, DenseTensor* dx,
                        DenseTensor* dy) {
  Op op(c, "multiply_grad", {&x, &y, &grad});
  side_of_product(op, grad, x, y, dy);
  side_of_product(op, grad, y, x, dx);
}

template <typename T, typename Context>
void DivideGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& quotient, const DenseTensor& grad, int,
                      DenseTensor* dx, DenseTensor* dy) {
  Op op(c, "divide_grad", {&y, &quotient, &grad});
  if (x.numel() != grad.numel()) refuse(op.name, "takes a numerator of the quotient's shape");
  Dims dims = dims_of(grad);
  Layout at = layout(dims, strides_of(dims), broadcast_strides(dims_of(y), dims.size()));
  check_dims(op.name, dims.size(), grad.numel());
  auto divided = [&](const void* from, void* to) { k_map_broadcast(op.stream, Map::divide, type_of(grad), from, y.data(), to, grad.numel(), at); };
  if (dy) {
    void* part = op.scratch(bytes_of(grad));
    k_map(op.stream, Map::multiply, type_of(grad), grad.data(), quotient.data(), part, grad.numel());
    divided(part, part);
    op.out(dy, y.dtype());
    std::vector<bool> reduced(dims.size());
    Dims own = dims_of(y), plain = strides_of(dims);
    own.insert(own.begin(), dims.size() - own.size(), 1);
    for (size_t k = 0; k < dims.size(); ++k) reduced[k] = own[k] == 1 && dims[k] != 1;
    sum_marked(op.stream, Sum::plain, type_of(grad), part, plain, nullptr, plain, dims, reduced, dy->data(), -1.f);
  }
  if (dx) op.out(dx, x.dtype()), divided(grad.data(), dx->data());
}

template <typename T, typename Context>
void AddNKernel(const Context& c, const std::vector<const phi::TensorBase*>& parts, DenseTensor* out) {
  std::vector<const DenseTensor*> x;
  for (const phi::TensorBase* each : parts) x.push_back(static_cast<const DenseTensor*>(each));
  Op op(c, "add_n", x);
  if (x.size() == 1) return same(op, *x[0], out);
  op.out(out, x[0]->dtype());
  k_map(op.stream, Map::add, type_of(*out), x[0]->data(), x[1]->data(), out->data(), out->numel());
  for (size_t k = 2; k < x.size(); ++k) k_map(op.stream, Map::add, type_of(*out), out->data(), x[k]->data(), out->data(), out->numel());
}

// ---- reductions

template <typename T, typename Context>
void SumKernel(const Context& c, const DenseTensor& x, const IntArray& axes, DataType, bool, DenseTensor* out) {
  reduce(c, "sum", x, axes.GetData(), false, out);
}

template <typename T, typename Context>
void MeanKernel(const Context& c, const DenseTensor& x, const IntArray& axes, bool, DenseTensor* out) {
  reduce(c, "mean", x, axes.GetData(), true, out);
}

template <typename T, typename Context>
void MeanAllKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  reduce(c, "mean_all", x, {}, true, out);
}

template <typename T, typename Context>
void MeanGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, const IntArray& axes, bool, bool all, DenseTensor* dx) {
  Op op(c, "mean_grad", {&grad});
  op.out(dx, x.dtype());
  Dims dims = dims_of(x), kept = dims;
  check_dims(op.name, dims.size(), x.numel());
  Dims given = axes.GetData();
  if (all || given.empty()) std::fill(kept.begin(), kept.end(), 1);
  else
    for (int64_t axis : given) kept[axis_of(axis, dims.size())] = 1;
  Dims at = broadcast_strides(kept, dims.size());
  float scale = static_cast<float>(grad.numel()) / static_cast<float>(x.numel());
  k_spread(op.stream, type_of(x), grad.data(), dx->data(), dx->numel(), layout(dims, at, at), scale);
}

template <typename T, typename Context>
void SumGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, const IntArray& axes, bool, bool all, DenseTensor* dx) {
  Op op(c, "sum_grad", {&grad});
  op.out(dx, x.dtype());
  Dims dims = dims_of(x), kept = dims, given = axes.GetData();
  if (all || given.empty()) std::fill(kept.begin(), kept.end(), 1);
  else
    for (int64_t axis : given) kept[axis_of(axis, dims.size())] = 1;
  Dims at = broadcast_strides(kept, dims.size());
  k_spread(op.stream, type_of(x), grad.data(), dx->data(), dx->numel(), layout(dims, at, at), 1.f);
}

template <typename T, typename Context>
void SquaredL2NormKernel(const Context& c, const DenseTensor& x, DenseTensor* out) {
  Op op(c, "squared_l2_norm", {&x});
  op.out(out, x.dtype());
  size_t n = x.numel(), rows = 1;
  for (size_t wanted : {256, 64, 16, 4})  // partial sums first, to use more than one block
    if (rows == 1 && n % wanted == 0 && n >= wanted * wanted) rows = wanted;
  if (rows == 1) return k_sum_rows(op.stream, Sum::squares, type_of(x), x.data(), nullptr, type_of(x), out->data(), 1, n, 1.f);
  void* part = op.scratch(rows * sizeof(float));
  k_sum_rows(op.stream, Sum::squares, type_of(x), x.data(), nullptr, Type::f32, part, rows, n / rows, 1.f);
  k_sum_rows(op.stream, Sum::plain, Type::f32, part, nullptr, type_of(x), out->data(), 1, rows, 1.f);
}

// ---- shapes

#define TB_RESHAPE(Name)                                                                                          \
  template <typename T, typename Context>                                                                         \
  void Name##Kernel(const Context& c, const DenseTensor& x, const IntArray&, DenseTensor* out) {                   \
    Op op(c, #Name, {&x});                                                                                        \
    same(op, x, out);                                                                                             \
  }
#define TB_RESHAPE_BACK(Name)                                                                                     \
  template <typename T, typename Context>                                                                         \
  void Name##GradKernel(const Context& c, const DenseTensor&, const DenseTensor& grad, DenseTensor* dx) {          \
    Op op(c, #Name "Grad", {&grad});                                                                              \
    same(op, grad, dx);                                                                                           \
  }
TB_RESHAPE(Reshape) TB_RESHAPE(Squeeze) TB_RESHAPE(Unsqueeze) TB_RESHAPE_BACK(Reshape) TB_RESHAPE_BACK(Flatten) TB_RESHAPE_BACK(Unsqueeze)

template <typename T, typename Context>
void FlattenKernel(const Context& c, const DenseTensor& x, int, int, DenseTensor* out) {
  Op op(c, "flatten", {&x});
  same(op, x, out);
}
template <typename T, typename Context>
void SqueezeGradKernel(const Context& c, const DenseTensor&, const DenseTensor& grad, const IntArray&, DenseTensor* dx) {
  Op op(c, "squeeze_grad", {&grad});
  same(op, grad, dx);
}

template <typename T, typename Context>
void TransposeKernel(const Context& c, const DenseTensor& x, const std::vector<int>& axes, DenseTensor* out) {
  permute(c, "transpose", x, axes, out);
}

template <typename T, typename Context>
void TransposeGradKernel(const Context& c, const DenseTensor& grad, const std::vector<int>& axes, DenseTensor* dx) {
  std::vector<int> back(axes.size());
  for (size_t k = 0; k < axes.size(); ++k) back[axis_of(axes[k], axes.size())] = static_cast<int>(k);
  permute(c, "transpose_grad", grad, back, dx);
}

template <typename T, typename Context>
void ConcatKernel(const Context& c, const std::vector<const DenseTensor*>& parts, const Scalar& axis, DenseTensor* out) {
  Op op(c, "concat", parts);
  Dims dims = dims_of(*out);
  join(op, parts, product(dims, 0, axis_of(axis.to<int64_t>(), dims.size())), phi::SizeOf(parts[0]->dtype()), out);
}

template <typename T, typename Context>
void ConcatGradKernel(const Context& c, const std::vector<const DenseTensor*>&, const DenseTensor& grad, const Scalar& axis,
                      std::vector<DenseTensor*> parts) {
  Op op(c, "concat_grad", {&grad});
  cut(op, grad, axis.to<int64_t>(), parts);
}

template <typename T, typename Context>
void StackKernel(const Context& c, const std::vector<const DenseTensor*>& parts, int axis, DenseTensor* out) {
  Op op(c, "stack", parts);
  Dims dims = dims_of(*out);
  join(op, parts, product(dims, 0, axis_of(axis, dims.size())), phi::SizeOf(parts[0]->dtype()), out);
}

template <typename T, typename Context>
void SplitKernel(const Context& c, const DenseTensor& x, const IntArray&, const Scalar& axis, std::vector<DenseTensor*> parts) {
  Op op(c, "split", {&x});
  cut(op, x, axis.to<int64_t>(), parts);
}

template <typename T, typename Context>
void SplitWithNumKernel(const Context& c, const DenseTensor& x, int, const Scalar& axis, std::vector<DenseTensor*> parts) {
  Op op(c, "split_with_num", {&x});
  cut(op, x, axis.to<int64_t>(), parts);
}

template <typename T, typename Context>
void SliceKernel(const Context& c, const DenseTensor& x, const Dims& axes, const IntArray& starts, const IntArray&, const Dims&, const Dims&,
                 DenseTensor* out) {
  Op op(c, "slice", {&x});
  op.out(out, x.dtype());
  if (axes.size() != 1) {
    slice_any(op, x, axes, starts, out);
    return;
  }
  Window w = window_of(op.name, x, axes, starts, out->numel());
  k_copy_2d(op.stream, static_cast<const char*>(x.data()) + w.offset, w.pitch, out->data(), w.width, w.width, w.rows);
}

template <typename T, typename Context>
void SliceGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, const Dims& axes, const IntArray& starts,
                     const IntArray&, const Dims&, const Dims&, DenseTensor* dx) {
  Op op(c, "slice_grad", {&grad});
  op.out(dx, grad.dtype());
  Window w = window_of(op.name, x, axes, starts, grad.numel());
  k_fill(op.stream, type_of(grad), dx->data(), dx->numel(), 0);
  k_copy_2d(op.stream, grad.data(), w.width, static_cast<char*>(dx->data()) + w.offset, w.pitch, w.width, w.rows);
}

// Makes tensors parts of one buffer, each at an aligned place, and copies their contents there.
template <typename T, typename Context>
void CoalesceTensorKernel(const Context& c, const std::vector<const DenseTensor*>& parts, DataType type, bool copies, bool constant, bool, float value,
                          bool aligned, int alignment, int element, const std::vector<int64_t>&, const std::vector<int64_t>&,
                          std::vector<DenseTensor*> outs, DenseTensor* fused) {
  Op op(c, "coalesce_tensor", parts);
  size_t size = element > 0 ? element : phi::SizeOf(type), whole = 0;
  auto places = [&](const DenseTensor& part) {
    size_t bytes = part.numel() * size;
    return (aligned ? (bytes + alignment - 1) / alignment * alignment : bytes) / size;
  };
  for (const DenseTensor* part : parts) whole += places(*part);
  fused->Resize({static_cast<int64_t>(whole)});
  op.out(fused, type);
  k_fill(op.stream, type_of(*fused), fused->data(), whole, constant ? value : 0);
  size_t at = 0;
  for (size_t k = 0; k < parts.size(); ++k) {
    DenseTensor here = fused->Slice(at, at + parts[k]->numel());
    if (copies && !constant) copy_async(op.stream, here.data(), parts[k]->data(), bytes_of(*parts[k]), Copy::device_to_device);
    at += places(*parts[k]);
    auto dims = outs[k]->dims();
    outs[k]->ShareDataWith(here).Resize(dims);
  }
}

template <typename T, typename Context>
void ViewSliceKernel(const Context& c, const DenseTensor& x, int64_t begin, int64_t end, DenseTensor* out) {
  Op op(c, "view_slice", {&x});
  auto dims = out->dims();
  out->ShareDataWith(x.Slice(begin, end)).Resize(dims);
}

template <typename T, typename Context>
void TileKernel(const Context& c, const DenseTensor& x, const IntArray& times, DenseTensor* out) {
  Op op(c, "tile", {&x});
  Dims to = dims_of(*out), dims = dims_of(x);
  Dims repeats = times.GetData();
  size_t n = std::max(dims.size(), repeats.size());
  dims.insert(dims.begin(), n - dims.size(), 1);
  repeats.insert(repeats.begin(), n - repeats.size(), 1);
  Dims split, at, strides = strides_of(dims);
  for (size_t k = 0; k < n; ++k) {
    split.insert(split.end(), {repeats[k], dims[k]});
    at.insert(at.end(), {0, strides[k]});
  }
  Dims seen, seen_at;
  for (size_t k = 0; k < split.size(); ++k)
    if (split[k] != 1) seen.push_back(split[k]), seen_at.push_back(at[k]);
  op.out(out, x.dtype());
  check_dims(op.name, seen.size(), out->numel());
  k_spread(op.stream, type_of(x), x.data(), out->data(), out->numel(), layout(seen, seen_at, seen_at), 1.f);
}

template <typename T, typename Context>
void TileGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& grad, const IntArray& times, DenseTensor* dx) {
  Op op(c, "tile_grad", {&grad});
  Dims dims = dims_of(x), repeats = times.GetData();
  size_t n = std::max(dims.size(), repeats.size());
  dims.insert(dims.begin(), n - dims.size(), 1);
  repeats.insert(repeats.begin(), n - repeats.size(), 1);
  Dims split;
  std::vector<bool> reduced;
  for (size_t k = 0; k < n; ++k) {
    if (repeats[k] != 1) split.push_back(repeats[k]), reduced.push_back(true);
    if (dims[k] != 1) split.push_back(dims[k]), reduced.push_back(false);
  }
  check_dims(op.name, split.size(), grad.numel());
  op.out(dx, grad.dtype());
  Dims at = strides_of(split);
  sum_marked(op.stream, Sum::plain, type_of(grad), grad.data(), at, nullptr, at, split, reduced, dx->data(), 1.f);
}

}  // namespace tb

TB_KERNEL(full, FullKernel, TB_ALL) {}
TB_KERNEL(full_like, FullLikeKernel, TB_ALL) { kernel->InputAt(0).SetBackend(phi::Backend::ALL_BACKEND); }
TB_KERNEL(empty, EmptyKernel, TB_ALL) {}
TB_KERNEL(arange, ArangeKernel, float, int, int64_t) {}
TB_KERNEL(triu, TriuKernel, TB_FLOATS) {}
TB_KERNEL(cast, CastKernel, TB_ALL) { kernel->OutputAt(0).SetDataType(phi::DataType::UNDEFINED); }
TB_KERNEL(assign, AssignKernel, TB_ALL) {}
TB_KERNEL(share_data, ShareDataKernel, TB_ALL) {}
TB_KERNEL(nop, NopKernel, TB_ALL) {}
TB_KERNEL(sync_calc_stream, SyncStreamKernel, float) {}
TB_KERNEL(memcpy_d2h, MemcpyD2HKernel, TB_ALL, int8_t, int16_t, phi::dtype::float16) {
  kernel->OutputAt(0).SetBackend(phi::Backend::CPU);
}
TB_KERNEL(memcpy_h2d, MemcpyH2DKernel, TB_ALL, int8_t, int16_t, phi::dtype::float16) {}
TB_KERNEL(set_value_with_tensor, SetTensorValueKernel, TB_FLOATS) {}
TB_KERNEL(scale, ScaleKernel, TB_FLOATS, int64_t) {}
TB_KERNEL(sqrt, SqrtKernel, TB_FLOATS) {}
TB_KERNEL(rsqrt, RsqrtKernel, TB_FLOATS) {}
TB_KERNEL(square, SquareKernel, TB_FLOATS) {}
TB_KERNEL(sin, SinKernel, TB_FLOATS) {}
TB_KERNEL(cos, CosKernel, TB_FLOATS) {}
TB_KERNEL(tanh, TanhKernel, TB_FLOATS) {}
TB_KERNEL(exp, ExpKernel, TB_FLOATS) {}
TB_KERNEL(silu, SiluKernel, TB_FLOATS) {}
TB_KERNEL(relu, ReluKernel, TB_FLOATS) {}
TB_KERNEL(gelu, GeluKernel, TB_FLOATS) {}
TB_KERNEL(rsqrt_grad, RsqrtGradKernel, TB_FLOATS) {}
TB_KERNEL(square_grad, SquareGradKernel, TB_FLOATS) {}
TB_KERNEL(sqrt_grad, SqrtGradKernel, TB_FLOATS) {}
TB_KERNEL(tanh_grad, TanhGradKernel, TB_FLOATS) {}
TB_KERNEL(relu_grad, ReluGradKernel, TB_FLOATS) {}
TB_KERNEL(silu_grad, SiluGradKernel, TB_FLOATS) {}
TB_KERNEL(gelu_grad, GeluGradKernel, TB_FLOATS) {}
TB_KERNEL(add, AddKernel, TB_FLOATS) {}
TB_KERNEL(subtract, SubtractKernel, TB_FLOATS) {}
TB_KERNEL(multiply, MultiplyKernel, TB_FLOATS) {}
TB_KERNEL(divide, DivideKernel, TB_FLOATS) {}
TB_KERNEL(maximum, MaximumKernel, TB_FLOATS) {}
TB_KERNEL(minimum, MinimumKernel, TB_FLOATS) {}
TB_KERNEL(elementwise_pow, ElementwisePowKernel, TB_FLOATS) {}
TB_KERNEL(floor_divide, FloorDivideKernel, int64_t) {}
TB_KERNEL(expand, ExpandKernel, TB_FLOATS) {}
TB_KERNEL(expand_grad, ExpandGradKernel, TB_FLOATS) {}
TB_KERNEL(add_grad, AddGradKernel, TB_FLOATS) {}
TB_KERNEL(subtract_grad, SubtractGradKernel, TB_FLOATS) {}
TB_KERNEL(multiply_grad, MultiplyGradKernel, TB_FLOATS) {}
TB_KERNEL(divide_grad, DivideGradKernel, TB_FLOATS) {}
TB_KERNEL(add_n, AddNKernel, TB_FLOATS) {}
TB_KERNEL(sum, SumKernel, TB_FLOATS) {}
TB_KERNEL(sum_grad, SumGradKernel, TB_FLOATS) {}
TB_KERNEL(mean, MeanKernel, TB_FLOATS) {}
TB_KERNEL(mean_all, MeanAllKernel, TB_FLOATS) {}
TB_KERNEL(mean_grad, MeanGradKernel, TB_FLOATS) {}
TB_KERNEL(squared_l2_norm, SquaredL2NormKernel, TB_FLOATS) {}
TB_KERNEL(reshape, ReshapeKernel, TB_ALL) {}
TB_KERNEL(reshape_grad, ReshapeGradKernel, TB_ALL) {}
TB_KERNEL(flatten, FlattenKernel, TB_ALL) {}
TB_KERNEL(flatten_grad, FlattenGradKernel, TB_ALL) {}
TB_KERNEL(squeeze, SqueezeKernel, TB_ALL) {}
TB_KERNEL(squeeze_grad, SqueezeGradKernel, TB_ALL) {}
TB_KERNEL(unsqueeze, UnsqueezeKernel, TB_ALL) {}
TB_KERNEL(unsqueeze_grad, UnsqueezeGradKernel, TB_ALL) {}
TB_KERNEL(transpose, TransposeKernel, TB_ALL) {}
TB_KERNEL(transpose_grad, TransposeGradKernel, TB_ALL) {}
TB_KERNEL(concat, ConcatKernel, TB_ALL) {}
TB_KERNEL(concat_grad, ConcatGradKernel, TB_ALL) {}
TB_KERNEL(stack, StackKernel, TB_ALL) {}
TB_KERNEL(split, SplitKernel, TB_ALL) {}
TB_KERNEL(split_with_num, SplitWithNumKernel, TB_ALL) {}
TB_KERNEL(slice, SliceKernel, TB_ALL) {}
TB_KERNEL(slice_grad, SliceGradKernel, TB_FLOATS) {}
TB_KERNEL(coalesce_tensor, CoalesceTensorKernel, TB_FLOATS) {}
TB_KERNEL(view_slice, ViewSliceKernel, TB_FLOATS) {}
TB_KERNEL(tile, TileKernel, TB_FLOATS) {}
TB_KERNEL(tile_grad, TileGradKernel, TB_FLOATS) {}
