// Stands in for libcudnn: handles, tensors, convolutions of the older interface, batch norms.
//
// Kernels compute nothing. A convolution takes the time of its operations at the speed of products, or
// of its tensors' bytes. torch asks for workspaces and gets the sizes that are stated here.
#include "cudnn.h"

#include <algorithm>
#include <cstring>

#include "machine.h"

using namespace cudnn;

namespace cudnn {

double element_bytes(int type) {
  if (type == f64 || type == i64) return 8;
  if (type == f32 || type == i32) return 4;
  return type == f16 || type == bf16 ? 2 : 1;
}

bool has_tensor_cores(int type) {
  const vgpu::Machine& m = vgpu::machine();
  return type != f64 && (type != f32 || m.flops_tf32 > m.flops_fp32);
}

double product_speed(int type, bool tensor_cores) {
  const vgpu::Machine& m = vgpu::machine();
  if (type == f64) return m.flops_fp64;
  if (!tensor_cores) return m.flops_fp32;
  if (type == f32) return m.flops_tf32;
  return type == f16 || type == bf16 ? m.flops_half : m.flops_fp8;
}

const char* type_name(int type, bool tensor_cores) {
  switch (type) {
    case f64: return "f64f64_f64f64";
    case f32: return tensor_cores ? "tf32f32_tf32f32" : "f32f32_f32f32";
    case f16: return "f16f16_f16f32";
    case bf16: return "bf16bf16_bf16f32";
    default: return "8bit";
  }
}

double Tensor::elements() const {
  double product = 1;
  for (std::int64_t size : sizes)
    product *= static_cast<double>(size);
  return product;
}

double Tensor::bytes() const { return elements() * element_bytes(type); }

bool Tensor::is_channels_last() const {
  return sizes.size() < 3 || strides.size() < 2 || sizes[1] == 1 || strides[1] == 1;
}

double Convolution::flops() const {
  return 2 * y.elements() * w.elements() / static_cast<double>(w.sizes[0]);
}

std::int64_t Convolution::workspace() const {
  double bytes = 0;
  for (const Tensor* tensor : {&x, &w, &y})
    if (tensor_cores && !tensor->is_channels_last()) bytes += tensor->bytes();
  return static_cast<std::int64_t>(bytes);
}

void launch_work(const Handle* handle, const char* name, double flops, double speed, double bytes,
                 double efficiency) {
  vgpu::Call call("cudaLaunchKernel", 211);
  vgpu::Stream* stream = vgpu::stream_of(handle->stream);
  // A thread moves 16 bytes; a multiprocessor has 2,048 threads.
  double occupancy = std::min(1.0, bytes / (16 * 2048 * vgpu::machine().multiprocessors));
  vgpu::launch(stream, name,
               vgpu::work_cost(flops, speed, bytes, occupancy, efficiency, stream->device));
}

namespace {

void copy_layout(const Handle* handle, const char* name, const Tensor& tensor) {
  if (!tensor.is_channels_last()) launch_work(handle, name, 0, 1, 2 * tensor.bytes());
}

}  // namespace

void launch_convolution(const Handle* handle, const Convolution& convolution, double more_bytes) {
  static constexpr const char* kPasses[] = {"fprop", "dgrad", "wgrad"};
  const Tensor* tensors[] = {&convolution.x, &convolution.w, &convolution.y};
  auto pass = static_cast<int>(convolution.pass);
  int result = pass == 0 ? 2 : pass == 1 ? 0 : 1;
  double bytes = more_bytes;
  for (int i = 0; i < 3; ++i) {
    bytes += tensors[i]->bytes();
    if (convolution.tensor_cores && i != result)
      copy_layout(handle, "cudnn::ops::nchwToNhwcKernel_vgpu", *tensors[i]);
  }
  int type = convolution.x.type;
  std::string name = std::string(convolution.tensor_cores ? "sm90_xmma_" : "implicit_convolve_") +
                     kPasses[pass] + "_implicit_gemm_" + type_name(type, convolution.tensor_cores) +
                     "_vgpu";
  launch_work(handle, vgpu::intern(name), convolution.flops(),
              product_speed(type, convolution.tensor_cores), bytes);
  if (convolution.tensor_cores)
    copy_layout(handle, "cudnn::ops::nhwcToNchwKernel_vgpu", *tensors[result]);
}

}  // namespace cudnn

