"""Forecasts whether, when and why memory runs out, from step peaks and a capacity. Pure.

The risk is the highest of four:

- *growth*: a trend that is monotone (Mann-Kendall on the medians of blocks), larger than the noise, and
  not levelling off. Slope: Theil-Sen; interval: the spread of the slopes between blocks.
- *spike*: the largest steps as a generalized Pareto distribution over a threshold, fitted by probability
  weighted moments (Hosking & Wallis 1987), and its probability to exceed the capacity.
- *fragmentation*: reserved bytes grow, or reach the capacity with retries, while allocated bytes do not.
- *static*: the memory in use leaves no margin.

Warm-up, a change of the batch size, evaluation and checkpoints are jumps, not trends: a jump is not
monotone over blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from zeromon.snapshot import Pool, RankSnapshot, RiskCause, StepSummary
from zeromon.snapshot.levels import OOM
from zeromon.snapshot.memory import Risk

HORIZON_STEPS = 1000
"""Growth that fills the capacity within these steps alarms (:data:`zeromon.snapshot.levels.OOM`)."""

_WARM_UP_STEPS = 10
_WINDOWS = (32, 64, 128, 256, 512)
_BLOCKS = 8
_MIN_CONCORDANT = 25  # of 28 pairs of blocks: p < 0.001 where there is no trend
_MIN_RISE_OF_NOISE = 4.0
_MIN_RISE_OF_CAPACITY = 0.001
_MAX_WINDOWS_AHEAD = 4  # a trend is extrapolated over at most four times its window
_GOES_ON = 6.0
"""Growth that would level off within so many times its rise so far is none."""
_LONG_WINDOW = 256
"""Growth over so many samples is no warm-up."""
_ONSET_STEPS, _ONSET_NOISE = 3.0, 6.0
"""How far, in steps of growth or in deviations, a sample of a trend lies from its line at most."""
_SPIKE_WINDOW = 512
_MIN_SPIKE_SAMPLES = 64
_SPIKE_STEPS = HORIZON_STEPS
_MIN_EVENTS = 8
_MAX_SHAPE = 0.5
_ALARM_CHANCE = 0.8
_ALARM = OOM.warning
_NO_ALARM = 0.9 * _ALARM
"""The highest risk of a growth that is too young for a forecast."""
SAFE_LEVEL, _ALARM_LEVEL = 0.90, 0.97
"""A level of at most SAFE_LEVEL is no risk."""

_SAME_GROWTH = 4.0
"""A growth before a trend is a part of it while their slopes differ by less than this factor."""
_SAME_ONSET_STEPS = 20
_MAX_BEND = 0.25
"""By this share of a growth its steps times the slope may differ from it."""

Samples = Sequence[tuple[int, int]]
"""(step, bytes), in order of steps."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A trend: slope and range of slopes in bytes per step, its last level, its window in samples."""

    slope: float
    slope_low: float
    slope_high: float
    now_bytes: float
    """The level at the end of the trend, bytes."""
    middle_bytes: float
    """The level at the end of the trend without the crests, bytes."""
    noise: float
    """The deviation of the samples from it, bytes."""
    window: int
    since_step: int
    """The first step from which on the use follows the trend."""
    grown_bytes: float
    """Since then."""
    was_level: bool = False
    """The use was level before that step."""

    def steps_left(self, capacity_bytes: float) -> tuple[float, float, float]:
        """Returns the (expected, soonest, latest) number of steps until *capacity_bytes*."""
        headroom = max(0.0, capacity_bytes - self.now_bytes)
        steps_latest = headroom / self.slope_low if self.slope_low > 0 else math.inf
        return headroom / self.slope, headroom / self.slope_high, steps_latest


# ---- growth ---------------------------------------------------------------------------------------


