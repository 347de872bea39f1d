"""Removes the agent from a run, which continues unchanged.

TARGET is a run id (or its beginning), the pid of a rank or of its launcher; with --all every watched
rank of this user on this node. The record stays: zeromon report. zeromon attach can attach to the run
again.
"""

import argparse
from contextlib import suppress

from zeromon.attach.loader import Outcome, detach
from zeromon.attach.rank_processes import Process, processes
from zeromon.cli import say
from zeromon.cli.attach_process import selected_processes, watched_pids
from zeromon.cli.options import flag
from zeromon.cli.terminal import show_json
from zeromon.cli.trial import end_trial
from zeromon.errors import AttachRefused, RunNotFound
from zeromon.ring import paths
from zeromon.sources.live import find, only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon detach TARGET | --all``"""
    parser.add_argument("target", nargs="?", help="run id or pid")
    flag(parser, "--all", "every watched rank of this user")
    flag(parser, "--json", "print the result of each rank as JSON")


def call(options: argparse.Namespace) -> int:
    """Finds the ranks and removes the agent from each."""
    ranks = _ranks(options)
    _end_trials({rank.pid for rank in ranks})
    outcomes = detach(ranks, paths.choose_root())
    if options.json:
        show_json(outcomes)
    for outcome in outcomes:
        _say(outcome)
    return 2 if any(outcome.refused for outcome in outcomes) else 0


def _ranks(options: argparse.Namespace) -> list[Process]:
    table = processes()
    if options.all:
        found = [table[pid] for pid in watched_pids() if pid in table]
        if not found:
            raise RunNotFound("no rank of this user is watched on this node")
        return found
    if options.target is None:
        raise AttachRefused("nothing to detach from", "Like: zeromon detach RUN, PID or --all")
    if options.target.isdigit():
        return selected_processes(options.target, everything=False)
    ranks = only(find(options.target)).open().latest().ranks
    alive = [table[rank.pid] for rank in ranks if rank.alive and rank.pid in table]
    if not alive:
        raise RunNotFound(f"no rank of {options.target} lives on this node", "zeromon report RUN")
    return alive


def _end_trials(pids: set[int]) -> None:
    """Ends the trials of these ranks: the agents leave at different steps, and all must undo at one."""
    with suppress(RunNotFound):
        for live in find(None):
            trials = live.open().latest().trials if pids.intersection(live.pids) else ()
            if trials and trials[-1].is_open:
                say(f"ending trial {trials[-1].number} first ...")
                end_trial(live.open(), trials[-1].number)


def _say(outcome: Outcome) -> None:
    if outcome.refused:
        say(outcome.refused, outcome.hint)
        return
    say(f"detached from rank {outcome.rank} (pid {outcome.pid})")
    for name in outcome.kept:
        say(
            f"  {name} stays: another tool has patched it since; zeromon's hook below it is inactive"
        )
