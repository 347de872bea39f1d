"""Everything that a screen draws, as one value."""

from dataclasses import dataclass

from zeromon.readout.answers import VerdictPeriod
from zeromon.readout.text import capture_text, pause_seconds, pause_text
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.levels import STALE_SECONDS
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.event_log import LogEntry, Mark
from zeromon.tui.feed import Span
from zeromon.tui.line import Line, clean
from zeromon.tui.plots import Trends
from zeromon.tui.status_text import age_text, clock


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
    life: tuple[VerdictPeriod, ...] = ()
    """The verdicts on the run over time; () until the record is read."""
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


def status_line(model: ViewModel, now_seconds: float) -> Line:
    """How old the snapshot is, for the right end of the first line."""
    capture = model.run.capture
    spans: Line = []
    if capture is not None and capture.is_open:
        spans.append((f" {clean(capture_text(capture, model.run.last_step))} ", "warn"))
    if model.rank_filter:
        spans.append((f" ranks: {clean(model.rank_filter)} ", "warn"))
    at = clock(model.run.taken_wall)
    if model.replay:
        sign = "⏸" if model.paused else "▶"
        return [*spans, (f" {sign} replay {at} x{model.speed:g} ", "warn" if model.paused else "accent")]
    age = max(0.0, now_seconds - model.newest_wall)
    if model.trouble and not model.run.ended:
        return [*spans, (f" ▲ {age_text(age)} old: {clean(model.trouble)} ", "warn")]
    if model.paused:
        lag = max(0.0, model.newest_wall - model.run.taken_wall)
        return [*spans, (f" ⏸ paused {at}, {age_text(lag)} behind ", "warn")]
    if model.run.unfinished:
        return [*spans, (f" incomplete, last seen {at} ", "warn")]
    if model.run.ended:
        return [*spans, (f" ended {at} ", "dim")]
    if model.run.detached:
        return [*spans, (" detached ", "dim")]
    # The collector of a large run takes a snapshot every few seconds: that age is not stale
    old = age > STALE_SECONDS + 2 * max(0.0, model.run.every_seconds - 1)
    pause = pause_seconds(model.run)
    if not old and pause is not None:
        return [*spans, (f" ▲ {pause_text(pause)} ", "warn")]
    label = f" ▲ {age_text(age)} old " if old else " ● live "
    return [*spans, (label, "warn" if old else "good")]


_LIFE_TONES = {None: "good", Severity.INFO: "faint", Severity.WARNING: "warn", Severity.CRITICAL: "bad"}


def draw_life(model: ViewModel, width: int) -> Line:
    """The verdicts on the run over its whole time, as a strip of *width*."""
    if not model.life or width < 40:
        return []
    start_wall, end_wall = model.life[0].start_wall, model.life[-1].end_wall
    tones = {str(period.health): _LIFE_TONES[period.severity] for period in model.life}
    track = width - len(", ".join(tones)) - 3
    spans: Line = [(" ", "")]
    drawn_cells = 0
    for period in model.life:
        upto = round(track * (period.end_wall - start_wall) / ((end_wall - start_wall) or 1))
        sign = _LIFE_SIGNS[period.severity] if model.look.letters else "▬"
        spans.append((sign * (upto - drawn_cells), _LIFE_TONES[period.severity]))
        drawn_cells = upto
    for number, (verdict_name, tone) in enumerate(tones.items()):
        spans += [("," * (number > 0) + " ", "dim"), (verdict_name, "dim" if tone == "faint" else tone)]
    return spans


_LIFE_SIGNS = {None: "-", Severity.INFO: ".", Severity.WARNING: "!", Severity.CRITICAL: "X"}


def draw_scrubber(model: ViewModel, width: int) -> Line:
    """The recorded span, and the position of the snapshot in it."""
    if model.span is None or width < 40:
        return []
    first_wall, last_wall = model.span
    start_text, end_text = f" {clock(first_wall)} ", f" {clock(last_wall)} "
    track = width - len(start_text) - len(end_text)
    share = (model.run.taken_wall - first_wall) / ((last_wall - first_wall) or 1)
    at = min(track - 1, max(0, round(share * (track - 1))))
    return [
        (start_text, "dim"), ("━" * at, "accent"), ("●", "bold"), ("─" * (track - at - 1), "faint"),
        (end_text, "dim"),
    ]  # fmt: skip
