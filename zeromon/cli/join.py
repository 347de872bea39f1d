"""Brings the agent into a run that was not started under zeromon, before a view opens on it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from zeromon import paths
from zeromon.advice import doing, hang_in_words
from zeromon.cli import say
from zeromon.cli.run import child_environment, start_collector
from zeromon.errors import AttachRefused, SourceError, ZeromonError
from zeromon.hangs import LEAST_NS
from zeromon.inject.refusal import is_ours
from zeromon.jobs import Process, all_ranks, elsewhere, nodes_of, processes, ranks_of, siblings
from zeromon.joining import Outcome, join
from zeromon.snapshot import RunSnapshot
from zeromon.source import LiveSource, node_runs

_PICTURE_SECONDS = 10.0
_VERDICT_SECONDS = 6.0
_MOST_LINES = 8
_LAUNCHERS = ("python", "torchrun", "deepspeed", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `zeromon attach` takes to join a run that never loaded us."""
    parser.add_argument(
        "--all", action="store_true",
        help="join all ranks of the job on this node; without TARGET every rank of this user",
    )  # fmt: skip
    parser.add_argument(
        "--no-view", action="store_true", help="join, say what is seen, and leave the agents there"
    )
    parser.add_argument("--method", choices=("thread", "remote", "gdb"), help=argparse.SUPPRESS)


def join_first(options: argparse.Namespace) -> int | None:
    """Joins what *options* name and nobody watches yet; an exit code when no view is to follow.

    Afterwards ``options.target`` is the run, where there is one.
    """
    target = options.target or ""
    if not (options.all or target.isdigit()):
        return None
    ranks = meant(target, everything=options.all)
    watched = watched_pids()
    fresh = [rank for rank in ranks if rank.pid not in watched]
    refused = False
    runs = {watched[rank.pid] for rank in ranks if rank.pid in watched}
    for _, job in groupby(sorted(fresh, key=lambda rank: rank.job), key=lambda rank: rank.job):
        run, some_refused = _join(list(job), options.method or "")
        refused = refused or some_refused
        runs.update(run)
    if not runs:
        return 2
    options.target = runs.pop() if len(runs) == 1 else None
    if not options.no_view:
        return None
    hangs = [
        hang for run in ([options.target] if options.target else runs) for hang in _say_state(run)
    ]
    return 1 if hangs else 2 if refused else 0


def meant(target: str, *, everything: bool) -> list[Process]:
    """The processes to join. Raises :class:`AttachRefused`."""
    table = processes()
    if not target:
        found = all_ranks(table)
        hint = "A rank has torch loaded and RANK in its environment; give another one's pid."
        if not found:
            raise AttachRefused("no rank of this user runs on this node", hint)
        return found
    pid = int(target)
    if pid not in table:
        raise AttachRefused(f"there is no process {pid}", "zeromon attach --all finds the ranks.")
    if is_ours(pid) or (pid == 1 and not _is_launcher(table[pid])):
        raise AttachRefused(f"process {pid} is not to be touched", "Give a rank's or a launcher's.")
    return siblings(pid, table) if everything else ranks_of(pid, table)


def _is_launcher(process: Process) -> bool:
    """In a container the launcher may be the first process; elsewhere everything is below that."""
    return any(name in word for word in process.command[:3] for name in _LAUNCHERS)


def watched_pids() -> dict[int, str]:
    """Pids with a live agent, and the run that each is in."""
    found = {}
    for run in node_runs():
        if not run.ended:
            with suppress(ZeromonError):
                for rank in LiveSource(run.address, run.run).latest().ranks:
                    if rank.alive and rank.ended != "detached":
                        found[rank.pid] = run.run
    return found


def _join(ranks: Sequence[Process], method: str) -> tuple[list[str], bool]:
    """The run that *ranks* are in now (none when none could be joined); whether any was refused."""
    began = time.monotonic()
    root = paths.choose_root()
    folder, outcomes = join(ranks, root, method=method)
    refused = [outcome for outcome in outcomes if outcome.refused]
    joined = [outcome for outcome in outcomes if not outcome.refused]
    for outcome in refused[:_MOST_LINES]:
        say(outcome.refused)
        if outcome.hint:
            say(f"  {outcome.hint}")
    if len(refused) > _MOST_LINES:
        say(f"nor could {len(refused) - _MOST_LINES} more be joined")
    if not joined:
        return [], True
    run = next((o.watched for o in joined if o.watched), folder.name)
    _wait_for_picture(root, folder, joined)
    say(f"joined {_count(joined)} as run {run} in {time.monotonic() - began:.1f} s {_stop(joined)}")
    _say_rest(ranks)
    return [run], bool(refused)


