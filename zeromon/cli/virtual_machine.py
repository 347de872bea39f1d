"""Virtual devices for a training command: the machine that is modelled, and what its torch loads."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from zeromon.base.errors import LaunchError
from zeromon.base.units import human_bytes
from zeromon.check.documents import UnreadableError, dialect_of, parse_config, read_text
from zeromon.check.launch import on_one_machine, read_command
from zeromon.cli.parser import add_flag, add_option, positive
from zeromon.cli.plan_setup import link_speed, parse_memory_size
from zeromon.cli.terminal import show_working
from zeromon.cli.virtual_waits import RankRings, modelled_steps, on_modelled_clock, waits_by_unit
from zeromon.memory.speeds import DEVICES, find_named_device
from zeromon.readout import preflight
from zeromon.ring import paths
from zeromon.ring.files import try_lock_file
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.rank import VIRTUAL
from zeromon_vgpu.build import build_libraries
from zeromon_vgpu.machine import IDENTITIES, write_machine
from zeromon_vgpu.timeline import read_timeline, unhindered_steps

_REACHED = 0.8
"""Share of the peaks of a data sheet that large products, copies and messages reach: an H200's products
reach 0.79 of them, its memory 0.88, its PCIe 0.84 (docs/evidence/virtual-device.md)."""
MAX_PROCESSES = 16
"""Each imports torch, which takes some seconds of a core and 0.4 GiB of the host."""
_GPU = "h100"
"""Whose speeds a device has of which the memory alone is known."""
_NETWORK = 8 * 50e9
"""Bytes/s of eight adapters of 400 Gb, as a node of eight H100s has them."""


def add_machine_arguments(group: argparse._ActionsContainer, gpu: str) -> None:
    """Adds what describes the virtual machine; *gpu*: the default."""
    virtual = "" if gpu else "launch on virtual devices, as zeromon preflight does: "
    add_option(group, "--gpu", "GPU", virtual + "h100, a100-40, ..., or a memory: 24GiB", str, gpu)
    add_option(
        group, "--nodes", "N",
        "nodes, each with the processes that the command starts on one (default: as it says)", positive,
    )  # fmt: skip
    add_option(
        group, "--processes", "N",
        "of more ranks than N, only a few run, and stand for the others", positive, MAX_PROCESSES,
    )  # fmt: skip
    add_option(
        group, "--link", "SPEED",
        "between the devices of a node: nvlink4, pcie4, 25GB/s (default: that of --gpu)", link_speed,
    )  # fmt: skip
    add_option(
        group, "--network", "SPEED",
        "between nodes, all adapters of one: 25GB/s, ib-ndr (default: 8x400Gb, which are bits)",
        link_speed, _NETWORK,
    )  # fmt: skip
    add_flag(group, "--arithmetic", "compute values on the CPU, for a small model: losses are real")


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """A virtual machine that is ready for one run after the other."""

    folder: Path
    """Where its devices write what they do."""
    device: str
    environment: Mapping[str, str]
    values: Mapping[str, float | str]
    operator_seconds: float = preflight.OPERATOR_SECONDS

    def check_calibrating(self, run: RunSnapshot) -> None:
        """Raises :class:`LaunchError` where *run* had other devices, or its command starts no ranks."""
        devices = {rank.machine.device.name for rank in run.ranks if rank.machine.device is not None}
        ran_on = min(devices, default="unknown devices")
        if find_named_device(ran_on) is not find_named_device(self.device):
            raise LaunchError(f"{run.run} ran on {ran_on}", "Give --gpu the device of the run.")
        if not run.command or shutil.which(run.command[0]) is None:
            raise LaunchError(
                f"the record of {run.run} lacks the command that started its ranks",
                "zeromon run -- torchrun ... records it.",
            )

    def calibrated_by(self, run: RunSnapshot, modelled: RunSnapshot) -> "VirtualMachine":
        """Returns the machine at the speeds of *run*, whose command it has run as *modelled*."""
        if modelled.ranks[0].world_size != run.ranks[0].world_size:
            raise LaunchError(
                f"the command of {run.run} starts {modelled.ranks[0].world_size} ranks here",
                f"The run had {run.ranks[0].world_size}: --calibrate needs the command of all ranks.",
            )
        speeds = preflight.calibrated_speeds(run, self.steps_of_ranks(modelled))
        write_machine(self.folder, changes={**self.values, **speeds})
        label = f"{self.device}, {preflight.calibration_text(run.run, speeds)}"
        return replace(self, device=label, operator_seconds=speeds["operator_ns"] / 1e9)

    def steps_of_ranks(self, run: RunSnapshot) -> list[tuple[preflight.Two, preflight.Two]]:
        """Seconds of a step and of its exposed communication on the devices of the ranks."""
        steps = []
        for rank in run.ranks:
            # what the first steps do once, the later ones do not
            windows = [(s.start_ns, s.end_ns) for s in rank.steps.recent if s.step > 1]
            if kinds := unhindered_steps(
                list(read_timeline(self.folder, f"{rank.rank}-{rank.pid}")), windows
            ):
                fast, slow = kinds
                steps.append(
                    ((fast.span / 1e9, slow.span / 1e9), (fast.exposed / 1e9, slow.exposed / 1e9))
                )
        return steps

    def on_its_clock(
        self, run: RunSnapshot, rings: RankRings
    ) -> tuple[RunSnapshot, dict[int, Sequence[preflight.UnitWait]]]:
        """Returns *run* with the times of its devices, and the waits of each rank that was timed."""
        ranks, waits = [], dict[int, Sequence[preflight.UnitWait]]()
        for rank in run.ranks:
            operations = list(read_timeline(self.folder, f"{rank.rank}-{rank.pid}"))
            calls = rings.calls(rank.pid)
            waits[rank.rank] = waits_by_unit(operations, calls)
            steps = modelled_steps(rank.steps.recent, operations, calls)
            ranks.append(on_modelled_clock(rank, steps, waits[rank.rank]))
        return replace(run, ranks=tuple(ranks), stragglers=()), waits


@contextmanager
def virtual_machine(
    command: Sequence[str], options: argparse.Namespace, name: str
) -> Iterator[VirtualMachine]:
    """Makes the machine that *options* describe for the torch of *command*; removes it at the end.

    Within, this process and its children keep live runs in a folder of the machine's own.
    """
    values, torch = machine_values(options), find_torch(command)
    # A CUDA 13 supports no device that is older than compute capability 7.5
    cuda = re.search(r"^cuda\b.*'(\d+)", (torch / "version.py").read_text(), re.MULTILINE)
    if cuda and int(cuda[1]) >= 13 and (values["major"], values["minor"]) < (7, 5):
        raise LaunchError(
            f"this torch, for CUDA {cuda[1]}, has no kernels for {values['name']}",
            "Install the build of torch that this GPU will run: one for CUDA 12.",
        )
    libraries = build_cached_libraries(torch)
    root = paths.choose_ring_root().parent
    _remove_abandoned(root)
    folder, lock = paths.make_private_folder(root / f"zeromon-{name}"), None
    earlier_folder = os.environ.get("ZEROMON_DIR")
    try:
        with suppress(OSError):  # of a file system without locks, where nothing is ever abandoned
            lock = try_lock_file(folder / _LOCK)
        write_machine(folder, changes=values)
        # Its own collector, which reads the virtual NVML: one of this node would read the real one
        os.environ["ZEROMON_DIR"] = str(folder / "live")
        inherited = os.environ.get("LD_LIBRARY_PATH", "")
        environment = {
            "VGPU_DIR": str(folder), "VGPU_LIBRARIES": str(libraries),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(libraries), inherited))),
            "TRITON_LIBCUDA_PATH": str(libraries), "DS_IGNORE_CUDA_DETECTION": "1",
            "VGPU_ARITHMETIC": "1" if options.arithmetic else "",
        }  # fmt: skip
        yield VirtualMachine(folder, str(values["name"]), environment, values)
    finally:
        os.environ.pop("ZEROMON_DIR")
        if earlier_folder is not None:
            os.environ["ZEROMON_DIR"] = earlier_folder
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


_LOCK = "preflight.lock"


def _remove_abandoned(root: Path) -> None:
    """Removes what killed preflights have left: virtual devices in memory of the host."""
    for path in root.glob(f"zeromon-*/{_LOCK}"):
        with suppress(OSError):
            is_own = paths.owner_uid_of(path.parent) == os.getuid()
            if is_own and (lock := try_lock_file(path)) is not None:
                shutil.rmtree(path.parent, ignore_errors=True)
                os.close(lock)


def machine_values(options: argparse.Namespace) -> dict[str, float | str]:
    """The values of the virtual machine's file by --gpu, --link and --network.

    Raises :class:`PlanError` where --gpu is neither a device nor a size.
    """
    named = find_named_device(options.gpu)
    device = named or DEVICES[_GPU]
    kind = next((kind for kind, peaks in DEVICES.items() if peaks is named), _GPU)
    label, major, minor, multiprocessors, clock = IDENTITIES[kind]
    if named is None:
        size = parse_memory_size("--gpu", options.gpu)
        label, device = f"{label} of {human_bytes(size)}", replace(device, nbytes=size)
    link = options.link or device.link
    return {
        # every view that shows a run's device then says so
        "name": label + VIRTUAL,
        "major": major, "minor": minor, "multiprocessors": multiprocessors, "clock_hz": clock,
        "memory_bytes": float(device.nbytes),
        "flops_half": _REACHED * device.half_flops, "flops_fp8": 2 * _REACHED * device.half_flops,
        "flops_tf32": _REACHED * device.half_flops / 2, "flops_fp32": _REACHED * device.single_flops,
        "memory_speed": _REACHED * device.memory, "pinned_speed": _REACHED * device.host,
        "node_speed": _REACHED * link, "pcie_speed": _REACHED * min(link, device.host),
        "network_speed": _REACHED * options.network, "nvlink_devices": 8 if link > device.host else 0,
        # Nobody reads the values of larger ones, and moving them takes this host's time
        "largest_payload": 1e18 if options.arithmetic else float(1 << 16),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of the ranks of a run on this machine."""

    command: list[str]
    environment: Mapping[str, str]
    ranks: tuple[int, ...] = ()
    """Those that run, where the others are simulated; () where all do."""


