"""Follows one run: its ranks and its launcher; takes its snapshot once a second."""

import json
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.base.errors import RingError
from zeromon.base.units import printable, printable_values
from zeromon.collector import attempts, requests
from zeromon.collector.attempts import Launched
from zeromon.collector.cluster import Leader
from zeromon.collector.cluster_client import NOTE, RunCluster
from zeromon.collector.notify import TOLD, Notifier
from zeromon.collector.rank import SETTLING_POLLS, RankFollower, killed_for_memory
from zeromon.collector.requests import Captures, Trials, with_trial_results
from zeromon.diagnosis.arrivals import ArrivalSkew, with_bubbles
from zeromon.diagnosis.communicators import ras_of, with_groups
from zeromon.diagnosis.engine import FindingHistory, advise
from zeromon.diagnosis.hangs import as_member, hangs_of
from zeromon.diagnosis.rule import lacks_cpus
from zeromon.diagnosis.stalls import find_stalls
from zeromon.diagnosis.stragglers import find_stragglers
from zeromon.fold import checkpoint
from zeromon.fold.checkpoint import Checkpoint
from zeromon.fold.state import RankState, Silence
from zeromon.fold.summarize import summarize_rank
from zeromon.memory.forecast import host_risk, risks_of_rank, with_earlier_onset
from zeromon.probes import process
from zeromon.probes.cpu_pressure import CpuUsers
from zeromon.probes.devices import Devices
from zeromon.probes.energy import EnergyMeter, Rapl
from zeromon.probes.host import HostReader
from zeromon.probes.nccl_ras import InspectorReader, RasReader, is_local_address
from zeromon.probes.network import network_peak_bandwidth
from zeromon.probes.process import REVISION, ProcessWatch, Revision
from zeromon.ring import paths, trial_words
from zeromon.ring.files import read_json_object, replace_file
from zeromon.ring.masking import mask_words
from zeromon.ring.ring_file import remove_ring_file
from zeromon.ring.tokens import NAME as TOKEN
from zeromon.snapshot import Finding, Hang, Pool, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import Links, Ras, Straggler
from zeromon.snapshot.host import Device, Energy
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.levels import NODE_SILENT_SECONDS
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, Risk
from zeromon.snapshot.rank import RankMachine
from zeromon.snapshot.run import NodeView
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Record, standing_findings

RETRY_NS = 30_000_000_000
"""Until a ring or a run that could not be followed is tried again."""
_NEVER_NS = 1 << 63
_FORECAST_NS_PER_RANK = 50_000_000


