"""The queries that zeromon sends to a Prometheus. Pure.

Every answer is small: the server aggregates over all ranks, and zeromon fetches single ranks by their
numbers. One query combines several parts as ``a or b``; the label ``of`` of a part is the part's name.
No query relies on recording rules.
"""

from collections.abc import Sequence
from typing import NamedTuple

from zeromon.readout.figures import EXPOSED, LATE, ON_NODES, OVER_RANKS, RISK, STEP
from zeromon.sources.prometheus.client import one_of, quoted

MOST_OF_A_KIND = 8
"""How many ranks :func:`mattering` selects by each criterion."""
REMEMBERED_SECONDS = 600
"""How long a rank without samples still belongs to the snapshot."""

_WAITING = 'role="waiting"'
_TENTH = 'rank=~".*(03|10|16|29|42|55|68|71|84|97)"'
_AGGREGATED = (STEP, RISK)
"""Figures with expressions of their own: a rate, and the maximum over a rank's memories."""
_SPREAD = tuple(m for f in OVER_RANKS if f not in _AGGREGATED for m in f.metrics)
_OF_NODES = tuple(m for f in ON_NODES if f is not STEP for m in f.metrics)
_CORE = (
    "run_started_timestamp_seconds",
    "rank_info", "rank_up", "rank_failed", "rank_death", "rank_detached", "steps_total",
    "steps_skipped_total", "micro_steps_total", "overlap_ratio", "exposed_communication_ratio",
    "collectives_untimed_ratio", "collective_in_flight_seconds", "wait_for_late_rank_seconds",
    "late_seconds", "hang", "finding",
    "memory_allocated_bytes", "memory_active_bytes", "memory_reserved_bytes",
    "memory_inactive_split_bytes", "memory_capacity_bytes", "memory_headroom_bytes",
    "memory_allocation_retries_total", "memory_out_of_memory_total",
    "host_memory_rss_bytes", "host_memory_available_bytes", "host_memory_limit_bytes",
    "host_memory_headroom_bytes", "host_memory_pinned_bytes", "oom_risk_ratio", "oom_steps_left",
    "cpu_wait_ratio", "major_faults_per_second", "events_dropped_total", "agent_errors_total",
    "agent_accounted_overhead_ratio", "agent_overhead_ratio", "agent_overhead_noise_ratio",
    "ledger_seconds_total", "communication_step_exposed_seconds",
)  # fmt: skip
_DETAIL = (
    "startup_seconds",
    "phase_seconds_total", "collectives_total", "collective_bytes_total", "collective_seconds_total",
    "collective_exposed_seconds_total", "collective_busbw_bytes_per_second",
    "collective_best_busbw_bytes_per_second", "group_info", "dim_info", "communication_step_seconds",
    "communication_step_wait_seconds",
    "communication_step_transfer_seconds", "memory_role_bytes", "memory_role_plain_bytes",
    "memory_role_predicted_bytes", "device_memory_used_bytes", "device_memory_total_bytes",
    "device_utilization_ratio", "device_power_watts", "device_temperature_celsius",
    "device_throttled", "device_xid", "device_ecc_errors_total",
)  # fmt: skip


class Choice(NamedTuple):
    """A selection of the time series of one run."""

    run: str
    match: str = ""
    """Further matchers in PromQL: ``cluster="a",job=~"b.*"``."""
    ranks: tuple[int, ...] | None = None
    instances: tuple[str, ...] | None = None

    def of(self, name: str, *more: str) -> str:
        """The selector of ``zeromon_<name>``."""
        return f"zeromon_{name}{{{self._matchers(*more)}}}"

    def of_all(self, names: Sequence[str]) -> str:
        """The selector of several metrics; *names* without ``zeromon_``."""
        those = one_of([f"zeromon_{name}" for name in names])
        return f"{{{self._matchers(f'__name__=~{those}')}}}"

    def _matchers(self, *more: str) -> str:
        parts = [f"run={quoted(self.run)}", *more]
        if self.ranks is not None:
            parts.append(f"rank=~{one_of([str(rank) for rank in self.ranks])}")
        if self.instances is not None:
            parts.append(f"instance=~{one_of(self.instances)}")
        return ",".join([*parts, self.match] if self.match else parts)


def tagged(expression: str, of: str) -> str:
    """*expression* with the label ``of`` set to *of*, the name of a part of one answer."""
    return f'label_replace({expression},"of","{of}","","")'


def named(expression: str) -> str:
    """*expression* with the name of the metric as the label ``figure``."""
    return f'label_replace({expression},"figure","$1","__name__","zeromon_(.+)")'


