// libnccl: Inspector, the profiler plugin. Each process writes JSON lines to a file of its own.
//
// As the plugin does, a thread writes the newest collective of each communicator at an interval: a
// sample. Times are those of the device's clock, from the start of the kernel, which waits for the other
// ranks.
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "machine.h"
#include "nccl.h"

namespace nccl {
namespace {

constexpr const char* kInterval = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Collectives that the file does not have yet. The thread may outlive static objects, so nothing is
// freed.
struct Queue {
  std::mutex mutex;
  std::map<const Comm*, std::deque<Finished>> finished;
};

Queue& queue() {
  static auto* made = new Queue;
  return *made;
}

std::FILE* open_file() {
  std::string job = variable("SLURM_JOBID"), folder = variable("NCCL_INSPECTOR_DUMP_DIR");
  if (folder.empty()) folder = "nccl-inspector-" + (job.empty() ? "unknown-jobid" : job);
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  mkdir(folder.c_str(), 0755);
  std::string path = folder + "/" + host + "-pid" + std::to_string(getpid()) + ".log";
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (!file) vgpu::complain("Inspector", ("cannot write " + path).c_str());
  return file;
}

void write_record(std::FILE* file, const Finished& one) {
  auto ns = static_cast<double>(one.end - one.start);
  std::fprintf(file,
               "{\"header\": {\"id\": \"%s\", \"rank\": %d, \"n_ranks\": %d}, "
               "\"metadata\": {\"inspector_output_format_version\": \"v4.0\", \"pid\": %d}, "
               "\"coll_perf\": {\"coll\": \"%s\", \"coll_sn\": %llu, \"coll_msg_size_bytes\": %llu, "
               "\"coll_exec_time_us\": %.3f, \"coll_timing_source\": \"kernel_gpu\", "
               "\"coll_algobw_gbs\": %.6f, \"coll_busbw_gbs\": %.6f}}\n",
               comm_hash(one.comm->name).c_str(), one.comm->rank, one.comm->size, getpid(),
               function_name(one.function), static_cast<unsigned long long>(one.number),
               static_cast<unsigned long long>(one.bytes), ns / 1e3, one.full_bytes / ns,
               one.bus_bytes / ns);
}

void write_newest(std::FILE* file) {
  vgpu::Time now = vgpu::now();
  std::lock_guard<std::mutex> held(queue().mutex);
  for (auto& [comm, finished] : queue().finished) {
    auto next = finished.begin();
    while (next != finished.end() && next->end <= now)
      ++next;
    if (next == finished.begin()) continue;
    write_record(file, *std::prev(next));
    finished.erase(finished.begin(), next);
  }
  std::fflush(file);
}

void write_always(std::FILE* file, std::chrono::microseconds interval) {
  while (true) {
    std::this_thread::sleep_for(interval);
    write_newest(file);
  }
}

bool start_inspector() {
  if (variable("NCCL_PROFILER_PLUGIN").find("inspector") == std::string::npos) return false;
  if (std::atoi(variable("NCCL_INSPECTOR_ENABLE").c_str()) == 0) return false;
  int interval = std::atoi(variable(kInterval).c_str());
  if (interval <= 0 || std::atoi(variable("NCCL_INSPECTOR_PROM_DUMP").c_str()) != 0) {
    vgpu::complain("Inspector", "has a model only at an interval, without NCCL_INSPECTOR_PROM_DUMP");
    return false;
  }
  std::FILE* file = open_file();
  if (file) std::thread(write_always, file, std::chrono::microseconds(interval)).detach();
  return file != nullptr;
}

}  // namespace

void inspect(const Finished& collective) {
  static const bool is_on = start_inspector();
  if (!is_on) return;
  std::lock_guard<std::mutex> held(queue().mutex);
  queue().finished[collective.comm].push_back(collective);
}

}  // namespace nccl
