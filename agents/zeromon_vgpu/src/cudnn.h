// What the parts of the stand-in for libcudnn share: handles, descriptors of tensors, and their costs.
#pragma once
#include <cstdint>
#include <vector>

#include "cost.h"
#include "cuda_api.h"

namespace cudnn {

enum Status : int { success = 0, bad_param = 2000, not_supported = 3000 };

// Numbers of cudnnDataType_t.
enum DataType { f32 = 0, f64 = 1, f16 = 2, i32 = 4, bf16 = 9, i64 = 10, e4m3 = 12, e5m2 = 13 };

struct Handle {
  void* stream = nullptr;
};

// A tensor, or a filter: dimensions from the batch (of a filter: from the outputs) to the pixels.
struct Tensor {
  int type = f32;
  std::vector<std::int64_t> sizes, strides;
  double elements() const;
  double bytes() const;
  // Tensor cores read all channels of a pixel at once; another order of a tensor is copied first.
  bool is_channels_last() const;
};

double element_bytes(int type);
const char* type_name(int type, bool tensor_cores);
// Operations per second of products of elements of this type.
double product_speed(int type, bool tensor_cores);
bool has_tensor_cores(int type);

enum class Pass { forward, backward_data, backward_filter };

// A convolution by implicit products. `x`, `w` and `y` stand for their gradients in a backward.
struct Convolution {
  Pass pass;
  Tensor x, w, y;
  bool tensor_cores;
  double flops() const;
  // The copies of those tensors whose channels are not last; without tensor cores, nothing.
  std::int64_t workspace() const;
};

// Enqueues the convolution, and the copies of tensors that it needs. `more_bytes`: traffic of what is
// fused into it.
void launch_convolution(const Handle* handle, const Convolution& convolution, double more_bytes = 0);
// Enqueues a kernel that does so many operations at `efficiency` of `speed`, and moves these bytes.
void launch_work(const Handle* handle, const char* name, double flops, double speed, double bytes,
                 double efficiency = 1);

}  // namespace cudnn
