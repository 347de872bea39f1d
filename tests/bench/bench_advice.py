"""Does advice help? `python tests/bench/bench_advice.py` (as root, for the limited link).

Each case of tests/programs/advised.py is a real run with a problem: the rule must fire. Then the same
with the finding's diff applied: the finding must be gone, and what it gained stands beside what was
predicted. The two in turns, medians of some rounds. ``--publish`` stores all cases for
docs/evidence/accuracy.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from evidence_pages import measured_here, publish
from records import keep
from support import Node, over_link, train_command

from zeromon.base.units import human_bytes
from zeromon.memory.plan import Work, of_run, point_of, step_difference
from zeromon.memory.spec import ZeroStage
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import settled_steps

ROUNDS = 3


class Case(NamedTuple):
    """A case of the program, the rule that must fire, and the link it runs over."""

    title: str
    rule: str
    steps: int = 60
    link: str = ""
    single: bool = False
    """Single steps are slow: their mean is measured, and not their median."""


CASES = {
    "fsdp_prefetch_off": Case("FSDP2 without prefetch, 2 Gbit/s", "fsdp_prefetch_off", link="2gbit"),
    "reshard_without_need": Case(
        "FSDP2 gathers again in backward, 2 Gbit/s", "reshard_without_need", link="2gbit"
    ),
    "whole_model_unit": Case("FSDP2, the whole model one unit", "whole_model_unit"),
    "ddp_bucket_large": Case("DDP with one bucket, 2 Gbit/s", "ddp_bucket_large", link="2gbit"),
    "tiny_collectives": Case("DDP with 120 tiny buckets", "tiny_collectives"),
    "tiny_units": Case("FSDP2, a unit each small layer", "tiny_collectives"),
    "accumulation_communicates": Case(
        "DDP reduces each of 4 micro-steps, 2 Gbit/s", "accumulation_communicates", link="2gbit"
    ),
    "accumulation_fsdp": Case(
        "FSDP2 reduces each of 4 micro-steps, 2 Gbit/s", "accumulation_communicates", link="2gbit"
    ),
    "data_wait": Case("no DataLoader workers", "data_wait"),
    "epoch_workers": Case("workers started again each epoch", "slow_steps", steps=120, single=True),
    "garbage_collection": Case(
        "garbage collections at different steps", "garbage_collection", steps=200, single=True
    ),
    "recompilations": Case(
        "varying length under torch.compile", "recompilations", steps=40, single=True
    ),
    "blocking_saves": Case("saves that block, 0.3 s each", "slow_steps", steps=120, single=True),
    "stage_too_high": Case("ZeRO-3 where ZeRO-2 fits, 2 Gbit/s", "stage_too_high", link="2gbit"),
    "tiny_buckets": Case("ZeRO-2 with tiny buckets", "tiny_collectives"),
    "overflow_storm": Case("fp16 from a scale of 2^50", "overflow_storm", steps=40),
    "loss_scale_settings": Case("fp16 that tries its limit every 10 steps", "loss_scale_settings"),
}


def measure(name: str, case: Case, state: str) -> RunSnapshot:
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    try:
        command = train_command(2, name, state, str(case.steps), program="advised.py")
        command = over_link(command, case.link) if case.link else command
        result = node.run(command)
        assert result.code == 0, result.output
    finally:
        node.close()
    return result.snapshot


ENGINE: dict[str, dict[str, Any]] = {
    "fsdp_prefetch_off": {"prefetch_units": 1},
    "reshard_without_need": {"stage": ZeroStage.GRADIENTS, "reshards": False},
    "ddp_bucket_large": {"bucket_cap_bytes": 1 << 20},
    "accumulation_communicates": {"reduces_each": False},
    "accumulation_fsdp": {"reduces_each": False},
    "stage_too_high": {"stage": ZeroStage.GRADIENTS, "reshards": False},
}
"""Cases whose change the engine of `zeromon plan` knows -> the change of the plan."""


def of_engine(run: RunSnapshot, name: str) -> float | None:
    """Seconds of a step that the engine predicts the change to take less; None where it cannot."""
    setup = of_run(run)
    other = replace(setup, plan=replace(setup.plan, **ENGINE[name]))
    longer = step_difference(point_of({}, setup, Work()), point_of({}, other, Work()))
    return None if longer is None else -longer[0]


def step_of(run: RunSnapshot, case: Case) -> float:
    if case.single:
        steps = [step.seconds for rank in run.ranks for step in settled_steps(rank.steps.recent)]
        return statistics.fmean(steps)
    return statistics.median(rank.steps.median_seconds or 0.0 for rank in run.ranks)


def found(run: RunSnapshot, rule: str) -> Finding | None:
    return next((f for f in run.findings if f.rule == rule), None)


HEAD = ("case", "rule", "before", "after", "predicted gain", "achieved")


def main() -> None:
    chosen = [word for word in sys.argv[1:] if word != "--publish"]
    if chosen and "--publish" in sys.argv:
        raise SystemExit("--publish stores all cases: name none")
    rows = []
    for name in chosen or CASES:
        case = CASES[name]
        before: list[RunSnapshot] = []
        after: list[RunSnapshot] = []
        for _ in range(ROUNDS):
            before.append(measure(name, case, "before"))
            after.append(measure(name, case, "after"))
        fired = [f for f in (found(run, case.rule) for run in before) if f is not None]
        gone = sum(found(run, case.rule) is None for run in after)
        told = f"fired {len(fired)}, gone {gone} of {ROUNDS}"
        engine = [of_engine(run, name) for run in before] if name in ENGINE else []
        said = ", ".join("n/a" if each is None else f"{each * 1e3:.1f} ms" for each in engine)
        steps = [statistics.median(step_of(run, case) for run in runs) for runs in (before, after)]
        row = [case.title, case.rule, *effect(case, fired, before, after, steps)]
        print(f"{name}: {told}; {' | '.join(row)}; engine: {said}", flush=True)
        rows.append(row)
    if "--publish" in sys.argv:
        entry = measured_here("tests/bench/bench_advice.py", head=list(HEAD), rows=rows)
        publish("accuracy", {"advice": entry})


def effect(
    case: Case,
    fired: list[Finding],
    before: list[RunSnapshot],
    after: list[RunSnapshot],
    steps: list[float],
) -> list[str]:
    """Step, memory or skipped steps before and after, the predicted gain, and the achieved one."""
    step_cells = [f"{step * 1e3:.1f} ms" for step in steps]
    achieved = steps[0] - steps[1]
    remedies = [f.remedy for f in fired if f.remedy is not None]
    if not remedies:
        return [*step_cells, "n/a (no remedy)", f"{achieved * 1e3:.1f} ms"]
    first = remedies[0]
    if first.frees_bytes is not None:
        peaks = [max(r.memory.unsharded_peak_bytes for r in runs[0].ranks) for runs in (before, after)]
        predicted = f"{human_bytes(first.frees_bytes)} less"
        return [*map(human_bytes, peaks), predicted, human_bytes(peaks[0] - peaks[1])]
    if first.gain_low_seconds is None or first.gain_high_seconds is None:
        skipped = [sum(r.steps.skipped_steps for r in runs[0].ranks) for runs in (before, after)]
        cells = [f"{count} of {case.steps} steps skipped" for count in skipped]
        return [*cells, first.effect or "n/a (no gain named)", f"{skipped[0] - skipped[1]} steps"]
    low = statistics.median(r.gain_low_seconds or 0.0 for r in remedies)
    high = statistics.median(r.gain_high_seconds or 0.0 for r in remedies)
    middle = statistics.median(
        ((r.gain_low_seconds or 0) + (r.gain_high_seconds or 0)) / 2 for r in remedies
    )
    keep(f"{case.rule}, achieved beside predicted", achieved / middle - 1, "", "zero")
    return [*step_cells, f"{low * 1e3:.1f} to {high * 1e3:.1f} ms", f"{achieved * 1e3:.1f} ms"]


if __name__ == "__main__":
    main()
