// The timeline: what ran on the device, one line an operation. And the calls that a profiler is told of.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <unordered_set>

#include "device.h"
#include "machine.h"

namespace vgpu {
namespace {

std::mutex file_lock, names_lock;
std::string& pending() {
  static auto* text = new std::string;
  return *text;
}
std::atomic<const char*> unit{""};
std::atomic<const Listener*> listener{nullptr};
std::atomic<std::uint32_t> calls{1};
thread_local std::uint32_t last = 0;

const char* kind_name(Kind kind) {
  static const char* const names[] = {"kernel", "collective", "copy", "fill",
                                      "event",  "wait",       "host", "mark"};
  return names[static_cast<int>(kind)];
}

std::FILE* open_timeline() {
  std::string path = folder() + "/timeline";
  mkdir(path.c_str(), 0700);
  path += "/" + std::to_string(global_rank()) + "-" + std::to_string(getpid()) + ".tsv";
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) complain("timeline", ("cannot write " + path).c_str());
  std::atexit(flush_timeline);
  return file;
}

}  // namespace

void write_line(const Op& op) {
  if (const Listener* told = listener.load()) told->operation(op);
  // Millions, and no time passes in them.
  if (op.kind == Kind::event && machine().log_events == 0) return;
  char line[1024];
  Time transfer = op.action ? op.action->transfer_start() : kUnknown;
  std::string detail = op.action ? op.action->detail() : std::string();
  int size = std::snprintf(
      line, sizeof line,
      "%s\t%d\t%u\t%u\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%d\t%lld\t%lld\t%lld\t%lld\t%s\t%s\t%.300s\n",
      kind_name(op.kind), op.device, op.stream, op.correlation, static_cast<long long>(op.enqueued),
      static_cast<long long>(op.ready), static_cast<long long>(op.start),
      static_cast<long long>(transfer), static_cast<long long>(op.finish),
      static_cast<long long>(op.bytes), static_cast<int>(op.direction),
      static_cast<long long>(op.unhindered_start.at[0]), static_cast<long long>(op.unhindered_end.at[0]),
      static_cast<long long>(op.unhindered_start.at[1]), static_cast<long long>(op.unhindered_end.at[1]),
      op.unit, detail.c_str(), op.name);
  std::lock_guard<std::mutex> held(file_lock);
  pending().append(line, static_cast<std::size_t>(size));
}

void flush_timeline() {
  if (is_forked()) return;
  std::lock_guard<std::mutex> held(file_lock);
  if (pending().empty()) return;
  static std::FILE* file = open_timeline();
  if (!file) return;
  std::fwrite(pending().data(), 1, pending().size(), file);
  std::fflush(file);
  pending().clear();
}

const char* intern(const std::string& text) {
  static auto* names = new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> held(names_lock);
  return names->insert(text).first->c_str();
}

const char* current_unit() { return unit.load(); }

void set_listener(const Listener* told) { listener = told; }

Call::Call(const char* name, std::uint32_t id) : name(name), id(id), correlation(calls.fetch_add(1)) {
  last = correlation;
  start = listener.load() ? now() : 0;
}

Call::~Call() {
  const Listener* told = listener.load();
  if (told && start) told->call(*this, now());
}

std::uint32_t last_correlation() { return last; }

Time now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * Time{1000000000} + time.tv_nsec;
}

void complain(const char* function, const char* why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", function, why);
}

}  // namespace vgpu

// For Python: the unit (a layer's name) that operations enqueued from now on belong to.
extern "C" __attribute__((visibility("default"))) void vgpu_set_unit(const char* name) {
  vgpu::unit = vgpu::intern(name);
}
