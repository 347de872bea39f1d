"""What the agent adds to the start of a rank, and what commands take: `bench_imports.py [ROUNDS]`.

Fresh processes in turns. The agent's import is timed in a process that has imported torch, also without
the full collection of garbage that falls due meanwhile: torch has made so many objects that it takes
longer than the import itself. The CPU time of a command is that beyond an empty Python's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from records import keep

ROOT = Path(__file__).resolve().parents[2]
AGENT = """
import gc, time, torch, torch.distributed
{}
wall, cpu = time.perf_counter(), time.process_time()
import zeromon_agents.runtime.bootstrap, zeromon_agents.runtime.agent
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
AGENTS = {"agent": AGENT.format(""), "agent, no collection": AGENT.format("gc.disable()")}
TARGETS = {"agent": 0.120, "zeromon --help": 0.150}
COMMANDS = ("--help", "run --help", "attach --help", "report --help", "compare --help")


def python(*words: str) -> tuple[float, float, str]:
    """Seconds of a process by the clock and of CPU, and what it printed."""
    folders = os.pathsep.join(str(ROOT / name) for name in ("", "agents", "dashboard"))
    before, began = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=os.environ | {"PYTHONPATH": folders}, cwd="/",
                          capture_output=True, text=True, check=True)  # fmt: skip
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, cpu, done.stdout


def main() -> None:
    """Prints the least and the median of each."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 15):
        for name, code in AGENTS.items():
            wall, cpu = map(float, python("-c", code)[2].split())
            found.setdefault(name, []).append((wall, cpu))
        for words in COMMANDS:
            empty = python("-c", "")
            whole = python("-m", "zeromon", *words.split())
            found.setdefault(f"zeromon {words}", []).append((whole[0], whole[1] - empty[1]))
    for name, times in found.items():
        wall, cpu = zip(*times, strict=True)
        target = f"   target {TARGETS[name] * 1e3:.0f} ms" if name in TARGETS else ""
        print(
            f"{name:24} {min(wall) * 1e3:5.0f} ms, median {statistics.median(wall) * 1e3:5.0f} ms; "
            f"CPU {statistics.median(cpu) * 1e3:5.0f} ms{target}"
        )
        keep(name, min(wall) * 1e3, "ms")


if __name__ == "__main__":
    main()
