"""The options of ``zeromon plan`` on model, machine and batch, and the setup that they describe."""

from __future__ import annotations

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
from zeromon.base.units import human_bytes
from zeromon.check.documents import UnreadableError, dialect_of, parse_config, read_text
from zeromon.cli.options import add_flag, add_list, add_option, positive
from zeromon.cli.plan_speeds import (
    add_speed_arguments,
    calibrate_speeds,
    machine_of_options,
    parse_host_memory,
    parse_memory_size,
    parse_share,
)
from zeromon.cli.plan_strategy import add_strategy_arguments, base_plan, change_plan
from zeromon.memory import plan
from zeromon.memory.config_files import changes_of_config
from zeromon.memory.ladder import RECOMPUTED
from zeromon.memory.models import from_count, model_from_units, part_of_model
from zeromon.memory.predict import Batch
from zeromon.memory.spec import ModelSpec, ShardPlan
from zeromon.probes.installation import find_training_python, own_package_folders
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


def add_host_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options of the hosts."""
    add_option(
        group, "--host-memory", "SIZE",
        "memory of one host, shared by its ranks: 512 (GiB), 1TiB; here: that of this machine",
    )  # fmt: skip
    add_option(group, "--nodes", "N", "number of nodes (default: one for 8 devices)", positive)


DESCRIBED = "zeromon: "
"""Marks the line that the child process prints: a model may print, too."""


# ---- the setup ------------------------------------------------------------------------------------


def setup_from_model(options: argparse.Namespace) -> plan.Setup:
    """The setup of a model on the command line."""
    if not options.model:
        raise PlanError("no model is given", hint="Like: zeromon plan 7B --devices 8 --gpu h100")
    path = config_path(options.model)
    is_entry = path is None and ":" in options.model
    if options.trace and path is None and not is_entry:
        raise PlanError(
            "--trace needs a model that can be built: module:factory",
            "Or a config.json, with transformers installed.",
        )
    model = None if is_entry or options.trace else read_model(options.model)
    hidden = model.architecture.hidden if model is not None and model.architecture else 0
    settings = read_config_changes(options, hidden)
    micro = options.micro_batch or settings.pop("micro_batch", None)
    settings.pop("micro_batch", None)
    chosen = change_plan(base_plan(settings, options), settings, options)
    batch = _given_batch(options, micro) if micro or options.length or options.trace else None
    measured = None
    if model is None:
        entry = str(path or options.model)
        described = (
            describe_entry(entry, batch, chosen.ranks) if options.trace else describe_entry(entry)
        )
        measured = described.get("activation_bytes")
        model = described_model(described, options.model, measured=measured is not None)
    if batch is not None and measured is not None:
        measured = measured // batch.sequences
    options.gpu = options.gpu or "a100"
    tensor, pipeline = options.tp or 1, options.pp or 1
    chosen = _split_data_parallel(chosen, tensor * pipeline)
    device_bytes, note = _smallest_device_memory(options.gpu)
    if options.rollout and model.architecture is None:
        note += ("keys and values of --rollout are not counted: the layers are unknown",)
    whole_numel = model.params
    model = part_of_model(replace(model, notes=(*model.notes, *note)), tensor, pipeline)
    return plan.Setup(
        model=model,
        plan=chosen,
        device_bytes=device_bytes,
        batch=batch,
        micro_batch_given=micro is not None,
        measured_activation_bytes=measured,
        measured_compute_bytes=4 if measured is not None else 0,  # it is traced in fp32
        reserve=options.reserve,
        host_bytes=parse_host_memory(options.host_memory),
        hosts=options.nodes or plan.hosts_of(chosen.ranks * tensor * pipeline),
        is_given=bool(options.config) or options.stage is not None,
        nvme_bytes=parse_memory_size("--nvme", options.nvme) if options.nvme else None,
        tensor=tensor,
        pipeline=pipeline,
        whole_numel=whole_numel,
        frozen=tuple(map(read_model, options.reference)),
        generated_tokens=(options.rollout or 0) * (options.length or 2048),
        machine=machine_of_options(options, chosen.ranks * tensor * pipeline),
    )


def _given_batch(options: argparse.Namespace, micro: int | None) -> Batch:
    return Batch(
        sequences=micro or 1,
        length=options.length or 2048,
        checkpointing=options.checkpointing,
        fused_attention=not options.no_fused_attention,
    )


def _split_data_parallel(chosen: ShardPlan, model_ranks: int) -> ShardPlan:
    """*chosen* over the ranks that remain for data parallelism beside *model_ranks* for each copy."""
    if model_ranks == 1:
        return chosen
    if chosen.ranks % model_ranks:
        raise PlanError(f"{chosen.ranks} devices cannot be split into groups of {model_ranks}")
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
    described: Mapping[str, Any], name: str, *, measured: bool = False
) -> ModelSpec:
    """The model that a child process described; *measured*: with its activations."""
    config = None if measured else described.get("config")
    notes = tuple(described.get("notes", ()))
    return model_from_units(name, described["units"], described["buffer_bytes"], config, notes)


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


@cache
def describe_entry(entry: str, traced: Batch | None = None, ranks: int = 1) -> dict[str, Any]:
    """Builds the model in a separate process: the core never imports torch or user code.

    *traced*: the batch of a step that the process runs on fake tensors of *ranks*.
    """
    command = [find_training_python(), "-c", _DESCRIBE.format(own_package_folders()), entry]
    if traced is not None:
        command += ["--trace", "--micro-batch", str(traced.sequences)]
        command += ["--length", str(traced.length), "--ranks", str(ranks)]
        command += ["--checkpointing"] if traced.checkpointing else []
        sys.stderr.write("zeromon: running one step of the model on fake tensors ...\n")
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [
        str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=inherited, check=False)
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


def read_run_snapshot(name: str) -> RunSnapshot:
    """The run *name*, or the snapshot in the file of that name."""
    from zeromon.cli.report import snapshot_of

    return snapshot_of(name)[0]


def setup_of_run(
    run: RunSnapshot, options: argparse.Namespace, base: plan.Setup | None = None
) -> plan.Setup:
    """The setup of *run*, changed by the command line; *base*: that of the run, where it is known."""
    base = base or plan.of_run(run)
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
        hosts=options.nodes or plan.hosts_of(chosen.ranks * model_ranks),
        is_given=True,
        nvme_bytes=parse_memory_size("--nvme", options.nvme) if options.nvme else None,
        machine=machine_of_options(options, chosen.ranks),
        measured=calibrate_speeds(
            base.measured, run, options, options.nodes or plan.hosts_of(chosen.ranks)
        ),
    )
