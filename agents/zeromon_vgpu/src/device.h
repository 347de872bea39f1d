// The virtual device: memory, streams, events and a clock, shared by all stand-ins of this folder.
//
// Each library here stands in for one of NVIDIA's under the same soname and exports the documented
// functions that torch calls. They all work on one model, libvgpu.so, which this header describes.
//
// Time. The device's clock is CLOCK_MONOTONIC in nanoseconds. A kernel does no arithmetic: it takes the
// time that the machine's description (machine.h) gives it. The schedule is a simulation by discrete
// events that follows the host: `advance` carries it to the present. The times of an operation follow
// from when the host enqueued it and from what it waits for, never from when a thread of ours woke up.
// So they are exact however busy the host is:
//
//     ready = max(enqueued, end of the previous operation of the stream)
//     start = max(ready, end of each operation in `after`)
//     end   = start + duration, at full speed
//
// Kernels that together ask for more than the whole device (`occupancy`) slow each other down: those
// of a stream of higher priority keep their speed, and the others share what they leave. A collective
// keeps its speed, and takes its share away from the kernels beside it.
//
// Data. Device memory is host memory, backed when it is touched. Copies and collectives do move bytes.
// An operation moves them as soon as those before it have, which may be earlier than its time on the
// clock. The host sees an operation as complete when its time has come and its bytes have moved. A
// query of an event with timing checks the time only: moving the bytes can take longer than on a device.
//
// Unhindered. Beside its times each operation has those that it would have if the host were always
// ahead, and if it took `machine().operator_ns` for each operation and nothing else. They follow from
// the same dependencies, at full speed, and tell what the devices and links take on a machine whose
// cores are not shared by all ranks of a run.
//
// Truth. Each operation becomes one line of the timeline (timeline.cpp) when it ends.
//
// Threads. One lock guards the model. The clock thread carries the schedule on where other processes
// wait for it; the data thread moves bytes without holding the lock. A host thread that waits advances
// the schedule itself and sleeps until its next event.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace vgpu {

// Priorities of streams are 0 down to -5, the highest.
constexpr int kHighestPriority = -5;

using Time = std::int64_t;
constexpr Time kUnknown = -1;
constexpr Time kNever = INT64_MAX;

Time now();

// Times for a host that is always ahead, and for one that takes time for each operation.
struct Unhindered {
  Time at[2] = {0, 0};
  void reach(const Unhindered& other) {
    for (int i = 0; i < 2; ++i)
      if (other.at[i] > at[i]) at[i] = other.at[i];
  }
  void add(Time fast, Time slow) { at[0] += fast, at[1] += slow; }
};

enum class Kind : std::uint8_t { kernel, collective, copy, fill, event, wait, host, mark };

// Numbers of cudaMemcpyKind.
enum class Direction : std::uint8_t { host, to_device, to_host, on_device };

struct Op;
struct Stream;
using OpRef = std::shared_ptr<Op>;

// What an operation does beside taking time.
class Action {
public:
  virtual ~Action() = default;
  // Moves the bytes; false if another process is not there yet. The data thread calls it again then.
  virtual bool move() { return true; }
  // The end of an operation that started at `start`; kUnknown while other processes decide it.
  virtual Time end(Time start, Time duration) { return start + duration; }
  // The unhindered end, once the operation has ended; other ranks are asked as in `end`.
  virtual Unhindered unhindered_end(Time duration) const {
    Unhindered end = unhindered_start;
    end.add(duration, duration);
    return end;
  }
  Unhindered unhindered_start;  // filled in by the model before the first call of `end`
  // Bytes may move only once the operation has started on the clock: host functions.
  virtual bool moves_on_time() const { return false; }
  // Other processes wait for it: the clock thread starts it in time.
  virtual bool is_awaited() const { return false; }
  // The same action for a replay of a graph.
  virtual std::unique_ptr<Action> copy() const = 0;
  // The latest arrival over all ranks, once it is known.
  virtual Time transfer_start() const { return kUnknown; }
  // What the timeline says of it: group and sequence number of a collective.
  virtual std::string detail() const { return {}; }
};

