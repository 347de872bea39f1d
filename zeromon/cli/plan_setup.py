"""The options of ``zeromon plan``, and the model, machine, batch and strategy that they describe."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.base.units import human_bytes, human_params
from zeromon.check.documents import UnreadableError, dialect_of, parse_config, read_text
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag, add_list, add_option, positive, whole
from zeromon.memory import plan
from zeromon.memory.config_files import changes_of_config, changes_of_deepspeed
from zeromon.memory.ladder import RECOMPUTED
from zeromon.memory.models import from_count, model_from_units, part_of_model
from zeromon.memory.plan import hosts_of, parse_size
from zeromon.memory.predict import Batch
from zeromon.memory.reconcile import micro_batch_of_rank
from zeromon.memory.spec import (
    FRAMEWORKS,
    OPTIMIZERS,
    PLACES,
    PRECISIONS,
    QUANTIZATIONS,
    ModelSpec,
    Precision,
    ShardPlan,
    ZeroStage,
)
from zeromon.memory.speeds import (
    COMPUTE,
    Machine,
    RunSpeeds,
    find_named_device,
    parse_link_peak,
    with_larger_batch,
)
from zeromon.probes.host import memory_capacity
from zeromon.probes.process import find_training_python, own_package_folders
from zeromon.snapshot import RunSnapshot


def add_setup_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what describes a model, a machine, a strategy and a batch."""
    parser.add_argument("model", nargs="?", help="7B, a config.json, or module:factory")
    add_option(parser, "--from", "RUN", "take model and figures from a run", dest="run")
    parser.add_argument("--config", help="a DeepSpeed JSON or accelerate YAML file")
    machine = parser.add_argument_group("machine")
    add_option(machine, "--devices", "N", "number of devices (default: 8)", positive)
    add_option(
        machine, "--gpu", "GPU",
        "h100, a100-40, ..., or its memory: 80 (GiB), 80GB (default: a100); several kinds: a100,v100",
    )  # fmt: skip
    add_option(
        machine, "--reserve", "SHARE",
        "share for contexts, NCCL, fragmentation", parse_share, plan.RESERVE,
    )  # fmt: skip
    add_host_arguments(machine)
    add_option(machine, "--nvme", "SIZE", "free bytes of the NVMe drives of one host: 2TB")
    add_speed_arguments(parser.add_argument_group("speeds, for the seconds of a step"))
    add_strategy_arguments(parser.add_argument_group("strategy (overrides --config)"))
    batch = parser.add_argument_group("batch")
    add_option(batch, "--micro-batch", "N", "sequences per rank and micro-step", positive)
    add_option(batch, "--length", "TOKENS", "tokens of a sequence (default: 2048)", positive)
    add_flag(batch, "--checkpointing", "activation checkpointing")
    add_flag(batch, "--no-fused-attention", "attention scores are written to memory")
    add_flag(batch, "--fused-loss", "the loss never holds all logits: Liger, chunked cross entropy")
    lora = parser.add_argument_group(
        "LoRA and QLoRA", "plan config.json --lora-rank 16 --lora-targets q_proj,v_proj --load-in 4bit"
    )
    add_option(
        lora, "--lora-rank", "N", "train adapters of rank N alone, as peft's LoraConfig(r=N)", positive
    )
    add_option(
        lora, "--lora-targets", "NAMES",
        "layers with an adapter: all-linear (default), attention, or names: q_proj,v_proj",
    )  # fmt: skip
    lora.add_argument(
        "--load-in", choices=tuple(QUANTIZATIONS),
        help="QLoRA: frozen linear layers in NF4 of bitsandbytes (double: double quantization)",
    )  # fmt: skip
    learning = parser.add_argument_group("reinforcement learning")
    add_list(
        learning, "--reference", "MODEL",
        "a frozen model beside the trained one (reference, reward): 7B or config.json; repeatable",
    )  # fmt: skip
    add_option(
        learning, "--rollout", "N",
        "sequences of --length tokens that a rank generates at once", positive,
    )  # fmt: skip
    add_flag(parser, "--trace", "run the real model on fake tensors")


