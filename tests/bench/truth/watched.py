"""Runs a case under a monitor, on gloo or on the virtual CUDA device, and keeps its answers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from forked_ranks import Forks
from monitor import Answers, Monitor, Run, Shown, load_monitor, monitor_files
from truths import WINDOW, Truth, gloo_truth, step_seconds, virtual_truth
from vgpu.environment import Environment, find
from vgpu.truth_table import cuda_fork_server

from zeromon_vgpu.machine import Fault, write_machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PEERS = ROOT / ".peers"
CASES: Mapping[str, Any] = json.loads((HERE / "cases.json").read_text())
QUESTIONS: Mapping[str, str] = CASES["questions"]
"""What may be asked, with its unit. Times and bytes: per step of rank 0; growth: of both on gloo."""
PATIENCE = 60.0
"""Seconds that a monitor has to name a fault of a job that does not end."""
LONGEST_SECONDS = {"gloo": 300.0, "virtual": 180.0}
POLL_SECONDS = 1.0
SETTLE_SECONDS = 2.0
"""After the last step: what is a second old is on every screen."""


class Told(NamedTuple):
    """What a monitor answered in a case, and what is true."""

    answers: Answers
    truth: Mapping[str, Any]
    started: float = math.nan
    """Seconds from the command to the first step."""
    step: float = math.nan
    """Seconds per step after the first ones; NaN where the run did not end."""
    rss: int = 0
    """Most bytes in memory of all processes of the run together, private and shared proportionally."""
    output: str = ""
    """The last lines that the run printed."""


def all_monitors() -> list[Monitor]:
    """The monitors of all files."""
    return [load_monitor(name).MONITOR for name in monitor_files()]


def file_of(monitor: Monitor) -> str:
    """The name of the file of a monitor."""
    return next(name for name in monitor_files() if load_monitor(name).MONITOR is monitor)


# ---- environments ---------------------------------------------------------------------------------


@cache
def peers() -> Path:
    """The programs of the monitors' environment: theirs, over the packages that are installed here."""
    folder = PEERS / "bin"
    if not (folder / "traceml").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        wanted = [package for monitor in all_monitors() for package in monitor.installed]
        subprocess.run([str(folder / "pip"), "install", "--quiet", *wanted], check=True)
    here = Path(metadata.distribution("torch").locate_file(""))
    # before probing's, which imports torch
    (_site(PEERS) / "a_packages_here.pth").write_text(f"{here}\n")
    return folder


