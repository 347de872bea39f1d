#include "cost.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"
#include "values.h"

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
    // Fused Adam reads four of each element and writes three.
    {"FusedAdamMathFunctor", 0, 65536.0 * 28},
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

// Attention: heads of all sequences, their lengths and the size of a head.
struct Attention {
  double heads, queries, keys, head_size;
  bool causal;
};

// The n-th integer argument of a template in a mangled name, or 0.
double template_number(const char* name, const char* part, int n) {
  const char* at = std::strstr(name, part);
  for (; at && n >= 0; --n)
    if ((at = std::strstr(at, "Li"))) at += 2;
  return at ? std::strtod(at, nullptr) : 0;
}

// Flash attention: the grid and the block sizes tell all, for queries and keys of one length.
Attention flash_attention(const char* name, bool backward, Grid grid) {
  double head_size = template_number(name, "kernel_traitsILi", 0);
  // A block works on queries in the forward, and on keys in the backward.
  double length = grid.x * template_number(name, "kernel_traitsILi", backward ? 2 : 1);
  // Flash_kernel_traits<...>>, Is_dropout, Is_causal, ...
  const char* options = std::strstr(name, "EELb");
  return {grid.y * grid.z, length, length, head_size, options && options[8] == '1'};
}

// Memory-efficient attention: the parameters of its CUTLASS kernels have head size, queries and keys.
Attention efficient_attention(bool backward, Grid grid, void** args) {
  auto* parameters = static_cast<const char*>(args[0]) + (backward ? 144 : 96);
  std::int32_t sizes[4];  // head sizes of keys and of values, queries, keys
  char mask = parameters[20];
  std::memcpy(sizes, parameters, sizeof sizes);
  return {grid.y * grid.z, static_cast<double>(sizes[2]), static_cast<double>(sizes[3]),
          (sizes[0] + sizes[1]) / 2.0, mask != 0};
}

// The forward is two products, the backward five. A causal mask halves both.
bool attention_cost(const char* name, Grid grid, double threads, void** args, int device, Cost* out) {
  bool flash = std::strstr(name, "flash_fwd_kernel") || std::strstr(name, "flash_bwd_dq_dk_dv_loop");
  bool backward = std::strstr(name, "flash_bwd_dq_dk_dv_loop") || std::strstr(name, "fmha_cutlassB");
  if (!flash && !std::strstr(name, "fmha_cutlass")) return false;
  if (!flash && !args) return false;
  Attention a =
      flash ? flash_attention(name, backward, grid) : efficient_attention(backward, grid, args);
  bool half = flash || !std::strstr(name, "_f32_");
  double flops = (backward ? 10 : 4) * a.heads * a.queries * a.keys * a.head_size / (a.causal ? 2 : 1);
  double element = half ? 2 : 4;
  double bytes = a.heads * (a.queries + a.keys) * 2 * a.head_size * element * (backward ? 2 : 1);
  double speed = half ? machine().flops_half : machine().flops_fp32;
  *out = work_cost(flops, speed, bytes, ceiling(grid.x * grid.y * grid.z * threads),
                   0.6 /* of what products reach */, device);
  return true;
}

}  // namespace

Cost kernel_cost(const char* name, Grid grid, double threads, void** args, int device) {
  const Machine& m = machine();
  double blocks = grid.x * grid.y * grid.z;
  if (std::strstr(name, "spin_kernel") && args) {  // torch.cuda._sleep: exactly its cycles
    auto cycles = static_cast<double>(*static_cast<std::int64_t*>(args[0]));
    return {static_cast<Time>(cycles / m.clock_hz * 1e9), 0, 0};
  }
  Cost attention;
  if (attention_cost(name, grid, threads, args, device, &attention)) return attention;
  const Traffic* traffic = kTraffic;
  while (!std::strstr(name, traffic->part))
    ++traffic;
  double bytes = blocks * (traffic->per_block + threads * traffic->per_thread);
  double ns = (m.kernel_ns + bytes / m.memory_speed * 1e9) * slowness(device);
  return {static_cast<Time>(ns), ceiling(blocks * threads), static_cast<std::int64_t>(bytes)};
}

Cost work_cost(double flops, double speed, double bytes, double occupancy, double efficiency,
               int device) {
  const Machine& m = machine();
  double seconds = std::max(flops / (speed * efficiency), bytes / m.memory_speed);
  // Only tensor cores are faster than single precision.
  double tensor_seconds = speed > m.flops_fp32 ? flops / speed : 0;
  return {static_cast<Time>((m.kernel_ns + seconds * 1e9) * slowness(device)), occupancy,
          static_cast<std::int64_t>(bytes), tensor_seconds};
}

Cost product_cost(double m, double n, double k, double batch, double speed, double element_bytes,
                  int device) {
  double bytes = (m * k + k * n + m * n) * batch * element_bytes;
  double tiles = std::max(1.0, m / 128) * std::max(1.0, n / 128) * batch;
  double occupancy = std::min(1.0, tiles / machine().multiprocessors);
  return work_cost(2 * m * n * k * batch, speed, bytes, occupancy, 1, device);
}

void launch(Stream* stream, const char* name, const Cost& cost, std::unique_ptr<Action> action) {
  if (!action) forget_values();
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
  op->action = std::move(action);
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