namespace {

// cudnnMathType_t: all others let float32 be rounded to TF32.
constexpr int kNoTensorCores = 3;

struct ConvolutionDescription {
  int math = 0;
};

// cudnnConvolutionFwdAlgoPerf_t and its likes
struct Performance {
  int algorithm, status;
  float milliseconds;
  std::size_t memory;
  int determinism, math, reserved[3];
};

bool uses_tensor_cores(const Tensor* x, const ConvolutionDescription* description) {
  return has_tensor_cores(x->type) && description->math != kNoTensorCores;
}

Convolution convolution_of(Pass pass, const Tensor* x, const Tensor* w, const Tensor* y,
                           const ConvolutionDescription* description) {
  return {pass, *x, *w, *y, uses_tensor_cores(x, description)};
}

template <class T>
int create(T** out) {
  *out = new T;
  return success;
}
template <class T>
int destroy(T* object) {
  delete object;
  return success;
}

int answer(const Convolution& convolution, int* count, Performance* results) {
  std::memset(results, 0, sizeof *results);
  results->algorithm = 1;  // implicit matrix products, in each of the three passes
  results->determinism = 1;
  results->memory = static_cast<std::size_t>(convolution.workspace());
  results->math = convolution.tensor_cores ? 0 : kNoTensorCores;
  *count = 1;
  return success;
}

int answer(const Convolution& convolution, std::size_t* bytes) {
  *bytes = static_cast<std::size_t>(convolution.workspace());
  return success;
}

// Batch norm reads its input twice, for the statistics and for the result. One channel of one image
// rarely stays in the cache in between.
int normalize(Handle* handle, const char* name, const Tensor* x, double passes) {
  launch_work(handle, name, 0, 1, passes * x->bytes());
  return success;
}

}  // namespace

// ---- the library
// ---------------------------------------------------------------------------------------

VGPU_API std::size_t cudnnGetVersion() { return VGPU_CUDNN_VERSION; }
VGPU_API std::size_t cudnnGetCudartVersion() { return VGPU_CUDA_VERSION; }
VGPU_API int cudnnGetProperty(int part, int* value) {
  constexpr int kParts[] = {VGPU_CUDNN_VERSION / 10000, VGPU_CUDNN_VERSION / 100 % 100,
                            VGPU_CUDNN_VERSION % 100};
  if (part < 0 || part > 2) return bad_param;
  *value = kParts[part];
  return success;
}
VGPU_API const char* cudnnGetErrorString(int status) {
  switch (status) {
    case success: return "CUDNN_STATUS_SUCCESS";
    case not_supported: return "CUDNN_STATUS_NOT_SUPPORTED: no model on the virtual device";
    default: return "CUDNN_STATUS_BAD_PARAM";
  }
}
VGPU_API void cudnnGetLastErrorString(char* text, std::size_t size) {
  if (size) *text = 0;
}

VGPU_API int cudnnCreate(Handle** handle) { return create(handle); }
VGPU_API int cudnnDestroy(Handle* handle) { return destroy(handle); }
VGPU_API int cudnnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return success;
}
VGPU_API int cudnnGetStream(Handle* handle, void** stream) {
  *stream = handle->stream;
  return success;
}

// ---- tensors and filters
// -------------------------------------------------------------------------------

VGPU_API int cudnnCreateTensorDescriptor(Tensor** out) { return create(out); }
VGPU_API int cudnnDestroyTensorDescriptor(Tensor* tensor) { return destroy(tensor); }
VGPU_API int cudnnSetTensorNdDescriptor(Tensor* tensor, int type, int count, const int* sizes,
                                        const int* strides) {
  *tensor = {type, {sizes, sizes + count}, {strides, strides + count}};
  return success;
}
VGPU_API int cudnnGetTensorNdDescriptor(const Tensor* tensor, int limit, int* type, int* count,
                                        int* sizes, int* strides) {
  *type = tensor->type;
  *count = static_cast<int>(tensor->sizes.size());
  for (int i = 0; i < std::min(limit, *count); ++i) {
    sizes[i] = static_cast<int>(tensor->sizes[i]);
    strides[i] = static_cast<int>(tensor->strides[i]);
  }
  return success;
}

