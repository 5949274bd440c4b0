// Convolution, pooling, batch norm, dropout, comparison: for models other than transformers.
#include "op.h"
#include "paddle/phi/core/generator.h"
#include "zoo.h"

namespace tb {
namespace {

void check_layout(const char* name, const std::string& layout) {
  if (layout != "NCHW" && layout != "AnyLayout" && layout != "NCL" && layout != "NCDHW" && layout != "NC") refuse(name, "takes the layout NCHW, and not " + layout);
}
void check_padding(const char* name, const std::string& algorithm) {
  if (algorithm != "EXPLICIT") refuse(name, "takes explicit paddings, and not " + algorithm);
}

const float* f32(const char* name, const DenseTensor& tensor) {
  if (tensor.dtype() != DataType::FLOAT32) refuse(name, "scale, bias and statistics must be float32");
  return static_cast<const float*>(tensor.data());
}
const float* f32(const char* name, const Optional& tensor) { return tensor ? f32(name, *tensor) : nullptr; }
float* room(Op& op, DenseTensor* tensor) { return tensor ? static_cast<float*>(op.out(tensor, DataType::FLOAT32)) : nullptr; }

// Paddings are one per dimension, or two, before and after. The window needs only the first; the result's size already includes both.
int64_t front(const std::vector<int64_t>& paddings, size_t dim) { return paddings.size() == 4 ? paddings[2 * dim] : paddings[dim]; }

Window2d window(const char* name, const DenseTensor& x, const DenseTensor& y, const Dims& kernel, const Dims& steps, const Dims& paddings) {
  Dims in = dims_of(x), out = dims_of(y);
  if (in.size() != 4 || out.size() != 4) refuse(name, "takes pictures of four dimensions");
  return {in[0], in[1], in[2], in[3], out[1], out[2], out[3], kernel[0], kernel[1], steps[0], steps[1], front(paddings, 0), front(paddings, 1), 1, 1, 1};
}

Window2d convolution(const char* name, const DenseTensor& x, const DenseTensor& w, const DenseTensor& y, const std::vector<int>& steps,
                     const std::vector<int>& paddings, const std::string& algorithm, const std::vector<int>& dilations, int groups,
                     const std::string& layout) {
  check_layout(name, layout), check_padding(name, algorithm);
  Dims filter = dims_of(w);
  Window2d at = window(name, x, y, {filter[2], filter[3]}, Dims(steps.begin(), steps.end()), Dims(paddings.begin(), paddings.end()));
  at.spread_y = dilations[0], at.spread_x = dilations[1], at.groups = groups;
  return at;
}

Window2d pooling(const char* name, const DenseTensor& x, const DenseTensor& y, const IntArray& kernel, const Dims& steps, const Dims& paddings,
                 const std::string& layout, bool global, const std::string& algorithm) {
  check_layout(name, layout), check_padding(name, algorithm);
  Dims in = dims_of(x);
  Dims size = global ? Dims{in[2], in[3]} : kernel.GetData();
  return window(name, x, y, size, steps, global ? Dims{0, 0} : paddings);
}

Pool2d pooled(const char* name, const std::string& type, bool exclusive, bool adaptive) {
  if (type != "max" && type != "avg") refuse(name, "takes the largest value or the mean, and not " + type);
  return {type == "max", exclusive, adaptive};
}

BatchNorm normed(const char* name, const DenseTensor& x, float momentum, float epsilon, const std::string& layout, bool known) {
  check_layout(name, layout);
  Dims dims = dims_of(x);
  return {static_cast<size_t>(dims[0]), static_cast<size_t>(dims[1]), static_cast<size_t>(product(dims, 2, dims.size())), momentum, epsilon, known};
}

uint64_t next_seed(const phi::CustomContext& c, bool fixed, int seed) {
  if (fixed) return seed;
  auto drawn = phi::DefaultCustomDeviceGenerator(phi::CustomPlace("testbed", c.GetPlace().GetDeviceId()))->IncrementOffset(1);
  return drawn.first * 0x9e3779b97f4a7c15ULL + drawn.second;
}

float kept_factor(const std::string& mode, float probability, bool is_test) {
  bool upscale = mode == "upscale_in_train";
  if (is_test) return upscale ? 1.f : 1.f - probability;
  return upscale ? (probability < 1.f ? 1.f / (1.f - probability) : 0.f) : 1.f;
}

}  // namespace

template <typename T, typename Context>
void ConvKernel(const Context& c, const DenseTensor& x, const DenseTensor& w, const std::vector<int>& steps, const std::vector<int>& paddings,
                const std::string& algorithm, const std::vector<int>& dilations, int groups, const std::string& layout, DenseTensor* y) {
  Op op(c, "conv2d", {&x, &w});
  op.out(y, x.dtype());
  k_conv(op.stream, type_of(x), convolution(op.name, x, w, *y, steps, paddings, algorithm, dilations, groups, layout), x.data(), w.data(), y->data());
}

template <typename T, typename Context>
void ConvGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& w, const DenseTensor& dy, const std::vector<int>& steps,
                    const std::vector<int>& paddings, const std::string& algorithm, const std::vector<int>& dilations, int groups,
                    const std::string& layout, DenseTensor* dx, DenseTensor* dw) {
  Op op(c, "conv2d_grad", {&x, &w, &dy});
  Window2d at = convolution(op.name, x, w, dy, steps, paddings, algorithm, dilations, groups, layout);
  if (dx) k_conv_grad_x(op.stream, type_of(x), at, w.data(), dy.data(), op.out(dx, x.dtype()));
  if (dw) k_conv_grad_w(op.stream, type_of(x), at, x.data(), dy.data(), op.out(dw, w.dtype()));
}

