// Paddle's fused operators: rms_norm, swiglu, rotary embedding.
#include "fused.h"
#include "op.h"

namespace tb {
namespace {

const void* data_of(const Optional& tensor) { return tensor ? tensor->data() : nullptr; }
void* data_of(DenseTensor* tensor) { return tensor ? tensor->data() : nullptr; }
size_t width_of(const DenseTensor& x, size_t num_dims) {
  Dims dims = dims_of(x);
  return product(dims, dims.size() - num_dims, dims.size());
}

void rms_norm(const phi::CustomContext& c, const char* name, const DenseTensor& x, const DenseTensor* w, size_t num_dims, double epsilon,
              DenseTensor* y, DenseTensor* inverse) {
  Op op(c, name, {&x, w});
  size_t cols = width_of(x, num_dims);
  op.out(y, x.dtype()), op.out(inverse, DataType::FLOAT32);
  k_rms_norm(op.stream, type_of(x), x.data(), w ? type_of(*w) : Type::f32, w ? w->data() : nullptr, y->data(),
             static_cast<float*>(inverse->data()), x.numel() / cols, cols, static_cast<float>(epsilon));
}

void rms_norm_grad(const phi::CustomContext& c, const char* name, const DenseTensor& x, const DenseTensor* w, const DenseTensor& inverse,
                   const DenseTensor& grad, size_t num_dims, DenseTensor* dx, DenseTensor* dw) {
  Op op(c, name, {&x, w, &inverse, &grad});
  if (inverse.dtype() != DataType::FLOAT32 || grad.dtype() != x.dtype()) refuse(name, "takes a gradient of the operand's type, and float32 means");
  size_t cols = width_of(x, num_dims);
  if (dx) op.out(dx, x.dtype());
  if (dw) op.out(dw, w->dtype());
  k_rms_norm_grad(op.stream, type_of(x), x.data(), w ? type_of(*w) : Type::f32, w ? w->data() : nullptr,
                  static_cast<const float*>(inverse.data()), grad.data(), data_of(dx), data_of(dw), x.numel() / cols, cols);
}

const DenseTensor* given(const Optional& tensor) { return tensor ? tensor.get_ptr() : nullptr; }

}  // namespace

template <typename T, typename Context>
void RmsNormKernel(const Context& c, const DenseTensor& x, const Optional& w, const Dims& shape, double epsilon, DenseTensor* y,
                   DenseTensor* inverse) {
  rms_norm(c, "rms_norm", x, given(w), std::max<size_t>(shape.size(), 1), epsilon, y, inverse);
}

template <typename T, typename Context>
void RmsNormGradKernel(const Context& c, const DenseTensor& x, const Optional& w, const DenseTensor& inverse, const DenseTensor& grad,
                       const Dims& shape, double, DenseTensor* dx, DenseTensor* dw) {
  rms_norm_grad(c, "rms_norm_grad", x, given(w), inverse, grad, std::max<size_t>(shape.size(), 1), dx, dw);
}

template <typename T, typename Context>
void FastRmsNormKernel(const Context& c, const DenseTensor& x, const DenseTensor& w, float epsilon, DenseTensor* y, DenseTensor* inverse) {
  rms_norm(c, "fast_rms_norm", x, &w, 1, epsilon, y, inverse);
}

template <typename T, typename Context>
void FastRmsNormGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& w, const DenseTensor& inverse, const DenseTensor& grad,
                           float, DenseTensor* dx, DenseTensor* dw) {
  rms_norm_grad(c, "fast_rms_norm_grad", x, &w, inverse, grad, 1, dx, dw);
}

template <typename T, typename Context>
void SwigluKernel(const Context& c, const DenseTensor& x, const Optional& y, DenseTensor* out) {
  Op op(c, "swiglu", {&x});
  if (y) op.reads(*y);
  op.out(out, x.dtype());
  size_t cols = dims_of(*out).back();
  k_swiglu(op.stream, type_of(x), x.data(), data_of(y), out->data(), out->numel() / cols, cols);
}