def placed_launch(
    command: Sequence[str], nodes: int | None, processes: int, environment: Mapping[str, str]
) -> Launch:
    """Returns the launch of the ranks of all nodes on this machine, at most so many *processes*.

    *nodes*: None for as many as *command* says. Raises :class:`LaunchError` where it does not say how
    many processes it starts.
    """
    launch = read_command(command)
    if launch.launcher == "accelerate":
        launch = replace(launch, options={**_accelerate_settings(launch.options), **launch.options})
    counts = map(launch.options.get, ("nnodes", "num_nodes", "num_machines"))
    node_count = next(filter(None, counts), 1)
    is_small = nodes is None and node_count == 1 and (launch.ranks or 1) <= processes
    # DeepSpeed would connect to the hosts of either file
    has_default = launch.launcher == "deepspeed" and _DEFAULT_HOSTFILE.is_file()
    if is_small and not has_default and "hostfile" not in launch.options:
        return Launch(list(command), environment)
    if launch.ranks is None or not isinstance(node_count, int):
        raise LaunchError(
            "the command does not say how many processes it starts",
            "Like torchrun --nproc-per-node 8, accelerate launch --num_processes 8.",
        )
    per_node = launch.ranks // node_count
    world = per_node * (nodes or node_count)
    ranks = representatives(world, per_node, processes) if world > processes else tuple(range(world))
    rank_places = f"{per_node} {world} {' '.join(map(str, ranks))}"
    variables = {**environment, "VGPU_PLACES": rank_places}
    if len(ranks) < world:
        variables["VGPU_RANKS"] = ",".join(map(str, ranks))
    return Launch(on_one_machine(command, len(ranks)), variables, ranks if len(ranks) < world else ())


