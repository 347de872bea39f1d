"""Runs of two ranks on gloo that count themselves (counted.py), and what is true of them.

Nothing here knows a monitor, and the counts use none of zeromon's code: marks around the same calls,
torch.profiler's trace, psutil. A monitor runs :func:`command` with TRUTH set to an
empty folder, reads its own figures once :func:`is_counted` is true, and then calls :func:`release`.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scores import Case, Truth

KINDS = ("late", "ddp", "fsdp2")
RANKS, STEPS, WINDOW = 2, 80, 20
MARKS, PROFILER, CALLS = "marks in the script", "torch.profiler", "torch.profiler, calls too"
PSUTIL = "psutil"

Span = tuple[float, float]
Facts = Mapping[str, Any]


def command(kind: str) -> list[str]:
    """The program and its arguments, for a launcher of RANKS ranks."""
    return [str(Path(__file__).with_name("counted.py")), kind, str(STEPS)]


def is_counted(folder: Path) -> bool:
    """Whether all ranks have ended their steps and written their counts."""
    return all((folder / f"{rank}.json").exists() for rank in range(RANKS))


def release(folder: Path) -> None:
    """Lets the ranks end."""
    (folder / "seen").touch()


def counted(kind: str, folder: Path) -> Case:
    """What is true of the run whose ranks wrote into *folder*."""
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    truths = _of_every_kind(ranks)
    truths |= _by_marks(ranks) if kind == "late" else _by_trace(ranks, folder)
    step = truths["step"].values[0][0] or 0.0
    return Case(kind, step, truths)


def _of_every_kind(ranks: Sequence[Facts]) -> dict[str, Truth]:
    times = [_differences(rank["ends"]) for rank in ranks]
    return {
        "steps": _one([len(rank["ends"]) for rank in ranks], "", MARKS),
        "step": _one([statistics.fmean(row[-WINDOW:]) for row in times], "s", MARKS),
        "chart step-time": Truth({n: row[-WINDOW:] for n, row in enumerate(times)}, "s", MARKS),
        "memory": _one([rank["rss"] for rank in ranks], "bytes", PSUTIL),
        "headroom": _one([None] * RANKS, "bytes", "no device"),
    }


def _differences(ends: Sequence[int]) -> list[float]:
    return [(end - start) / 1e9 for start, end in pairwise(ends)]


# ---- marks ----------------------------------------------------------------------------------------


def _by_marks(ranks: Sequence[Facts]) -> dict[str, Truth]:
    """Of a script that takes the time around each of its waits."""
    exposed, ratios, overlaps, series = [], [], [], {}
    for number, rank in enumerate(ranks):
        steps = rank["waits"][-WINDOW:]
        of_step = [_covered((reached, left) for _, reached, left in step) / 1e9 for step in steps]
        busy = sum(_covered((issued, left) for issued, _, left in step) for step in steps) / 1e9
        spent = (rank["ends"][-1] - rank["ends"][-WINDOW - 1]) / 1e9
        exposed.append(sum(of_step) / WINDOW)
        ratios.append(sum(of_step) / spent)
        overlaps.append(1 - sum(of_step) / busy)
        series[number] = of_step
    waits = [_waiting(ranks, rank) for rank in range(RANKS)]
    at_risk = [None if rank["used"] > 0.9 else 0.0 for rank in ranks]
    return {
        "exposed": _one(ratios, "ratio", MARKS),
        "exposed_seconds": _one(exposed, "s", MARKS),
        "overlap": _one(overlaps, "ratio", MARKS),
        "late": _one(list(reversed(waits)), "s", MARKS),
        "waits": _one(waits, "s", MARKS),
        "chart exposed": Truth(series, "s", MARKS),
        **({"risk": _one(at_risk, "ratio", PSUTIL)} if None not in at_risk else {}),
    }


def _waiting(ranks: Sequence[Facts], rank: int) -> float:
    """Seconds a step that *rank* waits until the other one issues: before, it computed."""
    both = zip(ranks[rank]["waits"][-WINDOW:], ranks[1 - rank]["waits"][-WINDOW:], strict=True)
    spans = (
        [(reached, at) for (_, reached, _), (at, _, _) in zip(mine, theirs, strict=True)]
        for mine, theirs in both
    )
    return sum(_covered(step) for step in spans) / WINDOW / 1e9


# ---- torch.profiler -------------------------------------------------------------------------------


def _by_trace(ranks: Sequence[Facts], folder: Path) -> dict[str, Truth]:
    """|C - K| of the profiler's trace: gloo's collectives without operators of the training thread.

    A second count takes the calls that issue collectives as communication, too, with their copies: the
    training thread does not compute in them.
    """
    parts: dict[str, list[float | None]] = defaultdict(list)
    totals: dict[str, list[float | None]] = defaultdict(list)
    series = {}
    for number, rank in enumerate(ranks):
        trace = _Trace(json.loads((folder / rank["trace"]).read_text())["traceEvents"])
        steps = [trace.step(step) for step in range(STEPS - WINDOW + 1, STEPS + 1)]
        exposed = [trace.exposed([step]) for step in steps]
        spent, communicated = sum(end - start for start, end in steps), trace.communicated(steps)
        series[number] = [us / 1e6 for us in exposed]
        totals["exposed"].append(sum(exposed) / spent)
        totals["overlap"].append(1 - sum(exposed) / communicated)
        totals["exposed_seconds"].append(sum(exposed) / WINDOW / 1e6)
        totals["with calls"].append(trace.exposed(steps, with_calls=True) / WINDOW / 1e6)
        rest = sum(exposed)
        other = spent
        for mark, part in _PARTS.items():
            spans = [trace.marks[mark, step] for step in range(STEPS - WINDOW + 1, STEPS + 1)]
            inside, length = trace.exposed(spans), sum(end - start for start, end in spans)
            parts[part].append((length - inside) / WINDOW / 1e6)
            other, rest = other - length, rest - inside
        parts["other"].append((other - rest) / WINDOW / 1e6)
        parts["exposed"].append(sum(exposed) / WINDOW / 1e6)
        for part in ("cpu_optimizer", "evaluation", "checkpoint", "garbage_collection", "compile"):
            parts[part].append(0.0)
    return {
        **{f"part {part}": _one(values, "s", PROFILER) for part, values in parts.items()},
        "exposed": _one(totals["exposed"], "ratio", PROFILER),
        "exposed_seconds": _one(totals["exposed_seconds"], "s", PROFILER),
        "exposed_seconds, with calls": _one(totals["with calls"], "s", CALLS),
        "overlap": _one(totals["overlap"], "ratio", PROFILER),
        "chart exposed": Truth(series, "s", PROFILER),
    }


_PARTS = {
    "data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer",
}  # fmt: skip
_OPERATORS = ("aten::", "fsdp::", "Optimizer.step")


class _Trace:
    """One rank's trace, in microseconds."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.marks: dict[tuple[str, int], Span] = {}
        gloo: list[Span] = []
        calls: list[Span] = []
        operators: dict[Any, list[Span]] = defaultdict(list)
        thread = None
        for event in events:
            name = str(event.get("name", ""))
            if event.get("ph") != "X":
                continue
            span = event["ts"], event["ts"] + event["dur"]
            if name.startswith("truth:"):
                _, mark, step = name.split(":")
                self.marks[mark, int(step)] = span
                thread = event["tid"]
            elif name.startswith("gloo:"):
                gloo.append(span)
            elif name.startswith("c10d::"):
                calls.append(span)
            elif event.get("cat") == "cpu_op" and name.startswith(_OPERATORS):
                operators[event["tid"]].append(span)
        self._gloo, self._operators = _union(gloo), _union(operators[thread])
        inside = _common(self._operators, _union(calls))
        self._calls = _union([*gloo, *calls]), _without(self._operators, inside)

    def step(self, number: int) -> Span:
        """From the end of the optimizer before to the end of the optimizer."""
        return self.marks["optimizer", number - 1][1], self.marks["optimizer", number][1]

    def communicated(self, spans: Sequence[Span]) -> float:
        """Microseconds of collectives within *spans*."""
        return _total(_common(self._gloo, _union(spans)))

    def exposed(self, spans: Sequence[Span], *, with_calls: bool = False) -> float:
        """Microseconds of collectives within *spans* during which no operator ran."""
        communication, operators = self._calls if with_calls else (self._gloo, self._operators)
        inside = _common(communication, _union(spans))
        return _total(inside) - _total(_common(inside, operators))


# ---- spans ----------------------------------------------------------------------------------------


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in first for b in second if a[1] > b[0])
    return [(start, end) for start, end in pairs if end > start]


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """*spans* without the *holes*, each of which is inside one of them."""
    cuts = sorted(point for span in (*spans, *holes) for point in span)
    return [(start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=True) if end > start]


def _total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _covered(spans: Iterable[Span]) -> float:
    return _total(_union(spans))


def _one(values: Sequence[float | None], unit: str, source: str) -> Truth:
    return Truth({rank: [value] for rank, value in enumerate(values)}, unit, source)
