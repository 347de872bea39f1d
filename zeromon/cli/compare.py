"""Compares runs side by side: significant differences, and which run to take.

RUN is a run id or its beginning, or a file written by zeromon report --json. The others are compared
with the first. Separate repeats of one program by commas: the noise is then the spread of the repeats.

  zeromon compare ddp zero2 zero3
  zeromon compare base.1,base.2,base.3 new.1,new.2,new.3
  zeromon compare main.json new --fail-on "step_time>+10%" --fail-on "peak_memory>+5%"

A * marks a difference that is larger than the noise, a ? one that a lack of CPUs or a neighbour on the
machine may explain. A threshold is METRIC, > or <, and an amount: +5%
or -5% of the first run's figure; +200MiB, +10ms, +5pp as a difference; 60GiB or 20% of the figure
itself. It is exceeded when the figure is beyond it by more than the noise; the same runs always give
the same answer. A threshold that cannot be judged does not pass: the figure is unknown, the noise is
larger than the limit, or ranks lacked CPUs; the message gives the repeats that would do. A run that died
exceeds every threshold.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence

from zeromon.cli.options import flag, several
from zeromon.cli.report import recent, snapshot_of
from zeromon.cli.terminal import is_coloured, show_json, working
from zeromon.compare.comparison import Column, Comparison, Row, compare, letter
from zeromon.compare.figures import RunFigures, figures_of
from zeromon.compare.text import (
    NOT_COMPARABLE,
    course_title,
    environment_lines,
    format_change,
    format_figure,
    grouped,
    has_content,
    steps_text,
)
from zeromon.compare.thresholds import NAMES, Verdict, judge, parse
from zeromon.errors import CompareError
from zeromon.report.table import table
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.storage.step_history import by_step, steps
from zeromon.tui.draw.chart import Curve, Plot, chart, legend
from zeromon.tui.line import plain
from zeromon.units import byte_scale, human_count, human_share, printable

_GOOD, _BAD, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
_LONGEST = 24
_CHART_COLUMNS, _CHART_ROWS = 78, 9
_GAPS = (0, 4, 1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon compare RUN RUN [RUN ...] [--fail-on LIMIT] [--json]``"""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, or repeats of one: a,b,c")
    several(
        parser, "--fail-on", "LIMIT",
        "exit code 1 when the threshold is exceeded, 2 when it cannot be judged; may be repeated",
    )  # fmt: skip
    flag(parser, "--json", "print JSON")
    names = textwrap.fill(", ".join(NAMES), 76, initial_indent="  ", subsequent_indent="  ")
    parser.epilog = (
        f"metrics for thresholds:\n{names},\n  and PLACE.ROLE, like device.optimizer_state\n\n"
        "exit code: 0 success, 1 a threshold is exceeded, 2 one cannot be judged, or wrong usage"
    )


def call(options: argparse.Namespace) -> int:
    """Finds the runs, compares, prints."""
    if len(options.runs) < 2:
        raise CompareError("a comparison needs two runs", "Like: zeromon compare ddp zero2")
    limits = [parse(text) for text in options.fail_on]
    with working("reading the runs"):
        found = compare([[find(name) for name in names.split(",")] for names in options.runs])
    verdict = judge(found, limits) if limits else Verdict((), ())
    if options.json:
        broken, undecided = verdict.exceeded, verdict.undecided
        show_json({"comparison": found, "broken": broken, "undecided": undecided})
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(as_text(found, width, coloured=is_coloured(sys.stdout)))
    for sentence in (*verdict.exceeded, *verdict.undecided):
        sys.stderr.write(f"zeromon: {printable(sentence)}\n")
    return 1 if verdict.exceeded else 2 if verdict.undecided else 0


def find(name: str) -> RunFigures:
    """The run called *name*, with its history."""
    return figures(*snapshot_of(name))


