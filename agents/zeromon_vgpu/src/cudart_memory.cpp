// libcudart: memory, copies, fills, and pools.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cost.h"
#include "cudart.h"
#include "machine.h"
#include "memory.h"
#include "values.h"

using namespace cuda;
using namespace cudart;
using vgpu::Block;
using vgpu::Call;
using vgpu::Direction;
using vgpu::Guard;
using vgpu::OpRef;
using vgpu::Place;
using vgpu::Stream;
using vgpu::stream_of;

namespace {

constexpr int kGuess = 4;  // cudaMemcpyDefault
constexpr std::size_t kPage = 4096, kLargeFill = 1 << 20, kLargeCopy = 1 << 20;

struct Rows {
  char* to;
  const char* from;
  std::size_t to_pitch, from_pitch, width, height;
};

class Copy : public vgpu::Action {
public:
  explicit Copy(const Rows& rows) : rows_(rows) {}
  bool move() override {
    for (std::size_t row = 0; row < rows_.height; ++row)
      move_row(rows_.to + row * rows_.to_pitch, rows_.from + row * rows_.from_pitch);
    return true;
  }
  std::unique_ptr<Action> copy() const override { return std::make_unique<Copy>(rows_); }

private:
  // Pages that are zero at both ends stay untouched: parameters that kernels filled, and that a framework
  // moves about, would otherwise take the host's memory and its time.
  void move_row(char* to, const char* from) const {
    std::size_t step = rows_.width < kLargeCopy ? rows_.width : kPage;
    for (std::size_t at = 0; at < rows_.width; at += step) {
      std::size_t part = std::min(step, rows_.width - at);
      if (step != kPage || !vgpu::is_zero(from + at, part) || !vgpu::is_zero(to + at, part))
        std::memmove(to + at, from + at, part);
    }
  }

