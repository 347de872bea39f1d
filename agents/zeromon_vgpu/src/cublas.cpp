// Stands in for libcublas: matrix products take their time and compute nothing.
#include "cost.h"
#include "cuda_api.h"
#include "machine.h"

namespace {

using Scalar = const void*;
using Matrix = const void*;
constexpr int kSuccess = 0;

struct Handle {
  void* stream = nullptr;
  int math_mode = 0, pointer_mode = 0;
};

enum DataType { f32 = 0, f64 = 1, f16 = 2, c32 = 4, c64 = 5, bf16 = 14, e4m3 = 28, e5m2 = 29 };

struct Element {
  double speed, bytes;
  const char* name;
};

Element element(int type, bool tf32) {
  const vgpu::Machine& m = vgpu::machine();
  switch (type) {
    case f64: return {m.flops_fp64, 8, "sm90_xmma_gemm_f64f64_vgpu"};
    case c64: return {m.flops_fp64 / 4, 16, "sm90_xmma_gemm_c64c64_vgpu"};
    case c32: return {m.flops_fp32 / 4, 8, "sm90_xmma_gemm_c32c32_vgpu"};
    case f32:
      return tf32 ? Element{m.flops_tf32, 4, "sm90_xmma_gemm_f32f32_tf32f32_vgpu"}
                  : Element{m.flops_fp32, 4, "sm90_xmma_gemm_f32f32_f32f32_vgpu"};
    case e4m3:
    case e5m2: return {m.flops_fp8, 1, "sm90_xmma_gemm_e4m3e4m3_vgpu"};
    case f16: return {m.flops_half, 2, "sm90_xmma_gemm_f16f16_vgpu"};
    default: return {m.flops_half, 2, "sm90_xmma_gemm_bf16bf16_vgpu"};
  }
}

int multiply(const Handle* handle, int type, bool tf32, double m, double n, double k, double batch) {
  vgpu::Call call("cudaLaunchKernel", 211);
  vgpu::Stream* stream = vgpu::stream_of(handle->stream);
  Element e = element(type, tf32 || handle->math_mode == 3);
  vgpu::launch(stream, e.name, vgpu::product_cost(m, n, k, batch, e.speed, e.bytes, stream->device));
  return kSuccess;
}

constexpr int kFastTf32 = 77;  // CUBLAS_COMPUTE_32F_FAST_TF32

}  // namespace

VGPU_API int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return kSuccess;
}
VGPU_API int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return kSuccess;
}
VGPU_API int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return kSuccess;
}
VGPU_API int cublasGetStream_v2(Handle* handle, void** stream) {
  *stream = handle->stream;
  return kSuccess;
}
VGPU_API int cublasSetWorkspace_v2(Handle*, void*, std::size_t) { return kSuccess; }
VGPU_API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return kSuccess;
}
VGPU_API int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return kSuccess;
}
VGPU_API int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return kSuccess;
}
VGPU_API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return kSuccess;
}
VGPU_API int cublasSetSmCountTarget(Handle*, int) { return kSuccess; }
VGPU_API int cublasGetVersion_v2(Handle*, int* version) {
  *version = 130100;
  return kSuccess;
}

#define GEMM(name, type)                                             \
  VGPU_API int name(Handle* handle, int, int, int m, int n, int k) { \
    return multiply(handle, type, false, m, n, k, 1);                \
  }
GEMM(cublasSgemm_v2, f32)
GEMM(cublasDgemm_v2, f64)
GEMM(cublasCgemm_v2, c32)
GEMM(cublasZgemm_v2, c64)

#define BATCHED(name, type)                                                                        \
  VGPU_API int name(Handle* handle, int, int, int m, int n, int k, Scalar, Matrix, int, long long, \
                    Matrix, int, long long, Scalar, void*, int, long long, int batch) {            \
    return multiply(handle, type, false, m, n, k, batch);                                          \
  }
BATCHED(cublasSgemmStridedBatched, f32)
BATCHED(cublasDgemmStridedBatched, f64)
BATCHED(cublasCgemmStridedBatched, c32)
BATCHED(cublasZgemmStridedBatched, c64)

VGPU_API int cublasSgemmEx(Handle* handle, int, int, int m, int n, int k, Scalar, Matrix, int type) {
  return multiply(handle, type, false, m, n, k, 1);
}

VGPU_API int cublasGemmEx(Handle* handle, int, int, int m, int n, int k, Scalar, Matrix, int type, int,
                          Matrix, int, int, Scalar, void*, int, int, int compute, int) {
  return multiply(handle, type, compute == kFastTf32, m, n, k, 1);
}

VGPU_API int cublasGemmStridedBatchedEx(Handle* handle, int, int, int m, int n, int k, Scalar, Matrix,
                                        int type, int, long long, Matrix, int, int, long long, Scalar,
                                        void*, int, int, long long, int batch, int compute, int) {
  return multiply(handle, type, compute == kFastTf32, m, n, k, batch);
}

#define VECTOR(name, type)                               \
  VGPU_API int name(Handle* handle, int, int m, int n) { \
    return multiply(handle, type, false, m, 1, n, 1);    \
  }
VECTOR(cublasSgemv_v2, f32)
VECTOR(cublasDgemv_v2, f64)

#define DOT(name, type) \
  VGPU_API int name(Handle* handle, int n) { return multiply(handle, type, false, 1, 1, n, 1); }
DOT(cublasSdot_v2, f32)
DOT(cublasDdot_v2, f64)
DOT(cublasDotEx, f16)
