"""What torch sees of one virtual device, as one JSON object."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

CYCLES_PER_MS = 1_980_000


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds on the current stream, where the host is ahead: a kernel runs meanwhile."""
    start, end = event(), event()
    torch.cuda._sleep(200 * CYCLES_PER_MS)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sleeps() -> dict[str, Any]:
    lengths = (0.1, 1, 20, 100)
    return {
        "sleeps": [
            [ms, timed(lambda ms=ms: torch.cuda._sleep(int(ms * CYCLES_PER_MS)))] for ms in lengths
        ]
    }


def runs_ahead() -> dict[str, Any]:
    """The host comes back before the device has done anything; a query says so."""
    done = event()
    torch.cuda._sleep(500 * CYCLES_PER_MS)
    done.record()
    early = done.query()
    done.synchronize()
    return {"early": early, "late": done.query()}


def streams() -> dict[str, Any]:
    """Two streams overlap; a wait makes them follow each other."""
    side, both = torch.cuda.Stream(), 100 * CYCLES_PER_MS

    def side_by_side(waits: bool) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(both)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(both)
        torch.cuda.current_stream().wait_stream(side)

    return {
        "overlapped": timed(lambda: side_by_side(False)),
        "in turn": timed(lambda: side_by_side(True)),
    }


def copies() -> dict[str, Any]:
    size = 64 << 20
    pinned, pageable = (
        torch.ones(size, dtype=torch.uint8).pin_memory(),
        torch.ones(size, dtype=torch.uint8),
    )
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    facts = {
        "pinned": timed(lambda: target.copy_(pinned, non_blocking=True)),
        "pageable": timed(lambda: target.copy_(pageable)),
    }
    strided = torch.arange(12.0).reshape(3, 4).cuda()
    facts["right"] = bool(target.cpu().min() == 1) and strided.t().cpu().tolist()[1] == [1.0, 5.0, 9.0]
    return facts


def memory() -> dict[str, Any]:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    less, _ = torch.cuda.mem_get_info()
    message = failure(lambda: torch.empty(100 << 30, dtype=torch.uint8, device="cuda"))
    ooms = torch.cuda.memory_stats()["num_ooms"]
    del kept
    torch.cuda.empty_cache()
    return {
        "total": total, "taken": free - less, "context": total - free, "oom": message, "ooms": ooms,
        "given back": torch.cuda.mem_get_info()[0] - free,
    }  # fmt: skip


def graphs() -> dict[str, Any]:
    x = torch.ones(1024, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(5 * CYCLES_PER_MS)
        x * 2
    facts: dict[str, Any] = {"replay": timed(graph.replay)}
    done = event()
    done.record()

    def query_in_capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x * 2
            done.query()

    facts["violation"] = failure(query_in_capture)

    def query_beside_capture() -> None:
        """By a thread that leaves the captures of others alone, as NCCL's watchdog does."""
        mode = ctypes.c_int(1)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        done.query()

    def capture_beside() -> None:
        thread = threading.Thread(target=query_beside_capture)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x * 2
            thread.start()
            thread.join()

    facts["beside"] = failure(capture_beside)
    return facts


def contention() -> dict[str, Any]:
    """A product that fills the device, alone and beside another one."""
    a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    a @ a
    alone = timed(lambda: a @ a)

    def two() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a @ a
        a @ a
        torch.cuda.current_stream().wait_stream(side)

    return {"alone": alone, "beside another": timed(two)}


def fork() -> dict[str, Any]:
    """A child of fork may not use the device, and its parent still may."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, failure(lambda: torch.cuda.current_stream().synchronize())[:200].encode())
        os._exit(0)
    os.waitpid(child, 0)
    return {"in child": os.read(read, 300).decode(), "in parent": timed(lambda: torch.cuda._sleep(1980))}


def queue() -> dict[str, Any]:
    """The host waits once 1,024 operations wait in a stream."""
    torch.cuda.synchronize()
    torch.cuda._sleep(200 * CYCLES_PER_MS)
    begun = time.perf_counter()
    for _ in range(1000):
        torch.cuda._sleep(1)
    short = time.perf_counter() - begun
    for _ in range(1000):
        torch.cuda._sleep(1)
    return {"blocked": time.perf_counter() - begun >= 0.15 or short >= 0.15}


def refusals() -> dict[str, Any]:
    x = torch.ones(4, 4, device="cuda")
    return {"fft": failure(lambda: torch.fft.fft(x))}


def main() -> None:
    torch.cuda.init()
    facts = {
        "name": torch.cuda.get_device_name(0), "capability": torch.cuda.get_device_capability(0),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
    }  # fmt: skip
    parts = (sleeps, runs_ahead, streams, copies, memory, graphs, contention, queue, refusals, fork)
    for part in parts:
        facts[part.__name__] = part()
    print("facts", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