def soonest_growth(samples: Samples, capacity_bytes: int) -> Growth | None:
    """Returns the trend that fills *capacity_bytes* soonest, over several windows; None without one."""
    candidates = []
    for window in _WINDOWS:
        if len(samples) < window:
            break
        trend = _growth_in_window(samples[-window:], capacity_bytes)
        if trend is not None:
            steps_left = trend.steps_left(capacity_bytes)[0]
            if steps_left <= _MAX_WINDOWS_AHEAD * window:
                candidates.append((steps_left, _with_onset_step(samples, trend)))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def steady_growth(samples: Samples) -> Growth | None:
    """Returns the newest trend, however far the capacity is; None without one.

    A warm-up rises as steadily for a while: growth that did not begin after a level must last longer.
    """
    trends = []
    for window in _WINDOWS:
        if len(samples) >= window:
            in_window = samples[-window:]
            rise = in_window[-1][1] - in_window[0][1]
            trend = _growth_in_window(in_window, round(in_window[-1][1] + _GOES_ON * rise))
            trends += [trend] if trend is not None else []
    if not trends:
        return None
    current = _with_onset_step(samples, trends[0])
    return current if current.was_level or trends[-1].window >= _LONG_WINDOW else None


def early_growth(peaks: Samples, last_step: int) -> Growth | None:
    """Returns the trend of a run that ends after a few steps, by its *peaks*; None without one.

    They must have risen by the same bytes in each step up to *last_step*. Those of the first steps rise
    when the optimizer makes its states, and a batch that is longer than all before may raise them.
    """
    line = [(step, nbytes) for step, nbytes in peaks if _STATES_STEPS < step <= last_step]
    rises = [b - a for (_, a), (_, b) in pairwise(line)]
    steps = [step for step, _ in line]
    if len(rises) < _MIN_RISES or steps != list(range(last_step - len(rises), last_step + 1)):
        return None
    slope = median(rises)
    if max(rises) - min(rises) > _MAX_UNEVENNESS * slope:
        return None
    return Growth(
        slope=slope,
        slope_low=min(rises),
        slope_high=max(rises),
        now_bytes=line[-1][1],
        middle_bytes=line[-1][1],
        noise=0.0,
        window=len(line),
        since_step=steps[0],
        grown_bytes=line[-1][1] - line[0][1],
    )


_STATES_STEPS, _MIN_RISES, _MAX_UNEVENNESS = 2, 3, 0.1


def _with_onset_step(samples: Samples, trend: Growth) -> Growth:
    """Returns *trend*, prolonged to the steps before its window, with its begin."""
    first_index, was_level = _first_on_line(samples, trend)
    segment: Growth | None = trend
    # A growth that was slower or faster for a while leaves the line as a level does
    while segment is not None and first_index >= _WINDOWS[0]:
        segment = _growth_before(samples[:first_index], segment)
        if segment is not None:
            first_index = min(
                _first_on_line(samples[:first_index], segment)[0], first_index - _WINDOWS[0]
            )
    since_step, used = samples[first_index] if first_index < len(samples) else samples[0]
    grown = max(0.0, samples[-1][1] - used)
    return replace(trend, since_step=since_step, grown_bytes=grown, was_level=was_level)


def _first_on_line(samples: Samples, trend: Growth) -> tuple[int, bool]:
    """Returns from which index on *samples* lie on the line of *trend*; True if they lay above before.

    Before a trend that slows down, they lie below.
    """
    end_step = samples[-1][0]
    bound = max(_ONSET_STEPS * trend.slope, _ONSET_NOISE * trend.noise)
    for index in range(len(samples) - 1, -1, -1):
        step, used = samples[index]
        above = used - (trend.middle_bytes + trend.slope * (step - end_step))
        if abs(above) > bound:
            return index + 1, above > 0
    return 0, False


def _growth_before(samples: Samples, trend: Growth) -> Growth | None:
    """Returns the growth at the end of *samples* that *trend* goes on; None where there was none."""
    in_window = samples[-_WINDOWS[0] :]
    earlier = _growth_in_window(in_window, in_window[-1][1])  # it has not levelled off: it went on
    if earlier is None or not 1 / _SAME_GROWTH < earlier.slope / trend.slope < _SAME_GROWTH:
        return None
    return earlier


