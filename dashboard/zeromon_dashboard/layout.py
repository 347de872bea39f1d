"""The pages. Pure: what is known of a run in, components out.

A page is named parts, each with the properties that change. The first view and every later one are made
by the same function; what is sent to a tab that is open are those parts whose properties have changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon import report
from zeromon.advice import risk_in_words
from zeromon.expected import rests
from zeromon.history import Series
from zeromon.record import KnownFinding
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon_dashboard import charts, views
from zeromon_dashboard.charts import Chart
from zeromon_dashboard.where import Where

Props = dict[str, Any]
Parts = dict[str, Props]
"""Properties by the id of a component."""

_SEVERITY = {"critical": "red", "warning": "orange", "info": "blue"}
_MOST_TRAFFIC = 200


@dataclass(frozen=True, slots=True)
class Known:
    """All that a page of a run is made from."""

    where: Where
    run: RunSnapshot
    series: Series
    findings: Sequence[KnownFinding] = ()
    live: bool = False
    age: float = 0.0
    trouble: str = ""

    @property
    def rank(self) -> RankSnapshot | None:
        """The rank that is told of where one is: the chosen one, else the one that waits most."""
        if self.where.ranks:
            chosen = (r for r in self.run.ranks if r.rank == self.where.ranks[0])
            return next(chosen, None)
        return report.most_exposed(self.run) or (self.run.ranks[0] if self.run.ranks else None)


@dataclass(frozen=True, slots=True)
class Page:
    """One page at one moment."""

    parts: Parts
    charts: dict[str, Chart] = field(default_factory=dict)
    """Those that grow at their end."""


# ---- the parts ------------------------------------------------------------------------------------


def page_of(known: Known) -> Page:
    """The page that *known* asks for."""
    made = _PARTS[known.where.page](known)
    return Page({**_head(known), **made.parts}, made.charts)


def _head(known: Known) -> Parts:
    run, first = known.run, (known.run.ranks[0] if known.run.ranks else None)
    facts = _facts(run, first) if first is not None else ""
    if known.where.at is not None:
        state, colour = f"as at {clock(run.taken_wall)}", "violet"
    elif known.trouble:
        state, colour = f"no answer for {human_seconds(known.age)}", "red"
    elif run.ended or not known.live:
        state, colour = "recorded", "gray"
    else:
        state, colour = "live", "teal"
    failed = any(rank.failed for rank in run.ranks) or bool(run.fleet and run.fleet.failed)
    return {
        "facts": {"children": facts},
        "state": {"children": state, "color": colour},
        "verdict": {
            "children": report.verdict(run),
            "c": "red" if failed else "inherit",
        },
    }


def _facts(run: RunSnapshot, first: RankSnapshot) -> str:
    fleet = run.fleet
    if fleet is None:
        return f"{first.strategy}, {len(run.ranks)} of {first.world_size} ranks, {first.device}"
    seen = human_count(fleet.ranks - fleet.silent)
    nodes = human_count(len(fleet.nodes))
    return f"{first.strategy}, {seen} of {human_count(first.world_size)} ranks on {nodes} nodes"


def clock(wall: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def _card(label: str, value: str, note: str, colour: str = "dimmed") -> Any:
    return dmc.Paper(
        [
            dmc.Text(label, size="xs", c="dimmed", tt="uppercase", fw=600),
            dmc.Text(value, size="xl", fw=700, className="figure"),
            dmc.Text(note, size="xs", c=colour, lineClamp=3),
        ],
        withBorder=True,
        p="sm",
        radius="md",
    )


def _overview(known: Known) -> Page:
    run = known.run
    lines = {
        "step-time": charts.step_time(known.series),
        "exposed": charts.exposed(known.series),
        "memory": charts.memory(known.series, known.run),
    }
    return Page(
        {
            "cards": {"children": [_risk(run), _waits(run), _steps(run), _agent(run)]},
            "breakdown": {"figure": views.breakdown(run)},
            "spreads": {"children": _spreads(run)},
            "findings": {
                "children": [*_notes(run), *_findings(run.findings[:3], len(run.findings))]
            },
        },
        _known_charts(lines),
    )


def _spreads(run: RunSnapshot) -> Any:
    """How the figures of all ranks spread, where a picture has only some of them."""
    fleet = run.fleet
    if fleet is None:
        return None
    heads = ("least", "5 %", "median", "95 %", "most")
    rows = []
    for name, title, words in report.SPREADS:
        found = fleet.spreads.get(name)
        if found is not None:
            values = (found.least, found.p5, found.median, found.p95, found.most)
            rows.append(html.Tr([html.Td(title), *(html.Td(words(value)) for value in values)]))
    return dmc.Table(
        [
            html.Thead(html.Tr([html.Th(f"{fleet.ranks:,} ranks"), *(html.Th(h) for h in heads)])),
            html.Tbody(rows),
        ],
        withTableBorder=True,
        verticalSpacing=4,
    )


def _notes(run: RunSnapshot) -> list[Any]:
    """What the source of the picture has to say of it."""
    return [dmc.Alert(part, color="orange") for part in run.note.split("; ") if part and run.ranks]


def _known_charts(found: dict[str, Chart | None]) -> dict[str, Chart]:
    return {name: chart or _no_chart() for name, chart in found.items()}


def _no_chart() -> Chart:
    return Chart("no step yet", "", {"": ([], [])}, 1.0)


def _risk(run: RunSnapshot) -> Any:
    pairs = [(rank, risk) for rank in run.ranks for risk in rank.risks]
    if not pairs:
        return _card("OOM risk", "n/a", "no capacity is known")
    rank, risk = max(pairs, key=lambda pair: pair[1].ratio)
    colour = "red" if risk.ratio >= 0.8 else "orange" if risk.ratio >= 0.5 else "dimmed"
    whose = "" if risk.pool == "host" else f"rank {rank.rank}: "
    words = whose + risk_in_words(risk, rank).removesuffix(" (none)")
    return _card("OOM risk", human_ratio(risk.ratio), words, colour)


def _waits(run: RunSnapshot) -> Any:
    worst = max(
        (rank for rank in run.ranks if rank.exposed_ratio is not None),
        key=lambda rank: rank.exposed_ratio or 0.0,
        default=None,
    )
    if worst is None:
        return _card("Exposed communication", "n/a", "nothing was timed yet")
    share = worst.exposed_ratio or 0.0
    colour = "red" if share >= 0.25 else "orange" if share >= 0.1 else "dimmed"
    note = f"{human_seconds(worst.exposed_seconds)} a step on rank {worst.rank}"
    if worst.traffic and worst.traffic[0].exposed_seconds > 0:
        most = worst.traffic[0]
        note += f"; most in {most.unit or most.group} ({most.op})"
    error = worst.check.error_ratio if worst.check is not None else None
    note += f"; {error * 100:+.0f} % off the last trace" if error is not None else ""
    return _card("Exposed communication", human_ratio(share), note, colour)


def _steps(run: RunSnapshot) -> Any:
    known = [rank.step_seconds for rank in run.ranks if rank.step_seconds]
    if not known:
        return _card("Step", "n/a", "no step yet")
    slowest = max(known)
    return _card(
        "Step", human_seconds(slowest), f"{1 / slowest:.3g} steps/s; median of the last steps"
    )


def _agent(run: RunSnapshot) -> Any:
    costs = [
        (rank.overhead_ratio, rank.overhead_noise_ratio or 0.0)
        for rank in run.ranks
        if rank.overhead_ratio is not None
    ]
    if not costs:
        return _card("What watching costs", "n/a", "not enough steps with idle hooks yet")
    cost, noise = max(costs)
    return _card(
        "What watching costs",
        f"{cost * 100:+.1f} %",
        f"± {noise * 100:.1f} %, from steps with idle hooks",
    )


def _memory(known: Known) -> Page:
    rank = known.rank
    lines = {"memory": charts.memory(known.series, known.run)}
    told = next((r for r in known.run.ranks if r.roles), None) if not known.where.ranks else rank
    return Page(
        {
            "cards": {"children": [_risk(known.run), *_fragmentation(rank)]},
            **_optional(
                "roles",
                views.roles(told) if told else None,
                "No census of this run's memory has been taken yet.",
            ),
            **_optional(
                "within",
                views.within_step(told) if told else None,
                "Units tell their peaks where the run allocates on a device.",
            ),
            "rests": {"children": _rests(told)},
        },
        _known_charts(lines),
    )


def _optional(name: str, figure: Props | None, absent: str) -> Parts:
    """A figure, or why there is none."""
    shown: Props = {}
    hidden: Props = {"display": "none"}
    return {
        name: {"figure": figure or {"data": [], "layout": charts.layout("", 120)}},
        f"{name}-shown": {"style": hidden if figure is None else shown},
        f"{name}-absent": {"children": absent, "style": shown if figure is None else hidden},
    }


def _fragmentation(rank: RankSnapshot | None) -> list[Any]:
    if rank is None:
        return []
    memory = rank.memory
    if memory is None:
        host = rank.host
        limit = human_bytes(host.limit_bytes) if host and host.limit_bytes > 0 else "no limit"
        return [
            _card("Resident", human_bytes(rank.rss_bytes), f"rank {rank.rank}"),
            _card(
                "Host, still to be had",
                human_bytes(host.headroom_bytes if host else None),
                f"cgroup: {limit}",
            ),
            _card("Pinned", human_bytes(rank.pinned_bytes), f"rank {rank.rank}"),
        ]
    slack = memory.reserved_bytes - memory.allocated_bytes
    retries = f"{human_count(memory.retries)} allocation retries, {human_count(memory.ooms)} failed"
    return [
        _card(
            "Reserved",
            human_bytes(memory.reserved_bytes),
            f"{human_bytes(memory.allocated_bytes)} of it allocated, rank {rank.rank}",
        ),
        _card(
            "Headroom",
            human_bytes(memory.headroom_bytes),
            f"of {human_bytes(memory.capacity_bytes)}",
        ),
        _card(
            "Fragmentation",
            human_bytes(slack),
            f"reserved, not allocated; {human_bytes(memory.inactive_split_bytes)} in split blocks; "
            f"{retries}",
        ),
    ]


def _rests(rank: RankSnapshot | None) -> str:
    """What no role accounts for, in words."""
    found = rests(rank) if rank is not None else ()
    return "; ".join(
        f"{rest.kind.replace('_', ' ')} ({rest.place}): {human_bytes(rest.nbytes)}"
        for rest in found
    )


def _communication(known: Known) -> Page:
    rank = known.rank
    return Page(
        {
            "traffic": {"rowData": traffic_rows(rank)},
            "traffic-title": {
                "children": f"What rank {rank.rank} waits for, a step" if rank else "no rank yet"
            },
            "in-flight": {"children": _in_flight(known.run)},
            **_optional(
                "own-time",
                views.own_time(known.run),
                "Ranks can be compared when two have timed the same steps.",
            ),
            **_optional(
                "busbw", views.busbw(rank) if rank else None, "No transfer has been timed yet."
            ),
            **_optional(
                "sizes", views.sizes(rank) if rank else None, "No collective has been counted yet."
            ),
            "capture-state": {"children": _capture(known.run)},
        }
    )


def traffic_rows(rank: RankSnapshot | None) -> list[dict[str, Any]]:
    """The table of what a rank waits for."""
    return [
        {
            "id": str(n),
            "unit": row.unit or f"({row.group})",
            "op": row.op,
            "phase": row.phase.replace("_", " "),
            "group": f"{row.group} ({row.group_size})",
            "calls": round(row.calls, 1),
            "mib": round(row.nbytes / (1 << 20), 3),
            "ms": round(1e3 * row.seconds, 3),
            "waits": None if row.wait_seconds is None else round(1e3 * row.wait_seconds, 3),
            "exposed": round(1e3 * row.exposed_seconds, 3),
            "busbw": _gigabytes(row.busbw_bytes_per_second),
            "best": _gigabytes(row.best_busbw_bytes_per_second),
        }
        for n, row in enumerate(rank.traffic[:_MOST_TRAFFIC] if rank else ())
    ]


def _gigabytes(rate: float | None) -> float | None:
    return None if not rate else round(rate / 1e9, 4)


def _in_flight(run: RunSnapshot) -> list[Any]:
    now = run.taken_ns
    waiting = [
        (now - one.issued_ns, rank.rank, one) for rank in run.ranks for one in rank.in_flight
    ]
    waiting.sort(key=lambda item: item[:2], reverse=True)
    lines: list[Any] = [
        dmc.Alert(
            f"{hang.kind.replace('_', ' ')}: {hang.op} in {hang.group}, {human_seconds(hang.seconds)}; "
            f"waiting {_ranks(hang.waiting)}, missing {_ranks((*hang.missing, *hang.dead))}"
            f"{f', not heard {_ranks(hang.elsewhere)}' if hang.elsewhere else ''}",
            color="red",
            title="A collective hangs",
        )
        for hang in run.hangs
    ]
    if not waiting or run.ended:
        return lines or [dmc.Text("No collective is in flight.", c="dimmed", size="sm")]
    return lines + [
        dmc.Text(
            f"rank {rank}: {one.op} {human_bytes(one.nbytes)} in {one.group}"
            f"{f', {one.unit}' if one.unit else ''}, for {human_seconds(ns / 1e9)}",
            size="sm",
        )
        for ns, rank, one in waiting[:8]
    ]


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
    return f"rank {shown}" if numbers else "none"


def _capture(run: RunSnapshot) -> str:
    capture = run.capture
    if capture is None:
        return "No trace was taken of this run."
    what = f"trace {capture.number}, step {capture.first} to {capture.first + capture.steps - 1}"
    return f"{what}: {capture.state}{f' ({capture.note})' if capture.note else ''}"


def _ranks_page(known: Known) -> Page:
    return Page(
        {
            "rank-map": {"figure": views.rank_map(known.run, known.where.metric)},
            "rank-table": {"rowData": rank_rows(known.run, known.where.node)},
            "rank-count": {"children": _count(known)},
            "stragglers": {"children": _stragglers(known.run)},
        }
    )


def _count(known: Known) -> str:
    """How many of all ranks the table has, where it has not all."""
    fleet, node = known.run.fleet, known.where.node
    if fleet is None:
        return ""
    if node:
        return f"The ranks of {node}; a click leads to one."
    shown, total = human_count(len(known.run.ranks)), human_count(fleet.ranks)
    return f"{shown} of {total} ranks, those that matter most; a click on a node shows its ranks."


def rank_rows(run: RunSnapshot, node: str = "") -> list[dict[str, Any]]:
    """The table of ranks, or of those of a node."""
    rows: list[dict[str, Any]] = []
    for rank in (rank for rank in run.ranks if not node or rank.node == node):
        figures = {name: rounded(read(rank)) for name, (_, _, read) in views.METRICS.items()}
        rows.append(
            {
                "id": str(rank.rank),
                "rank": rank.rank,
                "node": rank.node,
                "device": rank.device,
                "state": rank.ended or rank.phase or "up",
                "steps": rank.steps,
                **figures,
                "overlap": None
                if rank.overlap_ratio is None
                else round(100 * rank.overlap_ratio, 2),
                "unit": rank.unit,
            }
        )
    return rows


def rounded(value: float | None) -> float | None:
    """To three places: for tables."""
    return None if value is None else round(value, 3)


def _stragglers(run: RunSnapshot) -> list[Any]:
    if not run.stragglers:
        return [dmc.Text("The others wait for no single rank.", c="dimmed", size="sm")]
    return [
        dmc.Alert(
            f"{human_seconds(one.late_seconds)} a step ({human_ratio(one.share)})"
            f"{f' since step {one.since_step}' if one.since_step else ''}"
            f"{f', longer in {one.phase}' if one.phase else ''}{f': {one.cause}' if one.cause else ''}",
            title=f"The others wait for {one.who}",
            color="orange",
        )
        for one in run.stragglers
    ]


def _advice(known: Known) -> Page:
    gone = [one for one in known.findings if one.gone is not None]
    return Page(
        {
            "findings": {"children": _findings(known.run.findings, len(known.run.findings))},
            "earlier": {
                "children": [_earlier(one) for one in reversed(gone[-50:])]
                or [dmc.Text("None has come and gone.", c="dimmed", size="sm")]
            },
        }
    )


def _findings(findings: Sequence[Finding], total: int) -> list[Any]:
    if not total:
        return [dmc.Text("Nothing to report.", c="dimmed", size="sm")]
    shown = [_finding(finding) for finding in findings]
    more = total - len(findings)
    return [*shown, *([dmc.Text(f"and {more} more under Advice", size="sm")] if more else [])]


def _finding(finding: Finding) -> Any:
    who = f"rank {finding.rank}: " if finding.rank >= 0 else ""
    lines: list[Any] = [
        dmc.Group(
            [
                dmc.Badge(
                    finding.code or finding.rule, color=_SEVERITY[finding.severity], variant="light"
                ),
                dmc.Text(finding.severity, size="xs", c="dimmed"),
            ],
            gap="xs",
        ),
        dmc.Text(who + finding.text, size="sm", mt=4),
    ]
    if finding.remedy is not None:
        cause, *diff, expected = report.remedy_lines(finding.remedy)
        lines += [
            dmc.Text(cause, size="xs", c="dimmed", mt=4),
            html.Pre([_diff_line(line.removeprefix("  ")) for line in diff], className="diff"),
            dmc.Text(expected, size="xs"),
        ]
    return dmc.Paper(
        lines, withBorder=True, p="sm", radius="md", className=f"finding {finding.severity}"
    )


def _diff_line(line: str) -> Any:
    kind = {"+": "in", "-": "out"}.get(line[:1], "same")
    return html.Span(line + "\n", className=kind)


def _earlier(one: KnownFinding) -> Any:
    who = f"rank {one.rank}: " if one.rank >= 0 else ""
    when = f"{clock(one.came)} for {human_seconds((one.gone or one.came) - one.came)}"
    return dmc.Text([html.B(one.code or one.rule), f" {when}  {who}{one.text}"], size="sm")


_PARTS = {
    "overview": _overview,
    "memory": _memory,
    "communication": _communication,
    "ranks": _ranks_page,
    "advice": _advice,
}