def _count(joined: Sequence[Outcome]) -> str:
    ranks = ", ".join(str(o.rank) for o in joined[:_MOST_LINES])
    more = ", ..." if len(joined) > _MOST_LINES else ""
    return f"rank{'s' if len(joined) > 1 else ''} {ranks}{more}"


def _stop(joined: Sequence[Outcome]) -> str:
    """What it has cost the training threads."""
    longest = max(joined, key=lambda o: o.stopped_ns)
    if not longest.stopped_ns:
        return ""
    whose = "the main thread" if not longest.how.startswith("helper") else "a helper thread"
    return f"({whose} stood still for {longest.stopped_ns / 1e6:.2f} ms)"


def _say_rest(ranks: Sequence[Process]) -> None:
    """The ranks that were not meant, or are on other nodes, and what to run there."""
    table = processes()
    job = siblings(ranks[0].pid, table)
    beside = len({rank.pid for rank in job} - {rank.pid for rank in ranks})
    if beside:
        say(f"{beside} more of its ranks are on this node: zeromon attach --all {ranks[0].pid}")
    away = elsewhere(job)
    if away and len(job) < max(rank.world_size for rank in job):
        where = ", ".join(nodes_of(job, table)) or "other nodes"
        shown = f"{away[0]} to {away[-1]}" if len(away) > 1 else str(away[0])
        say(f"ranks {shown} are on {where}; run there: zeromon attach --all")


def _wait_for_picture(root: Path, folder: Path, joined: Sequence[Outcome]) -> None:
    """Until the collector shows them."""
    if os.environ.get("ZEROMON_COLLECTOR") != "off":
        start_collector(root, child_environment(os.environ, folder))
    pids = {outcome.pid for outcome in joined}
    deadline = time.monotonic() + _PICTURE_SECONDS
    while time.monotonic() < deadline:
        with suppress(SourceError):
            if any(pids <= set(run.pids) for run in node_runs()):
                return
        time.sleep(0.05)


def _say_state(run: str) -> list[str]:
    """Prints what the run does; returns its hangs in words. Waits until there is something to say."""
    found = [known for known in node_runs() if known.run == run]
    if not found:
        raise SourceError(f"no collector shows run {run}")
    source = LiveSource(found[0].address, run)
    began = time.monotonic()
    picture = source.latest()
    while not _is_clear(picture) and time.monotonic() < began + _patience(picture):
        time.sleep(0.2)
        picture = source.latest()
    where = {rank.rank: doing(rank) for rank in picture.ranks}
    words = [hang_in_words(picture, hang) for hang in picture.hangs]
    for line in words:
        sys.stdout.write(f"!! {line}\n")
    for rank in picture.ranks[:64]:
        sys.stdout.write(
            f"rank {rank.rank} (pid {rank.pid}): {_state(rank.step, rank.step_seconds)}"
            f"{where[rank.rank]}\n"
        )
    return words


def _patience(run: RunSnapshot) -> float:
    """Seconds: longer for one that may turn out to hang."""
    stands = any(rank.stack and rank.in_flight for rank in run.ranks)
    return LEAST_NS / 1e9 + 2 if stands else _VERDICT_SECONDS


def _is_clear(run: RunSnapshot) -> bool:
    """Whether it moves, or hangs and the ranks that are missed have said where they are."""
    missing = {number for hang in run.hangs for number in hang.missing}
    told = all(rank.stack for rank in run.ranks if rank.rank in missing and rank.alive)
    moves = all(rank.step_seconds is not None for rank in run.ranks)
    return told if run.hangs else moves


def _state(step: int, seconds: float | None) -> str:
    return f"step {step}, {seconds:.3f} s a step, " if seconds else ""
