"""Chooses the row of a plan: the one policy of ``plan``, ``check`` and fix-a-run.md. Pure.

1. It fits, with the least offload.
2. Where no micro-batch is given, it leaves half of the device for activations, if any such row does.
3. It costs less than the others by a tenth or more: by the seconds of a step, where all are known,
   else by the bytes that a rank sends; with DeepSpeed's settings that make either less.
4. Among rows of about the same cost: the given one, else the lowest stage.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zeromon.base.units import human_bytes, human_seconds
from zeromon.memory.plan import MUCH_LESS, Row, Setup, row_seconds
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES

Key = TypeVar("Key", bound=Hashable)
ROOMY = 0.5
"""Share of a device that model states may take where activations are unknown."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best row, None if nothing fits, and the reasons, one sentence each."""

    row: Row | None
    reasons: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """Settings that make its step shorter: ``"overlap_comm": true``."""


def choose_row(setup: Setup, rows: Sequence[Row]) -> Choice:
    """Returns the best of *rows* by the policy of this module."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return Choice(None, (_why_nothing_fits(rows),))
    nearest_tier = min(map(_offload_distance, fitting))
    candidates = [row for row in fitting if _offload_distance(row) == nearest_tier]
    if not setup.micro_batch_given:
        roomy = [row for row in candidates if row.device_bytes <= ROOMY * setup.usable_bytes]
        candidates = roomy or [min(candidates, key=lambda row: row.device_bytes)]
    equal = [candidates[at] for at in lowest_costs(step_costs(dict(enumerate(candidates))))]
    preset = next((row for row in rows if row.given), None)
    # Without this, a lower stage of equal cost replaces the one that the user gives
    chosen = preset if preset in equal and preset else min(equal, key=lambda row: row.plan.stage)
    reasons = [
        *_why_not_others(setup, chosen, rows),
        *([_preset_beside_chosen(preset, chosen)] if preset is not None else []),
        *_cost_sentences(chosen),
        *_roomier_sentence(setup, chosen, equal),
    ]
    return Choice(chosen, tuple(reasons), tuple(tuning_texts(chosen)))


def tuning_texts(chosen: Row) -> Iterator[str]:
    """Yields the settings in which the tuned variant of *chosen* differs from it."""
    if chosen.tuned is None:
        return
    if chosen.tuned.plan.grad_buckets != chosen.plan.grad_buckets:
        yield '"overlap_comm": true'
    if chosen.tuned.plan.reduces_whole_buckets != chosen.plan.reduces_whole_buckets:
        yield '"use_multi_rank_bucket_allreduce": false'


def _offload_distance(row: Row) -> int:
    """Returns how far the model states are from the device."""
    return PLACES.index(row.plan.optimizer_on) + PLACES.index(row.plan.params_on)


def step_costs(rows: Mapping[Key, Row]) -> dict[Key, float]:
    """Returns what a step costs: its seconds where all *rows* have them, else the bytes sent."""
    timed = all(isinstance(row.time, StepTime) for row in rows.values())
    tuned = {key: row.tuned or row for key, row in rows.items()}
    return {key: row_seconds(row) if timed else row.communication_bytes for key, row in tuned.items()}


def lowest_costs(costs: Mapping[Key, float]) -> list[Key]:
    """Returns the keys whose costs are about equal to the lowest."""
    return [key for key, cost in costs.items() if cost * MUCH_LESS <= min(costs.values())]


def _why_nothing_fits(rows: Sequence[Row]) -> str:
    fitting_device = [row for row in rows if row.fits_device and row.device_bytes]
    if fitting_device:
        leanest = min(fitting_device, key=lambda row: row.host_bytes)
        name, disk = leanest.plan.label, leanest.memory.total("nvme")
        if leanest.fits_host:
            return (
                f"nothing fits: {name} takes {human_bytes(disk)} of NVMe per rank, more than there is; "
                "a larger drive, more hosts or more devices would help"
            )
        return (
            f"nothing fits: {name} takes {human_bytes(leanest.host_bytes)} of host memory per rank; "
            "more host memory, more hosts or more devices would help"
        )
    smallest = min(rows, key=lambda row: row.device_bytes or math.inf)
    return (
        f"nothing fits: {smallest.plan.label} still needs {human_bytes(smallest.device_bytes)}; "
        "more devices, a smaller micro-batch or activation checkpointing would help"
    )


def _why_not_others(setup: Setup, chosen: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yields why no row below *chosen* was taken."""
    order = _offload_distance(chosen), chosen.plan.stage
    lower = [row for row in rows if (_offload_distance(row), row.plan.stage) < order]
    if not lower:
        if not chosen.plan.stage:
            yield "everything fits without partitioning"
        return
    if _offload_distance(chosen):
        yield "nothing fits without offload"
    if too_large := [row for row in lower if not row.fits_device]:
        yield f"{too_large[-1].plan.label} would need {human_bytes(too_large[-1].device_bytes)}"
        return
    if not setup.micro_batch_given and lower[-1].device_bytes > ROOMY * setup.usable_bytes:
        needs = human_bytes(lower[-1].device_bytes)
        yield f"{lower[-1].plan.label} leaves too little for activations: it takes {needs}"


