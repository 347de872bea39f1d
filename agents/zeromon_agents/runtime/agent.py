"""The agent of a training process: installs the hooks, keeps them quiet, and removes them.

The training thread does as little as possible. A daemon thread (the heartbeat) does once a second what
needs no hook: it samples host memory, writes a heartbeat, reports the first error of a hook to the user,
and starts a collector when none runs.
"""

import atexit
import functools
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from zeromon import __version__
from zeromon.ring import paths
from zeromon.ring.buffer import RingWriter
from zeromon.ring.codes import ExitKind, Flag, Kind, Phase
from zeromon.ring.files import try_lock_file
from zeromon.ring.masking import mask_words
from zeromon.ring.model_metadata import INSTALLED
from zeromon.ring.ring_file import ipc_namespace_number
from zeromon_agents.hooks.backend import Services, Units
from zeromon_agents.hooks.backends import Backends
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.calibration import measure_hook_cost
from zeromon_agents.hooks.functional import Functional
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.allocator import Allocator, Host
from zeromon_agents.observe.census import Census, census_step
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.live_trials import Trials
from zeromon_agents.observe.loading import FETCHERS, TRANSFORMS, Loading
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.observe.own_code import OwnCode
from zeromon_agents.observe.process_metadata import Compiled, Trackers, of_process, process_start_ns
from zeromon_agents.observe.scalars import Scalars
from zeromon_agents.observe.stall_detector import WARM_UP_STEPS, StallDetector, UntracedCollectives
from zeromon_agents.observe.step import Steps
from zeromon_agents.observe.torch_roles import Models
from zeromon_agents.observe.trace_capture import PROFILER, Capture
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, OFF, ON, HookContext
from zeromon_agents.runtime.imports import ImportWatch
from zeromon_agents.runtime.rendezvous import RankInfo, Rendezvous, first_number

_HEARTBEAT_SECONDS = 1.0
_MAX_ERROR_LETTERS = 10_000
_COLLECTOR_CHECK_EVERY = 5
_HUNG_AFTER_NS = 5_000_000_000
_LOOKS_AT_EACH, _LOOKS_EVERY_NS = 20, 100_000_000


def _launcher_job_id() -> str:
    """Returns the id that a scheduler or a launcher gives to all attempts of a job; "" without one."""
    slurm, elastic = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if slurm:
        return f"slurm-{slurm}"
    return "" if elastic == "none" else elastic[:200]


class Attachment(NamedTuple):
    """How the agent was attached to a process that was running already."""

    pid: int
    """The process as the collector sees it, outside of the process's PID namespace."""
    settings: dict[str, str]
    """The ZEROMON_ variables of the command that attached."""
    ipc: int
    """The IPC namespace of that command, and of the collector."""


