"""Recording rules, which add ranks up, and alerts. Pure: thresholds in, the document out.

Names are ``zeromon:LEVEL_WHAT:HOW``; the level is ``run`` or ``node``, whose labels are kept. An alert
about a rank says its node, which is taken from ``zeromon_rank_info``. A run's name and a rank's number
are unique within one target only (two jobs may have the same name), so joins are by instance, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

RANK = "instance, run, rank"
"""What tells a rank from all others."""

NODES = f"max by ({RANK}, node) (zeromon_rank_info)"
"""1 for each rank, with its node."""

WINDOW = "2m"
"""Of rates: several scrapes at the usual intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When alerts fire. The defaults are those of the live rules."""

    oom_warning: float = 0.5
    oom_critical: float = 0.8
    exposed: float = 0.25
    silent: str = "15m"
    """For how long a collector is missed whose ranks were alive when it was seen last."""
    patience: str = "1m"
    """For how long what may pass must hold."""
    memory: str = "15m"
    """For how long an end, an error or a loss is told of."""


class Aggregate(NamedTuple):
    """A figure over ranks: its name, how they are brought together, what of each, and by what else."""

    what: str
    how: str
    each: str
    by: tuple[str, ...] = ()


def _rate(counter: str) -> str:
    return f"rate({counter}[{WINDOW}])"


RANK_STEP_SECONDS = (
    f"{_rate('zeromon_step_seconds_sum')} / ({_rate('zeromon_step_seconds_count')} > 0)"
)
"""Mean of a rank's last steps."""

_MOVED = ("op", "group", "phase")

AGGREGATES: tuple[Aggregate, ...] = (
    Aggregate("ranks", "count", "zeromon_rank_up"),
    Aggregate("ranks_up", "sum", "zeromon_rank_up"),
    Aggregate("ranks_failed", "sum", "zeromon_rank_failed"),
    Aggregate("steps", "max", "zeromon_steps_total"),
    Aggregate("steps", "min", "zeromon_steps_total"),
    Aggregate("step_seconds", "avg", RANK_STEP_SECONDS),
    Aggregate("step_seconds", "max", RANK_STEP_SECONDS),
    Aggregate("phase_ratio", "avg", _rate("zeromon_phase_seconds_total"), ("phase",)),
    Aggregate("exposed_communication_ratio", "avg", "zeromon_exposed_communication_ratio"),
    Aggregate("exposed_communication_ratio", "max", "zeromon_exposed_communication_ratio"),
    Aggregate("overlap_ratio", "avg", "zeromon_overlap_ratio"),
    Aggregate("overlap_ratio", "min", "zeromon_overlap_ratio"),
    Aggregate("late_seconds", "max", "zeromon_late_seconds"),
    Aggregate("wait_for_late_rank_seconds", "avg", "zeromon_wait_for_late_rank_seconds"),
    Aggregate("wait_for_late_rank_seconds", "max", "zeromon_wait_for_late_rank_seconds"),
    Aggregate("collective_in_flight_seconds", "max", "zeromon_collective_in_flight_seconds"),
    Aggregate("hang_ranks", "sum", "zeromon_hang", ("role", "kind")),
    Aggregate("communication_step_seconds", "avg", "zeromon_communication_step_seconds", _MOVED),
    Aggregate(
        "communication_step_exposed_seconds", "avg",
        "zeromon_communication_step_exposed_seconds", _MOVED,
    ),
    Aggregate(
        "communication_step_exposed_seconds", "max",
        "zeromon_communication_step_exposed_seconds", _MOVED,
    ),
    Aggregate(
        "communication_step_wait_seconds", "avg", "zeromon_communication_step_wait_seconds", _MOVED
    ),
    Aggregate(
        "communication_step_transfer_seconds", "avg",
        "zeromon_communication_step_transfer_seconds", _MOVED,
    ),
    Aggregate(
        "collective_bytes_per_second", "sum", _rate("zeromon_collective_bytes_total"),
        ("op", "group"),
    ),
    Aggregate(
        "collective_busbw_bytes_per_second", "min", "zeromon_collective_busbw_bytes_per_second",
        ("op", "group"),
    ),
    Aggregate("memory_allocated_bytes", "max", "zeromon_memory_allocated_bytes"),
    Aggregate("memory_reserved_bytes", "max", "zeromon_memory_reserved_bytes"),
    Aggregate("memory_headroom_bytes", "min", "zeromon_memory_headroom_bytes"),
    Aggregate("memory_role_bytes", "max", "zeromon_memory_role_bytes", ("role", "place")),
    Aggregate("host_memory_rss_bytes", "sum", "zeromon_host_memory_rss_bytes"),
    Aggregate("host_memory_headroom_bytes", "min", "zeromon_host_memory_headroom_bytes"),
    Aggregate("oom_risk_ratio", "max", "zeromon_oom_risk_ratio", ("pool",)),
    Aggregate("oom_steps_left", "min", "zeromon_oom_steps_left", ("pool",)),
    Aggregate("findings", "sum", "zeromon_finding", ("rule", "severity")),
    Aggregate("events_dropped", "sum", "zeromon_events_dropped_total"),
    Aggregate("agent_errors", "sum", "zeromon_agent_errors_total"),
)  # fmt: skip
"""What is recorded, of runs and of their nodes."""


