"""Compares what a program did without zeromon with what it did with it. Pure: no file, no process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""What torch's dispatcher calls a collective in `c10d` -> what zeromon does."""

CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+|,\d+)?Z?"), "<time>"),
    (re.compile(r"\b\d\d:\d\d:\d\d(\.\d+)?\b"), "<time>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"(127\.0\.0\.1|localhost|\[?::1?\]?):\d+"), "<host>"),
    (re.compile(r"(?i)\b(pid|process group|port)[:= ]+\d+"), r"\1 <number>"),
    (re.compile(r"\d+(\.\d+)?\s*(it/s|s/it|steps/s|ms|seconds|s)\b"), "<duration>"),
    (re.compile(r"(?i)(['\"]?\w*(runtime|_per_second|time|_tps|entropy_s)['\"]?\s*[:=]\s*)['\"]?[\d.e+-]+['\"]?"),
     r"\1<duration>"),
)  # fmt: skip
"""What differs from one run of a program to the next: times, addresses, ports, process ids."""


BAR = re.compile(r"\d+%\|")
"""A bar of progress."""


class Outcome(NamedTuple):
    """What one run of a program did."""

    code: int | None
    """None: it did not end in time."""
    lines: list[str]
    steps: dict[str, list[str]]
    """rank.attempt -> a digest of the parameters after each step of an optimizer."""
    calls: dict[str, dict[str, int]]
    """rank.attempt -> calls of `c10d` by operator; empty where nobody counted."""
    errors: str = ""


class Verdict(NamedTuple):
    """What was held against what, and what differs."""

    code: str
    output: str
    steps: str
    collectives: str
    strategy: str
    agent: str
    findings: list[str]

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        texts = self.code, self.output, self.steps, self.collectives, self.strategy, self.agent
        return [text for text in texts if not text.startswith("ok")]

    def excused(self, output: str, steps: str) -> Verdict:
        """The same, where two runs without zeromon differ in *output* or *steps*, too."""
        itself = "ok, but differs without zeromon, too"
        return self._replace(
            output=self.output if output.startswith("ok") else itself,
            steps=self.steps if steps.startswith("ok") else itself,
        )


def normal(text: str, places: Mapping[str, str]) -> list[str]:
    """The lines of an output, without what changes from run to run; sorted, because ranks interleave.

    Bars of progress, and what the profiler says of itself, are left out.
    """
    for place, name in places.items():
        text = text.replace(place, name)
    lines = []
    for line in text.split("\n"):
        last = next((part for part in reversed(line.split("\r")) if part.strip()), "")
        if BAR.search(last) or last.startswith("USDT:") or not last.strip():
            continue
        for pattern, name in CHANGING:
            last = pattern.sub(name, last)
        lines.append(last.rstrip())
    return sorted(lines)


