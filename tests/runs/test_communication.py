"""What is exposed, by unit and bucket, on real runs; and that what the table asks for helps."""

from __future__ import annotations

import pytest
from recordings import replay
from support import Node, Result, train_command

from zeromon.readout.communication_report import by_unit
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.focus import most_exposed

STEPS = 30


def trained(node: Node, kind: str, setting: str) -> Result:
    result = node.run(train_command(2, kind, setting, str(STEPS), program="exposed.py"))
    assert result.code == 0, result.output
    return result


def most(result: Result) -> RankSnapshot:
    """The rank whose communication is exposed most, and what is said of it."""
    assert by_unit(result.snapshot, 8).startswith("Waits of rank ")
    rank = most_exposed(result.snapshot.ranks)
    assert rank is not None and rank.communication.exposed_seconds
    rows = sum(row.exposed_total_seconds for row in rank.communication.traffic)
    whole = sum(row.exposed_seconds for row in rank.communication.collectives)
    assert 0.5 * whole < rows <= 1.001 * whole  # rows of the start-up alone have faded out
    return rank


def recorded(node: Node, name: str) -> RankSnapshot:
    """As :func:`most`. The rows fade by step and the step has a mean: on a live run noise parts them."""
    rank = most(replay(node, name))
    assert sum(row.exposed_seconds for row in rank.communication.traffic) == pytest.approx(
        rank.communication.exposed_seconds, rel=0.3
    )
    return rank


def test_fsdp2_prefetch_hides_the_gathers_that_the_table_names(node: Node) -> None:
    """Without it each gather is exposed from its call to its end; with it the gathers are less so."""
    off, on = (recorded(node, f"exposed-fsdp2-{setting}") for setting in ("off", "on"))
    for rank in (off, on):
        gathers = [row for row in rank.communication.traffic if row.op == "all_gather"]
        assert {row.unit for row in gathers} == {str(n) for n in range(6)}
        assert {row.phase for row in gathers} == {"forward", "backward"}
        for row in rank.communication.traffic:
            assert row.group == "world" and row.group_size == 2
            assert row.calls == pytest.approx(1, abs=0.05)
            assert row.nbytes == pytest.approx((512 * 512 + 512) * 4, rel=0.05)
            assert row.wait_seconds is not None and row.transfer_seconds is not None
            assert row.wait_seconds + row.transfer_seconds <= 1.01 * row.seconds

    def share(rank: RankSnapshot, op: str) -> float:
        rows = [row for row in rank.communication.traffic if row.op == op]
        return sum(row.exposed_seconds for row in rows) / sum(row.seconds for row in rows)

    assert share(off, "all_gather") > 0.95
    assert share(on, "all_gather") < 0.75
    assert share(on, "reduce_scatter") > 0.95  # which prefetch does not touch


@pytest.mark.alone
def test_ddp_small_buckets_hide_what_the_one_large_one_exposes(node: Node) -> None:
    off, on = (most(trained(node, "ddp", setting)) for setting in ("off", "on"))
    (large,) = [row for row in off.communication.traffic if row.unit]
    assert (large.unit, large.op, large.phase) == ("bucket 0", "all_reduce", "backward")
    # the second step, in which DDP builds its buckets anew, has none that is timed
    assert large.nbytes == pytest.approx(6 * (512 * 512 + 512) * 4, rel=0.02)
    assert large.exposed_seconds > 0.8 * large.seconds
    small = [row for row in on.communication.traffic if row.unit]
    assert {row.unit for row in small} == {f"bucket {n}" for n in range(6)}
    exposed = sum(row.exposed_seconds for row in small)
    assert exposed < 0.8 * sum(row.seconds for row in small)
    # buckets are sent in the order in which gradients come: the last is what is left to wait for
    by_name = {row.unit: row for row in small}
    assert by_name["bucket 5"].exposed_seconds > by_name["bucket 0"].exposed_seconds


def test_on_gloo_deepspeed_exposes_all_in_spite_of_overlap_comm(node: Node) -> None:
    """Its CPU accelerator has no streams to overlap on; the buckets say so."""
    rank = recorded(node, "exposed-zero2")
    buckets = [row for row in rank.communication.traffic if row.unit.startswith("bucket")]
    assert len(buckets) == 3
    for row in buckets:
        assert row.exposed_seconds > 0.95 * row.seconds
        assert row.phase == "backward"