  Rows rows_;
};

class Fill : public vgpu::Action {
public:
  Fill(void* start, int value, std::size_t bytes) : start_(start), value_(value), bytes_(bytes) {}
  bool move() override {
    auto* from = static_cast<char*>(start_);
    std::size_t bytes = bytes_;
    Block block;
    // Untouched pages are zero: dropping pages keeps a large model within the host's memory.
    if (value_ == 0 && bytes >= kLargeFill && find_block(start_, &block) && block.owned) {
      auto address = reinterpret_cast<std::uintptr_t>(from);
      std::size_t head = (kPage - address % kPage) % kPage;
      std::size_t pages = (bytes - head) / kPage * kPage;
      std::memset(from, 0, head);
      madvise(from + head, pages, block.file < 0 ? MADV_DONTNEED : MADV_REMOVE);
      from += head + pages;
      bytes -= head + pages;
    }
    std::memset(from, value_, bytes);
    return true;
  }
  std::unique_ptr<Action> copy() const override {
    return std::make_unique<Fill>(start_, value_, bytes_);
  }

private:
  void* start_;
  int value_;
  std::size_t bytes_;
};

// cudaFreeAsync: the memory goes back when the stream gets there.
class Release : public vgpu::Action {
public:
  explicit Release(void* start) : start_(start) {}
  bool move() override {
    vgpu::unmap_block(start_);
    return true;
  }
  bool moves_on_time() const override { return true; }
  std::unique_ptr<Action> copy() const override { return std::make_unique<Release>(start_); }

private:
  void* start_;
};

bool is_on_device(const void* address) {
  Block block;
  return find_block(address, &block) && block.place == Place::device;
}

Direction direction_of(const void* to, const void* from, int kind) {
  if (kind != kGuess) return static_cast<Direction>(kind);
  bool to_device = is_on_device(to);
  if (is_on_device(from)) return to_device ? Direction::on_device : Direction::to_host;
  return to_device ? Direction::to_device : Direction::host;
}

// Without large payloads a large copy to a device takes time only: its pages stay without memory.
bool moves_bytes(const vgpu::Op& op) {
  if (op.direction != Direction::to_device && op.direction != Direction::on_device) return true;
  auto bytes = static_cast<double>(op.bytes);
  return op.bytes <= static_cast<std::int64_t>(kLargeCopy) || bytes <= vgpu::machine().largest_payload;
}

OpRef enqueue_copy(const Rows& rows, int kind, Stream* stream, bool* pageable) {
  auto op = std::make_unique<vgpu::Op>();
  op->kind = vgpu::Kind::copy;
  op->direction = direction_of(rows.to, rows.from, kind);
  op->bytes = static_cast<std::int64_t>(rows.width * rows.height);
  const void* on_host = op->direction == Direction::to_host ? rows.to : rows.from;
  Block block;
  *pageable = op->direction != Direction::on_device && !find_block(on_host, &block);
  op->duration = vgpu::copy_time(op->bytes, op->direction, !*pageable);
  Block source, target;
  bool is_on_devices = op->direction == Direction::on_device && find_block(rows.from, &source) &&
                       find_block(rows.to, &target);
  if (is_on_devices && source.device != target.device)
    op->duration = vgpu::peer_copy_time(op->bytes, source.device, target.device,
                                        have_peer_access(source.device, target.device));
  op->name = *pageable ? "memcpy pageable" : "memcpy";
  op->correlation = vgpu::last_correlation();
  if (moves_bytes(*op)) op->action = std::make_unique<Copy>(rows);
  return vgpu::enqueue(stream, std::move(op));
}

// Follows small values; a row to the host comes from elsewhere where its value is unknown.
Rows follow_values(Rows rows, int kind, Stream* stream) {
  std::size_t bytes = rows.width * rows.height;
  Direction direction = direction_of(rows.to, rows.from, kind);
  if (direction == Direction::to_host) {
    if (rows.height > 1 || stream->capture) return rows;
    Guard held(vgpu::lock());
    const char* last_kernel = stream->last ? stream->last->name : "";
    const char* value = vgpu::stand_in_for(rows.from, bytes, last_kernel);
    if (value) rows.from = value;
  } else if (direction == Direction::on_device && rows.height == 1) {
    vgpu::note_copied(rows.to, rows.from, bytes);
  } else if (direction == Direction::to_device) {
    for (std::size_t row = 0; row < rows.height; ++row)
      vgpu::note_written(rows.to + row * rows.to_pitch, rows.width);
  }
  return rows;
}

Error copy_rows(const Rows& given, int kind, Stream* stream, bool wait) {
  if (given.width * given.height == 0) return success;
  Rows rows = follow_values(given, kind, stream);
  if (rows.from != given.from) kind = static_cast<int>(Direction::to_host);
  bool pageable = false;
  OpRef op = enqueue_copy(rows, kind, stream, &pageable);
  if (stream->capture) return success;
  // As documented: from pageable memory the call returns once it is staged, to it once it is done.
  if (wait || pageable) {
    Guard held(vgpu::lock());
    vgpu::wait_complete(held, op);
  }
  return success;
}

Rows one_row(void* to, const void* from, std::size_t bytes) {
  return {static_cast<char*>(to), static_cast<const char*>(from), 0, 0, bytes, 1};
}

Error allocate(void** out, std::size_t bytes, Place place) {
  *out = nullptr;
  if (bytes == 0) return success;
  int device = vgpu::current_device();
  vgpu::open_context(device);
  *out = vgpu::map_block(bytes, device, place);
  return *out ? success : fail(out_of_memory);
}

}  // namespace

VGPU_API Error cudaMalloc(void** out, std::size_t bytes) {
  VGPU_ENTER_UNSAFE();
  Call call("cudaMalloc", 20);
  return allocate(out, bytes, Place::device);
}

VGPU_API Error cudaMallocManaged(void** out, std::size_t bytes, unsigned) {
  VGPU_ENTER_UNSAFE();
  return allocate(out, bytes, Place::device);
}

