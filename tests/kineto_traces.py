"""Kineto traces that tests write, and those of real jobs that they read."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from zeromon.traces.analysis import RankTrace, analyze_trace
from zeromon.traces.kineto import read_trace

SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data")) / "traces"


NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


def event(name: str, start: float, duration: float, stream: int = 7, **more: Any) -> dict[str, Any]:
    category = more.pop("cat", "kernel")
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start,
        "dur": duration, "args": {"stream": stream, "device": 0, **more},
    }  # fmt: skip


def write(folder: Path, events: list[Any], name: str = "trace.json", **head: Any) -> Path:
    path = folder / name
    text = json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x"}, indent=1)
    packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    path.write_bytes(packed)
    return path


def parts(rank: RankTrace) -> list[int | None]:
    """Nanoseconds: span, compute, exposed, exposed copy, idle, communication."""
    seconds = (
        rank.span_seconds, rank.compute_seconds, rank.exposed_seconds, rank.exposed_copy_seconds,
        rank.idle_seconds, rank.communication_seconds,
    )  # fmt: skip
    return [None if s is None else round(s * 1e9) for s in seconds]


def real(name: str) -> Path:
    """A trace of a real job; the test is skipped where the shared data are absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no {path}: set ZEROMON_SHARED_DATA to the folder with the shared traces")
    return path


def events_of(path: Path) -> list[dict[str, Any]]:
    """All events of a trace, by json."""
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def analyzed(path: Path) -> RankTrace:
    return analyze_trace(read_trace(path), 0)


def host(name: str, start: float, duration: float, tid: int, cat: str = "cpu_op") -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration,
        "args": {},
    }  # fmt: skip


def launched_by(start: float, what: dict[str, Any], duration: float = 1) -> list[dict[str, Any]]:
    """A device event, behind the host's call that launched it."""
    launch = host("cudaLaunchKernel", start, duration, 1, "cuda_runtime")
    return [{**launch, "args": {"correlation": what["args"]["correlation"]}}, what]


Spent = Counter[tuple[str, str]]


class Program:
    """A program of one thread and two streams that runs forwards, with the path to each moment."""

    actions = 80

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)
        self.events: list[dict[str, Any]] = []
        self.now, self.path, self.number = 0, Spent(), 0
        self.free: dict[int, tuple[int, Spent]] = {}
        """Stream -> end of its last kernel, and the path to it."""
        self.last: tuple[int, int, Spent] = (0, 0, Spent())
        """End of the kernel that ends last, its stream, its path."""
        self.depends: dict[int, list[tuple[int, Spent]]] = {7: [], 8: []}

    def spend(self, kind: str, name: str, long: int) -> None:
        self.path[kind, name] += long
        self.now += long

    def call(self, name: str, long: int, **args: Any) -> None:
        made = host(name, self.now, long, 1, "cuda_runtime")
        self.events.append({**made, "args": {"correlation": self.number, **args}})

    def launch(self) -> None:
        """An operator of 9 us that calls cudaLaunchKernel after 3 of them."""
        self.number += 1
        stream, long = self.chooser.choice((7, 8)), self.chooser.choice((2, 20, 60))
        self.events.append(host(f"aten::op{stream}", self.now, 9, 1))
        self.spend("host", f"aten::op{stream}", 3)
        before = [*self.depends[stream], *([self.free[stream]] if stream in self.free else [])]
        self.depends[stream] = []
        free, path = max(before, key=lambda one: one[0], default=(0, Spent()))
        start = max(self.now + 5, free + 1)
        name = self.chooser.choice(("gemm", NCCL))
        short = "gemm" if name == "gemm" else "ncclDevKernel_AllGather_RING_LL"
        if free <= self.now:
            path = self.path + Spent({("launch", short): start - self.now})
        else:
            path = path + Spent({("kernel to kernel", short): start - free})
        path = path + Spent({("compute" if name == "gemm" else "communication", short): long})
        self.free[stream] = start + long, path
        self.last = max(self.last, (start + long, stream, path), key=lambda one: one[0])
        self.events.append(event(name, start, long, stream, correlation=self.number))
        self.call("cudaLaunchKernel", 4)
        self.spend("host", "cudaLaunchKernel", 4)
        self.spend("host", f"aten::op{stream}", 2)

    def wait(self) -> None:
        """One stream waits for what the other has until now."""
        source, target = self.chooser.choice(((7, 8), (8, 7)))
        if source not in self.free:
            return
        self.depends[target].append(self.free[source])
        for name in ("cudaEventRecord", "cudaStreamWaitEvent"):
            self.number += 1
            self.call(name, 1)
            self.spend("host", name, 1)
        self.recorded("Stream Wait Event", target, source, self.number - 1)

    def recorded(
        self, name: str, stream: int, source: int = -1, record: int = -1, long: int = 0
    ) -> None:
        args = {
            "correlation": self.number, "wait_on_stream": source,
            "wait_on_cuda_event_record_corr_id": record,
        }  # fmt: skip
        self.events.append(event(name, self.now, long, stream, cat="cuda_sync", **args))

    def synchronize(self) -> None:
        """The host waits for one stream, or for all."""
        self.number += 1
        stream = self.chooser.choice((7, 8, None))
        if stream is not None and stream not in self.free:
            return
        end, _, path = self.last if stream is None else (*self.free[stream][:1], 0, self.free[stream][1])
        name = "cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize"
        long = max(2, end + 3 - self.now)
        self.call(name, long)
        kind = "Context Sync" if stream is None else "Stream Sync"
        self.recorded(kind, stream or 0, long=long)
        if end > self.now:
            self.path, self.now = (
                path + Spent({("host", name): self.now + long - end}),
                self.now + long,
            )
        else:
            self.spend("host", name, long)

    def run(self) -> tuple[int, Spent]:
        """(end of the step, the path to it)."""
        for _ in range(self.actions):
            chosen = self.chooser.choices((self.launch, self.wait, self.synchronize), (8, 2, 1))[0]
            chosen()
            self.spend("between operators", "(no operator)", self.chooser.choice((1, 7)))
        self.events.append(host("ProfilerStep#3", 0, self.now, 1, "user_annotation"))
        end, _, path = self.last
        return (end, path) if end >= self.now else (self.now, self.path)