class Agent:
    """The hooks of one process, from :meth:`start` to :meth:`stop`."""

    def __init__(self, run_dir: Path, rank_info: RankInfo, attachment: Attachment | None = None) -> None:
        self.run_dir, self.rank_info, self.attachment = run_dir, rank_info, attachment
        pid = attachment.pid if attachment else os.getpid()
        # The token keeps apart the rings of two attaches to one process
        name = f"rank{rank_info.rank}.{pid}.{secrets.token_hex(2)}.ring"
        self.guard = Guard()
        # Shared memory of another IPC namespace cannot be opened by the collector
        in_file = attachment is not None and attachment.ipc != ipc_namespace_number()
        self.ring = RingWriter(run_dir / name, rank=rank_info.rank, pid=pid, in_file=in_file)
        self.context = context = HookContext(self.ring, self.guard)
        self.patches, self.imports = Patches(), ImportWatch()
        self.device = DeviceTimer(context)
        self.collectives = Collectives(context, self.device)
        self.functional = Functional(context, self.collectives, self.device)
        before_mark, clear = context.timed(self._before_step_mark), self.collectives.counts.clear
        self.steps = Steps(context, before_mark, clear, self.device.device_type)
        # Before the hooks are made: they read it at that moment, and not at each call
        self.collectives.attached = self.steps.attached_mid_step = attachment is not None
        self.models = Models(self.guard.note)
        self.capture = Capture(context, self.steps, run_dir, rank_info.rank)
        self.trials = Trials(context, self.steps, self.models, run_dir, rank_info.rank)
        self.census, self.units = Census(context), Units(context)
        self.transfers, self.scalars = Transfers(context), Scalars(context, self.steps)
        self.backends = Backends(
            Services(
                context, self.patches, self.steps, self.collectives, self.device, self.models,
                self.census, self.units, self.transfers, self.scalars,
            )
        )  # fmt: skip
        self.collectives.framework_label = self.backends.group_label
        self.census.add(lambda: (self.models.claims,))
        self.census.add(self.backends.providers)
        self.allocator, self.host = Allocator(context), Host(context)
        self.own_code = OwnCode(context)
        self.loading = Loading(self.guard, self.ring.path, self._is_training)
        self._write_loading = self.guard.guarded(lambda: self.loading.write(self.context.emit))
        self.stall_detector = StallDetector(
            context, self.collectives, self.models.evaluates, attached=attachment is not None
        )
        untraced = UntracedCollectives(context, self.collectives, self.backends.reducers_sent)
        guarded = self.guard.guarded  # the failure of one loses neither the others nor the step
        flushes = self.collectives.flush_step, self.functional.flush_step, self.transfers.flush
        self._counting = (*flushes, *self.backends.ends)
        self._sampling = (self.device.poll, self.scalars.poll, self.host.sample)
        self._sampling_device = (self.allocator.sample,)
        self._accounting = guarded(untraced.account)
        self._stop_counting = guarded(untraced.dispatched.stop)
        self._describing = guarded(self._describe_process)
        self._metadata: dict[str, Any] = {}
        self._compiled, self._trackers = Compiled(), Trackers()
        self._describe_from, self._wrote_process, self._looks_from_ns = 0, False, 0
        self._device_index: int | None = None
        self._hang_written_of = self._census_of = -1
        self._stopping = threading.Event()
        self._heart: threading.Thread | None = None
        self._end_is_written = False
        self._is_apart = False
        """True if the heartbeat's thread leaves captures of other threads alone."""
        self._excepthook: Any = None
        self.rendezvous = self._rendezvous()

    def _rendezvous(self) -> Rendezvous | None:
        """Returns what introduces this node to the others; None on one node, or on another rank."""
        rank_info = self.rank_info
        if rank_info.world_size <= max(1, rank_info.local_world_size):
            return None
        if not rank_info.is_node_leader(self.run_dir):
            return None
        return Rendezvous(
            self.run_dir, rank_info.rank, rank_info.local_world_size, rank_info.world_size, self.guard
        )

    # ---- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Installs every hook; a hook on a module that is not loaded follows after its import."""
        self._write_rank_metadata()
        self.guard.guarded(lambda: self.context.add_metadata(**measure_hook_cost()._asdict()))()
        # Before the hooks: the base of these groups is what they have issued until here
        self.collectives.register_groups(existed=True)
        self.guard.on_limit = self.pause
        self.steps.on_start = self.guard.guarded(self._count_the_rest)
        self.steps.on_phase_end = self.guard.guarded(self.allocator.phase_ends)
        self.steps.on_optimizer = self.guard.guarded(self._optimizer_begins)
        self.steps.on_backward = self.context.timed(self.guard.guarded(self._backward_begins))
        self.collectives.install(self.patches, self._count_the_rest)
        self.guard.guarded(self.functional.install)(self.patches)
        self.guard.guarded(self.device.install)(self.patches)
        for module, watch in (
            ("torch.autograd", self.steps.watch_backward),
            ("torch.utils.data.dataloader", self.steps.watch_data),
            (PROFILER, self.capture.watch_profiler),
        ):
            # Guarded: it runs at an import of the script, which an error would fail
            patch = functools.partial(self.guard.guarded(watch), patches=self.patches)
            self.imports.when_imported(module, patch)
        watch_autocast = self.guard.guarded(self.steps.watch_autocast)
        self.imports.when_imported("torch.amp.autocast_mode", watch_autocast)
        fetches = self.loading.fetches
        self.imports.when_imported(FETCHERS, self.guard.guarded(fetches.watch))
        for module in dict(TRANSFORMS):
            self.imports.when_imported(module, self.guard.guarded(fetches.watch_transforms))
        self.backends.install(self.imports)
        atexit.register(self._at_exit)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        # the step during which the agent was attached is counted and not timed
        self.context.mode = IDLE if self.steps.attached_mid_step else ON
        self.context.detailed = True
        self._heart = threading.Thread(target=self._beat_until_stopped, name="zeromon", daemon=True)
        self._heart.start()
        if self.rendezvous is not None:
            self.rendezvous.start()

    def stop(self) -> list[str]:
        """Removes every hook and writes the end; returns names that another tool has patched since."""
        if self._stopping.is_set():
            return []
        self._stopping.set()
        self._count_the_rest()
        self.guard.guarded(self.capture.close)("the agent was stopped")
        self.guard.guarded(self.trials.close)("the agent was stopped")
        self.backends.stop()
        self.units.stop()
        self._stop_counting()
        self.imports.close()
        self._write_loading()
        self.loading.close()
        self.steps.leave_autocast()
        kept_names = self.patches.restore()
        # Not `is`: each access makes another bound method. Another tool's later hook stays.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)
        self.context.emit(Kind.EXIT, op=ExitKind.DETACHED)
        # Before the ring is closed: the heartbeat writes into it
        self._end_threads()
        self.ring.close()
        return kept_names

    def _is_training(self) -> bool:
        """Returns whether a batch that is made now is one of training."""
        return self.context.mode != OFF and not self.steps.evaluation.is_open

    def pause(self) -> None:
        """Switches all hooks off, in place: too many of them failed. A change is undone before."""
        if not self.trials.after(self.pause):
            self.context.mode = OFF

    # ---- metadata -----------------------------------------------------------------------------

    def _write_rank_metadata(self) -> None:
        rank_info = self.rank_info
        self.context.add_metadata(
            rank=rank_info.rank,
            local_rank=rank_info.local_rank,
            world_size=rank_info.world_size,
            local_world_size=rank_info.local_world_size,
            node=socket.gethostname(),
            pid=os.getpid(),
            torch=torch.__version__,
            python=sys.version.split()[0],
            agent=__version__,
            attached=self.attachment is not None,
            process_start_ns=process_start_ns(),
            device="cpu",
            restarts=first_number(("TORCHELASTIC_RESTART_COUNT",), 0),
            job=_launcher_job_id(),
        )

    def _write_device_metadata(self, *, training: bool) -> None:
        """Writes once which device the rank uses; the heartbeat may not know it."""
        device = accelerator.ready_device() if self._device_index is None else None
        if device is None:
            return
        index = device.module.current_device() if training else accelerator.known_index(device)
        if index is not None:
            self._device_index = index
            self.context.add_metadata(**device.describe(index))

    def _optimizer_begins(self, optimizer: Any) -> None:
        """Takes the census, where gradients are complete and nothing is updated yet."""
        if self.context.mode == OFF:
            return
        self.models.register_optimizer(optimizer)
        self.scalars.optimizer_steps(optimizer)
        next_step = self.context.step + 1
        if next_step == 1:  # before the optimizer creates its state, which may end the process
            # The parameters that an attached run has at its first step are not the initial ones
            if self.attachment is None:
                self.steps.beginnings.read_parameters(optimizer)
            if not self._wrote_process:  # once: there may be an optimizer for each parameter
                self._describing(0)
        is_due = self.context.mode == ON and census_step(next_step, self.context.steps_before)
        # A second optimizer of the same step would take a second census of the same memory
        if is_due and self._census_of != next_step and not accelerator.is_capturing():
            self._census_of = next_step
            self.census.take()

    def _backward_begins(self) -> None:
        """Samples the device's memory.

        A device that the script uses later than in the first step is met at the end of that step, so a
        failed allocation before is not recorded.
        """
        is_first = self.context.step == self.context.steps_before
        if self.context.mode == ON and (is_first or self.allocator.kind):
            self._write_device_metadata(training=True)
            self.allocator.sample_tensors(Phase.FORWARD)

    def _describe_process(self, step: int) -> None:
        """Writes the process once, and the models when one is new; at twice the step the next time.

        A script may create optimizers without end, and each description stays in the name table.
        """
        if not self._wrote_process:
            self._wrote_process = True
            self.own_code.remember_loop()
            autocast = self.steps.leave_autocast()
            self.context.add_metadata(process=of_process(autocast, self.allocator.kind))
        compiled = self._compiled.news(step)
        if compiled is not None:
            self.context.add_metadata(compiled=compiled)
        if self.models.changed and step >= self._describe_from:
            self._describe_from = 2 * step
            self._write_models()

    def _write_models(self) -> None:
        # Before the models are read: a model that is registered meanwhile sets it again
        self.models.changed = False
        metadata = self.backends.metadata()
        # the script has ended
        is_over = self._metadata.get("models") and not metadata.get("models")
        if metadata != self._metadata and not is_over:
            self._metadata = metadata
            self.context.add_metadata(**metadata)

    def _write_trackers(self) -> None:
        for tracker, facts in self._trackers.news().items():
            self.context.add_metadata(**{tracker: facts})

    # ---- every step ---------------------------------------------------------------------------

    def _before_step_mark(self, step: int) -> None:
        watched = step - self.context.steps_before
        # Control steps, too: else the next step would have the collectives of two steps
        self._count(watched)
        if self.context.mode == IDLE:
            return
        device = accelerator.ready_device()
        # A query of the device during a graph capture would end the capture
        if device and device.is_current_stream_capturing():
            return
        self._look(watched)
        if watched == WARM_UP_STEPS:
            self.collectives.end_warm_up()
        self.guard.run(self._sampling)
        if device:
            self.guard.run(self._sampling_device)

    def _look(self, watched: int) -> None:
        """Looks for what seldom changes: at each of the first steps, then at most ten times a second."""
        now_ns = time.monotonic_ns()
        if watched <= _LOOKS_AT_EACH or now_ns >= self._looks_from_ns or self.models.changed:
            self._looks_from_ns = now_ns + _LOOKS_EVERY_NS
            self.guard.run(self.backends.looks)
            self._describing(watched)

    def _count(self, watched: int) -> None:
        """Writes what was counted since the last call: by the hooks, and by the groups themselves."""
        self.guard.run(self._counting)
        self._accounting(watched)

    def _count_the_rest(self) -> None:
        """Writes what was counted since the last step: there may be no other step to do it."""
        mode = self.context.mode
        if self._stopping.is_set():
            self.context.mode = OFF  # before the counts are read: the loop may run meanwhile
        if mode != OFF and not self.steps.attached_mid_step:
            # A detach runs on another thread, and must not end a step in which the loop still is
            if self.steps.is_training_thread():
                self.guard.run((self.steps.end_unhooked_step,))
            self.guard.run(self.backends.looks)
            self._count(self.context.step + 1 - self.context.steps_before)
            self.guard.run((self.device.poll, self.scalars.poll))

    # ---- every second -------------------------------------------------------------------------

    def _beat_until_stopped(self) -> None:
        beats = 0
        while not self._stopping.is_set():
            try:
                self._one_heartbeat(beats)
            except Guard.CAUGHT as error:
                self.guard.note(error, "heartbeat")
            beats += 1
            self._stopping.wait(_HEARTBEAT_SECONDS)

    def _one_heartbeat(self, beats: int) -> None:
        # Tried each second: the driver is not loaded before the script uses the device
        self._is_apart = self._is_apart or accelerator.leave_captures_alone(self._device_index)
        spent_ns = self.context.spent_ns + self.context.hooks_ns + time.thread_time_ns()
        self.context.emit(Kind.BEAT, self.guard.errors, self.context.step, self.context.calls, spent_ns)
        self.host.sample(force=True)
        self._write_loading()
        self.imports.sweep()
        self._write_device_metadata(training=False)
        self.guard.guarded(self._write_trackers)()
        stalled = self.stall_detector.check()
        if not stalled:
            self.own_code.look()
        elif self._is_apart:
            self.device.write_ended()  # else what ended since the last step seems to be in flight
        if self.attachment is None:
            self._write_hang_of_control_step()
        # The search through gc takes 20 to 50 ms; in a run that makes progress the next step shows them
        elif stalled and not self.models.modules:
            self.backends.register_existing()
            if self.models.changed:
                self._write_models()
        self.capture.check()
        self.trials.check()
        message = self.guard.message()
        if message:
            with suppress(OSError):  # stderr may be closed
                os.write(2, f"{message}\n".encode())
        # Other ranks ask two seconds after the first one: else each would start a collector
        if beats % _COLLECTOR_CHECK_EVERY == (0 if self.rank_info.local_rank == 0 else 2):
            if self.attachment is None:
                ensure_collector(self.run_dir.parent)
            # in a PID namespace it would mistake processes
            elif self.attachment.pid == os.getpid():
                ensure_collector(self.run_dir.parent, self.attachment.settings)

    def _write_hang_of_control_step(self) -> None:
        """Writes the newest collective of a control step that does not end."""
        last_count, context = self.collectives.last_counted, self.context
        if context.mode != IDLE or last_count is None or self._hang_written_of == context.step:
            return
        if time.monotonic_ns() - self.steps.step_start_ns < _HUNG_AFTER_NS:
            return
        self._hang_written_of = context.step
        op, phase, group, nbytes = last_count
        # fmt: off
        context.write(self.steps.step_start_ns, Kind.ISSUED, op, phase, Flag.INFERRED, group, 0,
                      nbytes, 0, 0, 0)
        # fmt: on

    # ---- the end ------------------------------------------------------------------------------

    def in_forked_child(self) -> None:
        """Mutes the agent in a forked worker, which shares the mapping of its parent's ring."""
        self.ring.mute_writer()
        self.context.mode = OFF
        self.steps.on_boundary = None
        # Without these, the end of a data worker would run that of its parent's agent
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.guard.guarded(self.capture.flush)()
        with suppress(Guard.CAUGHT):
            self._count_the_rest()
            self._write_loading()
            error_text = mask_words([" ".join(str(error).split())[:_MAX_ERROR_LETTERS]])[0]
            # The innermost line of the script in the trace: " at train.py:32"
            location = ""
            for frame, line_number in traceback.walk_tb(trace):
                name = frame.f_code.co_filename
                if not any(marker in name for marker in INSTALLED):
                    location = f" at {os.path.basename(name)}:{line_number}"
            text_id = self.context.text(f"{kind.__name__}{location}: {error_text}")
            self.context.emit(Kind.EXIT, text_id, op=ExitKind.EXCEPTION)
            # atexit comes after this hook, and would write a clean end behind the exception
            self._end_is_written = True
        # Outside of `suppress`: whatever fails above, the traceback of the script is printed
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        self._stopping.set()
        if not self._end_is_written:
            self._write_end()
        self._end_threads()

    def _end_threads(self) -> None:
        """Waits for the agent's threads: the interpreter's end would kill one inside C++, and abort."""
        if self.rendezvous is not None:
            self.rendezvous.stop()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join(2 * _HEARTBEAT_SECONDS)

    def _write_end(self) -> None:
        with suppress(Guard.CAUGHT):
            self._count_the_rest()
            self._write_loading()
            self.steps.evaluation.training_ends()
            # a trace that fails must not lose the end record
            self.guard.guarded(self.capture.close)("the script ended before those steps did")
            self.guard.guarded(self.capture.flush)()
            self.context.emit(Kind.EXIT, op=ExitKind.CLEAN)
            self.collectives.completions.settle()


