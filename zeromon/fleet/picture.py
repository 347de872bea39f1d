"""Samples of a Prometheus in, the pictures out that all views know. Pure.

What is not in the samples is unknown: None, -1, or nothing. Text comes from labels, and labels from
strangers: a rank that is no number is passed over, everything else is text to be cleaned by the view.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from zeromon.errors import RuleNotFound
from zeromon.events import Phase
from zeromon.fleet.api import Line, Sample
from zeromon.history import IDLE, LEAST, MEDIAN, MOST, NAMES, Series
from zeromon.record import KnownFinding
from zeromon.rules import page
from zeromon.snapshot import (
    NOT_SEEN,
    CollectiveRow,
    Device,
    DeviceMemory,
    ExpectedRow,
    Finding,
    Fleet,
    FleetNode,
    Hang,
    HostMemory,
    InFlight,
    Pressure,
    RankSnapshot,
    Risk,
    RoleRow,
    Spread,
    StepSummary,
    Straggler,
    TrafficRow,
)
from zeromon.units import human_seconds

_FLIES_SECONDS = 1.0
"""A collective that is younger is the everyday."""
_MOST_RANK = 1 << 31
_INSTEAD = {"most": MOST, "median": MEDIAN, "least": LEAST}


class Key(NamedTuple):
    """A rank at a collector: two jobs of one name have the same ranks."""

    rank: int
    instance: str


@dataclass(slots=True)
class Facts:
    """The samples of one rank, by the name of the metric without ``zeromon_``."""

    found: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds a second, by phase."""

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """Of a metric with one value a rank."""
        rows = self.found.get(name)
        return rows[0][1] if rows else otherwise

    def whole(self, name: str) -> int:
        """The same as an integer; -1 where it is unknown."""
        value = self.number(name)
        return -1 if value is None else int(value)

    def count(self, name: str) -> int:
        """The same; 0 where it is unknown."""
        return max(0, self.whole(name))

    def label(self, name: str, label: str) -> str:
        """A label of an info metric; "" where it is unknown."""
        rows = self.found.get(name)
        return rows[0][0].get(label, "") if rows else ""

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """All values of a metric by some of its labels."""
        rows = self.found.get(name, ())
        return {tuple(found.get(label, "") for label in labels): value for found, value in rows}

    @property
    def up(self) -> bool:
        """Whether its process lives."""
        return self.number("rank_up") == 1


def key_of(labels: Mapping[str, str]) -> Key | None:
    """The rank that a sample is of; None where its label is no number."""
    text = labels.get("rank", "")
    if not (text.isascii() and text.isdigit() and int(text[:12]) < _MOST_RANK):
        return None
    return Key(int(text[:12]), labels.get("instance", ""))


def gathered(columns: Iterable[Sample], rates: Iterable[Sample]) -> dict[Key, Facts]:
    """The samples of :func:`zeromon.fleet.queries.columns` and ``rates``, by rank."""
    found: dict[Key, Facts] = {}
    for sample in columns:
        key = key_of(sample.labels)
        if key is not None:
            name = sample.labels.get("__name__", "").removeprefix("zeromon_")
            facts = found.setdefault(key, Facts())
            facts.found.setdefault(name, []).append((sample.labels, sample.value))
    for sample in rates:
        key = key_of(sample.labels)
        facts_of = found.get(key) if key is not None else None
        if facts_of is not None:
            of = sample.labels.get("of", "")
            if of == "phase":
                facts_of.phases[sample.labels.get("phase", "")] = sample.value
            else:
                facts_of.rates[of] = sample.value
    return found


def told_apart(found: Mapping[Key, Facts]) -> tuple[dict[Key, Facts], tuple[str, ...]]:
    """One job's ranks, and the collectors of another job of the same name.

    A rank that was started again elsewhere has died where it was: the living one counts. Two that live
    are two jobs; the one with the smallest address is taken, so that it stays the same.
    """
    living: dict[int, list[Key]] = {}
    for key in found:
        living.setdefault(key.rank, []).append(key)
    others: set[str] = set()
    for keys in living.values():
        up = sorted(key.instance for key in keys if found[key].up)
        others.update(up[1:])
    kept = {key: facts for key, facts in found.items() if key.instance not in others}
    for keys in living.values():
        mine = [key for key in keys if key in kept]
        newest = max(mine, key=lambda k: (found[k].up, found[k].count("steps_total")), default=None)
        for key in mine:
            if key != newest:
                del kept[key]
    return kept, tuple(sorted(others))


