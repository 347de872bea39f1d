"""The rules by family, and beside them a page for each code."""

from functools import cache

from zeromon.diagnosis.rule import Rule
from zeromon.diagnosis.rules import (
    collectives,
    communication,
    ddp,
    deepspeed,
    fsdp,
    health,
    host,
    loop,
    memory,
    monitoring,
    offload,
    precision,
    training,
)

FAMILIES = (
    health, memory, training, communication, precision, offload, ddp, fsdp, collectives,
    deepspeed, host, loop, monitoring,
)  # fmt: skip
"""First what ends a run, then what slows it down, then what zeromon itself could not record.

Findings of equal urgency about the same rank are listed in this order, and within a family in the order
of its functions.
"""


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule that a family module defines."""
    # vars() also has what a family imports: a rule of another family would be listed twice
    return tuple(
        value
        for family in FAMILIES
        for value in vars(family).values()
        if isinstance(value, Rule) and value.function.__module__ == family.__name__
    )
