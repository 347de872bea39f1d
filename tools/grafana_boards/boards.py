"""The contents of Grafana's dashboards: panels and their queries, as data. Pure.

Queries read the collectors' own metrics, so that they work without our recording rules. ``$run``,
``$node``, ``$rank`` and ``$__rate_interval`` are Grafana's to fill in. A rank's node is in
``zeromon_rank_info``; the choice of a node narrows the choice of ranks.
"""

from typing import Any

from grafana_boards.panels import (
    ALWAYS_1,
    LOST,
    NEUTRAL,
    Cell,
    Colours,
    Dashboard,
    Event,
    Panel,
    Query,
    Row,
    rising,
    steps_at,
)
from zeromon.export.prometheus.rules import ALIVE, NODES, RANK
from zeromon.snapshot.levels import (
    COLLECTOR_CPU,
    CPU_WAIT,
    EXPOSED,
    IN_FLIGHT_SECONDS,
    NODE_SILENT_SECONDS,
    OOM,
    STALE_SECONDS,
    Level,
)

_RUN = 'run=~"$run"'
_RANK = 'run=~"$run", rank=~"$rank"'
_RATE = "[$__rate_interval]"


def _stat(
    title: str, unit: str, expr: str, help: str, colours: Colours = NEUTRAL,
    missing: str = "n/a (no live rank)",
) -> Panel:  # fmt: skip
    query = (Query(expr, title),)
    look = {"width": 4, "height": 4, "colours": colours, "missing": missing}
    return Panel(title, "stat", unit, query, help, **look)  # type: ignore[arg-type]


def _lines(title: str, unit: str, help: str, *queries: tuple[str, str], **look: Any) -> Panel:
    found = tuple(Query(expr, legend) for expr, legend in queries)
    links = (("", "zeromon-rank"),) if any("{{rank}}" in legend for _, legend in queries) else ()
    return Panel(title, "timeseries", unit, found, help, links=links, **look)


def _table(
    title: str, unit: str, help: str, *queries: tuple[str, str], width: int = 12,
    cells: tuple[Cell, ...] = (), links: tuple[tuple[str, str], ...] = (),
) -> Panel:  # fmt: skip
    found = tuple(Query(expr, legend) for expr, legend in queries)
    return Panel(title, "table", unit, found, help, width=width, cells=cells, links=links)


def _now(how: str, metric: str) -> str:
    """Aggregates *metric* over the ranks that live, so that nothing is shown of ranks that have ended."""
    return f"{how} (zeromon_{metric}{{{_RUN}}} {ALIVE})"


def _begins(expr: str) -> str:
    """True in the minute after *expr* has begun to have an answer."""
    return f"({expr}) unless ({expr.replace('}', '} offset 1m')})"


_LIVES = f"max by (run) (zeromon_rank_up{{{_RUN}}}) == 1"
EVENTS = (
    Event("Start", "green", _begins(_LIVES), "{{run}} starts"),
    Event("End", "blue", f"({_LIVES.replace('}', '} offset 1m')}) unless ({_LIVES})", "{{run}} has ended"),
    Event("Death", "red", _begins(f'max by (run, rank, cause) (zeromon_rank_death{{{_RUN}, role="culprit"}})'),
          "rank {{rank}} of {{run}} died: {{cause}}"),
    Event("Findings", "orange", _begins(f'max by (run, rule, severity) (zeromon_finding{{{_RUN}, severity!="info"}})'),
          "{{run}}: {{rule}}"),
)  # fmt: skip


def _step(labels: str, how: str, by: str, ranks: str = "") -> str:
    """Duration of a step, aggregated over ranks."""
    spent = f"rate(zeromon_step_seconds_sum{{{labels}}}{_RATE})"
    steps = f"rate(zeromon_step_seconds_count{{{labels}}}{_RATE})"
    return f"{how} by ({by}) ({spent} / ({steps} > 0) {ranks})"


