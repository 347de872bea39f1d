"""Samples of a Prometheus in, the snapshots and histories out that all views know. Pure.

What is not in the samples is unknown: None, -1, or empty. Texts come from labels, which anybody may
have written: a rank that is no number is skipped, every other text is for the view to clean.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from zeromon.base.errors import RuleNotFound
from zeromon.base.units import human_count
from zeromon.diagnosis.rule import find_page
from zeromon.readout.figures import FIELD_OF_METRIC, MEMORY, ON_NODES
from zeromon.readout.text import rank_prefix, silent_for
from zeromon.ring.codes import Phase
from zeromon.snapshot import (
    CollectiveStatsRow,
    Finding,
    Hang,
    Pool,
    RankSnapshot,
    RiskCause,
    Severity,
    StepSummary,
    rank as records,
)
from zeromon.snapshot.communication import CollectiveRow, Dimension, HangKind, InFlight, Straggler
from zeromon.snapshot.focus import HOST_OOM, first_failed
from zeromon.snapshot.host import Device, HostMemory, Pressure
from zeromon.snapshot.ledger import Cause, LedgerRow, sum_by_cause
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, DeviceMemory, ExpectedRow, Risk, RoleRow
from zeromon.snapshot.run import DeathRole, Fleet, FleetNode, Spread
from zeromon.snapshot.step import UNTIMED
from zeromon.sources.prometheus.client import Line, Sample
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST
from zeromon.storage.step_history.rows import ABSENT, NAMES, Series, step_of

# ---- samples by rank: which rank each belongs to, and which ranks form one job ------------------

_MAX_RANK = 1 << 31


class Key(NamedTuple):
    """A rank as one collector exports it: two jobs of one name have the same rank numbers."""

    rank: int
    instance: str


@dataclass(slots=True)
class RankSamples:
    """The samples of one rank; metric names come without ``zeromon_``."""

    found: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    """Metric name -> (labels, value)."""
    rates: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds a second."""

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """The value of a metric that has one a rank."""
        rows = self.found.get(name)
        return rows[0][1] if rows else otherwise

    def whole(self, name: str) -> int:
        """The value as an integer; -1 where it is unknown."""
        value = self.number(name)
        return -1 if value is None else int(value)

    def count(self, name: str) -> int:
        """The value as an integer; 0 where it is unknown."""
        return max(0, self.whole(name))

    def label(self, name: str, label: str) -> str:
        """One label of an info metric; "" where it is unknown."""
        rows = self.found.get(name)
        return rows[0][0].get(label, "") if rows else ""

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a metric by the values of *labels*."""
        rows = self.found.get(name, ())
        return {tuple(tags.get(label, "") for label in labels): value for tags, value in rows}

    @property
    def up(self) -> bool:
        """True if the rank's process lives."""
        return self.number("rank_up") == 1


def key_of(labels: Mapping[str, str]) -> Key | None:
    """The rank that labels name; None where the label ``rank`` is no number."""
    digits = labels.get("rank", "")
    # Cut: int() raises ValueError for a label of more than 4300 digits
    if not (digits.isascii() and digits.isdigit() and int(digits[:12]) < _MAX_RANK):
        return None
    return Key(int(digits[:12]), labels.get("instance", ""))


def samples_by_rank(columns: Iterable[Sample], rates: Iterable[Sample]) -> dict[Key, RankSamples]:
    """The answers to :mod:`~zeromon.sources.prometheus.client`, columns and rates, by rank."""
    by_key: dict[Key, RankSamples] = {}
    for sample in columns:
        key = key_of(sample.labels)
        if key is not None:
            name = sample.labels.get("__name__", "").removeprefix("zeromon_")
            facts = by_key.setdefault(key, RankSamples())
            facts.found.setdefault(name, []).append((sample.labels, sample.value))
    for sample in rates:
        key = key_of(sample.labels)
        facts_of = by_key.get(key) if key is not None else None
        if facts_of is not None:
            of = sample.labels.get("of", "")
            if of == "phase":
                facts_of.phases[sample.labels.get("phase", "")] = sample.value
            else:
                facts_of.rates[of] = sample.value
    return by_key


