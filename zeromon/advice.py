"""What a person should know about a run. A rule is one function, and one line in :data:`RULES`.

Pure: a snapshot in, findings out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zeromon import offload, precision, remedies
from zeromon.hangs import in_words
from zeromon.remedies import STARVED, as_number
from zeromon.snapshot import (
    KILLED_FOR_MEMORY,
    Finding,
    Hang,
    RankSnapshot,
    Remedy,
    Risk,
    RunSnapshot,
    Straggler,
)
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

Rule = Callable[[RunSnapshot], Iterable[Finding]]

_SEVERITIES = ("critical", "warning", "info")
_LEAST_STEPS = 10
_LAST_STEPS = 50
_WARM_UP = 3
_MANY_BACKWARDS = 64


def oom_risk(run: RunSnapshot) -> Iterable[Finding]:
    """A memory is nearly full, or will be. The host's is said once, for the rank that holds most."""
    told_host = False
    for rank in sorted(run.ranks, key=lambda r: -r.rss_bytes):
        for risk in rank.risks:
            if risk.ratio < 0.5 or not rank.alive or (risk.pool == "host" and told_host):
                continue
            told_host = told_host or risk.pool == "host"
            yield Finding(
                rule="oom_risk",
                severity="critical" if risk.ratio >= 0.8 else "warning",
                rank=rank.rank,
                text=risk_in_words(risk, rank) + _what_grows(risk, rank),
                remedy=_of_growth() if risk.cause == "growth" else None,
            )


def _what_grows(risk: Risk, rank: RankSnapshot) -> str:
    """The role that grows, where the census sees one; "" without a trend."""
    if risk.cause != "growth" or not rank.roles:
        return ""
    most = max(rank.roles, key=lambda row: row.grown_bytes)
    grown = risk.growth_bytes_per_step or 0.0
    if most.grown_bytes > 4 * grown:
        return (
            f"; what grows is {most.role.replace('_', ' ')}, {human_bytes(most.grown_bytes)} so far"
        )
    return "; parameters, gradients and optimizer state do not grow: something else is kept"


def _of_growth() -> Remedy:
    return Remedy(
        cause="each step leaves something behind: most often a list of losses or outputs that hold "
        "their graph, or a cache without a bound",
        dialect="Python",
        diff="- losses.append(loss)\n+ losses.append(loss.item())  # or loss.detach()",
        effect="the growth ends",
        price="none",
    )


def risk_in_words(risk: Risk, rank: RankSnapshot) -> str:
    """``host memory runs out at about step 1,840 (in 231 steps, 12 min; 200 to 260): growth, ...``."""
    level = f"{human_bytes(risk.used_bytes)} of {human_bytes(risk.capacity_bytes)}"
    if risk.pool == "host":  # which the ranks share
        level += ", all ranks together"
    if risk.steps_left is None:
        return f"{risk.pool} memory: {level} in use ({_CAUSES.get(risk.cause, risk.cause)})"
    left = risk.steps_left
    details = [f"in {human_count(left)} steps"]
    if rank.step_seconds:
        details.append(human_seconds(left * rank.step_seconds))
    text = f"{risk.pool} memory runs out at about step {human_count(rank.step + left)}"
    if risk.steps_soonest is not None and risk.steps_latest is not None:
        soonest, latest = human_count(risk.steps_soonest), human_count(risk.steps_latest)
        details.append(f"between {soonest} and {latest} steps")
    grows = f"grows {human_bytes(risk.growth_bytes_per_step)} a step, now {level}"
    what = {"growth": "it", "fragmentation": "what is reserved and not used"}
    return f"{text} ({', '.join(details)}): {what.get(risk.cause, 'what others hold')} {grows}"


_CAUSES = {
    "static": "no margin is left",
    "spike": "its largest steps, by their tail, will pass the capacity",
    "fragmentation": "reserved and not used, and allocations had to be retried",
}