def _named(what: str) -> str:
    """Total *what* per second of all ranks; the label ``unit`` names it."""
    rate = f"sum(rate(zeromon_{what}_total{{{_RUN}}}{_RATE}) {ALIVE})"
    return f'label_replace({rate}, "unit", "{what}/s", "", "")'


def _moved(what: str, labels: str, how: str, ranks: str = "") -> str:
    return f"{how} by (op, group, phase) (zeromon_communication_step_{what}{{{labels}}} {ranks})"


def _of_one(metric: str, fullest: str, labels: str, by: str) -> str:
    """*metric* of the one rank with the most *fullest*: figures side by side are of the same rank."""
    rank = f"topk(1, sum by ({RANK}) ({fullest}))"
    return f"max by ({by}) (zeromon_{metric}{{{labels}}} and on ({RANK}) {rank})"


def _roles(labels: str) -> Panel:
    all_roles = f"zeromon_memory_role_bytes{{{labels}}}"
    return _lines("Memory by role", "bytes", "At the last census, before an optimizer step; the rank with the most.",
                  (_of_one("memory_role_bytes", all_roles, labels, "role, place"), "{{role}} on {{place}}"),
                  stacked=True)  # fmt: skip


_HEALTH = Panel(
    "Health", "stat", "none", (Query(
        f"topk by (run) (1, (zeromon_run_health{{{_RUN}}} == 1)"
        f" * on ({RANK}) group_left () zeromon_run_severity{{{_RUN}}})", "{{run}}: {{health}}"),),
    "The verdict on each run now, as the terminal's first line has it; of several nodes the worst.", width=24, height=3,
    colours=((0, "green"), (1, "blue"), (2, "orange"), (3, "red")), names=True,
)  # fmt: skip

_GOODPUT = (
    f'sum(zeromon_ledger_seconds_total{{{_RUN}, cause=~"compute|offload"}}) '
    f"/ sum(zeromon_ledger_seconds_total{{{_RUN}}})"
)
_ALERTS = _table(
    "Alerts", "none", "Alerts that fire now; zeromon prometheus rules has them. Empty without that rule file.",
    (f'max by (run, rank, alertname, severity) (ALERTS{{alertname=~"Zeromon.+", alertstate="firing", {_RUN}}})', ALWAYS_1),
)  # fmt: skip

