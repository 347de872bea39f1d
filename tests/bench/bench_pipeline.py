"""Bubbles, measured against the schedule's own: `python tests/bench/bench_pipeline.py [RANKS]`.

Stages that sleep (tests/programs/pipelines.py), so that all ranks compute at once on any machine.
The formula is that of equal stages and of messages that take no time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import Node, train_command

CHUNKS, STEPS = 4, 8
FORWARD, BACKWARD = 0.1, 0.2
FORMULAS = {
    "GPipe": lambda p, m: (p - 1) / (m + p - 1),
    "1F1B": lambda p, m: (p - 1) / (m + p - 1),
    "Interleaved1F1B": lambda p, m: (p - 1) / (2 * m + p - 1),
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": None,
}


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    times = f"forward {FORWARD * 1e3:.0f} ms, backward {BACKWARD * 1e3:.0f} ms"
    print(f"{ranks} ranks, {CHUNKS} micro-batches, {times} of the layers of a rank")
    print(f"{'schedule':24}{'measured':>10}{'schedule':>10}{'formula':>10}{'error':>10}{'of time':>10}")
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    try:
        for name, formula in FORMULAS.items():
            options = ["--steps", str(STEPS), "--micro-batches", str(CHUNKS)]
            spent = ["--forward", str(FORWARD), "--backward", str(BACKWARD)]
            result = node.run(train_command(ranks, name, *options, *spent, program="pipelines.py"))
            assert result.code == 0, result.output
            bubbles = [
                r.communication.pipeline.bubble
                for r in result.snapshot.ranks
                if r.communication.pipeline
            ]
            known = [bubble for bubble in bubbles if bubble is not None]
            assert len(known) == ranks, result.snapshot.ranks[0].communication.pipeline
            measured = statistics.fmean(bubble.measured_ratio for bubble in known)
            ideal = statistics.fmean(bubble.ideal_ratio for bubble in known)
            told = f"{formula(ranks, CHUNKS):10.1%}" if formula else f"{'-':>10}"
            error = measured / ideal - 1
            keep(name, error, "of the schedule's bubble", "zero")
            longer = known[0].span_seconds / known[0].ideal_seconds - 1
            print(
                f"{name:24}{measured:10.1%}{ideal:10.1%}{told}{error:+10.1%}{longer:+10.1%}", flush=True
            )
    finally:
        node.close()
    print("error: of the measured bubble against that of the schedule; of time: of the whole call")


if __name__ == "__main__":
    main()
