"""Runs a training command on virtual GPUs, before it costs a GPU hour: does it start, does it fit?

  zeromon preflight --gpu h100 -- torchrun --nproc-per-node 8 train.py
  zeromon preflight --gpu a100-40 --nodes 2 --network 200Gb -- accelerate launch train.py
  zeromon preflight --gpu 24GiB --steps 4 --json -- deepspeed train.py --deepspeed_config ds.json

The script is unchanged and runs with its own torch, which must be a CUDA build, on libraries that stand
in for NVIDIA's. Real: the script, the framework, the caching allocator, the order of kernels and
collectives, the data loader. Modelled: how long kernels and collectives take, and the memory of the
devices, which takes host memory only where something is written. Kernels compute nothing, so losses and
other values that the device computes mean nothing.

The run ends after --steps steps, when it hangs, or when it fails. It takes real steps: point checkpoints
and trackers elsewhere. What it was stays as a run: zeromon report NAME. The libraries are built once, in
half a minute, by this machine's g++.

Exit code 0 where it fits and nothing is found; 1 where it does not, hangs or fails, or has findings; 2
where it cannot be asked here.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zeromon.base.errors import LaunchError, ZeromonError
from zeromon.base.units import human_bytes
from zeromon.check.launch import on_one_machine, read_command
from zeromon.cli import tell_user
from zeromon.cli.measured_launch import Request, run_launch
from zeromon.cli.parser import add_flag, add_option, positive
from zeromon.cli.plan_setup import link_speed, parse_memory_size
from zeromon.cli.report import snapshot_of
from zeromon.cli.terminal import show_json, show_progress, show_text, show_working
from zeromon.memory.fit import Trial
from zeromon.memory.speeds import DEVICES, Device, find_named_device
from zeromon.probes.process import find_training_python
from zeromon.readout.preflight import Two, preflight_result, preflight_text
from zeromon.readout.verdict import hang_text
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot
from zeromon_vgpu.build import build
from zeromon_vgpu.machine import IDENTITIES, write_machine
from zeromon_vgpu.timeline import read_timeline, unhindered_steps

_REACHED = 0.8
"""Share of the peaks of a data sheet that large products, copies and messages reach: an H200's products
reach 0.79 of them, its memory 0.88, its PCIe 0.84 (docs/vgpu.md)."""
_GPU = "h100"
_STEPS, _SECONDS = 6, 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon preflight [options] -- command ...``"""
    machine = parser.add_argument_group("the machine that is modelled")
    add_option(machine, "--gpu", "GPU", "h100, a100-40, ..., or its memory: 24GiB", str, _GPU)
    add_option(
        machine, "--nodes", "N",
        "nodes, each with the processes that the command starts on one (default: as it says)", positive,
    )  # fmt: skip
    add_option(
        machine, "--link", "SPEED",
        "between the devices of a node: nvlink4, pcie4, 25GB/s (default: that of --gpu)", link_speed,
    )  # fmt: skip
    add_option(
        machine, "--network", "SPEED",
        "between nodes, all adapters of one: 8x400Gb (bits), 25GB/s, ib-ndr (default: 400Gb a device)",
        link_speed,
    )  # fmt: skip
    length = parser.add_argument_group("how long")
    add_option(length, "--steps", "N", "optimizer steps", positive, _STEPS)
    add_option(length, "--seconds", "N", "at most so long", positive, _SECONDS)
    parser.add_argument("--name", help="name of the run (default: preflight, the script, the time)")
    add_option(parser, "-o --output", "FILE", "keep what the command prints", Path)
    add_flag(parser, "--json", "print JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")


