"""Findings: evidence, what to change, what that is expected to do, and its price."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from zeromon.errors import ZeromonError
from zeromon.rules import page
from zeromon.snapshot import Finding
from zeromon.tui.line import Line, clean, wrapped
from zeromon.tui.look import Look
from zeromon.tui.scene import Scene
from zeromon.tui.screens.text import TextScreen
from zeromon.tui.screens.view import View
from zeromon.tui.tables import FINDINGS, Sheet, mark
from zeromon.tui.widgets.page import Page
from zeromon.tui.widgets.table import Table
from zeromon.units import human_seconds


class Findings(View):
    """The gravest first; below, the one under the cursor."""

    TAB = "findings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy the diff")]

    def body(self) -> ComposeResult:
        """The list over the one."""
        with Vertical(id="body"):
            yield Table(
                FINDINGS, lambda f: (f.rule, f.rank), id="findings", empty="nothing to report"
            )
            yield Page("the finding", id="finding")

    def on_mount(self) -> None:
        """The keys go to the list."""
        for part in ("#findings", "#finding"):
            self.query_one(part).add_class("box")
        self.focus_body()

    def focus_body(self) -> None:
        """The list."""
        self.query_one("#findings", Table).focus()

    def draw(self, scene: Scene) -> None:
        """Both."""
        found, table = _wanted(scene), self.query_one("#findings", Table)
        table.styles.height = min(len(found) + 3, max(5, self.size.height // 3))
        table.show(found, scene.look)
        self._detail()

    @on(Table.Moved, "#findings")
    def _detail(self) -> None:
        finding = self.query_one("#findings", Table).current
        shown = self.query_one("#finding", Page)
        scene = self.zeromon.scene
        look = scene.look if scene is not None else Look()
        if finding is None:
            shown.show(lambda width: wrapped("no finding", width, "dim"))
        else:
            shown.show(lambda width: finding_page(finding, look, width))

    @on(Table.Chosen, "#findings")
    def _explain(self) -> None:
        """The rule's own page."""
        finding = self.query_one("#findings", Table).current
        if finding is None:
            return
        try:
            found = page(finding.code or finding.rule)
        except ZeromonError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self.app.push_screen(TextScreen(f"{found.code} {found.name}", lambda _scene: found.text))

    def action_copy(self) -> None:
        """The diff goes to the clipboard of the terminal, also through ssh and tmux (OSC 52)."""
        finding = self.query_one("#findings", Table).current
        if finding is None or finding.remedy is None:
            self.notify("this finding has no diff", severity="warning")
            return
        self.app.copy_to_clipboard(finding.remedy.diff)
        self.notify("the diff is in the clipboard", markup=False)

    def sheet(self, scene: Scene) -> Sheet[Any]:
        """The list."""
        return Sheet("findings", FINDINGS, _wanted(scene))


def _wanted(scene: Scene) -> list[Finding]:
    """Those of the run, and of ranks that the filter lets through."""
    ranks = {rank.rank for rank in scene.ranks}
    return [f for f in scene.run.findings if f.rank < 0 or f.rank in ranks or not scene.wanted]


def finding_page(finding: Finding, look: Look, width: int) -> list[Line]:
    """Everything that is known of a finding."""
    sign, tone = mark(finding.severity)
    who = f"rank {finding.rank}" if finding.rank >= 0 else "the whole run"
    lines: list[Line] = [
        [(f"{sign} ", tone), (clean(f"{finding.code} {finding.rule}").replace("_", " "), "bold"),
         (f"  {who}", "dim")],
        [], *wrapped(finding.text, width, tone), [],
    ]  # fmt: skip
    remedy = finding.remedy
    if remedy is None:
        return [
            *lines,
            *wrapped(
                "No change to a configuration is known to help. Enter explains the rule.",
                width,
                "dim",
            ),
        ]
    lines += wrapped(f"because {remedy.cause}", width)
    lines += [[], [(clean(remedy.dialect), "bold"), ("   y copies", "dim")]]
    for text in remedy.diff.splitlines():
        change = {"+": "added", "-": "removed"}.get(text.strip()[:1], "")
        lines += wrapped(text, width, change, "  ")
    lines.append([])
    if remedy.gain_low_seconds is not None and remedy.gain_high_seconds is not None:
        low, high = remedy.gain_low_seconds, human_seconds(remedy.gain_high_seconds)
        span = f"{human_seconds(low)} to {high}" if low else f"up to {high}"
        lines.append([("expected   ", "dim"), (f"a step {span} shorter", "good")])
    if remedy.frees_bytes is not None:
        lines.append(
            [("expected   ", "dim"), (f"{look.size(remedy.frees_bytes)} less a rank", "good")]
        )
    if remedy.effect:
        lines += wrapped(remedy.effect, width, "", "expected   ")
    lines += wrapped(remedy.price or "none", width, "", "price      ")
    return [*lines, [], [("Enter explains the rule", "dim")]]
