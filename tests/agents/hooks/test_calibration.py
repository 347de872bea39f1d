"""What the hooks cost is measured on the hooks themselves, and what the agent spends is added up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Kind
from zeromon.ring.events import Heartbeat, decode_record
from zeromon_agents.hooks.calibration import measure_hook_cost
from zeromon_agents.runtime.around import around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext


@pytest.fixture
def context(tmp_path: Path) -> HookContext:
    return HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0, capacity=1 << 8), Guard())


def test_the_hooks_are_timed_before_training() -> None:
    """A hook that failed would be cheaper: then there is no figure at all."""
    cost = measure_hook_cost()
    assert 0 < cost.record_ns < 10**7 and 0 < cost.call_ns < 10**7


def test_calls_of_wrapped_functions_are_counted_while_the_agent_is_on(context: HookContext) -> None:
    wrapped = around(context, lambda: None)(lambda: 5)
    for context.mode in (ON, ON, OFF):
        assert wrapped() == 5
    assert context.calls == 2


def test_samples_are_timed_also_when_they_fail(context: HookContext) -> None:
    def sample(seconds: float) -> None:
        time.sleep(seconds)
        raise OSError

    with pytest.raises(OSError):
        context.timed(sample)(0.01)
    assert context.spent_ns >= 10_000_000


def test_a_heartbeat_carries_what_was_spent(context: HookContext) -> None:
    """Records are numbered by the ring itself."""
    for _ in range(3):
        context.emit(Kind.HOST)
    context.emit(Kind.BEAT, 0, 7, 11, 13)
    *_, beat = (decode_record(raw) for raw in RingReader(context.ring.path).read())
    assert isinstance(beat, Heartbeat)
    assert (beat.step, beat.records, beat.calls, beat.spent_ns) == (7, 4, 11, 13)
