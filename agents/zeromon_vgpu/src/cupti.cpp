// Stands in for libcupti: activity records of the device, from which torch's profiler writes its traces.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "cuda_api.h"
#include "device.h"

namespace {

enum Result : int { ok = 0, max_limit_reached = 12, queue_empty = 18 };
enum Kind : int {
  memcpy_kind = 1,
  memset_kind = 2,
  driver = 4,
  runtime = 5,
  kernel = 10,
  correlation = 39
};
constexpr int kKinds = 128, kStacks = 8;

// The records of CUPTI 13, as documented: CUpti_ActivityKernel10, Memcpy6, Memset4, API and
// ExternalCorrelation.
struct alignas(8) KernelRecord {
  Kind kind;
  std::uint8_t cache_config, shared_config;
  std::uint16_t registers;
  std::uint32_t launch_type, cache_request;
  std::uint64_t start, end, completed;
  std::uint32_t device, context, stream;
  std::int32_t grid[3], block[3];
  std::int32_t static_shared, dynamic_shared;
  std::uint32_t local_per_thread, local_total, correlation;
  std::int64_t grid_id;
  const char* name;
  char rest[104];
};
static_assert(sizeof(KernelRecord) == 216);
static_assert(offsetof(KernelRecord, correlation) == 92 && offsetof(KernelRecord, name) == 104);

struct alignas(8) CopyRecord {
  Kind kind;
  std::uint8_t direction, source, target, flags;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
  char rest[48];
};
static_assert(sizeof(CopyRecord) == 96 && offsetof(CopyRecord, correlation) == 44);

struct alignas(8) FillRecord {
  Kind kind;
  std::uint32_t value;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
  std::uint16_t flags, memory;
  char rest[36];
};
static_assert(sizeof(FillRecord) == 88 && offsetof(FillRecord, memory) == 50);

struct alignas(8) CallRecord {
  Kind kind;
  std::uint32_t id;
  std::uint64_t start, end;
  std::uint32_t process, thread, correlation, result;
};
static_assert(sizeof(CallRecord) == 40);

struct alignas(8) CorrelationRecord {
  Kind kind;
  std::int32_t external_kind;
  std::uint64_t external;
  std::uint32_t correlation, reserved;
};
static_assert(sizeof(CorrelationRecord) == 24);

using RequestBuffer = void (*)(std::uint8_t**, std::size_t*, std::size_t*);
using BufferDone = void (*)(void*, std::uint32_t, std::uint8_t*, std::size_t, std::size_t);

struct State {
  std::mutex lock;
  RequestBuffer request = nullptr;
  BufferDone done = nullptr;
  std::uint64_t (*timestamp)() = nullptr;
  std::vector<std::string> records;  // raw bytes: cheap to keep, and of several sizes
  std::map<std::uint32_t, std::string> call_names;
  // Our clock at the first anchor, the profiler's then, and how much faster its clock runs.
  vgpu::Time our_anchor = 0;
  std::uint64_t their_anchor = 0;
  double ratio = 1;
  std::uint8_t* early = nullptr;
  std::size_t early_size = 0, early_most = 0;
};

State& state() {
  static auto* made = new State;
  return *made;
}
std::atomic<bool> enabled[kKinds];
thread_local std::vector<std::uint64_t> stacks[kStacks];

template <class Record>
void keep(const Record& record) {
  std::lock_guard<std::mutex> held(state().lock);
  state().records.emplace_back(reinterpret_cast<const char*>(&record), sizeof record);
}

std::uint64_t stamp(vgpu::Time time) { return static_cast<std::uint64_t>(time); }

void on_operation(const vgpu::Op& op) {
  if (op.kind == vgpu::Kind::copy && enabled[memcpy_kind]) {
    CopyRecord r{};
    r.kind = memcpy_kind;
    constexpr std::uint8_t host_to_device = 1, device_to_host = 2, on_device = 8;
    constexpr std::uint8_t pageable = 1, pinned = 2, device = 3;
    std::uint8_t host = std::strstr(op.name, "pageable") ? pageable : pinned;
    bool up = op.direction == vgpu::Direction::to_device,
         down = op.direction == vgpu::Direction::to_host;
    r.direction = up ? host_to_device : down ? device_to_host : on_device;
    r.source = up ? host : device;
    r.target = down ? host : device;
    r.bytes = static_cast<std::uint64_t>(op.bytes);
    r.start = stamp(op.start);
    r.end = stamp(op.finish);
    r.device = static_cast<std::uint32_t>(op.device);
    r.context = 1;
    r.stream = op.stream;
    r.correlation = op.correlation;
    keep(r);
  } else if (op.kind == vgpu::Kind::fill && enabled[memset_kind]) {
    FillRecord r{};
    r.kind = memset_kind;
    r.bytes = static_cast<std::uint64_t>(op.bytes);
    r.start = stamp(op.start);
    r.end = stamp(op.finish);
    r.device = static_cast<std::uint32_t>(op.device);
    r.context = 1;
    r.stream = op.stream;
    r.correlation = op.correlation;
    r.memory = 3;
    keep(r);
  } else if ((op.kind == vgpu::Kind::kernel || op.kind == vgpu::Kind::collective) && enabled[kernel]) {
    KernelRecord r{};
    r.kind = kernel;
    r.registers = 32;
    r.start = stamp(op.start);
    r.end = r.completed = stamp(op.finish);
    r.device = static_cast<std::uint32_t>(op.device);
    r.context = 1;
    r.stream = op.stream;
    r.correlation = op.correlation;
    r.name = op.name;
    for (int i = 0; i < 3; ++i)
      r.grid[i] = r.block[i] = 1;
    keep(r);
  }
}

void on_call(const vgpu::Call& call, vgpu::Time end) {
  for (int kind = 0; kind < kStacks; ++kind) {
    if (!enabled[correlation] || stacks[kind].empty()) continue;
    keep(CorrelationRecord{correlation, kind, stacks[kind].back(), call.correlation, 0});
  }
  if (!enabled[runtime]) return;
  auto thread = static_cast<std::uint32_t>(syscall(SYS_gettid));
  keep(CallRecord{runtime, call.id, stamp(call.start), stamp(end), static_cast<std::uint32_t>(getpid()),
                  thread, call.correlation, 0});
  std::lock_guard<std::mutex> held(state().lock);
  state().call_names[call.id] = call.name;
}

void listen() {
  static const vgpu::Listener listener{on_operation, on_call};
  bool any = false;
  for (const auto& on : enabled)
    any |= on;
  vgpu::set_listener(any ? &listener : nullptr);
}

void set_anchor() {
  State& s = state();
  s.our_anchor = vgpu::now();
  s.their_anchor = s.timestamp ? s.timestamp() : stamp(s.our_anchor);
}

// The profiler's clock may be another (the processor's counter): its rate is measured since the anchor.
void measure_clock() {
  State& s = state();
  if (!s.timestamp) return;
  vgpu::Time passed = vgpu::now() - s.our_anchor;
  if (passed > 1000000)
    s.ratio = static_cast<double>(s.timestamp() - s.their_anchor) / static_cast<double>(passed);
}

std::uint64_t convert(std::uint64_t time) {
  const State& s = state();
  double since = static_cast<double>(static_cast<vgpu::Time>(time) - s.our_anchor) * s.ratio;
  return s.their_anchor + static_cast<std::uint64_t>(static_cast<std::int64_t>(since));
}

template <class Record>
void convert_times(std::string& bytes) {
  auto* record = reinterpret_cast<Record*>(bytes.data());
  record->start = convert(record->start);
  record->end = convert(record->end);
}

Kind kind_of(const void* record) {
  Kind kind;
  std::memcpy(&kind, record, sizeof kind);
  return kind;
}

std::size_t size_of(Kind kind) {
  switch (kind) {
    case kernel: return sizeof(KernelRecord);
    case memcpy_kind: return sizeof(CopyRecord);
    case memset_kind: return sizeof(FillRecord);
    case runtime: return sizeof(CallRecord);
    case correlation: return sizeof(CorrelationRecord);
    default: return 0;
  }
}

// Fills the buffers that the profiler hands out, one after the other.
class Writer {
public:
  void put(const std::string& record) {
    if (!buffer_ || used_ + record.size() > size_) {
      close();
      open();
    }
    std::memcpy(buffer_ + used_, record.data(), record.size());
    used_ += record.size();
  }
  void close() {
    if (buffer_) state().done(nullptr, 0, buffer_, size_, used_);
    buffer_ = nullptr;
  }

private:
  void open() {
    State& s = state();
    std::size_t most = 0;
    if (s.early) {
      buffer_ = s.early;
      size_ = s.early_size;
      s.early = nullptr;
    } else {
      s.request(&buffer_, &size_, &most);
    }
    used_ = 0;
  }
  std::uint8_t* buffer_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

}  // namespace

VGPU_API Result cuptiGetVersion(std::uint32_t* version) {
  *version = 130001;
  return ok;
}
VGPU_API Result cuptiGetResultString(Result, const char** text) {
  *text = "error of the virtual CUPTI";
  return ok;
}

VGPU_API Result cuptiActivityRegisterCallbacks(RequestBuffer request, BufferDone done) {
  state().request = request;
  state().done = done;
  set_anchor();
  return ok;
}
VGPU_API Result cuptiActivityRegisterTimestampCallback(std::uint64_t (*timestamp)()) {
  state().timestamp = timestamp;
  set_anchor();
  return ok;
}

VGPU_API Result cuptiActivityEnable(Kind kind) {
  State& s = state();
  if (!s.our_anchor) set_anchor();
  if (kind >= 0 && kind < kKinds) enabled[kind] = true;
  listen();
  // Kineto flushes only if a buffer was asked for.
  if (!s.early && s.request) s.request(&s.early, &s.early_size, &s.early_most);
  return ok;
}
VGPU_API Result cuptiActivityDisable(Kind kind) {
  if (kind >= 0 && kind < kKinds) enabled[kind] = false;
  listen();
  return ok;
}
VGPU_API Result cuptiActivityEnableRuntimeApi(std::uint32_t, std::uint8_t) { return ok; }
VGPU_API Result cuptiActivityEnableDriverApi(std::uint32_t, std::uint8_t) { return ok; }
VGPU_API Result cuptiActivityEnableCudaEventDeviceTimestamps(std::uint8_t) { return ok; }
VGPU_API Result cuptiActivitySetAttribute(int, std::size_t*, void*) { return ok; }
VGPU_API Result cuptiActivityGetNumDroppedRecords(void*, std::uint32_t, std::size_t* count) {
  *count = 0;
  return ok;
}

VGPU_API Result cuptiActivityPushExternalCorrelationId(int kind, std::uint64_t id) {
  stacks[kind % kStacks].push_back(id);
  return ok;
}
VGPU_API Result cuptiActivityPopExternalCorrelationId(int kind, std::uint64_t* id) {
  auto& stack = stacks[kind % kStacks];
  if (stack.empty()) return queue_empty;
  if (id) *id = stack.back();
  stack.pop_back();
  return ok;
}

VGPU_API Result cuptiActivityFlushAll(std::uint32_t) {
  State& s = state();
  if (!s.request) return ok;
  {
    vgpu::Guard held(vgpu::lock());
    vgpu::advance(held, vgpu::now());
  }
  std::vector<std::string> records;
  {
    std::lock_guard<std::mutex> held(s.lock);
    records.swap(s.records);
  }
  measure_clock();
  Writer writer;
  for (std::string& record : records) {
    switch (kind_of(record.data())) {
      case kernel:
        convert_times<KernelRecord>(record);
        reinterpret_cast<KernelRecord*>(record.data())->completed =
            reinterpret_cast<KernelRecord*>(record.data())->end;
        break;
      case memcpy_kind: convert_times<CopyRecord>(record); break;
      case memset_kind: convert_times<FillRecord>(record); break;
      case runtime: convert_times<CallRecord>(record); break;
      default: break;
    }
    writer.put(record);
  }
  writer.close();
  return ok;
}

VGPU_API Result cuptiActivityGetNextRecord(std::uint8_t* buffer, std::size_t valid,
                                           std::uint8_t** record) {
  std::uint8_t* next = *record ? *record + size_of(kind_of(*record)) : buffer;
  if (next >= buffer + valid) return max_limit_reached;
  *record = next;
  return ok;
}

VGPU_API Result cuptiSubscribe(void** subscriber, void*, void*) {
  static char made;
  *subscriber = &made;
  return ok;
}
VGPU_API Result cuptiUnsubscribe(void*) { return ok; }
VGPU_API Result cuptiEnableCallback(std::uint32_t, void*, int, std::uint32_t) { return ok; }
VGPU_API Result cuptiEnableDomain(std::uint32_t, void*, int) { return ok; }
VGPU_API Result cuptiFinalize() { return ok; }
VGPU_API Result cuptiGetCallbackName(int, std::uint32_t id, const char** name) {
  std::lock_guard<std::mutex> held(state().lock);
  auto found = state().call_names.find(id);
  *name = found == state().call_names.end() ? "cudaApi" : found->second.c_str();
  return ok;
}
