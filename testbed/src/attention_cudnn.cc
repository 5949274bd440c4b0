// Flash attention in bfloat16 by cuDNN's graph interface. The library is loaded at run time; the build needs its headers and NVIDIA's
// cudnn-frontend (headers only). Backward uses the deterministic algorithm: every run gives the same bits.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "attention.h"
#include "library.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace tb {

bool Attention::operator<(const Attention& o) const {
  return std::tie(batch, queries, keys, heads, kv_heads, size, scale, causal) <
         std::tie(o.batch, o.queries, o.keys, o.heads, o.kv_heads, o.size, o.scale, o.causal);
}

namespace {

namespace fe = cudnn_frontend;
using Graph = std::shared_ptr<fe::graph::Graph>;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
enum Uid : int64_t { kQ = 1, kK, kV, kOut, kLse, kDout, kDq, kDk, kDv };

void must(fe::error_t error, const char* what) {
  if (error.is_bad()) throw std::runtime_error(std::string("testbed: cuDNN attention, ") + what + ": " + error.get_message());
}

struct Cudnn {
  std::mutex mutex;
  std::map<Stream, cudnnHandle_t> handles;
  std::map<std::pair<bool, Attention>, Graph> graphs;

  Cudnn() {
    const char* given = getenv("TESTBED_CUDNN");
    fe::cudnn_dlhandle = dlopen(given ? given : "libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
    if (!fe::cudnn_dlhandle) throw std::runtime_error(std::string("testbed: ") + dlerror() + "; set TESTBED_CUDNN to its path");
  }
  cudnnHandle_t handle(Stream stream) {
    cudnnHandle_t& found = handles[stream];
    if (!found && (fe::detail::create_handle(&found) != CUDNN_STATUS_SUCCESS ||
                   fe::detail::set_stream(found, static_cast<cudaStream_t>(stream)) != CUDNN_STATUS_SUCCESS))
      throw std::runtime_error("testbed: no cuDNN handle");
    return found;
  }
};
Cudnn& cudnn() { static auto* made = new Cudnn; return *made; }

// Dimensions in cuDNN's order, [batch, heads, rows, size]; in memory the order is [batch, rows, heads, size].
fe::graph::Tensor_attributes laid_out(Uid uid, int64_t batch, int64_t heads, int64_t rows, int64_t size) {
  return fe::graph::Tensor_attributes()
      .set_uid(uid)
      .set_dim({batch, heads, rows, size})
      .set_stride({rows * heads * size, size, heads * size, 1})
      .set_data_type(fe::DataType_t::BFLOAT16);
}
void is_output(Tensor tensor, const fe::graph::Tensor_attributes& like) {
  tensor->set_output(true).set_uid(like.get_uid()).set_dim(like.get_dim()).set_stride(like.get_stride()).set_data_type(like.get_data_type());
}

struct Parts {
  fe::graph::Tensor_attributes q, k, v, out, lse, dout;
  explicit Parts(const Attention& a)
      : q(laid_out(kQ, a.batch, a.heads, a.queries, a.size)), k(laid_out(kK, a.batch, a.kv_heads, a.keys, a.size)),
        v(laid_out(kV, a.batch, a.kv_heads, a.keys, a.size)), out(laid_out(kOut, a.batch, a.heads, a.queries, a.size)),
        dout(laid_out(kDout, a.batch, a.heads, a.queries, a.size)) {
    lse.set_uid(kLse).set_dim({a.batch, a.heads, a.queries, 1}).set_stride({a.heads * a.queries, a.queries, 1, 1});
    lse.set_data_type(fe::DataType_t::FLOAT);
  }
};

Graph empty_graph() {
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(fe::DataType_t::BFLOAT16);
  graph->set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

Graph forward_graph(const Attention& a, cudnnHandle_t handle) {
  Parts parts(a);
  Graph graph = empty_graph();
  auto how = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true).set_causal_mask(a.causal).set_attn_scale(a.scale);
  auto [out, lse] = graph->sdpa(graph->tensor(parts.q), graph->tensor(parts.k), graph->tensor(parts.v), how);
  is_output(out, parts.out);
  is_output(lse, parts.lse);
  must(graph->build(handle, {fe::HeurMode_t::A}), "forward");
  return graph;
}

Graph backward_graph(const Attention& a, cudnnHandle_t handle) {
  Parts parts(a);
  Graph graph = empty_graph();
  auto how = fe::graph::SDPA_backward_attributes().set_name("attention_grad").set_causal_mask(a.causal).set_attn_scale(a.scale);
  how.set_deterministic_algorithm(true);
  auto [dq, dk, dv] = graph->sdpa_backward(graph->tensor(parts.q), graph->tensor(parts.k), graph->tensor(parts.v), graph->tensor(parts.out),
                                           graph->tensor(parts.dout), graph->tensor(parts.lse), how);
  is_output(dq, laid_out(kDq, a.batch, a.heads, a.queries, a.size));
  is_output(dk, laid_out(kDk, a.batch, a.kv_heads, a.keys, a.size));
  is_output(dv, laid_out(kDv, a.batch, a.kv_heads, a.keys, a.size));
  must(graph->build(handle, {fe::HeurMode_t::A}), "deterministic backward");
  return graph;
}

void run(Stream s, Type type, const Attention& shape, bool grad, std::unordered_map<int64_t, void*> pointers, const Scratch& scratch) {
  if (type != Type::bf16) throw std::runtime_error("testbed: attention takes bfloat16 only on CUDA");
  std::lock_guard<std::mutex> guard(cudnn().mutex);
  cudnnHandle_t handle = cudnn().handle(s);
  Graph& graph = cudnn().graphs[{grad, shape}];
  if (!graph) graph = grad ? backward_graph(shape, handle) : forward_graph(shape, handle);
  int64_t size = graph->get_workspace_size();
  void* workspace = size > 0 ? scratch(static_cast<size_t>(size)) : nullptr;
  Piece piece(s, Work::compute, grad ? "attention_grad" : "attention");
  must(graph->execute(handle, pointers, workspace), "execution");
}

void* any(const void* address) { return const_cast<void*>(address); }

}  // namespace

void k_attention(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, void* out, float* lse,
                 const Scratch& scratch) {
  run(s, type, shape, false, {{kQ, any(q)}, {kK, any(k)}, {kV, any(v)}, {kOut, out}, {kLse, lse}}, scratch);
}

void k_attention_grad(Stream s, Type type, const Attention& shape, const void* q, const void* k, const void* v, const void* out,
                      const float* lse, const void* dout, void* dq, void* dk, void* dv, const Scratch& scratch) {
  run(s, type, shape, true,
      {{kQ, any(q)}, {kK, any(k)}, {kV, any(v)}, {kOut, any(out)}, {kLse, any(lse)}, {kDout, any(dout)}, {kDq, dq}, {kDk, dk}, {kDv, dv}},
      scratch);
}

}  // namespace tb
