"""The samples of one rank in, its :class:`RankSnapshot` out. Pure.

What is not in the samples is unknown: None, -1, or empty.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from zeromon.base.errors import RuleNotFound
from zeromon.base.units import human_count
from zeromon.diagnosis.rule import find_page
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
)
from zeromon.snapshot.communication import CollectiveRow, Dimension, HangKind, InFlight, Straggler
from zeromon.snapshot.focus import HOST_OOM, first_failed
from zeromon.snapshot.host import Device, HostMemory, Pressure
from zeromon.snapshot.ledger import Cause, LedgerRow, sum_by_cause
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, DeviceMemory, ExpectedRow, Risk, RoleRow
from zeromon.snapshot.rank import (
    DETACHED,
    AgentHealth,
    RankCommunication,
    RankConfig,
    RankLedger,
    RankMachine,
    RankMemory,
    RankRequests,
    RankStatus,
    RankSteps,
    RankTraining,
)
from zeromon.snapshot.run import DeathRole
from zeromon.sources.prometheus.client import Line
from zeromon.sources.prometheus.decode.samples import Key, RankSamples, row_of_cell
from zeromon.storage.step_history.rows import step_of

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
    alive_text = DETACHED if facts.number("rank_detached") == 1 else ""
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
        status=RankStatus(
            alive=is_up and not silent_seconds, ended=outcome, failed=failed, exception="",
            started_ns=0, last_event_ns=round((taken_wall - silent_seconds) * 1e9),
        ),
        steps=RankSteps(
            last_step=steps, watched_steps=steps, micro_steps=facts.count("micro_steps_total"),
            skipped_steps=facts.count("steps_skipped_total"),
            median_seconds=seconds, mean_seconds=seconds,
            total_seconds=facts.rates.get("spent_in_all", 0.0),
            phase_seconds={p: s for (p,), s in facts.by("phase_seconds_total", "phase").items()},
            recent=(point,) if point is not None else (),
            phase="", unit="", duration_buckets=(),  # not exported
        ),
        communication=RankCommunication(
            collectives=_op_rows(facts), traffic=_stats_rows(facts),
            in_flight=_collectives_in_flight(facts, now_ns),
            untimed_ratio=facts.number("collectives_untimed_ratio"),
            overlap_ratio=facts.number("overlap_ratio"), exposed_ratio=exposed,
            exposed_seconds=exposed * seconds if exposed is not None and seconds else None,
            wait_seconds=facts.number("wait_for_late_rank_seconds"),
            late_seconds=facts.number("late_seconds"),
            units=(), untimed={}, unattributed={},  # not exported
        ),
        memory=RankMemory(
            device=_gpu_mem(facts), host=_host_memory(facts), roles=_by_role(facts),
            expected=_exp_rows(facts), risks=_oom_risk(facts),
            rss_bytes=facts.whole("host_memory_rss_bytes"),
            host_available_bytes=facts.whole("host_memory_available_bytes"),
            pinned_bytes=facts.whole("host_memory_pinned_bytes"),
        ),
        machine=RankMachine(device=_device_stats(facts), pressure=_cpu_pressure(facts)),
        config=RankConfig(),
        training=RankTraining(),
        ledger=RankLedger(
            rows=_ledger_rows(facts), startup_seconds=facts.number("startup_seconds"),
            unsaved_seconds=facts.number("unsaved_seconds"),
        ),
        agent=AgentHealth(
            dropped=facts.count("events_dropped_total"), errors=facts.count("agent_errors_total"),
            accounted_overhead_ratio=facts.number("agent_accounted_overhead_ratio"),
            overhead_ratio=facts.number("agent_overhead_ratio"),
            overhead_noise_ratio=facts.number("agent_overhead_noise_ratio"),
        ),
        requests=RankRequests(),
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
