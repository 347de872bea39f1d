"""How programs of others are compared; the programs themselves run in `make test-programs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs.others import judge, table
from programs.others.judge import Outcome

HERE = str(Path(judge.__file__).parent)


def outcome(**given: Any) -> Outcome:
    return Outcome(**{"code": 0, "lines": [], "steps": {}, "calls": {}} | given)


def report(*, count: int = 3, strategy: str = "ddp", **given: Any) -> dict[str, Any]:
    rows = [{"op": "all_reduce", "count": count - 1}, {"op": "all_reduce", "count": 1}]
    rank = {
        "rank": 0,
        "strategy": strategy,
        "status": {"failed": given.get("failed", False)},
        "steps": {"watched_steps": 2},
        "agent": {"errors": given.get("errors", 0), "dropped": given.get("dropped", 0)},
        "communication": {
            "collectives": given.get("collectives", rows),
            "unattributed": given.get("unattributed", {}),
        },
    }
    return {"ranks": [rank], "attempt": 1}


def test_what_changes_from_run_to_run_is_no_difference() -> None:
    one = "b at 0x7f00aa11, took 3.25 s\n\n 10%|# | 1\r100%|##| 2\nloss 1.5 {'train_runtime': 1.2}\n"
    other = "loss 1.5 {'train_runtime': 9}\nb at 0x7f00bb22, took 4 s\n"
    assert judge.normal(one, {}) == judge.normal(other, {})
    assert judge.normal("loss 1.5", {}) != judge.normal("loss 1.6", {})
    assert judge.normal("saved /tmp/a/x", {"/tmp/a": "<work>"}) == ["saved <work>/x"]


def test_lines_of_two_ranks_may_come_in_any_order() -> None:
    found = judge.judge_output(outcome(lines=["a", "b"]), outcome(lines=["a", "c"]))
    assert found == "2 lines differ"
    assert judge.changed(["a", "b"], ["a", "c"]) == ["- b", "+ c"]
    assert judge.normal("b\na\n", {}) == judge.normal("a\nb\n", {})


def test_parameters_are_compared_after_each_step_of_the_last_attempt() -> None:
    bare = outcome(steps={"0.0": ["a", "x"], "0.1": ["b", "c"], "1.1": ["b", "d"]})
    same = outcome(steps={"0.0": ["a"], "0.1": ["b", "c"], "1.1": ["b", "d"]})
    assert judge.judge_steps(bare, same) == "ok 4"
    other = outcome(steps={"0.1": ["b", "c"], "1.1": ["b", "e"]})
    assert judge.judge_steps(bare, other) == "differ on rank 1 from step 2"
    fewer = outcome(steps={"0.1": ["b"], "1.1": ["b", "d"]})
    assert judge.judge_steps(bare, fewer) == "[2, 2] steps without, [1, 2] with"
    assert judge.judge_steps(outcome(), outcome()) == "ok none"


def test_collectives_are_held_against_the_count_without_zeromon() -> None:
    calls = {"0.0": {"c10d::allreduce_": 9}, "0.1": {"c10d::allreduce_": 3, "c10d::check_for_nan": 2}}
    bare = outcome(calls=calls)
    assert judge.judge_collectives(bare, report()) == "ok all_reduce 3"
    assert judge.judge_collectives(bare, report(count=2)) == "rank 0 all_reduce: 2 of 3"
    more = report(unattributed={"world": 1})
    assert judge.judge_collectives(bare, more) == "rank 0 unknown: 1 of 0"
    unnamed = report(count=2, unattributed={"world": 1})
    assert judge.judge_collectives(bare, unnamed) == "ok all_reduce 3, of which 1 without a name"
    assert judge.judge_collectives(outcome(), report()) == "nobody counted"
    assert judge.judge_collectives(bare, {"ranks": []}) == "rank 0 all_reduce: 0 of 3"
    other = report(unattributed={"world": 1}, collectives=[{"op": "broadcast", "count": 2}])
    assert not judge.judge_collectives(bare, other).startswith("ok")


def test_the_report_must_tell_strategy_steps_and_attempts() -> None:
    assert judge.judge_strategy(report(), "ddp", 2, 1) == "ok ddp, 2 steps"
    assert judge.judge_strategy(report(), "fsdp2", 2, 1).startswith("reports [('ddp', 2)]")
    assert judge.judge_strategy(report(), "ddp", 2, 2) == "reports attempt 1, not 2"
    assert judge.judge_strategy(report() | {"attempt": 2}, "ddp", 2, 2) == "ok ddp, 2 steps, 2 attempts"


def test_a_failed_hook_a_lost_record_and_a_missing_rank_are_faults() -> None:
    assert judge.judge_agent(report(), 1) == "ok"
    assert judge.judge_agent(report(), 2) != "ok"
    assert judge.judge_agent(report(errors=1), 1) != "ok"
    assert judge.judge_agent(report(dropped=1), 1) != "ok"
    assert judge.judge_agent(report(failed=True), 1) == "says that [0] failed"


def test_a_program_that_differs_from_itself_is_no_fault_of_zeromon() -> None:
    found = judge.Verdict("ok 0", "2 lines differ", "ok 4", "ok", "ok", "ok", [])
    assert found.faults == ["2 lines differ"]
    assert not found.excused("3 lines differ", "ok 4").faults
    assert found.excused("ok 9 lines", "differ on rank 0 from step 1").faults
    failed = judge.Verdict("1 without, 1 with", "ok 0 lines", "ok none", "ok", "ok", "ok", [])
    assert failed.excused("3 lines differ", "ok none").faults


def test_the_verdict_has_every_part() -> None:
    finding = {"severity": "info", "code": "ZM301", "rule": "late", "rank": 1, "text": "waits"}
    program = table.Program("one", "", "ddp", 2)
    bare = outcome(calls={"0.0": {"c10d::allreduce_": 3}})
    told = report() | {"findings": [finding]}
    good = judge.verdict_of(program, bare, outcome(), told, 1)
    assert (good.faults, good.findings) == ([], ["info ZM301 late, rank 1: waits"])
    died = judge.verdict_of(program, bare._replace(code=1), outcome(code=1), told, 1)
    assert died.faults == ["1 without, 1 with"]
    refused = table.Program("two", "", "", 0, fails="refused")
    assert not judge.verdict_of(refused, outcome(code=1), outcome(code=1), {}, 1).faults
    assert judge.verdict_of(refused, outcome(), outcome(), {}, 1).faults


@pytest.mark.parametrize("program", table.PROGRAMS, ids=lambda program: program.name)
def test_each_program_is_one_command(program: table.Program) -> None:
    words = program.command.format(python="python", here=HERE, port=1).split()
    assert "python" in words
    for word in words:
        assert not word.startswith(HERE) or Path(word).exists(), word


def test_names_are_unique() -> None:
    names = [program.name for program in table.PROGRAMS]
    assert len(set(names)) == len(names)
