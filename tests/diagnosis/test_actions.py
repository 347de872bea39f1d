"""What a finding without a remedy says to do names the ranks and the lines of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import rank, run

from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.rule import action_of
from zeromon.snapshot import Finding, Hang, RunSnapshot
from zeromon.snapshot.communication import Straggler
from zeromon.snapshot.host import CodeLine
from zeromon.snapshot.memory import KILLED_FOR_MEMORY

STACK = ("/home/me/t.py:9 in main", "/home/me/data.py:41 in wait")


def finding(snapshot: RunSnapshot, code: str, of_rank: int) -> Finding:
    return next(f for f in advise(snapshot) if (f.code, f.rank) == (code, of_rank))


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (
            {"ended": "exception", "exception": "ValueError at t.py:44: bad sample"},
            "Fix t.py:44, where rank 1 raised it; the whole traceback is in the output of rank 1.",
        ),
        ({"ended": "SIGKILL"}, "Find out who sent SIGKILL: "),
        ({"ended": "SIGSEGV"}, "Run again with PYTHONFAULTHANDLER=1: it prints where native code of"),
        ({"ended": "exit code 17"}, "Read the last lines that rank 1 printed: it ended itself"),
        ({"ended": KILLED_FOR_MEMORY}, "Let ranks hold less host memory, or give them more; "),
    ],
)
def test_the_end_of_a_rank(status: dict[str, Any], action: str) -> None:
    """A rank that died of it is told nothing."""
    died = rank(1, alive=False, failed=True, last_event_ns=1, **status)
    victim = rank(0, alive=False, failed=True, last_event_ns=10**9, ended="SIGTERM")
    snapshot = run(victim, died, ended=True)
    assert action_of(finding(snapshot, "ZM001", 1)).startswith(action)
    assert finding(snapshot, "ZM001", 0).action == ""


def test_whoever_was_stopped_is_told_that_the_sender_is_unknown() -> None:
    stopped = [rank(n, alive=False, failed=True, last_event_ns=1, ended="SIGTERM") for n in (0, 1)]
    action = finding(run(*stopped, ended=True), "ZM001", 1).action
    assert action.startswith("Nothing, if you stopped it.") and "sender" in action


@pytest.mark.parametrize("is_over", [False, True])
def test_a_hang_names_the_line_of_the_missing_rank(is_over: bool) -> None:
    """The stacks can be printed only while the processes live."""
    hang = Hang(
        kind="a member has not come", op="all_reduce", group="dp", group_id="1", sequence=12,
        nbytes=1000, seconds=40.0, waiting=(0,), missing=(1,), dead=(), elsewhere=(), calls=(),
    )  # fmt: skip
    snapshot = replace(run(rank(0), rank(1, stack=STACK), ended=is_over), hangs=(hang,))
    action = finding(snapshot, "ZM002", 1).action
    assert action.startswith(f"Look at data.py:41 in wait, where rank 1 {'was' if is_over else 'is'}")
    assert ("zeromon doctor" in action) is not is_over


@pytest.mark.parametrize(
    ("phases", "action"),
    [
        (("other",), "Look at t.py:37, where rank 1 is most often while others wait."),
        (("data_wait",), "Look at what rank 1 loads: "),
        (("backward",), "Compare rank 1 with others: "),
    ],
)
def test_a_late_rank_is_looked_at_where_it_is_late(phases: tuple[str, ...], action: str) -> None:
    late = Straggler(
        rank=1, late_seconds=0.2, share=0.4, since_step=5, phases=phases, longer_seconds=0.2
    )
    at = CodeLine(place="/home/me/t.py:37 in <module>", communicates=False, ratio=0.9)
    snapshot = run(rank(0), rank(1, own_code=(at,)), stragglers=(late,))
    assert action_of(finding(snapshot, "ZM309", 1)).startswith(action)
