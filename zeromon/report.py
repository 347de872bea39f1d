"""A run as a text that fits a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeromon.advice import doing, host_evidence
from zeromon.expected import rests, role_bytes
from zeromon.offload import peak
from zeromon.snapshot import (
    KILLED_FOR_MEMORY,
    Disk,
    ExpectedRow,
    Finding,
    RankSnapshot,
    Remedy,
    RunSnapshot,
    Setting,
    StepSummary,
    Stretch,
)
from zeromon.traffic import SIZE_BOUNDS
from zeromon.units import human_bytes, human_count, human_rate, human_ratio, human_seconds

_MOST_RANKS = 32
_MARKS = {"critical": "!!", "warning": " !", "info": "  "}


def verdict(run: RunSnapshot) -> str:
    """One sentence: how the run is, or how it ended."""
    if not run.ranks:
        return run.note or "no rank has reported yet"
    failed = [rank for rank in run.ranks if rank.failed]
    steps = max(rank.steps for rank in run.ranks)
    if failed:
        first = first_of(failed)
        if first.stopped:
            return f"stopped by {first.stopped} after step {first.step}"
        count = len(failed) if run.fleet is None else run.fleet.failed
        others = f" (and {count - 1} more)" if count > 1 else ""
        return f"died: rank {first.rank}{others}, {first.ended}, after step {first.step}"
    if all(rank.silent for rank in run.ranks):
        return f"{run.ranks[0].ended}, then at step {human_count(steps)}"
    if run.ended:
        return f"finished after {human_count(steps)} steps"
    return f"running, step {human_count(steps)}"


def first_of(failed: Sequence[RankSnapshot]) -> RankSnapshot:
    """The rank that the others followed: a launcher ends them with SIGTERM when one dies."""
    return min(failed, key=lambda r: (bool(r.stopped), r.last_event_ns))


def render(run: RunSnapshot, stretches: Sequence[Stretch] = ()) -> str:
    """The whole report; *stretches*: of a long run, what it was like over time."""
    blocks = [_head(run)]
    if run.ranks:
        blocks += [block for block in (spreads(run),) if block]
        blocks.append(_ranks(run))
        if stretches:
            blocks.append(_over_time(stretches))
        blocks += [_phases(run), _communication(run)]
        blocks += [block for block in (units(run, 8), sizes(run)) if block]
        blocks.append(_memory(run))
        blocks += [block for block in (roles(run), offload(run), engines(run)) if block]
        deaths = _deaths(run)
        if deaths:
            blocks.append(deaths)
        chosen = settings(run, written_only=True)
        if chosen:
            blocks.append(chosen)
    rest = [finding for finding in run.findings if finding.rule != "rank_died"]  # said above
    if rest:
        blocks.append(_findings(rest))
    return "\n\n".join(blocks) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(f"  {line}" for line in lines)


def _head(run: RunSnapshot) -> str:
    first = run.ranks[0] if run.ranks else None
    lines = [f"run {run.run}: {verdict(run)}"]
    if run.command:
        lines.append(f"  command   {' '.join(run.command)}")
    if first is not None:
        count = len(run.ranks) if run.fleet is None else run.fleet.ranks
        ranks = f"{count} of {first.world_size} ranks on {run.node}"
        lines.append(f"  ranks     {ranks}, {first.strategy}, {first.device}")
    lines.append(f"  duration  {human_seconds(max(0.0, run.taken_wall - run.started_wall))}")
    return "\n".join(lines)


def _shown(run: RunSnapshot) -> Sequence[RankSnapshot]:
    return run.ranks[:_MOST_RANKS]


def _ranks(run: RunSnapshot) -> str:
    header = ("rank", "steps", "step", "exposed", "share", "overlap", "state")
    rows = [
        (
            str(rank.rank),
            human_count(rank.steps),
            human_seconds(rank.step_seconds),
            human_seconds(rank.exposed_seconds),
            human_ratio(rank.exposed_ratio),
            human_ratio(rank.overlap_ratio),
            rank.ended or rank.phase,
        )
        for rank in _shown(run)
    ]
    more = (len(run.ranks) if run.fleet is None else run.fleet.ranks) - len(_shown(run))
    tail = f"\n  ... and {more} more ranks" if more > 0 else ""
    tail += "".join(f"\n  {line}" for line in map(checked, _shown(run)) if line)
    return f"Steps (median of the last {20})\n{table(header, rows)}{tail}"


SPREADS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step_seconds", "step", human_seconds),
    ("exposed_ratio", "exposed share", human_ratio),
    ("overlap_ratio", "overlap", human_ratio),
    ("late_seconds", "late, a step", human_seconds),
    ("memory_bytes", "memory", human_bytes),
    ("headroom_bytes", "headroom", human_bytes),
    ("risk_ratio", "OOM risk", human_ratio),
)
"""Figures over all ranks of a large run: where :attr:`Fleet.spreads` has it, its name, in words."""


def spreads(run: RunSnapshot) -> str:
    """How figures spread over all ranks, where a picture has only some of them; "" where it has all."""
    fleet = run.fleet
    if fleet is None:
        return ""
    rows = [
        (title, *map(words, (s.least, s.p5, s.median, s.p95, s.most)))
        for name, title, words in SPREADS
        if (s := fleet.spreads.get(name)) is not None
    ]
    header = ("all ranks", "least", "5 %", "median", "95 %", "most")
    return f"How {human_count(fleet.ranks)} ranks spread\n{table(header, rows)}"


def _over_time(stretches: Sequence[Stretch]) -> str:
    """How step time, exposed share and memory went over a long run."""
    rows = [
        (
            f"{human_count(part.first_step)} to {human_count(part.last_step)}",
            human_seconds(part.step_seconds),
            human_ratio(part.exposed_ratio),
            human_bytes(part.rss_bytes),
            human_bytes(part.reserved_bytes) if part.reserved_bytes >= 0 else "-",
        )
        for part in stretches
    ]
    header = ("steps", "step", "exposed", "RSS", "reserved")
    return f"Over the whole run (median step; the most bytes on any rank)\n{table(header, rows)}"


def checked(rank: RankSnapshot) -> str:
    """How far the live figure is from the last trace; "" without one."""
    if rank.check is None or rank.check.error_ratio is None:
        return ""
    steps = ", ".join(map(str, rank.check.steps[:4])) + (", ..." if rank.check.steps[4:] else "")
    return (
        f"rank {rank.rank}: the live exposed time is {rank.check.error_ratio * 100:+.1f} % off the "
        f"trace of step {steps}"
    )


def _phases(run: RunSnapshot) -> str:
    total: dict[str, float] = {}
    for rank in run.ranks:
        for phase, seconds in rank.phase_seconds.items():
            total[phase] = total.get(phase, 0.0) + seconds
    spent = sum(total.values())
    order = ["forward", "backward", "optimizer", "cpu_optimizer", "data_wait", "other"]
    if not total.get("cpu_optimizer"):
        order.remove("cpu_optimizer")
    parts = [f"{name} {human_ratio(total.get(name, 0.0) / spent)}" for name in order if spent]
    return "Where the time of a step goes\n  " + (", ".join(parts) or "no step yet")


def _communication(run: RunSnapshot) -> str:
    rank = run.ranks[0]
    header = ("op", "group", "calls", "bytes", "time", "exposed", "busbw")
    rows = [
        (
            row.op,
            f"{row.group}({row.group_size})",
            human_count(row.count),
            human_bytes(row.nbytes),
            human_seconds(row.seconds) if row.seconds else "-",
            human_seconds(row.exposed_seconds) if row.seconds else "-",
            human_rate(row.busbw_bytes_per_second) if row.timed else "-",
        )
        for row in rank.collectives
    ]
    lines = [f"Communication of rank {rank.rank}", table(header, rows) if rows else "  none"]
    if rank.untimed:
        unknown = sum(rank.unattributed.values())
        of_them = f", {human_count(unknown)} of them of unknown operation" if unknown else ""
        lines.append(
            f"  {human_count(sum(rank.untimed.values()))} collectives were counted but not timed"
            f" one by one{of_them}"
        )
    return "\n".join(lines)


def most_exposed(run: RunSnapshot) -> RankSnapshot | None:
    """The rank that waits most for its communication, of those with timed collectives."""
    timed = [rank for rank in run.ranks if rank.traffic]
    return max(timed, key=lambda r: r.exposed_seconds or 0.0, default=None)


def units(run: RunSnapshot, most: int) -> str:
    """What communicates, by unit or bucket, on the rank that waits most; "" without any."""
    rank = most_exposed(run)
    if rank is None:
        return ""
    rows = [
        (
            row.unit or f"({row.group})",
            row.op,
            row.phase.replace("_", " "),
            _calls(row.calls),
            human_bytes(row.nbytes),
            human_seconds(row.seconds),
            human_seconds(row.wait_seconds) if row.wait_seconds is not None else "-",
            human_seconds(row.exposed_seconds),
            human_rate(row.busbw_bytes_per_second) if row.busbw_bytes_per_second else "-",
            human_rate(row.best_busbw_bytes_per_second) if row.best_busbw_bytes_per_second else "-",
        )
        for row in rank.traffic[:most]
    ]
    head = ("unit", "op", "phase", "calls", "bytes", "time", "waits", "exposed", "busbw", "best")
    lines = [f"What rank {rank.rank} waits for, a step (mean of the last ten)", table(head, rows)]
    rest = rank.traffic[most:]
    if rest:
        exposed = sum(row.exposed_seconds for row in rest)
        lines.append(f"  ... and {len(rest)} more, {human_seconds(exposed)} exposed")
    waits = [row for row in rank.traffic if row.wait_seconds is not None]
    if waits:
        waited, moved = (
            sum(row.wait_seconds or 0.0 for row in waits),
            sum(row.transfer_seconds or 0.0 for row in waits),
        )
        lines.append(
            f"  in all: {human_seconds(moved)} of transfer, {human_seconds(waited)} of waiting for "
            "ranks that come later"
        )
    peak = _link_peaks(rank)
    return "\n".join(lines + ([peak] if peak else []))


def _calls(calls: float) -> str:
    return f"{calls:.1f}".removesuffix(".0") if calls < 100 else human_count(calls)


def _link_peaks(rank: RankSnapshot) -> str:
    links = rank.links
    if links is None:
        return ""
    parts = []
    for rate, what, kind, far in (
        (links.device_bytes_per_second, "between devices", links.device_kind, False),
        (links.network_bytes_per_second, "between nodes", links.network_kind, True),
    ):
        best = max(
            (r.best_busbw_bytes_per_second for r in rank.traffic if (r.nodes > 1) is far), default=0
        )
        if rate and best:
            parts.append(
                f"{human_rate(rate)} {what} ({kind}), of which the best is {human_ratio(best / rate)}"
            )
    return f"  the links' peak: {'; '.join(parts)}" if parts else ""


def sizes(run: RunSnapshot) -> str:
    """How large the collectives of the rank that waits most are; "" without any."""
    rank = most_exposed(run)
    if rank is None or not rank.sizes:
        return ""
    bounds = [*(f"<= {human_bytes(bound).replace('.0', '')}" for bound in SIZE_BOUNDS), "larger"]
    shown = [i for i in range(len(bounds)) if any(row.calls[i] for row in rank.sizes)]
    rows = [
        (row.op, *(human_count(row.calls[i]) if row.calls[i] else "-" for i in shown))
        for row in rank.sizes
    ]
    header = ("op", *(bounds[i] for i in shown))
    return f"Collectives of rank {rank.rank} by size (timed steps)\n{table(header, rows)}"


def _memory(run: RunSnapshot) -> str:
    header = ("rank", "RSS", "allocated", "reserved", "headroom", "risk")
    rows = []
    for rank in _shown(run):
        memory = rank.memory
        risk = max((r.ratio for r in rank.risks), default=None)
        rows.append(
            (
                str(rank.rank),
                human_bytes(rank.rss_bytes),
                human_bytes(memory.allocated_bytes) if memory else "-",
                human_bytes(memory.reserved_bytes) if memory else "-",
                human_bytes(memory.headroom_bytes) if memory else "-",
                human_ratio(risk),
            )
        )
    return f"Memory at the last sample\n{table(header, rows)}"


def roles(run: RunSnapshot) -> str:
    """Memory by role on the first rank that told it, measured against predicted; "" without any."""
    rank = next((r for r in run.ranks if r.roles), None)
    if rank is None:
        return ""
    rows: list[tuple[str, ...]] = [
        (
            name.replace("_", " "),
            *(_places(rank, name)),
            *_compared(next((e for e in rank.expected if e.role == name), None)),
        )
        for name in dict.fromkeys([*(e.role for e in rank.expected), *(r.role for r in rank.roles)])
    ]
    rows = [row for row in rows if any(cell not in ("-", "0 B") for cell in row[1:])]
    for rest in rests(rank):
        cells = ["-", "-", "-"]
        cells[("device", "host").index(rest.place)] = human_bytes(rest.nbytes)
        rows.append((_REST_NAMES[rest.kind], *cells, "-", "-", "-"))
    header = ("role", "device", "host", "disk", "plain ZeRO", "predicted", "unexplained")
    when = "at the optimizer step; gathered parameters at their peak"
    blocks = [f"Memory of rank {rank.rank} by role ({when})\n{table(header, rows)}"]
    causes = sorted(
        ((cause.nbytes, row.role, cause.text) for row in rank.expected for cause in row.causes),
        reverse=True,
    )
    if causes:
        lines = [
            f"  +{human_bytes(nbytes):>9}  {role.replace('_', ' ')}: {text}"
            for nbytes, role, text in causes[:_MOST_CAUSES]
        ]
        blocks.append("On top of the plain arithmetic of ZeRO\n" + "\n".join(lines))
    return "\n\n".join(blocks)


_MOST_CAUSES = 8
_REST_NAMES = {
    "activation_temp": "activation + temp",
    "reserved_unallocated": "reserved, unallocated",
    "non_torch": "non-torch",
    "other": "everything else in RSS",
}


def _places(rank: RankSnapshot, role: str) -> tuple[str, str, str]:
    """What of *role* is on device, host and disk."""
    found = role_bytes(rank, role) or (0, 0, 0)
    device, host, disk = (human_bytes(n) if n else "-" for n in found)
    return device, host, disk


def _compared(row: ExpectedRow | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    unexplained = row.unexplained_bytes
    return (
        human_bytes(row.plain_bytes) if row.plain_bytes else "-",
        "n/a" if row.predicted_bytes is None else human_bytes(row.predicted_bytes),
        "n/a" if unexplained is None else _signed(unexplained),
    )


def _signed(nbytes: int) -> str:
    if not nbytes:
        return "0"
    return f"{'-' if nbytes < 0 else '+'}{human_bytes(abs(nbytes))}"


def offload(run: RunSnapshot) -> str:
    """Offloaded state on the move, beside what its way could do; "" without any."""
    rank = next((r for r in run.ranks if r.transfers), None)
    if rank is None:
        return ""
    peaks = {way.path: peak(rank, way.path) for way in rank.transfers}
    rows = [
        (
            way.path.replace("_", " "),
            human_bytes(way.nbytes),
            human_bytes(way.step_bytes),
            human_rate(way.bytes_per_second),
            human_rate(way.best_bytes_per_second or None),
            human_rate(peaks[way.path][0]),
            human_seconds(way.blocked_seconds) if way.seconds else "n/a",
        )
        for way in rank.transfers
    ]
    head = ("path", "bytes", "a step", "speed", "best", "at most", "waited")
    says = dict.fromkeys(
        f"{human_rate(rate)} is what {what}" for rate, what in peaks.values() if rate
    )
    lines = [table(head, rows), *(f"  {line}" for line in says), *_disk_lines(rank.disk)]
    return f"Offload of rank {rank.rank}\n" + "\n".join(lines)


def _disk_lines(disk: Disk | None) -> list[str]:
    """Its space, and what it did in the last seconds."""
    if disk is None or disk.free_bytes is None:
        return []
    on = f" ({disk.device})" if disk.device else ""
    free = f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} free"
    lines = [f"  {disk.path}{on}: {free}"]
    if disk.busy_ratio is not None:
        lines.append(f"  busy {human_ratio(disk.busy_ratio)} of the last ten seconds")
    if disk.busy_bytes_per_second is not None:
        lines.append(
            f"  while busy it moves {human_rate(disk.busy_bytes_per_second)}, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once; at best it moved "
            f"{human_rate(disk.best_busy_bytes_per_second)}"
        )
    return lines


def engines(run: RunSnapshot) -> str:
    """The DeepSpeed engines of the first rank that has some; "" without any."""
    rank = next((r for r in run.ranks if r.engines), None)
    if rank is None:
        return ""
    header = ("engine", "steps", "skipped", "bytes", "exposed", "loss scale", "grad norm")
    rows = [
        (
            f"{engine.engine} {engine.strategy}",
            human_count(engine.steps),
            human_count(engine.skipped),
            human_bytes(engine.nbytes),
            human_seconds(engine.exposed_seconds),
            "-" if engine.loss_scale is None else f"{engine.loss_scale:g}",
            "-" if engine.grad_norm is None else f"{engine.grad_norm:.4g}",
        )
        for engine in rank.engines
    ]
    return f"DeepSpeed engines of rank {rank.rank}\n{table(header, rows)}"


def settings(run: RunSnapshot, *, written_only: bool) -> str:
    """The configuration: what took effect, beside what was written where the two differ."""
    rank = next((r for r in run.ranks if r.settings), None)
    if rank is None:
        return ""
    many = len({s.engine for s in rank.settings}) > 1
    lines = []
    for setting in rank.settings:
        if written_only and not setting.written and setting.name not in _ALWAYS_SHOWN:
            continue
        name = f"engine {setting.engine}: {setting.name}" if many else setting.name
        lines.append((name, setting.effective, _origin(setting)))
    width = max((len(name) for name, _, _ in lines), default=0)
    text = "\n".join(f"  {name.ljust(width)}  {value}{note}" for name, value, note in lines)
    hint = "written, and what follows from it" if written_only else "as it took effect"
    return f"Configuration ({hint})\n{text}"


_ALWAYS_SHOWN = ("zero_optimization.overlap_comm", "train_batch_size")


def _origin(setting: Setting) -> str:
    if not setting.written:
        return "  (default)"
    return "" if setting.written == setting.effective else f"  (written: {setting.written})"


def _deaths(run: RunSnapshot) -> str:
    lines = []
    for rank in run.ranks:
        if not rank.failed:
            continue
        lines.append(
            f"  rank {rank.rank}: {rank.ended}; last seen in step {rank.step + 1}, {doing(rank)}"
        )
        if rank.exception:
            lines.append(f"    {rank.exception}")
        if rank.ended == KILLED_FOR_MEMORY:
            lines.append(f"    {host_evidence(rank)}")
        largest = sorted(_held(rank), reverse=True)[:3]
        if largest and (rank.ended == KILLED_FOR_MEMORY or rank.out_of_memory is not None):
            parts = ", ".join(f"{name} {human_bytes(nbytes)}" for nbytes, name in largest if nbytes)
            lines.append(f"    most of it: {parts}")
        if rank.out_of_memory is not None:
            lines += [f"    {line}" for line in _out_of_memory(rank)]
        lines += _before_death(rank)
    return "Deaths\n" + "\n".join(lines) if lines else ""


def _held(rank: RankSnapshot) -> list[tuple[int, str]]:
    """(bytes, what) of a rank, where its memory ran out: the device's roles, or the host's."""
    on_device = rank.out_of_memory is not None
    roles = [
        (row.device_bytes if on_device else row.host_bytes, row.role.replace("_", " "))
        for row in rank.roles
    ]
    place = "device" if on_device else "host"
    rest = [(r.nbytes, _REST_NAMES[r.kind]) for r in rests(rank) if r.place == place]
    return roles + rest


def _out_of_memory(rank: RankSnapshot) -> list[str]:
    """What the allocator said when it failed."""
    oom = rank.out_of_memory
    if oom is None:
        return []
    lines = [
        f"asked for {human_bytes(oom.requested_bytes)}; {human_bytes(oom.free_bytes)} of "
        f"{human_bytes(oom.total_bytes)} were free on the device"
    ]
    if oom.largest_block_bytes >= 0:
        lines[0] += f", the largest block in the cache was {human_bytes(oom.largest_block_bytes)}"
    memory = rank.memory
    if memory is not None and memory.reserved_bytes > 0:
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        lines.append(
            f"reserved and not allocated at the last sample: {human_bytes(slack)} "
            f"({human_ratio(slack / memory.reserved_bytes)} of what was reserved)"
        )
    return lines


_LOOK_BACK_SECONDS = (300, 60, 30, 10, 3, 0)


def _before_death(rank: RankSnapshot) -> list[str]:
    """What its memory was in the time before."""
    if not rank.recent:
        return []
    end = max(rank.last_event_ns, rank.recent[-1].end_ns)
    shown: dict[int, tuple[float, StepSummary]] = {}
    for seconds in _LOOK_BACK_SECONDS:
        before = [s for s in rank.recent if end - s.end_ns >= seconds * 1e9]
        if before:
            shown[before[-1].step] = ((end - before[-1].end_ns) / 1e9, before[-1])
    if len(shown) < 2:
        return []
    rows = [
        (
            f"-{ago:.1f} s",
            human_count(step.step),
            human_bytes(step.rss_bytes),
            human_bytes(step.allocated_bytes) if step.allocated_bytes >= 0 else "-",
            human_bytes(step.reserved_bytes) if step.reserved_bytes >= 0 else "-",
        )
        for ago, step in shown.values()
    ]
    lines = table(("before", "step", "RSS", "allocated", "reserved"), rows).splitlines()
    return [f"  {line}" for line in lines]


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for f in findings:
        who = f"rank {f.rank}: " if f.rank >= 0 else ""
        lines.append(f"{_MARKS[f.severity]} {f.code} {who}{f.text}")
        if f.remedy is not None:
            lines += [f"     {line}" for line in remedy_lines(f.remedy)]
    return "Findings (zeromon rule CODE explains them)\n" + "\n".join(lines)


def remedy_lines(remedy: Remedy) -> list[str]:
    """Cause, change, what it is expected to do, and its price."""
    lines = [f"because {remedy.cause}; {remedy.dialect}:"]
    lines += [f"  {line}" for line in remedy.diff.splitlines()]
    effects = []
    if remedy.gain_low_seconds is not None and remedy.gain_high_seconds is not None:
        low, high = human_seconds(remedy.gain_low_seconds), human_seconds(remedy.gain_high_seconds)
        effects.append(f"a step {low} to {high} shorter")
    if remedy.frees_bytes is not None:
        effects.append(f"{human_bytes(remedy.frees_bytes)} less a rank")
    if remedy.effect:
        effects.append(remedy.effect)
    lines.append(f"expected: {', '.join(effects)}; price: {remedy.price or 'none'}")
    return lines
