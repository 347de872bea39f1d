"""The report of a run: a text that fits a terminal. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from zeromon.base.units import (
    counted,
    human_bytes,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
    printable,
    signed,
)
from zeromon.readout import figures, ledger
from zeromon.readout.answers import (
    findings_to_act_on,
    goodput_facts,
    life_of_run,
    life_text,
    memory_answer,
    no_change_text,
    pace_facts,
    step_bars,
    window_text,
)
from zeromon.readout.breakdown import (
    PART_NAMES,
    PARTS,
    USUAL,
    WINDOW,
    exposed_is_known,
    pace,
    pace_text,
    rank_parts,
    workers_text,
)
from zeromon.readout.communication_report import (
    by_operation,
    by_unit,
    check_text,
    dim_block,
    nccl_block,
    stage_block,
)
from zeromon.readout.death_report import attempt_block, deaths
from zeromon.readout.remedy import remedy_text
from zeromon.readout.tables import (
    RANK_COLUMNS,
    Column,
    RoleLine,
    aligned_table,
    pick_columns,
    role_lines,
    text_table,
)
from zeromon.readout.text import (
    clock,
    commit_text,
    exposed_unknown,
    finding_text,
    joined_text,
    leading_clauses,
    memory_unknown,
    resolved_texts,
    run_state,
)
from zeromon.readout.throughput import progress_text, throughput_text
from zeromon.readout.verdict import SIGNS, Verdict, judge_run
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import first_counted
from zeromon.snapshot.host import Disk
from zeromon.snapshot.rank import Setting
from zeromon.snapshot.run import About
from zeromon.snapshot.step import StepRange


def memory_block(ranks: Sequence[RankSnapshot]) -> str:
    """The memory of each rank at its last sample, and its out-of-memory risk."""
    rows = text_table(
        ranks,
        Column("rank", lambda rank: str(rank.rank)),
        Column("RSS", lambda rank: rank.memory.rss_bytes, figures.BYTES),
        Column("workers", lambda rank: workers_text(rank.memory.workers)),
        _allocator_column("allocated"),
        _allocator_column("reserved"),
        Column("peak", _allocated_peak_text),
        _allocator_column("headroom"),
        Column("risk", figures.RISK.text),
    )
    notes = dict.fromkeys(f"  {reason}" for rank in ranks if (reason := memory_unknown(rank)))
    return "\n".join([f"Memory at the last sample\n{rows}", *notes])


def _allocator_column(name: str) -> Column[RankSnapshot]:
    field = f"{name}_bytes"
    return Column(name, lambda r: getattr(r.memory.device, field, None), figures.BYTES, unknown="-")


def _allocated_peak_text(rank: RankSnapshot) -> str:
    """``20.2 GiB, backward of step 1``; "-" where unknown."""
    device = rank.memory.device
    if device is None or device.peak_bytes < 0:
        return "-"
    return f"{human_bytes(device.peak_bytes)}, {device.peak_phase} of step {device.peak_step}"


def by_role(run: RunSnapshot) -> str:
    """Memory by role on the first rank that told it, measured against predicted; "" without any."""
    rank = first_counted(run.ranks)
    if rank is None:
        return ""
    rows = text_table(
        role_lines(rank),
        Column("role", lambda role: role.name),
        *map(_tier_bytes_column, ("device", "host", "disk")),
        Column("plain ZeRO", lambda role: role.plain or None, figures.BYTES, unknown="-"),
        Column("predicted", lambda r: "-" if r.plain is None else human_bytes(r.predicted)),
        Column("unexplained", lambda role: "-" if role.plain is None else _unexplained_text(role)),
    )
    sampled = "at the optimizer step; gathered parameters at their peak"
    return f"Memory of rank {rank.rank} by role ({sampled})\n{rows}"


def causes_beyond_formula(rank: RankSnapshot) -> list[tuple[int, str]]:
    """Bytes beyond the formula of ZeRO, with their role and cause; the largest first."""
    causes = ((c.nbytes, row.role, c.text) for row in rank.memory.expected for c in row.causes)
    return [(n, f"{role.replace('_', ' ')}: {text}") for n, role, text in sorted(causes, reverse=True)]


def _tier_bytes_column(tier: str) -> Column[RoleLine]:
    return Column(tier, lambda role: role.tiers.get(tier) or None, figures.BYTES, unknown="-")


def _unexplained_text(role: RoleLine) -> str:
    if role.measured is None or role.predicted is None:
        return "n/a"
    excess = role.measured - role.predicted
    return signed(human_bytes, excess) if excess else "0"


def offload_block(run: RunSnapshot) -> str:
    """Offloaded state on the move, beside what its way could do; "" without any."""
    rank = next((r for r in run.ranks if r.memory.transfers), None)
    if rank is None:
        return ""
    peaks = {move.path: rank.path_peak(move.path) for move in rank.memory.transfers}
    rows = text_table(
        rank.memory.transfers,
        Column("path", lambda move: move.path.replace("_", " ")),
        Column("bytes", lambda move: move.nbytes, figures.BYTES),
        Column("per step", lambda move: move.step_bytes, figures.BYTES),
        Column("speed", lambda move: move.bytes_per_second, figures.RATE),
        Column("best", lambda move: move.best_bytes_per_second or None, figures.RATE),
        Column("limit", lambda move: peaks[move.path][0], figures.RATE),
        Column("waited", lambda move: human_seconds(move.blocked_seconds) if move.seconds else "n/a"),
    )
    limits = dict.fromkeys(
        f"{human_rate(rate)} is what {source}" for rate, source in peaks.values() if rate
    )
    blocks = [rows, *(f"  {sentence}" for sentence in limits), *_offload_disk_lines(rank.machine.disk)]
    return f"Offload of rank {rank.rank}\n" + "\n".join(blocks)


def _offload_disk_lines(disk: Disk | None) -> list[str]:
    if disk is None or disk.free_bytes is None:
        return []
    device = f" ({disk.device})" if disk.device else ""
    free = f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} free"
    sentences = [f"  {disk.path}{device}: {free}"]
    if disk.busy_ratio is not None:
        sentences.append(f"  busy {human_ratio(disk.busy_ratio)} of the last ten seconds")
    if disk.busy_bytes_per_second is not None:
        sentences.append(
            f"  while busy it moves {human_rate(disk.busy_bytes_per_second)}, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once; at best it moved "
            f"{human_rate(disk.best_busy_bytes_per_second)}"
        )
    return sentences


# ---- the report of a run -------------------------------------------------------------------------

_MAX_RANKS = 32
_MARKS = {Severity.CRITICAL: "!!", Severity.WARNING: " !", Severity.INFO: "  "}


def render_answers(
    run: RunSnapshot,
    annotation: About | None = None,
    past: Sequence[Finding] = (),
    action_of: Callable[[Finding], str] = lambda finding: finding.action,
) -> str:
    """The four answers in about 25 lines; *action_of*: what to do about a finding without a remedy.

    *past*: all findings of the record, for the verdicts on the run over time.
    """
    judged, life = judge_run(run), life_of_run(run, past)
    cause = leading_clauses(judged.cause, _MAX_HEADLINE)
    rows_shown = [_state_line(run, judged), f"  {SIGNS[judged.severity]} {judged.health}: {cause}"]
    if len(life) > 1:
        rows_shown.append(f"  {life_text(life)}")
    rows_shown += [row for row in _fact_lines(run, annotation or About()) if row.startswith(_FACTS)]
    window = f"per step, {window_text(run)}"
    facts = [f"{value} {note.replace('per step', window, 1)}" for value, note in pace_facts(run)]
    # A scrape has the count of steps, and a time is a difference of two
    is_unscraped = run.origin and run.last_step
    reason = "no step between two of the last scrapes" if is_unscraped else "no step has ended"
    rows_shown += ["", f"What does a step wait for? {'; '.join(facts) or f'n/a: {reason}'}"]
    rows_shown += [f"  {value} {note}" for value, note in goodput_facts(run)]
    for bar in step_bars(run):
        placement = f", {bar.placement}" if bar.placement else ""
        rows_shown.append(f"  rank {bar.rank.rank}{placement}: {bar.text}")
    rows_shown += ["", "What do I change?"]
    chosen = findings_to_act_on(run)
    for finding in chosen:
        rows = finding_lines(finding)
        is_in_verdict = finding is judged.finding
        if finding.remedy is None and is_in_verdict and (action := action_of(finding)):
            short_advice = leading_clauses(action, _MAX_ADVICE, ". ")
            reference = f". See zeromon rule {finding.code}." * (short_advice != action)
            rows = [f"  {finding.code} {short_advice}{reference}"]
        elif is_in_verdict and rows[1:]:
            cause = rows[1].strip().removeprefix("because ")
            rows = [f"  {finding.code} {cause[:1].upper()}{cause[1:]}", *rows[2:]]
        rows_shown += rows
    if not chosen:
        rows_shown.append(f"  {no_change_text(run)}")
    elif omitted := len(run.findings) - len(chosen):
        rows_shown.append(f"  and {counted(omitted, 'more finding')}")
    server = f" --prometheus {run.origin}" if run.origin else ""
    rows_shown += ["", f"Will it run out of memory? {memory_answer(run)}", ""]
    return "\n".join([*rows_shown, f"All figures: zeromon report {run.run} --full{server}\n"])


_FACTS = ("  command", "  tags", "  note", "  ranks", "  devices", "  watched", "  duration")


_MAX_HEADLINE, _MAX_ADVICE = 150, 240
"""Characters: two and three lines of a narrow terminal."""


def render_run(
    run: RunSnapshot,
    ranges: Sequence[StepRange] = (),
    annotation: About | None = None,
    past: Iterable[Finding] = (),
) -> str:
    """The whole report of *run*.

    *ranges*: the parts of a long run. *annotation*: what its user wrote about it. *past*: all findings
    of its record, of which those are shown that were over before its end.
    """
    blocks = [
        head_block(run, annotation or About()),
        attempt_block(run),
        ledger_block([run], is_short=True),
    ]
    if run.ranks:
        blocks += [
            spread_block(run), _rank_block(run), _over_time(ranges), phase_block(run),
            stage_block(run), by_operation(run), dim_block(run), by_unit(run, 8), nccl_block(run),
            memory_block(_shown_ranks(run)), by_role(run), offload_block(run),
            engine_block(run), deaths(run), settings_block(run, written_only=True),
        ]  # fmt: skip
    blocks.append(_findings_of([f for f in run.findings if f.rule != "rank_died"]))  # see deaths()
    blocks.append(_earlier_findings_block(run, past))
    return "\n\n".join(block for block in blocks if block) + "\n"


def head_block(run: RunSnapshot, annotation: About) -> str:
    """The head of the report: the run's state, verdict, command, ranks and duration."""
    judged = judge_run(run)
    rows = [_state_line(run, judged), f"  verdict   {judged.health}: {judged.cause}"]
    return "\n".join([*rows, *_fact_lines(run, annotation)])


