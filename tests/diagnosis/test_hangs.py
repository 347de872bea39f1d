"""Who waits, who is missing, and why; on snapshots made by hand. `tests/runs` hangs for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, rank, run

from zeromon.base.errors import RunNotFound
from zeromon.cli.doctor import run_as_text
from zeromon.diagnosis.engine import advise
from zeromon.probes.process import python_stack_text
from zeromon.readout.text import doing, group_text, state_text
from zeromon.readout.verdict import hang_headline, hang_text
from zeromon.snapshot import Finding, RankSnapshot, Severity
from zeromon.snapshot.communication import GroupProgress, InFlight
from zeromon.snapshot.rank import Halt
from zeromon.snapshot.run import NodeView
from zeromon.sources.live import find_live_runs
from zeromon.storage.run_store import Store
from zeromon_dashboard.pages.ranks import _straggler_alerts

NOW = 100_000_000_000
WORLD, OTHER = "world/0/0,1", "other/1/0,1"


def entry(op: str = "all_reduce", sequence: int = 7, group: str = WORLD, **more: Any) -> InFlight:
    facts: dict[str, Any] = {"nbytes": 64, "issued_ns": NOW - 20_000_000_000} | more
    label = group.split("/")[0]
    return InFlight(
        op=op, group=label, sequence=sequence, unit="", phase="backward", group_id=group, **facts
    )


def at(number: int, *inside: InFlight, world: int = 6, other: int = 0, **more: Any) -> RankSnapshot:
    members = more.pop("members", (0, 1))
    groups = (
        GroupProgress(group_id=WORLD, label="world", ranks=members, sequence=world),
        GroupProgress(group_id=OTHER, label="other", ranks=members, sequence=other),
    )
    return rank(number, in_flight=inside, groups=groups, **more)


def found(*ranks: RankSnapshot) -> Any:
    return run(*ranks, taken_ns=NOW).hangs


def test_a_member_that_has_not_come() -> None:
    (hang,) = found(at(0, entry(), world=7), at(1))
    assert hang.kind == "a member has not come"
    assert (hang.waiting, hang.missing, hang.dead, hang.elsewhere) == ((0,), (1,), (), ())
    assert (hang.op, hang.group, hang.sequence, round(hang.seconds)) == ("all_reduce", "world", 7, 20)


def test_the_dimension_of_the_group_is_named() -> None:
    """A rank is in many groups: the text says for what the group is, and who is in it."""

    def member(number: int, sequence: int, **more: Any) -> RankSnapshot:
        group = GroupProgress(
            group_id="mesh_tp/2/2,3", label="mesh_tp", ranks=(2, 3), sequence=sequence, dim="tp"
        )
        return changed(rank(number, phase="forward", unit="", **more), groups=(group,))

    waits = member(3, 7, in_flight=(entry(group="mesh_tp/2/2,3"),))
    whole = run(rank(0), rank(1), member(2, 6), waits, taken_ns=NOW)
    (hang,) = whole.hangs
    assert hang_text(whole, hang) == (
        "all_reduce #7 of tp (ranks 2, 3; 64 B) has not ended for 20 s: "
        "rank 2 has not called it (in forward); rank 3 waits"
    )
    assert hang_headline(whole, hang) == (
        "all_reduce in tp is stuck: rank 2 has not called it (in forward); rank 3 waits"
    )
    assert doing(waits) == "in forward, all_reduce #7 of tp (ranks 2, 3) in flight"


@pytest.mark.parametrize(
    ("label", "dim", "members", "text"),
    [
        ("world", "", (0, 1), "group world"),
        ("world", "world", (0, 1), "group world"),
        ("world", "dp", (0, 1), "dp (ranks 0, 1)"),
        ("experts_of_two", "experts_of_two", (0, 2), "group experts_of_two (ranks 0, 2)"),
        ("mesh_dp_shard", "dp_shard", tuple(range(4096)), "dp_shard (4,096 ranks)"),
    ],
)
def test_a_group_in_words(label: str, dim: str, members: tuple[int, ...], text: str) -> None:
    assert group_text(label, dim, members) == text


def test_a_slow_collective_is_no_hang_yet() -> None:
    """Neither before ten seconds, nor before ten times a step."""
    young = entry(issued_ns=NOW - 9_000_000_000)
    assert found(at(0, young, world=7), at(1)) == ()
    assert found(at(0, entry(), world=7, median_seconds=3.0), at(1)) == ()


def test_a_mismatch_that_all_members_wait_in_is_a_hang_at_once() -> None:
    """No later call can end it. A size that a rank has only called before proves nothing yet."""
    after = {"issued_ns": NOW - 4_000_000_000}
    here = at(0, entry(**after), world=7)
    (ops,) = found(here, at(1, entry("broadcast", **after), world=7))
    (sizes,) = found(here, at(1, entry(nbytes=128, **after), world=7))
    assert (ops.kind, sizes.kind) == ("mismatched operations", "mismatched sizes")
    assert found(here, at(1, entry(**after), world=7)) == ()
    three = {"world": 7, "members": (0, 1, 2)}
    assert found(at(0, entry(**after), **three), at(1, entry("broadcast", **after), **three)) == ()


def test_a_dead_peer() -> None:
    (hang,) = found(at(0, entry(), world=7), at(1, alive=False, ended="SIGKILL", failed=True))
    assert (hang.kind, hang.dead, hang.missing) == ("a member is dead", (1,), ())


def test_other_operations_and_other_sizes_at_one_number() -> None:
    (ops,) = found(at(0, entry(), world=7), at(1, entry("broadcast"), world=7))
    assert ops.kind == "mismatched operations"
    assert [(c.rank, c.op, c.nbytes) for c in ops.calls] == [
        (0, "all_reduce", 64), (1, "broadcast", 64),
    ]  # fmt: skip
    left = GroupProgress(
        group_id=WORLD, label="world", ranks=(0, 1), sequence=7, op="broadcast", nbytes=64
    )  # its sender does not wait: it is out of it again
    (gone,) = found(at(0, entry(), world=7), changed(at(1), groups=(left,)))
    assert (gone.kind, gone.waiting) == (ops.kind, (0,))
    assert [call.op for call in gone.calls] == ["all_reduce", "broadcast"]
    (sizes,) = found(at(0, entry(), world=7), at(1, entry(nbytes=128), world=7))
    assert sizes.kind == "mismatched sizes"
    (fine,) = found(at(0, entry("broadcast"), world=7), at(1, entry("broadcast", nbytes=9), world=7))
    assert fine.kind == "all members are in it"


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    first, second = found(at(0, entry(), world=7), at(1, entry(group=OTHER, sequence=1), other=1))
    assert {first.kind, second.kind} == {"deadlock of groups"}
    whole = run(at(0, entry(), world=7), at(1, entry(group=OTHER, sequence=1), other=1), taken_ns=NOW)
    assert hang_headline(whole, whole.hangs[0]) == (
        "deadlock of groups: rank 0 in all_reduce of world, rank 1 in all_reduce of other"
    )
    over = replace(entry(group=OTHER, sequence=1), phase="other")  # it has left its loop
    trains = replace(entry(), phase="backward")
    whole = run(at(0, trains, world=7), at(1, over, other=1), taken_ns=NOW)
    headline = hang_headline(whole, whole.hangs[0])
    assert headline.endswith("; rank 1 ended step 20 and has begun no other")


def test_members_on_other_nodes_are_not_accused() -> None:
    (hang,) = found(at(0, entry(), world=7, members=(0, 1, 8, 9)), at(1, entry(), world=7))
    assert (hang.elsewhere, hang.missing) == ((8, 9), ())
    assert hang.kind == "members on other nodes are not seen"


def test_the_doctor_lists_the_nodes() -> None:
    nodes = (
        NodeView(node="a", address="a:1", first_rank=0, ranks=2, here=True, heard_seconds=0.0),
        NodeView(node="b", address="b:1", first_rank=2, ranks=2, heard_seconds=12.0,
                 round_trip_seconds=0.002, silent=True),
    )  # fmt: skip
    text = run_as_text(run(rank(0), nodes=nodes, nodes_note="no answer"), (), {})
    assert "  a  ranks 0-1  this node\n" in text
    assert "  b  ranks 2-3  reported 12.00 s ago  round trip 2.0 ms\n  no answer\n" in text


def test_it_is_said_once_with_who_and_where() -> None:
    """As a finding, and by the doctor."""
    snapshot = run(at(0, entry(), world=7), at(1, phase="data_wait"), taken_ns=NOW)
    told = [f for f in advise(snapshot) if f.rule == "collective_in_flight"]
    assert [f.rank for f in told] == [1]
    assert "all_reduce #7 of group world (64 B) has not ended for 20 s" in told[0].text
    assert "rank 1 has not called it (in data_wait" in told[0].text
    text = run_as_text(snapshot, snapshot.hangs, {1: "File train.py"})
    assert "!! all_reduce #7" in text and "Python stack of rank 1\n  File train.py" in text
    assert "no collective hangs" in run_as_text(run(at(0)), (), {})


def test_without_py_spy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert python_stack_text(1) == "py-spy is not installed: pip install py-spy"


def dead(number: int, nbytes: int, op: str = "all_reduce", sequence: int = 7) -> RankSnapshot:
    group = GroupProgress(
        group_id=WORLD, label="world", ranks=(0, 1), sequence=sequence, op=op, nbytes=nbytes
    )
    return rank(number, groups=(group,), alive=False, ended="exception", failed=True)


def test_a_mismatch_that_the_backend_ended_is_told_from_the_record() -> None:
    """gloo raises on both ranks; nothing is in flight any more."""
    (hang,) = found(dead(0, 64), dead(1, 128))
    assert (hang.kind, hang.seconds, hang.sequence) == ("mismatched sizes", 0.0, 7)
    told = [f for f in advise(run(dead(0, 64), dead(1, 128))) if f.rule == "collective_mismatch"]
    assert told[0].text == (
        "all_reduce #7 of group world (64 B) broke off: mismatched sizes in world: "
        "rank 0 called all_reduce (64 B), rank 1 called all_reduce (128 B)"
    )
    (hang,) = found(dead(0, 64), dead(1, 64, "broadcast"))
    assert hang.kind == "mismatched operations"


def test_deaths_for_other_reasons_are_no_mismatch() -> None:
    assert found(dead(0, 64), dead(1, 64)) == ()
    assert found(dead(0, 64), dead(1, 128, sequence=6)) == ()
    assert found(dead(0, 64, "gather"), dead(1, 128, "gather")) == ()


def test_a_send_without_an_answer_accuses_no_member() -> None:
    """Only two ranks take part in it: the others have not missed it."""
    ranks = [at(0, entry("send", -5), members=(0, 1, 2)), at(1), at(2)]
    (hang,) = found(*ranks)
    assert (hang.kind, hang.waiting, hang.missing) == ("its peer has not answered", (0,), ())
    text = next(f.text for f in advise(run(*ranks, taken_ns=NOW)) if "in_flight" in f.rule)
    assert text.startswith("send #5 of group world")


def test_of_a_group_only_the_oldest_hang_is_told() -> None:
    """DDP has several buckets in flight; the second waits for the first."""
    later = entry(sequence=8, issued_ns=NOW - 19_000_000_000)
    (hang,) = found(at(0, later, entry(), world=8), at(1))
    assert (hang.sequence, hang.missing) == (7, (1,))


def test_members_at_different_numbers_are_not_all_inside() -> None:
    """One is past the call in which the other waits: each is named with its own."""
    past = at(1, entry(sequence=9, issued_ns=NOW - 15_000_000_000), world=9)
    whole = run(at(0, entry("barrier", nbytes=0), world=7), past, taken_ns=NOW)
    (hang,) = whole.hangs
    assert hang.kind == "mismatched numbers of calls"
    assert "rank 0 called barrier #7 (0 B), rank 1 called all_reduce #9 (64 B)" in hang_text(whole, hang)
    gone_on = run(at(0, entry(), world=7), at(1, world=9), taken_ns=NOW)
    assert gone_on.hangs[0].kind == "mismatched numbers of calls"
    assert "rank 1 called an unknown collective #9" in hang_text(gone_on, gone_on.hangs[0])


def test_a_suspended_rank_is_named_after_the_launcher_killed_it() -> None:
    """Its agent was suspended with it, so its last event is old; it has not died before the others."""
    ends = {"alive": False, "failed": True}
    waits = at(0, entry(), world=7, ended="SIGTERM", last_event_ns=NOW, **ends)
    halted = at(1, ended="SIGKILL", halted=Halt.SUSPENDED, last_event_ns=NOW - 20_000_000_000, **ends)
    whole = run(waits, halted, ended=True, taken_ns=2 * NOW)
    (hang,) = whole.hangs
    assert hang_headline(whole, hang) == (
        "hung at step 21 for 20 s: rank 1 never called all_reduce (suspended by a signal)"
    )


def test_a_suspended_rank_waits_for_nobody() -> None:
    """Its peer has left the call in which it was stopped, and waits for it in the next one."""
    behind = at(1, entry(issued_ns=NOW - 21_000_000_000), world=7, halted=Halt.SUSPENDED)
    whole = run(at(0, entry("all_gather", sequence=8), world=8), behind, taken_ns=NOW)
    (hang,) = whole.hangs
    assert (hang.kind, hang.sequence, hang.missing) == ("a member has not come", 8, (1,))
    assert hang_headline(whole, hang) == (
        "all_gather in world is stuck: rank 1 has not called it (suspended by a signal); rank 0 waits"
    )
    assert not found(at(0, world=8), behind), "rank 0 has left it and waits in none"
    both = [at(number, entry(), world=7, halted=Halt.SUSPENDED) for number in (0, 1)]
    assert not found(*both), "the whole job was suspended"


@pytest.mark.parametrize("halt", [Halt.SUSPENDED, Halt.TRACED, Halt.UNRESPONSIVE])
def test_a_rank_that_does_not_run_is_the_one_that_the_others_wait_for(halt: Halt) -> None:
    """Also where a third has left the call already: numbers that differ are then no mistake."""
    members = (0, 1, 2)
    stopped = at(1, entry(), world=7, members=members, halted=halt)
    waits = at(2, entry(), world=7, members=members)
    later = entry("all_gather", sequence=8, issued_ns=NOW - 19_000_000_000)
    past = at(0, later, world=8, members=members)
    for third in (past, at(0, entry(), world=7, members=members)):
        whole = run(third, stopped, waits, taken_ns=NOW)
        (hang,) = whole.hangs
        assert (hang.kind, hang.missing) == ("a member in it does not run", (1,))
        assert f"rank 1 is in it ({halt})" in hang_headline(whole, hang)
        assert 1 not in hang.waiting


def test_all_ranks_in_a_call_that_keeps_the_gil_are_a_hang() -> None:
    held = [at(number, entry(), world=7, halted=Halt.UNRESPONSIVE) for number in (0, 1)]
    assert [hang.kind for hang in found(*held)] == ["all members are in it"]


def test_a_rank_that_stands_still_is_not_called_running() -> None:
    waits = at(0, entry(), world=7, stack=("/home/me/t.py:40 in main",))
    away = at(1, stack=("/home/me/t.py:32 in main",), phase="other")
    assert [state_text(one) for one in (waits, away)] == ["in all_reduce", "at t.py:32"]
    shown = str(_straggler_alerts(run(waits, away, taken_ns=NOW)))
    assert "rank 1 has not called it (at t.py:32)" in shown and "No straggler" not in shown


def test_an_ended_run_is_not_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No collector shows it any more; its record does."""
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    Store().save(run(rank(0), run="over-1", ended=True))
    with pytest.raises(RunNotFound, match="over-1 has ended") as raised:
        find_live_runs("over-1")
    assert raised.value.hint == "zeromon report over-1"
    with pytest.raises(RunNotFound, match="no run matches other"):
        find_live_runs("other")


def test_the_doctor_says_that_a_run_has_ended() -> None:
    over = run(dead(0, 64), dead(1, 64), ended=True)
    assert "  it has ended: zeromon report train-1\n" in run_as_text(over, (), {})


def test_the_doctor_lists_what_slows_a_run() -> None:
    slow = Finding(rule="straggler", code="ZM309", severity=Severity.WARNING, text="late", rank=1)
    text = run_as_text(run(at(0), findings=(slow,)), (), {})
    assert "no collective hangs\n ! rank 1: late\n" in text