def _preset_beside_chosen(preset: Row, chosen: Row) -> str:
    """Returns why *chosen* is chosen and not what was given."""
    if preset is chosen:
        return f"it is {GIVEN}, and nothing that fits costs less"
    name = f"{GIVEN}, {preset.plan.label},"
    if not preset.device_bytes:
        return f"what {name} needs of a device is unknown"
    if not preset.fits_device:
        return f"{name} does not fit: it needs {human_bytes(preset.device_bytes)}"
    if not preset.fits_host:
        return f"{name} does not fit: it takes {human_bytes(preset.host_bytes)} of the host a rank"
    if not preset.fits_nvme:
        return f"{name} does not fit: it takes {human_bytes(preset.memory.total('nvme'))} of NVMe a rank"
    if _offload_distance(preset) > _offload_distance(chosen):
        return f"{name} fits too, and offloads without need"
    seconds = row_seconds(preset.tuned or preset)
    if math.isfinite(seconds) and seconds > row_seconds(chosen.tuned or chosen):
        return f"{name} fits too, and a step takes {human_seconds(seconds)}"
    sent = (preset.tuned or preset).communication_bytes
    if sent > (chosen.tuned or chosen).communication_bytes:
        return f"{name} fits too, and sends {human_bytes(sent)} per step"
    return f"{name} fits too, and takes {human_bytes(preset.device_bytes)}"


GIVEN = "the given strategy"
"""The row of the configuration, the options or the run."""


def _cost_sentences(chosen: Row) -> Iterator[str]:
    """Yields the bytes and the seconds of a step, and what the better setting gains."""
    tuned_row = chosen.tuned or chosen
    yield f"a rank sends {human_bytes(tuned_row.communication_bytes)} per step"
    if not isinstance(tuned_row.time, StepTime):
        if tuned_row is not chosen:
            yield f"without that setting it sends {human_bytes(chosen.communication_bytes)}"
        return
    interval = f"{human_seconds(tuned_row.time.least)} to {human_seconds(tuned_row.time.most)}"
    yield f"a step takes about {human_seconds(tuned_row.time.seconds)} ({interval})"
    if tuned_row is not chosen:
        extra = human_bytes(tuned_row.device_bytes - chosen.device_bytes)
        setting = "that setting" if len(list(tuning_texts(chosen))) == 1 else "these settings"
        yield f"without {setting} {human_seconds(row_seconds(chosen))}, and {extra} less memory"


def _roomier_sentence(setup: Setup, chosen: Row, equal: Sequence[Row]) -> Iterator[str]:
    """Yields a row of about the same cost that takes much less memory, where memory is short."""
    if chosen.device_bytes <= ROOMY * setup.usable_bytes and chosen.largest_micro_batch is None:
        return
    roomiest = max(equal, key=lambda row: (row.largest_micro_batch or 0, -row.device_bytes))
    limit, mine = roomiest.largest_micro_batch, chosen.largest_micro_batch
    if limit is not None and mine is not None and limit > mine:
        yield f"{roomiest.plan.label} costs about as much, and takes {limit} sequences instead of {mine}"
    elif (share := roomiest.device_bytes / max(1, chosen.device_bytes)) < MUCH_LESS:
        yield f"{roomiest.plan.label} costs about as much, and takes {share * 100:.0f} % of the memory"
