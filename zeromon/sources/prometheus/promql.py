"""The queries that zeromon sends to a Prometheus. Pure.

Every answer is small: the server aggregates over all ranks, and zeromon fetches single ranks by their
numbers. One query combines several parts as ``a or b``; the label ``of`` of a part is the part's name.
No query relies on recording rules.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from zeromon.readout.figures import EXPOSED, LATE, ON_NODES, OVER_RANKS, RISK, STEP
from zeromon.sources.prometheus.client import one_of, quote_promql_literal

MAX_OF_A_KIND = 8
"""How many ranks :func:`ranks_that_matter` selects by each criterion."""
REMEMBERED_SECONDS = 600
"""How long a rank without samples still belongs to the snapshot."""

_WAITING = 'role="waiting"'
# Endings of ten ranks in a hundred that reach every local rank: 0 alone would reach the even ones
_TENTH = 'rank=~".*(03|10|16|29|42|55|68|71|84|97)"'
_AGGREGATED = (STEP, RISK)
"""Figures with expressions of their own: a rate, and the maximum over a rank's memories."""
_SPREAD = tuple(m for f in OVER_RANKS if f not in _AGGREGATED for m in f.metrics)
_OF_NODES = tuple(m for f in ON_NODES if f is not STEP for m in f.metrics)
_METRICS: dict[str, Any] = json.loads(files(__package__).joinpath("metrics.json").read_text())
"""Metrics that every snapshot needs, those of ranks that a view shows in detail, and those of a list."""
_CORE: Sequence[str] = _METRICS["core"]
_DETAIL: Sequence[str] = _METRICS["detail"]


class Choice(NamedTuple):
    """A selection of the time series of one run."""

    run: str
    match: str = ""
    """Further matchers in PromQL: ``cluster="a",job=~"b.*"``."""
    ranks: tuple[int, ...] | None = None
    instances: tuple[str, ...] | None = None

    def of(self, name: str, *extra: str) -> str:
        """The selector of ``zeromon_<name>``."""
        return f"zeromon_{name}{{{self._label_matchers(*extra)}}}"

    def of_all(self, names: Sequence[str]) -> str:
        """The selector of several metrics; *names* without ``zeromon_``."""
        those = one_of([f"zeromon_{name}" for name in names])
        return f"{{{self._label_matchers(f'__name__=~{those}')}}}"

    def _label_matchers(self, *extra: str) -> str:
        matchers = [f"run={quote_promql_literal(self.run)}", *extra]
        if self.ranks is not None:
            matchers.append(f"rank=~{one_of([str(rank) for rank in self.ranks])}")
        if self.instances is not None:
            matchers.append(f"instance=~{one_of(self.instances)}")
        return ",".join([*matchers, self.match] if self.match else matchers)


def tag_part(expression: str, of: str) -> str:
    """*expression* with the label ``of`` set to *of*, the name of a part of one answer."""
    return f'label_replace({expression},"of","{of}","","")'


def by_name(expression: str) -> str:
    """*expression* with the name of the metric as the label ``figure``."""
    return f'label_replace({expression},"figure","$1","__name__","zeromon_(.+)")'


def or_join(*expressions: str) -> str:
    """All *expressions* in one query."""
    return " or ".join(expressions)


def runs_last_hour() -> str:
    """Every run of the last hour: its ranks, how it is, and the figures of a list of runs.

    A rank does not know its strategy at first: then a run has two series. ``or`` keeps the left side, so
    resident memory stands in only without a device.
    """
    return or_join(*(tag_part(query, of) for of, query in _METRICS["runs_last_hour"].items()))


def count_of_ranks(run: Choice) -> str:
    """The number of ranks of a run, and one of them."""
    rank_up = run.of("rank_up")
    return or_join(tag_part(f"count({rank_up})", "ranks"), tag_part(f"topk(1, {rank_up})", "one"))


