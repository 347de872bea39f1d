"""Checks of a DeepSpeed configuration. A check is one function, and one line in :data:`CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zeromon.check.deepspeed.batch import (
    batch_product,
    batch_size,
    missing_batch,
    save_without_gather,
)
from zeromon.check.deepspeed.conflicts import (
    bf16_needs,
    duplicates,
    no_effect,
    stage_conflicts,
    two_names,
    two_precisions,
)
from zeromon.check.deepspeed.fields import deprecated, names, values
from zeromon.check.deepspeed.hygiene import (
    bf16_device,
    clipping,
    dead_paths,
    gradient_types,
    gradients,
    large_prefetch,
)
from zeromon.check.deepspeed.optimizer import optimizer, scheduler
from zeromon.check.deepspeed.performance import (
    bucket_size,
    fp16_with_zero3,
    fp32_gradients,
    loss_scale,
    no_mixed_precision,
    nvme,
    overlap_comm,
    pinned_memory,
)
from zeromon.check.deepspeed.readers import hjson, unfilled
from zeromon.check.problem import Config, Machine, Problem

Check = Callable[[Config, Machine], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    names,
    values,
    deprecated,
    duplicates,
    two_precisions,
    two_names,
    stage_conflicts,
    bf16_needs,
    no_effect,
    fp32_gradients,
    overlap_comm,
    bucket_size,
    fp16_with_zero3,
    loss_scale,
    no_mixed_precision,
    pinned_memory,
    nvme,
    batch_size,
    missing_batch,
    batch_product,
    save_without_gather,
    optimizer,
    scheduler,
    hjson,
    unfilled,
    gradients,
    gradient_types,
    bf16_device,
    clipping,
    large_prefetch,
    dead_paths,
)
