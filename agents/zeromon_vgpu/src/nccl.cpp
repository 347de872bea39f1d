// Stands in for libnccl: communicators and the calls that enqueue collectives on them.
#include "nccl.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

#include "cuda_api.h"
#include "machine.h"
#include "memory.h"

using namespace nccl;

struct UniqueId {
  char text[128];
};

namespace nccl {

int Comm::place_of(int member) const {
  auto found = std::lower_bound(running.begin(), running.end(), member);
  if (found == running.end() || *found != member) return kAbsent;
  return static_cast<int>(found - running.begin());
}

int Comm::stand_in(int member) const {
  auto behind = std::upper_bound(running.begin(), running.end(), member);
  return std::max(0, static_cast<int>(behind - running.begin()) - 1);
}

vgpu::Reach reach_between(const Comm& comm, int rank, int other) {
  auto where = [&comm](int member) {
    int place = comm.place_of(member);
    if (place != kAbsent) return std::pair(comm.shared->node[place], comm.shared->device[place]);
    int global = comm.globals[static_cast<std::size_t>(member)];
    return std::pair(vgpu::node_of(global), vgpu::device_of(global));
  };
  auto [node, device] = where(rank);
  auto [other_node, other_device] = where(other);
  return vgpu::reach_between(node, device, other_node, other_device);
}

void ring_clock(const Comm& comm, int rank) {
  for (int place = 0; place < comm.places(); ++place)
    if ((rank < 0 || place == comm.place_of(rank)) && place != comm.place)
      vgpu::ring(vgpu::board()->seats[comm.shared->seat[place]].clock_bell);
}

void ring_data(const Comm& comm, int rank) {
  for (int place = 0; place < comm.places(); ++place)
    if ((rank < 0 || place == comm.place_of(rank)) && place != comm.place)
      vgpu::ring(vgpu::board()->seats[comm.shared->seat[place]].data_bell);
}

std::string comm_hash(const std::string& name) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%016zx", std::hash<std::string>{}(name));
  return text;
}

namespace {

void nap() {
  timespec time{0, 100000};
  nanosleep(&time, nullptr);
}

std::string comm_path(const std::string& name) { return vgpu::folder() + "/" + kCommFile + name; }

// The file stays until all have left: RAS reads it.
void leave(Comm& comm) {
  Shared& shared = *comm.shared;
  if (!shared.left[comm.place].exchange(true) && ++shared.gone == comm.places())
    unlink(comm_path(comm.name).c_str());
}

Shared* open_shared(const std::string& path, std::size_t places) {
  std::size_t bytes = sizeof(Shared) + places * places * kMails * sizeof(Mail);
  return static_cast<Shared*>(vgpu::map_file(path, bytes, true));
}

Result unsupported(const char* function, const char* why = "has no model in the virtual NCCL") {
  vgpu::complain(function, why);
  return invalid_usage;
}

// The two ranks of a group, by their place in it, that the next communicator of two is for.
thread_local std::pair<int, int> next_pair{kAbsent, kAbsent};

// What ncclConfig_t of NCCL 2.17 and later begins with.
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking, cluster_size, least_blocks, most_blocks;
  const char* net_name;
};

// The tag that startup.py puts where a configuration names a network; empty where all ranks run.
GroupTag tag_of(const void* config) {
  const auto* given = static_cast<const Config*>(config);
  return vgpu::has_absent_ranks() && given ? read_tag(given->net_name) : GroupTag{};
}

constexpr const char* kUntagged =
    "VGPU_RANKS is set, and nothing says which ranks this communicator has: create it by "
    "torch.distributed";

Result join_by_id(Comm** out, int size, const UniqueId& id, int rank, const void* config) {
  if (!vgpu::has_absent_ranks() || size == 1) {
    // Of one rank torch hands over no identifier.
    std::string own = std::to_string(getpid()) + "-" + std::to_string(vgpu::now());
    return join(out, size, vgpu::has_absent_ranks() ? own : id.text, rank,
                vgpu::has_absent_ranks() ? std::vector<int>{vgpu::global_rank()} : std::vector<int>{});
  }
  GroupTag tag = tag_of(config);
  auto [low, high] = next_pair;
  if (size == 2 && low != kAbsent && static_cast<std::size_t>(high) < tag.ranks.size()) {
    tag.name += "/" + std::to_string(low) + ":" + std::to_string(high);
    tag.ranks = {tag.ranks[static_cast<std::size_t>(low)], tag.ranks[static_cast<std::size_t>(high)]};
  }
  if (tag.ranks.size() != static_cast<std::size_t>(size))
    return unsupported("ncclCommInitRank", kUntagged);
  return join(out, size, next_name(tag.name), rank, std::move(tag.ranks));
}