# ---- one rank -------------------------------------------------------------------------------------


def rank_of(
    key: Key, facts: Facts, now: float, run_step: int, *, silent_seconds: float = 0.0
) -> RankSnapshot:
    """A rank as its samples have it; *now* is the moment of the picture, seconds since the epoch.

    Its newest point stands for the steps of a while: their mean, under the number *run_step* that the
    run had come to.
    """
    up, failed = facts.up, facts.number("rank_failed") == 1
    rate = facts.rates.get("steps", 0.0)
    seconds = facts.rates.get("spent", 0.0) / rate if rate > 0 else None
    exposed = facts.number("exposed_communication_ratio")
    now_ns, steps = round(now * 1e9), facts.count("steps_total")
    ended = "" if up else "failed" if failed else "finished"
    if silent_seconds:
        ended = f"{NOT_SEEN} {human_seconds(round(silent_seconds))}"
    point = point_of(facts, run_step, now_ns, seconds) if seconds else None
    return RankSnapshot(
        rank=key.rank,
        local_rank=_integer(facts.label("rank_info", "local_rank")),
        world_size=_integer(facts.label("rank_info", "world_size")),
        pid=_integer(facts.label("rank_info", "pid")),
        node=facts.label("rank_info", "node") or key.instance,
        device=facts.label("rank_info", "device"),
        strategy=facts.label("rank_info", "strategy"),
        alive=up and not silent_seconds,
        ended=ended,
        failed=failed,
        exception="",
        step=steps,
        steps=steps,
        step_seconds=seconds,
        steps_seconds_total=facts.rates.get("spent_in_all", 0.0),
        step_buckets=(),
        phase="",
        unit="",
        phase_seconds={p: s for (p,), s in facts.by("phase_seconds_total", "phase").items()},
        collectives=_collectives(facts),
        untimed={},
        unattributed={},
        overlap_ratio=facts.number("overlap_ratio"),
        exposed_ratio=exposed,
        exposed_seconds=exposed * seconds if exposed is not None and seconds else None,
        in_flight=_in_flight(facts, now_ns),
        units=(),
        memory=_memory(facts),
        rss_bytes=facts.whole("host_memory_rss_bytes"),
        host_available_bytes=facts.whole("host_memory_available_bytes"),
        pinned_bytes=facts.whole("host_memory_pinned_bytes"),
        dropped=facts.count("events_dropped_total"),
        errors=facts.count("agent_errors_total"),
        overhead_ratio=facts.number("agent_overhead_ratio"),
        overhead_noise_ratio=facts.number("agent_overhead_noise_ratio"),
        started_ns=0,
        last_event_ns=round((now - silent_seconds) * 1e9),
        recent=(point,) if point is not None else (),
        risks=_risks(facts),
        device_stats=_device(facts),
        host=_host(facts),
        pressure=_pressure(facts),
        micro_steps=facts.count("micro_steps_total"),
        skipped_steps=facts.count("steps_skipped_total"),
        roles=_roles(facts),
        wait_seconds=facts.number("wait_for_late_rank_seconds"),
        late_seconds=facts.number("late_seconds"),
        expected=_expected(facts),
        traffic=_traffic(facts),
    )


