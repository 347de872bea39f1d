// Our own prototypes of what the CUDA runtime's documentation describes, as far as torch uses it.
// Names are ours; layouts and numbers are the interface's.
#pragma once
#include <cstddef>
#include <cstdint>

// build.py defines VGPU_CUDA_VERSION, such as 12080: the CUDA of the wheel that it builds for.
#define VGPU_API extern "C" __attribute__((visibility("default")))

namespace cuda {

enum Error : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  initialization_error = 3,
  invalid_function = 98,
  invalid_device = 101,
  device_uninitialized = 201,
  file_not_found = 301,
  invalid_handle = 400,
  illegal_state = 401,
  symbol_not_found = 500,
  not_ready = 600,
  peer_access_enabled = 704,
  peer_access_not_enabled = 705,
  illegal_address = 700,
  launch_timeout = 702,
  not_permitted = 800,
  not_supported = 801,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_unmatched = 903,
  capture_unjoined = 904,
  captured_event = 907,
  ecc_uncorrectable = 214,
  device_lost = 999
};

struct Dim3 {
  unsigned x, y, z;
};

// cudaLaunchConfig_t
struct LaunchConfig {
  Dim3 grid, block;
  std::size_t shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

// cudaPointerAttributes
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
#if VGPU_CUDA_VERSION >= 13000  // the caller's record ends here before
  long reserved[8];
#endif
};

// cudaFuncAttributes, as far as it is read
struct FunctionAttributes {
  std::size_t shared_bytes, const_bytes, local_bytes;
  int max_threads_per_block, registers, ptx_version, binary_version, cache_mode_ca;
  int max_dynamic_shared_bytes, preferred_carveout;
  int cluster_size_set, cluster_width, cluster_height, cluster_depth;
  int cluster_policy, non_portable_cluster, reserved[16];
};

// cudaMemLocation, cudaMemPoolProps: only their first words are read.
struct MemoryLocation {
  int type, id;
};

// cudaMemAccessDesc
struct MemoryAccess {
  MemoryLocation location;
  int flags;  // 3: reads and writes
};

// cudaIpcMemHandle_t and cudaIpcEventHandle_t
struct IpcHandle {
  char bytes[64];
};

// Attributes of a device by the numbers of cudaDeviceAttr.
enum Attribute : int {
  max_threads_per_block = 1,
  max_block_x = 2,
  max_block_y = 3,
  max_block_z = 4,
  max_grid_x = 5,
  max_grid_y = 6,
  max_grid_z = 7,
  max_shared_per_block = 8,
  total_constant = 9,
  warp_size = 10,
  max_registers_per_block = 12,
  clock_rate = 13,
  multiprocessor_count = 16,
  kernel_timeout = 17,
  integrated = 18,
  compute_mode = 20,
  ecc_enabled = 32,
  pci_bus_id = 33,
  pci_device_id = 34,
  memory_clock_rate = 36,
  memory_bus_width = 37,
  l2_cache_size = 38,
  max_threads_per_multiprocessor = 39,
  pci_domain_id = 50,
  capability_major = 75,
  capability_minor = 76,
  max_shared_per_multiprocessor = 81,
  max_registers_per_multiprocessor = 82,
  max_shared_per_block_optin = 97,
  max_blocks_per_multiprocessor = 106
};

}  // namespace cuda
