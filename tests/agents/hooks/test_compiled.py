"""The hooks in C and the Python that they stand in for do the same: drawn calls, and the same tests."""

from __future__ import annotations

import functools
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Kind, Phase, UnitEvent
from zeromon_agents.hooks import c10d
from zeromon_agents.hooks.backend import Units
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import PAYLOADS, Group
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime import hook_context
from zeromon_agents.runtime.around import SKIP, around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, OFF, ON, HookContext

DRAWS, CALLS = 40, 300
METHODS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "reduce_scatter", "send", "barrier")
HERE = Path(__file__).parent


def test_the_hooks_are_compiled_here() -> None:
    """Else all other tests would be of the Python alone: ``make`` compiles them."""
    wanted = os.environ.get("ZEROMON_PURE") != "1"
    assert (hook_context.compiled_hooks is not None) is wanted


class Options:
    """The part of a collective's options that the hook reads."""

    def __init__(self, is_async: bool | None) -> None:
        if is_async is not None:
            self.asyncOp = is_async


class Work:
    """A collective under way, which ends at its wait."""

    def get_future(self) -> Any:
        """A future that never ends."""
        return torch.futures.Future()


class Pg:
    """A process group as the hooks see it."""


class Side:
    """One implementation, and what it is called with; both sides get the same calls."""

    def __init__(self, folder: Path) -> None:
        self.ring = RingWriter(folder / "rank0.ring", rank=0)
        self.reader = RingReader(self.ring.path)
        self.context = context = HookContext(self.ring, Guard())
        context.mode, context.thread = ON, threading.get_ident()
        self.collectives = collectives = Collectives(context, DeviceTimer(context))
        self.pg = Pg()
        group = Group(3, weakref.ref(self.pg), size=4, on_device=False, base=0)
        group.seen_sequences, group.even = None, set(METHODS) - {"reduce_scatter"}
        group.extras["reduce_scatter"] = 1
        self.group = collectives.groups[id(self.pg)] = group
        self.fate: Callable[[], Any] = Work
        self.works: list[Any] = []
        self.issue = {
            name: collectives._issue_hook(lambda *_, **__: self.fate(), name, PAYLOADS[name])
            for name in METHODS
        }
        self.wait = collectives._wait_hook(lambda *_, **__: self.fate())
        self.owner = Pg()
        self.seen: list[Any] = []
        units = Units(context)
        self.wrapped = {
            "scoped": around(context, self._before, self._after, scoped=True, active_from=ON)(self._own),
            "plain": around(context, self._before, self._after)(self._own),
            "unit": units.within(
                lambda owner: ("layer", {}), UnitEvent.RESHARD, lambda *_: self.fate() is True,
                traced=False,
            )(self._own),
        }  # fmt: skip

    def _before(self, *args: Any, **kwargs: Any) -> Any:
        self.context.unit = 7 << 16
        self.seen.append((len(args), sorted(kwargs)))
        return self.fate()

    def _after(self, state: Any, result: Any, *args: Any) -> None:
        self.seen.append((str(type(state)), str(type(result)), len(args)))

    def _own(self, *_: Any, **__: Any) -> Any:
        self.seen.append(self.context.unit)
        return self.fate()

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a call comes to: the kind of its result, or its error and that error's cause."""
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            return repr(error), repr(error.__context__)
        if isinstance(result, Work):
            self.works.append(result)
        return str(type(result))

    def state(self) -> Any:
        """Everything that the hooks keep and write, without times."""
        records = [
            (raw[2], raw[3], raw[2] & 0xFF == Kind.DONE or raw[4:6], raw[6])
            for raw in self.reader.read()
        ]
        collectives, context, group = self.collectives, self.context, self.group
        entries = [
            (type(e).__name__, len(e), [x for i, x in enumerate(e) if i not in (3, 5, 7)])
            for e in collectives.open.values()
        ]
        counts = dict(collectives.counts), group.issued, group.point_to_point, group.extra
        kept = context.calls, context.unit, context.engine, context.guard.errors
        return records, entries, counts, kept, self.seen, sorted(collectives.completions.waited_for)


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    """The compiled one, where it is compiled, and the one in Python."""
    # A wait of any length may or may not have seen the end of its collective
    monkeypatch.setattr(c10d, "BLOCKED_NS", 10**15)
    found = []
    for name in ("compiled", "pure"):
        (tmp_path / name).mkdir()
        found.append(Side(tmp_path / name))
        monkeypatch.setattr(hook_context, "compiled_hooks", None)
    assert found[1].context.recorder is None
    return found


def fate(draw: random.Random) -> Callable[[], Any]:
    """What the function underneath does in one call."""

    def fail() -> Any:
        raise KeyError("its own error")

    choices = [Work, Work, Work, lambda: None, lambda: True, lambda: SKIP, fail]
    return draw.choice(choices)


