"""A change that is tried in live ranks: on in the same steps of all ranks, and always undone."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from zeromon.ring.codes import TrialState
from zeromon.ring.trial_words import LEASE_SECONDS, MARGIN, REQUEST, WORDS, Change, Plan
from zeromon_agents.observe import live_trials
from zeromon_agents.observe.live_trials import CHANGES, Unfit, keep_gathered, prefetch_next

FIRST, SIZE, BLOCKS = 20, 6, 8


class Rank:
    """One rank whose training loop the test drives; *on* are the steps with the change."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.steps: Any = SimpleNamespace(on_boundary=None)
        self.context = MagicMock()
        self.context.ring.path = folder / f"rank{rank}.ring"
        self.context.guard.guarded = lambda hook: hook
        self.said: list[tuple[TrialState, int]] = []
        self.context.emit = lambda kind, number, step, text, cost, op: self.said.append((op, step))
        self.models: Any = SimpleNamespace(order=None, rank=self)
        self.trials = live_trials.Trials(self.context, self.steps, self.models, folder, rank)
        self.is_on = False
        self.on: list[int] = []

    def step(self, number: int) -> None:
        """Runs step *number*, and then what is between two steps."""
        if self.is_on:
            self.on.append(number)
        if self.steps.on_boundary is not None:
            self.steps.on_boundary(number + 1)


def switching(models: Any) -> Iterator[None]:
    yield
    models.rank.is_on = True
    try:
        while True:
            yield
    finally:
        models.rank.is_on = False


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    monkeypatch.setitem(CHANGES, Change.PREFETCH, switching)
    both = Rank(tmp_path, 0), Rank(tmp_path, 1)
    ask(tmp_path)
    return both


def ask(folder: Path, **other: Any) -> None:
    rings = ("rank0.ring", "rank1.ring")
    plan = Plan(1, Change.PREFETCH, FIRST, SIZE, BLOCKS, rings)._asdict() | other
    (folder / WORDS).write_bytes(bytes(16))
    (folder / REQUEST).write_text(json.dumps(plan))


def train(both: tuple[Rank, Rank], at: dict[int, Callable[[], None]] | None = None) -> None:
    """Both ranks train; one is ahead of the other by a step, at times this one and at times that."""
    for number in range(1, FIRST + BLOCKS * SIZE + 10):
        for rank in both if number % 2 else reversed(both):
            rank.step(number)
        (at or {}).get(number, lambda: None)()


def accept(both: tuple[Rank, Rank]) -> None:
    for rank in both:
        rank.trials.check()


def test_all_ranks_switch_at_the_same_steps_and_back(ranks: tuple[Rank, Rank]) -> None:
    accept(ranks)
    train(ranks)
    blocks = [n for n in range(BLOCKS) if n % 4 in (1, 2)]
    planned = [FIRST + n * SIZE + k for n in blocks for k in range(SIZE)]
    for rank in ranks:
        assert rank.on == planned
        assert rank.said[0][0] == TrialState.READY
        assert rank.said[-1] == (TrialState.DONE, FIRST + BLOCKS * SIZE)
        assert not rank.trials.is_open and rank.steps.on_boundary is None


def test_a_rank_that_reads_the_request_too_late_keeps_all_from_it(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].trials.check()
    train(ranks, {FIRST - MARGIN: ranks[1].trials.check})
    for rank in ranks:
        assert rank.on == [] and rank.said[-1][0] == TrialState.REFUSED


@pytest.mark.parametrize("how", ["withdrawn", "lease"])
@pytest.mark.parametrize("when", range(FIRST + SIZE, FIRST + 3 * SIZE))
def test_a_request_that_ends_is_undone_at_one_step(
    ranks: tuple[Rank, Rank], tmp_path: Path, how: str, when: int
) -> None:
    """Whenever it ends, and also where it ends between the two ranks' looks."""
    accept(ranks)

    def ends() -> None:
        if how == "withdrawn":
            (tmp_path / REQUEST).unlink()
        else:
            old = time.time() - LEASE_SECONDS - 1
            os.utime(tmp_path / REQUEST, (old, old))

    for number in range(1, FIRST + BLOCKS * SIZE + 10):
        ranks[number % 2].step(number)
        if number == when:
            ends()
        ranks[1 - number % 2].step(number)
    assert ranks[0].on == ranks[1].on and ranks[0].on[-1] < when + SIZE + MARGIN
    for rank in ranks:
        assert rank.said[-1][0] == TrialState.WITHDRAWN
        assert not rank.is_on


def test_an_agent_that_stops_undoes_first_with_all_ranks(ranks: tuple[Rank, Rank]) -> None:
    """A rank that went on alone would send other collectives than the rest."""
    accept(ranks)
    stopped: list[str] = []
    at = FIRST + SIZE + 1

    def stops() -> None:
        assert ranks[1].trials.after(lambda: stopped.append("now"))
        assert not stopped

    train(ranks, {at: stops})
    assert stopped == ["now"] and ranks[0].on == ranks[1].on
    assert ranks[1].trials.after(stops) is False