def dedupe_jobs(ranks: Mapping[Key, RankSamples]) -> tuple[dict[Key, RankSamples], tuple[str, ...]]:
    """The ranks of one job, and the collectors that export another job of the same name.

    Of a rank that was restarted on another node the living process counts. Two living processes of one
    rank are two jobs: the collector with the smallest address is kept, so that the choice is stable.
    """
    keys_by_rank: dict[int, list[Key]] = {}
    for key in ranks:
        keys_by_rank.setdefault(key.rank, []).append(key)
    rejected: set[str] = set()
    for keys in keys_by_rank.values():
        alive = sorted(key.instance for key in keys if ranks[key].up)
        rejected.update(alive[1:])
    chosen = {key: facts for key, facts in ranks.items() if key.instance not in rejected}
    for keys in keys_by_rank.values():
        mine = [key for key in keys if key in chosen]
        winner = max(mine, key=lambda k: (ranks[k].up, ranks[k].count("steps_total")), default=None)
        for key in mine:
            if key != winner:
                del chosen[key]
    return chosen, tuple(sorted(rejected))


# ---- range queries in, step history out ---------------------------------------------------------

_INSTEAD = {"most": MOST, "median": MEDIAN, "least": LEAST}


def series_of_ranks(matrix: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.client.steps_over_time`: a row a rank and moment.

    A moment at which a rank has no step is a gap. Rows of one moment have the same step number, that of
    the rank with the most steps.
    """
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for entry in matrix:
        key = key_of(entry.labels)
        if key is None:
            continue
        name = entry.labels.get("phase") or entry.labels.get("figure") or entry.labels.get("of", "")
        _fill_series_cells(cells.setdefault(key.rank, {}), name, entry)
    return _cell_rows(cells, interval)


def whole_series_of(matrix: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.client.whole_over_time`: max, median, min."""
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for series in matrix:
        of, quantity = series.labels.get("of", ""), series.labels.get("figure", "")
        if of in _INSTEAD:
            _fill_series_cells(cells.setdefault(_INSTEAD[of], {}), quantity, series)
        elif of == "steps_total":
            for instead in _INSTEAD.values():
                _fill_series_cells(cells.setdefault(instead, {}), of, series)
    return _cell_rows(cells, interval)


def _fill_series_cells(by_time: dict[float, dict[str, float]], name: str, series: Line) -> None:
    for at, number in series.values:
        value = float(number)
        if value == value and abs(value) != float("inf"):
            by_time.setdefault(at, {})[name] = value


_PHASES = {f"{phase.label}_us": phase.label for phase in Phase}


def _cell_rows(cells: Mapping[int, Mapping[float, Mapping[str, float]]], interval: float) -> Series:
    reached: dict[float, int] = {}
    for by_time in cells.values():
        for at, row in by_time.items():
            reached[at] = max(reached.get(at, 0), int(row.get("steps_total", 0)))
    columns: Series = {name: [] for name in NAMES}
    for rank, by_time in sorted(cells.items()):
        last_step = -1
        for at, row in sorted(by_time.items()):
            step = reached[at]
            if "step_seconds" in row and "steps_total" in row and step != last_step:
                for name, value in row_of_cell(rank, step, at, row, interval).items():
                    columns[name].append(value)
                last_step = step
    return columns


def row_of_cell(
    rank: int, step: int, at: float, row: Mapping[str, float], interval: float
) -> dict[str, Any]:
    """The mean step that ends *at* a moment, of so many seconds, by the columns of a step history."""
    seconds, rate = row["step_seconds"], row.get("steps", 0.0)
    exposed = row.get("exposed_communication_ratio")
    wait = (exposed or 0.0) * seconds
    overlap = row.get("overlap_ratio", 1.0)
    communication = wait / (1 - overlap) if overlap < 1 else wait
    if "overlap_ratio" not in row and wait:
        communication = -1e-6  # only the waits for it are known
    values: dict[str, Any] = dict(zip(NAMES, ABSENT, strict=True))
    values |= {
        "rank": rank, "step": step, "steps": max(1, round(interval / seconds)) if seconds else 1,
        "flags": UNTIMED if exposed is None else 0, "start_us": round(1e6 * (at - seconds)),
        "duration_us": round(1e6 * seconds),
        "communication_us": round(1e6 * communication),
        "exposed_us": round(1e6 * wait), "allocated_bytes": int(row.get("memory_allocated_bytes", -1)),
        "reserved_bytes": int(row.get("memory_reserved_bytes", -1)),
        "rss_bytes": int(row.get("host_memory_rss_bytes", -1)), "other_bytes": -1,
    }  # fmt: skip
    for name, phase in _PHASES.items():
        values[name] = round(1e6 * row.get(phase, 0.0) / rate) if rate else 0
    return values


# ---- aggregated samples of a run too large to read rank by rank: counts, spreads, nodes ----------

_RESIDENT = MEMORY.metrics[-1]


def _field_of_figure(labels: Mapping[str, str], fields: Container[str]) -> str | None:
    """The field of a figure; resident memory counts only where no device memory is known."""
    name = labels.get("figure") or labels.get("of", "")
    field = FIELD_OF_METRIC.get(name)
    return None if name == _RESIDENT and field in fields else field


@dataclass(slots=True)
class Whole:
    """The decoded answer to :func:`zeromon.sources.prometheus.client.whole_run`."""

    counts: dict[str, float]
    spreads: dict[str, Spread]
    findings: dict[tuple[str, str], int]
    waiting: int

    @property
    def ranks(self) -> int:
        """The number of ranks that are exported now."""
        return int(self.counts.get("ranks", 0))


def whole_of(samples: Iterable[Sample]) -> Whole:
    """Decodes the answer to :func:`zeromon.sources.prometheus.client.whole_run`."""
    totals = Whole({}, {}, {}, 0)
    counted: dict[str, dict[float, float]] = {}
    for sample in samples:
        labels, of = sample.labels, sample.labels.get("of", "")
        if of == "finding":
            rule = labels.get("rule", ""), labels.get("severity", "")
            totals.findings[rule] = sample.count
        elif of == "hang":
            totals.waiting += sample.count
        elif of == "spread":
            quantity, ln = labels.get("figure", ""), float(labels.get("ln", "nan"))
            if ln < _MAX_LN:  # what is below zero has no logarithm
                counted.setdefault(quantity, {})[math.exp(ln)] = sample.value
        else:
            totals.counts[of] = sample.value
    # Resident memory last: it counts only where no device memory is known by then
    for name in sorted(counted, key=lambda name: name == _RESIDENT):
        quantity = _field_of_figure({"figure": name}, totals.spreads) or ""
        totals.spreads.setdefault(quantity, spread_of_counts(counted[name]))
    totals.spreads.pop("", None)
    return totals


# exp() raises OverflowError above 709
_MAX_LN = 700.0


def spread_of_counts(counted: Mapping[float, float]) -> Spread:
    """The quantiles of a figure; *counted*: value -> how many ranks have it."""
    values = sorted(counted)
    reached = list(accumulate(counted[value] for value in values))
    lowest, p5, median, p95, highest = (
        values[min(len(values) - 1, bisect_left(reached, share * reached[-1]))]
        for share in (0.0, 0.05, 0.5, 0.95, 1.0)
    )
    return Spread(least=lowest, p5=p5, median=median, p95=p95, most=highest)


def nodes_of_samples(
    samples: Iterable[Sample], names: Mapping[str, str], silent: Mapping[str, tuple[int, float]]
) -> tuple[FleetNode, ...]:
    """The nodes, sorted by name; *silent*: collector -> (ranks it had, seconds without an answer)."""
    rows: dict[str, dict[str, float]] = {}
    for sample in sorted(samples, key=lambda s: s.labels.get("figure") == _RESIDENT):
        row = rows.setdefault(sample.labels.get("instance", ""), {})
        of = sample.labels.get("of", "")
        if of in ("ranks", "up", "failed", "lost"):
            row[of] = sample.value
            continue
        field = _field_of_figure(sample.labels, row)
        if field is not None:
            row[field] = sample.value
    nodes = [_fleet_node(address, row, names) for address, row in rows.items() if "ranks" in row]
    nodes += [
        FleetNode(node=names.get(address) or address, address=address, ranks=ranks, up=0, failed=0,
                  silent_seconds=seconds)
        for address, (ranks, seconds) in silent.items()
    ]  # fmt: skip
    return tuple(sorted(nodes, key=lambda node: _natural_sort_key(node.node)))


def _fleet_node(address: str, row: Mapping[str, float], names: Mapping[str, str]) -> FleetNode:
    values: dict[str, Any] = {column.field: row.get(column.field) for column in ON_NODES}
    return FleetNode(
        node=names.get(address) or address, address=address, ranks=int(row.get("ranks", 0)),
        up=int(row.get("up", 0)), failed=int(row.get("failed", 0)), **values,
    )  # fmt: skip


def _natural_sort_key(name: str) -> tuple[str, int, str]:
    """``node9`` before ``node10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :][:18] or 0), name


