"""Examines this machine and its runs: requirements, what zeromon can measure here, and hangs.

Without TARGET: torch, NCCL, driver, DeepSpeed, launchers, links, shared memory, limits, ptrace, and
what the agent can and cannot measure here; then each live run. With a TARGET, a run id (or its
beginning), the pid of a rank, or host:port: that run only.

For a run without progress it names the hanging collective, the waiting ranks and the missing ranks; with
py-spy also the Python stack of each: py-spy reads the memory of the process from outside and stops it
briefly. --stacks dumps the stacks of every rank on this node now, even if the run is progressing. Exit
code 1 when a finding is critical or a problem of this machine affects runs, else 0.

--notify sends a test message to where `zeromon run --notify URL` sends alerts, and examines nothing:

  zeromon doctor --notify ntfys://TOPIC          one service, or several
  zeromon doctor --notify                        those of ZEROMON_NOTIFY

Exit codes: 0 all services accepted it, 1 one did not, 2 a URL names no service. Accepted does not
mean delivered: check that the message arrived. Needs pip install 'zeromon[notify]'.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromon import __version__
from zeromon.attach.inject.refusal import right_to_trace
from zeromon.base.errors import NotifyError, RunNotFound, ZeromonError
from zeromon.base.units import human_bytes, human_rate, human_seconds
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag
from zeromon.cli.report import newest_snapshot
from zeromon.cli.terminal import show_json, show_text, show_working
from zeromon.collector.notify import deliver_message, parse_target, split_notify_urls
from zeromon.probes import process as processes
from zeromon.probes.cpu_pressure import usable_cpu_count
from zeromon.probes.devices import Devices
from zeromon.probes.host import HostReader
from zeromon.probes.network import network_peak_bandwidth
from zeromon.readout import text
from zeromon.readout.alerts import Tone, safe_message
from zeromon.readout.verdict import hang_text
from zeromon.ring import paths
from zeromon.snapshot import Finding, Hang, RunSnapshot, Severity
from zeromon.snapshot.run import NodeView, RankProcess
from zeromon.sources import live as live_source

_GIB = 1 << 30
_MIN_SHM_BYTES = 1 * _GIB
_MIN_OPEN_FILES = 4096
_EXIT_STATUS_SINCE = (6, 15)
_PATIENCE_SECONDS = 120

_ASK_TORCH = """
import json, sys
sys.path += FOLDERS
found = {}
try:
    import torch
    found["version"] = torch.__version__
    for built in ("cuda", "hip", "xpu"):
        if getattr(torch.version, built, None):
            name = "ROCm" if built == "hip" else built.upper()
            found["built"] = f"{name} {getattr(torch.version, built)}"
            break
    try:
        found["type"] = torch.accelerator.current_accelerator().type
    except (RuntimeError, AttributeError):
        found["type"] = ""
    found["devices"] = torch.accelerator.device_count() if found["type"] else 0
    if found["devices"] and found["type"] == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    from zeromon_agents.runtime.bootstrap import missing_parts
    found["missing"] = missing_parts()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
