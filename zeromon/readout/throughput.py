"""Tokens and samples a second, model FLOPs utilization, and how far a run is. Pure.

A rank reports what its own model was called with. Ranks of tensor and pipeline parallelism work on the
same batch, which counts once; ranks of context parallelism have parts of the same sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from zeromon.memory.devices import peak_flops
from zeromon.memory.models import model_of, ranks_of_dim, whole_parts
from zeromon.memory.seconds import training_flops
from zeromon.readout.breakdown import WINDOW
from zeromon.readout.figures import run_step_seconds
from zeromon.readout.text import pause_seconds, roughly
from zeromon.ring.events import Padding
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Dim
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.step import settled
from zeromon.units import human_count, human_ratio

_UNTOLD = "neither a wrapped model nor a DataLoader has told its batches"
_DIVIDED = "no wrapper and no device mesh says how the ranks divide a batch"
_NO_TOKENS = "batches hold no tokens: the model got no input_ids and no matrix of integers"
_STANDS = "no step ends"


def token_ranks(rank: RankSnapshot) -> int | None:
    """Ranks that have tokens of their own; None where unknown."""
    ranks = rank.data_parallel_ranks
    return None if ranks is None else ranks * ranks_of_dim(rank, Dim.CP)


def samples_per_step(run: RunSnapshot) -> float | str:
    """Samples of a step of all ranks, mean of all steps, or why they are unknown."""
    return _of_all(run, "samples", _mean)


def tokens_per_step(run: RunSnapshot) -> float | str:
    """Tokens of a step of all ranks, mean of all steps, or why they are unknown."""
    return _of_all(run, "tokens", _mean)


def samples_per_second(run: RunSnapshot) -> float | str:
    """Samples a second of all ranks in the last steps, or why they are unknown."""
    return _STANDS if pause_seconds(run) is not None else _of_all(run, "samples", _rate)


def tokens_per_second(run: RunSnapshot) -> float | str:
    """Tokens a second of all ranks in the last steps, or why they are unknown."""
    return _STANDS if pause_seconds(run) is not None else _of_all(run, "tokens", _rate)


def own_part(rank: RankSnapshot, name: str) -> float | None:
    """The rank's own part of all ``samples`` or ``tokens``: ranks that get the same batch divide it."""
    count = getattr(rank.batches, name, 0)
    if rank.data_parallel_ranks is None or not count:
        return None
    same = ranks_of_dim(rank, Dim.TP)
    return count / (same if name == "tokens" else same * ranks_of_dim(rank, Dim.CP))


def _no_tokens(run: RunSnapshot) -> str:
    if run.origin:
        return "a Prometheus has their totals: rate(zeromon_tokens_total)"
    return _NO_TOKENS if any(rank.batches for rank in run.ranks) else _UNTOLD


def _of_all(
    run: RunSnapshot, name: str, read: Callable[[RankSnapshot, str], float | None]
) -> float | str:
    """The mean of the ranks that know their ``samples`` or ``tokens``, times those with their own."""
    known = [(rank, value) for rank in run.ranks if (value := read(rank, name)) is not None]
    if not known:
        return _no_tokens(run) if name == "tokens" else _UNTOLD
    rank, _ = known[0]
    ranks = token_ranks(rank) if name == "tokens" else rank.data_parallel_ranks
    return _DIVIDED if ranks is None else fmean(value for _, value in known) * ranks


def _mean(rank: RankSnapshot, name: str) -> float | None:
    total = getattr(rank.batches, name, 0)
    return total / rank.batches.steps if rank.batches is not None and total else None


def _rate(rank: RankSnapshot, name: str) -> float | None:
    steps = settled(step for step in rank.recent[-WINDOW:] if getattr(step, name) >= 0)
    seconds = sum(step.seconds for step in steps)
    return sum(getattr(step, name) for step in steps) / seconds if seconds > 0 else None


# ---- model FLOPs utilization ----------------------------------------------------------------------


def flops_per_token(run: RunSnapshot) -> float | str:
    """The FLOPs that the training of a token needs, by the shapes of the model, or why it is unknown.

    What activation checkpointing repeats does not count.
    """
    first = next((rank for rank in run.ranks if rank.models), None)
    if first is not None and len(first.models) != 1 and first.pipeline is None:
        return "the rank trains several models"
    parts, why = whole_parts(run)
    if why or first is None:
        return why
    if any("matrix_numel" not in part for part in parts):
        return "the model does not say how many of its parameters a token uses"
    weights = sum(part.get("matrix_numel", 0) for part in parts)
    trained = sum(map(_trained, parts))
    attention = sum(part.get("attention", 0) for part in parts)
    return training_flops(weights, trained, attention, _length(run))


def _trained(part: ModelMetadata) -> float:
    """Matrices that are trained, by the share of all parameters that are."""
    share = part.get("trainable", 0) / max(1, part.get("numel", 0))
    return part.get("matrix_numel", 0) * min(1.0, share)