template <typename T, typename Context>
void SwigluGradKernel(const Context& c, const DenseTensor& x, const Optional& y, const DenseTensor& grad, DenseTensor* dx, DenseTensor* dy) {
  Op op(c, "swiglu_grad", {&x, &grad});
  if (y) op.reads(*y);
  if (dx) op.out(dx, x.dtype());
  if (y && dy) op.out(dy, y->dtype());
  size_t cols = dims_of(grad).back();
  k_swiglu_grad(op.stream, type_of(x), x.data(), data_of(y), grad.data(), data_of(dx), y ? data_of(dy) : nullptr, grad.numel() / cols, cols);
}

namespace {

void rotate(const phi::CustomContext& c, const char* name, const Optional& sines, const Optional& cosines, const Optional& positions,
            std::initializer_list<std::pair<const DenseTensor*, DenseTensor*>> tensors, bool adjacent, bool seq_first, bool back) {
  Op op(c, name, {});
  if (!sines || !cosines || positions) refuse(name, "takes sines and cosines, and no position ids");
  op.reads(*sines), op.reads(*cosines);
  for (auto [x, out] : tensors) {
    if (!x || !out) continue;
    op.reads(*x);
    op.out(out, x->dtype());
    Dims dims = dims_of(*x);
    Rotary shape{static_cast<size_t>(dims[seq_first ? 1 : 0]), static_cast<size_t>(dims[seq_first ? 0 : 1]), static_cast<size_t>(dims[2]),
                 static_cast<size_t>(dims[3]), seq_first, adjacent};
    if (sines->dtype() != x->dtype() || cosines->dtype() != x->dtype()) refuse(name, "sines and cosines must have the tensor's type");
    if (static_cast<size_t>(sines->numel()) != shape.seq * shape.size || sines->numel() != cosines->numel())
      refuse(name, "takes a sine and a cosine for each position and element");
    k_rotary(op.stream, type_of(*x), x->data(), sines->data(), cosines->data(), out->data(), shape, back);
  }
}

}  // namespace

template <typename T, typename Context>
void RotaryKernel(const Context& c, const DenseTensor& q, const Optional& k, const Optional& v, const Optional& sines,
                  const Optional& cosines, const Optional& positions, bool adjacent, bool seq_first, float, DenseTensor* out_q,
                  DenseTensor* out_k, DenseTensor* out_v) {
  rotate(c, "fused_rotary_position_embedding", sines, cosines, positions, {{&q, out_q}, {given(k), out_k}, {given(v), out_v}}, adjacent,
         seq_first, false);
}

template <typename T, typename Context>
void RotaryGradKernel(const Context& c, const Optional& sines, const Optional& cosines, const Optional& positions, const DenseTensor& q,
                      const Optional& k, const Optional& v, bool adjacent, bool seq_first, float, DenseTensor* dq, DenseTensor* dk,
                      DenseTensor* dv) {
  rotate(c, "fused_rotary_position_embedding_grad", sines, cosines, positions, {{&q, dq}, {given(k), dk}, {given(v), dv}}, adjacent,
         seq_first, true);
}

}  // namespace tb

TB_KERNEL(rms_norm, RmsNormKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::FLOAT32); }
TB_KERNEL(rms_norm_grad, RmsNormGradKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::UNDEFINED); }
TB_KERNEL(fast_rms_norm, FastRmsNormKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::FLOAT32); }
TB_KERNEL(fast_rms_norm_grad, FastRmsNormGradKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::UNDEFINED); }
TB_KERNEL(swiglu, SwigluKernel, TB_FLOATS) {}
TB_KERNEL(swiglu_grad, SwigluGradKernel, TB_FLOATS) {}
TB_KERNEL(fused_rotary_position_embedding, RotaryKernel, TB_FLOATS) {}
TB_KERNEL(fused_rotary_position_embedding_grad, RotaryGradKernel, TB_FLOATS) {}
