"""A trace on demand: torch.profiler for exactly the steps that a request names.

A request is a file beside the rings, which the beat looks at once a second. Only from then on does the
training thread ask anything of this module, at each end of a step, until the last step was recorded. The
trace is written by the beat's thread. What this costs, the steps that were asked for pay, and no others:
on a device torch.profiler waits for it when it stops, which is why nobody starts one but the user.

The script's own profiler comes first: a request is refused while it is on, and given up when it begins.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromon.events import Kind, TraceState
from zeromon_agents.allocator import cuda_ready
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.recorder import Recorder
from zeromon_agents.step import Steps

PROFILER = "torch.autograd.profiler"
REQUEST = "trace.json"
_MOST_STEPS = 100


class Request(NamedTuple):
    """What is asked for."""

    number: int
    first: int
    """Number of the first step to record."""
    steps: int
    folder: Path


class Capture:
    """Waits for requests, and serves one at a time."""

    def __init__(self, recorder: Recorder, steps: Steps, run_dir: Path, rank: int) -> None:
        self._recorder = recorder
        self._steps = steps
        self._file = run_dir / REQUEST
        self._rank = rank
        self._seen: tuple[int, int] = (0, 0)
        self._served = 0
        self._request: Request | None = None
        self._profile: Any = None
        self._step_mark: Any = None
        self._to_save: tuple[Request, Any] | None = None
        self._saving = threading.Lock()
        self._withdrawn = False
        self._own_call = False
        self._others = 0
        """Profilers of the script that are on."""

    # ---- the script's own profiler ------------------------------------------------------------

    def watch_profiler(self, module: Any, patches: Patches) -> None:
        """Notices when the script starts and stops a profiler of its own."""
        profile = module.profile
        for name in ("_prepare_trace", "_start_trace"):
            original = patches.original(profile, name)
            patches.set(profile, name, self._start_hook(original, name))
        original = patches.original(profile, "__exit__")
        patches.set(profile, "__exit__", self._exit_hook(original))

    def _start_hook(self, original: Any, name: str) -> Any:
        note = self._recorder.guard.note

        def start(profile: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if not self._own_call:
                    if not getattr(profile, "_zeromon_counted", False):
                        profile._zeromon_counted = True
                        self._others += 1
                    self._give_up("the script's own profiler began")
            except Guard.CAUGHT as error:
                note(error, name)
            return original(profile, *args, **kwargs)

        start.__name__ = name
        return start

    def _exit_hook(self, original: Any) -> Any:
        note = self._recorder.guard.note

        def __exit__(profile: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            try:
                if getattr(profile, "_zeromon_counted", False):
                    profile._zeromon_counted = False
                    self._others -= 1
            except Guard.CAUGHT as error:
                note(error, "__exit__")
            return original(profile, *args, **kwargs)

        return __exit__

    # ---- the beat's thread --------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether steps are being recorded now."""
        return self._profile is not None

    def look(self) -> None:
        """Takes up a new request, notices that one was withdrawn, writes a trace that is ready."""
        self.flush()
        try:
            found = self._file.stat()
        except OSError:
            self._withdrawn = self._request is not None
            return
        if self._request is None and (found.st_ino, found.st_mtime_ns) != self._seen:
            self._seen = found.st_ino, found.st_mtime_ns
            self._take_up()

    def flush(self) -> None:
        """Writes what was recorded; also at the end of the process, which waits for it."""
        with self._saving:
            ready, self._to_save = self._to_save, None
            if ready is not None:
                self._save(*ready)

    def _take_up(self) -> None:
        with self._file.open() as file:
            content = json.load(file)
        ranks = content.get("ranks")
        if ranks and self._rank not in ranks:
            return
        steps = min(_MOST_STEPS, max(1, int(content["steps"])))
        request = Request(
            int(content["number"]), int(content["first"]), steps, Path(content["folder"])
        )
        if request.number <= self._served:
            return  # an agent that looks again at what it has served
        self._served, self._withdrawn = request.number, False
        self._request = request
        self._tell(TraceState.WAITING, request)
        self._steps.on_boundary = self._recorder.guard.guarded(self._boundary)

    def _save(self, request: Request, profile: Any) -> None:
        path = request.folder / f"rank{self._rank}.json"
        partial = path.with_suffix(".part.json")
        try:
            profile.export_chrome_trace(str(partial))
            partial.chmod(0o600)  # its folder is private, too
            partial.replace(path)
        except Guard.CAUGHT as error:
            with suppress(OSError):
                partial.unlink()
            self._tell(TraceState.FAILED, request, f"cannot write {path}: {error}")
            return
        self._tell(TraceState.SAVED, request)

    # ---- the training thread ------------------------------------------------------------------

    def _boundary(self, following: int) -> None:
        """Between two steps; *following* is the one that begins now."""
        request = self._request
        if request is None:
            self._steps.on_boundary = None
            return
        if self._profile is None:
            if self._withdrawn:
                self._end(TraceState.REFUSED, "it was withdrawn")
                return
            if following < request.first:
                return
            if following > request.first:
                self._end(
                    TraceState.REFUSED, f"step {request.first} was over when it was asked for"
                )
                return
            self._start(request)
            return
        self._end_mark()
        if following >= request.first + request.steps:
            self._stop(request)
        else:
            self._begin_mark(following)

    def _start(self, request: Request) -> None:
        if self._others > 0 or torch.autograd._profiler_enabled():
            self._end(TraceState.REFUSED, "the script's own profiler is on")
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if cuda_ready():
            activities.append(ProfilerActivity.CUDA)
        made = profile(activities=activities)
        self._own_call = True
        try:
            made.start()
        except Guard.CAUGHT as error:
            self._end(TraceState.FAILED, f"torch.profiler: {error}")
            return
        finally:
            self._own_call = False
        self._profile = made
        self._tell(TraceState.RECORDING, request)
        self._begin_mark(request.first)

    def _begin_mark(self, step: int) -> None:
        """The name that every reader of such traces knows steps by."""
        self._step_mark = torch.profiler.record_function(f"ProfilerStep#{step}")
        self._step_mark.__enter__()

    def _end_mark(self) -> None:
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _stop(self, request: Request) -> None:
        made, self._profile = self._profile, None
        try:
            made.stop()
        except Guard.CAUGHT as error:
            self._end(TraceState.FAILED, f"torch.profiler: {error}")
            return
        self._to_save = request, made
        self._request = None
        self._steps.on_boundary = None

    def _give_up(self, why: str) -> None:
        """Ends a recording at once, or a request that waits for its step."""
        if self._request is None:
            return
        made, self._profile = self._profile, None
        if made is not None:
            self._end_mark()
            made.stop()
        self._end(TraceState.REFUSED, why)

    def close(self, why: str) -> None:
        """Nothing more comes: a recording ends, and is lost."""
        self._give_up(why)

    def _end(self, state: TraceState, why: str) -> None:
        request, self._request = self._request, None
        self._steps.on_boundary = None
        if request is not None:
            self._tell(state, request, why)

    def _tell(self, state: TraceState, request: Request, text: str = "") -> None:
        recorder = self._recorder
        said = recorder.text(text) if text else 0
        recorder.emit(Kind.TRACE, request.number, recorder.step + 1, said, op=state)
