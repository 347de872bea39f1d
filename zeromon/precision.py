"""What fp16 and its loss scale cost, and what would cost less. Pure; see :mod:`zeromon.remedies`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zeromon.remedies import LEAST_SHARE, LEAST_STEPS, as_number, setting
from zeromon.snapshot import Finding, RankSnapshot, Remedy, RunSnapshot
from zeromon.units import human_ratio

_LAST_STEPS = 50
_LEAST_OF_A_STORM = 10
_USUAL_WINDOW, _USUAL_HYSTERESIS = 1000, 2
_LEAST_TRIES = 3
_MANY_LOST = 5


def overflow_storm(run: RunSnapshot) -> Iterable[Finding]:
    """fp16 gradients overflow so often that training stands still. Said once."""
    for rank in run.ranks:
        last = [step.skipped for step in rank.recent[-_LAST_STEPS:]]
        skipped = sum(last)
        if len(last) < _LEAST_OF_A_STORM or skipped < max(5, 0.2 * len(last)):
            continue
        if scale_tries(rank) is not None:  # the scale fits: it is only tried too often
            continue
        scale = next((e.loss_scale for e in rank.engines if e.loss_scale is not None), None)
        at = f"; the loss scale is down to {scale:g}" if scale is not None else ""
        floor = next((s.effective for s in rank.settings if s.name.endswith("min_loss_scale")), "1")
        if scale is not None and scale <= (as_number(floor) or 1.0):
            at += ", its floor: it cannot be halved any more"
        newest = [step.step for step in rank.recent[-_LAST_STEPS:] if step.skipped][-3:]
        at += f"; the newest: {', '.join(map(str, newest))}"
        yield Finding(
            rule="overflow_storm",
            code="ZM401",
            severity="critical" if all(last[-_LEAST_OF_A_STORM:]) else "warning",
            text=f"{skipped} of the last {len(last)} steps were skipped for overflow{at}",
            remedy=_lower_scale(rank, scale, skipped),
        )
        return


def _lower_scale(rank: RankSnapshot, scale: float | None, skipped: int) -> Remedy:
    """Begins where the scale has come to, or leaves fp16."""
    hysteresis = as_number(setting(rank, "fp16.hysteresis"))
    if hysteresis is not None and hysteresis < 1:
        return Remedy(
            cause="the scale is halved when the hysteresis has been counted down to 1, and this one "
            "begins below: it is never halved",
            dialect="DeepSpeed JSON",
            diff=f'- "hysteresis": {hysteresis:g}\n+ "hysteresis": {_USUAL_HYSTERESIS}',
            effect="the scale comes down, and steps are applied again",
            price="none",
        )
    power = max(0, int(math.log2(scale))) if scale and scale >= 1 else 12
    return Remedy(
        cause="gradients times the loss scale do not fit into fp16",
        dialect="DeepSpeed JSON",
        diff=f'+ "fp16": {{"initial_scale_power": {power}}}\n'
        '  or, where the device has it:\n- "fp16": {"enabled": true}\n+ "bf16": {"enabled": true}',
        effect=f"the {skipped} steps are not lost",
        price="none; bf16 has fewer bits of mantissa and needs no scale",
    )


def loss_scale_settings(run: RunSnapshot) -> Iterable[Finding]:
    """The dynamic loss scale costs steps: it tries its limit too often, or began too high. Said once."""
    for rank in run.ranks:
        found = _scale_tried(rank) or _scale_began_high(rank)
        if found is not None:
            yield found
            return


class Tries(NamedTuple):
    """A dynamic loss scale that is doubled until gradients overflow."""

    times: int
    lost: int
    """Steps that were skipped for it."""
    steps: int


def scale_tries(rank: RankSnapshot) -> Tries | None:
    """The times that the loss scale was tried too large; None where overflows have other causes.

    DeepSpeed doubles it when ``loss_scale_window`` + 1 steps have gone by without an overflow. What
    overflows then is skipped, ``hysteresis`` times until the scale is halved again. So an overflow that
    comes that many steps after the last one is a try.
    """
    window = round(as_number(setting(rank, "fp16.loss_scale_window")) or 0)
    if window < 1:
        return None
    slack = max(1, window // 10)
    tries: list[tuple[int, int]] = []
    """The first and the last overflow of each."""
    for number in (n for n, step in enumerate(rank.recent) if step.skipped):
        if tries and number - tries[-1][1] - 1 <= slack:
            tries[-1] = tries[-1][0], number  # the hysteresis of the same
        else:
            tries.append((number, number))
    gaps = [after[0] - before[1] - 1 for before, after in itertools.pairwise(tries)]
    regular = sum(gap > window and (gap - 1) % window <= slack for gap in gaps)
    if regular < max(_LEAST_TRIES, 0.75 * len(gaps)):
        return None
    cycles = rank.recent[tries[0][1] + 1 : tries[-1][1] + 1]
    return Tries(len(gaps), sum(step.skipped for step in cycles), len(cycles))


def _scale_tried(rank: RankSnapshot) -> Finding | None:
    tries = scale_tries(rank)
    if tries is None or tries.lost < 0.01 * tries.steps:
        return None
    share, each = tries.lost / tries.steps, tries.lost / tries.times
    window, longer = setting(rank, "fp16.loss_scale_window"), _USUAL_WINDOW
    diff = f'- "loss_scale_window": {window}\n+ "loss_scale_window": {longer}'
    if each > _USUAL_HYSTERESIS:
        diff += f'\n- "hysteresis": {each:.0f}\n+ "hysteresis": {_USUAL_HYSTERESIS}'
    left = min(each, _USUAL_HYSTERESIS)
    return Finding(
        rule="loss_scale_settings",
        code="ZM404",
        severity="warning" if share >= LEAST_SHARE else "info",
        text=f"{human_ratio(share)} of the steps are skipped because the loss scale is doubled until it "
        f"overflows: {tries.times} times in {tries.steps} steps, {each:.2g} skipped each time",
        remedy=Remedy(
            cause=f"it is doubled after every {window} steps without an overflow",
            dialect="DeepSpeed JSON",
            diff=diff,
            effect=f"{human_ratio(left / (longer + 1 + left))} of the steps are skipped",
            price=f"a scale that one bad batch has halved is doubled again only after {longer} steps",
        ),
    )


def _scale_began_high(rank: RankSnapshot) -> Finding | None:
    """Of a run that was seen from its first step, and has found its scale since."""
    power = as_number(setting(rank, "fp16.initial_scale_power"))
    hysteresis = as_number(setting(rank, "fp16.hysteresis")) or 1
    lost = sum(1 for _ in itertools.takewhile(lambda step: step.skipped, rank.recent))
    since = rank.recent[lost:]
    if power is None or lost < _MANY_LOST or rank.recent[0].step != 1 or len(since) < LEAST_STEPS:
        return None
    if sum(step.skipped for step in since) > LEAST_SHARE * len(since):
        return None
    settled = max(0, round(power - (lost - hysteresis + 1)))
    return Finding(
        rule="loss_scale_settings",
        code="ZM404",
        severity="info",
        text=f"the first {lost} steps were skipped, until the loss scale had come down from 2^{power:g} "
        f"to 2^{settled}",
        remedy=Remedy(
            cause="the scale that it begins with is too large for these gradients",
            dialect="DeepSpeed JSON",
            diff=f'- "initial_scale_power": {power:g}\n+ "initial_scale_power": {settled}',
            effect=f"the next run does not lose {lost} steps",
            price="none",
        ),
    )


def half_precision_unused(run: RunSnapshot) -> Iterable[Finding]:
    """A device that computes bf16 many times as fast is given fp32."""
    for rank in run.ranks:
        name = rank.device_stats.name if rank.device_stats else ""
        whole = [f for f in rank.models if int(f.get("compute_bytes", 0)) == 4]
        if not whole or rank.steps < LEAST_STEPS or not any(part in name for part in _HAS_BF16):
            continue
        yield Finding(
            rule="half_precision_unused",
            code="ZM403",
            severity="info",
            rank=rank.rank,
            text=f"parameters are computed with in fp32 on {name}, which has bf16",
            remedy=Remedy(
                cause="no mixed precision is configured (autocast is not seen from here)",
                dialect="DeepSpeed JSON"
                if rank.strategy.startswith("deepspeed")
                else "Python (FSDP2)",
                diff='+ "bf16": {"enabled": true}'
                if rank.strategy.startswith("deepspeed")
                else "+ fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
                effect="half the bytes of gathers and activations, and matrix products on tensor cores",
                price="fewer bits of mantissa: check the loss",
            ),
        )
        return


_HAS_BF16 = ("A100", "A800", "H100", "H200", "H800", "B100", "B200", "GB200", "L40", "A10", "A40")


RULES: tuple[Callable[[RunSnapshot], Iterable[Finding]], ...] = (
    overflow_storm,
    loss_scale_settings,
    half_precision_unused,
)
