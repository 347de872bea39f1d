"""What is known of ranks before they report, and of attempts that ended before, as text. Pure."""

from collections.abc import Sequence

from zeromon.readout.deaths import death_text
from zeromon.snapshot import Attempt, RankProcess, RunSnapshot
from zeromon.units import human_count, human_seconds

_MAX_LISTED_PROCESSES = 2


def process_text(process: RankProcess) -> str:
    """``pid 4242 is at train.py:21 in main``."""
    return f"pid {process.pid} is at {process.at}" if process.at else f"pid {process.pid} runs"


def starting_text(run: RunSnapshot) -> str:
    """``no rank has reported after 95 s; pid 4242 is at train.py:21 in main``."""
    if run.ended:
        return run.note or unreported_text(run.attempts) or "no rank ever reported"
    waited = human_seconds(max(0.0, run.taken_wall - run.started_wall))
    parts = [f"no rank has reported after {waited}", *_processes(run.starting), run.note]
    return "; ".join(filter(None, parts))


def restarting_text(run: RunSnapshot) -> str:
    """``attempt 2; pid 4242 is at train.py:21 in main``."""
    return "; ".join((f"attempt {run.restarting}", *_processes(run.starting)))


def unreported_text(attempts: Sequence[Attempt]) -> str:
    """``attempts 2 and 3 ended before a rank reported: rank 0, exit code 1``; "" without any."""
    if not attempts:
        return ""
    names = [human_count(one.number) for one in attempts]
    many = (
        f"attempts {', '.join(names[:-1])} and {names[-1]}" if names[1:] else f"attempt {names[0]}"
    )
    deaths = attempts[-1].deaths
    why = f": {death_text(deaths[0])}" if deaths else ""
    return f"{many} ended before a rank reported{why}"


def _processes(starting: Sequence[RankProcess]) -> list[str]:
    shown = [process_text(one) for one in starting[:_MAX_LISTED_PROCESSES]]
    more = len(starting) - len(shown)
    return [*shown, f"{human_count(more)} more"] if more else shown
