"""Healthy runs are left alone: each example, looked at all along."""

from __future__ import annotations

import pytest
from support import ROOT, TORCHRUN, Node, Result, train_command

from zeromon.advice import OF_TIME
from zeromon.remedies import STARVED
from zeromon.snapshot import Finding, RunSnapshot

pytestmark = pytest.mark.alone

STEPS, QUIET_STEPS = 80, 200
EXAMPLES = ROOT / "examples"
SIZES = "--layers 3 --heads 2 --width 64 --length 128 --batch 6 --log-every 100".split()
CASES = {
    "fsdp2": ["train_gpt.py", "--strategy", "fsdp2"],
    "ddp": ["train_gpt.py", "--strategy", "ddp"],
    "zero3": ["train_gpt_deepspeed.py", "--no-compile"],
}


def warned(node: Node, command: list[str]) -> tuple[Result, dict[str, Finding]]:
    """The run, and each rule that said more than information at any time."""
    found: dict[str, Finding] = {}

    def look(picture: RunSnapshot) -> None:
        found.update({f.rule: f for f in picture.findings if f.severity != "info"})

    result = node.run(command, seen=look, DS_ACCELERATOR="cpu")
    assert result.code == 0, result.output
    look(result.snapshot)
    return result, found


def findings_of(node: Node, case: str, steps: int) -> tuple[set[str], bool]:
    """Rules that warned, and whether the kernel says that ranks lacked CPUs."""
    program, *arguments = CASES[case]
    command = [*TORCHRUN, "2", str(EXAMPLES / program), *arguments, "--steps", str(steps), *SIZES]
    result, found = warned(node, command)
    ranks = result.snapshot.ranks
    assert [rank.steps for rank in ranks] == [steps, steps]
    lacked = max(rank.pressure.most_cpu_wait_ratio for rank in ranks if rank.pressure)
    return set(found), lacked >= STARVED


@pytest.mark.parametrize("case", CASES)
def test_a_healthy_run_is_not_warned_of_anything_but_waiting(node: Node, case: str) -> None:
    """On any machine: on a shared one ranks do wait for each other, and are told so."""
    found, starved = findings_of(node, case, STEPS)
    assert found - OF_TIME <= ({"cpu_starved"} if starved else set()), found


@pytest.mark.quiet
@pytest.mark.parametrize("case", CASES)
def test_a_healthy_run_on_a_quiet_machine_is_not_warned_of_anything(node: Node, case: str) -> None:
    found, starved = findings_of(node, case, QUIET_STEPS)
    assert found <= ({"cpu_starved"} if starved else set()), found


def test_the_same_look_sees_a_run_that_is_not(node: Node) -> None:
    """A fault that has nothing to do with time, so that a busy machine does not hide it."""
    command = train_command(2, "whole_model_unit", "before", "30", program="advised.py")
    assert "whole_model_unit" in warned(node, command)[1]
