"""What /metrics counts, against two counts that zeromon has no part in."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from flight import AS_GLOO_SAYS, by_gloo_op, flight_counts, unattributed
from support import ENDED_WELL, ROOT, Node, Result, train_command
from trace_format import checked

from zeromon.comparison.run_figures import METRIC, figures_of
from zeromon.export import chrome_trace
from zeromon.export.files import Export, Progress
from zeromon.readout.throughput import flops_per_token, mfu_of_run, samples_per_step, tokens_per_step
from zeromon.ring import slices
from zeromon.ring.strategy import Strategy
from zeromon.snapshot.noise import Estimate
from zeromon.storage.step_history.queries import frame_of_steps, readable_segment_tables

STEPS = 12
FSDP2 = pytest.param("fsdp2", marks=pytest.mark.fsdp2)
CASES = [
    pytest.param("fsdp2", 2, marks=pytest.mark.fsdp2),
    *((strategy, 2) for strategy in ("fsdp1-full", "ddp", "zero1")),
    pytest.param("fsdp2", 4, marks=pytest.mark.fsdp2),
    *(pytest.param(name, 4, marks=pytest.mark.long) for name in ("fsdp1-full", "ddp", "zero1")),
]


@dataclass
class Trained:
    result: Result
    facts: dict[str, Any]
    metrics: dict[str, dict[tuple[str, ...], float]]


_done: dict[tuple[str, int], Trained] = {}


def trained(node: Node, strategy: str, ranks: int) -> Trained:
    """The run of that strategy; made once."""
    if (strategy, ranks) not in _done:
        out = node.folder / f"{strategy}-{ranks}"
        command = train_command(ranks, "--strategy", strategy, "--steps", str(STEPS), "--out", str(out))
        result = node.run(command, run=f"{strategy}-{ranks}")
        assert result.code == 0, result.output
        facts = json.loads((out / "0.json").read_text())
        _done[strategy, ranks] = Trained(result, facts, node.metrics(result.run))
    return _done[strategy, ranks]


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_counts_and_bytes_equal_the_flight_recorders(
    shared_node: Node, strategy: str, ranks: int
) -> None:
    """Every collective of the run is on /metrics, with its bytes, to the unit."""
    run = trained(shared_node, strategy, ranks)
    calls, nbytes = flight_counts(run.facts)
    assert sum(calls.values()) > STEPS
    found = by_gloo_op(run.metrics["zeromon_collectives_total"], "0")
    found_bytes = by_gloo_op(run.metrics["zeromon_collective_bytes_total"], "0")
    unknown = unattributed(run.metrics, "0")
    if run.facts["recorder"]:
        assert (found, found_bytes, unknown) == (calls, nbytes, 0)
    else:  # what C++ issues in the first steps has no operation then, and is counted all the same
        assert sum(found.values()) + unknown == sum(calls.values())
        assert found <= calls and found_bytes <= nbytes
    assert run.metrics["zeromon_steps_total"] == {(str(r),): STEPS for r in range(ranks)}


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_the_strategy_arrives_as_fields(shared_node: Node, strategy: str, ranks: int) -> None:
    """The fields and the label for people say the same."""
    snapshot = trained(shared_node, strategy, ranks).result.snapshot
    assert {rank.strategy_fields for rank in snapshot.ranks} == {Strategy.parse(strategy)}
    assert {rank.strategy for rank in snapshot.ranks} == {strategy}


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_counts_and_bytes_equal_the_models_arithmetic(
    shared_node: Node, strategy: str, ranks: int
) -> None:
    """A step sends what the parameters' shapes and the strategy say, no byte more."""
    run = trained(shared_node, strategy, ranks)
    shapes = run.facts["params"]
    calls = by_op(run.metrics["zeromon_collectives_total"])
    nbytes = by_op(run.metrics["zeromon_collective_bytes_total"])
    units = 4  # three blocks and the root
    if strategy == "fsdp2":
        # each parameter is padded to whole rows per rank; gathered in forward and in backward
        whole = sum(
            math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) * 4 for shape in shapes.values()
        )
        assert calls == {"all_gather": 2 * units * STEPS, "reduce_scatter": units * STEPS}
        assert nbytes == {"all_gather": 2 * whole * STEPS, "reduce_scatter": whole * STEPS}
    elif strategy == "fsdp1-full":
        # a unit is one flat parameter, padded to the ranks; the root stays unsharded after forward
        flat = Counter[str]()
        for name, shape in shapes.items():
            flat[unit_of(name)] += math.prod(shape)
        padded = {unit: math.ceil(numel / ranks) * ranks * 4 for unit, numel in flat.items()}
        gathered = 2 * sum(padded.values()) - padded["root"]
        assert calls["reduce_scatter"] == units * STEPS
        assert nbytes["reduce_scatter"] == sum(padded.values()) * STEPS
        assert calls["all_gather"] == (2 * units - 1) * STEPS
        assert nbytes["all_gather"] == gathered * STEPS
    else:
        whole = 4 * sum(math.prod(shape) for shape in shapes.values())
        assert nbytes["all_reduce"] == whole * STEPS
        if strategy == "zero1":
            assert nbytes["broadcast"] >= whole * STEPS


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_a_comparison_says_what_a_ring_sends_and_what_a_step_trains_on(
    shared_node: Node, strategy: str, ranks: int
) -> None:
    """Three times the parameters under FSDP, twice under DDP; (n-1)/n of them in a ring of n."""
    run = trained(shared_node, strategy, ranks)
    _, nbytes = flight_counts(run.facts)
    found = figures_of(
        run.result.snapshot,
        frame_of_steps(shared_node.store.history(run.result.run)).to_dict(as_series=False),
    )
    snapshot = run.result.snapshot
    assert (samples_per_step(snapshot), tokens_per_step(snapshot)) == (2 * ranks, 2 * ranks * 32)
    # the closed formula of this model, whatever shards it: head, layers, scores
    width, layers, length = 32, 3, 32
    weights = 256 * width + layers * 12 * width**2
    assert flops_per_token(snapshot) == 6 * weights + 12 * layers * length * width
    assert mfu_of_run(snapshot) == "peak FLOP/s of cpu unknown"
    sent = METRIC["sent_bytes"].find(found)
    assert isinstance(sent, Estimate)
    share = (ranks - 1) / ranks
    if strategy.startswith("fsdp"):
        reduced = by_op(run.metrics["zeromon_collective_bytes_total"])["reduce_scatter"]
        # gloo says of a reduce-scatter that it is an all-reduce: the flight recorder has no other one
        assert nbytes["all_reduce"] == reduced
        assert sent.value == pytest.approx(share * sum(nbytes.values()) / STEPS)
    else:
        whole = 4 * sum(math.prod(shape) for shape in run.facts["params"].values())
        broadcast = whole if strategy == "zero1" else 0  # each shard from the rank that updates it
        # in so short a run a little is left of what was broadcast at its start
        assert sent.value == pytest.approx(share * (2 * whole + broadcast), rel=0.02)


