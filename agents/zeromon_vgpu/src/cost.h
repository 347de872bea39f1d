// The roofline: how long kernels, matrix products and copies take on this machine, and what they fill.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device.h"

namespace vgpu {

struct Cost {
  Time duration;
  double occupancy;
  std::int64_t bytes;
  double tensor_seconds = 0;  // of its time with all tensor cores in use
};

struct Grid {
  double x, y, z;
};

// A kernel by its name, its blocks, and the threads of a block. `args`: of a spin kernel its cycles, of
// an attention kernel its sizes.
Cost kernel_cost(const char* name, Grid grid, double threads, void** args, int device);
// So many operations at `efficiency` of `speed` per second, or `bytes` of traffic, whichever takes
// longer.
Cost work_cost(double flops, double speed, double bytes, double occupancy, double efficiency,
               int device);
// 2mnk operations at `speed` per second, or the bytes of its matrices, whichever takes longer.
Cost product_cost(double m, double n, double k, double batch, double speed, double element_bytes,
                  int device);
// Enqueues a kernel of this cost; the host needs the time of a launch for it.
void launch(Stream* stream, const char* name, const Cost& cost, std::unique_ptr<Action> action = {});
// A copy to another device: over their link, or through the host where they lack access to each other.
Time peer_copy_time(std::int64_t bytes, int from, int to, bool have_access);
Time copy_time(std::int64_t bytes, Direction direction, bool pinned);

}  // namespace vgpu
