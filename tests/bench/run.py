"""All benchmarks, one after the other: `make bench`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

NAMES = (
    "bench_hooks.py",
    "bench_census.py",
    "bench_collector.py",
    "bench_exposition.py",
    "bench_forecast.py",
    "bench_prediction.py",
    "bench_seconds.py",
    "truth/ours.py",
    "bench_exposed.py",
    "bench_pipeline.py",
    "bench_advice.py",
    "bench_tui.py",
    "bench_step.py",
    "bench_stragglers.py",
    "bench_traces.py",
    "bench_snapshot.py",
    "bench_attach.py",
)

for name in NAMES:
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-W", "ignore", str(HERE / name)], check=True)
