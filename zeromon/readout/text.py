"""Sentences about a run and its ranks, for every view. Pure.

A finding's own sentence stands with its rule. Names come from the run: a view cleans or escapes them.
"""

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeromon.base.units import counted, human_bytes, human_count, human_ratio, human_seconds
from zeromon.fold.summarize import waits_for_batch
from zeromon.readout.breakdown import PART_NAMES
from zeromon.ring.codes import operation_by_name
from zeromon.ring.model_metadata import INSTALLED
from zeromon.ring.strategy import Dim, dim_by_name
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.communication import InFlight, Straggler, bus_factor
from zeromon.snapshot.focus import first_failed, has_left, is_ending, roles_of
from zeromon.snapshot.host import CodeLine, ExtensionLock
from zeromon.snapshot.levels import UNTIMED
from zeromon.snapshot.rank import NOT_SEEN, Halt
from zeromon.snapshot.run import Attempt, Death, DeathRole, NodeView, RankProcess
from zeromon.snapshot.step import Capture, CaptureState, Lanes, LaneSpan, LateArrival, Stream

_MAX_LISTED_PROCESSES = 2


def starting_text(run: RunSnapshot) -> str:
    """``no rank has reported after 95 s; pid 4242 is at train.py:21 in main``."""
    if run.ended:
        return run.note or unreported_text(run.attempts) or "no rank ever reported"
    waited = human_seconds(max(0.0, run.taken_wall - run.started_wall))
    phrases = [f"no rank has reported after {waited}", *_process_texts(run.starting), run.note]
    return "; ".join(filter(None, phrases))


def restarting_text(run: RunSnapshot) -> str:
    """``attempt 2; pid 4242 is at train.py:21 in main``."""
    return "; ".join((f"attempt {run.restarting}", *_process_texts(run.starting)))


def unreported_text(attempts: Sequence[Attempt]) -> str:
    """``attempts 2 and 3 ended before a rank reported: rank 0, exit code 1``; "" without any."""
    if not attempts:
        return ""
    names = [human_count(attempt.number) for attempt in attempts]
    numbers = f"attempts {', '.join(names[:-1])} and {names[-1]}" if names[1:] else f"attempt {names[0]}"
    deaths = attempts[-1].deaths
    reason = f": {death_text(deaths[0])}" if deaths else ""
    return f"{numbers} ended before a rank reported{reason}"


def _process_texts(starting: Sequence[RankProcess]) -> list[str]:
    pids_at: dict[str, list[int]] = {}
    for proc in starting:
        location = proc.at.removesuffix(_AT_TOP_LEVEL).rpartition("/")[2]
        pids_at.setdefault(f"at {location}" if location else "running", []).append(proc.pid)
    phrases = []
    for activity, pids in list(pids_at.items())[:_MAX_LISTED_PROCESSES]:
        listed = ", ".join(map(str, pids[:_MAX_LISTED_PROCESSES]))
        others_text = ", ..." * (len(pids) > _MAX_LISTED_PROCESSES)
        verb = "are" if pids[1:] else "is"
        phrases.append(f"pid{'s' * bool(pids[1:])} {listed}{others_text} {verb} {activity}")
    hidden = len(pids_at) - len(phrases)
    return [*phrases, "others elsewhere"] if hidden else phrases


# ---- the run ---------------------------------------------------------------------------------------


CHANGED = " with changes"


def commit_text(revision: str) -> str:
    """Returns the git commit of a run: ``638361765e7a with changes``; "" where unknown."""
    return revision[:12] + (CHANGED if revision.endswith("-dirty") else "")


def run_state(run: RunSnapshot) -> str:
    """One sentence: how the run is, or how it ended; after a restart with the number of the attempt."""
    if run.restarting:
        return f"restarting, attempt {run.restarting}"
    if not run.ranks and not run.unfinished:
        return starting_text(run)
    state = f"{_state_of(run)}, attempt {run.attempt}" if run.last_attempt > 1 else _state_of(run)
    jobs = 1 + sum(entry.finished for entry in run.attempts)
    unreported = unreported_text([entry for entry in run.attempts if entry.number > run.attempt])
    lost = record_text(run) if run.ended and not run.unfinished else ""
    phrases = [state, unreported, f"job {jobs} of this run" if jobs > 1 else ""]
    phrases.append(f"its record is incomplete: {lost}" if lost else "")
    return "; ".join(filter(None, phrases))


