"""Recording rules, which aggregate ranks, and alerts. Pure: thresholds in, the rule file out.

Names are ``zeromon:LEVEL_WHAT:HOW``; the level is ``run`` or ``node``, whose labels are kept. An alert
about a rank has the label ``node``, from ``zeromon_rank_info``. A run's name and a rank's number are
unique within one scrape target only (two jobs may have the same name), so joins use ``instance``, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.snapshot.levels import EXPOSED, LATE, OOM

RANK = "instance, run, rank"
"""The labels that identify a rank."""

NODES = f"max by ({RANK}, node) (zeromon_rank_info)"
"""1 for each rank, with its node."""

ALIVE = f"and on ({RANK}) zeromon_rank_up == 1"
"""Condition in expressions of ranks: leaves those whose process lives."""

WINDOW = "2m"
"""The window of rates: several scrapes at usual intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When alerts fire. The defaults are those of the live rules."""

    oom_warning: float = OOM.warning
    oom_critical: float = OOM.critical
    exposed: float = EXPOSED.critical
    silent: str = "15m"
    """How long the alert on a silent collector fires after its last scrape with living ranks."""
    patience: str = "1m"
    """How long a condition that may pass must hold before its alert fires."""
    memory: str = "15m"
    """How long the alert on a failed rank, an error or a loss fires."""


class Aggregate(NamedTuple):
    """A recorded figure: its name, the aggregation, further labels, and the expression of a rank."""

    what: str
    how: str
    by: tuple[str, ...] = ()
    each: str = ""
    """Where it is not the metric of that name."""


def _rate_of(counter: str) -> str:
    return f"rate({counter}[{WINDOW}])"


# Without > 0, a rank that takes no step gives NaN, and so does the average of its run
RANK_STEP_SECONDS = (
    f"{_rate_of('zeromon_step_seconds_sum')} / ({_rate_of('zeromon_step_seconds_count')} > 0)"
)
"""PromQL: the mean duration of a rank's last steps."""

_MOVED = ("op", "group", "phase")

AGGREGATES: tuple[Aggregate, ...] = (
    Aggregate("ranks", "count", each="zeromon_rank_up"),
    Aggregate("ranks_up", "sum", each="zeromon_rank_up"),
    Aggregate("ranks_failed", "sum", each="zeromon_rank_failed"),
    Aggregate("steps", "max", each="zeromon_steps_total"),
    Aggregate("steps", "min", each="zeromon_steps_total"),
    Aggregate("step_seconds", "avg", each=RANK_STEP_SECONDS),
    Aggregate("step_seconds", "max", each=RANK_STEP_SECONDS),
    Aggregate("phase_ratio", "avg", ("phase",), _rate_of("zeromon_phase_seconds_total")),
    Aggregate("exposed_communication_ratio", "avg"),
    Aggregate("exposed_communication_ratio", "max"),
    Aggregate("overlap_ratio", "avg"),
    Aggregate("overlap_ratio", "min"),
    Aggregate("late_seconds", "max"),
    Aggregate("wait_for_late_rank_seconds", "avg"),
    Aggregate("wait_for_late_rank_seconds", "max"),
    Aggregate("collective_in_flight_seconds", "max"),
    Aggregate("hang_ranks", "sum", ("role", "kind"), "zeromon_hang"),
    Aggregate("communication_step_seconds", "avg", _MOVED),
    Aggregate("communication_step_exposed_seconds", "avg", _MOVED),
    Aggregate("communication_step_exposed_seconds", "max", _MOVED),
    Aggregate("communication_step_wait_seconds", "avg", _MOVED),
    Aggregate("communication_step_transfer_seconds", "avg", _MOVED),
    Aggregate(
        "collective_bytes_per_second", "sum", ("op", "group"), _rate_of("zeromon_collective_bytes_total")
    ),
    Aggregate("collective_busbw_bytes_per_second", "min", ("op", "group")),
    Aggregate("memory_allocated_bytes", "max"),
    Aggregate("memory_reserved_bytes", "max"),
    Aggregate("memory_headroom_bytes", "min"),
    Aggregate("memory_role_bytes", "max", ("role", "place")),
    Aggregate("host_memory_rss_bytes", "sum"),
    Aggregate("host_memory_headroom_bytes", "min"),
    Aggregate("oom_risk_ratio", "max", ("pool",)),
    Aggregate("oom_steps_left", "min", ("pool",)),
    Aggregate("findings", "sum", ("rule", "severity"), "zeromon_finding"),
    Aggregate("events_dropped", "sum", each="zeromon_events_dropped_total"),
    Aggregate("agent_errors", "sum", each="zeromon_agent_errors_total"),
)
"""The recorded figures, each once a run and once a node."""


