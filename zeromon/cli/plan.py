"""Predicts the memory of a model on the given devices under every ZeRO stage, and recommends one.

MODEL is a number of parameters (7B, 350M), a Hugging Face config.json (or its folder), or a Python
entry module:factory, which zeromon builds on the meta device. So it does with a config.json where
transformers is installed, and counts the model exactly; without transformers only some families can
be counted. --config takes a DeepSpeed JSON or an accelerate YAML.

  zeromon plan 7B --devices 4 --memory a100-40
  zeromon plan config.json --devices 8 --memory h100 --micro-batch 4 --length 4096
  zeromon plan config.json --config ds_z3.json --devices 8 --memory 80GiB --html plan.html
  zeromon plan mymodel:build --devices 8 --trace --micro-batch 2 --length 2048
  zeromon plan --from RUN --devices 16 --micro-batch 8       a changed setup, calibrated on a run

Exit code 0 when a stage fits, 1 when none does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from zeromon.check.documents import UnreadableError, dialect_of, parse, read_text
from zeromon.cli import positive
from zeromon.cli.plan_output import as_json, as_text, write_html
from zeromon.cli.plan_speeds import add_speed_arguments, calibrated, machine_of, share
from zeromon.cli.sizes import host_memory, memory_size
from zeromon.errors import PlanError
from zeromon.memory import plan
from zeromon.memory.config_files import changes, deepspeed_changes
from zeromon.memory.models import from_config, from_count, from_units
from zeromon.memory.parallel import part_of
from zeromon.memory.predict import Batch
from zeromon.memory.spec import (
    FRAMEWORKS,
    OPTIMIZERS,
    PLACES,
    PRECISIONS,
    ModelSpec,
    ShardPlan,
    ZeroStage,
)
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon plan MODEL --devices N --memory SIZE [...]``"""
    parser.add_argument("model", nargs="?", help="7B, a config.json, or module:factory")
    parser.add_argument(
        "--from", dest="run", metavar="RUN", help="take model and figures from a run"
    )
    parser.add_argument("--config", help="a DeepSpeed JSON or accelerate YAML file")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--devices", type=positive, metavar="N", help="number of devices (default: 8)"
    )
    machine.add_argument(
        "--memory",
        metavar="SIZE",
        default=None,
        help="of one device: 80 (GiB), 80GB, h100, ... (default: a100); of several kinds: a100,v100",
    )
    machine.add_argument(
        "--reserve", type=share, default=plan.RESERVE, metavar="SHARE",
        help="share for contexts, NCCL, fragmentation (default: %(default)s)",
    )  # fmt: skip
    add_host_arguments(machine)
    machine.add_argument(
        "--nvme", metavar="SIZE", help="free bytes of the NVMe drives of one host: 2TB"
    )
    add_speed_arguments(parser.add_argument_group("speeds, for the seconds of a step"))
    machine.add_argument(
        "--fewest", action="store_true", help="also the fewest devices on which a strategy fits"
    )
    _add_strategy_arguments(parser.add_argument_group("strategy (overrides --config)"))
    what = parser.add_argument_group("batch")
    what.add_argument(
        "--micro-batch", type=positive, metavar="N", help="sequences per rank and micro-step"
    )
    what.add_argument(
        "--length", type=positive, metavar="TOKENS", help="tokens of a sequence (default: 2048)"
    )
    what.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    what.add_argument(
        "--no-fused-attention", action="store_true", help="attention scores are written to memory"
    )
    learning = parser.add_argument_group("reinforcement learning")
    learning.add_argument(
        "--reference", action="append", default=[], metavar="MODEL",
        help="a frozen model beside the trained one (reference, reward): 7B or config.json; repeatable",
    )  # fmt: skip
    learning.add_argument(
        "--rollout", type=positive, metavar="N",
        help="sequences of --length tokens that a rank generates at once",
    )  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="run the real model on fake tensors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--html", metavar="FILE", help="write the table and a chart as HTML (needs plotly)"
    )


