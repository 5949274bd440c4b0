// Matrix products by cuBLAS in float32, or in bfloat16 with float32 sums. It is declared here, so that its headers need not be installed.
#include <map>
#include <mutex>

#include "kernels.h"
#include "library.h"

namespace tb {
namespace {

using Handle = void*;
constexpr int kRealFloat = 0, kRealBf16 = 14, kCompute32 = 68, kDefaultAlgorithm = -1;  // library_types.h, cublas_api.h
constexpr size_t kWorkspace = size_t{32} << 20;

using Create = int(Handle*);
using SetStream = int(Handle, void*);
using SetWorkspace = int(Handle, void*, size_t);
using Gemm = int(Handle, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, int, int, long long, const void*,
                 void*, int, int, long long, int, int, int);

const Library& cublas() {
  static const Library found("TESTBED_CUBLAS", "libcublas.so.13");
  return found;
}

void must(int status, const char* what) {
  if (status) throw std::runtime_error(std::string("testbed: ") + what + " failed with status " + std::to_string(status));
}

// One handle per stream, each with its own workspace: the library's own would be shared between streams, which would synchronise.
Handle handle_of(Stream stream) {
  static std::mutex mutex;
  static auto* handles = new std::map<Stream, Handle>;
  std::lock_guard<std::mutex> guard(mutex);
  Handle& found = (*handles)[stream];
  if (!found) {
    must(cublas().find<Create>("cublasCreate_v2")(&found), "cublasCreate");
    must(cublas().find<SetStream>("cublasSetStream_v2")(found, stream), "cublasSetStream");
    must(cublas().find<SetWorkspace>("cublasSetWorkspace_v2")(found, device_allocate(kWorkspace), kWorkspace), "cublasSetWorkspace");
  }
  return found;
}

}  // namespace

// Row-major out[m, n] = op(x) op(y) is column-major out^T[n, m] = op(y)^T op(x)^T.
void k_gemm(Stream s, Type type, bool tx, bool ty, int64_t m, int64_t n, int64_t k, const void* x, const void* y, void* out,
            int64_t batch, int64_t step_x, int64_t step_y, int64_t step_out) {
  static Gemm* const gemm = cublas().find<Gemm>("cublasGemmStridedBatchedEx");
  if (type != Type::f32 && type != Type::bf16) throw std::runtime_error("testbed: matmul takes float32 and bfloat16 only");
  Handle handle = handle_of(s);
  Piece piece(s, Work::compute, "gemm");
  const float one = 1, zero = 0;
  int element = type == Type::bf16 ? kRealBf16 : kRealFloat;
  must(gemm(handle, ty, tx, static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &one, y, element, static_cast<int>(ty ? k : n), step_y,
            x, element, static_cast<int>(tx ? m : k), step_x, &zero, out, element, static_cast<int>(n), step_out, static_cast<int>(batch),
            kCompute32, kDefaultAlgorithm),
       "cublasGemmStridedBatchedEx");
}

}  // namespace tb
