"""The cost of fp16 and its loss scale, and what would cost less. Pure."""

import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from zeromon.base.units import human_ratio
from zeromon.diagnosis.rule import Match, as_number, rule, setting_of
from zeromon.diagnosis.rules.common import MIN_SHARE, fill_remedy
from zeromon.ring.strategy import Framework
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.focus import MIN_STEPS

_LAST_STEPS = 50
_MIN_STORM_STEPS = 10
_USUAL_WINDOW, _USUAL_HYSTERESIS = 1000, 2
_MIN_TRIES = 3
_MANY_LOST = 5


@rule("ZM401", severity=Severity.WARNING, once=True)
def overflow_storm(run: RunSnapshot) -> Iterable[Match]:
    """fp16 gradients overflow so often that training does not progress. Reported once."""
    for rank in run.ranks:
        skips = [step.skipped for step in rank.steps.recent[-_LAST_STEPS:]]
        skipped = sum(skips)
        if len(skips) < _MIN_STORM_STEPS or skipped < max(5, 0.2 * len(skips)):
            continue
        if scale_tries(rank) is not None:  # the scale fits: it is only tried too often
            continue
        if setting_of(rank, "bf16.enabled") == "true":  # nothing overflows: ZM409 says what is
            continue
        scale = next((e.loss_scale for e in rank.config.engines if e.loss_scale is not None), None)
        at = f"; the loss scale is down to {scale:g}" if scale is not None else ""
        limit = next(
            (s.effective for s in rank.config.settings if s.name.endswith("min_loss_scale")), "1"
        )
        if scale is not None and scale <= (as_number(limit) or 1.0):
            at += ", its floor, and cannot be halved any more"
        newest_steps = [step.step for step in rank.steps.recent[-_LAST_STEPS:] if step.skipped][-3:]
        at += f"; the newest: {', '.join(map(str, newest_steps))}"
        yield Match(
            f"{skipped} of the last {len(skips)} steps were skipped for overflow{at}",
            remedy=_lower_scale(rank, scale, skipped),
            severity=Severity.CRITICAL if all(skips[-_MIN_STORM_STEPS:]) else None,
        )


def _lower_scale(rank: RankSnapshot, scale: float | None, skipped: int) -> Remedy:
    """Begins where the scale has come to, or leaves fp16."""
    hysteresis = as_number(setting_of(rank, "fp16.hysteresis"))
    if hysteresis is not None and hysteresis < 1:
        return fill_remedy("usual_hysteresis", hysteresis=f"{hysteresis:g}", usual=_USUAL_HYSTERESIS)
    power = max(0, int(math.log2(scale))) if scale and scale >= 1 else 12
    initial_power = as_number(setting_of(rank, "fp16.initial_scale_power"))
    lower = f'+ "fp16": {{"initial_scale_power": {power}}}\n  or, where the device has it:\n'
    lower = lower if initial_power is None or power < initial_power else ""
    return fill_remedy("lower_scale", lower=lower, skipped=skipped, advice=_of_the_norm(rank))


def _of_the_norm(rank: RankSnapshot) -> str:
    """Returns the advice where the gradients themselves are too large; clipping follows the overflow."""
    limit = as_number(setting_of(rank, "gradient_clipping"))
    clips = "" if limit else ', and "gradient_clipping": 1.0 against the spikes before an overflow'
    return f"; where the loss grows, too, lower the learning rate{clips}"


