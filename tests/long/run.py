"""Runs drawn cases under `zeromon run`, watches each, and judges what zeromon says of it.

    run.py [--count 200] [--seed S] [--only WORD ...]    faults
    run.py --healthy [--count 40]                        identical ranks beside other programs: no alarm
    run.py --case 17                                     one case of the draw, with all its lines
    run.py ... --cuda                                    on the virtual CUDA device of `make vgpu`

Each case is judged three times: live, once a second, by the verdict on the snapshot of /api/runs/RUN;
in the second after its end, by the first two lines of `zeromon report`; later from the store alone, once
collector and live records are gone. A folder (--out) keeps a file for each case: a run that is started
again on the same commit goes on where it was. At the end result.json has the seed, the machine, the
commit and all lines. It needs about half a minute per case, and nothing else that trains beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "tools")]

from drawn_faults import FAULT_COUNT, HEALTHY_COUNT, KINDS, SEED, Case, draw, draw_healthy  # noqa: E402
from evidence_pages import Entry, publish, today  # noqa: E402
from judge import Line, Mark, accusations, flips, judge, judge_live, share  # noqa: E402
from served import bearer, get  # noqa: E402
from support import PROGRAMS, TORCHRUN, ZEROMON, clean_environment, free_port  # noqa: E402
from vgpu.environment import Environment, find  # noqa: E402

from zeromon.base.errors import ZeromonError  # noqa: E402
from zeromon.readout.verdict import judge_run  # noqa: E402
from zeromon.storage.run_store import decode_snapshot  # noqa: E402
from zeromon_vgpu.machine import write_machine  # noqa: E402

LASTS_SECONDS = 10.0
"""How long a run that ends by itself goes on after its fault."""
HANG_SECONDS = 21.0
"""After so long a run that hangs is ended by SIGTERM, as its user would."""
PATIENCE_SECONDS = 150.0
"""No case takes longer, unless something is wrong with the case."""
LIMIT_BYTES = 5 << 29
"""Of the memory cgroup of `leak_limited`."""
_LOOP = "while True: pass"
_BURSTS = """
import time
while True:
    end = time.time() + 1.5
    while time.time() < end: pass
    time.sleep(2)
