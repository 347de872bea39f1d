"""Snapshots with something to see on every screen, and sources that give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache

from builders import MS, changed, device_memory, rank, run, summary
from recordings import RINGS

from zeromon.base.errors import CaptureRefused
from zeromon.diagnosis.engine import advise
from zeromon.fold.lanes import lanes_of_rings
from zeromon.ring.slices import run_events
from zeromon.snapshot import CollectiveStatsRow, Finding, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.communication import InFlight, Straggler, UnitRow
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.host import Device
from zeromon.snapshot.memory import Cause, ExpectedRow, Risk, RoleRow
from zeromon.snapshot.run import Fleet, FleetNode, Spread
from zeromon.snapshot.step import Lanes
from zeromon.sources.base import Output, Playback
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST
from zeromon.storage.step_history.rows import NAMES, Series

GIB = 1 << 30


def wave(number: int, shift: int) -> int:
    """A figure that repeats every 16 steps."""
    return 10 + ((number + shift) * 5 % 16)


def one_step(number: int, rank_number: int, start_ns: int) -> StepSummary:
    """A step of about 430 ms, a little different each time."""
    exposed = (30 + 4 * wave(number, 3 * rank_number)) * MS
    forward, backward, optimizer = 110 * MS, 190 * MS, 25 * MS
    data, other = (6 + wave(number, 1) % 5) * MS, 9 * MS
    waits = (0, exposed // 4, exposed - exposed // 4, 0, 0, 0)
    phases = (other, forward + waits[1], backward + waits[2], optimizer, data, 0)
    return summary(
        number, start_ns=start_ns, end_ns=start_ns + sum(phases), phase_ns=phases,
        phase_exposed_ns=waits, communication_ns=exposed + 140 * MS, exposed_ns=exposed,
        idle=number % 32 == 0, collectives=48, collective_bytes=6 << 30,
        allocated_bytes=round((38 + number / 9 + rank_number % 8) * GIB),
        reserved_bytes=round((44 + number / 9 + rank_number % 8) * GIB), rss_bytes=9 * GIB,
    )  # fmt: skip


@lru_cache
def steps(rank_number: int, count: int) -> tuple[StepSummary, ...]:
    """*count* steps one after the other."""
    made: list[StepSummary] = []
    at = 1000 * MS
    for number in range(1, count + 1):
        made.append(one_step(number, rank_number, at))
        at = made[-1].end_ns + (30 * MS if number % 40 == 0 else 0)
    return tuple(made)


@lru_cache
def traffic(rank_number: int) -> tuple[CollectiveStatsRow, ...]:
    """An FSDP model of six layers: gathered twice, reduced once."""
    rows = []
    for op, phase, ms in (("all_gather", "forward", 9), ("all_gather", "backward", 11),
                          ("reduce_scatter", "backward", 16)):  # fmt: skip
        for layer in range(6):
            busy = (ms + (layer * 7 + rank_number) % 5) / 1e3
            rows.append(CollectiveStatsRow(
                op=op, group="dp_shard", group_size=8, nodes=1, phase=phase,
                unit=f"model.layers.{layer}", count=160, calls=1.0, nbytes=218e6, seconds=busy,
                exposed_seconds=busy * 0.4, exposed_total_seconds=busy * 64, wait_seconds=busy * 0.15,
                transfer_seconds=busy * 0.8, algbw_bytes_per_second=218e6 / busy,
                busbw_bytes_per_second=218e6 / busy * 7 / 8, best_busbw_bytes_per_second=31e9,
            ))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


def roles() -> tuple[tuple[RoleRow, ...], tuple[ExpectedRow, ...]]:
    """What is where, beside what was predicted."""
    facts = (("sharded_param", 3.5, 3.5), ("optimizer_state", 14.0, 14.0), ("sharded_grad", 3.5, 3.4),
             ("unsharded_param", 6.1, 5.2))  # fmt: skip
    rows = tuple(
        RoleRow(role=name, device_bytes=round(held * GIB), host_bytes=0, disk_bytes=0,
                pinned_bytes=0, grown_bytes=GIB if name == "unsharded_param" else 0)
        for name, held, _ in facts
    )  # fmt: skip
    expected = tuple(
        ExpectedRow(
            role=name, measured_bytes=round(held * GIB), plain_bytes=round(wanted * 0.9 * GIB),
            predicted_bytes=round(wanted * GIB),
            causes=(Cause(text="padding to equal shards", nbytes=round(wanted * 0.1 * GIB)),),
        )
        for name, held, wanted in facts
    )  # fmt: skip
    return rows, expected


_BASE = rank(0)


def one_rank(number: int, count: int, ranks: int) -> RankSnapshot:
    """A rank of that run."""
    recent = steps(number % 16, count)  # what follows repeats
    growing = number == min(3, ranks - 1)
    risk = Risk(
        pool="device", ratio=0.74 if growing else 0.31, cause="growth" if growing else "none",
        steps_left=148.0 if growing else None, steps_soonest=130.0 if growing else None,
        steps_latest=170.0 if growing else None,
        growth_bytes_per_step=GIB / 9 if growing else None,
        used_bytes=recent[-1].reserved_bytes, capacity_bytes=80 * GIB,
    )  # fmt: skip
    held, expected = roles()
    units = tuple(
        UnitRow(
            fqn=f"model.layers.{n}", unshards=320, exposed_seconds=1.0 + n,
            peak_allocated_bytes=(30 + (n * 11) % 17) * GIB,
        )
        for n in range(6)
    )  # fmt: skip
    flying = InFlight(
        op="all_gather", group="dp_shard", sequence=7712, unit="model.layers.4", phase="backward",
        nbytes=218 << 20, issued_ns=recent[-1].end_ns - 12 * MS,
    )  # fmt: skip
    return changed(
        _BASE, rank=number, pid=100 + number, recent=recent, last_step=count, watched_steps=count,
        world_size=ranks, node=f"node{number // 8:02}",
        device=f"cuda:{number % 8}", local_rank=number % 8, strategy="fsdp2",
        median_seconds=0.43 + number / 2000, mean_seconds=0.43 + number / 2000,
        exposed_ratio=0.22 - (number % 16) / 100,
        exposed_seconds=0.095 - (number % 16) / 230, overlap_ratio=0.61 + (number % 8) / 50,
        late_seconds=0.021 if number == 1 else 0.001 + (number % 5) / 1000,
        wait_seconds=0.002 if number == 1 else 0.018 + (number % 7) / 1000,
        accounted_overhead_ratio=0.003, overhead_ratio=0.001, overhead_noise_ratio=0.002,
        phase="backward",
        unit=f"model.layers.{number % 6}", risks=(risk,), traffic=traffic(number % 5), units=units,
        roles=held, expected=expected, rss_bytes=9 * GIB, in_flight=(flying,) if number < 2 else (),
        last_event_ns=recent[-1].end_ns,
        memory_device=device_memory(
            allocated_bytes=recent[-1].allocated_bytes, active_bytes=recent[-1].allocated_bytes + GIB,
            reserved_bytes=recent[-1].reserved_bytes, inactive_split_bytes=3 * GIB,
        ),
        machine_device=Device(
            name="NVIDIA H100", used_bytes=70 * GIB, total_bytes=80 * GIB, utilization_ratio=0.97,
            power_watts=612.0, temperature_celsius=63.0,
        ),
    )  # fmt: skip


DATA_WAIT = Finding(
    rule="data_wait", code="ZM601", severity="warning", rank=1,
    text="20.0 ms of a step (4.6 %) wait for the next batch: the loader has no workers",
    remedy=Remedy(
        cause="no workers: batches are made in the training process", dialect="Python (DataLoader)",
        diff="- DataLoader(data)\n+ DataLoader(data, num_workers=4)",
        gain_low_seconds=0.015, gain_high_seconds=0.02, price="4 processes, and their batches in memory",
    ),
)  # fmt: skip


@cache
def snapshot(ranks: int = 2, count: int = 160) -> RunSnapshot:
    """A run with something to see: a thousand ranks take seconds to make."""
    made = [one_rank(n, count, ranks) for n in range(ranks)]
    late = Straggler(
        rank=1, late_seconds=0.021, share=0.108, since_step=101, phases=("data_wait",),
        longer_seconds=0.019,
    )  # fmt: skip
    base = run(
        *made, run="train_gpt-091500-abc", node="node00", taken_wall=1070.0,
        taken_ns=made[0].steps.recent[-1].end_ns, stragglers=(late,) if ranks > 1 else (),
    )  # fmt: skip
    return replace(base, findings=(*advise(base), DATA_WAIT))


def spread(*values: float) -> Spread:
    least, p5, median, p95, most = values
    return Spread(least=least, p5=p5, median=median, p95=p95, most=most)


@cache
def fleet_picture(nodes: int = 2048, each: int = 8) -> RunSnapshot:
    """A run of thousands of ranks, as a Prometheus tells of it: one rank failed, a node is silent."""
    base = snapshot(16)
    shown = [0, 1, 3, 8, 9, 700, 701, 4242, 9999, 16383]
    ranks = [
        changed(
            base.ranks[n], rank=number, local_rank=number % each, node=f"node{number // each:04}",
            world_size=nodes * each, phase="", unit="", units=(), traffic=(), in_flight=(),
        )
        for n, number in enumerate(shown)
    ]  # fmt: skip
    ranks[5] = changed(ranks[5], alive=False, failed=True, ended="failed")
    ranks[8] = changed(ranks[8], alive=False, ended="not seen for 40.00 s")
    rows = tuple(
        FleetNode(
            node=f"node{n:04}", address=f"10.0.{n // 256}.{n % 256}:9417", ranks=each,
            up=0 if n == 1249 else each - (n == 87), failed=int(n == 87),
            silent_seconds=40.0 if n == 1249 else 0.0,
            step_seconds=None if n == 1249 else 0.43 + n % 37 / 1000,
            exposed_ratio=None if n == 1249 else 0.05 + n * 7 % 101 / 400,
            late_seconds=0.021 if n == 0 else 0.001 + n % 5 / 1000, wait_seconds=0.02 - n % 9 / 1000,
            memory_bytes=(40 + n % 23) * GIB, risk_ratio=0.74 if n == 0 else 0.1 + n % 7 / 30,
        )
        for n in range(nodes)
    )  # fmt: skip
    spreads = {
        "step_seconds": spread(0.43, 0.432, 0.444, 0.46, 0.466),
        "exposed_ratio": spread(0.05, 0.06, 0.17, 0.28, 0.3),
        "overlap_ratio": spread(0.4, 0.5, 0.61, 0.7, 0.75),
        "late_seconds": spread(0.0, 0.001, 0.003, 0.005, 0.021),
        "memory_bytes": spread(*(n * GIB for n in (40, 41, 51, 61, 62))),
        "headroom_bytes": spread(*(n * GIB for n in (18, 19, 29, 39, 40))),
        "risk_ratio": spread(0.1, 0.1, 0.2, 0.3, 0.74),
    }
    fleet = Fleet(
        ranks=nodes * each, up=nodes * each - each - 1, failed=1, silent=each, waiting=0, nodes=rows,
        spreads=spreads,
    )  # fmt: skip
    return replace(
        base, ranks=tuple(ranks), fleet=fleet, origin="http://prometheus:9090", every_seconds=15.0,
        node=f"{nodes:,} nodes", command=(), findings=(base.findings[0],), stragglers=(),
        note="the clock of http://prometheus:9090 is 12.00 s ahead of this machine's",
    )  # fmt: skip


class FixedSource:
    """Gives the same snapshot for ever, or raises; keeps the moments that it is given."""

    live = True
    relocatable = False
    playback: Playback | None = None

    def __init__(
        self, answer: RunSnapshot | Exception, kept: dict[float, RunSnapshot] | None = None
    ) -> None:
        self.answer = answer
        self.kept = kept or {}
        self.run = "run" if isinstance(answer, Exception) else answer.run
        self.known: list[Finding] = []
        self.asked: list[Sequence[int]] = []
        self.reads = 0
        self.detail: tuple[tuple[int, ...], str] = ((), "")

    def latest(self) -> RunSnapshot:
        self.reads += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def span(self) -> tuple[float, float] | None:
        return (min(self.kept), max(self.kept)) if self.kept else None

    def at(self, wall: float) -> RunSnapshot:
        return self.kept[max((known for known in self.kept if known <= wall), default=min(self.kept))]

    def series(self, query: StepQuery = WHOLE_RUN) -> Series:
        self.asked.append(query.ranks)
        from zeromon.storage.step_history.rows import row_of

        rows = [
            row_of(rank.rank, step, 0)
            for rank in self.latest().ranks
            if rank.rank in query.ranks
            for step in rank.steps.recent
        ]
        return {name: [row[i] for row in rows] for i, name in enumerate(NAMES)}

    def findings(self) -> list[Finding]:
        return self.known

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """Those of a recorded run of FSDP2."""
        rings = list(run_events("no live run", RINGS / "straggler-data"))
        return lanes_of_rings(rings, {0: 0, 1: 0}, steps=steps, ranks=ranks)

    def output(self, pid: int) -> Output:
        return Output("/logs/train.log", (f"process {pid}", "step 1 loss 2.5", "step 2 loss 2.4"))

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:
        raise CaptureRefused(f"run {self.run} is not live", "A trace needs a live run.")

    def request_detail(self, ranks: Sequence[int] = (), node: str = "") -> None:
        self.detail = (tuple(ranks), node)


class FleetSource(FixedSource):
    """Of such a run; its past is of all ranks together."""

    def series(self, query: StepQuery = WHOLE_RUN) -> Series:
        from zeromon.storage.step_history.rows import row_of

        if query.ranks:
            return super().series(query)
        lines = ((LEAST, 0), (MEDIAN, 3), (MOST, 7))
        rows = [row_of(of, step, 0) for of, variant in lines for step in steps(variant, 160)]
        return {name: [row[i] for row in rows] for i, name in enumerate(NAMES)}