def _add_strategy_arguments(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--framework", choices=FRAMEWORKS)
    how.add_argument("--stage", type=int, choices=range(4))
    how.add_argument("--precision", choices=tuple(PRECISIONS))
    how.add_argument(
        "--grad-dtype", choices=("fp32", "bf16", "fp16"),
        help="of gradients between micro-steps (default: that of the precision)",
    )  # fmt: skip
    how.add_argument("--optimizer", choices=tuple(OPTIMIZERS))
    how.add_argument("--offload-optimizer", choices=PLACES)
    how.add_argument("--offload-params", choices=PLACES)
    how.add_argument(
        "--shard-ranks", type=positive, metavar="N", help="hybrid sharding: ranks per copy"
    )
    how.add_argument("--accumulation", type=positive, metavar="N")
    how.add_argument("--tp", type=positive, metavar="N", help="tensor parallelism: ranks per layer")
    how.add_argument("--pp", type=positive, metavar="N", help="pipeline parallelism: stages")


def add_host_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options of the hosts."""
    group.add_argument(
        "--host-memory", metavar="SIZE",
        help="memory of one host, shared by its ranks: 512 (GiB), 1TiB; here: that of this machine",
    )  # fmt: skip
    group.add_argument(
        "--hosts", type=positive, metavar="N", help="number of hosts (default: one for 8 devices)"
    )


DESCRIBED = "zeromon: "
"""Marks the line that the child process prints: a model may print, too."""


def call(options: argparse.Namespace) -> int:
    """Reads, computes, prints."""
    setup = from_run(options) if options.run else from_model(options)
    rows = plan.table(setup)
    best, why = plan.recommended(rows, micro_batch_given=setup.micro_batch_given)
    found = as_json(setup, rows, best, why, fewest=options.fewest)
    if options.html:
        write_html(found, options.html)
    if options.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.write(as_text(setup, rows, best, why, fewest=options.fewest))
    return 0 if best is not None else 1


# ---- the setup ------------------------------------------------------------------------------------


def from_model(options: argparse.Namespace) -> plan.Setup:
    """The setup of a model on the command line."""
    if not options.model:
        raise PlanError("no model is given", hint="Like: zeromon plan 7B --devices 8 --memory h100")
    path = config_path(options.model)
    is_entry = path is None and ":" in options.model
    if options.trace and not (is_entry or (path is not None and _builds())):
        raise PlanError(
            "--trace needs a model that can be built: module:factory",
            "Or a config.json, with transformers installed.",
        )
    model = None if is_entry or options.trace else read_model(options.model)
    hidden = model.architecture.hidden if model is not None and model.architecture else 0
    found = read_changes(options, hidden)
    micro = options.micro_batch or found.pop("micro_batch", None)
    found.pop("micro_batch", None)
    chosen = changed(_base(found, options), found, options)
    batch = None
    if micro or options.length or options.trace:
        batch = Batch(
            sequences=micro or 1,
            length=options.length or 2048,
            checkpointing=options.checkpointing,
            fused_attention=not options.no_fused_attention,
        )
    measured = None
    if model is None:
        described = describe(str(path or options.model), options, batch, chosen.ranks)
        measured = described.get("activation_bytes")
        model = described_model(described, options.model, measured=measured is not None)
    if batch is not None and measured is not None:
        measured = measured // batch.sequences
    options.memory = options.memory or "a100"
    tensor, pipeline = options.tp or 1, options.pp or 1
    chosen = _data_parallel(chosen, tensor * pipeline)
    device_bytes, note = _device_memory(options.memory)
    if options.rollout and model.architecture is None:
        note += ("keys and values of --rollout are not counted: the layers are unknown",)
    whole = model.params
    model = part_of(replace(model, notes=(*model.notes, *note)), tensor, pipeline)
    return plan.Setup(
        model=model,
        plan=chosen,
        device_bytes=device_bytes,
        batch=batch,
        micro_batch_given=micro is not None,
        measured_activation_bytes=measured,
        measured_compute_bytes=4 if measured is not None else 0,  # it is traced in fp32
        reserve=options.reserve,
        host_bytes=host_memory(options.host_memory),
        hosts=options.hosts or plan.hosts_of(chosen.ranks * tensor * pipeline),
        is_given=bool(options.config) or options.stage is not None,
        nvme_bytes=memory_size("--nvme", options.nvme) if options.nvme else None,
        tensor=tensor,
        pipeline=pipeline,
        whole_numel=whole,
        frozen=tuple(read_model(text) for text in options.reference),
        generated_tokens=(options.rollout or 0) * (options.length or 2048),
        machine=machine_of(options, chosen.ranks * tensor * pipeline),
    )


def _data_parallel(chosen: ShardPlan, others: int) -> ShardPlan:
    """*chosen* over the ranks that remain for data parallelism beside *others* for each copy."""
    if others == 1:
        return chosen
    if chosen.ranks % others:
        raise PlanError(f"{chosen.ranks} devices cannot be split into groups of {others}")
    shards = 0 if chosen.shard_ranks == chosen.ranks else chosen.shard_ranks
    return replace(chosen, ranks=chosen.ranks // others, shard_ranks=shards)


def _device_memory(text: str) -> tuple[int, tuple[str, ...]]:
    """The memory of the smallest of several kinds of devices, and a note where they differ."""
    sizes = [memory_size("--memory", part) for part in text.split(",")]
    least, most = min(sizes), max(sizes)
    if least == most:
        return least, ()
    return least, (
        f"shards are equal, so the smallest device decides: {human_bytes(most - least)} of the "
        "largest stay free",
    )


def _base(found: Mapping[str, Any], options: argparse.Namespace) -> ShardPlan:
    """Stage 3 with DeepSpeed's own defaults, where that is the framework."""
    ranks = options.devices or found.get("ranks", 8)
    framework = options.framework or found.get("framework", "deepspeed")
    defaults = deepspeed_changes({}) if framework == "deepspeed" and not options.config else {}
    names = (
        "grad_bucket_numel", "prefetch_numel", "live_numel", "persistence_numel", "reuse_numel",
        "sub_group_numel", "optimizer_buffers", "param_buffer_numel", "max_in_cpu", "pins",
    )  # fmt: skip
    chosen = {name: defaults[name] for name in names if name in defaults}
    return ShardPlan(stage=ZeroStage.PARAMETERS, ranks=ranks, **chosen)


def config_path(text: str) -> Path | None:
    """Returns the config.json that *text* names, itself or by its folder; None for other models."""
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def read_model(text: str) -> ModelSpec:
    """A number of parameters, or a config.json."""
    path = config_path(text)
    if path is not None:
        config = read_config(path)
        if _builds():
            return described_model(describe(str(path)), str(path))
        model = from_config(config, name=str(path))
        kind = config.get("model_type")
        note = f"counted by a formula that equals transformers' own model for {kind}"
        return replace(model, notes=(*model.notes, note))
    count = plan.parse_count(text)
    if count is None:
        raise PlanError(
            f"{text!r} is neither a number of parameters nor a file nor module:factory",
            hint="Like: 7B, path/to/config.json, mymodel:build",
        )
    return from_count(count, name=text)


def _builds() -> bool:
    """Returns whether a child process can build the model of a config.json. Imports neither package."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def described_model(
    described: Mapping[str, Any], name: str, *, measured: bool = False
) -> ModelSpec:
    """The model that a child process described; *measured*: with its activations."""
    config = None if measured else described.get("config")
    notes = tuple(described.get("notes", ()))
    return from_units(name, described["units"], described["buffer_bytes"], config, notes)


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns the content of a JSON or YAML file; raises :class:`PlanError` for anything else."""
    try:
        text = read_text(path)
        return parse(text, str(path), dialect_of(path, text)).data
    except UnreadableError as error:
        line = f", line {error.line}" if error.line > 1 else ""
        raise PlanError(f"cannot read {path}{line}: {error.message}", hint=error.fix) from error


def read_changes(options: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """The configuration of --config."""
    if not options.config:
        return {}
    path = Path(options.config)
    config = read_config(path)
    section = config.get("deepspeed_config")
    inner = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    found = changes(config, hidden)
    if isinstance(inner, str):  # accelerate reads everything but the launch settings from that file
        beside = path.parent / inner
        other = beside if beside.is_file() else Path(inner)
        ranks = {"ranks": found["ranks"]} if "ranks" in found else {}
        found = changes(read_config(other), hidden) | ranks
    return found


def changed(base: ShardPlan, found: Mapping[str, Any], options: argparse.Namespace) -> ShardPlan:
    """*base*, changed by a configuration, then by the command line."""
    fields = dict(found)
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
    given = {
        "framework": options.framework,
        "accumulation": options.accumulation,
        "optimizer_on": options.offload_optimizer,
        "params_on": options.offload_params,
        "precision": PRECISIONS.get(options.precision or ""),
        "optimizer": OPTIMIZERS.get(options.optimizer or ""),
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if options.grad_dtype:
        kept = 4 if options.grad_dtype == "fp32" else 2
        fields["precision"] = replace(fields.get("precision", base.precision), grad_bytes=kept)
    if fields.get("framework", base.framework) == "ddp":
        fields.setdefault("stage", ZeroStage.NONE)
    if "stage" in fields:
        fields["reshards"] = fields["stage"] == ZeroStage.PARAMETERS
    return replace(base, **fields)


def describe(
    entry: str,
    options: argparse.Namespace | None = None,
    batch: Batch | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Builds the model in a separate process: the core never imports torch or user code."""
    command = [sys.executable, "-m", "zeromon_agents.describe", entry]
    if options is not None and options.trace and batch is not None:
        command += ["--trace", "--micro-batch", str(batch.sequences)]
        command += ["--length", str(batch.length), "--ranks", str(ranks)]
        command += ["--checkpointing"] if options.checkpointing else []
        sys.stderr.write("zeromon: running one step of the model on fake tensors ...\n")
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [
        str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=inherited, check=False)
    marked = [x for x in done.stdout.splitlines() if x.startswith(DESCRIBED)]
    if done.returncode or not marked:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise PlanError(
            f"cannot build {entry}: {reason}",
            hint="A Python entry must be importable from here, and return a torch.nn.Module; torch is "
            "needed. A config.json must be of a model that the installed transformers has.",
        )
    found: dict[str, Any] = json.loads(marked[-1].removeprefix(DESCRIBED))
    return found


def from_run(options: argparse.Namespace) -> plan.Setup:
    """The model, the strategy and the activations of a recorded or live run."""
    from zeromon.cli.report import newest_snapshot

    run = newest_snapshot(options.run)
    return setup_of_run(run, options)


def setup_of_run(run: RunSnapshot, options: argparse.Namespace) -> plan.Setup:
    """The setup of *run*, changed by the command line; see :func:`from_run`."""
    base = plan.of_run(run)
    found = read_changes(options, 0)
    found.pop("micro_batch", None)
    model, batch = base.model, base.batch
    if batch is not None and options.micro_batch:
        if batch.sequences == 1:
            note = "--micro-batch counts batches of the run's size"
            model = replace(model, notes=(*model.notes, note))
        batch = replace(batch, sequences=options.micro_batch)
    chosen = changed(base.plan, found, options)
    others = base.tensor * base.pipeline
    if options.devices:
        chosen = _data_parallel(chosen, others)
    return replace(
        base,
        model=model,
        plan=chosen,
        device_bytes=memory_size("--memory", options.memory)
        if options.memory
        else base.device_bytes,
        batch=batch,
        reserve=options.reserve,
        host_bytes=host_memory(options.host_memory),
        hosts=options.hosts or plan.hosts_of(chosen.ranks * others),
        is_given=True,
        nvme_bytes=memory_size("--nvme", options.nvme) if options.nvme else None,
        machine=machine_of(options, chosen.ranks),
        measured=calibrated(
            base.measured, run, options, options.hosts or plan.hosts_of(chosen.ranks)
        ),
    )