def of_node(each: str) -> str:
    """The expression *each*, of ranks, with their nodes."""
    return f"({each}) * on ({RANK}) group_left (node) {NODES}"


def recorded(aggregate: Aggregate, level: str) -> dict[str, str]:
    """The rule that records *aggregate* of each ``run`` or ``node``."""
    labels = ("run",) if level == "run" else ("run", "node")
    each = aggregate.each if level == "run" else of_node(aggregate.each)
    by = ", ".join((*labels, *aggregate.by))
    return {
        "record": f"zeromon:{level}_{aggregate.what}:{aggregate.how}",
        "expr": f"{aggregate.how} by ({by}) ({each})",
    }


class Alert(NamedTuple):
    """An alert: its rule's page, how grave it is, when it fires, for how long that must hold, words."""

    name: str
    code: str
    severity: str
    expr: str
    hold: str
    summary: str
    description: str


_AT_ONCE = "0s"
_WHO = "rank {{ $labels.rank }} of {{ $labels.run }} on {{ $labels.node }}"
_RISK = (
    "Risk {{ $value | humanizePercentage }}. zeromon_oom_steps_left says in how many steps, "
    "zeromon_memory_role_bytes what holds it."
)


def _found(query: str) -> str:
    """A template: the ranks of the alert's run that *query* finds, where ``%q`` is the run."""
    return (
        f"{{{{ range $rank := printf `{query}` $labels.run | query }}}}rank "
        f'{{{{ $rank | label "rank" }}}} on {{{{ $rank | label "node" }}}}; {{{{ end }}}}'
    )