def union(*parts: str) -> str:
    """All *parts* in one query."""
    return " or ".join(parts)


def runs() -> str:
    """Every run of the last hour: its ranks, how it is, and the figures of a list of runs."""
    seconds, count = "rate(zeromon_step_seconds_sum[1m])", "rate(zeromon_step_seconds_count[1m])"
    lives = "and on (instance, run, rank) zeromon_rank_up == 1"
    severity = "* on (instance, run, rank) group_left () zeromon_run_severity"
    held = ("zeromon_memory_reserved_bytes", "zeromon_host_memory_rss_bytes")
    # a rank does not know its strategy at first: then a run has two series
    info = 'zeromon_rank_info{strategy!="unknown"}'
    parts = {
        "ranks": "count by (run) (zeromon_rank_up)",
        "up": "sum by (run) (zeromon_rank_up)",
        "steps": "max by (run) (last_over_time(zeromon_steps_total[1h]))",
        "known": "count by (run) (last_over_time(zeromon_rank_up[1h]))",
        "started": "min by (run) (last_over_time(zeromon_run_started_timestamp_seconds[1h]))",
        "strategy": f"count by (run, strategy) (last_over_time({info}[1h]))",
        "health": f"topk by (run) (1, (zeromon_run_health == 1) {severity})",
        "step_seconds": f"max by (run) ({seconds} / ({count} > 0) {lives})",
        "exposed": "max by (run) (zeromon_exposed_communication_ratio)",
        "memory": union(*(f"max by (run) ({metric})" for metric in held)),
    }
    return union(*(tagged(expression, of) for of, expression in parts.items()))


def census(run: Choice) -> str:
    """The number of ranks of a run, and one of them."""
    up = run.of("rank_up")
    return union(tagged(f"count({up})", "ranks"), tagged(f"topk(1, {up})", "one"))


def scrapes(run: Choice) -> str:
    """The raw samples of ``rank_up`` over five minutes; *run* must select a single rank."""
    return f"{run.of('rank_up')}[5m]"


def step_seconds(run: Choice, window: str) -> str:
    """The mean step time of each rank over the *window*, seconds."""
    spent, count = run.of("step_seconds_sum"), run.of("step_seconds_count")
    return f"(rate({spent}[{window}]) / (rate({count}[{window}]) > 0))"


# ---- single ranks ---------------------------------------------------------------------------------


def columns(run: Choice, *, detail: bool = False) -> str:
    """The metrics of ranks that every snapshot needs; with *detail* also those of :func:`details`."""
    return run.of_all((*_CORE, *_DETAIL) if detail else _CORE)


def details(run: Choice) -> str:
    """The further metrics of ranks that a view shows in detail."""
    return run.of_all(_DETAIL)


def rates(run: Choice, window: str) -> str:
    """The rates of the ranks' steps and phases, and the time of each rank's last scrape."""
    return union(
        tagged(f"rate({run.of('step_seconds_sum')}[{window}])", "spent"),
        tagged(f"rate({run.of('step_seconds_count')}[{window}])", "steps"),
        tagged(f"rate({run.of('phase_seconds_total')}[{window}])", "phase"),
        tagged(run.of("step_seconds_sum"), "spent_in_all"),
        tagged(f"timestamp({run.of('rank_up')})", "seen"),
    )


def lost(run: Choice) -> str:
    """Ranks that had samples within :data:`REMEMBERED_SECONDS` and have none now."""
    up = run.of("rank_up")
    return f"last_over_time({up}[{REMEMBERED_SECONDS}s]) unless {up}"


def last_seen(run: Choice, seconds: int, step: int) -> str:
    """The time of each rank's last scrape, by the server's clock."""
    return f"max_over_time(timestamp({run.of('rank_up')})[{seconds}s:{step}s])"


def last_alive(run: Choice, seconds: int, step: int) -> str:
    """The time, to *step* seconds, at which a rank of the run was alive last."""
    return f"max(max_over_time(timestamp({run.of('rank_up')} == 1)[{seconds}s:{step}s]))"


def span(run: Choice, seconds: int, step: int) -> str:
    """The times of the run's first and last scrape, by the server's clock."""
    whole = f"timestamp({run.of('rank_up')})[{seconds}s:{step}s]"
    return union(
        tagged(f"min(min_over_time({whole}))", "first"),
        tagged(f"max(max_over_time({whole}))", "last"),
    )


# ---- aggregates of large runs -----------------------------------------------------------------------


def sample(run: Choice) -> Choice:
    """A tenth of the ranks, spread over all local ranks."""
    return run._replace(match=",".join(filter(None, (run.match, _TENTH))))