VGPU_API Error cudaFree(void* start) {
  VGPU_ENTER_UNSAFE();
  Call call("cudaFree", 22);
  vgpu::open_context(vgpu::current_device());
  if (!start) return success;
  {
    Guard held(vgpu::lock());
    vgpu::synchronize_device(held, vgpu::current_device());
  }
  return vgpu::unmap_block(start) ? success : fail(invalid_value);
}

VGPU_API Error cudaHostAlloc(void** out, std::size_t bytes, unsigned) {
  VGPU_ENTER_UNSAFE();
  Call call("cudaHostAlloc", 27);
  return allocate(out, bytes, Place::host);
}

VGPU_API Error cudaMallocHost(void** out, std::size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

VGPU_API Error cudaFreeHost(void* start) {
  VGPU_ENTER();
  if (!start) return success;
  {
    Guard held(vgpu::lock());
    vgpu::synchronize_device(held, vgpu::current_device());
  }
  return vgpu::unmap_block(start) ? success : fail(invalid_value);
}

VGPU_API Error cudaHostRegister(void* start, std::size_t bytes, unsigned) {
  VGPU_ENTER();
  vgpu::add_block(start, bytes, vgpu::current_device(), Place::host);
  return success;
}

VGPU_API Error cudaHostUnregister(void* start) {
  VGPU_ENTER();
  vgpu::remove_block(start);
  return success;
}

VGPU_API Error cudaHostGetDevicePointer(void** out, void* on_host, unsigned) {
  *out = on_host;
  return success;
}

VGPU_API Error cudaPointerGetAttributes(PointerAttributes* out, const void* address) {
  VGPU_ENTER();
  *out = {};
  Block block;
  auto* pointer = const_cast<void*>(address);
  out->device = -2;
  out->host_pointer = pointer;
  if (!find_block(address, &block)) return success;
  bool on_device = block.place == Place::device;
  out->type = on_device ? 2 : 1;
  out->device = block.device;
  out->device_pointer = pointer;
  if (on_device) out->host_pointer = nullptr;
  return success;
}

VGPU_API Error cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  VGPU_ENTER();
  int device = vgpu::current_device();
  vgpu::open_context(device);
  int place = vgpu::physical_device(device);
  *total = vgpu::memory_limit(place);
  std::size_t used = vgpu::used_bytes(place);
  *free_bytes = used > *total ? 0 : *total - used;
  return success;
}

// ---- copies and fills ------------------------------------------------------------------------------

VGPU_API Error cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  VGPU_ENTER();
  Call call("cudaMemcpyAsync", 41);
  return copy_rows(one_row(to, from, bytes), kind, stream_of(stream), false);
}

VGPU_API Error cudaMemcpy(void* to, const void* from, std::size_t bytes, int kind) {
  VGPU_ENTER_UNSAFE();
  Call call("cudaMemcpy", 31);
  return copy_rows(one_row(to, from, bytes), kind, stream_of(nullptr), true);
}

VGPU_API Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                   void* stream) {
  VGPU_ENTER();
  Call call("cudaMemcpyPeerAsync", 61);
  int on_device = static_cast<int>(Direction::on_device);
  return copy_rows(one_row(to, from, bytes), on_device, stream_of(stream), false);
}

VGPU_API Error cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                 std::size_t from_pitch, std::size_t width, std::size_t height, int kind,
                                 void* stream) {
  VGPU_ENTER();
  Call call("cudaMemcpy2DAsync", 47);
  Rows rows{static_cast<char*>(to), static_cast<const char*>(from), to_pitch, from_pitch, width, height};
  return copy_rows(rows, kind, stream_of(stream), false);
}

VGPU_API Error cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t bytes,
                                  std::size_t offset, int) {
  VGPU_ENTER();
  std::memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, from, bytes);
  return success;
}

