"""Tokens and samples a second, model FLOPs utilization, and how far a run is. Pure.

A rank reports what its own model was called with. Ranks of tensor and pipeline parallelism work on the
same batch, which counts once; ranks of context parallelism have parts of the same sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from zeromon.base.units import human_count, human_ratio
from zeromon.memory.models import model_of, ranks_of_dim, whole_model_parts
from zeromon.memory.seconds import training_flops
from zeromon.memory.speeds import peak_flops
from zeromon.readout.breakdown import WINDOW
from zeromon.readout.figures import run_step_seconds
from zeromon.readout.text import pause_seconds, rough_time
from zeromon.ring.codes import Padding
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Dim
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.step import settled_steps

_UNTOLD = "no batch size seen from a wrapped model or DataLoader"
_DIVIDED = "no wrapper and no device mesh says how the ranks divide a batch"
_NO_TOKENS = "batches hold no tokens"
_STANDS = "no step ends"


def token_ranks(rank: RankSnapshot) -> int | None:
    """Ranks that have tokens of their own; None where unknown."""
    ranks = rank.data_parallel_ranks
    return None if ranks is None else ranks * ranks_of_dim(rank, Dim.CP)


def samples_per_step(run: RunSnapshot) -> float | str:
    """Samples of a step of all ranks, mean of all steps, or why they are unknown."""
    return _of_all(run, "samples", _mean_per_step)


def tokens_per_step(run: RunSnapshot) -> float | str:
    """Tokens of a step of all ranks, mean of all steps, or why they are unknown."""
    return _of_all(run, "tokens", _mean_per_step)


def samples_per_second(run: RunSnapshot) -> float | str:
    """Samples a second of all ranks in the last steps, or why they are unknown."""
    return _STANDS if pause_seconds(run) is not None else _of_all(run, "samples", _rate_per_second)


def tokens_per_second(run: RunSnapshot) -> float | str:
    """Tokens a second of all ranks in the last steps, or why they are unknown."""
    return _STANDS if pause_seconds(run) is not None else _of_all(run, "tokens", _rate_per_second)


def own_part(rank: RankSnapshot, name: str) -> float | None:
    """The rank's own part of all ``samples`` or ``tokens``: ranks that get the same batch divide it."""
    count = getattr(rank.training.batches, name, 0)
    if rank.data_parallel_ranks is None or not count:
        return None
    sharers = ranks_of_dim(rank, Dim.TP)
    return count / (sharers if name == "tokens" else sharers * ranks_of_dim(rank, Dim.CP))


def _no_tokens_reason(run: RunSnapshot) -> str:
    if run.origin:
        return "a Prometheus has their totals: rate(zeromon_tokens_total)"
    return _NO_TOKENS if any(rank.training.batches for rank in run.ranks) else _UNTOLD


def _of_all(
    run: RunSnapshot, name: str, measure: Callable[[RankSnapshot, str], float | None]
) -> float | str:
    """The mean of the ranks that know their ``samples`` or ``tokens``, times those with their own."""
    measured = [(rank, value) for rank in run.ranks if (value := measure(rank, name)) is not None]
    if not measured:
        return _no_tokens_reason(run) if name == "tokens" else _UNTOLD
    rank, _ = measured[0]
    ranks = token_ranks(rank) if name == "tokens" else rank.data_parallel_ranks
    return _DIVIDED if ranks is None else fmean(value for _, value in measured) * ranks


def _mean_per_step(rank: RankSnapshot, name: str) -> float | None:
    total = getattr(rank.training.batches, name, 0)
    return total / rank.training.batches.steps if rank.training.batches is not None and total else None


def _rate_per_second(rank: RankSnapshot, name: str) -> float | None:
    steps = settled_steps(step for step in rank.steps.recent[-WINDOW:] if getattr(step, name) >= 0)
    seconds = sum(step.seconds for step in steps)
    return sum(getattr(step, name) for step in steps) / seconds if seconds > 0 else None


# ---- model FLOPs utilization ----------------------------------------------------------------------


def flops_per_token(run: RunSnapshot) -> float | str:
    """The FLOPs that the training of a token needs, by the shapes of the model, or why it is unknown.

    What activation checkpointing repeats does not count.
    """
    rank = next((rank for rank in run.ranks if rank.config.models), None)
    if rank is not None and len(rank.config.models) != 1 and rank.communication.pipeline is None:
        return "the rank trains several models"
    shards, reason = whole_model_parts(run)
    if reason or rank is None:
        return reason
    if any("matrix_numel" not in shard for shard in shards):
        return "the model does not say how many of its parameters a token uses"
    weights = sum(shard.get("matrix_numel", 0) for shard in shards)
    trained = sum(map(_trained_numel, shards))
    attention = sum(shard.get("attention", 0) for shard in shards)
    return training_flops(weights, trained, attention, _mean_sequence_length(run))