def _state_line(run: RunSnapshot, judged: Verdict) -> str:
    """The run's state, without what the verdict repeats."""
    state = run_state(run)
    return f"run {run.run}: {leading_clauses(state, 0) if judged.cause in state else state}"


def _fact_lines(run: RunSnapshot, annotation: About) -> list[str]:
    first_rank = run.ranks[0] if run.ranks else None
    rows: list[str] = []
    if annotation.tags:
        rows.append(f"  tags      {printable(', '.join(annotation.tags))}")
    if annotation.note:
        rows.append(f"  note      {printable(annotation.note)}")
    if run.note and run.note not in run_state(run):
        rows.append(f"  note      {printable(run.note)}")
    if run.command:
        rows.append(f"  command   {' '.join(run.command)}")
    if run.revision:
        rows.append(f"  code      git commit {commit_text(run.revision)}")
    if first_rank is not None:
        count = len(run.ranks) if run.fleet is None else run.fleet.ranks
        ranks = f"{count} of {first_rank.world_size} ranks on {run.node}"
        rows.append(f"  ranks     {ranks}, {first_rank.strategy}, {first_rank.device}")
        if first_rank.on_virtual_device:
            is_modelled = any(not step.idle for step in first_rank.steps.recent)
            rows.append(f"  devices   modelled, {_MODELLED if is_modelled else _HOST_TIMES}")
    started = [rank for rank in run.ranks if rank.ledger.startup_seconds is not None]
    if started:
        longest = max(started, key=lambda rank: rank.ledger.startup_seconds or 0.0)
        stages = ledger.startup_parts_text(longest) or "imports, set-up, first batch"
        setup = f"{human_seconds(longest.ledger.startup_seconds)} until the first step: {stages}"
        rows.append(f"  start-up  {setup}")
    if joined := joined_text(run):
        rows.append(f"  watched   {joined.removeprefix('watched ')}")
    is_virtual = first_rank is not None and first_rank.on_virtual_device
    if not is_virtual and (used := ledger.energy_text(run)):
        rows.append(f"  energy    {used}")
    lasted = human_seconds(max(0.0, run.taken_wall - run.started_wall))
    rows.append(f"  duration  {lasted}, started {clock(run.started_wall)}")
    return rows


