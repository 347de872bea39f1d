"""Virtual devices for a training command: the machine that is modelled, and what its torch loads."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path, PurePath
from statistics import fmean, median, mode
from typing import Any, NamedTuple

from zeromon.base.errors import LaunchError, RingError
from zeromon.base.units import human_bytes
from zeromon.check.documents import UnreadableError, dialect_of, parse_config, read_text
from zeromon.check.launch import on_one_machine, read_command
from zeromon.cli.parser import add_flag, add_option, positive
from zeromon.cli.plan_setup import link_speed, parse_memory_size
from zeromon.cli.terminal import show_working
from zeromon.memory.speeds import DEVICES, find_named_device
from zeromon.readout import preflight
from zeromon.readout.preflight import UnitWait
from zeromon.ring import paths
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.codes import Flag, Phase, operation_by_name
from zeromon.ring.events import Issued, PhaseSpan, StepMark, decode_record
from zeromon.ring.files import try_lock_file
from zeromon.ring.paths import ring_paths
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.communication import CollectiveRow, bus_factor, overlap_ratio
from zeromon.snapshot.rank import VIRTUAL
from zeromon_vgpu.build import build_libraries
from zeromon_vgpu.intervals import Intervals, clip, length, subtract, union
from zeromon_vgpu.machine import IDENTITIES, write_machine
from zeromon_vgpu.timeline import Operation, read_timeline, uncovered_nanoseconds, unhindered_steps

# ---- waits of virtual devices -------------------------------------------------------------------

# The run of a preflight on the clock of its virtual devices: steps, phases, and the waits by unit.
# A device times each operation, and the ring of its rank says in which phase it was enqueued, and
# which unit called a collective.

Caller = tuple[int, str, str, str]
"""When it called, in nanoseconds of CLOCK_MONOTONIC; unit, operation and phase."""


SLOW = 1
"""Index of the times for a host that takes its time for an operator: views show those."""


class HostCalls(NamedTuple):
    """Calls, phases and steps of a rank's Python with their times, as far as its ring reaches back."""

    callers: list[Caller]
    """The collectives."""
    phases: list[tuple[int, int, Phase]]
    """Begin and end of each, likewise, and which one."""
    step_ends: dict[int, int]
    """When the host had enqueued which step."""

    def windows(self, operations: Sequence[Operation]) -> list[tuple[int, int, int]]:
        """The number of each step, and from when until when the host enqueued it.

        Without the first two, which do once what the others do not, and without the last one of a
        process that was ended: it had not written all operations.
        """
        last_written = max((operation.enqueued for operation in operations), default=0)
        return [
            (step, begin_ns, end_ns)
            for (earlier, begin_ns), (step, end_ns) in pairwise(self.step_ends.items())
            if 1 < earlier == step - 1 and end_ns <= last_written
        ]

    def phase_at(self, time_ns: int) -> Phase:
        """The phase that goes on then, the inner one of two."""
        position = bisect_right(self.phases, time_ns, key=itemgetter(0))
        phases = (phase for _, end_ns, phase in reversed(self.phases[:position]) if time_ns <= end_ns)
        return next(phases, Phase.OTHER)


