"""What only a GPU can settle: ``make test-gpu``, ``make bench-gpu``. ``DRY=1`` runs it without one.

The rows are in rows.py, and what their processes run in ranks.py. A row that fails or takes too long
does not stop the others. The figures go to OUT as JSON and Markdown, with what the tests may keep.
``suite.py --publish FILE...`` stores them for docs/evidence/gpu.md. Exit code 0: all passed; 1: a row
failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromon.snapshot import RunSnapshot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [
    str(ROOT / name)
    for name in ("", "agents", "tests", "tests/bench", "tests/gpu", "tests/programs", "tools")
]
sys.path.extend(path for path in PATHS if path not in sys.path)

import evidence_pages  # noqa: E402

SECONDS = 570.0
"""Of one command: a machine is lent for ten minutes at a time."""
STARTS = 120.0
"""The most that a process needs beyond its steps: imports, NCCL, the end."""


class OutOfTime(Exception):
    """A row has used up its time."""


class NotHere(Exception):
    """This machine cannot tell; the text says why."""


@dataclass(frozen=True)
class Check:
    """One figure of a row, and what it must be."""

    what: str
    measured: str
    expected: str
    verdict: str
    """``pass``, ``FAIL``, ``figure`` (published, not judged), ``ran`` (not judged without a GPU)."""


@dataclass
class Row:
    """One line of the table: a function that yields checks."""

    number: str
    title: str
    part: str
    """The command that runs it: ``1``, ``2`` or ``bench``."""
    seconds: float
    run: Callable[[Bench], Iterable[Check]]


ROWS: list[Row] = []


def row(number: str, title: str, *, part: str, seconds: float) -> Callable[[Any], Any]:
    """Adds a function to the rows."""

    def add(function: Callable[[Bench], Iterable[Check]]) -> Callable[[Bench], Iterable[Check]]:
        ROWS.append(Row(number, title, part, seconds, function))
        return function

    return add


@dataclass
class Outcome:
    """What came of a row."""

    number: str
    title: str
    verdict: str
    """``pass``, ``FAIL``, ``n/a``, ``out of time``, ``error``; in a dry run ``ran`` for ``pass``."""
    seconds: float
    note: str = ""
    checks: list[Check] = field(default_factory=list)


@dataclass
class Done:
    """What processes of ranks.py did."""

    facts: list[dict[str, Any]]
    output: str
    newest: RunSnapshot | None = None

    @property
    def snapshot(self) -> RunSnapshot:
        """The last snapshot of the run, which was watched."""
        assert self.newest is not None, self.output
        return self.newest


class Bench:
    """What rows run on: a collector, processes, a clock, and a folder for the figures."""

    def __init__(self, out: Path, *, dry: bool, patience: float = 1.0) -> None:
        from support import Node

        self.out, self.dry, self.patience = out, dry, patience
        self.node = Node(Path(tempfile.mkdtemp(prefix="zeromon-gpu-")))
        self.ends = time.monotonic() + SECONDS * patience
        self.kept: dict[str, bytes] = {}
        self._trained: dict[Any, Done] = {}

    def close(self) -> None:
        """Stops the collector and writes what was kept."""
        self.node.close()
        with tarfile.open(self.out / "fixtures.tgz", "w:gz") as archive:
            for name, content in self.kept.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    # ---- checks -----------------------------------------------------------------------------------

    def check(self, what: str, measured: Any, expected: Any, good: bool, *, here: bool = False) -> Check:
        """A check; *here*: it holds without a GPU, too."""
        verdict = ("pass" if good else "FAIL") if here or not self.dry else "ran"
        return Check(what, str(measured), str(expected), verdict)

    def near(
        self, what: str, measured: float | None, expected: float | None, *,
        ratio: float, absolute: float = 0.0, unit: str = "", scale: float = 1.0, here: bool = False,
    ) -> Check:  # fmt: skip
        """Whether a figure is within *ratio* or within *absolute* of the truth; the larger counts."""
        told = "n/a" if expected is None else f"{expected / scale:.4g} {unit} ± {ratio:.0%}"
        if measured is None or expected is None:
            return self.check(what, "n/a", told, False, here=here)
        good = abs(measured - expected) <= max(ratio * abs(expected), absolute)
        return self.check(what, f"{measured / scale:.4g} {unit}", told, good, here=here)

    @staticmethod
    def figure(what: str, measured: Any) -> Check:
        """A figure that is published and not judged."""
        return Check(what, str(measured), "", "figure")

    def keep(self, name: str, content: bytes) -> None:
        """Keeps a fixture for the tests; more than a megabyte is no fixture."""
        if len(content) < 1 << 20:
            self.kept[name] = content

    # ---- processes --------------------------------------------------------------------------------

    def run(
        self, program: str, ranks: int = 1, *, watched: bool = True, seconds: float = 0.0,
        seen: Callable[[Any, list[subprocess.Popen[bytes]]], bool] | None = None,
        env: Mapping[str, str] | None = None, may_fail: bool = False, **options: Any,
    ) -> Done:  # fmt: skip
        """Runs a program of ranks.py on *ranks* processes; raises RuntimeError where one fails.

        Not where it *may_fail*, as a rank does whose peer has died.
        *seen* gets each snapshot and the processes, and ends them all where it returns True.
        """
        from launch import environments
        from support import clean_environment

        self.node.runs += 1
        name, extra = f"run{self.node.runs}", dict(env or {})
        facts = self.node.folder / name
        facts.mkdir()
        common = (
            self.node.environment(name, **extra) if watched
            else clean_environment() | {"PYTHONPATH": os.pathsep.join(PATHS)} | extra
        )  # fmt: skip
        common |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000", "TORCH_FR_BUFFER_SIZE": "20000"}
        command = [sys.executable, str(HERE / "ranks.py"), program, json.dumps(options)]
        deadline = min(self.ends, time.monotonic() + (seconds or STARTS) * self.patience)
        with (facts / "log").open("w+") as log:
            running = [
                subprocess.Popen(
                    command, env=common | own | {"FACTS": str(facts / f"{own['RANK']}.json")},
                    cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                )
                for own in environments(ranks)
            ]  # fmt: skip
            try:
                stopped = self._follow(name if watched else "", running, seen, deadline)
            finally:
                _end(running)
            log.seek(0)
            output = log.read()
        if not (stopped or may_fail) and any(process.returncode for process in running):
            codes = [process.returncode for process in running]
            raise RuntimeError(f"{program} {options}: exit codes {codes}\n{output[-1500:]}")
        files = sorted(facts.glob("*.json"))
        found = [json.loads(file.read_text()) for file in files]
        return Done(found, output, self.node.settle(name) if watched else None)

    def _follow(
        self, run: str, running: Sequence[subprocess.Popen[bytes]], seen: Any, deadline: float
    ) -> bool:
        """Ticks the collector until all have ended; returns whether *seen* ended them before."""
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline:
                raise OutOfTime("its processes did not end in time")
            if seen is None and any(process.poll() for process in running):
                return False
            if run:
                self.node.collector.tick()
            snapshot = self.node.snapshot(run) if run else None
            if seen is not None and (snapshot is not None or not run) and seen(snapshot, running):
                return True
            time.sleep(0.2)
        return False

    def once(self, key: Any, make: Callable[[], Done]) -> Done:
        """What *make* returned for *key* before, else now: rows share runs."""
        if key not in self._trained:
            self._trained[key] = make()
        return self._trained[key]


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- running rows -------------------------------------------------------------------------------


def carried_out(
    rows: Iterable[Row], bench: Any, clock: Callable[[], float] = time.monotonic
) -> Iterator[Outcome]:
    """Runs each row within its time and the command's; no row stops another."""
    ends = bench.ends
    for one in rows:
        began = clock()
        if ends - began < min(one.seconds, 30.0):
            yield Outcome(one.number, one.title, "out of time", 0.0, "not begun")
            continue
        bench.ends = min(ends, began + one.seconds)
        checks: list[Check] = []
        verdict, note = "", ""
        try:
            for check in one.run(bench):
                checks.append(check)
                if clock() > bench.ends:
                    raise OutOfTime(f"after {len(checks)} checks")
        except NotHere as why:
            verdict = "FAIL" if verdict_of(checks) == "FAIL" else "n/a"
            note = str(why)
        except OutOfTime as why:
            verdict, note = "out of time", str(why)
        except Exception as error:
            verdict, note = "error", f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        yield Outcome(
            one.number, one.title, verdict or verdict_of(checks), clock() - began, note, checks
        )
    bench.ends = ends


