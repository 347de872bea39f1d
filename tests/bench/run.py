"""All benchmarks, one after the other: `make bench`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

for name in ("bench_hooks.py", "bench_collector.py", "bench_step.py"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-W", "ignore", str(HERE / name)], check=True)