def scrapes_of_rank(run: Choice) -> str:
    """The raw samples of ``rank_up`` over five minutes; *run* must select a single rank."""
    return f"{run.of('rank_up')}[5m]"


def step_seconds(run: Choice, window: str) -> str:
    """The mean step time of each rank over the *window*, seconds."""
    total, count = run.of("step_seconds_sum"), run.of("step_seconds_count")
    return f"(rate({total}[{window}]) / (rate({count}[{window}]) > 0))"


# ---- single ranks ---------------------------------------------------------------------------------


def columns_of_ranks(run: Choice, *, detail: bool = False) -> str:
    """The metrics that every snapshot needs; with *detail* also those of :func:`details_of_ranks`."""
    return run.of_all((*_CORE, *_DETAIL) if detail else _CORE)


def details_of_ranks(run: Choice) -> str:
    """The further metrics of ranks that a view shows in detail."""
    return run.of_all(_DETAIL)


def rates_of_steps(run: Choice, window: str) -> str:
    """The rates of the ranks' steps and phases, and the time of each rank's last scrape."""
    return or_join(
        tag_part(f"rate({run.of('step_seconds_sum')}[{window}])", "spent"),
        tag_part(f"rate({run.of('step_seconds_count')}[{window}])", "steps"),
        tag_part(f"rate({run.of('phase_seconds_total')}[{window}])", "phase"),
        tag_part(run.of("step_seconds_sum"), "spent_in_all"),
        tag_part(f"timestamp({run.of('rank_up')})", "seen"),
    )


def recently_lost_ranks(run: Choice) -> str:
    """Ranks that had samples within :data:`REMEMBERED_SECONDS` and have none now."""
    rank_up = run.of("rank_up")
    return f"last_over_time({rank_up}[{REMEMBERED_SECONDS}s]) unless {rank_up}"


def last_scrape_times(run: Choice, seconds: int, step: int) -> str:
    """The time of each rank's last scrape, by the server's clock."""
    return f"max_over_time(timestamp({run.of('rank_up')})[{seconds}s:{step}s])"


def last_alive_time(run: Choice, seconds: int, step: int) -> str:
    """The time, to *step* seconds, at which a rank of the run was alive last."""
    return f"max(max_over_time(timestamp({run.of('rank_up')} == 1)[{seconds}s:{step}s]))"


def run_span(run: Choice, seconds: int, step: int) -> str:
    """The times of the run's first and last scrape, by the server's clock."""
    times = f"timestamp({run.of('rank_up')})[{seconds}s:{step}s]"
    return or_join(
        tag_part(f"min(min_over_time({times}))", "first"),
        tag_part(f"max(max_over_time({times}))", "last"),
    )


# ---- aggregates of large runs -----------------------------------------------------------------------


def sample_tenth(run: Choice) -> Choice:
    """A tenth of the ranks, spread over all local ranks."""
    return run._replace(match=",".join(filter(None, (run.match, _TENTH))))


def whole_run(run: Choice, window: str, *, sampled: bool = False) -> str:
    """Counts over all ranks, and the distribution of each figure over ranks (a tenth if *sampled*)."""
    rank_up, base = run.of("rank_up"), sample_tenth(run) if sampled else run
    counts = [
        tag_part(f"count({rank_up})", "ranks"),
        tag_part(f"sum({rank_up})", "up"),
        tag_part(f"sum({run.of('rank_failed')})", "failed"),
        tag_part(f"max(timestamp({rank_up}))", "seen"),
        tag_part(f"count(count by (instance, rank) ({run.of('hang', _WAITING)}))", "hang"),
        tag_part(f"count by (rule, severity) ({run.of('finding')})", "finding"),
    ]
    expressions = {
        "oom_risk_ratio": f"max by (instance, rank) ({base.of('oom_risk_ratio')})",
        "step_seconds": step_seconds(base, window),
    }
    return or_join(
        *counts,
        tag_part(f"count_values by (figure) {_round_ln(by_name(base.of_all(_SPREAD)))}", "spread"),
        *(
            tag_part(
                f'label_replace(count_values {_round_ln(of)},"figure","{quantity}","","")', "spread"
            )
            for quantity, of in expressions.items()
        ),
    )


