"""What this machine has for a training run, and what zeromon can measure on it. It only reads.

torch is imported in a separate process: the core never imports it, and a broken torch must not end
zeromon.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromon import __version__
from zeromon.attach.inject.refusal import right_to_trace
from zeromon.errors import ZeromonError
from zeromon.probes.devices import Devices
from zeromon.probes.extension_lock import cache_folder, cached_locks
from zeromon.probes.host_memory import HostReader
from zeromon.probes.installation import own_folders, training_python
from zeromon.probes.network import network_peak
from zeromon.probes.process import py_spy
from zeromon.readout.text import lock_text, removal_of
from zeromon.ring import paths
from zeromon.sources.live import collector_address
from zeromon.units import human_bytes, human_rate

_GIB = 1 << 30
_LEAST_SHM = 1 * _GIB
_LEAST_FILES = 4096
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


def judged(name: str, value: str, is_fine: bool, hint: str, severity: str = "warning") -> Fact:
    """A fact with a *severity* and a *hint* where it is not fine."""
    return Fact(name, value) if is_fine else Fact(name, value, severity, hint)


def survey() -> list[Fact]:
    """All facts, in the order in which they are shown."""
    found: list[Fact] = []
    for look in LOOKS:
        with suppress(OSError, ValueError, ZeromonError):
            found += look()
    return found


# ---- software ------------------------------------------------------------------------------------


def zeromon_itself() -> list[Fact]:
    """The version of zeromon, and the collector."""
    address = next(filter(None, map(collector_address, paths.ring_roots())), None)
    return [
        Fact("zeromon", f"{__version__}, Python {platform.python_version()}"),
        Fact("collector", address or "not running: the first rank starts one"),
    ]


def torch_facts(python: str = "") -> list[Fact]:
    """The versions of torch and NCCL, and the names that the agent needs."""
    asked = python or training_python()
    found = ask_torch(asked)
    if "version" not in found:
        why = found.get("error", "it cannot be imported")
        hint = "Activate the environment of your training, so that the first python of the path has it."
        return [Fact("torch", f"none here ({why})", "note", hint)]
    built = found.get("built") or found.get("type") or "CPU only"
    parts = [str(found["version"]), str(built), f"{found.get('devices', 0)} devices"]
    if found.get("nccl"):
        parts.append(f"NCCL {found['nccl']}")
    if asked != (python or sys.executable):
        parts.append(f"of {asked}")
    facts = [Fact("torch", ", ".join(parts))]
    missing = found.get("missing") or []
    if found.get("error"):
        facts.append(Fact("agent", str(found["error"]), "warning"))
    elif missing:
        text = f"this torch lacks {', '.join(missing)}: ranks cannot be watched"
        facts.append(Fact("agent", text, "warning", "torch 2.6 or newer is needed."))
    else:
        seen = "collectives, units, steps, memory by role; "
        on_device = "device timing" if found.get("devices") else "no device here: the host's clock"
        facts.append(Fact("agent", seen + on_device))
    return facts


def ask_torch(python: str) -> dict[str, Any]:
    """The result of a separate Python process; empty when it fails."""
    environment = os.environ | {"ZEROMON_RUN_DIR": ""}
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", f"FOLDERS = {own_folders()}{_ASK_TORCH}"],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False, env=environment,
        )  # fmt: skip
        answer = json.loads(done.stdout.partition("FOUND ")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return answer if isinstance(answer, dict) else {}


def frameworks() -> list[Fact]:
    """Versions of the frameworks on top of torch, and launchers."""
    names = ("deepspeed", "accelerate", "transformers", "lightning")
    versions = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    launchers = [
        n for n in ("torchrun", "deepspeed", "accelerate", "srun", "mpirun") if shutil.which(n)
    ]
    spy = Fact("stacks", "py-spy is installed")
    if not py_spy():
        hint = "pip install py-spy shows where a rank hangs."
        spy = Fact("stacks", "py-spy is not installed", "note", hint)
    return [
        Fact("frameworks", ", ".join(versions) or "none"),
        Fact("launchers", ", ".join(launchers) or "none on the path"),
        spy,
    ]


# ---- devices and links ------------------------------------------------------------------------------


def devices() -> list[Fact]:
    """Devices by the libraries of their vendors, and the bandwidth of the links."""
    known = Devices()
    found = []
    for uuid in known.uuids():
        device = known.read(uuid, 0)
        if device is None:
            continue
        peak, kind = known.links(uuid)
        link = f", {kind} {human_rate(peak)}" if peak else ""
        held = (
            f", clocks throttled: {', '.join(device.throttle_reasons)}"
            if device.throttle_reasons
            else ""
        )
        text = f"{device.name}, {human_bytes(device.total_bytes)}{link}{held}"
        found.append(judged("device", text, not device.throttle_reasons, ""))
    driver = known.driver()
    found = found or [Fact("device", "none by NVML, AMD SMI or Level Zero", "note")]
    if driver:
        found.insert(0, Fact("driver", driver))
    rate, kind = network_peak()
    network = f"{human_rate(rate)} ({kind})" if rate else "the kernel does not report its speed"
    return [*found, Fact("network", network)]


# ---- limits ------------------------------------------------------------------------------------------


def memory() -> list[Fact]:
    """Shared memory, the host's limit, and the folders of rings and records."""
    shm = shutil.disk_usage("/dev/shm")
    text = f"{human_bytes(shm.free)} of {human_bytes(shm.total)} free"
    hint = "docker run --shm-size=16g: DataLoader workers and NCCL need it."
    facts = [judged("/dev/shm", text, shm.total >= _LEAST_SHM, hint)]
    host = HostReader().read(os.getpid())
    limit = (
        f"limit {human_bytes(host.limit_bytes)} ({host.cgroup})"
        if host.limit_bytes > 0
        else "no limit"
    )
    facts.append(Fact("host memory", f"{human_bytes(host.headroom_bytes)} to take, {limit}"))
    store = paths.store_root()
    existing = next((p for p in (store, *store.parents) if p.exists()), Path("/"))
    room = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    text = f"{store}, {human_bytes(room)} free" if writable else f"{store} cannot be written"
    foreign = paths.foreign(store, store / "runs")
    hint = "Set ZEROMON_STORE to another folder."
    is_good = writable and room > _GIB and not foreign
    return [*facts, judged("records", foreign or text, is_good, hint)]