def drawn_call(draw: random.Random) -> Callable[[Side], Any]:
    """One call, to be made on both sides."""
    what, it = draw.randrange(10), fate(draw)
    if what == 0:
        mode, phase = draw.choice((ON, ON, ON, IDLE, OFF)), draw.choice(list(Phase))
        engine, detailed = draw.randrange(3), draw.random() < 0.2

        def change(side: Side) -> None:
            context = side.context
            context.mode, context.engine, context.detailed = mode, engine, detailed
            context.timing = detailed
            context.enter(phase)

        return change
    if what <= 4:
        name, is_async = draw.choice(METHODS), draw.choice((True, False, False, None))
        tensor = draw.choice((torch.ones(8), torch.ones(3, dtype=torch.int16), torch.nn.Parameter()))
        payload = draw.choice((tensor, [tensor], [tensor, torch.ones(2)]))
        words = [Options(is_async)] if name == "barrier" else [payload, payload, Options(is_async)]
        other_thread = draw.random() < 0.1

        def issue(side: Side) -> Any:
            side.fate, caller = it, side.context.thread
            if other_thread:
                side.context.thread = 0
            shown = side.attempt(side.issue[name], side.pg, *words)
            side.context.thread = caller
            return shown

        return issue
    if what <= 7:
        place, more = draw.random(), draw.choice(((), (), (5,)))

        def wait(side: Side) -> Any:
            side.fate = it
            work = side.works[int(place * len(side.works))] if side.works else Work()
            return side.attempt(side.wait, work, *more)

        return wait
    name, named = draw.choice(("scoped", "plain", "unit")), draw.choice(({}, {}, {"key": 1}))

    def call(side: Side) -> Any:
        side.fate = it
        return side.attempt(side.wrapped[name], side.owner, *range(draw_count), **named)

    draw_count = draw.choice((0, 1, 12))
    return call


@pytest.mark.parametrize("seed", range(DRAWS))
def test_both_do_the_same(seed: int, sides: list[Side]) -> None:
    draw = random.Random(seed)
    for number in range(CALLS):
        call = drawn_call(draw)
        first, second = (call(side) for side in sides)
        assert first == second, number
        if number % 20 == 0:
            first, second = (side.state() for side in sides)
            assert first == second, number
    assert sides[0].state() == sides[1].state()


def test_ctrl_c_in_a_hook_reaches_the_user(sides: list[Side]) -> None:
    """Whichever part of the hook it meets."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    for side in sides:
        options, payload = Options(True), [torch.ones(1)]
        side.collectives.completions.call_back = interrupt  # type: ignore[method-assign]
        issue = side.collectives._issue_hook(lambda *_: Work(), "allreduce", PAYLOADS["allreduce"])
        calls = (
            functools.partial(around(side.context, interrupt)(lambda: None)),
            functools.partial(around(side.context, None, interrupt)(lambda: None)),
            functools.partial(issue, side.pg, payload, options),
        )
        for function in calls:
            with pytest.raises(KeyboardInterrupt):
                function()
        assert side.context.guard.errors == 0


def test_nothing_is_kept_alive_and_no_reference_is_lost(sides: list[Side]) -> None:
    for side in sides:
        tensor, function = torch.ones(4), around(side.context, lambda *_: None)(lambda x: x)
        side.fate = Work
        options, words = Options(False), (tensor, tensor)
        counts = []
        for _ in range(100):
            side.wait(side.issue["_allgather_base"](side.pg, *words, options))
            function(tensor)
            side.wrapped["unit"](side.owner)
            counts.append([sys.getrefcount(one) for one in (tensor, options, side.group)])
        assert counts[1] == counts[-1]
        died = weakref.ref(tensor)
        del tensor, words
        assert died() is None


def add(one: int, two: int = 2) -> int:
    """Adds."""
    return one + two


def test_a_hook_can_be_copied_pickled_and_bound(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that holds a function of torch is copied as before."""
    for side in sides:
        hook = around(side.context)(add)
        monkeypatch.setattr(sys.modules[__name__], "add", hook)
        assert copy(hook) is deepcopy([hook])[0] is pickle.loads(pickle.dumps(hook)) is hook
        monkeypatch.undo()
        owner = type("Owner", (), {"method": around(side.context)(lambda self, x: (self, x))})()
        assert owner.method(3) == (owner, 3)
        assert owner.method.__self__ is owner
        assert hook(1) == 3 and hook.__name__ == "add" and hook.__wrapped__ is add
        for function in (hook, side.wait, *side.issue.values()):
            assert function.__name__ and function.__qualname__ and function.__module__


def test_a_muted_or_closed_ring_is_not_written(sides: list[Side]) -> None:
    """As in a forked child, and after a detach."""
    for side in sides:
        side.wait(side.issue["allreduce"](side.pg, [torch.ones(1)], Options(False)))
        assert len(side.reader.read()) == 2
        side.ring.close()
        side.wait(side.issue["allreduce"](side.pg, [torch.ones(1)], Options(False)))
        side.wrapped["unit"](side.owner)
        assert side.reader.read() == []


def test_the_same_tests_pass_without_the_compiled_hooks() -> None:
    files = [HERE / "test_hooks.py", HERE / "test_background.py", HERE.parent / "runtime/test_around.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env=os.environ | {"ZEROMON_PURE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "[100%]" in done.stdout, done.stdout[-3000:]
