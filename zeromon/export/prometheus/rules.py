"""Recording rules, which aggregate ranks, and alerts. Pure: thresholds in, the rule file out.

Names are ``zeromon:LEVEL_WHAT:HOW``; the level is ``run`` or ``node``, whose labels are kept. An alert
about a rank has the label ``node``, from ``zeromon_rank_info``. A run's name and a rank's number are
unique within one scrape target only (two jobs may have the same name), so joins use ``instance``, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

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


_TABLE: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("rules.yaml").read_text())
_PARTS = {
    "alive": ALIVE, "rank": RANK, "window": WINDOW, "late": f"{100 * LATE.critical:.0f}",
    "who": "rank {{ $labels.rank }} of {{ $labels.run }} on {{ $labels.node }}",
    # Without > 0, a rank that takes no step gives NaN, and so does the average of its run
    "step_seconds": f"rate(zeromon_step_seconds_sum[{WINDOW}])"
    f" / (rate(zeromon_step_seconds_count[{WINDOW}]) > 0)",
}  # fmt: skip
"""Part of an expression or a sentence in <...> of the table -> its text."""


def _fill_parts(template: str, values: Mapping[str, object]) -> str:
    return re.sub(r"<(\w+)>", lambda match: str(values[match[1]]), template)


AGGREGATES = tuple(
    Aggregate(what, how, tuple(by[0]) if by else (), *(_fill_parts(each, _PARTS) for each in by[1:]))
    for what, how, *by in _TABLE["aggregates"]
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


def _ranks_template(query: str) -> str:
    """A template that lists the ranks that *query* returns; ``%q`` in *query* is the alert's run."""
    return (
        f"{{{{ range $rank := printf `{query}` $labels.run | query }}}}rank "
        f'{{{{ $rank | label "rank" }}}} on {{{{ $rank | label "node" }}}}; {{{{ end }}}}'
    )


def all_alerts(limits: Thresholds) -> tuple[Alert, ...]:
    """All alerts, by subject: failed ranks and hangs, memory, collectors, lost time, lost records."""
    alerts = []
    for row in _TABLE["alerts"]:
        values = _PARTS | asdict(limits)
        if "ranks" in row:
            values["ranks"] = _ranks_template(with_node_label(_fill_parts(row["ranks"], values)))
        cells = {name: _fill_parts(row[name], values) for name in Alert._fields}
        cells["expr"] = with_node_label(cells["expr"]) if "of_ranks" in row else cells["expr"]
        alerts.append(Alert(**cells))
    return tuple(alerts)


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
