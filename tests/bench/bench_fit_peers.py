"""`zeromon fit` beside accelerate's batch finder, on one job and limit.

Needs root and a memory cgroup. accelerate searches as its documentation says: the decorator around the
training function, from its default of 128; then with allocations that fail, as on a device. DeepSpeed's
autotuner does not start with two ranks on a CPU: it asks for ssh or for two devices.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_fit import LAUNCHER, Cgroup, fits, one
from records import keep

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
LENGTH = 1024
MOST_SECONDS = 900.0


def searched(group: Cgroup, command: list[str], folder: Path, found: str) -> tuple[dict[str, Any], int]:
    """What a search of its own prints: sizes that it tries, and by the pattern *found* its answer."""
    log, before, began = folder / "log", group.kills(), time.monotonic()
    with log.open("w") as out:
        running = subprocess.Popen(
            command, preexec_fn=group.enter, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
        try:
            code: int | str = running.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            code = f"ended after {MOST_SECONDS:.0f} s"
    group.clear()
    text = log.read_text(errors="replace")
    tried = re.findall(r"^rank 0 tries (\d+)", text, re.MULTILINE)
    answers = re.findall(found, text)
    size = int(answers[-1]) if answers else 0
    return {
        "tries": [int(each) for each in tried], "found": size or None, "exit": code,
        "kills": group.kills() - before, "seconds": round(time.monotonic() - began, 1),
        "says": "; ".join(dict.fromkeys(re.findall(r"\w+Error: [^\n]*", text)))[:200],
    }, size  # fmt: skip


def accelerates(room: int | None) -> list[str]:
    limit = [] if room is None else ["--room", str(room)]
    return [*LAUNCHER, str(PROGRAMS / "batch_finder.py"), "--length", str(LENGTH), *limit]


def main() -> None:
    """One line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1200, help="MiB")
    parser.add_argument("only", nargs="*", help="fit, accelerate, accelerate-failing")
    options = parser.parse_args()
    limit = options.limit << 20
    known = ("fit", "accelerate", "accelerate-failing")
    for name in options.only or known:
        with tempfile.TemporaryDirectory() as text:
            folder, group = Path(text), Cgroup(limit)
            if name == "fit":
                told = one(limit, LENGTH, folder, bare=True)
            else:
                # what two ranks may allocate beyond what they hold when they begin
                room = None if name == "accelerate" else (limit - (700 << 20)) // 2 >> 20
                told, size = searched(group, accelerates(room), folder, r"rank 0 found (\d+)")
                if size:
                    told["runs alone"] = fits(group, size, LENGTH, dict(os.environ), bare=True)
            print(name, json.dumps(told), flush=True)
            keep(f"{name}, size found", told["found"], "samples", better="higher")
            keep(f"{name}, killed", told["kills"], "processes", noise=0)
            keep(f"{name}, time", told["seconds"], "s")


if __name__ == "__main__":
    main()