def verdict_of(checks: Sequence[Check]) -> str:
    """FAIL where a check fails; ``ran`` where some were not judged; else pass."""
    found = {check.verdict for check in checks}
    if not found:
        return "error"
    return "FAIL" if "FAIL" in found else "ran" if "ran" in found else "pass"


# ---- the report ---------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    import torch

    facts = {
        "torch": torch.__version__, "python": platform.python_version(),
        "date": evidence_pages.today(), "commit": evidence_pages.commit_here(),
        "cores": str(os.cpu_count()), "device": "none",
    }  # fmt: skip
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(0)
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        from zeromon.probes.nvml import Nvml

        facts["driver"] = Nvml().driver()
    return facts


def markdown(facts: Mapping[str, str], outcomes: Iterable[Mapping[str, Any]]) -> str:
    """The table of one or several commands on one machine."""
    where = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    lines = [f"{facts['device']}: {where}.", "", "| # | row | check | measured | expected | verdict |"]
    lines.append("|---|---|---|---|---|---|")
    for one in outcomes:
        head = f"| {one['number']} | {one['title']} |"
        why = one["note"].partition("\n")[0].replace("|", "/")[:200]
        lines.append(f"{head} {why} | {one['seconds']:.0f} s | | **{one['verdict']}** |")
        for check in one["checks"]:
            cells = (check[key].replace("|", "/") for key in ("what", "measured", "expected", "verdict"))
            lines.append(f"| | | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_report(out: Path, part: str, facts: Mapping[str, str], outcomes: Sequence[Outcome]) -> None:
    """The figures of a command, for programs and for people."""
    rows = [asdict(one) for one in outcomes]
    (out / f"figures-{part}.json").write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    (out / f"figures-{part}.md").write_text(markdown(facts, rows))


HEAD = ("#", "row", "check", "measured", "expected", "verdict")


def table_rows(outcomes: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """The rows of :data:`HEAD`: one per outcome, followed by those of its checks."""
    for one in outcomes:
        note = one["note"].partition("\n")[0][:200]
        yield one["number"], one["title"], note, f"{one['seconds']:.0f} s", "", one["verdict"]
        for check in one["checks"]:
            cells = (check[key].replace("\n", " ").replace("|", "/") for key in CHECK_FIELDS)
            yield ("", "", *cells)


CHECK_FIELDS = ("what", "measured", "expected", "verdict")


def publish(files: Sequence[Path], folder: Path = evidence_pages.EVIDENCE, commit: str = "") -> None:
    """Stores the figures of commands on one machine; refuses those of a dry run.

    *commit* is that of a tree without git, as on the machine with the GPU.
    """
    contents = [json.loads(file.read_text()) for file in files]
    facts = [content["machine"] for content in contents]
    if not facts or any(one["device"] == "none" for one in facts):
        raise SystemExit("these figures are of a dry run")
    rows = [one for content in contents for one in content["rows"]]
    rows.sort(key=lambda one: (int(one["number"].rstrip("b")), one["number"]))
    shown = ("torch", "python", "cuda", "nccl", "driver", "cores")
    machine = ", ".join(f"{name} {facts[0][name]}" for name in shown if name in facts[0])
    entry = {
        "tool": "tests/gpu/suite.py", "date": max(one["date"] for one in facts),
        "commit": commit or facts[0].get("commit", ""), "machine": f"{facts[0]['device']}, {machine}",
        "view": "gpu", "head": list(HEAD), "rows": [list(cells) for cells in table_rows(rows)],
    }  # fmt: skip
    evidence_pages.publish("gpu", {facts[0]["device"].split()[-1].lower(): entry}, folder)


def missing() -> list[str]:
    """Modules that the suite needs and this Python does not have."""
    from importlib.util import find_spec

    return [name for name in ("torch", "msgspec", "prometheus_client") if find_spec(name) is None]


def main(words: Sequence[str] | None = None) -> int:
    """Runs a part, or publishes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--part", default="all", help="1, 2, bench, or all but bench")
    parser.add_argument("--dry", action="store_true", help="run what can run without a GPU")
    parser.add_argument("--rows", default="", help="numbers, with commas")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for the time limits of rows (4 on the virtual device)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--publish", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="", help="commit of the figures, where they lack it")
    options = parser.parse_args(words)
    if options.publish is not None:
        publish(options.publish, commit=options.commit)
        return 0
    lacking = missing()
    if lacking:
        print(f"not here: {', '.join(lacking)}. make gpu-wheels brings what travels", file=sys.stderr)
        return 2
    import rows  # noqa: F401
    import torch

    if not torch.cuda.is_available() and not options.dry:
        print("there is no GPU: torch sees no CUDA device. DRY=1 runs what needs none", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {number for number in options.rows.split(",") if number}
    parts = {"1", "2"} if options.part == "all" else {options.part}
    chosen = [one for one in ROWS if (one.number in asked if asked else one.part in parts)]
    chosen = [replace(one, seconds=one.seconds * options.patience) for one in chosen]
    bench, outcomes = Bench(options.out, dry=options.dry, patience=options.patience), []
    bench.ends += SECONDS * options.patience * (len(parts) - 1)
    facts = machine() | ({"dry": "yes", "device": "none"} if options.dry else {})
    try:
        for outcome in carried_out(chosen, bench):
            outcomes.append(outcome)
            write_report(options.out, options.part, facts, outcomes)
            note = outcome.note.partition("\n")[0]
            told = f"{outcome.seconds:6.1f} s  {outcome.title}  {note}"
            print(f"{outcome.number:>3} {outcome.verdict:<11} {told}")
            for check in outcome.checks:
                if check.verdict == "FAIL":
                    print(f"      {check.what}: {check.measured}, not {check.expected}")
            sys.stdout.flush()
    finally:
        bench.close()
        shutil.rmtree(bench.node.folder, ignore_errors=True)
    print(f"figures: {options.out}")
    return int(any(one.verdict in ("FAIL", "error", "out of time") for one in outcomes))


if __name__ == "__main__":
    # rows.py imports this file by its name: one list of rows
    import suite

    raise SystemExit(suite.main())
