"""The tools that stand side by side, each as its own documentation says, and where its answers are.

A tool is a row of :data:`TOOLS`. Its answers are keyed by question (side_by_side.QUESTIONS). What a tool
concludes is a plain value; what it only shows, so that its user concludes, is :class:`Shown`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

JOB = Path(__file__).with_name("job.py")
DEBUG_PORT = 25123


class Shown(NamedTuple):
    """An answer that the tool's user finds in what it shows."""

    value: Any


Answers = Mapping[str, Any]


class Run(NamedTuple):
    """A run that a tool watches."""

    folder: Path
    arguments: tuple[str, ...]
    """Of the job: case and steps."""
    bin: Path
    """Of the environment in which the peers are installed."""

    @property
    def case(self) -> str:
        """The job's case."""
        return self.arguments[0]

    def pids(self) -> list[int]:
        """The processes of the ranks, by rank."""
        named = f"{JOB} {' '.join(self.arguments)}"
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, KeyError, ValueError):
                words = (folder / "cmdline").read_text().replace("\0", " ")
                values = dict(
                    v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v
                )
                if named in words and values.get("TRUTH") == str(self.folder) and "RANK" in values:
                    found[int(values["RANK"])] = int(folder.name)
        return [pid for _, pid in sorted(found.items())]

    def read(self, *command: str) -> str:
        """What a command of the peers' environment prints."""
        words = [str(self.bin / command[0]), *command[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr


class Tool(NamedTuple):
    """A tool, in its best mode for these questions."""

    name: str
    package: str
    """Whose version is printed; "" is torch."""
    lines: int
    """That its user adds to the script (job_lines.py)."""
    cases: str
    """In which it has something to answer, by its documentation; elsewhere it is n/a without a run."""
    launch: Callable[[Run], list[str]]
    environment: Mapping[str, str] = {}
    live: Callable[[Run], Answers] = lambda run: {}
    """While the ranks live; of a hang, asked each second."""
    after: Callable[[Run], Answers] = lambda run: {}
    """After the end of the run."""


def _torchrun(run: Run, *between: str) -> list[str]:
    launcher = [str(run.bin / "python"), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*launcher, *between, str(JOB), *run.arguments]


# ---- zeromon --------------------------------------------------------------------------------------


def _zeromon_launch(run: Run) -> list[str]:
    return [sys.executable, "-m", "zeromon", "run", "--", *_torchrun(run)]


def _report(run: Run, *more: str) -> dict[str, Any]:
    stores = {"ZEROMON_DIR": str(run.folder / "rings"), "ZEROMON_STORE": str(run.folder / "store")}
    words = [sys.executable, "-m", "zeromon", "report", "--json", *more]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | stores, timeout=60)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {}


def _zeromon(run: Run) -> Answers:
    """The figures and conclusions of `zeromon report`, from its JSON."""
    return _from_report(_report(run))


def _zeromon_ended(run: Run) -> Answers:
    """The same once the collector has seen the end, which takes it a second or two."""
    return _from_report(_report(run, "--wait", "20"))


def _from_report(said: Mapping[str, Any]) -> Answers:
    if not said:
        return {}
    first, answers = said["ranks"][0], {"late rank": "nobody"}
    last = [s for s in first["steps"]["recent"][-20:] if not s["idle"]]
    if first["steps"]["mean_seconds"] and last:
        spent = [sum(s["phase_ns"][n] for s in last) / len(last) / 1e9 for n in range(5)]
        roles = {row["role"]: row["host_bytes"] for row in first["memory"]["roles"]}
        answers |= {
            "step": first["steps"]["mean_seconds"], "forward": spent[1], "backward": spent[2],
            "optimizer": spent[3], "data": spent[4],
            "exposed": first["communication"]["exposed_seconds"],
            "bytes": last[-1]["collective_bytes"], "calls": last[-1]["collectives"],
            "parameters": roles.get("unsharded_param"), "gradients": roles.get("unsharded_grad"),
            "optimizer state": roles.get("optimizer_state"),
        }  # fmt: skip
    for late in said["stragglers"]:
        answers |= {
            "late rank": late["rank"],
            "late in": late["phase"].partition("_")[0],
            "late by": late["late_seconds"],
        }
    for risk in first["memory"]["risks"]:
        answers["grow by"] = risk["growth_bytes_per_step"]  # the host's, of all ranks
    for hang in said["hangs"]:
        stuck = (hang["missing"] or [None])[0]
        stacks = [rank["status"]["stack"] for rank in said["ranks"] if rank["rank"] == stuck]
        lines = [stack for stack in stacks if stack]
        answers |= {"stuck rank": stuck, "stuck in": _function(lines[0][-1]) if lines else None}
    for rank in said["ranks"]:
        if rank["status"]["failed"] and rank["status"]["ended"] == "SIGKILL":
            answers |= {"dead rank": rank["rank"], "died at": rank["steps"]["last_step"] + 1}
    return answers


def _function(frame: str) -> str:
    """The name of the function of a frame such as ``train.py:57 in stand_still``."""
    return frame.rpartition(" in ")[2].split()[0]


# ---- TraceML --------------------------------------------------------------------------------------


def _traceml_launch(run: Run) -> list[str]:
    folder = ["--logs-dir", str(run.folder / "logs"), "--run-name", "job"]
    launcher = [str(run.bin / "traceml"), "run", str(JOB), "--nproc-per-node", "2", *folder]
    return [*launcher, "--args", *run.arguments]


def _traceml(run: Run) -> Answers:
    """The diagnosis and the step timing of final_summary.json."""
    path = run.folder / "logs" / "job" / "final_summary.json"
    if not path.exists():
        return {}
    said = json.loads(path.read_text())["step_time"]
    row = said["groups"]["rows"].get("0", {}).get("metrics", {})
    names = {
        "step": "step_time_ms", "data": "input_wait_ms", "forward": "forward_ms",
        "backward": "backward_ms", "optimizer": "optimizer_ms",
    }  # fmt: skip
    answers: dict[str, Any] = {
        name: row[key] / 1e3 for name, key in names.items() if row.get(key) is not None
    }
    diagnosis = said["diagnosis"]
    answers["late rank"] = "nobody"
    if "STRAGGLER" in diagnosis["kind"]:
        evidence = diagnosis["evidence"]
        answers |= {
            "late rank": evidence.get("culprit_rank"),
            "late in": "data" if "INPUT" in diagnosis["kind"] else diagnosis["phase"],
            "late by": evidence["visible_cost_ms"] / 1e3,
        }
    return answers


# ---- probing --------------------------------------------------------------------------------------

_MEAN = "select avg(duration) from python.torch_trace where module = '{}' and stage = '{}' and step > 20"


def _probing(run: Run) -> Answers:
    """SQL over the modules that it samples in each rank, and the stack of a rank that stands still."""
    pids = run.pids()
    if run.case == "hang":
        stacks = [run.read("probing", "-t", str(pid), "backtrace") for pid in pids]
        stuck = [rank for rank, stack in enumerate(stacks) if "stand_still" in stack]
        return {"stuck rank": Shown(stuck[0]), "stuck in": Shown("stand_still")} if stuck else {}
    net = "Net" if run.case == "exchange" else "module"
    forwards = [_probed(run, pid, _MEAN.format(net, "post forward")) for pid in pids]
    answers: dict[str, Any] = {"forward": forwards[0] if forwards else None}
    answers["optimizer"] = _probed(run, pids[0], _MEAN.format("AdamW", "post step")) if pids else None
    if None not in forwards and len(forwards) == 2 and max(forwards) > 2 * min(forwards):
        answers |= {
            "late rank": Shown(forwards.index(max(forwards))), "late in": Shown("forward"),
            "late by": Shown(max(forwards) - min(forwards)),
        }  # fmt: skip
    return answers


def _probed(run: Run, pid: int, question: str) -> float | None:
    """A number that it answers in a table."""
    table = run.read("probing", "-t", str(pid), "query", question)
    found = re.search(r"^│ (\d+\.\d+)", table, re.MULTILINE)
    return float(found[1]) if found else None


# ---- memray, DeepSpeed's comms_logger, torch's debug server ---------------------------------------

_LARGEST_LEAK = """
import sys, memray
leaks = memray.FileReader(sys.argv[1]).get_leaked_allocation_records(merge_threads=True)
largest = max(leaks, key=lambda one: one.size)
print(largest.size, *[frame[0] for frame in largest.stack_trace() if frame[1].endswith("job.py")][:1])
"""


def _memray_launch(run: Run) -> list[str]:
    program = f"{JOB} {' '.join(run.arguments)}"
    script = f"exec {run.bin}/memray run --force -q -o {run.folder}/$RANK.bin {program}"
    launcher = [str(run.bin / "python"), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*launcher, "--no-python", "sh", "-c", script]


def _memray(run: Run) -> Answers:
    """What was allocated and not freed, by its stack."""
    paths = [run.folder / f"{rank}.bin" for rank in range(2)]
    if run.case != "leak" or not all(path.exists() for path in paths):
        return {}
    found = [run.read("python", "-c", _LARGEST_LEAK, str(path)).split() for path in paths]
    nbytes = sum(int(size) for size, *_ in found)
    where = {name for _, *names in found for name in names}
    return {"grow by": nbytes / int(run.arguments[1]), "grow in": ", ".join(sorted(where)) or None}


_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def _comms_logger(run: Run) -> Answers:
    """The table of log_summary()."""
    rows = re.findall(
        r"^ +([\d.]+) (B|KB|MB|GB) +(\d+) +([\d.]+) ", (run.folder / "output").read_text(), re.MULTILINE
    )
    steps = int(run.arguments[1])
    if run.case != "exchange" or not rows:
        return {}
    return {
        "bytes": sum(float(size) * _UNITS[unit] * int(calls) for size, unit, calls, _ in rows) / steps,
        "calls": sum(int(calls) for *_, calls, _ in rows) // steps,
        "exposed": sum(float(ms) for *_, ms in rows) / 1e3 / steps,
    }


def _debug_server(run: Run) -> Answers:
    """The page with the stacks of all ranks."""
    if run.case != "hang":
        return {}
    with suppress(OSError):
        page = (
            urllib.request.urlopen(f"http://127.0.0.1:{DEBUG_PORT}/stacks", timeout=10).read().decode()
        )
        stacks = re.split(r"Rank \d+:", page)[1:]
        stuck = [rank for rank, stack in enumerate(stacks) if "stand_still" in stack]
        if stuck:
            return {"stuck rank": Shown(stuck[0]), "stuck in": Shown("stand_still")}
    return {}


PROBING = {"PROBING": "job.py", "PROBING_TORCH_PROFILING": "on"}
ALL = "plain exchange input slow leak hang death"
TOOLS = (
    Tool("zeromon", "zeromon", 0, ALL, _zeromon_launch, live=_zeromon, after=_zeromon_ended),
    Tool(
        "TraceML", "traceml-ai", 3, "plain exchange input slow leak death",
        _traceml_launch, {"TOOL": "traceml"}, after=_traceml,
    ),
    Tool("probing", "probing", 0, "plain input slow hang", _torchrun, PROBING, live=_probing),
    Tool("memray", "memray", 0, "leak", _memray_launch, after=_memray),
    Tool(
        "comms_logger", "deepspeed", 4, "exchange", _torchrun,
        {"TOOL": "comms_logger", "DS_ACCELERATOR": "cpu"}, after=_comms_logger,
    ),
    Tool(
        "debug server", "torch", 2, "hang", _torchrun,
        {"TOOL": "debug_server", "DEBUG_PORT": str(DEBUG_PORT)}, live=_debug_server,
    ),
)  # fmt: skip
