"""Values that several rules read from a run in the same way. Pure."""

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from string import Template
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from zeromon.base.units import human_ratio, human_seconds
from zeromon.diagnosis.rule import as_number, setting_of
from zeromon.memory.ladder import FORMATS, ladder_of_risk
from zeromon.memory.plan import shorter_step_by
from zeromon.ring.codes import Phase
from zeromon.ring.strategy import MODEL_PARALLEL, Dim, Framework, Strategy, dim_by_name
from zeromon.snapshot import CollectiveStatsRow, Pool, RankSnapshot, RunSnapshot
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.focus import is_running_out, pool_of
from zeromon.snapshot.levels import AVOIDABLE
from zeromon.snapshot.step import settled_steps

MIN_SHARE = AVOIDABLE.warning
AVERAGED = 0.9
"""The share of the parameters' bytes that a step all-reduces over all ranks, where they are replicas."""
WINDOW = 20
"""The last steps that means are taken over."""
MIB = 1 << 20
OF_ITERABLE = "_InfiniteConstantSampler"
"""The sampler of a DataLoader for an IterableDataset, for which it refuses any other sampler."""


class GainSeconds(TypedDict):
    """Two fields of a remedy."""

    gain_low_seconds: float
    gain_high_seconds: float


class Gain(NamedTuple):
    """The shares of an avoidable time that a change is expected to save, at least and at most."""

    low: float
    high: float

    def seconds(self, avoidable: float) -> GainSeconds:
        """Returns the seconds that a change saves of the *avoidable* seconds."""
        return {"gain_low_seconds": self.low * avoidable, "gain_high_seconds": self.high * avoidable}


_BY_ENGINE = Gain(0.6, 1.4)
"""Shares of what ``zeromon plan`` predicts. Measured: 0.7 to 1.1 (docs/evidence/accuracy.md)."""


def predicted_gain(run: RunSnapshot, shares: Gain, seconds: float, **change: Any) -> GainSeconds:
    """Seconds that *change* gains, at least and at most: by the engine, else *shares* of *seconds*."""
    predicted = shorter_step_by(run, **change)
    if predicted is not None and predicted > 0:
        return _BY_ENGINE.seconds(predicted)
    return shares.seconds(seconds)


def exposed_seconds(traffic: Iterable[CollectiveStatsRow]) -> float:
    """The exposed seconds of *traffic* a step."""
    return sum(row.exposed_seconds for row in traffic)


class PhaseTime(NamedTuple):
    """The time that a phase takes in the last steps."""

    seconds: float
    """Mean per step."""
    share: float
    """The share of these steps."""


def phase_time(rank: RankSnapshot, phase: Phase) -> PhaseTime:
    """Mean seconds of *phase* per step, and its share of the same steps."""
    steps = [step for step in settled_steps(rank.steps.recent[-WINDOW:]) if len(step.phase_ns) > phase]
    took_ns, total = (sum(s.phase_ns[phase] for s in steps), sum(s.end_ns - s.start_ns for s in steps))
    return PhaseTime(took_ns / len(steps) / 1e9, took_ns / total) if total else PhaseTime(0.0, 0.0)


def room_bytes(run: RunSnapshot, rank: RankSnapshot) -> int:
    """Bytes that *rank* may still allocate: on its device, or its part of its node; -1 where unknown.

    0 where that memory is running out, however much of it is free now.
    """
    if is_running_out(run.ranks, pool_of(rank, Pool.DEVICE)):
        return 0
    if rank.memory.device is not None:
        return rank.memory.device.headroom_bytes
    if rank.memory.host is None or rank.memory.host.headroom_bytes < 0:
        return -1
    return rank.memory.host.headroom_bytes // sum(peer.node == rank.node for peer in run.ranks)


def raised_settings(rank: RankSnapshot, advice: Iterable[tuple[str, str, str]]) -> tuple[str, str]:
    """The members of a JSON object that DeepSpeed has now, and those to have: only what is not so.

    *advice*: for each setting the end of its name, its default, and the value to have. A number is never
    lowered.
    """
    old, new = [], []
    for name, default, better in advice:
        current, key = setting_of(rank, name) or default, name.rpartition(".")[2]
        # Words such as "true" are no numbers: 0 and 1 let the advice on them stand
        if current != better and (as_number(current) or 0.0) < (as_number(better) or 1.0):
            old.append(f'"{key}": {current}')
            new.append(f'"{key}": {better}')
    return ", ".join(old), ", ".join(new)


# ---- all-gathers of parameters that cross nodes -------------------------------------------------

