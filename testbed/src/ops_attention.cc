// Paddle's flash attention operators: [batch, sequence, heads, size], without dropout, and without masks except the causal one.
#include <cmath>

#include "attention.h"
#include "op.h"

namespace tb {
namespace {

Attention shape_of(const char* name, const DenseTensor& q, const DenseTensor& k, float dropout, bool masked, bool causal) {
  if (dropout != 0 || masked) refuse(name, "takes neither dropout nor a mask");
  Dims a = dims_of(q), b = dims_of(k);
  if (a.size() != 4 || b.size() != 4 || a[2] % b[2]) refuse(name, "takes [batch, sequence, heads, size], heads a multiple of the keys' heads");
  if (causal && a[1] != b[1]) refuse(name, "takes as many queries as keys where it is causal");
  return {a[0], a[1], b[1], a[2], b[2], a[3], 1.f / std::sqrt(static_cast<float>(a[3])), causal};
}

}  // namespace

template <typename T, typename Context>
void FlashAttnKernel(const Context& c, const DenseTensor& q, const DenseTensor& k, const DenseTensor& v, const Optional&, const Optional& mask,
                     float dropout, bool causal, bool return_softmax, bool, const std::string&, DenseTensor* out, DenseTensor* softmax,
                     DenseTensor* lse, DenseTensor* seed) {
  Op op(c, "flash_attn", {&q, &k, &v});
  Attention shape = shape_of(op.name, q, k, dropout, static_cast<bool>(mask), causal);
  if (return_softmax) refuse(op.name, "gives no softmax");
  lse->Resize(common::make_ddim({shape.batch, shape.heads, shape.queries}));
  op.out(out, q.dtype()), op.out(lse, DataType::FLOAT32);
  if (seed) {  // no random number is drawn, but the gradient operator needs it as an operand
    seed->Resize(common::make_ddim({2}));
    op.out(seed, DataType::INT64);
    k_fill(op.stream, Type::i64, seed->data(), 2, 0);
  }
  k_attention(op.stream, type_of(q), shape, q.data(), k.data(), v.data(), out->data(), static_cast<float*>(lse->data()),
              [&](size_t size) { return op.scratch(size); });
}

template <typename T, typename Context>
void FlashAttnGradKernel(const Context& c, const DenseTensor& q, const DenseTensor& k, const DenseTensor& v, const DenseTensor& out,
                         const DenseTensor& lse, const DenseTensor&, const Optional& mask, const DenseTensor& grad, float dropout, bool causal,
                         DenseTensor* dq, DenseTensor* dk, DenseTensor* dv) {
  Op op(c, "flash_attn_grad", {&q, &k, &v, &out, &lse, &grad});
  Attention shape = shape_of(op.name, q, k, dropout, static_cast<bool>(mask), causal);
  DenseTensor* given[3] = {dq, dk, dv};
  const DenseTensor* like[3] = {&q, &k, &v};
  void* places[3];
  for (int each = 0; each < 3; ++each)
    places[each] = given[each] ? op.out(given[each], like[each]->dtype()) : op.scratch(bytes_of(*like[each]));
  k_attention_grad(op.stream, type_of(q), shape, q.data(), k.data(), v.data(), out.data(), static_cast<const float*>(lse.data()), grad.data(),
                   places[0], places[1], places[2], [&](size_t size) { return op.scratch(size); });
}

}  // namespace tb

TB_KERNEL(flash_attn, FlashAttnKernel, TB_FLOATS) {
  kernel->OutputAt(2).SetDataType(phi::DataType::FLOAT32);
  kernel->OutputAt(3).SetDataType(phi::DataType::INT64);
}
TB_KERNEL(flash_attn_grad, FlashAttnGradKernel, TB_FLOATS) {}