def alerts(limits: Thresholds) -> tuple[Alert, ...]:
    """All alerts, the gravest first."""
    lately = limits.memory
    nodes_lately = f"max by ({RANK}, node) (last_over_time(zeromon_rank_info[{lately}]))"
    silent = f"last_over_time(zeromon_rank_up[{limits.silent}]) == 1 unless zeromon_rank_up"
    nodes_then = f"max by ({RANK}, node) (last_over_time(zeromon_rank_info[{limits.silent}]))"
    risk = f"zeromon_oom_risk_ratio >= %s and on ({RANK}) zeromon_rank_up == 1"
    late = 'zeromon_finding{rule="straggler", severity="warning"}'
    missing = of_node('zeromon_hang{run=%q, role=~"missing|dead"}')
    worst = of_node("topk(1, zeromon_exposed_communication_ratio{run=%q})")
    return (
        Alert(
            "ZeromonRankDied", "ZM001", "critical",
            f'last_over_time(zeromon_finding{{rule="rank_died"}}[{lately}])'
            f" * on ({RANK}) group_left (node) {nodes_lately}",
            _AT_ONCE,
            f"{_WHO} died",
            "It ended otherwise than by finishing. zeromon report tells how, in which step and phase.",
        ),
        Alert(
            "ZeromonHang", "ZM002", "critical",
            "count by (run, kind, op, group) (zeromon_hang)",
            _AT_ONCE,
            "{{ $labels.op }} in {{ $labels.group }} of {{ $labels.run }} hangs",
            "{{ $labels.kind }}: {{ $value }} ranks are in it or missing. Missing or dead: "
            f"{_found(missing)}zeromon doctor on its node says more.",
        ),
        Alert(
            "ZeromonOutOfMemory", "ZM201", "critical",
            of_node(risk % limits.oom_critical),
            _AT_ONCE,
            f"{_WHO} is about to run out of {{{{ $labels.pool }}}} memory",
            _RISK,
        ),
        Alert(
            "ZeromonOutOfMemoryForecast", "ZM201", "warning",
            of_node(risk % limits.oom_warning),
            limits.patience,
            f"{_WHO} may run out of {{{{ $labels.pool }}}} memory",
            _RISK,
        ),
        Alert(
            "ZeromonSilentCollector", "ZM012", "critical",
            f"count by (instance, run, node) (({silent})"
            f" * on ({RANK}) group_left (node) {nodes_then})",
            limits.patience,
            "nothing is heard of {{ $labels.run }} on {{ $labels.node }}",
            "{{ $value }} ranks were alive when {{ $labels.instance }} answered last. The node, its "
            "network or its collector is gone.",
        ),
        Alert(
            "ZeromonStuckCollector", "ZM012", "warning",
            f"increase(zeromon_collector_ticks_total[{WINDOW}]) == 0",
            limits.patience,
            "the collector at {{ $labels.instance }} stands still",
            "It answers, and what it says is old: it has read nothing for minutes. Is the node short of "
            "CPU, or its disk stuck?",
        ),
        Alert(
            "ZeromonStraggler", "ZM309", "warning",
            of_node(late),
            limits.patience,
            f"the others wait for {_WHO}",
            "Step after step, for this rank or for all of its node: 5 % of a step or more. zeromon "
            "attach says since when, in which phase, and why where that shows.",
        ),
        Alert(
            "ZeromonExposedCommunication", "ZM301", "warning",
            f"max by (run) (zeromon_exposed_communication_ratio) >= {limits.exposed}",
            limits.patience,
            "{{ $labels.run }} waits for its communication",
            "{{ $value | humanizePercentage }} of a step, most on "
            f"{_found(worst)}zeromon attach shows which unit.",
        ),
        Alert(
            "ZeromonAgentErrors", "ZM006", "warning",
            of_node(f"increase(zeromon_agent_errors_total[{lately}]) > 0"),
            _AT_ONCE,
            f"hook calls fail on {_WHO}",
            "{{ $value | humanize }} of late. Training is not affected; figures may be incomplete.",
        ),
        Alert(
            "ZeromonRecordsLost", "ZM005", "warning",
            of_node(f"increase(zeromon_events_dropped_total[{lately}]) > 0"),
            _AT_ONCE,
            f"records of {_WHO} were lost",
            "{{ $value | humanize }} of late were overwritten unread: counts are too low.",
        ),
    )  # fmt: skip


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook": f"zeromon rule {alert.code}",
        },
    }


def document(limits: Thresholds) -> dict[str, Any]:
    """The rule file: each level's records, then the alerts."""
    groups: list[dict[str, Any]] = [
        {"name": f"zeromon-{level}", "rules": [recorded(each, level) for each in AGGREGATES]}
        for level in ("run", "node")
    ]
    groups.append({"name": "zeromon-alerts", "rules": [_rule(alert) for alert in alerts(limits)]})
    return {"groups": groups}
