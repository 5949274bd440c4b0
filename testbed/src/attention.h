// Attention on [batch, sequence, heads, size]: a plain loop with host threads (attention.cc), cuDNN with CUDA (attention_cudnn.cc).
#pragma once
#include <functional>

#include "kernels.h"

namespace tb {

struct Attention {
  int64_t batch, queries, keys, heads, kv_heads, size;
  float scale;
  bool causal;
  bool operator<(const Attention& other) const;
};
using Scratch = std::function<void*(size_t)>;

// `lse` is the logarithm of each row's sum of exponentials: float32, [batch, heads, queries].
void k_attention(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, void* out, float* lse,
                 const Scratch& scratch);
void k_attention_grad(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, const void* out,
                      const float* lse, const void* dout, void* dq, void* dk, void* dv, const Scratch& scratch);

}  // namespace tb