def fleet_of_nodes(totals: Whole, nodes: tuple[FleetNode, ...]) -> Fleet:
    """The state of a large run; the largest values are exact, those of the worst nodes."""
    maxima = {
        column.field: max((v for n in nodes if (v := column.of_node(n)) is not None), default=None)
        for column in ON_NODES
    }
    spreads = {
        name: spread if (high := maxima.get(name)) is None else replace(spread, most=high)
        for name, spread in totals.spreads.items()
    }
    silent = sum(node.ranks for node in nodes if node.silent_seconds)
    return Fleet(
        ranks=totals.ranks + silent, up=int(totals.counts.get("up", 0)), silent=silent,
        failed=int(totals.counts.get("failed", 0)), waiting=totals.waiting, nodes=nodes,
        spreads=spreads,
    )  # fmt: skip


# ---- the samples of one rank in, its snapshot out -----------------------------------------------

_SHORT_SECONDS = 1.0
"""A younger collective is an everyday one and not shown as in flight."""


def rank_of(
    key: Key, facts: RankSamples, taken_wall: float, run_step: int, *, silent_seconds: float = 0.0
) -> RankSnapshot:
    """The snapshot of a rank; *taken_wall*: its moment, seconds since the epoch.

    Its one recent step is the mean over the window of the rates, with the number *run_step*, the
    newest step of the run. *silent_seconds*: how long the rank has had no samples.
    """
    is_stopped = (DeathRole.STOPPED,) in facts.by("rank_death", "role")
    is_up, failed = facts.up, is_stopped or facts.number("rank_failed") == 1
    rate = facts.rates.get("steps", 0.0)
    seconds = facts.rates.get("spent", 0.0) / rate if rate > 0 else None
    exposed = facts.number("exposed_communication_ratio")
    now_ns, steps = round(taken_wall * 1e9), facts.count("steps_total")
    alive_text = records.DETACHED if facts.number("rank_detached") == 1 else ""
    outcome = alive_text if is_up else _failed_end_text(facts) if failed else "finished"
    if silent_seconds:
        outcome = silent_for(silent_seconds)
    point = mean_step_point(facts, run_step, now_ns, seconds) if seconds else None
    return RankSnapshot(
        rank=key.rank,
        local_rank=_int_or_zero(facts.label("rank_info", "local_rank")),
        world_size=_int_or_zero(facts.label("rank_info", "world_size")),
        pid=_int_or_zero(facts.label("rank_info", "pid")),
        node=facts.label("rank_info", "node") or key.instance,
        device=facts.label("rank_info", "device"), strategy=facts.label("rank_info", "strategy"),
        dimensions=_dim_rows(facts),
        status=records.RankStatus(
            alive=is_up and not silent_seconds, ended=outcome, failed=failed, exception="",
            started_ns=0, last_event_ns=round((taken_wall - silent_seconds) * 1e9),
        ),
        steps=records.RankSteps(
            last_step=steps, watched_steps=steps, micro_steps=facts.count("micro_steps_total"),
            skipped_steps=facts.count("steps_skipped_total"),
            median_seconds=seconds, mean_seconds=seconds,
            total_seconds=facts.rates.get("spent_in_all", 0.0),
            phase_seconds={p: s for (p,), s in facts.by("phase_seconds_total", "phase").items()},
            recent=(point,) if point is not None else (),
            phase="", unit="", duration_buckets=(),  # not exported
        ),
        communication=records.RankCommunication(
            collectives=_op_rows(facts), traffic=_stats_rows(facts),
            in_flight=_collectives_in_flight(facts, now_ns),
            untimed_ratio=facts.number("collectives_untimed_ratio"),
            overlap_ratio=facts.number("overlap_ratio"), exposed_ratio=exposed,
            exposed_seconds=exposed * seconds if exposed is not None and seconds else None,
            wait_seconds=facts.number("wait_for_late_rank_seconds"),
            late_seconds=facts.number("late_seconds"),
            units=(), untimed={}, unattributed={},  # not exported
        ),
        memory=records.RankMemory(
            device=_gpu_mem(facts), host=_host_memory(facts), roles=_by_role(facts),
            expected=_exp_rows(facts), risks=_oom_risk(facts),
            rss_bytes=facts.whole("host_memory_rss_bytes"),
            host_available_bytes=facts.whole("host_memory_available_bytes"),
            pinned_bytes=facts.whole("host_memory_pinned_bytes"),
        ),
        machine=records.RankMachine(device=_device_stats(facts), pressure=_cpu_pressure(facts)),
        config=records.RankConfig(),
        training=records.RankTraining(),
        ledger=records.RankLedger(
            rows=_ledger_rows(facts), startup_seconds=facts.number("startup_seconds"),
            unsaved_seconds=facts.number("unsaved_seconds"),
        ),
        agent=records.AgentHealth(
            dropped=facts.count("events_dropped_total"), errors=facts.count("agent_errors_total"),
            accounted_overhead_ratio=facts.number("agent_accounted_overhead_ratio"),
            overhead_ratio=facts.number("agent_overhead_ratio"),
            overhead_noise_ratio=facts.number("agent_overhead_noise_ratio"),
        ),
        requests=records.RankRequests(),
    )  # fmt: skip