_MODELLED = (
    "by zeromon preflight: times are those of the devices and of a host that always takes the same for "
    "an operator, without those of data loading and of the script's own code"
)
_HOST_TIMES = "but the times of steps are those of this machine"


def _shown_ranks(run: RunSnapshot) -> Sequence[RankSnapshot]:
    return run.ranks[:_MAX_RANKS]


def _rank_block(run: RunSnapshot) -> str:
    rows = text_table(
        _shown_ranks(run),
        *pick_columns(RANK_COLUMNS, "rank", "steps", "step", "exposed", "share", "overlap", "state"),
    )
    hidden = (len(run.ranks) if run.fleet is None else run.fleet.ranks) - len(_shown_ranks(run))
    tail = f"\n  ... and {hidden} more ranks" if hidden > 0 else ""
    tail += "".join(f"\n  {row}" for row in map(check_text, _shown_ranks(run)) if row)
    tail += why_unknown(_shown_ranks(run))
    tail += f"\n  {throughput_text(run)}"
    paces = [(paced.starved_ratio, rank) for rank in run.ranks if (paced := pace(rank)) is not None]
    if paces:
        _, slowest = max(paces, key=lambda pair: pair[0])
        tail += f"\n  rank {slowest.rank} is {pace_text(slowest)}"
    if progress := progress_text(run):
        tail += f"\n  {progress}"
    if (teller := figures.best_informed(run)) is not None:
        tail += f"\n  training, by rank {teller.rank}: {figures.training_text(teller)}"
    return f"Steps (mean of the last {WINDOW} timed steps, excluding the first step)\n{rows}{tail}"