def figures(snapshot: RunSnapshot, is_kept: bool) -> RunFigures:
    """The figures of *snapshot*, whose record is in the run store where *is_kept*."""
    kept = steps(Store().history(snapshot.run)) if is_kept else None
    if kept is None or kept.is_empty():
        kept = by_step(recent(snapshot).lazy()).collect()
    return figures_of(snapshot, kept.to_dict(as_series=False))


# ---- text -----------------------------------------------------------------------------------------

Text = tuple[str, str]
"""The text of a cell, and its colour ("" for none)."""


def as_text(found: Comparison, width: int, *, coloured: bool = False, drawn: bool = True) -> str:
    """The runs, the table in as many parts as *width* requires, and the recommendation.

    *drawn*: with the chart of the memory.
    """
    where = [_wrapped(line, "  ", width) for line in environment_lines(found)]
    parts = [_runs(found), "\n".join(["Environment", *where])]
    parts += _tables(found, width, coloured=coloured)
    if any(cell.marked for row in found.rows for cell in row.cells):
        parts[-1] += f"\n  * differs from {letter(0)} by more than the noise"
    if any(cell.doubtful for row in found.rows for cell in row.cells):
        parts[-1] += f"\n  ? {NOT_COMPARABLE}"
    parts += _memory(found, width) if drawn else []
    notes = _unknown(found)
    if notes:
        parts.append("Not known\n" + "\n".join(_wrapped(note, "  ", width) for note in notes))
    advice, reasons = found.advice.text, found.advice.reasons
    lines = [_wrapped(advice[0].upper() + advice[1:], "", width)]
    parts.append("\n".join([*lines, *(_wrapped(why, "  - ", width) for why in reasons)]))
    return "\n\n".join(parts) + "\n"


def _memory(found: Comparison, width: int) -> list[str]:
    """The memory of all columns in one chart, whose lines differ by their gaps; [] for less than two."""
    lines = found.memory.lines
    if sum(bool(line) for line in lines) < 2:
        return []
    top = max(nbytes for line in lines for _, nbytes in line)
    first = min(line[0][0] for line in lines if line)
    last = max(line[-1][0] for line in lines)
    divisor, unit = byte_scale(top)
    curves = tuple(
        Curve(letter(n), "", line, _GAPS[n % len(_GAPS)]) for n, line in enumerate(lines) if line
    )
    plot = Plot(curves=curves, x=(first, last), y=(0.0, 1.05 * top), unit=unit,
                axis=lambda value: f"{value / divisor:.4g}",
                foot=(f"step {human_count(first)}", human_count(last)))  # fmt: skip
    wide = min(width - 2, _CHART_COLUMNS)
    drawn = [legend(plot, wide), *chart(plot, wide, _CHART_ROWS)]
    return ["\n".join([course_title(found), *(f"  {plain(one)}".rstrip() for one in drawn)])]


def _wrapped(text: str, mark: str, width: int) -> str:
    return textwrap.fill(
        printable(text), min(width, 100), initial_indent=mark, subsequent_indent=" " * len(mark)
    )


def _runs(found: Comparison) -> str:
    rows = [
        (
            f"{letter(number)}  {_name(column)}",
            _short(column.strategy),
            _batch(column),
            steps_text(column),
            "died" if column.died else column.ended.split(" ")[0].strip(","),
        )
        for number, column in enumerate(found.columns)
    ]
    return table(("   run", "strategy", "batch", "steps timed", ""), rows)


def _name(column: Column) -> str:
    repeats = f" and {len(column.runs) - 1} more" if len(column.runs) > 1 else ""
    return _short(column.runs[0]) + repeats


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _batch(column: Column) -> str:
    """``4 x 2 x 8 = 64``: micro-batch, accumulation, ranks."""
    whole = f" = {human_count(column.effective_batch)}" if column.effective_batch else ""
    return f"{column.micro_batch or '?'} x {column.micro_steps} x {column.ranks or '?'}{whole}"