class Risks:
    """The memory risks of a run's ranks; with more ranks, each is forecast less often."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[int, tuple[Risk, ...]]] = {}
        """Rank -> time of the forecast (ns), and the risks."""
        self._host: tuple[Risk, ...] = ()
        self._host_ns = -(1 << 62)
        self._growing: dict[tuple[int, Pool], Risk] = {}
        """Rank, -1 for all of them, and memory -> its last risk with growth."""

    def update(self, ranks: Sequence[RankSnapshot], now_ns: int) -> dict[int, tuple[Risk, ...]]:
        """Returns rank -> its risks; of a dead rank, and of the host since a death, the last ones.

        The host's risk is a risk of every rank.
        """
        interval_ns = _FORECAST_NS_PER_RANK * len(ranks)
        if now_ns - self._host_ns >= interval_ns and all(rank.status.alive for rank in ranks):
            risk = host_risk(ranks)
            host_risks = [] if risk is None else [risk]
            self._host_ns, self._host = now_ns, self._with_growth_onset(-1, host_risks, ranks)
        for rank in ranks:
            made_ns, last_risks = self._by_rank.get(rank.rank, (-interval_ns, ()))
            if now_ns - made_ns >= interval_ns and (rank.status.alive or not last_risks):
                risks = self._with_growth_onset(rank.rank, risks_of_rank(rank), [rank])
                self._by_rank[rank.rank] = (now_ns, risks)
        return {rank.rank: (*self._by_rank[rank.rank][1], *self._host) for rank in ranks}

    def _with_growth_onset(
        self, number: int, risks: Sequence[Risk], ranks: Sequence[RankSnapshot]
    ) -> tuple[Risk, ...]:
        """Returns *risks* of *ranks* since the onset of their growth, which it remembers."""
        growing = self._growing
        dated = [
            with_earlier_onset(r, growing.get((number, r.pool)), ranks[0].steps.recent) for r in risks
        ]
        grown = [risk for risk in dated if risk.growth_bytes_per_step is not None]
        self._growing |= {(number, risk.pool): risk for risk in grown}
        return tuple(dated)


class LinkPeaks:
    """The peak bandwidths of each rank's links, read once."""

    def __init__(self) -> None:
        self._network = network_peak_bandwidth()
        self._by_rank: dict[int, Links] = {}

    def of(self, rank: int, uuid: str, devices: Devices) -> Links | None:
        """Returns the peaks of *rank*, whose device has that *uuid* ("" without a device)."""
        if not uuid and self._network[0] is None:
            return None
        # A rank names its device some time after its ring begins: its links are then asked for again
        if rank not in self._by_rank or (uuid and not self._by_rank[rank].device_kind):
            device, host, network = devices.links(uuid), devices.host_link(uuid), self._network
            self._by_rank[rank] = Links(
                device_bytes_per_second=device[0], device_kind=device[1],
                network_bytes_per_second=network[0], network_kind=network[1],
                host_bytes_per_second=host[0], host_kind=host[1],
            )  # fmt: skip
        return self._by_rank[rank]


def judge_rank_silences(followers: Sequence[RankFollower], run: RunSnapshot) -> None:
    """Notes the stall or hang of each follower's state, since the rank's last progress.

    The fold ends it with the next progress. What is expected to take long is neither. A silence keeps
    its cause, for its seconds may be counted already.
    """
    hangs = [hang for hang in run.hangs if not hang.pause]
    stalled = {stall.rank.rank for stall in find_stalls(run) if not stall.rank.status.pause}
    for follower in followers:
        if follower.alive:
            rank = follower.state.rank
            hang = next((hung for hung in hangs if rank in (*hung.waiting, *hung.missing)), None)
            if hang is None and hangs and rank in stalled:
                hang = hangs[0]  # others wait, and it is not known for what it does not call
            _note_silence(follower.state, hang, stalls=rank in stalled, now_ns=run.taken_ns)


def _note_silence(state: RankState, hang: Hang | None, *, stalls: bool, now_ns: int) -> None:
    if state.silence is None and (stalls or hang is not None):
        cause = Cause.STALL if hang is None else Cause.HANG
        state.silence = Silence(cause, "", max(state.progress_ns, state.first_event_ns))
    if (silence := state.silence) is None:
        return
    silence.counted_ns = now_ns
    if hang is not None and silence.cause is Cause.HANG and not silence.of:
        awaited = (*hang.dead, *hang.missing, *hang.elsewhere)
        silence.of = f"rank {awaited[0]}" if awaited else ""


_START_SECONDS = 30.0
"""How long a run without launcher and ranks counts as running."""
_TASKS_SECONDS = 120.0
"""How long after the first the other tasks of a launcher are waited for."""
_NO_RANK = (
    "no rank ever reported; the command ended before init_process_group and before any"
    " optimizer step, or another sitecustomize kept zeromon out"
)


