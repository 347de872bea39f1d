"""`zeromon trace analyze` beside HolisticTraceAnalysis 0.5.0: `python tests/bench/bench_traces.py`.

Whole processes, interpreter and imports included: seconds and the largest resident set. HTA runs in an
environment of its own (.hta, made at the first call from PyPI) on the traces in ../shared/data/traces
(ZEROMON_SHARED_DATA overrides), its last profiler step included. Then a trace of 1,000,000 events with a
known answer.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import keep

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data")) / "traces"
HTA = ROOT / ".hta"
EVENTS = 1_000_000

HTA_PROGRAM = """
import json, sys
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="", include_last_profiler_step=True)
time = found.get_temporal_breakdown(visualize=False).iloc[0].to_dict()
overlap = found.get_comm_comp_overlap(visualize=False).iloc[0].to_dict()
print("FOUND " + json.dumps({**time, **overlap}, default=float))
"""


def measured(command: list[str]) -> tuple[float, int, str]:
    """(seconds, largest resident bytes, standard output) of a process."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        spent = time.perf_counter() - began
        output.seek(0)
        errors.seek(0)
        assert status == 0, errors.read()[-2000:]
        return spent, usage.ru_maxrss * 1024, output.read()


def hta_python() -> Path:
    """The interpreter of HTA's environment."""
    python = HTA / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HTA)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "HolisticTraceAnalysis==0.5.0"]
        subprocess.run(pip, check=True)
    return python


def best(command: list[str], rounds: int) -> tuple[float, int, str]:
    """The fastest of some rounds."""
    return min((measured(command) for _ in range(rounds)), key=lambda found: found[0])


def ours(path: Path, rounds: int = 3) -> tuple[float, int, dict[str, float]]:
    """zeromon on one trace."""
    command = [sys.executable, "-m", "zeromon", "trace", "analyze", str(path), "--json"]
    spent, peak, text = best(command, rounds)
    return spent, peak, json.loads(text)["ranks"][0]


def beside_hta(path: Path) -> dict[str, float]:
    """Both on one trace, and whether they agree."""
    spent, peak, found = ours(path)
    theirs, their_peak, text = best([str(hta_python()), "-c", HTA_PROGRAM, str(path)], 2)
    line = next(x for x in text.splitlines() if x.startswith("FOUND "))
    hta = json.loads(line.removeprefix("FOUND "))
    span = found["span_seconds"]
    row = {
        "seconds": spent, "hta_seconds": theirs, "times_faster": theirs / spent,
        "mb": peak / 1e6, "hta_mb": their_peak / 1e6, "times_less": their_peak / peak,
        "compute_pct": 100 * found["compute_seconds"] / span,
        "hta_compute_pct": hta["compute_time_pctg"],
        "idle_pct": 100 * found["idle_seconds"] / span, "hta_idle_pct": hta["idle_time_pctg"],
        "overlap_pct": 100 * (found["overlap_ratio"] or 0),
        "hta_overlap_pct": hta["comp_comm_overlap_pctg"],
    }  # fmt: skip
    print(
        f"{path.name}: {spent:.2f} s, {peak / 1e6:.0f} MB; HTA {theirs:.2f} s, "
        f"{their_peak / 1e6:.0f} MB: {row['times_faster']:.1f} times faster (target 10), "
        f"{row['times_less']:.1f} times less memory (target 5)"
    )
    for part in ("compute", "idle", "overlap"):
        print(
            f"  {part} {row[f'{part}_pct']:.2f} % (HTA {row[f'hta_{part}_pct']:.2f} %)", flush=True
        )
    return row


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
                    f'"args": {{"External id": {number}, "stream": {stream}, "grid": [1, 2, 3]}}}},\n'
                )
            at += long + wide + 100
        file.write('{"ph": "i", "name": "end", "ts": 0, "s": "g"}\n]}\n')
    return compute, exposed


def main() -> None:
    """One block a trace."""
    for path in sorted(SHARED.glob("*.json.gz")) if "ours" not in sys.argv else ():
        beside_hta(path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.json"
        compute, exposed = generated(path)
        spent, peak, rank = ours(path, rounds=1)
        right = (round(rank["compute_seconds"] * 1e9), round(rank["exposed_seconds"] * 1e9))
        assert right == (compute, exposed), (right, compute, exposed)
        size = path.stat().st_size
    keep("a million events", spent, "s")
    keep("a million events, memory", peak / 1e6, "MB")
    print(
        f"{EVENTS:,} events, {size / 1e6:.0f} MB: {spent:.1f} s (target 10), {peak / 1e6:.0f} MB "
        f"(target 500), exact to the nanosecond"
    )


if __name__ == "__main__":
    main()
