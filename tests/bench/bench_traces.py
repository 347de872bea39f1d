"""`zeromon trace analyze` beside HolisticTraceAnalysis 0.5.0: `bench_traces.py [ours]`.

Whole processes, interpreter and imports included: seconds and the largest resident set, for the same
figures: breakdown, overlap, kernels, idle time by cause, queues, the critical path of a step. HTA runs
in an environment of its own (.hta, made at the first call from PyPI) on the traces in
../shared/data/traces (ZEROMON_SHARED_DATA overrides), its last profiler step included; with pandas 2,
for its critical path fails with pandas 3. Then simulated programs whose critical path is known, and a
trace of 1,000,000 events with a known answer; with `ours`, that alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kineto_traces import Program, write
from records import keep

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data")) / "traces"
HTA = ROOT / ".hta" / "0.5.0"
EVENTS = 1_000_000
STEP = 1
"""The place of the step with the critical path among the steps of the trace."""

HTA_PROGRAM = """
import json, logging, sys, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
import pandas
from hta.trace_analysis import TraceAnalysis
one = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="", include_last_profiler_step=True)
found = {"pandas": pandas.__version__}
found.update(one.get_temporal_breakdown(visualize=False).iloc[0].to_dict())
found.update(one.get_comm_comp_overlap(visualize=False).iloc[0].to_dict())
kernels = one.get_gpu_kernel_breakdown(visualize=False)[1]
found["kernels"] = {row["name"]: row["sum (us)"] for _, row in kernels.iterrows()}
idle = one.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
found["idle"] = [[row.stream, row.idle_category, row.idle_time] for row in idle.itertuples()]
found["queues"] = {}
for stream, rows in one.get_queue_length_time_series(ranks=[0])[0].groupby("stream"):
    rows = rows.sort_values("ts", kind="stable")
    lasts = rows.ts.shift(-1) - rows.ts
    span = rows.ts.iloc[-1] - rows.ts.iloc[0]
    found["queues"][str(stream)] = [
        (rows.queue_length * lasts).sum() / span, rows.queue_length.max(),
        lasts[rows.queue_length == 0].sum() / span,
    ]
try:
    graph, found["critical_path_ok"] = one.critical_path_analysis(0, "ProfilerStep", int(sys.argv[2]))
    parts = graph.get_critical_path_breakdown().groupby("bound_by").duration.sum()
    found["critical_path"] = {kind or "dependency": us for kind, us in parts.to_dict().items()}
except Exception as error:
    found["critical_path"] = f"{type(error).__name__}: {error}"
print("FOUND " + json.dumps(found, default=float))
"""


class Process(NamedTuple):
    """What a process took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str

    def beside(self, other: Process) -> str:
        """Its figures, and how many times those of *other* are as large."""
        return (
            f"{self.seconds:.2f} s ({self.cpu_seconds:.2f} s of CPU), {self.peak_bytes / 1e6:.0f} MB; "
            f"HTA {other.seconds:.2f} s ({other.cpu_seconds:.2f} s), {other.peak_bytes / 1e6:.0f} MB: "
            f"{other.seconds / self.seconds:.1f} times faster "
            f"({other.cpu_seconds / self.cpu_seconds:.1f} times less CPU), "
            f"{other.peak_bytes / self.peak_bytes:.1f} times less memory (target 5)"
        )


def measured(command: list[str]) -> Process:
    """Runs a process."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        spent = time.perf_counter() - began
        output.seek(0)
        errors.seek(0)
        assert status == 0, errors.read()[-2000:]
        cpu = usage.ru_utime + usage.ru_stime
        return Process(spent, cpu, usage.ru_maxrss * 1024, output.read())


def hta_python() -> Path:
    """The interpreter of HTA's environment."""
    python = HTA / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HTA)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "HolisticTraceAnalysis==0.5.0", "pandas<3"], check=True)
    return python


def best(command: list[str], rounds: int) -> Process:
    """The fastest of some rounds."""
    return min((measured(command) for _ in range(rounds)), key=lambda found: found.seconds)


def ours(path: Path, *options: str, rounds: int = 3) -> tuple[Process, dict[str, Any]]:
    """zeromon on one trace."""
    command = [sys.executable, "-m", "zeromon", "trace", "analyze", str(path), "--json", *options]
    process = best(command, rounds)
    return process, json.loads(process.output)["ranks"][0]


def theirs(path: Path, step: int, rounds: int = 2) -> tuple[Process, dict[str, Any]]:
    """HTA on one trace."""
    command = [str(hta_python()), "-c", HTA_PROGRAM, str(path), str(step)]
    process = best(command, rounds)
    line = next(x for x in process.output.splitlines() if x.startswith("FOUND "))
    return process, json.loads(line.removeprefix("FOUND "))


def beside_hta(path: Path) -> None:
    """Both on one trace, and whether they agree."""
    alone, first = ours(path)
    step = first["steps"][STEP]["step"]
    process, found = ours(path, "--critical-path", str(step))
    other, hta = theirs(path, STEP)
    print(f"{path.name}, HTA with pandas {hta['pandas']}: {process.beside(other)}")
    print(f"  without the critical path: {alone.seconds:.2f} s ({alone.cpu_seconds:.2f} s of CPU)")
    for name, (mine, its) in figures(found, hta).items():
        mark = "" if abs(mine - its) <= 0.011 else "  DIFFERS"
        print(f"  {name}: {mine:,.2f} (HTA {its:,.2f}){mark}")
    kinds = {kind: round(1e3 * s, 3) for kind, s in found["critical_path"]["kinds"].items()}
    print(f"  critical path of step {step}, ms: {kinds}")
    print(f"    HTA, us: {hta['critical_path']}", flush=True)