"""
_PROGRAMS = {
    "": (), "loop": ([_LOOP, 0],), "loops": ([_LOOP, 0], [_LOOP, 0]), "nice": ([_LOOP, 19],),
    "bursts": ([_BURSTS, 0],),
}  # fmt: skip


class NotPossible(Exception):
    """The case cannot be run here, or did not come to its fault; the text says why."""


class Running:
    """A case under `zeromon run`."""

    def __init__(self, case: Case, folder: Path, port: int, cuda: Environment | None) -> None:
        self.case, self.folder, self._cuda = case, folder, cuda
        self.name = f"case-{case.number}"  # no word of it is a cause
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.environment = clean_environment() | {
            "ZEROMON_DIR": str(folder / "live"), "ZEROMON_STORE": str(folder / "store"),
            "ZEROMON_PORT": str(port), "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if cuda is not None:
            write_machine(folder)
            self.environment |= cuda.variables(folder) | {"DS_ACCELERATOR": "cuda"}
            if case.kind == "nan" or case.strategy in ("zero2", "zero3"):  # what branches on values
                self.environment["VGPU_ARITHMETIC"] = "1"
        self.lines: list[tuple[float, str, str]] = []
        self.findings: dict[str, str] = {}
        """Code and rank -> the newest sentence."""
        self.output = folder / "output"
        self._collector = folder / "live" / "collector.json"

    def command(self) -> list[str]:
        """The command as a user would write it."""
        case = self.case
        seconds = LASTS_SECONDS + (case.amount if case.kind == "slow_start" else 0)
        words = {
            "fault": case.kind, "strategy": case.strategy, "loading": case.loading,
            "accumulation": case.accumulation, "rank": case.rank, "step": case.step,
            "amount": case.amount, "seconds": seconds, "marks": self.marks,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in words.items()]
        restarts = [f"--max-restarts={case.restarts}"] if case.restarts else []
        torchrun = TORCHRUN if self._cuda is None else (str(self._cuda.python), *TORCHRUN[1:])
        program = [*torchrun, "2", *restarts, str(PROGRAMS / "drawn.py"), *options]
        return [*ZEROMON, "run", "--name", self.name, "--", *program]

    def fault_time(self) -> float | None:
        """When the fault came first; None before."""
        times = [path.read_text() for path in self.marks.glob("fault.*")]
        return min((float(text) for text in times if text), default=None)

    def watch(self, wrapped: Sequence[str]) -> int:
        """Runs the case to its end, which a hang has by SIGTERM; returns the exit code."""
        started = time.time()
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                [*wrapped, *self.command()], env=self.environment, cwd=self.marks, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                self._poll(process, started)
                return process.wait(40)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _poll(self, process: subprocess.Popen[bytes], started: float) -> None:
        while not _ends_within(process, 1.0):
            self._read()
            begun = self.fault_time()
            lasts = HANG_SECONDS if KINDS[self.case.kind].is_hang else 4 * LASTS_SECONDS
            if time.time() > min(begun + lasts if begun else 1e12, started + PATIENCE_SECONDS):
                process.send_signal(signal.SIGTERM)
                return

    def _read(self) -> None:
        try:
            facts = json.loads(self._collector.read_text())
            snapshot = decode_snapshot(
                get(facts["port"], f"/api/runs/{self.name}", **bearer(facts["key"]))[1]
            )
        except (OSError, ValueError, ZeromonError):  # no collector yet, or no rank
            return
        judged = judge_run(snapshot)
        self.lines.append((time.time(), judged.text, str(judged.health)))
        for finding in snapshot.findings:
            self.findings[f"{finding.code} rank {finding.rank}"] = finding.text

    def report(self) -> str:
        """What `zeromon report` says now."""
        done = subprocess.run(
            [*ZEROMON, "report", self.name], env=self.environment, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        return done.stdout or done.stderr

    def leave_only_the_store(self) -> None:
        """Ends the collector and removes the live records."""
        with suppress(OSError, ValueError, KeyError):
            pid = json.loads(self._collector.read_text())["pid"]
            for wait, number in ((6, signal.SIGTERM), (4, signal.SIGKILL)):
                deadline = time.monotonic() + wait  # it ends by itself, soon after the last run
                while _lives(pid) and time.monotonic() < deadline:
                    time.sleep(0.1)
                os.kill(pid, number)
        shutil.rmtree(self.folder / "live", ignore_errors=True)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


@contextmanager
def memory_limit(case: Case) -> Iterator[list[str]]:
    """Words before a command that put it into a memory cgroup with a limit, where the case has one."""
    if case.kind != "leak_limited":
        yield []
        return
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if is_v1 else root) / f"zeromon-drawn-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        raise NotPossible("needs root and a memory cgroup that can be divided") from error
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        for _ in range(50):
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def other_programs(load: str) -> Iterator[None]:
    """The other programs of the machine, while the case runs."""
    started = [
        subprocess.Popen([sys.executable, "-c", code], preexec_fn=lambda by=by: os.nice(by))
        for code, by in _PROGRAMS[load]
    ]
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def run_case(
    case: Case, port: int, *, keep: Path | None = None, cuda: Environment | None = None
) -> dict[str, Any]:
    """Runs *case* and returns all that was said, with its marks."""
    folder = keep or Path(tempfile.mkdtemp(prefix="zeromon-drawn-"))
    shutil.rmtree(folder, ignore_errors=True)
    running = Running(case, folder, port, cuda)
    started = time.time()
    try:
        with memory_limit(case) as wrapped, other_programs(case.load):
            code = running.watch(wrapped)
            after = running.report()
        if running.fault_time() is None:
            raise NotPossible(f"its fault never came: {running.output.read_text()[-1500:]}")
        running.leave_only_the_store()
        later = running.report()
        return with_marks(_said(running, started, code, after, later))
    finally:
        running.leave_only_the_store()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def first_two(report: str) -> str:
    """The first two lines of a report."""
    return "\n".join(line.strip() for line in report.splitlines()[:2])


def _said(running: Running, started: float, code: int, after: str, later: str) -> dict[str, Any]:
    """All that was said of a case, without marks."""
    case, begun = running.case, running.fault_time()
    readings = [(round(at - (begun or 1e12), 1), *said) for at, *said in running.lines]
    return {
        "case": asdict(case), "name": case.name, "truth": case.truth, "commit": commit(),
        "exit": code,
        "seconds": round(time.time() - started, 1),
        "fault_at": round(begun - started, 1) if begun else None,
        "readings": readings, "after": {"lines": first_two(after)},
        "later": {"lines": first_two(later)}, "is_same_later": after == later,
        "findings": running.findings,
        "output": running.output.read_text(errors="replace")[-6000:] if code else "",
    }  # fmt: skip


def with_marks(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the marks that its lines deserve."""
    case = Case(**result["case"])
    lines = [Line(*reading) for reading in result["readings"]]
    live = judge_live(case, lines)
    marked = {
        **result, "live": {**asdict(live), "mark": live.mark.value, "flips": flips(lines)},
        "false_before": accusations(case, lines)[:1],
    }  # fmt: skip
    for part in ("after", "later"):
        judged = judge(case, result[part]["lines"], is_live=False)
        marked[part] = {
            "lines": result[part]["lines"], "mark": judged.mark.value, "reason": judged.reason,
        }  # fmt: skip
    return marked


