// libnccl: collectives and transfers as operations of a stream.
#include <algorithm>
#include <cstring>

#include "cost.h"
#include "machine.h"
#include "memory.h"
#include "nccl.h"

namespace nccl {
namespace {

using vgpu::kUnknown;
using vgpu::Time;

// The n-th collective of this process, from 0: what a plan counts.
std::atomic<std::int64_t> issued{0};

vgpu::Link link_at(vgpu::Reach reach, Time time) {
  vgpu::Link link = vgpu::link_of(reach);
  // By the time that all ranks agree on, so that all compute the same end.
  for (const vgpu::Fault& fault : vgpu::faults())
    if (fault.kind == "link" && vgpu::run_seconds(time) >= fault.at) link.speed /= fault.factor;
  return link;
}

struct Request {
  Comm* comm;
  Function function;
  const void* source;
  void* target;
  std::uint64_t count;
  int type, reduction, root;
  std::uint64_t sequence, number;
  std::int64_t call;
};

void count_launch(Request& request) {
  Comm& comm = *request.comm;
  request.sequence = comm.next++;
  request.number = comm.shared->launched[comm.place][static_cast<int>(request.function)]++;
  request.call = issued++;
}

bool gathers(Function function) {
  return function == Function::all_gather || function == Function::all_to_all;
}

// The full size S, and nccl-tests' bytes on the bus of one rank.
double full_bytes(const Request& r) {
  double bytes = static_cast<double>(r.count) * static_cast<double>(element_size(r.type));
  bool sharded = gathers(r.function) || r.function == Function::reduce_scatter;
  return sharded ? bytes * r.comm->size : bytes;
}

double bus_bytes(const Request& r) {
  double n = r.comm->size, factor = 1;
  if (r.function == Function::all_reduce) factor = 2 * (n - 1) / n;
  if (gathers(r.function) || r.function == Function::reduce_scatter) factor = (n - 1) / n;
  return full_bytes(r) * factor;
}

constexpr std::size_t kBlankBytes = 4096;

class Collective : public vgpu::Action {
public:
  explicit Collective(const Request& request) : r_(request) {
    stuck_ = fault("stuck");
    if (const vgpu::Fault* late = fault("late")) delay_ = static_cast<Time>(late->seconds * 1e9);
  }

  Time end(Time start, Time) override {
    if (Time aborted = r_.comm->aborted) return std::max(start, aborted);
    if (end_ != kUnknown || stuck_) return end_;
    Time began = start;
    start += delay_;
    auto* arrivals = r_.comm->shared->arrivals[r_.sequence % kSlots];
    Arrival& mine = arrivals[r_.comm->place];
    if (mine.tag != r_.sequence + 1) {
      mine.start = start;
      mine.unhindered = unhindered_start;
      mine.function = static_cast<int>(r_.function);
      mine.type = r_.type;
      mine.reduction = r_.reduction;
      mine.root = r_.root;
      mine.count = r_.count;
      mine.tag = r_.sequence + 1;
      ring_clock(*r_.comm);
    }
    Time latest = start;
    vgpu::Unhindered unhindered = unhindered_start;
    // A rank that is absent comes with the last of those that run.
    for (int place = 0; place < r_.comm->places(); ++place) {
      const Arrival& other = arrivals[place];
      if (other.tag != r_.sequence + 1 || !fits(other, place)) return kUnknown;
      latest = std::max(latest, other.start);
      unhindered.reach(other.unhindered);
    }
    vgpu::Link link = link_at(r_.comm->span, latest);
    double ns = r_.comm->size == 1 ? vgpu::machine().kernel_ns
                                   : link.latency_ns + bus_bytes(r_) / link.speed * 1e9;
    transfer_ = latest;
    end_ = latest + static_cast<Time>(ns);
    unhindered.add(static_cast<Time>(ns), static_cast<Time>(ns));
    unhindered_end_ = unhindered;
    inspect({r_.comm, r_.function, r_.number, r_.count * element_size(r_.type), full_bytes(r_),
             bus_bytes(r_), began, end_});
    return end_;
  }

