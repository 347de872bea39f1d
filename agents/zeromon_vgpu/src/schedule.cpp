// The schedule: streams, events, captures, and the two threads that carry them on.
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <unordered_map>

#include "device.h"
#include "machine.h"
#include "memory.h"
#include "values.h"

namespace vgpu {
namespace {

constexpr std::int64_t kInlineBytes = 256 << 10;
constexpr Time kHousekeeping = 50000000;  // timeline on disk, at most this old
constexpr Time kGranularity = 30000;      // the clock thread's shortest sleep

struct Model {
  std::mutex lock;
  std::condition_variable changed;
  std::vector<Stream*> streams, active;
  std::vector<OpRef> running[kMaxDevices];
  std::vector<OpRef> actions;  // bytes yet to move, in the order of enqueueing
  Stream* defaults[kMaxDevices] = {};
  std::uint32_t next_stream = 8;
  int urgent = 0;  // operations that have not ended and whose start others wait for
  Unhindered host;
  bool moving = false;
  bool started = false;
};

Model& model() {
  static auto* made = new Model;  // never destroyed: its threads outlive static destructors
  return *made;
}

std::atomic<bool> forked{false};

Seat& seat() { return board()->seats[my_seat()]; }

bool is_urgent(const Op& op) {
  return op.kind == Kind::collective || op.kind == Kind::host || (op.action && op.action->is_awaited());
}

std::chrono::steady_clock::time_point clock_point(Time time) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time));
}

// ---- times -----------------------------------------------------------------------------------------

Time start_time(const Stream& stream, const Op& op) {
  Time time = std::max(op.enqueued, stream.tail);
  for (const OpRef& other : op.after) {
    if (!other->ended) return kUnknown;
    time = std::max(time, other->finish);
  }
  return time;
}

Time end_time(Op& op) {
  if (op.action) return op.action->end(op.start, op.duration);
  if (op.rate == 0) return op.left > 0 ? kUnknown : op.counted;  // until those above it end
  return op.counted + static_cast<Time>(std::ceil(op.left / op.rate));
}

// Counts what the units have done until `time` at the rates so far, and sets the rates from then on.
void count_activity(int device, Time time) {
  Activity& activity = seat().activity[physical_device(device)];
  ++activity.version;
  double seconds = static_cast<double>(std::max<Time>(0, time - activity.counted)) / 1e9;
  activity.counted = std::max<Time>(time, activity.counted);
  double rates[kUnits] = {};
  for (const OpRef& op : model().running[device]) {
    rates[kMultiprocessors] += op->occupancy * op->rate;
    rates[kTensorCores] += op->tensor_share * op->rate;
    rates[kMemoryBandwidth] += op->memory_share * op->rate;
  }
  for (int unit = 0; unit < kUnits; ++unit) {
    activity.used[unit] = activity.used[unit] + activity.rate[unit] * seconds;
    activity.rate[unit] = std::min(1.0, rates[unit]);
  }
  ++activity.version;
}

// Shares the device among what runs on it from `time` on.
void share_device(int device, Time time) {
  double asked[1 - kHighestPriority] = {}, rates[1 - kHighestPriority], taken = 0;
  for (const OpRef& op : model().running[device])
    (op->kind == Kind::collective ? taken : asked[-op->priority]) += op->occupancy;
  double room = std::max(0.1, 1 - taken);
  for (int level = -kHighestPriority; level >= 0; --level) {
    bool is_short = machine().contention != 0 && asked[level] > room;
    rates[level] = is_short ? room / asked[level] : 1;
    room = is_short ? 0 : room - asked[level];
  }
  for (const OpRef& op : model().running[device]) {
    double rate = rates[-op->priority];
    if (op->kind == Kind::collective || op->occupancy == 0 || op->rate == rate) continue;
    Time from = std::max(time, op->counted);
    op->left -= static_cast<double>(from - op->counted) * op->rate;
    op->counted = from;
    op->rate = rate;
  }
  count_activity(device, time);
}

void count_busy(int device, Time time, bool was_busy) {
  bool busy = !model().running[device].empty();
  if (busy == was_busy) return;
  int place = physical_device(device);
  if (!busy) seat().busy_ns[place].fetch_add(std::max<Time>(0, time - seat().busy_since[place]));
  seat().busy_since[place] = busy ? time : 0;
}