def earlier_result(kept: Path) -> dict[str, Any] | None:
    """The result of a case of this commit, judged anew; None where there is none."""
    result = json.loads(kept.read_text()) if kept.exists() else {}
    return with_marks(result) if result.get("commit") == commit() else None


def _changes(lines: Sequence[Line]) -> list[Line]:
    """The lines whose words, without figures, differ from those of the line before."""
    shown: list[Line] = []
    before = ""
    for line in lines:
        words = "".join(letter for letter in line.text if not letter.isdigit())[:60]
        if words != before:
            shown.append(line)
        before = words
    return shown


def commit() -> str:
    """The commit of the tree, short; with ``-dirty`` where it has changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the cases ran on."""
    return {
        "commit": commit(), "date": today(),
        "python": platform.python_version(), "cpus": os.cpu_count(),
        "machine": platform.machine(), "kernel": platform.release(),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    """The score by kind, and every line that is not right."""
    kinds = Counter(result["case"]["kind"] for result in results)
    rows = [f"{'kind':18} cases  live  after  later"]
    for kind in sorted(kinds):
        own = [result for result in results if result["case"]["kind"] == kind]
        rights = (_rights(own, part) for part in ("live", "after", "later"))
        rows.append(f"{kind:18} {len(own):5}  " + "  ".join(f"{text:>5}" for text in rights))
    rows.append("")
    for result in results:
        for part in ("live", "after"):
            if result[part]["mark"] not in ("right", "unseen"):
                said = result[part].get("lines") or result[part]["text"]
                rows.append(f"{result['name']} {part} {result[part]['mark']}: {result[part]['reason']}")
                rows += [f"    {line[:220]}" for line in said.splitlines()]
    flipped = sum(len(result["live"]["flips"]) for result in results)
    shares = (f"{part} {shares_of(results)[part]:.1%}" for part in ("live", "after", "later"))
    early = [
        f"{result['name']}: {result['false_before'][0]}" for result in results if result["false_before"]
    ]
    rows += [f"before the fault: {text[:240]}" for text in early]
    rows.append(
        f"{len(results)} cases: {', '.join(shares)}; {flipped} flips; {len(early)} accused before"
    )
    return "\n".join(rows)


FAULTS_HEAD = ("fault", "cases", "live", "after")
DRAWN_HEAD = ("reading", "right", "target")


READINGS = {
    "live": "while the fault lasts", "after": "the second after the end",
    "later": "later, from the record",
}  # fmt: skip


def page_entries(summary: dict[str, Any]) -> dict[str, Entry]:
    """The tables of docs/evidence/reliability.md: right readings of all cases, and by fault."""
    results = summary["results"]
    where = {
        "tool": "tests/long/run.py", "date": summary["date"], "commit": summary["commit"],
        "machine": f"{summary['machine']}, {summary['cpus']} cores, Python {summary['python']}",
    }  # fmt: skip

    def count(results_with: list[Any]) -> str:
        return f"{sum(map(bool, results_with))} of {len(results)}"

    early = count([result["false_before"] for result in results])
    if summary["healthy"]:
        flipped = count([result["live"]["flips"] for result in results])
        rows = [["a rank named", early, "0"], ["a verdict that flips", flipped, "0"]]
        rows = [[f"healthy runs beside load: {name}", *cells] for name, *cells in rows]
        return {"drawn-healthy": where | {"head": list(DRAWN_HEAD), "rows": rows}}
    drawn = [
        [READINGS[part], f"{_rights(results, part).replace('/', ' of ')} ({right:.1%})", "97 %"]
        for part, right in summary["shares"].items()
    ]
    drawn.append(["a rank named as straggler before its fault", early, "0"])
    faults = []
    for kind in sorted({result["case"]["kind"] for result in results}):
        own = [result for result in results if result["case"]["kind"] == kind]
        faults.append([kind, str(len(own)), _rights(own, "live"), _rights(own, "after")])
    return {
        "drawn": where | {"head": list(DRAWN_HEAD), "rows": drawn},
        "faults": where | {"head": list(FAULTS_HEAD), "rows": faults},
    }


def mistakes(result: dict[str, Any]) -> list[str]:
    """What was true and what was said, of each reading that is not right."""
    rows: list[str] = []
    for part in ("live", "after", "later"):
        said = result[part]
        if said["mark"] in ("right", "unseen") or (part == "later" and result["is_same_later"]):
            continue
        rows.append(f"    {part} {said['mark']}: {said['reason']}")
        rows += [f"        {line[:240]}" for line in (said.get("lines") or said["text"]).splitlines()]
    return [f"{result['name']}: {result['truth']}", *rows] if rows else []


def _rights(results: Sequence[dict[str, Any]], part: str) -> str:
    marks = [result[part]["mark"] for result in results if result[part]["mark"] != "unseen"]
    return f"{marks.count('right')}/{len(marks)}"


def shares_of(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Part -> the share of right first lines."""
    return {
        part: share([Mark(result[part]["mark"]) for result in results])
        for part in ("live", "after", "later")
    }


def options() -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--healthy", action="store_true", help="runs without a fault, beside load")
    parser.add_argument("--count", type=int, help="cases of the draw")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of the cases")
    parser.add_argument("--each", type=int, default=0, help="at most so many cases of a kind")
    parser.add_argument("--case", type=int, help="the number of one case; shows all its lines")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--out", type=Path, help="folder of the results (default build/drawn)")
    parser.add_argument("--port", type=int, default=0, help="port of the collectors (default: free)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the record of the last case")
    parser.add_argument("--anew", action="store_true", help="forget earlier results")
    parser.add_argument("--cuda", action="store_true", help="on the virtual CUDA device")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--publish", type=Path, metavar="RESULT.json", help="store it for the page")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for."""
    count = given.count or (HEALTHY_COUNT if given.healthy else FAULT_COUNT)
    cases = (draw_healthy if given.healthy else draw)(given.seed, count)
    if given.case is not None:
        return [case for case in cases if case.number == given.case]
    if given.only:
        cases = [case for case in cases if any(word in case.name for word in given.only)]
    if given.each:
        counts: Counter[str] = Counter()
        limited = []
        for case in cases:
            counts[case.kind] += 1
            if counts[case.kind] <= given.each:
                limited.append(case)
        cases = limited
    return cases


def main() -> int:
    """Runs the cases that are missing, writes result.json and prints the table."""
    given = options()
    if given.publish:
        publish("reliability", page_entries(json.loads(given.publish.read_text())))
        return 0
    cuda = find() if given.cuda else None
    name = "drawn" + "-healthy" * given.healthy + "-cuda" * given.cuda
    folder = given.out or ROOT / "build" / name
    if given.anew:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: cleanly
    started = time.monotonic()
    results = []
    cases = chosen(given)
    if given.list:
        print("\n".join(case.name for case in cases))
        return 0
    try:
        for case in cases:
            kept = folder / f"{given.seed}-{case.name}.json"
            if given.case is None and (earlier := earlier_result(kept)) is not None:
                results.append(earlier)
                continue
            if time.monotonic() - started > given.minutes * 60:
                break
            try:
                result = run_case(case, given.port or free_port(), keep=given.keep, cuda=cuda)
            except NotPossible as reason:
                print(f"{case.name}: not possible: {reason}", flush=True)
                continue
            kept.write_text(json.dumps(result, indent=1))
            results.append(result)
            _show(result, at_length=given.case is not None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    shares = shares_of(results)
    summary = {
        "seed": given.seed, "healthy": given.healthy, **machine(),
        "cases": len(results), "shares": shares,
        "flips": sum(len(result["live"]["flips"]) for result in results),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(summary | {"results": results}, indent=1))
    print(table(results))
    return 0 if results and len(results) == len(cases) else 1


def _show(result: dict[str, Any], *, at_length: bool) -> None:
    marks = " ".join(f"{part}={result[part]['mark']}" for part in ("live", "after", "later"))
    first = result["live"]["first_right"]
    print(f"{result['name']}: {marks} first right after {first} s, {result['seconds']} s", flush=True)
    if at_length:
        for line in _changes([Line(*reading) for reading in result["readings"]]):
            print(f"  {line.seconds:6.1f}  {line.text[:260]}")
        print("  after   " + result["after"]["lines"].replace("\n", "\n          "))
        print("\n".join(f"  {of}: {text}" for of, text in sorted(result["findings"].items())))
        print(result["output"])


if __name__ == "__main__":
    sys.exit(main())