# ---- starts the collector of this node when none runs -------------------------------------------


def ensure_collector(root: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
    """Starts a collector for *root* when no process holds its lock. Never called by the training thread.

    *settings* are environment variables that this process does not have itself.
    """
    environment = {**os.environ, **settings}
    if environment.get("ZEROMON_COLLECTOR") == "off" or collector_runs(root):
        return
    python = environment.get("ZEROMON_PYTHON") or sys.executable
    # What the training preloads (an allocator, a profiler) must not run in the collector
    inherited = {k: v for k, v in environment.items() if k != "LD_PRELOAD"}
    source = str(Path(__file__).resolve().parents[2])
    inherited["PYTHONPATH"] = os.pathsep.join((str(paths.CORE), source))
    inherited["ZEROMON_DIR"] = str(root)
    inherited.pop("ZEROMON_SHIM", None)
    with suppress(OSError, subprocess.SubprocessError):
        # the command puts itself into the background and returns at once
        subprocess.run(
            [python, "-m", "zeromon.collector", "--daemon"],
            # `-m` puts this folder first on sys.path: a json.py of the script would shadow Python's
            cwd="/",
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )


def collector_runs(root: Path) -> bool:
    """Returns whether a process holds the collector's lock of *root*; True where no lock can be made."""
    try:
        fd = try_lock_file(root / paths.LOCK)
    except OSError:
        return True  # no collector could be started there either
    if fd is None:
        return True
    os.close(fd)
    return False
