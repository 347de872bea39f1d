"""Which ranks are stalled, since when, and what explains it. Pure.

A rank is stalled when no step has ended for longer than its own rhythm explains, and its agent has seen
no progress of its steps and collectives in that time. Its Python stack says whether that is expected:
a checkpoint, a compilation, a debugger, and an evaluation without collectives take long, too.
"""

from __future__ import annotations

from typing import NamedTuple

from zeromon.levels import STALL_SECONDS, STALL_STEPS
from zeromon.snapshot import RankSnapshot, RunSnapshot

_EXPECTED = (
    ("is stopped in a debugger", ("/pdb.py:", "/bdb.py:", "/debugpy/", "/pydevd")),
    ("compiles", ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/")),
    (
        "saves or loads a checkpoint",
        (
            "/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/",
            "/checkpoint_engine/", " in save_checkpoint", " in load_checkpoint", " in save_pretrained",
        ),
    ),
)  # fmt: skip
"""What a stall is for, and the frames that show it."""

_LOADER = ("/torch/utils/data/dataloader.py:",)


class Stall(NamedTuple):
    """A rank whose steps have stopped."""

    rank: RankSnapshot
    seconds: float
    """Since the last step ended."""
    explanation: str
    """What the rank does for so long, where that is expected; "" where nothing explains the stall."""


def stalls(run: RunSnapshot) -> tuple[Stall, ...]:
    """The stalled ranks of *run*, the longest stall first; none before its first step has ended.

    Where one rank is stalled, the others that make no progress count, too: ranks end a step at nearly,
    and not exactly, the same time.
    """
    quiet = [_stall(rank, run.taken_ns) for rank in run.ranks if _is_quiet(rank)]
    if run.ended or not any(map(_is_long, quiet)):
        return ()
    stalled = [stall for stall in quiet if stall.seconds >= STALL_SECONDS / 2]
    return tuple(sorted(stalled, key=lambda stall: (-stall.seconds, stall.rank.rank)))


def _is_quiet(rank: RankSnapshot) -> bool:
    """Whether *rank* has ended a step and its agent sees no progress since."""
    return rank.alive and bool(rank.stack) and bool(rank.recent)


def _stall(rank: RankSnapshot, now_ns: int) -> Stall:
    return Stall(rank, (now_ns - rank.recent[-1].end_ns) / 1e9, explanation(rank))


def _is_long(stall: Stall) -> bool:
    return stall.seconds >= STALL_SECONDS + STALL_STEPS * (stall.rank.step_seconds or 0.0)


def explanation(rank: RankSnapshot) -> str:
    """What explains that *rank* makes no progress; "" where nothing does."""
    for text, marks in _EXPECTED:
        if _shows(rank.stack, marks):
            return text
    return "evaluates" if rank.evaluating and not _shows(rank.stack, _LOADER) else ""


def waits_for_data(rank: RankSnapshot) -> bool:
    """Whether the stack of *rank* shows that it waits for a batch of its DataLoader."""
    return _shows(rank.stack, _LOADER)


def _shows(stack: tuple[str, ...], marks: tuple[str, ...]) -> bool:
    return any(mark in frame for frame in stack for mark in marks)