class RankRings:
    """The rings of a live run, held open: the collector removes them once the run has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[Path, RingReader] = {}

    def open_new(self) -> None:
        """Opens the rings that have come."""
        for folder in self._folder.glob("*/"):
            for path in ring_paths(folder):
                if path not in self._readers:
                    with suppress(RingError, OSError):
                        self._readers[path] = RingReader(path)

    def calls(self, pid: int) -> HostCalls:
        """Returns what a process did, by its ring."""
        calls = HostCalls([], [], {})
        for reader in self._readers.values():
            if reader.header.pid != pid:
                continue
            units = {
                n.id: str(n.payload.get("fqn", "")) for n in reader.names() if n.kind == NameKind.UNIT
            }
            for record in reader.read(final=True):
                event = decode_record(record)
                if isinstance(event, Issued):
                    unit = units.get(event.unit, "")
                    calls.callers.append((event.t_ns, unit, event.op.label, event.phase.label))
                elif isinstance(event, PhaseSpan) and not event.flags & (Flag.DEVICE | Flag.ASYNC):
                    calls.phases.append((event.start_ns, event.t_ns, event.phase))
                elif isinstance(event, StepMark) and not event.flags & Flag.DEVICE:
                    calls.step_ends[event.step] = event.t_ns
        calls.phases.sort()
        return calls


def waits_by_unit(operations: Sequence[Operation], calls: HostCalls) -> tuple[UnitWait, ...]:
    """Returns what each unit's collectives take in a step, the longest wait first."""
    calls_of_rank = list(_collective_calls(uncovered_nanoseconds(operations, kind=SLOW), calls.callers))
    steps_of_calls = [
        [call for call in calls_of_rank if begin_ns < call[1].enqueued <= end_ns]
        for _, begin_ns, end_ns in calls.windows(operations)
    ]
    # In a step that the agent only counts, no call is known
    counts = [(len(calls), sum(bool(unit) for (unit, *_), *_ in calls)) for calls in steps_of_calls]
    usual_count = mode([count for count in counts if count[1]] or counts or [(0, 0)])
    counted = [
        calls for calls, count in zip(steps_of_calls, counts, strict=True) if count == usual_count
    ]
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, operation, exposed in chain.from_iterable(counted):
        start, finish = operation.unhindered[SLOW]
        for i, number in enumerate((1, operation.bytes, finish - start, exposed)):
            sums[key][i] += number
    n = len(counted)
    rows = [
        UnitWait(
            unit=unit, op=op, phase=phase, calls=calls / n, nbytes=round(size / n),
            seconds=duration / n / 1e9, exposed_seconds=exposed / n / 1e9,
        )
        for (unit, op, phase), (calls, size, duration, exposed) in sums.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.exposed_seconds, reverse=True))


def _collective_calls(
    collectives: Iterable[tuple[Operation, int]], callers: Sequence[Caller]
) -> Iterator[tuple[tuple[str, str, str], Operation, int]]:
    """Yields each of the *collectives* with the unit, operation and phase of its caller."""
    used = -1
    for operation, exposed in sorted(collectives, key=lambda pair: pair[0].enqueued):
        position = bisect_right(callers, operation.enqueued, key=itemgetter(0)) - 1
        # all_reduce for ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)
        camel = operation.name.removeprefix("ncclDevKernel_").partition("_")[0].partition("(")[0]
        kernel = re.sub(r"(?<!^)(?=[A-Z])", "_", camel).lower()
        # A second one after the same call was launched by C++, as those of DDP's reducer are
        is_known = position > used and kernel in (callers[position][2], _SEND_RECEIVE)
        used = max(used, position)
        yield callers[position][1:] if is_known else ("", kernel, ""), operation, exposed


_SEND_RECEIVE = "send_recv"
"""NCCL's kernel for sends, receives and all-to-all."""


# ---- the rank on that clock ----------------------------------------------------------------------


def modelled_steps(
    recent: Sequence[StepSummary], operations: Sequence[Operation], calls: HostCalls
) -> list[StepSummary]:
    """Returns the steps of *recent* with the times of the modelled devices, one right after the other.

    A step takes from the end of the last one on its device to its own.
    """
    ordered = sorted(operations, key=_ENQUEUED)
    finished = list(accumulate((op.unhindered[SLOW][1] for op in ordered), max))
    by_number, steps = {step.step: step for step in recent}, list[StepSummary]()
    for number, begin_ns, end_ns in calls.windows(operations):
        low, high = (bisect_right(ordered, at_ns, key=_ENQUEUED) for at_ns in (begin_ns, end_ns))
        if not 0 < low < high or number not in by_number:
            continue
        step, window = by_number[number], (finished[low - 1], finished[high - 1])
        of_step = ordered[low:high]
        sent = union(op.unhindered[SLOW] for op in of_step if op.kind == "collective")
        communication = clip(sent, *window)
        exposed = subtract(communication, union(op.unhindered[SLOW] for op in of_step if op.computes))
        phases, waits = _by_phase(of_step, window[0], exposed, calls)
        start_ns = steps[-1].end_ns if steps else step.start_ns
        steps.append(
            replace(
                step, start_ns=start_ns, end_ns=start_ns + window[1] - window[0], idle=False, untimed=0,
                communication_ns=length(communication), exposed_ns=length(exposed),
                phase_ns=phases, phase_exposed_ns=waits,
            )
        )  # fmt: skip
    return steps