class RunFollower:
    """One run's folder: its ranks and its launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name
        self.info = printable_values(read_json_object(folder / "run.json"))
        self.started_wall = float(
            self.info.get("started") or paths.read_run_name(folder)[1] or time.time()
        )
        self.ranks: dict[str, RankFollower] = {}
        """Name of a ring -> its follower."""
        self.bad_rings: dict[str, str] = {}
        """Name of a ring that cannot be read -> why."""
        self._retry_ns: dict[str, int] = {}
        """Name of a ring that was left out -> when it is tried again, CLOCK_MONOTONIC."""
        self._has_retried = False
        self.ended = False
        self.ended_wall = 0.0
        self.captures: Captures | None = None
        self.trials = Trials(folder)
        self.alerts = Notifier(folder)
        self.record: Record | None = None
        self.is_saved = False
        """True once a snapshot of the run was due to be saved."""
        self._history = read_history_end(folder)
        self.cluster = RunCluster(folder)
        self._earlier = read_saved_totals(folder / TOTALS)
        self._host = HostReader()
        self._rapl, self._energy = Rapl(), EnergyMeter()
        self._revision = Revision(folder)
        self._links = LinkPeaks()
        self._cpu_users = CpuUsers()
        self._nccl = Nccl()
        self._risks = Risks()
        self._skew = ArrivalSkew()
        self._stragglers: tuple[Straggler, ...] = ()
        self._findings = FindingHistory()
        self._since: dict[Path, int] = {}
        """Ring -> when the attempt of its rank began."""
        self._before: dict[int, Counter[str]] = defaultdict(Counter)
        """Rank -> its seconds by cause in earlier attempts."""
        self._failed_since = 0.0
        self._attempts = 1
        launcher = self.info.get("pid")
        born = self.info.get("mono_ns")
        self._launcher = ProcessWatch(int(launcher), born) if launcher else None
        self._launched_ns = born if launcher and isinstance(born, int) else 0
        self._seen_ns = 0
        """When a rank or the launcher was last seen alive, CLOCK_MONOTONIC."""
        self._ended_ns = 0
        self._launched: Launched | None = None
        if self._launcher is not None:
            # A poll sees the end up to a tick late, which the ledger would count as the run's
            self._launcher.note_end_time()
            self._launched = Launched(self._launcher.pid)
        self._clock_ns = wall_clock_offset_ns(self.info)
        self._tasks = process.TaskWatch(folder)
        expected = self.info.get("tasks")
        self._expected_tasks = expected if isinstance(expected, int) else 0

    # ---- following -----------------------------------------------------------------------------

    def poll(self) -> None:
        """Finds new rings, reads all rings, and detects the end of the run."""
        for path in paths.ring_paths(self.folder):
            if self._retry_ns.get(path.name, _NEVER_NS) <= time.monotonic_ns():
                del self.bad_rings[path.name]
            if path.name not in self.ranks and path.name not in self.bad_rings:
                self._follow(path)
        for follower in self.ranks.values():
            follower.poll()
        now_ns, waits = time.monotonic_ns(), True
        if any(follower.alive for follower in self.ranks.values()):
            self._seen_ns, waits = now_ns, False
        # Not where every process has reported: look() reads all of /proc
        if self._launched is not None and (waits or self._launched.is_waiting) and not self.ended:
            self._launched.look({follower.state.pid for follower in self.ranks.values()}, now_ns)
        if not self.ended and self._is_over() and not self._retry_left_out_rings():
            self.ended = True
            self._ended_ns = self._run_end_ns()
            self.ended_wall = (self._ended_ns + self._clock_ns) / 1e9

    def _retry_left_out_rings(self) -> bool:
        """Retries, once, at the end of the run, the rings that were left out; True if there are any."""
        tries = bool(self._retry_ns) and not self._has_retried
        if tries:
            self._has_retried, self._retry_ns = True, dict.fromkeys(self._retry_ns, 0)
        return tries

    def _run_end_ns(self) -> int:
        """When the launcher ended, or the last rank where one outlived it; now, where nothing tells."""
        launcher_ns = self._launcher.ended_ns if self._launcher is not None else 0
        if launcher_ns > self._seen_ns:
            return launcher_ns
        died = (follower.died_ns for follower in self.ranks.values())
        return max((ns for ns in died if ns), default=time.monotonic_ns())

    def _follow(self, path: Path) -> None:
        try:
            new = self.ranks[path.name] = RankFollower(path, self._earlier.get(path.name))
        except (RingError, OSError, ValueError) as error:
            self.bad_rings[path.name] = printable(str(error))
            self._retry_ns[path.name] = time.monotonic_ns() + RETRY_NS
            return
        # Not before: a ring that cannot be opened now needs its totals at the next try
        self._earlier.pop(path.name, None)
        self._retry_ns.pop(path.name, None)
        for name, old in list(self.ranks.items()):
            if old.was_detached and old.state.pid == new.state.pid and name != path.name:
                # the same process was attached again
                del self.ranks[name]
                old.reader.close()
                remove_ring_file(old.path)

    def set_aside_broken(self, devices: Devices) -> bool:
        """Leaves out the rings that break a snapshot by themselves; returns whether there was one.

        Each is tried again later, with the totals it had: what broke may have been one figure of one
        moment, and a ring that is left out for good is a record that is lost.
        """
        broken: dict[str, str] = {}
        now_ns = time.monotonic_ns()
        for name, follower in self.ranks.items():
            try:
                follower.poll()
                self._match_arrivals([follower])
                summaries = self._summarize_ranks([follower], now_ns)
                ranks = self._complete_summaries([follower], summaries, devices, now_ns)
                hangs_of(map(as_member, ranks), now_ns)
            except Exception as error:  # noqa: PERF203
                broken[name] = printable(f"{name} is left out: {type(error).__name__}: {error}")
        for name in broken:
            follower = self.ranks.pop(name)
            self._earlier[name] = follower.totals()
            self._retry_ns[name] = now_ns + RETRY_NS
            follower.reader.close()
        self.bad_rings |= broken
        return bool(broken)

    def _wall_seconds(self) -> float:
        """Returns the time of the clock that the run began with, however often it was set since."""
        return (time.monotonic_ns() + self._clock_ns) / 1e9

    def _is_over(self) -> bool:
        if self.cluster.is_connected and self._has_failed_lately():
            return False
        if self._launcher is not None and self._launcher.alive():
            return False
        age = self._wall_seconds() - self.started_wall
        if self._tasks.alive():
            return False
        if self._tasks.count < self._expected_tasks and age < _TASKS_SECONDS:
            return False
        # Without it, a rank counts as killed whose exit status comes a poll later
        if any(not follower.settled for follower in self.ranks.values()):
            return False
        if self._launched is not None and self._launched.is_settling:
            return False
        # Without it, the record lacks a trace whose analysis still runs
        if self.captures is not None and self.captures.busy:
            return False
        return bool(self.ranks) or self._launcher is not None or age > _START_SECONDS

    def has_live_processes(self) -> bool:
        """Returns whether its launcher or one of its ranks still runs."""
        launched = self._launcher is not None and self._launcher.alive()
        return launched or any(follower.process.alive() for follower in self.ranks.values())

    def _has_failed_lately(self) -> bool:
        """Returns whether a rank failed so recently that other nodes may not have its report yet."""
        failed = any(follower.ending()[1] for follower in self.newest())
        if failed and not self._failed_since:
            self._failed_since = time.monotonic()
        return failed and time.monotonic() - self._failed_since < NODE_SILENT_SECONDS + 3

    def newest(self) -> list[RankFollower]:
        """Returns one follower per rank: after a restart those of the newest attempt."""
        return attempts.current_followers(attempts.group_by_attempt(self.ranks.values()))

    def rings(self) -> tuple[str, ...]:
        """Returns the name of each rank's ring, in order of ranks."""
        by_rank = {follower.state.rank: follower.path.name for follower in self.newest()}
        return tuple(name for _, name in sorted(by_rank.items()))

    def is_name_known(self) -> bool:
        """Returns whether the run's name is known; see :meth:`RunCluster.can_name_run`."""
        return self.ended or self.cluster.can_name_run([f.state for f in self.newest()])

    def connect(self, lead: Callable[[str], Leader]) -> None:
        """Connects to the other nodes, where there are any; see :meth:`RunCluster.connect`."""
        self.cluster.connect(self.run, (f.state.rank for f in self.newest()), lead)

    def recall(self, standing: Iterable[Finding]) -> None:
        """Goes on from the findings that an earlier collector showed last."""
        self._findings = FindingHistory(standing)

    def _with_history_end(self, run: RunSnapshot) -> RunSnapshot:
        """Returns *run* with when its history stopped, and why."""
        if self.record is not None and self.record.note and not self._history.note:
            self._history = HistoryEnd(self.record.note, self._wall_seconds(), self.record.last_step)
            # Beside the rings, because the store may be unable to keep it
            with suppress(OSError):
                replace_file(self.folder / _HISTORY_END, json.dumps(self._history))
        note, until_wall, step = self._history
        return replace(run, history_note=note, history_until=until_wall, history_step=step)

    # ---- the snapshot --------------------------------------------------------------------------

    def snapshot(self, devices: Devices) -> RunSnapshot:
        """Returns the snapshot of the run, with risks and findings."""
        now_ns = time.monotonic_ns()
        by_attempt = attempts.group_by_attempt(self.ranks.values())
        numbers = attempts.attempt_numbers(by_attempt)
        followers = attempts.current_followers(by_attempt)
        if len(by_attempt) > self._attempts:  # figures of several ranks or steps begin anew
            self._skew, self._risks, self._stragglers = ArrivalSkew(), Risks(), ()
            self._findings = FindingHistory()
            self._attempts = len(by_attempt)
        self._update_ledger_base(by_attempt)
        # before the ranks are summarized: waits and transfers belong to these steps
        self._match_arrivals(followers)
        self.cluster.exchange(self._skew)
        self._host.new_round()
        summaries = self._summarize_ranks(followers, now_ns)
        capture = self.captures.follow(summaries, now_ns) if self.captures is not None else None
        ranks = self._nccl.inspected(self._complete_summaries(followers, summaries, devices, now_ns))
        nodes = self.cluster.nodes()
        self._find_stragglers(ranks, nodes)
        self.cluster.report(ranks)
        hangs = self.cluster.find_hangs([f.state for f in followers], ranks, now_ns)
        leads = not nodes or nodes[0].here  # one question of a job: RAS asks all its processes
        folder = next((f for rank in ranks if (f := rank.config.process.get("folder"))), "")
        run = RunSnapshot(
            run=self.run, command=tuple(mask_words([*map(str, self.info.get("command") or ())])),
            node=printable(socket.gethostname()), started_wall=self.started_wall,
            taken_wall=self.ended_wall or self._wall_seconds(), taken_ns=now_ns, ended=self.ended,
            ranks=ranks, findings=(), note=self._note(), unread=self._unread_ranks(followers),
            stragglers=self._stragglers, hangs=hangs,
            ras=self._nccl.ras(ranks, hangs if leads else (), now_ns), capture=capture,
            trials=self.trials.follow(ranks, now_ns),
            alias=self.folder.name if self.folder.name != self.run else "", nodes=nodes,
            away=self.cluster.away, nodes_note=self.cluster.note,
            attempts=attempts.earlier_attempts(by_attempt, self._launched_ns),
            job=self._job_name(followers), planned_steps=int(self.info.get("steps") or 0),
            driver=devices.driver(),
            cpu_users=self._cpu_users.read(now_ns) if any(map(lacks_cpus, ranks)) else (),
            energy=self._used(followers, ranks, now_ns), revision=self._revision.of(folder),
            attempt=next(reversed(numbers), 1),
        )  # fmt: skip
        if self._launched is not None:
            run = self._launched.with_unreported(run, numbers, self._clock_ns)
        run = self._with_history_end(run)
        judge_rank_silences(followers, run)
        findings = with_trial_results(advise(run), run.trials)
        return replace(run, findings=self._findings.shown(run, findings))

    def _update_ledger_base(self, by_attempt: Sequence[Sequence[RankFollower]]) -> None:
        """Updates from when on each rank's ledger goes, and its seconds in earlier attempts."""
        starts_ns = attempts.attempt_starts_ns(by_attempt, self._launched_ns)
        self._since = {
            follower.path: since_ns
            for members, since_ns in zip(by_attempt, starts_ns, strict=False)
            for follower in members
        }
        self._before = attempts.earlier_ledger_totals(by_attempt, self._launched_ns)

    def _match_arrivals(self, followers: Sequence[RankFollower]) -> None:
        """Matches the collectives that ended at each rank with those of the other ranks."""
        local_ranks = {follower.state.rank for follower in followers}
        for follower in followers:
            state = follower.state
            groups = {}
            for group in {arrival.group for arrival in state.arrivals}:
                ranks = state.groups.get(group, {}).get("ranks", ())
                local = len(local_ranks.intersection(ranks))
                groups[group] = state.group_id(group), local, len(ranks)
            self._skew.record_arrivals(state.rank, groups, state.arrivals)
            state.arrivals.clear()

    def _summarize_ranks(self, followers: Sequence[RankFollower], now_ns: int) -> list[RankSnapshot]:
        """Returns the snapshots of the ranks by their own events and processes."""
        summaries = []
        for follower in followers:
            since_ns, until_ns = self._since.get(follower.path, 0), self._ended_ns or now_ns
            observed = replace(
                attempts.observed_lifetime(follower, since_ns, until_ns),
                halted=follower.halted(now_ns),
                host=follower.host(self._host),
                lock=follower.lock(now_ns),
            )
            summaries.append(summarize_rank(follower.state, observed))
        return summaries

    def _complete_summaries(
        self,
        followers: Sequence[RankFollower],
        summaries: Sequence[RankSnapshot],
        devices: Devices,
        now_ns: int,
    ) -> tuple[RankSnapshot, ...]:
        """Returns the *summaries* with what probes and the other ranks say of each rank."""
        risks = self._risks.update(summaries, now_ns)
        killed = killed_for_memory(summaries)
        checks = self.captures.checks if self.captures is not None else {}
        on_device = Counter(str(f.state.meta.get("device_uuid", "")) for f in followers if f.alive)
        ranks = []
        for follower, rank in zip(followers, summaries, strict=True):
            number, virtual = rank.rank, rank.on_virtual_device
            uuid = str(follower.state.meta.get("device_uuid", ""))
            ended = KILLED_FOR_MEMORY if number in killed else rank.status.ended
            device = _with_process_count(devices.read(uuid, now_ns, rank.pid), on_device[uuid])
            totals: Counter[str] = self._before[number] + Counter(rank.ledger.totals)
            completed = replace(
                rank,
                status=replace(rank.status, ended=ended),
                communication=replace(
                    rank.communication,
                    links=None if virtual else self._links.of(number, uuid, devices),
                    wait_seconds=None if virtual else self._skew.wait_seconds(number),
                    late_seconds=None if virtual else self._skew.late_seconds(number),
                ),
                memory=replace(
                    rank.memory,
                    workers=follower.workers(),
                    risks=() if rank.status.detached else risks[number],
                ),
                machine=RankMachine(device=device, disk=follower.disk(), pressure=follower.pressure()),
                ledger=replace(rank.ledger, totals=dict(totals)),
                requests=replace(rank.requests, check=checks.get(number)),
            )
            ranks.append(completed)
        return with_bubbles(tuple(ranks))

    def _used(
        self, followers: Sequence[RankFollower], ranks: Sequence[RankSnapshot], now_ns: int
    ) -> Energy:
        """The energy that this node has used for the run. Ranks that share a device count it once."""
        devices = {
            str(follower.state.meta.get("device_uuid", "")): joules
            for follower, rank in zip(followers, ranks, strict=True)
            if rank.machine.device
            and (joules := rank.machine.device.energy_joules) is not None
            and not rank.on_virtual_device
        }
        return self._energy.add(now_ns, devices, self._rapl.read(), self._rapl.note)

    def _find_stragglers(self, ranks: Sequence[RankSnapshot], nodes: Sequence[NodeView]) -> None:
        """Updates the stragglers while all ranks are alive; after a death the last ones remain."""
        if all(rank.status.alive and not rank.on_virtual_device for rank in ranks):
            error = self.cluster.clock_error_seconds()
            self._stragglers = find_stragglers(
                self._skew,
                ranks,
                lambda rank: next((node.node for node in nodes if node.has(rank)), ""),
                error,
                self._stragglers,
            )

    def _job_name(self, followers: Sequence[RankFollower]) -> str:
        """The name that the user gave to the job, else the id that its launcher or scheduler gave."""
        names = (self.info.get("job"), *(follower.state.meta.get("job") for follower in followers))
        return next((str(name) for name in names if name), "")

    def _note(self) -> str:
        messages = [*self.bad_rings.values(), self.alerts.note, *self._tracking_notes()]
        if any(messages):
            return "; ".join(filter(None, messages))
        return "" if self.ranks or not self.ended else _NO_RANK

    def _unread_ranks(self, followers: Iterable[RankFollower]) -> tuple[int, ...]:
        """The ranks that have no ring but one that cannot be read, by the names of the files."""
        ring_ranks = {paths.rank_of_ring(name) for name in self.bad_rings}
        return tuple(sorted(ring_ranks - {follower.state.rank for follower in followers} - {-1}))

    def _tracking_notes(self) -> Iterator[str]:
        """Yields what the processes of ``zeromon run --track`` cannot send."""
        for path in sorted(self.folder.glob(f"{paths.TRACK}*")):
            with suppress(OSError):
                yield printable(path.read_text(errors="replace")[:200])

    # ---- keeping -------------------------------------------------------------------------------

    def keep_new_steps(self) -> None:
        """Appends the new steps to the history."""
        if self.record is not None:
            present = self.newest()
            for attempt in attempts.group_by_attempt(self.ranks.values()):
                for follower in attempt:
                    final = self.ended or follower not in present
                    self.record.keep(follower.new_history_rows(final=final))

    def save_rank_totals(self) -> None:
        """Saves the totals, from which a restarted collector continues.

        An earlier attempt needs them only where its ring has overwritten what it began with.
        """
        current = self.newest()
        checkpoints = {name: self._earlier[name] for name in self._retry_ns if name in self._earlier}
        for follower in self.ranks.values():
            if follower in current or follower.reader.position > follower.reader.header.capacity:
                checkpoints[follower.path.name] = follower.totals()
        replace_file(self.folder / TOTALS, checkpoint.encode_checkpoints(checkpoints))

    def keep(self, store: Store) -> None:
        """Moves the rings of an ended run from memory to the store."""
        for follower in self.ranks.values():
            with suppress(RingError):  # it was truncated since the last poll
                store.keep_ring(self.run, follower.path.name, follower.reader.memory)
        for follower in self.ranks.values():  # after every copy is complete
            follower.reader.close()
        # zeromon's own files alone, because the user may have chosen the folder
        for name in _RUN_FILES:
            # A killed process leaves the hidden file that was to replace another
            for path in (*self.folder.glob(name), *self.folder.glob(f".{name}.*")):
                # The file may only name a ring in shared memory, which unlink() would leave behind
                if path.suffix == ".ring":
                    remove_ring_file(path)
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def _with_process_count(device: Device | None, ranks: int) -> Device | None:
    """Returns the *device* with the number of its processes, of which *ranks* are known here."""
    if device is None or ranks <= (device.processes or 0):
        return device
    return replace(device, processes=ranks)