def exposed_communication(run: RunSnapshot) -> Iterable[Finding]:
    """The run waits for its communication. Said once, for the rank that waits most."""
    timed = [r for r in run.ranks if r.exposed_ratio is not None and r.steps >= _LEAST_STEPS]
    if not timed:
        return
    worst = max(timed, key=lambda r: r.exposed_ratio or 0.0)
    share = worst.exposed_ratio or 0.0
    if share < 0.10:
        return
    most = worst.traffic[0] if worst.traffic else None
    where = ""
    if most is not None and most.exposed_seconds > 0:
        what = f"{most.op}, {most.phase.replace('_', ' ')}"
        where = f"; most in {most.unit or 'calls without a unit'} ({what}), "
        where += human_seconds(most.exposed_seconds)
    late = sum(row.wait_seconds or 0.0 for row in worst.traffic)
    if late > 0.5 * (worst.exposed_seconds or 0.0):
        where += f"; {human_seconds(late)} of communication waits for ranks that come later"
    yield Finding(
        rule="exposed_communication",
        severity="warning" if share >= 0.25 else "info",
        rank=worst.rank,
        text=f"{human_ratio(share)} of a step ({human_seconds(worst.exposed_seconds)}) waits for "
        f"communication{where}",
    )


def poor_overlap(run: RunSnapshot) -> Iterable[Finding]:
    """Communication is hardly hidden, and it matters."""
    for rank in run.ranks:
        overlap, share = rank.overlap_ratio, rank.exposed_ratio or 0.0
        if overlap is not None and overlap < 0.3 and share >= 0.15 and rank.steps >= _LEAST_STEPS:
            yield Finding(
                rule="poor_overlap",
                severity="info",
                rank=rank.rank,
                text=f"{human_ratio(overlap) if overlap >= 0.0005 else 'nothing'} of the "
                "communication is hidden behind compute",
            )
            return


def straggler(run: RunSnapshot) -> Iterable[Finding]:
    """Others wait for one rank, step after step."""
    for late in run.stragglers:
        by = human_seconds(late.longer_seconds)
        why = f"; its {late.phase.replace('_', ' ')} is longer by {by}" if late.phase else ""
        why += f"; {late.cause}" if late.cause else ""
        yield Finding(
            rule="straggler",
            severity="warning" if late.share >= 0.05 else "info",
            rank=late.rank,
            text=f"{_late_at(late)} {human_seconds(late.late_seconds)} a step "
            f"({human_ratio(late.share)}) for it since step {human_count(late.since_step)}{why}",
        )


def _late_at(late: Straggler) -> str:
    """``node b: all its ranks come late; the others wait``."""
    if late.whole_node:
        return f"node {late.node}: all its ranks come after all others, which wait"
    return f"on node {late.node}; the others wait" if late.node else "the others wait"


def starved_prefetch(run: RunSnapshot) -> Iterable[Finding]:
    """ZeRO-3 asks for parameters only when it needs them, and waits. Said for the worst rank."""
    worst: tuple[float, float, RankSnapshot] | None = None
    for rank in run.ranks:
        moved = {g.outcome: g for g in rank.gathers}
        everything, late = sum(g.nbytes for g in rank.gathers), moved.get("late")
        timed = [s for s in rank.recent[-_LAST_STEPS:] if not s.idle and s.step > _WARM_UP]
        if late is None or len(timed) < _LEAST_STEPS:
            continue
        share = late.nbytes / (everything or 1)
        waits = sum(s.late_gather_ns for s in timed) / max(
            1, sum(s.end_ns - s.start_ns for s in timed)
        )
        if share >= 0.3 and waits >= 0.03 and (worst is None or waits > worst[0]):
            worst = (waits, share, rank)
    if worst is None:
        return
    waits, share, rank = worst
    name = "stage3_prefetch_bucket_size"
    value = next((s.effective for s in rank.settings if s.name.endswith(name)), "unknown")
    yield Finding(
        rule="starved_prefetch",
        severity="warning" if waits >= 0.10 else "info",
        rank=rank.rank,
        text=f"{human_ratio(share)} of the gathered parameter bytes are asked for only when they are "
        f"needed, which waits {human_ratio(waits)} of a step ({name} is {value})",
        remedy=Remedy(
            cause="no more than the prefetch bucket is asked for ahead",
            dialect="DeepSpeed JSON",
            diff=f'- "{name}": {value}\n+ "{name}": {_larger(value)}',
            gain_low_seconds=0.2 * waits * (rank.step_seconds or 0.0),
            gain_high_seconds=0.9 * waits * (rank.step_seconds or 0.0),
            price="so many more elements are gathered at once",
        ),
    )


