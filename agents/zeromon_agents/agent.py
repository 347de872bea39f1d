"""One agent a training process: puts the hooks in, keeps them quiet, takes them out.

The training thread does as little as possible. What needs no hook is done once a second by a daemon
thread (the *beat*): host memory, signs of life, telling the user once when something broke, and
starting a collector when there is none.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from zeromon import __version__, paths
from zeromon.events import ExitKind, Flag, Kind
from zeromon.ring import RingWriter
from zeromon_agents import model_facts
from zeromon_agents.allocator import Allocator, cuda_ready
from zeromon_agents.c10d import Collectives
from zeromon_agents.capture import PROFILER, Capture
from zeromon_agents.census import Census, census_step
from zeromon_agents.ddp import DISTRIBUTED, Ddp
from zeromon_agents.deepspeed import DeepSpeed, group_label
from zeromon_agents.found import find
from zeromon_agents.fsdp1 import RUNTIME, WRAPPER, Fsdp1
from zeromon_agents.fsdp2 import PARAM_GROUP, STATE, Fsdp2, Units
from zeromon_agents.guard import Guard
from zeromon_agents.host import Host
from zeromon_agents.imports import ImportWatch
from zeromon_agents.meeting import Meeting, is_first
from zeromon_agents.offload import Disk, watch_disk
from zeromon_agents.patches import Patches
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import IDLE, OFF, ON, Recorder
from zeromon_agents.standing import Standing
from zeromon_agents.step import Steps
from zeromon_agents.torch_roles import Models
from zeromon_agents.unseen import WARM_UP_STEPS, Unseen

_BEAT_SECONDS = 1.0
_COLLECTOR_EVERY = 5
_HUNG_AFTER_NS = 5_000_000_000


_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)  # fmt: skip


def first_number(names: Sequence[str], otherwise: int) -> int:
    """The first of these environment variables that is a number."""
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdigit()), otherwise)


class Place:
    """Which rank this process is."""

    def __init__(self) -> None:
        distributed = torch.distributed
        ready = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if ready else int(os.environ.get("RANK", 0))
        world = distributed.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", 1))
        self.world_size = world
        said = first_number(_LOCAL_RANK, -1)
        self.local_rank = self.rank if said < 0 else said
        self.knows_local_rank = said >= 0
        self.local_world_size = first_number(_LOCAL_SIZE, 0)
        """0 where the launcher does not say."""

    def introduces(self, run_dir: Path) -> bool:
        """Whether this rank is the one of its node that introduces it to the others."""
        return self.local_rank == 0 if self.knows_local_rank else is_first(run_dir)


class Joined(NamedTuple):
    """A process that was running already, and what those who joined it said."""

    pid: int
    """Of this process as the collector sees it."""
    settings: dict[str, str]
    """Their ZEROMON_ variables."""


class Agent:
    """The hooks of one process, from :meth:`start` to :meth:`stop`."""

    def __init__(self, run_dir: Path, place: Place, joined: Joined | None = None) -> None:
        pid = joined.pid if joined else os.getpid()
        name = f"rank{place.rank}.{pid}.{secrets.token_hex(2)}.ring"
        self.guard = Guard()
        self.ring = RingWriter(run_dir / name, rank=place.rank, pid=pid)
        self.joined = joined
        self.recorder = Recorder(self.ring, self.guard)
        self.place = place
        self.run_dir = run_dir
        self.patches = Patches()
        self.imports = ImportWatch()
        self.device = DeviceTimer(self.recorder)
        self.collectives = Collectives(self.recorder, self.device)
        self.steps = Steps(self.recorder, self._before_step_mark, self.collectives.counts.clear)
        self.collectives.joined = self.steps.joining = joined is not None
        self._shown_hang_of = -1
        self.models = Models(self.guard.note)
        self._described: dict[str, Any] = {}
        self._describe_from = 0
        self.ddp = Ddp(
            self.recorder, self.steps, self.collectives, self.device, self.patches, self.models
        )
        self.collectives.framework_label = group_label
        self.capture = Capture(self.recorder, self.steps, run_dir, place.rank)
        self.census = Census(self.recorder)
        self.census.add(self.models.claims)
        self._census_of = -1
        self.deepspeed = DeepSpeed(
            self.recorder, self.steps, self.device, self.patches, self.census
        )
        self.unseen = Unseen(self.recorder, self.collectives, self.ddp.buckets)
        self.allocator = Allocator(self.recorder)
        self.host = Host(self.recorder)
        self.units = Units(self.recorder, self.device)
        self.standing = Standing(self.recorder, self.collectives)
        guarded = self.guard.guarded  # one that fails takes neither the others nor the step with it
        self._counting = (
            guarded(self.collectives.flush_step),
            guarded(self.deepspeed.transfers.flush),
        )
        self._sampling = (
            guarded(self.device.poll),
            guarded(self.host.sample),
            guarded(self.allocator.sample),
        )
        self._accounting = guarded(self.unseen.account)
        self._describing = guarded(self._describe_new_models)
        self._stopping = threading.Event()
        self._beating: threading.Thread | None = None
        self._excepthook: Any = None
        self._told_device = False
        self.meeting: Meeting | None = None
        if place.world_size > max(1, place.local_world_size) and place.introduces(run_dir):
            self.meeting = Meeting(
                run_dir, place.rank, place.local_world_size, place.world_size, self.guard
            )

    # ---- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Installs every hook; those on modules not yet imported come when they are."""
        self._describe()
        self._watch_existing_groups()
        self.guard.on_limit = self.pause
        self.steps.on_optimizer = self.guard.guarded(self._optimizer_begins)
        self.steps.on_backward = self.guard.guarded(self._backward_begins)
        self.collectives.install(self.patches)
        fsdp2 = Fsdp2(self.units, self.steps, self.patches, self.models.saw_module)
        fsdp1 = Fsdp1(self.units, self.steps, self.patches, self.models)
        for module, watch in (
            ("torch.autograd", lambda m: self.steps.watch_backward(m, self.patches)),
            ("torch.utils.data.dataloader", lambda m: self.steps.watch_data(m, self.patches)),
            (DISTRIBUTED, self.ddp.watch),
            (PARAM_GROUP, fsdp2.watch_param_group),
            (STATE, fsdp2.watch_state),
            (RUNTIME, fsdp1.watch_runtime),
            (WRAPPER, fsdp1.watch_wrapper),
            (PROFILER, lambda m: self.capture.watch_profiler(m, self.patches)),
        ):
            self.imports.when_imported(module, self.guard.guarded(watch))
        self.deepspeed.watch(self.imports)
        disk = Disk(self.recorder, self.deepspeed.transfers, self.patches)
        watch_disk(self.imports, disk, self.guard.guarded)
        atexit.register(self._at_exit)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        # a step that has begun without us is counted and not timed
        self.recorder.mode = IDLE if self.steps.joining else ON
        self.recorder.detailed = True
        self._beating = threading.Thread(target=self._beat, name="zeromon", daemon=True)
        self._beating.start()
        if self.meeting is not None:
            self.meeting.start()

    def stop(self) -> list[str]:
        """Takes every hook out and says goodbye; returns what somebody else has patched over."""
        if self._stopping.is_set():
            return []
        self._stopping.set()
        self.recorder.mode = OFF
        self.guard.guarded(self.capture.close)("the agent was stopped")
        self.ddp.stop()
        self.units.stop()
        self.imports.close()
        if self.meeting is not None:
            self.meeting.stop()
        kept = self.patches.restore()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)
        self.recorder.emit(Kind.EXIT, op=ExitKind.DETACHED)
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(2 * _BEAT_SECONDS)
        return kept

    def pause(self) -> None:
        """Switches all hooks off, in place: too many of them failed."""
        self.recorder.mode = OFF

    # ---- what is told once --------------------------------------------------------------------

    def _describe(self) -> None:
        place = self.place
        self.recorder.meta(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            node=socket.gethostname(),
            pid=os.getpid(),
            torch=torch.__version__,
            python=sys.version.split()[0],
            agent=__version__,
            device="cpu",
            argv=sys.argv[:20],
        )

    def _describe_device(self) -> None:
        if self._told_device or not cuda_ready():
            return
        self._told_device = True
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        self.recorder.meta(device=f"cuda:{index}", device_name=properties.name, device_uuid=uuid)

    def _watch_existing_groups(self) -> None:
        world = torch.distributed.distributed_c10d._world
        for pg in list(world.pg_map):
            if hasattr(pg, "group_name"):
                self.collectives.group_of(pg, existed=True)

    def _optimizer_begins(self, optimizer: Any) -> None:
        """Gradients are complete and nothing is updated yet: the moment of the census."""
        if self.recorder.mode == OFF:
            return
        self.models.saw_optimizer(optimizer)
        following = self.recorder.step + 1
        if following == 1:  # before it makes its state, which may be the end of the process
            self._describing(0)
        due = self.recorder.mode == ON and census_step(following, self.recorder.before)
        if due and self._census_of != following:
            self._census_of = following
            self.census.take()

    def _backward_begins(self) -> None:
        if self.recorder.mode == ON:
            self.allocator.sample_tensors()

    def _describe_new_models(self, step: int) -> None:
        """At the end of a step in which something came; ever more seldom.

        A script may go on making optimizers, and each description stays in the name table.
        """
        if self.models.changed and step >= self._describe_from:
            self.models.changed = False
            self._describe_from = 2 * step
            self._describe_models()

    def _describe_models(self) -> None:
        modules, optimizers = self.models.live()
        facts: dict[str, Any] = {}
        if optimizers:
            facts["optimizer"] = type(optimizers[0]).__name__
            if facts["optimizer"] == "ZeroRedundancyOptimizer":
                facts["strategy"] = "zero1"
        found = (model_facts.of_module(module, optimizers) for module in modules)
        facts["models"] = [model for model in found if model is not None]
        if facts != self._described:
            self._described = facts
            self.recorder.meta(**facts)

    # ---- every step ---------------------------------------------------------------------------

    def _before_step_mark(self, step: int) -> None:
        for count in self._counting:
            count()
        if self.recorder.mode == IDLE:
            return
        seen = step - self.recorder.before
        self._accounting(seen)
        self._describing(seen)
        if seen == WARM_UP_STEPS:
            self.collectives.end_warm_up()
        for sample in self._sampling:
            sample()

    # ---- every second -------------------------------------------------------------------------

    def _beat(self) -> None:
        beats = 0
        while not self._stopping.is_set():
            try:
                self._one_beat(beats)
            except Guard.CAUGHT as error:
                self.guard.note(error, "beat")
            beats += 1
            self._stopping.wait(_BEAT_SECONDS)

    def _one_beat(self, beats: int) -> None:
        self.recorder.emit(Kind.BEAT, self.guard.errors, self.recorder.step)
        self.host.sample(force=True)
        self.imports.sweep()
        self._describe_device()
        if self.joined is None:
            self._show_hang_in_idle_step()
        elif self.standing.look() and not self.models.modules:
            self._find_what_stands()
        self.capture.look()
        message = self.guard.message()
        if message:
            tell(message)
        if beats % _COLLECTOR_EVERY == (0 if self.place.local_rank == 0 else 2):
            if self.joined is None:
                ensure_collector(self.run_dir.parent)
            elif self.joined.pid == os.getpid():  # else it would take other processes for ours
                ensure_collector(self.run_dir.parent, self.joined.settings)

    def _find_what_stands(self) -> None:
        """Models and optimizers that no hook has met, for nothing has moved since we came."""
        found = find()
        for module in found.modules:
            self.models.saw_module(module)
        for optimizer in found.optimizers:
            self.models.saw_optimizer(optimizer)
        for engine in found.engines:
            self.deepspeed.saw_engine(engine)
        if self.models.changed:
            self.models.changed = False
            self._describe_models()

    def _show_hang_in_idle_step(self) -> None:
        """A step with idle hooks that does not end: record what it last began."""
        last, recorder = self.collectives.last_counted, self.recorder
        if recorder.mode != IDLE or last is None or self._shown_hang_of == recorder.step:
            return
        if time.monotonic_ns() - self.steps.step_start_ns < _HUNG_AFTER_NS:
            return
        self._shown_hang_of = recorder.step
        op, phase, group, nbytes = last
        # fmt: off
        recorder.write(self.steps.step_start_ns, Kind.ISSUED, op, phase, Flag.INFERRED, group, 0,
                       nbytes, 0, 0, 0)
        # fmt: on

    # ---- the end ------------------------------------------------------------------------------

    def in_forked_child(self) -> None:
        """A forked worker shares the mapping: it must not write into its parent's record."""
        self.ring.mute()
        self.recorder.mode = OFF
        self.steps.on_boundary = None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.guard.guarded(self.capture.flush)()
        with suppress(Guard.CAUGHT):
            text = self.recorder.text(f"{kind.__name__}: {error}")
            self.recorder.emit(Kind.EXIT, text, op=ExitKind.EXCEPTION)
            atexit.unregister(self._at_exit)
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        with suppress(Guard.CAUGHT):
            self._stopping.set()
            self.recorder.mode = OFF
            # a trace that fails must not cost the goodbye
            self.guard.guarded(self.capture.close)("the script ended before those steps did")
            self.guard.guarded(self.capture.flush)()
            self.recorder.emit(Kind.EXIT, op=ExitKind.CLEAN)
            self.collectives.settle()