def call(options: argparse.Namespace) -> int:
    """Launches the command on virtual devices, and says what became of it."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError("no command to run", "zeromon preflight -- torchrun ... train.py")
    torch = find_torch(command)
    libraries = _libraries(torch)
    name = options.name or f"preflight-{paths.new_run_id(command)}"
    folder = paths.make_private_folder(paths.choose_ring_root().parent / f"zeromon-{name}")
    try:
        return _run(command, options, libraries, name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    command: Sequence[str], options: argparse.Namespace, libraries: Path, name: str, folder: Path
) -> int:
    machine = machine_values(options)
    write_machine(folder, changes=machine)
    # Its own collector, which reads the virtual NVML: one of this node would read the real one
    os.environ["ZEROMON_DIR"] = str(folder / "live")
    command, places = placed_command(command, options.nodes)
    environment = {
        "VGPU_DIR": str(folder), "VGPU_LIBRARIES": str(libraries),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH", "")))
        ),
        "TRITON_LIBCUDA_PATH": str(libraries), "DS_IGNORE_CUDA_DETECTION": "1", **places,
    }  # fmt: skip
    request = Request(
        trial=Trial(stage="", micro_batch=1), command=command, environment=environment, name=name,
        log=options.output or folder / "output", steps=options.steps, most_seconds=options.seconds,
        stop_reason=_hang_reason,
    )  # fmt: skip
    tell_user(f"to look at it meanwhile: ZEROMON_DIR={folder / 'live'} zeromon attach")
    outcome, error = "", ""
    try:
        outcome = run_launch(request, lambda message: show_progress(f"  {message}")).outcome
    except LaunchError as failure:
        error = str(failure)
    show_progress("")
    run = _snapshot(name)
    output = request.log.read_text(errors="replace")
    if run is None or not run.ranks:
        sys.stderr.write(output[-2000:])
        raise LaunchError(
            error or "no rank of the command used torch.distributed", "See its output above."
        )
    result = preflight_result(
        run, str(machine["name"]), outcome or error, options.steps, _steps_of_ranks(run, folder)
    )
    if options.json:
        show_json({"preflight": result, "run": run})
    else:
        show_text(preflight_text(run, result))
        if error and not any(rank.status.exception for rank in run.ranks):
            sys.stderr.write("\n".join(output.strip().splitlines()[-12:]) + "\n")
    return 1 if outcome or error or result.findings else 0


def machine_values(options: argparse.Namespace) -> dict[str, float | str]:
    """What the virtual machine is, for its file: that of --gpu, --link and --network.

    Raises :class:`PlanError` where --gpu is neither a device nor a size.
    """
    named = find_named_device(options.gpu)
    device = named or DEVICES[_GPU]
    kind = next((kind for kind, known in DEVICES.items() if known is named), _GPU)
    label, major, minor, multiprocessors, clock = IDENTITIES[kind]
    if named is None:
        size = parse_memory_size("--gpu", options.gpu)
        label, device = f"{label} of {human_bytes(size)}", _with_memory(device, size)
    link = options.link or device.link
    network = options.network or _NETWORK
    return {
        # every view that shows a run's device then says so
        "name": f"{label} (virtual)",
        "major": major, "minor": minor, "multiprocessors": multiprocessors, "clock_hz": clock,
        "memory_bytes": float(device.nbytes),
        "flops_half": _REACHED * device.half_flops, "flops_fp8": 2 * _REACHED * device.half_flops,
        "flops_tf32": _REACHED * device.half_flops / 2, "flops_fp32": _REACHED * device.single_flops,
        "memory_speed": _REACHED * device.memory, "pinned_speed": _REACHED * device.host,
        "node_speed": _REACHED * link, "pcie_speed": _REACHED * min(link, device.host),
        "network_speed": _REACHED * network, "nvlink_devices": 8 if link > device.host else 0,
    }  # fmt: skip


_NETWORK = 50e9
"""Bytes/s of one adapter of 400 Gb, of which a device has one on most nodes of H100s."""


def _with_memory(device: Device, nbytes: int) -> Device:
    return Device(
        nbytes, device.half_flops, device.single_flops, device.memory, device.link, device.host
    )


def placed_command(command: Sequence[str], nodes: int | None) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts the ranks of all nodes here, and the variables that place them.

    *nodes*: None for as many as *command* says. Raises :class:`LaunchError` where it does not say how
    many processes it starts.
    """
    launch = read_command(command)
    told = launch.options.get("nnodes" if launch.launcher == "torchrun" else "num_nodes", 1)
    if launch.launcher == "accelerate":
        told = launch.options.get("num_machines", 1)
    if nodes is None and told == 1:
        return list(command), {}
    if launch.ranks is None or not isinstance(told, int):
        raise LaunchError(
            "the command does not say how many processes it starts",
            "Like torchrun --nproc-per-node 8, accelerate launch --num_processes 8.",
        )
    per_node = launch.ranks // told
    world = per_node * (nodes or told)
    places = f"{per_node} {world} {' '.join(map(str, range(world)))}"
    return on_one_machine(command, world), {"VGPU_PLACES": places}


# ---- the torch of the command, and the libraries for it -----------------------------------------


def find_torch(command: Sequence[str]) -> Path:
    """Returns the folder of the torch that *command* imports.

    Raises :class:`LaunchError` without one, and where it is a build for CPUs.
    """
    python = python_of(command[0])
    find = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    done = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False, cwd="/")
    origin = done.stdout.strip()
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


def python_of(program: str) -> str:
    """Returns the Python that runs *program*: itself, or that in its first line."""
    found = shutil.which(program)
    if found is None:
        raise LaunchError(f"there is no {program}", "Is the environment of the training active?")
    path = str(Path(found).absolute())  # and no further: a link in a virtual environment is its Python
    if re.fullmatch(r"python[\d.]*", Path(path).name):
        return path
    with suppress(OSError), open(path, "rb") as file:
        words = file.readline(500).decode(errors="replace").removeprefix("#!").split()
        interpreter = words[-1] if words and words[0].endswith("/env") else (words or [""])[0]
        if "python" in Path(interpreter).name and (known := shutil.which(interpreter)):
            return known
    return find_training_python()


def _libraries(torch: Path) -> Path:
    """Builds the libraries for *torch*, unless they are there, and returns their folder."""
    if shutil.which("g++") is None:
        raise LaunchError(
            "no g++, with which the virtual device is built", "apt-get install g++ binutils"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeromon" / "vgpu"
    folder = cache / re.sub(r"\W+", "-", str(torch)).strip("-")
    with show_working("building the virtual device, half a minute, once"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return build(torch, folder)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            raise LaunchError(f"the virtual device cannot be built: {error}") from error


# ---- what became of it --------------------------------------------------------------------------


def _hang_reason(run: RunSnapshot) -> str:
    """The first hang that lasts; by then the ranks have sent the lines where they stand."""
    lasting = (hang for hang in run.hangs if hang.seconds > _HANG_SECONDS and not hang.pause)
    return next((hang_text(run, hang) for hang in lasting), "")


def _steps_of_ranks(run: RunSnapshot, folder: Path) -> list[tuple[Two, Two]]:
    """Seconds of a step and of its exposed communication on the devices of some ranks."""
    found = []
    for rank in run.ranks[:_TIMED_RANKS]:
        # what the first steps do once, the later ones do not
        windows = [(s.start_ns, s.end_ns) for s in rank.steps.recent if s.step > 1]
        if kinds := unhindered_steps(list(read_timeline(folder, rank.rank)), windows):
            fast, slow = kinds
            found.append(((fast.span / 1e9, slow.span / 1e9), (fast.exposed / 1e9, slow.exposed / 1e9)))
    return found


_TIMED_RANKS = 8
_HANG_SECONDS = 15.0


def _snapshot(name: str) -> RunSnapshot | None:
    try:
        return snapshot_of(name)[0]
    except ZeromonError:
        return None