_DEFAULT_HOSTFILE = Path("/job/hostfile")
"""``DLTS_HOSTFILE`` in deepspeed/launcher/runner.py."""


def _accelerate_settings(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the file that ``accelerate launch`` reads, by default the user's own."""
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = Path(options.get("config_file") or hub / "accelerate" / "default_config.yaml")
    with suppress(UnreadableError):
        content = read_text(path)
        return parse_config(content, path.name, dialect_of(path, content)).data
    return {}


def representatives(world: int, per_node: int, count: int) -> tuple[int, ...]:
    """Returns *count* ranks that stand for all: of the first, the second and the last node."""
    chosen = dict.fromkeys((0, per_node % world, world - per_node, 1, world - 1, *range(world)))
    return tuple(sorted(list(chosen)[:count]))


# ---- the torch of the command, and the libraries for it -----------------------------------------


def find_torch(command: Sequence[str]) -> Path:
    """The folder of the command's torch; raises :class:`LaunchError` without a build for GPUs."""
    start = python_of(command)
    # without the folder of the command, where a torch.py may lie
    find = "import sys; del sys.path[0]; import importlib.util as u; print(u.find_spec('torch').origin)"
    done = subprocess.run([*start, "-c", find], capture_output=True, text=True, check=False)
    python, origin = " ".join(start), done.stdout.strip()
    if not origin:
        raise LaunchError(
            f"{python} has no torch", "Give the command in the environment of the training."
        )
    torch = Path(origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise LaunchError(
            f"the torch of {python} is a build for CPUs",
            "A preflight needs the build that the GPUs will run: pip install torch, from PyPI.",
        )
    return torch


def python_of(command: Sequence[str]) -> list[str]:
    """Returns how *command* starts its Python; of a shell script, the first on the path."""
    if PurePath(command[0]).name in _STARTS_ELSEWHERE:
        way_out = "Give what it starts on one node, such as torchrun, and --nodes."
        raise LaunchError(f"{command[0]} starts processes on other machines", way_out)
    if shutil.which(command[0]) is None:
        raise LaunchError(f"there is no {command[0]}", "Is the environment of the training active?")
    names = [PurePath(token).name for token in command]
    count = len(names) if names[0] in _ENTERS_ENVIRONMENT else 0
    at = next((n for n in range(count) if _STARTS_PYTHON.fullmatch(names[n])), 0)
    if names[at].startswith("python"):
        # And no further: a link in a virtual environment is its Python
        return list(command[: at + 1])
    if at and "/" not in command[at]:
        return [*command[:at], "python"]
    with suppress(OSError), open(shutil.which(command[at]) or command[at], "rb") as file:
        interpreters = file.readline(500).decode(errors="replace").removeprefix("#!").split()
        pythons = filter(None, (shutil.which(i) for i in interpreters if "python" in PurePath(i).name))
        return [next(pythons, shutil.which("python") or sys.executable)]
    return [sys.executable]


_STARTS_PYTHON = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|tune|[\w-]+\.py")
_ENTERS_ENVIRONMENT = {"uv", "env", "nice", "numactl", "taskset", "conda", "poetry", "pixi"}
_STARTS_ELSEWHERE = {"srun", "sbatch", "salloc", "qsub", "mpirun", "mpiexec", "pdsh", "ssh"}


def build_cached_libraries(torch: Path) -> Path:
    """Builds the libraries for *torch*, unless they are there, and returns their folder."""
    if shutil.which("g++") is None:
        raise LaunchError(
            "no g++, with which the virtual device is built",
            "apt-get install g++ binutils; without root: conda install -c conda-forge gxx binutils",
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeromon" / "vgpu"
    folder = cache / re.sub(r"\W+", "-", str(torch)).strip("-")
    with show_working("building the virtual device, half a minute, once"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return build_libraries(torch, folder)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            cause = "g++ failed" if isinstance(error, subprocess.CalledProcessError) else error
            way_out = f"Is {cache} full? XDG_CACHE_HOME chooses another folder."
            raise LaunchError(f"the virtual device cannot be built: {cause}", way_out) from error