def _ledger_rows(facts: RankSamples) -> tuple[LedgerRow, ...]:
    totals = facts.by("ledger_seconds_total", "cause").items()
    causes = {str(cause): cause for cause in Cause}
    return sum_by_cause(LedgerRow(cause=causes[c], seconds=s) for (c,), s in totals if c in causes)


def _failed_end_text(facts: RankSamples) -> str:
    cause = next((cause for (cause,) in facts.by("rank_death", "cause")), "")
    return KILLED_FOR_MEMORY if cause == HOST_OOM else cause or "failed"


def _int_or_zero(digits: str) -> int:
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 12 else 0


def mean_step_point(facts: RankSamples, step: int, end_ns: int, seconds: float) -> StepSummary:
    """The mean step over the window of the rates, as a step that ends at *end_ns*."""
    cell = {name: value for name in _OF_STEP if (value := facts.number(name)) is not None}
    cell |= facts.phases | {"steps": facts.rates.get("steps", 0.0), "step_seconds": seconds}
    exposed = cell.get("exposed_communication_ratio", 0.0) * seconds
    row = row_of_cell(-1, step, end_ns / 1e9, cell, seconds)
    return replace(
        step_of(tuple(row.values()), 0), end_ns=end_ns,
        phase_exposed_ns=_exposed_by_phase(facts, exposed),
    )  # fmt: skip


