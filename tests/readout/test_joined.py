"""A run that was joined has one step number, the job's, and every view says that its past is unknown."""

from __future__ import annotations

import pytest
from builders import folded, run, state, step

from zeromon.export.prometheus.metrics import Writer
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.report import render_run
from zeromon.readout.text import joined_text, notes_of, run_state
from zeromon.snapshot import RankSnapshot
from zeromon.storage.run_store import manifest_of_run
from zeromon.tui.screens.overview import note_lines

TOLD = "watched since step 355; earlier activity is unknown"


def joined(before: int = 354, steps: int = 111) -> RankSnapshot:
    events = [step(before + n, 100.0 * n, 100.0 * n + 100) for n in range(1, steps + 1)]
    return summarize_rank(folded([*events], state(attached=True, steps_before=before)))


def test_every_view_has_the_number_of_the_job() -> None:
    one = joined()
    snapshot = run(one)
    assert (one.steps.last_step, one.steps.first_step) == (465, 355)
    assert run_state(snapshot) == "running, step 465"
    assert run_state(run(one, ended=True)) == "finished after 465 steps"
    (row,) = [line.split() for line in render_run(snapshot).splitlines() if line[:6] == "  0   "][:1]
    assert row[:2] == ["0", "465"]
    assert manifest_of_run(snapshot).steps == 465
    text = Writer().write([snapshot], None, openmetrics=False).decode()
    assert 'zeromon_steps_total{run="train-1",rank="0"} 465' in text


def test_every_view_says_that_the_past_is_unknown() -> None:
    snapshot = run(joined())
    assert joined_text(snapshot) == TOLD
    assert notes_of(snapshot) == [TOLD]
    assert TOLD.removeprefix("watched ") in render_run(snapshot)
    assert TOLD in "".join(text for line in note_lines(snapshot) for text, _ in line)


@pytest.mark.parametrize(("attached", "told"), [(True, "watched since zeromon attached"), (False, "")])
def test_before_its_first_step_a_run_has_no_number(attached: bool, told: str) -> None:
    snapshot = run(summarize_rank(state(attached=attached)))
    assert joined_text(snapshot).startswith(told) and bool(joined_text(snapshot)) == attached
