"""Rules on what the training itself shows: NaN by rank, spikes, equal batches, different parameters."""

from __future__ import annotations

from typing import Any

import pytest
from builders import changed, device_memory, rank, run, step, summary
from evidence import FIRES, IN_BF16, MODEL, found, normed, one, row

from zeromon.diagnosis.engine import advise
from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.codes import Scalar
from zeromon.ring.events import Precision, ScalarValue
from zeromon.ring.model_metadata import ProcessMetadata
from zeromon.snapshot import Finding, RankSnapshot, Severity
from zeromon.snapshot.communication import Dimension
from zeromon.snapshot.host import Device
from zeromon.snapshot.rank import Setting
from zeromon.snapshot.step import ScalarRow

NAN, INF = float("nan"), float("inf")


def of_run(rule: str, *ranks: RankSnapshot) -> Finding | None:
    return next((f for f in advise(run(*ranks)) if f.rule == rule), None)


# ---- the fold -------------------------------------------------------------------------------------


def test_a_value_belongs_to_its_step_also_when_it_comes_after_it() -> None:
    """The learning rate is written when it changes; a value of the step under way is that step's."""
    state = RankState()
    for event in (
        ScalarValue(1, Scalar.LEARNING_RATE, 0.1, 1),
        step(1, 0, 10),
        ScalarValue(2, Scalar.LOSS, 3.0, 1),
        ScalarValue(3, Scalar.LOSS, 2.5, 2),
        ScalarValue(4, Scalar.GRAD_NORM, NAN, 2),
        step(2, 10, 20),
    ):
        fold_event(state, event)
    steps = [(s.loss, s.grad_norm, s.learning_rate) for s in summarize_rank(state).steps.recent]
    assert steps == [(3.0, None, 0.1), (2.5, None, 0.1)]
    rows = {row.name: row for row in summarize_rank(state).training.scalars}
    assert (rows["loss"].value, rows["loss"].step, rows["loss"].nonfinite) == (2.5, 2, 0)
    norm = rows["grad_norm"]
    assert (norm.value, norm.nonfinite, norm.first_nonfinite_step) == (None, 1, 2)


def test_deepspeeds_norm_is_one_of_them_but_not_where_the_loss_scale_is_tried() -> None:
    state = RankState()
    fold_event(state, Precision(1, 1, NAN, -1, 1.5))
    fold_event(state, step(1, 0, 10))
    fold_event(state, Precision(2, 1, 65536.0, 2, INF))
    fold_event(state, step(2, 10, 20))
    assert [s.grad_norm for s in summarize_rank(state).steps.recent] == [1.5, None]
    assert summarize_rank(state).training.scalars[0].nonfinite == 0
    fold_event(state, Precision(3, 1, NAN, -1, INF))
    assert summarize_rank(state).training.scalars[0].nonfinite == 1


# ---- NaN ------------------------------------------------------------------------------------------


def broken(number: int, since: int, *, name: str = "loss", now: float | None = None) -> RankSnapshot:
    """A rank of two whose loss is not finite from step *since* on; 0: it is."""
    of = ScalarRow(
        name=name, value=now if since else 2.0, step=30, nonfinite=max(0, 31 - since) if since else 0,
        first_nonfinite_step=since,
    )  # fmt: skip
    return rank(number, world_size=2, scalars=(of,))


@pytest.mark.parametrize(
    ("ranks", "at", "says"),
    [
        ((broken(0, 12), broken(1, 11)), 1, "on rank 1 first; rank 0 follows in step 12"),
        ((broken(0, 0), broken(1, 11)), 1, "since step 11, on rank 1 first; 20 steps"),
        ((broken(0, 11), broken(1, 11)), -1, "on 2 ranks in the same step"),
        ((broken(0, 11), rank(1, world_size=2)), 0, "only 1 of 2 ranks report it"),
    ],
)
def test_the_first_rank_with_nan_is_named_as_far_as_it_is_known(
    ranks: tuple[RankSnapshot, ...], at: int, says: str
) -> None:
    finding = of_run("not_finite", *ranks)
    assert finding is not None and says in finding.text
    assert (finding.rank, finding.severity) == (at, Severity.CRITICAL)