_OF_STEP = (
    "exposed_communication_ratio", "overlap_ratio", "memory_allocated_bytes", "memory_reserved_bytes",
    "host_memory_rss_bytes",
)  # fmt: skip


def _exposed_by_phase(facts: RankSamples, exposed: float) -> tuple[int, ...]:
    """Nanoseconds of *exposed* seconds by phase; empty where the server does not have the phases."""
    phases: Counter[str] = Counter()
    rows = facts.by("communication_step_exposed_seconds", "op", "group", "phase")
    for (_, _, phase), seconds in rows.items():
        phases[phase] += seconds  # type: ignore[assignment]  # Counter adds any number
    total = sum(phases.values()) or 1.0
    return tuple(round(1e9 * exposed * phases[phase.label] / total) for phase in Phase) if rows else ()


def _gpu_mem(facts: RankSamples) -> DeviceMemory | None:
    if "memory_reserved_bytes" not in facts.found:
        return None
    reserved, capacity = facts.whole("memory_reserved_bytes"), facts.whole("memory_capacity_bytes")
    # headroom = min(free, capacity - reserved): what it is below the latter, others hold
    free = facts.whole("memory_headroom_bytes")
    return DeviceMemory(
        allocated_bytes=facts.whole("memory_allocated_bytes"),
        active_bytes=facts.whole("memory_active_bytes"),
        reserved_bytes=reserved,
        inactive_split_bytes=facts.whole("memory_inactive_split_bytes"),
        capacity_bytes=capacity,
        free_bytes=free,
        retries=facts.count("memory_allocation_retries_total"),
        ooms=facts.count("memory_out_of_memory_total"),
    )


def _oom_risk(facts: RankSamples) -> tuple[Risk, ...]:
    steps_left = {
        pool: (cause, n) for (pool, cause), n in facts.by("oom_steps_left", "pool", "cause").items()
    }
    risks = []
    for (pool,), ratio in sorted(facts.by("oom_risk_ratio", "pool").items()):
        # As a tuple: before Python 3.12, `in Pool` raises TypeError for a str that is no member
        if pool not in tuple(Pool):
            continue  # of another version
        cause, steps = steps_left.get(pool, ("none", None))
        device = pool == Pool.DEVICE
        used = facts.whole("memory_reserved_bytes") if device else -1  # see with_host_use
        limit = facts.whole("memory_capacity_bytes") if device else -1
        headroom = limit - used if device else facts.whole("host_memory_headroom_bytes")
        growth = headroom / steps if steps and headroom > 0 else None
        risks.append(
            Risk(pool=Pool(pool), ratio=ratio, cause=RiskCause(cause), steps_left=steps, used_bytes=used,
                 capacity_bytes=limit, growth_bytes_per_step=growth)
        )  # fmt: skip
    return tuple(risks)


