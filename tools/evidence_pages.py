"""Figures of docs/evidence: JSON that benches and tests write, and tables that pages show of it.

``docs/evidence/data/SUBJECT.json`` has entries by name. An entry has the `tool` that measures it, its
`date`, `commit` and `machine`, and a table as `head` and `rows`. `shown` names the columns that the page
has, `shown_rows` its rows by their first cell, `view` a function of :data:`VIEWS` that summarizes rows,
and `omitted` says why no page has the table. A page has ``<!-- begin: SUBJECT.NAME -->`` where the
table goes; NAME may be a pattern of several entries. ``python docs/generate.py`` writes the tables.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import compress, groupby
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
END = "<!-- end -->"
BLOCK = re.compile(rf"(<!-- begin: ([\w-]+)\.([\w.*-]+) -->\n).*?({END})", re.DOTALL)
ALWAYS_KEPT = ("area", "tried", "result", "omitted")
"""Fields about an entry that stay when a tool publishes its table again."""

Entry = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]


# ---- entries --------------------------------------------------------------------------------------


def entry_faults(entry: Mapping[str, Any]) -> list[str]:
    """What an entry lacks: date, commit, machine, a tool that exists, rows as long as their head."""
    patterns = {"date": r"20\d\d-\d\d-\d\d", "commit": r"[0-9a-f]{7,40}", "machine": r".*\w.*"}
    faults = [
        f"{field}: {entry.get(field)!r}"
        for field, pattern in patterns.items()
        if not re.fullmatch(pattern, str(entry.get(field, "")))
    ]
    if not entry.get("tool") or not (ROOT / entry["tool"]).exists():
        faults.append(f"tool: {entry.get('tool')!r}")
    head, rows = entry.get("head", []), entry.get("rows", [])
    if not head or not rows or any(len(row) != len(head) for row in rows):
        faults.append("rows: none, or not as long as the head")
    faults += [f"shown: {name!r}" for name in entry.get("shown", []) if name not in head]
    first = [row[0] for row in rows]
    faults += [f"shown_rows: {cell!r}" for cell in entry.get("shown_rows", []) if cell not in first]
    return faults


def read_entries(subject: str, folder: Path = EVIDENCE) -> dict[str, Entry]:
    """Name -> entry of one file; none where there is no file."""
    path = folder / "data" / f"{subject}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def format_entries(entries: Mapping[str, Entry]) -> str:
    """The entries as JSON with one line per row, so that a diff shows rows."""
    parts = []
    for name, entry in entries.items():
        fields = [
            f"  {json.dumps(field)}: {json.dumps(value, ensure_ascii=False)},"
            for field, value in entry.items()
            if field != "rows"
        ]
        rows = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in entry["rows"])
        parts.append("\n".join([f" {json.dumps(name)}: {{", *fields, f'  "rows": [\n{rows}\n  ]\n }}']))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def publish(subject: str, entries: Mapping[str, Entry], folder: Path = EVIDENCE) -> None:
    """Stores the *entries*, which replace those of the same name, and writes the pages."""
    for name, entry in entries.items():
        if faults := entry_faults(entry):
            raise SystemExit(f"{subject}.{name} is not published: {'; '.join(faults)}")
    stored = read_entries(subject, folder)
    stored |= {name: keep_layout(stored.get(name, {}), entry) for name, entry in entries.items()}
    (folder / "data" / f"{subject}.json").write_text(format_entries(stored))
    write_pages(folder)


def keep_layout(former: Entry, entry: Entry) -> Entry:
    """The *entry* with the layout of the *former* one, as far as its columns and rows still exist."""
    kept = {field: former[field] for field in ALWAYS_KEPT if field in former}
    if former.get("head") == entry["head"]:
        kept |= {field: former[field] for field in ("view", "shown") if field in former}
        cells = {row[0] for row in entry["rows"]}
        if shown := [cell for cell in former.get("shown_rows", []) if cell in cells]:
            kept["shown_rows"] = shown
    return {**kept, **entry}


def commit_here() -> str:
    """The commit of the tree; with ``-dirty`` where it has changes, which :func:`publish` refuses.

    "" without git, as on a machine that has only the files.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def today() -> str:
    """The date in UTC, as YYYY-MM-DD."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def measured_here(tool: str, **fields: Any) -> Entry:
    """An entry of today, this commit and this machine, with *fields*."""
    where = {"date": today(), "commit": commit_here(), "machine": machine_here()}
    return {"tool": tool} | where | fields


def machine_here() -> str:
    """Cores, processor, Python and torch of this machine."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if "model name" in line]
    processor = models[0].partition(":")[2].strip() if models else platform.machine()
    versions = [f"Python {platform.python_version()}"]
    versions += [f"torch {d.version}" for d in metadata.distributions() if d.name == "torch"]
    return ", ".join([f"{os.cpu_count()} cores of {processor}", *versions])


