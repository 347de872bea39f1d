"""The run at a glance: its life, what a step waits for, what to change, step time and memory."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from zeromon.base.units import human_count, human_seconds
from zeromon.diagnosis.rule import action_of
from zeromon.readout import answers, charts
from zeromon.readout.answers import Kind, StepBar, memory_answer, no_change_text
from zeromon.readout.breakdown import PART_NAMES
from zeromon.readout.figures import SPREAD_HEADS, spread_rows
from zeromon.readout.remedy import effect_text, remedy_text
from zeromon.readout.tables import MARKS, RANK_COLUMNS
from zeromon.readout.text import finding_text, leading_clauses, notes_of
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.tui import status_text
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.drawing import LETTERS, chart_drawer, stacked_bar
from zeromon.tui.line import Line, clean, cut_line, fit, line_width, wrap_text
from zeromon.tui.plots import plot_of
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel, draw_life
from zeromon.tui.widgets.panel import Panel

_AXIS = 7
_GAP = "  "


class Overview(View):
    """The first screen."""

    TAB = "overview"

    def body(self) -> ComposeResult:
        """The figures, the run's life, the bars, what to change, the charts."""
        yield Panel(id="figures")
        yield Panel(id="life")
        with Vertical(id="body"):
            yield Panel("What does a step wait for?", id="bars", classes="box")
            yield Panel("What do I change?", id="news", classes="box")
            with Horizontal(id="charts"):
                for name in charts.list_names(overview=True):
                    yield Panel(name, id=f"chart-{name}", classes="box")

    def draw(self, model: ViewModel) -> None:
        """Draws all parts."""
        options, height = model.look, self.size.height
        figures_panel = self.query_one("#figures", Panel)
        figures_panel.show(lambda width, _h: [status_text.figures_line(model.run, options, width)])
        self.query_one("#life", Panel).show(lambda width, _h: [draw_life(model, width)])
        self._draw_step_bars(model)
        columns = max(1, self.query_one("#charts Panel", Panel).size.width - _AXIS)
        for spec in charts.charts_of(model.ranks):
            if spec.overview:
                chart = plot_of(spec, model.ranks, model.trends, options, columns, model.mark_steps)
                title = f"{chart.title}, {chart.a_step}" if chart.a_step else chart.title
                if spec.pool:
                    answer = memory_answer(model.run)
                    short_answer = re.split("[,:]", answer)[0] if len(answer) > columns - 11 else answer
                    title = f"Out of memory? {short_answer}"
                self.query_one(f"#chart-{spec.name}", Panel).show(chart_drawer(chart.plot), title)
        news, max_rows = self.query_one("#news", Panel), 5 if height >= 30 else 2
        rows = [*note_lines(model.run), *change_lines(model.run, max_rows, news.size.width - 2)]
        news.styles.height = len(rows) + 2
        news.show(lambda width, _h: [cut_line(row, width) for row in rows])

    def _draw_step_bars(self, model: ViewModel) -> None:
        """Draws the parts of a step by rank; of a large run, how the figures of its ranks spread."""
        options, height = model.look, self.size.height
        bars = self.query_one("#bars", Panel)
        fleet = model.run.fleet
        if fleet is not None:
            head: Line = [(fit(name, 10, right=True), "title") for name in SPREAD_HEADS]
            table: list[Line] = [[(fit("", 22), ""), *head]]
            for figure, values in spread_rows(fleet)[: max(4, height - 20) - 1]:
                cells = ((fit(value, 10, right=True), "") for value in values)
                table.append([(fit(figure.title, 22), "dim"), *cells])
            bars.styles.height = len(table) + 2
            bars.show(
                lambda width, _h: [cut_line(row, width) for row in table],
                f"all {human_count(fleet.ranks)} ranks on {human_count(len(fleet.nodes))} nodes",
            )
            return
        question = "What does a step wait for?" + " shares of a step," * options.shares
        chosen, is_high = answers.step_bars(model.run), height >= 30
        line_count = len(chosen) * (1 + is_high) + (not is_high or options.letters)
        bars.styles.height = max(1, line_count) + 2
        bars.show(
            lambda width, _h: waits_lines(chosen, options, width, with_text=is_high),
            f"{question} {answers.window_text(model.run)}".rstrip(", "),
        )

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The table of ranks."""
        return TableExport("ranks", RANK_COLUMNS, model.ranks)


_TONES_OF_KINDS = {
    Kind.COMPUTE: "backward", Kind.WAITING: "data_wait", Kind.COMMUNICATION: "exposed",
    Kind.OWN: "other",
}  # fmt: skip


def waits_lines(
    bars: Sequence[StepBar], options: DisplayOptions, width: int, *, with_text: bool
) -> list[Line]:
    """A bar for the median rank and one for the worst, with their parts in words; else a legend."""
    if not bars:
        return [[("n/a: no step is timed yet", "dim")]]
    longest = max(bar.seconds for bar in bars)
    names = [
        f"rank {bar.rank.rank}" + (f", {bar.placement}" if bar.placement and width >= 60 else "")
        for bar in bars
    ]
    label = 2 + max(map(len, names))
    rows: list[Line] = []
    for name, bar in zip(names, bars, strict=True):
        sizes = [
            ("data_wait" if segment.late else _TONES_OF_KINDS[segment.kind], segment.seconds)
            for segment in bar.segments
        ]
        of = bar.seconds if options.shares else longest
        bar_spans = stacked_bar(sizes, of, max(4, width - label - 10), letters=options.letters)
        time = (fit(human_seconds(bar.seconds), 10, right=True), "bold")
        rows.append([(fit(name, label), "bold"), *bar_spans, time])
        if with_text:
            shares = leading_clauses(clean(bar.text), width - label, ", ")
            rows.append([(fit("", label), ""), (shares, "dim")])
    if not with_text or options.letters:
        kinds = dict.fromkeys(segment.kind for bar in bars for segment in bar.segments)
        texts = {tone: str(kind) for kind, tone in _TONES_OF_KINDS.items()} | {"other": "own code"}
        rows.append(_join_legend([_TONES_OF_KINDS[kind] for kind in kinds], options, texts))
    return [cut_line(row, width) for row in rows]


_SHORT_NAMES = {"exposed": "exposed", "hidden": "hidden", "data_wait": "data"}


def legend_of_parts(keys: Sequence[str], options: DisplayOptions, width: int) -> Line:
    """The legend of the parts of a bar; shorter where there is no room."""
    spans = _join_legend(keys, options, PART_NAMES)
    if line_width(spans) - len(_GAP) > width:
        spans = _join_legend(keys, options, PART_NAMES | _SHORT_NAMES)
    if line_width(spans) > width:
        spans[-1] = spans[-1][0].rstrip(), "dim"
    return spans


def _join_legend(keys: Sequence[str], options: DisplayOptions, names: Mapping[str, str]) -> Line:
    spans: Line = []
    for key in keys:
        sign = LETTERS[key] if options.letters else "■"
        spans += [(f"{sign} ", key), (names[key] + _GAP, "dim")]
    return spans


def note_lines(run: RunSnapshot) -> list[Line]:
    """Warnings about what is known of the run."""
    return [[(" ! ", "warn"), (clean(note), "warn")] for note in notes_of(run)]


def change_lines(run: RunSnapshot, max_rows: int, width: int) -> list[Line]:
    """The first finding's change, of the next the problem, in *max_rows* lines; then how many follow."""
    chosen, judged_finding = answers.findings_to_act_on(run, 3), judge_run(run).finding
    rows: list[Line] = [] if chosen else [[(no_change_text(run), "dim")]]
    shown_count = 0
    for finding in chosen:
        if len(rows) >= max_rows:
            break
        shown_count += 1
        sign, tone = MARKS[finding.severity]
        effect = f"[{gain}] " if (gain := effect_text(finding.remedy)) else ""
        head: Line = [(f"{sign:>2} ", tone), (f"{clean(finding.code)} ", "bold"), (effect, "good")]
        if finding is not judged_finding and shown_count > 1:
            rows.append([*head, (clean(finding_text(finding)), tone)])
            continue
        indent = line_width(head)
        head_row, *tail_rows = [
            row for change in _change_of(finding) for row in wrap_text(change, width - indent)
        ]
        rows.append([*head, *head_row])
        rows += [[(" " * indent, ""), *row] for row in tail_rows[: min(3, max_rows) - 1]]
        if len(tail_rows) >= min(3, max_rows):
            rows[-1].append((" …", ""))
    omitted = len(run.findings) - shown_count
    if omitted > 0:
        count = f"   and {human_count(omitted)} more" if chosen else human_count(omitted)
        rows.append([(f"{count} finding{'s' * (omitted > 1)}: key 6", "dim")])
    return rows


def _change_of(finding: Finding) -> list[str]:
    """The lines that the change of *finding* adds, else what the rule's page advises."""
    diff = () if finding.remedy is None else remedy_text(finding.remedy).diff
    added_lines = [clean(diff_line.text.strip()) for diff_line in diff if diff_line.kind == "added"]
    return added_lines or [clean(action_of(finding)) or clean(finding_text(finding))]


def finding_lines(findings: Sequence[Finding], width: int) -> list[Line]:
    """The findings, one per line, each in the clauses that fit."""
    rows: list[Line] = []
    for finding in findings:
        sign, tone = MARKS[finding.severity]
        head: Line = [(f"{sign:>2} ", tone), (f"{clean(finding.code)} ", "bold")]
        sentence = leading_clauses(clean(finding_text(finding)), width - line_width(head))
        rows.append([*head, (sentence, tone)])
    return rows
