// Stands in for libcublasLt: descriptions of products, and products that take their time.
#include <cstring>

#include "cost.h"
#include "cuda_api.h"
#include "machine.h"

namespace {

constexpr int kSuccess = 0;

struct Description {
  int compute, transpose_a, transpose_b;
};
struct Layout {
  int type, batch;
  std::uint64_t rows, columns;
};
// cublasLtMatmulHeuristicResult_t
struct Heuristic {
  std::uint64_t algorithm[8];
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
enum DescriptionAttribute { kTransposeA = 3, kTransposeB = 4 };
enum LayoutAttribute { kType = 0, kRows = 2, kColumns = 3, kBatch = 5 };

struct Element {
  double speed, bytes;
};
Element element(int type, int compute) {
  const vgpu::Machine& m = vgpu::machine();
  if (type == 0) return {compute == 77 ? m.flops_tf32 : m.flops_fp32, 4};
  if (type == 1) return {m.flops_fp64, 8};
  if (type == 28 || type == 29 || type == 3) return {m.flops_fp8, 1};
  return {m.flops_half, 2};
}

}  // namespace

VGPU_API std::size_t cublasLtGetVersion() { return 130100; }
VGPU_API std::size_t cublasLtGetCudartVersion() { return 13000; }
VGPU_API int cublasLtCreate(void** handle) {
  static char made;
  *handle = &made;
  return kSuccess;
}
VGPU_API int cublasLtDestroy(void*) { return kSuccess; }

VGPU_API int cublasLtMatmulDescCreate(Description** out, int compute, int) {
  *out = new Description{compute, 0, 0};
  return kSuccess;
}
VGPU_API int cublasLtMatmulDescDestroy(Description* description) {
  delete description;
  return kSuccess;
}
VGPU_API int cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* value,
                                            std::size_t) {
  if (attribute == kTransposeA) std::memcpy(&description->transpose_a, value, sizeof(int));
  if (attribute == kTransposeB) std::memcpy(&description->transpose_b, value, sizeof(int));
  return kSuccess;
}

VGPU_API int cublasLtMatrixLayoutCreate(Layout** out, int type, std::uint64_t rows,
                                        std::uint64_t columns, std::int64_t) {
  *out = new Layout{type, 1, rows, columns};
  return kSuccess;
}
VGPU_API int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return kSuccess;
}
VGPU_API int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value,
                                              std::size_t) {
  if (attribute == kType) std::memcpy(&layout->type, value, sizeof(int));
  if (attribute == kRows) std::memcpy(&layout->rows, value, sizeof(std::uint64_t));
  if (attribute == kColumns) std::memcpy(&layout->columns, value, sizeof(std::uint64_t));
  if (attribute == kBatch) std::memcpy(&layout->batch, value, sizeof(int));
  return kSuccess;
}

VGPU_API int cublasLtMatmulPreferenceCreate(void** out) {
  *out = new char;
  return kSuccess;
}
VGPU_API int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<char*>(preference);
  return kSuccess;
}
VGPU_API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, std::size_t) {
  return kSuccess;
}

VGPU_API int cublasLtMatmulAlgoGetHeuristic(void*, Description*, Layout*, Layout*, Layout*, Layout*,
                                            void*, int, Heuristic* result, int* found) {
  std::memset(result, 0, sizeof *result);
  *found = 1;
  return kSuccess;
}

VGPU_API int cublasLtMatmul(void*, Description* description, const void*, const void*, Layout* a,
                            const void*, Layout*, const void*, const void*, Layout*, void*, Layout* d,
                            const void*, void*, std::size_t, void* handle) {
  vgpu::Call call("cudaLaunchKernel", 211);
  vgpu::Stream* stream = vgpu::stream_of(handle);
  Element e = element(a->type, description->compute);
  auto inner = static_cast<double>(description->transpose_a ? a->rows : a->columns);
  vgpu::launch(stream, "nvjet_gemm_lt_vgpu",
               vgpu::product_cost(static_cast<double>(d->rows), static_cast<double>(d->columns), inner,
                                  d->batch, e.speed, e.bytes, stream->device));
  return kSuccess;
}
