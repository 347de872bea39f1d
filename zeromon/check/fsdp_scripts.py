"""Checks of how a script calls FSDP: arguments, units, precision, and what it loads on every rank."""

import ast
import re
from collections.abc import Iterator

from zeromon.check.deepspeed.hygiene import NO_BF16
from zeromon.check.one_rank import last_name, runs_on_one_rank
from zeromon.check.problem import Machine, Problem, did_you_mean, set_instead
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
            if keyword.arg in _OF_A_POLICY:
                fix = set_instead(keyword.arg, f"auto_wrap_policy={_PARTIAL}")
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


_BLOCK_LISTS = {"layers", "layer", "blocks", "block", "h"}
"""Attributes in which models keep their blocks, as ``model.layers`` or ``transformer.h``."""
_BLOCK_NAME = re.compile(r"(?!sub)(\w+_)?(layer|block|blk)\d*")
_STAGE_NAME = re.compile(r"\w*(stage|group|tower)\w*")


def every_module(script: Script) -> Iterator[Problem]:
    """Yields loops that make a unit of each module, or of each part of a block."""
    shards = {call.node: call for name in (FSDP, "fully_shard") for call in calls_of(script, name)}
    for loop in (node for node in ast.walk(script.tree) if isinstance(node, ast.For)):
        # Not below an if, which selects
        statements = [
            statement for statement in loop.body if isinstance(statement, (ast.Expr, ast.Assign))
        ]
        for statement in statements:
            call = next((shards[n] for n in ast.walk(statement) if n in shards), None)
            if call is not None and (fault := _too_fine(script, loop)):
                message = f"{fault}: many small all-gathers"
                fix = f"for block in model.layers: {ast.unparse(call.node.func)}(block), then the model"
                yield script.problem("ZM312", "warning", statement, message, fix, call.short)


def _too_fine(script: Script, loop: ast.For) -> str:
    """Returns what is wrong with units of what *loop* goes over; "" where they may be blocks."""
    method, module = _iterated_module(loop)
    if method in ("modules", "named_modules"):
        return "each module is a unit, down to the single layers"
    part_names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    # Parts that are called blocks are those of a stage, as of a ResNet or a Swin transformer
    if method not in ("", "children", "named_children") or any(map(_BLOCK_NAME.fullmatch, part_names)):
        return ""
    return "each part of a block is a unit" if _is_block(script, loop, module, method) else ""


def _is_block(script: Script, loop: ast.For, module: ast.expr, method: str) -> bool:
    """Returns whether *module*, over whose parts *loop* goes, is one block of a model."""
    if isinstance(module, ast.Subscript):
        return last_name(module.value) in _BLOCK_LISTS
    if not isinstance(module, ast.Name) or _STAGE_NAME.fullmatch(module.id.lower()):
        return False
    for outer, _ in script.flow.around(loop):
        if isinstance(outer, ast.For) and any(
            isinstance(n, ast.Name) and n.id == module.id for n in ast.walk(outer.target)
        ):
            return last_name(_iterated_module(outer)[1]) in _BLOCK_LISTS
    return bool(method and _BLOCK_NAME.fullmatch(module.id.lower()))


def _iterated_module(loop: ast.For) -> tuple[str, ast.expr]:
    """Returns the method of a module that *loop* iterates, "" for none, and the module."""
    expr = loop.iter
    while isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.args:
        expr = expr.args[0]  # enumerate, list, reversed
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute):
        return expr.func.attr, expr.func.value
    return "", expr


def loaded_on_every_rank(script: Script) -> Iterator[Problem]:
    """Yields ``load_state_dict`` of what ``torch.load`` read on all ranks of a sharding script."""
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
        if not isinstance(node, ast.Call) or last_name(node) != "load_state_dict":
            continue
        loaded = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "state_dict")]
        origins = {origin for expr in loaded for origin in script.flow.reach(expr)}
        if _SMALL_STATE.search(ast.unparse(node.func).lower()):
            continue
        for call in [loads.pop(read) for read in [*loads] if read in origins]:  # once for each file
            if call.node not in guarded and _reads_whole_file(script, call):
                message = "every rank loads the whole checkpoint into the memory of its host"
                fix = 'torch.load(path, mmap=True, map_location="cpu"), or torch.distributed.checkpoint'
                yield script.problem("ZM704", "info", node, message, fix, "torch.load")


_SMALL_STATE = re.compile("sched|scaler|sampler|loader")
"""Receivers of ``load_state_dict`` whose state is a few numbers."""


def _reads_whole_file(script: Script, call: Call) -> bool:
    """Returns whether ``torch.load`` makes a copy for each rank."""
    # The ranks of a host share the pages of a mapped file, and a meta tensor takes no memory
    if is_open(call) or script.value(script.argument(call, "mmap")) is True:
        return False
    return str(script.value(script.argument(call, "map_location", 1))) != "meta"


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
            fix = 'backend="cpu:gloo,cuda:nccl"'
            yield script.problem("ZM105", severity, call.node, message, fix, "backend")


CHECKS: tuple[Check, ...] = (
    unknown_arguments, no_shard, unscaled_fp16, policy_of_the_root, loaded_on_device_0, every_module,
    loaded_on_every_rank, no_host_backend,
)  # fmt: skip
