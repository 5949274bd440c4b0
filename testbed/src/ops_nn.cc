// Matrix products, normalisation, embedding, loss, optimizers.
#include <algorithm>

#include "op.h"
#include "zoo.h"

namespace tb {
namespace {

// Operands have the kernel's type unless its registration says otherwise; these check the type before they read.
const float* f32(const DenseTensor& tensor) {
  if (tensor.dtype() != DataType::FLOAT32) refuse("an operand", "must be float32");
  return static_cast<const float*>(tensor.data());
}
float* f32(DenseTensor* tensor) { return const_cast<float*>(f32(*tensor)); }
const int64_t* ids_of(const char* name, const DenseTensor& tensor) {
  if (tensor.dtype() != DataType::INT64) refuse(name, "takes int64 indices");
  return static_cast<const int64_t*>(tensor.data());
}
const void* data_of(const Optional& tensor) { return tensor ? tensor->data() : nullptr; }
void* data_of(DenseTensor* tensor) { return tensor ? tensor->data() : nullptr; }

// A matrix product, or a batch of them. A batched x with a single y is one large product.
struct Shape {
  int64_t batch, m, n, k, x_size, y_size;

  Shape(const char* name, const DenseTensor& x, const DenseTensor& y, bool tx, bool ty) {
    Dims a = dims_of(x), b = dims_of(y);
    if (a.size() < 2 || b.size() < 2) refuse(name, "takes matrices only");
    int64_t rows = a[a.size() - 2], cols = a.back();
    batch = product(a, 0, a.size() - 2);
    int64_t other = product(b, 0, b.size() - 2);
    if (other == 1 && batch > 1) {
      if (tx) refuse(name, "a batch of transposed matrices times one matrix");
      rows *= batch, batch = 1;
    }
    if (batch != std::max<int64_t>(other, 1)) refuse(name, "the batches of both operands must be equal");
    m = tx ? cols : rows, k = tx ? rows : cols, n = ty ? b[b.size() - 2] : b.back();
    x_size = rows * cols, y_size = b[b.size() - 2] * b.back();
  }
};

void rows_and_cols(const DenseTensor& x, int axis, size_t* rows, size_t* cols) {
  Dims dims = dims_of(x);
  *rows = product(dims, 0, axis), *cols = product(dims, axis, dims.size());
}

}  // namespace

template <typename T, typename Context>
void MatmulKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, bool tx, bool ty, DenseTensor* out) {
  Op op(c, "matmul", {&x, &y});
  Shape s(op.name, x, y, tx, ty);
  op.out(out, x.dtype());
  k_gemm(op.stream, type_of(x), tx, ty, s.m, s.n, s.k, x.data(), y.data(), out->data(), s.batch, s.x_size, s.y_size, s.m * s.n);
}

template <typename T, typename Context>
void MatmulGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& grad, bool tx, bool ty,
                      DenseTensor* dx, DenseTensor* dy) {
  Op op(c, "matmul_grad", {&x, &y, &grad});
  Shape s(op.name, x, y, tx, ty);
  Type type = type_of(grad);
  int64_t g = s.m * s.n;
  if (dx) {
    op.out(dx, x.dtype());
    if (!tx) k_gemm(op.stream, type, false, !ty, s.m, s.k, s.n, grad.data(), y.data(), dx->data(), s.batch, g, s.y_size, s.x_size);
    else k_gemm(op.stream, type, ty, true, s.k, s.m, s.n, y.data(), grad.data(), dx->data(), s.batch, s.y_size, g, s.x_size);
  }
  if (dy) {
    op.out(dy, y.dtype());
    if (!ty) k_gemm(op.stream, type, !tx, false, s.k, s.n, s.m, x.data(), grad.data(), dy->data(), s.batch, s.x_size, g, s.y_size);
    else k_gemm(op.stream, type, true, tx, s.n, s.k, s.m, grad.data(), x.data(), dy->data(), s.batch, g, s.x_size, s.y_size);
  }
}

template <typename T, typename Context>
void BmmKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  MatmulKernel<T, Context>(c, x, y, false, false, out);
}

template <typename T, typename Context>
void BmmGradKernel(const Context& c, const DenseTensor& x, const DenseTensor& y, const DenseTensor& grad, DenseTensor* dx, DenseTensor* dy) {
  MatmulGradKernel<T, Context>(c, x, y, grad, false, false, dx, dy);
}

