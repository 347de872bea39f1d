"""What differs in the environments of runs, and what is not known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import rank, run

from zeromon.comparison.environment import Difference, environments_of, of_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.rank import Setting

CLEAN, OTHER = "a" * 40, "b" * 40
COMMAND = ("torchrun", "--nproc-per-node", "2", "train.py")


def recorded(revision: str = CLEAN, *more: str, torch: str = "2.13.0", **variables: str) -> RunSnapshot:
    process: Any = {"packages": {"python": "3.11", "torch": torch}, "variables": variables}
    command = (*COMMAND, *more)
    return run(rank(0, process=process, device="cpu"), revision=revision, command=command)


def differences(*runs: RunSnapshot) -> dict[str, tuple[str, ...]]:
    found = environments_of([[one] for one in runs])
    return {row.name: row.values for row in found.differences}


def test_only_what_differs_is_named() -> None:
    first, second = (recorded(OMP_NUM_THREADS="1"), recorded(OTHER, torch="2.15.0", NCCL_DEBUG="INFO"))
    assert differences(first, second) == {
        "git commit": ("a" * 12, "b" * 12),
        "torch": ("2.13.0", "2.15.0"),
        "OMP_NUM_THREADS": ("1", "not set"),
        "NCCL_DEBUG": ("not set", "INFO"),
    }
    alike = environments_of([[first], [first]])
    assert (alike.differences, alike.same) == ((), 5)  # commit, device, python, torch, one variable


def test_a_command_differs_by_its_options() -> None:
    found = differences(recorded(CLEAN, "--lr", "0.1", "--fp16"), recorded(CLEAN, "--lr", "0.2"))
    assert found == {"command": ("--lr 0.1 --fp16", "--lr 0.2")}


def test_settings_of_deepspeed_differ_by_their_effective_values() -> None:
    """Only where all runs have settings: else the strategy tells."""
    first, second = (
        replace(
            recorded(),
            ranks=(
                rank(
                    0,
                    settings=tuple(
                        Setting(engine=0, name=name, effective=value, written="")
                        for name, value in values.items()
                    ),
                ),
            ),
        )
        for values in ({"zero.stage": "1", "a": "x"}, {"zero.stage": "3", "a": "x", "b": "y"})
    )
    assert differences(first, second) == {"zero.stage": ("1", "3"), "b": ("not set", "y")}
    assert "zero.stage" not in differences(first, recorded())


def test_two_working_copies_with_changes_are_not_called_the_same() -> None:
    changed = recorded(CLEAN + "-dirty")
    assert differences(changed, changed) == {"git commit": ("a" * 12 + " with changes",) * 2}


def test_repeats_show_each_of_their_values() -> None:
    found = environments_of([[recorded(), recorded(torch="2.15.0")], [recorded()]])
    assert found.differences == (Difference(name="torch", values=("2.13.0 / 2.15.0", "2.13.0")),)


def test_a_record_without_environment_is_unknown_and_not_the_same() -> None:
    old = replace(recorded(), ranks=(rank(0),))
    found = environments_of([[recorded()], [old]])
    assert of_run(old) == {}
    assert (found.same, found.unknown) == (0, (1,))
    assert all(row.values[1] == "n/a" for row in found.differences)
