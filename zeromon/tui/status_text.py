"""The lines of text at the top of the terminal view: run, state, largest risk, figures. Pure."""

import time
from collections.abc import Callable, Sequence

from zeromon.focus import nearest_oom
from zeromon.levels import OOM, Level
from zeromon.readout import throughput
from zeromon.readout.figures import run_step_seconds
from zeromon.readout.text import overhead_text, pause_seconds
from zeromon.readout.verdict import beside, exposed_severity, risk_level, verdict
from zeromon.snapshot import RankSnapshot, Risk, RiskCause, RunSnapshot, Severity
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.line import Line, clean
from zeromon.units import human_count, human_ratio, human_seconds


def tone_of(value: float | None, level: Level) -> str:
    """The tone of a figure by its thresholds; ``dim`` where it is unknown."""
    return "dim" if value is None else _OF_FIGURE[level.severity(value)]


_TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: "dim", None: "good"}
_OF_FIGURE = _TONES | {Severity.INFO: ""}


def head(run: RunSnapshot) -> Line:
    """The first line: run, its health in a word, state, strategy, ranks, node and device."""
    known = verdict(run)
    tone = _TONES[known.severity]
    line: Line = [(" zeromon ", "badge"), (f" {clean(run.run)} ", "bold")]
    line += [
        (f" {_SIGNS[known.severity]} {known.health} ", tone),
        (f"· {clean(beside(known.health, run))}", ""),
    ]
    if run.ranks:
        first = run.ranks[0]
        fleet = run.fleet
        present = fleet.ranks - fleet.silent if fleet is not None else len(run.ranks)
        count = f"{human_count(present)} of {human_count(first.world_size)} ranks"
        if present == first.world_size:
            count = f"{human_count(first.world_size)} rank{'s' * (first.world_size != 1)}"
        facts = [first.strategy, count, f"on {run.node}", first.device.partition(":")[0]]
        line.append(("  " + " · ".join(clean(fact) for fact in facts if fact), "dim"))
    return line


_SIGNS = {None: "●", Severity.INFO: "■", Severity.WARNING: "▲", Severity.CRITICAL: "✖"}


def risk(run: RunSnapshot, width: int = 200) -> Line:
    """The most important fact about the run, as one sentence that fits in *width*."""
    known = verdict(run)
    tone = _TONES[known.severity]
    text = clean(known.cause)
    if len(text) + 3 > width and known.short:
        text = clean(known.short)
    sign = "·" if tone in ("good", "dim") else _SIGNS[known.severity]
    return [(f" {sign} ", tone), (text, "" if tone == "good" else tone)]


def level_and_cause(risk: Risk) -> str:
    """How much of a memory is in use, and what a risk comes from where there is one."""
    level = risk_level(risk)
    return level if risk.cause == RiskCause.NONE else f"{level}, {risk.cause}"


def risk_line(name: str, risk: Risk, tone: str) -> Line:
    """A line about one memory: *name*, the risk, and its cause in *tone*."""
    return [
        (name, "dim"),
        (human_ratio(risk.ratio), tone_of(risk.ratio, OOM)),
        (f"  {level_and_cause(risk)}", tone),
    ]


def tokens_per_second(run: RunSnapshot, look: DisplayOptions) -> float | str:
    """Tokens a second of all ranks, or why they are unknown; by ``--tokens-per-step`` where given."""
    if not look.tokens_per_step:
        return throughput.tokens_per_second(run)
    each = run_step_seconds(run.ranks) if pause_seconds(run) is None else None
    return look.tokens_per_step / each if each else "no step ends"


def figures(run: RunSnapshot, look: DisplayOptions) -> list[tuple[str, str, str]]:
    """The run in numbers: (name, value, tone)."""
    ranks, spreads = run.ranks, run.fleet.spreads if run.fleet is not None else {}
    each = spreads["step_seconds"].median if "step_seconds" in spreads else run_step_seconds(ranks)
    shares = [rank.exposed_ratio for rank in ranks if rank.exposed_ratio is not None]
    overlaps = [rank.overlap_ratio for rank in ranks if rank.overlap_ratio is not None]
    exposed, overlap = max(shares, default=None), min(overlaps, default=None)
    if "overlap_ratio" in spreads:  # the ranks of the snapshot are not those that overlap least
        overlap = spreads["overlap_ratio"].least
    worst = nearest_oom(ranks)
    rate = tokens_per_second(run, look)
    used = throughput.mfu(run, rate, look.peak_flops)
    moves = each is not None and pause_seconds(run) is None
    made = [
        ("step", human_seconds(each) if each else "n/a", "bold" if moves else "dim"),
        ("steps/s", f"{1 / each:.3g}" if each and moves else "n/a", "" if moves else "dim"),
        ("exposed", human_ratio(exposed) + _off(ranks),
         "dim" if exposed is None else _OF_FIGURE[exposed_severity(run)]),
        ("overlap", human_ratio(overlap), ""),
        ("OOM risk", human_ratio(worst[1].ratio if worst else None),
         tone_of(worst[1].ratio if worst else None, OOM)),
        ("tokens/s", *_known(rate, human_count)),
        ("MFU", *_known(used, human_ratio)),
    ]  # fmt: skip
    if throughput.progress(run) is not None:
        made.append(("progress", throughput.progress_text(run), ""))
    if (cost := overhead_text(ranks)) != "n/a":
        made.append(("agent's cost", cost, "dim"))
    return made


def _known(value: float | str, text: Callable[[float], str]) -> tuple[str, str]:
    """A figure and its tone; of an unknown one only an error says more than n/a."""
    if isinstance(value, float):
        return text(value), ""
    return value if value.startswith("error") else "n/a", "dim"


def _off(ranks: Sequence[RankSnapshot]) -> str:
    """The deviation of the live exposed time from the last trace."""
    known = [r.check.error_ratio for r in ranks if r.check is not None]
    off = max((abs(error) for error in known if error is not None), default=None)
    return "" if off is None else f" (a trace differs by {off * 100:.0f} %)"


def figures_line(run: RunSnapshot, look: DisplayOptions, width: int) -> Line:
    """The run in numbers, as one line of *width*: what was asked for first, what is unknown last.

    A figure that does not fit is left out, whole.
    """
    asked = {"step"}
    asked |= {"tokens/s"} if look.tokens_per_step else set()
    asked |= {"MFU"} if look.peak_flops else set()
    asked |= {"progress"} if run.planned_steps else set()
    line: Line = []
    for name, value, tone in sorted(
        figures(run, look), key=lambda figure: (figure[0] not in asked, figure[1] == "n/a")
    ):
        spans = [(f" {name} ", "dim"), (f"{value} ", tone)]
        if sum(len(text) for text, _ in (*line, *spans)) <= width + 1:  # the last blank is none
            line += spans
    return [*line[:-1], (line[-1][0].rstrip(), line[-1][1])] if line else line


def clock(wall: float) -> str:
    """``12:04:31``, local time."""
    return time.strftime("%H:%M:%S", time.localtime(wall))


def ago(seconds: float) -> str:
    """An age for people, in whole seconds: ``3 s``."""
    return human_seconds(seconds) if seconds >= 120 else f"{seconds:.0f} s"
