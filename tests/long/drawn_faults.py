"""Draws training runs with one fault each, or with none, from a seed. Pure.

A case is a strategy, a way of loading, and a fault that befalls a rank (or all) from a step on.
`tests/programs/drawn.py` trains it, `run.py` runs and watches it, `judge.py` says whether the verdict
names its cause and its rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

ALL_RANKS = -1
SEED = 20261125
FAULT_COUNT = 200
HEALTHY_COUNT = 40

_DDP = ("ddp", "ddp_unused", "ddp_static", "ddp_hook", "ddp_frozen", "zero1")
STRATEGIES = (*_DDP, "fsdp1", "fsdp2", "zero2", "zero3", "trainer")
"""`ddp_unused`: find_unused_parameters. `ddp_static`: a static graph whose gradients are views of the
buckets. `ddp_hook`: a communication hook. `ddp_frozen`: half of the layers frozen. `zero1`:
ZeroRedundancyOptimizer. `zero2`, `zero3`: DeepSpeed. `trainer`: HF Trainer with its defaults."""
EARLY_SHARE = 0.2
LOADINGS = ("none", "loader", "workers")
"""Batches made in the loop, by a DataLoader without workers, by one with two workers."""
LOADS = ("loop", "loops", "nice", "bursts")
"""Other programs of the machine: a busy loop, two, one of low priority, one that comes and goes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what trains, and what goes wrong."""

    number: int
    kind: str
    strategy: str
    loading: str
    accumulation: int
    rank: int
    """Whom the fault befalls; ALL_RANKS for all."""
    step: int
    """The first step that the fault touches, from 1."""
    amount: float = 0.0
    """What the kind measures: seconds late, MiB per step, batches more."""
    restarts: int = 0
    load: str = ""

    @property
    def name(self) -> str:
        """For a folder and a table: ``007-sleeps-fsdp2-loader-r1``."""
        rank = "all" if self.rank == ALL_RANKS else f"r{self.rank}"
        parts = [f"{self.number:03}", self.kind, self.strategy, self.loading, rank]
        return "-".join([*parts, self.load] if self.load else parts)

    @property
    def truth(self) -> str:
        """What goes wrong, in one sentence: ``rank 1 sleeps for ever, step 40``."""
        who = "all ranks" if self.rank == ALL_RANKS else f"rank {self.rank}"
        text = KINDS[self.kind].truth.format(amount=f"{self.amount:g}")
        return text if self.is_healthy else f"{who}: {text}, from step {self.step}"

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with the run."""
        return self.kind in HEALTHY


@dataclass(frozen=True, slots=True)
class Kind:
    """What a fault is, and what may be drawn with it."""

    truth: str
    """What happens; {amount}: the amount."""
    strategies: tuple[str, ...] = STRATEGIES
    loadings: tuple[str, ...] = LOADINGS
    ranks: tuple[int, ...] = (0, 1)
    amounts: tuple[float, ...] = (0.0,)
    accumulations: tuple[int, ...] = (1, 1, 1, 3)
    restarts: int = 0
    is_hang: bool = False
    """Whether the run stays until somebody ends it."""
    weight: int = 1
    can_be_early: bool = False
    """Whether it may come in one of the first three steps."""


_EVERYWHERE = (ALL_RANKS,)
_LATE = (0.08, 0.12, 0.16, 0.2)