def _trained_numel(shard: ModelMetadata) -> float:
    """Matrices that are trained, by the share of all parameters that are."""
    share = shard.get("trainable", 0) / max(1, shard.get("numel", 0))
    return shard.get("matrix_numel", 0) * min(1.0, share)


def _mean_sequence_length(run: RunSnapshot) -> float:
    batches = [rank.training.batches for rank in run.ranks if rank.training.batches is not None]
    positions = sum(batch.positions for batch in batches)
    splits = ranks_of_dim(run.ranks[0], Dim.CP) if run.ranks else 1
    return splits * sum(batch.pairs for batch in batches) / positions if positions else 0.0


def device_peak(rank: RankSnapshot) -> float | str:
    """Dense peak of the rank's device in the dtype of its matrices, FLOP/s, or why it is unknown."""
    name = rank.machine.device.name if rank.machine.device is not None else ""
    model = model_of(rank) or ModelMetadata()
    dtype = rank.config.process.get("autocast") or model.get("compute_dtype", "")
    return peak_flops(name or rank.device.partition(":")[0], dtype)


def mfu_of_run(run: RunSnapshot, rate: float | str | None = None, peak: float = 0.0) -> float | str:
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
    used = mfu_of_run(run)
    return used if isinstance(used, float) else None


def throughput_text(run: RunSnapshot) -> str:
    """``12,300 tokens/s, 96 samples/s, MFU 41 %``, each that is unknown with its reason."""
    tokens, samples, used = tokens_per_second(run), samples_per_second(run), mfu_of_run(run)
    mean = tokens_per_step(run)
    items = []
    if isinstance(tokens, float):
        items.append(f"{human_count(tokens)} tokens/s{padding_text(run)}")
        items.append(f"{human_count(mean)} tokens a step" if isinstance(mean, float) else "")
    if isinstance(samples, float):
        items.append(f"{human_count(samples)} samples/s")
    sentences = [*filter(None, items)]
    if isinstance(tokens, str):
        sentences.append(f"tokens/s n/a: {tokens}")
    if isinstance(used, float):
        sentences.append(f"MFU {human_ratio(used)}")
    elif isinstance(tokens, float):
        sentences.append(f"MFU n/a: {used}")
    return ", ".join(sentences)


def padding_text(run: RunSnapshot) -> str:
    """Text that says whether tokens include padding; "" where the model gets no attention mask."""
    kinds = {rank.training.batches.padding for rank in run.ranks if rank.training.batches is not None}
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


def how_far(run: RunSnapshot) -> Progress | None:
    """How far the first rank is, as in every view; None where nothing says how many steps there are.

    The time that is left is by the step time that views show, so that they agree with it.
    """
    goals = [(goal, rank) for rank in run.ranks if (goal := _goal_of_rank(run, rank)) is not None]
    if not goals:
        return None
    (step, of, by), _ = max(goals, key=lambda goal: goal[0][0])
    step_seconds = run_step_seconds(run.ranks)
    moves = step < of and not run.ended and pause_seconds(run) is None
    seconds_left = (of - step) * step_seconds if step_seconds and moves else None
    return Progress(step=step, of=of, by=by, left_seconds=seconds_left)


def planned_steps(run: RunSnapshot, rank: RankSnapshot) -> int | None:
    """The number of the last step, as the rank counts; of the epoch where only that is known."""
    goal = _goal_of_rank(run, rank)
    return None if goal is None else rank.steps.last_step + goal[1] - goal[0]


def _goal_of_rank(run: RunSnapshot, rank: RankSnapshot) -> tuple[int, int, str] | None:
    """The rank's step, of how many, and what says so."""
    goal = rank.config.goal
    step, of, by = rank.steps.last_step, run.planned_steps, "--steps"
    if not of:
        step, by = rank.steps.last_step + goal.get("before", 0), goal.get("by", "")
        micro_steps = rank.steps.recent[-1].micro_steps if rank.steps.recent else 0
        of = goal.get("steps", 0) or math.ceil(goal.get("batches", 0) / max(1, micro_steps))
    return (step, of, by) if of and 0 <= step <= of else None


def progress_text(run: RunSnapshot) -> str:
    """``step 120 of 1,000, about 12 min left``; "" where nothing says how many steps there are."""
    reached = how_far(run)
    if reached is None:
        return ""
    unit = " of this epoch" if reached.by == "DataLoader" else ""
    sentence = f"step {human_count(reached.step)} of {human_count(reached.of)}{unit}"
    if reached.left_seconds is None:
        return sentence
    return f"{sentence}, about {rough_time(reached.left_seconds)} left"
