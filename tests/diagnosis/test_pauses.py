"""Pauses of one rank, for which the others wait: told with their size and rhythm (ZM608)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from builders import MS, rank, run, summary

from zeromon.diagnosis.engine import advise
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot

USUAL_MS = 100


def paused(
    number: int, pauses: dict[int, int], waits: dict[int, int], saves: bool, untimed: int = 1000
) -> RankSnapshot:
    """150 steps of 100 ms; *pauses*, *waits*: step -> ms of the rank's own time, or in backward.

    Each *untimed*-th step is not timed.
    """
    steps, at = [], 0
    for step in range(1, 151):
        own, wait = pauses.get(step, 0) * MS, waits.get(step, 0) * MS
        spent = [0] * len(Phase)
        spent[Phase.FORWARD], spent[Phase.BACKWARD] = 40 * MS, 60 * MS + wait
        spent[Phase.CHECKPOINT] = 10 * MS if saves and own else 0
        spent[Phase.OTHER] = max(0, own - spent[Phase.CHECKPOINT])
        exposed = [0] * len(Phase)
        exposed[Phase.BACKWARD] = wait
        end = at + sum(spent)
        timed = step % untimed > 0
        steps.append(summary(step, start_ns=at, end_ns=end, phase_ns=tuple(spent), idle=not timed,
                             phase_exposed_ns=tuple(exposed) if timed else (0,) * len(Phase),
                             exposed_ns=wait * timed))  # fmt: skip
        at = end
    return rank(number, recent=tuple(steps), watched_steps=150, last_step=150, median_seconds=0.1)


@pytest.mark.parametrize(("pause_ms", "severity"), [(3000, "warning"), (1000, "info")])
def test_the_other_ranks_wait_for_one_that_saves_once(pause_ms: int, severity: str) -> None:
    """It is a warning from a tenth of the time on; where both ranks save at once, nobody waits."""
    saving = paused(0, {130: pause_ms}, {}, saves=False)
    steps = []
    for step in saving.steps.recent:
        spent = list(step.phase_ns)
        spent[Phase.CHECKPOINT], spent[Phase.OTHER] = spent[Phase.OTHER], 0
        steps.append(replace(step, phase_ns=tuple(spent)))
    saving = saving.with_recent(steps)
    waiting = paused(1, {}, {130: pause_ms}, saves=False)
    (finding,) = (f for f in advise(run(saving, waiting)) if f.rule == "slow_steps")
    assert (finding.rank, finding.severity) == (0, severity)
    assert finding.text.endswith("of it checkpoint; the other ranks wait")
    (finding,) = (f for f in advise(run(saving, replace(saving, rank=1))) if f.rule == "slow_steps")
    assert finding.severity == "info" and "wait" not in finding.text


@pytest.mark.parametrize(
    ("pauses", "saves", "text"),
    [
        (dict.fromkeys(range(61, 151, 20), 1000), False,
         "pauses for 1.0 s about every 20 steps (own code) since step 61"),
        ({51: 5000, 101: 5000}, True, "saves a checkpoint for 5.0 s about every 50 steps since step 51"),
        (dict.fromkeys((37, 49, 73, 85, 97, 133), 800), False,
         "pauses for 800.0 ms about every 12 steps (own code) since step 37"),
        (dict.fromkeys((11, *range(36, 151, 12)), 800), False,
         "pauses for 800.0 ms about every 12 steps (own code) since step 36"),
        (dict.fromkeys((61, 64, 90, 149), 1000), False,
         "pauses for 1.0 s in 4 steps (own code) since step 61"),
        (dict.fromkeys((81, 82, 83, 85, 86, 87, 140), 1000), False,
         "pauses for 1.0 s in 7 steps (own code) since step 81"),
    ],
)  # fmt: skip
def test_pauses_of_one_rank_are_told_with_their_rhythm(
    pauses: dict[int, int], saves: bool, text: str
) -> None:
    ranks = (paused(0, pauses, {}, saves), paused(1, {}, pauses, saves))
    (told,) = (f for f in advise(run(*ranks)) if f.code == "ZM608")
    assert (told.rank, str(told.severity)) == (0, "warning")
    assert told.text.replace("1.00 s", "1.0 s").replace("5.00 s", "5.0 s").startswith(text)
    together = (paused(0, pauses, {}, saves), paused(1, pauses, {}, saves))
    assert not [f for f in advise(run(*together)) if f.code == "ZM608" and "rank" in f.text]


def test_pauses_in_untimed_steps_belong_to_the_rhythm() -> None:
    """Of pauses every 12 steps each second one falls into an untimed step, which is every eighth."""
    pauses = dict.fromkeys(range(36, 151, 12), 800)
    ranks = (paused(0, pauses, {}, False, untimed=8), paused(1, {}, pauses, False, untimed=8))
    (told,) = (f for f in advise(run(*ranks)) if f.code == "ZM608")
    begin = "pauses for 800.0 ms about every 12 steps (own code) since step 36; "
    assert told.rank == 0 and told.text.startswith(begin)
    share = float(told.text.removeprefix(begin).split()[0])
    assert share == pytest.approx(100 * 10 * 0.8 / (115 * 0.1 + 10 * 0.8), rel=0.01)


def test_short_pauses_without_a_rhythm_are_those_of_a_busy_machine() -> None:
    """Pauses of 0.2 s in these steps are no finding; pauses of 1 s in the same steps are."""
    frequent = [n for n in range(61, 140) if n % 6 in (0, 2)]  # after two steps, or four
    for at, seconds, is_told in (
        ((61, 64, 70, 73, 80, 90, 111, 149), 0.2, False),
        (frequent, 0.2, False),
        ((61, 64, 70, 73, 80, 90, 111, 149), 1.0, True),
    ):
        long = dict.fromkeys(at, round(1000 * seconds))
        ranks = (paused(0, long, {}, False), paused(1, {}, long, False))
        told = [f for f in advise(run(*ranks)) if f.code == "ZM608" and "pauses" in f.text]
        assert bool(told) is is_told
    rhythm = dict.fromkeys(range(61, 151, 10), 200)
    ranks = (paused(0, rhythm, {}, False), paused(1, {}, rhythm, False))
    (told,) = (f for f in advise(run(*ranks)) if f.code == "ZM608")
    assert "about every 10 steps" in told.text


@pytest.mark.parametrize("steps", [(61,), range(76, 151), range(91, 151)])
def test_one_pause_or_one_in_each_step_is_no_rhythm(steps: Iterable[int]) -> None:
    """A delay in every step from one on is a straggler (ZM309), not a pause."""
    long = dict.fromkeys(steps, 1000)
    ranks = (paused(0, long, {}, False), paused(1, {}, long, False))
    assert not [f for f in advise(run(*ranks)) if f.code == "ZM608"]
