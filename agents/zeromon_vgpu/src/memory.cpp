// Device memory, pinned memory and the board of the run.
#include "memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"
#include "machine.h"

namespace vgpu {
namespace {

std::atomic<bool> opened[kMaxDevices];  // contexts of this process

std::mutex blocks_lock;
std::map<std::uintptr_t, Block>& blocks() {
  static auto* all = new std::map<std::uintptr_t, Block>;
  return *all;
}

Board* open_board() {
  std::string path = folder() + "/board";
  void* mapped = map_file(path, sizeof(Board), true);
  if (!mapped) {
    complain("board", ("cannot open " + path).c_str());
    std::abort();
  }
  return static_cast<Board*>(mapped);
}

int take_seat() {
  // Peers read our memory where a system lets only parents do so.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  for (int i = 0; i < kMaxProcesses; ++i) {
    Seat& seat = board()->seats[i];
    int old = seat.pid.load();
    if (old && is_alive(seat)) continue;
    if (!seat.pid.compare_exchange_strong(old, getpid())) continue;
    seat.node = my_node();
    for (auto& bytes : seat.bytes)
      bytes = 0;
    for (auto& busy : seat.busy_ns)
      busy = 0;
    for (auto& since : seat.busy_since)
      since = 0;
    for (Activity& activity : seat.activity) {
      activity.counted = now();
      for (int unit = 0; unit < kUnits; ++unit)
        activity.used[unit] = activity.rate[unit] = 0;
    }
    return i;
  }
  complain("board", "more than 256 processes use one virtual machine");
  std::abort();
}

std::size_t round_up(std::size_t bytes) { return (bytes + 511) & ~std::size_t{511}; }

// Copies what is not zero, so that untouched pages stay without memory.
bool copy_touched(const Block& block, int file) {
  constexpr std::size_t kChunk = 64 << 10;
  static const char zeros[kChunk] = {};
  const auto* from = static_cast<const char*>(block.start);
  for (std::size_t offset = 0; offset < block.bytes; offset += kChunk) {
    std::size_t bytes = std::min(kChunk, block.bytes - offset);
    if (std::memcmp(from + offset, zeros, bytes) == 0) continue;
    if (pwrite(file, from + offset, bytes, static_cast<off_t>(offset)) != static_cast<ssize_t>(bytes))
      return false;
  }
  return true;
}

}  // namespace

Board* board() {
  static Board* mapped = open_board();
  return mapped;
}

int my_seat() {
  static int seat = take_seat();
  return seat;
}

bool is_alive(const Seat& seat) {
  int pid = seat.pid.load();
  return pid && (kill(pid, 0) == 0 || errno == EPERM);
}

bool is_here(const Seat& seat) { return seat.node == my_node() && is_alive(seat); }

void ring(std::atomic<int>& bell) {
  bell.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<int*>(&bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wait_bell(std::atomic<int>& bell, int seen, std::int64_t nanoseconds) {
  timespec limit{nanoseconds / 1000000000, nanoseconds % 1000000000};
  syscall(SYS_futex, reinterpret_cast<int*>(&bell), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

std::uint64_t used_bytes(int device) {
  std::uint64_t total = 0;
  for (const Seat& seat : board()->seats)
    if (seat.bytes[device].load() && is_here(seat)) total += seat.bytes[device].load();
  return total;
}

bool charge(int device, std::int64_t bytes) {
  device = physical_device(device);
  auto& mine = board()->seats[my_seat()].bytes[device];
  if (bytes > 0 && used_bytes(device) + static_cast<std::uint64_t>(bytes) > memory_limit(device))
    return false;
  mine.fetch_add(static_cast<std::uint64_t>(bytes));
  return true;
}

std::uint64_t memory_limit(int device) {
  const Fault* fault = planned("full", device);
  bool acts = fault && uptime() >= fault->at;
  return static_cast<std::uint64_t>(machine().memory_bytes * (acts ? fault->factor : 1));
}

bool has_context(int device) { return opened[device]; }

void open_context(int device) {
  if (!opened[device].exchange(true)) charge(device, static_cast<std::int64_t>(machine().context_bytes));
}

void* map_block(std::size_t bytes, int device, Place place) {
  std::size_t size = round_up(bytes);
  if (place == Place::device && !charge(device, static_cast<std::int64_t>(size))) return nullptr;
  void* start =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> held(blocks_lock);
  blocks()[reinterpret_cast<std::uintptr_t>(start)] = {start, size, device, place, true, -1};
  return start;
}

bool unmap_block(void* start) {
  Block block;
  {
    std::lock_guard<std::mutex> held(blocks_lock);
    auto found = blocks().find(reinterpret_cast<std::uintptr_t>(start));
    if (found == blocks().end() || !found->second.owned) return false;
    block = found->second;
    blocks().erase(found);
  }
  if (block.place == Place::device) charge(block.device, -static_cast<std::int64_t>(block.bytes));
  munmap(start, block.bytes);
  if (block.file >= 0) close(block.file);
  return true;
}

bool share_block(const void* address, Block* block) {
  Block found;
  if (!find_block(address, &found) || !found.owned || found.place != Place::device) return false;
  if (found.file < 0) {
    int file = memfd_create("vgpu", MFD_CLOEXEC);
    if (file < 0) return false;
    bool is_copied = ftruncate(file, static_cast<off_t>(found.bytes)) == 0 && copy_touched(found, file);
    if (!is_copied || mmap(found.start, found.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                           file, 0) == MAP_FAILED) {
      close(file);
      return false;
    }
    found.file = file;
    std::lock_guard<std::mutex> held(blocks_lock);
    blocks()[reinterpret_cast<std::uintptr_t>(found.start)] = found;
  }
  *block = found;
  return true;
}

void* map_file(const std::string& path, std::size_t bytes, bool create) {
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
  if (file < 0) return nullptr;
  bool is_sized = ftruncate(file, static_cast<off_t>(bytes)) == 0;
  void* mapped =
      is_sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

void add_block(void* start, std::size_t bytes, int device, Place place) {
  std::lock_guard<std::mutex> held(blocks_lock);
  blocks()[reinterpret_cast<std::uintptr_t>(start)] = {start, bytes, device, place, false, -1};
}

void remove_block(void* start) {
  std::lock_guard<std::mutex> held(blocks_lock);
  blocks().erase(reinterpret_cast<std::uintptr_t>(start));
}

bool find_block(const void* address, Block* block) {
  auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::lock_guard<std::mutex> held(blocks_lock);
  auto after = blocks().upper_bound(wanted);
  if (after == blocks().begin()) return false;
  --after;
  if (wanted >= after->first + after->second.bytes) return false;
  *block = after->second;
  return true;
}

}  // namespace vgpu
