// libcudart: streams, events, captures and graphs.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "cudart.h"
#include "memory.h"

using namespace cuda;
using namespace cudart;
using vgpu::Call;
using vgpu::Event;
using vgpu::Graph;
using vgpu::Guard;
using vgpu::Stream;
using vgpu::stream_of;

namespace {
enum CaptureMode { kGlobal, kThreadLocal, kRelaxed };
thread_local int capture_mode = kGlobal;
std::mutex captures_lock;
std::vector<Graph*> captures;
std::atomic<std::uint64_t> next_capture{1};
}  // namespace

bool cudart::breaks_capture() {
  std::lock_guard<std::mutex> held(captures_lock);
  bool broken = false;
  if (capture_mode == kRelaxed) return false;
  for (Graph* graph : captures) {
    bool mine = graph->thread == pthread_self() && graph->mode != kRelaxed;
    if (mine || (graph->mode == kGlobal && capture_mode == kGlobal)) graph->invalid = broken = true;
  }
  return broken;
}

// ---- streams ---------------------------------------------------------------------------------------

VGPU_API Error cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  VGPU_ENTER();
  vgpu::open_context(vgpu::current_device());
  int level = std::clamp(priority, vgpu::kHighestPriority, 0);
  *stream = vgpu::make_stream(vgpu::current_device(), level, flags);
  return success;
}

VGPU_API Error cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

VGPU_API Error cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

VGPU_API Error cudaStreamDestroy(void* stream) {
  VGPU_ENTER();
  vgpu::destroy_stream(static_cast<Stream*>(stream));
  return success;
}

VGPU_API Error cudaStreamGetPriority(void* stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return success;
}

VGPU_API Error cudaStreamGetFlags(void* stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return success;
}

VGPU_API Error cudaStreamGetDevice(void* stream, int* device) {
  *device = stream_of(stream)->device;
  return success;
}

VGPU_API Error cudaStreamGetId(void* stream, unsigned long long* id) {
  *id = stream_of(stream)->id;
  return success;
}

namespace {
// A query or a wait on a stream that is being captured ends the capture.
bool spoils(Stream* stream) {
  if (stream->capture) stream->capture->invalid = true;
  return stream->capture;
}
}  // namespace

VGPU_API Error cudaStreamSynchronize(void* handle) {
  VGPU_ENTER();
  Call call("cudaStreamSynchronize", 131);
  Stream* stream = stream_of(handle);
  if (spoils(stream)) return fail(capture_unsupported);
  Guard held(vgpu::lock());
  vgpu::synchronize(held, stream);
  return success;
}

VGPU_API Error cudaStreamQuery(void* handle) {
  VGPU_ENTER();
  Stream* stream = stream_of(handle);
  if (spoils(stream)) return fail(capture_unsupported);
  Guard held(vgpu::lock());
  return vgpu::is_idle(held, stream) ? success : not_ready;
}

VGPU_API Error cudaStreamWaitEvent(void* stream, Event* event, unsigned) {
  VGPU_ENTER();
  Call call("cudaStreamWaitEvent", 147);
  if (event->shared) return wait_shared(stream_of(stream), *event);
  return vgpu::wait_event(stream_of(stream), event) ? success : fail(captured_event);
}

// ---- events ----------------------------------------------------------------------------------------

namespace {
constexpr unsigned kNoTiming = 2, kInterprocess = 4;
}

VGPU_API Error cudaEventCreateWithFlags(Event** event, unsigned flags) {
  VGPU_ENTER();
  vgpu::open_context(vgpu::current_device());
  if ((flags & kInterprocess) && !(flags & kNoTiming)) return fail(invalid_value);
  *event = new Event{flags, vgpu::current_device(), nullptr, nullptr, nullptr};
  if (!(flags & kInterprocess)) return success;
  (*event)->shared = make_shared_event();
  return (*event)->shared ? success : fail(out_of_memory);
}

VGPU_API Error cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }

VGPU_API Error cudaEventDestroy(Event* event) {
  delete event;
  return success;
}

VGPU_API Error cudaEventRecordWithFlags(Event* event, void* handle, unsigned) {
  VGPU_ENTER();
  Call call("cudaEventRecord", 135);
  Stream* stream = stream_of(handle);
  if (event->device != stream->device) return fail(invalid_handle);
  if (event->shared) return record_shared(stream, *event);
  vgpu::record_event(stream, event);
  return success;
}

VGPU_API Error cudaEventRecord(Event* event, void* stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

VGPU_API Error cudaEventQuery(Event* event) {
  VGPU_ENTER_UNSAFE();
  if (event->shared) return is_done(*event->shared) ? success : not_ready;
  if (!event->op) return success;
  if (event->capture) return fail(capture_unsupported);
  Guard held(vgpu::lock());
  bool timed = !(event->flags & kNoTiming);
  bool done = timed ? vgpu::has_ended(held, event->op) : vgpu::is_complete(held, event->op);
  return done ? success : not_ready;
}

VGPU_API Error cudaEventSynchronize(Event* event) {
  VGPU_ENTER_UNSAFE();
  Call call("cudaEventSynchronize", 137);
  while (event->shared && !is_done(*event->shared))
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (!event->op) return success;
  if (event->capture) return fail(capture_unsupported);
  Guard held(vgpu::lock());
  vgpu::wait_complete(held, event->op);
  return success;
}

VGPU_API Error cudaEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  VGPU_ENTER();
  if (!from->op || !to->op || ((from->flags | to->flags) & kNoTiming)) return fail(invalid_handle);
  if (from->capture || to->capture) return fail(capture_unsupported);
  Guard held(vgpu::lock());
  if (!vgpu::has_ended(held, from->op) || !vgpu::has_ended(held, to->op)) return not_ready;
  *milliseconds = static_cast<float>(static_cast<double>(to->op->finish - from->op->finish) / 1e6);
  return success;
}

