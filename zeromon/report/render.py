"""The report of a run: a text that fits a terminal. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from zeromon.readout.breakdown import (
    PART_NAMES,
    PARTS,
    USUAL,
    WINDOW,
    exposed_is_known,
    pace,
    pace_text,
    rank_parts,
)
from zeromon.readout.figures import (
    EXPOSED,
    EXPOSED_SECONDS,
    OVERLAP,
    SPREAD_HEADS,
    STEP,
    STEPS,
    spread_rows,
    telling,
    training_text,
)
from zeromon.readout.ledger import (
    JobLedger,
    activity_texts,
    cause_text,
    checkpoint_text,
    energy_text,
    headline,
    job_ledger,
    startup_parts_text,
)
from zeromon.readout.remedy import remedy_text
from zeromon.readout.text import (
    commit_text,
    exposed_unknown,
    finding_text,
    joined_text,
    resolved_texts,
    run_state,
    state_text,
)
from zeromon.readout.throughput import progress, progress_text, throughput_text
from zeromon.readout.verdict import verdict
from zeromon.report.communication import (
    checked,
    communication,
    dimensions,
    inspected,
    pipeline,
    sizes,
    units,
)
from zeromon.report.deaths import attempts, deaths
from zeromon.report.memory import memory, offload, roles
from zeromon.report.table import column_table, table, wrap
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Setting, Severity, StepRange
from zeromon.storage.run_store import About
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds, printable

_MOST_RANKS = 32
_MARKS = {Severity.CRITICAL: "!!", Severity.WARNING: " !", Severity.INFO: "  "}


def render(
    run: RunSnapshot,
    ranges: Sequence[StepRange] = (),
    about: About | None = None,
    known: Iterable[Finding] = (),
) -> str:
    """The whole report of *run*.

    *ranges*: the parts of a long run. *about*: what its user wrote about it. *known*: all findings of
    its record, of which those are shown that were over before its end.
    """
    blocks = [head(run, about or About()), attempts(run), ledger([run])]
    if run.ranks:
        blocks += [
            spreads(run), _ranks(run), _over_time(ranges), phases(run), activities(run),
            pipeline(run),
            communication(run), dimensions(run), units(run, 8), sizes(run), inspected(run),
            memory(_shown(run)),
            roles(run), offload(run), engines(run), deaths(run), settings(run, written_only=True),
        ]  # fmt: skip
    blocks.append(_findings([f for f in run.findings if f.rule != "rank_died"]))  # see deaths()
    blocks.append(_earlier(run, known))
    return "\n\n".join(block for block in blocks if block) + "\n"


def head(run: RunSnapshot, about: About) -> str:
    """The head of the report: the run's state, verdict, command, ranks and duration."""
    first = run.ranks[0] if run.ranks else None
    judged = verdict(run)
    lines = [f"run {run.run}: {run_state(run)}", f"  verdict   {judged.health}: {judged.cause}"]
    if about.tags:
        lines.append(_wrapped(f"tags      {printable(', '.join(about.tags))}"))
    if about.note:
        lines.append(_wrapped(f"note      {printable(about.note)}"))
    if run.command:
        lines.append(f"  command   {' '.join(run.command)}")
    if run.revision:
        lines.append(f"  code      git commit {commit_text(run.revision)}")
    if first is not None:
        count = len(run.ranks) if run.fleet is None else run.fleet.ranks
        ranks = f"{count} of {first.world_size} ranks on {run.node}"
        lines.append(f"  ranks     {ranks}, {first.strategy}, {first.device}")
    started = [rank for rank in run.ranks if rank.startup_seconds is not None]
    if started:
        longest = max(started, key=lambda rank: rank.startup_seconds or 0.0)
        parts = startup_parts_text(longest) or "imports, set-up, first batch"
        setup = f"{human_seconds(longest.startup_seconds)} until the first step: {parts}"
        lines.append(_wrapped(f"start-up  {setup}"))
    if joined := joined_text(run):
        lines.append(f"  watched   {joined.removeprefix('watched ')}")
    if used := energy_text(run):
        lines.append(f"  energy    {used}")
    lines.append(f"  duration  {human_seconds(max(0.0, run.taken_wall - run.started_wall))}")
    return "\n".join(lines)


def _shown(run: RunSnapshot) -> Sequence[RankSnapshot]:
    return run.ranks[:_MOST_RANKS]


