"""Samples of the training thread's stack: which line of the script runs between the phases of a step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zeromon.ring.codes import Phase
from zeromon_agents.observe import own_code
from zeromon_agents.observe.own_code import OwnCode
from zeromon_agents.runtime.hook_context import OFF, ON

SCRIPT = """\
def log_metrics(wait):
    wait()

def log_through(library, wait):
    library(wait)

def train(step, wait, library):
    step()
    log_metrics(wait)
    log_through(library, wait)
    wait()

def main(step, wait, library):
    train(step, wait, library)
    wait()
"""
LIBRARY = """\
def call(function):
    function()
"""
TRAINER = """\
def inner_loop(step, wait, callback):
    step()
    callback(wait)
    gather(wait)

def gather(wait):
    wait()
"""
CALLBACK = """\
def on_step_end(wait):
    wait()
"""
MAIN = """\
def main(trainer, step, wait, callback):
    trainer(step, wait, callback)
"""


WAIT = """\
def make(nth, calls, stands, may_go):
    def wait():
        if next(calls) == nth:
            stands.set()
            may_go.wait(30)
    return wait
"""


def loaded(text: str, file: str, name: str) -> Callable[..., Any]:
    """The function *name* of *text*, as if it stood in *file*."""
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


@pytest.fixture
def context() -> Any:
    """What the sampler reads of a training process; its records are kept."""
    written: list[dict[str, Any]] = []
    return SimpleNamespace(
        phase=Phase.OTHER, mode=ON, step=1, thread=0, written=written,
        add_metadata=lambda own_code: written.append(own_code),
    )  # fmt: skip


def look_at(context: Any, body: Callable[..., object], nth: int, looks: int = 4) -> list[str]:
    """The lines that are written while *body* stands still at its *nth* wait, a look in each step."""
    own, calls = OwnCode(context, 0.0), itertools.count(1)
    stands, may_go = threading.Event(), threading.Event()
    make = loaded(WAIT, "/usr/lib/python3.11/threading.py", "make")
    wait = make(nth, calls, stands, may_go)

    def train() -> None:
        context.thread = threading.get_ident()
        body(own.remember_loop, wait)

    thread = threading.Thread(target=train)
    thread.start()
    assert stands.wait(30)
    for _ in range(looks):
        own.look()
        context.step += 1
    may_go.set()
    thread.join(30)
    lines = context.written[-1]["lines"] if context.written else []
    return [f"{place}{' (waits)' * communicates}" for place, communicates, _ in lines]


def plain(step: Any, wait: Any) -> None:
    """A script with a loop of its own."""
    call = loaded(LIBRARY, "/x/site-packages/tokenizers/a.py", "call")
    loaded(SCRIPT, "/home/me/train.py", "main")(step, wait, call)


@pytest.mark.parametrize(
    ("nth", "line"),
    [
        (1, "/home/me/train.py:2 in log_metrics"),
        (2, "/home/me/train.py:5 in log_through"),  # not the library that it calls
        (3, "/home/me/train.py:11 in train"),
        (4, "/home/me/train.py:15 in main"),  # it may be the loop: train() is one step then
    ],
)
def test_the_line_is_the_innermost_of_the_script_below_its_loop(
    context: Any, nth: int, line: str
) -> None:
    assert look_at(context, plain, nth) == [line]


@pytest.mark.parametrize(
    ("nth", "line"),
    [(1, "/home/me/callbacks.py:2 in on_step_end"), (2, "transformers/trainer.py:7 in gather")],
)
def test_a_trainers_loop_is_below_the_script_that_calls_it(context: Any, nth: int, line: str) -> None:
    trainer = loaded(TRAINER, "/x/site-packages/transformers/trainer.py", "inner_loop")
    callback = loaded(CALLBACK, "/home/me/callbacks.py", "on_step_end")
    main = loaded(MAIN, "/home/me/train.py", "main")
    seen = look_at(context, lambda step, wait: main(trainer, step, wait, callback), nth)
    assert seen == [line]


def test_a_wait_for_other_ranks_is_told_from_work(context: Any) -> None:
    call = loaded(LIBRARY, "/x/site-packages/torch/distributed/distributed_c10d.py", "call")
    main = loaded(SCRIPT, "/home/me/train.py", "main")
    seen = look_at(context, lambda step, wait: main(step, wait, call), 2)
    assert seen == ["/home/me/train.py:5 in log_through (waits)"]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OTHER])
def test_nothing_is_looked_at_in_a_phase(
    context: Any, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_code.sys, "_current_frames", lambda: pytest.fail("it looked"))
    context.phase = phase
    assert look_at(context, plain, 1) == []


def test_steps_that_are_shorter_than_the_looks_are_counted(context: Any) -> None:
    """Each second look finds the thread in a phase again."""
    phases = itertools.cycle((Phase.OTHER, Phase.OTHER, Phase.FORWARD))

    class Changing(SimpleNamespace):
        @property
        def phase(self) -> Phase:
            return next(phases)

    del context.phase
    short = Changing(**vars(context))
    assert look_at(short, plain, 1, looks=20) == ["/home/me/train.py:2 in log_metrics"]


def test_nothing_is_looked_at_when_the_agent_is_off(context: Any) -> None:
    context.mode = OFF
    assert look_at(context, plain, 1) == []


def test_the_lines_of_a_step_that_never_ends_are_not_counted(context: Any) -> None:
    """What a script does after its last step is no part of a step."""
    assert look_at(context, plain, 1, looks=1) == []


def test_records_are_few_however_long_a_run_is(context: Any) -> None:
    own = OwnCode(context, 0.0)
    for n in range(10_000):
        own._counts[own_code.Line(f"train.py:{n % 7} in f", communicates=False)] += 9
        own._send()
    assert 5 < len(context.written) <= 24
    assert all(len(one["lines"]) <= 6 for one in context.written)
