"""The output of ``zeromon plan``: table and reason as text, everything as JSON."""

from dataclasses import asdict
from typing import Any

from zeromon.memory import plan
from zeromon.memory.ladder import ladder
from zeromon.memory.plan import copies, fewest_devices, unique_bytes
from zeromon.memory.predict import ACTIVATION
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES
from zeromon.memory.speeds import sources
from zeromon.readout.remedy import ladder_lines
from zeromon.report.table import Column, column_table
from zeromon.snapshot import Rung
from zeromon.units import human_bytes, human_params, human_seconds


def as_text(setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False) -> str:
    """The table, the recommendation, and where the bytes go."""
    model, (best, why) = setup.model, _recommended(setup, rows)
    lines = [
        f"{model.name}: {_params(setup)} on "
        f"{setup.devices} devices of {'' if setup.capacity_known else 'an assumed '}"
        f"{human_bytes(setup.device_bytes)} ({human_bytes(setup.usable_bytes)} usable)"
    ]
    if setup.host_bytes is not None:
        each = human_bytes(setup.usable_host_bytes)
        hosts = f"{setup.hosts} host{'s' * (setup.hosts > 1)}"
        lines.append(f"{hosts} of {human_bytes(setup.host_bytes)} ({each} usable a rank)")
    if setup.batch is not None:
        b = setup.batch
        how = ", checkpointing" if b.checkpointing else ""
        tokens = f" x {b.length} tokens" if b.length > 1 else ""
        lines.append(f"micro-batch of {b.sequences}{tokens}{how}")
    lines += [f"note: {note}" for note in model.notes]
    lines += ["", _table(setup, rows, best, fewest=fewest), "", *_speeds(setup, rows)]
    if any(row.given and row is not best for row in rows):
        lines.append(f"= {plan.GIVEN}")
    if best is not None:
        lines.append(f"choose {best.plan.label}: {why}")
        lines += ["", _roles(best)]
    else:
        lines.append(why)
    rungs = _ladder(setup, rows)
    if rungs:
        lines += ["", f"what frees memory under {setup.plan.label}, cheapest first"]
        lines[-1] += (
            ":" if any(row.memory.role(ACTIVATION) for row in rows) else ", without activations:"
        )
        lines += [f"  {line}" for line in ladder_lines(rungs)]
    return "\n".join(lines) + "\n"


def _recommended(setup: plan.Setup, rows: list[plan.Row]) -> tuple[plan.Row | None, str]:
    return plan.recommended(rows, micro_batch_given=setup.micro_batch_given)


def _ladder(setup: plan.Setup, rows: list[plan.Row]) -> tuple[Rung, ...]:
    """The OOM ladder of the given strategy where it does not fit the device."""
    row = next((row for row in rows if row.plan == setup.plan), None)
    if row is None or row.fits_device:
        return ()
    return ladder(setup, row.device_bytes - setup.usable_bytes)


def _params(setup: plan.Setup) -> str:
    """The parameters of the model, and of the part of one rank where others have other parts."""
    own, whole = human_params(setup.model.params), setup.whole_numel
    if setup.tensor == setup.pipeline == 1:
        return f"{own} parameters"
    of_all = f"{'n/a' if whole is None else human_params(whole)} parameters"
    return f"{of_all}, {own} a rank (tensor {setup.tensor} x pipeline {setup.pipeline})"


def _table(setup: plan.Setup, rows: list[plan.Row], best: plan.Row | None, *, fewest: bool) -> str:
    devices: Column[plan.Row] = ("fewest devices", lambda row: str(_fewest(setup, row) or "-"))
    return column_table(
        rows,
        ("strategy", lambda r: f"{'>' if r is best else '=' if r.given else ' '} {r.plan.label}"),
        ("plain ZeRO", lambda row: f"{row.memory.model_states / 1e9:.4g} GB"),
        ("device", lambda row: human_bytes(row.device_bytes)),
        ("host/rank", lambda row: human_bytes(n) if (n := row.memory.total("host")) else "-"),
        ("nvme/rank", lambda row: human_bytes(n) if (n := row.memory.total("nvme")) else "-"),
        ("fits", _fits),
        ("sent a step", lambda row: human_bytes(row.communication_bytes)),
        ("step", lambda r: human_seconds(None if isinstance(r.time, str) else r.time.seconds)),
        ("(from to)", lambda row: "" if isinstance(row.time, str) else interval_text(row.time)),
        (
            "most sequences",
            lambda row: str(n) if (n := row.largest_micro_batch) is not None else "-",
        ),
        ("copies", lambda row: f"{copies(plan.sizes_of(setup, row.plan), row):.1f}"),
        *([devices] if fewest else []),
    )