def _larger(value: str) -> str:
    number = as_number(value)
    return "200000000" if number is None else f"{4 * number:.0f}"


def disk_space(run: RunSnapshot) -> Iterable[Finding]:
    """The disk that state is offloaded to is nearly full. Said once a path."""
    told: set[str] = set()
    for rank in run.ranks:
        disk = rank.disk
        if disk is None or disk.free_bytes is None or not disk.total_bytes or disk.path in told:
            continue
        if disk.free_bytes < 0.05 * disk.total_bytes and rank.alive:
            told.add(disk.path)
            yield Finding(
                rule="disk_space",
                severity="warning",
                rank=rank.rank,
                text=f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} are free "
                f"at {disk.path}, where state is offloaded to",
            )


def no_step(run: RunSnapshot) -> Iterable[Finding]:
    """Backward passes go by, and no optimizer step ends. Said once."""
    for rank in run.ranks:
        usual = max((step.micro_steps for step in rank.recent), default=0)
        if rank.backwards_since_step > max(_MANY_BACKWARDS, 4 * usual):
            yield Finding(
                rule="no_step",
                severity="info",
                rank=rank.rank,
                text=f"{rank.backwards_since_step} backward passes since the last optimizer step; "
                "without steps there is nothing to measure by",
            )
            return


def rank_died(run: RunSnapshot) -> Iterable[Finding]:
    """A rank ended otherwise than by finishing, and nobody stopped the run with Ctrl-C."""
    for rank in run.ranks:
        if rank.failed and rank.stopped != "Ctrl-C":
            why = host_evidence(rank) if rank.ended == KILLED_FOR_MEMORY else ""
            yield Finding(
                rule="rank_died",
                severity="critical",
                rank=rank.rank,
                text=f"{rank.ended} after step {rank.step}, {doing(rank)}{why and f'; {why}'}",
            )
    for away in run.away:
        if away.failed:
            yield Finding(
                rule="rank_died",
                severity="critical",
                rank=away.rank,
                text=f"{away.ended} on node {away.node}, {away.doing}",
            )


def host_evidence(rank: RankSnapshot) -> str:
    """What the kernel counted, and what the rank held, when it was killed for memory."""
    host = rank.host
    if host is None:
        return ""
    where = f"cgroup {host.cgroup}" if host.cgroup and host.oom_kills >= 0 else "machine"
    times = "one such kill" if host.kills_at_end == 1 else f"{host.kills_at_end} such kills"
    text = f"the {where} counted {times} then; this rank held {human_bytes(rank.rss_bytes)}"
    return f"{text} of a limit of {human_bytes(host.limit_bytes)}" if host.limit_bytes > 0 else text


def in_flight_too_long(run: RunSnapshot) -> Iterable[Finding]:
    """A collective does not end. Said once, for the member that is missing, else for one that waits."""
    for hang in run.hangs:
        blamed = (*hang.dead, *hang.missing, *hang.elsewhere, *hang.waiting)
        yield Finding(
            rule="collective_in_flight" if hang.seconds else "collective_mismatch",
            severity="critical",
            rank=blamed[0],
            text=hang_in_words(run, hang),
        )


