"""The run at a glance: figures, where a step's time goes, memory, exposed communication, findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from zeromon import report
from zeromon.snapshot import Finding, Fleet, RankSnapshot, RunSnapshot
from zeromon.tui import words
from zeromon.tui.draw.bars import stacked
from zeromon.tui.draw.chart import chart, legend
from zeromon.tui.line import Line, clean, cut, fit, length
from zeromon.tui.look import Look
from zeromon.tui.parts import breakdown, exposed_is_known
from zeromon.tui.plots import exposed_plot, memory_plot
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import View
from zeromon.tui.tables import RANKS, Sheet, mark
from zeromon.tui.tones import LETTERS, PARTS
from zeromon.tui.widgets.panel import Panel
from zeromon.units import human_count, human_ratio, human_seconds

_AXIS = 7
_MOST_BARS = 12
_GAP = "  "


class Overview(View):
    """The first screen."""

    TAB = "overview"

    def body(self) -> ComposeResult:
        """Figures, bars, charts, findings."""
        yield Panel(id="figures")
        with Vertical(id="body"):
            yield Panel("step time", id="bars", classes="box")
            with Horizontal(id="charts"):
                yield Panel("memory", id="memory", classes="box")
                yield Panel("exposed communication", id="exposed", classes="box")
            yield Panel("findings", id="news", classes="box")

    def draw(self, scene: Scene) -> None:
        """All of it."""
        look, height = scene.look, self.size.height
        figures = self.query_one("#figures", Panel)
        figures.show(lambda width, _h: [cut(words.figures_line(scene.run, look), width)])
        self._draw_bars(scene)
        marks, trends = scene.mark_steps, scene.trends
        memory = self.query_one("#memory", Panel)
        columns = max(1, memory.size.width - _AXIS)
        found = memory_plot(scene.ranks, trends, look, columns, marks)
        memory.show(lambda w, h: [legend(found.plot, w), *chart(found.plot, w, h - 1)], found.title)
        exposed = exposed_plot(scene.ranks, trends, look, columns, marks)
        self.query_one("#exposed", Panel).show(
            lambda w, h: [legend(exposed, w), *chart(exposed, w, h - 1)],
            f"exposed communication, {'share of a step' if look.shares else 'a step'}",
        )
        most = 5 if height >= 34 else 3 if height >= 30 else 2
        news = self.query_one("#news", Panel)
        lines = [*note_lines(scene.run), *finding_lines(scene.run.findings, most)]
        news.styles.height = len(lines) + 2
        news.show(lambda width, _h: [cut(line, width) for line in lines])

    def _draw_bars(self, scene: Scene) -> None:
        """Where the time of a step goes, rank by rank; of many ranks, how their figures spread."""
        look, height = scene.look, self.size.height
        bars = self.query_one("#bars", Panel)
        fleet = scene.run.fleet
        if fleet is not None:
            table = spread_lines(fleet, look, max(4, height - 20))
            bars.styles.height = len(table) + 2
            bars.show(
                lambda width, _h: [cut(line, width) for line in table],
                f"all {human_count(fleet.ranks)} ranks on {human_count(len(fleet.nodes))} nodes",
            )
            return
        shown = min(len(scene.ranks), _MOST_BARS, max(2, (height - 20) // 2))
        bars.styles.height = shown + 3
        chosen = most_exposed(scene.ranks, shown)
        of = (
            ""
            if len(chosen) == len(scene.ranks)
            else f": {len(chosen)} of {human_count(len(scene.ranks))}, the most exposed"
        )
        bars.show(
            lambda width, _h: step_bars(chosen, look, width),
            f"step time, {'shares' if look.shares else 'mean of the last steps'}{of}",
        )

    def sheet(self, scene: Scene) -> Sheet[Any]:
        """The ranks."""
        return Sheet("ranks", RANKS, scene.ranks)


def most_exposed(ranks: Sequence[RankSnapshot], most: int) -> list[RankSnapshot]:
    """Those with the most exposed communication, in order of ranks."""
    if len(ranks) <= most:
        return list(ranks)
    chosen = sorted(ranks, key=lambda r: (-(r.exposed_seconds or 0.0), r.rank))[:most]
    return sorted(chosen, key=lambda r: r.rank)


def step_bars(ranks: Sequence[RankSnapshot], look: Look, width: int) -> list[Line]:
    """One bar a rank, and what its parts mean."""
    rows = [(rank, breakdown(rank)) for rank in ranks]
    longest = max((sum(spent for _, spent in parts) for _, parts in rows), default=0.0)
    seen = {name for _, parts in rows for name, spent in parts if spent > 0}
    lines: list[Line] = []
    label, figure = 10, 26 if width >= 60 else 10
    for rank, parts in rows:
        whole = sum(spent for _, spent in parts)
        bar = stacked(parts, whole if look.shares else longest, max(4, width - label - figure),
                      letters=look.letters)  # fmt: skip
        name: Line = [(fit(f"rank {rank.rank}", label), "bold")]
        lines.append([*name, *bar, *_beside(rank, whole, figure)])
    if rows and not any(exposed_is_known(rank) for rank, _ in rows):
        seen.discard("exposed")
    return [*lines, parts_legend([part for part in PARTS if part in seen], look, width)]


def _beside(rank: RankSnapshot, whole: float, width: int) -> Line:
    time = fit(human_seconds(whole) if whole else "-", 10, right=True)
    if width < 20:
        return [(time, "bold")]
    share = fit(human_ratio(rank.exposed_ratio), 8, right=True)
    return [
        (time, "bold"),
        (share, words.level(rank.exposed_ratio, 0.1, 0.25)),
        (" exposed", "dim"),
    ]


def parts_legend(parts: Sequence[str], look: Look, width: int) -> Line:
    """What the parts of a bar mean; in fewer words where there is no room."""
    line = _legend(parts, look, {part: f"{part} communication" for part in ("exposed", "hidden")})
    if length(line) - len(_GAP) > width:
        line = _legend(parts, look, {})
    if length(line) > width:
        line[-1] = line[-1][0].rstrip(), "dim"
    return line


def _legend(parts: Sequence[str], look: Look, names: dict[str, str]) -> Line:
    line: Line = []
    for part in parts:
        sign = LETTERS[part] if look.letters else "■"
        name = names.get(part, "rest" if part == "other" else part.replace("_", " "))
        line += [(f"{sign} ", part), (name + _GAP, "dim")]
    return line


def spread_lines(fleet: Fleet, look: Look, most: int) -> list[Line]:
    """How the figures of all ranks spread, one a line."""
    heads = ("least", "5 %", "median", "95 %", "most")
    lines: list[Line] = [[(fit("", 22), ""), *((fit(h, 10, right=True), "title") for h in heads)]]
    for name, title, words_of in report.SPREADS:
        spread = fleet.spreads.get(name)
        if spread is None or len(lines) >= most:
            continue
        say = look.size if name.endswith("_bytes") else words_of
        values = (spread.least, spread.p5, spread.median, spread.p95, spread.most)
        said = ((fit(say(value), 10, right=True), "") for value in values)
        lines.append([(fit(title, 22), "dim"), *said])
    return lines


def note_lines(run: RunSnapshot) -> list[Line]:
    """What the source of the picture has to say of it."""
    return [[(" ! ", "warn"), (clean(part), "warn")] for part in run.note.split("; ") if part]


def finding_lines(findings: Sequence[Finding], most: int) -> list[Line]:
    """The gravest findings, one a line."""
    if not findings:
        return [[("nothing to report", "dim")]]
    lines: list[Line] = []
    for finding in findings[:most]:
        sign, tone = mark(finding.severity)
        who = f"rank {finding.rank}: " if finding.rank >= 0 else ""
        lines.append(
            [
                (f"{sign:>2} ", tone),
                (f"{clean(finding.code)} ", "bold"),
                (clean(who + finding.text), tone),
            ]
        )
    more = len(findings) - most
    if more > 0:
        lines[-1] = [(f"   and {more + 1} more (6)", "dim")]
    return lines
