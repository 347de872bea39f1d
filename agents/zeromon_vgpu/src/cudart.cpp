// Stands in for libcudart: devices and errors.
#include "cudart.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "machine.h"
#include "memory.h"

using namespace cuda;
using vgpu::Call;
using vgpu::Guard;
using vgpu::machine;

namespace cudart {
namespace {

thread_local Error last_error = success;
// By the device that reaches and the one that is reached; by the pool's device and the one that reaches.
std::atomic<bool> peer_access[vgpu::kMaxDevices][vgpu::kMaxDevices],
    pool_access[vgpu::kMaxDevices][vgpu::kMaxDevices];

}  // namespace

Error fail(Error error) {
  if (error != success && error != not_ready) last_error = error;
  return error;
}

bool is_unusable(Error* why) {
  if (vgpu::is_forked()) {
    *why = initialization_error;
    return true;
  }
  static const vgpu::Fault* lost = vgpu::planned("lost");
  if (lost && vgpu::uptime() >= lost->at &&
      (lost->device < 0 || lost->device == vgpu::current_device())) {
    *why = device_lost;
    return true;
  }
  return false;
}

bool have_peer_access(int device, int other) {
  return peer_access[device][other] || peer_access[other][device] || pool_access[device][other] ||
         pool_access[other][device];
}

void allow_pool_access(int device, int peer, bool is_allowed) { pool_access[device][peer] = is_allowed; }

namespace {

// Writes the members of a record in their order, each where its type's alignment puts it.
class Record {
public:
  explicit Record(void* start) : start_(static_cast<char*>(start)) {}
  template <class T>
  void put(T value) {
    offset_ = (offset_ + alignof(T) - 1) / alignof(T) * alignof(T);
    std::memcpy(start_ + offset_, &value, sizeof value);
    offset_ += sizeof value;
  }
  void ints(std::initializer_list<int> values) {
    for (int value : values)
      put(value);
  }
  void text(const char* value, std::size_t size) {
    std::memset(start_ + offset_, 0, size);
    std::memcpy(start_ + offset_, value, std::min(size, std::strlen(value)));
    offset_ += size;
  }

private:
  char* start_;
  std::size_t offset_ = 0;
};

int as_int(double value) { return static_cast<int>(value); }

// cudaDeviceProp, member by member; `is12`: with those that CUDA 13 dropped.
void write_properties(void* out, int device, bool is12) {
  const vgpu::Machine& m = machine();
  Record r(out);
  r.text(m.name.c_str(), 256);
  char uuid[17] = "ZZZZZZZZZZZZZZZ";
  uuid[15] = static_cast<char>(vgpu::physical_device(device) + 1);
  r.text(uuid, 16);
  r.text("", 8);
  r.put(0u);
  r.put(static_cast<std::size_t>(m.memory_bytes));
  r.put(std::size_t{49152});
  r.ints({65536, 32});
  r.put(std::size_t{2147483647});
  r.ints({1024, 1024, 1024, 64, 2147483647, 65535, 65535});
  if (is12) r.put(as_int(m.clock_hz / 1000));
  r.put(std::size_t{65536});
  r.ints({as_int(m.major), as_int(m.minor)});
  r.put(std::size_t{512});
  r.put(std::size_t{32});
  if (is12) r.put(1);
  r.put(as_int(m.multiprocessors));
  if (is12) r.put(0);
  r.ints({0, 1});
  if (is12) r.put(0);
  for (int i = 0; i < (is12 ? 40 : 39); ++i)
    r.put(16384);  // limits of textures and surfaces
  r.put(std::size_t{512});
  r.ints({1, 1, 0x10 + vgpu::physical_device(device), 0, 0, 0, 3, 1});
  if (is12) r.put(2619000);
  r.ints({5120, 50 << 20, 32 << 20, 2048, 1, 1, 1});
  r.put(std::size_t{233472});
  r.ints({65536, 1, 0, 0, 0});
  if (is12) r.put(2);
  r.ints({0, 1, 1, 1, 1});
  if (is12) r.put(1);
  r.put(std::size_t{232448});
  r.ints({0, 0, 32, 0});
  r.put(std::size_t{1024});
  r.ints({1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1});
}

constexpr double kPeak = 1.117;  // of the speed that large kernels reach
constexpr int kBusBytes = 640;

int attribute(int number, int device) {
  const vgpu::Machine& m = machine();
  switch (number) {
    case max_threads_per_block:
    case max_block_x:
    case max_block_y: return 1024;
    case max_block_z: return 64;
    case max_grid_x: return 2147483647;
    case max_grid_y:
    case max_grid_z: return 65535;
    case max_shared_per_block: return 49152;
    case total_constant:
    case max_registers_per_block:
    case max_registers_per_multiprocessor: return 65536;
    case warp_size:
    case max_blocks_per_multiprocessor: return 32;
    case clock_rate: return as_int(m.clock_hz / 1000);
    case multiprocessor_count: return as_int(m.multiprocessors);
    case kernel_timeout:
    case integrated:
    case compute_mode:
    case pci_device_id:
    case pci_domain_id: return 0;
    case pci_bus_id: return 0x10 + vgpu::physical_device(device);
    case memory_clock_rate: return as_int(m.memory_speed * kPeak / kBusBytes / 2 / m.slow / 1000);
    case memory_bus_width: return kBusBytes * 8;
    case l2_cache_size: return 50 << 20;
    case max_threads_per_multiprocessor: return 2048;
    case capability_major: return as_int(m.major);
    case capability_minor: return as_int(m.minor);
    case max_shared_per_multiprocessor: return 233472;
    case max_shared_per_block_optin: return 232448;
    default: return number < 100 ? 1 : 0;
  }
}

bool is_device(int device) { return device >= 0 && device < vgpu::visible_count(); }

}  // namespace
}  // namespace cudart

