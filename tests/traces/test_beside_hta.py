"""Why HolisticTraceAnalysis gives other shares of some traces: it leaves device events out.

With two or more profiler steps HTA keeps the device events whose launch is in the trace, not after the
last step (by default: before the last step). zeromon counts every device event.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kineto_traces import analyzed, event, events_of, host, parts, real, write

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

PUBLISHED = {
    "two_rank_ddp_rank1.json.gz": (643_612, 496_485, 256_572),
    "eight_rank_dlrm_rank3.json.gz": (62_119, 234_760, 86_525),
}
"""What HTA 0.5.0 prints by default: microseconds of idle, compute and non-compute time."""

WHOLE = {
    "two_rank_ddp_rank1.json.gz": (732_352, 620_516, 380_097),
    "eight_rank_dlrm_rank3.json.gz": (76_007, 281_336, 107_251),
}
"""The same with include_last_profiler_step=True."""


def kept_by_hta(events: list[dict[str, Any]], last_step: bool) -> list[dict[str, Any]]:
    """The device events that HTA keeps: those whose launch is in the steps of the trace."""
    steps = [e for e in events if str(e.get("name")).startswith("ProfilerStep")]
    ends = max(e["ts"] + e["dur"] for e in steps)
    begins = max(e["ts"] for e in steps)
    launches = {
        e["args"].get("correlation")
        for e in events
        if e.get("ph") == "X" and e.get("cat") not in DEVICE and "args" in e
        and (e["ts"] <= ends if last_step else e["ts"] < begins)
    } - {None}  # fmt: skip
    return [e for e in events if e.get("cat") in DEVICE and e["args"].get("correlation") in launches]


def idle_compute_rest(path: Path) -> tuple[int, int, int]:
    """Microseconds, as HTA divides the span."""
    span, compute, _, _, idle, _ = (part or 0 for part in parts(analyzed(path)))
    return idle // 1000, compute // 1000, (span - idle - compute) // 1000


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_same_device_events_give_the_same_figures(tmp_path: Path, name: str) -> None:
    """Of two real traces, to the microsecond: with HTA's choice of events, and with all of them."""
    path = real(name)
    events = events_of(path)
    chosen = write(tmp_path, kept_by_hta(events, last_step=False))
    assert idle_compute_rest(chosen) == PUBLISHED[name]
    assert idle_compute_rest(write(tmp_path, kept_by_hta(events, last_step=True))) == WHOLE[name]
    assert idle_compute_rest(path) == WHOLE[name]


def test_a_kernel_that_was_launched_before_the_recording_keeps_the_device_busy(tmp_path: Path) -> None:
    """The device is never idle. HTA leaves out 40 of 60 us, as their launch is not in the trace."""
    events = [
        host("ProfilerStep#1", 0, 30, 1, "user_annotation"),
        host("ProfilerStep#2", 30, 30, 1, "user_annotation"),
        event("gemm", 0, 10, correlation=1),
        event("gemm", 10, 40, 9, correlation=99),
        event("gemm", 50, 10, correlation=2),
    ]
    for number, at in ((1, 0), (2, 45)):
        launch = host("cudaLaunchKernel", at, 1, 1, "cuda_runtime")
        events.append({**launch, "args": {"correlation": number}})
    assert idle_compute_rest(write(tmp_path, events)) == (0, 60, 0)
    assert idle_compute_rest(write(tmp_path, kept_by_hta(events, last_step=True))) == (40, 20, 0)
