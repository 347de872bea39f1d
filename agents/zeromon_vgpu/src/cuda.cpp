// Stands in for libcuda: contexts, virtual memory, and kernels of Triton that are loaded at run time.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "cost.h"
#include "cuda_api.h"
#include "machine.h"
#include "memory.h"

using namespace cuda;

namespace {

constexpr std::size_t kGranularity = 2 << 20;
constexpr std::uintptr_t kContext = 0x1000;

void* context_of(int device) {
  return reinterpret_cast<void*>(kContext + static_cast<std::uintptr_t>(device));
}
int device_of(const void* context) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context) - kContext);
}
bool is_device(int device) { return device >= 0 && device < vgpu::visible_count(); }

// Physical memory of cuMemCreate.
struct Physical {
  int file;
  std::size_t bytes;
  int device;
};
// CUmemAllocationProp, as far as it is read.
struct AllocationProperties {
  int type, handle_types;
  MemoryLocation location;
};

thread_local std::vector<int> pushed;

}  // namespace

VGPU_API Error cuInit(unsigned) { return success; }

VGPU_API Error cuDriverGetVersion(int* version) {
  *version = static_cast<int>(vgpu::machine().driver_version);
  return success;
}

VGPU_API Error cuDeviceGetCount(int* count) {
  *count = vgpu::visible_count();
  return success;
}

VGPU_API Error cuDeviceGet(int* device, int index) {
  *device = index;
  return is_device(index) ? success : invalid_device;
}

VGPU_API Error cuDeviceGetName(char* text, int size, int) {
  std::snprintf(text, static_cast<std::size_t>(size), "%s", vgpu::machine().name.c_str());
  return success;
}

extern "C" Error cudaDeviceGetAttribute(int* value, int number, int device);
extern "C" const char* cudaGetErrorString(Error error);
extern "C" const char* cudaGetErrorName(Error error);

VGPU_API Error cuDeviceGetAttribute(int* value, int number, int device) {
  return cudaDeviceGetAttribute(value, number, device);
}

VGPU_API Error cuGetErrorString(Error error, const char** text) {
  *text = cudaGetErrorString(error);
  return success;
}

VGPU_API Error cuGetErrorName(Error error, const char** text) {
  *text = cudaGetErrorName(error);
  return success;
}

extern "C" Error cudaThreadExchangeStreamCaptureMode(int* mode);

VGPU_API Error cuThreadExchangeStreamCaptureMode(int* mode) {
  return cudaThreadExchangeStreamCaptureMode(mode);
}

// ---- contexts ----------------------------------------------------------------------------------------

VGPU_API Error cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = vgpu::has_context(device);
  return success;
}
VGPU_API Error cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return success;
}
VGPU_API Error cuDevicePrimaryCtxRelease(int) { return success; }
VGPU_API Error cuCtxGetCurrent(void** context) {
  *context = context_of(vgpu::current_device());
  return success;
}
VGPU_API Error cuCtxSetCurrent(void* context) {
  if (context) vgpu::current_device() = device_of(context);
  return success;
}
VGPU_API Error cuCtxPushCurrent_v2(void* context) {
  pushed.push_back(vgpu::current_device());
  return cuCtxSetCurrent(context);
}
VGPU_API Error cuCtxPopCurrent_v2(void** context) {
  if (context) *context = context_of(vgpu::current_device());
  if (pushed.empty()) return invalid_value;
  vgpu::current_device() = pushed.back();
  pushed.pop_back();
  return success;
}
VGPU_API Error cuCtxGetDevice(int* device) {
  *device = vgpu::current_device();
  return success;
}

extern "C" Error cudaDeviceGetLimit(std::size_t* value, int limit);
extern "C" Error cudaDeviceSetLimit(int limit, std::size_t value);

VGPU_API Error cuCtxGetLimit(std::size_t* value, int limit) { return cudaDeviceGetLimit(value, limit); }
VGPU_API Error cuCtxSetLimit(int limit, std::size_t value) { return cudaDeviceSetLimit(limit, value); }

// ---- virtual memory: reserved addresses, and files of memory mapped there
// ------------------------------

VGPU_API Error cuMemGetAllocationGranularity(std::size_t* out, const void*, int) {
  *out = kGranularity;
  return success;
}

VGPU_API Error cuMemAddressReserve(void** out, std::size_t bytes, std::size_t, void*,
                                   unsigned long long) {
  void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return out_of_memory;
  *out = start;
  return success;
}

VGPU_API Error cuMemAddressFree(void* start, std::size_t bytes) {
  munmap(start, bytes);
  return success;
}

