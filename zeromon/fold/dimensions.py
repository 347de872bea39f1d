"""The dimensions of a rank's process groups, and its strategy with the model parallelism. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from zeromon.fold.state import RankState, group_label, group_size
from zeromon.ring.dimensions import (
    MODEL_PARALLEL,
    DimensionMetadata,
    dim_of,
    dimension_metadata,
    name_of,
)
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import Dimension


def _sent(state: RankState) -> list[DimensionMetadata]:
    return dimension_metadata(state.meta.get("dimensions"))


def names(state: RankState) -> dict[int, str]:
    """Group -> the name of its dimension: as the agent found it, else by the label of the group."""
    named = {number: name_of(group_label(state, number)) for number in state.groups}
    for one in _sent(state):
        named |= dict.fromkeys(one["groups"], one["name"])
    return named


def dimensions(state: RankState) -> tuple[Dimension, ...]:
    """Returns the dimensions of the rank, each with the largest of its groups."""
    found = {
        one["name"]: Dimension(
            name=one["name"], size=one["size"], nodes=one["nodes"], used=one["used"]
        )
        for one in _sent(state)
    }
    for number, name in names(state).items():
        known = found.get(name) or Dimension(name=name)
        found[name] = replace(
            known,
            size=max(known.size, group_size(state, number)),
            nodes=max(known.nodes, int(state.groups.get(number, {}).get("nodes", 0))),
            used=True,
        )
    return tuple(found.values())


def label_of(state: RankState, found: Strategy) -> str:
    """Returns the label of its strategy *found*; the agent's own where this version does not know it."""
    return found.label if found != Strategy() else str(state.meta.get("strategy", found.label))


def strategy(state: RankState, dims: Iterable[Dimension]) -> Strategy:
    """Returns the strategy that the agent sent, with those of the rank's *dims* that split the model."""
    used = {dim_of(one.name) for one in dims if one.used and one.size > 1}
    parts = tuple(dim for dim in MODEL_PARALLEL if dim in used)
    return replace(Strategy.read(state.meta), parts=parts)
