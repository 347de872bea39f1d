"""The schedule of a step: what waits for what under each framework, by hand-made cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeromon.memory.seconds import AFTER, Hides, Rates, exposed_by_unit
from zeromon.memory.spec import Precision, ShardPlan, Sizes, ZeroStage

GIGA = 10**9
SIZES = Sizes(
    numel=4 * GIGA, trainable=4 * GIGA, shard_numel=2 * GIGA, trainable_shard_numel=2 * GIGA,
    layer_numel=GIGA,
)  # fmt: skip
"""Four units of 1 G elements; on two ranks in bf16 a gather sends 1 GB, as a reduce-scatter does."""
RATES = Rates(
    forward=8.0, backward=16.0, gather=1e9, reduce=1e9, between=1e9, latency=0.0, hides=Hides.STREAMS
)  # fmt: skip


def total(rates: Rates = RATES, sizes: Sizes = SIZES, **changes: Any) -> float:
    given: dict[str, Any] = {"stage": ZeroStage.PARAMETERS, "framework": "fsdp2", "ranks": 2}
    return sum(exposed_by_unit(sizes, ShardPlan(**(given | changes)), rates).values())


def test_fsdp2_exposes_the_first_gathers_and_the_last_reduction() -> None:
    """Compute of 2 s a unit hides each gather of 1 s but the first of each pass."""
    found = exposed_by_unit(
        SIZES, ShardPlan(stage=ZeroStage.PARAMETERS, framework="fsdp2", ranks=2), RATES
    )
    assert found == pytest.approx({"unit 0": 1.0 + 1.0, "unit 3": 1.0})


def test_without_prefetch_every_gather_is_exposed() -> None:
    """In backward behind the reduction of the unit before, because they share a link."""
    assert total(prefetch_units=0) == pytest.approx(4 + 4 + 4)


def test_prefetch_that_a_script_asks_for_hides_on_a_cpu_too() -> None:
    on_cpu = replace(RATES, hides=Hides.THREADS)
    assert total(on_cpu) == pytest.approx(4 + 4 + 4)
    assert total(on_cpu, prefetch_units=1) == pytest.approx(1 + 1 + 4)


def test_links_that_are_slower_than_compute_are_the_bottleneck() -> None:
    """A gather of 4 s a unit: forward takes 16 s and the last unit's compute, backward 32 s."""
    slow = replace(RATES, gather=0.25e9, reduce=0.25e9)
    assert total(slow) == pytest.approx((4 * 4 + 2 - 8) + (8 * 4 - 16), rel=0.2)


def test_parameters_that_stay_gathered_are_gathered_once_a_micro_step() -> None:
    kept = total(replace(RATES, hides=Hides.NOTHING), stage=ZeroStage.GRADIENTS, accumulation=3)
    assert kept == pytest.approx(3 * (4 + 4))


def test_gradients_that_accumulate_are_reduced_once() -> None:
    nothing = replace(RATES, hides=Hides.NOTHING)
    assert total(nothing, accumulation=2) == pytest.approx(2 * 12)
    assert total(nothing, accumulation=2, reduces_each=False) == pytest.approx(2 * 12 - 4)
    assert total(nothing, accumulation=2, framework="ddp", stage=ZeroStage.NONE) == pytest.approx(8)


def test_the_root_unit_is_gathered_alone_and_its_reduction_comes_last() -> None:
    rooted = replace(SIZES, root_numel=2 * GIGA)
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, framework="fsdp2", ranks=2)
    found = exposed_by_unit(rooted, plan, RATES)
    assert found["(root)"] >= 2.0 + 2.0  # its gather before, its reduction after all others


@pytest.mark.parametrize(("cap", "seconds"), [(8 * GIGA, 8.0), (2 * GIGA, 2.0), (GIGA, 1.0)])
def test_ddp_exposes_its_last_bucket(cap: int, seconds: float) -> None:
    """8 GB of gradients, 1 s each to reduce; 16 s of backward hide all but the last bucket."""
    found = total(framework="ddp", stage=ZeroStage.NONE, bucket_cap_bytes=cap)
    assert found == pytest.approx(seconds, rel=0.01)


def test_zero_2_without_overlap_waits_for_each_bucket_and_gathers_after_the_step() -> None:
    """An all-reduce of 8 s, then a gather of 4 s; overlap leaves one of eight buckets."""
    changes = {"framework": "deepspeed", "stage": ZeroStage.GRADIENTS, "grad_bucket_numel": GIGA // 2}
    assert total(**changes) == pytest.approx(8 + 4)
    assert total(grad_buckets=2, **changes) == pytest.approx(1 + 4)
    plan = ShardPlan(ranks=2, **changes)  # type: ignore[arg-type]
    assert exposed_by_unit(SIZES, plan, RATES)[AFTER] == pytest.approx(4)


def test_zero_3_gathers_as_far_ahead_as_its_prefetch_bucket() -> None:
    """With reduce buckets of a unit."""
    changes = {"framework": "deepspeed", "grad_bucket_numel": GIGA}
    assert total(prefetch_numel=0, **changes) == pytest.approx(4 + 4 + 4)
    assert total(prefetch_numel=GIGA, **changes) == pytest.approx(1 + 1 + 1)


def test_a_latency_counts_for_each_call() -> None:
    nothing = replace(RATES, hides=Hides.NOTHING, latency=0.5)
    assert total(nothing) == pytest.approx(12 + 12 * 0.5)


def test_copies_of_hybrid_sharding_add_an_all_reduce_of_the_shards() -> None:
    nothing = replace(RATES, hides=Hides.NOTHING)
    hybrid = total(nothing, ranks=4, shard_ranks=2)
    assert hybrid == pytest.approx(12 + 4)


def test_one_rank_sends_nothing() -> None:
    assert exposed_by_unit(SIZES, ShardPlan(stage=ZeroStage.PARAMETERS, ranks=1), RATES) == {}


def test_gradients_in_fp32_take_twice_as_long_to_reduce() -> None:
    nothing = replace(RATES, hides=Hides.NOTHING)
    assert total(nothing, precision=Precision.policy()) == pytest.approx(4 + 4 + 8)


def test_thousands_of_buckets_keep_the_latency_of_each() -> None:
    """8 s of bytes, and 8,000 calls of 1 ms, as if each were sent by itself."""
    slow = replace(RATES, hides=Hides.NOTHING, latency=1e-3)
    many = {"framework": "deepspeed", "stage": ZeroStage.OPTIMIZER, "grad_bucket_numel": 500_000}
    assert total(slow, **many) == pytest.approx(8 + 8 + 4, rel=0.01)