def record_text(run: RunSnapshot) -> str:
    """``the store was full from 14:03 on, step 61 of at least 100``; "" for a whole record."""
    clock = "%Y-%m-%d %H:%M"
    if run.history_note:
        full = "no space left" in run.history_note.lower()
        stop_time = time.strftime(clock, time.localtime(run.history_until))
        step = f"step {human_count(run.history_step)} of {'at least ' if run.unfinished else ''}"
        reason = f"the store {'was full' if full else 'could not be written'} from {stop_time} on"
        return f"{reason}, {step}{human_count(run.last_step)}"
    if not run.unfinished:
        return ""
    stop_time = time.strftime(clock, time.localtime(run.taken_wall))
    return f"nothing was written after {stop_time}, step {human_count(run.last_step)}"


def _state_of(run: RunSnapshot) -> str:
    if run.unfinished:
        return f"incomplete: {record_text(run)}"
    steps = run.last_step
    failed = first_failed(run.ranks, run.hangs)
    if failed is not None:
        return end_text(run, failed)
    if all(rank.status.silent for rank in run.ranks):
        return f"{run.ranks[0].status.ended}, then at step {human_count(steps)}"
    if run.detached:
        ending = "the run has ended since" if run.ended else "the run goes on, and is not watched"
        return f"detached after step {human_count(steps)}; {ending}"
    if run.ended:
        return f"finished after {counted(steps, 'step')}"
    if stall_finding(run) is not None:
        return f"stalled after step {human_count(steps)}"
    if is_ending(run):
        return f"ending after step {human_count(steps)}"
    return f"running, step {human_count(steps)}"


def joined_text(run: RunSnapshot) -> str:
    """Since when a run is watched that was joined while it ran; "" for one that was launched."""
    joined = [rank for rank in run.ranks if rank.status.joined]
    if not joined:
        return ""
    step = min(rank.steps.first_step for rank in joined)
    start = (
        f"step {human_count(step)}" if any(r.steps.watched_steps for r in joined) else "zeromon attached"
    )
    return f"watched since {start}; earlier activity is unknown"


def notes_of(run: RunSnapshot) -> list[str]:
    """The limits of what is known of *run*: notes of the snapshot's source, and of an attach."""
    return [note for note in (*run.note.split("; "), joined_text(run)) if note]


def has_died(run: RunSnapshot) -> bool:
    """Returns whether a rank failed, and not because somebody stopped the run."""
    if not any(rank.status.failed for rank in run.ranks):
        return run.fleet is not None and run.fleet.failed > 0
    return DeathRole.STOPPED not in roles_of(run).values()


STALLS = frozenset(("collective_in_flight", "stalled"))
"""Rules whose critical findings say that a run makes no progress."""


def stall_finding(run: RunSnapshot) -> Finding | None:
    """The finding that *run* made no progress last; None where it did, or a pause is expected."""
    critical = (f for f in run.findings if f.severity is Severity.CRITICAL)
    return next((f for f in critical if f.rule in STALLS), None)


def pause_seconds(run: RunSnapshot) -> float | None:
    """Seconds since a step of *run* ended, while a finding says that it makes no progress; else None.

    Rates of earlier steps are not the run's rates then. A pause that is expected counts as well.
    """
    end_times = [rank.steps.recent[-1].end_ns for rank in run.ranks if rank.steps.recent]
    if run.ended or not end_times or all(finding.rule not in STALLS for finding in run.findings):
        return None
    return max(0.0, (run.taken_ns - max(end_times)) / 1e9)


def pause_text(seconds: float) -> str:
    """``no step for 35 s``: how long no step has ended."""
    return f"no step for {rough_time(seconds)}"


def silent_text(run: RunSnapshot, silent: Sequence[RankSnapshot]) -> str:
    """``8 ranks on node0003 not seen for 40 s``."""
    count = len(silent) if run.fleet is None else max(len(silent), run.fleet.silent)
    nodes = sorted({rank.node for rank in silent})
    remainder = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    place_text = f"on {', '.join(nodes[:2])}{remainder}"
    return f"{counted(count, 'rank')} {place_text} {silent[0].status.ended}"


