"""Advice on real runs: a rule fires, its diff is applied, the finding is gone, the step is shorter.

What was predicted stands beside what was achieved in docs/evidence/accuracy.md
(tests/bench/bench_advice.py); here, on a machine with other work, only the sign and the order of
magnitude are held.
"""

from __future__ import annotations

import statistics

import pytest
from recordings import replay
from support import Node, train_command

from zeromon.memory.plan import shorter_step_by
from zeromon.memory.spec import ZeroStage
from zeromon.snapshot import Finding, RunSnapshot

STEPS = 30


def ran(node: Node, case: str, state: str, steps: int = STEPS, ranks: int = 2) -> RunSnapshot:
    command = train_command(ranks, case, state, str(steps), program="advised.py")
    result = node.run(command, **({"DS_ACCELERATOR": "cpu"} if case == "loss_scale_settings" else {}))
    assert result.code == 0, result.output
    return result.snapshot


def told(run: RunSnapshot, rule: str) -> Finding | None:
    return next((f for f in run.findings if f.rule == rule), None)


def step_seconds(run: RunSnapshot) -> float:
    return statistics.median(rank.steps.median_seconds or 0.0 for rank in run.ranks)


@pytest.mark.alone
def test_what_it_says_to_change_shortens_the_step(node: Node) -> None:
    rule = "tiny_collectives"
    before, after = ran(node, rule, "before"), ran(node, rule, "after")
    shortens_the_step(rule, before, after)
    for rank in before.ranks:  # what nothing is advised against
        assert rank.config.process.get("threads") == 1 and rank.config.process.get("autocast") == ""
        assert rank.config.process.get("variables", {}).get("OMP_NUM_THREADS") == "1"
    caps = [run.ranks[0].config.models[0].get("bucket_cap_bytes") for run in (before, after)]
    assert caps == [1048, 25 << 20]


def test_workers_for_the_loader_shorten_the_step(node: Node) -> None:
    runs = (replay(node, f"advised-data-{state}").snapshot for state in ("before", "after"))
    shortens_the_step("data_wait", *runs)


def test_parameters_that_stay_gathered_shorten_the_step(node: Node) -> None:
    """The gain is that of the engine, which knows resharding."""
    before, after = (replay(node, f"advised-reshard-{state}").snapshot for state in ("before", "after"))
    shortens_the_step("reshard_without_need", before, after)
    finding = told(before, "reshard_without_need")
    likely = shorter_step_by(before, stage=ZeroStage.GRADIENTS, reshards=False)
    assert finding is not None and finding.remedy is not None and likely is not None
    assert finding.remedy.gain_low_seconds == pytest.approx(0.6 * likely)


def shortens_the_step(rule: str, before: RunSnapshot, after: RunSnapshot) -> None:
    finding = told(before, rule)
    assert finding is not None and finding.remedy is not None
    assert told(after, rule) is None
    low, high = finding.remedy.gain_low_seconds, finding.remedy.gain_high_seconds
    assert low is not None and high is not None
    achieved = step_seconds(before) - step_seconds(after)
    assert 0.25 * low < achieved < 4 * high


def test_units_a_layer_free_what_the_whole_model_took(node: Node) -> None:
    before, after = (replay(node, f"advised-units-{state}").snapshot for state in ("before", "after"))
    finding = told(before, "whole_model_unit")
    assert finding is not None and finding.remedy is not None
    assert told(after, "whole_model_unit") is None
    freed = before.ranks[0].memory.unsharded_peak_bytes - after.ranks[0].memory.unsharded_peak_bytes
    assert finding.remedy.frees_bytes == pytest.approx(freed, rel=0.05)


def test_a_loss_scale_that_is_tried_too_often_is_no_storm(node: Node) -> None:
    """By DeepSpeed's own scaler: 11 steps without an overflow, then 2 that are skipped."""
    run = ran(node, "loss_scale_settings", "before", 60, ranks=1)
    finding = told(run, "loss_scale_settings")
    assert finding is not None and finding.remedy is not None
    assert run.ranks[0].steps.skipped_steps == 8
    assert "15.4 %" in finding.text  # 2 of 13
    assert finding.remedy.diff == '- "loss_scale_window": 10\n+ "loss_scale_window": 1000'
    assert told(run, "overflow_storm") is None