def snapshot_of_folder(folder: Path) -> RunSnapshot:
    """Returns the snapshot of a run, read from its rings without a collector."""
    run = RunFollower(folder)
    run.recall(standing_findings(Store().folder(run.run)))
    # So many polls until a missing exit status counts as unknown, a ring that cannot be read has been
    # tried twice, and the run counts as over
    for _ in range(SETTLING_POLLS + 2):
        run.poll()
    return run.snapshot(Devices())


# ---- what NCCL itself says of a run -------------------------------------------------------------


class Nccl:
    """The readers of one run."""

    def __init__(self) -> None:
        self._inspectors: dict[int, InspectorReader] = {}
        """Pid -> its reader."""
        self._ras = RasReader()

    def inspected(self, ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
        """Returns the ranks with what Inspector has written of them."""
        rows, notes = {}, {}
        for rank in ranks:
            reader = self._inspectors.get(rank.pid) or self._inspector_reader(rank)
            if reader is not None:
                rows[rank.rank], notes[rank.rank] = reader.read(), reader.note
        return tuple(
            rank.with_communication(inspector_note=notes[rank.rank]) if notes.get(rank.rank) else rank
            for rank in with_groups(ranks, rows)
        )

    def _inspector_reader(self, rank: RankSnapshot) -> InspectorReader | None:
        variables = _nccl_variables(rank)
        if not variables:
            return None
        try:
            # The plugin resolves a relative path in the folder of its process, which a script may change
            folder = Path(os.readlink(f"/proc/{rank.pid}/cwd"))
        except OSError:
            folder = Path(rank.config.process.get("folder", ""))
        return self._inspectors.setdefault(rank.pid, InspectorReader(rank.pid, variables, folder))

    def ras(self, ranks: Sequence[RankSnapshot], hangs: Iterable[Hang], now_ns: int) -> Ras | None:
        """Returns RAS's newest answer while a collective of NCCL hangs; None before the first."""
        asked_rank = next((rank for rank in ranks if rank.status.alive and _uses_nccl(rank)), None)
        if asked_rank is None or not any(hang.seconds and not hang.pause for hang in hangs):
            self._ras = RasReader()  # an answer about another hang is none about the next
            return None
        self._ras.ask(_nccl_variables(asked_rank), now_ns)
        answer = self._ras.answer
        return ras_of(answer, ranks, is_local_address) if answer is not None else None


def _nccl_variables(rank: RankSnapshot) -> Mapping[str, str]:
    return rank.config.process.get("variables", {})


def _uses_nccl(rank: RankSnapshot) -> bool:
    return "nccl" in rank.config.process.get("packages", {}) and rank.device.startswith("cuda")


# ---- the files of a run's folder ----------------------------------------------------------------

TOTALS, _HISTORY_END = "totals.msgpack", "history.json"
_RUN_FILES = (
    "rank*.ring", "rank*.loading", "run.json", paths.RUN_NAME, "nodes.json", NOTE, "meets",
    process.TASKS, REVISION, TOTALS, trial_words.REQUEST, trial_words.WORDS, requests.REQUEST,
    paths.NOTIFY, TOLD, _HISTORY_END, TOKEN, f"{paths.TRACK}*",
)  # fmt: skip
"""The files of zeromon in a run's folder."""


class HistoryEnd(NamedTuple):
    """Why the store keeps no history any more, "" while it does; since when, and the last step kept."""

    note: str = ""
    wall: float = 0.0
    step: int = 0


def read_history_end(folder: Path) -> HistoryEnd:
    """Returns what an earlier collector noted about the end of the history."""
    with suppress(OSError, ValueError, TypeError):
        note, until_wall, step = json.loads((folder / _HISTORY_END).read_text())
        return HistoryEnd(printable(str(note)), float(until_wall), int(step))
    return HistoryEnd()


def read_saved_totals(path: Path) -> dict[str, Checkpoint]:
    """Returns the totals that an earlier collector saved, by the names of the rings."""
    try:
        return checkpoint.decode_checkpoints(path.read_bytes())
    except OSError:
        return {}


def wall_clock_offset_ns(info: Mapping[str, Any]) -> int:
    """Returns wall clock less monotonic clock, ns, when the run began; now, where that is not known."""
    started, mono_ns, now_ns = info.get("started"), info.get("mono_ns"), time.monotonic_ns()
    # CLOCK_MONOTONIC begins anew with each boot: a larger value is of an earlier one
    if isinstance(started, float) and isinstance(mono_ns, int) and 0 < mono_ns <= now_ns:
        return round(started * 1e9) - mono_ns
    return time.time_ns() - now_ns
