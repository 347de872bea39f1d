"""Records a trace on demand: runs torch.profiler for exactly the steps that a request names.

A request is a file beside the rings, which the heartbeat checks once a second. The training thread
enters this module only after a request came, at each end of a step, until the last requested step. The
heartbeat's thread writes the trace. Only the requested steps pay the cost: on a device, torch.profiler
synchronizes when it stops, so a trace starts only on the user's request.

The script's own profiler has priority: a request is refused while it records, and ends when it starts.
"""

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromon.ring.codes import Kind, TraceState
from zeromon.ring.files import replacing_file
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.step import Steps
from zeromon_agents.runtime.around import Patches, around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext

PROFILER = "torch.autograd.profiler"
REQUEST = "trace.json"
_MAX_STEPS = 100


class Request(NamedTuple):
    """The steps to record, and where to."""

    number: int
    first: int
    """Number of the first step to record."""
    steps: int
    folder: Path


class Capture:
    """Waits for requests, and records one at a time."""

    def __init__(self, context: HookContext, steps: Steps, run_dir: Path, rank: int) -> None:
        self._context = context
        self._steps = steps
        self._file = run_dir / REQUEST
        self._rank = rank
        self._file_state: tuple[int, int] = (0, 0)
        self._served = 0
        self._request: Request | None = None
        self._profile: Any = None
        self._step_mark: Any = None
        self._to_save: tuple[Request, Any] | None = None
        self._saving = threading.Lock()
        self._withdrawn = False
        self._own_call = False
        self._script_profilers = 0
        """Profilers of the script that are recording."""

    # ---- the script's own profiler ------------------------------------------------------------

    def watch_profiler(self, module: Any, patches: Patches) -> None:
        """Patches torch.profiler to notice when the script starts and stops a profiler of its own."""
        profile = module.profile
        start_hook, end_hook = self._profiler_starts, self._profiler_ends
        for name, hook in (
            ("_prepare_trace", start_hook),
            ("_start_trace", start_hook),
            ("__exit__", end_hook),
        ):
            patches.wrap(profile, name, around(self._context, hook, active_from=OFF))

    def _profiler_starts(self, profile: Any, *_: Any, **__: Any) -> None:
        if self._own_call:
            return
        # A profiler passes both _prepare_trace and _start_trace, and counts once
        if not getattr(profile, "_zeromon_counted", False):
            profile._zeromon_counted = True
            self._script_profilers += 1
        self.close("the script's own profiler began")

    def _profiler_ends(self, profile: Any, *_: Any, **__: Any) -> None:
        if getattr(profile, "_zeromon_counted", False):
            profile._zeromon_counted = False
            self._script_profilers -= 1

    # ---- the heartbeat's thread --------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """True if steps are being recorded."""
        return self._profile is not None

    def check(self) -> None:
        """Accepts a new request, detects a withdrawn one, and writes a trace that is ready."""
        self.flush()
        try:
            file = self._file.stat()
        except OSError:
            self._withdrawn = self._request is not None
            return
        # With the inode: two requests in one tick of the clock have the same time
        if self._request is None and (file.st_ino, file.st_mtime_ns) != self._file_state:
            self._file_state = file.st_ino, file.st_mtime_ns
            self._accept_request()

    def flush(self) -> None:
        """Writes a recorded trace. The end of the process waits for it."""
        with self._saving:
            recorded, self._to_save = self._to_save, None
            if recorded is not None:
                self._save(*recorded)

    def _accept_request(self) -> None:
        with self._file.open() as file:
            content = json.load(file)
        ranks = content.get("ranks")
        if ranks and self._rank not in ranks:
            return
        steps = min(_MAX_STEPS, max(1, int(content["steps"])))
        request = Request(int(content["number"]), int(content["first"]), steps, Path(content["folder"]))
        if request.number <= self._served:
            return  # the same request again
        self._served, self._withdrawn = request.number, False
        if self._steps.on_boundary is not None:
            self._write_state(TraceState.REFUSED, request, "a change is being tried")
            return
        self._request = request
        self._write_state(TraceState.WAITING, request)
        # Last: from here on the training thread may call it
        self._steps.on_boundary = self._context.guard.guarded(self._boundary)

    def _save(self, request: Request, profile: Any) -> None:
        path = request.folder / f"rank{self._rank}.json"
        try:
            with replacing_file(path) as partial:
                profile.export_chrome_trace(str(partial))
                if partial.stat().st_size == 0:  # Kineto only logs that it cannot write
                    raise OSError("torch.profiler wrote nothing")
        except Guard.CAUGHT as error:
            self._write_state(TraceState.FAILED, request, f"cannot write {path}: {error}")
            return
        self._write_state(TraceState.SAVED, request)

    # ---- the training thread ------------------------------------------------------------------

    def _boundary(self, next_step: int) -> None:
        """Starts, marks or stops the recording between two steps; *next_step* is the next step."""
        request = self._request
        if request is None:
            self._steps.on_boundary = None
            return
        if accelerator.is_capturing():  # torch.profiler synchronizes, which would end the capture
            return
        if self._profile is None:
            if self._withdrawn:
                self._end(TraceState.REFUSED, "it was withdrawn")
                return
            if next_step < request.first:
                return
            if next_step > request.first:
                self._end(TraceState.REFUSED, f"step {request.first} was over when it was requested")
                return
            self._start(request)
            return
        self._end_mark()
        if next_step >= request.first + request.steps:
            self._stop(request)
        else:
            self._begin_mark(next_step)

    def _start(self, request: Request) -> None:
        # The counter does not know a profiler that began before the agent was attached
        if self._script_profilers > 0 or torch.autograd._profiler_enabled():
            self._end(TraceState.REFUSED, "the script's own profiler is on")
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        device = accelerator.ready_device()
        if device is not None:  # a type without an activity of its own is torch's private one
            by_name = ProfilerActivity.__members__
            activities.append(by_name.get(device.type.upper(), by_name["PrivateUse1"]))
        profiler = profile(activities=activities)
        self._own_call = True
        try:
            profiler.start()
        except Guard.CAUGHT as error:
            self._end(TraceState.FAILED, f"torch.profiler: {error}")
            return
        finally:
            self._own_call = False
        self._profile = profiler
        self._write_state(TraceState.RECORDING, request)
        self._begin_mark(request.first)

    def _begin_mark(self, step: int) -> None:
        """Opens the mark by which every reader of Kineto traces knows a step."""
        self._step_mark = torch.profiler.record_function(f"ProfilerStep#{step}")
        self._step_mark.__enter__()

    def _end_mark(self) -> None:
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _stop(self, request: Request) -> None:
        profiler, self._profile = self._profile, None
        try:
            profiler.stop()
        except Guard.CAUGHT as error:
            self._end(TraceState.FAILED, f"torch.profiler: {error}")
            return
        self._to_save = request, profiler
        self._request = None
        self._steps.on_boundary = None

    def close(self, reason: str) -> None:
        """Ends a recording and discards it, or ends a request that waits for its first step."""
        if self._request is None:
            return
        profiler, self._profile = self._profile, None
        if profiler is not None:
            self._end_mark()
            profiler.stop()
        self._end(TraceState.REFUSED, reason)

    def _end(self, state: TraceState, reason: str) -> None:
        request, self._request = self._request, None
        self._steps.on_boundary = None
        if request is not None:
            self._write_state(state, request, reason)

    def _write_state(self, state: TraceState, request: Request, sentence: str = "") -> None:
        context = self._context
        text_id = context.text(sentence) if sentence else 0
        context.emit(Kind.TRACE, request.number, context.step + 1, text_id, op=state)
