// What the files of libnccl share: the communicator in shared memory, element types and reductions.
//
// Ranks meet in one file a communicator. Two protocols run in it, each a ring of slots by sequence
// number: arrivals carry the times from which every rank computes the same end, payloads carry the
// address that peers read the bytes from. A tag of a slot is its sequence number plus one.
//
// Where VGPU_RANKS names the ranks that run, a communicator has members that do not: absent ones. They
// count in its size, its bytes and its link, and nobody waits for them. Arrays of the file are by the
// place of a rank among those that run.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "machine.h"

namespace nccl {

constexpr int kMaxRanks = 64, kSlots = 64, kMails = 32, kSplits = 64;
constexpr int kVersion = 22907;
// What the name of a communicator's file begins with.
constexpr const char* kCommFile = "comm-";

enum Result : int {
  ok = 0,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5
};
enum class Function : int { all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all };
constexpr int kFunctions = 6;
enum Reduction : int { sum, product, maximum, minimum, average, first_custom };

std::size_t element_size(int type);

struct Arrival {
  std::atomic<std::uint64_t> tag;
  vgpu::Time start;
  vgpu::Unhindered unhindered;
  int function, type, reduction, root;
  std::uint64_t count;
};

struct Payload {
  std::atomic<std::uint64_t> posted, read;
  const void* source;
};

// From one rank to another: when each side came, and what the sender has.
struct Mail {
  std::atomic<std::uint64_t> sent, received, posted, read;
  vgpu::Time send_start, receive_start;
  vgpu::Unhindered unhindered_send, unhindered_receive;
  std::uint64_t bytes;
  const void* source;
};

struct Split {
  std::atomic<std::uint64_t> tag;
  int color, key;
};

struct Shared {
  std::atomic<int> joined, running, gone;  // `running`: members that are to join
  int size;                                // with those that are absent
  std::atomic<bool> left[kMaxRanks];       // by ncclCommDestroy or ncclCommAbort
  std::atomic<std::uint64_t> launched[kMaxRanks][kFunctions];
  int rank[kMaxRanks], pid[kMaxRanks], seat[kMaxRanks], device[kMaxRanks], node[kMaxRanks];
  Split splits[kSplits][kMaxRanks];
  Arrival arrivals[kSlots][kMaxRanks];
  Payload payloads[kSlots][kMaxRanks];
  Mail mails[1];  // place x place x kMails
};

constexpr int kAbsent = -1;

struct Comm {
  Shared* shared = nullptr;
  int rank = 0, size = 0, device = 0;
  std::vector<int> running;  // members that run, in order
  std::vector<int> globals;  // global ranks of all members; empty where all run
  int place = 0;             // of this rank in `running`
  std::string name;
  std::uint64_t next = 0, splits = 0;
  std::map<int, std::uint64_t> sent, received;
  std::map<int, double> scales;  // of custom reductions
  int next_custom = first_custom;
  vgpu::Reach span = vgpu::Reach::nvlink;  // of the two ranks that are farthest apart
  std::atomic<vgpu::Time> aborted{0};      // when, or 0

  int places() const { return static_cast<int>(running.size()); }
  // The place of a member among those that run, or kAbsent.
  int place_of(int member) const;
  // The place of the rank that runs in a member's stead: its own, else that of the last before it.
  int stand_in(int member) const;
  Mail& mail(int from, int to, std::uint64_t number) const {
    return shared->mails[(static_cast<std::size_t>(place_of(from)) * running.size() +
                          static_cast<std::size_t>(place_of(to))) *
                             kMails +
                         number % kMails];
  }
};

// A communicator of `size` ranks by its name. `globals`: the global rank of each, or none if all run.
Result join(Comm** out, int size, const std::string& name, int rank, std::vector<int> globals = {});
// What startup.py calls a group: its name and the global ranks of its members.
struct GroupTag {
  std::string name;
  std::vector<int> ranks;
};
// The name of a group's next communicator, the same on each of its ranks.
std::string next_name(const std::string& group);
GroupTag read_tag(const char* text);

// What joins two ranks.
vgpu::Reach reach_between(const Comm& comm, int rank, int other);
// Wakes the clock or the data thread of a peer; of all peers if `rank` < 0.
void ring_clock(const Comm& comm, int rank = -1);
void ring_data(const Comm& comm, int rank = -1);
// Reads the memory of the rank at a place. False if the system forbids it.
bool pull(const Comm& comm, int place, void* to, const void* from, std::size_t bytes);
// Reduces `count` elements that the rank of each place has at `sources[place]` plus `offset` elements.
// A sum counts an absent rank as the mean of those that run.
void reduce(const Comm& comm, const void* const* sources, std::size_t offset, std::size_t count,
            int type, int reduction, void* out);

// What a rank receives of a collective, from the addresses of the running ranks' bytes. Empty: its
// target stays as it is, as where the root is absent.
std::vector<char> received_bytes(const Comm& comm, Function function, const void* const* sources,
                                 std::uint64_t count, int type, int reduction, int root);

// A floating-point scalar of this type; false for other types.
bool read_scalar(const void* scalar, int type, double* out);

// Enqueues a collective; a captured one gets its sequence number at each replay.
void enqueue_collective(Comm* comm, Function function, const void* source, void* target,
                        std::uint64_t count, int type, int reduction, int root, void* stream);

struct Transfer {
  Comm* comm;
  bool is_send;
  void* buffer;
  std::uint64_t bytes;
  int peer;
  std::uint64_t number;
};
// One kernel for all of these sends and receives.
void enqueue_transfers(std::vector<Transfer> transfers, void* stream);

// ---- what NCCL reports of itself (nccl_inspector.cpp, nccl_ras.cpp)
const char* function_name(Function function);
std::string comm_hash(const std::string& name);

// A collective whose end is known: `number` counts those of its function, `bytes` are those of a rank.
struct Finished {
  const Comm* comm;
  Function function;
  std::uint64_t number, bytes;
  double full_bytes, bus_bytes;
  vgpu::Time start, end;
};
// Hands it to Inspector, which writes it once the clock has reached its end.
void inspect(const Finished& collective);
// Listens for clients of RAS, once a process.
void start_ras();

}  // namespace nccl