def add_host_arguments(group: argparse._ArgumentGroup, default_nodes: str = "one for 8 devices") -> None:
    """Adds the options of the hosts."""
    add_option(
        group, "--host-memory", "SIZE",
        "memory of one host, shared by its ranks: 512 (GiB), 1TiB; default: this machine's",
    )  # fmt: skip
    add_option(group, "--nodes", "N", f"number of nodes (default: {default_nodes})", positive)


DESCRIBED = "zeromon: "
"""Marks the line that the child process prints: a model may print, too."""


# ---- the setup ------------------------------------------------------------------------------------


def setup_from_model(options: argparse.Namespace) -> plan.Setup:
    """The setup of a model on the command line."""
    if not options.model:
        raise PlanError("no model is given", hint="Like: zeromon plan 7B --devices 8 --gpu h100")
    path = config_path(options.model)
    is_entry = path is None and ":" in options.model
    if options.trace and (options.fused_loss or options.sequence_parallel):
        raise PlanError(
            "--trace takes the loss and the layers as the model has them",
            hint="Leave --trace out: --fused-loss and --sequence-parallel have formulas.",
        )
    if options.trace and path is None and not is_entry:
        raise PlanError(
            "--trace needs a model that can be built: module:factory",
            "Or a config.json, with transformers installed.",
        )
    lora = _lora_flags(options, can_build=is_entry or path is not None)
    model = None if is_entry or options.trace or lora else read_model(options.model)
    hidden = model.architecture.hidden if model is not None and model.architecture else 0
    settings = read_config_changes(options, hidden)
    micro = options.micro_batch or settings.pop("micro_batch", None)
    # With --micro-batch the line above does not take it out, and ShardPlan has no such field
    settings.pop("micro_batch", None)
    chosen = change_plan(base_plan(settings, options), settings, options)
    if lora:
        chosen = _with_frozen_base(chosen, is_chosen=bool(options.precision or "precision" in settings))
    batch = _given_batch(options, micro) if micro or options.length or options.trace else None
    measured = None
    if model is None:
        entry = str(path or options.model)
        model, measured = _built_model(entry, options, batch if options.trace else None, chosen, lora)
    options.gpu = options.gpu or "a100"
    tensor, pipeline = options.tp or 1, options.pp or 1
    chosen = _split_data_parallel(chosen, tensor * pipeline)
    device_bytes, note = _smallest_device_memory(options.gpu)
    if options.rollout and model.architecture is None:
        note += ("keys and values of --rollout are not counted: the layers are unknown",)
    whole_numel = model.params
    if lora:
        note += (_lora_note(model, options.load_in),)
    model = part_of_model(replace(model, notes=(*model.notes, *note)), tensor, pipeline)
    return plan.Setup(
        model=model, plan=chosen, device_bytes=device_bytes, batch=batch,
        micro_batch_given=micro is not None, measured_activation_bytes=measured,
        measured_compute_bytes=4 if measured is not None else 0,  # it is traced in fp32
        reserve=options.reserve, host_bytes=parse_host_memory(options.host_memory),
        hosts=options.nodes or plan.hosts_of(chosen.ranks * tensor * pipeline),
        is_given=bool(options.config or options.framework) or options.stage is not None,
        nvme_bytes=parse_memory_size("--nvme", options.nvme) if options.nvme else None,
        tensor=tensor, pipeline=pipeline, whole_numel=whole_numel,
        frozen=tuple(map(read_model, options.reference)),
        generated_tokens=(options.rollout or 0) * (options.length or 2048),
        machine=machine_of_options(options, chosen.ranks * tensor * pipeline),
    )  # fmt: skip


def _built_model(
    entry: str,
    options: argparse.Namespace,
    traced: Batch | None,
    chosen: ShardPlan,
    lora: tuple[str, ...],
) -> tuple[ModelSpec, int | None]:
    """The model that a child process builds, and the activations of a sequence where it is *traced*."""
    described = describe_entry(entry, traced, chosen.ranks if traced else 1, lora)
    nbytes = described.get("activation_bytes")
    if nbytes == 0:
        reason = "activations are not counted: the traced step kept none"
        described = {**described, "notes": [*described.get("notes", ()), reason]}
    model = described_model(
        described, options.model, measured=nbytes is not None, load_in=options.load_in or ""
    )
    if traced is None or nbytes is None:
        return model, None
    return model, nbytes // traced.sequences


