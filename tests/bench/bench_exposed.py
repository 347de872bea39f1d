"""What is exposed, and what moves it: `tests/bench/bench_exposed.py [KIND ...]` (as root, for the link).

Two ranks on gloo (tests/programs/exposed.py), as they are and over a link of 2 Gbit/s: FSDP2 without and
with prefetch, DDP with one large and with six small buckets, ZeRO-2 without and with overlap_comm; the
two in turns. What the unit table of the first names, what the change leaves of it, and how far the live
figure is from a trace of its steps. Named kinds run once.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import Node, over_link, train_command

from zeromon.base.errors import CaptureRefused
from zeromon.snapshot import CollectiveStatsRow, RunSnapshot

STEPS, LINK = 120, "2gbit"
ROUNDS = 1 if sys.argv[1:] else 3
CASES = {"fsdp2": "FSDP2, prefetch", "ddp": "DDP, small buckets", "zero2": "ZeRO-2, overlap_comm"}


class RunFigures(NamedTuple):
    """One run: seconds a step, and the error of the live exposed time against the trace."""

    step: float
    exposed: float
    rows: tuple[CollectiveStatsRow, ...]
    error: float | None


def measure(kind: str, setting: str, rate: str) -> RunFigures:
    asked = False

    def look(run: RunSnapshot) -> None:
        nonlocal asked
        if not asked and run.ranks and min(rank.steps.watched_steps for rank in run.ranks) >= 30:
            asked = True
            try:
                node.collector.trace(run.run, 4, ())
            except CaptureRefused as error:
                print(f"  no trace: {error}")

    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    try:
        command = train_command(2, kind, setting, str(STEPS), program="exposed.py")
        result = node.run(over_link(command, rate) if rate else command, seen=look)
        assert result.code == 0, result.output
    finally:
        node.close()
    ranks = result.snapshot.ranks
    errors = [
        r.requests.check.error_ratio
        for r in ranks
        if r.requests.check and r.requests.check.error_ratio is not None
    ]
    return RunFigures(
        statistics.median(rank.steps.median_seconds or 0.0 for rank in ranks),
        statistics.mean(rank.communication.exposed_seconds or 0.0 for rank in ranks),
        ranks[0].communication.traffic,
        max(errors, key=abs, default=None),
    )


def by_op(rows: tuple[CollectiveStatsRow, ...]) -> str:
    """``all_gather 12.0 of 13.0 ms``: exposed time a step of its duration, by operation."""
    ops = dict.fromkeys(row.op for row in rows if row.exposed_seconds > 1e-4)
    parts = []
    for op in ops:
        own = [row for row in rows if row.op == op]
        exposed, spent = sum(r.exposed_seconds for r in own), sum(r.seconds for r in own)
        parts.append(f"{op} {exposed * 1e3:.1f} of {spent * 1e3:.1f}")
    return ", ".join(parts)


def main() -> None:
    kinds = {kind: CASES[kind] for kind in sys.argv[1:] or CASES}
    for rate, (kind, name) in itertools.product(("", LINK), kinds.items()):
        link = f", over {rate}" if rate else ""
        print(f"{name}{link} (median of {ROUNDS} in turns; ms a step)")
        runs: dict[str, list[RunFigures]] = {"off": [], "on": []}
        for _ in range(ROUNDS):
            for setting, found in runs.items():
                found.append(measure(kind, setting, rate))
        for setting, found in runs.items():
            middle = sorted(found, key=lambda m: m.exposed)[ROUNDS // 2]
            step = statistics.median(m.step for m in found)
            keep(f"{kind} {setting} {rate}".strip(), middle.exposed * 1e3, "ms a step")
            errors = ", ".join("n/a" if m.error is None else f"{m.error:+.1%}" for m in found)
            print(
                f"  {setting:<4} step {step * 1e3:.1f}, exposed {middle.exposed * 1e3:.1f}"
                f" ({by_op(middle.rows)}); against the trace {errors}",
                flush=True,
            )


if __name__ == "__main__":
    main()