template <typename T, typename Context>
void SoftmaxKernel(const Context& c, const DenseTensor& x, int axis, DenseTensor* out) {
  Op op(c, "softmax", {&x});
  Dims dims = dims_of(x);
  if (axis != -1 && axis != static_cast<int>(dims.size()) - 1) refuse(op.name, "over the last axis only");
  op.out(out, x.dtype());
  k_softmax(op.stream, type_of(x), x.data(), out->data(), x.numel() / dims.back(), dims.back());
}

template <typename T, typename Context>
void SoftmaxGradKernel(const Context& c, const DenseTensor& y, const DenseTensor& grad, int, DenseTensor* dx) {
  Op op(c, "softmax_grad", {&y, &grad});
  op.out(dx, y.dtype());
  int64_t cols = dims_of(y).back();
  k_softmax_grad(op.stream, type_of(y), y.data(), grad.data(), dx->data(), y.numel() / cols, cols);
}

template <typename T, typename Context>
void LayerNormKernel(const Context& c, const DenseTensor& x, const Optional& w, const Optional& b, float epsilon, int axis, DenseTensor* y,
                     DenseTensor* mean, DenseTensor* variance) {
  Op op(c, "layer_norm", {&x});
  size_t rows, cols;
  rows_and_cols(x, axis, &rows, &cols);
  if (w) op.reads(*w);
  if (b) op.reads(*b);
  op.out(y, x.dtype()), op.out(mean, DataType::FLOAT32), op.out(variance, DataType::FLOAT32);
  k_layer_norm(op.stream, type_of(x), x.data(), w ? type_of(*w) : Type::f32, data_of(w), data_of(b), y->data(), f32(mean), f32(variance), rows,
               cols, epsilon);
}

template <typename T, typename Context>
void LayerNormGradKernel(const Context& c, const DenseTensor& x, const Optional& w, const Optional& b, const DenseTensor& mean,
                         const DenseTensor& variance, const DenseTensor& grad, float epsilon, int axis, DenseTensor* dx, DenseTensor* dw,
                         DenseTensor* db) {
  Op op(c, "layer_norm_grad", {&x, &mean, &variance, &grad});
  if (w) op.reads(*w);
  size_t rows, cols;
  rows_and_cols(x, axis, &rows, &cols);
  if (dx) op.out(dx, x.dtype());
  if (dw) op.out(dw, w->dtype());
  if (db) op.out(db, b->dtype());
  k_layer_norm_grad(op.stream, type_of(x), x.data(), w ? type_of(*w) : Type::f32, data_of(w), f32(mean), f32(variance), grad.data(), data_of(dx),
                    data_of(dw), data_of(db), rows, cols, epsilon);
}

template <typename T, typename Context>
void EmbeddingKernel(const Context& c, const DenseTensor& ids, const DenseTensor& w, int64_t, DenseTensor* out) {
  Op op(c, "embedding", {&ids, &w});
  op.out(out, w.dtype());
  Dims dims = dims_of(w);
  k_embedding(op.stream, type_of(w), ids_of(op.name, ids), w.data(), out->data(), ids.numel(), dims[0], dims[1]);
}

template <typename T, typename Context>
void EmbeddingGradKernel(const Context& c, const DenseTensor& ids, const DenseTensor& w, const DenseTensor& grad, int64_t, DenseTensor* dw) {
  Op op(c, "embedding_grad", {&ids, &grad});
  op.out(dw, w.dtype());
  Dims dims = dims_of(w);
  k_embedding_grad(op.stream, type_of(w), ids_of(op.name, ids), grad.data(), dw->data(), ids.numel(), dims[0], dims[1]);
}

template <typename T, typename Context>
void CrossEntropyKernel(const Context& c, const DenseTensor& x, const DenseTensor& labels, bool soft, bool use_softmax, bool, int ignored,
                        int axis, DenseTensor* softmax, DenseTensor* loss) {
  Op op(c, "cross_entropy_with_softmax", {&x, &labels});
  Dims dims = dims_of(x);
  bool last = axis == -1 || axis == static_cast<int>(dims.size()) - 1;
  if (soft || !use_softmax || !last) refuse(op.name, "takes hard labels and logits over the last axis only");
  op.out(softmax, x.dtype()), op.out(loss, x.dtype());
  k_cross_entropy(op.stream, f32(x), ids_of(op.name, labels), f32(softmax), f32(loss), x.numel() / dims.back(), dims.back(), ignored);
}

template <typename T, typename Context>
void CrossEntropyGradKernel(const Context& c, const DenseTensor& labels, const DenseTensor& softmax, const DenseTensor& grad, bool, bool, bool,
                            int ignored, int, DenseTensor* dx) {
  Op op(c, "cross_entropy_with_softmax_grad", {&labels, &softmax, &grad});
  op.out(dx, softmax.dtype());
  int64_t cols = dims_of(softmax).back();
  k_cross_entropy_grad(op.stream, f32(softmax), ids_of(op.name, labels), f32(grad), f32(dx), softmax.numel() / cols, cols, ignored);
}