def _length(run: RunSnapshot) -> float:
    """Mean length of the sequence that a token is in."""
    known = [rank.batches for rank in run.ranks if rank.batches is not None]
    positions = sum(each.positions for each in known)
    parts = ranks_of_dim(run.ranks[0], Dim.CP) if run.ranks else 1
    return parts * sum(each.pairs for each in known) / positions if positions else 0.0


def device_peak(rank: RankSnapshot) -> float | str:
    """Dense peak of the rank's device in the dtype of its matrices, FLOP/s, or why it is unknown."""
    name = rank.device_stats.name if rank.device_stats is not None else ""
    model = model_of(rank) or ModelMetadata()
    dtype = rank.process.get("autocast") or model.get("compute_dtype", "")
    return peak_flops(name or rank.device.partition(":")[0], dtype)


def mfu(run: RunSnapshot, rate: float | str | None = None, peak: float = 0.0) -> float | str:
    """Model FLOPs utilization, or why it is unknown; *rate* and *peak*: what the user says of them."""
    rate = tokens_per_second(run) if rate is None else rate
    flops = flops_per_token(run)
    if isinstance(rate, str) or isinstance(flops, str) or not run.ranks:
        return rate if isinstance(rate, str) else str(flops)
    of_device = peak or device_peak(run.ranks[0])
    if isinstance(of_device, str):
        return of_device
    if run.ranks[0].world_size < 1:
        return "the number of ranks is not known"
    used = flops * rate / (of_device * run.ranks[0].world_size)
    if used <= 1:
        return used
    return f"error: it would be over 100 % of {human_count(of_device / 1e12)} TFLOP/s a device"


def mfu_ratio(run: RunSnapshot) -> float | None:
    """Model FLOPs utilization; None where it is unknown."""
    used = mfu(run)
    return used if isinstance(used, float) else None


def throughput_text(run: RunSnapshot) -> str:
    """``12,300 tokens/s, 96 samples/s, MFU 41 %``, each that is unknown with its reason."""
    tokens, samples, used = tokens_per_second(run), samples_per_second(run), mfu(run)
    each = tokens_per_step(run)
    parts = []
    if isinstance(tokens, float):
        parts.append(f"{human_count(tokens)} tokens/s{padding_text(run)}")
        parts.append(f"{human_count(each)} tokens a step" if isinstance(each, float) else "")
    if isinstance(samples, float):
        parts.append(f"{human_count(samples)} samples/s")
    said = [*filter(None, parts)]
    if isinstance(tokens, str):
        said.append(f"tokens/s n/a: {tokens}")
    if isinstance(used, float):
        said.append(f"MFU {human_ratio(used)}")
    elif isinstance(tokens, float):
        said.append(f"MFU n/a: {used}")
    return ", ".join(said)


def padding_text(run: RunSnapshot) -> str:
    """Text that says whether tokens include padding; "" where the model gets no attention mask."""
    kinds = {rank.batches.padding for rank in run.ranks if rank.batches is not None}
    if Padding.INCLUDED in kinds:
        return " (padding included)"
    return " (without padding)" if Padding.LEFT_OUT in kinds else ""


# ---- progress -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int
    of: int
    by: str
    """The source of the number of steps."""
    left_seconds: float | None
    """None at the end, and while no step ends."""


def progress(run: RunSnapshot) -> Progress | None:
    """How far the last rank is; None where nothing says how many steps there are.

    The time that is left is by the step time that views show, so that they agree with it.
    """
    found = [(one, rank) for rank in run.ranks if (one := _goal(run, rank)) is not None]
    if not found:
        return None
    (step, of, by), _ = min(found, key=lambda one: one[0][0])
    each = run_step_seconds(run.ranks)
    moves = step < of and not run.ended and pause_seconds(run) is None
    left = (of - step) * each if each and moves else None
    return Progress(step=step, of=of, by=by, left_seconds=left)


def planned_steps(run: RunSnapshot, rank: RankSnapshot) -> int | None:
    """The number of the last step, as the rank counts; of the epoch where only that is known."""
    known = _goal(run, rank)
    return None if known is None else rank.step + known[1] - known[0]


def _goal(run: RunSnapshot, rank: RankSnapshot) -> tuple[int, int, str] | None:
    """The rank's step, of how many, and what says so."""
    goal = rank.goal
    step, of, by = rank.step, run.planned_steps, "--steps"
    if not of:
        step, by = rank.step + goal.get("before", 0), goal.get("by", "")
        micro_steps = rank.recent[-1].micro_steps if rank.recent else 0
        of = goal.get("steps", 0) or math.ceil(goal.get("batches", 0) / max(1, micro_steps))
    return (step, of, by) if of and 0 <= step <= of else None


def progress_text(run: RunSnapshot) -> str:
    """``step 120 of 1,000, about 12 min left``; what is not known is n/a."""
    known = progress(run)
    if known is None:
        return "n/a: neither a trainer, a DataLoader with a length nor --steps says how many steps"
    unit = " of this epoch" if known.by == "DataLoader" else ""
    text = f"step {human_count(known.step)} of {human_count(known.of)}{unit}"
    if known.left_seconds is None:
        return text
    return f"{text}, about {roughly(known.left_seconds)} left"
