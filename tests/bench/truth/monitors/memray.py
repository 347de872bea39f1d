"""memray: what was allocated and not freed, by its stack. It follows the host's allocators."""

from __future__ import annotations

from typing import Any

from monitor import Monitor, Run

_LARGEST_LEAK = """
import sys, memray
leaks = memray.FileReader(sys.argv[1]).get_leaked_allocation_records(merge_threads=True)
largest = max(leaks, key=lambda one: one.size)
print(largest.size, *[frame[0] for frame in largest.stack_trace() if frame[1].endswith("job.py")][:1])
"""


def _launch(run: Run) -> list[str]:
    program = f"{run.program} {' '.join(run.arguments)}"
    script = f"exec {run.bin}/memray run --force -q -o {run.folder}/$RANK.bin {program}"
    return run.ranks("--no-python", "sh", "-c", script)


def _after(run: Run) -> dict[str, Any]:
    paths = [run.folder / f"{rank}.bin" for rank in range(2)]
    if not all(path.exists() for path in paths):
        return {}
    leaks = [run.read("python", "-c", _LARGEST_LEAK, str(path)).split() for path in paths]
    nbytes = sum(int(size) for size, *_ in leaks if size.isdigit())
    functions = sorted({name for _, *names in leaks for name in names})
    return {"grow by": nbytes / run.case["steps"], "grow in": ", ".join(functions) or None}


MONITOR = Monitor(
    "memray", "memray", lines=0, answers={"gloo": ["leak"], "virtual": ["leak-ddp"]},
    launch=_launch, after=_after, installed=["memray==1.20.0"], url="https://github.com/bloomberg/memray",
    forks=False,
)  # fmt: skip