  bool move() override {
    // Bytes are objects that Python has packed: it reads them, however many they are. Large ones that
    // begin with zeros are none, but parameters that no host has written, as ZeRO-3 broadcasts them.
    bool is_packed = r_.type <= 1, is_large = full_bytes(r_) > vgpu::machine().largest_payload;
    if (r_.comm->aborted) return true;
    if (!is_packed && is_large) return true;
    if (stuck_) return false;
    auto* payloads = r_.comm->shared->payloads[r_.sequence % kSlots];
    Payload& mine = payloads[r_.comm->place];
    if (mine.posted != r_.sequence + 1) {
      mine.source = is_large && is_blank() ? nullptr : r_.source;
      mine.posted = r_.sequence + 1;
      ring_data(*r_.comm);
    }
    if (mine.read != r_.sequence + 1) {
      if (!all_have(payloads, &Payload::posted)) return false;
      if (!is_large || are_written(payloads)) read(payloads);
      mine.read = r_.sequence + 1;
      ring_data(*r_.comm);
    }
    // Peers may still read what an operation in place overwrites.
    if (!all_have(payloads, &Payload::read)) return false;
    if (!result_.empty()) std::memcpy(r_.target, result_.data(), result_.size());
    flip_bit();
    result_ = {};
    return true;
  }

  vgpu::Unhindered unhindered_end(Time) const override { return unhindered_end_; }

  Time transfer_start() const override { return transfer_; }

  std::string detail() const override {
    return "comm=" + r_.comm->name + " seq=" + std::to_string(r_.sequence) +
           " ranks=" + std::to_string(r_.comm->size) +
           " bus_bytes=" + std::to_string(static_cast<std::int64_t>(bus_bytes(r_)));
  }

  std::unique_ptr<Action> copy() const override {
    Request again = r_;
    count_launch(again);
    return std::make_unique<Collective>(again);
  }

private:
  // The fault of this kind that the plan has for this call, or null.
  const vgpu::Fault* fault(const char* kind) const {
    const vgpu::Fault* planned = vgpu::planned(kind);
    return planned && static_cast<std::int64_t>(planned->call) == r_.call ? planned : nullptr;
  }

  // NCCL has no check of its own: ranks that call different things wait for ever.
  bool fits(const Arrival& other, int place) const {
    if (other.function == static_cast<int>(r_.function) && other.count == r_.count &&
        other.type == r_.type && other.root == r_.root)
      return true;
    static std::atomic<bool> said{false};
    if (!said.exchange(true))
      vgpu::complain("nccl",
                     ("rank " + std::to_string(r_.comm->running[static_cast<std::size_t>(place)]) +
                      " calls another collective than rank " + std::to_string(r_.comm->rank) +
                      ": both hang, as with NCCL")
                         .c_str());
    return false;
  }

  bool all_have(const Payload* payloads, std::atomic<std::uint64_t> Payload::*tag) const {
    for (int place = 0; place < r_.comm->places(); ++place)
      if (payloads[place].*tag < r_.sequence + 1) return false;
    return true;
  }

  bool is_blank() const {
    return r_.source && vgpu::is_zero(r_.source, std::min<std::size_t>(r_.count, kBlankBytes));
  }

  bool are_written(const Payload* payloads) const {
    for (int place = 0; place < r_.comm->places(); ++place) {
      bool is_read = r_.function != Function::broadcast ||
                     r_.comm->running[static_cast<std::size_t>(place)] == r_.root;
      if (is_read && !payloads[place].source) return false;
    }
    return true;
  }

  void read(const Payload* payloads) {
    std::vector<const void*> sources(r_.comm->running.size());
    for (std::size_t place = 0; place < sources.size(); ++place)
      sources[place] = payloads[place].source;
    result_ =
        received_bytes(*r_.comm, r_.function, sources.data(), r_.count, r_.type, r_.reduction, r_.root);
  }

  void flip_bit() {
    const vgpu::Fault* flip = fault("flip");
    if (!flip || result_.empty()) return;
    auto bit = static_cast<std::size_t>(flip->bit);
    static_cast<char*>(r_.target)[bit / 8 % result_.size()] ^= static_cast<char>(1 << bit % 8);
  }

