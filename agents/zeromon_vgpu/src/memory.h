// Device memory and the board: one file a run that says which process uses what of which device.
//
// Memory is mapped without a reservation: pages exist once they are touched. A device's limit counts
// what all processes on it hold, and the context that each opened there.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace vgpu {

constexpr int kMaxDevices = 16, kMaxProcesses = 256;

// Parts of a device that GPM counts: multiprocessors, tensor cores, the bandwidth of its memory.
enum Unit { kMultiprocessors, kTensorCores, kMemoryBandwidth, kUnits };

// Seconds of full use of each unit until `counted`. `version` is odd while the owner writes.
struct Activity {
  std::atomic<unsigned> version;
  std::atomic<std::int64_t> counted;
  std::atomic<double> used[kUnits], rate[kUnits];
};

// One process on the board. Other processes ring its bells, and NVML reads its memory.
struct Seat {
  std::atomic<int> pid, node;
  std::atomic<int> clock_bell, data_bell;
  std::atomic<std::uint64_t> bytes[kMaxDevices];
  // Time with a kernel or a collective on the device, in total; and since when one runs, or 0.
  std::atomic<std::int64_t> busy_ns[kMaxDevices], busy_since[kMaxDevices];
  Activity activity[kMaxDevices];
};

struct Board {
  Seat seats[kMaxProcesses];
};

Board* board();
int my_seat();
bool is_alive(const Seat& seat);
// Of a living process on this node: another node has devices of its own.
bool is_here(const Seat& seat);
void ring(std::atomic<int>& bell);
// Sleeps until the bell no longer shows `seen`, or for `nanoseconds`.
void wait_bell(std::atomic<int>& bell, int seen, std::int64_t nanoseconds);

enum class Place { unknown, host, device };
struct Block {
  void* start;
  std::size_t bytes;
  int device;
  Place place;
  bool owned;
  int file = -1;  // that other processes map, once the block was shared
};

void open_context(int device);
bool has_context(int device);
// Bytes of the device; fewer by a planned `full`.
std::uint64_t memory_limit(int device);
// False if the device is full.
bool charge(int device, std::int64_t bytes);
std::uint64_t used_bytes(int device);
void* map_block(std::size_t bytes, int device, Place place);
bool unmap_block(void* start);
void add_block(void* start, std::size_t bytes, int device, Place place);
void remove_block(void* start);
bool find_block(const void* address, Block* block);
// Whether all bytes are zero, as those of a page are that nobody has touched.
inline bool is_zero(const void* start, std::size_t bytes) {
  auto* from = static_cast<const char*>(start);
  return from[0] == 0 && std::memcmp(from, from + 1, bytes - 1) == 0;
}
// Moves the block of device memory at an address into a file, where it stays; false if it cannot be
// shared. No bytes may move meanwhile (pause_data).
bool share_block(const void* address, Block* block);
// A file of the run in the memory of each process that maps it; null on failure.
void* map_file(const std::string& path, std::size_t bytes, bool create);

}  // namespace vgpu
