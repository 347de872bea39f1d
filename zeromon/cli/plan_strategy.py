"""The options of ``zeromon plan`` on the strategy, and the plan that they describe."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeromon.cli.options import add_option, positive, whole
from zeromon.memory.config_files import changes_of_deepspeed
from zeromon.memory.spec import FRAMEWORKS, OPTIMIZERS, PLACES, PRECISIONS, ShardPlan, ZeroStage

_YES = ("yes", "no")


def add_strategy_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    group.add_argument("--framework", choices=FRAMEWORKS)
    group.add_argument("--stage", type=int, choices=range(4))
    group.add_argument("--precision", choices=tuple(PRECISIONS))
    group.add_argument(
        "--grad-dtype", choices=("fp32", "bf16", "fp16"),
        help="of gradients between micro-steps (default: that of the precision)",
    )  # fmt: skip
    group.add_argument(
        "--optimizer", choices=tuple(OPTIMIZERS), metavar="NAME", help=", ".join(OPTIMIZERS)
    )
    group.add_argument("--offload-optimizer", choices=PLACES)
    group.add_argument("--offload-params", choices=PLACES)
    add_option(group, "--shard-ranks", "N", "hybrid sharding: ranks per copy", positive)
    group.add_argument("--accumulation", type=positive, metavar="N")
    group.add_argument(
        "--reshard", choices=_YES,
        help="FSDP frees parameters after forward: yes is stage 3, no is stage 2",
    )  # fmt: skip
    add_option(
        group, "--prefetch", "N",
        "gathered ahead: units under FSDP, elements under ZeRO-3 (stage3_prefetch_bucket_size)", whole,
    )  # fmt: skip
    add_option(
        group, "--bucket", "N",
        "of gradients: MiB under DDP (bucket_cap_mb), elements under ZeRO (reduce_bucket_size)", whole,
    )  # fmt: skip
    group.add_argument("--overlap", choices=_YES, help="ZeRO-1 and 2: overlap_comm")
    group.add_argument(
        "--reduce-each", choices=_YES, help="each micro-step reduces its gradients (no: no_sync)"
    )
    add_option(group, "--tp", "N", "tensor parallelism: ranks per layer", positive)
    add_option(group, "--pp", "N", "pipeline parallelism: stages", positive)


def base_plan(settings: Mapping[str, Any], options: argparse.Namespace) -> ShardPlan:
    """Stage 3 with DeepSpeed's own defaults, where that is the framework."""
    ranks = options.devices or settings.get("ranks", 8)
    framework = options.framework or settings.get("framework", "deepspeed")
    chosen = _deepspeed_defaults() if framework == "deepspeed" and not options.config else {}
    return ShardPlan(stage=ZeroStage.PARAMETERS, ranks=ranks, **chosen)


def _deepspeed_defaults() -> dict[str, Any]:
    """DeepSpeed's own defaults of buckets and buffers."""
    defaults = changes_of_deepspeed({})
    names = (
        "grad_bucket_numel", "prefetch_numel", "live_numel", "persistence_numel", "reuse_numel",
        "sub_group_numel", "optimizer_buffers", "param_buffer_numel", "max_in_cpu", "pins",
    )  # fmt: skip
    return {name: defaults[name] for name in names if name in defaults}


def change_plan(
    base: ShardPlan, settings: Mapping[str, Any], options: argparse.Namespace
) -> ShardPlan:
    """*base*, changed by a configuration, then by the command line."""
    fields = dict(settings)
    if options.devices:
        fields["ranks"] = options.devices
    fields.setdefault("ranks", base.ranks)
    if options.shard_ranks:
        fields["shard_ranks"] = options.shard_ranks
    elif fields["ranks"] != base.ranks and fields["ranks"] % base.shard_ranks:
        fields["shard_ranks"] = 0  # what it was cannot be kept
    elif base.shard_ranks == base.ranks:
        fields.setdefault("shard_ranks", 0)
    if options.stage is not None:
        fields["stage"] = ZeroStage(options.stage)
    if options.reshard:
        fields["stage"] = ZeroStage.PARAMETERS if options.reshard == "yes" else ZeroStage.GRADIENTS
    overrides = {
        "framework": options.framework,
        "accumulation": options.accumulation,
        "optimizer_on": options.offload_optimizer,
        "params_on": options.offload_params,
        "precision": PRECISIONS.get(options.precision or ""),
        "optimizer": OPTIMIZERS.get(options.optimizer or ""),
    }
    fields |= {name: value for name, value in overrides.items() if value is not None}
    if options.grad_dtype:
        nbytes = 4 if options.grad_dtype == "fp32" else 2
        fields["precision"] = replace(fields.get("precision", base.precision), grad_bytes=nbytes)
    framework = fields.get("framework", base.framework)
    if not options.framework and framework != "deepspeed" and "stage" in fields:
        framework = _wrapper_of_stage(framework, fields["stage"])
        fields["framework"] = framework
    if framework == "ddp":
        fields.setdefault("stage", ZeroStage.NONE)
    elif framework != "deepspeed" and base.framework in ("ddp", "deepspeed"):
        fields.setdefault("stage", ZeroStage.PARAMETERS)
    if framework == "deepspeed" != base.framework:
        fields = _deepspeed_defaults() | fields
    if "stage" in fields:
        fields["reshards"] = fields["stage"] == ZeroStage.PARAMETERS
    return replace(base, **(fields | _communication_fields(framework, options)))


def _wrapper_of_stage(framework: str, stage: ZeroStage) -> str:
    """Torch's own wrapper for a stage: DDP for stage 0, FSDP for stages 2 and 3."""
    if stage == ZeroStage.NONE:
        return "ddp"
    return "fsdp2" if framework == "ddp" and stage >= ZeroStage.GRADIENTS else framework


def _communication_fields(framework: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the options on when and how much is communicated at once."""
    fields: dict[str, Any] = {}
    if options.prefetch is not None:
        is_zero = framework == "deepspeed"
        fields["prefetch_numel" if is_zero else "prefetch_units"] = options.prefetch
    if options.bucket and framework == "ddp":
        fields["bucket_cap_bytes"] = options.bucket << 20
    elif options.bucket:
        fields["grad_bucket_numel"] = options.bucket
    if options.overlap:
        fields["grad_buckets"] = 2 if options.overlap == "yes" else 1
    if options.reduce_each:
        fields["reduces_each"] = options.reduce_each == "yes"
    return fields