def _ranks(run: RunSnapshot) -> str:
    rows = column_table(
        _shown(run),
        ("rank", lambda rank: str(rank.rank)),
        ("steps", STEPS.text),
        ("step", STEP.text),
        ("exposed", EXPOSED_SECONDS.text),
        ("share", EXPOSED.text),
        ("overlap", OVERLAP.text),
        ("state", state_text),
    )
    more = (len(run.ranks) if run.fleet is None else run.fleet.ranks) - len(_shown(run))
    tail = f"\n  ... and {more} more ranks" if more > 0 else ""
    tail += "".join(f"\n  {line}" for line in map(checked, _shown(run)) if line)
    tail += why_unknown(_shown(run))
    tail += "\n" + _wrapped(throughput_text(run))
    paces = [(known.starved_ratio, rank) for rank in run.ranks if (known := pace(rank)) is not None]
    if paces:
        _, slowest = max(paces, key=lambda one: one[0])
        tail += "\n" + _wrapped(f"rank {slowest.rank} is {pace_text(slowest)}")
    if progress(run) is not None:
        tail += "\n" + _wrapped(progress_text(run))
    if (teller := telling(run)) is not None:
        tail += "\n" + _wrapped(f"training, by rank {teller.rank}: {training_text(teller)}")
    return f"Steps (mean of the last {WINDOW} timed steps, without the first)\n{rows}{tail}"


def why_unknown(ranks: Sequence[RankSnapshot]) -> str:
    """Why exposed communication is n/a, once for the first rank where it is."""
    why = next(((rank, text) for rank in ranks if (text := exposed_unknown(rank))), None)
    if why is None:
        return ""
    return "\n" + _wrapped(f"exposed communication of rank {why[0].rank} is n/a: {why[1]}")


def spreads(run: RunSnapshot) -> str:
    """How figures spread over all ranks, where a snapshot has only some of them; "" where it has all."""
    fleet = run.fleet
    if fleet is None:
        return ""
    rows = [(figure.label, *values) for figure, values in spread_rows(fleet)]
    header = ("all ranks", *SPREAD_HEADS)
    return f"How {human_count(fleet.ranks)} ranks spread\n{table(header, rows)}"


def _over_time(ranges: Sequence[StepRange]) -> str:
    """Step time, exposed share and memory over a long run; "" without *ranges*."""
    if not ranges:
        return ""
    rows = column_table(
        ranges,
        ("steps", lambda p: f"{human_count(p.first_step)} to {human_count(p.last_step)}"),
        ("step", lambda p: human_seconds(p.step_seconds)),
        ("exposed", lambda p: human_ratio(p.exposed_ratio)),
        ("RSS", lambda p: human_bytes(p.rss_bytes)),
        ("reserved", lambda p: human_bytes(p.reserved_bytes) if p.reserved_bytes >= 0 else "-"),
    )
    return f"Over the whole run (mean step, without the first; the most bytes on any rank)\n{rows}"


def phases(run: RunSnapshot) -> str:
    """Where the time of a step goes, over all ranks."""
    of_ranks = [rank_parts(rank) for rank in run.ranks]
    total = {part: sum(parts.get(part, 0.0) for parts in of_ranks) for part in PARTS}
    spent = sum(total.values())
    known = {"exposed"} if any(map(exposed_is_known, run.ranks)) else set()
    always = known | set(USUAL) - {"exposed"}
    shown = [part for part in PARTS if total[part] or part in always]
    parts = [f"{PART_NAMES[part]} {human_ratio(total[part] / spent)}" for part in shown if spent]
    head = f"Where the time of a step goes (mean of the last {WINDOW} timed steps)"
    return f"{head}\n{_wrapped(', '.join(parts) or 'no step yet')}"


def _wrapped(text: str) -> str:
    return "\n".join(wrap(text, 98, "  ", "  "))


_SHOWN_SECONDS = 1.0
"""A finding that only the end brought has no duration."""


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    lines = [line for finding in findings for line in finding_lines(finding)]
    return "Findings (zeromon rule CODE explains them)\n" + "\n".join(lines)


def _earlier(run: RunSnapshot, known: Iterable[Finding]) -> str:
    """The findings that were over before the run was, without mere information; "" without any."""
    stood = {(one.rule, one.rank) for one in run.findings}
    over = [f for f in known if f.severity != Severity.INFO and (f.rule, f.rank) not in stood]
    lines = [_wrapped(f"{rule} {text}") for rule, text in resolved_texts(over)]
    return "\n".join(("Earlier findings", *lines)) if lines else ""


