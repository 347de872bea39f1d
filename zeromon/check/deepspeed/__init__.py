"""Checks of a DeepSpeed configuration. A check is one function, and one line in :data:`CHECKS`."""

from collections.abc import Callable, Iterable

from zeromon.check.deepspeed import conflicts, fields, performance
from zeromon.check.problem import Config, Machine, Problem

Check = Callable[[Config, Machine], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    fields.unknown_names, fields.wrong_values, fields.deprecated_names, fields.unknown_optimizer,
    fields.unknown_scheduler, fields.hjson_file, fields.unfilled_autos,
    conflicts.duplicate_keys, conflicts.two_precisions, conflicts.two_names, conflicts.stage_conflicts,
    conflicts.no_effect, conflicts.gradient_types, conflicts.scheduler_rate,
    conflicts.dead_paths, conflicts.batch_size, conflicts.missing_batch, conflicts.batch_product,
    conflicts.save_without_gather,
    performance.fp32_gradients, performance.overlap_comm, performance.bucket_size,
    performance.fp16_with_zero3, performance.loss_scale, performance.no_mixed_precision,
    performance.pinned_memory, performance.nvme_settings, performance.gradient_layout,
    performance.bf16_device, performance.missing_clipping, performance.large_prefetch,
)  # fmt: skip