namespace {

// The powers of beta may be in host memory: then they are copied to a small buffer of this stream.
struct Powers {
  const float *first, *second;

  Powers(Op& op, const DenseTensor& one, const DenseTensor& two) : first(f32(one)), second(f32(two)) {
    if (!phi::is_cpu_place(one.place())) return;
    float both[2] = {*first, *second};
    auto* there = static_cast<float*>(op.scratch(sizeof both));
    copy_async(op.stream, there, both, sizeof both, Copy::host_to_device);
    first = there, second = there + 1;
  }
};

void next_power(const phi::CustomContext& c, Op& op, const DenseTensor& power, float beta, DenseTensor* out) {
  if (phi::is_cpu_place(power.place())) {
    float value = *f32(power);
    c.HostAlloc<float>(out)[0] = beta * value;
    return;
  }
  op.out(out, DataType::FLOAT32);
  k_map(op.stream, Map::scale, Type::f32, power.data(), nullptr, out->data(), 1, beta, 0);
}

float* master_of(const char* name, bool wanted, const Optional& master, DenseTensor* out) {
  if (!wanted) return nullptr;
  if (!master || !out || master->data() != out->data()) refuse(name, "the float32 parameter must be updated in place");
  return f32(out);
}

}  // namespace

template <typename T, typename Context>
void AdamwKernel(const Context& c, const DenseTensor& parameter, const DenseTensor& grad, const DenseTensor& rate, const DenseTensor& moment1,
                 const DenseTensor& moment2, const Optional&, const DenseTensor& power1, const DenseTensor& power2, const Optional& master,
                 const Optional& skip, const Scalar& beta1, const Scalar& beta2, const Scalar& epsilon, float rate_ratio, float coefficient,
                 bool decay, bool, int64_t, bool multi_precision, bool global_powers, bool amsgrad, DenseTensor* parameter_out,
                 DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor*, DenseTensor* power1_out, DenseTensor* power2_out,
                 DenseTensor* master_out) {
  Op op(c, "adamw", {&parameter, &grad, &rate, &moment1, &moment2});
  if (amsgrad || skip) refuse(op.name, "neither amsgrad nor skipped updates");
  if (parameter_out->data() != parameter.data() || moment1_out->data() != moment1.data() || moment2_out->data() != moment2.data())
    refuse(op.name, "parameter and moments must be updated in place");
  AdamW how{beta1.to<float>(), beta2.to<float>(), epsilon.to<float>(), coefficient, rate_ratio, decay};
  float* kept = master_of(op.name, multi_precision, master, master_out);
  Powers powers(op, power1, power2);
  k_adamw(op.stream, how, type_of(parameter), parameter_out->data(), kept, type_of(grad), grad.data(), f32(moment1_out), f32(moment2_out),
          f32(rate), powers.first, powers.second, parameter.numel());
  if (global_powers) return;
  next_power(c, op, power1, how.beta1, power1_out);
  next_power(c, op, power2, how.beta2, power2_out);
}

template <typename T, typename Context>
void SgdKernel(const Context& c, const DenseTensor& parameter, const DenseTensor& rate, const DenseTensor& grad, const Optional& master,
               bool multi_precision, DenseTensor* out, DenseTensor* master_out) {
  Op op(c, "sgd", {&parameter, &rate, &grad});
  if (out->data() != parameter.data()) refuse(op.name, "the parameter must be updated in place");
  float* kept = master_of(op.name, multi_precision, master, master_out);
  const void* step = rate.data();
  if (rate.dtype() != DataType::FLOAT32) {  // Paddle passes the rate in the parameter's type
    void* wide = op.scratch(sizeof(float));
    k_cast(op.stream, type_of(rate), step, Type::f32, wide, 1);
    step = wide;
  }
  k_sgd(op.stream, type_of(parameter), out->data(), kept, type_of(grad), grad.data(), static_cast<const float*>(step), parameter.numel());
}