def silent_for(seconds: float) -> str:
    """``not seen for 40 s``: what Prometheus has no samples of any more."""
    return f"{NOT_SEEN} {human_seconds(round(seconds))}"


def node_lost(node: NodeView) -> str:
    """``node b has not reported for 40 s``."""
    return f"node {node.node} has not reported for {human_seconds(node.heard_seconds)}"


def capture_text(capture: Capture, step: int) -> str:
    """How far a trace capture is; *step*: the newest step that has ended."""
    if capture.state == CaptureState.WAITING:
        return f"trace {capture.number}: begins with step {capture.first}, step {step} has ended"
    if capture.state == CaptureState.RECORDING:
        last_step = capture.first + capture.steps - 1
        return f"trace {capture.number}: {'saving' if step >= last_step else 'recording'}"
    return f"trace {capture.number}: {capture.state}"


# ---- one rank --------------------------------------------------------------------------------------


def doing(rank: RankSnapshot) -> str:
    """The last seen activity of a rank: ``in backward, unit layers.3, send #4 of pp (ranks 2, 3)``."""
    if rank.status.halted is not Halt.NONE:
        return str(rank.status.halted)
    if rank.status.detached and rank.status.alive:
        return "not watched any more"
    if not rank.steps.phase:
        return "running"  # read from Prometheus, which does not know more
    phrases = [f"in {rank.steps.phase}" if rank.steps.phase != "other" else "in own code"]
    if rank.steps.unit:
        phrases.append(f"unit {rank.steps.unit}")
    if rank.communication.in_flight:
        entry = rank.communication.in_flight[0]
        phrases.append(f"{entry.op} #{abs(entry.sequence)} of {group_of(rank, entry)} in flight")
    elif rank.status.lock is not None:
        remedy = f": {removal_of(rank.status.lock)}" if rank.status.lock.is_stale else ""
        phrases.append(f"waiting for {lock_text(rank.status.lock)}{remedy}")
    elif rank.status.stack:
        if waits_for_batch(rank.status.stack):
            phrases.append("waiting for a batch of the DataLoader")
        phrases.append(f"at {script_line(rank.status.stack)}")
    return ", ".join(phrases)


def unit_name(unit: str) -> str:
    """The name of a unit in a sentence; ``unit 0`` where it reads as a number, as in a Sequential."""
    return f"unit {unit}" if unit and not any(map(str.isalpha, unit)) else unit


def lock_text(lock: ExtensionLock) -> str:
    """A lock of torch's extension cache: its age, and who holds it."""
    name = f"the lock of torch's extension cache {lock.path}, {human_seconds(lock.age_seconds)} old"
    if lock.owner is not None:
        return f"{name}, held by pid {lock.owner}"
    if not lock.is_stale:
        return f"{name}, of another user: its owner is n/a"
    return f"{name}, held by no process of this node"


def removal_of(lock: ExtensionLock) -> str:
    """The command that removes a stale lock."""
    return f"rm {shlex.quote(lock.path)}"


def group_of(rank: RankSnapshot, entry: InFlight) -> str:
    """In which group a collective of *rank* is: :func:`group_text`."""
    group = next((row for row in rank.communication.groups if row.group_id == entry.group_id), None)
    membership = ("", ()) if group is None else (group.dim, group.ranks)
    return group_text(entry.group, *membership)


def group_name(label: str, dim: str) -> str:
    """``tp``: the dimension of a group; its label where that says nothing more."""
    return label if dim_by_name(dim) in (Dim.WORLD, Dim.OTHER) else dim


def group_text(label: str, dim: str, members: Sequence[int], *details: str) -> str:
    """``tp (ranks 2, 3)``: its dimension and members; ``group world`` where that says nothing more."""
    kind = dim_by_name(dim)
    name = f"{'group ' * (kind in (Dim.WORLD, Dim.OTHER))}{group_name(label, dim)}"
    listed = members if dim and kind is not Dim.WORLD else ()
    notes = [members_text(listed), *details] if listed else details
    return f"{name} ({'; '.join(notes)})" if notes else name