def _integer(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0


def point_of(facts: Facts, step: int, end_ns: int, seconds: float) -> StepSummary:
    """The mean step of a while, as if it had just ended."""
    rate = facts.rates.get("steps", 0.0)
    phases = [facts.phases.get(phase.label, 0.0) / rate if rate else 0.0 for phase in Phase]
    exposed = (facts.number("exposed_communication_ratio") or 0.0) * seconds
    overlap = facts.number("overlap_ratio")
    communication = exposed / (1 - overlap) if overlap is not None and overlap < 1 else exposed
    return StepSummary(
        step=step,
        start_ns=end_ns - round(seconds * 1e9),
        end_ns=end_ns,
        idle=facts.number("exposed_communication_ratio") is None,
        micro_steps=0,
        phase_ns=tuple(round(1e9 * spent) for spent in phases),
        collectives=0,
        collective_bytes=0,
        communication_ns=round(1e9 * communication),
        exposed_ns=round(1e9 * exposed),
        allocated_bytes=facts.whole("memory_allocated_bytes"),
        reserved_bytes=facts.whole("memory_reserved_bytes"),
        rss_bytes=facts.whole("host_memory_rss_bytes"),
    )


def _memory(facts: Facts) -> DeviceMemory | None:
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


def _risks(facts: Facts) -> tuple[Risk, ...]:
    left = {
        pool: (cause, n) for (pool, cause), n in facts.by("oom_steps_left", "pool", "cause").items()
    }
    found = []
    for (pool,), ratio in sorted(facts.by("oom_risk_ratio", "pool").items()):
        cause, steps = left.get(pool, ("none", None))
        device = pool == "device"
        used = facts.whole("memory_reserved_bytes" if device else "host_memory_rss_bytes")
        limit = facts.whole("memory_capacity_bytes" if device else "host_memory_limit_bytes")
        found.append(
            Risk(pool=pool, ratio=ratio, cause=cause, steps_left=steps, used_bytes=used,
                 capacity_bytes=limit, growth_bytes_per_step=_growth(used, limit, steps))
        )  # fmt: skip
    return tuple(found)


def _growth(used: int, limit: int, steps: float | None) -> float | None:
    """What leads from *used* to *limit* in so many steps."""
    return (limit - used) / steps if steps and 0 <= used < limit else None


def _in_flight(facts: Facts, now_ns: int) -> tuple[InFlight, ...]:
    age = facts.number("collective_in_flight_seconds") or 0.0
    if age < _FLIES_SECONDS:
        return ()
    return (
        InFlight(op="collective", group="", sequence=-1, unit="", phase="", nbytes=-1,
                 issued_ns=now_ns - round(age * 1e9)),
    )  # fmt: skip


def _device(facts: Facts) -> Device | None:
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


def _host(facts: Facts) -> HostMemory | None:
    limit, room = facts.whole("host_memory_limit_bytes"), facts.whole("host_memory_headroom_bytes")
    return HostMemory(limit_bytes=limit, headroom_bytes=room) if max(limit, room) >= 0 else None


def _pressure(facts: Facts) -> Pressure | None:
    waits = facts.number("cpu_wait_ratio")
    faults = facts.number("major_faults_per_second", 0.0)
    return (
        None
        if waits is None
        else Pressure(cpu_wait_ratio=waits, major_faults_per_second=faults or 0.0)
    )


def _roles(facts: Facts) -> tuple[RoleRow, ...]:
    places = facts.by("memory_role_bytes", "role", "place")
    return tuple(
        RoleRow(
            role=role, device_bytes=int(places.get((role, "device"), 0)), pinned_bytes=0,
            host_bytes=int(places.get((role, "host"), 0)), disk_bytes=int(places.get((role, "disk"), 0)),
        )
        for role in dict.fromkeys(role for role, _ in places)
    )  # fmt: skip


def _expected(facts: Facts) -> tuple[ExpectedRow, ...]:
    plain = facts.by("memory_role_plain_bytes", "role")
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
        for (role,), nbytes in plain.items()
    )  # fmt: skip


