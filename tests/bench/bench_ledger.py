"""What was injected against what the ledger says: `python tests/bench/bench_ledger.py`.

Two ranks of DDP lose time in known ways, by the program's own clock (tests/programs/ledger.py); one is
killed and started again by torchrun. Printed: each loss, the ledger's figure, and the error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import PROGRAMS, ROOT, TORCHRUN, Node, train_command

from zeromon.readout.breakdown import rank_parts
from zeromon.readout.ledger import job_ledger
from zeromon.snapshot import RunSnapshot

LOSSES = ("save", "dcp", "evaluate", "collect", "compile", "loader", "late")
CAUSES = ("checkpoint", "evaluation", "compile", "data", "garbage_collection", "waiting")


EXAMPLES = (
    ("train_gpt.py", "--strategy", "ddp"), ("train_gpt.py", "--strategy", "fsdp2"),
    ("train_gpt_accelerate.py",), ("train_gpt_deepspeed.py", "--no-compile"),
)  # fmt: skip
"""Healthy runs of 60 steps: what of a step has no cause."""


def main() -> None:
    """Runs the program once for all losses, and once more for a restart."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    node = Node(folder)
    try:
        command = train_command(2, "60", *LOSSES, program="ledger.py")
        result = node.run(command, LEDGER_TRUTH=str(folder / "a"))
        assert result.code == 0, result.output
        print(f"{'loss':24}{'injected':>12}{'ledger':>12}{'error':>9}")
        of_rank(result.snapshot, folder / "a")
        of_restart(restarted(node, folder / "b"), folder / "b")
        for words in EXAMPLES:
            of_example(node, words)
    finally:
        node.close()


def restarted(node: Node, truth: Path) -> RunSnapshot:
    """A job under torchrun whose rank 0 kills itself once."""
    words = ("2", "--max-restarts", "1", str(PROGRAMS / "ledger.py"), "20", "save", "kill")
    result = node.run([*TORCHRUN, *words], launched=True, LEDGER_TRUTH=str(truth))
    assert result.code == 0, result.output
    return result.snapshot


def line(name: str, injected: float, found: float) -> None:
    """Prints one comparison."""
    keep(name, found / injected - 1, "of the injected", "zero")
    print(f"{name:24}{injected:10.3f} s{found:10.3f} s{found / injected - 1:+9.1%}", flush=True)


def of_rank(run: RunSnapshot, truth: Path) -> None:
    """Rank 0, which waits for rank 1."""
    rank = run.ranks[0]
    measured = json.loads(Path(f"{truth}.0.0").read_text())
    measured["waiting"] = json.loads(Path(f"{truth}.0.1").read_text())["waiting"]
    found = {str(row.cause): row.seconds for row in rank.ledger.rows}
    collections = [row for row in rank.ledger.activities if row.activity == "collect_all"]
    found["garbage_collection"] = collections[0].longest_seconds  # others happen by themselves
    for cause in CAUSES:
        line(cause.replace("_", " "), measured[cause][1], found[cause])
    line("sum against the process", measured["process"][1], sum(r.seconds for r in rank.ledger.rows))
    steps = sum(step.seconds for step in rank.steps.recent)
    print(f"other: {found['other'] / steps:.1%} of the steps")


def of_restart(run: RunSnapshot, truth: Path) -> None:
    """The steps between the checkpoint and the death, and the time without processes."""
    whole = job_ledger([run])
    found = {str(row.cause): row.seconds for row in whole.rows}
    times = [json.loads(Path(f"{truth}.{a}.{r}").read_text()) for a in range(2) for r in range(2)]
    lost = sum(one["lost"][1] for one in times[:2])
    line("work lost in a restart", lost, found["lost"])
    wall = sum(one["process"][1] for one in times) + found["dead"]
    line("sum of both attempts", wall, whole.rank_seconds)


def of_example(node: Node, words: tuple[str, ...]) -> None:
    """The share of the last steps that is Python between the phases, of the rank with the most."""
    program = str(ROOT / "examples" / words[0])
    result = node.run([*TORCHRUN, "2", program, *words[1:], "--steps", "60"], DS_ACCELERATOR="cpu")
    assert result.code == 0, result.output
    parts = [rank_parts(rank) for rank in result.snapshot.ranks]
    other = max(one.get("other", 0.0) / sum(one.values()) for one in parts)
    print(f"{' '.join(words)}: other {other:.1%} of a step", flush=True)


if __name__ == "__main__":
    main()