def members_text(members: Sequence[int]) -> str:
    """``ranks 2, 3``; of many, how many they are."""
    if len(members) > _MAX_MEMBERS:
        return counted(len(members), "rank")
    return f"rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"


_MAX_MEMBERS = 8


def exposed_unknown(rank: RankSnapshot) -> str:
    """Why the exposed communication of *rank* is unknown; "" where it is known."""
    if rank.communication.exposed_ratio is not None:
        return ""
    if rank.on_virtual_device:
        return "on modelled devices, this machine's times say nothing of it"
    if rank.communication.untimed_ratio is not None and rank.communication.untimed_ratio > UNTIMED:
        untimed = human_ratio(rank.communication.untimed_ratio)
        return f"{untimed} of its collectives are {_untimed_place(rank)}"
    unknown = rank.config.process.get("unknown_collectives")
    if unknown and any(step.untimed > step.collectives for step in rank.steps.recent):
        return f"no hook sees {', '.join(unknown)}"
    return "no step has been timed yet"


def overlap_unknown(rank: RankSnapshot) -> str:
    """Why the overlap of *rank* is unknown; "" where it is known, or its exposed time is not either."""
    if rank.communication.overlap_ratio is not None or rank.communication.exposed_ratio is None:
        return ""
    spans_unseen = any(step.communication_ns < 0 for step in rank.steps.recent if step.timed)
    return "when its collectives begin or end is not seen" if spans_unseen else "no communication"


def busbw_unknown(rank: RankSnapshot) -> str:
    """Why collectives of *rank* that sent bytes have no bus bandwidth; "" where none is without."""
    known = {(row.op, row.group) for row in rank.communication.traffic if row.busbw_bytes_per_second}
    unseen = [
        row.op
        for row in rank.communication.collectives
        if row.timed and row.nbytes and bus_factor(operation_by_name(row.op), row.group_size)
        and row.busbw_bytes_per_second is None and (row.op, row.group) not in known
    ]  # fmt: skip
    return f"when {', '.join(dict.fromkeys(unseen))} begins or ends is not seen" if unseen else ""


def memory_unknown(rank: RankSnapshot) -> str:
    """Which figures of the device's allocator are unknown, and why; "" where none is, and on a CPU."""
    kind = rank.config.process.get("allocator", "")
    if kind == "cudaMallocAsync":
        return "free parts of blocks and retries are n/a: cudaMallocAsync does not count them"
    if rank.memory.device is not None or not kind:
        return ""
    if kind == "uncached":
        return "device memory is n/a: torch counts nothing with PYTORCH_NO_CUDA_MEMORY_CACHING"
    return f"device memory is n/a: the allocator ({kind}) has told no figures"


def in_graphs(rank: RankSnapshot) -> str:
    """``28 collectives issued from C++, untimed``, and what follows; "" without any."""
    if not rank.communication.untimed_in_cpp:
        return ""
    count_text = f"{counted(rank.communication.untimed_in_cpp, 'collective')} {_untimed_place(rank)}"
    bound = rank.communication.exposed_ratio is not None and in_graphs_ratio(rank) > 0
    return f"{count_text}; exposed communication is at least what is shown" if bound else count_text


def in_graphs_ratio(rank: RankSnapshot) -> float:
    """Their share of the collectives of a step, without the first and the last step.

    Constructors communicate before the first step; what DDP's reducer has timed follows a step later.
    """
    steps = [step for step in rank.steps.recent[1:-1] if not step.idle]
    return sum(step.untimed for step in steps) / max(1, sum(step.collectives for step in steps))


def _untimed_place(rank: RankSnapshot) -> str:
    """Where no hook sees a collective: a graph is named only where torch.compile has made one."""
    graphs = "inside compiled graphs or " if rank.config.compiled.get("frames") else ""
    return f"{graphs}issued from C++, untimed"


def state_text(rank: RankSnapshot) -> str:
    """How a rank ended, where it stands still, else its phase: for a table cell."""
    if rank.status.stack and not rank.status.ended:
        return (
            f"in {rank.communication.in_flight[0].op}"
            if rank.communication.in_flight
            else f"at {short_frame(rank.status.stack)}"
        )
    phase = "running" if rank.steps.phase == "other" else rank.steps.phase or "up"
    return (ended_text(rank).removeprefix("stopped by ") or phase).replace("_", " ")