// Calls between ncclGroupStart and ncclGroupEnd, in order; sends and receives of a stream become one.
struct Group {
  int depth = 0;
  std::vector<Transfer> transfers;
  void* stream = nullptr;
};
thread_local Group group;

void flush_group() {
  if (group.transfers.empty()) return;
  enqueue_transfers(std::move(group.transfers), group.stream);
  group.transfers = {};
}

Result add_transfer(bool is_send, void* buffer, std::size_t count, int type, int peer, Comm* comm,
                    void* stream) {
  if (peer < 0 || peer >= comm->size) return invalid_argument;
  if (stream != group.stream) flush_group();
  group.stream = stream;
  group.transfers.push_back({comm, is_send, buffer, count * element_size(type), peer, 0});
  if (!group.depth) flush_group();
  return ok;
}

Result collective(Comm* comm, Function function, const void* source, void* target, std::size_t count,
                  int type, int reduction, int root, void* stream) {
  if (root < 0 || root >= comm->size) return invalid_argument;
  enqueue_collective(comm, function, source, target, count, type, reduction, root, stream);
  return ok;
}

}  // namespace

GroupTag read_tag(const char* text) {
  static const std::string kPrefix = "vgpu ";
  std::string whole = text ? text : "";
  if (whole.rfind(kPrefix, 0) != 0) return {};
  auto end = whole.rfind(' ');
  GroupTag tag{whole.substr(kPrefix.size(), end - kPrefix.size()), {}};
  std::istringstream words(whole.substr(end + 1));
  for (std::string word; std::getline(words, word, ',');)
    tag.ranks.push_back(std::stoi(word));
  return tag;
}

std::string next_name(const std::string& group) {
  static std::mutex mutex;
  static auto* counts = new std::map<std::string, int>;
  // A run that starts again in the same folder meets elsewhere.
  std::string attempt;
  for (const char* name : {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"})
    if (const char* value = std::getenv(name)) attempt += std::string("-") + value;
  std::lock_guard<std::mutex> held(mutex);
  int number = (*counts)[group]++;
  return comm_hash(group).substr(2) + attempt + "-" + std::to_string(number);
}

Result join(Comm** out, int size, const std::string& name, int rank, std::vector<int> globals) {
  if (size < 1 || rank < 0 || rank >= size) return invalid_argument;
  auto* comm = new Comm;
  for (int member = 0; member < size; ++member)
    if (globals.empty() || vgpu::runs(globals[static_cast<std::size_t>(member)]))
      comm->running.push_back(member);
  comm->rank = rank;
  comm->size = size;
  comm->globals = std::move(globals);
  comm->place = comm->place_of(rank);
  comm->device = vgpu::current_device();
  comm->name = name;
  if (comm->place == kAbsent || comm->running.size() > kMaxRanks)
    return unsupported("ncclCommInitRank", "at most 64 ranks run, and VGPU_RANKS names each of them");
  std::string path = comm_path(name);
  comm->shared = open_shared(path, comm->running.size());
  if (!comm->shared) {
    vgpu::complain("ncclCommInitRank", ("cannot open " + path).c_str());
    return system_error;
  }
  Shared& shared = *comm->shared;
  shared.rank[comm->place] = rank;
  shared.pid[comm->place] = getpid();
  shared.seat[comm->place] = vgpu::my_seat();
  shared.device[comm->place] = vgpu::physical_device(comm->device);
  shared.node[comm->place] = vgpu::my_node();
  shared.size = size;
  shared.running = comm->places();
  ++shared.joined;
  while (shared.joined < comm->places())
    nap();
  for (int other = 0; other < size; ++other)
    comm->span = std::max(comm->span, reach_between(*comm, 0, other));
  start_ras();
  *out = comm;
  return ok;
}

}  // namespace nccl

// ---- communicators -----------------------------------------------------------------------------------

VGPU_API Result ncclGetVersion(int* version) {
  *version = kVersion;
  return ok;
}

VGPU_API Result ncclGetUniqueId(UniqueId* id) {
  unsigned char random[12];
  if (getrandom(random, sizeof random, 0) != sizeof random) return system_error;
  std::memset(id, 0, sizeof *id);
  for (std::size_t i = 0; i < sizeof random; ++i)
    std::snprintf(id->text + 2 * i, 3, "%02x", random[i]);
  return ok;
}

VGPU_API const char* ncclGetErrorString(Result result) {
  switch (result) {
    case ok: return "no error";
    case system_error: return "unhandled system error";
    case invalid_argument: return "invalid argument";
    case invalid_usage: return "invalid usage";
    default: return "internal error";
  }
}

VGPU_API const char* ncclGetLastError(Comm*) { return ""; }

VGPU_API Result ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  return join_by_id(comm, size, id, rank, nullptr);
}

