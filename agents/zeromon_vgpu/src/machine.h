// What the virtual machine is: devices, speeds, links and the faults that a test plans.
//
// The file `machine` in the run's folder (VGPU_DIR) has one `name value` per line; Python writes it
// (machine.py names and explains each value). What it does not name has the value of an H100.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace vgpu {

struct Machine {
  std::string name = "NVIDIA H100 80GB HBM3";
  // Devices of a node, and how many of them, from the first on, NVLink joins to one group.
  double devices = 8, nvlink_devices = 8;
  double major = 9, minor = 0, multiprocessors = 132, clock_hz = 1.98e9;
  double memory_bytes = 80.0 * (1ull << 30), context_bytes = 520.0 * (1 << 20);
  // Speeds per second.
  double flops_fp64 = 60e12, flops_fp32 = 51e12, flops_tf32 = 400e12, flops_half = 785e12,
         flops_fp8 = 1500e12;
  double memory_speed = 3.0e12, pinned_speed = 54e9, pageable_speed = 10e9;
  // Links: NVLink, PCIe, and the network between nodes. Bandwidth is that on the bus of collectives.
  double node_speed = 360e9, pcie_speed = 40e9, network_speed = 45e9;
  double node_latency_ns = 12000, pcie_latency_ns = 20000, network_latency_ns = 30000;
  // Least time of a kernel, of a copy; host time of a launch; operations that may wait in a stream.
  double kernel_ns = 2000, copy_ns = 1850, launch_ns = 0, queue = 1024;
  double slow = 1;                 // all kernels take this many times as long
  double collective_share = 0.12;  // of the device, taken from kernels by a running collective
  double contention = 1;           // 0: kernels on several streams do not slow each other down
  // Collectives above this many bytes move none, for speed; nor do copies to devices, above a MiB.
  double largest_payload = 1e18;
  double driver_version = 13000;
  double log_events = 0;      // 1: events are on the timeline, too
  double operator_ns = 9000;  // what a host takes for an operator of torch with one kernel
  double started = 0;  // seconds of CLOCK_MONOTONIC from which faults count; 0: the process's start
};

// A planned fault: `fault kind key=value...`.
struct Fault {
  std::string kind;
  double rank = -1, device = -1, call = -1, factor = 1, seconds = 0, at = 0, bit = 0, code = 0;
};

const Machine& machine();
// The devices of the node that CUDA_VISIBLE_DEVICES leaves to this process, by their ordinals here.
int visible_count();
// The place on its node of a device that this process knows by an ordinal.
int physical_device(int ordinal);
const std::vector<Fault>& faults();
// The fault of this kind for this process, or null. `device` < 0: any.
const Fault* planned(const char* kind, int device = -1);
const std::string& folder();
int global_rank();
// Where a rank runs: as torchrun places ranks, RANK / LOCAL_WORLD_SIZE.
int node_of(int rank);
int my_node();
// The device of a rank that does not run: its place on its node.
int device_of(int rank);
// Whether VGPU_RANKS, such as `0,1,8,1023`, names the ranks that run; without it, all do.
bool has_absent_ranks();
bool runs(int rank);

// What joins two devices, the nearest first.
enum class Reach { nvlink, pcie, network };
struct Link {
  double latency_ns, speed;
};
Reach reach_between(int node, int device, int other_node, int other_device);
Link link_of(Reach reach);
// Seconds of the run at a moment of the device's clock: the same on every rank.
double run_seconds(std::int64_t time);
double uptime();
// How many times as long a kernel takes on this device, now.
double slowness(int device);

}  // namespace vgpu
