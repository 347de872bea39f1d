"""Programs of others, each without zeromon and with it: `make test-programs`.

Each program runs twice on two ranks (gloo, CPU): without zeromon, under torch's profiler, which counts
collectives; and under `zeromon run`. Exit codes, outputs, the parameters after each optimizer step (bit
for bit), and counts of collectives must be equal; the report must tell the strategy and the steps. Where
anything differs, the program runs once more without zeromon, to see whether it differs from itself.
Findings are listed for a person to read. Packages are installed into ENVIRONMENT, over this Python's.

Exit code 0: all as it should be; 1: something is not; 2: a program could not be run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

from evidence_pages import Entry, machine_here, measured_here, publish, read_entries
from judge import Outcome, Verdict, changed, judge_output, judge_steps, normal, verdict_of
from table import PROGRAMS, RANKS, Program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT_SECONDS = 300
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "trl",
    "torchtune",
    "torchtitan",
)
ASIDE = "terminate called without an active exception"
"""How one exit of gloo in some hundred ends, with zeromon or without; such a run is repeated."""


def environment(folder: Path) -> Path:
    """An environment with what requirements.txt names, over this Python's packages; its Python."""
    python, wanted = folder / "bin" / "python", (HERE / "requirements.txt").read_text()
    marker = folder / "installed.txt"
    if not marker.exists() or marker.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site = next(folder.glob("lib/python3*/site-packages"))
        below = sysconfig.get_path("purelib")
        (site / "project.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        pins = folder / "constraints.txt"
        torch = f"torch=={importlib.metadata.version('torch')}\n"
        pins.write_text((ROOT / "constraints.txt").read_text() + torch)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        install = ["install", "--quiet", "-c", str(pins), "-r", str(HERE / "requirements.txt")]
        subprocess.run([*pip, *install], check=True)
        marker.write_text(wanted)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "observe.pth").write_text(f"import sys; sys.path.append({str(HERE)!r}); import observe\n")
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions of the packages that the programs are of."""
    code = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python), "-c", code, *PACKAGES], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Harness:
    """Runs programs, in a folder of its own."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder, self.watched = python, folder, 0
        dropped = ("ZEROMON_", "MASTER_", "TORCHELASTIC", "ACCELERATE_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.variables = kept | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "huggingface"),
            "TOKENIZERS_PARALLELISM": "false",
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": "",
        }

    def zeromon(self, program: Program) -> dict[str, str]:
        """Where `zeromon run` and `zeromon report` meet; nothing of an earlier run is there."""
        place = self.folder / f"{program.name}-watched"
        return self.variables | {
            "ZEROMON_DIR": str(place / f"rings{self.watched}"),
            "ZEROMON_STORE": str(place / f"store{self.watched}"),
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "agents", "dashboard")),
        }

    def run(self, program: Program, way: str) -> Outcome:
        """Runs *program* `bare`, `counted` or `watched`; once more where gloo's exit failed."""
        outcome = self._run(program, way)
        if outcome.code and not program.fails and ASIDE in outcome.errors:
            outcome = self._run(program, way)
        return outcome

    def _run(self, program: Program, way: str) -> Outcome:
        place = self.folder / f"{program.name}-{way}"
        shutil.rmtree(place, ignore_errors=True)
        seen, work = place / "observed", place / "work"
        seen.mkdir(parents=True)
        work.mkdir()
        command = program.command.format(python=self.python, here=HERE, port=free_port()).split()
        variables = self.variables | {"OBSERVE": str(seen)}
        if way == "counted":
            variables["COUNT"] = "1"
        if way == "watched":
            self.watched += 1  # the collector of a run that is repeated may still be there
            variables |= self.zeromon(program)
            zeromon = [
                str(self.python),
                "-m",
                "zeromon",
                "run",
                "--quiet",
                "--port",
                str(free_port()),
                "--name",
            ]
            command = [*zeromon, program.name, "--", *command]
        code, output, errors = _finished(command, variables, work)
        (place / "output.txt").write_text(output)
        (place / "errors.txt").write_text(errors)
        places = {str(work): "<work>", str(place): "<place>", str(HERE): "<here>"}
        raises = program.fails or program.attempts > 1  # a traceback shows zeromon's frames, too
        return Outcome(
            code,
            normal(output, places) + normal("" if raises else errors, places),
            {_key(file): file.read_text().split() for file in seen.glob("*.steps")},
            {_key(file): json.loads(file.read_text()) for file in seen.glob("*.count")},
            errors,
        )

    def report(self, program: Program) -> dict[str, Any]:
        """What zeromon says of the run."""
        command = [str(self.python), "-m", "zeromon", "report", program.name, "--json", "--wait", "30"]
        done = subprocess.run(
            command, env=self.zeromon(program), cwd=self.folder, capture_output=True, text=True
        )
        if not done.stdout.strip():
            raise RuntimeError(f"no report: {done.stderr[-500:]}")
        (self.folder / f"{program.name}-watched" / "report.json").write_text(done.stdout)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def judge(self, program: Program) -> tuple[Verdict, list[str]]:
        """Runs *program* both ways; the verdict, and the lines of output that differ."""
        bare, watched = self.run(program, "counted"), self.run(program, "watched")
        report = {} if program.fails else self.report(program)
        verdict = verdict_of(program, bare, watched, report, RANKS)
        if verdict.faults and not program.fails:
            again = self.run(program, "bare")
            verdict = verdict.excused(judge_output(bare, again), judge_steps(bare, again))
        return verdict, changed(bare.lines, watched.lines)


