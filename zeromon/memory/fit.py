"""Which micro-batch to launch next, and which fits: peak = fixed + each x micro-batch, measured. Pure.

A launch measures the peak of the host and of the fullest device. Two launches of one stage give the
line. Other stages have the same line, moved by the difference of their states in the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from zeromon.memory.plan import Row, Setup, lowest_costs, predict_row, step_costs
from zeromon.memory.predict import During
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import ShardPlan, ZeroStage
from zeromon.snapshot.noise import Estimate, half_width

MAX_LAUNCHES, MAX_VIRTUAL_LAUNCHES = 4, 8
"""By default; one on virtual devices harms nothing where it runs out of memory."""
HOST, DEVICE = "host", "device"
RESERVE = {HOST: 0.02, DEVICE: 0.06}
"""Share of a memory that stays free: pages of libraries that the kernel takes back and needs again at
once; on a device what fragmentation takes at a longer run."""

_FIRST_JUMP = 8
"""The second launch is at most so many times larger than the first: one point is no line."""

_CLOSE = 0.8
_FAR, _SHORT, _SHORTER = 2, 0.06, 0.1
"""More than twice the largest measured size is far: that launch leaves so much of the memory free, and
the last does not. After one that was stopped more is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One launch of the user's command."""

    stage: str
    """"" where the command has no ``{stage}``."""
    micro_batch: int
    devices: int = 0
    """0 where the command has no ``{devices}``."""
    accumulation: int = 1
    outcome: str = ""
    """"" where it was measured; else why it was stopped."""
    slower: bool = False
    """It was stopped because it loses, with its memory measured."""
    killed: bool = False
    """It ended for lack of memory before it could be stopped."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Pool -> bytes at the peak: of all processes on the host, of one rank on a device."""
    rooms: dict[str, int] = field(default_factory=dict)
    """Pool -> bytes that they may hold."""
    base_bytes: int = 0
    """On the host when the ranks began: what no micro-batch changes."""
    own_bytes: int = 0
    """On the host, of zeromon fit itself: the command alone has them, too."""
    run: str = ""
    seconds: float | None = None
    """Median of a step."""
    seconds_error: float | None = None
    seconds_freedom: float = 0.0
    exposed_seconds: float | None = None
    samples: float | None = None
    """Samples of a step of all ranks."""
    tokens: float | None = None
    steps: int = 0
    wall_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """True if it ran within its memory."""
        return self.slower or not self.outcome

    def headroom(self, pool: str) -> int | None:
        """Bytes of *pool* that were left at the peak; None where it did not fit, or was not measured."""
        return self.rooms[pool] - self.peaks[pool] if self.fits and pool in self.peaks else None

    @property
    def estimate(self) -> Estimate | None:
        """Seconds of a step for each sample of a rank."""
        if self.seconds is None:
            return None
        step_estimate = Estimate(self.seconds, self.seconds_error, self.seconds_freedom)
        return step_estimate.scaled(1 / (self.micro_batch * self.accumulation))


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of a pool by micro-batch."""

    fixed: float
    each: float

    def at(self, micro_batch: int) -> float:
        """Bytes at *micro_batch*."""
        return self.fixed + self.each * micro_batch


def fitted_line(trials: Sequence[Trial], pool: str) -> Line | None:
    """Returns the line of the largest measured trials of one stage; None without two sizes.

    The largest decide: an allocator takes small batches from what it holds already. Sizes that differ
    little count together, because their peaks have noise.
    """
    points = sorted({t.micro_batch: t.peaks[pool] for t in trials if t.fits and pool in t.peaks}.items())
    if len(points) < 2:
        return None
    top = [point for point in points if point[0] >= _CLOSE * points[-1][0]]
    small, low = points[max(0, len(points) - len(top) - 1)]
    large, high = fmean(size for size, _ in top), fmean(peak for _, peak in top)
    # Noise may give the larger size the smaller peak: on a falling line every size fits
    slope = max(0.0, (high - low) / (large - small))
    return Line(high - slope * large, slope)


def usable_pool_bytes(trials: Sequence[Trial], pool: str) -> float | None:
    """Returns the bytes of *pool* that a trial may take, by the least room that any has seen."""
    limits = [t.rooms[pool] for t in trials if t.rooms.get(pool, 0) > 0]
    return min(limits) * (1 - RESERVE[pool]) if limits else None


def largest_fitting_size(
    trials: Sequence[Trial], sizes: Sequence[int], moved: Mapping[str, float] | None = None
) -> int | None:
    """Returns the largest of *sizes* that fits by the lines of *trials*, 0 for none; None if unknown.

    *moved*: pool -> bytes that another stage takes beyond that of *trials*.
    """
    pools = [pool for pool in (HOST, DEVICE) if any(pool in t.peaks for t in trials)]
    limits = [(pool, fitted_line(trials, pool), usable_pool_bytes(trials, pool)) for pool in pools]
    if not limits or any(trend is None for _, trend, _ in limits):
        return None
    # A room that no launch has seen limits nothing
    fitting = [
        size
        for size in sizes
        if all(
            limit is None
            or (trend is not None and trend.at(size) + (moved or {}).get(pool, 0.0) <= limit)
            for pool, trend, limit in limits
        )
    ]
    return max(fitting, default=0)


def second_launch_size(launch: Trial, sizes: Sequence[int]) -> int | None:
    """Returns the size of the second launch: the largest that surely fits, by the first alone.

    A sample takes at most what the first launch took beyond the bytes of processes without a model.
    """
    # On a device the bytes without a model are unknown: the whole peak counts for the samples
    bound = min(
        (
            limit // peak * launch.micro_batch
            if pool == DEVICE
            else launch.micro_batch
            + (limit - peak) * launch.micro_batch // max(1, peak - launch.base_bytes)
            for pool, peak in launch.peaks.items()
            if (limit := round(usable_pool_bytes([launch], pool) or 0)) and peak
        ),
        default=launch.micro_batch * 2,
    )
    max_size = min(max(bound, launch.micro_batch + 1), launch.micro_batch * _FIRST_JUMP)
    larger = [size for size in sizes if size > launch.micro_batch]
    return max((size for size in larger if size <= max_size), default=min(larger, default=None))


def largest_that_ran(trials: Sequence[Trial]) -> int:
    """Returns the largest micro-batch that ran, 0 for none."""
    return max((t.micro_batch for t in trials if t.fits), default=0)


def next_size(trials: Sequence[Trial], sizes: Sequence[int], launches_left: int) -> int | None:
    """Returns what to launch next of one stage, of *launches_left*; None: nothing is to be learnt."""
    if launches_left <= 0 or not sizes:
        return None
    if not trials:
        return sizes[0]
    too_large = min((t.micro_batch for t in trials if not t.fits), default=1 << 60)
    open_sizes = [size for size in sizes if largest_that_ran(trials) < size < too_large]
    if not open_sizes or not largest_that_ran(trials):
        return None
    measured = [t for t in trials if t.fits]
    if len({t.micro_batch for t in measured}) < 2:
        # One measured size is no line: between it and the one that failed, only halving is left
        if too_large < 1 << 60:
            return open_sizes[len(open_sizes) // 2]
        return second_launch_size(measured[0], sizes)
    goal = largest_fitting_size(measured, sizes)
    if goal is None:
        return None
    if goal in open_sizes:
        if too_large < 1 << 60:
            return _size_leaving_free(_SHORTER, measured, open_sizes)
        if launches_left > 1 and goal > _FAR * largest_that_ran(trials):  # far beyond what was measured
            return _size_leaving_free(_SHORT, measured, open_sizes)
        return goal
    if goal < too_large:
        return None
    # The line says that more fits than what failed: far below, another phase had the peak
    low = largest_that_ran(trials)
    if too_large > _FAR * low:
        return min(open_sizes, key=lambda size: abs(size * size - low * too_large))
    return _size_leaving_free(_SHORTER, measured, open_sizes)


def _size_leaving_free(share: float, trials: Sequence[Trial], sizes: Sequence[int]) -> int:
    """The largest of *sizes* that leaves a *share* of each memory free by the line."""
    free = {pool: share * (usable_pool_bytes(trials, pool) or 0.0) for pool in RESERVE}
    return largest_fitting_size(trials, sizes, free) or sizes[0]


def next_device_count(trials: Sequence[Trial], counts: Sequence[int]) -> int | None:
    """Returns which of *counts* to launch next, by bisection; None: the fewest that fit are known."""
    # More devices never take more memory of each, and a smaller launch takes less time
    too_few = max((t.devices for t in trials if not t.fits), default=0)
    # Of these counts alone: an earlier search may have had others
    enough = min((t.devices for t in trials if t.fits and t.devices in counts), default=counts[-1] + 1)
    open_counts = [count for count in counts if too_few < count < enough]
    return open_counts[(len(open_counts) - 1) // 2] if open_counts else None


def loses_beyond_noise(mine: Estimate, fastest: Estimate) -> bool:
    """Returns whether *mine* seconds a sample exceed *fastest* by more than the noise of both."""
    noise = half_width(mine, fastest)
    return noise is not None and mine.value - fastest.value > noise


# ---- the stages of a fit side by side -----------------------------------------------------------

_NEAR = 0.85
"""From this share of a memory on, a line is not extended far."""
_NAMED = {
    "0": ("", 0), "1": ("", 1), "2": ("", 2), "3": ("", 3), "ddp": ("ddp", 0),
    "fsdp2": ("fsdp2", 3), "fsdp2-zero2": ("fsdp2", 2), "fsdp1-full": ("fsdp1", 3),
    "fsdp1-grad-op": ("fsdp1", 2), "full_shard": ("fsdp1", 3), "shard_grad_op": ("fsdp1", 2),
    "no_shard": ("ddp", 0), "zero0": ("deepspeed", 0), "zero1": ("deepspeed", 1),
    "zero2": ("deepspeed", 2), "zero3": ("deepspeed", 3),
}  # fmt: skip
"""Name of a stage in a command -> framework ("": that of the run) and stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage at the largest micro-batch that fits."""

    name: str
    largest: int | None
    """0: none fits beside zeromon fit; None: unknown."""
    alone: int | None = None
    """The size that fits by the line when zeromon fit does not run beside it, where that is more."""
    measured: bool
    """A launch of this stage and size has run."""
    why: str = ""
    """Why figures are unknown."""
    peaks: dict[str, float] = field(default_factory=dict)
    rooms: dict[str, float] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    """Role -> predicted bytes of one rank."""
    seconds: float | None = None
    exposed_seconds: float | None = None
    samples: float | None = None
    tokens: float | None = None

    @property
    def advised(self) -> int | None:
        """The micro-batch to use."""
        return self.alone or self.largest

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of all ranks."""
        return _count_per_second(self.samples, self.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks."""
        return _count_per_second(self.tokens, self.seconds)


def least_memory_first(names: Sequence[str]) -> list[str]:
    """Returns *names*, the stage that needs the least memory first, and unknown ones last."""
    return sorted(names, key=lambda name: -_NAMED.get(name.lower(), ("", -1))[1])


def rows_of_stages(names: Sequence[str], setup: Setup | None) -> dict[str, Row]:
    """Returns stage -> predicted row, of the known stages in *names*; *setup*: that of the first."""
    if setup is None:
        return {}
    plans = {name: _plan_of_stage(setup, name) for name in names[1:]} | {names[0]: setup.plan}
    return {name: predict_row(setup, plan) for name, plan in plans.items() if plan is not None}


def cheapest_first(names: Sequence[str], rows: Mapping[str, Row]) -> list[str]:
    """Returns *names* by the policy of :mod:`zeromon.memory.plan`, without rows by what is sharded."""
    costs, ordered = step_costs(rows), []
    while costs:
        ordered.append(min(lowest_costs(costs), key=lambda name: rows[name].plan.stage))
        del costs[ordered[-1]]
    unknown = [name for name in names if name not in rows]
    return ordered + sorted(unknown, key=lambda name: _NAMED.get(name.lower(), ("", 9))[1])


def next_stage(trials: Sequence[Trial], names: Sequence[str], first: str) -> str | None:
    """Returns the next stage of *names* to launch, after *first*; None: the cheapest is known."""
    # The run of the first tells what the others cost
    if all(t.stage != first for t in trials):
        return first
    fitting = {t.stage for t in trials if t.fits}
    before = names[: min((names.index(name) for name in fitting if name in names), default=len(names))]
    return next((name for name in before if all(t.stage != name for t in trials)), None)


def cheapest_trial(trials: Sequence[Trial], names: Sequence[str]) -> Trial | None:
    """Returns the cheapest that fits: by seconds if all are timed; of about equal ones by *names*."""
    fitting = {t.stage: t for t in trials if t.fits and t.stage in names}
    seconds = {name: t.seconds for name, t in fitting.items() if t.seconds}
    equal = lowest_costs(seconds) if len(seconds) == len(fitting) else list(fitting)
    return fitting[min(equal, key=names.index)] if equal else None


def stages_of_trials(
    names: Sequence[str], trials: Sequence[Trial], sizes: Sequence[int], setup: Setup | None, cause: str
) -> list[Stage]:
    """Returns the stages; *setup*: of a run of the first one, None with *cause* where unknown."""
    baseline = [t for t in trials if t.stage == names[0]]
    stages = []
    base = predict_row(setup, setup.plan) if setup is not None else None
    for name in names:
        runs = [t for t in trials if t.stage == name]
        target = _plan_of_stage(setup, name) if setup is not None and name != names[0] else None
        if name == names[0] and setup is not None and base is not None and len(names) > 1:
            stages.append(_moved_stage(name, runs, baseline, sizes, setup, base, base))
        elif name == names[0]:
            stages.append(_ran_stage(name, runs, sizes, base))
        elif setup is None or base is None or target is None:
            reason = cause or f"the plan has no arithmetic for {name!r}"
            stages.append(replace(_ran_stage(name, runs, sizes, None), why="" if runs else reason))
        else:
            stages.append(
                _moved_stage(name, runs, baseline, sizes, setup, base, predict_row(setup, target))
            )
    return stages


def recommend_fastest_stage(stages: Sequence[Stage]) -> Stage | None:
    """Returns the stage with the most samples a second at its largest micro-batch; None if none fits.

    A measured figure within 2 % of a predicted one wins.
    """
    fitting = [s for s in stages if s.largest]
    timed = [s for s in fitting if s.samples_per_second is not None]
    if not timed:
        return max(fitting, key=lambda s: (s.measured, s.largest or 0), default=None)
    return max(timed, key=lambda s: (s.samples_per_second or 0.0) * (1.02 if s.measured else 1.0))


def _plan_of_stage(setup: Setup, name: str) -> ShardPlan | None:
    framework, level = _NAMED.get(name.lower(), (None, 0))
    if framework is None:
        return None
    base, stage = setup.plan, ZeroStage(level)
    framework = framework or base.framework
    if framework in ("ddp", "fsdp1", "fsdp2"):
        # DDP partitions nothing: its partitioned stages are those of FSDP2, and FSDP's stage 0 is DDP
        framework = "ddp" if not stage else "fsdp2" if framework == "ddp" else framework
    return replace(base, framework=framework, stage=stage, reshards=stage == ZeroStage.PARAMETERS)


def _ran_stage(name: str, runs: Sequence[Trial], sizes: Sequence[int], base: Row | None) -> Stage:
    """A stage by its own launches."""
    size = largest_that_ran(runs)
    if not size:
        failed = next((t.outcome for t in runs if t.outcome), "")
        return Stage(
            name=name, largest=0 if failed else None, measured=bool(failed), why=failed or "no launch"
        )
    trial = next(t for t in runs if t.micro_batch == size and t.fits)
    fits, size_alone = largest_fitting_size(runs, sizes), _size_without_fit(runs, sizes, size)
    note = f"more may fit: {fits} by the line" if not size_alone and fits and fits > size else ""
    if trial.seconds is None:
        note = "seconds: fewer than three steps ended in time"
    return replace(_stage_of_trial(trial, base, note), alone=size_alone)


def _size_without_fit(runs: Sequence[Trial], sizes: Sequence[int], size: int) -> int | None:
    """Size that fits in the memory of zeromon fit, too, if *size* nearly fills the rest; else None."""
    trend, limit = fitted_line(runs, HOST), usable_pool_bytes(runs, HOST)
    if trend is None or limit is None or trend.at(size) < _NEAR * limit:
        return None
    fit_bytes = max(t.own_bytes for t in runs)
    fitting = largest_fitting_size(runs, sizes, {HOST: -fit_bytes})
    return fitting if fitting is not None and fitting > size else None


def _stage_of_trial(trial: Trial, base: Row | None, note: str = "") -> Stage:
    return Stage(
        name=trial.stage,
        largest=trial.micro_batch,
        measured=True,
        why=note,
        peaks=dict(trial.peaks),
        rooms=dict(trial.rooms),
        roles=_role_bytes(base),
        seconds=trial.seconds,
        exposed_seconds=trial.exposed_seconds,
        samples=trial.samples,
        tokens=trial.tokens,
    )


def _role_bytes(prediction: Row | None) -> dict[str, int]:
    return {} if prediction is None else prediction.memory.by_role("device")


def _moved_stage(
    name: str, runs: Sequence[Trial], baseline: Sequence[Trial], sizes: Sequence[int],
    setup: Setup, base: Row, target: Row,
) -> Stage:  # fmt: skip
    """A stage by the launches of the first one, moved by the difference of their states."""
    extra = _difference_of_states(base, target, "device")
    pool = DEVICE if any(DEVICE in t.peaks for t in baseline) else HOST
    moved = {pool: extra * (1 if pool == DEVICE else setup.ranks_per_host)}
    if pool == DEVICE:
        moved[HOST] = _difference_of_states(base, target, "host") * setup.ranks_per_host
    size = largest_fitting_size(baseline, sizes, moved)
    too_large = min((t.micro_batch for t in runs if not t.fits), default=1 << 60)
    # A launch of this stage that failed overrules the line of the first stage
    if size is not None and size >= too_large:
        size = max([largest_that_ran(runs), *(n for n in sizes if n < too_large and n < size)])
    ran = next((t for t in runs if t.fits and t.micro_batch == size), None)
    if ran is not None:
        untimed = "" if ran.seconds else "seconds: fewer than three steps ended in time"
        return _stage_of_trial(ran, target, untimed)
    if not size:
        reason = "no size fits, by the plan" if size == 0 else "one launch is no line"
        return Stage(name=name, largest=size, measured=False, why=reason, roles=_role_bytes(target))
    peaks = {
        pool: trend.at(size) + moved.get(pool, 0.0)
        for pool in (HOST, DEVICE)
        if (trend := fitted_line(baseline, pool)) is not None
    }
    seconds, reason = _time_at(baseline, size, base, target)
    reference = next((t for t in reversed(baseline) if t.fits), None)
    scale = size / reference.micro_batch if reference is not None else 1.0
    return Stage(
        name=name,
        largest=size,
        measured=False,
        why=reason,
        peaks=peaks,
        rooms=dict(reference.rooms) if reference is not None else {},
        roles=_role_bytes(target),
        seconds=seconds,
        exposed_seconds=target.time.parts.communication if isinstance(target.time, StepTime) else None,
        samples=reference.samples * scale if reference is not None and reference.samples else None,
        tokens=reference.tokens * scale if reference is not None and reference.tokens else None,
    )


def _difference_of_states(base: Row, target: Row, tier: str) -> int:
    """Bytes that a rank holds more under *target*, while activations exist."""
    return target.memory.total(tier, During.LOSS) - base.memory.total(tier, During.LOSS)


def _time_at(runs: Sequence[Trial], size: int, base: Row, target: Row) -> tuple[float | None, str]:
    """Seconds of a step at *size*: the line of the first stage, and the difference by the plan."""
    timed = sorted((t.micro_batch, t.seconds) for t in runs if t.fits and t.seconds)
    if not timed:
        return None, "seconds: no step was timed"
    # The first stage needs no prediction: its own launches are timed where the plan lacks a speed
    if target is base:
        extra = 0.0
    elif isinstance(base.time, StepTime) and isinstance(target.time, StepTime):
        extra = target.time.seconds - base.time.seconds
    else:
        unknown = base.time if isinstance(base.time, str) else target.time
        return None, f"seconds: {unknown}"
    (small, low), (large, high) = timed[0], timed[-1]
    slope = max(0.0, (high - low) / (large - small)) if large > small else high / large
    # The plan may subtract more than the line has: without max(), the seconds are negative
    return max(1e-9, high + slope * (size - large) + extra), ""


def _count_per_second(count: float | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and seconds else None
