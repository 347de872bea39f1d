"""Compares runs side by side: significant differences, and which run to take.

RUN is a run id or its beginning, a file of zeromon report --json, or the folder of a record. The first
is the baseline. Separate repeats of one program by commas: the noise is then the spread of the repeats.

  zeromon compare ddp zero2 zero3
  zeromon compare base.1,base.2,base.3 new.1,new.2,new.3
  zeromon compare main.json new --fail-on "step_time>+10%" --fail-on "peak_memory>+5%"

A * marks a difference that is larger than the noise, a ? one that a lack of CPUs or a neighbour on the
machine may explain. A threshold is METRIC, > or <, and an amount: +5%
or -5% of the first run's figure; +200MiB, +10ms, +5pp as a difference; 60GiB or 20% of the figure
itself. It is exceeded when the figure is beyond it by more than the noise; the same runs always give
the same answer. A threshold that cannot be judged does not pass: the figure is unknown, the noise is
larger than the limit, or ranks lacked CPUs; the message says how many repeats are enough. A run
that died exceeds every threshold.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from zeromon.base.errors import CompareError
from zeromon.base.units import human_count, human_share, printable
from zeromon.cli.parser import add_flag, add_list
from zeromon.cli.report import recent_step_frame, snapshot_of
from zeromon.cli.terminal import is_coloured, show_json, show_working
from zeromon.comparison import text
from zeromon.comparison.comparison import Column, Comparison, Row, compare, letter
from zeromon.comparison.run_figures import RunFigures, figures_of
from zeromon.comparison.text import NAMES, Verdict, judge_limits, parse_limit
from zeromon.readout.tables import aligned_table
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history.queries import by_step, frame_of_steps

_GOOD, _BAD, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
_MAX_NAME_CHARS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon compare RUN RUN [RUN ...] [--fail-on LIMIT] [--json]``"""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, or repeats of one: a,b,c")
    add_list(
        parser, "--fail-on", "LIMIT",
        "exit code 1 when the threshold is exceeded, 2 when it cannot be judged; may be repeated",
    )  # fmt: skip
    add_flag(parser, "--json", "print JSON")
    names = textwrap.fill(", ".join(NAMES), 76, initial_indent="  ", subsequent_indent="  ")
    parser.epilog = (
        f"metrics for thresholds:\n{names},\n  and PLACE.ROLE, like device.optimizer_state\n\n"
        "exit code: 0 success, 1 a threshold is exceeded, 2 one cannot be judged, or wrong usage"
    )


def call(options: argparse.Namespace) -> int:
    """Finds the runs, compares, prints."""
    # Before the runs are read: a mistyped threshold must not cost the reading of long histories
    limits = [parse_limit(limit) for limit in options.fail_on]
    with show_working("reading the runs"):
        compared = compare_named(options.runs)
    verdict = judge_limits(compared, limits) if limits else Verdict((), ())
    if options.json:
        broken, undecided = verdict.exceeded, verdict.undecided
        show_json({"comparison": compared, "broken": broken, "undecided": undecided})
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(as_text(compared, width, coloured=is_coloured(sys.stdout)))
    for sentence in (*verdict.exceeded, *verdict.undecided):
        sys.stderr.write(f"zeromon: {printable(sentence)}\n")
    return 1 if verdict.exceeded else 2 if verdict.undecided else 0


def compare_named(runs: Sequence[str]) -> Comparison:
    """Returns the comparison of the named *runs*, each one run, or repeats of one: ``a,b,c``."""
    if len(runs) < 2:
        raise CompareError("a comparison needs two runs", "Like: zeromon compare ddp zero2")
    return compare([_repeats_of(names.split(",")) for names in runs])


def _repeats_of(names: Sequence[str]) -> list[RunFigures]:
    """The runs called *names*; raises :class:`CompareError` where two names are of one run."""
    repeats = [read_figures(name) for name in names]
    # One run twice is no second measurement: the noise would look smaller than it is
    if len({(run.snapshot.run, run.snapshot.started_wall) for run in repeats}) < len(repeats):
        hint = "Each repeat is a run of its own, like base.1,base.2,base.3."
        raise CompareError(f"{','.join(names)} names one run twice", hint)
    return repeats


def read_figures(name: str) -> RunFigures:
    """The run called *name*, with its history."""
    return snapshot_figures(*snapshot_of(name))


def snapshot_figures(snapshot: RunSnapshot, folder: Path | None) -> RunFigures:
    """The figures of *snapshot*, whose record may be in *folder*."""
    step_frame = frame_of_steps(folder / "history") if folder is not None else None
    # Early in a live run the record has no segment of steps
    if step_frame is None or step_frame.is_empty():
        step_frame = by_step(recent_step_frame(snapshot).lazy()).collect()
    return figures_of(snapshot, step_frame.to_dict(as_series=False))


# ---- text -----------------------------------------------------------------------------------------

Text = tuple[str, str]
"""The text of a cell, and its colour ("" for none)."""


def as_text(compared: Comparison, width: int, *, coloured: bool = False) -> str:
    """The runs, the table in as many parts as *width* requires, and the recommendation."""
    environment = [_wrap_text(row, "  ", width) for row in text.environment_lines(compared)]
    sections = [_runs_table(compared), "\n".join(["Environment", *environment])]
    sections += _figure_tables(compared, width, coloured=coloured)
    if any(cell.marked for row in compared.rows for cell in row.cells):
        sections[-1] += f"\n  * differs from {letter(0)} by more than the noise"
    if any(cell.doubtful for row in compared.rows for cell in row.cells):
        sections[-1] += f"\n  ? {text.NOT_COMPARABLE}"
    notes = _unknown_figures(compared)
    if notes:
        sections.append("Not known\n" + "\n".join(_wrap_text(note, "  ", width) for note in notes))
    advice, reasons = compared.advice.text, compared.advice.reasons
    rows = [_wrap_text(advice[0].upper() + advice[1:], "", width)]
    sections.append("\n".join([*rows, *(_wrap_text(reason, "  - ", width) for reason in reasons)]))
    return "\n\n".join(sections) + "\n"


