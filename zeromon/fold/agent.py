"""Folds what the agent reports of itself and of its rank: heartbeats, traces, precision, the end."""

from __future__ import annotations

import math

from zeromon.fold.registry import folds
from zeromon.fold.state import RankState, Spent
from zeromon.ring.events import Exit, Heartbeat, Precision, TraceMark


@folds(Heartbeat)
def _fold_heartbeat(state: RankState, e: Heartbeat) -> None:
    state.errors = e.errors
    state.phase = e.phase
    state.beats.append(Spent(e.t_ns, e.step, e.records, e.calls, e.spent_ns))


@folds(Exit)
def _fold_exit(state: RankState, e: Exit) -> None:
    state.exit = e


@folds(TraceMark)
def _fold_trace(state: RankState, e: TraceMark) -> None:
    state.trace = e


@folds(Precision)
def _fold_precision(state: RankState, e: Precision) -> None:
    engine = state.engines[e.engine]
    engine.precision = e
    if e.grad_norm is not None and not math.isfinite(e.grad_norm):
        engine.nonfinite += 1
