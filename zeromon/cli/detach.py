"""Removes the agent from a run, which continues unchanged.

TARGET is a run id (or its beginning), the pid of a rank or of its launcher; with --all every watched
rank of this user on this node. The record stays: zeromon report. zeromon attach can attach to the run
again.
"""

import argparse
from contextlib import suppress

from zeromon.attach.loader import Outcome, detach_ranks
from zeromon.attach.rank_processes import Process, running_processes
from zeromon.base.errors import AttachRefused, RunNotFound
from zeromon.cli import tell_user
from zeromon.cli.attach_process import selected_processes, watched_pids
from zeromon.cli.parser import add_flag
from zeromon.cli.terminal import show_json
from zeromon.cli.trial import end_trial
from zeromon.ring import paths
from zeromon.sources.live import find_live_runs, only_live_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon detach TARGET | --all``"""
    parser.add_argument("target", nargs="?", help="run id or pid")
    add_flag(parser, "--all", "every watched rank of this user")
    add_flag(parser, "--json", "print the result of each rank as JSON")


def call(options: argparse.Namespace) -> int:
    """Finds the ranks and removes the agent from each."""
    ranks = _chosen_ranks(options)
    _end_open_trials({rank.pid for rank in ranks})
    outcomes = detach_ranks(ranks, paths.choose_ring_root())
    if options.json:
        show_json(outcomes)
    for outcome in outcomes:
        _print_outcome(outcome)
    return 2 if any(outcome.refused for outcome in outcomes) else 0


def _chosen_ranks(options: argparse.Namespace) -> list[Process]:
    table = running_processes()
    if options.all:
        watched = [table[pid] for pid in watched_pids() if pid in table]
        if not watched:
            raise RunNotFound("no rank of this user is watched on this node")
        return watched
    if options.target is None:
        raise AttachRefused("nothing to detach from", "Like: zeromon detach RUN, PID or --all")
    if options.target.isdigit():
        return selected_processes(options.target, everything=False)
    ranks = only_live_run(find_live_runs(options.target)).open().latest().ranks
    alive = [table[rank.pid] for rank in ranks if rank.status.alive and rank.pid in table]
    if not alive:
        raise RunNotFound(f"no rank of {options.target} lives on this node", "zeromon report RUN")
    return alive


def _end_open_trials(pids: set[int]) -> None:
    """Ends the trials of these ranks: the agents leave at different steps, and all must undo at one."""
    # find_live_runs raises where no run is live: then no trial is open
    with suppress(RunNotFound):
        for live in find_live_runs(None):
            trials = live.open().latest().trials if pids.intersection(live.pids) else ()
            if trials and trials[-1].is_open:
                tell_user(f"ending trial {trials[-1].number} first ...")
                end_trial(live.open(), trials[-1].number)


def _print_outcome(outcome: Outcome) -> None:
    if outcome.refused:
        tell_user(outcome.refused, outcome.hint)
        return
    tell_user(f"detached from rank {outcome.rank} (pid {outcome.pid})")
    for name in outcome.kept:
        tell_user(
            f"  {name} stays: another tool has patched it since; zeromon's hook below it is inactive"
        )