template <typename T, typename Context>
void MomentumKernel(const Context& c, const DenseTensor& parameter, const DenseTensor& grad, const DenseTensor& velocity, const DenseTensor& rate,
                    const Optional& master, float mu, bool nesterov, const std::string& regularization, float decay, bool multi_precision,
                    float rescale, DenseTensor* parameter_out, DenseTensor* velocity_out, DenseTensor* master_out) {
  Op op(c, "momentum", {&parameter, &grad, &velocity, &rate});
  if (parameter_out->data() != parameter.data() || velocity_out->data() != velocity.data())
    refuse(op.name, "parameter and velocity must be updated in place");
  if (!regularization.empty() && regularization != "l2_decay") refuse(op.name, "no regularization " + regularization);
  float* kept = master_of(op.name, multi_precision, master, master_out);
  k_momentum(op.stream, type_of(parameter), parameter_out->data(), kept, type_of(grad), grad.data(), f32(velocity_out), f32(rate), mu,
             regularization.empty() ? 0.f : decay, rescale, nesterov, parameter.numel());
}

template <typename T, typename Context>
void LambKernel(const Context& c, const DenseTensor& parameter, const DenseTensor& grad, const DenseTensor& rate, const DenseTensor& moment1,
                const DenseTensor& moment2, const DenseTensor& power1, const DenseTensor& power2, const Optional& master, const Optional& skip,
                float decay, float beta1, float beta2, float epsilon, bool adapt, bool multi_precision, DenseTensor* parameter_out,
                DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* power1_out, DenseTensor* power2_out, DenseTensor* master_out) {
  Op op(c, "lamb", {&parameter, &grad, &rate, &moment1, &moment2});
  if (skip) refuse(op.name, "no skipped updates");
  if (parameter_out->data() != parameter.data() || moment1_out->data() != moment1.data() || moment2_out->data() != moment2.data())
    refuse(op.name, "parameter and moments must be updated in place");
  float* kept = master_of(op.name, multi_precision, master, master_out);
  Powers powers(op, power1, power2);
  auto* step = static_cast<float*>(op.scratch(parameter.numel() * sizeof(float)));
  k_lamb(op.stream, {beta1, beta2, epsilon, decay, adapt}, type_of(parameter), parameter_out->data(), kept, type_of(grad), grad.data(),
         f32(moment1_out), f32(moment2_out), f32(rate), powers.first, powers.second, step, parameter.numel());
  next_power(c, op, power1, beta1, power1_out);
  next_power(c, op, power2, beta2, power2_out);
}

}  // namespace tb

TB_KERNEL(momentum, MomentumKernel, TB_FLOATS) {
  for (int k : {1, 2}) kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
}
TB_KERNEL(lamb, LambKernel, TB_FLOATS) {
  for (int k : {5, 6}) kernel->InputAt(k).SetBackend(phi::Backend::ALL_BACKEND);
  for (int k : {1, 2, 3, 4, 5}) kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
  for (int k : {3, 4}) kernel->OutputAt(k).SetBackend(phi::Backend::UNDEFINED);
}
TB_KERNEL(matmul, MatmulKernel, TB_FLOATS) {}
TB_KERNEL(matmul_grad, MatmulGradKernel, TB_FLOATS) {}
TB_KERNEL(bmm, BmmKernel, TB_FLOATS) {}
TB_KERNEL(bmm_grad, BmmGradKernel, TB_FLOATS) {}
TB_KERNEL(softmax, SoftmaxKernel, TB_FLOATS) {}
TB_KERNEL(softmax_grad, SoftmaxGradKernel, TB_FLOATS) {}
TB_KERNEL(layer_norm, LayerNormKernel, TB_FLOATS) {
  for (int k : {1, 2}) kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
}
TB_KERNEL(layer_norm_grad, LayerNormGradKernel, TB_FLOATS) {
  for (int k : {1, 2}) kernel->OutputAt(k).SetDataType(phi::DataType::UNDEFINED);
}
TB_KERNEL(embedding, EmbeddingKernel, TB_FLOATS) {}
TB_KERNEL(embedding_grad, EmbeddingGradKernel, TB_FLOATS) {}
TB_KERNEL(cross_entropy_with_softmax, CrossEntropyKernel, float) {}
TB_KERNEL(cross_entropy_with_softmax_grad, CrossEntropyGradKernel, float) {}
TB_KERNEL(adamw, AdamwKernel, TB_FLOATS) {
  for (int k : {6, 7}) kernel->InputAt(k).SetBackend(phi::Backend::ALL_BACKEND);
  for (int k : {1, 2, 4, 5, 6}) kernel->OutputAt(k).SetDataType(phi::DataType::FLOAT32);
  for (int k : {4, 5}) kernel->OutputAt(k).SetBackend(phi::Backend::UNDEFINED);
}
TB_KERNEL(sgd, SgdKernel, TB_FLOATS) { kernel->OutputAt(1).SetDataType(phi::DataType::FLOAT32); }