VGPU_API Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void* config) {
  return join_by_id(comm, size, id, rank, config);
}

VGPU_API Result ncclCommInitRankScalable(Comm** comm, int size, int rank, int, UniqueId* ids,
                                         void* config) {
  return join_by_id(comm, size, ids[0], rank, config);
}

// For Python: the two ranks of a group that this thread now sends between; -1 afterwards.
VGPU_API void vgpu_next_pair(int low, int high) { next_pair = {low, high}; }

VGPU_API Result ncclCommSplit(Comm* comm, int color, int key, Comm** out, void* config) {
  std::uint64_t number = comm->splits++;
  Split* splits = comm->shared->splits[number % kSplits];
  splits[comm->place].color = color;
  splits[comm->place].key = key;
  splits[comm->place].tag = number + 1;
  std::vector<std::pair<int, int>> members;  // key, place
  for (int place = 0; place < comm->places(); ++place) {
    while (splits[place].tag < number + 1)
      nap();
    if (splits[place].color == color) members.emplace_back(splits[place].key, place);
  }
  *out = nullptr;
  if (color < 0) return ok;
  std::string name = comm->name + "." + std::to_string(number) + "." + std::to_string(color);
  if (vgpu::has_absent_ranks()) {  // the colors of absent ranks are unknown
    GroupTag tag = tag_of(config);
    auto mine = std::find(tag.ranks.begin(), tag.ranks.end(), vgpu::global_rank());
    if (mine == tag.ranks.end()) return unsupported("ncclCommSplit", kUntagged);
    auto rank = static_cast<int>(mine - tag.ranks.begin());
    return join(out, static_cast<int>(tag.ranks.size()), name, rank, tag.ranks);
  }
  std::sort(members.begin(), members.end());
  auto me =
      std::find_if(members.begin(), members.end(), [&](auto& m) { return m.second == comm->place; });
  return join(out, static_cast<int>(members.size()), name, static_cast<int>(me - members.begin()));
}

VGPU_API Result ncclCommFinalize(Comm*) { return ok; }
VGPU_API Result ncclCommDestroy(Comm* comm) {
  leave(*comm);
  return ok;  // kept: its last operations may still run
}

VGPU_API Result ncclCommAbort(Comm* comm) {
  comm->aborted = vgpu::now();
  leave(*comm);
  vgpu::ring(vgpu::board()->seats[vgpu::my_seat()].clock_bell);
  vgpu::ring(vgpu::board()->seats[vgpu::my_seat()].data_bell);
  return ok;
}

VGPU_API Result ncclCommRevoke(Comm* comm, int) { return ncclCommAbort(comm); }

VGPU_API Result ncclCommGetAsyncError(Comm*, Result* error) {
  *error = ok;
  return ok;
}

VGPU_API Result ncclCommCount(Comm* comm, int* size) {
  *size = comm->size;
  return ok;
}

VGPU_API Result ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return ok;
}

VGPU_API Result ncclCommCuDevice(Comm* comm, int* device) {
  *device = comm->device;
  return ok;
}

VGPU_API Result ncclCommRegister(Comm*, void*, std::size_t, void** handle) {
  *handle = nullptr;
  return ok;
}
VGPU_API Result ncclCommDeregister(Comm*, void*) { return ok; }

