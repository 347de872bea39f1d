"""Severities, pools, causes, hang kinds and capture states keep their text outside the process."""

from __future__ import annotations

import msgspec
import pytest
from builders import rank, run

from zeromon.ring.codes import TextEnum, TraceState
from zeromon.snapshot import Finding, Hang, Pool, RiskCause, Severity
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.step import Capture, CaptureState, RankCapture
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

ENUMS = (CaptureState, HangKind, Pool, RiskCause, Severity)


@pytest.mark.parametrize("member", [m for enum in ENUMS for m in enum], ids=str)
def test_a_member_is_its_text_in_json_text_and_sets(member: TextEnum) -> None:
    assert msgspec.json.encode(member) == msgspec.json.encode(member.value)
    assert f"{member}" == str(member) == member == member.value
    assert {member: 1}[member.value] == 1


def test_a_snapshot_of_plain_texts_is_read_into_enums() -> None:
    """As an older version wrote it, and again after a round trip."""
    finding = Finding(rule="oom_risk", severity="warning", text="x", rank=0)  # type: ignore[arg-type]
    risk = Risk(pool="host", ratio=0.9, cause="non-torch")  # type: ignore[arg-type]
    hang = Hang(
        kind="a member is dead", op="all_gather", group="world", group_id="g", sequence=1, nbytes=1,
        seconds=9.0, waiting=(0,), missing=(), dead=(1,), elsewhere=(), calls=(),
    )  # type: ignore[arg-type]  # fmt: skip
    capture = Capture(number=1, state="analysing", first=1, steps=1, ranks=(0,), folder="/t")  # type: ignore[arg-type]
    of_rank = RankCapture(request=1, state="refused", why="no")  # type: ignore[arg-type]
    old = run(rank(risks=(risk,), capture=of_rank), findings=(finding,), capture=capture)
    text = encode_snapshot(old)
    read = decode_snapshot(text)
    assert read.findings[0].severity is Severity.WARNING
    assert read.ranks[0].memory.risks[0].pool is Pool.HOST
    assert read.ranks[0].memory.risks[0].cause is RiskCause.NON_TORCH
    assert read.capture is not None and read.capture.state is CaptureState.ANALYSING
    assert read.ranks[0].requests.capture is not None
    assert read.ranks[0].requests.capture.state is CaptureState.REFUSED
    assert encode_snapshot(read) == text
    assert msgspec.json.decode(msgspec.json.encode(hang), type=Hang).kind is HangKind.DEAD_MEMBER


def test_texts_of_another_version_have_a_meaning() -> None:
    assert Severity("fatal") is Severity.INFO
    assert RiskCause("gremlins") is RiskCause.NONE
    assert HangKind("new") is HangKind.UNKNOWN


def test_severities_are_listed_from_the_most_urgent_on() -> None:
    assert [s.order for s in Severity] == [0, 1, 2]
    assert list(Severity) == [Severity.CRITICAL, Severity.WARNING, Severity.INFO]


def test_what_an_agent_reports_of_a_trace_is_a_state_of_a_capture() -> None:
    assert {state.label for state in TraceState} <= {str(state) for state in CaptureState}
    over = {state for state in CaptureState if state.is_over}
    assert over == {
        CaptureState.SAVED, CaptureState.REFUSED, CaptureState.DONE, CaptureState.FAILED,
    }  # fmt: skip
