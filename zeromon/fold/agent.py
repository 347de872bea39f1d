"""Folds what the agent reports of itself and of its rank: heartbeats, traces, precision, the end."""

import math
from dataclasses import replace
from typing import Any

from zeromon.fold.state import RankState, ScalarTotals, Spent, folds
from zeromon.fold.steps import record_by_host
from zeromon.ring.events import (
    Exit,
    Heartbeat,
    Precision,
    Scalar,
    ScalarValue,
    TraceMark,
    TrialMark,
)


@folds(Heartbeat)
def _fold_heartbeat(state: RankState, e: Heartbeat) -> None:
    state.errors = e.errors
    state.phase = e.phase
    state.beats.append(Spent(e.t_ns, e.step, e.records, e.calls, e.spent_ns))


@folds(Exit)
def _fold_exit(state: RankState, e: Exit) -> None:
    state.exit = e
    while state.enqueued:
        record_by_host(state)


@folds(TraceMark)
def _fold_trace(state: RankState, e: TraceMark) -> None:
    state.trace = e


@folds(TrialMark)
def _fold_trial(state: RankState, e: TrialMark) -> None:
    before = state.trial
    same = before is not None and before.number == e.number
    cost_ns = e.cost_ns + (before.cost_ns if before is not None and same else 0)
    state.trial = e._replace(cost_ns=cost_ns)


@folds(Precision)
def _fold_precision(state: RankState, e: Precision) -> None:
    engine = state.engines[e.engine]
    engine.precision = e
    if e.grad_norm is None:
        return
    is_finite = math.isfinite(e.grad_norm)
    engine.nonfinite += not is_finite
    if len(state.engines) == 1 and (is_finite or math.isnan(e.loss_scale)):
        _put(
            state, Scalar.GRAD_NORM, e.grad_norm, state.step + 1
        )  # else it is a scale that is tried


@folds(ScalarValue)
def _fold_scalar(state: RankState, e: ScalarValue) -> None:
    _put(state, e.scalar, e.value, e.step)


def _put(state: RankState, scalar: Scalar, value: float, step: int) -> None:
    """Keeps a value of a step; of several in a step the last, and that one was not finite."""
    totals = state.scalars.setdefault(scalar, ScalarTotals())
    is_finite = math.isfinite(value)
    if not is_finite and totals.last_nonfinite_step != step:
        totals.nonfinite += 1
        totals.last_nonfinite_step = step
        totals.first_nonfinite_step = totals.first_nonfinite_step or step
    totals.value, totals.step = value, step
    last = state.history[-1] if state.history else None
    if last is not None and last.step == step:
        of_step: dict[str, Any] = {scalar.label: value if is_finite else None}
        state.history[-1] = replace(last, **of_step)
    else:
        state.window.scalars[scalar.label] = value if is_finite else None