# ---- tables ---------------------------------------------------------------------------------------


def _signed(value: float) -> str:
    """``+0.4``, and ``0.0`` without a sign."""
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"


def _largest(values: Sequence[float | None], unit: str = "") -> str:
    """The value that is furthest from 0."""
    known = [value for value in values if value is not None]
    return f"{_signed(max(known, key=abs))}{unit}" if known else "n/a"


def outside(figures: Sequence[float | None] | None) -> float | None:
    """Distance of zeromon's figure from the device's range, in points; None where one is n/a."""
    if figures is None or figures[0] is None:
        return None
    shown, low, high = figures
    if low is None or high is None:
        return None
    return max(low - shown, shown - high, 0.0)


def timeline_table(entries: Sequence[Entry]) -> Table:
    """One row per strategy and its variants: the largest deviation from the timeline of the device."""
    phases = ("forward", "backward", "optimizer", "other")
    by_strategy: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        for row in entry["rows"]:
            by_strategy[row[0].partition(", ")[0]].append(dict(zip(entry["head"], row, strict=True)))
    rows = []
    for strategy, runs in by_strategy.items():
        within = sum(not run["off target"] for run in runs)
        step = _largest([run["step"] for run in runs], " %")
        known = [(run[name], name) for run in runs for name in phases if run[name] is not None]
        points, phase = max(known, key=lambda pair: abs(pair[0]), default=(0.0, "n/a"))
        ranges = [
            _largest([outside(run[name]) for run in runs]).lstrip("+") for name in ("exposed", "goodput")
        ]
        busbw = _largest([run["busbw"] for run in runs], " %")
        spans = step, f"{_signed(points)} {phase}" if known else "n/a"
        rows.append([strategy, f"{within} of {len(runs)}", *spans, *ranges, busbw])
    head = ("strategy", "within targets", "step", "phase", "exposed", "goodput", "busbw")
    known = [any(row[at] != "n/a" for row in rows) for at in range(len(head))]
    return list(compress(head, known)), [list(compress(row, known)) for row in rows]


def gpu_table(entries: Sequence[Entry]) -> Table:
    """One line per row of the suite: its checks, and the first of those that failed."""
    suite_rows: list[tuple[str, str, str]] = []
    checks: defaultdict[str, list[str]] = defaultdict(list)
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for entry in entries:
        for number, title, check, measured, expected, verdict in entry["rows"]:
            if number:
                suite_rows.append((number, title, verdict))
            elif verdict in ("pass", "FAIL"):
                checks[suite_rows[-1][0]].append(check)
                if verdict == "FAIL":
                    failed[suite_rows[-1][0]].append(f"{check}: {measured}, expected {expected}")
    lines = []
    for number, title, verdict in suite_rows:
        count, failures = len(checks[number]), failed[number]
        more = f"; {len(failures) - 1} more" if len(failures) > 1 else ""
        first = f": {failures[0]}{more}" if failures else ""
        lines.append([number, title, f"{count - len(failures)} of {count}", f"{verdict}{first}"])
    return ("#", "row", "checks passed", "verdict"), lines


