"""Strategies that tests go through."""

from __future__ import annotations

from dataclasses import replace

from zeromon.ring.strategy import (
    DDP,
    EVERY_FRAMEWORK,
    MODEL_PARALLEL,
    Dim,
    Sharding,
    Strategy,
    deepspeed_strategy,
    fsdp1_strategy,
    fsdp2_strategy,
)

EVERY: tuple[Strategy, ...] = (
    *EVERY_FRAMEWORK,
    *(Strategy(parts=(dim,)) for dim in MODEL_PARALLEL),
    *(
        replace(framework, parts=parts)
        for framework in (
            DDP,
            fsdp2_strategy(reshards=True),
            fsdp1_strategy(Sharding.FULL),
            deepspeed_strategy(1),
        )
        for parts in ((Dim.TP,), (Dim.PP,), (Dim.TP, Dim.PP, Dim.CP, Dim.EP))
    ),
)
"""The frameworks, the model parallelism alone, and some of their combinations."""
