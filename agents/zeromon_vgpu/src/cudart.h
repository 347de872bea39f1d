// What the files of libcudart share: the last error, the checks at the start of a call, captures.
#pragma once
#include "cuda_api.h"
#include "device.h"

namespace cudart {

// Keeps an error for cudaGetLastError; returns it.
cuda::Error fail(cuda::Error error);
// True if the process may not use the device: a child of fork, or a device that fell off the bus.
bool is_unusable(cuda::Error* why);
// True if a capture forbids unsafe calls of this thread; the capture is then invalid.
bool breaks_capture();
// True if one of two devices may reach the memory of the other.
bool have_peer_access(int device, int other);
void allow_pool_access(int device, int peer, bool is_allowed);

// Events of several processes (cudart_ipc.cpp).
std::shared_ptr<vgpu::SharedEvent> make_shared_event();
cuda::Error record_shared(vgpu::Stream* stream, const vgpu::Event& event);
cuda::Error wait_shared(vgpu::Stream* stream, const vgpu::Event& event);
// True once the last record of any process has its time and its bytes.
bool is_done(const vgpu::SharedEvent& event);

}  // namespace cudart

#define VGPU_ENTER()                                         \
  do {                                                       \
    cuda::Error why;                                         \
    if (cudart::is_unusable(&why)) return cudart::fail(why); \
  } while (0)
// A call that CUDA's documentation calls unsafe during a capture in global mode.
#define VGPU_ENTER_UNSAFE() \
  VGPU_ENTER();             \
  if (cudart::breaks_capture()) return cudart::fail(cuda::capture_unsupported)
