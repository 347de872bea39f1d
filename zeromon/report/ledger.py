"""Where every second of a job went, as text. Pure."""

from collections.abc import Sequence

from zeromon.readout.checkpoints import checkpoint_text
from zeromon.readout.ledger import JobLedger, activity_texts, cause_text, headline, job_ledger
from zeromon.report.table import table
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_count, human_ratio, human_seconds

_BAR = 30


def ledger(runs: Sequence[RunSnapshot], per: Sequence[tuple[str, float]] = ()) -> str:
    """Every second of the ranks of *runs*, which are one job; "" where nothing is known.

    *per*: further columns, with what a second is worth in each (kWh, money).
    """
    whole = job_ledger(runs)
    if not whole.rows:
        return ""
    work = [(whole.unit, whole.per_second)] if whole.unit else []
    lines = [f"Ledger: {headline(whole)}", _table(whole, [*work, *per])]
    lines += [f"  {note}" for note in (whole.unit_note, *whole.notes)]
    saves = checkpoint_text(runs[-1])
    return "\n".join([*lines, f"  {saves}"] if saves else lines)


def _table(whole: JobLedger, per: Sequence[tuple[str, float]]) -> str:
    def cells(name: str, seconds: float) -> tuple[str, ...]:
        amounts = (seconds * each for _, each in per)
        worth = (human_count(a) if a >= 1000 else f"{a:.4g}" for a in amounts)
        return name, human_seconds(seconds), human_ratio(seconds / whole.rank_seconds), *worth

    rows = [cells(cause_text(row), row.seconds) for row in whole.rows]
    header = ("cause", "of all ranks", "share", *(name for name, _ in per))
    lines = table(header, [*rows, cells("sum", whole.rank_seconds)]).splitlines()
    bars = ["", *("#" * round(_BAR * whole.share(row)) for row in whole.rows), ""]
    return "\n".join(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))


def activities(run: RunSnapshot) -> str:
    """What the training loops did beside training; "" where nothing was seen."""
    texts = activity_texts(run)
    return "Beside training\n" + "\n".join(f"  {text}" for text in texts) if texts else ""