def _growth_in_window(samples: Samples, capacity_bytes: int) -> Growth | None:
    size = len(samples) // _BLOCKS
    # What fills no block is cut at the old end: the newest samples decide the level
    samples = samples[len(samples) - size * _BLOCKS :]
    blocks = [samples[i : i + size] for i in range(0, len(samples), size)]
    levels = [median([used for _, used in block]) for block in blocks]
    rising = sum(b > a for i, a in enumerate(levels) for b in levels[i + 1 :])
    if rising < _MIN_CONCORDANT:
        return None
    centres = [(block[0][0] + block[-1][0]) / 2 for block in blocks]
    # Without the last condition, samples of one step number in two blocks divide by zero
    slopes = sorted(
        (levels[j] - levels[i]) / (centres[j] - centres[i])
        for i in range(_BLOCKS)
        for j in range(i + 1, _BLOCKS)
        if centres[j] > centres[i]
    )
    if not slopes:
        return None
    slope = median(slopes)
    end_step = samples[-1][0]
    base_level = median(
        [level - slope * (centre - end_step) for level, centre in zip(levels, centres, strict=True)]
    )
    residuals = [used - (base_level + slope * (step - end_step)) for step, used in samples]
    noise = 1.4826 * median([abs(r) for r in residuals])
    rise = slope * (end_step - samples[0][0])
    if slope <= 0 or rise < max(_MIN_RISE_OF_NOISE * noise, _MIN_RISE_OF_CAPACITY * capacity_bytes):
        return None
    if _is_levelling_off(levels, capacity_bytes) or _rises_by_jumps(levels):
        return None
    crest = sorted(residuals)[int(0.95 * (len(residuals) - 1))]
    tenth = len(slopes) // 10
    return Growth(
        slope=slope,
        slope_low=slopes[tenth],
        slope_high=max(slopes[-1 - tenth], slope),
        now_bytes=base_level + max(0.0, crest),
        middle_bytes=base_level,
        noise=noise,
        window=len(samples),
        since_step=samples[0][0],
        grown_bytes=rise,
    )


def _is_levelling_off(levels: Sequence[float], capacity_bytes: float) -> bool:
    """Returns whether growth slows down so much that it stays below the capacity.

    When growth shrinks by the factor r from half to half, what is still to come is d r / (1 - r), d
    being the growth of the second half.
    """
    midpoint = len(levels) // 2
    first_rise = levels[midpoint - 1] - levels[0]
    second_rise = levels[-1] - levels[midpoint]
    if second_rise <= 0:
        return True
    ratio = second_rise / first_rise if first_rise > 0 else 1.0
    return ratio < 1 and levels[-1] + second_rise * ratio / (1 - ratio) < capacity_bytes


def _rises_by_jumps(levels: Sequence[float]) -> bool:
    """Returns whether one or two jumps cause most of the rise, such as a larger batch or a new phase."""
    steps = sorted(b - a for a, b in pairwise(levels))
    rise = levels[-1] - levels[0]
    return steps[-1] > 0.5 * rise or steps[-1] + steps[-2] > 0.65 * rise


# ---- spikes ---------------------------------------------------------------------------------------