@pytest.mark.parametrize("strategy", [FSDP2, "fsdp1-full"])
def test_a_trace_of_the_record_has_every_collective_as_a_slice(shared_node: Node, strategy: str) -> None:
    """As many of each operation as the flight recorder counted; each within its step and its phase."""
    run = trained(shared_node, strategy, 2)
    folder = shared_node.store.folder(run.result.run)
    path = shared_node.folder / f"{strategy}.json"
    found, _ = readable_segment_tables(folder / "history")
    rings = slices.run_events(run.result.run, folder)
    chrome_trace.write_trace(
        Export(
            run=run.result.snapshot, steps=found, rings=rings, path=path, force=False,
            progress=Progress(1),
        )
    )  # fmt: skip
    events = checked(json.loads(path.read_text()))
    calls, _ = flight_counts(run.facts)
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    of_kind = {kind: [e for e in mine if e["cat"] == kind] for kind in {e["cat"] for e in mine}}
    counted = Counter(AS_GLOO_SAYS.get(e["name"], e["name"]) for e in of_kind["communication"])
    assert counted == calls
    assert [e["name"] for e in of_kind["step"]] == [f"step {n}" for n in range(1, STEPS + 1)]
    assert Counter(e["name"] for e in of_kind["phases"])["backward"] == STEPS
    ends = [e["ts"] + e["dur"] for e in of_kind["step"]]
    end = ends[-1]
    for one in [*of_kind["phases"], *of_kind["communication"], *of_kind["waits for communication"]]:
        # some precede the first step, and garbage may be collected after the last one
        follows = one["name"] == "garbage_collection"
        assert one["ts"] >= 0 and (follows or one["ts"] + one["dur"] <= end + 1), one
        # no phase reaches over the end of a step: all times are of one clock
        assert one["cat"] != "phases" or not any(
            one["ts"] < e - 1 < one["ts"] + one["dur"] - 2 for e in ends
        )
    spent = sum(e["dur"] for e in of_kind["waits for communication"]) / 1e6
    told = sum(row.exposed_seconds for row in run.result.snapshot.ranks[0].communication.collectives)
    assert spent == pytest.approx(told, rel=1e-6)