_FLEET = Dashboard(
    "zeromon-fleet", "zeromon: fleet", "All runs of all nodes, side by side.", ("run",),
    (
        Row("Now", (
            _HEALTH,
            _stat("Live runs", "none", f"count(count by (run) (zeromon_rank_up{{{_RUN}}} == 1)) or vector(0)",
                  "Runs with at least one living rank."),
            _stat("Live ranks", "none", f"sum(zeromon_rank_up{{{_RUN}}})", "Ranks whose process lives."),
            _stat("Failed ranks", "none", f"sum(zeromon_rank_failed{{{_RUN}}})",
                  "Ranks that failed, by themselves or because of another rank.", LOST),
            _stat("Collectors", "none", "count(zeromon_collector_runs)", "Collectors that answer, one per node.",
                  missing="n/a (no collector)"),
            _stat("Oldest snapshot", "s",
                  "clamp_min(max(timestamp(zeromon_collector_last_tick_timestamp_seconds)"
                  " - zeromon_collector_last_tick_timestamp_seconds), 0)",
                  "Age of the oldest figures, by the clocks of Prometheus and of the node.",
                  rising(Level(STALE_SECONDS, NODE_SILENT_SECONDS)), "n/a (no collector)"),
            _stat("Collectors' CPU", "percentunit",
                  f"max(rate(zeromon_collector_tick_seconds_total{_RATE}))",
                  "Share of a core that the busiest collector spends on reading its ranks.",
                  rising(COLLECTOR_CPU), "n/a (no collector)"),
        )),
        Row("Runs", (
            _table("Runs", "none", "One line per run.",
                   (f"sum by (run) (zeromon_rank_up{{{_RUN}}})", "live ranks"),
                   (f"sum by (run) (zeromon_rank_failed{{{_RUN}}})", "failed ranks"),
                   (f"max by (run) (zeromon_steps_total{{{_RUN}}})", "steps"),
                   (_step(_RUN, "avg", "run", ALIVE), "step time"),
                   (_now("max by (run)", "exposed_communication_ratio"), "exposed, worst rank"),
                   (_now("max by (run)", "oom_risk_ratio"), "OOM risk, worst rank"),
                   (_now("max by (run)", "late_seconds"), "latest rank"), width=24,
                   cells=(Cell("failed ranks", colours=LOST), Cell("step time", "s"), Cell("latest rank", "s"),
                          Cell("exposed, worst rank", "percentunit", rising(EXPOSED)),
                          Cell("OOM risk, worst rank", "percentunit", rising(OOM))), links=(("run", "zeromon-run"),)),
            _table("Findings", "none", "Present findings of each run; zeromon rule NAME explains a rule.",
                   (f"sum by (run, rule, severity) (zeromon_finding{{{_RUN}}})", "ranks"),
                   links=(("run", "zeromon-run"),)),
            _ALERTS,
            _lines("Live ranks by run", "none", "Ranks whose process lives.",
                   (f"sum by (run) (zeromon_rank_up{{{_RUN}}})", "{{run}}")),
            _lines("Step time by run", "s", "Mean over ranks, with all micro-steps.",
                   (_step(_RUN, "avg", "run"), "{{run}}")),
            _lines("Exposed communication by run", "percentunit",
                   "Exposed communication as a share of a step; the worst rank.",
                   (f"max by (run) (zeromon_exposed_communication_ratio{{{_RUN}}})", "{{run}}"),
                   colours=rising(EXPOSED)),
            _lines("OOM risk by run", "percentunit", "0: no end in sight; 1: out of memory now. The worst rank.",
                   (f"max by (run) (zeromon_oom_risk_ratio{{{_RUN}}})", "{{run}}"),
                   colours=rising(OOM)),
            _lines("Latest rank by run", "s", "Time per step that the other ranks wait for one rank alone.",
                   (f"max by (run) (zeromon_late_seconds{{{_RUN}}})", "{{run}}")),
            _lines("Communication by run", "Bps", "Payload of all ranks together.",
                   (f"sum by (run) (rate(zeromon_collective_bytes_total{{{_RUN}}}{_RATE}))", "{{run}}")),
        )),
        Row("Nodes", (
            Panel("Most exposed nodes", "bars", "percentunit", (Query(
                f"topk(10, max by (run, node) ((zeromon_exposed_communication_ratio{{{_RUN}}} {ALIVE})"
                f" * on ({RANK}) group_left (node) {NODES}))", "{{node}} {{run}}"),),
                "Exposed communication as a share of a step; the worst rank of each node.", width=12,
                colours=rising(EXPOSED), links=(("", "zeromon-rank"),)),
            Panel("Least host memory left", "bars", "bytes", (Query(
                f"bottomk(10, min by (run, node) ((zeromon_host_memory_headroom_bytes{{{_RUN}}} {ALIVE})"
                f" * on ({RANK}) group_left (node) {NODES}))", "{{node}} {{run}}"),),
                "Host memory that the tightest cgroup, or the machine, can still give.", width=12,
                colours=NEUTRAL, links=(("", "zeromon-rank"),)),
        )),
    ),
)  # fmt: skip

