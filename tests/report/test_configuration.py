"""The settings of several DeepSpeed engines: what they have in common once, and where they differ."""

from __future__ import annotations

from builders import rank, run

from zeromon.readout.report import settings_block
from zeromon.snapshot.rank import Setting


def test_settings_that_all_engines_have_in_common_are_shown_once() -> None:
    """A sweep of six engines over the learning rate."""
    rows = [
        Setting(engine=n, name=name, effective=value, written=value)
        for n in range(1, 7)
        for name, value in (("zero_optimization.stage", "2"), ("optimizer.params.lr", f"0.{n}"))
    ]
    lines = settings_block(run(rank(settings=tuple(rows))), written_only=True).splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["zero_optimization.stage", "2"],
        *(["engine", f"{n}:", "optimizer.params.lr", f"0.{n}"] for n in range(1, 7)),
    ]


def test_one_engine_has_no_number() -> None:
    row = Setting(engine=3, name="a.b", effective="1", written="")
    text = settings_block(run(rank(settings=(row,))), written_only=False)
    assert text.splitlines()[1:] == ["  a.b  1  (default)"]
