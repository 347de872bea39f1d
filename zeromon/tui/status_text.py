"""The lines of text at the top of the terminal view: run, state, largest risk, figures. Pure."""

import re
import time

from zeromon.base.units import human_count, human_ratio, human_seconds
from zeromon.readout import throughput
from zeromon.readout.figures import run_step_seconds
from zeromon.readout.tables import TONES, tone_of
from zeromon.readout.text import leading_clauses, pause_seconds
from zeromon.readout.verdict import SIGNS, exposed_severity, judge_run, risk_level, state_beside
from zeromon.snapshot import RiskCause, RunSnapshot, Severity
from zeromon.snapshot.focus import highest_exposed_ratio, nearest_oom
from zeromon.snapshot.levels import OOM
from zeromon.snapshot.memory import Risk
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.line import Line, clean, line_width, wrap_text

_TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: "dim", None: "good"}


def head_line(run: RunSnapshot, width: int = 200) -> Line:
    """The first line: run, its health in a word, state; then strategy, ranks, node, device that fit."""
    judged = judge_run(run)
    tone = _TONES[judged.severity]
    spans: Line = [(" zeromon ", "badge"), (f" {clean(run.run)} ", "bold")]
    spans.append((f" {SIGNS[judged.severity]} {judged.health} ", tone))
    state, state_width = clean(state_beside(judged.health, run)), width - line_width(spans) - 2
    for divider in (", ", " after "):
        state = leading_clauses(state, state_width, divider)
    spans.append((f"· {state}" if state else "", ""))
    if run.ranks:
        first_rank = run.ranks[0]
        fleet = run.fleet
        present = fleet.ranks - fleet.silent if fleet is not None else len(run.ranks)
        count = f"{human_count(present)} of {human_count(first_rank.world_size)} ranks"
        if present == first_rank.world_size:
            count = f"{human_count(first_rank.world_size)} rank{'s' * (first_rank.world_size != 1)}"
        device = "modelled " * first_rank.on_virtual_device + re.sub(r":\d+", "", first_rank.device)
        facts = [first_rank.strategy, count, f"on {run.node}", device]
        chosen: list[str] = []
        for fact in filter(None, map(clean, facts)):
            if line_width(spans) + len(" · ".join((*chosen, fact))) + 2 > width:
                break
            chosen.append(fact)
        spans += [(f"  {' · '.join(chosen)}", "dim")] if chosen else []
    return spans


def verdict_line(run: RunSnapshot, width: int = 200) -> Line:
    """The most important fact about the run, as one sentence that fits in *width*."""
    judged = judge_run(run)
    tone = _TONES[judged.severity]
    sentence = clean(judged.cause)
    if len(sentence) + 3 > width and judged.short:
        sentence = clean(judged.short)
    sign = "·" if tone in ("good", "dim") else SIGNS[judged.severity]
    for divider in ("; ", ", "):
        sentence = leading_clauses(sentence, width - 3, divider)
    return [(f" {sign} ", tone), (sentence, "" if tone == "good" else tone)]


def level_and_cause(risk: Risk) -> str:
    """How much of a memory is in use, and what a risk comes from where there is one."""
    level = risk_level(risk)
    return level if risk.cause == RiskCause.NONE else f"{level}, {risk.cause}"


def risk_lines(name: str, risk: Risk, tone: str, width: int) -> list[Line]:
    """Lines of *width* about one memory: *name*, the risk, and its cause in *tone*."""
    head: Line = [(name, "dim"), (f"{human_ratio(risk.ratio)}  ", tone_of(risk.ratio, OOM))]
    head_row, *tail_rows = wrap_text(level_and_cause(risk), width - line_width(head), tone)
    return [[*head, *head_row], *([(" " * line_width(head), ""), *row] for row in tail_rows)]


def tokens_per_second(run: RunSnapshot, options: DisplayOptions) -> float | str:
    """Tokens a second of all ranks, or why they are unknown; by ``--tokens-per-step`` where given."""
    if not options.tokens_per_step:
        return throughput.tokens_per_second(run)
    pace = run_step_seconds(run.ranks) if pause_seconds(run) is None else None
    return options.tokens_per_step / pace if pace else "no step ends"


def run_figures(run: RunSnapshot, options: DisplayOptions) -> list[tuple[str, str, str]]:
    """The run in numbers, as far as they are known: (name, value, tone)."""
    ranks, spreads = run.ranks, run.fleet.spreads if run.fleet is not None else {}
    pace = spreads["step_seconds"].median if "step_seconds" in spreads else run_step_seconds(ranks)
    exposed, nearest = highest_exposed_ratio(ranks), nearest_oom(ranks)
    rate = tokens_per_second(run, options)
    used = throughput.mfu_of_run(run, rate, options.peak_flops)
    moves = pace is not None and pause_seconds(run) is None
    ratios = [r.requests.check.error_ratio for r in ranks if r.requests.check is not None]
    deviation = max((abs(error) for error in ratios if error is not None), default=None)
    deviation_text = "" if deviation is None else f" (a trace differs by {deviation * 100:.0f} %)"
    rows = [("step", human_seconds(pace), "bold" if moves else "dim")] if pace else []
    rows += [("steps/s", f"{1 / pace:.3g}", "")] if pace and moves else []
    rows += [("progress", progress, "")] if (progress := throughput.progress_text(run)) else []
    if exposed is not None:
        rows.append(("exposed", human_ratio(exposed) + deviation_text, TONES[exposed_severity(run)]))
    if nearest is not None and not run.ended:
        rows.append(("OOM risk", human_ratio(nearest[1].ratio), tone_of(nearest[1].ratio, OOM)))
    for name, value, text_of in (("tokens/s", rate, human_count), ("MFU", used, human_ratio)):
        if isinstance(value, float) or value.startswith("error"):
            rows.append((name, text_of(value) if isinstance(value, float) else value, ""))
    return rows


def figures_line(run: RunSnapshot, options: DisplayOptions, width: int) -> Line:
    """The run in numbers, as one line of *width*: what was asked for first.

    A figure that does not fit is left out, whole.
    """
    requested = {"step"}
    requested |= {"tokens/s"} if options.tokens_per_step else set()
    requested |= {"MFU"} if options.peak_flops else set()
    row: Line = []
    for name, value, tone in sorted(run_figures(run, options), key=lambda row: row[0] not in requested):
        spans = [(f" {name} ", "dim"), (f"{value} ", tone)]
        if sum(len(chunk) for chunk, _ in (*row, *spans)) <= width + 1:  # the last blank is none
            row += spans
    return [*row[:-1], (row[-1][0].rstrip(), row[-1][1])] if row else row


def clock(wall_seconds: float) -> str:
    """``12:04:31``, local time."""
    return time.strftime("%H:%M:%S", time.localtime(wall_seconds))


def age_text(seconds: float) -> str:
    """An age for people, in whole seconds: ``3 s``."""
    return human_seconds(seconds) if seconds >= 120 else f"{seconds:.0f} s"
