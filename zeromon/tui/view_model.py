"""Everything that a screen draws, as one value."""

from dataclasses import dataclass

from zeromon.levels import STALE_SECONDS
from zeromon.readout.text import capture_text, pause_seconds, pause_text
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.event_log import LogEntry, Mark
from zeromon.tui.line import Line, clean
from zeromon.tui.playhead import Span
from zeromon.tui.plots import Trends
from zeromon.tui.status_text import ago, clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewModel:
    """A snapshot, and how to show it."""

    run: RunSnapshot
    ranks: tuple[RankSnapshot, ...]
    """The ranks that the filter selects."""
    look: DisplayOptions
    trends: Trends
    marks: tuple[Mark, ...] = ()
    log: tuple[LogEntry, ...] = ()
    """The events in the run so far."""
    rank_filter: str = ""
    """The filter of ranks, as the user typed it."""
    chosen: int | None = None
    """The rank that the user chose."""
    newest_wall: float = 0.0
    """When the newest snapshot was taken."""
    span: Span | None = None
    paused: bool = False
    replay: bool = False
    speed: float = 1.0
    trouble: str = ""
    """Why there is no newer snapshot; "" where nothing is wrong."""

    @property
    def mark_steps(self) -> tuple[float, ...]:
        """The steps at which charts show marks."""
        return tuple(float(mark.step) for mark in self.marks)

    def focus(self, otherwise: RankSnapshot | None = None) -> RankSnapshot | None:
        """The rank that the user chose; else *otherwise*, else the first rank."""
        chosen = next((rank for rank in self.ranks if rank.rank == self.chosen), None)
        return chosen or otherwise or (self.ranks[0] if self.ranks else None)


def status(model: ViewModel, now: float) -> Line:
    """How old the snapshot is, for the right end of the first line."""
    made = model.run.capture
    line: Line = []
    if made is not None and made.is_open:
        step = max((rank.step for rank in model.run.ranks), default=0)
        line.append((f" {clean(capture_text(made, step))} ", "warn"))
    if model.rank_filter:
        line.append((f" ranks: {clean(model.rank_filter)} ", "warn"))
    at = clock(model.run.taken_wall)
    if model.replay:
        sign = "⏸" if model.paused else "▶"
        return [
            *line,
            (f" {sign} replay {at} x{model.speed:g} ", "warn" if model.paused else "accent"),
        ]
    age = max(0.0, now - model.newest_wall)
    if model.trouble and not model.run.ended:
        return [*line, (f" ▲ {ago(age)} old: {clean(model.trouble)} ", "warn")]
    if model.paused:
        behind = max(0.0, model.newest_wall - model.run.taken_wall)
        return [*line, (f" ⏸ paused {at}, {ago(behind)} behind ", "warn")]
    if model.run.unfinished:
        return [*line, (f" incomplete, last seen {at} ", "warn")]
    if model.run.ended:
        return [*line, (f" ended {at} ", "dim")]
    if model.run.detached:
        return [*line, (" detached ", "dim")]
    old = age > STALE_SECONDS + 2 * max(0.0, model.run.every_seconds - 1)
    pause = pause_seconds(model.run)
    if not old and pause is not None:
        return [*line, (f" ▲ {pause_text(pause)} ", "warn")]
    text = f" ▲ {ago(age)} old " if old else " ● live "
    return [*line, (text, "warn" if old else "good")]


def scrubber(model: ViewModel, width: int) -> Line:
    """The recorded span, and the position of the snapshot in it."""
    if model.span is None or width < 40:
        return []
    first, last = model.span
    left, right = f" {clock(first)} ", f" {clock(last)} "
    room = width - len(left) - len(right)
    share = (model.run.taken_wall - first) / ((last - first) or 1)
    at = min(room - 1, max(0, round(share * (room - 1))))
    return [
        (left, "dim"), ("━" * at, "accent"), ("●", "bold"), ("─" * (room - at - 1), "faint"),
        (right, "dim"),
    ]  # fmt: skip