void start_op(Stream& stream, const OpRef& op, Time time) {
  op->started = true;
  op->ready = std::max(op->enqueued, stream.tail);
  op->start = op->counted = time;
  op->left = static_cast<double>(op->duration);
  op->unhindered_start.reach(stream.unhindered_tail);
  for (const OpRef& other : op->after)
    op->unhindered_start.reach(other->unhindered_end);
  if (op->action) op->action->unhindered_start = op->unhindered_start;
  if (op->kind == Kind::kernel || op->kind == Kind::collective) {
    auto& running = model().running[op->device];
    running.push_back(op);
    count_busy(op->device, time, running.size() > 1);
    share_device(op->device, time);
  }
  if (op->action && op->action->moves_on_time()) ring(seat().data_bell);
}

void end_op(Stream& stream, const OpRef& op, Time time) {
  op->ended = true;
  op->finish = time;
  op->after.clear();
  if (op->action) {
    op->unhindered_end = op->action->unhindered_end(op->duration);
  } else {
    op->unhindered_end = op->unhindered_start;
    op->unhindered_end.add(op->duration, op->duration);
  }
  stream.unhindered_tail.reach(op->unhindered_end);
  stream.tail = time;
  stream.queue.pop_front();
  if (stream.queue.empty()) {
    stream.active = false;
    auto& active = model().active;
    active.erase(std::find(active.begin(), active.end(), &stream));
  }
  auto& running = model().running[op->device];
  if (auto found = std::find(running.begin(), running.end(), op); found != running.end()) {
    running.erase(found);
    count_busy(op->device, time, true);
    share_device(op->device, time);
  }
  if (is_urgent(*op)) --model().urgent;
  write_line(*op);
}

// The next event of the schedule; kNever while only other processes can bring one.
Time next_event(Stream** where = nullptr) {
  Time best = kNever;
  for (Stream* stream : model().active) {
    Op& op = *stream->queue.front();
    Time time = op.started ? end_time(op) : start_time(*stream, op);
    if (time == kUnknown || time >= best) continue;
    best = time;
    if (where) *where = stream;
  }
  return best;
}

// ---- bytes -----------------------------------------------------------------------------------------

bool has_moved(const OpRef& op) { return op->moved; }

void prune(std::vector<OpRef>& needs) {
  needs.erase(std::remove_if(needs.begin(), needs.end(), has_moved), needs.end());
}

bool may_move(Op& op) {
  prune(op.needs);
  return op.needs.empty() && (op.started || !op.action->moves_on_time());
}

void move_bytes() {
  prctl(PR_SET_NAME, "vgpu-data");
  for (;;) {
    int seen = seat().data_bell.load();
    bool progress = false;
    Guard held(lock());
    auto& actions = model().actions;
    for (std::size_t i = 0; i < actions.size();) {
      OpRef op = actions[i];
      if (!may_move(*op)) {
        ++i;
        continue;
      }
      model().moving = true;
      held.unlock();
      bool moved = op->action->move();
      held.lock();
      model().moving = false;
      model().changed.notify_all();
      if (!moved) {
        ++i;
        continue;
      }
      op->moved = progress = true;
      actions.erase(std::find(actions.begin(), actions.end(), op));
      if (op->action->moves_on_time()) ring(seat().clock_bell);
      i = 0;
    }
    held.unlock();
    if (!progress) wait_bell(seat().data_bell, seen, kHousekeeping);
  }
}

void run_clock() {
  prctl(PR_SET_NAME, "vgpu-clock");
  prctl(PR_SET_TIMERSLACK, 1000);
  for (;;) {
    int seen = seat().clock_bell.load();
    Time wake;
    {
      Guard held(lock());
      Time present = now();
      advance(held, present);
      for (int device = 0; device < visible_count(); ++device)
        count_activity(device, present);
      wake = now() + kHousekeeping;
      if (model().urgent) wake = std::min(wake, std::max(next_event(), now() + kGranularity));
    }
    flush_timeline();
    wait_bell(seat().clock_bell, seen, std::max<Time>(wake - now(), 1));
  }
}

void start_threads() {
  if (model().started) return;
  model().started = true;
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  sigset_t all, old;  // signals are for the threads of the program
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old);
  std::thread(run_clock).detach();
  std::thread(move_bytes).detach();
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

// ---- enqueueing ------------------------------------------------------------------------------------

void depend_on(Op& op, std::vector<OpRef>& needs, const OpRef& other) {
  if (!other) return;
  other->ended ? op.unhindered_start.reach(other->unhindered_end) : op.after.push_back(other);
  if (other->action && !other->moved) needs.push_back(other);
  for (const OpRef& need : other->needs)
    if (!need->moved) needs.push_back(need);
}

