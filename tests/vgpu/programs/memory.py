"""Facts of an allocator and of a copy between two devices, as one JSON object."""

from __future__ import annotations

import ctypes
import json

import torch
from vgpu.programs.device import CYCLES_PER_MS, failure, timed

SIZE = 1 << 30
MIB = 1 << 20


def peer_statuses() -> list[int]:
    """Of peer access to device 3 from device 0: on, on again, off, off again; to device 0 itself."""
    major = (torch.version.cuda or "").partition(".")[0]
    cuda = ctypes.CDLL(f"libcudart.so.{major}")
    torch.cuda.set_device(0)
    enable, disable = cuda.cudaDeviceEnablePeerAccess, cuda.cudaDeviceDisablePeerAccess
    statuses = [enable(3, 0), enable(3, 0), disable(3), disable(3), enable(0, 0)]
    cuda.cudaGetLastError()
    return statuses


def staged_ms() -> float:
    """Milliseconds of a copy of 64 MiB between two devices that lack access to each other."""
    major = (torch.version.cuda or "").partition(".")[0]
    cuda = ctypes.CDLL(f"libcudart.so.{major}")
    source, target = (torch.empty(64 * MIB, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 4))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    to, origin = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
    size = ctypes.c_size_t(64 * MIB)
    return timed(lambda: cuda.cudaMemcpyPeerAsync(to, 4, origin, 0, size, stream))


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def main() -> None:
    torch.cuda.init()
    free = free_bytes()
    block = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    taken, allocated = free - free_bytes(), torch.cuda.memory_allocated()
    numbers = torch.arange(1 << 20, dtype=torch.int32)
    block[: 4 << 20].view(torch.int32).copy_(numbers)
    right = torch.equal(block[: 4 << 20].view(torch.int32).cpu(), numbers)
    message = failure(lambda: torch.empty(100 << 30, dtype=torch.uint8, device="cuda"))
    torch.cuda._sleep(CYCLES_PER_MS)
    del block
    back = free_bytes() - free
    grown = [torch.empty(SIZE // 8, dtype=torch.uint8, device="cuda") for _ in range(8)]
    backend = torch.cuda.get_allocator_backend()
    segments = torch.cuda.memory_snapshot() if backend == "native" else []
    large = sum(segment["segment_type"] == "large" for segment in segments)
    del grown
    here, there = (torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2))
    here[: 4 << 20].view(torch.int32).copy_(numbers)
    peer_ms = timed(lambda: there.copy_(here))
    facts = {
        "backend": backend, "taken": taken, "allocated": allocated,
        "right": right, "oom": message, "back": back, "segments": large,
        "peer": torch.cuda.can_device_access_peer(0, 1), "peer_ms": peer_ms,
        "peer_statuses": peer_statuses(), "staged_ms": staged_ms(),
        "peer_right": torch.equal(there[: 4 << 20].view(torch.int32).cpu(), numbers),
    }  # fmt: skip
    print("facts", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
