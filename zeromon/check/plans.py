"""Checks a sharding strategy against a model and a machine, for DeepSpeed and accelerate.

The estimates count model states without activations: a configuration does not contain the sequence
length. A stage is therefore reported as too high only where a lower one needs at most half of a device.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.base.units import human_bytes, human_rate, human_seconds
from zeromon.check.problem import Config, Machine, Path, Problem, join_names
from zeromon.check.scripts import FSDP, Call, Script
from zeromon.memory import plan
from zeromon.memory.config_files import changes_of_config
from zeromon.memory.ladder import ladder_rungs
from zeromon.memory.plan import ROOMY, choose_row, tuning_texts
from zeromon.memory.predict import Batch
from zeromon.memory.spec import ShardPlan, ZeroStage
from zeromon.memory.speeds import LINK
from zeromon.readout.remedy import ladder_lines


def stage_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields a stage or offload that does not fit, or that the model does not need."""
    setup = _plan_setup(config, machine)
    if setup is None:
        return
    rows = plan.plan_table(setup)
    mine = next(row for row in rows if row.plan == setup.plan)
    path = _first_path_given(config, _STAGES)
    choice = choose_row(setup, rows)
    pick, note = choice.row, choice.reasons[0]
    if not mine.fits_host:
        ranks = -(-mine.plan.ranks // setup.hosts)
        usage = f"{human_bytes(ranks * mine.host_bytes)} of {human_bytes(setup.host_bytes)}"
        message = f"{mine.plan.label} does not fit on the host: {ranks} ranks take {usage}"
        fix = f"{pick.plan.label} ({human_bytes(pick.device_bytes)} of a device)" if pick else note
        yield config.problem("ZM210", "warning", _first_path_given(config, _OFFLOADS), message, fix)
    if not mine.fits_device:
        needs = f"{human_bytes(mine.device_bytes)} of {human_bytes(setup.usable_bytes)} per rank"
        message = f"{mine.plan.label} does not fit: it needs {needs}, without activations"
        fix = f"{pick.plan.label} ({human_bytes(pick.device_bytes)})" if pick else note
        rungs = ladder_lines(ladder_rungs(setup, mine.device_bytes - setup.usable_bytes))
        fix = "\n".join((f"{fix}; or, cheapest first:", *rungs) if rungs else (fix,))
        yield config.problem("ZM203", "warning", path, message, fix)
        return
    if mine.plan.optimizer_on != "device" or mine.plan.params_on != "device":
        if message := _needless_offload(setup):
            paths = [offload for offload in _OFFLOADS if config.has(*offload)] or [path]
            fix = f"remove {join_names(offload[-1] for offload in paths)}"
            yield config.problem("ZM505", "warning", paths[0], message, fix)
        return
    if mine.plan.framework != "deepspeed" and not setup.model.has_units:
        return  # the peak of gathered parameters under FSDP is unknown
    roomy = setup.usable_bytes * ROOMY
    lower = [
        row
        for row in rows
        if row.plan.stage < mine.plan.stage
        and row.plan.optimizer_on == row.plan.params_on == "device"
        and row.device_bytes <= roomy
        and (row.tuned or row).communication_bytes < plan.MUCH_LESS * mine.communication_bytes
    ]
    if lower:
        lowest = max(lower, key=lambda row: row.plan.stage)
        pick, settings = lowest.tuned or lowest, list(tuning_texts(lowest))
        usage = f"{human_bytes(pick.device_bytes)} of {human_bytes(setup.usable_bytes)}"
        message = (
            f"{pick.plan.label} also fits ({usage}, without activations), and sends "
            f"{human_bytes(pick.communication_bytes)} per step instead of "
            f"{human_bytes(mine.communication_bytes)}{_on_the_link(pick, mine, machine)}"
        )
        fix = " with ".join((pick.plan.label, *settings)) + ", if the activations leave room"
        yield config.problem("ZM202", "info", path, message, fix)


def _needless_offload(setup: plan.Setup) -> str:
    """Returns how much of a device everything takes without the offload; "" where that is too much."""
    bare = replace(setup.plan, optimizer_on="device", params_on="device")
    likely, bound = plan.predict_row(setup, bare).device_bytes, ""
    highest = likely
    if bare.framework != "deepspeed" and not setup.model.has_units:
        # The units are unknown: at most the whole model is gathered at once
        gathered_plan = replace(bare, stage=ZeroStage.GRADIENTS, reshards=False)
        highest, bound = plan.predict_row(setup, gathered_plan).device_bytes, "at most "
    if likely > setup.usable_bytes * ROOMY or highest > setup.usable_bytes:
        return ""
    usage = f"{bound}{human_bytes(highest)} of {human_bytes(setup.usable_bytes)}"
    return f"everything fits on the devices without offload: {usage}, without activations"


def script_problems(script: Script, machine: Machine) -> Iterator[Problem]:
    """Yields an offload that a script asks FSDP for, and that the model does not need."""
    offloads = [(call, node) for call in script.calls if (node := _offload_argument(script, call))]
    if not offloads:
        return
    call, node = min(offloads, key=lambda pair: pair[1].lineno)
    strategy = str(script.value(script.argument(call, "sharding_strategy", 2))).rpartition(".")[2]
    lowers = any(c.short in ("MixedPrecision", "MixedPrecisionPolicy") for c in script.calls)
    # As accelerate's file would say it
    options = {"fsdp_version": 1 if call.short == FSDP else 2, "fsdp_offload_params": True,
               "fsdp_sharding_strategy": strategy}  # fmt: skip
    data = {"distributed_type": "FSDP", "mixed_precision": "bf16" if lowers else "no",
            "fsdp_config": options}  # fmt: skip
    setup = _plan_setup(Config(file=script.file, data=data, places={}), machine)
    if setup is not None and (message := _needless_offload(setup)):
        name = _OFFLOAD_ARGUMENTS[call.short]
        fix = f"remove {name}{' from each call' if len(offloads) > 1 else ''}"
        yield script.problem("ZM505", "warning", node, message, fix, name)


_OFFLOAD_ARGUMENTS = {FSDP: "cpu_offload", "fully_shard": "offload_policy"}


def _offload_argument(script: Script, call: Call) -> ast.expr | None:
    """Returns the argument of *call* that is ``CPUOffload(True)`` or ``CPUOffloadPolicy()``."""
    name = _OFFLOAD_ARGUMENTS.get(call.short)
    node = script.argument(call, name, 3 if call.short == FSDP else -1) if name else None
    policies = script.flow.values(node) if node is not None else []
    for policy in (c for c in script.calls if c.node in policies):
        is_on = script.value(script.argument(policy, "offload_params", 0)) is True
        if policy.short == "CPUOffloadPolicy" or (policy.short == "CPUOffload" and is_on):
            return node
    return None


def _on_the_link(pick: plan.Row, mine: plan.Row, machine: Machine) -> str:
    """Says how long the bytes of both take on the slowest link; "" where its speed is not given."""
    if machine.link is None:
        return ""
    reached = machine.link * LINK.likely
    times = (human_seconds(row.communication_bytes / reached) for row in (pick, mine))
    return f": {' instead of '.join(times)} at {human_rate(reached)}"


def _plan_setup(config: Config, machine: Machine) -> plan.Setup | None:
    """Returns the model under *config*; None where the model, the device or the ranks are unknown."""
    model, ranks = machine.model, machine.devices or config.ranks
    if model is None or machine.device_bytes is None:
        return None
    hidden = model.architecture.hidden if model.architecture else 0
    try:
        fields: dict[str, Any] = changes_of_config(config.data, hidden)
        micro_batch = fields.pop("micro_batch", None)
        fields["ranks"] = machine.devices or fields.get("ranks") or ranks
        if not fields["ranks"]:
            return None
        # --devices may be other than in the file, and ShardPlan refuses groups that do not divide it
        if fields["ranks"] % (fields.get("shard_ranks") or 1):
            fields["shard_ranks"] = 0
        fields["reshards"] = fields.get("stage") == ZeroStage.PARAMETERS
        chosen = ShardPlan(**{"stage": ZeroStage.PARAMETERS, **fields})
    except (PlanError, TypeError):  # the other checks report it
        return None
    hosts = machine.hosts or config.whole("num_machines") or 0
    return plan.Setup(
        model=model,
        plan=chosen,
        batch=Batch(sequences=micro_batch, length=1) if micro_batch else None,
        micro_batch_given=False,
        device_bytes=machine.device_bytes,
        host_bytes=machine.host_bytes,
        hosts=hosts if hosts > 0 else plan.hosts_of(chosen.ranks),
    )


_STAGES: tuple[Path, ...] = (
    ("zero_optimization", "stage"), ("deepspeed_config", "zero_stage"),
    ("fsdp_config", "fsdp_sharding_strategy"), ("fsdp_config", "fsdp_reshard_after_forward"),
)  # fmt: skip
"""Settings that shard the model."""

_OFFLOADS: tuple[Path, ...] = (
    ("zero_optimization", "offload_optimizer"), ("zero_optimization", "offload_param"),
    ("deepspeed_config", "offload_optimizer_device"), ("deepspeed_config", "offload_param_device"),
    ("fsdp_config", "fsdp_offload_params"),
)  # fmt: skip
"""Settings that offload to the host."""


def _first_path_given(config: Config, paths: tuple[Path, ...]) -> Path:
    return next((path for path in paths if config.has(*path)), ("distributed_type",))