VGPU_API Result ncclMemAlloc(void** out, std::size_t bytes) {
  *out = vgpu::map_block(bytes, vgpu::current_device(), vgpu::Place::device);
  return *out ? ok : system_error;
}

VGPU_API Result ncclMemFree(void* start) { return vgpu::unmap_block(start) ? ok : invalid_argument; }

VGPU_API Result ncclRedOpCreatePreMulSum(int* reduction, void* scalar, int type, int, Comm* comm) {
  double scale = 0;
  if (!read_scalar(scalar, type, &scale)) return unsupported("ncclRedOpCreatePreMulSum of integers");
  *reduction = comm->next_custom++;
  comm->scales[*reduction] = scale;
  return ok;
}

VGPU_API Result ncclRedOpDestroy(int, Comm*) { return ok; }  // kept: operations in flight name it

// ---- collectives -------------------------------------------------------------------------------------

VGPU_API Result ncclGroupStart() {
  ++group.depth;
  return ok;
}

VGPU_API Result ncclGroupEnd() {
  if (group.depth > 0) --group.depth;
  if (group.depth == 0) flush_group();
  return ok;
}

VGPU_API Result ncclAllReduce(const void* source, void* target, std::size_t count, int type,
                              int reduction, Comm* comm, void* stream) {
  return collective(comm, Function::all_reduce, source, target, count, type, reduction, 0, stream);
}

VGPU_API Result ncclAllGather(const void* source, void* target, std::size_t count, int type, Comm* comm,
                              void* stream) {
  return collective(comm, Function::all_gather, source, target, count, type, sum, 0, stream);
}

VGPU_API Result ncclReduceScatter(const void* source, void* target, std::size_t count, int type,
                                  int reduction, Comm* comm, void* stream) {
  return collective(comm, Function::reduce_scatter, source, target, count, type, reduction, 0, stream);
}

VGPU_API Result ncclBroadcast(const void* source, void* target, std::size_t count, int type, int root,
                              Comm* comm, void* stream) {
  return collective(comm, Function::broadcast, source, target, count, type, sum, root, stream);
}

VGPU_API Result ncclBcast(void* buffer, std::size_t count, int type, int root, Comm* comm,
                          void* stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

VGPU_API Result ncclReduce(const void* source, void* target, std::size_t count, int type, int reduction,
                           int root, Comm* comm, void* stream) {
  return collective(comm, Function::reduce, source, target, count, type, reduction, root, stream);
}

VGPU_API Result ncclAlltoAll(const void* source, void* target, std::size_t count, int type, Comm* comm,
                             void* stream) {
  return collective(comm, Function::all_to_all, source, target, count, type, sum, 0, stream);
}

VGPU_API Result ncclSend(const void* buffer, std::size_t count, int type, int peer, Comm* comm,
                         void* stream) {
  return add_transfer(true, const_cast<void*>(buffer), count, type, peer, comm, stream);
}

VGPU_API Result ncclRecv(void* buffer, std::size_t count, int type, int peer, Comm* comm, void* stream) {
  return add_transfer(false, buffer, count, type, peer, comm, stream);
}

VGPU_API Result ncclGather(const void* source, void* target, std::size_t count, int type, int root,
                           Comm* comm, void* stream) {
  std::size_t bytes = count * element_size(type);
  ncclGroupStart();
  ncclSend(source, count, type, root, comm, stream);
  for (int rank = 0; rank < comm->size && comm->rank == root; ++rank)
    ncclRecv(static_cast<char*>(target) + static_cast<std::size_t>(rank) * bytes, count, type, rank,
             comm, stream);
  return ncclGroupEnd();
}

VGPU_API Result ncclScatter(const void* source, void* target, std::size_t count, int type, int root,
                            Comm* comm, void* stream) {
  std::size_t bytes = count * element_size(type);
  ncclGroupStart();
  for (int rank = 0; rank < comm->size && comm->rank == root; ++rank)
    ncclSend(static_cast<const char*>(source) + static_cast<std::size_t>(rank) * bytes, count, type,
             rank, comm, stream);
  ncclRecv(target, count, type, root, comm, stream);
  return ncclGroupEnd();
}
