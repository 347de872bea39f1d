"""Checks of a DeepSpeed configuration. A check is one function, and one line in :data:`CHECKS`."""

from collections.abc import Callable, Iterable

from zeromon.check.deepspeed import conflicts, fields, hygiene, performance
from zeromon.check.problem import Config, Machine, Problem

Check = Callable[[Config, Machine], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    fields.unknown_names, fields.wrong_values, fields.deprecated_names,
    conflicts.duplicate_keys, conflicts.two_precisions, conflicts.two_names, conflicts.stage_conflicts,
    conflicts.bf16_needs, conflicts.no_effect,
    performance.fp32_gradients, performance.overlap_comm, performance.bucket_size,
    performance.fp16_with_zero3, performance.loss_scale, performance.no_mixed_precision,
    performance.pinned_memory, performance.nvme_settings,
    conflicts.batch_size, conflicts.missing_batch, conflicts.batch_product,
    conflicts.save_without_gather,
    hygiene.unknown_optimizer, hygiene.unknown_scheduler, hygiene.scheduler_rate,
    fields.hjson_file, fields.unfilled_autos,
    hygiene.gradient_layout, hygiene.gradient_types, hygiene.bf16_device, hygiene.missing_clipping,
    hygiene.large_prefetch, hygiene.dead_paths,
)  # fmt: skip