def why_unknown(ranks: Sequence[RankSnapshot]) -> str:
    """Why exposed communication is n/a, once for the first rank where it is."""
    gap = next(((rank, reason) for rank in ranks if (reason := exposed_unknown(rank))), None)
    if gap is None:
        return ""
    return f"\n  exposed communication of rank {gap[0].rank} is n/a: {gap[1]}"


def spread_block(run: RunSnapshot) -> str:
    """How figures spread over all ranks, where a snapshot has only some of them; "" where it has all."""
    fleet = run.fleet
    if fleet is None:
        return ""
    rows = [(entry.label, *values) for entry, values in figures.spread_rows(fleet)]
    header = ("all ranks", *figures.SPREAD_HEADS)
    return f"How {human_count(fleet.ranks)} ranks spread\n{aligned_table(header, rows)}"


def _over_time(ranges: Sequence[StepRange]) -> str:
    """Step time, exposed share and memory over a long run; "" without *ranges*."""
    if not ranges:
        return ""
    rows = text_table(
        ranges,
        Column("steps", lambda p: f"{human_count(p.first_step)} to {human_count(p.last_step)}"),
        Column("step", lambda p: p.step_seconds, figures.SECONDS),
        Column("exposed", lambda p: p.exposed_ratio, figures.RATIO),
        Column("RSS", lambda p: p.rss_bytes, figures.BYTES),
        Column("reserved", lambda p: human_bytes(p.reserved_bytes) if p.reserved_bytes >= 0 else "-"),
    )
    return f"Over the whole run (mean step, excluding the first; most bytes on any rank)\n{rows}"