def short_frame(stack: Sequence[str]) -> str:
    """``t.py:32``: :func:`script_line` without its function."""
    return script_line(stack).partition(" in ")[0]


def script_line(stack: Sequence[str]) -> str:
    """``t.py:32 in main``: :func:`script_frame` without its folder."""
    return script_frame(stack).rpartition("/")[2].removesuffix(_AT_TOP_LEVEL)


_AT_TOP_LEVEL = " in <module>"


def script_frame(stack: Sequence[str]) -> str:
    """The innermost frame of *stack* in the user's own code: neither installed nor Python's own.

    Without one, as in autograd's thread, that of the library: a hook of zeromon is no place of the run.
    """
    own_frames = [frame for frame in stack if not any(marker in frame for marker in INSTALLED)]
    library_frames = [frame for frame in stack if INSTALLED[0] not in frame]
    return (own_frames or library_frames or list(stack))[-1]


def busiest_line(rank: RankSnapshot, *, communicates: bool = False) -> str:
    """``train.py:111 in log_metrics``: the line of the function in most samples; "" if unknown.

    *communicates*: of those samples in which it waits for other ranks; else of the others.
    """
    functions: dict[tuple[str, str], list[CodeLine]] = {}
    for code_line in (row for row in rank.steps.own_code if row.communicates is communicates):
        file, _, function = code_line.place.rpartition(":")
        functions.setdefault((file, function.partition(" ")[2]), []).append(code_line)
    samples = max(functions.values(), key=lambda rows: sum(row.ratio for row in rows), default=[])
    if not samples:
        return ""
    location = max(samples, key=lambda row: row.ratio).place.removesuffix(_AT_TOP_LEVEL)
    return location.rpartition("/")[2] if location.startswith("/") else location


UNATTRIBUTED_NAMES = {
    "kept": "kept by each step",
    "activation_temp": "activation + temp",
    "reserved_unallocated": "reserved, unallocated",
    "non_torch": "non-torch",
    "other": "rest of RSS",
}
"""Memory that no role accounts for, by :attr:`Unattributed.kind`."""


def rough_time(seconds: float) -> str:
    """``64 s``, ``12 min``, ``3.5 h``: a forecast has no more digits."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- findings and stragglers -----------------------------------------------------------------------


def rank_prefix(rank: int) -> str:
    """``rank 3: ``; "" for -1, the whole run."""
    return f"rank {rank}: " if rank >= 0 else ""


def finding_text(finding: Finding) -> str:
    """``rank 3: ...``: whom a finding is about, and its sentence."""
    return f"{rank_prefix(finding.rank)}{finding.text}"


def leading_clauses(sentence: str, width: int, divider: str = "; ") -> str:
    """The first clauses of *sentence* that fit *width*, at least one; parentheses stay whole."""
    clauses = re.split(rf"{re.escape(divider)}(?![^(]*\))", sentence)
    while len(clauses) > 1 and len(divider.join(clauses)) > width:
        clauses.pop()
    return divider.join(clauses)


def clock(wall_time: float) -> str:
    """``2026-11-25 18:02:11``: *wall_time*, seconds since the epoch, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_time))


