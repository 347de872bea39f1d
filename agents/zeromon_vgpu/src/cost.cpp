#include "cost.h"

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace vgpu {
namespace {

// Bytes of memory traffic by a part of the kernel's name; the first that fits counts.
struct Traffic {
  const char* part;
  double per_thread, per_block;
};
constexpr Traffic kTraffic[] = {
    // Of Triton's kernels the driver sees threads alone. Inductor's names list the operators that they
    // fuse: without this line, the names below would match.
    {"triton_", 48, 0},
    // A block of a multi-tensor kernel works on a chunk of 65,536 elements: reads two, writes one.
    {"multi_tensor_apply", 0, 65536.0 * 12},
    // Four elements a thread, two read and one written, four bytes each.
    {"elementwise_kernel", 48, 0},
    {"reduce_kernel", 64, 0},
    {"softmax", 64, 0},
    {"layer_norm", 64, 0},
    {"", 48, 0},
};

double ceiling(double threads) { return std::min(1.0, threads / (machine().multiprocessors * 2048)); }

}  // namespace

Cost kernel_cost(const char* name, double blocks, double threads, void** args, int device) {
  const Machine& m = machine();
  if (std::strstr(name, "spin_kernel") && args) {  // torch.cuda._sleep: exactly its cycles
    auto cycles = static_cast<double>(*static_cast<std::int64_t*>(args[0]));
    return {static_cast<Time>(cycles / m.clock_hz * 1e9), 0, 0};
  }
  const Traffic* traffic = kTraffic;
  while (!std::strstr(name, traffic->part))
    ++traffic;
  double bytes = blocks * (traffic->per_block + threads * traffic->per_thread);
  double ns = (m.kernel_ns + bytes / m.memory_speed * 1e9) * slowness(device);
  return {static_cast<Time>(ns), ceiling(blocks * threads), static_cast<std::int64_t>(bytes)};
}

Cost product_cost(double m, double n, double k, double batch, double speed, double element_bytes,
                  int device) {
  const Machine& given = machine();
  double bytes = (m * k + k * n + m * n) * batch * element_bytes;
  double seconds = std::max(2 * m * n * k * batch / speed, bytes / given.memory_speed);
  // Only tensor cores are faster than single precision.
  double tensor_seconds = speed > given.flops_fp32 ? 2 * m * n * k * batch / speed : 0;
  double tiles = std::max(1.0, m / 128) * std::max(1.0, n / 128) * batch;
  return {static_cast<Time>((given.kernel_ns + seconds * 1e9) * slowness(device)),
          std::min(1.0, tiles / given.multiprocessors), static_cast<std::int64_t>(bytes),
          tensor_seconds};
}

void launch(Stream* stream, const char* name, const Cost& cost) {
  if (machine().launch_ns > 0) {
    Time until = now() + static_cast<Time>(machine().launch_ns);
    while (now() < until) {
    }
  }
  auto op = std::make_unique<Op>();
  op->kind = Kind::kernel;
  op->name = name;
  op->duration = cost.duration;
  op->occupancy = cost.occupancy;
  op->bytes = cost.bytes;
  double seconds = static_cast<double>(std::max<Time>(cost.duration, 1)) / 1e9;
  op->tensor_share = cost.tensor_seconds / seconds;
  op->memory_share = static_cast<double>(cost.bytes) / machine().memory_speed / seconds;
  op->correlation = last_correlation();
  enqueue(stream, std::move(op));
}

Time peer_copy_time(std::int64_t bytes, int from, int to, bool have_access) {
  const Machine& m = machine();
  double direct = link_of(reach_between(0, from, 0, to)).speed;
  double speed = have_access ? direct : m.pinned_speed / 2;
  return static_cast<Time>(m.copy_ns + static_cast<double>(bytes) / speed * 1e9);
}

Time copy_time(std::int64_t bytes, Direction direction, bool pinned) {
  const Machine& m = machine();
  double speed = direction == Direction::on_device ? m.memory_speed / 2
                 : pinned                          ? m.pinned_speed
                                                   : m.pageable_speed;
  double slow = direction == Direction::on_device ? m.slow : 1;
  return static_cast<Time>((m.copy_ns + static_cast<double>(bytes) / speed * 1e9) * slow);
}

}  // namespace vgpu