def hang_in_words(run: RunSnapshot, hang: Hang) -> str:
    """One line: what hangs, who waits, who is missing and what it does, and on which node."""
    where = {away.rank: away.doing for away in run.away}
    where |= {rank.rank: doing(rank) for rank in run.ranks}
    return in_words(hang, where, run.node_of)


def node_silent(run: RunSnapshot) -> Iterable[Finding]:
    """The collector of another node is heard no more, while the run goes on here."""
    for node in run.nodes:
        if node.silent:
            last = node.first_rank + node.ranks - 1
            ranks = f"ranks {node.first_rank} to {last}" if node.ranks > 1 else f"rank {last}"
            yield Finding(
                rule="node_silent",
                severity="critical",
                text=f"node {node.node} ({ranks}) has not been heard for "
                f"{human_seconds(node.heard_seconds)}: it is down, or the network to it is cut",
            )
    yield from _distant_nodes(run)
    if run.nodes_note and not run.ended:
        yield Finding(rule="nodes_apart", severity="info", text=run.nodes_note)


def _distant_nodes(run: RunSnapshot) -> Iterable[Finding]:
    """The way to a node takes much longer than that to the others, or that to all does: the head's."""
    trips = {n: n.round_trip_seconds for n in run.nodes if n.round_trip_seconds is not None}
    exposed = max((rank.exposed_ratio or 0.0 for rank in run.ranks), default=0.0)
    far = {node: trip for node, trip in trips.items() if trip >= _FAR_SECONDS}
    near = [trip for node, trip in trips.items() if node not in far]
    if not far or exposed < 0.10 or run.ended:
        return
    if not near and len(far) > 1:  # the one end that all ways have in common
        far = {run.nodes[0]: statistics.median(far.values())}
    for node, trip in far.items():
        usual = f", to the others {human_seconds(statistics.median(near))}" if near else ""
        if not near or trip >= _FAR_TIMES * statistics.median(near):
            yield Finding(
                rule="distant_node",
                severity="warning",
                rank=node.first_rank,
                text=f"a packet to node {node.node} and back takes {human_seconds(trip)}{usual}; "
                f"{human_ratio(exposed)} of a step waits for communication",
            )


_FAR_SECONDS = 0.005
_FAR_TIMES = 5


def record_incomplete(run: RunSnapshot) -> Iterable[Finding]:
    """What zeromon itself could not see, or not keep."""
    if run.history_note:
        yield Finding(
            rule="history_stopped",
            severity="warning",
            text=f"the run's history on disk has stopped: {run.history_note}",
        )
    for rank in run.ranks:
        if rank.dropped:
            yield Finding(
                rule="events_dropped",
                severity="warning",
                rank=rank.rank,
                text=f"{rank.dropped} records were overwritten before they were read",
            )
        if rank.errors:
            yield Finding(
                rule="agent_errors",
                severity="warning",
                rank=rank.rank,
                text=f"{rank.errors} hook calls failed; training is not affected",
            )
        if rank.unseen and rank is run.ranks[0]:
            yield Finding(
                rule="unknown_version",
                severity="info",
                text=f"this version of DeepSpeed has no {', '.join(rank.unseen)}: what is read there "
                "is unknown",
            )
        unknown, all_calls = sum(rank.unattributed.values()), sum(c.count for c in rank.collectives)
        if unknown > 0.05 * (all_calls + unknown):
            yield Finding(
                rule="untimed_collectives",
                severity="info",
                rank=rank.rank,
                text=f"{unknown} of {all_calls + unknown} collectives were issued from C++ and are "
                "counted, not timed",
            )


CODES = {
    "rank_died": "ZM001",
    "collective_in_flight": "ZM002",
    "collective_mismatch": "ZM003",
    "no_step": "ZM004",
    "events_dropped": "ZM005",
    "agent_errors": "ZM006",
    "unknown_version": "ZM007",
    "untimed_collectives": "ZM008",
    "history_stopped": "ZM009",
    "oom_risk": "ZM201",
    "disk_space": "ZM211",
    "exposed_communication": "ZM301",
    "straggler": "ZM309",
    "node_silent": "ZM010",
    "nodes_apart": "ZM011",
    "distant_node": "ZM316",
    "starved_prefetch": "ZM313",
    "poor_overlap": "ZM314",
}
"""The pages of the rules in here."""

