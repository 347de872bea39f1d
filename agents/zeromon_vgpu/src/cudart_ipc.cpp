// libcudart: memory and events that several processes share.
//
// A handle of memory names the file that backs a block and the process that has it open; a handle of an
// event names a file of the run. The record of a shared event tells the others its time and, once the
// bytes before it have moved, that they may read them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "cudart.h"
#include "machine.h"
#include "memory.h"

using namespace cuda;
using namespace cudart;
using vgpu::Event;
using vgpu::Stream;
using vgpu::Time;

namespace {

// Numbers of records: of the last call, of the last that has its time, its bytes.
struct EventState {
  std::atomic<std::uint64_t> recorded, ended, moved;
  std::atomic<Time> finish;
};

std::atomic<int> next_event{0};

}  // namespace

struct vgpu::SharedEvent {
  std::string name;
  EventState* state;
  bool is_owner;

  ~SharedEvent() {
    munmap(state, sizeof *state);
    if (is_owner) unlink((vgpu::folder() + "/" + name).c_str());
  }
};

namespace {

using EventRef = std::shared_ptr<vgpu::SharedEvent>;

EventRef open_event(const std::string& name, bool is_owner) {
  void* mapped = vgpu::map_file(vgpu::folder() + "/" + name, sizeof(EventState), is_owner);
  if (!mapped) return nullptr;
  return EventRef(new vgpu::SharedEvent{name, static_cast<EventState*>(mapped), is_owner});
}

void ring_others() {
  for (int seat = 0; seat < vgpu::kMaxProcesses; ++seat) {
    vgpu::Seat& other = vgpu::board()->seats[seat];
    if (!other.pid || seat == vgpu::my_seat()) continue;
    vgpu::ring(other.clock_bell);
    vgpu::ring(other.data_bell);
  }
}

class Publish : public vgpu::Action {
public:
  Publish(EventRef event, std::uint64_t number) : event_(std::move(event)), number_(number) {}
  bool move() override {
    event_->state->moved = number_;
    ring_others();
    return true;
  }
  Time end(Time start, Time) override {
    EventState& state = *event_->state;
    if (state.ended < number_) {
      state.finish = start;
      state.ended = number_;
      ring_others();
    }
    return start;
  }
  bool is_awaited() const override { return true; }
  std::unique_ptr<Action> copy() const override { return std::make_unique<Publish>(event_, number_); }

private:
  EventRef event_;
  std::uint64_t number_;
};

class Await : public vgpu::Action {
public:
  Await(EventRef event, std::uint64_t number) : event_(std::move(event)), number_(number) {}
  bool move() override { return event_->state->moved >= number_; }
  Time end(Time start, Time) override {
    const EventState& state = *event_->state;
    return state.ended < number_ ? vgpu::kUnknown : std::max(start, state.finish.load());
  }
  std::unique_ptr<Action> copy() const override { return std::make_unique<Await>(event_, number_); }

private:
  EventRef event_;
  std::uint64_t number_;
};

Error enqueue_shared(Stream* stream, vgpu::Kind kind, const char* name,
                     std::unique_ptr<vgpu::Action> action) {
  if (stream->capture) {
    vgpu::complain(name, "has no model for an event of several processes in a capture");
    return fail(not_supported);
  }
  auto op = std::make_unique<vgpu::Op>();
  op->kind = kind;
  op->name = name;
  op->action = std::move(action);
  vgpu::enqueue(stream, std::move(op));
  return success;
}

struct MemoryHandle {
  int pid, file, device;
  std::uint64_t inode, bytes;
};
static_assert(sizeof(MemoryHandle) <= sizeof(IpcHandle));

// Memory of another process that this one has mapped, by its inode.
struct Opened {
  void* start;
  std::size_t bytes;
  int count;
};
std::mutex opened_lock;
std::map<std::uint64_t, Opened>& opened() {
  static auto* all = new std::map<std::uint64_t, Opened>;
  return *all;
}

// Null if the process has freed the memory or ended.
void* map_peer(const MemoryHandle& handle) {
  std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat found {};
  if (file < 0) return nullptr;
  bool is_same = fstat(file, &found) == 0 && found.st_ino == handle.inode;
  void* mapped =
      is_same ? mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

}  // namespace

EventRef cudart::make_shared_event() {
  int number = next_event.fetch_add(1);
  return open_event("event-" + std::to_string(getpid()) + "-" + std::to_string(number), true);
}

bool cudart::is_done(const vgpu::SharedEvent& event) {
  const EventState& state = *event.state;
  std::uint64_t number = state.recorded;
  return state.ended >= number && state.moved >= number && state.finish <= vgpu::now();
}

Error cudart::record_shared(Stream* stream, const Event& event) {
  std::uint64_t number = event.shared->state->recorded.fetch_add(1) + 1;
  return enqueue_shared(stream, vgpu::Kind::event, "event",
                        std::make_unique<Publish>(event.shared, number));
}

Error cudart::wait_shared(Stream* stream, const Event& event) {
  return enqueue_shared(stream, vgpu::Kind::wait, "wait",
                        std::make_unique<Await>(event.shared, event.shared->state->recorded));
}

// ---- handles ---------------------------------------------------------------------------------------

VGPU_API Error cudaIpcGetMemHandle(IpcHandle* out, void* start) {
  VGPU_ENTER_UNSAFE();
  vgpu::Block block;
  {
    vgpu::Guard held(vgpu::lock());
    vgpu::pause_data(held);
    if (!vgpu::share_block(start, &block)) return fail(invalid_value);
  }
  struct stat found {};
  if (fstat(block.file, &found)) return fail(invalid_value);
  MemoryHandle handle{getpid(), block.file, block.device, found.st_ino, block.bytes};
  *out = {};
  std::memcpy(out, &handle, sizeof handle);
  return success;
}

VGPU_API Error cudaIpcOpenMemHandle(void** out, IpcHandle given, unsigned) {
  VGPU_ENTER_UNSAFE();
  MemoryHandle handle;
  std::memcpy(&handle, &given, sizeof handle);
  if (handle.pid == getpid()) return fail(device_uninitialized);
  vgpu::open_context(vgpu::current_device());
  std::lock_guard<std::mutex> held(opened_lock);
  auto found = opened().find(handle.inode);
  if (found == opened().end()) {
    void* start = map_peer(handle);
    if (!start) return fail(invalid_handle);
    vgpu::add_block(start, handle.bytes, handle.device, vgpu::Place::device);
    found = opened().insert({handle.inode, {start, handle.bytes, 0}}).first;
  }
  ++found->second.count;
  *out = found->second.start;
  return success;
}

VGPU_API Error cudaIpcCloseMemHandle(void* start) {
  VGPU_ENTER_UNSAFE();
  {
    vgpu::Guard held(vgpu::lock());
    vgpu::synchronize_device(held, vgpu::current_device());
  }
  std::lock_guard<std::mutex> held(opened_lock);
  auto found = std::find_if(opened().begin(), opened().end(),
                            [=](const auto& entry) { return entry.second.start == start; });
  if (found == opened().end()) return fail(invalid_value);
  if (--found->second.count) return success;
  vgpu::remove_block(start);
  munmap(start, found->second.bytes);
  opened().erase(found);
  return success;
}

VGPU_API Error cudaIpcGetEventHandle(IpcHandle* out, Event* event) {
  VGPU_ENTER();
  if (!event->shared) return fail(invalid_handle);
  *out = {};
  event->shared->name.copy(out->bytes, sizeof out->bytes - 1);
  return success;
}

VGPU_API Error cudaIpcOpenEventHandle(Event** event, IpcHandle handle) {
  VGPU_ENTER();
  EventRef shared = open_event(handle.bytes, false);
  if (!shared) return fail(invalid_handle);
  vgpu::open_context(vgpu::current_device());
  *event = new Event{2 | 4, vgpu::current_device(), nullptr, nullptr, std::move(shared)};
  return success;
}