def _key(file: Path) -> str:
    return file.name.rpartition(".")[0]


def _finished(
    command: Sequence[str], variables: Mapping[str, str], cwd: Path
) -> tuple[int | None, str, str]:
    """Runs *command* in a process group; its exit code, None where it did not end, and what it wrote."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            command, env=variables, cwd=cwd, stdout=output, stderr=errors,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = running.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


HEAD = (
    "| program | exit code | output | parameters | collectives of rank 0 | report | agent | findings |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(program: Program, verdict: Verdict) -> str:
    """The row of the table."""
    found = sorted({finding.split()[1] for finding in verdict.findings})
    if program.fails:
        return f"| {program.name} | {verdict.code} | does not run on a CPU: {program.fails} | | | | | |"
    cells = [
        program.name, verdict.code, verdict.output, verdict.steps, verdict.collectives, verdict.strategy,
        verdict.agent, ", ".join(found) or "none",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


PAGE_HEAD = (
    "program", "what it does", "steps", "parameters", "collectives of rank 0", "strategy reported",
)  # fmt: skip


def page_entry(verdicts: Mapping[str, Verdict], versions: Mapping[str, str]) -> Entry:
    """The table of docs/evidence/programs.md; descriptions are those that it has already."""
    described = {row[0]: row[1] for row in read_entries("programs")["programs"]["rows"]}
    rows = []
    for program in PROGRAMS:
        if program.fails or program.name not in verdicts:
            continue
        verdict, name = verdicts[program.name], f"`{program.name}`"
        attempt = f", attempt {program.attempts}" if program.attempts > 1 else ""
        is_reported = verdict.strategy.startswith("ok")
        steps = f"{program.steps}{attempt}" if is_reported else verdict.strategy
        strategy = program.strategy if is_reported else verdict.strategy
        cells = described.get(name, f"`{program.command}`"), steps, verdict.steps, verdict.collectives
        rows.append([name, *cells, strategy])
    machine = ", ".join([machine_here(), *(f"{name} {version}" for name, version in versions.items())])
    return measured_here(
        "tests/programs/others/run.py", machine=machine, head=list(PAGE_HEAD), rows=rows
    )


def tell(program: Program, verdict: Verdict, lines: Sequence[str], seconds: float) -> None:
    """What a person reads while the programs run: the verdict, what differs, and the findings."""
    print(f"{program.name}: {'; '.join(verdict.faults) or 'ok'} ({seconds:.0f} s)")
    if not verdict.output.startswith("ok"):
        print(*(f"    {line}" for line in lines[:20]), sep="\n")
    for finding in verdict.findings:
        read = "" if finding.split()[1] in program.judged else " (to be read)"
        print(f"    finding{read}: {finding}")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Runs the programs; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", help="names, or their beginnings (default: all)")
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".programs", help="made where it is missing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--publish", action="store_true", help="store the table for the page")
    parser.add_argument(
        "--keep", type=Path, help="folder for what the programs wrote (default: removed)"
    )
    options = parser.parse_args(arguments)
    chosen = [p for p in PROGRAMS if not options.programs or p.name.startswith(tuple(options.programs))]
    if not chosen:
        parser.error(f"no such program; there are {', '.join(p.name for p in PROGRAMS)}")
    python = environment(options.environment.resolve())
    folder = (
        options.keep.resolve() if options.keep else Path(tempfile.mkdtemp(prefix="zeromon-programs-"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    progress = sys.stderr if options.json else sys.stdout
    harness, verdicts, broken = Harness(python, folder), {}, {}
    for number, program in enumerate(chosen, 1):
        began = time.monotonic()
        print(f"[{number}/{len(chosen)}] {program.name}", file=progress, flush=True)
        try:
            verdict, lines = harness.judge(program)
        except (OSError, RuntimeError, ValueError) as error:
            broken[program.name] = str(error)
            print(f"{program.name}: could not be run: {error}", file=progress, flush=True)
            continue
        verdicts[program.name] = verdict
        if not options.json:
            tell(program, verdict, lines, time.monotonic() - began)
    if options.json:
        found = {name: verdict._asdict() for name, verdict in verdicts.items()}
        print(json.dumps({"versions": versions(python), "programs": found, "broken": broken}, indent=1))
    else:
        rows = [row(p, verdicts[p.name]) for p in chosen if p.name in verdicts]
        said = ", ".join(f"{name} {version}" for name, version in versions(python).items())
        print("", said, "", HEAD, *rows, sep="\n")
    if options.publish:
        publish("programs", {"programs": page_entry(verdicts, versions(python))})
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    if broken:
        return 2
    return int(any(verdict.faults for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
