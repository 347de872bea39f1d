"""Examines this machine and its runs: requirements, what zeromon can measure here, and hangs.

Without TARGET: torch, NCCL, driver, DeepSpeed, launchers, links, shared memory, limits, ptrace, and
what the agent can and cannot measure here; then each live run. With a TARGET, a run id (or its
beginning), the pid of a rank, or host:port: that run only.

For a run without progress it names the hanging collective, the waiting ranks and the missing ranks; with
py-spy also the Python stack of each: py-spy reads the memory of the process from outside and stops it
briefly. With --stacks it does so at once for every rank of this node, also in a run that moves. Exit
code 1 when a finding is critical or a problem of this machine affects runs, else 0.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from zeromon.cli.machine import Fact, survey
from zeromon.cli.options import flag
from zeromon.cli.terminal import show, working
from zeromon.probes.process import stack_of
from zeromon.readout.deaths import ended_text
from zeromon.readout.hang import hang_text
from zeromon.readout.text import doing, finding_text, run_state, stall_finding
from zeromon.snapshot import Finding, Hang, NodeView, RunSnapshot, Severity
from zeromon.sources.live import LiveSource, find, node_runs, only
from zeromon.units import human_seconds

_MOST_STACKS = 8
_MAX_WARNINGS = 3
_AT_ONCE = 4
"""Runs of py-spy side by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon doctor [TARGET] [--stacks | --no-stacks] [--json]``"""
    parser.add_argument("target", nargs="?", help="run id, pid or host:port")
    stacks = parser.add_mutually_exclusive_group()
    flag(stacks, "--stacks", "the Python stacks of all ranks of this node, now")
    flag(stacks, "--no-stacks", "do not run py-spy")
    flag(parser, "--json", "print JSON")


def call(options: argparse.Namespace) -> int:
    """Examines the machine, or one run."""
    if options.target is None:
        return _survey(options)
    return _examine(only(find(options.target)).open().latest(), options)


def _survey(options: argparse.Namespace) -> int:
    """The machine, then its live runs."""
    with working("importing torch"):
        facts = survey()
    live = [run for run in node_runs() if not run.ended]
    if options.json:
        runs = [run.run for run in live]
        sys.stdout.write(msgspec.json.encode({"facts": facts, "runs": runs}).decode() + "\n")
        return int(any(fact.severity == "warning" for fact in facts))
    show(facts_as_text(facts))
    bad = any(fact.severity == "warning" for fact in facts)
    for run in live:
        sys.stdout.write("\n")
        bad = bool(_examine(LiveSource(run.address, run.run).latest(), options)) or bad
    return int(bad)


_MARKS = {"fine": " ", "note": "·", "warning": "!"}


def facts_as_text(facts: list[Fact]) -> str:
    """One screen: a line per fact, and below it what to do."""
    width = max((len(fact.name) for fact in facts), default=0)
    lines = []
    for fact in facts:
        lines.append(f"{_MARKS[fact.severity]} {fact.name.ljust(width)}  {fact.value}")
        if fact.hint:
            lines.append(f"  {' ' * width}  -> {fact.hint}")
    return "\n".join(lines) + "\n"


def _examine(run: RunSnapshot, options: argparse.Namespace) -> int:
    """What hangs or is stalled in one run."""
    found = run.hangs
    if options.stacks:
        with working("reading stacks"), ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = [rank for rank in run.ranks if rank.alive]
            texts = pool.map(stack_of, [rank.pid for rank in asked])
            stacks = {rank.rank: text for rank, text in zip(asked, texts, strict=True)}
    else:
        suspects = [] if options.no_stacks else _suspects(found, run)
        told = {rank.rank: "\n".join(rank.stack) for rank in run.ranks}
        stacks = {rank: told[rank] or stack_of(pid) for rank, pid in suspects}
        if not options.no_stacks and not run.ranks:
            starting = run.starting[:_MOST_STACKS]
            stacks = {one.rank or 0: stack_of(one.pid) for one in starting}
    if options.json:
        content = {"run": run.run, "hangs": found, "stacks": stacks}
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    else:
        show(as_text(run, found, stacks))
    return int(bool(_severe(run)) or any(not hang.pause for hang in found))


def _severe(run: RunSnapshot) -> list[Finding]:
    """The critical findings that no hang of the list says as well."""
    told = {"collective_in_flight", "collective_mismatch"} if run.hangs else set()
    return [f for f in run.findings if f.severity is Severity.CRITICAL and f.rule not in told]


def _suspects(found: tuple[Hang, ...], run: RunSnapshot) -> list[tuple[int, int]]:
    """(rank, pid) of the ranks whose stacks help most: the missing ones, else a waiting one."""
    wanted: dict[int, None] = {}
    for hang in found:
        wanted.update(dict.fromkeys(hang.missing or hang.waiting[:2]))
    if not found and stall_finding(run) is not None:
        wanted.update(dict.fromkeys(rank.rank for rank in run.ranks if rank.stack))
    pids = {rank.rank: rank.pid for rank in run.ranks if rank.alive}
    return [(rank, pids[rank]) for rank in wanted if rank in pids][:_MOST_STACKS]


def _node_line(node: NodeView) -> str:
    """``zm1  ranks 2-3  reported 0.7 s ago  round trip 0.6 ms  clock ±0.5 ms``."""
    parts = [f"  {node.node}", f"ranks {node.first_rank}-{node.first_rank + node.ranks - 1}"]
    if node.here:
        parts.append("this node")
    elif node.heard_seconds is None:
        parts.append("no report yet")
    else:
        parts.append(f"reported {human_seconds(node.heard_seconds)} ago")
    if node.round_trip_seconds is not None:
        parts.append(f"round trip {human_seconds(node.round_trip_seconds)}")
    if node.clock_error_seconds is not None:
        parts.append(f"clock known to ±{human_seconds(node.clock_error_seconds)}")
    return "  ".join(parts)


def as_text(run: RunSnapshot, found: tuple[Hang, ...], stacks: dict[int, str]) -> str:
    """The hangs, what each rank does, and the stacks."""
    lines = [f"run {run.run}: {run_state(run)}"]
    if run.ended:
        lines.append(f"  it has ended: zeromon report {run.run}")
    where = {rank.rank: doing(rank) for rank in run.ranks}
    lines += [f"!! {finding_text(finding)}" for finding in _severe(run)]
    lines += [f"{'  ' if hang.pause else '!!'} {hang_text(run, hang)}" for hang in found]
    if run.ranks and not found and not run.ended and stall_finding(run) is None:
        warnings = [f for f in run.findings if f.severity is Severity.WARNING][:_MAX_WARNINGS]
        lines += ["no collective hangs", *(f" ! {finding_text(finding)}" for finding in warnings)]
    if run.nodes:
        lines += ["", "Nodes, as observed from here", *map(_node_line, run.nodes)]
    lines += [f"  {run.nodes_note}"] if run.nodes_note else []
    lines += ["", "What each rank does"] if run.ranks or run.starting else []
    lines += [
        f"  rank {'n/a' if one.rank is None else one.rank} (pid {one.pid}): has not reported yet"
        + (f", at {one.at}" if one.at else "")
        for one in run.starting[:64]
    ]
    lines += [
        f"  rank {rank.rank} (pid {rank.pid}): {where[rank.rank] if rank.alive else ended_text(rank)}"
        for rank in run.ranks[:64]
    ]
    for rank, text in stacks.items():
        lines += ["", f"Python stack of rank {rank}"]
        lines += [f"  {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n"