def with_node_label(expr: str) -> str:
    """The expression *expr* of ranks, with the label ``node`` added."""
    return f"({expr}) * on ({RANK}) group_left (node) {NODES}"


def recording_rule(aggregate: Aggregate, level: str) -> dict[str, str]:
    """The recording rule of *aggregate* at *level*, ``run`` or ``node``."""
    labels = ("run",) if level == "run" else ("run", "node")
    expr = aggregate.each or f"zeromon_{aggregate.what}"
    expr = expr if level == "run" else with_node_label(expr)
    by = ", ".join((*labels, *aggregate.by))
    return {
        "record": f"zeromon:{level}_{aggregate.what}:{aggregate.how}",
        "expr": f"{aggregate.how} by ({by}) ({expr})",
    }


class Alert(NamedTuple):
    """An alert: its rule's page, its severity, when it fires, for how long that must hold, words."""

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
    "Risk {{ $value | humanizePercentage }}. zeromon_oom_steps_left has the number of steps left, "
    "zeromon_memory_role_bytes the memory by role."
)


def _ranks_template(query: str) -> str:
    """A template that lists the ranks that *query* returns; ``%q`` in *query* is the alert's run."""
    return (
        f"{{{{ range $rank := printf `{query}` $labels.run | query }}}}rank "
        f'{{{{ $rank | label "rank" }}}} on {{{{ $rank | label "node" }}}}; {{{{ end }}}}'
    )


def all_alerts(limits: Thresholds) -> tuple[Alert, ...]:
    """All alerts, by subject: failed ranks and hangs, memory, collectors, lost time, lost records."""
    return (
        *_alerts_of_failures(limits), *_alerts_of_memory(limits), *_alerts_of_collectors(limits),
        *_alerts_of_time(limits), *_alerts_of_records(limits),
    )  # fmt: skip


def _alerts_of_failures(limits: Thresholds) -> tuple[Alert, ...]:
    nodes_lately = f"max by ({RANK}, node) (last_over_time(zeromon_rank_info[{limits.memory}]))"
    missing = with_node_label('zeromon_hang{run=%q, role=~"missing|dead"}')
    died = 'zeromon_rank_death{role="culprit"}'
    return (
        Alert(
            "ZeromonRankDied", "ZM001", "critical",
            # the series lasts as long as the collector: new is what was not there before
            f"(last_over_time({died}[{limits.memory}]) unless on ({RANK}) {died} offset {limits.memory})"
            f" * on ({RANK}) group_left (node) {nodes_lately}",
            _AT_ONCE,
            f"{_WHO} died: {{{{ $labels.cause }}}}",
            "It failed by itself; ranks that ended because of it have the role victim in "
            "zeromon_rank_death. zeromon report states the step and the phase.",
        ),
        Alert(
            "ZeromonHang", "ZM002", "critical",
            "count by (run, kind, op, group) (zeromon_hang)"
            " and on (run) max by (run) (zeromon_rank_up) == 1",
            _AT_ONCE,
            "{{ $labels.op }} in {{ $labels.group }} of {{ $labels.run }} hangs",
            "{{ $labels.kind }}: {{ $value }} ranks wait in it or are missing. Missing or dead: "
            f"{_ranks_template(missing)}zeromon doctor on its node shows the stacks.",
        ),
        Alert(
            "ZeromonStalled", "ZM013", "critical",
            f'count by (run) (zeromon_finding{{rule="stalled", severity="critical"}} {ALIVE})',
            _AT_ONCE,
            "{{ $labels.run }} makes no progress",
            "No step ends, and no collective that hangs says why. zeromon doctor on its node shows the "
            "stacks.",
        ),
    )  # fmt: skip


def _alerts_of_memory(limits: Thresholds) -> tuple[Alert, ...]:
    risk = f"zeromon_oom_risk_ratio >= %s {ALIVE}"
    return (
        Alert(
            "ZeromonOutOfMemory", "ZM201", "critical",
            with_node_label(risk % limits.oom_critical),
            _AT_ONCE,
            f"{_WHO} is about to run out of {{{{ $labels.pool }}}} memory",
            _RISK,
        ),
        Alert(
            "ZeromonOutOfMemoryForecast", "ZM201", "warning",
            with_node_label(risk % limits.oom_warning),
            limits.patience,
            f"{_WHO} may run out of {{{{ $labels.pool }}}} memory",
            _RISK,
        ),
    )  # fmt: skip