def test_a_change_that_does_not_fit_one_rank_is_refused_by_all(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits_rank_0(models: Any) -> Iterator[None]:
        if models.rank is ranks[1]:
            raise Unfit("it is so already")
        yield from switching(models)

    monkeypatch.setitem(CHANGES, Change.PREFETCH, fits_rank_0)
    accept(ranks)
    train(ranks)
    assert [rank.on for rank in ranks] == [[], []]
    assert all(rank.said[-1][0] == TrialState.REFUSED for rank in ranks)


def test_only_the_closed_list_and_only_this_process(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    ask(tmp_path, change="os.system")
    with pytest.raises(ValueError, match=r"os\.system"):
        rank.trials.check()
    ask(tmp_path, rings=("rank0.of-another-process.ring", "rank1.ring"))
    os.utime(tmp_path / REQUEST, (time.time() + 1, time.time() + 1))
    rank.trials.check()
    assert rank.steps.on_boundary is None
    rank.steps.on_boundary = lambda _: None  # a trace
    ask(tmp_path)
    os.utime(tmp_path / REQUEST, (time.time() + 2, time.time() + 2))
    rank.trials.check()
    assert rank.said == [(TrialState.REFUSED, 0)]


def test_shared_collections_leave_the_collector_as_it_was() -> None:
    before = gc.isenabled(), gc.get_freeze_count()
    change = live_trials.shared_collections(MagicMock())
    next(change)
    assert (gc.isenabled(), gc.get_freeze_count()) == before
    next(change)
    assert not gc.isenabled()
    with pytest.raises(Unfit):
        next(live_trials.shared_collections(MagicMock()))
    change.close()
    assert (gc.isenabled(), gc.get_freeze_count()) == before


def units(count: int) -> tuple[Any, list[Any], list[Any]]:
    """(models, units, their groups) as FSDP2 has them."""

    class Unit(SimpleNamespace):
        def _get_fsdp_state(self) -> Any:
            return self.state

        def modules(self) -> list[Any]:
            return [self, *self.children]

        def set_modules_to_forward_prefetch(self, units: list[Any]) -> None:
            self.state._states_to_forward_prefetch = [u.state for u in units]

        def set_modules_to_backward_prefetch(self, units: list[Any]) -> None:
            self.state._states_to_backward_prefetch = [u.state for u in units]

        __hash__ = object.__hash__

    def unit(children: list[Any]) -> Any:
        group = SimpleNamespace(
            post_forward_mesh_info="mesh" if not children else None, is_unsharded=False,
            unshard_async_op=False, device=SimpleNamespace(type="cpu"), reshard=MagicMock(),
        )  # fmt: skip
        state = SimpleNamespace(
            _fsdp_param_groups=[group], _states_to_forward_prefetch=[],
            _states_to_backward_prefetch=[],
        )  # fmt: skip
        return Unit(state=state, children=children)

    layers = [unit([]) for _ in range(count)]
    root = unit(layers)
    groups = [one.state._fsdp_param_groups[0] for one in (root, *layers)]
    models: Any = SimpleNamespace(live=lambda: ([root], []), order=None)
    return models, layers, groups


def test_keep_gathered_frees_what_no_backward_freed() -> None:
    models, _, groups = units(3)
    change = keep_gathered(models)
    next(change)
    assert groups[1].post_forward_mesh_info == "mesh"
    next(change)
    assert all(group.post_forward_mesh_info is None for group in groups)
    groups[2].is_unsharded = groups[0].is_unsharded = True  # as an evaluation leaves them
    next(change)
    assert groups[2].reshard.called and not groups[0].reshard.called  # the root's stays, as before
    change.close()
    assert [group.post_forward_mesh_info for group in groups] == [None, *["mesh"] * 3]
    for group in groups:
        group.post_forward_mesh_info = None
    with pytest.raises(Unfit):
        next(keep_gathered(models))


def test_prefetch_follows_the_order_in_which_units_ran() -> None:
    models, layers, groups = units(3)
    models.order = [groups[0], groups[2], groups[1], groups[3]]  # the root, 1, 0, 2
    change = prefetch_next(models)
    next(change)
    assert not any(layer.state._states_to_forward_prefetch for layer in layers)
    next(change)
    assert layers[1].state._states_to_forward_prefetch == [layers[0].state]
    assert layers[0].state._states_to_backward_prefetch == [layers[1].state]
    assert layers[2].state._states_to_forward_prefetch == []
    assert all(group.unshard_async_op for group in groups)
    with pytest.raises(Unfit, match="has set"):
        next(prefetch_next(models))
    change.close()
    assert not any(layer.state._states_to_forward_prefetch for layer in layers)
    assert not any(group.unshard_async_op for group in groups)
    models.order = []
    with pytest.raises(Unfit, match="fewer than two"):
        next(prefetch_next(models))
