"""Says why a live run stands still: which collective hangs, who waits, and where the missing ranks are.

TARGET is a run id (or its beginning), the pid of a rank, or host:port; without one, the only live run.
When py-spy is installed, the Python stack of each missing rank is shown, too: it reads the process's
memory from outside and stops it for a moment only. Exit code 0 when nothing hangs, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import msgspec

from zeromon.advice import doing
from zeromon.hangs import in_words
from zeromon.report import verdict
from zeromon.snapshot import Hang, RunSnapshot
from zeromon.source import find, only

_PATIENCE_SECONDS = 10.0
_MOST_STACKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon doctor [TARGET] [--no-stacks] [--json]``"""
    parser.add_argument("target", nargs="?", help="run id, pid or host:port")
    parser.add_argument("--no-stacks", action="store_true", help="do not ask py-spy")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def call(options: argparse.Namespace) -> int:
    """Finds the run, and says what is wrong with it."""
    run = only(find(options.target)).latest()
    found = run.hangs
    asked = [] if options.no_stacks else _suspects(found, run)
    stacks = {rank: stack_of(pid) for rank, pid in asked}
    if options.json:
        content = {"run": run.run, "hangs": found, "stacks": stacks}
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    else:
        sys.stdout.write(as_text(run, found, stacks))
    return 1 if found else 0


def _suspects(found: tuple[Hang, ...], run: RunSnapshot) -> list[tuple[int, int]]:
    """(rank, pid) of those whose stack says most: who is missing, else one that waits."""
    wanted: dict[int, None] = {}
    for hang in found:
        wanted.update(dict.fromkeys(hang.missing or hang.waiting[:2]))
    pids = {rank.rank: rank.pid for rank in run.ranks if rank.alive}
    return [(rank, pids[rank]) for rank in wanted if rank in pids][:_MOST_STACKS]


def stack_of(pid: int) -> str:
    """The Python stacks of a process, or why they cannot be had."""
    spy = shutil.which("py-spy")
    if spy is None:
        return "py-spy is not installed: pip install py-spy"
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer in {_PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return f"py-spy cannot be started: {error.strerror}"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"py-spy: {reason} (same user, or CAP_SYS_PTRACE, is needed)"
    return done.stdout.strip()


def as_text(run: RunSnapshot, found: tuple[Hang, ...], stacks: dict[int, str]) -> str:
    """The hangs, what each rank does, and the stacks."""
    lines = [f"run {run.run}: {verdict(run)}"]
    where = {rank.rank: doing(rank) for rank in run.ranks}
    if not found:
        lines.append("no collective hangs")
    lines += [f"!! {in_words(hang, where)}" for hang in found]
    lines += ["", "What each rank does"]
    lines += [
        f"  rank {rank.rank} (pid {rank.pid}): {where[rank.rank] if rank.alive else rank.ended}"
        for rank in run.ranks[:64]
    ]
    for rank, text in stacks.items():
        lines += ["", f"Python stack of rank {rank}"]
        lines += [f"  {line}" for line in text.splitlines()]
    return "\n".join(lines) + "\n"
