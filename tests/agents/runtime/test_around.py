"""The wrapper of all hooks but the collective one: what runs when, and that errors stay inside."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo import trace_rules
from torch._dynamo.testing import CompileCounter

from zeromon.ring.buffer import RingWriter
from zeromon_agents.runtime.around import RAISED, SKIP, around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, OFF, ON, HookContext, compiled_hooks

Calls = list[tuple[Any, ...]]


@pytest.fixture
def context(tmp_path: Path) -> HookContext:
    context = HookContext(RingWriter(tmp_path / "rank0.ring", rank=0), Guard())
    context.mode = ON
    return context


def recorded(context: HookContext, calls: Calls, **options: Any) -> Any:
    """A wrapped function that returns the sum of its arguments, and notes what runs around it."""

    def before(*args: Any, **kwargs: Any) -> str:
        calls.append(("before", args, kwargs))
        return "state"

    def after(state: Any, result: Any, *args: Any) -> None:
        calls.append(("after", state, result, args))

    @around(context, before, after, **options)
    def add(first: int, second: int = 0) -> int:
        """Adds."""
        if second < 0:
            raise KeyError("negative")
        return first + second

    return add


def test_both_see_the_call_and_after_sees_state_and_result(context: HookContext) -> None:
    calls: Calls = []
    assert recorded(context, calls)(1, second=2) == 3
    assert calls == [("before", (1,), {"second": 2}), ("after", "state", 3, (1,))]


def test_an_exception_of_the_function_passes_and_after_sees_that_it_raised(context: HookContext) -> None:
    calls: Calls = []
    with pytest.raises(KeyError, match="negative"):
        recorded(context, calls)(1, -1)
    assert calls[1][2] is RAISED
    assert context.guard.errors == 0


def test_a_skipped_call_has_no_after(context: HookContext) -> None:
    calls = []
    function = around(context, lambda *_: SKIP, lambda *_: calls.append(1), scoped=True)(abs)
    context.unit = 3
    assert function(-2) == 2
    assert (calls, context.unit, context.guard.errors) == ([], 3, 0)


@pytest.mark.parametrize("second", [2, -2])
def test_errors_of_both_go_to_the_guard_and_change_nothing(context: HookContext, second: int) -> None:
    states = []

    def before(*_: Any) -> None:
        raise ValueError("before")

    def after(state: Any, *_: Any) -> None:
        states.append(state)
        raise ValueError("after")

    @around(context, before, after, where="Engine.forward")
    def function(number: int) -> int:
        if number < 0:
            raise KeyError(number)
        return number

    if second > 0:
        assert function(second) == second
    else:
        with pytest.raises(KeyError) as raised:
            function(second)
        assert raised.value.__context__ is None
    assert states == [None]
    assert context.guard.errors == 2
    assert context.guard.first == "Engine.forward: ValueError: before"


def test_without_a_name_the_guard_gets_the_functions_own(context: HookContext) -> None:
    def before(*_: Any) -> None:
        raise ValueError("broken")

    class Engine:
        @around(context, before)
        def step(self) -> None:
            pass

    Engine().step()
    assert context.guard.first is not None
    assert context.guard.first.endswith("Engine.step: ValueError: broken")


def test_an_error_of_a_callback_with_bound_arguments_stays_inside(context: HookContext) -> None:
    """As of those that run at the end of DDP's backward, and of an asynchronous checkpoint."""

    def after(_: int) -> None:
        raise ValueError("broken")

    bound = functools.partial(after, 1)
    context.guard.guarded(bound)()
    context.guard.run((bound,))
    assert context.guard.errors == 2
    assert context.guard.first is not None
    assert context.guard.first.endswith("after: ValueError: broken")


