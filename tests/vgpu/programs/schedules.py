"""Random programs of streams, events, waits and collectives: ``schedules.py COUNT SEED``.

Both ranks draw the same program, but for the lengths of their sleeps. NCCL is called directly, so that
nothing else is enqueued. Each rank writes what it did, and what its events measured, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FLOAT, SUM = 7, 0
ELEMENTS = (1 << 10, 1 << 18)


class UniqueId(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 128)]


def communicator(rank: int, ranks: int) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    nccl = ctypes.CDLL("libnccl.so.2")
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0)
    identity = UniqueId()
    if rank == 0:
        nccl.ncclGetUniqueId(ctypes.byref(identity))
        store.set("id", bytes(identity).hex())
    identity = UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))
    comm = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(comm), ranks, identity, rank) == 0
    return nccl, comm


def draw(shared: random.Random) -> list[tuple[Any, ...]]:
    """A program: operations on up to four streams, in the order of the host."""
    streams, events, program = shared.randint(1, 4), 0, []  # type: int, int, list[tuple[Any, ...]]
    for _ in range(shared.randint(4, 30)):
        stream = shared.randrange(streams)
        kind = shared.choice(["sleep", "sleep", "event", "wait", "collective"])
        if kind == "event":
            program.append(("event", stream, events))
            events += 1
        elif kind == "wait" and events:
            program.append(("wait", stream, shared.randrange(events)))
        elif kind == "collective":
            program.append(("collective", stream, shared.choice(ELEMENTS)))
        else:
            program.append(("sleep", stream, 0))
    return program


def main() -> None:
    count, seed = map(int, sys.argv[1:])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    nccl, comm = communicator(rank, ranks)
    streams = [torch.cuda.Stream() for _ in range(4)]
    buffer = torch.empty(max(ELEMENTS), device="cuda")
    shared, own = random.Random(seed), random.Random(seed + rank + 1)
    done = []
    for number in range(count):
        program, events, lines = draw(shared), [], []
        for kind, stream, argument in program:
            handle = streams[stream]
            if kind == "sleep":
                argument = own.randrange(1000, 2_000_000)
                with torch.cuda.stream(handle):
                    torch.cuda._sleep(argument)
            elif kind == "event":
                events.append(handle.record_event(torch.cuda.Event(enable_timing=True)))
            elif kind == "wait":
                handle.wait_event(events[argument])
            else:
                memory, where = (ctypes.c_void_p(buffer.data_ptr()), ctypes.c_void_p(handle.cuda_stream))
                nccl.ncclAllReduce(memory, memory, ctypes.c_size_t(argument), FLOAT, SUM, comm, where)
            lines.append((kind, stream, argument))
        torch.cuda.synchronize()
        elapsed = [events[0].elapsed_time(event) for event in events]
        done.append({"number": number, "program": lines, "elapsed": elapsed})
    (Path(os.environ["VGPU_DIR"]) / f"programs-{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