def _wrap_text(sentence: str, mark: str, width: int) -> str:
    return textwrap.fill(
        printable(sentence), min(width, 100), initial_indent=mark, subsequent_indent=" " * len(mark)
    )


def _runs_table(compared: Comparison) -> str:
    rows = [
        (
            f"{letter(number)}  {_column_name(column)}",
            _shorten_name(column.strategy),
            _batch_formula(column),
            text.steps_text(column),
            "died" if column.died else column.ended.split(" ")[0].strip(","),
        )
        for number, column in enumerate(compared.columns)
    ]
    return aligned_table(("   run", "strategy", "batch", "steps timed", ""), rows)


def _column_name(column: Column) -> str:
    repeats = f" and {len(column.runs) - 1} more" if len(column.runs) > 1 else ""
    return _shorten_name(column.runs[0]) + repeats


def _shorten_name(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."


def _batch_formula(column: Column) -> str:
    """``4 x 2 x 8 = 64``: micro-batch, accumulation, ranks."""
    product = f" = {human_count(column.effective_batch)}" if column.effective_batch else ""
    return f"{column.micro_batch or '?'} x {column.micro_steps} x {column.ranks or '?'}{product}"


def _figure_tables(compared: Comparison, width: int, *, coloured: bool) -> list[str]:
    """One table where it fits, else without the differences, else the first run beside some others."""
    numbers = list(range(1, len(compared.columns)))
    for detailed in (True, False):
        rows = _table_rows(compared, [0, *numbers], detailed=detailed)
        if _fits_width(rows, width):
            return [_table_text(rows, coloured=coloured)]
    for count in range(len(numbers) - 1, 0, -1):
        chunks = [numbers[at : at + count] for at in range(0, len(numbers), count)]
        tables = [_table_rows(compared, [0, *chunk], detailed=False) for chunk in chunks]
        if all(_fits_width(rows, width) for rows in tables):
            break
    return [_table_text(rows, coloured=coloured) for rows in tables]


def _table_rows(compared: Comparison, columns: Sequence[int], *, detailed: bool) -> list[list[Text]]:
    header: list[Text] = [("", "")]
    for number in columns:
        header.append((letter(number), ""))
        if number and detailed:
            header.append((f"to {letter(0)}", ""))
    cell_rows = [header]
    for title, rows in text.grouped(compared):
        cell_rows.append([(title, "")] + [("", "")] * (len(header) - 1))
        for row in rows:
            cell_rows.append(_figure_cells(f"  {row.label}", row, columns, detailed=detailed))
            if row.name == "step_time":
                cell_rows.append(_noise_cells(row, columns, detailed=detailed))
    return cell_rows


def _figure_cells(label: str, row: Row, columns: Sequence[int], *, detailed: bool) -> list[Text]:
    cells: list[Text] = [(label, "")]
    for number in columns:
        cell = row.cells[number]
        mark = "*" if cell.marked else "?" if cell.doubtful else " "
        colour = (_GOOD if cell.better else _BAD) if cell.marked else ""
        value = text.format_figure(cell.value, row.unit)
        if not number:
            cells.append((value, ""))
        elif detailed:
            cells += [(value, ""), (text.format_change(row, number) + mark, colour)]
        else:
            cells.append((value + mark, colour))
    return cells


def _noise_cells(row: Row, columns: Sequence[int], *, detailed: bool) -> list[Text]:
    cells: list[Text] = [("    noise (99 %)", "")]
    for number in columns:
        cell = row.cells[number]
        share = human_share(cell.half_width, cell.value)
        # The blank stands for the mark of other rows: without it the figures do not align
        cells.append((share if detailed or not number else f"{share} ", ""))
        if number and detailed:
            cells.append(("", ""))
    return cells


def _fits_width(rows: Sequence[Sequence[Text]], width: int) -> bool:
    return max(map(len, _table_text(rows, coloured=False).split("\n"))) <= width


def _table_text(rows: Sequence[Sequence[Text]], *, coloured: bool) -> str:
    """Like :func:`zeromon.readout.report.aligned_table`, with colours."""
    widths = [max(len(row[i][0]) for row in rows) for i in range(len(rows[0]))]
    text_rows = []
    for row in rows:
        cells = [
            (cell.ljust(width) if i == 0 else cell.rjust(width), colour)
            for i, ((cell, colour), width) in enumerate(zip(row, widths, strict=True))
        ]
        painted = [f"{colour}{cell}{_PLAIN}" if coloured and colour else cell for cell, colour in cells]
        text_rows.append("  " + "  ".join(painted).rstrip())
    return "\n".join(text_rows)


def _unknown_figures(compared: Comparison) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    count = len(compared.columns)
    for row in compared.rows:
        if "." in row.name and not text.has_content(row):
            continue
        unknown: dict[str, list[int]] = {}
        for number, cell in enumerate(row.cells):
            if cell.value is None:
                unknown.setdefault(cell.why, []).append(number)
        for reason, numbers in unknown.items():
            runs = "" if len(numbers) == count else f" of {', '.join(map(letter, numbers))}"
            reasons.setdefault((runs, reason), []).append(row.label)
    return [f"{', '.join(labels)}{runs}: {reason}" for (runs, reason), labels in reasons.items()]
