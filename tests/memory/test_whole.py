"""The parameters of the whole model, from the parts that ranks describe."""

from __future__ import annotations

from typing import Any

import pytest
from builders import changed, rank, run

from zeromon.cli.plan_output import plan_as_text
from zeromon.memory.models import whole_numel
from zeromon.memory.plan import of_run, plan_table
from zeromon.ring.strategy import Dim, Framework, Strategy
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import Dimension, GroupProgress, PipelineRow


def model(numel: int, whole: int | None = None, **more: Any) -> dict[str, Any]:
    facts = {
        "framework": "fsdp2", "stage": 3, "ranks": 2, "numel": numel, "trainable": numel,
        "shard_numel": numel // 2, "trainable_shard_numel": numel // 2, "param_bytes": 4,
        "compute_bytes": 4, "grad_bytes": 4, "optimizer": "AdamW", "kept_numel": 10,
    }  # fmt: skip
    return facts | ({} if whole is None else {"whole_numel": whole}) | more


def part(number: int, *models: Any, tp: int = 1, pp: tuple[int, ...] = (), ep: int = 1) -> RankSnapshot:
    """A rank of FSDP2 over two, with tensor, pipeline and expert parallelism beside it."""
    sizes = {Dim.DP_SHARD: 2, Dim.TP: tp, Dim.PP: max(1, len(set(pp))), Dim.EP: ep}
    used = {dim: size for dim, size in sizes.items() if size > 1}
    row = PipelineRow(
        schedule="1F1B", stages=len(pp), micro_batches=4, stage_ranks=pp, on_device=False, own=(),
        order="", busy_seconds=None, span_seconds=None,
    )  # fmt: skip
    return changed(
        rank(number),
        models=models,
        dimensions=tuple(Dimension(name=dim, size=n, used=True) for dim, n in used.items()),
        strategy_fields=Strategy(
            framework=Framework.FSDP2,
            stage=3,
            parts=tuple(dim for dim in used if dim is not Dim.DP_SHARD),
        ),
        world_size=8,
        pipeline=row if pp else None,
    )


def parts_of_all() -> RunSnapshot:
    """Eight ranks: two shards, two of tensor parallelism, two stages of different size."""
    first, last = model(300, 500), model(500, 900)
    pipelines = [(n, n + 4) for n in range(4)]
    firsts = [part(n, first, tp=2, pp=pipelines[n]) for n in range(4)]
    return run(*firsts, *(part(n + 4, last, tp=2, pp=pipelines[n]) for n in range(4)))


def test_stages_add_up_and_tensor_parallel_shards_know_the_whole() -> None:
    made = parts_of_all()
    assert whole_numel(made) == (1400, "")
    setup = of_run(made)
    assert (setup.model.params, setup.whole_numel) == (500, 1400)  # the largest stage decides
    assert (setup.tensor, setup.pipeline, setup.devices) == (2, 2, 8)
    text = plan_as_text(setup, plan_table(setup))
    assert "parameters, 500 per rank (tensor 2 x pipeline 2) on 8 devices" in text


def test_the_stages_of_one_rank_are_one_model() -> None:
    """An interleaved schedule has several stages on a rank."""
    stages = [model(100, 100, units=[40, 30]), model(120, 120, units=[50])]
    made = run(part(0, *stages, pp=(0, 1, 0, 1)), part(1, *stages, pp=(0, 1, 0, 1)))
    assert whole_numel(made) == (440, "")
    setup = of_run(made)
    assert (setup.model.params, setup.model.notes) == (220, ())
    assert setup.known is not None and setup.known.unit_numels == (50, 40, 30)


def test_a_pipeline_without_torchs_schedules_is_known_by_its_group() -> None:
    """DeepSpeed's, and Megatron's."""
    group = GroupProgress(group_id="g", label="pipe", ranks=(0, 1), sequence=3, dim="pp")
    ranks = [part(n, model(100 + n), pp=(0, 1)) for n in range(2)]
    made = run(*(changed(one, pipeline=None, groups=(group,)) for one in ranks))
    assert whole_numel(made) == (201, "")


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ((rank(0),), "no rank reported its model"),
        ((part(0, model(100), tp=2),), "do not say how large the whole is"),
        ((part(0, model(100, 100), tp=2),), "do not say how large the whole is"),
        ((part(0, model(100, 200), tp=2, ep=2),), "experts of its own"),
        ((part(0, model(100, 100), pp=(0, 8)),), "rank 8 of the pipeline has not told its part"),
        ((changed(part(0, model(100), pp=(0, 1)), pipeline=None),), "which ranks the pipeline has"),
    ],
)
def test_what_is_not_known_has_its_reason(ranks: tuple[RankSnapshot, ...], why: str) -> None:
    numel, reason = whole_numel(run(*ranks))
    assert numel is None and why in reason
    if ranks[0].config.models:
        setup = of_run(run(*ranks))
        assert setup.whole_numel is None and any(why in note for note in setup.model.notes)