@pytest.mark.parametrize(
    ("active_from", "runs"), [(OFF, {OFF, IDLE, ON}), (IDLE, {IDLE, ON}), (ON, {ON})]
)
def test_modes_below_the_lowest_only_call_the_function(
    context: HookContext, active_from: int, runs: set[int]
) -> None:
    for mode in (OFF, IDLE, ON):
        calls: Calls = []
        add = recorded(context, calls, active_from=active_from)
        context.mode = mode
        assert add(1, 2) == 3
        assert bool(calls) == (mode in runs)


@pytest.mark.parametrize("fails", ["before", "function", ""])
def test_a_scoped_wrapper_restores_unit_and_engine(context: HookContext, fails: str) -> None:
    context.unit, context.engine = 3, 1
    within = []

    def before() -> None:
        context.unit, context.engine = 7, 2
        if fails == "before":
            raise ValueError

    @around(context, before, lambda *_: within.append(context.unit), scoped=True)
    def function() -> None:
        within.append(context.unit)
        if fails == "function":
            raise KeyError

    try:
        function()
    except KeyError:
        assert fails == "function"
    assert within == [7, 7]
    assert (context.unit, context.engine) == (3, 1)


def test_nested_calls_keep_their_own_state(context: HookContext) -> None:
    """As activation checkpointing and nested units do."""
    states = []

    def before(depth: int) -> int:
        context.unit = depth
        return context.unit

    @around(context, before, lambda state, *_: states.append((state, context.unit)), scoped=True)
    def function(depth: int) -> None:
        if depth:
            function(depth - 1)

    function(2)
    assert states == [(0, 0), (1, 1), (2, 2)]


def test_name_documentation_and_code_name_are_the_functions_own(context: HookContext) -> None:
    add = recorded(context, [])
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    pure = recorded(context, [], traced=True)
    assert pure.__code__.co_name == "add"

    @around(context, traced=True)
    def where() -> str:
        return sys._getframe(1).f_code.co_name

    assert where() == "where"
    # a compiled hook has no frame: a profiler shows the function alone
    compiled = around(context)(where.__wrapped__)
    assert compiled() == ("where" if compiled_hooks is None else sys._getframe().f_code.co_name)


def test_a_compiled_graph_depends_neither_on_the_hook_nor_on_the_mode(context: HookContext) -> None:
    calls: Calls = []

    def note(*_: Any) -> None:
        calls.append(())

    @around(context, note, note, traced=True)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda tensor: double(tensor) + 1, backend=counter, fullgraph=True)
    for mode in (ON, IDLE, OFF, ON):
        context.mode = mode
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert counter.frame_count == 1
    assert calls == []


def test_a_traced_wrapper_has_file_and_line_of_the_function(context: HookContext) -> None:
    """dynamo takes code for torch's by its file; a traceback shows where the function begins."""
    add = recorded(context, [], traced=True)
    with pytest.raises(KeyError) as raised:
        add(1, -1)
    begins = add._torchdynamo_inline.__code__.co_firstlineno
    frames = [(f.filename, f.name, f.lineno) for f in traceback.extract_tb(raised.tb)]
    assert frames[1:] == [(__file__, "add", begins), (__file__, "add", begins + 4)]
    conv = torch.nn.Conv2d.forward
    assert trace_rules.check(conv) and trace_rules.check(around(context, traced=True)(conv))


def test_hooks_are_charged_by_the_calls_that_were_timed(context: HookContext) -> None:
    """The wrapped function's own time is not the agent's, and what is timed inside counts once."""
    inner = context.timed(lambda: time.sleep(0.02))

    def before() -> None:
        time.sleep(0.005)
        inner()

    hook = around(context, before, lambda *_: time.sleep(0.005))(lambda: time.sleep(0.05))
    hook()
    assert context.hooks_ns == 0 and context.spent_ns >= 20e6
    context.timing = True
    began = time.perf_counter_ns()
    hook()
    whole = time.perf_counter_ns() - began
    assert 2 * 10e6 <= context.hooks_ns <= 2 * (whole - 70e6)
    before_both = context.spent_ns
    context.timed(inner)()
    assert 20e6 <= context.spent_ns - before_both <= time.perf_counter_ns() - began - whole
