"""Every way to run DDP, with a late rank in each: programs/ddp_ways.py."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from builders import run
from support import LAUNCH, PROGRAMS, Node

from zeromon.collector.rank import RankFollower
from zeromon.diagnosis.arrivals import ArrivalSkew
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stragglers import find_stragglers
from zeromon.fold.fold import fold_records
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.events import StepMark, decode_record
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.ledger import Cause

STEPS = 50
LATE_S = 0.02
RACES_IN_TORCH = {"delayed"}
"""Nobody waits for the delayed all-reduce of the step, so its losses differ from run to run."""


def trained(node: Node, steps: int, *ways: str, watched: bool = True) -> tuple[Any, list[Path]]:
    """What the program printed, and the rings of its ranks."""
    command = [*LAUNCH, "2", str(PROGRAMS / "ddp_ways.py"), str(steps), *ways]
    # nobody looks at when the ranks of an unwatched run arrive
    result = node.run(command) if watched else node.run(command, watched=False, HURRY="1")
    assert result.code == 0, result.output
    rings = []
    for kept in sorted(node.store.folder(result.run).glob("rank*.ring.gz")) if watched else ():
        rings.append(node.folder / kept.stem)
        rings[-1].write_bytes(gzip.decompress(kept.read_bytes()))
    return json.loads(result.output.splitlines()[-1]), rings


def snapshots(rings: list[Path], ends_ns: list[int]) -> list[RunSnapshot]:
    """The run at the end of each way, with the stragglers of that way alone."""
    followers = [RankFollower(ring) for ring in rings]
    parts: list[list[Any]] = []
    for follower in followers:
        follower._learn_names()
        records = list(follower.reader.records(final=True))
        marks = [n for n, r in enumerate(records, 1) if isinstance(decode_record(r), StepMark)]
        cuts = [0, *(max(n for n in marks if records[n - 1][1] < end) for end in ends_ns)]
        parts.append([records[a:b] for a, b in itertools.pairwise(cuts)])
    found = []
    for number in range(len(ends_ns)):
        skew = ArrivalSkew()
        for follower, part in zip(followers, parts, strict=True):
            state = follower.state
            fold_records(state, part[number])
            groups = {group: (state.group_id(group), 2, 2) for group in state.groups}
            skew.record_arrivals(state.rank, groups, state.arrivals)
            state.arrivals.clear()
        ranks = [summarize_rank(follower.state) for follower in followers]
        base = run(*ranks, stragglers=find_stragglers(skew, ranks))
        found.append(run(*ranks, stragglers=base.stragglers, findings=advise(base)))
    return found


def waited_seconds(rank: RankSnapshot) -> float:
    """How long *rank* has waited for the other one, by the ledger."""
    return sum(row.seconds for row in rank.ledger.rows if row.cause is Cause.WAITING)


def names_the_late_rank(node: Node, *ways: str) -> None:
    """Either the right straggler, or ZM008 with the reason why there is none; and the same losses."""
    printed, rings = trained(node, STEPS, *ways)
    ends_ns = [end for end, _ in printed.values()]
    waited = [0.0, 0.0]
    for number, (way, shown) in enumerate(zip(printed, snapshots(rings, ends_ns), strict=True)):
        assert [rank.agent.errors for rank in shown.ranks] == [0, 0], way
        late = (number + 1) % 2
        if any(f.code == "ZM008" and "late ranks are unknown" in f.text for f in shown.findings):
            continue
        assert [one.rank for one in shown.stragglers] == [late], way
        (one,) = shown.stragglers
        assert one.phases == ("forward",), way
        told = [f.rank for f in shown.findings if f.code == "ZM309"]
        assert told == [late], way
        assert all(0 <= (rank.communication.exposed_ratio or 0.0) <= 1 for rank in shown.ranks), way
        now = [waited_seconds(rank) for rank in shown.ranks]
        assert now[1 - late] - waited[1 - late] > 0.5 * STEPS * LATE_S, way  # the rest is of both
        assert now[late] - waited[late] < 0.5 * STEPS * LATE_S, way
        waited = now
    unwatched, _ = trained(node, STEPS, *ways, watched=False)
    same = [way for way, (_, losses) in unwatched.items() if losses == printed[way][1]]
    assert set(printed) - set(same) <= RACES_IN_TORCH


@pytest.mark.alone
def test_a_late_rank_is_named_where_torch_does_not_rebuild_buckets(node: Node) -> None:
    """With find_unused_parameters, and with optimizers that take turns."""
    names_the_late_rank(node, "unused", "odd", "unused_gan")


@pytest.mark.long
def test_a_late_rank_is_named_in_each_way_to_run_ddp(node: Node) -> None:
    names_the_late_rank(node)
