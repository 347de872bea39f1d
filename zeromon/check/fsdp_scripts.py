"""Checks of how a script calls FSDP: arguments, units, precision, and what it loads on every rank."""

import ast
from collections.abc import Iterator

from zeromon.check.deepspeed.hygiene import NO_BF16
from zeromon.check.one_rank import runs_on_one_rank
from zeromon.check.problem import Machine, Problem, did_you_mean
from zeromon.check.scripts import FSDP, WRAPPERS, Call, Check, Script, calls_of, is_arguments, is_open

_ARGUMENTS = (
    "module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy",
    "backward_prefetch", "mixed_precision", "ignored_modules", "param_init_fn", "device_id",
    "sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "ignored_states", "device_mesh",
)  # fmt: skip
"""Parameters of torch's FullyShardedDataParallel."""

_OF_A_POLICY = ("transformer_layer_cls", "min_num_params", "module_classes", "recurse")
_PARTIAL = "functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})"


def unknown_arguments(script: Script) -> Iterator[Problem]:
    """Yields arguments that FSDP1 does not have, and a wrap policy without its classes."""
    for call in calls_of(script, FSDP):
        for keyword in call.node.keywords:
            if keyword.arg is None or keyword.arg in _ARGUMENTS:
                continue
            fix = did_you_mean(keyword.arg, _ARGUMENTS, 0.7) or f"remove {keyword.arg}"
            fix = f"auto_wrap_policy={_PARTIAL}" if keyword.arg in _OF_A_POLICY else fix
            message = f"{FSDP} has no argument {keyword.arg}"
            yield script.problem("ZM107", "error", keyword.value, message, fix, keyword.arg)
        policy = script.argument(call, "auto_wrap_policy", 4)
        for expr in script.flow.values(policy) if policy is not None else ():
            if expr is None or not script.name_of(expr).endswith(".transformer_auto_wrap_policy"):
                continue
            message = (
                "transformer_auto_wrap_policy needs the classes of the layers: it fails when called"
            )
            fix = f"auto_wrap_policy={_PARTIAL}"
            yield script.problem("ZM107", "error", expr, message, fix, "auto_wrap_policy")


def no_shard(script: Script) -> Iterator[Problem]:
    """Yields FSDP1's ``NO_SHARD``, which torch deprecates."""
    for call in calls_of(script, FSDP):
        node = script.argument(call, "sharding_strategy", 2)
        if node is not None and str(script.value(node)).endswith("ShardingStrategy.NO_SHARD"):
            message = "NO_SHARD is deprecated: it is DDP, with FSDP's cost"
            fix = "DistributedDataParallel(model)"
            yield script.problem("ZM104", "warning", node, message, fix, "sharding_strategy")


def unscaled_fp16(script: Script) -> Iterator[Problem]:
    """Yields FSDP in fp16 without the gradient scaler that it needs."""
    # Accelerator, Trainer and Fabric make the scaler themselves
    if script.words & {"ShardedGradScaler", "Accelerator", "Trainer", "Fabric"}:
        return
    for name in ("MixedPrecision", "MixedPrecisionPolicy"):
        for call in calls_of(script, name):
            low = script.argument(call, "param_dtype", 0)
            if script.value(low) not in ("torch.float16", "torch.half"):
                continue
            if "GradScaler" not in script.words:
                message = "fp16 without a gradient scaler: small gradients become 0"
                fix = "ShardedGradScaler() under FSDP1, GradScaler() under FSDP2, or torch.bfloat16"
                yield script.problem("ZM408", "warning", low or call.node, message, fix, "param_dtype")
            for scaler in calls_of(script, "GradScaler") if _is_fsdp1_policy(script, call) else ():
                message = (
                    "each rank looks for infinite gradients in its own shard, so the ranks skip "
                    "different steps"
                )
                fix = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()"
                yield script.problem("ZM408", "error", scaler.node, message, fix, "GradScaler")


def _is_fsdp1_policy(script: Script, precision: Call) -> bool:
    """Returns whether FSDP1 shards a model with *precision*."""
    for call in calls_of(script, FSDP):
        strategy = str(script.value(script.argument(call, "sharding_strategy", 2)))
        policy = script.argument(call, "mixed_precision", 6)
        is_passed = policy is not None and precision.node in script.flow.values(policy)
        if is_passed and not strategy.endswith("NO_SHARD"):
            return True
    return False


def policy_of_the_root(script: Script) -> Iterator[Problem]:
    """Yields blocks that FSDP2 shards without the precision that only the whole model has."""
    calls = calls_of(script, "fully_shard")
    # **kwargs may pass mp_policy, which no call then shows
    if any(is_open(call) for call in calls):
        return
    policy_of = {call.node: script.argument(call, "mp_policy") for call in calls}
    blocks = [call for call in calls if script.flow.repeats(call.node)]
    roots = [call for call in calls if call not in blocks]
    policies = [node for call in roots if (node := policy_of[call.node]) is not None]
    lowers = any(
        isinstance(expr, ast.Call) and script.name_of(expr.func).endswith(".MixedPrecisionPolicy")
        for node in policies
        for expr in script.flow.values(node)
    )
    bare = [call for call in blocks if policy_of[call.node] is None]
    if lowers and len(policies) == len(roots) and bare and len(bare) == len(blocks):
        message = "the blocks do not inherit mp_policy of the whole model: they compute in fp32"
        fix = f"fully_shard(..., mp_policy={ast.unparse(policies[0])})"
        yield script.problem("ZM106", "warning", bare[0].node, message, fix, "mp_policy")


