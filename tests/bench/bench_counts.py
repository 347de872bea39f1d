"""What the agent adds to a step, in counts that do not depend on the machine's load.

    bench_counts.py [--calls] [--virtual] [--publish] [STRATEGY ...]

Two ranks train nine units by each strategy, on gloo or (``--virtual``) on virtual CUDA devices. Of rank
0 are counted, in a window of steps with the agent and in one after it was stopped, in one process:

* Python functions that the training thread enters, and records that it writes;
* its instructions, allocations of Python objects, and system calls, by valgrind's callgrind (without
  ``--calls`` or ``--virtual``). What the agent's own thread does is counted apart.

A share is of the instructions of a step of the same model at the size in docs/evidence/cost.md, without
the agent. Instructions are not time: code that the training has displaced from the caches takes longer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from count_program import WINDOW, WITHOUT
from evidence_pages import measured_here, publish
from records import keep
from support import LAUNCH, ROOT, TORCHRUN, Node, free_port
from vgpu.environment import Environment, find

from zeromon_vgpu.machine import write_machine

PROGRAM = str(ROOT / "tests/bench/count_program.py")
TITLES = {
    "ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
}  # fmt: skip
HEAD = ["strategy", "Python functions", "records", "instructions", "of a step's"]
SMALL, LARGE = ("16", "4"), ("128", "96")
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void dump(void) { CALLGRIND_DUMP_STATS; }
void zero(void) { CALLGRIND_ZERO_STATS; }
"""
RANK_0 = """
if [ "$RANK" != 0 ]; then REQUESTS= exec "$@"; fi
exec valgrind --tool=callgrind --instr-atstart=no --separate-threads=yes --collect-systime=yes \\
  --callgrind-out-file="$COUNTED" "$@"
"""


class Counted(NamedTuple):
    """What callgrind counts in a window."""

    instructions: int = 0
    system_calls: int = 0
    allocations: int = 0


def run(
    strategy: str,
    size: tuple[str, str],
    without: int,
    *,
    watched: bool,
    devices: Environment | None = None,
    **how: str,
) -> dict[str, float]:
    """What the program prints; on the virtual devices of that environment, else on gloo."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    node, script = Node(folder), how.pop("script", "")
    launcher = [*TORCHRUN, "2", "--no-python", script, sys.executable] if script else [*LAUNCH, "2"]
    if devices is None:
        how["DS_ACCELERATOR"] = "cpu"
    else:
        launcher[0] = str(devices.python)
        write_machine(folder / "devices", "h100")
        how |= devices.variables(folder / "devices") | {"NCCL_RAS_ADDR": f"localhost:{free_port()}"}
    words = [*launcher, PROGRAM, strategy, *size, str(without)]
    result = node.run(words, watched=watched, timeout=1800, PYTHONHASHSEED="0", **how)
    node.close()
    line = next((x for x in result.output.splitlines() if x.startswith("COUNTS ")), None)
    assert line is not None, result.output[-3000:]
    found: dict[str, float] = json.loads(line.removeprefix("COUNTS "))
    assert not found.get("errors"), "hook calls failed"
    return found


def read_counts(path: Path) -> Counted:
    """The counts in a file of callgrind, of one window and thread."""
    text, name = path.read_text(), ""
    totals = re.search(r"^totals: (\d+)(?: (\d+))?", text, re.MULTILINE)
    names, allocations = dict(re.findall(r"^c?fn=\((\d+)\) (.+)$", text, re.MULTILINE)), 0
    for line in text.splitlines():
        if line.startswith("cfn="):
            name = names.get(line[5:].partition(")")[0], "")
        elif line.startswith("calls=") and name.startswith("_PyObject_Malloc"):
            allocations += int(line[6:].split()[0])
    found = [int(number or 0) for number in totals.groups()] if totals else [0, 0]
    return Counted(found[0], found[1], allocations)


def callgrind(
    strategy: str, size: tuple[str, str], without: int, *, watched: bool
) -> list[dict[int, Counted]]:
    """Thread -> counts, of each window."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    source, library, script = folder / "requests.c", folder / "requests.so", folder / "rank_0.sh"
    source.write_text(REQUESTS)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    script.write_text(f"#!/bin/bash{RANK_0}")
    script.chmod(0o755)
    run(
        strategy, size, without, watched=watched, script=str(script),
        REQUESTS=str(library), COUNTED=str(folder / "counted"),
    )  # fmt: skip
    windows = []
    for part in (1, 2) if watched else (1,):
        files = folder.glob(f"counted.{part}-*")
        windows.append({int(path.name.rpartition("-")[2]): read_counts(path) for path in files})
    shutil.rmtree(folder)
    return windows


def count_calls(strategy: str, devices: Environment | None = None) -> dict[str, float]:
    """Python functions that the agent makes the training thread enter in a step, and records."""
    found = run(strategy, SMALL, WITHOUT, watched=True, devices=devices)
    return {"calls": found["with"] - found["without"], "records": found["records"]}


def main() -> None:
    """Counts, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", default=list(TITLES))
    parser.add_argument("--calls", action="store_true", help="without valgrind")
    parser.add_argument(
        "--virtual", action="store_true", help="on virtual CUDA devices, without valgrind"
    )
    parser.add_argument(
        "--publish", action="store_true", help="write the table of docs/evidence/cost.md"
    )
    words = parser.parse_args()
    devices, rows = find() if words.virtual else None, []
    where = "virtual H100" if devices else "gloo"
    for strategy in words.strategies:
        calls = count_calls(strategy, devices)
        row = f"{strategy:6} {calls['calls']:5.0f} calls, {calls['records']:5.1f} records"
        keep(f"{strategy} on {where}, Python calls a step", calls["calls"], "calls", noise=1)
        keep(f"{strategy} on {where}, records a step", calls["records"], "records", noise=1)
        rows.append([f"{TITLES[strategy]}, {where}", f"{calls['calls']:.0f}", f"{calls['records']:.1f}"])
        if not (words.calls or devices):
            on, off = callgrind(strategy, SMALL, WITHOUT, watched=True)
            (large,) = callgrind(strategy, LARGE, 2, watched=False)
            first, second = on[1], off[1]
            added = first.instructions / WINDOW - second.instructions / WITHOUT
            others = sum(one.instructions for thread, one in on.items() if thread != 1) / WINDOW
            share = added / (large[1].instructions / 2)
            row += (
                f", {added / 1e3:6.0f} k instructions "
                f"({share:.2%} of {large[1].instructions / 2e6:.0f} M), others {others / 1e3:.0f} k, "
                f"{first.allocations / WINDOW - second.allocations / WITHOUT:6.0f} allocations, "
                f"{first.system_calls / WINDOW - second.system_calls / WITHOUT:5.1f} system calls"
            )
            keep(f"{strategy}, instructions a step", added, "instructions")
            rows[-1] += [f"{added / 1e3:,.0f} k", f"{share:.2%}".replace("%", " %")]
        print(row, flush=True)
    if words.publish:
        entry = measured_here("tests/bench/bench_counts.py", head=HEAD[: len(rows[0])], rows=rows)
        publish("cost", {"counts-virtual" if devices else "counts-gloo": entry})


if __name__ == "__main__":
    main()
