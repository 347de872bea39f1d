// Stands in for libnvidia-ml: memory, processes and utilization from the board, faults from the plan.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda_api.h"
#include "device.h"
#include "machine.h"
#include "memory.h"

namespace {

enum Result : int {
  ok = 0,
  invalid_argument = 2,
  not_supported = 3,
  not_found = 6,
  too_small = 7,
  timeout = 10,
  gpu_is_lost = 15
};
constexpr double kIdleWatts = 70, kLimitWatts = 700;
constexpr double kSampleSeconds = 0.1;  // NVML averages over 1/6 to 1 second

int index_of(const void* handle) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1;
}
void* handle_of(unsigned index) { return reinterpret_cast<void*>(std::uintptr_t{index} + 1); }
unsigned device_count() { return static_cast<unsigned>(vgpu::machine().devices); }

const vgpu::Fault* active(const char* kind, int device) {
  for (const vgpu::Fault& fault : vgpu::faults())
    if (fault.kind == kind && (fault.device < 0 || fault.device == device) && vgpu::uptime() >= fault.at)
      return &fault;
  return nullptr;
}

// A device off the bus: NVML still counts it, and every question about it fails.
bool is_lost(const void* handle) { return active("lost", index_of(handle)); }

double busy_seconds(int device) {
  double most = 0;  // processes on one device take turns at best
  for (const vgpu::Seat& seat : vgpu::board()->seats) {
    if (!vgpu::is_here(seat)) continue;
    vgpu::Time since = seat.busy_since[device], running = since ? vgpu::now() - since : 0;
    most += static_cast<double>(seat.busy_ns[device] + std::max<vgpu::Time>(running, 0)) / 1e9;
  }
  return most;
}

double utilization(int device) {
  struct Sample {
    double time = 0, busy = 0, share = 0;
  };
  static std::mutex lock;
  static Sample samples[vgpu::kMaxDevices];
  std::lock_guard<std::mutex> held(lock);
  Sample& last = samples[device];
  double time = static_cast<double>(vgpu::now()) / 1e9, busy = busy_seconds(device);
  if (time - last.time >= kSampleSeconds) {
    double share = last.time > 0 ? (busy - last.busy) / (time - last.time) : busy > 0;
    last = {time, busy, std::clamp(share, 0.0, 1.0)};
  }
  return last.share;
}

double watts(int device) { return kIdleWatts + (kLimitWatts - kIdleWatts) * utilization(device); }

struct Memory {
  unsigned long long total, free, used;
};
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct Process1 {
  unsigned pid;
  unsigned long long bytes;
};
struct Process {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};
// nvmlEventData_t
struct Event {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
// nvmlGpuFabricInfoV_t, as far as it is read
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};
// A sample of GPM: when it was taken, and seconds of full use of each unit by all processes until then.
struct GpmSample {
  vgpu::Time time = 0;
  double used[vgpu::kUnits] = {};
};
struct GpmSupport {
  unsigned version, is_supported;
};
// nvmlGpmMetric_t and nvmlGpmMetricsGet_t
struct GpmMetric {
  unsigned id;
  int result;
  double value;
  const char *short_name, *long_name, *unit;
};
struct GpmMetrics {
  unsigned version, count;
  GpmSample *before, *after;
  GpmMetric metrics[];
};

// The units that a process of the run has used, as its clock thread last counted them. A process that
// was killed while it wrote has left them odd for good.
GpmSample read_activity(const vgpu::Activity& activity) {
  GpmSample sample;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    unsigned version = activity.version;
    sample.time = activity.counted;
    for (int unit = 0; unit < vgpu::kUnits; ++unit)
      sample.used[unit] = activity.used[unit];
    if (version % 2 == 0 && version == activity.version) break;
  }
  return sample;
}

// Which of our units a metric shows; kUnits: none.
int unit_of_metric(unsigned id) {
  switch (id) {
    case 2: return vgpu::kMultiprocessors;   // NVML_GPM_METRIC_SM_UTIL
    case 5: return vgpu::kTensorCores;       // NVML_GPM_METRIC_ANY_TENSOR_UTIL
    case 10: return vgpu::kMemoryBandwidth;  // NVML_GPM_METRIC_DRAM_BW_UTIL
  }
  return vgpu::kUnits;
}

constexpr unsigned long long kXid = 8;  // nvmlEventTypeXidCriticalError

}  // namespace

#define API VGPU_API Result
#define NVML_ENTER(handle) \
  if (is_lost(handle)) return gpu_is_lost

API nvmlInit() { return ok; }
API nvmlInit_v2() { return ok; }
API nvmlInitWithFlags(unsigned) { return ok; }
API nvmlShutdown() { return ok; }

VGPU_API const char* nvmlErrorString(Result result) {
  switch (result) {
    case ok: return "Success";
    case invalid_argument: return "Invalid Argument";
    case not_supported: return "Not Supported";
    case not_found: return "Not Found";
    case too_small: return "Insufficient Size";
    case timeout: return "Timeout";
    case gpu_is_lost: return "GPU is lost";
  }
  return "Unknown Error";
}

API nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.82.07");
  return ok;
}
API nvmlSystemGetNVMLVersion(char* text, unsigned size) {
  std::snprintf(text, size, "13.580.82.07");
  return ok;
}
API nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = static_cast<int>(vgpu::machine().driver_version);
  return ok;
}
API nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API nvmlDeviceGetCount_v2(unsigned* count) {
  *count = device_count();
  return ok;
}
API nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= device_count()) return invalid_argument;
  NVML_ENTER(handle_of(index));
  *handle = handle_of(index);
  return ok;
}
API nvmlDeviceGetHandleByIndex(unsigned index, void** handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

// Identifiers are those of cudaGetDeviceProperties.
API nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  NVML_ENTER(handle);
  std::snprintf(text, size, "GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a%02x", index_of(handle) + 1);
  return ok;
}
API nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  unsigned last = 0;
  std::size_t size = std::strlen(uuid);
  if (size < 2 || std::sscanf(uuid + size - 2, "%x", &last) != 1 || last < 1 || last > device_count())
    return not_found;
  *handle = handle_of(last - 1);
  return ok;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x", &bus) != 1 || bus < 0x10 || bus - 0x10 >= device_count())
    return not_found;
  *handle = handle_of(bus - 0x10);
  return ok;
}
API nvmlDeviceGetIndex(void* handle, unsigned* index) {
  *index = static_cast<unsigned>(index_of(handle));
  return ok;
}
API nvmlDeviceGetMinorNumber(void* handle, unsigned* index) { return nvmlDeviceGetIndex(handle, index); }
API nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::snprintf(text, size, "%s", vgpu::machine().name.c_str());
  return ok;
}
API nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = static_cast<int>(vgpu::machine().major);
  *minor = static_cast<int>(vgpu::machine().minor);
  return ok;
}

API nvmlDeviceGetMemoryInfo(void* handle, Memory* out) {
  NVML_ENTER(handle);
  unsigned long long total = vgpu::memory_limit(index_of(handle));
  unsigned long long used = vgpu::used_bytes(index_of(handle));
  *out = {total, total - std::min(used, total), used};
  return ok;
}
API nvmlDeviceGetMemoryInfo_v2(void* handle, Memory2* out) {
  Memory plain;
  nvmlDeviceGetMemoryInfo(handle, &plain);
  *out = {out->version, plain.total, 0, plain.free, plain.used};
  return ok;
}

API nvmlDeviceGetUtilizationRates(void* handle, Utilization* out) {
  NVML_ENTER(handle);
  auto percent = static_cast<unsigned>(utilization(index_of(handle)) * 100 + 0.5);
  *out = {percent, percent / 2};
  return ok;
}
API nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  NVML_ENTER(handle);
  *milliwatts = static_cast<unsigned>(watts(index_of(handle)) * 1000);
  return ok;
}
API nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) {
  *milliwatts = static_cast<unsigned>(kLimitWatts * 1000);
  return ok;
}
API nvmlDeviceGetPowerManagementLimit(void* handle, unsigned* milliwatts) {
  return nvmlDeviceGetEnforcedPowerLimit(handle, milliwatts);
}
// Millijoules since the run began.
API nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  NVML_ENTER(handle);
  double joules =
      kIdleWatts * vgpu::uptime() + (kLimitWatts - kIdleWatts) * busy_seconds(index_of(handle));
  *millijoules = static_cast<unsigned long long>(std::max(joules, 0.0) * 1000);
  return ok;
}
API nvmlDeviceGetTemperature(void* handle, int, unsigned* celsius) {
  NVML_ENTER(handle);
  *celsius = static_cast<unsigned>(35 + 30 * utilization(index_of(handle)));
  return ok;
}
API nvmlDeviceGetMaxClockInfo(void* handle, int type, unsigned* megahertz) {
  NVML_ENTER(handle);
  *megahertz = type == 2 ? 2619 : static_cast<unsigned>(vgpu::machine().clock_hz / 1e6);
  return ok;
}
API nvmlDeviceGetClockInfo(void* handle, int type, unsigned* megahertz) {
  NVML_ENTER(handle);
  nvmlDeviceGetMaxClockInfo(handle, type, megahertz);
  const vgpu::Fault* slow = active("slow", index_of(handle));
  if (slow && type != 2) *megahertz = static_cast<unsigned>(*megahertz / slow->factor);
  return ok;
}
// The reasons of a planned throttle: `code` is NVML's bit mask.
API nvmlDeviceGetCurrentClocksEventReasons(void* handle, unsigned long long* reasons) {
  NVML_ENTER(handle);
  const vgpu::Fault* throttled = active("throttle", index_of(handle));
  *reasons = throttled ? static_cast<unsigned long long>(throttled->code) : 0;
  return ok;
}
API nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) {
  return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}
// Planned `ecc` errors: type 1 is uncorrected.
API nvmlDeviceGetTotalEccErrors(void* handle, int type, int, unsigned long long* count) {
  NVML_ENTER(handle);
  const vgpu::Fault* errors = active("ecc", index_of(handle));
  *count = errors && type == 1 ? static_cast<unsigned long long>(std::max(errors->factor, 1.0)) : 0;
  return ok;
}

API nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* out) {
  NVML_ENTER(handle);
  unsigned found = 0, room = *count;
  for (const vgpu::Seat& seat : vgpu::board()->seats) {
    std::uint64_t bytes = seat.bytes[index_of(handle)];
    if (!bytes || !vgpu::is_here(seat)) continue;
    if (out && found < room) out[found] = {static_cast<unsigned>(seat.pid), bytes, ~0u, ~0u};
    ++found;
  }
  *count = found;
  return found > room ? too_small : ok;
}
// The first version, under the plain name, has shorter records.
API nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, Process1* out) {
  Process all[vgpu::kMaxProcesses];
  unsigned room = *count;
  *count = vgpu::kMaxProcesses;
  nvmlDeviceGetComputeRunningProcesses_v3(handle, count, all);
  for (unsigned i = 0; out && i < std::min(*count, room); ++i)
    out[i] = {all[i].pid, all[i].bytes};
  return *count > room ? too_small : ok;
}
API nvmlDeviceGetComputeRunningProcesses_v2(void* handle, unsigned* count, Process* out) {
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}

API nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 5;
  return ok;
}
API nvmlDeviceGetCurrPcieLinkGeneration(void* handle, unsigned* generation) {
  return nvmlDeviceGetMaxPcieLinkGeneration(handle, generation);
}
API nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* width) {
  *width = 16;
  return ok;
}
API nvmlDeviceGetCurrPcieLinkWidth(void* handle, unsigned* width) {
  return nvmlDeviceGetMaxPcieLinkWidth(handle, width);
}
API nvmlDeviceGetNvLinkState(void*, unsigned link, int* active_state) {
  *active_state = link < 18;
  return link < 18 ? ok : invalid_argument;
}
API nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = 0;
  return ok;
}
API nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* out) {
  out->state = 0;  // no fabric over several nodes
  return ok;
}
API nvmlDeviceGetMigMode(void*, unsigned* current, unsigned* pending) {
  *current = *pending = 0;
  return not_supported;
}

// ---- GPM: how much of the device's units was in use between two samples

API nvmlGpmQueryDeviceSupport(void* handle, GpmSupport* out) {
  NVML_ENTER(handle);
  out->is_supported = vgpu::machine().major >= 9;
  return ok;
}
API nvmlGpmSampleAlloc(GpmSample** out) {
  *out = new GpmSample;
  return ok;
}
API nvmlGpmSampleFree(GpmSample* sample) {
  delete sample;
  return ok;
}
API nvmlGpmSampleGet(void* handle, GpmSample* out) {
  NVML_ENTER(handle);
  if (vgpu::machine().major < 9) return not_supported;
  *out = {};
  for (const vgpu::Seat& seat : vgpu::board()->seats) {
    if (!vgpu::is_alive(seat)) continue;
    GpmSample one = read_activity(seat.activity[index_of(handle)]);
    out->time = std::max(out->time, one.time);
    for (int unit = 0; unit < vgpu::kUnits; ++unit)
      out->used[unit] += one.used[unit];
  }
  if (!out->time) out->time = vgpu::now();
  return ok;
}
API nvmlGpmMetricsGet(GpmMetrics* asked) {
  double seconds = static_cast<double>(asked->after->time - asked->before->time) / 1e9;
  if (seconds <= 0) return invalid_argument;
  for (unsigned i = 0; i < asked->count; ++i) {
    GpmMetric& metric = asked->metrics[i];
    int unit = unit_of_metric(metric.id);
    metric.result = unit == vgpu::kUnits ? not_supported : ok;
    if (metric.result != ok) continue;
    double used = asked->after->used[unit] - asked->before->used[unit];
    metric.value = 100 * std::clamp(used / seconds, 0.0, 1.0);
  }
  return ok;
}

// ---- Xids: a planned `xid` is one event of the device
// -------------------------------------------------

API nvmlEventSetCreate(void** set) {
  *set = new bool[vgpu::kMaxDevices]();
  return ok;
}
API nvmlEventSetFree(void* set) {
  delete[] static_cast<bool*>(set);
  return ok;
}
API nvmlDeviceRegisterEvents(void*, unsigned long long types, void*) {
  return types & kXid ? ok : not_supported;
}
API nvmlEventSetWait_v2(void* set, Event* out, unsigned milliseconds) {
  auto* told = static_cast<bool*>(set);
  vgpu::Time until = vgpu::now() + vgpu::Time{milliseconds} * 1000000;
  for (;;) {
    for (int device = 0; device < static_cast<int>(device_count()); ++device) {
      const vgpu::Fault* xid = active("xid", device);
      if (!xid || told[device]) continue;
      told[device] = true;
      *out = {handle_of(static_cast<unsigned>(device)), kXid, static_cast<unsigned long long>(xid->code),
              ~0u, ~0u};
      return ok;
    }
    if (vgpu::now() >= until) return timeout;
    timespec nap{0, 5000000};
    nanosleep(&nap, nullptr);
  }
}
API nvmlEventSetWait(void* set, Event* out, unsigned milliseconds) {
  return nvmlEventSetWait_v2(set, out, milliseconds);
}
