// Reads the machine's description and the planned faults.
#include "machine.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "device.h"

namespace vgpu {
namespace {

struct Plan {
  Machine machine;
  std::vector<Fault> faults;
};

std::map<std::string, double*> fields(Machine& m) {
  return {
      {"devices", &m.devices},
      {"nvlink_devices", &m.nvlink_devices},
      {"major", &m.major},
      {"minor", &m.minor},
      {"multiprocessors", &m.multiprocessors},
      {"clock_hz", &m.clock_hz},
      {"memory_bytes", &m.memory_bytes},
      {"context_bytes", &m.context_bytes},
      {"flops_fp64", &m.flops_fp64},
      {"flops_fp32", &m.flops_fp32},
      {"flops_tf32", &m.flops_tf32},
      {"flops_half", &m.flops_half},
      {"flops_fp8", &m.flops_fp8},
      {"memory_speed", &m.memory_speed},
      {"pinned_speed", &m.pinned_speed},
      {"pageable_speed", &m.pageable_speed},
      {"node_speed", &m.node_speed},
      {"pcie_speed", &m.pcie_speed},
      {"network_speed", &m.network_speed},
      {"node_latency_ns", &m.node_latency_ns},
      {"pcie_latency_ns", &m.pcie_latency_ns},
      {"network_latency_ns", &m.network_latency_ns},
      {"kernel_ns", &m.kernel_ns},
      {"copy_ns", &m.copy_ns},
      {"launch_ns", &m.launch_ns},
      {"queue", &m.queue},
      {"slow", &m.slow},
      {"collective_share", &m.collective_share},
      {"contention", &m.contention},
      {"largest_payload", &m.largest_payload},
      {"driver_version", &m.driver_version},
      {"log_events", &m.log_events},
      {"operator_ns", &m.operator_ns},
      {"started", &m.started},
  };
}

Fault read_fault(std::istringstream& words) {
  Fault fault;
  words >> fault.kind;
  std::map<std::string, double*> keys = {
      {"rank", &fault.rank},     {"device", &fault.device},   {"call", &fault.call},
      {"factor", &fault.factor}, {"seconds", &fault.seconds}, {"at", &fault.at},
      {"bit", &fault.bit},       {"code", &fault.code},
  };
  for (std::string word; words >> word;) {
    auto split = word.find('=');
    auto key = keys.find(word.substr(0, split));
    if (split == std::string::npos || key == keys.end()) {
      complain("machine", ("unknown key of a fault: " + word).c_str());
      std::exit(2);
    }
    *key->second = std::stod(word.substr(split + 1));
  }
  return fault;
}

Plan read_plan() {
  Plan plan;
  auto known = fields(plan.machine);
  std::ifstream file(folder() + "/machine");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    if (!(words >> key)) continue;
    if (key == "name") {
      std::getline(words >> std::ws, plan.machine.name);
    } else if (key == "fault") {
      plan.faults.push_back(read_fault(words));
    } else if (auto found = known.find(key); found != known.end()) {
      words >> *found->second;
    } else {
      complain("machine", ("unknown key: " + key).c_str());
      std::exit(2);
    }
  }
  return plan;
}

const Plan& plan() {
  static const Plan* read = new Plan(read_plan());
  return *read;
}

// As CUDA reads it: the list ends before the first device that is not there. UUIDs are not read.
std::vector<int> read_visible() {
  int count = static_cast<int>(machine().devices);
  std::vector<int> visible;
  const char* listed = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!listed || !std::strncmp(listed, "GPU-", 4) || !std::strncmp(listed, "MIG-", 4)) {
    for (int device = 0; device < count; ++device) visible.push_back(device);
    return visible;
  }
  std::istringstream places(listed);
  for (std::string place; std::getline(places, place, ',');) {
    char* end = nullptr;
    long device = std::strtol(place.c_str(), &end, 10);
    if (end == place.c_str() || device < 0 || device >= count) break;
    visible.push_back(static_cast<int>(device));
  }
  return visible;
}

const std::vector<int>& visible() {
  static const auto* read = new std::vector<int>(read_visible());
  return *read;
}

const Time kStarted = now();

}  // namespace

const Machine& machine() { return plan().machine; }
int visible_count() { return static_cast<int>(visible().size()); }
int physical_device(int ordinal) {
  return ordinal < visible_count() ? visible()[static_cast<std::size_t>(ordinal)] : ordinal;
}
const std::vector<Fault>& faults() { return plan().faults; }

const std::string& folder() {
  static const std::string* path = [] {
    const char* named = std::getenv("VGPU_DIR");
    auto* text = new std::string(named ? named : "/tmp/vgpu-" + std::to_string(getuid()));
    mkdir(text->c_str(), 0700);
    return text;
  }();
  return *path;
}

int global_rank() {
  const char* rank = std::getenv("RANK");
  return rank ? std::atoi(rank) : 0;
}

namespace {

// Ranks of a node; 0 where no launcher says it.
int ranks_per_node() {
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  return ranks ? std::atoi(ranks) : 0;
}

const std::set<int>& running_ranks() {
  static const auto* ranks = [] {
    auto* named = new std::set<int>;
    const char* list = std::getenv("VGPU_RANKS");
    std::istringstream words(list ? list : "");
    for (std::string word; std::getline(words, word, ',');)
      named->insert(std::stoi(word));
    return named;
  }();
  return *ranks;
}

}  // namespace

int node_of(int rank) { return ranks_per_node() ? rank / ranks_per_node() : 0; }
int my_node() { return node_of(global_rank()); }
int device_of(int rank) { return ranks_per_node() ? rank % ranks_per_node() : rank; }
bool has_absent_ranks() { return !running_ranks().empty(); }
bool runs(int rank) { return running_ranks().empty() || running_ranks().count(rank) > 0; }

Reach reach_between(int node, int device, int other_node, int other_device) {
  if (node != other_node) return Reach::network;
  auto joined = static_cast<int>(machine().nvlink_devices);
  bool is_joined = joined > 0 && device / joined == other_device / joined;
  return is_joined || device == other_device ? Reach::nvlink : Reach::pcie;
}

Link link_of(Reach reach) {
  const Machine& m = machine();
  switch (reach) {
    case Reach::nvlink: return {m.node_latency_ns, m.node_speed};
    case Reach::pcie: return {m.pcie_latency_ns, m.pcie_speed};
    default: return {m.network_latency_ns, m.network_speed};
  }
}

double run_seconds(Time time) {
  double started = machine().started > 0 ? machine().started : static_cast<double>(kStarted) / 1e9;
  return static_cast<double>(time) / 1e9 - started;
}

double uptime() { return run_seconds(now()); }

const Fault* planned(const char* kind, int device) {
  for (const Fault& fault : faults())
    if (fault.kind == kind && (fault.rank < 0 || fault.rank == global_rank()) &&
        (fault.device < 0 || device < 0 || fault.device == device))
      return &fault;
  return nullptr;
}

double slowness(int device) {
  const Fault* fault = planned("slow", device);
  bool acts = fault && uptime() >= fault->at;
  return machine().slow * (acts ? fault->factor : 1);
}

}  // namespace vgpu