def phase_block(run: RunSnapshot) -> str:
    """Where the time of a step goes, over all ranks."""
    of_ranks = [rank_parts(rank) for rank in run.ranks]
    sums = {name: sum(split.get(name, 0.0) for split in of_ranks) for name in PARTS}
    total = sum(sums.values())
    timed = {"exposed"} if any(map(exposed_is_known, run.ranks)) else set()
    always = timed | set(USUAL) - {"exposed"}
    names = [name for name in PARTS if sums[name] or name in always]
    shares = [f"{PART_NAMES[name]} {human_ratio(sums[name] / total)}" for name in names if total]
    head = f"Where the time of a step goes (mean of the last {WINDOW} timed steps)"
    return f"{head}\n  {', '.join(shares) or 'no step yet'}"


_SHOWN_SECONDS = 1.0
"""A finding that only the end brought has no duration."""


def _findings_of(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    rows = [row for finding in findings for row in finding_lines(finding)]
    return "Findings (zeromon rule CODE explains them)\n" + "\n".join(rows)


def _earlier_findings_block(run: RunSnapshot, findings: Iterable[Finding]) -> str:
    """The findings that were over before the run was, without mere information; "" without any."""
    stood = {(finding.rule, finding.rank) for finding in run.findings}
    past = [f for f in findings if f.severity != Severity.INFO and (f.rule, f.rank) not in stood]
    rows = [f"  {rule} {sentence}" for rule, sentence in resolved_texts(past)]
    return "\n".join(("Earlier findings", *rows)) if rows else ""


def finding_lines(finding: Finding) -> list[str]:
    """A finding, and its remedy where it has one."""
    duration = finding.gone - finding.came if finding.gone is not None and finding.came else 0.0
    is_shown = duration >= _SHOWN_SECONDS and finding.severity != Severity.INFO
    period = f" (lasted {human_seconds(duration)}, until the run ended)" if is_shown else ""
    rows = [f"{_MARKS[finding.severity]} {finding.code} {finding_text(finding)}{period}"]
    if finding.remedy is not None:
        change = remedy_text(finding.remedy)
        remedy = [change.reason, *(f"  {row.text}" for row in change.diff), change.outlook]
        rows += [f"     {row}" for row in remedy]
    return rows


# ---- where every second of a job went, as text --------------------------------------------------

_BAR = 30


def ledger_block(
    runs: Sequence[RunSnapshot], per: Sequence[tuple[str, float]] = (), *, is_short: bool = False
) -> str:
    """Every second of the ranks of *runs*, which are one job; "" where nothing is known.

    *per*: further columns, with what a second is worth in each (kWh, money). *is_short*: see
    :func:`ledger.cause_seconds`.
    """
    job = ledger.job_ledger(runs)
    if not job.rows:
        return ""
    blocks = [
        f"Ledger: {ledger.goodput_headline(job)}",
        _ledger_table(job, per, ledger.cause_seconds(job, is_short=is_short)),
    ]
    blocks += [f"  {note}" for note in job.notes]
    saves = ledger.checkpoint_text(runs[-1])
    return "\n".join([*blocks, f"  {saves}"] if saves else blocks)


def _ledger_table(
    job: ledger.JobLedger, per: Sequence[tuple[str, float]], causes: Mapping[str, float]
) -> str:
    def cells_of_row(name: str, seconds: float) -> tuple[str, ...]:
        amounts = (seconds * factor for _, factor in per)
        worth = (human_count(a) if a >= 1000 else f"{a:.4g}" for a in amounts)
        return name, human_seconds(seconds), human_ratio(seconds / job.rank_seconds), *worth

    rows = list(map(cells_of_row, causes, causes.values()))
    header = ("cause", "of all ranks", "share", *(name for name, _ in per))
    body = aligned_table(header, [*rows, cells_of_row("sum", job.rank_seconds)]).splitlines()
    bars = ["", *("#" * round(_BAR * seconds / job.rank_seconds) for seconds in causes.values()), ""]
    return "\n".join(f"{row}  {bar}".rstrip() for row, bar in zip(body, bars, strict=True))


def activities(run: RunSnapshot) -> str:
    """The activities of the training loops beside training; "" where nothing was seen."""
    notes = ledger.activity_texts(run)
    return "Besides training steps\n" + "\n".join(f"  {note}" for note in notes) if notes else ""


# ---- deepSpeed's engines and settings, as text --------------------------------------------------


def engine_block(run: RunSnapshot) -> str:
    """The DeepSpeed engines of the first rank that has some; "" without any."""
    rank = next((r for r in run.ranks if r.config.engines), None)
    if rank is None:
        return ""
    rows = text_table(
        rank.config.engines,
        Column("engine", lambda e: f"{e.engine} {e.strategy}{' (dropped)' * e.dropped}"),
        Column("steps", lambda e: e.steps, figures.COUNT),
        Column("skipped", lambda e: e.skipped, figures.COUNT),
        Column("bytes", lambda e: e.nbytes, figures.BYTES),
        Column("exposed", lambda e: e.exposed_seconds, figures.SECONDS),
        Column("loss scale", lambda e: "-" if e.loss_scale is None else f"{e.loss_scale:g}"),
        Column("grad norm", lambda e: "-" if e.grad_norm is None else f"{e.grad_norm:.4g}"),
    )
    return f"DeepSpeed engines of rank {rank.rank}\n{rows}"


def settings_block(run: RunSnapshot, *, written_only: bool) -> str:
    """The configuration: what took effect, beside what was written where the two differ.

    A setting that all engines have in common is shown once.
    """
    rank = next((r for r in run.ranks if r.config.settings), None)
    if rank is None:
        return ""
    listed = [
        s for s in rank.config.settings if s.written or not written_only or s.name in _ALWAYS_SHOWN
    ]
    engines = len({setting.engine for setting in listed})
    counts = Counter((s.name, s.effective, s.written) for s in listed)
    rows = dict.fromkeys(
        (
            f"engine {s.engine}: " * (counts[s.name, s.effective, s.written] != engines) + s.name,
            s.effective,
            _setting_origin_note(s),
        )
        for s in listed
    )
    width = max((len(name) for name, _, _ in rows), default=0)
    body = "\n".join(f"  {name.ljust(width)}  {value}{note}" for name, value, note in rows)
    hint = "written, and what follows from it" if written_only else "as it took effect"
    return f"Configuration ({hint})\n{body}"


_ALWAYS_SHOWN = ("zero_optimization.overlap_comm", "train_batch_size")


def _setting_origin_note(setting: Setting) -> str:
    if not setting.written:
        return "  (default)"
    return "" if setting.written == setting.effective else f"  (written: {setting.written})"