def resolved_texts(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """(rule, how often, how long and when, with the last evidence) of findings that are over.

    One row for each rule, the rule that was over last first.
    """
    by_rule: dict[str, list[Finding]] = {}
    for f in findings:
        if f.gone is not None:
            by_rule.setdefault(f.code or f.rule, []).append(f)
    rows = []
    for rule, repeats in sorted(by_rule.items(), key=lambda item: -max(f.gone or 0.0 for f in item[1])):
        last_finding = max(repeats, key=lambda f: f.gone or 0.0)
        stood = human_seconds(sum((f.gone or f.came) - f.came for f in repeats))
        ranks = sorted({f.rank for f in repeats if f.rank >= 0})
        often = f"{len(repeats)} times, " if len(repeats) > 1 else ""
        owners = f", {members_text(ranks)}" if len(ranks) > 1 else ""
        history = f"{often}for {stood} in total{owners}, last began {clock(last_finding.came)}"
        rows.append((rule, f"{history}: {finding_text(last_finding)}"))
    return rows


def straggler_text(late: Straggler) -> str:
    """``rank 3: late by 10.0 ms per step (forward) since step 40; the others wait ...``."""
    return f"{late.straggler_name}: {straggler_sentence(late)}"


def straggler_sentence(late: Straggler) -> str:
    """How late a straggler is and in which phases, since when, what it costs the others, and why."""
    start = f" since step {human_count(late.since_step)}" if late.since_step else ""
    step = "in the median step" if late.since_step else "per step"  # a Prometheus has means
    cost = f"{human_seconds(late.late_seconds)} {step} ({human_ratio(late.share)})"
    reason = f"; {late.cause}" if late.cause else ""
    if late.whole_node:
        return f"all its ranks come after all others, which wait {cost}{start}{reason}"
    if not late.phases:
        return f"late{start}; the others wait {cost}{reason}"
    phases = " and ".join(PART_NAMES.get(phase, phase) for phase in late.phases)
    longer = human_seconds(late.longer_seconds)
    return f"late by {longer} per step ({phases}){start}; the others wait {cost}{reason}"


# ---- the agent --------------------------------------------------------------------------------------

_SURE = 3.5
"""So many standard errors are a 99 % interval of batch means."""
_FINE = 0.01
"""A measured overhead whose interval is within this is shown, whatever it says."""


def overhead_text(ranks: Sequence[RankSnapshot]) -> str:
    """The agent's overhead: the accounted figure, and the measured figure where it allows a verdict."""
    measured = overhead_measured(ranks)
    return overhead_bound(ranks) + (f"; measured {measured}" if measured else "")


def overhead_bound(ranks: Sequence[RankSnapshot]) -> str:
    """``about 0.3 %``: the accounted overhead of the rank with the highest; ``n/a`` where unknown."""
    bounds = [b for rank in ranks if (b := rank.agent.accounted_overhead_ratio) is not None]
    return f"about {human_ratio(max(bounds))}" if bounds else "n/a"


def overhead_measured(ranks: Sequence[RankSnapshot]) -> str:
    """``+0.4 ± 0.3 %`` against control steps; "" where the noise of all ranks allows no verdict."""
    measured = [
        (ratio, _SURE * noise)
        for rank in ranks
        if (ratio := rank.agent.overhead_ratio) is not None
        and (noise := rank.agent.overhead_noise_ratio) is not None
    ]
    ratio, width = max((k for k in measured if k[1] <= max(_FINE, abs(k[0]))), default=(None, 0.0))
    return "" if ratio is None else f"{ratio * 100:+.1f} ± {width * 100:.1f} %"


# ---- how ranks and runs ended, in words ---------------------------------------------------------

_MAX_LISTED_RANKS = 4


def end_text(run: RunSnapshot, fatal: RankSnapshot) -> str:
    """How the run was stopped, or which rank ended it and how many died of that."""
    roles = roles_of(run)
    if roles[fatal.rank] is DeathRole.STOPPED:
        # Of the run, as everywhere: a stop reaches ranks in different steps
        return f"{ended_text(fatal)} after step {human_count(run.last_step)}"
    if roles[fatal.rank] is DeathRole.VICTIM and run.unread:
        last_step = human_count(fatal.steps.last_step)
        fate = f"rank {fatal.rank} ended after step {last_step} ({error_of(fatal)})"
        return f"died: cause unknown, the record of {numbered_ranks(run.unread)} is lost; {fate}"
    culprits = [rank for rank in run.ranks if roles.get(rank.rank) is DeathRole.CULPRIT]
    alike_count = sum(rank.status.ended == fatal.status.ended for rank in culprits)
    count_text = f" (and {alike_count - 1} more)" if alike_count > 1 else ""
    name = ended_text(fatal).removeprefix("stopped by ")
    manner = f", {name}, after step {human_count(fatal.steps.last_step)}"
    if has_left(fatal):
        manner = f" left after step {human_count(fatal.steps.last_step)} ({exit_text(fatal)})"
    other_ranks = [rank.rank for rank in culprits if rank.status.ended != fatal.status.ended]
    victims = [rank for rank, role in roles.items() if role is DeathRole.VICTIM]
    count = len(victims) if run.fleet is None else run.fleet.failed - len(culprits)
    phrases = [f"died: rank {fatal.rank}{count_text}{manner}"]
    phrases += [f"{numbered_ranks(other_ranks)} failed, too"] if other_ranks else []
    if count > 0:
        named = numbered_ranks(victims) if count == len(victims) else counted(count, "rank")
        phrases.append(f"{named} died of it")
    return "; ".join(phrases)


def error_of(rank: RankSnapshot) -> str:
    """How *rank* ended: ``SIGKILL``, or its exception: ``ValueError at t.py:32: bad sample 4711``."""
    error = rank.status.exception if rank.status.ended == "exception" else ""
    return f"{error[:_MAX_ERROR]}..." if len(error) > _MAX_ERROR else error or rank.status.ended


_MAX_ERROR = 160


def ended_text(rank: RankSnapshot) -> str:
    """How *rank* ended, in a word or two: ``SIGKILL``, ``ValueError``, ``stopped by Ctrl-C``."""
    if rank.status.stopped:
        return f"stopped by {rank.status.stopped}"
    is_error = rank.status.ended == "exception"
    return error_of(rank).split()[0].rstrip(":") if is_error else rank.status.ended


def exit_text(rank: RankSnapshot) -> str:
    """How a rank ended that left without an error; the kernel may not tell the exit code."""
    return "exit code 0" if rank.status.ended == "finished" else "without an error"


def death_text(death: Death) -> str:
    """``rank 1, exception, ValueError: boom``: how a rank of an earlier attempt ended."""
    fields = (f"rank {death.rank}", death.ended, death.exception)
    return ", ".join(field for field in fields if field)


def host_evidence(rank: RankSnapshot) -> str:
    """The kernel's count of kills, and the rank's memory, when the kernel killed it for memory."""
    host = rank.memory.host
    if host is None:
        return ""
    source = f"cgroup {host.cgroup}" if host.cgroup and host.oom_kills >= 0 else "machine"
    times = "one such kill" if host.kills_at_end == 1 else f"{host.kills_at_end} such kills"
    note = f"the {source} counted {times} then; this rank held {human_bytes(rank.memory.rss_bytes)}"
    return f"{note} of a limit of {human_bytes(host.limit_bytes)}" if host.limit_bytes > 0 else note


def left_text(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """``left after step 60 (exit code 0) while rank 1 trained in step 61``."""
    victims = [peer for peer in run.ranks if roles.get(peer.rank) is DeathRole.VICTIM]
    step = human_count(max((peer.steps.last_step for peer in victims), default=0) + 1)
    peers = numbered_ranks([peer.rank for peer in victims])
    departure = f"left after step {human_count(rank.steps.last_step)} ({exit_text(rank)})"
    return f"{departure} while {peers} trained in step {step}"


def consequence_text(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """``; it died of rank 0`` of a victim; "" of any other rank."""
    if roles.get(rank.rank) is not DeathRole.VICTIM:
        return ""
    culprits = [number for number, role in roles.items() if role is DeathRole.CULPRIT]
    if culprits:
        return f"; it died of {numbered_ranks(culprits)}"
    if run.unread:
        return f"; the record of {numbered_ranks(run.unread)} is lost, and may have the cause"
    return "; another rank had failed"


def unread_text(run: RunSnapshot) -> str:
    """``the record of rank 0 cannot be read: what it does, and how it ended, is unknown``."""
    unknown = "what it does, and how it ended, is unknown"
    return f"the record of {numbered_ranks(run.unread)} cannot be read: {unknown}"


def numbered_ranks(ranks: Sequence[int], limit: int = _MAX_LISTED_RANKS) -> str:
    """``rank 1``, ``ranks 1, 2, 3, 4 and 9 more``: at most *limit* by number."""
    hidden = len(ranks) - limit
    listed = ", ".join(map(str, ranks[:limit]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}{f' and {hidden} more' if hidden > 0 else ''}"


# ---- what the spans of the last steps say -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLane:
    """The collectives of a rank that have one unit and one name, in the order of their beginnings."""

    unit: str
    name: str
    spans: tuple[LaneSpan, ...]

    @property
    def label(self) -> str:
        """The unit and the collective; the collective alone where no unit is known."""
        return f"{self.unit} {self.name}" if self.unit else self.name


def communication_of(lanes: Lanes, rank: int) -> tuple[LaneSpan, ...]:
    """The collectives of a rank, in the order of their beginnings."""
    return tuple(s for s in lanes.spans if s.rank == rank and s.stream is not Stream.COMPUTE)


def compute_of(lanes: Lanes, rank: int) -> tuple[LaneSpan, ...]:
    """The phases of a rank, in the order of their beginnings."""
    return tuple(s for s in lanes.spans if s.rank == rank and s.stream is Stream.COMPUTE)


def by_unit(spans: Iterable[LaneSpan]) -> list[UnitLane]:
    """The collectives of one rank by unit and name, those that begin first at the top."""
    rows: dict[tuple[str, str], list[LaneSpan]] = {}
    for span in spans:
        rows.setdefault((span.unit, span.name), []).append(span)
    return [UnitLane(unit=unit, name=name, spans=tuple(row)) for (unit, name), row in rows.items()]


def exposed_part(span: LaneSpan) -> tuple[int, int]:
    """From when to when the rank was blocked, nanoseconds; empty where it was not."""
    return max(span.begin_ns, span.end_ns - span.exposed_ns), span.end_ns


def arrival_of(lanes: Lanes, span: LaneSpan) -> LateArrival | None:
    """Who came last to the collective of *span*; None where not all of its ranks are shown."""
    key = (span.name, span.unit, span.group, span.step)
    return next(
        (
            late
            for late in lanes.arrivals
            if (late.name, late.unit, late.group, late.step) == key
            and late.first_ns <= span.begin_ns <= late.at_ns <= span.end_ns
        ),
        None,
    )


def span_text(span: LaneSpan) -> str:
    """A collective or a phase with its size, its length and what of it was exposed."""
    fields = [f"{span.unit} {span.name}".strip(), span.group]
    if span.nbytes:
        fields.append(human_bytes(span.nbytes))
    fields.append(human_seconds((span.end_ns - span.begin_ns) / 1e9))
    if span.stream is not Stream.COMPUTE:
        fields.append(f"{human_seconds(span.exposed_ns / 1e9)} exposed")
    return f"rank {span.rank}, step {span.step}: " + ", ".join(field for field in fields if field)


def arrival_text(late: LateArrival) -> str:
    """Who came last, and by how much."""
    delay = human_seconds((late.at_ns - late.first_ns) / 1e9)
    return f"rank {late.rank} came last, {delay} after rank {late.first_rank}"


def lanes_summary(lanes: Lanes) -> str:
    """Which steps are shown, and the rank that came last most often; "" without a step."""
    steps = sorted({step.step for step in lanes.steps})
    if not steps:
        return ""
    steps_text = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if not lanes.arrivals:
        return steps_text
    rank, count = Counter(late.rank for late in lanes.arrivals).most_common(1)[0]
    longest = max(late.at_ns - late.first_ns for late in lanes.arrivals if late.rank == rank)
    return (
        f"{steps_text}: rank {rank} came last to {human_count(count)} of"
        f" {counted(len(lanes.arrivals), 'collective')}, by up to {human_seconds(longest / 1e9)}"
    )


def gaps_in(lanes: Lanes, run: RunSnapshot) -> list[str]:
    """Sentences on what the spans do not show; they are of *run*."""
    missing = [f"left out: {omission}" for omission in lanes.left_out]
    paused = pause_seconds(run)
    if paused is not None:
        missing.insert(0, f"{pause_text(paused)}: what is under way is not drawn")
    elif run.ended and (run.hangs or has_died(run)):
        missing.insert(0, "the step in which the run ended is not drawn")
    unplaced = sum(step.unplaced_ns for step in lanes.steps) / 1e9
    if unplaced:
        missing.append(f"{human_seconds(unplaced)} of exposed communication have no known moment")
    untimed = sum(step.untimed for step in lanes.steps)
    if untimed:
        missing.append(f"not drawn, because their time is unknown: {counted(untimed, 'collective')}")
    return missing