def _lora_flags(options: argparse.Namespace, *, can_build: bool) -> tuple[str, ...]:
    """The options of LoRA, as those of the process that builds the model; () without LoRA."""
    if not options.lora_rank:
        if options.load_in or options.lora_targets:
            raise PlanError("--load-in and --lora-targets need --lora-rank", "Like --lora-rank 16.")
        return ()
    if options.trace:
        raise PlanError("--trace counts no adapters", "Leave --trace out: LoRA has a formula.")
    if not can_build:
        raise PlanError(
            f"--lora-rank needs the layers of the model, which {options.model!r} does not say",
            "Give a config.json or module:factory.",
        )
    targets = options.lora_targets or "all-linear"
    flags = ("--lora-rank", str(options.lora_rank), "--lora-targets", targets)
    return (*flags, "--quantized") if options.load_in else flags


def _lora_note(model: ModelSpec, load_in: str | None) -> str:
    base = human_params(model.params - model.trainable)
    stored = "in 16 bits, or as --precision says"
    if load_in:
        stored = f"linear layers in {load_in}; to shard them, set bnb_4bit_quant_storage to bfloat16"
    return f"LoRA trains {model.trainable:,} parameters, lora_dropout 0; {base} are frozen, {stored}"


def _with_frozen_base(chosen: ShardPlan, *, is_chosen: bool) -> ShardPlan:
    """*chosen* with the precision of LoRA: fp32 adapters beside a 16-bit base, but for DeepSpeed.

    peft makes adapters in fp32 (autocast_adapter_dtype), and accelerate casts only what is trained to
    fp32 under FSDP. DeepSpeed casts both to 16 bits, and has fp32 masters.
    """
    precision = chosen.precision
    if chosen.framework != "deepspeed" and not is_chosen:
        precision = Precision.policy()
    if precision.param_bytes > precision.compute_bytes:
        precision = replace(precision, frozen_bytes=precision.compute_bytes)
    return replace(chosen, precision=precision)


def _given_batch(options: argparse.Namespace, micro: int | None) -> Batch:
    return Batch(
        sequences=micro or 1, length=options.length or 2048, checkpointing=options.checkpointing,
        fused_attention=not options.no_fused_attention, fused_loss=options.fused_loss,
        sequence_parallel=options.sequence_parallel,
    )  # fmt: skip