def tell(message: str) -> None:
    """One line on the user's stderr."""
    with suppress(Guard.CAUGHT):
        os.write(2, f"{message}\n".encode())


def ensure_collector(root: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
    """Starts a collector for *root* when none holds its lock. Never called by the training thread.

    *settings*: environment variables that are not this process's own.
    """
    environment = {**os.environ, **settings}
    if environment.get("ZEROMON_COLLECTOR") == "off" or collector_runs(root):
        return
    python = environment.get("ZEROMON_PYTHON") or sys.executable
    inherited = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "LD_PRELOAD")}
    source = str(Path(__file__).resolve().parents[1])
    core = str(Path(paths.__file__).resolve().parents[1])
    inherited["PYTHONPATH"] = os.pathsep.join((core, source))
    inherited["ZEROMON_DIR"] = str(root)
    inherited.pop("ZEROMON_SHIM", None)
    with suppress(OSError, subprocess.SubprocessError):
        # the command puts itself into the background and returns at once
        subprocess.run(
            [python, "-m", "zeromon.collector", "--daemon"],
            cwd="/",
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )


def collector_runs(root: Path) -> bool:
    """Whether some process holds the collector's lock of *root*."""
    try:
        fd = os.open(root / "collector.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return True  # nothing can be started there either
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
