"""One launch of a training command under the agents: measured, and then ended."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from zeromon.base.errors import LaunchError, RunNotFound, SourceError
from zeromon.fold.summarize import COMPILES
from zeromon.memory.fit import DEVICE, HOST, Trial, loses_beyond_noise
from zeromon.probes.host import Footprint
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.readout.verdict import hang_text, judge_run
from zeromon.ring import paths
from zeromon.ring.model_metadata import INSTALLED
from zeromon.snapshot import RankSnapshot, RiskCause, RunSnapshot
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.focus import DEVICE_OOM, death_cause
from zeromon.snapshot.levels import OOM
from zeromon.snapshot.noise import Estimate, median_of
from zeromon.snapshot.rank import Halt
from zeromon.snapshot.step import settled_steps
from zeromon.sources.live import LiveSource, collector_address

_LOOK_SECONDS = 0.01
_ASK_SECONDS, _LASTING_SECONDS = 0.4, 3.0
_TIMES_COMPILING = 4
"""So many times its seconds a launch lasts at most, where a rank compiles."""
_SAFE_SHARE = 0.004
"""Share of the memory; a launch with less left is stopped at once."""
_LOOKS_AHEAD = 4
"""It is stopped, too, where it would have less within so many looks at the pace of the last, unless the
line of earlier launches says that it ends sooner."""
_LEFT_FREE = ", but for what stays free"
_SILENT = "no rank reported. A command that sets PYTHONPATH must keep what is there: DIR:$PYTHONPATH"
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1
_ERROR = 1.02
"""By how much a peak exceeds the line at most, so far as this was seen."""
_TRENDS = (RiskCause.GROWTH, RiskCause.SPIKE, RiskCause.FRAGMENTATION, RiskCause.NON_TORCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A trial to launch, and for how long."""

    trial: Trial
    """Without measurements."""
    command: Sequence[str]
    environment: Mapping[str, str]
    name: str
    log: Path
    steps: int
    most_seconds: float
    best: Estimate | None = None
    """Seconds a sample of the best launch so far; this one is stopped where it loses."""
    expected_bytes: float | None = None
    """The peak on the host by the line of earlier launches."""
    spare_bytes: int = 0
    """Memory of the host that the launch leaves to other processes."""
    poll_seconds: float = _LOOK_SECONDS
    ranks: int = 0
    """How many report; 0: all of the world."""
    stop_reason: Callable[[RunSnapshot], str] = lambda _: ""
    """Says of a snapshot why the launch is over, "" while it goes on."""


def lasting_hang(run: RunSnapshot) -> str:
    """The first hang that lasts, in words; by then the ranks have sent the lines where they stand."""
    # Such a rank may compute in C++, as a construction or an optimizer on the host does for minutes
    opaque = {rank.rank for rank in run.ranks if rank.status.halted is Halt.UNRESPONSIVE}
    hangs = (hang for hang in run.hangs if opaque.isdisjoint(hang.waiting + hang.missing))
    lasting = (hang for hang in hangs if hang.seconds > _HANG_SECONDS and not hang.pause)
    # Before the first step, a rank that is back from such a call is many calls behind, and catches up
    slow = _SLOW if any(rank.steps.watched_steps for rank in run.ranks) else _SLOW_START
    return next((hang_text(run, hang) for hang in lasting if hang.kind not in slow), "")


_HANG_SECONDS = 15.0
_SLOW = (HangKind.ALL_INSIDE, HangKind.UNSEEN_MEMBERS)
"""All ranks that report wait in one collective: its device or link is slow, or modelled as such."""
_SLOW_START = (*_SLOW, HangKind.MISMATCHED_NUMBERS)


