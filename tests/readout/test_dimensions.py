"""What a process group is for, by its name; and what views, metrics and figures make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from builders import changed, collective, folded, rank, received, run, state, step
from evidence import found, one, row, units

from zeromon.export.prometheus.metrics import METRICS, rows_of
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.dimensions import by_dimension, dim_exposed, is_worth_showing, untimed_dimensions
from zeromon.readout.report import render_run
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.ring.strategy import Dim, dim_by_name, dim_name_of, parse_dimension_metadata
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import Dimension, GroupProgress
from zeromon.tui.screens.communication import sum_rows_by_field


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        *((text, Dim.TP) for text in (
            "tp", "mesh_tp", "TENSOR_MODEL_PARALLEL_GROUP", "tensor_parallel", "etp",
            "EXPERT_TENSOR_PARALLEL_GROUP")),
        *((text, Dim.PP) for text in ("mesh_pp", "pipe", "PIPELINE_MODEL_PARALLEL_GROUP")),
        *((text, Dim.CP) for text in ("cp", "CONTEXT_PARALLEL_GROUP", "sequence_parallel")),
        *((text, Dim.EP) for text in (
            "ep", "EXPERT_MODEL_PARALLEL_GROUP", "expert_parallel:ep_size_4")),
        *((text, Dim.DP) for text in (
            "dp", "mesh_dp_cp", "zero", "DATA_PARALLEL_GROUP_WITH_CP", "batch",
            "expert_data_parallel:ep_size_4")),
        *((text, Dim.DP_SHARD) for text in ("mesh_dp_shard_cp", "shard", "fsdp", "zero_hpz")),
        *((text, Dim.DP_REPLICATE) for text in ("replicate", "mesh_dp_replicate")),
        *((text, Dim.WORLD) for text in ("world", "default_pg")),
        *((text, Dim.OTHER) for text in (
            "", "dim_0", "mesh_dim_0", "pg7", "TENSOR_AND_DATA_PARALLEL_GROUP", "ep_tp",
            "MODEL_PARALLEL_GROUP", "data loader", "pipeline results", "EMBEDDING_GROUP")),
    ],
)  # fmt: skip
def test_a_name_says_what_the_group_is_for(name: str, dim: Dim) -> None:
    assert dim_by_name(name) is dim


def test_a_group_is_called_as_its_mesh_calls_it_else_by_its_use_else_by_its_description() -> None:
    labels = ("mesh_dp_shard_cp", "TENSOR_MODEL_PARALLEL_GROUP", "gradient sync")
    assert [*map(dim_name_of, labels)] == ["dp_shard_cp", "tp", "gradient sync"]


def test_what_an_agent_of_another_version_sends_is_left_out() -> None:
    good: dict[str, Any] = {"name": "tp", "size": 2, "nodes": 1, "groups": [3], "used": True}
    bad = [None, 3, {}, {**good, "size": "2"}, {**good, "name": None}, {**good, "groups": 1}]
    assert parse_dimension_metadata([*bad, good]) == [good]
    assert parse_dimension_metadata("tp") == []


def folded_rank(*dimensions: dict[str, Any], **groups: tuple[str, int]) -> RankSnapshot:
    """A rank of four with a collective in group 1, and other groups by label and size."""
    made = state(world_size=4, dimensions=[*dimensions])
    made.groups[1]["size"] = 4
    for number, (label, size) in enumerate(groups.values(), 2):
        made.groups[number] = {"label": label, "size": size, "nodes": 1}
    return summarize_rank(folded([*collective(0, 10, 5), step(1, 0, 100), step(2, 100, 200)], made))


def sent(name: str, size: int, *groups: int, used: bool = True) -> dict[str, Any]:
    return {"name": name, "size": size, "nodes": 1, "groups": [*groups], "used": used}


def test_the_world_group_of_a_mesh_has_the_name_that_the_agent_found() -> None:
    seen = folded_rank(sent("tp", 4, 1))
    assert [(c.group, c.dim) for c in seen.communication.collectives] == [("world", "tp")]
    assert [(g.label, g.dim) for g in seen.communication.groups] == [("world", "tp")]
    assert seen.strategy == "fsdp2 + tp" and seen.data_parallel_ranks == 1


def test_a_label_names_the_dimension_where_the_agent_sends_none() -> None:
    seen = folded_rank(tensor=("mesh_tp", 2), pipeline=("PIPELINE_MODEL_PARALLEL_GROUP", 2))
    assert [d.name for d in seen.dimensions] == ["world", "tp", "pp"]
    assert seen.strategy == "fsdp2 + tp + pp" and seen.data_parallel_ranks == 1


def test_an_unused_dimension_and_one_of_a_single_rank_divide_nothing() -> None:
    seen = folded_rank(sent("tp", 2, used=False), sent("cp", 1), sent("dp", 4, 1))
    assert seen.strategy == "fsdp2" and seen.data_parallel_ranks == 4


def test_ranks_of_expert_parallelism_have_samples_of_their_own() -> None:
    seen = folded_rank(sent("ep", 4, 1), sent("cp", 2))
    assert seen.strategy == "fsdp2 + cp + ep" and seen.data_parallel_ranks == 2


def test_without_wrapper_and_mesh_the_data_parallel_size_is_unknown() -> None:
    assert rank(0, strategy="unknown", world_size=4).data_parallel_ranks is None
    assert rank(0, strategy="unknown", world_size=1).data_parallel_ranks == 1
    dims = (Dimension(name="dp", size=4, used=True),)
    assert rank(0, strategy="unknown", world_size=4, dimensions=dims).data_parallel_ranks == 4


def test_of_a_label_alone_the_size_of_tensor_parallelism_is_unknown() -> None:
    assert rank(0, strategy="fsdp2 + tp", world_size=4).data_parallel_ranks is None


def batch(strategy: str, *dimensions: Dimension) -> tuple[float | str, float | str]:
    """The samples and tokens of a step of eight ranks whose models get two of five tokens each."""
    member = rank(0, strategy=strategy, world_size=8, batches=received(2, 5), dimensions=dimensions)
    return samples_per_step(run(member)), tokens_per_step(run(member))


def test_a_batch_counts_the_data_parallel_ranks_only() -> None:
    """Tokens also those of context parallelism, whose ranks have parts of the same samples."""
    tp, dp = Dimension(name="tp", size=4, used=True), Dimension(name="dp", size=2, used=True)
    cp = Dimension(name="cp", size=4, used=True)
    assert batch("fsdp2", dp) == (16, 80)
    assert batch("fsdp2 + tp", tp, dp) == (4, 20)
    assert batch("tp", tp) == (2 * 2, 10 * 2)
    assert batch("fsdp2 + cp", cp, dp) == (4, 80)
    assert batch("pp", Dimension(name="pp", size=8, used=True)) == (2, 10)
    assert "how the ranks divide a batch" in str(batch("unknown"))


TP = Dimension(name="tp", size=2, nodes=1, used=True)
SHARD = Dimension(name="dp_shard", size=4, nodes=2, used=True)
MIXED = one(
    *units("all_gather", "forward", group="mesh_dp_shard", dim="dp_shard"),
    row("all_reduce", "", dim="tp", group="mesh_tp", seconds=0.03, busbw_bytes_per_second=2e9),
    row("all_reduce", "", "backward", dim="tp", group="mesh_tp", busbw_bytes_per_second=6e9),
    dimensions=(TP, SHARD), strategy="fsdp2 + tp",
)  # fmt: skip


def counted(snapshot: RankSnapshot, *, unknown: int = 0) -> RankSnapshot:
    """*snapshot* with totals by group, and collectives of unknown operation in that of tp."""
    made = folded_rank(sent("tp", 4, 1))
    totals = tuple(
        replace(
            made.communication.collectives[0],
            group=f"mesh_{name}",
            dim=name,
            count=90,
            timed=80,
            nodes=1,
        )
        for name in ("tp", "dp_shard")
    )
    groups = tuple(
        GroupProgress(group_id=name, label=f"mesh_{name}", dim=name, ranks=(0, 1), sequence=1)
        for name in ("tp", "dp_shard")
    )
    return changed(snapshot, collectives=totals, groups=groups, unattributed={"mesh_tp": unknown})


def test_bandwidth_and_exposed_time_of_a_dimension_are_of_all_its_rows() -> None:
    first, second = by_dimension(counted(MIXED))
    assert (first.dimension, second.dimension) == (SHARD, TP)
    assert first.exposed_seconds == pytest.approx(0.04)
    assert second.busbw_bytes_per_second == pytest.approx((0.03 * 2e9 + 0.01 * 6e9) / 0.04)


@pytest.mark.parametrize(("unknown", "is_known"), [(0, True), (10, True), (11, False)])
def test_exposed_time_is_unknown_where_a_tenth_is_not_timed(unknown: int, is_known: bool) -> None:
    rows = {r.dimension.name: r for r in by_dimension(counted(MIXED, unknown=unknown))}
    assert (rows["tp"].exposed_seconds is not None) == is_known
    assert rows["dp_shard"].exposed_seconds is not None
    finding = found(counted(MIXED, unknown=unknown), "exposed_communication")
    assert finding is not None and ("tp 20.0 ms" in finding.text) == is_known
    assert ("tp n/a" in finding.text) != is_known


def test_collectives_that_no_hook_times_make_a_dimension_unknown() -> None:
    """All-reduces of a DTensor are counted by sequence number, and scatters before are timed."""
    seen = counted(MIXED)
    for facts in ({"timed": 0, "seconds": 0.0}, {"timed": 40}):
        reduces = replace(seen.communication.collectives[0], op="all_reduce", count=60, **facts)
        rows = by_dimension(changed(seen, collectives=(*seen.communication.collectives, reduces)))
        assert {r.dimension.name: r.exposed_seconds is None for r in rows}["tp"]
    of_ddp = replace(seen.communication.collectives[0], timed=0)
    rows = by_dimension(changed(seen, collectives=(of_ddp, *seen.communication.collectives[1:])))
    assert all(r.exposed_seconds is not None for r in rows)


def test_a_world_group_without_collectives_is_no_row_and_tensor_parallelism_is() -> None:
    world = Dimension(name="world", size=8, used=True)
    rows = by_dimension(changed(MIXED, dimensions=(TP, world), collectives=()))
    assert [(r.dimension.name, r.exposed_seconds) for r in rows] == [("tp", None)]


def test_the_report_has_dimensions_only_where_they_say_more_than_groups() -> None:
    text = render_run(run(counted(MIXED)))
    assert "Dimensions of rank 0" in text and "data-parallel ranks: 4 of 8" in text
    plain = one(*units("all_gather", "forward"), dimensions=(replace(SHARD, size=8),))
    assert not is_worth_showing(plain) and "Dimensions" not in render_run(run(plain))


def test_exposed_communication_is_told_by_dimension() -> None:
    finding = found(counted(MIXED), "exposed_communication")
    assert finding is not None and "by dimension: dp_shard 40.0 ms, tp 20.0 ms" in finding.text


def test_gathers_of_tensor_parallelism_are_no_gathers_of_parameters() -> None:
    far = units("all_gather", "forward", nodes=2, dim="tp")
    assert found(one(*far, roles=()), "full_shard_across_nodes") is None


def test_the_table_sums_by_dimension() -> None:
    rows = {r.dim: r for r in sum_rows_by_field(MIXED.communication.traffic, "dim")}
    assert rows["tp"].phase == "(several)" and rows["tp"].exposed_seconds == pytest.approx(0.02)
    assert rows["tp"].busbw_bytes_per_second == pytest.approx(3e9)


@pytest.mark.parametrize(("unknown", "dims"), [(0, ["dp_shard", "tp"]), (90, ["dp_shard"])])
def test_exposed_seconds_of_a_dimension_that_is_not_timed_are_absent(
    unknown: int, dims: list[str]
) -> None:
    seen = counted(MIXED, unknown=unknown)
    assert [dim for (dim,), _ in dim_exposed(seen)] == dims
    assert untimed_dimensions(seen) == [d for d in ("tp",) if d not in dims]


def test_metrics_have_a_bounded_label() -> None:
    strange = changed(
        counted(MIXED),
        collectives=tuple(
            replace(counted(MIXED).communication.collectives[0], dim=f"mine{n}", group=f"g{n}")
            for n in range(50)
        ),
    )
    by = {spec.name: dict(rows_of(spec, run(strange))(strange)) for spec in METRICS}  # type: ignore[arg-type]
    assert by["zeromon_dim_bytes_total"] == {
        ("other",): 50 * strange.communication.collectives[0].nbytes
    }
    assert {dim for dim, *_ in by["zeromon_dim_info"]} == {"other"}
    rates = {dim: rate for (dim,), rate in by["zeromon_dim_busbw_bytes_per_second"].items()}
    assert math.isclose(rates["tp"] or 0, 3e9) and set(rates) == {str(dim) for dim in Dim}