VGPU_API Error cudaEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
  return cudaEventElapsedTime(milliseconds, from, to);
}

// ---- captures and graphs ---------------------------------------------------------------------------

namespace {
struct GraphExec {
  Graph graph;
  std::vector<Stream*> lanes;
};
enum CaptureStatus { kNone = 0, kActive = 1, kInvalidated = 2 };
CaptureStatus status_of(const Stream* stream) {
  if (!stream->capture) return kNone;
  return stream->capture->invalid ? kInvalidated : kActive;
}
}  // namespace

VGPU_API Error cudaStreamBeginCaptureToGraph(void* handle, Graph* graph, const void*, const void*,
                                             std::size_t, int mode) {
  VGPU_ENTER();
  Stream* stream = stream_of(handle);
  if (stream == vgpu::default_stream(stream->device)) return fail(capture_unsupported);
  if (stream->capture) return fail(illegal_state);
  if (!graph) graph = new Graph;
  graph->id = next_capture.fetch_add(1);
  graph->mode = mode;
  graph->thread = pthread_self();
  graph->lanes.assign(1, stream);
  stream->capture = graph;
  std::lock_guard<std::mutex> held(captures_lock);
  captures.push_back(graph);
  return success;
}

VGPU_API Error cudaStreamBeginCapture(void* stream, int mode) {
  return cudaStreamBeginCaptureToGraph(stream, nullptr, nullptr, nullptr, 0, mode);
}

VGPU_API Error cudaStreamEndCapture(void* handle, Graph** out) {
  VGPU_ENTER();
  Stream* stream = stream_of(handle);
  Graph* graph = stream->capture;
  *out = nullptr;
  if (!graph) return fail(illegal_state);
  if (graph->lanes[0] != stream) return fail(capture_unmatched);
  for (Stream* other : vgpu::streams_of(stream->device))
    if (other->capture == graph) other->capture = nullptr;
  {
    std::lock_guard<std::mutex> held(captures_lock);
    captures.erase(std::find(captures.begin(), captures.end(), graph));
  }
  graph->ended = true;
  if (graph->invalid) return fail(capture_invalidated);
  *out = graph;
  return success;
}

VGPU_API Error cudaStreamIsCapturing(void* stream, int* status) {
  *status = status_of(stream_of(stream));
  return success;
}

// CUDA 12's _v2 has no edge data; its fifth argument is the number of dependencies.
VGPU_API Error cudaStreamGetCaptureInfo(void* handle, int* status, unsigned long long* id, Graph** graph,
                                        const void** nodes, const void** edges, std::size_t* count) {
  Stream* stream = stream_of(handle);
  *status = status_of(stream);
  if (stream->capture && id) *id = stream->capture->id;
  if (stream->capture && graph) *graph = stream->capture;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return success;
}

VGPU_API Error cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id,
                                           Graph** graph, const void** nodes, std::size_t* count) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, nullptr, count);
}

VGPU_API Error cudaStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id,
                                           Graph** graph, const void** nodes, const void** edges,
                                           std::size_t* count) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, edges, count);
}

VGPU_API Error cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return success;
}

VGPU_API Error cudaGraphCreate(Graph** graph, unsigned) {
  *graph = new Graph;
  return success;
}

VGPU_API Error cudaGraphInstantiateWithFlags(GraphExec** exec, Graph* graph, unsigned long long) {
  VGPU_ENTER();
  *exec = new GraphExec{*graph, {}};
  return success;
}

VGPU_API Error cudaGraphInstantiate(GraphExec** exec, Graph* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

VGPU_API Error cudaGraphUpload(GraphExec*, void*) { return success; }

VGPU_API Error cudaGraphLaunch(GraphExec* exec, void* stream) {
  VGPU_ENTER();
  Call call("cudaGraphLaunch", 311);
  vgpu::launch_graph(exec->graph, stream_of(stream), exec->lanes);
  return success;
}

// Kept: an event that was recorded in the capture still names it.
VGPU_API Error cudaGraphDestroy(Graph* graph) {
  graph->nodes.clear();
  return success;
}

VGPU_API Error cudaGraphExecDestroy(GraphExec* exec) {
  delete exec;
  return success;
}

VGPU_API Error cudaGraphGetNodes(Graph* graph, void**, std::size_t* count) {
  *count = graph->nodes.size();
  return success;
}

#if VGPU_CUDA_VERSION >= 13000
VGPU_API Error cudaGraphNodeGetDependencies(void*, void**, void*, std::size_t* count) {
#else
VGPU_API Error cudaGraphNodeGetDependencies(void*, void**, std::size_t* count) {
#endif
  *count = 0;
  return success;
}