def _alerts_of_collectors(limits: Thresholds) -> tuple[Alert, ...]:
    silent = f"last_over_time(zeromon_rank_up[{limits.silent}]) == 1 unless zeromon_rank_up"
    nodes_then = f"max by ({RANK}, node) (last_over_time(zeromon_rank_info[{limits.silent}]))"
    return (
        Alert(
            "ZeromonSilentCollector", "ZM012", "critical",
            f"count by (instance, run, node) (({silent})"
            f" * on ({RANK}) group_left (node) {nodes_then})",
            limits.patience,
            "no collector answers for {{ $labels.run }} on {{ $labels.node }}",
            "{{ $value }} ranks were alive in the last answer of {{ $labels.instance }}. The node, its "
            "network or its collector is down.",
        ),
        Alert(
            "ZeromonStuckCollector", "ZM012", "warning",
            f"increase(zeromon_collector_ticks_total[{WINDOW}]) == 0",
            limits.patience,
            "the collector at {{ $labels.instance }} reads no records",
            "It answers with old data: it has read no ring for minutes. Check whether the node is short "
            "of CPU, or its disk is stuck.",
        ),
    )  # fmt: skip


def _alerts_of_time(limits: Thresholds) -> tuple[Alert, ...]:
    late = f'zeromon_finding{{rule="straggler", severity="warning"}} {ALIVE}'
    exposed = f"zeromon_exposed_communication_ratio%s {ALIVE}"
    worst_rank = with_node_label(f"topk(1, {exposed % '{run=%q}'})")  # zeromon.snapshot.focus
    return (
        Alert(
            "ZeromonStraggler", "ZM309", "warning",
            with_node_label(late),
            limits.patience,
            f"the other ranks wait for {_WHO}",
            f"Step after step, for this rank or for all of its node: {100 * LATE.critical:.0f} % of a "
            "step or more. zeromon attach shows since when, in which phase, and the cause where known.",
        ),
        Alert(
            "ZeromonExposedCommunication", "ZM301", "warning",
            f"max by (run) ({exposed % ''}) >= {limits.exposed}",
            limits.patience,
            "{{ $labels.run }} waits for communication",
            "{{ $value | humanizePercentage }} of a step, the most on "
            f"{_ranks_template(worst_rank)}zeromon attach shows which unit.",
        ),
    )  # fmt: skip


def _alerts_of_records(limits: Thresholds) -> tuple[Alert, ...]:
    return (
        Alert(
            "ZeromonAgentErrors", "ZM006", "warning",
            with_node_label(f"increase(zeromon_agent_errors_total[{limits.memory}]) > 0"),
            _AT_ONCE,
            f"hook calls fail on {_WHO}",
            "{{ $value | humanize }} recently. Training is not affected; figures may be incomplete.",
        ),
        Alert(
            "ZeromonRecordsLost", "ZM005", "warning",
            with_node_label(f"increase(zeromon_events_dropped_total[{limits.memory}]) > 0"),
            _AT_ONCE,
            f"records of {_WHO} were lost",
            "{{ $value | humanize }} records were recently overwritten unread: counts are too low.",
        ),
    )  # fmt: skip


def _alert_rule(alert: Alert, runbook_url: str) -> dict[str, Any]:
    url = runbook_url.replace("{code}", alert.code)
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook": f"zeromon rule {alert.code}",
            **({"runbook_url": url} if url else {}),
        },
    }


def rule_document(limits: Thresholds, runbook_url: str = "") -> dict[str, Any]:
    """The rule file: each level's records, then the alerts; *runbook_url* with ``{code}``."""
    groups: list[dict[str, Any]] = [
        {
            "name": f"zeromon-{level}",
            "rules": [recording_rule(aggregate, level) for aggregate in AGGREGATES],
        }
        for level in ("run", "node")
    ]
    groups.append(
        {
            "name": "zeromon-alerts",
            "rules": [_alert_rule(alert, runbook_url) for alert in all_alerts(limits)],
        }
    )
    return {"groups": groups}


BOARDS = sorted((Path(__file__).parent / "boards").glob("*.json"))
LABELS = (("__meta_zeromon_node", "node"),)
"""Label from service discovery -> the label that every series of a target gets."""


def scrape_document(
    sd: Sequence[str],
    targets: Sequence[str],
    *,
    token_file: str,
    interval: str = "15s",
    rules: Sequence[str] = (),
) -> dict[str, Any]:
    """The file: one job that scrapes what the URLs *sd* list, and *targets*."""
    access = {"authorization": {"credentials_file": token_file}}
    # Without honor_labels, the node of /sd renames that of zeromon_rank_info to exported_node
    job: dict[str, Any] = {"job_name": "zeromon", "honor_labels": True, **access}
    if sd:
        job["http_sd_configs"] = [{"url": url, **access} for url in sd]
        job["relabel_configs"] = [
            {"source_labels": [meta], "regex": "(.+)", "target_label": label} for meta, label in LABELS
        ]
    if targets:
        job["static_configs"] = [{"targets": list(targets)}]
    config: dict[str, Any] = {"global": {"scrape_interval": interval}}
    if rules:
        config["global"]["evaluation_interval"] = interval
        config["rule_files"] = list(rules)
    return config | {"scrape_configs": [job]}