_OF_RUN = Dashboard(
    "zeromon-run", "zeromon: run", "One run, over its ranks.", ("run",),
    (
        Row("Now", (
            _HEALTH,
            _stat("Live ranks", "none", f"sum(zeromon_rank_up{{{_RUN}}})", "Ranks whose process lives."),
            _stat("Steps", "none", f"max(zeromon_steps_total{{{_RUN}}})", "Optimizer steps."),
            _stat("Step time now", "s", _step(_RUN, "avg", "run", ALIVE), "Mean over ranks.", missing="n/a (no step ends)"),
            _stat("Exposed now", "percentunit",
                  _now("max", "exposed_communication_ratio"),
                  "Exposed communication as a share of a step; the worst rank.", rising(EXPOSED)),
            _stat("OOM risk now", "percentunit", _now("max", "oom_risk_ratio"),
                  "0: no end in sight; 1: out of memory now. The worst rank.", rising(OOM)),
            _stat("Steps until out of memory", "none", _now("min", "oom_steps_left"),
                  "For the worst rank.",
                  ((0, "red"), (steps_at(OOM.critical), "orange"), (steps_at(OOM.warning), "green")), "n/a (no trend)"),
            _stat("Failed ranks", "none", f"sum(zeromon_rank_failed{{{_RUN}}})",
                  "Ranks that failed, by themselves or because of another rank.", LOST),
            _stat("Waits for a CPU", "percentunit", _now("max", "cpu_wait_ratio"),
                  "Share of the last ten seconds in which a main thread was runnable but waited for a CPU; the worst rank.",
                  rising(CPU_WAIT)),
            _stat("In flight", "s", _now("max", "collective_in_flight_seconds"),
                  "Age of the oldest collective that has not ended.", rising(IN_FLIGHT_SECONDS)),
            _stat("MFU now", "percentunit", _now("max", "mfu_ratio"),
                  "Model FLOPs utilization; n/a where the model or the device's peak is unknown.",
                  missing="n/a (peak unknown)"),
            _stat("Goodput so far", "percentunit", _GOODPUT,
                  "Useful share of the time since the start: forwards, backwards and optimizers."),
            _stat("Tokens or samples a second", "none", f'{_named("tokens")} or on () {_named("samples")}',
                  "Of all ranks; samples where batches hold no tokens."),
        )),
        Row("Steps", (
            _lines("Step time", "s", "With all micro-steps; fastest, mean and slowest rank.",
                   (_step(_RUN, "min", "run"), "fastest"), (_step(_RUN, "avg", "run"), "mean"),
                   (_step(_RUN, "max", "run"), "slowest")),
            _lines("Phases", "percentunit", "Breakdown of the time by phase, mean over ranks.",
                   (f"avg by (phase) (rate(zeromon_phase_seconds_total{{{_RUN}}}{_RATE})) > 0", "{{phase}}"),
                   stacked=True),
            _lines("Step time, distribution", "s", "Quantiles over ranks and steps, from the histogram.",
                   *((f"histogram_quantile({q}, sum by (le) (rate(zeromon_step_seconds_bucket{{{_RUN}}}{_RATE})))",
                      f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99))),
            _lines("Throughput", "none", "Tokens a second of all ranks; samples where batches hold no tokens.",
                   (f'{_named("tokens")} or on () {_named("samples")}', "{{unit}}")),
            _lines("Ledger", "percentunit", "Where the time of set-up and steps goes: share of all ranks' seconds by cause.",
                   (f"sum by (cause) (rate(zeromon_ledger_seconds_total{{{_RUN}}}{_RATE})) / ignoring (cause) "
                    f"group_left sum(rate(zeromon_ledger_seconds_total{{{_RUN}}}{_RATE})) > 0", "{{cause}}"),
                   stacked=True),
            _lines("Goodput", "percentunit", "Useful share of the time since the start: forwards, backwards and optimizers.",
                   (_GOODPUT, "goodput")),
            _lines("MFU", "percentunit", "Model FLOPs utilization; empty where the model or the device's peak is unknown.",
                   (f"max(zeromon_mfu_ratio{{{_RUN}}})", "MFU")),
            Panel("Ranks by step time", "heatmap", "s", (Query(_step(_RUN, "max", "rank"), "rank {{rank}}"),),
                  "How many ranks have which step time; a second band is a group of slower ranks.", width=16),
        )),
        Row("Communication", (
            _lines("Exposed communication", "percentunit", "Exposed communication as a share of a step.",
                   (f"avg(zeromon_exposed_communication_ratio{{{_RUN}}})", "mean"),
                   (f"max(zeromon_exposed_communication_ratio{{{_RUN}}})", "worst rank"),
                   colours=rising(EXPOSED)),
            _lines("Overlap", "percentunit", "Share of communication that is hidden behind compute.",
                   (f"avg(zeromon_overlap_ratio{{{_RUN}}})", "mean"),
                   (f"min(zeromon_overlap_ratio{{{_RUN}}})", "worst rank")),
            _lines("Latest ranks", "s", "Time per step that the other ranks wait for each of these ranks alone.",
                   (f"topk(5, zeromon_late_seconds{{{_RUN}}})", "rank {{rank}}")),
            _lines("Exposed a step", "s", "By operation, group and phase; mean over ranks.",
                   (_moved("exposed_seconds", _RUN, "avg"), "{{op}} {{group}} {{phase}}"), stacked=True),
            _lines("Payload", "Bps", "Of all ranks together, by operation and group.",
                   (f"sum by (op, group) (rate(zeromon_collective_bytes_total{{{_RUN}}}{_RATE}))",
                    "{{op}} {{group}}")),
            _lines("Oldest collective in flight", "s", "Age of the oldest collective that has not ended; a rising line is a hang.",
                   (f"max(zeromon_collective_in_flight_seconds{{{_RUN}}})", "oldest")),
            _table("Ranks of a hang", "none", "Ranks that wait in a hanging collective now, are missing, or dead.",
                   (f"max by (rank, role, kind, op, group) (zeromon_hang{{{_RUN}}})", ALWAYS_1), width=24),
        )),
        Row("Memory", (
            _lines("OOM risk", "percentunit", "0: no end in sight; 1: out of memory now. The worst rank.",
                   (f"max by (pool) (zeromon_oom_risk_ratio{{{_RUN}}})", "{{pool}}"), colours=rising(OOM)),
            _lines("Device memory", "bytes", "The fullest rank.",
                   *((_of_one(f"memory_{what}_bytes", f"zeromon_memory_reserved_bytes{{{_RUN}}}", _RUN, "run"), what)
                     for what in ("allocated", "reserved", "capacity"))),
            _lines("Host memory", "bytes", "Resident set of the largest rank, and the host memory that is left.",
                   (f"max(zeromon_host_memory_rss_bytes{{{_RUN}}})", "largest rank"),
                   (f"min(zeromon_host_memory_headroom_bytes{{{_RUN}}})", "left")),
            _roles(_RUN),
            _lines("Offload", "Bps", "Achieved speed by path, mean over ranks; a lower bound.",
                   (f"avg by (path) (zeromon_offload_bytes_per_second{{{_RUN}}})", "{{path}}")),
        )),
        Row("Configuration", (
            _table("Ranks", "none", "Node, device, strategy and process of each rank.",
                   (f"max by (rank, node, device, strategy, pid) (zeromon_rank_info{{{_RUN}}})", ALWAYS_1),
                   links=(("rank", "zeromon-rank"),)),
            _ALERTS,
            _table("Findings", "none", "Present findings; zeromon rule NAME explains a rule.",
                   (f"sum by (rule, severity) (zeromon_finding{{{_RUN}}})", "ranks")),
            _table("Settings", "none", "Effective and written values of DeepSpeed's configuration.",
                   (f"max by (engine, name, effective, written) (zeromon_setting_info{{{_RUN}}})", ALWAYS_1)),
            _lines("Loss scale", "none", "Loss scale of fp16 training; the lowest of all ranks.",
                   (f"min(zeromon_loss_scale{{{_RUN}}})", "loss scale")),
            _lines("Loss", "none", "Loss where a logger of the process gets it; mean of the ranks that know it.",
                   (f'avg(zeromon_training_scalar{{{_RUN}, name="loss"}})', "loss"), floats=True),
            _lines("Gradient norm", "none", "Norm before clipping; the highest of all ranks.",
                   (f'max(zeromon_training_scalar{{{_RUN}, name="grad_norm"}})', "norm")),
        )),
        Row("Health of zeromon", (
            _lines("Records lost", "none", "Records that were overwritten or damaged before they were read, all ranks; counts are then too low.",
                   (f"sum(zeromon_events_dropped_total{{{_RUN}}})", "records")),
            _lines("Hook errors", "none", "Errors inside the agent's hooks; training is not affected.",
                   (f"sum(zeromon_agent_errors_total{{{_RUN}}})", "errors")),
            _lines("Cost of the agent", "percentunit", "Upper bound, by the agent's calls and samples.",
                   (f"max(zeromon_agent_accounted_overhead_ratio{{{_RUN}}})", "at most"), top=0.02),
        )),
    ),
)  # fmt: skip


