"""What the terminal shows, as text. Pure: a picture and a width in, rich text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

from zeromon import report
from zeromon.report import verdict
from zeromon.snapshot import Finding, RankSnapshot, Risk, RunSnapshot
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

SERIES_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00")
"""Okabe and Ito's palette: told apart by colour-blind readers too."""

DIM, BOLD = "#8b95a1", "bold"
GOOD, WARN, BAD = "green", "yellow", "bold red"
_LEVELS = {"critical": (BAD, "!!"), "warning": (WARN, " !"), "info": ("", " ·")}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Series = Sequence[float | None]


def level_style(ratio: float | None, warn: float, bad: float) -> str:
    """A colour for a ratio where more is worse."""
    if ratio is None:
        return DIM
    return BAD if ratio >= bad else WARN if ratio >= warn else GOOD


def header(run: RunSnapshot, width: int, *, paused: bool = False, stale: str = "") -> Text:
    """The first line: which run, on what, how far."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(" zeromon ", "bold reverse")
    text.append(f" {run.run} ", BOLD)
    if stale:  # what is shown is old: that goes first
        text.append(f" {stale} ", WARN)
    first = run.ranks[0] if run.ranks else None
    if first is not None:
        text.append(f" {first.strategy}, {len(run.ranks)} of {first.world_size} ranks, ", DIM)
        text.append(f"{first.device} ", DIM)
    style = BAD if any(rank.failed for rank in run.ranks) else GOOD
    text.append(f" {verdict(run)}", style)
    if paused:
        text.append("  paused", WARN)
    text.truncate(width, overflow="ellipsis")
    return text


def risk_line(run: RunSnapshot, width: int) -> Text:
    """The second line: OOM risk, exposed communication, and what we cost."""
    text = Text(no_wrap=True, overflow="ellipsis")
    worst = worst_risk(run)
    risk = worst[1] if worst else None
    ratio = risk.ratio if risk else None
    text.append(" OOM risk ", DIM)
    text.append(human_ratio(ratio), level_style(ratio, 0.5, 0.8))
    if risk is not None and risk.steps_left is not None:
        text.append(f" full in ~{human_count(risk.steps_left)} steps", WARN)
    text.append("   exposed ", DIM)
    share = highest(run, lambda rank: rank.exposed_ratio)
    text.append(human_ratio(share), level_style(share, 0.10, 0.25))
    error = max(
        (
            abs(r.check.error_ratio)
            for r in run.ranks
            if r.check and r.check.error_ratio is not None
        ),
        default=None,
    )
    if error is not None:
        text.append(f" ± {error * 100:.0f} %", DIM)
    text.append("   overlap ", DIM)
    text.append(human_ratio(lowest(run, lambda rank: rank.overlap_ratio)))
    if worst is not None:
        used = f"{human_bytes(worst[1].used_bytes)} of {human_bytes(worst[1].capacity_bytes)}"
        # ranks share the host: its figure is that of all of them
        whose = "all ranks" if worst[1].pool == "host" else f"r{worst[0].rank}"
        text.append(f"   {worst[1].pool} {whose} {used}", DIM)
    cost = highest(run, lambda rank: rank.overhead_ratio)
    if cost is not None:
        noise = highest(run, lambda rank: rank.overhead_noise_ratio) or 0.0
        text.append(f"   agent {cost * 100:+.1f} ± {noise * 100:.1f} %", DIM)
    text.truncate(width, overflow="ellipsis")
    return text


def worst_risk(run: RunSnapshot) -> tuple[RankSnapshot, Risk] | None:
    """The rank and the memory that are closest to the end."""
    pairs = [(rank, risk) for rank in run.ranks for risk in rank.risks]
    return max(pairs, key=lambda pair: pair[1].ratio, default=None)


def highest(run: RunSnapshot, read: Callable[[RankSnapshot], float | None]) -> float | None:
    """The largest known value over ranks."""
    return max((v for v in map(read, run.ranks) if v is not None), default=None)


def lowest(run: RunSnapshot, read: Callable[[RankSnapshot], float | None]) -> float | None:
    """The smallest known value over ranks."""
    return min((v for v in map(read, run.ranks) if v is not None), default=None)


# ---- ranks ---------------------------------------------------------------------------------------

RANK_COLUMNS = (
    ("rank", 5), ("state", 11), ("step", 8), ("step time", 10), ("exposed", 9), ("share", 7),
    ("overlap", 8), ("memory", 10), ("risk", 7),
)  # fmt: skip


def rank_header(width: int) -> Text:
    """The column names of the rank table."""
    text = Text(no_wrap=True, style="bold")
    for index, (name, size) in enumerate(RANK_COLUMNS):
        text.append(name.ljust(size) if index < 2 else name.rjust(size))
    rest = width - text.cell_len
    text.append(("  unit" if rest >= 14 else "").ljust(max(0, rest)))
    text.truncate(width)
    return text


def rank_line(rank: RankSnapshot, width: int) -> Text:
    """One rank."""
    risk = max((r.ratio for r in rank.risks), default=None)
    state = rank.ended or rank.phase
    style = BAD if rank.failed else DIM if rank.ended else ""
    memory = rank.memory.reserved_bytes if rank.memory else rank.rss_bytes
    cells = (
        (str(rank.rank), BOLD),
        (state, style),
        (human_count(rank.step), ""),
        (human_seconds(rank.step_seconds), ""),
        (human_seconds(rank.exposed_seconds), ""),
        (human_ratio(rank.exposed_ratio), level_style(rank.exposed_ratio, 0.10, 0.25)),
        (human_ratio(rank.overlap_ratio), ""),
        (human_bytes(memory), ""),
        (human_ratio(risk), level_style(risk, 0.5, 0.8)),
    )
    text = Text(no_wrap=True)
    for index, ((value, colour), (_, size)) in enumerate(zip(cells, RANK_COLUMNS, strict=True)):
        fitted = value[: size - 1]
        text.append(fitted.ljust(size) if index < 2 else fitted.rjust(size), colour)
    if width - text.cell_len >= 14:
        text.append(f"  {rank.unit}", DIM)
    text.truncate(width, overflow="ellipsis", pad=True)
    return text


# ---- findings ------------------------------------------------------------------------------------


def finding_line(finding: Finding, width: int) -> Text:
    """One finding."""
    style, mark = _LEVELS[finding.severity]
    who = f"rank {finding.rank}: " if finding.rank >= 0 else ""
    text = Text(f" {mark} {who}{finding.text}", style=style, no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


def findings(run: RunSnapshot, width: int, most: int) -> Text:
    """The gravest findings, one a line."""
    if not run.findings:
        quiet = "nothing to report" if run.ranks else (run.note or "waiting for the first rank")
        return Text(f"  · {quiet}", style=DIM)
    lines = [finding_line(f, width) for f in run.findings[:most]]
    more = len(run.findings) - most
    if more > 0:
        lines[-1] = Text(f"    ... and {more + 1} more (zeromon report)", style=DIM)
    return Text("\n").join(lines)


def details(run: RunSnapshot | None) -> Text:
    """Engines, memory by role, offload, and the whole configuration."""
    if run is None:
        return Text("waiting for the first picture", style=DIM)
    blocks = [report.engines(run), report.roles(run), report.offload(run)]
    blocks.append(report.settings(run, written_only=False))
    text = _titled(blocks)
    if not text:
        first = run.ranks[0].strategy if run.ranks else "this run"
        text.append(f"{first} has no configuration file of its own: nothing to show here", DIM)
    return text


def findings_page(run: RunSnapshot | None) -> Text:
    """Every finding with its evidence, its cause, what to change and what that will do."""
    if run is None:
        return Text("waiting for the first picture", style=DIM)
    text = Text()
    for finding in run.findings:
        style, mark = _LEVELS[finding.severity]
        who = f"rank {finding.rank}: " if finding.rank >= 0 else ""
        text.append(f" {mark} {finding.code} {who}{finding.text}\n", style or BOLD)
        for line in report.remedy_lines(finding.remedy) if finding.remedy else ():
            change = line.strip()[:1]
            text.append(f"      {line}\n", {"+": GOOD, "-": "red"}.get(change, ""))
        text.append("\n")
    return text if text else Text("nothing to report", style=DIM)


def communication(run: RunSnapshot | None) -> Text:
    """What communicates by unit and bucket, how large it is, and how far that is from a trace."""
    if run is None:
        return Text("waiting for the first picture", style=DIM)
    lines = [line for line in map(report.checked, run.ranks) if line]
    checks = (
        "\n".join(["Against the last trace", *(f"  {line}" for line in lines)]) if lines else ""
    )
    text = _titled([report.units(run, _MOST_UNITS), report.sizes(run), checks])
    return text if text else Text("no collective has been timed yet", style=DIM)


_MOST_UNITS = 60


def _titled(blocks: Sequence[str]) -> Text:
    """Blocks of a report, their first lines bold."""
    text = Text()
    for part in (part for block in blocks for part in block.split("\n\n") if part):
        title, _, rest = part.partition("\n")
        text.append(f"{title}\n", BOLD)
        text.append(f"{rest}\n\n")
    return text


# ---- charts --------------------------------------------------------------------------------------


def exposed_series(run: RunSnapshot) -> list[tuple[str, list[float | None]]]:
    """Exposed communication in % of the step, by rank; steps with idle hooks are passed over."""
    return _rank_series(
        run,
        lambda s: (
            None if s.idle or s.end_ns <= s.start_ns
            else 100 * s.exposed_ns / (s.end_ns - s.start_ns)
        ),
    )  # fmt: skip


def memory_series(run: RunSnapshot) -> list[tuple[str, list[float | None]]]:
    """Reserved bytes (device) or resident set (host) in GiB, by rank."""

    def gib(nbytes: int) -> float | None:
        return nbytes / 2**30 if nbytes >= 0 else None

    device = any(rank.memory is not None for rank in run.ranks)
    return _rank_series(run, lambda s: gib(s.reserved_bytes if device else s.rss_bytes))


def memory_title(run: RunSnapshot) -> str:
    """Which memory the chart is about."""
    device = any(rank.memory is not None for rank in run.ranks)
    return "device memory reserved, GiB" if device else "host memory (RSS), GiB"


def _rank_series(
    run: RunSnapshot, read: Callable[..., float | None]
) -> list[tuple[str, list[float | None]]]:
    """A series a rank; beyond a few ranks, their highest and lowest a step."""
    series = [(f"r{rank.rank}", [read(s) for s in rank.recent]) for rank in run.ranks]
    if len(series) <= 4:
        return series
    longest = max(len(values) for _, values in series)
    columns = list(zip(*[_padded(v, longest) for _, v in series], strict=True))
    known = [[v for v in column if v is not None] for column in columns]
    return [
        ("max", [max(column, default=None) for column in known]),
        ("min", [min(column, default=None) for column in known]),
    ]


def _padded(values: list[float | None], size: int) -> list[float | None]:
    return [None] * (size - len(values)) + values


def nice_ceiling(value: float) -> float:
    """The next of 1, 2, 5, 10, ... above *value*: an axis that does not twitch."""
    if value <= 0:
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= value)


def chart(
    series: Sequence[tuple[str, Series]], width: int, height: int, floor: float = 0.0
) -> list[Text]:
    """Braille lines over the newest steps, two a column, with the axis on the left."""
    label = 7
    columns = max(0, width - label)
    if columns < 4 or height < 2:
        return []
    shown = [(name, list(values)[-columns * 2 :]) for name, values in series]
    top = nice_ceiling(max((v for _, vs in shown for v in vs if v is not None), default=1.0))
    dots = [[0] * columns for _ in range(height)]
    owner = [[0] * columns for _ in range(height)]
    for number, (_, values) in enumerate(shown):
        _draw(values, columns, height, (floor, top), number, dots, owner)
    return [_chart_line(row, dots[row], owner[row], height, (floor, top)) for row in range(height)]


def _draw(
    values: Series,
    columns: int,
    height: int,
    span: tuple[float, float],
    number: int,
    dots: list[list[int]],
    owner: list[list[int]],
) -> None:
    """Draws one line; the newest value sits at the right edge, None is passed over."""
    floor, top = span
    start, before = columns * 2 - len(values), None
    for index, value in enumerate(values):
        if value is None:
            continue
        share = min(1.0, max(0.0, (value - floor) / ((top - floor) or 1)))
        y = round((1 - share) * (height * 4 - 1))
        x = start + index
        low, high = (y, y) if before is None else (min(before, y), max(before, y))
        for dot in range(low, high + 1):
            dots[dot >> 2][x >> 1] |= _DOTS[dot & 3][x & 1]
            owner[dot >> 2][x >> 1] = number
        before = y


def _chart_line(
    row: int, dots: list[int], owner: list[int], height: int, span: tuple[float, float]
) -> Text:
    floor, top = span
    middle = height // 2
    value = {0: top, height - 1: floor}.get(row)
    if value is None and row == middle and height >= 5:
        value = top - (top - floor) * (middle / (height - 1))
    text = Text(f"{value:6.4g} " if value is not None else " " * 7, style=DIM, no_wrap=True)
    for mask, number in zip(dots, owner, strict=True):
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        text.append(chr(0x2800 + mask) if mask else " ", colour if mask else "")
    return text


def legend(series: Sequence[tuple[str, Series]]) -> Text:
    """The series' names and newest values in their colours."""
    text = Text()
    for number, (name, values) in enumerate(series):
        newest = next((v for v in reversed(values) if v is not None), None)
        shown = f"{newest:.4g}" if newest is not None else "-"
        text.append(f" {name} {shown}", SERIES_COLOURS[number % len(SERIES_COLOURS)])
    return text