// A legacy default stream and the blocking streams of its device wait for each other.
void follow_default_rules(Stream& stream, Op& op) {
  Stream* legacy = model().defaults[stream.device];
  if (&stream != legacy) {
    if (legacy && !(stream.flags & 1) && !stream.hidden) depend_on(op, stream.needs, legacy->last);
    return;
  }
  for (Stream* other : model().streams)
    if (other != legacy && other->device == stream.device && !(other->flags & 1) && !other->hidden)
      depend_on(op, stream.needs, other->last);
}

OpRef append(Guard& held, Stream& stream, std::unique_ptr<Op> made, bool limited) {
  start_threads();
  auto limit = static_cast<std::size_t>(machine().queue);
  while (limited && stream.queue.size() >= limit) {
    advance(held, now());
    if (stream.queue.size() < limit) break;
    Time wake = std::min(next_event(), now() + kHousekeeping);
    model().changed.wait_until(held, clock_point(wake));
  }
  OpRef op(std::move(made));
  op->device = stream.device;
  op->stream = stream.id;
  if (!*op->unit) op->unit = current_unit();
  op->enqueued = now();
  bool takes_time = op->kind != Kind::event && op->kind != Kind::wait && op->kind != Kind::mark;
  if (limited && takes_time) model().host.add(0, static_cast<Time>(machine().operator_ns));
  op->unhindered_start.reach(model().host);
  op->unhindered_start.reach(stream.unhindered_waits);
  for (const OpRef& other : std::vector<OpRef>(std::move(op->after))) {
    depend_on(*op, stream.needs, other);
  }
  follow_default_rules(stream, *op);
  prune(stream.needs);
  op->needs = stream.needs;
  bool empty = op->kind == Kind::collective && machine().largest_payload == 0;
  if (!op->action || empty) {
    op->moved = true;
  } else {
    bool small = op->kind == Kind::kernel ||
                 (op->bytes <= kInlineBytes && (op->kind == Kind::copy || op->kind == Kind::fill));
    if (small && op->needs.empty()) {
      op->moved = op->action->move();
    } else {
      model().actions.push_back(op);
      stream.needs.assign(1, op);
      ring(seat().data_bell);
    }
  }
  stream.queue.push_back(op);
  stream.last = op;
  if (!stream.active) {
    stream.active = true;
    model().active.push_back(&stream);
  }
  if (is_urgent(*op)) {
    ++model().urgent;
    ring(seat().clock_bell);
  }
  return op;
}

void add_node(Stream& stream, const OpRef& op) {
  auto& lanes = stream.capture->lanes;
  auto lane = std::find(lanes.begin(), lanes.end(), &stream);
  stream.capture->nodes.push_back({op, static_cast<std::size_t>(lane - lanes.begin())});
  if (lane == lanes.end()) lanes.push_back(&stream);
}

OpRef place(Guard& held, Stream* stream, std::unique_ptr<Op> op) {
  op->priority = stream->priority;
  if (!stream->capture) return append(held, *stream, std::move(op), true);
  OpRef node(std::move(op));
  add_node(*stream, node);
  return node;
}

std::unique_ptr<Op> make_op(Kind kind, const char* name) {
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->name = name;
  return op;
}

}  // namespace

int& current_device() {
  thread_local int device = 0;
  return device;
}

Stream* stream_of(void* handle) {
  bool is_default = reinterpret_cast<std::uintptr_t>(handle) <= 2;
  return is_default ? default_stream(current_device()) : static_cast<Stream*>(handle);
}

std::mutex& lock() { return model().lock; }
bool is_forked() { return forked; }

Stream* make_stream(int device, int priority, unsigned flags) {
  auto* stream = new Stream;
  Guard held(lock());
  stream->id = model().next_stream++;
  stream->device = device;
  stream->priority = priority;
  stream->flags = flags;
  model().streams.push_back(stream);
  return stream;
}

void destroy_stream(Stream* stream) {
  Guard held(lock());
  auto& streams = model().streams;
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
  if (!stream->active) delete stream;  // else its operations still run, as CUDA promises
}

Stream* default_stream(int device) {
  Guard held(lock());
  Stream*& stream = model().defaults[device];
  if (!stream) {
    stream = new Stream;
    stream->id = 7;  // what profilers show for it
    stream->device = device;
    model().streams.push_back(stream);
  }
  return stream;
}