def test_a_loss_that_is_finite_again_is_less_urgent_and_skipped_steps_are_no_finding() -> None:
    again = of_run("not_finite", broken(0, 11, now=2.0), broken(1, 0))
    assert again is not None and again.severity == Severity.WARNING
    assert of_run("not_finite", broken(0, 0), broken(1, 0)) is None
    norm = broken(0, 11, name="grad_norm")
    assert of_run("not_finite", norm) is not None
    assert of_run("not_finite", changed(norm, process={"autocast": "float16"})) is None


# ---- spikes ---------------------------------------------------------------------------------------


def test_a_spike_is_compared_with_the_past_alone() -> None:
    """A norm that falls from the start has none; nor has one that stays where it jumped to."""
    falling = tuple(summary(n, grad_norm=100.0 / n) for n in range(1, 60))
    assert found(one(recent=falling), "grad_norm_spikes") is None
    several = found(normed(30, 40, 50), "grad_norm_spikes")
    assert several is not None and "3 such steps of the last 60" in several.text
    assert several.severity == Severity.WARNING
    assert found(normed(5), "grad_norm_spikes") is None  # too early to judge


@pytest.mark.parametrize(
    ("facts", "diff"),
    [
        ({}, "+ torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        ({"strategy": "deepspeed-zero2"}, '+ "gradient_clipping": 1.0'),
        (
            {
                "process": {"clip_norm": 1.0},
                "scalars": (
                    ScalarRow(
                        name="learning_rate", value=3e-4, step=60, nonfinite=0, first_nonfinite_step=0
                    ),
                ),
            },
            "- learning_rate: 0.0003\n+ learning_rate: 0.00015",
        ),
    ],
)
def test_gradients_are_clipped_and_clipped_ones_get_a_lower_rate(
    facts: dict[str, Any], diff: str
) -> None:
    finding = found(normed(40, **facts), "grad_norm_spikes")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == diff
    limit = "clipped to 1" if "process" in facts else "clipping unknown"
    assert limit in finding.text


# ---- what ranks begin with ------------------------------------------------------------------------


def beginner(number: int, marks: tuple[int, ...] = (1, 2, 3), **facts: Any) -> RankSnapshot:
    loader: Any = {"sampler": "RandomSampler"}
    given: dict[str, Any] = {"world_size": 2, "first_batches": marks, "loader": loader}
    return rank(number, **(given | facts))


def test_ranks_that_read_the_same_batches_are_told() -> None:
    finding = of_run("same_samples", beginner(0), beginner(1))
    assert finding is not None and finding.remedy is not None
    assert "2 of 2 ranks (0, 1) are the same (RandomSampler)" in finding.text
    assert "DistributedSampler(data)" in finding.remedy.diff


@pytest.mark.parametrize(
    "facts",
    [
        {"marks": (7, 7, 7)},  # constant test data
        {"marks": ()},  # unknown
        {"dimensions": (Dimension(name="tp", size=2, nodes=1, used=True),)},
        {"strategy": "unknown"},  # nobody knows how the ranks divide a batch
    ],
)
def test_ranks_that_may_read_the_same_batches_are_not_accused(facts: dict[str, Any]) -> None:
    assert of_run("same_samples", beginner(0, **facts), beginner(1, **facts)) is None


def test_ranks_that_read_batches_of_their_own_are_silent() -> None:
    assert of_run("same_samples", beginner(0), beginner(1, (1, 2, 4))) is None


def started(number: int, mark: int | None, **facts: Any) -> RankSnapshot:
    process: ProcessMetadata = {"params_bytes": 400}
    if mark is not None:
        process["params_mark"] = mark
    given: dict[str, Any] = {"world_size": 2, "strategy": "ddp", "process": process}
    return rank(number, **(given | facts))


def test_ranks_that_begin_with_different_parameters_are_told() -> None:
    finding = of_run("initial_parameters_differ", started(0, 5), started(1, 6))
    assert finding is not None and finding.remedy is not None
    assert finding.text == "rank 1 began with other parameters than rank 0"
    assert "dist.broadcast" in finding.remedy.diff
    for other in (started(1, 5), started(1, None)):  # equal; on a device
        assert of_run("initial_parameters_differ", started(0, 5), other) is None
    experts = (Dimension(name="ep", size=2, nodes=1, used=True),)  # each rank has experts of its own
    parts = (started(n, n, dimensions=experts) for n in (0, 1))
    assert of_run("initial_parameters_differ", *parts) is None
    shards = (started(n, n, strategy="fsdp2") for n in (0, 1))
    assert of_run("initial_parameters_differ", *shards) is None


@pytest.mark.parametrize(("sent", "fires"), [(400.0, True), (40.0, False)])
def test_a_loop_of_ones_own_is_judged_where_it_averages_its_gradients(sent: float, fires: bool) -> None:
    calls = row("all_reduce", "", "other", group_size=2, nbytes=sent)
    ranks = [started(n, n, strategy="unknown", traffic=(calls,)) for n in (0, 1)]
    assert (of_run("initial_parameters_differ", *ranks) is not None) == fires


# ---- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts", "diff"),
    [
        ("Tesla T4", {}, "+ MixedPrecisionPolicy(param_dtype=torch.float16)"),
        ("Tesla V100-PCIE-16GB", {"strategy": "fsdp1-full"}, "+ scaler = ShardedGradScaler()"),
        ("Tesla T4", {"strategy": "deepspeed-zero2"}, '+ "fp16": {"enabled": true}'),
        (
            "Tesla T4",
            {"process": {"autocast": "bfloat16"}, "models": (MODEL,), "device": "cuda:0"},
            '+ with torch.autocast("cuda", dtype=torch.float16):',
        ),
    ],
)
def test_bf16_is_told_on_devices_without_it(name: str, facts: dict[str, Any], diff: str) -> None:
    given = {"machine_device": Device(name=name), "models": IN_BF16} | facts
    finding = found(one(**given), "bf16_emulated")
    assert finding is not None and finding.remedy is not None
    assert diff in finding.remedy.diff and name in finding.text
    for other in ("NVIDIA RTX A4000", "NVIDIA L4", "NVIDIA H100 80GB HBM3", ""):
        assert found(one(**given | {"machine_device": Device(name=other)}), "bf16_emulated") is None