def changed(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Lines that only one of two outputs has, with a sign."""
    left, right = Counter(before), Counter(after)
    return [f"- {x}" for x in (left - right).elements()] + [f"+ {x}" for x in (right - left).elements()]


def operations(calls: Mapping[str, int]) -> Counter[str]:
    """Calls of `c10d` by zeromon's names; an operator that is no collective is left out."""
    found: Counter[str] = Counter()
    for name, count in calls.items():
        operation = OPERATIONS.get(name.removeprefix("c10d::"))
        if operation is not None:
            found[operation] += count
    return found


def counted(rank: Mapping[str, Any]) -> Counter[str]:
    """Collectives of a rank of a report, by operation; those of unknown operation under "unknown"."""
    found: Counter[str] = Counter()
    communication = rank["communication"]
    for row in communication["collectives"]:
        found[row["op"]] += row["count"]
    found["unknown"] += sum(communication["unattributed"].values())
    return +found


def last_attempt(by_rank: Mapping[str, Any]) -> dict[int, Any]:
    """rank -> what it did in its launcher's last attempt."""
    newest: dict[int, tuple[int, Any]] = {}
    for key, value in by_rank.items():
        rank, attempt = map(int, key.split("."))
        newest[rank] = max(newest.get(rank, (-1, None)), (attempt, value), key=lambda pair: pair[0])
    return {rank: value for rank, (_, value) in sorted(newest.items())}


def judge_output(bare: Outcome, watched: Outcome) -> str:
    """Whether both printed the same."""
    lines = changed(bare.lines, watched.lines)
    return f"{len(lines)} lines differ" if lines else f"ok {len(bare.lines)} lines"


def judge_steps(bare: Outcome, watched: Outcome) -> str:
    """Whether the parameters after each step are the same bit for bit."""
    left, right = last_attempt(bare.steps), last_attempt(watched.steps)
    if left == right:
        return f"ok {sum(map(len, left.values()))}" if left else "ok none"
    for rank in sorted(left | right):
        pairs = enumerate(zip(left.get(rank, ()), right.get(rank, ()), strict=False), 1)
        first = next((n for n, (one, other) in pairs if one != other), None)
        if first is not None:
            return f"differ on rank {rank} from step {first}"
    without, with_it = ([len(found[rank]) for rank in found] for found in (left, right))
    return f"{without} steps without, {with_it} with"


def judge_collectives(bare: Outcome, report: Mapping[str, Any]) -> str:
    """Whether zeromon counted what the profiler did in a run without zeromon."""
    true = {rank: operations(calls) for rank, calls in last_attempt(bare.calls).items()}
    seen = {rank["rank"]: counted(rank) for rank in report["ranks"]}
    wrong = [
        f"rank {rank} {op}: {seen.get(rank, Counter())[op]} of {true.get(rank, Counter())[op]}"
        for rank in sorted(true | seen)
        for op in sorted(true.get(rank, Counter()) | seen.get(rank, Counter()))
        if seen.get(rank, Counter())[op] != true.get(rank, Counter())[op]
    ]
    if not true:
        return "nobody counted"
    unnamed = {rank: found["unknown"] for rank, found in seen.items()}
    missing = {rank: (true[rank] - seen.get(rank, Counter())).total() for rank in true}
    if missing != unnamed or any(" unknown" not in text and _more(text) for text in wrong):
        return "; ".join(wrong) or "no rank reported"
    told = ", ".join(f"{op} {count}" for op, count in sorted(true[0].items()))
    return f"ok {told}" + (f", of which {unnamed[0]} without a name" if unnamed[0] else "")


def _more(text: str) -> bool:
    """Whether zeromon counted more of an operation than there were."""
    seen, true = text.rpartition(": ")[2].split(" of ")
    return int(seen) > int(true)


def judge_strategy(report: Mapping[str, Any], strategy: str, steps: int, attempts: int) -> str:
    """Whether the report tells the right strategy, steps and attempts of each rank."""
    said = {(rank["strategy"], rank["steps"]["watched_steps"]) for rank in report["ranks"]}
    if said != {(strategy, steps)}:
        return f"reports {sorted(said)}, not {(strategy, steps)}"
    if report["attempt"] != attempts:
        return f"reports attempt {report['attempt']}, not {attempts}"
    return f"ok {strategy}, {steps} steps" + (f", {attempts} attempts" if attempts > 1 else "")


def judge_agent(report: Mapping[str, Any], ranks: int) -> str:
    """Whether each rank was watched to its end without a failed hook or a lost record."""
    found = [(r["rank"], r["agent"]["errors"], r["agent"]["dropped"]) for r in report["ranks"]]
    if found != [(rank, 0, 0) for rank in range(ranks)]:
        return f"(rank, failed hooks, lost records): {found}"
    failed = [rank["rank"] for rank in report["ranks"] if rank["status"]["failed"]]
    return f"says that {failed} failed" if failed else "ok"


def judge_code(one: Outcome, other: Outcome, *, fails: bool) -> str:
    """Whether both ended as they should."""
    if one.code != other.code or one.code is None or bool(one.code) != fails:
        return f"{one.code} without, {other.code} with"
    return f"ok {one.code}"


def verdict_of(
    program: Any, bare: Outcome, watched: Outcome, report: Mapping[str, Any], ranks: int
) -> Verdict:
    """What the two runs of a line of the table show; *report* is empty where it must fail."""
    code = judge_code(bare, watched, fails=bool(program.fails))
    output, steps = judge_output(bare, watched), judge_steps(bare, watched)
    if program.fails:
        return Verdict(code, output, steps, "ok -", "ok -", "ok -", [])
    return Verdict(
        code,
        output,
        steps,
        judge_collectives(bare, report),
        judge_strategy(report, program.strategy, program.steps, program.attempts),
        judge_agent(report, ranks),
        [
            f"{one['severity']} {one['code']} {one['rule']}, rank {one['rank']}: {one['text']}"
            for one in report["findings"]
        ],
    )