def _collectives(facts: Facts) -> tuple[CollectiveRow, ...]:
    sizes = {row["group"]: (_integer(row.get("size", "")), _integer(row.get("nodes", "")))
             for row, _ in facts.found.get("group_info", ()) if "group" in row}  # fmt: skip
    columns = {
        name: facts.by(name, "op", "group")
        for name in ("collective_bytes_total", "collective_seconds_total",
                     "collective_exposed_seconds_total", "collective_busbw_bytes_per_second",
                     "collective_best_busbw_bytes_per_second")
    }  # fmt: skip
    nbytes, seconds, exposed, busbw, best = columns.values()
    return tuple(
        CollectiveRow(
            op=op, group=group, group_size=sizes.get(group, (0, 0))[0],
            nodes=sizes.get(group, (0, 0))[1], count=int(count), timed=int(count),
            nbytes=int(nbytes.get((op, group), 0)), quantized_bytes=0,
            seconds=seconds.get((op, group), 0.0),
            exposed_seconds=exposed.get((op, group), 0.0),
            busbw_bytes_per_second=busbw.get((op, group)),
            best_busbw_bytes_per_second=best.get((op, group), 0.0),
        )
        for (op, group), count in facts.by("collectives_total", "op", "group").items()
    )  # fmt: skip