def extension_cache() -> list[Fact]:
    """The folder of torch's compiled extensions, and each lock in it, for which every rank waits."""
    folder = cache_folder(os.environ)
    locks = cached_locks(folder)
    facts = [Fact("extensions", f"{folder}, {'no lock' if not locks else 'locked'}")]
    for lock in locks:
        hint = f"{removal_of(lock)}: ranks wait for it for ever." if lock.is_stale else ""
        severity = "warning" if lock.is_stale else "note"
        facts.append(Fact("lock", lock_text(lock), severity, hint))
    return facts


def limits() -> list[Fact]:
    """Limits of this user's processes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    opened = str(files) if files >= 0 else "unlimited"
    endless = locked == resource.RLIM_INFINITY
    pinned = "unlimited" if endless else human_bytes(locked)
    to_open = "ulimit -n 65536: each worker, peer and file takes one."
    to_lock = "ulimit -l unlimited: InfiniBand registers what it sends."
    return [
        judged("open files", opened, not 0 <= files < _LEAST_FILES, to_open),
        judged("locked memory", pinned, endless, to_lock, "note"),
    ]


def kernel() -> list[Fact]:
    """What this kernel reports of a dying or hanging process."""
    release = platform.release()
    numbers = tuple(int(p) for p in release.split("-")[0].split(".")[:2] if p.isdigit())
    tells = numbers >= _EXIT_STATUS_SINCE
    can, why, hint = right_to_trace()
    text = f"{release}: {'reports' if tells else 'does not report'} how a process ended"
    without = "Before Linux 6.15 the report of a killed rank has no signal."
    return [
        judged("kernel", text, tells, without, "note"),
        Fact("ptrace", why, "fine" if can else "note", hint),
    ]


LOOKS: tuple[Callable[[], list[Fact]], ...] = (
    zeromon_itself,
    torch_facts,
    frameworks,
    devices,
    memory,
    extension_cache,
    limits,
    kernel,
)
