"""Findings: evidence, what to change, the expected effect, and its cost."""

from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from zeromon.base.errors import ZeromonError
from zeromon.diagnosis.rule import action_of, find_page
from zeromon.readout.answers import findings_to_act_on
from zeromon.readout.remedy import remedy_text
from zeromon.readout.tables import FINDING_COLUMNS, MARKS
from zeromon.snapshot import Finding
from zeromon.tui.columns import TableExport
from zeromon.tui.line import Line, clean, wrap_text
from zeromon.tui.screens.text import TextScreen
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page
from zeromon.tui.widgets.table import Table


class Findings(View):
    """The findings to act on, then the others; below them, the one under the cursor."""

    FOCUS = "#findings"
    TAB = "findings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy the diff")]

    def body(self) -> ComposeResult:
        """The list over the details."""
        with Vertical(id="body"):
            yield Table(
                FINDING_COLUMNS, lambda f: (f.rule, f.rank), id="findings", empty="nothing to report"
            )
            yield Page("the finding", id="finding")

    def draw(self, model: ViewModel) -> None:
        """Draws the list and the details."""
        findings, table = _filtered_findings(model), self.query_one("#findings", Table)
        table.styles.height = min(len(findings) + 3, max(5, self.size.height // 3))
        table.show(findings)
        self._draw_finding_page()

    @on(Table.Moved, "#findings")
    def _draw_finding_page(self) -> None:
        finding = self.query_one("#findings", Table).current
        details = self.query_one("#finding", Page)
        if finding is None:
            details.show(lambda width: wrap_text("no finding", width, "dim"))
        else:
            details.show(lambda width: finding_page(finding, width))

    @on(Table.Chosen, "#findings")
    def _explain(self) -> None:
        finding = self.query_one("#findings", Table).current
        if finding is None:
            return
        try:
            explained = find_page(finding.code or finding.rule)
        except ZeromonError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self.app.push_screen(
            TextScreen(
                f"{explained.code} {explained.name}", lambda _model: explained.text, is_markdown=True
            )
        )

    def action_copy(self) -> None:
        """Copies the diff to the terminal's clipboard, also through ssh and tmux (OSC 52)."""
        finding = self.query_one("#findings", Table).current
        if finding is None or finding.remedy is None:
            self.notify("this finding has no diff", severity="warning")
            return
        self.app.copy_to_clipboard(finding.remedy.diff)
        self.notify("the diff was copied to the clipboard", markup=False)

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The list of findings."""
        return TableExport("findings", FINDING_COLUMNS, _filtered_findings(model))


def _filtered_findings(model: ViewModel) -> list[Finding]:
    """The findings of the run and of the ranks that the filter selects, in the Overview's order."""
    ranks, findings = {rank.rank for rank in model.ranks}, model.run.findings
    chosen = findings_to_act_on(model.run, len(findings))
    ordered = [*chosen, *(f for f in findings if f not in chosen)]
    return [f for f in ordered if f.rank < 0 or f.rank in ranks or not model.rank_filter]


def finding_page(finding: Finding, width: int) -> list[Line]:
    """Everything that is known about a finding."""
    sign, tone = MARKS[finding.severity]
    subject = f"rank {finding.rank}" if finding.rank >= 0 else "the whole run"
    rows: list[Line] = [
        [(f"{sign} ", tone), (clean(f"{finding.code} {finding.rule}").replace("_", " "), "bold"),
         (f"  {subject}", "dim")],
        [], *wrap_text(finding.text, width, tone), [],
    ]  # fmt: skip
    remedy = finding.remedy
    if remedy is None:
        action = action_of(finding) or "No change of the configuration is known to help."
        return [*rows, *wrap_text(action, width), [], [("Enter explains the rule", "dim")]]
    advice = remedy_text(remedy)
    rows += wrap_text(advice.cause, width)
    rows += [[], [(clean(advice.dialect), "bold"), ("   y copies", "dim")]]
    for change in advice.diff:
        rows += wrap_text(change.text, width, change.kind, "  ")
    rows.append([])
    for effect in advice.expected:
        tone = "" if effect == remedy.effect else "good"
        rows += wrap_text(effect, width, tone, "effect     ")
    rows += wrap_text(advice.price, width, "", "cost       ")
    return [*rows, [], [("Enter explains the rule", "dim")]]