def spike_probability(samples: Samples, capacity_bytes: int, steps: int = _SPIKE_STEPS) -> float:
    """Returns the probability that one of the next *steps* exceeds the capacity.

    The estimate uses the largest of the last steps. Consecutive steps over the threshold are one event,
    with its largest step: a phase of evaluation or a larger batch is one event, not many.
    """
    values = [used for _, used in samples[-_SPIKE_WINDOW:]]
    ordered, count = sorted(values), len(values)
    if count < _MIN_SPIKE_SAMPLES:
        return 0.0
    threshold, typical, largest = ordered[int(0.9 * count)], ordered[count // 2], ordered[-1]
    if capacity_bytes - largest > 3 * (largest - typical):
        return 0.0  # too far for an extrapolation from the samples
    # The largest excess of each run of values over the threshold
    events: list[int] = []
    inside = False
    for value in values:
        if value <= threshold:
            inside = False
        elif inside:
            events[-1] = max(events[-1], value - threshold)
        else:
            events.append(value - threshold)
            inside = True
    excesses = sorted(events)
    if len(excesses) < _MIN_EVENTS:
        return 0.0
    shape, scale = fit_generalized_pareto(excesses)
    once = _tail_probability(capacity_bytes - threshold, shape, scale) * len(excesses) / count
    return 1 - (1 - once) ** steps


def fit_generalized_pareto(excesses: Sequence[float]) -> tuple[float, float]:
    """Returns (shape, scale) of the generalized Pareto distribution of ascending *excesses*.

    Probability weighted moments, Hosking & Wallis 1987: a0 is the mean, a1 the mean of
    y (1 - F(y)) with F at plotting positions (i - 0.35) / n.
    """
    n = len(excesses)
    a0 = sum(excesses) / n
    a1 = sum(y * (1 - (i + 0.65) / n) for i, y in enumerate(excesses)) / n
    if a0 <= 2 * a1 or a1 <= 0:  # a tail without a finite mean
        return _MAX_SHAPE, max(a0 * (1 - _MAX_SHAPE), 1.0)
    shape = min(_MAX_SHAPE, 2 - a0 / (a0 - 2 * a1))
    # At least a byte, as the tail divides by the scale
    return shape, max(2 * a0 * a1 / (a0 - 2 * a1), 1.0)


def _tail_probability(excess: float, shape: float, scale: float) -> float:
    """Returns P(Y > excess) of the generalized Pareto distribution."""
    if excess <= 0:
        return 1.0
    # The limit at shape 0, where -1 / shape has no value
    if abs(shape) < 1e-6:
        return math.exp(-excess / scale)
    base = 1 + shape * excess / scale
    # A negative shape bounds the tail: beyond its end the power of a negative base is complex
    return float(base ** (-1 / shape)) if base > 0 else 0.0


# ---- one memory -----------------------------------------------------------------------------------


def risk_of_level(used_bytes: float, capacity_bytes: float) -> float:
    """Returns the risk 0..1 of a level: 0 up to 90 % of the capacity, 0.5 at 97 %, 1 at 100 %."""
    if capacity_bytes <= 0:
        return 0.0
    level = used_bytes / capacity_bytes
    if level <= _ALARM_LEVEL:
        return _clamp_ratio((level - SAFE_LEVEL) / (_ALARM_LEVEL - SAFE_LEVEL) * _ALARM)
    return _clamp_ratio(_ALARM + (level - _ALARM_LEVEL) / (1 - _ALARM_LEVEL) * (1 - _ALARM))


def risk_of_growth(steps_left: float) -> float:
    """Returns the risk 0..1 of growth: 1 at 0 steps, 0.5 at :data:`HORIZON_STEPS`, lower beyond."""
    if steps_left <= HORIZON_STEPS:
        return 1 - (1 - _ALARM) * steps_left / HORIZON_STEPS
    return _ALARM * HORIZON_STEPS / steps_left


def risk_of_spike(chance: float) -> float:
    """Returns the risk 0..1 of a spike with probability *chance*: 0.5, an alarm, at 0.8."""
    if chance < _ALARM_CHANCE:
        return _ALARM * chance / _ALARM_CHANCE
    return _ALARM + (1 - _ALARM) * (chance - _ALARM_CHANCE) / (1 - _ALARM_CHANCE)


def forecast_risk(pool: Pool, samples: Samples, capacity_bytes: int) -> Risk | None:
    """Returns the risk that *pool* runs out; None while its capacity or its use is unknown."""
    valid = [(step, used) for step, used in samples if used >= 0]
    if capacity_bytes <= 0 or not valid:
        return None
    past_warm_up = [sample for sample in valid if sample[0] > _WARM_UP_STEPS]
    peak = max(used for _, used in valid[-20:])
    level = risk_of_level(peak, capacity_bytes)
    risk = Risk(
        pool=pool,
        ratio=level,
        cause=RiskCause.STATIC if level else RiskCause.NONE,
        used_bytes=peak,
        capacity_bytes=capacity_bytes,
    )
    trend = soonest_growth(past_warm_up, capacity_bytes)
    if trend is not None:
        grown = _risk_of_trend(risk, RiskCause.GROWTH, trend, capacity_bytes)
        return grown if grown.ratio >= risk.ratio else _risk_with_past(risk, trend)
    if (trend := steady_growth(past_warm_up)) is not None:
        capped = min(risk_of_growth(trend.steps_left(capacity_bytes)[0]), _NO_ALARM)
        return replace(_risk_with_past(risk, trend), ratio=max(level, capped))
    spiked = risk_of_spike(spike_probability(past_warm_up, capacity_bytes))
    return replace(risk, ratio=spiked, cause=RiskCause.SPIKE) if spiked > risk.ratio else risk


def _risk_with_past(risk: Risk, trend: Growth) -> Risk:
    """Returns *risk* with what *trend* says of the past: the capacity is not foretold."""
    return replace(
        risk,
        cause=RiskCause.GROWTH,
        growth_bytes_per_step=trend.slope,
        since_step=trend.since_step,
        grown_bytes=round(trend.grown_bytes),
    )


def _risk_of_trend(risk: Risk, cause: RiskCause, trend: Growth, capacity_bytes: int) -> Risk:
    """Returns *risk* as that of *trend*, until *capacity_bytes*."""
    expected, steps_soonest, steps_latest = trend.steps_left(capacity_bytes)
    return replace(
        _risk_with_past(risk, trend),
        ratio=risk_of_growth(expected),
        cause=cause,
        steps_left=expected,
        steps_soonest=steps_soonest,
        steps_latest=steps_latest if steps_latest != math.inf else None,
    )


def device_memory_risk(
    recent: Sequence[StepSummary], capacity_bytes: int, retries: int = 0
) -> Risk | None:
    """Returns the risk of the device: of allocated bytes, or of fragmentation and non-torch memory.

    The caching allocator frees cached blocks before it fails, so a reserved size at the capacity is no
    alarm by itself. *retries*: number of allocations so far that had to free cached blocks first.
    """
    allocated = [(s.step, s.allocated_bytes) for s in recent]
    risk = forecast_risk(Pool.DEVICE, allocated, capacity_bytes)
    reserved = [(s.step, s.reserved_bytes) for s in recent if s.reserved_bytes >= 0]
    if risk is None or not reserved or risk.ratio >= OOM.warning:
        return risk
    non_torch = [(s.step, s.other_bytes) for s in recent if s.other_bytes >= 0]
    for cause, samples in ((RiskCause.FRAGMENTATION, reserved), (RiskCause.NON_TORCH, non_torch)):
        past_warm_up = [sample for sample in samples if sample[0] > _WARM_UP_STEPS]
        is_reserved = cause == RiskCause.FRAGMENTATION
        # Contexts, NCCL and other processes may take what is beside the allocated peak
        peak_bytes = 0 if is_reserved else max(s.allocated_bytes for s in recent[-20:])
        limit = max(1, capacity_bytes - peak_bytes)
        trend = soonest_growth(past_warm_up, limit)
        # Reserved bytes follow allocated bytes that grow: that is no fragmentation
        if trend is None or (is_reserved and risk.cause == RiskCause.GROWTH):
            continue
        grown = _risk_of_trend(risk, cause, trend, limit)
        if grown.ratio > risk.ratio:
            risk = replace(grown, used_bytes=samples[-1][1])
    last_reserved, used = reserved[-1][1], allocated[-1][1]
    if (
        retries > 0
        and last_reserved >= _ALARM_LEVEL * capacity_bytes
        and used < 0.9 * last_reserved
        and risk.ratio < 0.6
    ):
        risk = replace(risk, ratio=0.6, cause=RiskCause.FRAGMENTATION, used_bytes=last_reserved)
    return risk


def with_earlier_onset(risk: Risk, earlier: Risk | None, recent: Sequence[StepSummary]) -> Risk:
    """Returns *risk* since the onset of *earlier*, where its growth has been a straight line from there.

    A trend looks back over the *recent* steps only, so that an older growth seems to begin with them.
    """
    slope = risk.growth_bytes_per_step
    if slope is None or earlier is None:
        return risk
    if recent[0].step < risk.since_step <= earlier.since_step + _SAME_ONSET_STEPS:
        return risk  # an onset among the steps, which more steps after it tell more exactly
    grown = risk.used_bytes - (earlier.used_bytes - earlier.grown_bytes)
    if abs(slope * (recent[-1].step - earlier.since_step) - grown) > _MAX_BEND * grown:
        return risk
    return replace(risk, since_step=earlier.since_step, grown_bytes=grown)


def risks_of_rank(rank: RankSnapshot) -> tuple[Risk, ...]:
    """Returns the risk of a rank's device. The host's risk is the node's: see :func:`host_risk`."""
    if rank.memory.device is None:
        return ()
    risk = device_memory_risk(rank.steps.recent, device_capacity_bytes(rank), rank.memory.device.retries)
    return () if risk is None else (risk,)


def host_risk(ranks: Sequence[RankSnapshot]) -> Risk | None:
    """Returns the risk of the host's memory, which the ranks of a run share.

    The use is the sum over the ranks at each step that all ranks have, because ranks of one run step
    together. The capacity is the current sum plus the memory that the kernel still has available.
    """
    alive = [
        rank for rank in ranks if rank.status.alive and rank.memory.rss_bytes >= 0 and rank.steps.recent
    ]
    if not alive:
        return None
    capacity = host_capacity_bytes(alive)
    rss_by_step = [
        {s.step: s.rss_bytes for s in rank.steps.recent if s.rss_bytes >= 0} for rank in alive
    ]
    common = sorted(set.intersection(*(set(steps) for steps in rss_by_step)))
    sums = [(step, sum(steps[step] for steps in rss_by_step)) for step in common]
    risk = forecast_risk(Pool.HOST, sums, capacity)
    if risk is None or risk.growth_bytes_per_step is None:
        return risk
    growth_steps = [step for step in common if step >= risk.since_step]
    grown = {
        rank.rank: steps[growth_steps[-1]] - steps[growth_steps[0]]
        for rank, steps in zip(alive, rss_by_step, strict=True)
    }
    peak = max(grown.values())
    growing = tuple(number for number, nbytes in grown.items() if nbytes >= _MAIN_SHARE * peak)
    return replace(risk, growing_ranks=growing if len(growing) < len(alive) else ())


_MAIN_SHARE = 0.5
"""A rank that grows by less than this share of the one that grows most is not called growing."""


def device_capacity_bytes(rank: RankSnapshot) -> int:
    """Returns the bytes that the allocator may reserve: reserved bytes plus headroom; -1: unknown."""
    memory = rank.memory.device
    if memory is None or memory.capacity_bytes < 0:
        return -1
    return memory.reserved_bytes + max(0, memory.headroom_bytes)


def host_capacity_bytes(alive_ranks: Sequence[RankSnapshot]) -> int:
    """Returns the bytes that *alive_ranks* may hold together; -1 where unknown."""
    headrooms = [
        rank.memory.host.headroom_bytes
        if rank.memory.host is not None and rank.memory.host.headroom_bytes >= 0
        else rank.memory.host_available_bytes
        for rank in alive_ranks
    ]
    valid = [headroom for headroom in headrooms if headroom >= 0]
    return sum(rank.memory.rss_bytes for rank in alive_ranks) + min(valid) if valid else -1


def _clamp_ratio(value: float) -> float:
    return min(1.0, max(0.0, value))