def figures(found: dict[str, Any], hta: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Name -> ours and HTA's: shares in percent, times in microseconds."""
    span = found["span_seconds"]
    rows = {
        "compute, %": (100 * found["compute_seconds"] / span, hta["compute_time_pctg"]),
        "idle, %": (100 * found["idle_seconds"] / span, hta["idle_time_pctg"]),
        "overlap, %": (100 * (found["overlap_ratio"] or 0), hta["comp_comm_overlap_pctg"]),
    }
    kernels = {row["name"]: row["seconds"] * 1e6 for row in found["kernels"]}
    both = [name for name in hta["kernels"] if name in kernels]
    rows[f"time of {len(both)} kernels, us"] = (
        sum(kernels[name] for name in both), sum(hta["kernels"][name] for name in both),
    )  # fmt: skip
    idle: dict[tuple[int, str], float] = {(s, kind): us for s, kind, us in hta["idle"]}
    for one in found["streams"]:
        stream, parts = one["stream"], one["idle"]
        other = parts["communication"] + parts["streams"] + parts["other"]
        for name, seconds, kind in (
            ("host", parts["host"], "host_wait"), ("kernels", parts["kernels"], "kernel_wait"),
            ("other", other, "other"),
        ):  # fmt: skip
            rows[f"stream {stream} idle, {name}, us"] = seconds * 1e6, idle.get((stream, kind), 0.0)
        mean, most, empty = hta["queues"][str(stream)]
        rows[f"stream {stream} queue, mean"] = one["queue_mean"], mean
        rows[f"stream {stream} queue, most"] = one["queue_most"], most
        rows[f"stream {stream} queue, empty %"] = 100 * one["queue_empty_ratio"], 100 * empty
    return rows


def known_paths(folder: Path) -> None:
    """Critical paths of simulated programs: the known one, ours and HTA's, in microseconds."""
    for seed in range(4):
        program = Program(seed)
        end, path = program.run()
        known: Counter[str] = Counter()
        for (kind, _), us in path.items():
            known[kind] += us
        file = write(folder, program.events, distributedInfo={"rank": 0, "world_size": 1})
        kinds = ours(file, "--critical-path", rounds=1)[1]["critical_path"]["kinds"]
        mine = {kind: round(s * 1e6) for kind, s in kinds.items()}
        assert mine == known and sum(known.values()) == end, (mine, known)
        print(f"program {seed}, {end} us: {mine}, as simulated")
        print(f"  HTA: {theirs(file, 0, rounds=1)[1]['critical_path']}", flush=True)


def generated(path: Path) -> tuple[int, int]:
    """A trace of EVENTS events; (compute, exposed) nanoseconds of it.

    In each microsecond-sized cell a kernel, and a collective that half of the time is beside it.
    """
    chooser = random.Random(1)
    compute = exposed = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        at = 1_700_000_000_000_000_000
        for number in range(EVENTS // 4):
            long, wide, hidden = chooser.randrange(500, 5000), 400, number % 2
            start = at + (100 if hidden else long)
            compute += long
            exposed += 0 if hidden else wide
            lines = [
                ("cpu_op", "aten::mm", at - 500, 300, 1),
                ("cuda_runtime", "cudaLaunchKernel", at - 300, 100, 1),
                ("kernel", "gemm_kernel_of_some_length<float, 128, 128>", at, long, 7),
                ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", start, wide, 20),
            ]
            for category, name, begin, lasts, stream in lines:
                file.write(
                    f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 0, "tid": {stream}, '
                    f'"ts": {begin // 1000}.{begin % 1000:03d}, "dur": {lasts / 1000:.3f}, '
                    f'"args": {{"External id": {number}, "stream": {stream}, "grid": [1, 2, 3], '
                    f'"correlation": {number + EVENTS * (stream > 7)}}}}},\n'
                )
            at += long + wide + 100
        file.write('{"ph": "i", "name": "end", "ts": 0, "s": "g"}\n]}\n')
    return compute, exposed


def main() -> None:
    """One block a trace."""
    with_hta = "ours" not in sys.argv
    traces = sorted(SHARED.glob("*.json.gz")) if with_hta else []
    assert traces or not with_hta, f"no traces in {SHARED}: set ZEROMON_SHARED_DATA"
    for path in traces:
        beside_hta(path)
    with tempfile.TemporaryDirectory() as folder:
        if with_hta:
            known_paths(Path(folder))
        path = Path(folder) / "million.json"
        compute, exposed = generated(path)
        process, rank = ours(path, rounds=1)
        right = (round(rank["compute_seconds"] * 1e9), round(rank["exposed_seconds"] * 1e9))
        assert right == (compute, exposed), (right, compute, exposed)
        size = path.stat().st_size
    keep("a million events", process.seconds, "s")
    keep("a million events, CPU", process.cpu_seconds, "s")
    keep("a million events, memory", process.peak_bytes / 1e6, "MB")
    print(
        f"{EVENTS:,} events, {size / 1e6:.0f} MB: {process.seconds:.1f} s (target 10; "
        f"{process.cpu_seconds:.1f} s of CPU), {process.peak_bytes / 1e6:.0f} MB (target 500), "
        "exact to the nanosecond"
    )


if __name__ == "__main__":
    main()