FAULTS = {
    "late_forward": Kind("{amount} s late in each forward", amounts=_LATE, weight=2),
    "late_backward": Kind("{amount} s late in each backward", amounts=_LATE),
    "late_between": Kind("{amount} s late between steps", amounts=_LATE, weight=2),
    "late_loader": Kind(
        "{amount} s late in each batch of its loader", loadings=("loader",), amounts=_LATE
    ),
    "hiccup": Kind("a pause of {amount} s every 12 steps", amounts=(0.8, 1.2), accumulations=(1,)),
    "checkpoint": Kind(
        "saves for {amount} s every 20 steps while the others wait",
        amounts=(1.5, 2.5),
        accumulations=(1,),
    ),
    "stall_all": Kind("sleep for ever", ranks=_EVERYWHERE, is_hang=True),
    "stall_loader": Kind("its data set never returns", loadings=("loader",), is_hang=True),
    "stall_workers": Kind(
        "its DataLoader workers never return",
        loadings=("workers",),
        ranks=(0, 1, ALL_RANKS),
        is_hang=True,
    ),
    "skipped": Kind("does not call an all_reduce that the others call", can_be_early=True, is_hang=True),
    "extra": Kind("calls an all_reduce that the others do not", can_be_early=True, is_hang=True),
    "size": Kind(
        "reduces 1,000 elements where the others reduce 4,000", can_be_early=True, is_hang=True
    ),
    "operation": Kind("broadcasts where the others reduce", can_be_early=True, is_hang=True),
    "uneven": Kind(
        "has {amount} batches more than the others",
        strategies=STRATEGIES[:-1],
        amounts=(-1, 1),
        accumulations=(1,),
        is_hang=True,
    ),
    "sleeps": Kind("sleeps for ever", can_be_early=True, is_hang=True, weight=2),
    "leak": Kind("keeps {amount} MiB per step, no limit", amounts=(12, 24), ranks=(0, 1, ALL_RANKS)),
    "leak_limited": Kind(
        "keeps {amount} MiB per step, in a cgroup with a limit", amounts=(6, 10), ranks=(0, 1)
    ),
    "exception": Kind("raises ValueError", can_be_early=True, weight=2),
    "killed": Kind("is killed by SIGKILL", can_be_early=True),
    "exit_zero": Kind("calls sys.exit(0)", can_be_early=True),
    "return_early": Kind("returns while the others train", can_be_early=True),
    "nan": Kind("has a loss of NaN"),
    "python": Kind(
        "{amount} s of own Python code per step",
        ranks=_EVERYWHERE,
        amounts=(0.3, 0.5),
        accumulations=(1,),
    ),
    "slow_start": Kind("read data for {amount} s before training", ranks=_EVERYWHERE, amounts=(12, 16)),
    "restart_recovers": Kind("raises ValueError, trains after the restart", restarts=1),
    "restart_repeats": Kind("raises ValueError in both attempts", restarts=1),
    "restart_fails": Kind("raises ValueError, then cannot join the process group", restarts=1),
}
"""Kind of fault -> what it is drawn with; `tests/programs/drawn.py` says what each does."""

HEALTHY = {
    "healthy": Kind("well", ranks=_EVERYWHERE, weight=2),
    "slow_first_step": Kind("well after a first step of {amount} s", ranks=_EVERYWHERE, amounts=(8,)),
    "evaluation": Kind(
        "well, evaluates every 30 steps",
        strategies=STRATEGIES[:-1],
        ranks=_EVERYWHERE,
        accumulations=(1,),
    ),
    "epochs": Kind(
        "well, starts its workers every 30 batches",
        strategies=STRATEGIES[:-1],
        loadings=("workers",),
        ranks=_EVERYWHERE,
    ),
}
"""Kinds of runs that no verdict may call broken."""

KINDS = FAULTS | HEALTHY


def draw(seed: int = SEED, count: int = FAULT_COUNT) -> list[Case]:
    """Returns *count* cases of all kinds; every kind comes once before one comes again."""
    return _cases(random.Random(seed), KINDS, count, loads=("",))


def draw_healthy(seed: int = SEED, count: int = HEALTHY_COUNT) -> list[Case]:
    """Returns *count* runs of identical ranks, each beside other programs of the machine."""
    return _cases(random.Random(f"healthy {seed}"), HEALTHY, count, loads=LOADS)


def _cases(
    source: random.Random, kinds: dict[str, Kind], count: int, loads: tuple[str, ...]
) -> list[Case]:
    decks: dict[str, Iterator[str]] = {}
    order = _deal(source, [name for name, kind in kinds.items() for _ in range(kind.weight)])
    loading = _deal(source, LOADINGS)
    load = _deal(source, loads)
    cases = []
    for number in range(1, count + 1):
        name = next(order)
        kind = kinds[name]
        strategies = decks.setdefault(name, _deal(source, kind.strategies))
        cases.append(_case(source, number, name, next(strategies), next(loading), next(load)))
    return cases


def _case(source: random.Random, number: int, name: str, strategy: str, loading: str, load: str) -> Case:
    kind = KINDS[name]
    if loading not in kind.loadings:
        loading = source.choice(kind.loadings)
    if strategy == "trainer" and loading == "none":
        loading = "loader"  # a Trainer always has a DataLoader
    accumulation = source.choice(kind.accumulations)
    if strategy == "ddp_static":
        accumulation = 1  # torch refuses no_sync() there
    latest = 40 if accumulation > 1 or strategy not in _DDP else 60
    is_early = kind.can_be_early and source.random() < EARLY_SHARE
    return Case(
        number, name, strategy, loading, accumulation,
        rank=source.choice(kind.ranks),
        step=source.randrange(1, 4) if is_early else source.randrange(25, latest),
        amount=source.choice(kind.amounts),
        restarts=kind.restarts,
        load=load,
    )  # fmt: skip


def _deal(source: random.Random, cards: tuple[str, ...] | list[str]) -> Iterator[str]:
    """Cards of a shuffled deck, which is shuffled anew when it is used up."""
    while True:
        deck = list(cards)
        source.shuffle(deck)
        yield from deck
