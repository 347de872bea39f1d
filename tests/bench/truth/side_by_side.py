"""Does a monitor lie, and what does it cost? `python tests/bench/truth/side_by_side.py [CASE ...]`.

Jobs with one known fault each (cases.json) under each monitor (monitors/): the errors of what each
says, what it names wrongly, how soon it names a fault, and what a step, a start and the memory cost, in
whole runs in turns (--pairs). What a monitor does not answer is n/a, which is not wrong. ``--device
virtual`` runs on the virtual CUDA device, which `make vgpu` installs. The peers are installed into the
folder .peers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / name) for name in ("tests/bench", "tests", "tools", "agents", "")]

from evidence_pages import Entry, markdown_table, measured_here, publish, read_entries  # noqa: E402
from monitor import Monitor, Shown  # noqa: E402
from records import keep  # noqa: E402
from truths import Truth  # noqa: E402
from watched import (  # noqa: E402
    CASES,
    QUESTIONS,
    Told,
    all_monitors,
    decode_told,
    encode_told,
    peers,
    plain,
    result_key,
    told,
    virtual_peers,
)

from zeromon.base.units import human_bytes, human_ratio, human_seconds  # noqa: E402

TOOL = "tests/bench/truth/side_by_side.py"
HUMAN = {"s": human_seconds, "bytes": human_bytes, "ratio": human_ratio}
RESULTS = ROOT / "build" / "monitors.jsonl"
VIRTUAL = "virtual H100, torch 2.13.0"
COST_CASE = {"gloo": "plain", "virtual": "launch-ddp"}


def applies(monitor: Monitor, kind: str, case: str) -> bool:
    """Whether the monitor has something to answer in a case."""
    return any(fnmatchcase(case, pattern) for pattern in monitor.answers[kind])


# ---- scores ---------------------------------------------------------------------------------------


def error(answer: Any, truth: Any) -> float | None:
    """The error of a number: relative, or in shares where the truth says so; None for words."""
    answer = plain(answer)
    if isinstance(truth, (int, float)) and not isinstance(truth, bool):
        truth = Truth(((truth, truth),))
    is_number = isinstance(answer, (int, float))
    return truth.error(answer) if isinstance(truth, Truth) and is_number else None


def cell(answer: Any, truth: Any, unit: str) -> str:
    """An answer beside the truth: right, wrong, or by how much; what is only shown is in brackets."""
    if isinstance(answer, Shown):
        return f"({cell(answer.value, truth, unit)})"
    if answer is None:
        return "n/a"
    if unit in HUMAN:
        off = error(answer, truth)
        return HUMAN[unit](answer) if off is None else f"{HUMAN[unit](answer)}, {off:+.1%}"
    return "right" if answer == truth else f"wrong: {answer}"


def entry(head: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any) -> Entry:
    """A table for docs/evidence/peers.md."""
    return measured_here(TOOL, head=list(head), rows=[list(row) for row in rows], **more)


def answered(kind: str, cases: Sequence[str], only: Sequence[str]) -> dict[str, dict[str, Told]]:
    """Runs each case under each monitor, unless its result is known; prints a table per case."""
    answers: dict[str, dict[str, Told]] = {}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = dict(map(json.loads, lines))
    for number, case in enumerate(cases, 1):
        chosen = [monitor for monitor in all_monitors() if applies(monitor, kind, case)]
        answers[case] = {}
        for monitor in chosen:
            key = result_key(monitor, kind, case)
            if key in known:
                answers[case][monitor.name] = decode_told(known[key])
                continue
            if only and monitor.name not in only:
                continue
            began = time.monotonic()
            try:
                one = told(monitor, kind, case)
            except Exception:
                traceback.print_exc()  # the others go on; this one has no result
                continue
            answers[case][monitor.name] = one
            with RESULTS.open("a") as file:
                file.write(json.dumps([key, encode_told(one)]) + "\n")
            spent = time.monotonic() - began
            print(f"{number} of {len(cases)}: {case}, {monitor.name}, {spent:.0f} s", file=sys.stderr)
        print(f"\n### {case}\n")
        print(markdown_table((["question", *answers[case]], case_rows(kind, case, answers[case]))))
        for name, one in answers[case].items():
            if sentence := one.answers.get("sentence"):
                print(f"{name}: {sentence}")
        sys.stdout.flush()
        keep_records(kind, case, answers[case])
    return answers


def case_rows(kind: str, case: str, each: Mapping[str, Told]) -> list[list[str]]:
    """One row per question of a case."""
    return [
        [name, *(cell(t.answers.get(name), t.truth.get(name), QUESTIONS[name]) for t in each.values())]
        for name in CASES[kind][case]["questions"]
    ]


def keep_records(kind: str, case: str, each: Mapping[str, Told]) -> None:
    """The errors as records of `run.py`."""
    for name, one in each.items():
        for question in CASES[kind][case]["questions"]:
            off = error(one.answers.get(question), one.truth.get(question))
            keep(f"{name}: {case}, {question}", off, "ratio", "zero")


def gloo_entries(answers: Mapping[str, Mapping[str, Told]]) -> dict[str, Entry]:
    """One table per case; those of a late rank are one table of the page."""
    entries = {}
    for case, each in answers.items():
        rows = case_rows("gloo", case, each)
        if case in ("input", "slow"):
            rows = [[f"{case}: {row[0]}", *row[1:]] for row in rows]
        name = f"late-{case}" if case in ("input", "slow") else case
        entries[name] = entry(["question", *each], rows)
    return entries


def virtual_entries(
    answers: Mapping[str, Mapping[str, Told]], former: Mapping[str, Entry]
) -> dict[str, Entry]:
    """All figures with their errors, of which the page shows the largest; and all verdicts.

    What did not run keeps the answers of the *former* tables, which says its commit.
    """
    figures, verdicts, kept = [], [], former.get("virtual-verdicts", {"head": [], "rows": []})
    asks = {monitor.name: monitor for monitor in all_monitors()}
    names = list(asks)
    before = {
        row[0]: {name: cell for name, cell in zip(kept["head"], row, strict=True) if cell != "-"}
        for row in kept["rows"]
    }
    for case in CASES["virtual"]:
        each = answers.get(case, {})
        for question in CASES["virtual"][case]["questions"]:
            unit = QUESTIONS[question]
            for name, one in each.items():
                answer, truth = one.answers.get(question), one.truth.get(question)
                if unit and question != "named after":
                    off = error(answer, truth)
                    figures.append([case, question, name, cell(answer, truth, unit),
                                    None if off is None else round(off, 4)])  # fmt: skip
        figures += [row for row in former.get("virtual-figures", {"rows": []})["rows"]
                    if row[0] == case and row[2] not in each]  # fmt: skip
        cells = before.get(case, {}) | {name: verdict_cell(case, one) for name, one in each.items()}
        unasked = {name: "-" if applies(one, "virtual", case) else "n/a" for name, one in asks.items()}
        verdicts.append([case, *((unasked | cells)[name] for name in asks)])
    figures.sort(key=lambda row: names.index(row[2]))  # zeromon first
    head = ["case", "question", "monitor", "answer", "error"]
    asked = [name for at, name in enumerate(names, 1) if {row[at] for row in verdicts} - {"-", "n/a"}]
    at = [0, *(1 + names.index(name) for name in asked)]
    rows = [[row[number] for number in at] for row in verdicts if set(row[1:]) != {"-"}]
    device = f"{VIRTUAL}; the others at {kept['commit']}" if former else VIRTUAL
    return {
        "virtual-figures": entry(
            head, figures, view="monitor-errors", machine=f"{device}; {', '.join(versions('virtual'))}"
        ),
        "virtual-verdicts": entry(["case", *asked], rows, view="monitor-verdicts", machine=device),
    }


def verdict_cell(case: str, one: Told) -> str:
    """The cause and the rank that a monitor names, and after how long it did so."""
    true, answers = CASES["virtual"][case]["true"], one.answers
    asked = [key for key in ("cause", "rank", "late in", "stuck in", "grow in", "died at")
             if key in CASES["virtual"][case]["questions"] and key in true]  # fmt: skip
    if answers.get("cause") is None:
        return answers.get("n/a", "n/a")
    different = [key for key in asked if plain(answers.get(key)) != true[key]]
    wrong = [str(plain(answers.get(key))) for key in different if key in ("cause", "rank")]
    missing = [key for key in different if key not in ("cause", "rank")]
    words = f"wrong: {', '.join(wrong)}" if wrong else "right"
    if not wrong and missing:
        words += f", not {' and '.join(missing)}"
    if "named after" in answers and not wrong:
        words += f", {human_seconds(plain(answers['named after']))}"
    return f"({words})" if isinstance(answers["cause"], Shown) else words


# ---- costs ----------------------------------------------------------------------------------------


def costs(kind: str, pairs: int, only: Sequence[str]) -> Entry:
    """Whole runs with each monitor and without, in turns: means with 95 % intervals.

    DeepSpeed's own monitors are in its engine, which the job of the costs has not.
    """
    case = COST_CASE[kind]
    watching = [m for m in all_monitors() if m.package != "deepspeed" and m.answers[kind]]
    watching = [m for m in watching if not only or m.name in only]
    runs: defaultdict[str, list[Told]] = defaultdict(list)
    for turn in range(pairs):
        order = [None, *watching]
        for monitor in order if turn % 2 else reversed(order):
            one = told(monitor, kind, case, measured=kind == "gloo")
            runs[monitor.name if monitor else ""].append(one)
        print(f"turn {turn + 1} of {pairs}", file=sys.stderr, flush=True)
    rows = []
    for monitor in watching:
        both = list(zip(runs[monitor.name], runs[""], strict=True))
        both = [pair for pair in both if not any(math.isnan(one.step) for one in pair)]
        if not both:
            rows.append([monitor.name, "n/a (no run ended)", "n/a", "n/a", str(monitor.lines)])
            continue
        step = mean([with_it.step / without.step - 1 for with_it, without in both])
        start = mean([with_it.started - without.started for with_it, without in both])
        rss = statistics.fmean(with_it.rss - without.rss for with_it, without in both)
        keep(f"{monitor.name}: a step", step[0], "ratio", noise=step[1])
        keep(f"{monitor.name}: start", start[0], "s", noise=start[1])
        rows.append([
            monitor.name, f"{step[0]:+.1%} ± {step[1]:.1%}", f"{start[0]:+.2f} ± {start[1]:.2f} s",
            human_bytes(rss), str(monitor.lines),
        ])  # fmt: skip
    head = ["monitor", "step", "start", "memory of all processes", "lines in the script"]
    print(f"\n### cost, {pairs} runs each, in turns\n\n{markdown_table((head, rows))}", flush=True)
    if kind == "virtual":
        shown = ["monitor", "step", "lines in the script"]  # ranks are forked: no start, no imports
        return entry(head, rows, shown=shown, machine=VIRTUAL)
    return entry(
        head, rows, shown=["monitor", "start", "memory of all processes", "lines in the script"]
    )


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by the normal distribution."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))


# ---- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Prints the tables; stores them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="names or patterns (default: all); a name without a match, with --pairs: only the costs",
    )
    parser.add_argument("--device", choices=("gloo", "virtual"), default="gloo")
    parser.add_argument(
        "--pairs", type=int, default=0, metavar="N", help="runs for the cost (default: none)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="store the tables for docs/evidence/peers.md"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="MONITOR",
        help="these alone; with --publish the others keep their answers",
    )
    parser.add_argument("--resume", action="store_true", help=f"go on with {RESULTS.name} in build/")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if not options.resume:
        RESULTS.unlink(missing_ok=True)
    kind = options.device
    patterns = options.cases or ["*"]
    cases = [name for name in CASES[kind] if any(fnmatchcase(name, one) for one in patterns)]
    print(", ".join(versions(kind)), flush=True)
    answers = answered(kind, cases, options.only)
    former = read_entries("peers") if options.only else {}
    entries = virtual_entries(answers, former) if kind == "virtual" else gloo_entries(answers)
    if not cases:  # the costs alone
        entries = {}
    if options.pairs:
        entries["virtual-costs" if kind == "virtual" else "costs"] = costs(
            kind, options.pairs, options.only
        )
    if options.publish:
        publish("peers", entries)


def versions(kind: str) -> list[str]:
    """The monitors with their versions."""
    folder = virtual_peers() if kind == "virtual" else peers()
    monitors = [monitor for monitor in all_monitors() if monitor.package]
    program = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    words = [str(folder / "python"), "-c", program, *(monitor.package for monitor in monitors)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return [f"{one.name} {version}" for one, version in zip(monitors, printed, strict=True)]


if __name__ == "__main__":
    main()