template <typename T, typename Context>
void PoolKernel(const Context& c, const DenseTensor& x, const IntArray& kernel, const std::vector<int64_t>& steps,
                const std::vector<int64_t>& paddings, bool, bool exclusive, const std::string& layout, const std::string& type, bool global,
                bool adaptive, const std::string& algorithm, DenseTensor* y) {
  Op op(c, "pool2d", {&x});
  op.out(y, x.dtype());
  k_pool(op.stream, type_of(x), pooling(op.name, x, *y, kernel, steps, paddings, layout, global, algorithm),
         pooled(op.name, type, exclusive, adaptive), x.data(), y->data());
}

template <typename T, typename Context>
void PoolGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& dy, const IntArray& kernel,
                    const std::vector<int64_t>& steps, const std::vector<int64_t>& paddings, bool, bool exclusive, const std::string& layout,
                    const std::string& type, bool global, bool adaptive, const std::string& algorithm, DenseTensor* dx) {
  Op op(c, "pool2d_grad", {&x, &y, &dy});
  op.out(dx, x.dtype());
  k_pool_grad(op.stream, type_of(x), pooling(op.name, x, y, kernel, steps, paddings, layout, global, algorithm),
              pooled(op.name, type, exclusive, adaptive), x.data(), y.data(), dy.data(), dx->data());
}

template <typename T, typename Context>
void BatchNormKernel(const Context& c, const DenseTensor& x, const DenseTensor& mean, const DenseTensor& variance, const Optional& scale,
                     const Optional& bias, bool is_test, float momentum, float epsilon, const std::string& layout, bool use_global, bool trainable,
                     DenseTensor* y, DenseTensor* mean_out, DenseTensor* variance_out, DenseTensor* saved_mean, DenseTensor* saved_scale,
                     DenseTensor* reserved) {
  Op op(c, "batch_norm", {&x, &mean, &variance});
  if (mean_out->data() != mean.data() || variance_out->data() != variance.data()) refuse(op.name, "running statistics must be updated in place");
  if (scale) op.reads(*scale);
  if (bias) op.reads(*bias);
  bool known = use_global || (is_test && !trainable);
  op.out(y, x.dtype());
  if (reserved) reserved->Resize({0}), op.out(reserved, DataType::UINT8);
  k_batch_norm(op.stream, type_of(x), normed(op.name, x, momentum, epsilon, layout, known), x.data(), f32(op.name, scale), f32(op.name, bias), y->data(),
               room(op, mean_out), room(op, variance_out), room(op, saved_mean), room(op, saved_scale));
}