def _split_data_parallel(chosen: ShardPlan, model_ranks: int) -> ShardPlan:
    """*chosen* over the ranks that remain for data parallelism beside *model_ranks* for each copy."""
    if model_ranks == 1:
        return chosen
    if chosen.ranks % model_ranks:
        raise PlanError(f"{chosen.ranks} devices cannot be split into groups of {model_ranks}")
    # 0 is resolved to all ranks, which are fewer here: the old number would exceed them
    shards = 0 if chosen.shard_ranks == chosen.ranks else chosen.shard_ranks
    return replace(chosen, ranks=chosen.ranks // model_ranks, shard_ranks=shards)


def _smallest_device_memory(kinds: str) -> tuple[int, tuple[str, ...]]:
    """The memory of the smallest of several kinds of devices, and a note where they differ."""
    sizes = [parse_memory_size("--gpu", kind) for kind in kinds.split(",")]
    smallest, largest = min(sizes), max(sizes)
    if smallest == largest:
        return smallest, ()
    return smallest, (
        f"shards are equal, so the smallest device decides: {human_bytes(largest - smallest)} of the "
        "largest stay free",
    )


def config_path(model: str) -> Path | None:
    """Returns the config.json that *model* names, itself or by its folder; None for other models."""
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


@cache
def read_model(spec: str) -> ModelSpec:
    """A number of parameters, or a config.json."""
    path = config_path(spec)
    if path is not None:
        read_config_file(path)  # raises for a file without a configuration
        return described_model(describe_entry(str(path)), str(path))
    count = plan.parse_count(spec)
    if count is None:
        raise PlanError(
            f"{spec!r} is neither a number of parameters nor a file nor module:factory",
            hint="Like: 7B, path/to/config.json, mymodel:build",
        )
    return from_count(count, name=spec)


def described_model(
    described: Mapping[str, Any], name: str, *, measured: bool = False, load_in: str = ""
) -> ModelSpec:
    """The model that a child process described; *measured*: with its activations."""
    config = None if measured else described.get("config")
    notes = tuple(described.get("notes", ()))
    units, buffer_bytes, lora = described["units"], described["buffer_bytes"], described.get("lora")
    return model_from_units(name, units, buffer_bytes, config, notes, lora, load_in)


def read_config_file(path: Path) -> Mapping[str, Any]:
    """Returns the content of a JSON or YAML file; raises :class:`PlanError` for anything else."""
    try:
        content = read_text(path)
        return parse_config(content, str(path), dialect_of(path, content)).data
    except UnreadableError as error:
        position = f", line {error.line}" if error.line > 1 else ""
        raise PlanError(f"cannot read {path}{position}: {error.message}", hint=error.fix) from error


def read_config_changes(options: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """The configuration of --config."""
    if not options.config:
        return {}
    path = Path(options.config)
    config = read_config_file(path)
    section = config.get("deepspeed_config")
    inner = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    settings = changes_of_config(config, hidden)
    if isinstance(inner, str):  # accelerate reads everything but the launch settings from that file
        sibling = path.parent / inner
        inner_path = sibling if sibling.is_file() else Path(inner)
        ranks = {"ranks": settings["ranks"]} if "ranks" in settings else {}
        settings = changes_of_config(read_config_file(inner_path), hidden) | ranks
    return settings


_DESCRIBE = """
import runpy, sys
sys.path += {}
runpy.run_module("zeromon_agents.describe", run_name="__main__")
"""
"""The folders are last: what the training has of a package counts."""


# Each call starts a Python that imports torch, and a sweep asks at every point
@cache
def describe_entry(
    entry: str, traced: Batch | None = None, ranks: int = 1, flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Builds the model in a separate process: the core never imports torch or user code.

    *traced*: the batch of a step that the process runs on fake tensors of *ranks*. *flags*: of LoRA.
    """
    command = [find_training_python(), "-c", _DESCRIBE.format(own_package_folders()), entry, *flags]
    if traced is not None:
        command += ["--trace", "--micro-batch", str(traced.sequences)]
        command += ["--length", str(traced.length), "--ranks", str(ranks)]
        command += ["--checkpointing"] if traced.checkpointing else []
        command += [] if traced.fused_attention else ["--no-fused-attention"]
        sys.stderr.write("zeromon: running one step of the model on fake tensors ...\n")
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [
        str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=inherited, check=False)
    # Of several marked lines the last counts: that of describe.py comes after those of the user's code
    marked = [x for x in done.stdout.splitlines() if x.startswith(DESCRIBED)]
    if done.returncode or not marked:
        error_rows = done.stderr.strip().splitlines()
        reason = error_rows[-1] if error_rows else f"exit code {done.returncode}"
        raise PlanError(
            f"cannot build {entry}: {reason}",
            hint="A Python entry must be importable from here, and return a torch.nn.Module; torch is "
            "needed, in this Python or in the first one of the path. A config.json needs transformers "
            "there, which must have the model. Or give a number of parameters: 7B.",
        )
    description: dict[str, Any] = json.loads(marked[-1].removeprefix(DESCRIBED))
    return description


def setup_of_run(
    run: RunSnapshot, options: argparse.Namespace, base: plan.Setup | None = None
) -> plan.Setup:
    """The setup of *run*, changed by the command line; *base*: that of the run, where it is known."""
    base = base or plan.of_run(run)
    if options.lora_rank or options.load_in:
        raise PlanError("a run has the adapters that it has", "Give a config.json for --lora-rank.")
    settings = read_config_changes(options, 0)
    settings.pop("micro_batch", None)
    model, batch = base.model, base.batch
    if batch is not None and options.micro_batch:
        if batch.sequences == 1:
            note = "--micro-batch counts batches of the run's size"
            model = replace(model, notes=(*model.notes, note))
        batch = replace(batch, sequences=options.micro_batch)
    measured = base.measured_activation_bytes
    if batch is not None and options.checkpointing and not batch.checkpointing and measured:
        batch, measured = (replace(batch, checkpointing=True), round(measured * (1 - RECOMPUTED)))
        note = f"activation checkpointing frees about {RECOMPUTED:.0%} of the measured activations"
        model = replace(model, notes=(*model.notes, note))
    chosen = change_plan(base.plan, settings, options)
    model_ranks = base.tensor * base.pipeline
    if options.devices:
        chosen = _split_data_parallel(chosen, model_ranks)
    devices = chosen.ranks * model_ranks
    hosts = options.nodes or hosts_of(devices)
    return replace(
        base,
        model=model,
        plan=chosen,
        device_bytes=parse_memory_size("--gpu", options.gpu) if options.gpu else base.device_bytes,
        capacity_known=base.capacity_known or bool(options.gpu),
        batch=batch,
        measured_activation_bytes=measured,
        reserve=options.reserve,
        host_bytes=parse_host_memory(options.host_memory),
        hosts=hosts,
        is_given=True,
        nvme_bytes=parse_memory_size("--nvme", options.nvme) if options.nvme else None,
        machine=machine_of_options(options, devices),
        measured=calibrate_speeds(base.measured, run, options, hosts),
    )


# ---- speeds of the machine -----------------------------------------------------------------------


def add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    add_option(
        group, "--interconnect", "SPEED",
        "slowest link between ranks, all adapters of a host: 8x400Gb (bits), 25GB/s, ib-ndr; "
        "required for several hosts (default: that of --gpu)",
        link_speed,
    )  # fmt: skip
    add_option(
        group, "--efficiency", "SHARE",
        f"share of the peak FLOP/s that compute reaches (default: {COMPUTE.likely})", parse_share,
    )  # fmt: skip
    add_option(group, "--pcie", "SPEED", "between device and host: pcie4, 32GB/s", link_speed)
    add_option(
        group, "--host-bandwidth", "SPEED",
        "host memory bandwidth available to the optimizer (default: 109GB/s)", link_speed,
    )  # fmt: skip
    add_option(group, "--nvme-bandwidth", "SPEED", "of all NVMe drives of a host: 6GB/s", link_speed)
    add_option(
        group, "--link", "FACTOR",
        "multiply the speed of links between ranks by FACTOR", parse_factor, 1.0,
    )  # fmt: skip
    group.add_argument(
        "--straggler", choices=("as-is", "median"), default="as-is",
        help="with --from RUN; median: assume the slowest rank computes as fast as the median rank",
    )  # fmt: skip


def parse_factor(typed: str) -> float:
    """Reads a factor above 0; ``2x`` is 2."""
    number = float(typed.strip().lower().removesuffix("x"))
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, not {typed}")
    return number


def parse_share(typed: str) -> float:
    """Reads a share, from 0 to less than 1."""
    number = float(typed)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to less than 1, not {typed}")
    return number


def machine_of_options(options: argparse.Namespace, devices: int) -> Machine:
    """The speeds of the devices that --gpu names, and of the links between them."""
    named = [find_named_device(name) for name in (options.gpu or "").split(",")]
    specs = [device for device in named if device is not None]
    # One device of unknown speed may be the slowest of all
    slowest = min(specs, key=lambda d: d.half_flops) if len(specs) == len(named) else None
    hosts = options.nodes or hosts_of(devices)
    host_link = slowest.link if slowest is not None else None
    link = options.interconnect
    # NVLink ends at the host: between hosts, the device's own link is no default
    if link is None and hosts == 1:
        link = host_link
    return Machine(
        device=slowest, efficiency=options.efficiency, link=link, within=host_link, pcie=options.pcie,
        host=options.host_bandwidth, nvme=options.nvme_bandwidth, ranks_per_host=-(-devices // hosts),
        link_times=options.link, late_ranks=options.straggler == "as-is",
    )  # fmt: skip


def calibrate_speeds(
    measured: RunSpeeds | None, run: RunSnapshot, options: argparse.Namespace, hosts: int
) -> RunSpeeds | None:
    """Returns the speeds *measured* in *run*, for another micro-batch, checkpointing, or more hosts."""
    if measured is None:
        return None
    rank = next(rank for rank in run.ranks if rank.config.models)
    size, speeds = micro_batch_of_rank(rank), measured.speeds
    if options.micro_batch and not size:  # the compute of a sample is not known
        speeds = replace(speeds, forward_seconds=None, backward_seconds=None)
    elif options.micro_batch and size:
        speeds = with_larger_batch(speeds, options.micro_batch / size)
    if options.checkpointing and not rank.config.models[0].get("recomputes"):
        speeds = replace(speeds, recompute_seconds=speeds.forward_seconds or 0.0)
    if hosts > measured.hosts:
        speeds = replace(speeds, gather=None, reduce=None, all_reduce=None)  # over another link
    return replace(measured, speeds=speeds)


def parse_memory_size(option: str, size: str) -> int:
    """Returns the bytes of the *size* of *option*, and says how a number without a unit was read.

    Raises :class:`PlanError` for anything but a size.
    """
    nbytes = parse_size(size)
    # a100-40 ends in a digit and is no number without a unit
    if not size.strip()[-1].isalpha() and not size.strip()[:1].isalpha():
        tell_user(f"{option} {size} is read as {human_bytes(nbytes)}")
    return nbytes


def link_speed(speed: str) -> float:
    """Returns the bytes/s of --interconnect and its like."""
    try:
        return parse_link_peak(speed)
    except PlanError as error:
        raise argparse.ArgumentTypeError(f"{error}. {error.hint}") from error


def parse_host_memory(size: str | None) -> int | None:
    """Returns the bytes of --host-memory; "here" is the memory of this machine."""
    if size is None:
        return None
    nbytes = memory_capacity(os.getpid()) if size == "here" else parse_memory_size("--host-memory", size)
    if nbytes < 0:
        raise PlanError("the memory size of this machine is unknown", "Give --host-memory 512GiB.")
    return nbytes


# ---- the strategy, and the plan that it describes ------------------------------------------------

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
        "--reduce-whole", choices=_YES,
        help="ZeRO-1 and 2: all ranks get whole buckets (use_multi_rank_bucket_allreduce)",
    )  # fmt: skip
    group.add_argument(
        "--reduce-each", choices=_YES, help="each micro-step reduces its gradients (no: no_sync)"
    )
    add_option(group, "--tp", "N", "tensor parallelism: ranks per layer", positive)
    add_flag(group, "--sequence-parallel", "with --tp: norms and residuals are split by tokens, too")
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


def change_plan(base: ShardPlan, settings: Mapping[str, Any], options: argparse.Namespace) -> ShardPlan:
    """*base*, changed by a configuration, then by the command line."""
    fields = dict(settings)
    if options.devices:
        fields["ranks"] = options.devices
    fields.setdefault("ranks", base.ranks)
    if options.shard_ranks:
        fields["shard_ranks"] = options.shard_ranks
    elif fields["ranks"] != base.ranks and fields["ranks"] % base.shard_ranks:
        fields["shard_ranks"] = 0  # what it was cannot be kept
    # ShardPlan resolves 0 to a number; kept, full sharding would become hybrid over more ranks
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
        given = fields.get("precision", base.precision)
        # Gradients accumulate in this type; what reduces them has a type of its own
        fields["precision"] = replace(given, grad_bytes=nbytes, reduce_bytes=given.sent_grad_bytes)
    framework = fields.get("framework", base.framework)
    if not options.framework and framework != "deepspeed" and "stage" in fields:
        framework = _wrapper_of_stage(framework, fields["stage"])
        fields["framework"] = framework
    if framework == "ddp":
        fields.setdefault("stage", ZeroStage.NONE)
        if fields["ranks"] == 1:
            fields["bucket_cap_bytes"] = 0  # a single process trains without DDP
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
    if options.reduce_whole:
        fields["reduces_whole_buckets"] = options.reduce_whole == "yes"
    if options.reduce_each:
        fields["reduces_each"] = options.reduce_each == "yes"
    return fields