def _tables(found: Comparison, width: int, *, coloured: bool) -> list[str]:
    """One table where it fits, else without the differences, else the first run beside some others."""
    others = list(range(1, len(found.columns)))
    for detailed in (True, False):
        rows = _rows(found, [0, *others], detailed=detailed)
        if _width(rows) <= width:
            return [_laid_out(rows, coloured=coloured)]
    for most in range(len(others) - 1, 0, -1):
        chunks = [others[at : at + most] for at in range(0, len(others), most)]
        tables = [_rows(found, [0, *chunk], detailed=False) for chunk in chunks]
        if max(map(_width, tables)) <= width:
            break
    return [_laid_out(rows, coloured=coloured) for rows in tables]


def _rows(found: Comparison, columns: Sequence[int], *, detailed: bool) -> list[list[Text]]:
    header: list[Text] = [("", "")]
    for number in columns:
        header.append((letter(number), ""))
        if number and detailed:
            header.append((f"to {letter(0)}", ""))
    lines = [header]
    for title, rows in grouped(found):
        lines.append([(title, "")] + [("", "")] * (len(header) - 1))
        for row in rows:
            lines.append(_line(f"  {row.label}", row, columns, detailed=detailed))
            if row.name == "step_time":
                lines.append(_noise(row, columns, detailed=detailed))
    return lines


def _line(label: str, row: Row, columns: Sequence[int], *, detailed: bool) -> list[Text]:
    cells: list[Text] = [(label, "")]
    for number in columns:
        cell = row.cells[number]
        mark = "*" if cell.marked else "?" if cell.doubtful else " "
        colour = (_GOOD if cell.better else _BAD) if cell.marked else ""
        value = format_figure(cell.value, row.unit)
        if not number:
            cells.append((value, ""))
        elif detailed:
            cells += [(value, ""), (format_change(row, number) + mark, colour)]
        else:
            cells.append((value + mark, colour))
    return cells


def _noise(row: Row, columns: Sequence[int], *, detailed: bool) -> list[Text]:
    """The uncertainty of each figure, as a share of the figure."""
    cells: list[Text] = [("    noise (99 %)", "")]
    for number in columns:
        cell = row.cells[number]
        text = human_share(cell.half_width, cell.value)
        cells.append((text if detailed or not number else f"{text} ", ""))
        if number and detailed:
            cells.append(("", ""))
    return cells


def _width(rows: Sequence[Sequence[Text]]) -> int:
    return sum(_widths(rows)) + 2 * len(rows[0])


def _widths(rows: Sequence[Sequence[Text]]) -> list[int]:
    return [max(len(row[i][0]) for row in rows) for i in range(len(rows[0]))]


def _laid_out(rows: Sequence[Sequence[Text]], *, coloured: bool) -> str:
    """Like :func:`zeromon.report.table.table`, with colours."""
    widths = _widths(rows)
    lines = []
    for row in rows:
        cells = [
            (text.ljust(width) if i == 0 else text.rjust(width), colour)
            for i, ((text, colour), width) in enumerate(zip(row, widths, strict=True))
        ]
        plain = [
            f"{colour}{text}{_PLAIN}" if coloured and colour else text for text, colour in cells
        ]
        lines.append("  " + "  ".join(plain).rstrip())
    return "\n".join(lines)


def _unknown(found: Comparison) -> list[str]:
    """The unknown figures, by reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    count = len(found.columns)
    for row in found.rows:
        if "." in row.name and not has_content(row):
            continue
        whys: dict[str, list[int]] = {}
        for number, cell in enumerate(row.cells):
            if cell.value is None:
                whys.setdefault(cell.why, []).append(number)
        for why, numbers in whys.items():
            whose = "" if len(numbers) == count else f" of {', '.join(map(letter, numbers))}"
            reasons.setdefault((whose, why), []).append(row.label)
    return [f"{', '.join(labels)}{whose}: {why}" for (whose, why), labels in reasons.items()]