def every_module(script: Script) -> Iterator[Problem]:
    """Yields loops over all modules that make a unit of each, down to the single layers."""
    shards = {call.node: call for name in (FSDP, "fully_shard") for call in calls_of(script, name)}
    for loop in ast.walk(script.tree):
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
            continue
        func = loop.iter.func
        if not isinstance(func, ast.Attribute) or func.attr not in ("modules", "named_modules"):
            continue
        for statement in loop.body:  # not below an if, which selects
            call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
            if call in shards:
                message = "each module is a unit, down to the single layers: many small all-gathers"
                fix = "for block in model.layers: ..., then the model"
                short = shards[call].short
                yield script.problem("ZM312", "warning", statement, message, fix, short)


def loaded_on_every_rank(script: Script) -> Iterator[Problem]:
    """Yields ``load_state_dict(torch.load(...))`` that all ranks of a sharding script run."""
    if not any(call.short in (FSDP, "fully_shard") for call in script.calls):
        return
    loads = {call.node: call for call in script.calls if call.name == "torch.load"}
    guarded = {
        inner
        for node in ast.walk(script.tree)
        if isinstance(node, (ast.If, ast.IfExp)) and "rank" in ast.unparse(node.test).lower()
        for inner in ast.walk(node)
    }
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        loaded = node.args[0] if node.args else None
        if node.func.attr != "load_state_dict" or loaded not in loads or loaded in guarded:
            continue
        call = loads[loaded]
        # The ranks of a host share the pages of a mapped file, and a meta tensor takes no memory
        if is_open(call) or script.value(script.argument(call, "mmap")) is True:
            continue
        if str(script.value(script.argument(call, "map_location", 1))) == "meta":
            continue
        message = "every rank loads the whole checkpoint into the memory of its host"
        fix = 'torch.load(path, mmap=True, map_location="cpu"), or torch.distributed.checkpoint'
        yield script.problem("ZM704", "info", node, message, fix, "torch.load")


def loaded_on_device_0(script: Script) -> Iterator[Problem]:
    """Yields ``torch.load(..., map_location="cuda:0")`` that all ranks run, each with its own device."""
    wraps = any(call.short in WRAPPERS for call in script.calls)
    # Without set_device the launcher may show each process one device, which is cuda:0 for each
    if not wraps or "set_device" not in script.words:
        return
    for call in script.calls:
        node = script.argument(call, "map_location", 1) if call.name == "torch.load" else None
        if script.value(node) != "cuda:0" or runs_on_one_rank(script, call.node):
            continue
        message = "every rank loads the whole checkpoint into the memory of device 0"
        fix = 'map_location="cpu"'
        yield script.problem("ZM704", "warning", call.node, message, fix, "map_location")


def bf16_device(script: Script, machine: Machine) -> Iterator[Problem]:
    """Yields computation in bf16 on a device that emulates it."""
    # A script that asks torch.cuda.is_bf16_supported() chooses another type there
    if machine.device not in NO_BF16 or "is_bf16_supported" in script.words:
        return
    names = {"autocast": "dtype", "MixedPrecision": "param_dtype", "MixedPrecisionPolicy": "param_dtype"}
    for call in script.calls:
        node = script.argument(call, names.get(call.short, ""), 0 if "Mixed" in call.short else 1)
        is_on = call.short in names and script.value(node) == "torch.bfloat16"
        if is_arguments(call):
            node = script.argument(call, "bf16")
            is_on = script.value(node) is True
        elif call.short == "Accelerator":
            node = script.argument(call, "mixed_precision")
            is_on = script.value(node) == "bf16"
        if is_on and node is not None:
            message = f"a {machine.device.upper()} has no units for bf16: it is emulated, and slow"
            fix = "fp16 with a gradient scaler"
            origin = script.flow.values(node)[0] or node
            yield script.problem("ZM406", "warning", origin, message, fix, "bf16")


_ON_SHARDS = ("clip_grad_norm_", "get_total_norm", "full_tensor")
"""Calls that run a collective on DTensors where they are; an optimizer's step runs none."""


def no_host_backend(script: Script) -> Iterator[Problem]:
    """Yields NCCL as the only backend, where FSDP2 keeps the shards on the host and a call reduces them.

    ``DTensor.redistribute`` runs the collective on the device of the shard; without a backend for
    ``cpu`` torch raises RuntimeError. Without a name, ``init_process_group`` makes a backend for each.
    """
    used = next((name for name in _ON_SHARDS if name in script.words), "")
    policies = calls_of(script, "CPUOffloadPolicy") if "fully_shard" in script.words else []
    branches = (p for call in policies for p, _ in script.flow.around(call.node))
    # A setting that turns the offload on may be off
    severity = "info" if any(isinstance(p, (ast.If, ast.IfExp)) for p in branches) else "error"
    for call in calls_of(script, "init_process_group") if used and policies else ():
        node = script.argument(call, "backend", 0)
        values = script.flow.values(node) if node is not None else []
        names = [value.value for value in values if isinstance(value, ast.Constant)]
        if any(str(name).lower() in ("nccl", "cuda:nccl") for name in names):
            message = (
                f"{used} reduces shards that CPUOffloadPolicy keeps on the host, and NCCL reduces none "
                "there: No backend type associated with device type cpu"
            )
            fix = 'init_process_group("cpu:gloo,cuda:nccl")'
            yield script.problem("ZM105", severity, call.node, message, fix, "backend")


CHECKS: tuple[Check, ...] = (
    unknown_arguments, no_shard, unscaled_fp16, policy_of_the_root, loaded_on_device_0, every_module,
    loaded_on_every_rank, no_host_backend,
)  # fmt: skip
