// Device memory, pinned memory and the board of the run.
#include "memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
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
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board))) {
    complain("board", ("cannot open " + path).c_str());
    std::abort();
  }
  void* mapped = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
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
    for (auto& bytes : seat.bytes)
      bytes = 0;
    for (auto& busy : seat.busy_ns)
      busy = 0;
    for (auto& since : seat.busy_since)
      since = 0;
    return i;
  }
  complain("board", "more than 256 processes use one virtual machine");
  std::abort();
}

std::size_t round_up(std::size_t bytes) { return (bytes + 511) & ~std::size_t{511}; }

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
    if (seat.bytes[device].load() && is_alive(seat)) total += seat.bytes[device].load();
  return total;
}

bool charge(int device, std::int64_t bytes) {
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
  blocks()[reinterpret_cast<std::uintptr_t>(start)] = {start, size, device, place, true};
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
  return true;
}

void add_block(void* start, std::size_t bytes, int device, Place place) {
  std::lock_guard<std::mutex> held(blocks_lock);
  blocks()[reinterpret_cast<std::uintptr_t>(start)] = {start, bytes, device, place, false};
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
