"""Healthy runs are left alone: each example, looked at all along."""

from __future__ import annotations

import inspect
import os

import pytest
from recordings import replay
from support import LAUNCH, ROOT, Node, Result, train_command

from zeromon.diagnosis.rules import all_rules
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.levels import CPU_WAIT

STEPS, QUIET_STEPS = 80, 200
EXAMPLES = ROOT / "examples"
SIZES = "--layers 3 --heads 2 --length 128 --log-every 100".split()
SMALL = [*SIZES, "--width", "64", "--batch", "6"]
ENOUGH = [*SIZES, "--width", "128", "--batch", "16"]
"""With SMALL a third of a step is communication, and that is said; here compute is most of it."""
TRUE_OF_IT = {"zero3": {"tiny_collectives", "stage_too_high", "exposed_communication"}}
"""Of a model that any device could hold whole: its gathers are many, small, and for nothing."""
SPARE_CPUS = (os.cpu_count() or 1) >= 4
"""Else what the collector and the launcher take makes one of two ranks the slower."""
WAITING = {rule.name for rule in all_rules() if "Waits(" in inspect.getsource(rule.function)}
CASES = {
    "fsdp2": ["train_gpt.py", "--strategy", "fsdp2"],
    "ddp": ["train_gpt.py", "--strategy", "ddp"],
    "zero3": ["train_gpt_deepspeed.py", "--no-compile"],
}


def warned(node: Node, command: list[str]) -> tuple[Result, dict[str, Finding]]:
    """The run, and each rule that said more than information at any time."""
    found: dict[str, Finding] = {}

    def look(snapshot: RunSnapshot) -> None:
        found.update({f.rule: f for f in snapshot.findings if f.severity != "info"})

    extra = {"DS_ACCELERATOR": "cpu"} if "deepspeed" in " ".join(command) else {}
    result = node.run(command, seen=look, **extra)
    assert result.code == 0, result.output
    look(result.snapshot)
    return result, found


def findings_of(node: Node, case: str, steps: int, sizes: list[str]) -> tuple[set[str], bool]:
    """Rules that warned, and whether the kernel says that ranks lacked CPUs."""
    program, *arguments = CASES[case]
    command = [*LAUNCH, "2", str(EXAMPLES / program), *arguments, "--steps", str(steps), *sizes]
    result, found = warned(node, command)
    ranks = result.snapshot.ranks
    assert [rank.steps.watched_steps for rank in ranks] == [steps, steps]
    lacked = max(rank.machine.pressure.held_cpu_wait_ratio for rank in ranks if rank.machine.pressure)
    return set(found), lacked >= CPU_WAIT.warning


@pytest.mark.alone
def test_a_healthy_run_is_not_warned_of_anything_but_waiting(node: Node) -> None:
    """On any machine: on a shared one ranks do wait for each other, and are told so."""
    found, starved = findings_of(node, "fsdp2", STEPS, SMALL)
    assert found - WAITING <= ({"cpu_starved"} if starved else set()), found


@pytest.mark.parametrize("case", ["ddp", "zero3"])
def test_a_healthy_recording_is_not_warned_of_anything_but_waiting(node: Node, case: str) -> None:
    snapshot = replay(node, f"healthy-{case}").snapshot
    assert [rank.steps.watched_steps for rank in snapshot.ranks] == [STEPS, STEPS]
    assert {f.rule for f in snapshot.findings if f.severity != "info"} - WAITING == set()


@pytest.mark.quiet
@pytest.mark.parametrize("case", CASES)
def test_a_healthy_run_on_a_quiet_machine_is_not_warned_of_anything(node: Node, case: str) -> None:
    found, starved = findings_of(node, case, QUIET_STEPS, ENOUGH)
    known = TRUE_OF_IT.get(case, set()) | (set() if SPARE_CPUS else {"straggler"})
    assert found - known <= ({"cpu_starved"} if starved else set()), found


@pytest.mark.alone
def test_the_same_look_sees_a_run_that_is_not(node: Node) -> None:
    """A fault that has nothing to do with time, so that a busy machine does not hide it."""
    command = train_command(2, "whole_model_unit", "before", "30", program="advised.py")
    assert "whole_model_unit" in warned(node, command)[1]