def describe_setting(options: str) -> str:
    """The options of ``zeromon plan`` in short: ``ZeRO-3, 8 a100, 1 x 4096, checkpointing``."""
    words, given = shlex.split(options), {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            given[word[2:]] = "" if following.startswith("--") else following
    framework = given.get("framework", "").upper()
    parts = [framework or f"ZeRO-{given.get('stage', 0)}"]
    parts[0] += ", optimizer on the host" if "offload-optimizer" in given else ""
    parts.append(f"{given['devices']} {given['gpu']}")
    parts.append(f"{given['micro-batch']} x {given['length']}")
    parts += [name for name in ("checkpointing", "fused-loss") if name in given]
    if "lora-rank" in given:
        parts.append("LoRA")
    if "load-in" in given:
        parts.append("4 bits")
    if given.get("optimizer") == "sgd":
        parts.append("SGD")
    return ", ".join(parts)


def memory_table(entries: Sequence[Entry]) -> Table:
    """The published runs with their settings in short."""
    rows = [
        [model, describe_setting(options.strip("`")), reported, planned, preflight, source]
        for entry in entries
        for model, options, reported, planned, preflight, source in entry["rows"]
    ]
    return ("model", "setting", *entries[0]["head"][2:]), rows


def memory_outcomes_table(entries: Sequence[Entry]) -> Table:
    """Runs that fitted or not: how often each prediction agrees; a run without a preflight has n/a."""
    rows = [row for entry in entries for row in entry["rows"]]
    lines = []
    for outcome in ("runs", "OOM"):
        chosen = [row for row in rows if row[2] == outcome]
        planned = sum(row[3].endswith(", no") is (outcome == "OOM") for row in chosen)
        tried = [row[4] for row in chosen if not row[4].startswith("n/a")]
        agreeing = sum((verdict == "OOM") is (outcome == "OOM") for verdict in tried)
        sources = len({row[5] for row in chosen})
        cells = f"{planned} of {len(chosen)}", f"{agreeing} of {len(tried)}", str(sources)
        lines.append([outcome, *cells])
    return ("reported", "`plan` agrees", "`preflight` agrees", "sources"), lines


def attacks_table(entries: Sequence[Entry]) -> Table:
    """One line per area: attacks, the tests that try them again, and those with a weak result."""
    lines = []
    for entry in entries:
        tests = {test for row in entry["rows"] for test in re.findall(r"`[^`]*::[^`]*`", row[3])}
        counts = str(len(entry["rows"])), str(len(tests))
        lines.append([entry["area"], entry["tried"], entry["result"], *counts])
        weak = [row for row in entry["rows"] if row[2].startswith("weak")]
        lines += [["", row[1], row[2], "", ""] for row in weak]
    return ("area", "tried", "result", "attacks", "tests"), lines


def strategies_table(entries: Sequence[Entry]) -> Table:
    """Results with their numbers of ranks; strategies alike share a row, versions alike a column."""
    cells: defaultdict[str, defaultdict[str, dict[str, list[str]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for strategy, torch, ranks, result in (row for entry in entries for row in entry["rows"]):
        cells[torch.removesuffix(".0")][strategy].setdefault(result, []).append(ranks)
    strategies = list(dict.fromkeys(row[0] for entry in entries for row in entry["rows"]))
    versions: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for version, results in cells.items():
        column = ["; ".join(f"{result}: {', '.join(ranks)}" for result, ranks in results[name].items())
                  or "not run" for name in strategies]  # fmt: skip
        versions[tuple(column)].append(version)
    head = ("strategy", *(f"ranks, torch {', '.join(alike)}" for alike in versions.values()))
    rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for strategy, *results in zip(strategies, *versions, strict=True):
        rows[tuple(results)].append(strategy)
    return head, [["; ".join(names), *results] for results, names in rows.items()]


def published_steps_table(entries: Sequence[Entry]) -> Table:
    """Errors of predicted steps per source and device, and how many figures lie in the interval."""
    runs = [dict(zip(entry["head"], row, strict=True)) for entry in entries for row in entry["rows"]]
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["source"], run["devices"].partition(" ")[2]].append(run)
    lines = []
    for (source, device), members in [*groups.items(), (("all", ""), runs)]:
        errors = [run["error, %"] for run in members]
        again = [abs(run["by the first, %"]) for run in members if run["by the first, %"] is not None]
        inside = sum(run["from, s"] <= run["published, s"] <= run["to, s"] for run in members)
        ends = f"{min(errors):+.0f} to {max(errors):+.0f} %"
        by_first = f"{median(again):.0f} %" if again else "n/a (one row)"
        typical = f"{median(map(abs, errors)):.0f} %"
        lines.append([source, device, ends, typical, by_first, f"{inside} of {len(members)}"])
    head = ("source", "device", "error", "median", "with the first's share", "in the interval")
    return head, lines


def whatif_table(entries: Sequence[Entry]) -> Table:
    """Errors of predicted changes per strategy that they start from."""
    groups: defaultdict[str, list[tuple[float, Sequence[str]]]] = defaultdict(list)
    for row in (row for entry in entries for row in entry["rows"]):
        for group in (row[0].partition(",")[0], "all"):
            groups[group].append((float(row[5].rstrip("%")), row))
    lines = []
    for group in sorted(groups, key=lambda name: name == "all"):
        errors = groups[group]
        largest, row = max(errors, key=lambda pair: abs(pair[0]))
        typical = median(abs(error) for error, _ in errors)
        within = sum(abs(float(row[6].rstrip("%"))) <= 5 for _, row in errors)
        place = f"{largest:+.1f} %, `{row[1]}`"
        lines.append([group, str(len(errors)), f"{typical:.1f} %", place, f"{within} of {len(errors)}"])
    return ("from", "changes", "median error", "largest error", "memory within 5 %"), lines


def monitor_errors_table(entries: Sequence[Entry]) -> Table:
    """Question by monitor: the largest error of its answers, and how many of the cases have none."""
    errors: defaultdict[str, defaultdict[str, list[float | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case, question, monitor, _, error in (row for entry in entries for row in entry["rows"]):
        if case.startswith(("healthy-", "poor-")):
            errors[question][monitor].append(error)

    def cell(given: Sequence[float | None]) -> str:
        known = [abs(error) for error in given if error is not None]
        if not known:
            return "n/a"
        missing = len(given) - len(known)
        return f"{max(known):.1%}" + (f", n/a in {missing} of {len(given)}" if missing else "")

    names = dict.fromkeys(name for row in errors.values() for name in row)
    monitors = [name for name in names if any(cell(row[name]) != "n/a" for row in errors.values())]
    rows = [[question, *(cell(row[name]) for name in monitors)] for question, row in errors.items()]
    return ("figure", *monitors), rows


def monitor_verdicts_table(entries: Sequence[Entry]) -> Table:
    """Case by monitor that concludes anything; the cases of one state together."""
    head = entries[0]["head"]
    groups: defaultdict[str, list[Sequence[str]]] = defaultdict(list)
    for row in (row for entry in entries for row in entry["rows"]):
        state, _, _ = row[0].partition("-")
        groups[f"{state}-*" if state in ("healthy", "poor") else row[0]].append(row)

    def cell(cells: Sequence[str]) -> str:
        if len(cells) == 1:
            return cells[0]
        tried = [one for one in cells if one != "-" and not one.startswith("n/a")]
        if not tried:
            return "-" if "-" in cells else "n/a"
        right = sum(one.lstrip("(").startswith("right") for one in tried)
        words = f"right in {right} of {len(tried)}"
        return f"({words})" if any(one.startswith("(") for one in tried) else words

    rows = [[name, *(cell([row[at] for row in group]) for at in range(1, len(head)))]
            for name, group in groups.items()]  # fmt: skip
    at = [0, *(n for n in range(1, len(head)) if any(row[n] not in ("-", "n/a") for row in rows))]
    return [head[n] for n in at], [[row[n] for n in at] for row in rows]


def plain_table(entries: Sequence[Entry]) -> Table:
    """The shown columns of the shown rows."""
    shown = entries[0].get("shown", entries[0]["head"])
    at = [entries[0]["head"].index(name) for name in shown]
    return shown, [
        [row[number] for number in at]
        for entry in entries
        for row in entry["rows"]
        if row[0] in entry.get("shown_rows", [row[0]])
    ]


def first_clause_table(entries: Sequence[Entry]) -> Table:
    """The shown columns; a cell of more than a dozen words ends with its first clause."""

    def shorten(cell: str) -> str:
        clause = cell.partition("; ")[0]
        return clause if len(cell.split()) > 12 and len(clause.split()) > 4 else cell

    head, rows = plain_table(entries)
    return head, [[shorten(cell) for cell in row] for row in rows]


VIEWS: Mapping[str, Callable[[Sequence[Entry]], Table]] = {
    "timeline": timeline_table, "gpu": gpu_table, "memory": memory_table,
    "memory-outcomes": memory_outcomes_table, "attacks": attacks_table,
    "first-clause": first_clause_table, "strategies": strategies_table,
    "published-steps": published_steps_table, "whatif": whatif_table,
    "monitor-errors": monitor_errors_table, "monitor-verdicts": monitor_verdicts_table,
}  # fmt: skip


def origin(entries: Sequence[Entry]) -> str:
    """Date, commit and machine of the entries, each once."""
    machines: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for entry in entries:
        machines[entry["date"], entry["commit"][:8]][entry["machine"]] = None
    parts = [f"{date}, {commit}: {'; '.join(names)}" for (date, commit), names in machines.items()]
    return ". ".join(parts) + "."


def markdown_table(table: Table) -> str:
    """A table of Markdown."""
    head, rows = table
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def render_block(subject: str, pattern: str, folder: Path = EVIDENCE) -> str:
    """The table of the entries whose name matches *pattern*, and where they are from."""
    entries = [
        entry
        for name, entry in read_entries(subject, folder).items()
        if fnmatchcase(name, pattern) and "omitted" not in entry
    ]
    if not entries:
        raise SystemExit(f"no entry of docs/evidence/data/{subject}.json is named {pattern}")
    parts = []
    for _, group in groupby(entries, lambda entry: (entry.get("view"), entry["head"])):
        like = list(group)
        table = (VIEWS[like[0]["view"]] if "view" in like[0] else plain_table)(like)
        parts.append(f"{markdown_table(table)}\n\n{origin(like)}\n")
    return "\n".join(parts)


def render_page(text: str, folder: Path = EVIDENCE) -> str:
    """The page with the present tables."""
    return BLOCK.sub(lambda at: f"{at[1]}{render_block(at[2], at[3], folder)}{at[4]}", text)


def write_pages(folder: Path = EVIDENCE) -> None:
    """Writes the tables of all pages of *folder*."""
    for page in sorted(folder.glob("*.md")):
        page.write_text(render_page(page.read_text(), folder))