RULES: tuple[Rule, ...] = (
    rank_died,
    oom_risk,
    in_flight_too_long,
    straggler,
    node_silent,
    exposed_communication,
    starved_prefetch,
    disk_space,
    poor_overlap,
    no_step,
    record_incomplete,
    *precision.RULES,
    *offload.RULES,
    *remedies.RULES,
)


OF_TIME = frozenset((
    "accumulation_communicates", "cpu_optimizer_slow", "data_wait", "ddp_bucket_large",
    "exposed_communication", "fsdp_prefetch_off", "full_shard_across_nodes", "offload_waits",
    "overlap_comm_off", "reshard_without_need", "slow_link", "stage_too_high", "starved_prefetch",
    "straggler", "tiny_collectives", "zero_plus_plus",
))  # fmt: skip
"""Rules by what is waited for. Where ranks have no CPU to run on, that is what they all see."""


def advise(run: RunSnapshot) -> tuple[Finding, ...]:
    """All findings, the gravest first."""
    found = [
        finding if finding.code else replace(finding, code=CODES.get(finding.rule, ""))
        for rule in RULES
        for finding in rule(run)
    ]
    if any(r.pressure and r.pressure.most_cpu_wait_ratio >= STARVED for r in run.ranks):
        found = [_doubted(f) if f.rule in OF_TIME else f for f in found]
    return tuple(sorted(found, key=_by_gravity))


def _doubted(finding: Finding) -> Finding:
    """The same as no more than information."""
    text = f"{finding.text}; ranks lack CPUs, which may be why (ZM605)"
    return replace(finding, severity="info", text=text)


def _by_gravity(finding: Finding) -> tuple[int, bool, int]:
    """What has a way out comes first among equals."""
    return _SEVERITIES.index(finding.severity), finding.remedy is None, finding.rank


def doing(rank: RankSnapshot) -> str:
    """What a rank was last seen doing: ``in backward, unit layers.3, all_gather #451 in flight``."""
    if not rank.phase:
        return "running"  # read from Prometheus, which does not know more
    parts = [f"in {rank.phase}" if rank.phase != "other" else "between phases"]
    if rank.unit:
        parts.append(f"unit {rank.unit}")
    if rank.in_flight:
        oldest = rank.in_flight[0]
        parts.append(f"{oldest.op} #{abs(oldest.sequence)} of group {oldest.group} in flight")
    elif rank.stack:
        parts.append(f"at {script_frame(rank.stack)}")
    return ", ".join(parts)


def script_frame(stack: Sequence[str]) -> str:
    """The innermost frame of the user's own: neither installed nor of Python itself."""
    own = [f for f in stack if not any(part in f for part in _NOT_THE_SCRIPT)]
    return (own or list(stack))[-1]


_NOT_THE_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>")
LINGER_NS = 10_000_000_000
"""For how long a finding stays that holds no more: one at the edge of its rule would flap."""


class Settled:
    """What is shown of what holds: it comes at once, and goes when it has not held for a while."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, Finding]] = {}

    def shown(self, found: Iterable[Finding], now_ns: int) -> tuple[Finding, ...]:
        """*found*, and what held less than :data:`LINGER_NS` ago, the gravest first.

        A rule that holds now for another rank is not shown for the one it held for before.
        """
        now = {(finding.rule, finding.rank): (now_ns, finding) for finding in found}
        holding = {rule for rule, _ in now}
        before = {
            (rule, rank): item
            for (rule, rank), item in self._seen.items()
            if rule not in holding and now_ns - item[0] < LINGER_NS
        }
        self._seen = before | now
        return tuple(sorted((f for _, f in self._seen.values()), key=_by_gravity))
