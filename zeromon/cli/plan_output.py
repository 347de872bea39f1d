"""The output of ``zeromon plan``: table and reason as text, everything as JSON."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zeromon.base.units import human_bytes, human_params, human_seconds, signed
from zeromon.memory import plan
from zeromon.memory.ladder import ladder_rungs
from zeromon.memory.predict import ACTIVATION
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES
from zeromon.memory.speeds import speed_sources
from zeromon.readout.figures import BYTES, COUNT, RATIO, SECONDS, TEXT
from zeromon.readout.remedy import ladder_lines
from zeromon.readout.tables import Column, Columns, aligned_table, text_table
from zeromon.snapshot.finding import Rung
from zeromon.tui.columns import fit_columns


def plan_as_text(setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False) -> str:
    """The table, the recommendation, and where the bytes go."""
    model, chosen = setup.model, plan.choose_row(setup, rows)
    choice = chosen.row
    output = [
        f"{model.name}: {_params_text(setup)} on {setup.devices} device"
        f"{'s' * (setup.devices > 1)} of {'' if setup.capacity_known else 'an assumed '}"
        f"{human_bytes(setup.device_bytes)} ({human_bytes(setup.usable_bytes)} usable)"
    ]
    if setup.host_bytes is not None:
        per_rank = human_bytes(setup.usable_host_bytes)
        hosts = f"{setup.hosts} host{'s' * (setup.hosts > 1)}"
        output.append(f"{hosts} of {human_bytes(setup.host_bytes)} ({per_rank} usable a rank)")
    if setup.batch is not None:
        b = setup.batch
        suffix = ", checkpointing" if b.checkpointing else ""
        tokens = f" x {b.length} tokens" if b.length > 1 else ""
        output.append(f"micro-batch of {b.sequences}{tokens}{suffix}")
    output += [f"note: {note}" for note in model.notes]
    output += ["", _plan_table(setup, rows, choice, fewest=fewest), "", *_speed_notes(setup, rows)]
    if any(row.given and row is not choice for row in rows):
        output.append(f"= {plan.GIVEN}")
    if any(_fit_text(row, setup.usable_bytes) == "tight" for row in rows):
        output.append("tight: over 90 % of what is usable, with little left for fragmentation")
    output += _paper_note(rows)
    if any(row.plan.framework == "fsdp1" for row in rows):
        output.append("FSDP1 with limit_all_gathers=True: without it, gathers run ahead without bound")
    if choice is None:
        output += chosen.reasons
    else:
        output += ["", f"choose {' with '.join((choice.plan.label, *chosen.settings[:1]))}"]
        output[-1] += "".join(f" and {setting}" for setting in chosen.settings[1:])
        output += [f"  - {reason}" for reason in chosen.reasons]
        output += ["", _roles_text(choice)]
    rungs = _oom_ladder(setup, rows)
    if rungs:
        output += ["", f"what frees memory under {setup.plan.label}, cheapest first"]
        output[-1] += ":" if _counts_activations(rows) else ", without activations:"
        output += [f"  {row}" for row in ladder_lines(rungs)]
    return "\n".join(output) + "\n"


def _counts_activations(rows: list[plan.Row]) -> bool:
    return any(row.memory.role(ACTIVATION) for row in rows)


def _paper_note(rows: list[plan.Row]) -> list[str]:
    """Returns a note on the rows in which DeepSpeed sends more than the ZeRO paper."""
    differing = [row for row in rows if row.communication_bytes > 1.2 * row.paper_bytes]
    if not differing:
        return []
    stages = " and ".join(dict.fromkeys(f"ZeRO-{row.plan.stage}" for row in differing))
    return [
        f"sent/step: the ZeRO paper has {human_bytes(differing[0].paper_bytes)} for {stages}.",
        '  DeepSpeed all-reduces whole buckets, unless "use_multi_rank_bucket_allreduce" is false.'
        if differing[0].plan.framework == "deepspeed"
        else "  DDP all-reduces, and ZeroRedundancyOptimizer broadcasts what it has updated.",
    ]


def _oom_ladder(setup: plan.Setup, rows: list[plan.Row]) -> tuple[Rung, ...]:
    """The OOM ladder of the given strategy where it does not fit the device."""
    row = next((row for row in rows if row.plan == setup.plan), None)
    if row is None or row.fits_device:
        return ()
    return ladder_rungs(setup, row.device_bytes - setup.usable_bytes)


def _params_text(setup: plan.Setup) -> str:
    """The parameters of the model, and of the part of one rank where others have other parts."""
    own_params, whole_numel = human_params(setup.model.params), setup.whole_numel
    trainable = setup.model.trainable
    trained = f" ({human_params(trainable)} trained)" if trainable < setup.model.params else ""
    if setup.tensor == setup.pipeline == 1:
        return f"{own_params} parameters{trained}"
    of_all = f"{'n/a' if whole_numel is None else human_params(whole_numel)} parameters"
    return f"{of_all}, {own_params} per rank (tensor {setup.tensor} x pipeline {setup.pipeline})"


def _plan_table(
    setup: plan.Setup, rows: list[plan.Row], choice: plan.Row | None, *, fewest: bool
) -> str:
    devices: Column[plan.Row] = Column("fewest devices", lambda row: str(_fewest_of(setup, row) or "-"))
    fits = "fits" if _counts_activations(rows) else "fits without activations"
    return text_table(
        rows,
        Column(
            "strategy", lambda r: f"{'>' if r is choice else '=' if r.given else ' '} {r.plan.label}"
        ),
        Column("plain ZeRO", lambda row: row.memory.model_states, BYTES),
        Column("device", lambda row: row.device_bytes or None, BYTES),
        Column("host/rank", lambda row: human_bytes(n) if (n := row.memory.total("host")) else "-"),
        Column("nvme/rank", lambda row: human_bytes(n) if (n := row.memory.total("nvme")) else "-"),
        Column(fits, lambda row: _fit_text(row, setup.usable_bytes)),
        Column("sent/step", lambda row: row.communication_bytes, BYTES),
        *(_TIME_COLUMNS if any(isinstance(row.time, StepTime) for row in rows) else ()),
        Column("max micro-batch", lambda row: row.largest_micro_batch, COUNT, unknown="-"),
        *([devices] if fewest else []),
    )


_TIME_COLUMNS: tuple[Column[plan.Row], ...] = (
    Column("step", lambda row: None if isinstance(row.time, str) else row.time.seconds, SECONDS),
    Column("(min to max)", lambda row: "n/a" if isinstance(row.time, str) else interval_text(row.time)),
)


def interval_text(time: StepTime) -> str:
    """``1.20 s to 1.50 s``: between which times a step is."""
    return f"{human_seconds(time.least)} to {human_seconds(time.most)}"


def _speed_notes(setup: plan.Setup, rows: list[plan.Row]) -> list[str]:
    """Where the seconds come from, and why some are n/a."""
    timed = any(isinstance(row.time, StepTime) for row in rows)
    notes = [f"seconds: {source}" for source in speed_sources(setup.machine, setup.measured, setup.plan)]
    needs = dict.fromkeys(row.time for row in rows if isinstance(row.time, str))
    return [*(notes if timed else []), *(f"step time n/a without {quantity}" for quantity in needs)]


_TIGHT_SHARE = 0.9


def _fit_text(row: plan.Row, usable_bytes: int) -> str:
    if not row.device_bytes:
        return "n/a"
    if row.fits:
        return "tight" if row.device_bytes > _TIGHT_SHARE * usable_bytes else "yes"
    return "no" if not row.fits_device else "not the host" if not row.fits_host else "not the NVMe"


def _fewest_of(setup: plan.Setup, row: plan.Row) -> int | None:
    ranks = plan.fewest_fitting_devices(setup, row.plan)
    return None if ranks is None else ranks * setup.tensor * setup.pipeline


def _roles_text(row: plan.Row) -> str:
    terms = sorted(row.memory.terms, key=lambda t: -t.nbytes)
    cells = [
        (term.role.replace("_", " "), human_bytes(term.nbytes), term.place, term.during.label,
         term.cause or ("of one micro-batch" if term.role == ACTIVATION else "plain ZeRO"))
        for term in terms
    ]  # fmt: skip
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(4)]
    lines = [
        f"  {c[0]:<{widths[0]}}  {c[1]:>10}  {c[2]:<{widths[2]}}  {c[3]:<{widths[3]}}  {c[4]}"
        for c in cells
    ]
    by_phase = row.memory.by_phase()
    peak = max(by_phase, key=lambda phase: by_phase[phase])
    other_phases = ", ".join(f"{name} {human_bytes(n)}" for name, n in by_phase.items() if name != peak)
    largest_peak = f"{row.plan.label}: device memory peaks in the {peak}, {human_bytes(by_phase[peak])}"
    return "\n".join([f"{largest_peak} ({other_phases})", *lines])


def plan_as_json(setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False) -> dict[str, Any]:
    """Everything, in bytes."""
    chosen = plan.choose_row(setup, rows)
    choice = chosen.row
    return {
        "model": setup.model.name, "params": setup.model.params, "whole_params": setup.whole_numel,
        "trainable": setup.model.trainable, "ranks": setup.plan.ranks, "devices": setup.devices,
        "device_bytes": setup.device_bytes, "usable_bytes": setup.usable_bytes,
        "host_bytes": setup.host_bytes, "hosts": setup.hosts, "notes": setup.model.notes,
        "speeds": speed_sources(setup.machine, setup.measured, setup.plan),
        "rows": [
            {
                "label": row.plan.label, "given": row.given, "framework": row.plan.framework,
                "stage": int(row.plan.stage), "optimizer_on": row.plan.optimizer_on,
                "params_on": row.plan.params_on, "fits": row.fits if row.device_bytes else None,
                "fits_host": row.fits_host, "fits_nvme": row.fits_nvme,
                "plain_bytes": row.memory.model_states,
                "cluster_bytes": row.memory.model_states * setup.devices,
                "unique_bytes": plan.unique_state_bytes(plan.sizes_under_plan(setup, row.plan), row.plan)
                * setup.tensor
                * setup.pipeline,
                **({"fewest_devices": _fewest_of(setup, row)} if fewest else {}),
                "bytes": {t: row.memory.total(t) or (None if t == "device" else 0) for t in PLACES},
                "roles": {tier: row.memory.by_role(tier) for tier in PLACES},
                "device_bytes_by_phase": row.memory.by_phase(),
                "communication_bytes": row.communication_bytes,
                "within_host_bytes": round(row.sent.within_host),
                "paper_communication_bytes": row.paper_bytes,
                **step_seconds(row),
                "largest_micro_batch": row.largest_micro_batch,
            }
            for row in rows
        ],
        "recommended": choice.plan.label if choice is not None else None,
        "settings": list(chosen.settings),
        "why": "; ".join(chosen.reasons),
        "ladder": [asdict(rung) for rung in _oom_ladder(setup, rows)],
    }  # fmt: skip


def step_seconds(row: plan.Row) -> dict[str, Any]:
    """The seconds of a step; None with the reason where they are unknown."""
    if isinstance(row.time, str):
        return {"step_seconds": None, "step_seconds_unknown": row.time}
    return {
        "step_seconds": row.time.seconds,
        "step_seconds_interval": [row.time.least, row.time.most],
        "step_parts": asdict(row.time.parts),
    }


# ---- what changes of a run do --------------------------------------------------------------------

_MAX_ROWS = 64
_LATE = "(late ranks)"
_MAX_SIDE_BY_SIDE, _MAX_UNITS = 3, 12
"""So many points have their exposed communication laid side by side, with so many units."""


def changes_as_text(base: plan.Point, points: Sequence[plan.Point], *, width: int = sys.maxsize) -> str:
    """The table for *width* columns, where speeds come from, and what is unknown."""
    pareto = plan.memory_time_front([base, *points])
    setup = base.setup
    assert setup is not None
    listed = points if len(points) <= _MAX_ROWS else [p for p in pareto if p is not base]
    rows = [f"{setup.model.name}: {setup.plan.label} on {setup.devices} devices", ""]
    rows.append(_changes_table(base, listed, pareto, width))
    if len(points) > _MAX_ROWS:
        rows.append(f"  {len(points)} points; the table has those marked *, and --json has all")
    if 0 < len(points) <= _MAX_SIDE_BY_SIDE:
        rows += ["", *_exposed_tables(base, points)]
    rows += ["", *_point_notes(base, points)]
    return "\n".join(rows) + "\n"


def _changes_table(
    base: plan.Point, listed: Sequence[plan.Point], pareto: Sequence[plan.Point], width: int
) -> str:
    def gain_text(point: plan.Point, *numbers: int) -> str:
        gained = plan.step_difference(base, point) if point is not base else None
        if point.time is None or gained is None:
            return "n/a" if point.time is None else "-"
        return " to ".join(signed(human_seconds, gained[number]) for number in numbers)

    def exposed_seconds(point: plan.Point) -> float | None:
        return point.time.parts.communication + point.time.parts.waiting if point.time else None

    def label(p: plan.Point) -> str:
        return f"{'*' if p in pareto and len(pareto) > 1 else ' '} {p.label}"

    rows = [base, *listed]
    columns: Columns[plan.Point] = (
        Column("change", label, width=2 + max(len(label(p)) for p in rows)),
        Column("step", lambda p: p.time.seconds if p.time else None, SECONDS, 10),
        Column("(min to max)", lambda p: interval_text(p.time) if p.time else "n/a", TEXT, 22, 4),
        Column("difference", lambda p: gain_text(p, 0), TEXT, 12, 1),
        Column("(min to max)", lambda p: gain_text(p, 1, 2), TEXT, 25, 3),
        Column("exposed", lambda p: exposed_seconds(p), SECONDS, 10),
        *(column for column in _WHERE_KNOWN if any(column.text(p) != "n/a" for p in rows)),
    )
    return text_table(rows, *(column for column, _ in fit_columns(columns, width)))


_WHERE_KNOWN: tuple[Column[plan.Point], ...] = (
    Column("device", lambda p: human_bytes(n) + " +" * p.is_bound if (n := _device_bytes(p)) else "n/a"),
    Column("fits", lambda p: ("yes" if p.row.fits else "no") if p.row and fits_known(p) else "n/a"),
    Column("MFU", lambda p: p.mfu if p.row else None, RATIO, 8, 2),
    Column("tokens/s", lambda p: p.tokens_per_second if p.row else None, COUNT, 10),
)
"""Columns that a table has where a point has a value."""


def _exposed_tables(base: plan.Point, points: Sequence[plan.Point]) -> list[str]:
    """The exposed communication of a step by unit or bucket, the largest first."""
    timed = [
        (p.label, {**p.time.exposed, _LATE: p.time.parts.waiting})
        for p in (base, *points)
        if p.time is not None
    ]
    totals: dict[str, float] = defaultdict(float)
    for _, units in timed:
        for name, seconds in units.items():
            totals[name] += seconds
    names = sorted(filter(totals.get, totals), key=lambda name: -totals[name])
    if not names:
        return []
    rows = [
        (name, *(human_seconds(units.get(name, 0.0)) for _, units in timed))
        for name in names[:_MAX_UNITS]
    ]
    omitted = len(names) - _MAX_UNITS
    sections = [aligned_table(("exposed a step", *(label for label, _ in timed)), rows)]
    return sections + ([f"  and {omitted} more; --json has all"] if omitted > 0 else [])


def _point_notes(base: plan.Point, points: Sequence[plan.Point]) -> list[str]:
    setup = base.setup
    assert setup is not None
    notes = [f"note: {note}" for note in _assumed_notes(base)]
    if any(point.is_bound for point in (base, *points)):
        notes.append("note: +: at least, as activations or gathered units are unknown")
    if base.time is not None:
        notes += [
            f"seconds: {note}" for note in speed_sources(setup.machine, setup.measured, setup.plan)
        ]
    unknown = dict.fromkeys((p.error and f"{p.label}: {p.error}") for p in points if p.row is None)
    notes += filter(None, unknown)
    needs = dict.fromkeys(p.unknown for p in (base, *points) if p.row is not None and p.unknown)
    notes += [f"step time n/a without {quantity}" for quantity in needs]
    if setup.measured is not None and any("precision" in p.change for p in points):
        notes.append("note: compute keeps the speed of the run's own precision")
    return notes


def _device_bytes(point: plan.Point) -> int:
    """Returns the bytes of *point* on a device; 0 where they are unknown."""
    return point.row.device_bytes if point.row is not None else 0


def fits_known(point: plan.Point) -> bool:
    """Returns whether the memory of a device is known, and what *point* needs of it."""
    return point.setup is not None and point.setup.capacity_known and _device_bytes(point) > 0


def _assumed_notes(base: plan.Point) -> list[str]:
    assert base.setup is not None
    missing = "what fits is n/a without the memory of a device: give --gpu"
    return [*base.setup.model.notes, *([] if fits_known(base) else [missing])]


def changes_as_json(base: plan.Point, points: Sequence[plan.Point], *, of: int) -> dict[str, Any]:
    """Everything, in bytes and seconds; *of*: how many points were asked for."""
    pareto = plan.memory_time_front([base, *points])
    setup = base.setup
    assert setup is not None
    return {
        "model": setup.model.name,
        "devices": setup.devices,
        "usable_bytes": setup.usable_bytes if setup.capacity_known else None,
        "notes": _assumed_notes(base),
        "speeds": speed_sources(setup.machine, setup.measured, setup.plan),
        "asked": of,
        "points": [_point_json(point, base, pareto) for point in (base, *points)],
    }


def _point_json(point: plan.Point, base: plan.Point, pareto: Sequence[plan.Point]) -> dict[str, Any]:
    content: dict[str, Any] = {"change": dict(point.change), "error": point.error or None}
    row = point.row
    if row is None:
        return content
    content |= {
        "label": row.plan.label,
        "fits": row.fits if fits_known(point) else None,
        "bytes": {tier: row.memory.total(tier) for tier in PLACES},
        "roles": {tier: row.memory.by_role(tier) for tier in PLACES},
        "activations_known": point.counts_activations,
        "bytes_are_least": point.is_bound,
        "communication_bytes": row.communication_bytes,
        "samples": point.samples,
        "tokens_per_second": point.tokens_per_second,
        "mfu": point.mfu,
        "pareto": point in pareto,
    }
    content |= step_seconds(row)
    if not isinstance(row.time, StepTime):
        return content
    gain = plan.step_difference(base, point)
    return content | {
        "exposed_seconds": dict(row.time.exposed),
        "difference_seconds": gain[0] if gain else None,
        "difference_seconds_interval": list(gain[1:]) if gain else None,
    }