def _site(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


@cache
def virtual_peers() -> Path:
    """The same programs over the CUDA build of torch and the virtual device's libraries."""
    theirs, folder = peers(), PEERS / "virtual"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    sites = [cuda().site, _site(PEERS)]
    lines = "".join(f"import site; site.addsitedir({str(site)!r})\n" for site in sites)
    (_site(folder) / "a_packages_here.pth").write_text(lines)
    for script in theirs.iterdir():
        if script.is_file() and not script.is_symlink() and script.name.islower():
            with suppress(UnicodeDecodeError):
                first, rest, body = script.read_text().partition("\n")
                if first.startswith(f"#!{theirs}/python"):
                    ours = folder / "bin" / script.name
                    ours.write_text(f"#!{folder}/bin/python{rest}{body}")
                    ours.chmod(0o755)
    return folder / "bin"


@cache
def cuda() -> Environment:
    """The CUDA build of torch that `make vgpu` has installed."""
    return find()


@cache
def forks() -> Forks:
    """What forks the ranks of virtual runs."""
    return Forks(cuda_fork_server(cuda()))


def _programs(kind: str, monitor: Monitor | None) -> Path:
    """Where Python is, and the monitor's own programs; what installs nothing needs no environment."""
    if kind == "gloo":
        return peers()
    is_bare = monitor is None or (monitor.forks and not monitor.installed)
    return cuda().folder / "bin" if is_bare else virtual_peers()


def make_run(kind: str, name: str, folder: Path, monitor: Monitor | None) -> Run:
    """The run of a case; writes the machine of a virtual one."""
    case = CASES[kind][name]
    is_virtual = kind == "virtual"
    program, bin_folder = HERE / case["program"], _programs(kind, monitor)
    variables = os.environ | {
        "TRUTH": str(folder), "OMP_NUM_THREADS": "1", "TRUTH_WAITS": "60" if monitor else "0",
        "ZEROMON_DIR": f"{folder}/rings", "ZEROMON_STORE": f"{folder}/store",
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "MONITOR": file_of(monitor) if monitor else "",
    }  # fmt: skip
    python = str(bin_folder / "python")
    if is_virtual:
        faults = [Fault(**fault) for fault in case.get("faults", ())]
        write_machine(folder / "device", "h100", faults, case["machine"])
        variables |= cuda().variables(folder / "device")
        launcher: tuple[str, ...] = (python, str(ROOT / "tests" / "programs" / "launch.py"), "2")
        if monitor is None or monitor.forks:
            launcher = (sys.executable, str(HERE / "forked_ranks.py"), "2")
            variables["FORKS"] = str(forks().path)
        arguments: tuple[str, ...] = (name,)
    else:
        variables["DS_ACCELERATOR"] = "cpu"
        launcher = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2")
        arguments = (name, str(case["steps"]))
    for key, value in (monitor.environment if monitor else {}).items():
        variables[key] = value.format(program=program.name, folder=folder)
    return Run(folder, program, arguments, bin_folder, case, kind, launcher, variables)


# ---- a run ----------------------------------------------------------------------------------------


@contextmanager
def started(run: Run, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The processes of a run, which are ended afterwards."""
    with (run.folder / "output").open("w") as output:
        process = subprocess.Popen(
            words, env=dict(run.variables), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in run.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def told(monitor: Monitor | None, kind: str, name: str, *, measured: bool = False) -> Told:
    """One run of a case under a monitor; None is no monitor. *measured*: its memory, too."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-truth-"))
    try:
        run = make_run(kind, name, folder, monitor)
        if monitor and monitor.reason and (reason := monitor.reason(run)):
            return Told({"n/a": reason}, {})
        words = (monitor.launch if monitor else Run.ranks)(run)
        began = time.time()
        with started(run, words) as process:
            watch = _Watch(monitor, run, measured)
            watch.follow(process)
            answers = watch.answers_at_end()
        return _compared(run, answers, began, watch.most_bytes, monitor.steps if monitor else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Watch:
    """A monitor's answers while the run lives."""

    def __init__(self, monitor: Monitor | None, run: Run, measured: bool) -> None:
        self.monitor, self.run, self.measured = monitor, run, measured
        self.answers: dict[str, Any] = {}
        self.samples: list[float] = []
        self.named: float | None = None
        self.most_bytes = 0
        self.is_live = monitor is not None and "live" in monitor._fields and (
            monitor.live is not Monitor._field_defaults["live"]
        )  # fmt: skip

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Until the run ends, or has been seen."""
        run, struck = self.run, self.run.folder / "struck"
        facts = [run.folder / f"{rank}.json" for rank in range(2)]
        limit = time.monotonic() + LONGEST_SECONDS[run.kind]
        while process.poll() is None and time.monotonic() < limit:
            if self.measured:
                self.most_bytes = max(self.most_bytes, _memory(run))
            if struck.exists() and self.is_live and (run.kind == "virtual" or run.must_name):
                self.ask(since := float(struck.read_text()))
                if run.must_name and (self.named is not None or time.time() - since > PATIENCE):
                    return
            if run.must_name and struck.exists() and not self.is_live:
                return
            if all(path.exists() for path in facts):
                time.sleep(SETTLE_SECONDS)
                self.ask(float(struck.read_text()) if struck.exists() else time.time(), last=True)
                (run.folder / "seen").touch()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
                return
            time.sleep(POLL_SECONDS if self.measured or self.is_live else 0.25)

    def ask(self, since: float, *, last: bool = False) -> None:
        """Its answers now; while the steps run, samples of what has no meaning afterwards."""
        if self.monitor is None or not self.is_live:
            return
        answers = dict(self.monitor.live(self.run))
        if not last and answers.get("utilization") is not None:
            self.samples.append(answers["utilization"])
        self.answers |= {key: value for key, value in answers.items() if value is not None}
        if self.named is None and self._names(answers):
            self.named = time.time() - since

    def _names(self, answers: Answers) -> bool:
        true, asked = self.run.case["true"], self.run.case["questions"]
        wanted = {key: true[key] for key in ("cause", "rank") if key in true and key in asked}
        if true.get("cause") == "healthy" or "nobody" in wanted.values():
            return False
        return bool(wanted) and all(plain(answers.get(key)) == true for key, true in wanted.items())

    def answers_at_end(self) -> dict[str, Any]:
        """The answers after the end, with those of the living run that the end takes away."""
        answers = dict(self.answers)
        if self.monitor and not self.run.must_name:
            for key, value in self.monitor.after(self.run).items():
                if value is not None and not (
                    key in ("device memory", "utilization") and key in answers
                ):
                    answers[key] = value
        if self.samples:
            answers["utilization"] = statistics.median(self.samples)
        if self.named is not None:
            is_shown = isinstance(answers.get("rank", answers.get("cause")), Shown)
            answers["named after"] = Shown(self.named) if is_shown else self.named
        return answers


def plain(answer: Any) -> Any:
    """The value of an answer, whoever concludes it."""
    return answer.value if isinstance(answer, Shown) else answer


def _compared(
    run: Run, answers: dict[str, Any], began: float, most_bytes: int, steps: tuple[int, int] | None
) -> Told:
    paths = [run.folder / f"{rank}.json" for rank in range(2)]
    facts = [json.loads(path.read_text()) for path in paths if path.exists()]
    truth = dict(run.case["true"]) | {"named after": 0.0}
    output = "\n".join(run.output.splitlines()[-12:])
    if len(facts) < 2:
        return Told(answers, truth, rss=most_bytes, output=output)
    if run.kind == "virtual":
        truth |= virtual_truth(run, facts, steps) | run.case["true"]
        step = step_seconds(run)
    else:
        truth |= gloo_truth(run, facts) | run.case["true"]
        ends = [mark["end"] for mark in facts[0]["marks"]]
        step = (ends[-1] - ends[WINDOW]) / (len(ends) - 1 - WINDOW)
    return Told(answers, truth, facts[0]["started"] - began, step, most_bytes, output)


def _memory(run: Run) -> int:
    """Bytes of all processes of a run, the monitor's own too, by their proportional set size."""
    total, mark = 0, f"TRUTH={run.folder}\0"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if mark in (folder / "environ").read_text():
                for line in (folder / "smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) << 10
    return total


# ---- results in a file, so that a bench that was cut goes on -----------------------------------------


def encode_told(one: Told) -> dict[str, Any]:
    """As JSON has it: what is only shown, and truths, as objects."""

    def encode(value: Any) -> Any:
        if isinstance(value, Shown):
            return {"shown": value.value}
        return {"ranges": value.ranges, "step": value.step} if isinstance(value, Truth) else value

    facts = one._asdict()
    for key in ("answers", "truth"):
        facts[key] = {name: encode(value) for name, value in facts[key].items()}
    return facts


def decode_told(facts: Mapping[str, Any]) -> Told:
    """The result again."""

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "shown" in value:
            return Shown(value["shown"])
        return Truth(tuple((low, high) for low, high in value["ranges"]), value["step"])

    decoded = {key: {name: decode(value) for name, value in facts[key].items()}
               for key in ("answers", "truth")}  # fmt: skip
    return Told(**{**facts, **decoded})


def result_key(monitor: Monitor, kind: str, case: str) -> str:
    """Names a result by the case, as cases.json has it, and the monitor."""
    content = hashlib.sha256(json.dumps(CASES[kind][case]).encode()).hexdigest()
    return f"{kind} {case} {monitor.name} {content[:12]}"