VGPU_API int cudnnCreateFilterDescriptor(Tensor** out) { return create(out); }
VGPU_API int cudnnDestroyFilterDescriptor(Tensor* filter) { return destroy(filter); }
VGPU_API int cudnnSetFilterNdDescriptor(Tensor* filter, int type, int format, int count,
                                        const int* sizes) {
  *filter = {type, {sizes, sizes + count}, {}};
  // CUDNN_TENSOR_NHWC is 1; of the strides, only that of the channels is read
  filter->strides = {0, format == 1 ? 1 : static_cast<std::int64_t>(filter->elements())};
  return success;
}
VGPU_API int cudnnGetFilterNdDescriptor(const Tensor* filter, int limit, int* type, int* format,
                                        int* count, int* sizes) {
  *type = filter->type;
  *format = filter->is_channels_last();
  *count = static_cast<int>(filter->sizes.size());
  for (int i = 0; i < std::min(limit, *count); ++i)
    sizes[i] = static_cast<int>(filter->sizes[i]);
  return success;
}

// ---- convolutions
// --------------------------------------------------------------------------------------

VGPU_API int cudnnCreateConvolutionDescriptor(ConvolutionDescription** out) { return create(out); }
VGPU_API int cudnnDestroyConvolutionDescriptor(ConvolutionDescription* description) {
  return destroy(description);
}
VGPU_API int cudnnSetConvolutionNdDescriptor(ConvolutionDescription*) { return success; }
VGPU_API int cudnnSetConvolutionGroupCount(ConvolutionDescription*, int) { return success; }
VGPU_API int cudnnSetConvolutionMathType(ConvolutionDescription* description, int math) {
  description->math = math;
  return success;
}

// The heuristics, and the search that measures: one algorithm each.
#define CONVOLUTION(name, pass, a, b, c)                                                                \
  VGPU_API int cudnnGetConvolution##name##WorkspaceSize(Handle*, Tensor* a, Tensor* b,                  \
                                                        ConvolutionDescription* description, Tensor* c, \
                                                        int, std::size_t* bytes) {                      \
    return answer(convolution_of(pass, x, w, y, description), bytes);                                   \
  }                                                                                                     \
  VGPU_API int cudnnGetConvolution##name##Algorithm_v7(Handle*, Tensor* a, Tensor* b,                   \
                                                       ConvolutionDescription* description, Tensor* c,  \
                                                       int, int* count, Performance* results) {         \
    return answer(convolution_of(pass, x, w, y, description), count, results);                          \
  }                                                                                                     \
  VGPU_API int cudnnFindConvolution##name##AlgorithmEx(                                                 \
      Handle*, Tensor* a, const void*, Tensor* b, const void*, ConvolutionDescription* description,     \
      Tensor* c, void*, int, int* count, Performance* results, void*, std::size_t) {                    \
    return answer(convolution_of(pass, x, w, y, description), count, results);                          \
  }                                                                                                     \
  VGPU_API int cudnnConvolution##name(Handle* handle, const void*, Tensor* a, const void*, Tensor* b,   \
                                      const void*, ConvolutionDescription* description, int, void*,     \
                                      std::size_t, const void*, Tensor* c, void*) {                     \
    launch_convolution(handle, convolution_of(pass, x, w, y, description));                             \
    return success;                                                                                     \
  }
CONVOLUTION(Forward, Pass::forward, x, w, y)
CONVOLUTION(BackwardData, Pass::backward_data, w, y, x)
CONVOLUTION(BackwardFilter, Pass::backward_filter, x, y, w)