  Request r_;
  Time end_ = kUnknown, transfer_ = kUnknown, delay_ = 0;
  vgpu::Unhindered unhindered_end_;
  std::vector<char> result_;
  bool stuck_ = false;
};

// A send to an absent rank is complete at once. What comes from one is what this rank sends to it in the
// same group, if that is as much: an exchange of all with all is so with itself.
class Transfers : public vgpu::Action {
public:
  explicit Transfers(std::vector<Transfer> transfers) : transfers_(std::move(transfers)) {}

  Time end(Time start, Time) override {
    Time end = start, latest = start;
    bool all = true;
    for (Transfer& t : transfers_) {
      if (Time aborted = t.comm->aborted) return std::max(start, aborted);
      if (is_absent(t)) continue;
      Mail& mail = mail_of(t);
      auto& tag = t.is_send ? mail.sent : mail.received;
      if (tag != t.number + 1) {
        (t.is_send ? mail.send_start : mail.receive_start) = start;
        (t.is_send ? mail.unhindered_send : mail.unhindered_receive) = unhindered_start;
        tag = t.number + 1;
        ring_clock(*t.comm, t.peer);
      }
    }
    vgpu::Unhindered unhindered_latest;
    for (const Transfer& t : transfers_) {
      Time both = start;
      vgpu::Unhindered one = unhindered_start;
      if (!is_absent(t)) {
        const Mail& mail = mail_of(t);
        if (mail.sent < t.number + 1 || mail.received < t.number + 1) {
          all = false;
          continue;
        }
        both = std::max(mail.send_start, mail.receive_start);
        one.reach(mail.unhindered_send);
        one.reach(mail.unhindered_receive);
      }
      vgpu::Link link = link_at(reach_between(*t.comm, t.comm->rank, t.peer), both);
      latest = std::max(latest, both);
      auto ns = static_cast<Time>(link.latency_ns + static_cast<double>(t.bytes) / link.speed * 1e9);
      end = std::max(end, both + ns);
      one.add(ns, ns);
      unhindered_latest.reach(one);
    }
    if (!all) return kUnknown;
    unhindered_end_ = unhindered_latest;
    transfer_ = latest;
    return end;
  }

  bool move() override {
    bool all = true;
    for (Transfer& t : transfers_) {
      if (moves_none(t)) continue;
      if (is_absent(t)) {
        echo(t);
        continue;
      }
      Mail& mail = mail_of(t);
      if (t.is_send && mail.posted != t.number + 1) {
        mail.source = t.buffer;
        mail.bytes = t.bytes;
        mail.posted = t.number + 1;
        ring_data(*t.comm, t.peer);
      }
    }
    for (Transfer& t : transfers_) {
      if (moves_none(t) || is_absent(t)) continue;
      Mail& mail = mail_of(t);
      if (!t.is_send && mail.posted == t.number + 1 && mail.read != t.number + 1) {
        pull(*t.comm, t.comm->place_of(t.peer), t.buffer, mail.source, std::min(t.bytes, mail.bytes));
        mail.read = t.number + 1;
        ring_data(*t.comm, t.peer);
      }
      all &= mail.read >= t.number + 1;
    }
    return all;
  }

  vgpu::Unhindered unhindered_end(Time) const override { return unhindered_end_; }

  Time transfer_start() const override { return transfer_; }

  std::string detail() const override {
    const Comm& comm = *transfers_[0].comm;
    return "comm=" + comm.name + " seq=p2p ranks=" + std::to_string(comm.size);
  }

  std::unique_ptr<Action> copy() const override {
    std::vector<Transfer> again = transfers_;
    for (Transfer& t : again)
      t.number = (t.is_send ? t.comm->sent : t.comm->received)[t.peer]++;
    return std::make_unique<Transfers>(std::move(again));
  }

private:
  static bool is_absent(const Transfer& t) { return t.comm->place_of(t.peer) == kAbsent; }

  static bool moves_none(const Transfer& t) {
    return t.comm->aborted || static_cast<double>(t.bytes) > vgpu::machine().largest_payload;
  }

  void echo(const Transfer& receive) const {
    for (const Transfer& t : transfers_)
      if (!receive.is_send && t.is_send && t.comm == receive.comm && t.peer == receive.peer &&
          t.bytes == receive.bytes)
        std::memmove(receive.buffer, t.buffer, t.bytes);
  }

