"""A run as lines of text, one per step: for screen readers, logs and CI."""

import time
from collections.abc import Callable, Iterable, Iterator

from zeromon.base.errors import RunNotFound, SourceError
from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.readout.text import run_state
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.focus import nearest_oom
from zeromon.sources.base import Source
from zeromon.tui.event_log import events_between_snapshots
from zeromon.tui.feed import Reconnect
from zeromon.tui.plots import step_of
from zeromon.tui.status_text import clock


def write_until_ended(
    source: Source,
    write: Callable[[str], object],
    *,
    every_seconds: float = 1.0,
    reconnect: Reconnect | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RunSnapshot | None:
    """Writes steps and events until the run has ended; returns the last snapshot."""
    prior: RunSnapshot | None = None
    printed, trouble = 0, ""
    while True:
        try:
            run, trouble = source.latest(), ""
        except RunNotFound as error:
            renewed = reconnect(True) if reconnect is not None and prior is not None else None
            if renewed is None:
                write(f"the run is gone: {error}")
                return prior
            source = renewed
            continue
        except SourceError as error:
            # Once per trouble: a screen reader would read each attempt aloud
            if str(error) != trouble:
                trouble = str(error)
                write(f"{trouble}; trying again")
            source = (reconnect(False) if reconnect is not None else None) or source
            sleep(every_seconds)
            continue
        for output_line in lines_of_snapshot(prior, run, printed):
            write(output_line)
        printed, prior = max(printed, _last_whole_step(run)), run
        if run.ended:
            write(run_state(run))
            return run
        sleep(every_seconds)


def lines_of_snapshot(prior: RunSnapshot | None, run: RunSnapshot, printed: int) -> Iterator[str]:
    """The lines for *run*: events since *prior*, and the steps after *printed* that all ranks ended."""
    for note in events_between_snapshots(prior, run):
        severe = {"bad": "critical: ", "warn": "warning: "}.get(note.tone, "")
        yield f"{clock(note.wall)} {severe}{note.text}"
    judged = judge_run(run)
    if prior is None or judge_run(prior).health is not judged.health:
        yield judged.text
    last_step = _last_whole_step(run)
    oldest_step = min((rank.steps.recent[0].step for rank in run.ranks if rank.steps.recent), default=1)
    # At first the newest step alone: a view that is opened late would print all that are kept
    start = last_step if prior is None else max(printed + 1, oldest_step)
    if prior is not None and start > printed + 1 and not run.origin:
        yield f"steps {human_count(printed + 1)} to {human_count(start - 1)} were too fast to print"
    steps: Iterable[int] = range(max(1, start), last_step + 1)
    if run.origin:  # there, a point stands for many steps
        recent = {stats.step for rank in run.ranks for stats in rank.steps.recent}
        steps = sorted(step for step in recent if start <= step <= last_step and step > printed)
    for step in steps:
        yield step_line(run, step)


def _last_whole_step(run: RunSnapshot) -> int:
    """The newest step that all living ranks have ended."""
    last_steps = [
        rank.steps.recent[-1].step for rank in run.ranks if rank.steps.recent and not rank.status.ended
    ]
    last_steps = last_steps or [rank.steps.recent[-1].step for rank in run.ranks if rank.steps.recent]
    return min(last_steps, default=0)


def step_line(run: RunSnapshot, step: int) -> str:
    """One step over all ranks: the longest, the most exposed, and the fullest rank."""
    steps = [(rank.rank, stats) for rank in run.ranks if (stats := step_of(rank.steps.recent, step))]
    if not steps:
        return f"step {human_count(step)}: not known"
    slowest = max(steps, key=lambda pair: pair[1].seconds)
    facts = [f"step {human_count(step)}", f"{human_seconds(slowest[1].seconds)} (rank {slowest[0]})"]
    timed = [(rank, stats) for rank, stats in steps if stats.timed and stats.seconds > 0]
    share = "n/a (not timed)"
    if timed:
        peak = max(timed, key=lambda pair: pair[1].exposed_ns / pair[1].seconds)
        share = f"{human_ratio(peak[1].exposed_ns / 1e9 / peak[1].seconds)} (rank {peak[0]})"
    facts.append(f"exposed {share}")
    device = [(stats.reserved_bytes, rank) for rank, stats in steps if stats.reserved_bytes >= 0]
    if device:
        facts.append(f"reserved {human_bytes(max(device)[0])} (rank {max(device)[1]})")
    else:
        facts.append(f"RSS {human_bytes(sum(stats.rss_bytes for _, stats in steps))} (all ranks)")
    nearest = nearest_oom(run.ranks)
    if nearest is not None:
        facts.append(f"OOM risk {human_ratio(nearest[1].ratio)}")
    if any(stats.skipped for _, stats in steps):
        facts.append("skipped: gradients overflowed")
    return "  ".join(facts)
