"""Stragglers on real runs: `python tests/bench/bench_stragglers.py [SHARE ...]`.

Two ranks of FSDP2 on gloo, one of them slowed by 5 to 50 % of a step from step 10 on, in its data, in
its forward, or at random: after how many steps it is named, and whether anybody else is. Healthy runs:
how often somebody is accused.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import PROGRAMS, TORCHRUN, Node

from zeromon.snapshot import RunSnapshot

HEALTHY_RUNS = 2 if sys.argv[1:] else 5
FROM_STEP = 10


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
                named = max(rank.steps.last_step for rank in run.ranks) - FROM_STEP

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
    for share in map(float, sys.argv[1:] or (0.05, 0.10, 0.20, 0.50)):
        cells, wrong = [], set()
        for where in ("data", "forward", "random"):
            named, others, _ = slowed(where, share, 120)
            keep(f"{share:.0%} in {where}", named, "steps until named")
            cells.append("never" if named is None else str(named))
            wrong |= others
        tail = f"   wrongly named: {sorted(wrong)}" if wrong else ""
        print(f"  {share:>4.0%} of a step  {cells[0]:>8} {cells[1]:>8} {cells[2]:>8}{tail}", flush=True)
    accused = steps = 0
    for _ in range(HEALTHY_RUNS):
        _, wrong, _ = slowed("none", 0.0, 200)
        accused += bool(wrong)
        steps += 200
    keep("healthy runs accused", accused, f"of {HEALTHY_RUNS}", noise=1)
    print(f"healthy: {accused} of {HEALTHY_RUNS} runs ({steps} steps) accused somebody")


if __name__ == "__main__":
    stragglers()