def _each(metric: str, legend: str = "rank {{rank}}") -> tuple[str, str]:
    """A metric of each selected rank."""
    return f"{metric}{{{_RANK}}}", legend


_OF_RANK = Dashboard(
    "zeromon-rank", "zeromon: rank", "Selected ranks of a run, one by one.", ("run", "node", "rank"),
    (
        Row("Now", (
            Panel("Exposed communication by rank", "ranks", "percentunit",
                  (Query(f"zeromon_exposed_communication_ratio{{{_RANK}}}", "rank {{rank}}"),),
                  "Exposed communication as a share of a step; a line a rank.", width=12, colours=rising(EXPOSED)),
            Panel("OOM risk by rank", "ranks", "percentunit",
                  (Query(f"max by (rank) (zeromon_oom_risk_ratio{{{_RANK}}})", "rank {{rank}}"),),
                  "0: no end in sight; 1: out of memory now. A line a rank.", width=12, colours=rising(OOM)),
        )),
        Row("Steps", (
            _lines("Step time", "s", "With all micro-steps.", (_step(_RANK, "max", "rank"), "rank {{rank}}")),
            _lines("Phases", "percentunit", "Breakdown of the time by phase, mean over the selected ranks.",
                   (f"avg by (phase) (rate(zeromon_phase_seconds_total{{{_RANK}}}{_RATE})) > 0", "{{phase}}"),
                   stacked=True),
            _lines("Steps", "none", "Optimizer steps, and steps that were skipped because of an overflow.",
                   _each("zeromon_steps_total"), _each("zeromon_steps_skipped_total", "rank {{rank}} skipped")),
        )),
        Row("Communication", (
            _lines("Exposed communication", "percentunit", "Exposed communication as a share of a step.",
                   _each("zeromon_exposed_communication_ratio")),
            _lines("Overlap", "percentunit", "Share of communication that is hidden behind compute.",
                   _each("zeromon_overlap_ratio")),
            _lines("In flight", "s", "Age of the oldest collective that has not ended.",
                   _each("zeromon_collective_in_flight_seconds")),
            _lines("Late", "s", "Time per step that the other ranks wait for this rank alone.",
                   _each("zeromon_late_seconds")),
            _lines("Waits for late ranks", "s", "Time per step that the rank waits for ranks that arrive later.",
                   _each("zeromon_wait_for_late_rank_seconds")),
        )),
        Row("Memory", (
            _lines("Device memory", "bytes", "Caching allocator, and the memory that this process may use.",
                   _each("zeromon_memory_allocated_bytes", "rank {{rank}} allocated"),
                   _each("zeromon_memory_reserved_bytes", "rank {{rank}} reserved"),
                   _each("zeromon_memory_capacity_bytes", "rank {{rank}} capacity")),
            _lines("Fragmentation", "bytes", "Free parts of split blocks.",
                   _each("zeromon_memory_inactive_split_bytes")),
            _lines("Allocation retries", "none", "Allocations that succeeded only after a flush of the cache.",
                   (f"increase(zeromon_memory_allocation_retries_total{{{_RANK}}}{_RATE})", "rank {{rank}}")),
            _lines("Host memory", "bytes", "Resident set, and the memory that its cgroup or the machine can still give.",
                   _each("zeromon_host_memory_rss_bytes", "rank {{rank}} resident"),
                   _each("zeromon_host_memory_headroom_bytes", "rank {{rank}} left")),
            _lines("OOM risk", "percentunit", "0: no end in sight; 1: out of memory now.",
                   (f"max by (rank) (zeromon_oom_risk_ratio{{{_RANK}}})", "rank {{rank}}")),
            _roles(_RANK),
            _lines("Measured minus predicted", "bytes", "By role: bytes that the prediction does not explain.",
                   _each("zeromon_memory_role_unexplained_bytes", "rank {{rank}} {{role}}"), floats=True),
            _lines("Unattributed memory", "bytes", "Activations, fragmentation, other libraries, the rest of the resident set.",
                   _each("zeromon_memory_rest_bytes", "rank {{rank}} {{kind}} on {{place}}")),
        )),
        Row("Host", (
            _lines("Waits for a CPU", "percentunit", "Share of the last ten seconds in which the main thread was runnable but waited for a CPU.",
                   _each("zeromon_cpu_wait_ratio")),
            _lines("Major faults", "none", "Page faults per second that needed a read from disk.",
                   _each("zeromon_major_faults_per_second")),
            _lines("Disk", "Bps", "Read and written by the rank's process.",
                   (f"rate(zeromon_process_disk_read_bytes_total{{{_RANK}}}{_RATE})", "rank {{rank}} read"),
                   (f"rate(zeromon_process_disk_written_bytes_total{{{_RANK}}}{_RATE})", "rank {{rank}} written")),
        )),
        Row("Device", collapsed=True, panels=(
            _lines("Utilization", "percentunit", "Share of time with a kernel running.",
                   _each("zeromon_device_utilization_ratio")),
            _lines("Power", "watt", "Power draw; of the host, its processors and DRAM.",
                   _each("zeromon_device_power_watts"),
                   (f"rate(zeromon_host_energy_joules_total{{{_RANK}}}{_RATE})", "host of rank {{rank}}")),
            _lines("Temperature", "celsius", "Of the device.", _each("zeromon_device_temperature_celsius"), floats=True),
            _lines("PCIe", "Bps", "To the device and from it.",
                   _each("zeromon_device_pcie_receive_bytes_per_second", "rank {{rank}} in"),
                   _each("zeromon_device_pcie_transmit_bytes_per_second", "rank {{rank}} out")),
            _lines("NVLink", "Bps", "All links, to the device and from it.",
                   _each("zeromon_device_nvlink_receive_bytes_per_second", "rank {{rank}} in"),
                   _each("zeromon_device_nvlink_transmit_bytes_per_second", "rank {{rank}} out")),
            _lines("Throttling and errors", "none", "Reasons for throttled clocks, uncorrected ECC errors, the newest Xid.",
                   _each("zeromon_device_throttled", "rank {{rank}} {{reason}}"),
                   _each("zeromon_device_ecc_errors_total", "rank {{rank}} ECC"),
                   _each("zeromon_device_xid", "rank {{rank}} Xid")),
        )),
    ),
)  # fmt: skip