def run_launch(request: Request, tell: Callable[[str], None]) -> Trial:
    """Runs the command until it is measured, and ends it; raises :class:`LaunchError` where it fails."""
    # A killed process loses what Python has buffered: the log would end before the error
    environment = {**os.environ, **request.environment, "PYTHONUNBUFFERED": "1"}
    run = [sys.executable, "-m", "zeromon", "run", "--quiet", "--name", request.name, "--"]
    start = time.monotonic()
    with request.log.open("wb") as log:
        # A session of its own: Ctrl-C must reach this process alone, which ends the launch in order
        child = subprocess.Popen(
            [*run, *request.command], env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
    watch = _Watch(request, child, tell)
    try:
        trial = watch.follow()
    finally:
        watch.feet.end()
        child.wait()
    return replace(trial, wall_seconds=time.monotonic() - start)


def _end_with_parent() -> None:
    """In the child: the kernel sends SIGTERM where this process is killed, also after an exec."""
    if _PRCTL is not None:
        _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


class _Watch:
    """Follows one launch: its memory many times a second, its steps by the collector."""

    def __init__(
        self, request: Request, child: subprocess.Popen[bytes], tell: Callable[[str], None]
    ) -> None:
        self.request, self.child, self._tell = request, child, tell
        self.feet = Footprint(child.pid)
        self._root = paths.choose_ring_root()
        self._source: LiveSource | None = None
        self._run: RunSnapshot | None = None
        self._rooms: list[int] = []
        self._base = 0
        self._peak = 0
        self._kills = -1
        self._headroom = -1
        self._reason_from = time.monotonic()

    def follow(self) -> Trial:
        """Returns the trial once it is measured, stopped or ended."""
        asked_at = time.monotonic()
        deadline, latest_end = (asked_at + n * self.request.most_seconds for n in (1, _TIMES_COMPILING))
        while self.child.poll() is None:
            if reason := self._look():
                self.feet.kill(all_but=(self.child.pid,))
                return self._measured_trial(reason)
            if time.monotonic() - asked_at >= _ASK_SECONDS:
                # CPUAdam takes minutes, once, and an end in between would leave its lock
                pauses = [rank.status.pause for rank in self._run.ranks] if self._run else []
                if COMPILES in pauses and deadline < latest_end:
                    deadline += time.monotonic() - asked_at
                asked_at = time.monotonic()
                self._ask()
                if reason := self._forecast_reason() or self._stop_reason():
                    return self._measured_trial(reason)
                if self._run is not None and self._steps(_ended_steps) >= self.request.steps:
                    return self._measured_trial("")
                mine, rival = self._measured_trial("").estimate, self.request.best
                if mine is not None and rival is not None and loses_beyond_noise(mine, rival):
                    return replace(
                        self._measured_trial("slower than the best, beyond the noise"), slower=True
                    )
            if time.monotonic() > deadline:
                return self._timed_out()
            time.sleep(self.request.poll_seconds)
        return self._ended()

    def _look(self) -> str:
        """Reads the memory; returns why the launch must stop at once, "" while it may go on."""
        used, previous = self.feet.read(), self._headroom
        self._headroom, kills = self.feet.headroom(self.request.spare_bytes)
        self._kills = max(self._kills, kills)
        # -1: neither a cgroup nor /proc/meminfo says what is left, and no launch may be stopped for that
        if self._headroom < 0:
            return ""
        capacity = used + self._headroom
        self._rooms.append(capacity)
        if not self._base and any((self._root / self.request.name).glob("rank*.ring")):
            self._base = used
        self._peak = max(self._peak, self.feet.peak(), used)
        growth = max(0, previous - self._headroom) if previous >= 0 else 0
        soon, expected = used + _LOOKS_AHEAD * growth, self.request.expected_bytes
        if expected is not None and used <= _ERROR * expected:
            soon = min(soon, max(used, round(expected)))
        if capacity - max(used, soon) < _SAFE_SHARE * capacity:
            return "host memory would have run out" + _LEFT_FREE * bool(self.request.spare_bytes)
        return ""

    def _ask(self) -> None:
        # The collector of the previous launch may still end, and another one begin at another port
        address = collector_address(self._root) or (self._source and self._source.address)
        if address and (self._source is None or self._source.address != address):
            self._source = LiveSource(address, self.request.name)
        if self._source is not None:
            with suppress(SourceError, RunNotFound):
                self._run = self._source.latest()
                step_count, step_limit = self._steps(_ended_steps), self.request.steps
                self._tell(f"{min(step_count, step_limit)} of {step_limit} steps")

    def _steps(self, count: Callable[[RankSnapshot], int]) -> int:
        ranks = self._run.ranks if self._run is not None else ()
        # The slowest rank may be among those that have not reported yet
        if not ranks or len(ranks) < (self.request.ranks or max(rank.world_size for rank in ranks)):
            return 0
        return min(map(count, ranks))

    def _forecast_reason(self) -> str:
        """Why the live forecast says that the run will die; "" where it says nothing of the kind."""
        if self._run is None:
            return ""
        # Running out harms no virtual device, and a forecast may be wrong
        ranks = [rank for rank in self._run.ranks if not rank.on_virtual_device]
        risks = [risk for rank in ranks for risk in rank.memory.risks]
        alarms = [r for r in risks if r.ratio >= OOM.warning and r.cause in _TRENDS]
        return f"the forecast: {alarms[0].pool} memory runs out ({alarms[0].cause})" if alarms else ""

    def _stop_reason(self) -> str:
        reason, time_now = self.request.stop_reason(self._run) if self._run else "", time.monotonic()
        self._reason_from = self._reason_from if reason else time_now
        # The record of a rank that has just come back is as far behind as the rank was silent
        return reason if time_now - self._reason_from > _LASTING_SECONDS else ""

    def _timed_out(self) -> Trial:
        if self._steps(_ended_steps) > 1:
            return self._measured_trial("")
        cause = ""
        if (run := self._run) is not None:
            # A call that lasts since before the first step is no finding, but here the reason
            hang = next((hang for hang in run.hangs if hang.seconds), None)
            cause = f": {judge_run(run).cause if hang is None else hang_text(run, hang)}"
        raise LaunchError(
            f"no two steps in {self.request.most_seconds:.0f} seconds (--seconds allows more){cause}",
            f"The output is in {self.request.log}.",
        )

    def _ended(self) -> Trial:
        """The command ended by itself: it was short, or it died."""
        # The collector needs a moment to see the exits and to read the last records of the rings
        for _ in range(10):
            self._ask()
            time.sleep(0.2)
            if self._run is not None and self._run.ended:
                break
        ranks = self._run.ranks if self._run is not None else ()
        if any(r.memory.out_of_memory or death_cause(r) == DEVICE_OOM for r in ranks):
            return replace(self._measured_trial("out of memory"), killed=True)
        if self._kills > 0:
            return replace(self._measured_trial("out of host memory"), killed=True)
        # A script that takes fewer steps than --steps has ended well, and is measured
        steps = self._steps(lambda rank: rank.steps.watched_steps)
        if self.child.returncode == 0 and steps > 1:
            return self._measured_trial("")
        is_silent = self.child.returncode == 0 and not ranks
        cause = _SILENT if is_silent else find_failure(self.request.log.read_text(errors="replace"))
        raise LaunchError(
            f"the command ended with code {self.child.returncode} after {steps} steps"
            + (f": {cause[:300]}" if cause else ""),
            f"Its whole output is in {self.request.log}.",
        )

    def _measured_trial(self, outcome: str) -> Trial:
        trial = replace(
            self.request.trial, outcome=outcome, run=self.request.name, base_bytes=self._base,
            own_bytes=Footprint(os.getpid(), deep=False).read(),
        )  # fmt: skip
        peaks, limits = {}, {}
        if self._peak and self._rooms:
            peaks[HOST], limits[HOST] = self._peak, round(median(self._rooms))
        run = self._run
        if run is None or not run.ranks:
            return replace(trial, peaks=peaks, rooms=limits)
        devices = [_device_peak_bytes(rank) for rank in run.ranks]
        if all(device is not None for device in devices):
            peaks[DEVICE], limits[DEVICE] = max(filter(None, devices), key=lambda d: d[0] - d[1])
        return replace(_add_step_timings(trial, run), peaks=peaks, rooms=limits)


# The first row that launchers print behind the end of a script
_OF_LAUNCHER = re.compile(r"(?m)^.*(elastic/multiproc|sigkill_handler|CalledProcessE|ChildFailedE)")
_TRACEBACK_ROW = re.compile(
    r'(?m)^(?:\[rank\d+\]: )?(?: +File "(.+)", line (\d+)|(?:\w+\.)*(\w*(?:Error|Exception))(:.*|$))'
)


def find_failure(output: str) -> str:
    """Returns the last exception in *output* with its line in the script, else the last row."""
    script_output = _OF_LAUNCHER.split(output, maxsplit=1)[0].strip("-=* \n")
    failure, place = script_output.rpartition("\n")[2], ""
    for file, line, exception, message in _TRACEBACK_ROW.findall(script_output):
        if exception:
            failure, place = f"{exception}{place}{message}", ""
        elif not any(marker in file for marker in INSTALLED):
            place = f" at {Path(file).name}:{line}"
    return failure


def _ended_steps(rank: RankSnapshot) -> int:
    """Steps that the device has ended, too: a host may be several ahead of it."""
    ended_step = rank.steps.recent[-1].step if rank.steps.recent else 0
    return rank.steps.watched_steps - max(0, rank.steps.last_step - ended_step)


def _device_peak_bytes(rank: RankSnapshot) -> tuple[int, int] | None:
    """The most bytes that the allocator had handed out, and what it may; None without a device."""
    if rank.memory.device is None or rank.memory.device.capacity_bytes <= 0:
        return None
    # One that ran out in its first step has none
    other_bytes = max((0, *(step.other_bytes for step in rank.steps.recent)))
    return rank.memory.device.peak_bytes, rank.memory.device.capacity_bytes - other_bytes


def _add_step_timings(trial: Trial, run: RunSnapshot) -> Trial:
    """*trial* with the seconds of the slowest rank, and what a step of all ranks trains."""
    # The first step compiles, autotunes and fills the allocator's cache
    times = [
        [step.seconds for step in settled_steps(rank.steps.recent) if step.step > 1]
        for rank in run.ranks
    ]
    estimates = [median_of(durations) for durations in times if len(durations) > 1]
    if not estimates:
        return trial
    slowest = max(estimates, key=lambda estimate: estimate.value)
    exposed = [
        r.communication.exposed_seconds for r in run.ranks if r.communication.exposed_seconds is not None
    ]
    samples, tokens = samples_per_step(run), tokens_per_step(run)
    return replace(
        trial,
        seconds=slowest.value,
        seconds_error=slowest.error,
        # JSON has no infinity: msgspec would write null, which the next call cannot read
        seconds_freedom=min(slowest.freedom, 1e6),
        exposed_seconds=fmean(exposed) if exposed else None,
        samples=samples if isinstance(samples, float) else None,
        tokens=tokens if isinstance(tokens, float) else None,
        steps=min(rank.steps.watched_steps for rank in run.ranks),
    )
