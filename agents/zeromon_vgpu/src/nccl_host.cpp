// libnccl: collectives of the host, for groups of gloo that have absent members. NCCL has none such.
#include <time.h>

#include <cstring>
#include <map>
#include <mutex>

#include "cuda_api.h"
#include "machine.h"
#include "nccl.h"

namespace nccl {
namespace {

// Communicators by the tag of their group, made at its first collective.
Comm* host_comm(const char* text, int rank) {
  static std::mutex mutex;
  static auto* made = new std::map<std::string, Comm*>;
  std::lock_guard<std::mutex> held(mutex);
  Comm*& comm = (*made)[text];
  if (comm) return comm;
  GroupTag tag = read_tag(text);
  auto size = static_cast<int>(tag.ranks.size());
  join(&comm, size, next_name(tag.name + "/host"), rank, std::move(tag.ranks));
  return comm;
}

// Waits until all ranks that run have come to this collective.
void wait_for_all(const Comm& comm, const Payload* payloads, std::atomic<std::uint64_t> Payload::*tag,
                  std::uint64_t number) {
  timespec pause{0, 50000};
  for (int place = 0; place < comm.places(); ++place)
    while (payloads[place].*tag < number)
      nanosleep(&pause, nullptr);
}

}  // namespace

// For Python: returns once the collective of the host is complete. Gather and scatter are not NCCL's.
VGPU_API int vgpu_host_collective(const char* tag, int rank, int function, const void* source,
                                  void* target, std::uint64_t count, int type, int reduction, int root) {
  Comm* comm = host_comm(tag, rank);
  if (!comm) return invalid_usage;
  constexpr int kGather = kFunctions, kScatter = kFunctions + 1;
  std::uint64_t number = ++comm->next;
  Payload* payloads = comm->shared->payloads[number % kSlots];
  payloads[comm->place].source = source;
  payloads[comm->place].posted = number;
  wait_for_all(*comm, payloads, &Payload::posted, number);
  std::vector<const void*> sources;
  for (int place = 0; place < comm->places(); ++place)
    sources.push_back(payloads[place].source);
  std::vector<char> result;
  std::size_t bytes = count * element_size(type);
  if (function == kScatter) {
    int from = comm->place_of(root);
    if (from != kAbsent) {
      result.resize(bytes);
      auto offset = static_cast<std::size_t>(comm->rank) * bytes;
      pull(*comm, from, result.data(),
           static_cast<const char*>(sources[static_cast<std::size_t>(from)]) + offset, bytes);
    }
  } else if (function != kGather || rank == root) {
    auto known = function == kGather ? Function::all_gather : static_cast<Function>(function);
    result = received_bytes(*comm, known, sources.data(), count, type, reduction, root);
  }
  payloads[comm->place].read = number;
  wait_for_all(*comm, payloads, &Payload::read, number);
  if (!result.empty()) std::memcpy(target, result.data(), result.size());
  return ok;
}

}  // namespace nccl
