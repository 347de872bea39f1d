"""whatif against reality: `python tests/bench/bench_whatif.py FOLDER [GROUP...]` (root, for the links).

Each group is a strategy as it is, and changes of it; all are real runs of two gloo ranks over a loopback
that the kernel's token bucket limits, some with a delayed rank. The programs of a group train in turns
of five steps, because the load of a machine changes from minute to minute. FOLDER keeps the records.
Each change is predicted from the record of what it changes, with the options of `zeromon plan`; the
table has all groups that FOLDER has. Without a group nothing is run. ``--publish`` stores the table for
docs/evidence/accuracy.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from evidence_pages import measured_here, publish
from support import ROOT, TORCHRUN, Node, over_link

from zeromon.cli import build_parser
from zeromon.cli.plan import predict_points
from zeromon.cli.report import snapshot_of
from zeromon.memory.plan import Point
from zeromon.memory.predict import During
from zeromon.memory.reconcile import PEAK_ROLES
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.step import settled_steps
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

SIZE = "--width 256 --layers 4 --length 64 --steps 31".split()
LINK, DELAY = 2000, 0.06
TELLING = 0.05
"""Two steps differ when they do so by more than this share."""


class Program(NamedTuple):
    """A run: strategy, link in Mbit/s, sequences, micro-steps, and more."""

    strategy: str
    link: int = LINK
    batch: int = 4
    accumulate: int = 1
    checkpoint: bool = False
    delay: float = 0.0
    environment: tuple[tuple[str, str], ...] = ()
    bucket: int = 0


class Case(NamedTuple):
    """*after* is *before* with *settings*."""

    settings: str
    after: str
    before: str = ""
    """Empty: what the group begins with."""


def usual(strategy: str) -> dict[str, Program]:
    """The strategy as it is, and what changes alike in each group."""
    base = Program(strategy)
    return {
        "as it is": base,
        "twice the link": base._replace(link=2 * LINK),
        "half the link": base._replace(link=LINK // 2),
        "twice the batch": base._replace(batch=8),
        "accumulation": base._replace(accumulate=2),
        "a late rank": base._replace(delay=DELAY),
    }


PROGRAMS = {name: usual(name) for name in ("ddp", "fsdp2", "zero2", "zero3")}
PROGRAMS["ddp"] |= {
    "one bucket": Program("ddp", environment=(("BUCKET", "100"),)),
    "FSDP2": Program("fsdp2"),
    "checkpointing": Program("ddp", checkpoint=True),
}
PROGRAMS["fsdp2"] |= {
    "kept gathered": Program("fsdp2-zero2"),
    "DDP": Program("ddp"),
    "prefetch": Program("fsdp2", environment=(("PREFETCH", "1"),)),
    "checkpointing": Program("fsdp2", checkpoint=True),
}
PROGRAMS["zero2"] |= {
    "ZeRO-1": Program("zero1"),
    "ZeRO-3": Program("zero3"),
    "larger buckets": Program("zero2", bucket=4_000_000),
}
PROGRAMS["zero3"] |= {"ZeRO-2": Program("zero2")}

COMMON = (
    Case("link=2", "twice the link"),
    Case("link=0.5", "half the link"),
    Case("micro-batch=8", "twice the batch"),
    Case("accumulation=2", "accumulation"),
    Case("straggler=median", "as it is", "a late rank"),
    Case("link=4", "twice the link", "half the link"),
)
CASES = {name: list(COMMON) for name in PROGRAMS}
CASES["ddp"] += [
    Case("bucket=100", "one bucket"), Case("stage=3", "FSDP2"), Case("stage=0", "as it is", "FSDP2"),
    Case("checkpointing=yes", "checkpointing"),
]  # fmt: skip
CASES["fsdp2"][3] = Case("accumulation=2 reduce-each=no", "accumulation")
CASES["fsdp2"] += [
    Case("reshard=no", "kept gathered"), Case("stage=0", "DDP"), Case("prefetch=1", "prefetch"),
    Case("stage=3", "as it is", "DDP"),
    Case("checkpointing=yes", "checkpointing"),
]  # fmt: skip
CASES["zero2"] += [
    Case("stage=1", "ZeRO-1"), Case("stage=3", "ZeRO-3"), Case("bucket=4000000", "larger buckets"),
    Case("stage=2", "as it is", "ZeRO-3"),
]  # fmt: skip
CASES["zero3"] += [Case("stage=2", "ZeRO-2")]


# ---- record ---------------------------------------------------------------------------------------


def command(program: Program, folder: Path, name: str) -> list[str]:
    """The launcher, the program and its options, over its link."""
    script = str(Path(__file__).with_name("whatif_program.py"))
    words = [*TORCHRUN, "2", script, *SIZE, "--batch", str(program.batch)]
    words += ["--accumulate", str(program.accumulate)]
    words += ["--checkpoint"] if program.checkpoint else []
    if not program.strategy.startswith("zero"):
        return over_link([*words, "--strategy", program.strategy], f"{program.link}mbit")
    config = json.loads((ROOT / f"examples/deepspeed/{program.strategy}.json").read_text())
    config.pop("bf16", None)
    if program.bucket:
        config["zero_optimization"]["reduce_bucket_size"] = program.bucket
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return over_link([*words, "--config", str(path), "--no-compile"], f"{program.link}mbit")


def record(group: str, into: Path) -> None:
    """Trains the programs of a group in turns, and writes a snapshot of each."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    node, turns = Node(folder), folder / "turns"
    turns.mkdir()
    programs = {name.replace(" ", "_"): one for name, one in PROGRAMS[group].items()}
    running = []
    for place, (name, program) in enumerate(programs.items()):
        given = {"TURNS": str(turns), "PLACE": str(place), "PLACES": str(len(programs))}
        given |= {"DELAY": str(program.delay), **dict(program.environment)}
        quiet = (folder / f"{name}.log").open("w")
        running.append(
            subprocess.Popen(
                command(program, folder, name), env=node.environment(name, **given), cwd=ROOT,
                stdout=quiet, stderr=quiet,
            )
        )  # fmt: skip
    deadline = time.monotonic() + 400
    while any(one.poll() is None for one in running):
        if time.monotonic() > deadline or any(one.poll() for one in running):
            for one in running:
                one.terminate()
            raise SystemExit(f"a program failed, or did not end: see {folder}")
        node.collector.tick()
        time.sleep(0.5)
    for name in programs:
        run = node.settle(name)
        assert run is not None
        (into / f"{group}-{name}.json").write_bytes(encode_snapshot(run))
    node.close()