def by_op(series: dict[tuple[str, ...], float]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (rank, _, op), value in series.items():
        if rank == "0":
            found[op] += int(value)
    return dict(found)


@cache
def unit_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else "root"


@pytest.mark.parametrize("strategy", [FSDP2, "fsdp1-full", "ddp", "zero1"])
def test_losses_are_bit_identical_without_the_agent(shared_node: Node, strategy: str) -> None:
    """Watching changes no bit of what is learned."""
    watched = trained(shared_node, strategy, 2)
    out = shared_node.folder / f"{strategy}-bare"
    command = train_command(2, "--strategy", strategy, "--steps", str(STEPS), "--out", str(out))
    bare = shared_node.run(command, watched=False)
    assert bare.code == 0, bare.output
    facts = json.loads((out / "0.json").read_text())
    assert watched.facts["watched"] and not facts["watched"]
    assert facts["losses"] == watched.facts["losses"]
    losses = [float.fromhex(loss) for loss in facts["losses"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", [FSDP2, "fsdp1-full"])
def test_units_carry_their_fqn(shared_node: Node, strategy: str) -> None:
    """Each block and the root is a unit, unsharded twice a step (idle steps left out)."""
    rank = trained(shared_node, strategy, 2).result.snapshot.ranks[0]
    assert {unit.fqn for unit in rank.communication.units} == {
        "(root)",
        "layers.0",
        "layers.1",
        "layers.2",
    }
    assert all(unit.exposed_seconds > 0 for unit in rank.communication.units)
    block = next(unit for unit in rank.communication.units if unit.fqn == "layers.1")
    assert STEPS <= block.unshards <= 2 * STEPS


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_phases_add_up_to_the_steps(shared_node: Node, strategy: str, ranks: int) -> None:
    """The phases of all steps, other included, are the steps' time."""
    for rank in trained(shared_node, strategy, ranks).result.snapshot.ranks:
        assert sum(rank.steps.phase_seconds.values()) == pytest.approx(
            rank.steps.total_seconds, rel=1e-6
        )
        assert all(rank.steps.phase_seconds[p] > 0 for p in ("forward", "backward", "optimizer"))
        assert rank.strategy == strategy
        assert rank.status.ended in ENDED_WELL


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_memory_by_role_is_as_predicted(shared_node: Node, strategy: str, ranks: int) -> None:
    """Every role that can be seen is within 2 % of what the arithmetic says, on every rank."""
    run = trained(shared_node, strategy, ranks)
    whole = 4 * sum(math.prod(shape) for shape in run.facts["params"].values())
    for rank in run.result.snapshot.ranks:
        rows = {row.role: row for row in rank.memory.expected}
        for row in rows.values():
            if row.measured_bytes is not None:
                assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.02), row
        shards = strategy.startswith("fsdp")
        held = rows["sharded_param" if shards else "unsharded_param"].measured_bytes
        assert held == pytest.approx(whole / ranks if shards else whole, rel=0.05)
        if shards:  # the root, and two blocks at once
            causes = [cause.nbytes for cause in rows["unsharded_param"].causes]
            assert len(causes) == 3 and sum(causes) == rank.memory.unsharded_peak_bytes
        else:
            assert rows["reduce_scatter"].measured_bytes is None  # DDP's buckets are in C++
            assert rows["reduce_scatter"].predicted_bytes == whole
    states = [r.measured_bytes for x in run.result.snapshot.ranks for r in x.memory.expected
              if r.role == "optimizer_state"]  # fmt: skip
    total = sum(n for n in states if n is not None)
    assert total == pytest.approx(2 * whole * (ranks if strategy == "ddp" else 1), rel=0.05)


def test_programs_are_where_the_tests_look() -> None:
    """The example that is trained here is the one that is shipped."""
    assert (ROOT / "examples" / "train_gpt.py").exists()