std::vector<Stream*> streams_of(int device) {
  Guard held(lock());
  std::vector<Stream*> found;
  for (Stream* stream : model().streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

OpRef enqueue(Stream* stream, std::unique_ptr<Op> op) {
  if (op->kind == Kind::collective) note_collective(static_cast<std::size_t>(op->bytes));
  Guard held(lock());
  return place(held, stream, std::move(op));
}

void advance(Guard& held, Time until) {
  (void)held;
  bool progress = false;
  for (;;) {
    Stream* stream = nullptr;
    Time time = next_event(&stream);
    if (time > until) break;
    progress = true;
    OpRef op = stream->queue.front();
    op->started ? end_op(*stream, op, time) : start_op(*stream, op, time);
  }
  if (progress) model().changed.notify_all();
}

bool has_ended(Guard& held, const OpRef& op) {
  advance(held, now());
  return op->ended;
}

bool is_complete(Guard& held, const OpRef& op) {
  advance(held, now());
  prune(op->needs);
  return op->ended && op->moved && op->needs.empty();
}

void wait_complete(Guard& held, const OpRef& op) {
  while (!is_complete(held, op)) {
    Time wake = std::min(next_event(), now() + kHousekeeping);
    model().changed.wait_until(held, clock_point(wake));
  }
  model().host.reach(op->unhindered_end);
}

bool is_idle(Guard& held, Stream* stream) { return !stream->last || is_complete(held, stream->last); }

void synchronize(Guard& held, Stream* stream) {
  if (OpRef last = stream->last) wait_complete(held, last);
}

void synchronize_device(Guard& held, int device) {
  std::vector<OpRef> ends;
  for (Stream* stream : model().streams)
    if (stream->device == device && stream->last) ends.push_back(stream->last);
  for (const OpRef& last : ends)
    wait_complete(held, last);
}

void drain_data() {
  Guard held(lock());
  while (!model().actions.empty())
    model().changed.wait_until(held, clock_point(now() + kHousekeeping));
}

void pause_data(Guard& held) {
  model().changed.wait(held, [] { return !model().moving; });
}

void record_event(Stream* stream, Event* event) {
  Guard held(lock());
  event->capture = stream->capture;
  event->op = place(held, stream, make_op(Kind::event, "event"));
}

bool wait_event(Stream* stream, Event* event) {
  Guard held(lock());
  if (!event->op) return true;
  if (event->capture && event->capture->ended) return false;
  if (event->capture && !stream->capture) stream->capture = event->capture;
  if (!stream->capture && event->op->ended) stream->unhindered_waits.reach(event->op->unhindered_end);
  if (!stream->capture && event->op->ended && event->op->needs.empty()) return true;
  auto op = make_op(Kind::wait, "wait");
  op->after.push_back(event->op);
  place(held, stream, std::move(op));
  return true;
}

void launch_graph(const Graph& graph, Stream* stream, std::vector<Stream*>& lanes) {
  Guard held(lock());
  while (lanes.size() < graph.lanes.size()) {
    auto* lane = lanes.empty() ? stream : new Stream;
    if (lane != stream) {
      lane->id = model().next_stream++;
      lane->hidden = true;
      model().streams.push_back(lane);
    }
    lanes.push_back(lane);
  }
  if (!lanes.empty()) lanes[0] = stream;
  for (Stream* lane : lanes)
    lane->device = stream->device;
  OpRef entry = append(held, *stream, make_op(Kind::event, "graph"), true);
  std::unordered_map<const Op*, OpRef> replayed;
  std::vector<OpRef> last(lanes.size(), entry);
  for (const auto& [node, lane] : graph.nodes) {
    auto op = make_op(node->kind, node->name);
    op->direction = node->direction;
    op->duration = node->duration;
    op->occupancy = node->occupancy;
    op->priority = node->priority;
    op->tensor_share = node->tensor_share;
    op->memory_share = node->memory_share;
    op->bytes = node->bytes;
    op->unit = node->unit;
    op->correlation = last_correlation();
    if (node->action) op->action = node->action->copy();
    if (last[lane] == entry && lanes[lane] != stream) op->after.push_back(entry);
    for (const OpRef& other : node->after)
      if (auto found = replayed.find(other.get()); found != replayed.end())
        op->after.push_back(found->second);
    last[lane] = append(held, *lanes[lane], std::move(op), false);
    replayed[node.get()] = last[lane];
  }
  for (std::size_t lane = 1; lane < lanes.size(); ++lane) {
    auto join = make_op(Kind::wait, "wait");
    join->after.push_back(last[lane]);
    append(held, *stream, std::move(join), false);
  }
}

}  // namespace vgpu

extern "C" {
// For Python: a mark on a stream (a cudaStream_t of the current device, 0 its default stream).
__attribute__((visibility("default"))) void vgpu_mark(void* stream, int device, const char* name) {
  using namespace vgpu;
  auto* place_at = stream ? static_cast<Stream*>(stream) : default_stream(device);
  enqueue(place_at, make_op(Kind::mark, intern(name)));
}
__attribute__((visibility("default"))) void vgpu_drain() { vgpu::drain_data(); }
}