ACROSS_NODES = Gain(0.3, 0.9)
"""Shares of the exposed time of gathers across nodes. An estimate, not measured: what remains is the
gather within a node."""


class FarGathers(NamedTuple):
    """The gathers of a rank that cross nodes."""

    nodes: int
    local_ranks: int
    """Ranks a node."""
    seconds: float
    """Exposed, a step."""
    share: float
    """:attr:`seconds` as a share of the step."""
    cause: str = "every all-gather crosses the network between the nodes"

    @property
    def text(self) -> str:
        """The evidence of a finding."""
        return (
            f"gathering parameters from {self.nodes} nodes waits {human_seconds(self.seconds)} per step "
            f"({human_ratio(self.share)})"
        )

    @property
    def gain(self) -> GainSeconds:
        """The gain of gathers within a node."""
        return ACROSS_NODES.seconds(self.seconds)


def far_gathers(rank: RankSnapshot) -> FarGathers | None:
    """The gathers of *rank* that cross nodes; None where they cost little."""
    # Tensor parallelism gathers activations, which no copy of the parameters keeps within a node
    gathers = [
        row
        for row in rank.communication.traffic
        if row.op == "all_gather" and row.nodes > 1 and dim_by_name(row.dim) not in MODEL_PARALLEL
    ]
    nodes = max((row.nodes for row in gathers), default=0)
    seconds = exposed_seconds(gathers)
    share = rank.share_of_step(seconds)
    if nodes < 2 or share < 2 * MIN_SHARE:
        return None
    return FarGathers(nodes, max(1, rank.world_size // nodes), seconds, share)


# ---- which stage shards more than that of a strategy --------------------------------------------


class NextStage(NamedTuple):
    """A stage that shards more than another."""

    roles: tuple[str, ...]
    """The memory roles that it divides among the ranks, or moves."""
    form: ConfigFormat
    diff: str
    cost: str
    moves: bool = False
    """It moves the roles from the device to the host: all ranks share them already."""


DIFFS: Mapping[str, Any] = json.loads(files(__package__).joinpath("remedies.json").read_text())
"""Changes and their sentences, with a ``$blank`` for each figure of a run."""
_NEXT_STAGE = {
    (Framework(fields["framework"]), fields["stage"], fields.get("hybrid", False)): NextStage(
        tuple(fields["roles"]),
        ConfigFormat(fields["form"]),
        fields["diff"],
        fields["cost"],
        fields.get("moves", False),
    )
    for fields in DIFFS["next_stages"]
}
"""Framework, stage, hybrid or not -> the next stage; the cost of each is in Rajbhandari et al. 2020
(arXiv 1910.02054), section 7."""


def fill_remedy(
    name: str, run_figures: Mapping[str, Any] = MappingProxyType({}), /, **blanks: object
) -> Remedy:
    """Returns the remedy *name* of remedies.json with *run_figures*, and *blanks* in its sentences."""
    sentences: Mapping[str, str] = DIFFS["remedies"][name]
    fields: dict[str, Any] = {
        field: Template(sentence).substitute(blanks) for field, sentence in sentences.items()
    }
    fields["dialect"] = ConfigFormat(fields["dialect"])
    if "takes" in fields:
        fields["takes"] = Pool(fields["takes"])
    return Remedy(**fields, **run_figures)


def next_stage(strategy: Strategy) -> NextStage | None:
    """The stage that shards more; None where there is none, or where all that it moves is offloaded."""
    if strategy.is_deepspeed and strategy.stage == 3 and strategy.offload:
        return None
    # DeepSpeed refuses stages 2 and 3 under a pipeline
    if strategy.is_deepspeed and strategy.stage in (1, 2) and Dim.PP in strategy.parts:
        return None
    is_hybrid = strategy.framework is Framework.FSDP1 and strategy.stage == 2 and bool(strategy.hybrid)
    return _NEXT_STAGE.get((strategy.framework, strategy.stage, is_hybrid))


def ladder_remedy(
    run: RunSnapshot, rank: RankSnapshot, pool: Pool, need_bytes: float | None
) -> Remedy | None:
    """The OOM ladder of *rank*, whose *pool* is full; None where the model is unknown."""
    rungs = ladder_of_risk(run, pool, need_bytes)
    if pool == Pool.HOST and not any(rung.frees_bytes for rung in rungs):
        return None  # most of the host's memory is no state of the model
    if not rungs or not rank.config.models:
        return None
    form = FORMATS[rank.config.models[0].get("framework", "ddp")]
    return fill_remedy("ladder", {"rungs": rungs}, form=form)