sys.stdout.write("FOUND " + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: a name, the result, and what to do about a problem."""

    name: str
    value: str
    severity: str = "fine"
    """``fine``, ``note`` (something cannot be measured) or ``warning`` (runs are affected)."""
    hint: str = ""


def judge_fact(name: str, value: str, is_fine: bool, hint: str, severity: str = "warning") -> Fact:
    """A fact with a *severity* and a *hint* where it is not fine."""
    return Fact(name, value) if is_fine else Fact(name, value, severity, hint)


def survey_machine() -> list[Fact]:
    """All facts, in the order in which they are shown."""
    facts: list[Fact] = []
    for read_facts in LOOKS:
        # A machine without /dev/shm, or with an odd /proc, must not hide the other facts
        with suppress(OSError, ValueError, ZeromonError):
            facts += read_facts()
    return facts


# ---- software ------------------------------------------------------------------------------------


def zeromon_itself() -> list[Fact]:
    """The version of zeromon, and the collector."""
    address = next(filter(None, map(live_source.collector_address, paths.user_ring_roots())), None)
    return [
        Fact("zeromon", f"{__version__}, Python {platform.python_version()}"),
        Fact("collector", address or "not running: the first rank starts one"),
    ]


def torch_facts(python: str = "") -> list[Fact]:
    """The versions of torch and NCCL, and the names that the agent needs."""
    executable = python or processes.find_training_python()
    answer = ask_torch(executable)
    if "version" not in answer:
        reason = answer.get("error", "it cannot be imported")
        hint = "Activate the environment of your training, so that the first python of the path has it."
        return [Fact("torch", f"none here ({reason})", "note", hint)]
    built = answer.get("built") or answer.get("type") or "CPU only"
    phrases = [str(answer["version"]), str(built), f"{answer.get('devices', 0)} devices"]
    if answer.get("nccl"):
        phrases.append(f"NCCL {answer['nccl']}")
    if executable != (python or sys.executable):
        phrases.append(f"of {executable}")
    facts = [Fact("torch", ", ".join(phrases))]
    missing = answer.get("missing") or []
    if answer.get("error"):
        facts.append(Fact("agent", str(answer["error"]), "warning"))
    elif missing:
        problem = f"this torch lacks {', '.join(missing)}: ranks cannot be watched"
        facts.append(Fact("agent", problem, "warning", "torch 2.6 or newer is needed."))
    else:
        coverage = "collectives, units, steps, memory by role; "
        clock = "device timing" if answer.get("devices") else "no device; timing uses the host clock"
        facts.append(Fact("agent", coverage + clock))
    return facts


def ask_torch(python: str) -> dict[str, Any]:
    """The result of a separate Python process; empty when it fails."""
    # Inside zeromon run, this process would take the inherited folder for that of its own run
    environment = os.environ | {"ZEROMON_RUN_DIR": ""}
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", f"FOLDERS = {processes.own_package_folders()}{_ASK_TORCH}"],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False, env=environment,
        )  # fmt: skip
        # The import of torch and of its plugins may print to stdout, too
        answer = json.loads(done.stdout.partition("FOUND ")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return answer if isinstance(answer, dict) else {}


def framework_facts() -> list[Fact]:
    """Versions of the frameworks on top of torch, and launchers."""
    versions = []
    for name in ("deepspeed", "accelerate", "transformers", "lightning"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    launchers = [n for n in ("torchrun", "deepspeed", "accelerate", "srun", "mpirun") if shutil.which(n)]
    has_spy = bool(processes.find_py_spy())
    spy = f"py-spy is {'' if has_spy else 'not '}installed"
    hint = "pip install py-spy shows where a rank hangs."
    return [
        Fact("frameworks", ", ".join(versions) or "none"),
        Fact("launchers", ", ".join(launchers) or "none in PATH"),
        judge_fact("stacks", spy, has_spy, hint, "note"),
    ]


# ---- devices and links ------------------------------------------------------------------------------


def device_facts() -> list[Fact]:
    """Devices by the libraries of their vendors, and the bandwidth of the links."""
    reader = Devices()
    facts = []
    for uuid in reader.uuids():
        device = reader.read(uuid, 0)
        if device is None:
            continue
        peak, kind = reader.links(uuid)
        link = f", {kind} {human_rate(peak)}" if peak else ""
        reasons = ", ".join(device.throttle_reasons)
        throttle = f", clocks throttled: {reasons}" if reasons else ""
        description = f"{device.name}, {human_bytes(device.total_bytes)}{link}{throttle}"
        facts.append(judge_fact("device", description, not reasons, ""))
    driver = reader.driver()
    facts = facts or [Fact("device", "none found by NVML, AMD SMI or Level Zero", "note")]
    if driver:
        facts.insert(0, Fact("driver", driver))
    rate, kind = network_peak_bandwidth()
    network = f"{human_rate(rate)} ({kind})" if rate else "the kernel does not report its speed"
    facts.append(Fact("network", network))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if "InfiniBand" in kind and locked != resource.RLIM_INFINITY:
        hint = "Run `ulimit -l unlimited`: InfiniBand pins its buffers."
        facts.append(Fact("locked memory", human_bytes(locked), "note", hint))
    return facts


# ---- limits ------------------------------------------------------------------------------------------


def cpu_facts() -> list[Fact]:
    """The CPUs that this process may use, those of the machine, and how many run or wait to run."""
    usable, online = usable_cpu_count(os.getpid()), os.cpu_count() or 0
    load, _, _ = os.getloadavg()
    quota = f"{usable:.3g} of {online}" if usable is not None else f"{online}"
    is_free = load <= (usable or online)
    hint = "More threads want to run than there are CPUs: ranks wait for one (ZM605)."
    return [judge_fact("CPUs", f"{quota} usable, load {load:.1f} (1 min)", is_free, hint, "note")]


def memory_facts() -> list[Fact]:
    """Shared memory, the host's limit, and the folders of rings and records."""
    shm = shutil.disk_usage("/dev/shm")
    space = f"{human_bytes(shm.free)} of {human_bytes(shm.total)} free"
    hint = "docker run --shm-size=16g: DataLoader workers and NCCL need it."
    facts = [judge_fact("/dev/shm", space, shm.total >= _MIN_SHM_BYTES, hint)]
    host = HostReader().read(os.getpid())
    limit = "no limit"
    if host.limit_bytes > 0:
        limit = f"limit {human_bytes(host.limit_bytes)} ({host.cgroup})"
    facts.append(Fact("host memory", f"{human_bytes(host.headroom_bytes)} available, {limit}"))
    store = paths.record_store_root()
    # Before the first run the store does not exist, and disk_usage needs a folder that does
    existing = next((p for p in (store, *store.parents) if p.exists()), Path("/"))
    free_bytes = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    space = f"{store}, {human_bytes(free_bytes)} free" if writable else f"{store} cannot be written"
    foreign = paths.foreign_reason(store, store / "runs")
    hint = "Set ZEROMON_STORE to another folder."
    is_good = writable and free_bytes > _GIB and not foreign
    return [*facts, judge_fact("records", foreign or space, is_good, hint)]


def extension_cache_facts() -> list[Fact]:
    """The folder of torch's compiled extensions, and each lock in it, for which every rank waits."""
    folder = processes.extension_cache_folder(os.environ)
    locks = processes.cached_extension_locks(folder)
    facts = [Fact("extensions", f"{folder}, {'no lock' if not locks else 'locked'}")]
    for lock in locks:
        hint = f"{text.removal_of(lock)}: ranks wait for it for ever." if lock.is_stale else ""
        severity = "warning" if lock.is_stale else "note"
        facts.append(Fact("lock", text.lock_text(lock), severity, hint))
    return facts


def limit_facts() -> list[Fact]:
    """Limits of this user's processes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1 in Python
    open_files = str(files) if files >= 0 else "unlimited"
    to_open = "Run `ulimit -n 65536`: each worker, peer and file takes one."
    return [judge_fact("open files", open_files, not 0 <= files < _MIN_OPEN_FILES, to_open)]


def kernel_facts() -> list[Fact]:
    """Facts about what this kernel reports of a dying or hanging process."""
    release = platform.release()
    numbers = tuple(int(p) for p in release.split("-")[0].split(".")[:2] if p.isdigit())
    tells = numbers >= _EXIT_STATUS_SINCE
    can, ptrace_state, hint = right_to_trace()
    exit_report = f"{release}: {'reports' if tells else 'does not report'} how a process ended"
    without = "Before Linux 6.15 the report of a killed rank has no signal."
    return [
        judge_fact("kernel", exit_report, tells, without, "note"),
        Fact("ptrace", ptrace_state, "fine" if can else "note", hint),
    ]


LOOKS: tuple[Callable[[], list[Fact]], ...] = (
    zeromon_itself, torch_facts, framework_facts, device_facts, cpu_facts, memory_facts,
    extension_cache_facts, limit_facts, kernel_facts,
)  # fmt: skip


_MAX_STACKS = 8
_MAX_WARNINGS = 3
_AT_ONCE = 4
"""Runs of py-spy side by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon doctor [TARGET] [--stacks | --no-stacks] [--json]``"""
    parser.add_argument(
        "target", nargs="?", help="run id, pid or host:port; also of a run that has ended"
    )
    stacks = parser.add_mutually_exclusive_group()
    add_flag(stacks, "--stacks", "the Python stacks of all ranks of this node, now")
    add_flag(stacks, "--no-stacks", "do not run py-spy")
    add_flag(parser, "--json", "print JSON")
    parser.add_argument(
        "--notify", nargs="*", metavar="URL",
        help="send a test message to where alerts go (default: ZEROMON_NOTIFY)",
    )  # fmt: skip


def call(options: argparse.Namespace) -> int:
    """Examines the machine, or one run; or sends a test message."""
    if options.notify is not None:
        urls = options.notify or split_notify_urls(os.environ.get("ZEROMON_NOTIFY", ""))
        if not urls:
            raise NotifyError("no URL to send to", "Give one after --notify, or set ZEROMON_NOTIFY.")
        sentence = f"alerts from {socket.gethostname()} come here"
        test = safe_message(Tone.SUCCESS, "test: zeromon", (sentence,))
        failed = 0
        for service in [parse_target(url) for url in urls]:
            if refusal := deliver_message(service.url, test):
                tell_user(f"{service.name} did not accept the message: {refusal}")
                failed = 1
            else:
                sys.stdout.write(f"{service.name} has accepted the message\n")
        return failed
    if options.target is None:
        return _show_survey(options)
    try:
        run = live_source.only_live_run(live_source.find_live_runs(options.target)).open().latest()
    except RunNotFound:
        run = newest_snapshot(options.target)
    return _examine_run(run, options)


def _show_survey(options: argparse.Namespace) -> int:
    with show_working("importing torch"):
        facts = survey_machine()
    alarm = any(fact.severity == "warning" for fact in facts)
    live = [run for run in live_source.runs_of_node() if not run.ended]
    if options.json:
        show_json({"facts": facts, "runs": [run.run for run in live]})
        return int(alarm)
    show_text(facts_as_text(facts))
    for run in live:
        sys.stdout.write("\n")
        # In this order: `alarm or ...` would skip every run after the first alarm
        alarm = (
            bool(_examine_run(live_source.LiveSource(run.address, run.run).latest(), options)) or alarm
        )
    return int(alarm)


_MARKS = {"fine": " ", "note": "·", "warning": "!"}


def facts_as_text(facts: list[Fact]) -> str:
    """One screen: a line per fact, and below it what to do."""
    width = max((len(fact.name) for fact in facts), default=0)
    fact_rows = []
    for fact in facts:
        fact_rows.append(f"{_MARKS[fact.severity]} {fact.name.ljust(width)}  {fact.value}")
        if fact.hint:
            fact_rows.append(f"  {' ' * width}  -> {fact.hint}")
    return "\n".join(fact_rows) + "\n"


def _examine_run(run: RunSnapshot, options: argparse.Namespace) -> int:
    """Shows what hangs or is stalled in one run; returns the exit code."""
    hangs = run.hangs
    stacks: dict[int | str, str]
    if options.stacks:
        with show_working("reading stacks"), ThreadPoolExecutor(_AT_ONCE) as pool:
            ranks = [rank for rank in run.ranks if rank.status.alive]
            stack_texts = pool.map(processes.python_stack_text, [rank.pid for rank in ranks])
            stacks = {rank.rank: stack for rank, stack in zip(ranks, stack_texts, strict=True)}
    else:
        suspects = [] if options.no_stacks else _stack_suspects(hangs, run)
        reported = {rank.rank: "\n".join(rank.status.stack) for rank in run.ranks}
        # A stack that the rank has reported needs neither py-spy nor the right to trace
        stacks = {rank: reported[rank] or processes.python_stack_text(pid) for rank, pid in suspects}
        if not options.no_stacks and not run.ranks:
            # Not by rank: a launcher may give none, and processes of two attempts have the same
            starting = run.starting[:_MAX_STACKS]
            stacks = {
                _process_label(process): processes.python_stack_text(process.pid) for process in starting
            }
    if options.json:
        show_json({"run": run.run, "hangs": hangs, "stacks": stacks})
    else:
        show_text(run_as_text(run, hangs, stacks))
    return int(bool(_critical_findings(run)) or any(not hang.pause for hang in hangs))


def _critical_findings(run: RunSnapshot) -> list[Finding]:
    """The critical findings that no hang of the list says as well."""
    covered = {"collective_in_flight", "collective_mismatch"} if run.hangs else set()
    return [f for f in run.findings if f.severity is Severity.CRITICAL and f.rule not in covered]


def _stack_suspects(hangs: tuple[Hang, ...], run: RunSnapshot) -> list[tuple[int, int]]:
    """(rank, pid) of the ranks whose stacks help most: the missing ones, else a waiting one."""
    numbers: dict[int, None] = {}
    for hang in hangs:
        numbers.update(dict.fromkeys(hang.missing or hang.waiting[:2]))
    if not hangs and text.stall_finding(run) is not None:
        numbers.update(dict.fromkeys(rank.rank for rank in run.ranks if rank.status.stack))
    pids = {rank.rank: rank.pid for rank in run.ranks if rank.status.alive}
    return [(rank, pids[rank]) for rank in numbers if rank in pids][:_MAX_STACKS]


def _node_line(node: NodeView) -> str:
    """``zm1  ranks 2-3  reported 0.7 s ago  round trip 0.6 ms  clock ±0.5 ms``."""
    phrases = [f"  {node.node}", f"ranks {node.first_rank}-{node.first_rank + node.ranks - 1}"]
    if node.here:
        phrases.append("this node")
    elif node.heard_seconds is None:
        phrases.append("no report yet")
    else:
        phrases.append(f"reported {human_seconds(node.heard_seconds)} ago")
    if node.round_trip_seconds is not None:
        phrases.append(f"round trip {human_seconds(node.round_trip_seconds)}")
    if node.clock_error_seconds is not None:
        phrases.append(f"clock known to ±{human_seconds(node.clock_error_seconds)}")
    return "  ".join(phrases)


def _process_label(process: RankProcess) -> str:
    """``rank 1 (pid 4711)``; ``n/a`` for a rank that the launcher does not give."""
    return f"rank {'n/a' if process.rank is None else process.rank} (pid {process.pid})"


def run_as_text(run: RunSnapshot, hangs: tuple[Hang, ...], stacks: Mapping[int | str, str]) -> str:
    """The hangs, what each rank does, and the *stacks*, by rank or by the label of a process."""
    rows = [f"run {run.run}: {text.run_state(run)}"]
    if run.ended:
        rows.append(f"  it has ended: zeromon report {run.run}")
    states = {rank.rank: text.doing(rank) for rank in run.ranks}
    rows += [f"!! {text.finding_text(finding)}" for finding in _critical_findings(run)]
    rows += [f"{'  ' if hang.pause else '!!'} {hang_text(run, hang)}" for hang in hangs]
    if run.ranks and not hangs and not run.ended and text.stall_finding(run) is None:
        warnings = [f for f in run.findings if f.severity is Severity.WARNING][:_MAX_WARNINGS]
        rows += ["no collective hangs", *(f" ! {text.finding_text(finding)}" for finding in warnings)]
    if run.nodes:
        rows += ["", "Nodes, as observed from here", *map(_node_line, run.nodes)]
    rows += [f"  {run.nodes_note}"] if run.nodes_note else []
    rows += ["", "What each rank does"] if run.ranks or run.starting else []
    rows += [
        f"  {_process_label(process)}: has not reported yet"
        + (f", at {process.at}" if process.at else "")
        for process in run.starting[:64]
    ]
    rows += [
        f"  rank {rank.rank} (pid {rank.pid}): "
        f"{states[rank.rank] if rank.status.alive else text.ended_text(rank)}"
        for rank in run.ranks[:64]
    ]
    for label, stack in stacks.items():
        rows += ["", f"Python stack of {f'rank {label}' if isinstance(label, int) else label}"]
        rows += [f"  {row}" for row in stack.splitlines()]
    return "\n".join(rows) + "\n"
