"""Kineto traces that tests write, and those of real jobs that they read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from zeromon.traces.analysis import RankTrace, analyze
from zeromon.traces.kineto import read

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
    text = json.dumps(
        {"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x"}, indent=1
    )
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
    return analyze(read(path), 0)


def host(name: str, start: float, duration: float, tid: int, cat: str = "cpu_op") -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration,
        "args": {},
    }  # fmt: skip


def launched_by(start: float, what: dict[str, Any], duration: float = 1) -> list[dict[str, Any]]:
    """A device event, behind the host's call that launched it."""
    launch = host("cudaLaunchKernel", start, duration, 1, "cuda_runtime")
    return [{**launch, "args": {"correlation": what["args"]["correlation"]}}, what]