def interval_text(time: StepTime) -> str:
    """``1.20 s to 1.50 s``: between which times a step is."""
    return f"{human_seconds(time.least)} to {human_seconds(time.most)}"


def _speeds(setup: plan.Setup, rows: list[plan.Row]) -> list[str]:
    """Where the seconds come from, and why some are n/a."""
    known = any(isinstance(row.time, StepTime) for row in rows)
    lines = [f"seconds: {text}" for text in sources(setup.machine, setup.measured, setup.plan)]
    needs = dict.fromkeys(row.time for row in rows if isinstance(row.time, str))
    return [*(lines if known else []), *(f"seconds n/a without {what}" for what in needs)]


def _fits(row: plan.Row) -> str:
    if row.fits:
        return "yes"
    return "no" if not row.fits_device else "not the host" if not row.fits_host else "not the NVMe"


def _fewest(setup: plan.Setup, row: plan.Row) -> int | None:
    ranks = fewest_devices(setup, row.plan)
    return None if ranks is None else ranks * setup.tensor * setup.pipeline


def _roles(row: plan.Row) -> str:
    terms = sorted(row.memory.terms, key=lambda t: -t.nbytes)
    cells = [
        (
            term.role.replace("_", " "),
            human_bytes(term.nbytes),
            term.place,
            term.during.value,
            term.cause or ("of one micro-batch" if term.role == ACTIVATION else "plain ZeRO"),
        )
        for term in terms
    ]
    width = max((len(c[0]) for c in cells), default=0)
    return "\n".join(f"  {c[0]:<{width}}  {c[1]:>10}  {c[2]:<6}  {c[3]:<8}  {c[4]}" for c in cells)


def as_json(setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False) -> dict[str, Any]:
    """Everything, in bytes."""
    best, why = _recommended(setup, rows)
    return {
        "model": setup.model.name,
        "params": setup.model.params,
        "whole_params": setup.whole_numel,
        "trainable": setup.model.trainable,
        "ranks": setup.plan.ranks,
        "devices": setup.devices,
        "device_bytes": setup.device_bytes,
        "usable_bytes": setup.usable_bytes,
        "host_bytes": setup.host_bytes,
        "hosts": setup.hosts,
        "notes": setup.model.notes,
        "speeds": sources(setup.machine, setup.measured, setup.plan),
        "rows": [
            {
                "label": row.plan.label,
                "given": row.given,
                "framework": row.plan.framework,
                "stage": int(row.plan.stage),
                "optimizer_on": row.plan.optimizer_on,
                "params_on": row.plan.params_on,
                "fits": row.fits,
                "fits_host": row.fits_host,
                "fits_nvme": row.fits_nvme,
                "plain_bytes": row.memory.model_states,
                "cluster_bytes": row.memory.model_states * setup.devices,
                "unique_bytes": unique_bytes(plan.sizes_of(setup, row.plan), row.plan)
                * setup.tensor
                * setup.pipeline,
                **({"fewest_devices": _fewest(setup, row)} if fewest else {}),
                "bytes": {place: row.memory.total(place) for place in PLACES},
                "roles": {place: row.memory.by_role(place) for place in PLACES},
                "communication_bytes": row.communication_bytes,
                **step_seconds(row),
                "largest_micro_batch": row.largest_micro_batch,
            }
            for row in rows
        ],
        "recommended": best.plan.label if best is not None else None,
        "why": why,
        "ladder": [asdict(rung) for rung in _ladder(setup, rows)],
    }


def step_seconds(row: plan.Row) -> dict[str, Any]:
    """The seconds of a step; None with the reason where they are unknown."""
    if isinstance(row.time, str):
        return {"step_seconds": None, "step_seconds_unknown": row.time}
    return {
        "step_seconds": row.time.seconds,
        "step_seconds_interval": [row.time.least, row.time.most],
        "step_parts": asdict(row.time.parts),
    }
