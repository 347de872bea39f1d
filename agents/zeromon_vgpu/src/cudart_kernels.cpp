// libcudart: kernels. Their code never runs: a launch is an operation of the roofline's duration.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "cost.h"
#include "cudart.h"
#include "machine.h"
#include "values.h"

using namespace cuda;
using namespace cudart;
using vgpu::Call;
using vgpu::stream_of;

namespace {

std::mutex names_lock;
std::unordered_map<const void*, const char*>& names() {
  static auto* all = new std::unordered_map<const void*, const char*>;
  return *all;
}

const char* name_of(const void* function) {
  std::lock_guard<std::mutex> held(names_lock);
  auto found = names().find(function);
  return found == names().end() ? "kernel" : found->second;
}

double count(Dim3 size) { return static_cast<double>(size.x) * size.y * size.z; }

// Starts are the triple-angle calls of compiled code: the configuration is pushed, then popped.
struct Pushed {
  Dim3 grid, block;
  std::size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Pushed> pushed;

Error launch(const void* function, Dim3 grid, Dim3 block, void** args, void* handle) {
  VGPU_ENTER();
  Call call("cudaLaunchKernel", 211);
  vgpu::Stream* stream = stream_of(handle);
  const char* name = name_of(function);
  vgpu::Grid blocks{static_cast<double>(grid.x), static_cast<double>(grid.y),
                    static_cast<double>(grid.z)};
  vgpu::Cost cost = vgpu::kernel_cost(name, blocks, count(block), args, stream->device);
  launch(stream, name, cost, vgpu::small_kernel(name, grid.y, args));
  return success;
}

}  // namespace

VGPU_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
VGPU_API void __cudaRegisterFatBinaryEnd(void**) {}
VGPU_API void __cudaUnregisterFatBinary(void**) {}
VGPU_API char __cudaInitModule(void**) { return 1; }
VGPU_API void __cudaRegisterFunction(void**, const void* function, char*, const char* name, int, void*,
                                     void*, void*, void*, int*) {
  std::lock_guard<std::mutex> held(names_lock);
  names()[function] = name;
}
VGPU_API void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
VGPU_API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int, int) {}

VGPU_API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared, void* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}

VGPU_API Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared, void** stream) {
  Pushed last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared_bytes;
  *stream = last.stream;
  return success;
}

VGPU_API Error __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return success;
}

VGPU_API Error __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, std::size_t,
                                  void* stream) {
  return launch(kernel, grid, block, args, stream);
}

VGPU_API Error cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, std::size_t,
                                void* stream) {
  return launch(function, grid, block, args, stream);
}

VGPU_API Error cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** args,
                                           std::size_t, void* stream) {
  return launch(function, grid, block, args, stream);
}

VGPU_API Error cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** args) {
  return launch(function, config->grid, config->block, args, config->stream);
}

namespace {
// The architecture of torch's builds that such a device loads: CUB looks for exactly that one.
int architecture() {
  int major = static_cast<int>(vgpu::machine().major), minor = static_cast<int>(vgpu::machine().minor);
  if (major == 7) return minor < 5 ? 70 : 75;
  return major == 8 && minor >= 6 ? 86 : major * 10;
}
}  // namespace

VGPU_API Error cudaFuncGetAttributes(FunctionAttributes* out, const void*) {
  std::memset(out, 0, offsetof(FunctionAttributes, cluster_size_set));
  out->max_threads_per_block = 1024;
  out->registers = 32;
  out->ptx_version = out->binary_version = architecture();
  out->max_dynamic_shared_bytes = 232448;
  return success;
}

VGPU_API Error cudaFuncSetAttribute(const void*, int, int) { return success; }
VGPU_API Error cudaFuncSetCacheConfig(const void*, int) { return success; }
VGPU_API Error cudaKernelSetAttributeForDevice(const void*, int, int, int) { return success; }

VGPU_API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                             std::size_t) {
  *blocks = 2;
  return success;
}

VGPU_API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                      std::size_t, unsigned) {
  *blocks = 2;
  return success;
}

VGPU_API Error cudaOccupancyMaxActiveClusters(int* clusters, const void*, const LaunchConfig*) {
  *clusters = 16;
  return success;
}

// ---- libraries of kernels ----------------------------------------------------------------------------

VGPU_API Error cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**,
                                   unsigned) {
  static char loaded;
  *library = &loaded;
  return success;
}

VGPU_API Error cudaLibraryUnload(void*) { return success; }

VGPU_API Error cudaLibraryGetKernel(const void** kernel, void*, const char* name) {
  const char* kept = vgpu::intern(name);
  std::lock_guard<std::mutex> held(names_lock);
  names()[kept] = kept;
  *kernel = kept;
  return success;
}

// ---- host functions ----------------------------------------------------------------------------------

namespace {

class HostCall : public vgpu::Action {
public:
  explicit HostCall(std::function<void()> function) : function_(std::move(function)) {}
  bool move() override {
    function_();
    done_ = vgpu::now();
    return true;
  }
  bool moves_on_time() const override { return true; }
  vgpu::Time end(vgpu::Time start, vgpu::Time) override {
    return done_ == vgpu::kUnknown ? vgpu::kUnknown : std::max(start, done_.load());
  }
  std::unique_ptr<Action> copy() const override { return std::make_unique<HostCall>(function_); }

private:
  std::function<void()> function_;
  std::atomic<vgpu::Time> done_{vgpu::kUnknown};
};

Error enqueue_host(void* stream, std::function<void()> function) {
  VGPU_ENTER();
  auto op = std::make_unique<vgpu::Op>();
  op->kind = vgpu::Kind::host;
  op->name = "host function";
  op->action = std::make_unique<HostCall>(std::move(function));
  vgpu::enqueue(stream_of(stream), std::move(op));
  return success;
}

}  // namespace

VGPU_API Error cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue_host(stream, [=] { function(data); });
}

VGPU_API Error cudaStreamAddCallback(void* stream, void (*function)(void*, Error, void*), void* data,
                                     unsigned) {
  return enqueue_host(stream, [=] { function(stream, success, data); });
}

// ---- the driver's entry points -----------------------------------------------------------------------

VGPU_API Error cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                unsigned long long, int* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  std::string name = symbol;
  void* found = driver ? dlsym(driver, (name + "_v2").c_str()) : nullptr;
  if (!found && driver) found = dlsym(driver, symbol);
  *function = found;
  if (status) *status = found ? 0 : 1;  // cudaDriverEntryPointSuccess, SymbolNotFound
  return success;                       // the status says what was not found
}

VGPU_API Error cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                       int* status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, status);
}