def with_host_use(ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """*ranks*, all of a run, with the memory that the ranks of each node use together."""
    used: dict[str, int] = {}
    for rank in ranks:
        used[rank.node] = used.get(rank.node, 0) + max(0, rank.memory.rss_bytes)
    risks = ((_risk_of_node(risk, rank, used) for risk in rank.memory.risks) for rank in ranks)
    return [
        replace(rank, memory=replace(rank.memory, risks=tuple(rank_risks)))
        for rank, rank_risks in zip(ranks, risks, strict=True)
    ]


def _risk_of_node(risk: Risk, rank: RankSnapshot, used: Mapping[str, int]) -> Risk:
    headroom = rank.memory.host.headroom_bytes if rank.memory.host is not None else -1
    if risk.pool != Pool.HOST or headroom < 0:
        return risk
    return replace(risk, used_bytes=used[rank.node], capacity_bytes=used[rank.node] + headroom)


def _collectives_in_flight(facts: RankSamples, now_ns: int) -> tuple[InFlight, ...]:
    age = facts.number("collective_in_flight_seconds") or 0.0
    if age < _SHORT_SECONDS:
        return ()
    return (
        InFlight(op="collective", group="", sequence=-1, unit="", phase="", nbytes=-1,
                 issued_ns=now_ns - round(age * 1e9)),
    )  # fmt: skip


def _device_stats(facts: RankSamples) -> Device | None:
    if not any(name.startswith("device_") for name in facts.found):
        return None
    used, total = facts.whole("device_memory_used_bytes"), facts.whole("device_memory_total_bytes")
    ecc, xid = facts.number("device_ecc_errors_total"), facts.number("device_xid")
    return Device(
        name=facts.label("rank_info", "device"),
        used_bytes=used if used >= 0 else None,
        total_bytes=total if total >= 0 else None,
        utilization_ratio=facts.number("device_utilization_ratio"),
        power_watts=facts.number("device_power_watts"),
        temperature_celsius=facts.number("device_temperature_celsius"),
        throttle_reasons=tuple(sorted(r for (r,) in facts.by("device_throttled", "reason"))),
        ecc_errors=None if ecc is None else int(ecc),
        xid=None if xid is None else int(xid),
    )


def _host_memory(facts: RankSamples) -> HostMemory | None:
    limit, free = facts.whole("host_memory_limit_bytes"), facts.whole("host_memory_headroom_bytes")
    return HostMemory(limit_bytes=limit, headroom_bytes=free) if max(limit, free) >= 0 else None


def _cpu_pressure(facts: RankSamples) -> Pressure | None:
    waits = facts.number("cpu_wait_ratio")
    if waits is None:
        return None
    return Pressure(
        cpu_wait_ratio=waits,
        major_faults_per_second=facts.number("major_faults_per_second") or 0.0,
        minute_cpu_wait_ratio=waits,
        held_cpu_wait_ratio=waits,
    )


def _by_role(facts: RankSamples) -> tuple[RoleRow, ...]:
    nbytes = facts.by("memory_role_bytes", "role", "place")
    return tuple(
        RoleRow(
            role=role, device_bytes=int(nbytes.get((role, "device"), 0)), pinned_bytes=0,
            host_bytes=int(nbytes.get((role, "host"), 0)), disk_bytes=int(nbytes.get((role, "disk"), 0)),
        )
        for role in dict.fromkeys(role for role, _ in nbytes)
    )  # fmt: skip


def _exp_rows(facts: RankSamples) -> tuple[ExpectedRow, ...]:
    analytic = facts.by("memory_role_plain_bytes", "role")
    predicted = facts.by("memory_role_predicted_bytes", "role")
    measured: dict[str, float] = {}
    for (role, _), nbytes in facts.by("memory_role_bytes", "role", "place").items():
        measured[role] = measured.get(role, 0.0) + nbytes
    return tuple(
        ExpectedRow(
            role=role, measured_bytes=int(measured[role]) if role in measured else None,
            plain_bytes=int(nbytes),
            predicted_bytes=int(predicted[role,]) if (role,) in predicted else None,
        )
        for (role,), nbytes in analytic.items()
    )  # fmt: skip


def _dims_by_group(facts: RankSamples) -> dict[str, str]:
    return {group: dim for dim, group in facts.by("dim_info", "dim", "group")}


def _dim_rows(facts: RankSamples) -> tuple[Dimension, ...]:
    """One row for each dimension, by the largest of its groups."""
    by_dim: dict[str, Dimension] = {}
    for dim, size, nodes in facts.by("dim_info", "dim", "size", "nodes"):
        dimension = by_dim.get(dim) or Dimension(name=dim)
        by_dim[dim] = replace(
            dimension, used=True, size=max(dimension.size, _int_or_zero(size)),
            nodes=max(dimension.nodes, _int_or_zero(nodes)),
        )  # fmt: skip
    return tuple(by_dim.values())


def _op_rows(facts: RankSamples) -> tuple[CollectiveRow, ...]:
    sizes = {row["group"]: (_int_or_zero(row.get("size", "")), _int_or_zero(row.get("nodes", "")))
             for row, _ in facts.found.get("group_info", ()) if "group" in row}  # fmt: skip
    columns = {
        name: facts.by(name, "op", "group")
        for name in ("collective_bytes_total", "collective_seconds_total",
                     "collective_exposed_seconds_total", "collective_busbw_bytes_per_second",
                     "collective_best_busbw_bytes_per_second")
    }  # fmt: skip
    nbytes, seconds, exposed, busbw, best_busbw = columns.values()
    dims = _dims_by_group(facts)
    return tuple(
        CollectiveRow(
            op=op, group=group, group_size=sizes.get(group, (0, 0))[0],
            nodes=sizes.get(group, (0, 0))[1], count=int(count), timed=int(count),
            nbytes=int(nbytes.get((op, group), 0)), quantized_bytes=0,
            seconds=seconds.get((op, group), 0.0),
            exposed_seconds=exposed.get((op, group), 0.0),
            busbw_bytes_per_second=busbw.get((op, group)),
            best_busbw_bytes_per_second=best_busbw.get((op, group), 0.0), dim=dims.get(group, ""),
        )
        for (op, group), count in facts.by("collectives_total", "op", "group").items()
    )  # fmt: skip


def _stats_rows(facts: RankSamples) -> tuple[CollectiveStatsRow, ...]:
    """By operation, group and phase: units are too many for labels."""
    keys = ("op", "group", "phase")
    exposed = facts.by("communication_step_exposed_seconds", *keys)
    waits = facts.by("communication_step_wait_seconds", *keys)
    moved = facts.by("communication_step_transfer_seconds", *keys)
    sizes = {row.get("group", ""): _int_or_zero(row.get("size", ""))
             for row, _ in facts.found.get("group_info", ())}  # fmt: skip
    dims = _dims_by_group(facts)
    rows = [
        CollectiveStatsRow(
            op=op, group=group, group_size=sizes.get(group, 0), nodes=0, phase=phase, unit="", count=0,
            calls=0.0, nbytes=-1, seconds=seconds, exposed_seconds=exposed.get((op, group, phase), 0.0),
            exposed_total_seconds=0.0, wait_seconds=waits.get((op, group, phase)),
            transfer_seconds=moved.get((op, group, phase)), algbw_bytes_per_second=None,
            busbw_bytes_per_second=None, best_busbw_bytes_per_second=0.0, dim=dims.get(group, ""),
        )
        for (op, group, phase), seconds in facts.by("communication_step_seconds", *keys).items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


def on_our_clock(rank: RankSnapshot, shift_ns: int) -> RankSnapshot:
    """*rank* with its times moved by *shift_ns*, from another node's monotonic clock to this one's."""
    status, in_flight = rank.status, rank.communication.in_flight
    recent = (
        replace(step, start_ns=step.start_ns + shift_ns, end_ns=step.end_ns + shift_ns)
        for step in rank.steps.recent
    )
    return (
        rank.with_recent(recent)
        .with_status(
            started_ns=status.started_ns + shift_ns, last_event_ns=status.last_event_ns + shift_ns
        )
        .with_communication(
            in_flight=tuple(replace(op, issued_ns=op.issued_ns + shift_ns) for op in in_flight)
        )
    )


# ---- findings, hangs and stragglers from the samples of several ranks, now and over time ---------


def findings_of(
    facts: Mapping[Key, RankSamples], counts: Mapping[tuple[str, str], int], ranks: int
) -> tuple[Finding, ...]:
    """One finding for each rule and rank; one alone for a rule that holds for all or for many ranks."""
    ranks_by_rule: dict[tuple[str, str], list[int]] = {}
    for key, samples in sorted(facts.items()):
        for rule, severity in samples.by("finding", "rule", "severity"):
            ranks_by_rule.setdefault((rule, severity), []).append(key.rank)
    findings = []
    for (rule, severity), named in ranks_by_rule.items():
        count = max(counts.get((rule, severity), 0), len(named))
        if ranks > 1 and count >= ranks:
            findings.append(_finding_of(rule, severity))
        elif count > _MAX_NAMED:
            listed = ", ".join(map(str, named[:_MAX_NAMED]))
            findings.append(
                _finding_of(rule, severity, f" (on {count:,} of {ranks:,} ranks: {listed}, ...)")
            )
        else:
            findings += [_finding_of(rule, severity, rank=rank) for rank in named]
    return tuple(sorted(findings, key=lambda f: (f.severity.order, f.code, f.rank)))


def with_deaths(findings: Iterable[Finding], ranks: Sequence[RankSnapshot]) -> tuple[Finding, ...]:
    """*findings*, of which those about deaths say what each of *ranks* died of, and in which step."""
    failed = [rank for rank in ranks if rank.status.failed]
    fates = {r.rank: f"{r.status.ended} after step {human_count(r.steps.last_step)}" for r in failed}
    if (first_dead := first_failed(failed)) is not None:
        fates[-1] = f"{rank_prefix(first_dead.rank)}{fates[first_dead.rank]}"
    return tuple(
        replace(f, text=fates.get(f.rank, f.text)) if f.rule == "rank_died" else f for f in findings
    )


_MAX_NAMED = 3


def _finding_of(rule: str, severity: str, extra: str = "", rank: int = -1) -> Finding:
    title, code = rule.replace("_", " "), ""
    with suppress(RuleNotFound):  # of another version
        title, code = find_page(rule).summary, find_page(rule).code
    return Finding(rule=rule, severity=Severity(severity), text=title + extra, rank=rank, code=code)


def hangs_of_ranks(facts: Mapping[Key, RankSamples]) -> tuple[Hang, ...]:
    """One hang for each kind, operation and group among the metrics ``zeromon_hang`` of the ranks."""
    roles: dict[tuple[str, ...], dict[str, list[int]]] = {}
    ages: dict[tuple[str, ...], float] = {}
    for key, samples in sorted(facts.items()):
        for role, *named in samples.by("hang", "role", "kind", "op", "group"):
            hang = tuple(named)
            roles.setdefault(hang, {}).setdefault(role, []).append(key.rank)
            age = samples.number("collective_in_flight_seconds") or 0.0
            ages[hang] = max(age, ages.get(hang, 0.0))
    return tuple(
        Hang(
            kind=HangKind(kind), op=op or "a collective", group=group or "a group", group_id="",
            sequence=-1, nbytes=-1, seconds=ages[kind, op, group], waiting=tuple(by.get("waiting", ())),
            elsewhere=(), calls=(), missing=tuple(by.get("missing", ())),
            dead=tuple(by.get("dead", ())),
        )
        for (kind, op, group), by in roles.items()
    )  # fmt: skip


def stragglers_of_findings(
    ranks: Iterable[RankSnapshot], findings: Iterable[Finding]
) -> tuple[Straggler, ...]:
    """The ranks that have the finding ``straggler``."""
    late = {finding.rank for finding in findings if finding.rule == "straggler"}
    return tuple(
        Straggler(
            rank=rank.rank, late_seconds=rank.communication.late_seconds or 0.0, since_step=0, phases=(),
            share=(rank.communication.late_seconds or 0.0) / (rank.steps.median_seconds or math.inf),
            longer_seconds=0.0,
        )
        for rank in ranks
        if rank.rank in late
    )  # fmt: skip


def history_of(matrix: Sequence[Line], step: float) -> list[Finding]:
    """When each finding appeared and disappeared, to the resolution of *step* seconds.

    A finding that holds at the newest moment has not disappeared.
    """
    newest_wall = max((series.values[-1][0] for series in matrix if series.values), default=0.0)
    findings = []
    for series in matrix:
        rule, severity = series.labels.get("rule", ""), series.labels.get("severity", "")
        for appeared, vanished in _spans_of_moments([at for at, _ in series.values], 1.5 * step):
            base = _finding_of(rule, severity)
            findings.append(
                Finding(rule=rule, rank=-1, code=base.code, severity=base.severity, text=base.text,
                             came=appeared, gone=None if vanished >= newest_wall else vanished + step)
            )  # fmt: skip
    return sorted(findings, key=lambda finding: (finding.came, finding.rule))


def _spans_of_moments(times: Sequence[float], max_gap: float) -> Iterable[tuple[float, float]]:
    """First and last of each series of moments that are at most *max_gap* apart."""
    start = 0
    for at in range(1, len(times) + 1):
        if at == len(times) or times[at] - times[at - 1] > max_gap:
            yield times[start], times[at - 1]
            start = at
