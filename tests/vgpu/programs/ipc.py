"""A tensor and an event of the device that two processes share, as one JSON object of facts."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
import torch.multiprocessing as mp
from vgpu.programs.device import CYCLES_PER_MS

NUMBERS = 1 << 20
IpcHandle = ctypes.c_char * 64


class HandleArgument(ctypes.Structure):
    _fields_ = [("bytes", IpcHandle)]


def add_one(tensors: Any, results: Any) -> None:
    """Reads the tensor, writes into it, and waits for the event of the other process."""
    torch.cuda.init()
    results.put("ready")
    shared, handle = tensors.get()
    event = torch.cuda.Event.from_ipc_handle(shared.device, handle)
    early = event.query()
    event.wait()
    done = torch.cuda.Event(interprocess=True)
    received = shared.cpu()
    shared.copy_(received + 1)
    done.record()
    results.put((early, event.query(), int(received.sum()), done.ipc_handle()))
    tensors.get()
    del shared, received


def runtime() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def refusals() -> dict[str, int]:
    """Statuses of handles that cannot be: of host memory, and of this process itself."""
    handle, opened = HandleArgument(), ctypes.c_void_p()
    on_host, on_device = torch.ones(4).pin_memory(), torch.ones(4, device="cuda")
    get, open_ = runtime().cudaIpcGetMemHandle, runtime().cudaIpcOpenMemHandle
    host = get(ctypes.byref(handle), ctypes.c_void_p(on_host.data_ptr()))
    assert get(ctypes.byref(handle), ctypes.c_void_p(on_device.data_ptr())) == 0
    return {"host": host, "itself": open_(ctypes.byref(opened), handle, 1)}


def main() -> None:
    context = mp.get_context("spawn")
    tensors, results = context.Queue(), context.Queue()
    child = context.Process(target=add_one, args=(tensors, results))
    child.start()
    tensor = torch.arange(NUMBERS, dtype=torch.int64).cuda().share_memory_()
    cleared = torch.full((NUMBERS,), 7).cuda().share_memory_()
    event = torch.cuda.Event(interprocess=True)
    results.get()
    torch.cuda._sleep(3000 * CYCLES_PER_MS)
    event.record()
    tensors.put((tensor, event.ipc_handle()))
    early, late, total, handle = results.get()
    done = torch.cuda.Event.from_ipc_handle(tensor.device, handle)
    done.synchronize()
    address, size = ctypes.c_void_p(cleared.data_ptr()), ctypes.c_size_t(cleared.nbytes)
    runtime().cudaMemset(address, 0, size)
    facts = {
        "early": early, "late": late, "total": total, "expected": NUMBERS * (NUMBERS - 1) // 2,
        "written": torch.equal(tensor.cpu(), torch.arange(NUMBERS) + 1),
        "cleared": int(cleared.cpu().sum()), "refusals": refusals(),
    }  # fmt: skip
    tensors.put(None)
    child.join()
    print("facts", json.dumps(facts | {"code": child.exitcode}), flush=True)


if __name__ == "__main__":
    main()
