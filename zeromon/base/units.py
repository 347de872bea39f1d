"""Numbers for people: the last function before the screen. Pure."""

import re
import textwrap
from collections.abc import Callable
from typing import Any

JOULES_A_KWH = 3.6e6


def human_bytes(nbytes: float | None) -> str:
    """``1.5 GiB``; ``n/a`` for None or a negative number."""
    if nbytes is None or nbytes < 0:
        return "n/a"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < (1024 if unit == "B" else 1023.95):  # that is 1024.0 when it is rounded
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


_BYTE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def byte_scale(peak: float) -> tuple[int, str]:
    """The unit, in bytes, in which *peak* bytes are a legible number, and its name."""
    return next(((nbytes, unit) for nbytes, unit in _BYTE_UNITS if peak >= nbytes), _BYTE_UNITS[-1])


_DIGITS = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))
_LONG_NUMBER = re.compile(rb"(?:^|[\s:\[,])-?\d{25}")


def with_usual_numbers(content: bytes) -> bytes:
    """Returns *content*, JSON; raises :class:`ValueError` for a number that is longer than any figure.

    JSON has integers of any length, and arithmetic with floats overflows on them.
    """
    # The first test is one pass in C over the whole snapshot; the expression runs only where it hits
    if b"0" * 25 in content.translate(_DIGITS) and _LONG_NUMBER.search(content):
        raise ValueError("a number has more than 24 digits")
    return content


def signed(formatter: Callable[[float], str], value: float) -> str:
    """The amount of *value* as *formatter* has it, behind its sign."""
    return f"{'-' if value < 0 else '+'}{formatter(abs(value))}"


def human_seconds(seconds: float | None) -> str:
    """``12.3 ms``, ``4.56 s``, ``3 min 20 s``."""
    if seconds is None:
        return "n/a"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds_left:02d} s"


def human_ratio(ratio: float | None) -> str:
    """``12.3 %``; ``n/a`` for None."""
    return "n/a" if ratio is None else f"{ratio * 100:.1f} %"


def human_share(amount: float | None, total: float | None) -> str:
    """``12.3 %`` of *total*; ``n/a`` where one of them is unknown or *total* is 0."""
    return human_ratio(amount / total if total and amount is not None else None)


def human_energy(joules: float) -> str:
    """``1.2 kWh``, ``3.4 kJ``, ``5.0 J``."""
    if joules >= JOULES_A_KWH / 10:
        return f"{joules / JOULES_A_KWH:,.3g} kWh"
    return f"{joules / 1e3:.3g} kJ" if joules >= 1e3 else f"{joules:.3g} J"


def human_rate(bytes_per_second: float | None) -> str:
    """Bandwidth in decimal units, as nccl-tests prints it."""
    if bytes_per_second is None:
        return "n/a"
    if bytes_per_second < 1e6:
        return f"{bytes_per_second / 1e3:.0f} kB/s"
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:.0f} MB/s"
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def printable(raw: str) -> str:
    """*raw* from a run for a terminal: control characters become ``?``."""
    return raw if raw.isprintable() else "".join(c if c.isprintable() else "?" for c in raw)


def printable_lines(raw: str) -> str:
    """*raw* of several lines for a terminal: all control characters but line feeds become ``?``."""
    return "\n".join(map(printable, raw.split("\n")))


def printable_values(value: Any) -> Any:
    """*value*, decoded JSON from a run, with every text in it :func:`printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_values(element) for key, element in value.items()}
    return [printable_values(element) for element in value] if isinstance(value, list) else value


def human_count(count: float | None) -> str:
    """``1,234``; ``n/a`` for None and for -1, which is no count."""
    return "n/a" if count is None or count == -1 else f"{count:,.0f}"


def counted(count: float, noun: str) -> str:
    """``1 rank``, ``1,234 ranks``."""
    return f"{human_count(count)} {noun}{'s' * (count != 1)}"


def human_calls(calls: float) -> str:
    """``2``, ``2.5``, ``1,234``: calls a step, which are a mean."""
    return f"{calls:.1f}".removesuffix(".0") if calls < 100 else human_count(calls)


def human_params(count: int | None) -> str:
    """``6.74 B``, ``124 M``; ``n/a`` for None."""
    if count is None:
        return "n/a"
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def formula_safe_cell(cell: str) -> str:
    """*cell* of a CSV, in a form that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[mnu]?s|[kKMGT]?i?B)(\b|\W|$))")


def wrap_report_line(report_line: str, width: int) -> list[str]:
    """*report_line* of a report in *width* columns; a row of a table stays whole."""
    gaps = list(_GAP.finditer(report_line))
    if len(report_line) <= width or len(gaps) > 1:
        return [report_line]
    below = gaps[0].end() if gaps else len(report_line) - len(report_line.lstrip()) + 2
    indent = " " * min(below, width // 2)
    return wrap_paragraph(report_line, width, "", indent)


def wrap_paragraph(paragraph: str, width: int, bullet: str, indent: str) -> list[str]:
    """*paragraph* in *width* columns behind *bullet*, then *indent*; a number keeps its unit."""
    wrapped = textwrap.wrap(
        glue_units(paragraph), width, initial_indent=bullet, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip
    return [row.replace(GLUE, " ") for row in wrapped]


GLUE = "\N{NO-BREAK SPACE}"


def glue_units(paragraph: str) -> str:
    """*paragraph* with :data:`GLUE` between each number and its unit."""
    return _BEFORE_UNIT.sub(GLUE, paragraph)