_OF_UNIT = Dashboard(
    "zeromon-unit", "zeromon: communication",
    "Communication by operation, process group and phase. Units are too many for labels: "
    "zeromon attach and zeromon dash show them.", ("run", "node", "rank"),
    (
        Row("A step", (
            _lines("Communication", "s", "From the call to the end; overlapping collectives count separately. Mean over ranks.",
                   (_moved("seconds", _RANK, "avg"), "{{op}} {{group}} {{phase}}"), stacked=True),
            _lines("Exposed", "s", "Communication that blocked the compute stream, on CPU backends the calling thread.",
                   (_moved("exposed_seconds", _RANK, "avg"), "{{op}} {{group}} {{phase}}"), stacked=True),
            _lines("Waiting for late ranks", "s", "Communication time spent waiting for ranks that arrive later.",
                   (_moved("wait_seconds", _RANK, "avg"), "{{op}} {{group}} {{phase}}"), stacked=True),
            _lines("Transfer", "s", "Shortest duration over the ranks.",
                   (_moved("transfer_seconds", _RANK, "avg"), "{{op}} {{group}} {{phase}}"), stacked=True),
            _table("Now", "s", "Seconds per step, mean over the selected ranks.",
                   (_moved("seconds", _RANK, "avg", ALIVE), "all"), (_moved("exposed_seconds", _RANK, "avg", ALIVE), "exposed"),
                   (_moved("wait_seconds", _RANK, "avg", ALIVE), "waiting"),
                   (_moved("transfer_seconds", _RANK, "avg", ALIVE), "transfer"), width=16),
        )),
        Row("Collectives", (
            _lines("Calls", "ops", "Collectives per second of a rank, by operation and group.",
                   (f"avg by (op, group) (rate(zeromon_collectives_total{{{_RANK}}}{_RATE}))", "{{op}} {{group}}")),
            _lines("Payload", "Bps", "Of a rank, by operation and group.",
                   (f"avg by (op, group) (rate(zeromon_collective_bytes_total{{{_RANK}}}{_RATE}))", "{{op}} {{group}}")),
            _lines("Exposed of all seconds", "percentunit", "By operation and group.",
                   (f"avg by (op, group) (rate(zeromon_collective_exposed_seconds_total{{{_RANK}}}{_RATE}))",
                    "{{op}} {{group}}")),
            _lines("Bus bandwidth", "Bps", "As nccl-tests defines it, over the last steps; and the highest so far.",
                   (f"min by (op, group) (zeromon_collective_busbw_bytes_per_second{{{_RANK}}})", "{{op}} {{group}}"),
                   (f"max by (op, group) (zeromon_collective_best_busbw_bytes_per_second{{{_RANK}}})",
                    "{{op}} {{group}} best")),
            _lines("Links", "Bps", "Peak bandwidth of each link in one direction.",
                   (f"max by (link) (zeromon_link_peak_bytes_per_second{{{_RANK}}})", "{{link}}")),
            _lines("Size of a call", "bytes", "Quantiles over timed collectives.",
                   *((f"histogram_quantile({q}, sum by (le) (rate(zeromon_collective_size_bytes_bucket{{{_RANK}}}{_RATE})))",
                      f"p{round(100 * q)}") for q in (0.5, 0.9))),
            _lines("Counted, not timed", "ops", "Collectives issued from C++, or in a control step.",
                   (f"avg by (group) (rate(zeromon_collectives_untimed_total{{{_RANK}}}{_RATE}))", "{{group}}")),
            _lines("Exposed by dimension", "percentunit",
                   "Share of time in which communication of a dimension of the parallelism (dp_shard, tp, ...) is exposed. Mean over ranks.",
                   (f"avg by (dim) (rate(zeromon_dim_exposed_seconds_total{{{_RANK}}}{_RATE}))", "{{dim}}")),
            _lines("Bus bandwidth by dimension", "Bps", "Of all collectives in a dimension of the parallelism together; the slowest rank.",
                   (f"min by (dim) (zeromon_dim_busbw_bytes_per_second{{{_RANK}}})", "{{dim}}")),
            _table("Groups", "none", "Process groups, their size, and the number of nodes that they span.",
                   (f"count by (group, size, nodes) (zeromon_group_info{{{_RANK}}})", "ranks"), width=16),
        )),
        Row("ZeRO-3", collapsed=True, panels=(
            _lines("Gathered parameters", "Bps", "Prefetched (ahead), or fetched when needed (late).",
                   (f"avg by (outcome) (rate(zeromon_gather_bytes_total{{{_RANK}}}{_RATE}))", "{{outcome}}"), width=12),
            _lines("Exposed gathers", "percentunit", "Share of time in which parameter gathers blocked the compute stream or the calling thread.",
                   (f"avg by (outcome) (rate(zeromon_gather_exposed_seconds_total{{{_RANK}}}{_RATE}))", "{{outcome}}"),
                   width=12),
        )),
    ),
)  # fmt: skip

BOARDS = (_FLEET, _OF_RUN, _OF_RANK, _OF_UNIT)