def whole(run: Choice, window: str, *, sampled: bool = False) -> str:
    """Counts over all ranks, and the distribution of each figure over ranks (a tenth if *sampled*)."""
    up, some = run.of("rank_up"), sample(run) if sampled else run
    parts = [
        tagged(f"count({up})", "ranks"),
        tagged(f"sum({up})", "up"),
        tagged(f"sum({run.of('rank_failed')})", "failed"),
        tagged(f"max(timestamp({up}))", "seen"),
        tagged(f"count(count by (rank) ({up} == 1) > 1)", "twice"),
        tagged(f"count(count by (instance, rank) ({run.of('hang', _WAITING)}))", "hang"),
        tagged(f"count by (rule, severity) ({run.of('finding')})", "finding"),
    ]
    figures = {
        "oom_risk_ratio": f"max by (instance, rank) ({some.of('oom_risk_ratio')})",
        "step_seconds": step_seconds(some, window),
    }
    return union(
        *parts,
        tagged(f"count_values by (figure) {_rounded(named(some.of_all(_SPREAD)))}", "spread"),
        *(
            tagged(
                f'label_replace(count_values {_rounded(of)},"figure","{figure}","","")', "spread"
            )
            for figure, of in figures.items()
        ),
    )


def _rounded(expression: str) -> str:
    """The arguments of ``count_values``: logarithms, rounded so that values are accurate to 0.5 %."""
    return f'("ln", round(ln({expression}), 0.01))'


def nodes(run: Choice, window: str) -> str:
    """The number of ranks and the worst rank's figures of each node, and nodes without samples."""
    up = run.of("rank_up")
    known = f"count by (instance) (last_over_time({up}[{REMEMBERED_SECONDS}s]))"
    return union(
        tagged(f"count by (instance) ({up})", "ranks"),
        tagged(f"sum by (instance) ({up})", "up"),
        tagged(f"sum by (instance) ({run.of('rank_failed')}) > 0", "failed"),
        named(f"max by (__name__, instance) ({run.of_all(_OF_NODES)})"),
        tagged(f"max by (instance) ({step_seconds(run, window)})", "step_seconds"),
        tagged(f"{known} unless count by (instance) ({up})", "lost"),
    )


def node_names(run: Choice) -> str:
    """The node of each collector."""
    return f"count by (instance, node) ({run.of('rank_info')})"


def mattering(run: Choice) -> str:
    """The ranks that matter most: highest risk, latest, most exposed, slowest, failed, hanging, ..."""
    most, up = MOST_OF_A_KIND, run.of("rank_up")
    figures = [figure.metrics[0] for figure in (RISK, LATE, EXPOSED)]
    return union(
        *(f"topk({most}, {run.of(figure)})" for figure in figures),
        f"bottomk({most}, {run.of('steps_total')})",
        f"topk({most}, {run.of('rank_failed')} == 1)",
        f"topk({most}, {up} == 0)",
        f"topk by (role) ({most}, {run.of('hang')})",
        f"topk by (rule) (2, {run.of('finding')})",
        run._replace(ranks=(0,)).of("rank_up"),
    )


# ---- over time --------------------------------------------------------------------------------------


def steps_over_time(run: Choice, window: str) -> str:
    """The steps of single ranks over time."""
    gauges = ("steps_total", "exposed_communication_ratio", "overlap_ratio", "memory_allocated_bytes",
              "memory_reserved_bytes", "host_memory_rss_bytes")  # fmt: skip
    phases = f"rate({run.of('phase_seconds_total')}[{window}])"
    return union(
        named(run.of_all(gauges)),
        tagged(step_seconds(run, window), "step_seconds"),
        tagged(phases, "phase"),
        tagged(f"rate({run.of('step_seconds_count')}[{window}])", "steps"),
    )


def whole_over_time(run: Choice, window: str) -> str:
    """The steps of all ranks over time: the largest, the median and the smallest value."""
    gauges = run.of_all(
        ("exposed_communication_ratio", "memory_reserved_bytes", "host_memory_rss_bytes")
    )
    steps = step_seconds(run, window)
    parts = [tagged(f"max({run.of('steps_total')})", "steps_total")]
    for name, share in (("most", 1), ("median", 0.5), ("least", 0)):
        parts += [
            tagged(named(f"quantile by (__name__) ({share}, {gauges})"), name),
            tagged(
                f'label_replace(quantile({share}, {steps}),"figure","step_seconds","","")', name
            ),
        ]
    return union(*parts)


def findings_over_time(run: Choice) -> str:
    """Each finding over time, with the number of ranks that had it."""
    return f"count by (rule, severity) ({run.of('finding')})"
