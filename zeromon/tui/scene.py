"""Everything that a screen draws from, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from zeromon.capture import is_open, progress
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.tui.line import Line, clean
from zeromon.tui.look import Look
from zeromon.tui.marks import Mark
from zeromon.tui.notes import Note
from zeromon.tui.playhead import Span
from zeromon.tui.plots import Trends
from zeromon.tui.words import ago, clock

_FRESH_SECONDS = 5.0
"""A collector makes a picture a second; what is older than this is said to be old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture, and how it is looked at."""

    run: RunSnapshot
    ranks: tuple[RankSnapshot, ...]
    """Those that the filter lets through."""
    look: Look
    trends: Trends
    marks: tuple[Mark, ...] = ()
    notes: tuple[Note, ...] = ()
    wanted: str = ""
    """The filter."""
    chosen: int | None = None
    """A rank that the user chose."""
    newest_wall: float = 0.0
    """When the newest picture was taken."""
    span: Span | None = None
    paused: bool = False
    replay: bool = False
    speed: float = 1.0
    trouble: str = ""
    """Why there is nothing newer."""

    @property
    def mark_steps(self) -> tuple[float, ...]:
        """Where charts show marks."""
        return tuple(float(mark.step) for mark in self.marks)

    def focus(self, otherwise: RankSnapshot | None = None) -> RankSnapshot | None:
        """The rank that was chosen; else *otherwise*, else the first."""
        found = next((rank for rank in self.ranks if rank.rank == self.chosen), None)
        return found or otherwise or (self.ranks[0] if self.ranks else None)


def status(scene: Scene, now: float) -> Line:
    """How old the picture is, at the right end of the first line."""
    made = scene.run.capture
    line: Line = []
    if made is not None and is_open(made):
        step = max((rank.step for rank in scene.run.ranks), default=0)
        line.append((f" {clean(progress(made, step))} ", "warn"))
    if scene.wanted:
        line.append((f" ranks: {clean(scene.wanted)} ", "warn"))
    at = clock(scene.run.taken_wall)
    if scene.replay:
        sign = "⏸" if scene.paused else "▶"
        return [
            *line,
            (f" {sign} replay {at} x{scene.speed:g} ", "warn" if scene.paused else "accent"),
        ]
    age = max(0.0, now - scene.newest_wall)
    if scene.trouble and not scene.run.ended:
        return [*line, (f" ▲ {ago(age)} old: {clean(scene.trouble)} ", "warn")]
    if scene.paused:
        behind = max(0.0, scene.newest_wall - scene.run.taken_wall)
        return [*line, (f" ⏸ paused {at}, {ago(behind)} behind ", "warn")]
    if scene.run.ended:
        return [*line, (f" ended {at} ", "dim")]
    old = age > _FRESH_SECONDS + 2 * max(0.0, scene.run.every_seconds - 1)
    text = f" ▲ {ago(age)} old " if old else " ● live "
    return [*line, (text, "warn" if old else "good")]


def scrubber(scene: Scene, width: int) -> Line:
    """What is kept, and where in it the picture is."""
    if scene.span is None or width < 40:
        return []
    first, last = scene.span
    left, right = f" {clock(first)} ", f" {clock(last)} "
    room = width - len(left) - len(right)
    share = (scene.run.taken_wall - first) / ((last - first) or 1)
    at = min(room - 1, max(0, round(share * (room - 1))))
    return [
        (left, "dim"), ("━" * at, "accent"), ("●", "bold"), ("─" * (room - at - 1), "faint"),
        (right, "dim"),
    ]  # fmt: skip