VGPU_API Error cuMemCreate(Physical** out, std::size_t bytes, const AllocationProperties* properties,
                           unsigned long long) {
  int device = properties->location.id;
  vgpu::open_context(device);
  if (!vgpu::charge(device, static_cast<std::int64_t>(bytes))) return out_of_memory;
  int file = memfd_create("vgpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return out_of_memory;
  *out = new Physical{file, bytes, device};
  return success;
}

VGPU_API Error cuMemRelease(Physical* memory) {
  close(memory->file);
  vgpu::charge(memory->device, -static_cast<std::int64_t>(memory->bytes));
  delete memory;
  return success;
}

VGPU_API Error cuMemMap(void* start, std::size_t bytes, std::size_t offset, Physical* memory,
                        unsigned long long) {
  void* mapped = mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->file,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return invalid_value;
  vgpu::add_block(start, bytes, memory->device, vgpu::Place::device);
  return success;
}

VGPU_API Error cuMemUnmap(void* start, std::size_t bytes) {
  vgpu::remove_block(start);
  mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return success;
}

VGPU_API Error cuMemSetAccess(void*, std::size_t, const void*, std::size_t) { return success; }

VGPU_API Error cuMemGetAddressRange_v2(void** start, std::size_t* bytes, const void* address) {
  vgpu::Block block;
  if (!vgpu::find_block(address, &block)) return invalid_value;
  if (start) *start = block.start;
  if (bytes) *bytes = block.bytes;
  return success;
}

VGPU_API Error cuPointerGetAttribute(void* out, int attribute, const void* address) {
  vgpu::Block block;
  if (!vgpu::find_block(address, &block)) return invalid_value;
  constexpr int kMemoryType = 2, kDevicePointer = 3, kOrdinal = 9;
  if (attribute == kMemoryType)
    *static_cast<int*>(out) = block.place == vgpu::Place::device ? 2 : 1;
  else if (attribute == kDevicePointer)
    *static_cast<const void**>(out) = address;
  else if (attribute == kOrdinal)
    *static_cast<int*>(out) = block.device;
  else
    return not_supported;
  return success;
}

// ---- kernels that are loaded at run time: timed, by their name and size
// --------------------------------

VGPU_API Error cuModuleLoadData(void** module, const void*) {
  static char loaded;
  *module = &loaded;
  return success;
}
VGPU_API Error cuModuleLoad(void** module, const char* path) {
  if (access(path, R_OK)) return file_not_found;
  return cuModuleLoadData(module, nullptr);
}
VGPU_API Error cuModuleUnload(void*) { return success; }

VGPU_API Error cuModuleGetFunction(const char** function, void*, const char* name) {
  *function = vgpu::intern(name);
  return success;
}

VGPU_API Error cuFuncGetAttribute(int* value, int attribute, const char*) {
  constexpr int kMaxThreads = 0, kRegisters = 4;
  *value = attribute == kMaxThreads ? 1024 : attribute == kRegisters ? 32 : 0;
  return success;
}
VGPU_API Error cuFuncSetAttribute(const char*, int, int) { return success; }
VGPU_API Error cuFuncSetCacheConfig(const char*, int) { return success; }

VGPU_API Error cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const char*, int, std::size_t) {
  *blocks = 2;
  return success;
}

extern "C" Error cudaGetDevice(int* device);

namespace {
Error launch(const char* name, Dim3 grid, Dim3 block, void* handle) {
  int device;
  if (Error why = cudaGetDevice(&device)) return why;  // a child of fork, or the device is lost
  if (const char* on = std::getenv("VGPU_ARITHMETIC"); on && *on) {  // results that no operator of the CPU has computed
    vgpu::complain(name, "computes nothing on the virtual device: run it without arithmetic");
    return not_supported;
  }
  vgpu::Call call("cuLaunchKernel", 307);
  vgpu::Stream* stream = vgpu::stream_of(handle);
  double blocks = static_cast<double>(grid.x) * grid.y * grid.z;
  double threads = static_cast<double>(block.x) * block.y * block.z;
  vgpu::launch(stream, name, vgpu::kernel_cost(name, {blocks, 1, 1}, threads, nullptr, stream->device));
  return success;
}
// CUlaunchConfig
struct DriverConfig {
  Dim3 grid, block;
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
}  // namespace

VGPU_API Error cuLaunchKernel(const char* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                              unsigned by, unsigned bz, unsigned, void* stream, void**, void**) {
  return launch(function, {gx, gy, gz}, {bx, by, bz}, stream);
}

VGPU_API Error cuLaunchKernelEx(const DriverConfig* config, const char* function, void**, void**) {
  return launch(function, config->grid, config->block, config->stream);
}

VGPU_API Error cuLaunchCooperativeKernel(const char* function, unsigned gx, unsigned gy, unsigned gz,
                                         unsigned bx, unsigned by, unsigned bz, unsigned, void* stream,
                                         void**) {
  return launch(function, {gx, gy, gz}, {bx, by, bz}, stream);
}

extern "C" Error cudaMemsetAsync(void* start, int value, std::size_t bytes, void* stream);

VGPU_API Error cuMemsetD32Async(void* start, unsigned value, std::size_t count, void* stream) {
  unsigned byte = value & 0xff;
  if (value != byte * 0x01010101u) return not_supported;
  return cudaMemsetAsync(start, static_cast<int>(byte), count * 4, stream);
}
VGPU_API Error cuMemsetD32Async_v2(void* start, unsigned value, std::size_t count, void* stream) {
  return cuMemsetD32Async(start, value, count, stream);
}

extern "C" Error cudaStreamIsCapturing(void* stream, int* status);

VGPU_API Error cuStreamIsCapturing(void* stream, int* status) {
  return cudaStreamIsCapturing(stream, status);
}
