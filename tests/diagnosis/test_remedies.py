"""A remedy is offered only where what it needs was seen, and where the memory that it takes is free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import MS, changed, deepspeed_facts, run, short_of_cpus, summary
from evidence import (
    CPU_STEP,
    FIRES,
    GATHERS,
    GIB,
    GROWING,
    MIB,
    MODEL,
    WAITING,
    found,
    one,
    pausing,
    row,
    units,
)

from zeromon.base.units import human_count
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.rules import common
from zeromon.readout.report import render_run
from zeromon.ring.codes import Phase
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import Finding, Pool, RankSnapshot, RiskCause, Severity
from zeromon.snapshot.host import CodeLine, HostMemory
from zeromon.snapshot.ledger import ActivityRow
from zeromon.snapshot.memory import Risk, RoleRow
from zeromon.snapshot.step import LoadingRow

WORKERS: Any = {"num_workers": 4, "persistent_workers": True}
SAVES = ActivityRow(phase="checkpoint", activity="save", background=False, count=4, seconds=8.0,
                    longest_seconds=2.0, nbytes=4 * GIB, last_ns=0)  # fmt: skip
CPU = short_of_cpus(0.5)
SAME: Any = {
    "world_size": 2, "first_batches": (1, 2, 3), "loader": {"sampler": "RandomSampler"},
    "strategy": "ddp",
}  # fmt: skip


def test_each_remedy_of_the_table_is_offered_by_a_rule() -> None:
    rules = Path(common.__file__).parent.glob("*.py")
    names = {
        str(node.value)
        for path in rules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    # A half precision of each framework has its own diff, under the name of the framework
    assert {name.partition("precision_")[0] for name in common.DIFFS["remedies"]} - {"half_"} <= names


def made_in(seconds: float) -> LoadingRow:
    """100 batches that took *seconds* each to make."""
    return LoadingRow(
        batches=100, fetch_seconds=100 * seconds, transform_seconds=None, collate_seconds=1.0,
        read_bytes=0, disk_bytes=0, major_faults=0,
    )  # fmt: skip


def loads(**facts: Any) -> RankSnapshot:
    """Steps of 200 ms, 80 ms of them wait for a batch."""
    return one(recent=WAITING * 30, **facts)


def of_stage(label: str, snapshot: RankSnapshot) -> RankSnapshot:
    return replace(snapshot, strategy=label, strategy_fields=Strategy.parse(label))


def accumulates(micro_steps: int) -> RankSnapshot:
    return one(
        *units("reduce_scatter", "backward", calls=4.0),
        recent=(summary(1, micro_steps=micro_steps),) * 30,
    )


def wraps(**model: Any) -> RankSnapshot:
    facts: Any = {**MODEL, "units": [], "kept_numel": 100 * MIB, **model}
    return one(models=(facts,), unsharded_peak_bytes=400 * MIB)


NEEDS: dict[str, tuple[str, RankSnapshot, list[RankSnapshot]]] = {
    "no workers": ("data_wait", loads(loader={"num_workers": 0}), [
        loads(),  # whose batches they are is unknown
        loads(loader={"num_workers": 0}, pressure=CPU),  # no CPU for them
    ]),
    "workers that are too few": ("data_wait", loads(loader=WORKERS, loading=made_in(0.6)), [
        loads(loader=WORKERS, loading=made_in(0.4)),  # a batch each 100 ms, a step of 120 ms
        loads(loader=WORKERS),
        loads(loader=WORKERS, loading=made_in(0.6), pressure=CPU),
    ]),
    "a sampler that divides nothing": ("same_samples", one(**SAME), [
        one(**SAME | {"loader": {"sampler": name}})
        for name in ("", "DistributedSampler", "MySampler")
    ] + [one(**SAME | {"loader": {}})]),
    "backwards that add up": ("accumulation_communicates", accumulates(4), [
        accumulates(1),  # L-BFGS
    ]),
    "one unit": ("whole_model_unit", wraps(largest_unit_numel=100 * MIB), [
        wraps(largest_unit_numel=10 * MIB),  # each layer is one, kept gathered
    ]),
    "a process group": ("slow_steps", pausing(
        Phase.CHECKPOINT, 10, 2000, activities=(SAVES,), checkpoints=4,
    ), [
        pausing(Phase.CHECKPOINT, 10, 2000, activities=(SAVES,), checkpoints=4, world_size=1),
        pausing(Phase.CHECKPOINT, 10, 2000, activities=(SAVES,), checkpoints=4,
                strategy="deepspeed-zero2"),
    ]),
    "workers that were forked": ("workers_grow", FIRES["workers_grow"], [
        one(workers=replace(GROWING, forked=False)),
    ]),
    "workers that do not stay": ("slow_steps", FIRES["slow_steps"], [
        changed(FIRES["slow_steps"], loader={"num_workers": 4, "persistent_workers": True}),
        changed(FIRES["slow_steps"], loader={"num_workers": 0, "persistent_workers": False}),
        changed(FIRES["slow_steps"], loader={}),
    ]),
}  # fmt: skip
"""What a remedy needs -> its rule, a rank that shows it, and ranks with the symptom and without that."""


def remedies(snapshot: RankSnapshot, rule: str) -> list[str]:
    """The diffs that *rule* offers to two ranks like *snapshot*."""
    both = run(snapshot, replace(snapshot, rank=1))
    return [f.remedy.diff for f in advise(both) if f.rule == rule and f.remedy is not None]


@pytest.mark.parametrize("need", NEEDS)
def test_a_remedy_is_offered_only_where_what_it_needs_was_seen(need: str) -> None:
    rule, seen, others = NEEDS[need]
    assert remedies(seen, rule)
    assert not [diff for other in others for diff in remedies(other, rule)]


def test_an_iterable_data_set_is_divided_by_itself() -> None:
    """torch refuses a sampler for it."""
    iterable = one(**SAME | {"loader": {"sampler": "_InfiniteConstantSampler"}})
    (diff,) = remedies(iterable, "same_samples")
    assert "def __iter__" in diff and "DistributedSampler" not in diff


def test_only_stage_3_leaves_a_part_of_the_optimizer_on_the_device() -> None:
    for stage in (1, 2, 3):
        slow = of_stage(f"deepspeed-zero{stage}-offload", one(recent=CPU_STEP * 30))
        (diff,) = remedies(slow, "cpu_optimizer_slow")
        assert ('"ratio"' in diff) is (stage == 3)


def test_waits_for_new_workers_are_told_once() -> None:
    """Each epoch starts its workers: ZM608 advises that they stay, and more of them start as slowly."""
    loading = made_in(0.002)
    starts = pausing(Phase.DATA_WAIT, 10, 5000, loading=loading, loader={"num_workers": 2})
    told = {f.rule for f in advise(run(starts)) if f.rule in ("data_wait", "slow_steps")}
    assert told == {"slow_steps"}


def test_the_first_start_of_workers_is_no_lack_of_them() -> None:
    """Too early for ZM608: 10 of the first 20 steps are in no judgement of slow ones."""
    loading = made_in(0.002)
    starts = pausing(Phase.DATA_WAIT, 361, 5000, loading=loading, loader={"num_workers": 2})
    early = changed(starts, watched_steps=20, recent=starts.steps.recent[:20])
    assert not {f.code for f in advise(run(early))} & {"ZM601", "ZM608"}
    no_workers = changed(early, loader={"num_workers": 0})
    assert "ZM601" in {f.code for f in advise(run(no_workers))}


@pytest.mark.parametrize("every", [5, 10, 20])
def test_no_share_is_more_than_the_whole(every: int) -> None:
    """The median step has no wait at all, and the mean of the waits is many times that step."""
    bursts = pausing(Phase.DATA_WAIT, every, 20_000, loader={"num_workers": 4}, loading=made_in(30.0))
    finding = found(bursts, "data_wait")
    assert finding is not None and finding.share is not None
    assert 0.8 < finding.share <= 1.0


# ---- memory ---------------------------------------------------------------------------------------

HOST, DEVICE = Pool.HOST, Pool.DEVICE
TAKES = {
    "accumulation_communicates": DEVICE,  # whole gradients between micro-steps
    "cpu_optimizer_slow": DEVICE,
    "data_wait": HOST,
    "fsdp_prefetch_off": DEVICE,
    "full_shard_across_nodes": DEVICE,
    "garbage_collection": HOST,
    "offload_waits": HOST,
    "offload_without_need": DEVICE,
    "overlap_comm_off": DEVICE,
    "pinned_memory_off": HOST,
    "reshard_without_need": DEVICE,
    "slow_steps": HOST,
    "stage_too_high": DEVICE,
    "tiny_collectives": DEVICE,
    "zero_plus_plus": DEVICE,
}
"""The rules whose remedy takes memory, and which."""


def offered(rule: str) -> tuple[RankSnapshot, Finding]:
    """What fires *rule*, and its finding; the optimizer on the host by an engine of stage 3."""
    snapshot = FIRES[rule]
    if rule == "cpu_optimizer_slow":
        snapshot = of_stage("deepspeed-zero3-offload", snapshot)
    finding = found(snapshot, rule)
    assert finding is not None and finding.remedy is not None
    return snapshot, finding


@pytest.mark.parametrize("rule", FIRES)
def test_a_remedy_says_which_memory_it_takes(rule: str) -> None:
    remedy = offered(rule)[1].remedy
    assert remedy is not None and remedy.takes == TAKES.get(rule)


def threats(pool: Pool) -> Iterator[Risk]:
    """A memory that is full, and one that a trend will fill."""
    full = Risk(pool=pool, ratio=0.9, cause=RiskCause.STATIC, used_bytes=70 * GIB,
                capacity_bytes=80 * GIB)  # fmt: skip
    yield full
    yield replace(full, ratio=0.1, cause=RiskCause.GROWTH, steps_left=500.0, growth_bytes_per_step=MIB)


@pytest.mark.parametrize("rule", TAKES)
def test_what_takes_memory_is_not_advised_while_that_memory_runs_out(rule: str) -> None:
    snapshot, _ = offered(rule)
    taken = HOST if snapshot.device == "cpu" else TAKES[rule]
    for pool in Pool:
        for threat in threats(pool):
            finding = found(changed(snapshot, risks=(threat,)), rule)
            is_offered = finding is not None and finding.remedy is not None
            assert is_offered is (pool is not taken), (pool, threat)


def test_no_memory_is_called_free_while_it_runs_out() -> None:
    """A leak on one rank takes the room of all ranks of the host."""
    rank = one(*GATHERS, host=HostMemory(headroom_bytes=64 * GIB))
    (growing,) = (risk for risk in threats(HOST) if risk.steps_left)
    both = run(rank, changed(rank, rank=1, risks=(growing,)))
    assert "are free" not in " ".join(f.text for f in advise(both))
    assert "are free" in " ".join(f.text for f in advise(run(rank, replace(rank, rank=1))))


def test_a_rank_has_its_part_of_its_own_node() -> None:
    """Two ranks on each of two nodes: half of the node is free for each, and the finding says so."""
    first = one(*GATHERS, host=HostMemory(headroom_bytes=64 * GIB))
    ranks = [replace(first, rank=n, node=f"node{n // 2}") for n in range(4)]
    assert "32.0 GiB per rank are free" in " ".join(f.text for f in advise(run(*ranks)))


def test_growing_workers_are_urgent_where_the_host_is_soon_full() -> None:
    """4 workers of two ranks take 42 MiB per step of 200 ms."""
    for room, severity in ((64 * GIB, Severity.WARNING), (1 << 50, Severity.INFO)):
        rank = one(workers=GROWING, host=HostMemory(headroom_bytes=room))
        both = run(rank, replace(rank, rank=1))
        (finding,) = (f for f in advise(both) if f.rule == "workers_grow")
        assert finding.severity is severity
        steps = human_count(room / (42 * MIB))
        assert f"4 x 307.0 MiB; they fill host memory in {steps} steps" in finding.text


def test_a_report_shows_the_memory_of_workers_beside_that_of_their_rank() -> None:
    text = render_run(run(one(workers=GROWING)))
    assert "workers" in text and "4 x 307.0 MiB" in text
    assert "workers" not in render_run(run(one()))


# ---- collectives of the script ----------------------------------------------------------------------


def logging_rank(calls: float = 24.0, nbytes: float = 96.0, **facts: Any) -> RankSnapshot:
    """Steps of 200 ms, 20 ms of them in all-reduces that the script issues itself."""
    own = row("all_reduce", unit="", phase="other", calls=calls, nbytes=nbytes, exposed_seconds=0.02,
              seconds=0.02)  # fmt: skip
    lines = (
        CodeLine(place="train.py:80 in main", ratio=0.6),
        CodeLine(place="/home/me/train.py:12 in log", ratio=0.3, communicates=True),
    )
    return one(own, own_code=lines, **facts)


def test_many_scalars_that_the_script_averages_are_stacked() -> None:
    finding = found(logging_rank(), "tiny_collectives")
    assert finding is not None and finding.remedy is not None
    assert finding.text == (
        "10.0 % of a step waits for the script's own 24 all_reduces; 4 B each, mostly at "
        "train.py:12 in log"
    )
    assert "torch.stack(values)" in finding.remedy.diff
    assert finding.remedy.gain_high_seconds == pytest.approx(1.3 * 0.02 * 23 / 24)


def test_the_line_of_the_script_may_be_seen_on_another_rank() -> None:
    """The agent of the worst rank has seen too few lines of its script."""
    worst = changed(logging_rank(), own_code=())
    findings = advise(run(replace(worst, rank=0), replace(logging_rank(), rank=1)))
    finding = next(f for f in findings if f.rule == "tiny_collectives")
    assert finding.rank == 0 and "mostly at train.py:12 in log" in finding.text


@pytest.mark.parametrize(
    ("facts", "diff"),
    [
        ({"strategy": "unknown"}, "DistributedDataParallel(model)"),
        (
            {"strategy": "unknown", "process": {"params_bytes": 6 * MIB + 4096}},
            "DistributedDataParallel",
        ),
        ({"strategy": "fsdp2"}, "torch.stack"),
        ({"strategy": "unknown", "process": {"params_bytes": 100 * MIB}}, "torch.stack"),
        ({"strategy": "unknown", "process": {}}, "torch.stack"),
    ],
)
def test_gradients_that_the_script_averages_are_given_to_ddp(facts: dict[str, Any], diff: str) -> None:
    """96 all-reduces of the 6 MiB of a model, as courses write it."""
    base: Any = {"process": {"params_bytes": 6 * MIB}}
    finding = found(logging_rank(96.0, 6.0 * MIB, **(base | facts)), "tiny_collectives")
    assert finding is not None and finding.remedy is not None
    assert diff in finding.remedy.diff


@pytest.mark.parametrize(
    "rank",
    [
        logging_rank(calls=3.0),
        logging_rank(nbytes=24.0 * 64 * MIB),
        one(*units("all_reduce", "backward", 40)),
    ],
)
def test_few_or_large_calls_and_those_of_units_are_not_stacked(rank: RankSnapshot) -> None:
    assert not [diff for diff in remedies(rank, "tiny_collectives") if "stack" in diff]


@pytest.mark.parametrize(
    ("living", "grown", "diff"),
    [(6, 600 * MIB, "engine.destroy()"), (1, 600 * MIB, "losses"), (6, 100 * MIB, "losses")],
)
def test_engines_that_pile_up_are_destroyed(living: int, grown: int, diff: str) -> None:
    """A sweep makes one after another; a growth that is not theirs gets the usual advice."""
    engine = deepspeed_facts()["engines"][0]
    engines = tuple(replace(engine, engine=n, dropped=n > living) for n in range(1, 7))
    state = RoleRow(role="optimizer_state", device_bytes=0, host_bytes=GIB, disk_bytes=0,
                    pinned_bytes=0, grown_bytes=grown)  # fmt: skip
    leak = Risk(pool=HOST, ratio=0.6, cause=RiskCause.GROWTH, steps_left=500.0, used_bytes=2 * GIB,
                capacity_bytes=20 * GIB, growth_bytes_per_step=11.0 * MIB, grown_bytes=GIB)  # fmt: skip
    (found_diff,) = remedies(one(engines=engines, roles=(state,), risks=(leak,)), "oom_risk")
    assert diff in found_diff


def test_without_cpus_for_workers_a_faster_batch_is_advised() -> None:
    snapshot = loads(loader={"num_workers": 0}, loading=made_in(0.08), pressure=CPU)
    finding = found(snapshot, "data_wait")
    assert finding is not None and finding.remedy is None
    assert finding.action.startswith("Make a batch faster: storing samples as they are used")


def test_workers_that_do_not_keep_up_are_not_started_again_by_an_epoch() -> None:
    """Every fourth step waits for four workers, which need 170 ms for a batch; a step trains 15 ms."""
    keeps_up = pausing(
        Phase.DATA_WAIT, 8, 2000, loader={"num_workers": 4, "persistent_workers": False},
        loading=made_in(0.6),
    )  # fmt: skip
    finding = found(keeps_up, "slow_steps")
    assert finding is not None and finding.remedy is not None
    behind = changed(keeps_up, loading=made_in(1.7))
    finding = found(behind, "slow_steps")
    assert finding is None or finding.remedy is None
    told = found(behind, "data_wait")
    assert told is not None and told.remedy is not None and "num_workers=8" in told.remedy.diff


def test_workers_that_the_steps_need_are_not_taken_away() -> None:
    """Eight that need 1.4 s for a batch deliver one each 175 ms; fewer would be the limit."""
    starved = loads(loader={"num_workers": 8}, loading=made_in(1.4), pressure=short_of_cpus(0.5, cpus=2))
    starved = changed(starved, recent=(summary(1, end_ns=300 * MS, start_ns=100 * MS),) * 30)
    finding = found(starved, "cpu_starved")
    assert finding is not None
    assert finding.remedy is None or "num_workers" not in finding.remedy.diff
    idle = changed(starved, loading=made_in(0.01))
    finding = found(idle, "cpu_starved")
    assert finding is not None and finding.remedy is not None and "num_workers=1" in finding.remedy.diff


@pytest.mark.parametrize(
    ("trains", "waits", "workers", "cpus", "low", "high"),
    [
        (0.020, 0.180, 0, 16, 0.0775, 0.1705),  # measured: 158 ms, examples/slow_loader.py
        (0.0084, 0.1716, 0, 2, 0.0042, 0.151),  # measured: 135 ms; a worker that computes hides 8.4 ms
        (0.120, 0.080, 0, 16, 0.040, 0.088),  # four workers hide all of it
        (0.120, 0.080, 4, 16, 0.024, 0.088),
        (0.020, 0.060, 4, 2, 0.0, 0.044),  # a step as long as its batch: half
    ],
)
def test_what_workers_gain_is_a_step_as_long_as_its_training_or_its_batch(
    trains: float, waits: float, workers: int, cpus: int, low: float, high: float
) -> None:
    train_ns, wait_ns = round(trains * 1e9), round(waits * 1e9)
    phase_ns = [0] * len(Phase)
    phase_ns[Phase.FORWARD], phase_ns[Phase.DATA_WAIT] = train_ns, wait_ns
    step = summary(
        1, start_ns=0, end_ns=train_ns + wait_ns, phase_ns=tuple(phase_ns), communication_ns=0,
        exposed_ns=0,
    )  # fmt: skip
    loading = made_in((trains + waits) * max(1, workers) * 1.01)
    snapshot = one(
        recent=(step,) * 30, loader={"num_workers": workers}, loading=loading,
        pressure=short_of_cpus(0.0, cpus=cpus),
    )  # fmt: skip
    finding = found(snapshot, "data_wait")
    assert finding is not None and finding.remedy is not None
    gains = finding.remedy.gain_low_seconds, finding.remedy.gain_high_seconds
    assert gains == pytest.approx((low, high), rel=0.01)
