// A device type of torch (PrivateUse1) whose memory is the host's and whose streams are threads.
//
// Events, waits between streams and collectives run in a stream's own thread. The host computes the operators,
// after it has waited for the current stream. So what an operator needs has passed its waits, and a stream that
// stands still stands still for real.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

// ---- streams and events -------------------------------------------------------------------------------

struct Mark {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool passed = false;
  Clock::time_point at;

  void pass() {
    std::lock_guard<std::mutex> lock(mutex);
    at = Clock::now();
    passed = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return passed;
  }
};
using Marked = std::shared_ptr<Mark>;

class Queue {  // a stream: work in order, in a thread of its own
 public:
  Queue() { std::thread([this] { run(); }).detach(); }
  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }
  Marked mark() {
    auto made = std::make_shared<Mark>();
    push([made] { made->pass(); });
    return made;
  }
  void drain() {
    auto passed = mark();
    if (PyGILState_Check()) {  // the thread may have to let a tensor go that Python knows
      pybind11::gil_scoped_release release;
      passed->wait();
    } else {
      passed->wait();
    }
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
};

std::mutex made_mutex;
std::deque<Queue*>& queues() {  // never freed: a thread may still run at exit
  static auto* all = new std::deque<Queue*>{new Queue()};
  return *all;
}
thread_local c10::StreamId current = 0;

Queue& queue(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(made_mutex);
  return *queues().at(id);
}
c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, 0), id); }
c10::StreamId new_stream() {
  std::lock_guard<std::mutex> lock(made_mutex);
  queues().push_back(new Queue());
  return queues().size() - 1;
}
void drain() { queue(current).drain(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(TYPE, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = stream(current);
    current = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return queue(s.id()).mark()->query(); }
  void synchronizeStream(const c10::Stream& s) const override { queue(s.id()).drain(); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (c10::StreamId id = 0; id < static_cast<c10::StreamId>(queues().size()); ++id) queue(id).drain();
  }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Marked();
    *static_cast<Marked*>(*event) = queue(s.id()).mark();
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    auto mark = *static_cast<Marked*>(event);
    queue(s.id()).push([mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<Marked*>(event))->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<Marked*>(event))->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Marked*>(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    auto &a = *static_cast<Marked*>(start), &b = *static_cast<Marked*>(end);
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory -------------------------------------------------------------------------------------------

std::atomic<int64_t> allocated{0};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(TYPE, 0)};
    void* data = std::aligned_alloc(64, (n + 63) / 64 * 64);
    {
      std::lock_guard<std::mutex> lock(mutex());
      sizes()[data] = n;
    }
    allocated += n;
    return {data, data, &release, c10::Device(TYPE, 0)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      allocated -= sizes()[data];
      sizes().erase(data);
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  static std::mutex& mutex() { static auto* m = new std::mutex(); return *m; }
  static std::unordered_map<void*, size_t>& sizes() {
    static auto* s = new std::unordered_map<void*, size_t>();
    return *s;
  }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

void resize_storage(c10::StorageImpl* storage, size_t n) {
  drain();
  auto data = memory.allocate(n);
  auto kept = std::min(n, storage->nbytes());
  if (kept) memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr(std::move(data));
  storage->set_nbytes(n);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    resize_storage(storage.unsafeGetStorageImpl(), n);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// ---- operators ----------------------------------------------------------------------------------------

at::Tensor on_host(const at::Tensor& t) {  // the same memory
  if (t.device().type() != TYPE) return t;
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at_offset = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = (impl->numel() + impl->storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}
at::Tensor& set_(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  c10::SymInt n(static_cast<int64_t>(source.nbytes() / self.itemsize()));
  return set_(self, source, 0, {n}, {c10::SymInt(1)});
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  drain();
  on_host(to).copy_(on_host(self));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar(const at::Tensor& self) {
  drain();
  return on_host(self).item();
}
void elsewhere(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

// ---- collectives: another backend's, in a stream of the group, on the same memory ------------------------

struct Transfer final : c10d::Work {
  Marked mark;
  explicit Transfer(Marked m) : mark(std::move(m)) {}
  bool isCompleted() override { return mark->query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    auto held = mark;
    queue(current).push([held] { held->wait(); });
  }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
};
using Launched = c10::intrusive_ptr<c10d::Work>;

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner_(std::move(inner)), id_(new_stream()) {}
  const std::string getBackendName() const override { return "threads"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  Launched _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return launch({out, in}, [=, this]() mutable { return inner_->_allgather_base(to, from, o); });
  }
  Launched _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return launch({out, in}, [=, this]() mutable { return inner_->_reduce_scatter_base(to, from, o); });
  }
  Launched allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    auto aliases = all(tensors);
    return launch(tensors, [=, this]() mutable { return inner_->allreduce(aliases, o); });
  }
  Launched broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    auto aliases = all(tensors);
    return launch(tensors, [=, this]() mutable { return inner_->broadcast(aliases, o); });
  }
  Launched allgather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins, const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> to;
    for (auto& out : outs) to.push_back(all(out));
    auto from = all(ins), held = ins;
    for (auto& out : outs) held.insert(held.end(), out.begin(), out.end());
    return launch(held, [=, this]() mutable { return inner_->allgather(to, from, o); });
  }
  Launched barrier(const c10d::BarrierOptions& o) override {
    return launch({}, [=, this]() { return inner_->barrier(o); });
  }

 private:
  static std::vector<at::Tensor> all(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> found;
    for (auto& t : tensors) found.push_back(on_host(t));
    return found;
  }
  template <typename F>
  Launched launch(std::vector<at::Tensor> held, F run) {
    ++issued_;
    auto ready = queue(current).mark();
    auto ended = std::make_shared<Mark>();
    queue(id_).push([=]() mutable {
      ready->wait();
      run()->wait();
      held.clear();
      ended->pass();
    });
    return c10::make_intrusive<Transfer>(ended);
  }
  c10::intrusive_ptr<c10d::Backend> inner_;
  c10::StreamId id_;
  uint64_t issued_ = 0;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(inner, rank, size);
  });
  m.def("allocated", [] { return allocated.load(); });
}
