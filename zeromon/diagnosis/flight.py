"""Hangs, by the Flight Recorder's dumps of all ranks of a job. Pure.

Who waits for whom is :mod:`.hangs`, as in a live run. Dumps know more of each call: the first number at
which members have called something else, of another size or of other types, comes before what hangs.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import zip_longest

from zeromon.base.units import human_seconds
from zeromon.diagnosis.hangs import Member, hangs_of
from zeromon.readout.tables import fitted_table
from zeromon.readout.verdict import NOT_CALLED
from zeromon.ring.codes import operation_by_name
from zeromon.snapshot.communication import GroupProgress, HangKind, InFlight
from zeromon.traces.allocations import NO_STACK, stack_origin
from zeromon.traces.flight import Dump, Entry

OTHER_TYPES = "mismatched element types"
OTHER_SHAPES = "mismatched shapes of as many elements"
"""NCCL takes them, but ranks that run the same program have none: what goes wrong later began here."""
DIFFER = (HangKind.MISMATCHED_OPERATIONS, HangKind.MISMATCHED_SIZES, OTHER_TYPES, OTHER_SHAPES)
"""The kinds of findings that members have called something different."""
NO_DUMP = "a member has no dump"
ALL_SEEN = "all ranks that have a dump are in it"
"""The kind of a finding on a backend that does not say who the members are."""
_BOTH = (0, 1)
_SAME_SIDES = {
    "all_reduce": _BOTH, "all_gather": _BOTH, "reduce_scatter": _BOTH, "broadcast": _BOTH,
    "reduce": _BOTH, "gather": (0,), "scatter": (1,),
}  # fmt: skip
"""Operation -> its sides (inputs, outputs) that are equal on all members, as ``Op.match`` of torch's own
analyser has it (torch/distributed/flight_recorder/components/types.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """Where one member of the group is."""

    rank: int
    state: str
    """One of :data:`WAITING`, :data:`DONE`, :data:`MISSING`, :data:`UNSEEN`."""
    call: Entry | None
    """The call of the finding, or the last one before it; None where neither is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFinding:
    """A collective that does not end, or that members have called differently."""

    kind: str
    op: str
    group: str
    sequence: int
    since_ns: int
    """When the first member called it, wall clock."""
    seconds: float | None
    """From then to the newest dump; None for what has ended on all members."""
    ranks: tuple[RankCall, ...]


WAITING, DONE, MISSING, UNSEEN = "waiting", "done", NOT_CALLED, "no dump"

_Calls = dict[int, dict[int, list[Entry]]]
"""Rank -> sequence number -> its calls, of one group; of several, the last one coalesces the others."""


def flight_findings(dumps: Sequence[Dump]) -> tuple[FlightFinding, ...]:
    """Returns the calls that differ between the members, then the hangs, the oldest first."""
    now_ns = max((dump.written_ns for dump in dumps), default=0)
    calls: dict[str, _Calls] = {}
    for dump in dumps:
        for entry in dump.entries:
            # Each dump gets an entry, or a rank without calls would count as unseen instead of missing
            of_ranks = calls.setdefault(entry.group, {peer.rank: {} for peer in dumps})
            of_ranks[dump.rank].setdefault(entry.sequence, []).append(entry)
    names, ranks = _group_members(dumps, calls)
    certain = {group for dump in dumps for group, (_, members) in dump.groups.items() if members}
    hangs = hangs_of([_dump_member(dump, names, ranks, calls) for dump in dumps], now_ns)
    findings = []
    differ: dict[str, int] = {}
    hanging = {hang.group_id for hang in hangs}
    for group, of_group in calls.items():
        members_count = len(ranks[group]) if group in certain else 0
        differences = _first_differences(of_group, members_count)
        # Other shapes alone are legal: they are the cause only where something is wrong after them
        if [kind for *_, kind in differences] == [OTHER_SHAPES] and group not in hanging:
            continue
        for sequence, place_number, kind in differences:
            if kind != OTHER_SHAPES:
                differ[group] = sequence
            findings.append(
                _flight_finding(
                    kind, names[group], sequence, ranks[group], of_group, now_ns, place_number
                )
            )
    for hang in hangs:
        if hang.sequence < 0:
            members: tuple[int, ...] = hang.waiting
        elif differ.get(hang.group_id, hang.sequence + 1) <= hang.sequence:
            continue  # it follows from what the members have called
        else:
            members = ranks[hang.group_id]
        kind = NO_DUMP if hang.kind == HangKind.UNSEEN_MEMBERS else str(hang.kind)
        # gloo does not say who the members are, so one without a call may be left out
        if hang.kind == HangKind.ALL_INSIDE and hang.group_id not in certain:
            kind = ALL_SEEN
        findings.append(
            _flight_finding(kind, hang.group, hang.sequence, members, calls[hang.group_id], now_ns)
        )
    return tuple(sorted(findings, key=lambda f: (f.kind not in DIFFER, f.since_ns)))


def calls_under_way(dumps: Sequence[Dump]) -> list[str]:
    """Returns one line: the oldest call that has not ended and is too young to hang; [] without one."""
    now_ns = max((dump.written_ns for dump in dumps), default=0)
    young = [(e.created_ns, d.rank, e) for d in dumps for e in d.entries if not e.ended]
    if not young:
        return []
    since_ns, rank, entry = min(young, key=lambda item: item[0])
    seconds = human_seconds(max(0, now_ns - since_ns) / 1e9)
    return [f"rank {rank} is in {entry.op} #{abs(entry.sequence)} for {seconds}: too short for a hang"]


def _group_members(
    dumps: Iterable[Dump], calls: dict[str, _Calls]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Group -> what to call it, and -> its members; of gloo, those that have called it, or all."""
    names: dict[str, str] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        for group, (description, members) in dump.groups.items():
            # torch describes the first group as default_pg, and one without a description as undefined
            names[group] = {"default_pg": "world", "undefined": group}.get(description, description)
            # A dump of gloo has no members: it must not remove those that another dump has
            ranks[group] = members or ranks.get(group, ())
    for group, of_group in calls.items():
        names[group] = names[group] or group
        is_whole = names[group] == "world"
        ranks[group] = ranks[group] or tuple(r for r, log in of_group.items() if log or is_whole)
    return names, ranks


def _dump_member(
    dump: Dump, names: dict[str, str], ranks: dict[str, tuple[int, ...]], calls: dict[str, _Calls]
) -> Member:
    groups = []
    for group, of_group in calls.items():
        of_rank = of_group.get(dump.rank, {})
        last_call = of_rank[max(of_rank)][-1] if of_rank else None
        if dump.rank in ranks[group]:
            groups.append(
                GroupProgress(
                    group_id=group,
                    label=names[group],
                    ranks=ranks[group],
                    sequence=-1 if last_call is None else last_call.sequence,
                    op="none" if last_call is None else _operation_label(last_call),
                    nbytes=0 if last_call is None else last_call.nbytes,
                )
            )
    flying = [
        InFlight(
            op=_operation_label(entry), group=names[entry.group], sequence=entry.sequence, unit="",
            phase="", nbytes=entry.nbytes, issued_ns=entry.created_ns, group_id=entry.group,
        )
        for entry in dump.entries
        if not entry.ended
    ]  # fmt: skip
    return Member(rank=dump.rank, in_flight=tuple(flying), groups=tuple(groups))


def _operation_label(entry: Entry) -> str:
    operation = operation_by_name(entry.op)
    return operation.label if operation else entry.op


def _first_differences(calls: _Calls, members_count: int) -> list[tuple[int, int, str]]:
    """The first call in dumps that differs: number, place among those of the number, kind of difference.

    Where that is :data:`OTHER_SHAPES`, the first call with another kind follows.
    """
    differences: list[tuple[int, int, str]] = []
    for number in sorted({n for of_rank in calls.values() for n in of_rank if n >= 0}):
        for place_number, entries in enumerate(_calls_by_place(calls, number)):
            kind = _difference_kind(entries, len(entries) == members_count)
            if kind is not None and kind not in [earlier_kind for *_, earlier_kind in differences]:
                differences.append((number, place_number, kind))
            if kind not in (None, OTHER_SHAPES):
                return differences
    return differences


def _calls_by_place(calls: _Calls, number: int) -> Iterator[list[Entry]]:
    """Yields the calls under *number* that ranks compare with each other."""
    of_ranks = [of_rank for of_rank in calls.values() if number in of_rank]
    longest = max(len(of_rank[number]) for of_rank in of_ranks)
    # The recorder keeps the last calls: the oldest number of a rank may have lost its first parts
    comparable = [
        of_rank[number]
        for of_rank in of_ranks
        if len(of_rank[number]) == longest or number > min(n for n in of_rank if n >= 0)
    ]
    for entries in zip_longest(*comparable):
        yield [entry for entry in entries if entry is not None]


def _difference_kind(entries: Sequence[Entry], is_complete: bool) -> str | None:
    """Returns how calls differ, or None; *is_complete*: they are those of all members."""
    # Calls are mostly equal: without this, the sizes of every call would be summed up
    if len({(entry.op, entry.sizes, entry.types) for entry in entries}) == 1:
        return None
    operations = {_operation_label(entry) for entry in entries}
    if len(operations) > 1:
        return HangKind.MISMATCHED_OPERATIONS
    if operations == {"all_to_all"} and is_complete:
        sent, received = (sum(entry.elements[side] for entry in entries) for side in _BOTH)
        return HangKind.MISMATCHED_SIZES if sent != received else None
    sides = _SAME_SIDES.get(operations.pop(), ())
    if any(len({entry.elements[side] for entry in entries}) > 1 for side in sides):
        return HangKind.MISMATCHED_SIZES
    if any(len({entry.types[side] for entry in entries}) > 1 for side in sides):
        return OTHER_TYPES
    if any(len({entry.sizes[side] for entry in entries}) > 1 for side in sides):
        return OTHER_SHAPES
    return None


def _flight_finding(
    kind: str,
    group: str,
    sequence: int,
    members: Iterable[int],
    calls: _Calls,
    now_ns: int,
    place_number: int = -1,
) -> FlightFinding:
    rows, inside = [], []
    for rank in members:
        of_rank = calls.get(rank, {})
        if (of_number := of_rank.get(sequence)) is not None:
            call = of_number[place_number] if place_number < len(of_number) else of_number[-1]
            inside.append((call, of_number[-1]))
            state = DONE if call.ended else WAITING
            rows.append(RankCall(rank=rank, state=state, call=call))
        else:
            state = MISSING if rank in calls else UNSEEN
            earlier = of_rank.get(max((n for n in of_rank if 0 <= n < sequence), default=sequence))
            rows.append(RankCall(rank=rank, state=state, call=earlier[-1] if earlier else None))
    since_ns = min(entry.created_ns for entry, _ in inside)
    (entry, enclosing), *_ = inside
    return FlightFinding(
        kind=str(kind),
        op=entry.op if entry is enclosing else f"{entry.op} in {enclosing.op}",
        group=group,
        sequence=sequence,
        since_ns=since_ns,
        seconds=None if all(e.ended for e, _ in inside) else (now_ns - since_ns) / 1e9,
        ranks=tuple(rows),
    )


# ---- the findings as text -------------------------------------------------------------------------

_MAX_CALLS = 12
_MAX_SIZES = 3
_LONGEST_RANKS = 10


def flight_text(hangs: Sequence[FlightFinding], ranks: Sequence[int], notes: Sequence[str]) -> str:
    """A block for each finding; members in the same place share a row."""
    blocks = [_flight_finding_block(finding) for finding in hangs]
    if not hangs:
        blocks = [f"Nothing hangs in the dumps of rank{'s' * (len(ranks) > 1)} {_spans_of(ranks)}"]
    if notes:
        blocks.append("\n".join(["Notes", *(f"  {note}" for note in notes)]))
    return "\n\n".join(blocks) + "\n"


def _flight_finding_block(finding: FlightFinding) -> str:
    start = datetime.fromtimestamp(finding.since_ns / 1e9, timezone.utc)
    lasts = (
        "it has ended on all members that called it"
        if finding.seconds is None
        else f"{human_seconds(max(0.0, finding.seconds))} before the newest dump"
    )
    head = (
        f"!! {finding.op} #{abs(finding.sequence)} of {finding.group}: {finding.kind}\n"
        f"   since {start:%Y-%m-%d %H:%M:%S} UTC, {lasts}"
    )
    rows: dict[tuple[str, ...], list[int]] = {}
    # 1 where only the outputs of the calls differ
    calls = [row.call for row in finding.ranks if row.call and row.call.sequence == finding.sequence]
    inputs, outputs = (len({(c.sizes[side], c.types[side]) for c in calls}) for side in _BOTH)
    side = int(inputs == 1 < outputs)
    for call in finding.ranks:
        rows.setdefault(_member_call_cells(call, finding, side), []).append(call.rank)
    cells, below = [], []
    for row, members in list(rows.items())[:_MAX_CALLS]:
        label = spans = _spans_of(members)
        if len(spans) > _LONGEST_RANKS:
            label = f"{len(members):,} ranks"
            below.append(f"\n  {label}: {textwrap.shorten(spans, 300, placeholder=' ...')}")
        cells.append((label, *row))
    if len(rows) > _MAX_CALLS:
        hidden = sum(len(members) for members in list(rows.values())[_MAX_CALLS:])
        cells.append((f"and {hidden:,} more", "", "", ""))
    table = fitted_table(("ranks", "state", "call", "where"), cells, 2, 3)
    return f"{head}\n{table}{''.join(below)}"


def _member_call_cells(row: RankCall, finding: FlightFinding, side: int) -> tuple[str, ...]:
    state, call = row.state, row.call
    if call is None:
        return state, "-", NO_STACK
    call_text = f"{call.op} #{abs(call.sequence)}"
    if call.sequence == finding.sequence:
        state = f"{state} ({call.state})"
    else:
        call_text = f"last {call_text}"
    if finding.kind in DIFFER:
        sizes = call.sizes[side] or call.sizes[1]
        shapes = " ".join(str(list(size)).replace(" ", "") for size in sizes[:_MAX_SIZES])
        dots = " ..." if len(sizes) > _MAX_SIZES else ""
        types = call.types[side] or call.types[1]
        call_text += " to" * side
        call_text = f"{call_text} {shapes}{dots} {' '.join(sorted(set(types)))}".rstrip()
    return state, call_text, stack_origin(call.stack, own_only=True)


def _spans_of(ranks: Sequence[int]) -> str:
    """``0, 2-7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
