"""Does a monitor lie, and what does it cost? `python tests/bench/truth/side_by_side.py [CASE ...]`.

One job (job.py) with one fault each time, under each tool (tools.py): the errors of what each says, what
it names wrongly, how soon it names a hang, and what a step, a start and the memory cost, in whole runs
in turns (--pairs). What a tool does not answer is n/a, which is not wrong. The peers are installed into
the folder .peers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from evidence_pages import Entry, markdown_table, measured_here, publish
from records import keep

from tools import TOOLS, Answers, Run, Shown, Tool
from zeromon.base.units import human_bytes, human_seconds

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / ".peers"
INSTALLED = ("traceml-ai==0.5.0", "probing==0.2.4", "memray==1.20.0", "tabulate==0.10.0")
CASES = {"plain": 120, "exchange": 120, "input": 120, "slow": 120, "leak": 200, "hang": 60, "death": 60}
WINDOW, FAULTY, AT_STEP, KEPT_BYTES = 20, 1, 30, 4 << 22
PATIENCE = 60.0
"""Seconds that a tool has to name a hang."""

QUESTIONS: Mapping[str, Mapping[str, str]] = {
    "plain": {
        "step": "s", "data": "s", "forward": "s", "backward": "s", "optimizer": "s",
        "parameters": "bytes", "gradients": "bytes", "optimizer state": "bytes", "late rank": "",
    },
    "exchange": {"exposed": "s", "bytes": "bytes", "calls": ""},
    "input": {"late rank": "", "late in": "", "late by": "s"},
    "slow": {"late rank": "", "late in": "", "late by": "s"},
    "leak": {"grow by": "bytes", "grow in": ""},
    "hang": {"stuck rank": "", "stuck in": "", "named after": "s"},
    "death": {"dead rank": "", "died at": ""},
}  # fmt: skip
"""Case -> what is asked, and its unit. Times and bytes are of a step of rank 0; growth is of both."""


class Told(NamedTuple):
    """What a tool answered in a case, and what is true."""

    answers: Answers
    truth: Answers
    started: float
    """Seconds from the command to the first step."""
    step: float
    """Mean seconds of a step after the first ones; NaN where the run did not end."""
    rss: int
    """Most bytes in memory of all processes of the run together, private and shared proportionally."""


def peers() -> Path:
    """The programs of the peers' environment: theirs, over the packages that are installed here."""
    folder = PEERS / "bin"
    if not (folder / "traceml").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        subprocess.run([str(folder / "pip"), "install", "--quiet", *INSTALLED], check=True)
        here = Path(metadata.distribution("torch").locate_file(""))
        (site,) = PEERS.glob("lib/python*/site-packages")
        (site / "a_packages_here.pth").write_text(f"{here}\n")  # before probing's, which imports torch
    return folder


def told(tool: Tool | None, case: str, steps: int) -> Told:
    """One run of the job under *tool*; None is no tool."""
    with tempfile.TemporaryDirectory(prefix="zeromon-truth-") as name:
        run = Run(Path(name), (case, str(steps)), peers())
        environment = os.environ | {
            "TRUTH": name, "OMP_NUM_THREADS": "1", "TRUTH_WAITS": "60" if tool else "0",
            "ZEROMON_DIR": f"{name}/rings", "ZEROMON_STORE": f"{name}/store",
            "PATH": f"{run.bin}:{os.environ['PATH']}", **(tool.environment if tool else {}),
        }  # fmt: skip
        words = (tool or TOOLS[2]).launch(run)
        began = time.time()
        with (run.folder / "output").open("w") as output:
            process = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            return _followed(tool, run, process, began)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in run.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _followed(tool: Tool | None, run: Run, process: subprocess.Popen[bytes], began: float) -> Told:
    answers: dict[str, Any] = {}
    most, looked, struck = 0, 0.0, run.folder / "struck"
    counts = [run.folder / f"{rank}.json" for rank in range(2)]
    limit = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < limit:
        if time.monotonic() > looked + 1:
            most, looked = max(most, _memory(run)), time.monotonic()
        if run.case == "hang" and struck.exists():
            answers = _until_named(tool, run, float(struck.read_text()))
            break
        if all(path.exists() for path in counts):
            time.sleep(2)  # what is a second old is on every screen
            answers |= tool.live(run) if tool else {}
            (run.folder / "seen").touch()
            break
        time.sleep(0.25)
    if run.case != "hang":
        process.wait(timeout=120)
    answers |= tool.after(run) if tool else {}
    facts = [json.loads(path.read_text()) for path in counts if path.exists()]
    if not facts:
        return Told(answers, _truth(run.case, [], run), math.nan, math.nan, most)
    ends = [mark["end"] for mark in facts[0]["marks"]]
    return Told(
        answers, _truth(run.case, facts, run), facts[0]["started"] - began,
        (ends[-1] - ends[WINDOW]) / (len(ends) - 1 - WINDOW), most,
    )  # fmt: skip