VGPU_API Error cudaGetSymbolAddress(void** out, const void* symbol) {
  *out = const_cast<void*>(symbol);  // the host's shadow of the variable has its size
  return success;
}

VGPU_API Error cudaMemsetAsync(void* start, int value, std::size_t bytes, void* handle) {
  VGPU_ENTER();
  Call call("cudaMemsetAsync", 51);
  if (bytes == 0) return success;
  auto op = std::make_unique<vgpu::Op>();
  op->kind = vgpu::Kind::fill;
  op->direction = Direction::on_device;
  op->name = "memset";
  op->bytes = static_cast<std::int64_t>(bytes);
  op->duration = vgpu::copy_time(op->bytes, Direction::on_device, true);
  op->correlation = call.correlation;
  op->action = std::make_unique<Fill>(start, value, bytes);
  vgpu::note_written(start, bytes);
  vgpu::enqueue(stream_of(handle), std::move(op));
  return success;
}

VGPU_API Error cudaMemset(void* start, int value, std::size_t bytes) {
  return cudaMemsetAsync(start, value, bytes, nullptr);
}

// ---- pools: memory of cudaMallocAsync goes back to the device when it is freed -----------------------

namespace {
std::atomic<std::uint64_t> pool_used[vgpu::kMaxDevices], pool_most[vgpu::kMaxDevices];
enum PoolAttribute { kReserved = 5, kMostReserved = 6, kUsed = 7, kMostUsed = 8 };
int pool_device(const void* pool) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(pool)) - 1;
}
}  // namespace

VGPU_API Error cudaMallocAsync(void** out, std::size_t bytes, void* handle) {
  VGPU_ENTER();
  Call call("cudaMallocAsync", 376);
  int device = stream_of(handle)->device;
  Error error = allocate(out, bytes, Place::device);
  if (error == success && bytes) {
    std::uint64_t used = pool_used[device].fetch_add(bytes) + bytes;
    if (used > pool_most[device]) pool_most[device] = used;
  }
  return error;
}

VGPU_API Error cudaFreeAsync(void* start, void* handle) {
  VGPU_ENTER();
  Call call("cudaFreeAsync", 377);
  Block block;
  if (!start) return success;
  if (!find_block(start, &block)) return fail(invalid_value);
  pool_used[block.device].fetch_sub(std::min<std::uint64_t>(block.bytes, pool_used[block.device]));
  auto op = std::make_unique<vgpu::Op>();
  op->kind = vgpu::Kind::event;
  op->name = "free";
  op->action = std::make_unique<Release>(start);
  vgpu::enqueue(stream_of(handle), std::move(op));
  return success;
}

VGPU_API Error cudaDeviceGetDefaultMemPool(void** pool, int device) {
  *pool = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device + 1));
  return success;
}

VGPU_API Error cudaMemPoolGetAttribute(void* pool, int attribute, std::uint64_t* value) {
  int device = pool_device(pool);
  bool most = attribute == kMostReserved || attribute == kMostUsed;
  *value = attribute < kReserved ? 0 : (most ? pool_most : pool_used)[device].load();
  return success;
}

VGPU_API Error cudaMemPoolSetAttribute(void* pool, int attribute, const std::uint64_t*) {
  int device = pool_device(pool);
  if (attribute == kMostReserved || attribute == kMostUsed) pool_most[device] = pool_used[device].load();
  return success;
}

VGPU_API Error cudaMemPoolSetAccess(void* pool, const MemoryAccess* access, std::size_t count) {
  for (const MemoryAccess* one = access; one != access + count; ++one)
    allow_pool_access(pool_device(pool), one->location.id, one->flags == 3);
  return success;
}
VGPU_API Error cudaMemPoolTrimTo(void*, std::size_t) { return success; }

VGPU_API Error cudaDeviceGetGraphMemAttribute(int, int, std::uint64_t* value) {
  *value = 0;
  return success;
}
VGPU_API Error cudaDeviceSetGraphMemAttribute(int, int, void*) { return success; }