struct Op {
  Kind kind = Kind::kernel;
  Direction direction = Direction::host;
  const char* name = "";
  Time duration = 0;
  double occupancy = 0;
  double tensor_share = 0, memory_share = 0;  // of the peak, while it runs at full speed
  std::int64_t bytes = 0;
  std::uint32_t correlation = 0;
  std::vector<OpRef> after;
  std::unique_ptr<Action> action;

  // Filled in by the model.
  int device = 0, priority = 0;
  std::uint32_t stream = 0;
  const char* unit = "";
  Time enqueued = 0, ready = kUnknown, start = kUnknown, finish = kUnknown;
  bool started = false, ended = false, moved = false;
  double left = 0, rate = 1;
  Time counted = 0;
  Unhindered unhindered_start, unhindered_end;
  std::vector<OpRef> needs;  // actions that must have moved their bytes before this one is complete
};

// A capture: operations by the stream that they were captured on.
struct Graph {
  struct Node {
    OpRef op;
    std::size_t lane;
  };
  std::vector<Node> nodes;
  std::vector<Stream*> lanes;
  std::uint64_t id = 0;
  int mode = 0;
  unsigned long thread = 0;
  bool invalid = false, ended = false;
};

struct Stream {
  std::uint32_t id = 0;
  int device = 0, priority = 0;
  unsigned flags = 0;  // 1: does not wait for the legacy default stream
  std::deque<OpRef> queue;
  OpRef last;
  Time tail = 0;
  Unhindered unhindered_tail, unhindered_waits;  // the latter of events that have ended already
  std::vector<OpRef> needs;
  Graph* capture = nullptr;
  bool hidden = false, active = false;
};

struct SharedEvent;  // cudart_ipc.cpp

struct Event {
  unsigned flags = 0;  // 2: no timing, 4: of several processes
  int device = 0;
  OpRef op;
  Graph* capture = nullptr;
  std::shared_ptr<SharedEvent> shared;
};

// The device of the calling thread, and a stream by its handle there: null, 1 and 2 are default streams.
int& current_device();
Stream* stream_of(void* handle);

std::mutex& lock();
using Guard = std::unique_lock<std::mutex>;

// ---- streams (schedule.cpp). Functions that take a Guard expect it to be held.
Stream* make_stream(int device, int priority, unsigned flags);
void destroy_stream(Stream* stream);
Stream* default_stream(int device);
std::vector<Stream*> streams_of(int device);
// Appends an operation, or adds it to the capture of the stream. Waits while the launch queue is full.
OpRef enqueue(Stream* stream, std::unique_ptr<Op> op);
void advance(Guard& held, Time until);
bool has_ended(Guard& held, const OpRef& op);  // by the clock alone
bool is_complete(Guard& held, const OpRef& op);
void wait_complete(Guard& held, const OpRef& op);
bool is_idle(Guard& held, Stream* stream);
void synchronize(Guard& held, Stream* stream);
void synchronize_device(Guard& held, int device);
// Until no bytes are left to move, whatever the clock says: arithmetic on the host reads them.
void drain_data();
// Until no bytes are being moved; none are as long as the lock is held.
void pause_data(Guard& held);
// A child of fork has no threads of the model: like CUDA's, it may not use the device.
bool is_forked();

// ---- events and captures (schedule.cpp)
void record_event(Stream* stream, Event* event);
// False if the event was recorded in a capture that has ended.
bool wait_event(Stream* stream, Event* event);
void launch_graph(const Graph& graph, Stream* stream, std::vector<Stream*>& lanes);

// ---- a call of the API (timeline.cpp): numbers it, charges the host its cost, tells a profiler
struct Call {
  Call(const char* name, std::uint32_t id);
  ~Call();
  const char* name;
  std::uint32_t id, correlation;
  Time start;
};
std::uint32_t last_correlation();

// ---- the timeline (timeline.cpp)
void write_line(const Op& op);
void flush_timeline();
const char* intern(const std::string& text);
const char* current_unit();

// What a profiler is given of each operation and of each call.
struct Listener {
  void (*operation)(const Op& op);
  void (*call)(const Call& call, Time end);
};
void set_listener(const Listener* listener);

// ---- what cannot be done here: one line on stderr that names the function
void complain(const char* function, const char* why);

}  // namespace vgpu