def _round_ln(expression: str) -> str:
    """The arguments of ``count_values``: logarithms, rounded so that values are accurate to 0.5 %."""
    return f'("ln", round(ln({expression}), 0.01))'


def figures_of_nodes(run: Choice, window: str) -> str:
    """The number of ranks and the worst rank's figures of each node, and nodes without samples."""
    rank_up = run.of("rank_up")
    remembered = f"count by (instance) (last_over_time({rank_up}[{REMEMBERED_SECONDS}s]))"
    return or_join(
        tag_part(f"count by (instance) ({rank_up})", "ranks"),
        tag_part(f"sum by (instance) ({rank_up})", "up"),
        tag_part(f"sum by (instance) ({run.of('rank_failed')}) > 0", "failed"),
        by_name(f"max by (__name__, instance) ({run.of_all(_OF_NODES)})"),
        tag_part(f"max by (instance) ({step_seconds(run, window)})", "step_seconds"),
        tag_part(f"{remembered} unless count by (instance) ({rank_up})", "lost"),
    )


def names_of_nodes(run: Choice) -> str:
    """The node of each collector."""
    return f"count by (instance, node) ({run.of('rank_info')})"


def ranks_that_matter(run: Choice) -> str:
    """The ranks that matter most: highest risk, latest, most exposed, slowest, failed, hanging, ..."""
    limit, rank_up = MAX_OF_A_KIND, run.of("rank_up")
    metrics = [column.metrics[0] for column in (RISK, LATE, EXPOSED)]
    return or_join(
        *(f"topk({limit}, {run.of(metric)})" for metric in metrics),
        f"bottomk({limit}, {run.of('steps_total')})",
        f"topk({limit}, {run.of('rank_failed')} == 1)",
        f"topk({limit}, {rank_up} == 0)",
        f"topk by (role) ({limit}, {run.of('hang')})",
        f"topk by (rule) (2, {run.of('finding')})",
        run._replace(ranks=(0,)).of("rank_up"),
    )


# ---- over time --------------------------------------------------------------------------------------


def steps_over_time(run: Choice, window: str) -> str:
    """The steps of single ranks over time."""
    gauges = ("steps_total", "exposed_communication_ratio", "overlap_ratio", "memory_allocated_bytes",
              "memory_reserved_bytes", "host_memory_rss_bytes")  # fmt: skip
    phases = f"rate({run.of('phase_seconds_total')}[{window}])"
    return or_join(
        by_name(run.of_all(gauges)),
        tag_part(step_seconds(run, window), "step_seconds"),
        tag_part(phases, "phase"),
        tag_part(f"rate({run.of('step_seconds_count')}[{window}])", "steps"),
    )


def whole_over_time(run: Choice, window: str) -> str:
    """The steps of all ranks over time: the largest, the median and the smallest value."""
    gauges = run.of_all(
        ("exposed_communication_ratio", "memory_reserved_bytes", "host_memory_rss_bytes")
    )
    steps = step_seconds(run, window)
    expressions = [tag_part(f"max({run.of('steps_total')})", "steps_total")]
    for name, share in (("most", 1), ("median", 0.5), ("least", 0)):
        expressions += [
            tag_part(by_name(f"quantile by (__name__) ({share}, {gauges})"), name),
            tag_part(f'label_replace(quantile({share}, {steps}),"figure","step_seconds","","")', name),
        ]
    return or_join(*expressions)


def findings_over_time(run: Choice) -> str:
    """Each finding over time, with the number of ranks that had it."""
    return f"count by (rule, severity) ({run.of('finding')})"