template <typename T, typename Context>
void BatchNormGradKernel(const Context& c, const DenseTensor& x, const Optional& scale, const Optional& bias, const Optional& mean,
                         const Optional& variance, const DenseTensor& saved_mean, const DenseTensor& saved_scale, const Optional&,
                         const DenseTensor& dy, float momentum, float epsilon, const std::string& layout, bool is_test, bool use_global,
                         bool trainable, DenseTensor* dx, DenseTensor* dscale, DenseTensor* dbias) {
  Op op(c, "batch_norm_grad", {&x, &saved_mean, &saved_scale, &dy});
  bool known = use_global || (is_test && !trainable);
  if (known && (!mean || !variance)) refuse(op.name, "needs the running statistics that forward used");
  for (const Optional* each : {&scale, &bias, &mean, &variance})
    if (*each) op.reads(**each);
  void* made = dx ? op.out(dx, x.dtype()) : nullptr;
  k_batch_norm_grad(op.stream, type_of(x), normed(op.name, x, momentum, epsilon, layout, known), x.data(), f32(op.name, scale), f32(op.name, mean),
                    f32(op.name, variance), f32(op.name, saved_mean), f32(op.name, saved_scale), dy.data(), made, room(op, dscale), room(op, dbias));
}

template <typename T, typename Context>
void DropoutKernel(const Context& c, const DenseTensor& x, const Optional& seed_tensor, const Scalar& p, bool is_test, const std::string& mode,
                   int seed, bool fixed, DenseTensor* y, DenseTensor* mask) {
  Op op(c, "dropout", {&x});
  if (seed_tensor) refuse(op.name, "takes its seed as a number");
  float probability = p.to<float>(), factor = kept_factor(mode, probability, is_test);
  op.out(y, x.dtype());
  if (is_test) return k_map(op.stream, Map::scale, type_of(x), x.data(), nullptr, y->data(), x.numel(), factor, 0);
  auto* kept = static_cast<uint8_t*>(op.out(mask, DataType::UINT8));
  k_dropout(op.stream, type_of(x), x.data(), y->data(), kept, x.numel(), next_seed(c, fixed, seed), probability, factor);
}

template <typename T, typename Context>
void DropoutGradKernel(const Context& c, const DenseTensor& mask, const DenseTensor& dy, const Scalar& p, bool is_test, const std::string& mode,
                       DenseTensor* dx) {
  Op op(c, "dropout_grad", {&mask, &dy});
  if (is_test) refuse(op.name, "has no gradient where nothing is dropped");
  op.out(dx, dy.dtype());
  k_dropout_grad(op.stream, type_of(dy), dy.data(), static_cast<const uint8_t*>(mask.data()), dx->data(), dy.numel(),
                 kept_factor(mode, p.to<float>(), is_test));
}

namespace {

void compared(const phi::CustomContext& c, const char* name, Order order, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  Op op(c, name, {&x, &y});
  if (x.dtype() != y.dtype()) refuse(name, "both operands must have one element type");
  auto whole = [&](const DenseTensor& from) -> const void* {  // broadcast to the result's shape
    if (from.numel() == out->numel()) return from.data();
    void* made = op.scratch(out->numel() * phi::SizeOf(from.dtype()));
    spread_to(op, from, dims_of(*out), made);
    return made;
  };
  const void *left = whole(x), *right = y.numel() == 1 ? y.data() : whole(y);
  auto* made = static_cast<uint8_t*>(op.out(out, DataType::BOOL));
  k_compare(op.stream, order, type_of(x), left, right, y.numel() == 1, made, out->numel());
}

}  // namespace

#define TB_COMPARISON(Name, name)                                                                                         \
  template <typename T, typename Context>                                                                                 \
  void Name##Kernel(const Context& c, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {                    \
    compared(c, #name, Order::name, x, y, out);                                                                           \
  }
