"""torch.distributed.pipelining on real ranks: the records are the schedule, whatever it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support import Node, train_command

from zeromon.memory.models import whole_numel
from zeromon.readout.report import render_run
from zeromon.ring.buffer import RingReader
from zeromon.ring.codes import StageAction
from zeromon.ring.events import StageRun, decode_record
from zeromon.snapshot.communication import Act, schedule_notation

STEPS, CHUNKS = 4, 4
SCHEDULES = ("Interleaved1F1B", "GPipe", "1F1B")


def orders(node: Node, run: str, rank: int) -> list[str]:
    """The order of actions of each call that a rank recorded."""
    (kept,) = node.store.folder(run).glob(f"rank{rank}.*.ring.gz")
    path = node.folder / f"rank{rank}.1.ring"
    path.write_bytes(gzip.decompress(kept.read_bytes()))
    found: list[str] = []
    order: list[Act] = []
    for event in map(decode_record, RingReader(path).read(final=True)):
        if not isinstance(event, StageRun):
            continue
        if event.action is StageAction.CALL:
            found.append(schedule_notation(order))
            order = []
        else:
            act = Act(event.stage, event.action, event.micro_batch)
            order += [] if order and order[-1] == act else [act]  # the loss is a second part
    return found


def test_the_records_of_two_ranks_are_the_schedules_of_torch(node: Node) -> None:
    """Three schedules in one launch; the losses are those of a run without zeromon."""
    command = train_command(2, *SCHEDULES, "--steps", str(STEPS), program="pipelines.py")
    out = node.folder / "watched"
    result = node.run([*command, "--out", str(out)])
    assert result.code == 0, result.output
    plain = node.folder / "plain"
    bare = node.run([*command, "--out", str(plain)], watched=False)
    assert bare.code == 0, bare.output
    for rank in range(2):
        assert read(out, rank) == read(plain, rank)
    first, last = orders(node, result.run, 0), orders(node, result.run, 1)
    assert len(first) == len(last) == len(SCHEDULES) * STEPS
    forwards, backwards = (" ".join(f"0{kind}{n}" for n in range(CHUNKS)) for kind in "FB")
    assert set(first[STEPS : 2 * STEPS]) == {f"{forwards} {backwards}"}
    assert set(first[2 * STEPS :]) == {"0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"}
    assert set(last[2 * STEPS :]) == {"1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"}
    assert {len(order.split()) for order in first[:STEPS]} == {2 * 2 * CHUNKS}
    of_a_stage = 8 * 8 + 8
    assert [[m["numel"] for m in rank.config.models] for rank in result.snapshot.ranks] == [
        [of_a_stage]
    ] * 2
    assert whole_numel(result.snapshot) == (2 * of_a_stage, "")
    for rank in result.snapshot.ranks:
        shown = rank.communication.pipeline
        assert shown is not None and shown.bubble is not None, shown
        assert (shown.schedule, shown.stages, shown.stage_ranks) == ("1F1B", 2, (0, 1))
        assert shown.order == (first if rank.rank == 0 else last)[-1]
        assert 0 < shown.bubble.ideal_ratio < 1 and 0 < shown.bubble.measured_ratio < 1
        assert len(shown.own[0].micro_batch_waits) == CHUNKS
        assert rank.agent.errors == 0
        # of each call all micro-batches are one micro-step
        steps = rank.steps
        assert steps.micro_steps == steps.watched_steps == len(SCHEDULES) * STEPS
        assert steps.phase_seconds["forward"] > 0.9 * steps.watched_steps * CHUNKS * 0.005
        assert steps.phase_seconds["backward"] > 0.9 * steps.watched_steps * CHUNKS * 0.010
        own_rows = [t for t in rank.communication.traffic if t.unit == f"stage {rank.rank}"]
        assert {"send", "recv"} <= {row.op for row in own_rows}
    assert "Pipeline: 1F1B, 2 stages, 4 micro-batches" in render_run(result.snapshot)


def test_the_pipeline_of_deepspeed_has_stages_and_a_bubble(node: Node) -> None:
    """Its ranks share their samples, and the losses are those of a run without zeromon."""
    pytest.importorskip("deepspeed")
    command = train_command(2, program="engine_pipeline.py")
    out, plain = node.folder / "watched", node.folder / "plain"
    result = node.run([*command, "--out", str(out)])
    assert result.code == 0, result.output
    bare = node.run([*command, "--out", str(plain)], watched=False)
    assert bare.code == 0, bare.output
    orders_of_1f1b = ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    for rank in result.snapshot.ranks:
        assert read(out, rank.rank) == read(plain, rank.rank)
        shown = rank.communication.pipeline
        assert shown is not None and shown.bubble is not None, shown
        assert (shown.schedule, shown.stages, shown.stage_ranks) == ("1F1B", 2, (0, 1))
        assert shown.order == orders_of_1f1b[rank.rank]
        assert shown.own[0].seconds["forward"] > (0.004, 0.012)[rank.rank]
        assert rank.steps.micro_steps == rank.steps.watched_steps == 12
        assert rank.steps.phase_seconds["backward"] > 0
        sizes = {dimension.name: dimension.size for dimension in rank.dimensions}
        assert (sizes["pp"], rank.data_parallel_ranks, "tp" in sizes) == (2, 1, False)
        own_rows = [t for t in rank.communication.traffic if t.unit == f"stage {rank.rank}"]
        assert {"send", "recv"} <= {row.op for row in own_rows}
        assert rank.agent.errors == 0
    # 4 micro-batches of 4 samples, which the first stage alone receives
    assert [r.training.batches and r.training.batches.samples for r in result.snapshot.ranks] == [
        12 * 16,
        None,
    ]
    # the sleep of the second stage is three times that of the first, for which it waits
    first, last = (rank.communication.pipeline for rank in result.snapshot.ranks)
    assert first and last and first.bubble and last.bubble
    assert first.bubble.measured_ratio > last.bubble.measured_ratio


def read(folder: Path, rank: int) -> dict[str, list[str]]:
    content: dict[str, list[str]] = json.loads((folder / f"{rank}.json").read_text())
    return content


@pytest.mark.long
@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B"])
def test_four_ranks_with_two_stages_each(node: Node, name: str) -> None:
    command = train_command(4, name, "--micro-batches", "8", program="pipelines.py")
    result = node.run(command)
    assert result.code == 0, result.output
    for rank in result.snapshot.ranks:
        shown = rank.communication.pipeline
        assert shown is not None and shown.bubble is not None, shown
        assert len(shown.own) == 2 and len(shown.stage_ranks) == 8
        assert rank.steps.micro_steps == STEPS