def finding_lines(finding: Finding) -> list[str]:
    """A finding, and its remedy where it has one."""
    held = finding.gone - finding.came if finding.gone is not None and finding.came else 0.0
    is_shown = held >= _SHOWN_SECONDS and finding.severity != Severity.INFO
    until = f" (for {human_seconds(held)}, to the end)" if is_shown else ""
    lines = [f"{_MARKS[finding.severity]} {finding.code} {finding_text(finding)}{until}"]
    if finding.remedy is not None:
        text = remedy_text(finding.remedy)
        remedy = [text.reason, *(f"  {line.text}" for line in text.diff), text.outlook]
        lines += [f"     {line}" for line in remedy]
    return lines


# ---- where every second of a job went, as text --------------------------------------------------

_BAR = 30


def ledger(runs: Sequence[RunSnapshot], per: Sequence[tuple[str, float]] = ()) -> str:
    """Every second of the ranks of *runs*, which are one job; "" where nothing is known.

    *per*: further columns, with what a second is worth in each (kWh, money).
    """
    whole = job_ledger(runs)
    if not whole.rows:
        return ""
    work = [(whole.unit, whole.per_second)] if whole.unit else []
    lines = [f"Ledger: {headline(whole)}", _table(whole, [*work, *per])]
    lines += [f"  {note}" for note in (whole.unit_note, *whole.notes)]
    saves = checkpoint_text(runs[-1])
    return "\n".join([*lines, f"  {saves}"] if saves else lines)


def _table(whole: JobLedger, per: Sequence[tuple[str, float]]) -> str:
    def cells(name: str, seconds: float) -> tuple[str, ...]:
        amounts = (seconds * each for _, each in per)
        worth = (human_count(a) if a >= 1000 else f"{a:.4g}" for a in amounts)
        return name, human_seconds(seconds), human_ratio(seconds / whole.rank_seconds), *worth

    rows = [cells(cause_text(row), row.seconds) for row in whole.rows]
    header = ("cause", "of all ranks", "share", *(name for name, _ in per))
    lines = table(header, [*rows, cells("sum", whole.rank_seconds)]).splitlines()
    bars = ["", *("#" * round(_BAR * whole.share(row)) for row in whole.rows), ""]
    return "\n".join(f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True))


def activities(run: RunSnapshot) -> str:
    """The activities of the training loops beside training; "" where nothing was seen."""
    texts = activity_texts(run)
    return "Beside training\n" + "\n".join(f"  {text}" for text in texts) if texts else ""


# ---- deepSpeed's engines and settings, as text --------------------------------------------------


def engines(run: RunSnapshot) -> str:
    """The DeepSpeed engines of the first rank that has some; "" without any."""
    rank = next((r for r in run.ranks if r.engines), None)
    if rank is None:
        return ""
    rows = column_table(
        rank.engines,
        ("engine", lambda e: f"{e.engine} {e.strategy}{' (dropped)' * e.dropped}"),
        ("steps", lambda e: human_count(e.steps)),
        ("skipped", lambda e: human_count(e.skipped)),
        ("bytes", lambda e: human_bytes(e.nbytes)),
        ("exposed", lambda e: human_seconds(e.exposed_seconds)),
        ("loss scale", lambda e: "-" if e.loss_scale is None else f"{e.loss_scale:g}"),
        ("grad norm", lambda e: "-" if e.grad_norm is None else f"{e.grad_norm:.4g}"),
    )
    return f"DeepSpeed engines of rank {rank.rank}\n{rows}"


def settings(run: RunSnapshot, *, written_only: bool) -> str:
    """The configuration: what took effect, beside what was written where the two differ.

    A setting that all engines have in common is shown once.
    """
    rank = next((r for r in run.ranks if r.settings), None)
    if rank is None:
        return ""
    known = [s for s in rank.settings if s.written or not written_only or s.name in _ALWAYS_SHOWN]
    engines = len({setting.engine for setting in known})
    alike = Counter((s.name, s.effective, s.written) for s in known)
    lines = dict.fromkeys(
        (
            f"engine {s.engine}: " * (alike[s.name, s.effective, s.written] != engines) + s.name,
            s.effective,
            _origin(s),
        )
        for s in known
    )
    width = max((len(name) for name, _, _ in lines), default=0)
    text = "\n".join(f"  {name.ljust(width)}  {value}{note}" for name, value, note in lines)
    hint = "written, and what follows from it" if written_only else "as it took effect"
    return f"Configuration ({hint})\n{text}"


_ALWAYS_SHOWN = ("zero_optimization.overlap_comm", "train_batch_size")


def _origin(setting: Setting) -> str:
    if not setting.written:
        return "  (default)"
    return "" if setting.written == setting.effective else f"  (written: {setting.written})"
