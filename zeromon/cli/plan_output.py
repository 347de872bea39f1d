"""The output of ``zeromon plan``: table and reason as text, everything as JSON."""

from dataclasses import asdict
from typing import Any

from zeromon.base.units import human_bytes, human_params, human_seconds
from zeromon.memory import plan
from zeromon.memory.ladder import ladder_rungs
from zeromon.memory.plan import fewest_fitting_devices, state_copies, unique_state_bytes
from zeromon.memory.predict import ACTIVATION
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES
from zeromon.memory.speeds import speed_sources
from zeromon.readout.remedy import ladder_lines
from zeromon.report.table import Column, column_table
from zeromon.snapshot import Rung


def plan_as_text(setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False) -> str:
    """The table, the recommendation, and where the bytes go."""
    model, (choice, reason) = setup.model, _recommended_row(setup, rows)
    output = [
        f"{model.name}: {_params_text(setup)} on "
        f"{setup.devices} devices of {'' if setup.capacity_known else 'an assumed '}"
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
    if choice is not None:
        output.append(f"choose {choice.plan.label}: {reason}")
        output += ["", _roles_text(choice)]
    else:
        output.append(reason)
    rungs = _oom_ladder(setup, rows)
    if rungs:
        output += ["", f"what frees memory under {setup.plan.label}, cheapest first"]
        output[-1] += (
            ":" if any(row.memory.role(ACTIVATION) for row in rows) else ", without activations:"
        )
        output += [f"  {row}" for row in ladder_lines(rungs)]
    return "\n".join(output) + "\n"


def _recommended_row(setup: plan.Setup, rows: list[plan.Row]) -> tuple[plan.Row | None, str]:
    return plan.recommend_row(rows, micro_batch_given=setup.micro_batch_given)


def _oom_ladder(setup: plan.Setup, rows: list[plan.Row]) -> tuple[Rung, ...]:
    """The OOM ladder of the given strategy where it does not fit the device."""
    row = next((row for row in rows if row.plan == setup.plan), None)
    if row is None or row.fits_device:
        return ()
    return ladder_rungs(setup, row.device_bytes - setup.usable_bytes)


def _params_text(setup: plan.Setup) -> str:
    """The parameters of the model, and of the part of one rank where others have other parts."""
    own_params, whole_numel = human_params(setup.model.params), setup.whole_numel
    if setup.tensor == setup.pipeline == 1:
        return f"{own_params} parameters"
    of_all = f"{'n/a' if whole_numel is None else human_params(whole_numel)} parameters"
    return f"{of_all}, {own_params} a rank (tensor {setup.tensor} x pipeline {setup.pipeline})"


def _plan_table(
    setup: plan.Setup, rows: list[plan.Row], choice: plan.Row | None, *, fewest: bool
) -> str:
    devices: Column[plan.Row] = ("fewest devices", lambda row: str(_fewest_of(setup, row) or "-"))
    return column_table(
        rows,
        ("strategy", lambda r: f"{'>' if r is choice else '=' if r.given else ' '} {r.plan.label}"),
        ("plain ZeRO", lambda row: f"{row.memory.model_states / 1e9:.4g} GB"),
        ("device", lambda row: human_bytes(row.device_bytes)),
        ("host/rank", lambda row: human_bytes(n) if (n := row.memory.total("host")) else "-"),
        ("nvme/rank", lambda row: human_bytes(n) if (n := row.memory.total("nvme")) else "-"),
        ("fits", _fit_text),
        ("sent/step", lambda row: human_bytes(row.communication_bytes)),
        ("step", lambda r: human_seconds(None if isinstance(r.time, str) else r.time.seconds)),
        ("(min to max)", lambda row: "" if isinstance(row.time, str) else interval_text(row.time)),
        ("max sequences", lambda r: str(n) if (n := r.largest_micro_batch) is not None else "-"),
        ("state copies", lambda r: f"{state_copies(plan.sizes_under_plan(setup, r.plan), r):.1f}"),
        *([devices] if fewest else []),
    )


def interval_text(time: StepTime) -> str:
    """``1.20 s to 1.50 s``: between which times a step is."""
    return f"{human_seconds(time.least)} to {human_seconds(time.most)}"


def _speed_notes(setup: plan.Setup, rows: list[plan.Row]) -> list[str]:
    """Where the seconds come from, and why some are n/a."""
    timed = any(isinstance(row.time, StepTime) for row in rows)
    notes = [
        f"seconds: {source}" for source in speed_sources(setup.machine, setup.measured, setup.plan)
    ]
    needs = dict.fromkeys(row.time for row in rows if isinstance(row.time, str))
    return [*(notes if timed else []), *(f"step time n/a without {quantity}" for quantity in needs)]


def _fit_text(row: plan.Row) -> str:
    if row.fits:
        return "yes"
    return "no" if not row.fits_device else "not the host" if not row.fits_host else "not the NVMe"


def _fewest_of(setup: plan.Setup, row: plan.Row) -> int | None:
    ranks = fewest_fitting_devices(setup, row.plan)
    return None if ranks is None else ranks * setup.tensor * setup.pipeline


def _roles_text(row: plan.Row) -> str:
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


def plan_as_json(
    setup: plan.Setup, rows: list[plan.Row], *, fewest: bool = False
) -> dict[str, Any]:
    """Everything, in bytes."""
    choice, reason = _recommended_row(setup, rows)
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
        "speeds": speed_sources(setup.machine, setup.measured, setup.plan),
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
                "unique_bytes": unique_state_bytes(plan.sizes_under_plan(setup, row.plan), row.plan)
                * setup.tensor
                * setup.pipeline,
                **({"fewest_devices": _fewest_of(setup, row)} if fewest else {}),
                "bytes": {tier: row.memory.total(tier) for tier in PLACES},
                "roles": {tier: row.memory.by_role(tier) for tier in PLACES},
                "communication_bytes": row.communication_bytes,
                **step_seconds(row),
                "largest_micro_batch": row.largest_micro_batch,
            }
            for row in rows
        ],
        "recommended": choice.plan.label if choice is not None else None,
        "why": reason,
        "ladder": [asdict(rung) for rung in _oom_ladder(setup, rows)],
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