TB_COMPARISON(Less, less)
TB_COMPARISON(LessEqual, less_equal)
TB_COMPARISON(Greater, greater)
TB_COMPARISON(GreaterEqual, greater_equal)
TB_COMPARISON(Equal, equal)
TB_COMPARISON(NotEqual, not_equal)
#undef TB_COMPARISON

template <typename T, typename Context>
void ArgMaxKernel(const Context& c, const DenseTensor& x, const Scalar& axis, bool, bool flatten, DataType type, DenseTensor* out) {
  Op op(c, "argmax", {&x});
  Dims dims = dims_of(x);
  int64_t at = axis.to<int64_t>();
  if (type != DataType::INT64 || flatten || (at != -1 && at != static_cast<int64_t>(dims.size()) - 1)) refuse(op.name, "over the last axis, into int64");
  auto* made = static_cast<int64_t*>(op.out(out, DataType::INT64));
  k_argmax(op.stream, type_of(x), x.data(), made, x.numel() / dims.back(), dims.back());
}

template <typename T, typename Context>
void CumsumKernel(const Context& c, const DenseTensor& x, const Scalar& axis, bool flatten, bool exclusive, bool reverse, DenseTensor* out) {
  Op op(c, "cumsum", {&x});
  if (flatten || exclusive || reverse) refuse(op.name, "of a value and those before it, along one axis");
  Dims dims = dims_of(x);
  int64_t at = axis.to<int64_t>() + (axis.to<int64_t>() < 0 ? dims.size() : 0);
  op.out(out, x.dtype());
  k_cumsum(op.stream, type_of(x), x.data(), out->data(), product(dims, 0, at), dims[at], product(dims, at + 1, dims.size()));
}

template <typename T, typename Context>
void OneHotKernel(const Context& c, const DenseTensor& x, const Scalar& classes, DenseTensor* out) {
  Op op(c, "one_hot", {&x});
  auto* made = static_cast<float*>(op.out(out, DataType::FLOAT32));
  k_one_hot(op.stream, static_cast<const int64_t*>(x.data()), made, x.numel(), classes.to<int64_t>());
}

}  // namespace tb

TB_KERNEL(argmax, ArgMaxKernel, TB_FLOATS) { kernel->OutputAt(0).SetDataType(phi::DataType::UNDEFINED); }
TB_KERNEL(cumsum, CumsumKernel, TB_FLOATS) {}
TB_KERNEL(one_hot, OneHotKernel, int64_t) { kernel->OutputAt(0).SetDataType(phi::DataType::FLOAT32); }
TB_KERNEL(conv2d, ConvKernel, TB_FLOATS) {}
TB_KERNEL(conv2d_grad, ConvGradKernel, TB_FLOATS) {}
TB_KERNEL(pool2d, PoolKernel, TB_FLOATS) {}
TB_KERNEL(pool2d_grad, PoolGradKernel, TB_FLOATS) {}
TB_KERNEL(batch_norm, BatchNormKernel, TB_FLOATS) {
  for (int k : {1, 2, 3, 4}) kernel->InputAt(k).SetDataType(phi::DataType::FLOAT32), kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
  kernel->OutputAt(5).SetDataType(phi::DataType::UINT8);
}
TB_KERNEL(batch_norm_grad, BatchNormGradKernel, TB_FLOATS) {
  for (int k : {1, 2}) kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
}
TB_KERNEL(dropout, DropoutKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::UINT8); }
TB_KERNEL(dropout_grad, DropoutGradKernel, TB_FLOATS) { kernel->InputAt(0).SetDataType(phi::DataType::UINT8); }

#define TB_COMPARED float, int64_t, phi::dtype::bfloat16
TB_KERNEL(less_than, LessKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
TB_KERNEL(less_equal, LessEqualKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
TB_KERNEL(greater_than, GreaterKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
TB_KERNEL(greater_equal, GreaterEqualKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
TB_KERNEL(equal, EqualKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
TB_KERNEL(not_equal, NotEqualKernel, TB_COMPARED) { kernel->OutputAt(0).SetDataType(phi::DataType::BOOL); }