using namespace cudart;

// ---- devices ---------------------------------------------------------------------------------------

VGPU_API Error cudaGetDeviceCount(int* count) {
  VGPU_ENTER();
  *count = vgpu::visible_count();
  return success;
}

VGPU_API Error cudaGetDevice(int* device) {
  VGPU_ENTER();
  *device = vgpu::current_device();
  return success;
}

VGPU_API Error cudaSetDevice(int device) {
  VGPU_ENTER();
  if (!is_device(device)) return fail(invalid_device);
  vgpu::current_device() = device;
  vgpu::open_context(device);
  return success;
}

VGPU_API Error cudaDriverGetVersion(int* version) {
  *version = as_int(machine().driver_version);
  return success;
}

VGPU_API Error cudaRuntimeGetVersion(int* version) {
  *version = VGPU_CUDA_VERSION;
  return success;
}

// CUDA 12 exports its layout as cudaGetDeviceProperties_v2.
VGPU_API Error cudaGetDeviceProperties(void* properties, int device) {
  if (!is_device(device)) return fail(invalid_device);
  write_properties(properties, device, false);
  return success;
}

VGPU_API Error cudaGetDeviceProperties_v2(void* properties, int device) {
  if (!is_device(device)) return fail(invalid_device);
  write_properties(properties, device, true);
  return success;
}

VGPU_API Error cudaDeviceGetAttribute(int* value, int number, int device) {
  if (!is_device(device)) return fail(invalid_device);
  *value = attribute(number, device);
  return success;
}

VGPU_API Error cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!is_device(device)) return fail(invalid_device);
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0", 0x10 + vgpu::physical_device(device));
  return success;
}

VGPU_API Error cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x", &bus) != 1) return fail(invalid_value);
  for (*device = 0; is_device(*device); ++*device)
    if (vgpu::physical_device(*device) + 0x10 == static_cast<int>(bus)) return success;
  return fail(invalid_value);
}

VGPU_API Error cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_device(device) || !is_device(peer)) return fail(invalid_device);
  *can = device != peer;
  return success;
}

VGPU_API Error cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  VGPU_ENTER();
  if (!is_device(peer) || peer == vgpu::current_device()) return fail(invalid_device);
  if (flags) return fail(invalid_value);
  bool was_enabled = peer_access[vgpu::current_device()][peer].exchange(true);
  return was_enabled ? fail(peer_access_enabled) : success;
}

VGPU_API Error cudaDeviceDisablePeerAccess(int peer) {
  VGPU_ENTER();
  if (!is_device(peer)) return fail(invalid_device);
  bool was_enabled = peer_access[vgpu::current_device()][peer].exchange(false);
  return was_enabled ? success : fail(peer_access_not_enabled);
}

VGPU_API Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = vgpu::kHighestPriority;
  return success;
}

VGPU_API Error cudaDeviceSynchronize() {
  VGPU_ENTER_UNSAFE();
  Call call("cudaDeviceSynchronize", 165);
  Guard held(vgpu::lock());
  vgpu::synchronize_device(held, vgpu::current_device());
  return success;
}

VGPU_API Error cudaDeviceSetLimit(int, std::size_t) { return success; }

VGPU_API Error cudaDeviceGetLimit(std::size_t* value, int) {
  *value = 1024;
  return success;
}

VGPU_API Error cudaProfilerStart() { return success; }
VGPU_API Error cudaProfilerStop() { return success; }

// ---- errors ----------------------------------------------------------------------------------------

VGPU_API Error cudaGetLastError() { return std::exchange(last_error, success); }
VGPU_API Error cudaPeekAtLastError() { return last_error; }

namespace {
struct ErrorText {
  Error error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {success, "cudaSuccess", "no error"},
    {invalid_value, "cudaErrorInvalidValue", "invalid argument"},
    {out_of_memory, "cudaErrorMemoryAllocation", "out of memory"},
    {initialization_error, "cudaErrorInitializationError", "initialization error"},
    {invalid_function, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {invalid_device, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {device_uninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {file_not_found, "cudaErrorFileNotFound", "file not found"},
    {invalid_handle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {illegal_state, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {symbol_not_found, "cudaErrorSymbolNotFound", "named symbol not found"},
    {not_ready, "cudaErrorNotReady", "device not ready"},
    {peer_access_enabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {peer_access_not_enabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {illegal_address, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {ecc_uncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {launch_timeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {not_permitted, "cudaErrorNotPermitted", "operation not permitted"},
    {not_supported, "cudaErrorNotSupported", "operation not supported"},
    {capture_unsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {capture_invalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {capture_unmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {capture_unjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {captured_event, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {device_lost, "cudaErrorUnknown", "unknown error"},
};
const ErrorText& text_of(Error error) {
  for (const ErrorText& entry : kErrors)
    if (entry.error == error) return entry;
  return kErrors[std::size(kErrors) - 1];
}
}  // namespace

VGPU_API const char* cudaGetErrorName(Error error) { return text_of(error).name; }
VGPU_API const char* cudaGetErrorString(Error error) { return text_of(error).text; }
