"""Stragglers and hangs on real runs: `python tests/bench/bench_stragglers.py`.

Two ranks of FSDP2 on gloo, one of them slowed by 5 to 50 % of a step from step 10 on, in its data, in
its forward, or at random: after how many steps it is named, and whether anybody else is. Healthy runs:
how often somebody is accused. Then five kinds of hang: seconds from standstill to the right verdict.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PROGRAMS, TORCHRUN, Node

from zeromon.snapshot import RunSnapshot

HEALTHY_RUNS = 5
FROM_STEP = 10
PATIENCE_SECONDS = 60.0


def slowed(where: str, share: float, steps: int) -> tuple[int | None, set[int], int]:
    """(steps until rank 1 is named, other ranks that were, snapshots with an accusation)."""
    named: int | None = None
    wrong: set[int] = set()
    accusing = 0

    def look(run: RunSnapshot) -> None:
        nonlocal named, accusing
        accusing += bool(run.stragglers)
        for late in run.stragglers:
            if late.rank != 1 or where == "none":
                wrong.add(late.rank)
            elif named is None:
                named = max(rank.step for rank in run.ranks) - FROM_STEP

    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    try:
        command = [*TORCHRUN, "2", str(PROGRAMS / "slow_rank.py"), where, str(share), str(steps)]
        result = node.run(command, seen=look)
        assert result.code == 0, result.output
    finally:
        node.close()
    return named, wrong, accusing


def stragglers() -> None:
    print("rank 1 slowed by      data  forward   random   (steps until it is named)")
    for share in (0.05, 0.10, 0.20, 0.50):
        cells, wrong = [], set()
        for where in ("data", "forward", "random"):
            named, others, _ = slowed(where, share, 120)
            cells.append("never" if named is None else str(named))
            wrong |= others
        tail = f"   wrongly named: {sorted(wrong)}" if wrong else ""
        print(
            f"  {share:>4.0%} of a step  {cells[0]:>8} {cells[1]:>8} {cells[2]:>8}{tail}",
            flush=True,
        )
    accused = steps = 0
    for _ in range(HEALTHY_RUNS):
        _, wrong, _ = slowed("none", 0.0, 200)
        accused += bool(wrong)
        steps += 200
    print(f"healthy: {accused} of {HEALTHY_RUNS} runs ({steps} steps) accused somebody")


Verdict = Callable[[RunSnapshot], bool]


def hung(kind: str) -> Verdict:
    """Whether a snapshot says what is true of tests/programs/hang.py KIND."""

    def mismatch(of: str) -> Verdict:
        return lambda run: any(h.kind == f"mismatched {of}" for h in run.hangs)

    verdicts: dict[str, Verdict] = {
        "late": lambda run: any(h.missing == (1,) and h.waiting == (0,) for h in run.hangs),
        "exit": lambda run: any(
            r.rank == 1
            and r.failed
            and (r.ended == "exit code 7" or "without a final record" in r.ended)
            for r in run.ranks
        ),
        "op": mismatch("operations"),
        "size": mismatch("sizes"),
        "deadlock": lambda run: any(h.kind == "deadlock of groups" for h in run.hangs),
    }
    return verdicts[kind]


def until_verdict(kind: str) -> float | None:
    """Seconds from the last sign of progress to the right verdict; None when there was none."""
    right = hung(kind)
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    command = [*TORCHRUN, "2", str(PROGRAMS / "hang.py"), kind]
    with (node.folder / "output").open("w") as output:
        training = subprocess.Popen(
            command, env=node.environment("r"), stdout=output, stderr=output
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < deadline:
            node.collector.tick()
            run = node.snapshot("r")
            if run is not None and run.ranks and right(run):
                still = [hang.seconds for hang in run.hangs if hang.seconds]
                ended = [rank.last_event_ns for rank in run.ranks if rank.failed]
                return max(still) if still else (run.taken_ns - min(ended)) / 1e9
            time.sleep(0.25)
        return None
    finally:
        training.terminate()
        training.wait()
        node.close()


def hangs() -> None:
    print("\nseconds from the standstill to the right verdict (a collective hangs after 10 s)")
    for kind in ("late", "exit", "op", "size", "deadlock"):
        took = until_verdict(kind)
        print(f"  {kind:<9} {'none' if took is None else f'{took:.1f} s'}", flush=True)


if __name__ == "__main__":
    stragglers()
    hangs()