VGPU_API int cudnnConvolutionBiasActivationForward(Handle* handle, const void*, Tensor* x, const void*,
                                                   Tensor* w, const void*,
                                                   ConvolutionDescription* description, int, void*,
                                                   std::size_t, const void*, Tensor* z, const void*,
                                                   Tensor* bias, const void*, void*, Tensor* y, void*) {
  launch_convolution(handle, convolution_of(Pass::forward, x, w, y, description),
                     z->bytes() + bias->bytes());
  return success;
}

VGPU_API int cudnnCreateActivationDescriptor(char** out) { return create(out); }
VGPU_API int cudnnDestroyActivationDescriptor(char* description) { return destroy(description); }
VGPU_API int cudnnSetActivationDescriptor(char*) { return success; }

// ---- batch norm
// ----------------------------------------------------------------------------------------

VGPU_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle*, int, int, Tensor*,
                                                                      Tensor*, Tensor*, Tensor*, void*,
                                                                      std::size_t* bytes) {
  *bytes = 0;
  return success;
}
VGPU_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle*, int, int, Tensor*, Tensor*,
                                                               Tensor*, Tensor*, Tensor*, Tensor*, void*,
                                                               std::size_t* bytes) {
  *bytes = 0;
  return success;
}
VGPU_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle*, int, int, void*, Tensor*,
                                                                  std::size_t* bytes) {
  *bytes = 0;  // the mask of a fused activation, which torch does not ask for
  return success;
}
VGPU_API int cudnnBatchNormalizationForwardTrainingEx(Handle* handle, int, int, const void*, const void*,
                                                      Tensor* x) {
  return normalize(handle, "cudnn::bn_fw_tr_1C11_kernel_vgpu", x, 3);
}
VGPU_API int cudnnBatchNormalizationForwardInference(Handle* handle, int, const void*, const void*,
                                                     Tensor* x) {
  return normalize(handle, "cudnn::bn_fw_inf_1C11_kernel_vgpu", x, 2);
}
VGPU_API int cudnnBatchNormalizationBackwardEx(Handle* handle, int, int, const void*, const void*,
                                               const void*, const void*, Tensor* x) {
  return normalize(handle, "cudnn::bn_bw_1C11_kernel_vgpu", x, 5);
}

// ---- samplers of images
// --------------------------------------------------------------------------------

// A spatial transformer: the sizes of the images that it makes.
VGPU_API int cudnnCreateSpatialTransformerDescriptor(Tensor** out) { return create(out); }
VGPU_API int cudnnDestroySpatialTransformerDescriptor(Tensor* images) { return destroy(images); }
VGPU_API int cudnnSetSpatialTransformerNdDescriptor(Tensor* images, int, int type, int count,
                                                    const int* sizes) {
  *images = {type, {sizes, sizes + count}, {}};
  return success;
}

namespace {
double grid_bytes(const Tensor& images) {
  return 2 * images.bytes() / static_cast<double>(std::max<std::int64_t>(images.sizes[1], 1));
}
}  // namespace

VGPU_API int cudnnSpatialTfGridGeneratorForward(Handle* handle, Tensor* images) {
  launch_work(handle, "cudnn::ops::generateGridKernel_vgpu", 0, 1, grid_bytes(*images));
  return success;
}
VGPU_API int cudnnSpatialTfGridGeneratorBackward(Handle* handle, Tensor* images) {
  launch_work(handle, "cudnn::ops::generateGridBackwardKernel_vgpu", 0, 1, grid_bytes(*images));
  return success;
}
VGPU_API int cudnnSpatialTfSamplerForward(Handle* handle, Tensor* images, const void*, Tensor* x,
                                          const void*, const void*, const void*, Tensor* y) {
  launch_work(handle, "cudnn::ops::spatialTfSamplerKernel_vgpu", 0, 1,
              x->bytes() + y->bytes() + grid_bytes(*images));
  return success;
}
VGPU_API int cudnnSpatialTfSamplerBackward(Handle* handle, Tensor* images, const void*, Tensor* x,
                                           const void*, const void*, Tensor* dx, void*, const void*,
                                           Tensor* dy) {
  launch_work(handle, "cudnn::ops::spatialTfSamplerBackwardKernel_vgpu", 0, 1,
              x->bytes() + dx->bytes() + dy->bytes() + 2 * grid_bytes(*images));
  return success;
}