def _until_named(tool: Tool | None, run: Run, struck: float) -> dict[str, Any]:
    while tool and time.time() - struck < PATIENCE:
        found = dict(tool.live(run))
        if found.get("stuck rank") is not None:
            after = time.time() - struck
            named = Shown(after) if isinstance(found["stuck rank"], Shown) else after
            return found | {"named after": named}
        time.sleep(1)
    return {}


def _memory(run: Run) -> int:
    """Bytes of all processes of a run, the tool's own too, by their proportional set size."""
    total, mark = 0, f"TRUTH={run.folder}\0"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if mark in (folder / "environ").read_text():
                for line in (folder / "smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) << 10
    return total


def _truth(case: str, facts: Sequence[Mapping[str, Any]], run: Run) -> Answers:
    """What is true: by construction, and by the marks of rank 0 in all steps but the first ones."""
    if case == "hang":
        return {"stuck rank": FAULTY, "stuck in": "stand_still", "named after": 0.0}
    if case == "death":
        return {"dead rank": FAULTY, "died at": AT_STEP}
    if case == "leak":
        return {"grow by": 2 * KEPT_BYTES, "grow in": "keep"}
    if case in ("input", "slow"):
        within = "data" if case == "input" else "forward"
        return {"late rank": FAULTY, "late in": within, "late by": _apart(facts)}
    marks = facts[0]["marks"]
    if case == "exchange":
        last = [mark["exchange"] for mark in marks[-WINDOW:]]
        of_all = statistics.fmean(mark["exchange"] for mark in marks)
        return {
            "exposed": (statistics.fmean(last), of_all),
            "bytes": facts[0]["parameters"], "calls": facts[0]["calls"],
        }  # fmt: skip
    found: dict[str, Any] = {"late rank": "nobody"}
    for name in ("data", "forward", "backward", "optimizer"):
        times = [mark[name] for mark in marks]
        found[name] = statistics.fmean(times[-WINDOW:]), statistics.fmean(times)
    ends = [mark["end"] for mark in marks]
    found["step"] = (
        (ends[-1] - ends[-WINDOW - 1]) / WINDOW,
        (ends[-1] - facts[0]["marks"][0]["end"]) / (len(ends) - 1),
    )
    parameters = facts[0]["parameters"]
    return found | {"parameters": parameters, "gradients": parameters, "optimizer state": 2 * parameters}


def _apart(facts: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """How much later the faulty rank comes to its backward, a step: in the last steps, and in all."""
    before = [
        [mark["data"] + mark["forward"] + mark["optimizer"] for mark in rank["marks"]] for rank in facts
    ]
    later = [theirs - ours for theirs, ours in zip(before[FAULTY], before[1 - FAULTY], strict=True)]
    return statistics.fmean(later[-WINDOW:]), statistics.fmean(later)


# ---- scores ---------------------------------------------------------------------------------------


def error(answer: Any, truth: Any) -> float | None:
    """The relative error of a number; of a pair of truths (last steps, all steps) the smaller one."""
    if isinstance(answer, Shown):
        return error(answer.value, truth)
    if isinstance(truth, tuple):
        return min((error(answer, one) for one in truth), key=abs)
    return answer / truth - 1 if truth else None


def cell(answer: Any, truth: Any, unit: str) -> str:
    """An answer beside the truth: right, wrong, or by how much; what is only shown is in brackets."""
    if isinstance(answer, Shown):
        return f"({cell(answer.value, truth, unit)})"
    if answer is None:
        return "n/a"
    if unit in ("s", "bytes"):
        human = human_seconds(answer) if unit == "s" else human_bytes(answer)
        off = error(answer, truth)
        return human if off is None else f"{human}, {off:+.1%}"
    return "right" if answer == truth else f"wrong: {answer}"


def entry(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Entry:
    """The table of a case for docs/evidence/peers.md."""
    return measured_here(
        "tests/bench/truth/side_by_side.py", head=list(head), rows=[list(row) for row in rows]
    )


def answered(cases: Sequence[str], entries: dict[str, Entry]) -> dict[str, Any]:
    """Runs each case under each tool; prints a table a case, and adds it to *entries*."""
    found: dict[str, Any] = {}
    for case in cases:
        each = {tool.name: told(tool, case, CASES[case]) for tool in TOOLS if case in tool.cases.split()}
        print(f"\n### {case}\n")
        rows = []
        for name, unit in QUESTIONS[case].items():
            cells = [cell(t.answers.get(name), t.truth.get(name), unit) for t in each.values()]
            rows.append([name, *cells])
        print(markdown_table((["question", *each], rows)), flush=True)
        if case in ("input", "slow"):  # one table of the page
            rows = [[f"{case}: {row[0]}", *row[1:]] for row in rows]
        name_of_entry = f"late-{case}" if case in ("input", "slow") else case
        entries[name_of_entry] = entry(["question", *each], rows)
        found[case] = {name: [t.answers, t.truth] for name, t in each.items()}
        for name, t in each.items():
            for question, unit in QUESTIONS[case].items():
                answer, truth = t.answers.get(question), t.truth.get(question)
                off = error(answer, truth) if unit in ("s", "bytes") and answer is not None else None
                keep(f"{name}: {case}, {question}", off, "ratio", "zero")
    return found


def costs(pairs: int, entries: dict[str, Entry]) -> dict[str, Any]:
    """Whole runs with each tool and without, in turns; prints means with 95 % intervals, adds them."""
    watching = [tool for tool in TOOLS if tool.name != "comms_logger"]  # it wraps its own calls alone
    runs: defaultdict[str, list[Told]] = defaultdict(list)
    for turn in range(pairs):
        order = [None, *watching]
        for tool in order if turn % 2 else reversed(order):
            runs[tool.name if tool else ""].append(told(tool, "plain", CASES["plain"]))
        print(f"turn {turn + 1} of {pairs}", file=sys.stderr, flush=True)
    rows, found = [], {}
    for tool in watching:
        both = list(zip(runs[tool.name], runs[""], strict=True))
        step = _mean([with_it.step / without.step - 1 for with_it, without in both])
        start = _mean([with_it.started - without.started for with_it, without in both])
        rss = statistics.fmean(with_it.rss - without.rss for with_it, without in both)
        found[tool.name] = {"step": step, "start": start, "rss": rss, "lines": tool.lines}
        keep(f"{tool.name}: a step", step[0], "ratio", noise=step[1])
        keep(f"{tool.name}: start", start[0], "s", noise=start[1])
        rows.append([
            tool.name, f"{step[0]:+.1%} ± {step[1]:.1%}", f"{start[0]:+.2f} ± {start[1]:.2f} s",
            human_bytes(rss), str(tool.lines),
        ])  # fmt: skip
    print(f"\n### cost, {pairs} runs each, in turns\n")
    head = ["tool", "a step", "start", "memory of all processes", "lines in the script"]
    print(markdown_table((head, rows)), flush=True)
    entries["costs"] = entry(head, rows)
    return found


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by the normal distribution."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    """The tables, and JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument(
        "--pairs", type=int, default=0, metavar="N", help="runs for the cost (default: none)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="store the tables for docs/evidence/peers.md"
    )
    options = parser.parse_args()
    versions = [f"{tool.name} ({_version(tool)})" for tool in TOOLS]
    print(", ".join(versions), flush=True)
    entries: dict[str, Entry] = {}
    found = {"answers": answered(options.cases or list(CASES), entries)}
    if options.pairs:
        found["costs"] = costs(options.pairs, entries)
    if options.publish:
        publish("peers", entries)
    print(json.dumps(found, default=lambda one: one._asdict()))


def _version(tool: Tool) -> str:
    words = [
        str(peers() / "python"),
        "-c",
        f"import importlib.metadata as m; print(m.version({tool.package!r}))",
    ]
    return f"{tool.package} {subprocess.run(words, capture_output=True, text=True).stdout.strip()}"


if __name__ == "__main__":
    main()