@rule("ZM404", once=True)
def loss_scale_settings(run: RunSnapshot) -> Iterable[Match]:
    """The dynamic loss scale skips steps: it tries its limit too often, or began too high."""
    matches = (_scale_tried_often(rank) or _scale_began_high(rank) for rank in run.ranks)
    return filter(None, matches)


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
    window = round(as_number(setting_of(rank, "fp16.loss_scale_window")) or 0)
    if window < 1:
        return None
    slack = max(1, window // 10)
    tries: list[tuple[int, int]] = []
    """The first and the last overflow of each."""
    for number in (n for n, step in enumerate(rank.steps.recent) if step.skipped):
        if tries and number - tries[-1][1] - 1 <= slack:
            tries[-1] = tries[-1][0], number  # the hysteresis of the same
        else:
            tries.append((number, number))
    gaps = [later[0] - earlier[1] - 1 for earlier, later in itertools.pairwise(tries)]
    # Several doublings may pass before one overflows: the gap is then a multiple of the window
    regular = sum(gap > window and (gap - 1) % window <= slack for gap in gaps)
    if regular < max(_MIN_TRIES, 0.75 * len(gaps)):
        return None
    cycles = rank.steps.recent[tries[0][1] + 1 : tries[-1][1] + 1]
    return Tries(len(gaps), sum(step.skipped for step in cycles), len(cycles))


def _scale_tried_often(rank: RankSnapshot) -> Match | None:
    tries = scale_tries(rank)
    if tries is None or tries.lost < 0.01 * tries.steps:
        return None
    share, per_try = tries.lost / tries.steps, tries.lost / tries.times
    window, longer = setting_of(rank, "fp16.loss_scale_window"), _USUAL_WINDOW
    hysteresis_lines = ""
    if per_try > _USUAL_HYSTERESIS:
        hysteresis_lines = f'\n- "hysteresis": {per_try:.0f}\n+ "hysteresis": {_USUAL_HYSTERESIS}'
    remaining = min(per_try, _USUAL_HYSTERESIS)
    later_share = human_ratio(remaining / (longer + 1 + remaining))
    return Match(
        f"{human_ratio(share)} of the steps are skipped: the loss scale doubles until it overflows; "
        f"{tries.times} times in {tries.steps} steps, {per_try:.2g} skipped each time",
        severity=Severity.WARNING if share >= MIN_SHARE else None,
        remedy=fill_remedy(
            "longer_window",
            window=window,
            longer=longer,
            share=later_share,
            hysteresis_lines=hysteresis_lines,
        ),
    )


def _scale_began_high(rank: RankSnapshot) -> Match | None:
    """Matches a run that is known from its first step, and whose scale has settled since."""
    power = as_number(setting_of(rank, "fp16.initial_scale_power"))
    hysteresis = as_number(setting_of(rank, "fp16.hysteresis")) or 1
    lost = sum(1 for _ in itertools.takewhile(lambda step: step.skipped, rank.steps.recent))
    later = rank.steps.recent[lost:]
    if power is None or lost < _MANY_LOST or rank.steps.recent[0].step != 1 or len(later) < MIN_STEPS:
        return None
    if sum(step.skipped for step in later) > MIN_SHARE * len(later):
        return None
    # The first overflows only count the hysteresis down: each one after them halves the scale
    settled_power = max(0, round(power - (lost - hysteresis + 1)))
    return Match(
        f"the first {lost} steps were skipped; then the loss scale had come down from 2^{power:g} "
        f"to 2^{settled_power}",
        remedy=fill_remedy("lower_initial_scale", power=f"{power:g}", settled=settled_power, lost=lost),
    )


@rule("ZM403", once=True)
def half_precision_unused(run: RunSnapshot) -> Iterable[Match]:
    """A device that computes bf16 many times as fast computes in fp32. Reported once."""
    for rank in run.ranks:
        name = rank.machine.device.name if rank.machine.device else ""
        fp32_models = [m for m in rank.config.models if m.get("compute_bytes", 0) == 4]
        if (
            not fp32_models
            or rank.steps.watched_steps < MIN_STEPS
            or not any(chip in name for chip in _HAS_BF16)
        ):
            continue
        if rank.config.process.get("autocast"):
            continue
        strategy, change = rank.sharding_strategy, "half_precision"
        if strategy.is_deepspeed or strategy.framework in (Framework.FSDP1, Framework.FSDP2):
            change += f"_{strategy.framework}"
        remedy = fill_remedy(change, device=rank.device_type)
        yield Match(f"the model computes in fp32 on {name}, which has bf16", rank.rank, remedy)


@rule("ZM406", severity=Severity.WARNING, once=True)
def bf16_emulated(run: RunSnapshot) -> Iterable[Match]:
    """The model computes in bf16 on a device without units for it. Reported once."""
    for rank in run.ranks:
        name = rank.machine.device.name if rank.machine.device else ""
        autocast = rank.config.process.get("autocast") == _BF16
        if not _LACKS_BF16.search(name) or not (
            autocast or any(m.get("compute_dtype") == _BF16 for m in rank.config.models)
        ):
            continue
        form, diff = _diff_to_fp16(rank, autocast=autocast)
        evidence = f"bf16 is emulated on {name}; its compute capability is below 8.0"
        yield Match(evidence, rank.rank, fill_remedy("fp16_for_bf16", form=form, diff=diff))


def _diff_to_fp16(rank: RankSnapshot, *, autocast: bool) -> tuple[ConfigFormat, str]:
    """The configuration format, and the diff from bf16 to fp16."""
    strategy = rank.sharding_strategy
    form, scaler = ConfigFormat.PYTHON, "torch.amp.GradScaler()"
    code = f'with torch.autocast("{rank.device_type}", dtype=torch.{{}}):'
    current = code.format(_BF16) if autocast else "model.to(torch.bfloat16)"
    if not autocast and strategy.is_deepspeed:
        return ConfigFormat.DEEPSPEED, '- "bf16": {"enabled": true}\n+ "fp16": {"enabled": true}'
    if not autocast and strategy.framework in (Framework.FSDP1, Framework.FSDP2):
        is_fsdp1 = strategy.framework is Framework.FSDP1
        form = ConfigFormat.FSDP1 if is_fsdp1 else ConfigFormat.FSDP2
        code = f"MixedPrecision{'' if is_fsdp1 else 'Policy'}(param_dtype=torch.{{}})"
        current, scaler = code.format(_BF16), "ShardedGradScaler()" if is_fsdp1 else scaler
    return form, f"- {current}\n+ {code.format('float16')}\n+ scaler = {scaler}"


_BF16 = "bfloat16"
_LACKS_BF16 = re.compile(
    r"\b(V100S?|T4G?|P100|P40|P4|TITAN (V|RTX|Xp?)|RTX 20\d\d|Quadro RTX|GTX)\b", re.IGNORECASE
)
"""Pascal, Volta and Turing, in the names that NVML gives."""

_HAS_BF16 = ("A100", "A800", "H100", "H200", "H800", "B100", "B200", "GB200", "L40", "A10", "A40")