# ---- compare --------------------------------------------------------------------------------------


def path_of(into: Path, group: str, name: str) -> Path:
    return into / f"{group}-{(name or 'as it is').replace(' ', '_')}.json"


def measured(run: RunSnapshot) -> float:
    return median(step.seconds for step in settled_steps(run.ranks[0].steps.recent))


def predicted(path: Path, settings: str) -> tuple[Point, Point]:
    """The run as it is and with *settings*, as the command predicts it."""
    words = [word for setting in settings.split() for word in ("--set", setting)]
    options = build_parser("plan").parse_args(["plan", "--from", str(path), *words])
    base, (point,) = predict_points(options, snapshot_of(options.run)[0], 1)[:2]
    return base, point


def memory_error(rank: RankSnapshot, point: Point) -> float:
    """Predicted less measured bytes of the roles that a census reaches, as a share."""
    assert point.row is not None
    rows = [row for row in rank.memory.expected if row.measured_bytes is not None]
    roles = {row.role for row in rows}
    told = sum(
        term.nbytes
        for term in point.row.memory.terms
        if term.role in roles and (term.during & During.STEP or term.role in PEAK_ROLES)
    )
    return told / sum(row.measured_bytes or 0 for row in rows) - 1


HEAD = ("from", "change", "before", "after", "predicted", "error", "memory")


def compare(
    group: str, into: Path
) -> tuple[list[float], list[float], list[bool], list[tuple[str, ...]]]:
    """Prints a line per case; returns errors of steps and of memory, ordered pairs, and the lines."""
    steps, memory, gains, rows = [], [], [], []
    for case in CASES[group]:
        before = path_of(into, group, case.before)
        after = decode_snapshot(path_of(into, group, case.after).read_bytes())
        base, point = predicted(before, case.settings)
        assert base.time is not None and point.time is not None, point.unknown
        was, became = measured(decode_snapshot(before.read_bytes())), measured(after)
        error, off = point.time.seconds / became - 1, memory_error(after.ranks[0], point)
        steps.append(error)
        memory.append(off)
        if case.before in ("", "a late rank"):  # a remedy of the strategy as it is
            gains.append(((point.time.seconds - base.time.seconds) / was, (became - was) / was))
        cells = (
            f"{group}, {case.before}" if case.before else group, case.settings,
            *(f"{1e3 * x:.1f} ms" for x in (was, became, point.time.seconds)),
            f"{error:+.1%}", f"{off:+.1%}",
        )  # fmt: skip
        rows.append(cells)
        print(f"| {' | '.join(cells)} |", flush=True)
    ordered = [
        (a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(gains, 2) if abs(a[1] - b[1]) > TELLING
    ]
    return steps, memory, ordered, rows


def main() -> None:
    """Records the named groups, then the table."""
    folder, *groups = (word for word in sys.argv[1:] if word != "--publish")
    into = Path(folder)
    into.mkdir(exist_ok=True)
    for group in groups:
        record(group, into)
    print(f"| {' | '.join(HEAD)} |")
    print(f"|{'---|' * len(HEAD)}")
    steps, memory, ordered, rows = [], [], [], []
    for group in PROGRAMS:
        if path_of(into, group, "").exists():
            found = compare(group, into)
            steps += found[0]
            memory += found[1]
            ordered += found[2]
            rows += found[3]
    if steps:
        print(f"{len(steps)} cases: median error of a step {median(map(abs, steps)):.1%}")
        print(f"memory: {sum(abs(x) <= 0.05 for x in memory)} of {len(memory)} within 5 %")
        print(f"order: {sum(ordered)} of {len(ordered)} pairs right")
    if "--publish" in sys.argv[1:]:
        fields = {"view": "whatif", "head": list(HEAD), "rows": [list(row) for row in rows]}
        publish("accuracy", {"whatif": measured_here("tests/bench/bench_whatif.py", **fields)})


if __name__ == "__main__":
    main()