def _traffic(facts: Facts) -> tuple[TrafficRow, ...]:
    """By operation, group and phase: units are too many for labels."""
    keys = ("op", "group", "phase")
    exposed = facts.by("communication_step_exposed_seconds", *keys)
    waits = facts.by("communication_step_wait_seconds", *keys)
    moved = facts.by("communication_step_transfer_seconds", *keys)
    sizes = {row.get("group", ""): _integer(row.get("size", ""))
             for row, _ in facts.found.get("group_info", ())}  # fmt: skip
    rows = [
        TrafficRow(
            op=op, group=group, group_size=sizes.get(group, 0), nodes=0, phase=phase, unit="", count=0,
            calls=0.0, nbytes=-1, seconds=seconds, exposed_seconds=exposed.get((op, group, phase), 0.0),
            exposed_total_seconds=0.0, wait_seconds=waits.get((op, group, phase)),
            transfer_seconds=moved.get((op, group, phase)), algbw_bytes_per_second=None,
            busbw_bytes_per_second=None, best_busbw_bytes_per_second=0.0,
        )
        for (op, group, phase), seconds in facts.by("communication_step_seconds", *keys).items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


# ---- what is said of several ----------------------------------------------------------------------


def findings_of(
    facts: Mapping[Key, Facts], counts: Mapping[tuple[str, str], int], ranks: int
) -> tuple[Finding, ...]:
    """One for each rule and rank; of what holds of more than a few, or of all, one alone."""
    whose: dict[tuple[str, str], list[int]] = {}
    for key, known in sorted(facts.items()):
        for rule, severity in known.by("finding", "rule", "severity"):
            whose.setdefault((rule, severity), []).append(key.rank)
    found = []
    for (rule, severity), named in whose.items():
        many = max(counts.get((rule, severity), 0), len(named))
        if ranks > 1 and many >= ranks:
            found.append(_finding(rule, severity))
        elif many > _MOST_NAMED:
            some = ", ".join(map(str, named[:_MOST_NAMED]))
            found.append(
                _finding(rule, severity, f" (on {many:,} of {ranks:,} ranks: {some}, ...)")
            )
        else:
            found += [_finding(rule, severity, rank=rank) for rank in named]
    return tuple(sorted(found, key=lambda f: (_gravity(f.severity), f.code, f.rank)))


_MOST_NAMED = 3


def _finding(rule: str, severity: str, more: str = "", rank: int = -1) -> Finding:
    text, code = rule.replace("_", " "), ""
    with suppress(RuleNotFound):  # of another version
        text, code = page(rule).summary, page(rule).code
    return Finding(rule=rule, severity=severity, text=text + more, rank=rank, code=code)


def _gravity(severity: str) -> int:
    return {"critical": 0, "warning": 1}.get(severity, 2)


def hangs_of(facts: Mapping[Key, Facts]) -> tuple[Hang, ...]:
    """One for each kind, operation and group of a hang that its ranks tell of."""
    roles: dict[tuple[str, ...], dict[str, list[int]]] = {}
    ages: dict[tuple[str, ...], float] = {}
    for key, known in sorted(facts.items()):
        for role, *named in known.by("hang", "role", "kind", "op", "group"):
            hang = tuple(named)
            roles.setdefault(hang, {}).setdefault(role, []).append(key.rank)
            age = known.number("collective_in_flight_seconds") or 0.0
            ages[hang] = max(age, ages.get(hang, 0.0))
    return tuple(
        Hang(
            kind=kind, op=op or "a collective", group=group or "a group", group_id="", sequence=-1,
            nbytes=-1, seconds=ages[kind, op, group], waiting=tuple(by.get("waiting", ())),
            elsewhere=(), calls=(), missing=tuple(by.get("missing", ())),
            dead=tuple(by.get("dead", ())),
        )
        for (kind, op, group), by in roles.items()
    )  # fmt: skip


def stragglers_of(
    ranks: Iterable[RankSnapshot], findings: Iterable[Finding]
) -> tuple[Straggler, ...]:
    """Ranks of which the rule says that others wait for them."""
    late = {finding.rank for finding in findings if finding.rule == "straggler"}
    return tuple(
        Straggler(
            rank=rank.rank, late_seconds=rank.late_seconds or 0.0, since_step=0, phase="",
            share=(rank.late_seconds or 0.0) / rank.step_seconds if rank.step_seconds else 0.0,
            longer_seconds=0.0,
        )
        for rank in ranks
        if rank.rank in late
    )  # fmt: skip


# ---- the whole of a large run -----------------------------------------------------------------------

_FIGURES = {
    "exposed_communication_ratio": "exposed_ratio",
    "overlap_ratio": "overlap_ratio",
    "late_seconds": "late_seconds",
    "wait_for_late_rank_seconds": "wait_seconds",
    "memory_reserved_bytes": "memory_bytes",
    "memory_headroom_bytes": "headroom_bytes",
    "host_memory_rss_bytes": "memory_bytes",
    "oom_risk_ratio": "risk_ratio",
    "step_seconds": "step_seconds",
}


_RESIDENT = "host_memory_rss_bytes"


def _figure(labels: Mapping[str, str], known: Container[str]) -> str | None:
    """The name of a figure; resident memory counts only where no device tells of its own."""
    name = labels.get("figure") or labels.get("of", "")
    figure = _FIGURES.get(name)
    return None if name == _RESIDENT and figure in known else figure


def _device_first(samples: Iterable[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: s.labels.get("figure") == _RESIDENT)


@dataclass(slots=True)
class Whole:
    """What :func:`zeromon.fleet.queries.whole` answers."""

    counts: dict[str, float]
    spreads: dict[str, Spread]
    findings: dict[tuple[str, str], int]
    waiting: int

    @property
    def ranks(self) -> int:
        """That there are now."""
        return int(self.counts.get("ranks", 0))


def whole_of(samples: Iterable[Sample]) -> Whole:
    """Reads that."""
    made = Whole({}, {}, {}, 0)
    counted: dict[str, dict[float, float]] = {}
    for sample in samples:
        labels, of = sample.labels, sample.labels.get("of", "")
        if of == "finding":
            rule = labels.get("rule", ""), labels.get("severity", "")
            made.findings[rule] = int(sample.value)
        elif of == "hang":
            made.waiting += int(sample.value)
        elif of == "spread":
            figure, ln = labels.get("figure", ""), float(labels.get("ln", "nan"))
            if ln < _MOST_LN:  # what is below zero has no logarithm
                counted.setdefault(figure, {})[math.exp(ln)] = sample.value
        else:
            made.counts[of] = sample.value
    for name in sorted(counted, key=lambda name: name == _RESIDENT):
        figure = _figure({"figure": name}, made.spreads) or ""
        made.spreads.setdefault(figure, spread_of(counted[name]))
    made.spreads.pop("", None)
    return made


_MOST_LN = 700.0


def spread_of(counted: Mapping[float, float]) -> Spread:
    """The quantiles of values by how often they are there."""
    values = sorted(counted)
    reached = list(accumulate(counted[value] for value in values))
    least, p5, median, p95, most = (
        values[min(len(values) - 1, bisect_left(reached, share * reached[-1]))]
        for share in (0.0, 0.05, 0.5, 0.95, 1.0)
    )
    return Spread(least=least, p5=p5, median=median, p95=p95, most=most)


def nodes_of(
    samples: Iterable[Sample],
    names: Mapping[str, str],
    silent: Mapping[str, tuple[int, float]],
) -> tuple[FleetNode, ...]:
    """The nodes by name. *silent*: by collector, how many ranks it had and for how long it is."""
    rows: dict[str, dict[str, float]] = {}
    for sample in _device_first(samples):
        row = rows.setdefault(sample.labels.get("instance", ""), {})
        of = sample.labels.get("of", "")
        if of in ("ranks", "up", "failed", "lost"):
            row[of] = sample.value
            continue
        figure = _figure(sample.labels, row)
        if figure is not None:
            row[figure] = sample.value
    made = [_node(address, row, names) for address, row in rows.items() if "ranks" in row]
    made += [
        FleetNode(node=names.get(address) or address, address=address, ranks=ranks, up=0, failed=0,
                  silent_seconds=seconds)
        for address, (ranks, seconds) in silent.items()
    ]  # fmt: skip
    return tuple(sorted(made, key=lambda node: _natural(node.node)))


def _node(address: str, row: Mapping[str, float], names: Mapping[str, str]) -> FleetNode:
    return FleetNode(
        node=names.get(address) or address, address=address, ranks=int(row.get("ranks", 0)),
        up=int(row.get("up", 0)), failed=int(row.get("failed", 0)),
        step_seconds=row.get("step_seconds"), exposed_ratio=row.get("exposed_ratio"),
        late_seconds=row.get("late_seconds"), wait_seconds=row.get("wait_seconds"),
        memory_bytes=row.get("memory_bytes"), risk_ratio=row.get("risk_ratio"),
    )  # fmt: skip


def _natural(text: str) -> tuple[str, int, str]:
    """``node9`` before ``node10``."""
    stem = text.rstrip("0123456789")
    return stem, int(text[len(stem) :][:18] or 0), text


_OF_NODES = ("step_seconds", "exposed_ratio", "late_seconds", "wait_seconds", "memory_bytes",
             "risk_ratio")  # fmt: skip


def fleet_of(whole: Whole, nodes: tuple[FleetNode, ...]) -> Fleet:
    """Both together. The most is exact: that of the worst nodes."""
    most = {
        name: max((v for node in nodes if (v := getattr(node, name)) is not None), default=None)
        for name in _OF_NODES
    }
    spreads = {
        name: spread if (high := most.get(name)) is None else replace(spread, most=high)
        for name, spread in whole.spreads.items()
    }
    silent = sum(node.ranks for node in nodes if node.silent_seconds)
    return Fleet(
        ranks=whole.ranks + silent, up=int(whole.counts.get("up", 0)), silent=silent,
        failed=int(whole.counts.get("failed", 0)), waiting=whole.waiting, nodes=nodes,
        spreads=spreads,
    )  # fmt: skip


# ---- over time --------------------------------------------------------------------------------------


def series_of(lines: Sequence[Line], interval: float) -> Series:
    """Rows of :func:`zeromon.fleet.queries.steps_over_time`: one a rank and moment.

    A moment at which a rank has no step is a gap. Rows of several ranks have the same step number, that
    of the rank which had come farthest.
    """
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        key = key_of(line.labels)
        if key is None:
            continue
        name = line.labels.get("phase") or line.labels.get("figure") or line.labels.get("of", "")
        _fill(cells.setdefault(key.rank, {}), name, line)
    return _rows(cells, interval)


def whole_series_of(lines: Sequence[Line], interval: float) -> Series:
    """The same of :func:`zeromon.fleet.queries.whole_over_time`: the most, the median and the least."""
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        of, figure = line.labels.get("of", ""), line.labels.get("figure", "")
        if of in _INSTEAD:
            _fill(cells.setdefault(_INSTEAD[of], {}), figure, line)
        elif of == "steps_total":
            for instead in _INSTEAD.values():
                _fill(cells.setdefault(instead, {}), of, line)
    return _rows(cells, interval)


def _fill(moments: dict[float, dict[str, float]], name: str, line: Line) -> None:
    for at, text in line.values:
        value = float(text)
        if value == value and abs(value) != float("inf"):
            moments.setdefault(at, {})[name] = value


_PHASES = {f"{phase.label}_us": phase.label for phase in Phase}


def _rows(cells: Mapping[int, Mapping[float, Mapping[str, float]]], interval: float) -> Series:
    reached: dict[float, int] = {}
    for moments in cells.values():
        for at, row in moments.items():
            reached[at] = max(reached.get(at, 0), int(row.get("steps_total", 0)))
    made: Series = {name: [] for name in NAMES}
    for rank, moments in sorted(cells.items()):
        last = -1
        for at, row in sorted(moments.items()):
            step = reached[at]
            if "step_seconds" in row and "steps_total" in row and step != last:
                for name, value in _row(rank, step, at, row, interval).items():
                    made[name].append(value)
                last = step
    return made


def _row(
    rank: int, step: int, at: float, row: Mapping[str, float], interval: float
) -> dict[str, int]:
    seconds, rate = row["step_seconds"], row.get("steps", 0.0)
    exposed = row.get("exposed_communication_ratio")
    spent = (exposed or 0.0) * seconds
    overlap = row.get("overlap_ratio")
    communication = spent / (1 - overlap) if overlap is not None and overlap < 1 else spent
    made = dict.fromkeys(NAMES, 0)
    made |= {
        "rank": rank, "step": step, "steps": max(1, round(interval / seconds)) if seconds else 1,
        "flags": IDLE if exposed is None else 0, "start_us": round(1e6 * (at - seconds)),
        "duration_us": round(1e6 * seconds), "communication_us": round(1e6 * communication),
        "exposed_us": round(1e6 * spent), "allocated_bytes": int(row.get("memory_allocated_bytes", -1)),
        "reserved_bytes": int(row.get("memory_reserved_bytes", -1)),
        "rss_bytes": int(row.get("host_memory_rss_bytes", -1)), "other_bytes": -1,
    }  # fmt: skip
    for name, phase in _PHASES.items():
        made[name] = round(1e6 * row.get(phase, 0.0) / rate) if rate else 0
    return made


def history_of(lines: Sequence[Line], step: float) -> list[KnownFinding]:
    """When each finding came and went, to the resolution of *step* seconds; the newest moment stands."""
    newest = max((line.values[-1][0] for line in lines if line.values), default=0.0)
    found = []
    for line in lines:
        rule, severity = line.labels.get("rule", ""), line.labels.get("severity", "")
        for came, gone in _stretches([at for at, _ in line.values], 1.5 * step):
            told = _finding(rule, severity)
            found.append(
                KnownFinding(rule=rule, rank=-1, code=told.code, severity=severity, text=told.text,
                             came=came, gone=None if gone >= newest else gone + step)
            )  # fmt: skip
    return sorted(found, key=lambda one: (one.came, one.rule))


def _stretches(moments: Sequence[float], most: float) -> Iterable[tuple[float, float]]:
    """First and last of moments that follow one another by no more than *most*."""
    begin = 0
    for at in range(1, len(moments) + 1):
        if at == len(moments) or moments[at] - moments[at - 1] > most:
            yield moments[begin], moments[at - 1]
            begin = at


def on_our_clock(rank: RankSnapshot, shift_ns: int) -> RankSnapshot:
    """A rank of a collector's picture, whose clock is another node's."""
    return replace(
        rank,
        started_ns=rank.started_ns + shift_ns,
        last_event_ns=rank.last_event_ns + shift_ns,
        recent=tuple(
            replace(step, start_ns=step.start_ns + shift_ns, end_ns=step.end_ns + shift_ns)
            for step in rank.recent
        ),
        in_flight=tuple(replace(one, issued_ns=one.issued_ns + shift_ns) for one in rank.in_flight),
    )
