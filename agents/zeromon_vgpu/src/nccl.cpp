// Stands in for libnccl: communicators and the calls that enqueue collectives on them.
#include "nccl.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda_api.h"
#include "machine.h"
#include "memory.h"

using namespace nccl;

struct UniqueId {
  char text[128];
};

namespace nccl {

vgpu::Reach reach_between(const Comm& comm, int rank, int other) {
  const Shared& shared = *comm.shared;
  return vgpu::reach_between(shared.node[rank], shared.device[rank], shared.node[other],
                             shared.device[other]);
}

void ring_clock(const Comm& comm, int rank) {
  for (int other = 0; other < comm.size; ++other)
    if ((rank < 0 || rank == other) && other != comm.rank)
      vgpu::ring(vgpu::board()->seats[comm.shared->seat[other]].clock_bell);
}

void ring_data(const Comm& comm, int rank) {
  for (int other = 0; other < comm.size; ++other)
    if ((rank < 0 || rank == other) && other != comm.rank)
      vgpu::ring(vgpu::board()->seats[comm.shared->seat[other]].data_bell);
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
  if (!shared.left[comm.rank].exchange(true) && ++shared.gone == comm.size)
    unlink(comm_path(comm.name).c_str());
}

Shared* open_shared(const std::string& path, int size) {
  auto ranks = static_cast<std::size_t>(size);
  std::size_t bytes = sizeof(Shared) + ranks * ranks * kMails * sizeof(Mail);
  return static_cast<Shared*>(vgpu::map_file(path, bytes, true));
}

Result join(Comm** out, int size, const std::string& name, int rank) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return invalid_argument;
  std::string path = comm_path(name);
  auto* comm = new Comm;
  comm->shared = open_shared(path, size);
  if (!comm->shared) {
    vgpu::complain("ncclCommInitRank", ("cannot open " + path).c_str());
    return system_error;
  }
  comm->rank = rank;
  comm->size = size;
  comm->device = vgpu::current_device();
  comm->name = name;
  Shared& shared = *comm->shared;
  shared.pid[rank] = getpid();
  shared.seat[rank] = vgpu::my_seat();
  shared.device[rank] = comm->device;
  shared.node[rank] = vgpu::my_node();
  shared.size = size;
  ++shared.joined;
  while (shared.joined < size)
    nap();
  for (int other = 0; other < size; ++other)
    comm->span = std::max(comm->span, reach_between(*comm, 0, other));
  start_ras();
  *out = comm;
  return ok;
}

Result unsupported(const char* function) {
  vgpu::complain(function, "has no model in the virtual NCCL");
  return invalid_usage;
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
  return join(comm, size, id.text, rank);
}

VGPU_API Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void*) {
  return join(comm, size, id.text, rank);
}

VGPU_API Result ncclCommInitRankScalable(Comm** comm, int size, int rank, int, UniqueId* ids, void*) {
  return join(comm, size, ids[0].text, rank);
}

VGPU_API Result ncclCommSplit(Comm* comm, int color, int key, Comm** out, void*) {
  std::uint64_t number = comm->splits++;
  Split* splits = comm->shared->splits[number % kSplits];
  splits[comm->rank].color = color;
  splits[comm->rank].key = key;
  splits[comm->rank].tag = number + 1;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < comm->size; ++rank) {
    while (splits[rank].tag < number + 1)
      nap();
    if (splits[rank].color == color) members.emplace_back(splits[rank].key, rank);
  }
  *out = nullptr;
  if (color < 0) return ok;
  std::sort(members.begin(), members.end());
  auto me =
      std::find_if(members.begin(), members.end(), [&](auto& m) { return m.second == comm->rank; });
  return join(out, static_cast<int>(members.size()),
              comm->name + "." + std::to_string(number) + "." + std::to_string(color),
              static_cast<int>(me - members.begin()));
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
