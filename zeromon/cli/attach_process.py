"""Loads the agent into a run that was not started under zeromon, before a view opens on it."""

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from zeromon.attach import rank_processes
from zeromon.attach.inject.refusal import is_own_process
from zeromon.attach.loader import Outcome, attach_ranks
from zeromon.base.errors import AttachRefused, SourceError, ZeromonError
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag
from zeromon.cli.run import child_environment, start_collector
from zeromon.cli.terminal import show_text
from zeromon.diagnosis.hangs import MIN_HANG_NS
from zeromon.readout.text import doing
from zeromon.readout.verdict import hang_text
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot
from zeromon.sources.live import LiveSource, runs_of_node

_SNAPSHOT_SECONDS = 10.0
_STATE_SECONDS = 6.0
_MAX_LISTED = 8
_LAUNCHERS = ("python", "torchrun", "deepspeed", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zeromon attach` for a run without zeromon."""
    add_flag(
        parser, "--all",
        "attach to all ranks of the job on this node; without TARGET to every rank of this user",
    )  # fmt: skip
    add_flag(parser, "--no-view", "attach, print the state of the ranks, and leave the agents there")


def attach_first(options: argparse.Namespace) -> int | None:
    """Attaches to the ranks that *options* select and that have no agent yet.

    Sets ``options.target`` to the run, where there is one. Returns an exit code when no view follows.
    """
    target = options.target or ""
    if not (options.all or target.isdigit()):
        return None
    ranks = selected_processes(target, everything=options.all)
    watched = watched_pids()
    fresh = [rank for rank in ranks if rank.pid not in watched]
    refused = False
    runs = {watched[rank.pid] for rank in ranks if rank.pid in watched}
    # groupby joins neighbours only: unsorted, one job would become several runs
    for _, job in groupby(sorted(fresh, key=lambda rank: rank.job), key=lambda rank: rank.job):
        run, some_refused = _attach_job(list(job))
        refused = refused or some_refused
        runs.update(run)
    if not runs:
        return 2
    # Without a target, the view lists all live runs and lets the user choose
    options.target = runs.pop() if len(runs) == 1 else None
    if not options.no_view:
        return None
    hangs = [
        hang for run in ([options.target] if options.target else runs) for hang in _print_state(run)
    ]
    return 1 if hangs else 2 if refused else 0


def selected_processes(target: str, *, everything: bool) -> list[rank_processes.Process]:
    """The processes to attach to. Raises :class:`AttachRefused`."""
    table = rank_processes.running_processes()
    if not target:
        ranks = rank_processes.all_user_ranks(table)
        hint = "A rank has loaded torch and has RANK in its environment; give another pid."
        if not ranks:
            raise AttachRefused("no rank of this user runs on this node", hint)
        return ranks
    pid = int(target)
    if pid not in table:
        raise AttachRefused(f"there is no process {pid}", "zeromon attach --all finds the ranks.")
    if is_own_process(pid) or (pid == 1 and not _is_launcher(table[pid])):
        raise AttachRefused(
            f"refusing to attach to process {pid}", "Give the pid of a rank or of a launcher."
        )
    return (
        rank_processes.sibling_ranks(pid, table) if everything else rank_processes.ranks_of(pid, table)
    )


def _is_launcher(process: rank_processes.Process) -> bool:
    """Returns whether *process* is a launcher; in a container that may be the first process."""
    return any(name in argument for argument in process.command[:3] for name in _LAUNCHERS)


def watched_pids() -> dict[int, str]:
    """Pids with a live agent, and the run that each is in."""
    watched = {}
    for run in runs_of_node():
        if not run.ended:
            # A run that ends meanwhile must not hide the ranks of all others
            with suppress(ZeromonError):
                for rank in LiveSource(run.address, run.run).latest().ranks:
                    if rank.status.alive and not rank.status.detached:
                        watched[rank.pid] = run.run
    return watched


def _attach_job(ranks: Sequence[rank_processes.Process]) -> tuple[list[str], bool]:
    """The run of *ranks* after the attach ([] when all were refused); whether any was refused."""
    start = time.monotonic()
    root = paths.choose_ring_root()
    folder, outcomes = attach_ranks(ranks, root)
    refused = [outcome for outcome in outcomes if outcome.refused]
    attached = [outcome for outcome in outcomes if not outcome.refused]
    for outcome in refused[:_MAX_LISTED]:
        tell_user(outcome.refused, outcome.hint)
    if len(refused) > _MAX_LISTED:
        tell_user(f"{len(refused) - _MAX_LISTED} more were refused")
    if not attached:
        return [], True
    # A rank that belongs to a run already stays in it: *folder* is then not its run
    run = next((o.watched for o in attached if o.watched), folder.name)
    _wait_for_snapshot(root, folder, attached)
    seconds = time.monotonic() - start
    tell_user(
        f"attached to {_ranks_text(attached)} as run {run} in {seconds:.1f} s {_stop_text(attached)}"
    )
    # The ranks of the job that were not selected, or are on other nodes
    table = rank_processes.running_processes()
    job = rank_processes.sibling_ranks(ranks[0].pid, table)
    unselected = len({rank.pid for rank in job} - {rank.pid for rank in ranks})
    if unselected:
        tell_user(
            f"{unselected} more of its ranks are on this node: zeromon attach --all {ranks[0].pid}"
        )
    remotes = rank_processes.remote_rank_numbers(job)
    if remotes and len(job) < max(rank.world_size for rank in job):
        nodes = ", ".join(rank_processes.node_names_of(job, table)) or "other nodes"
        span = f"{remotes[0]} to {remotes[-1]}" if len(remotes) > 1 else str(remotes[0])
        tell_user(f"ranks {span} are on {nodes}; run there: zeromon attach --all")
    return [run], bool(refused)


def _ranks_text(attached: Sequence[Outcome]) -> str:
    ranks = ", ".join(str(o.rank) for o in attached[:_MAX_LISTED])
    ellipsis = ", ..." if len(attached) > _MAX_LISTED else ""
    return f"rank{'s' if len(attached) > 1 else ''} {ranks}{ellipsis}"


def _stop_text(attached: Sequence[Outcome]) -> str:
    longest = max(attached, key=lambda o: o.stopped_ns)
    if not longest.stopped_ns:
        return ""
    thread = "the main thread" if not longest.how.startswith("helper") else "a helper thread"
    return f"({thread} was stopped for {longest.stopped_ns / 1e6:.2f} ms)"


def _wait_for_snapshot(root: Path, folder: Path, attached: Sequence[Outcome]) -> None:
    if os.environ.get("ZEROMON_COLLECTOR") != "off":
        start_collector(root, child_environment(os.environ, folder))
    pids = {outcome.pid for outcome in attached}
    deadline = time.monotonic() + _SNAPSHOT_SECONDS
    while time.monotonic() < deadline:
        # A collector that is starting may not answer yet
        with suppress(SourceError):
            if any(pids <= set(run.pids) for run in runs_of_node()):
                return
        time.sleep(0.05)


def _print_state(run: str) -> list[str]:
    """Prints the state of the ranks; returns the hangs as text. Waits for the first snapshot."""
    runs = [node_run for node_run in runs_of_node() if node_run.run == run]
    if not runs:
        raise SourceError(f"no collector shows run {run}")
    source = LiveSource(runs[0].address, run)
    start = time.monotonic()
    snapshot = source.latest()
    while not _is_clear(snapshot) and time.monotonic() < start + _patience_seconds(snapshot):
        time.sleep(0.2)
        snapshot = source.latest()
    activities = {rank.rank: doing(rank) for rank in snapshot.ranks}
    hang_texts = [hang_text(snapshot, hang) for hang in snapshot.hangs]
    for sentence in hang_texts:
        show_text(f"!! {sentence}\n")
    for rank in snapshot.ranks[:64]:
        pace = (
            f"step {rank.steps.last_step}, {rank.steps.median_seconds:.3f} s a step, "
            if rank.steps.median_seconds
            else ""
        )
        show_text(f"rank {rank.rank} (pid {rank.pid}): {pace}{activities[rank.rank]}\n")
    return hang_texts


def _patience_seconds(run: RunSnapshot) -> float:
    """How many seconds to wait: longer where a hang is possible."""
    stands = any(rank.status.stack and rank.communication.in_flight for rank in run.ranks)
    return MIN_HANG_NS / 1e9 + 2 if stands else _STATE_SECONDS


def _is_clear(run: RunSnapshot) -> bool:
    """Returns whether the run progresses, or hangs and missing ranks have reported their position."""
    missing = {number for hang in run.hangs for number in hang.missing}
    located = all(rank.status.stack for rank in run.ranks if rank.rank in missing and rank.status.alive)
    moves = all(rank.steps.median_seconds is not None for rank in run.ranks)
    return located if run.hangs else moves