_ENQUEUED = attrgetter("enqueued")


def _by_phase(
    operations: Iterable[Operation], reached: int, exposed: Intervals, calls: HostCalls
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nanoseconds of a step, from *reached* on, by the phase that enqueued what ends; the exposed part.

    A gap before an operation belongs to the operation's phase, which waits.
    """
    durations, waits = [0] * len(Phase), [0] * len(Phase)
    in_order = sorted(operations, key=lambda op: op.unhindered[SLOW])
    for op in in_order:
        finish = op.unhindered[SLOW][1]
        if finish > reached:
            phase = calls.phase_at(op.enqueued)
            durations[phase] += finish - reached
            waits[phase] += length(clip(exposed, reached, finish))
            reached = finish
    return tuple(durations), tuple(waits)


def on_modelled_clock(
    rank: RankSnapshot, steps: Sequence[StepSummary], waits: Sequence[UnitWait]
) -> RankSnapshot:
    """Returns *rank* with the modelled *steps*, and with the *waits* of its units in one of them."""
    if not steps:
        return replace(rank, steps=replace(rank.steps, median_seconds=None, mean_seconds=None))
    seconds = [step.seconds for step in steps]
    exposed, duration = sum(step.exposed_ns for step in steps), sum(seconds)
    sent = sum(step.communication_ns for step in steps)
    return replace(
        rank,
        steps=replace(
            rank.steps, recent=tuple(steps), median_seconds=median(seconds), mean_seconds=fmean(seconds),
            total_seconds=duration,
            phase_seconds={p.label: sum(step.phase_ns[p] for step in steps) / 1e9 for p in Phase},
        ),
        communication=replace(
            rank.communication,
            overlap_ratio=overlap_ratio(sent, exposed), exposed_ratio=exposed / 1e9 / duration,
            exposed_seconds=exposed / 1e9 / len(steps), wait_seconds=None, late_seconds=None,
            untimed={},
            traffic=tuple(_stats_row(w, rank.communication.collectives, len(steps)) for w in waits),
        ),
    )  # fmt: skip


def _stats_row(wait: UnitWait, totals: Sequence[CollectiveRow], steps: int) -> CollectiveStatsRow:
    """The row of a unit's *wait* in so many *steps*; its group is known where one alone has such."""
    rows = [row for row in totals if row.op == wait.op]
    of_group = rows[0] if len(rows) == 1 else None
    rate = wait.nbytes / wait.seconds if wait.seconds else None
    factor = bus_factor(operation_by_name(wait.op), of_group.group_size) if of_group else None
    busbw = rate * factor if rate and factor else None
    return CollectiveStatsRow(
        op=wait.op, phase=wait.phase, unit=wait.unit, calls=wait.calls, nbytes=wait.nbytes,
        group=of_group.group if of_group else "", group_size=of_group.group_size if of_group else 0,
        nodes=of_group.nodes if of_group else 0, dim=of_group.dim if of_group else "",
        count=round(wait.calls * steps), seconds=wait.seconds,
        exposed_seconds=wait.exposed_seconds, exposed_total_seconds=steps * wait.exposed_seconds,
        wait_seconds=None, transfer_seconds=wait.seconds, algbw_bytes_per_second=rate,
        busbw_bytes_per_second=busbw, best_busbw_bytes_per_second=busbw or 0.0,
    )  # fmt: skip


# ---- the virtual machine ------------------------------------------------------------------------

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