OFF = Setting(engine=1, name="zero_optimization.contiguous_gradients", effective="false", written="")
SCATTERED: dict[str, Any] = {"memory_device": device_memory(), "settings": (OFF,)}


def test_gradients_that_are_not_contiguous_are_told_where_an_allocator_caches() -> None:
    scattered = one(strategy="deepspeed-zero2", **SCATTERED)
    finding = found(scattered, "fragmentation")
    assert finding is not None and finding.remedy is not None
    assert '+ "contiguous_gradients": true' in finding.remedy.diff
    assert finding.severity == Severity.INFO
    assert found(changed(scattered, memory_device=None), "fragmentation") is None


@pytest.mark.parametrize(
    "strategy", ["deepspeed-zero0", "deepspeed-zero1-offload", "deepspeed-zero2-offload"]
)
def test_gradients_are_contiguous_whatever_the_setting_where_deepspeed_decides(strategy: str) -> None:
    """Below stage 3 DeepSpeed turns it on with an offloaded optimizer; stage 0 does not read it."""
    assert found(one(strategy=strategy, **SCATTERED), "fragmentation") is None


def test_measured_fragmentation_is_told_before_a_setting_that_may_cause_it() -> None:
    """On the same rank, and on a later one."""
    setting = one(strategy="deepspeed-zero2", **SCATTERED)
    fragmented = changed(FIRES["fragmentation"], rank=1)
    both = changed(fragmented, rank=0, **SCATTERED)
    for ranks in ((both,), (setting, fragmented)):
        finding = of_run("fragmentation", *ranks)
        assert finding is not None
        assert (finding.rank, finding.severity) == (ranks[-1].rank, Severity.WARNING)
        assert "not allocated" in finding.text
