"""Joins a live run with the terminal view.

TARGET is a run id (or its beginning), the pid of a rank, or host:port of a collector; without one,
the live runs of this user on this node are offered. `q` leaves; the run is not disturbed.
"""

from __future__ import annotations

import argparse
import sys

from zeromon.errors import SourceError
from zeromon.source import LiveRun, LiveSource, find, only
from zeromon.store import encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon attach [TARGET] [--json]``"""
    parser.add_argument("target", nargs="?", help="run id, pid or host:port")
    parser.add_argument("--json", action="store_true", help="print the picture once and leave")


def call(options: argparse.Namespace) -> int:
    """Finds the run and shows it."""
    found = find(options.target)
    if options.json:
        run = only(found).latest()
        sys.stdout.write(encode(run).decode() + "\n")
        return 1 if run.findings else 0
    if isinstance(found, list):
        found = _choose(found)
    if not (sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on stderr
        raise SourceError("the terminal view needs a terminal", "Use --json, or zeromon report.")
    from zeromon.tui.app import ZeromonApp

    return ZeromonApp(found).run() or 0


def _choose(runs: list[LiveRun]) -> LiveSource:
    """Asks which of *runs* is meant."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return only(runs)
    for number, run in enumerate(runs, 1):
        state = "ended" if run.ended else f"{run.ranks} ranks, step {run.steps}"
        sys.stderr.write(f"  {number}  {run.run}  {state}  {' '.join(run.command)[:60]}\n")
    while True:
        sys.stderr.write(f"which one? [1-{len(runs)}] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            return only(runs)
        if answer.strip().isdigit() and 1 <= int(answer) <= len(runs):
            chosen = runs[int(answer) - 1]
            return LiveSource(chosen.address, chosen.run)