  static Mail& mail_of(const Transfer& t) {
    return t.is_send ? t.comm->mail(t.comm->rank, t.peer, t.number)
                     : t.comm->mail(t.peer, t.comm->rank, t.number);
  }

  std::vector<Transfer> transfers_;
  Time transfer_ = kUnknown;
  vgpu::Unhindered unhindered_end_;
};

const char* kernel_name(Function function, int reduction, int type) {
  static const char* const reductions[] = {"Sum", "Prod", "MinMax", "MinMax", "SumPostDiv", "PreMulSum"};
  static const char* const types[] = {"i8",  "u8",  "i32", "u32",  "i64",    "u64",
                                      "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
  std::string name = std::string("ncclDevKernel_") + function_name(function);
  if (function == Function::all_reduce || function == Function::reduce_scatter ||
      function == Function::reduce)
    name += std::string("_") + reductions[std::min<int>(reduction, first_custom)] + "_" + types[type];
  return vgpu::intern(name + "_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}

void submit(const char* name, std::int64_t bytes, std::unique_ptr<vgpu::Action> action, void* handle) {
  vgpu::Call call("cudaLaunchKernelExC", 430);
  auto op = std::make_unique<vgpu::Op>();
  op->kind = vgpu::Kind::collective;
  op->name = name;
  op->bytes = bytes;
  op->occupancy = vgpu::machine().collective_share;
  op->correlation = call.correlation;
  op->action = std::move(action);
  vgpu::enqueue(vgpu::stream_of(handle), std::move(op));
}

}  // namespace

std::vector<char> received_bytes(const Comm& comm, Function function, const void* const* sources,
                                 std::uint64_t count, int type, int reduction, int root) {
  std::size_t bytes = count * element_size(type);
  auto ranks = static_cast<std::size_t>(comm.size), me = static_cast<std::size_t>(comm.rank);
  std::vector<char> result;
  if (function == Function::reduce && comm.rank != root) return result;
  if (function == Function::broadcast && comm.place_of(root) == kAbsent) return result;
  result.resize(gathers(function) ? bytes * ranks : bytes);
  switch (function) {
    case Function::all_reduce:
    case Function::reduce: reduce(comm, sources, 0, count, type, reduction, result.data()); break;
    case Function::reduce_scatter:
      reduce(comm, sources, count * me, count, type, reduction, result.data());
      break;
    case Function::broadcast:
      pull(comm, comm.place_of(root), result.data(), sources[comm.place_of(root)], bytes);
      break;
    case Function::all_gather:
    case Function::all_to_all:
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        auto member = static_cast<int>(rank);
        bool echoes = function == Function::all_to_all && comm.place_of(member) == kAbsent;
        int place = echoes ? comm.place : comm.stand_in(member);
        const auto* from = static_cast<const char*>(sources[place]);
        if (function == Function::all_to_all) from += (echoes ? rank : me) * bytes;
        pull(comm, place, result.data() + rank * bytes, from, bytes);
      }
      break;
  }
  return result;
}

const char* function_name(Function function) {
  static const char* const names[kFunctions] = {"AllReduce", "AllGather", "ReduceScatter",
                                                "Broadcast", "Reduce",    "AllToAll"};
  return names[static_cast<int>(function)];
}

void enqueue_collective(Comm* comm, Function function, const void* source, void* target,
                        std::uint64_t count, int type, int reduction, int root, void* stream) {
  bool captured = vgpu::stream_of(stream)->capture;
  Request request{comm, function, source, target, count, type, reduction, root, 0, 0, -1};
  if (!captured) count_launch(request);
  auto bytes = static_cast<std::int64_t>(full_bytes(request));
  submit(kernel_name(function, reduction, type), bytes, std::make_unique<Collective>(request), stream);
}

void enqueue_transfers(std::vector<Transfer> transfers, void* stream) {
  std::int64_t bytes = 0;
  bool captured = vgpu::stream_of(stream)->capture;
  for (Transfer& t : transfers) {
    bytes += static_cast<std::int64_t>(t.bytes);
    if (!captured) t.number = (t.is_send ? t.comm->sent : t.comm->received)[t.peer]++;
  }
  submit("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", bytes,
         std::make_unique<Transfers>(std::move(transfers)), stream);
}

}  // namespace nccl
