"""Checks of how a script shards and trains: arguments, units, precision, order, loads, accumulation."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeromon.check.deepspeed.performance import NO_BF16
from zeromon.check.one_rank import RANKS, last_name, runs_on_one_rank
from zeromon.check.problem import NAMES, Machine, Problem, did_you_mean, set_instead
from zeromon.check.scripts import (
    FSDP,
    UNKNOWN,
    WRAPPERS,
    Call,
    Check,
    Script,
    calls_of,
    is_arguments,
    is_open,
    names_key,
)

_ARGUMENTS: Sequence[str] = NAMES["torch"]["fsdp_arguments"]
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


def unscaled_fp16(script: Script) -> Iterator[Problem]:
    """Yields FSDP in fp16 without the gradient scaler that it needs."""
    # Accelerator, Trainer and Fabric make the scaler themselves
    if script.words & {"ShardedGradScaler", "Accelerator", "Trainer", "Fabric"}:
        return
    for call in calls_of(script, "MixedPrecision", "MixedPrecisionPolicy"):
        low = script.argument(call, "param_dtype", 0)
        if script.value(low) not in ("torch.float16", "torch.half"):
            continue
        if "GradScaler" not in script.words:
            message = "fp16 without a gradient scaler: small gradients become 0"
            fix = "ShardedGradScaler() under FSDP1, GradScaler() under FSDP2, or torch.bfloat16"
            yield script.problem("ZM408", "warning", low or call.node, message, fix, "param_dtype")
        for scaler in calls_of(script, "GradScaler") if _is_fsdp1_policy(script, call) else ():
            message = "ranks look for infinite gradients in their own shards, and skip different steps"
            fix = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()"
            yield script.problem("ZM408", "error", scaler.node, message, fix, "GradScaler")


def _is_fsdp1_policy(script: Script, precision: Call) -> bool:
    """Returns whether FSDP1 shards a model with *precision*."""
    policies = (script.argument(call, "mixed_precision", 6) for call in _sharding_calls(script))
    return any(node is not None and precision.node in script.flow.values(node) for node in policies)


def _sharding_calls(script: Script) -> list[Call]:
    """Returns the calls of FSDP1 that shard; under NO_SHARD each rank has whole gradients."""
    strategies = {c: script.argument(c, "sharding_strategy", 2) for c in calls_of(script, FSDP)}
    return [c for c, node in strategies.items() if not str(script.value(node)).endswith("NO_SHARD")]


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
    shards = {call.node: call for call in calls_of(script, FSDP, "fully_shard")}
    for loop in script.nodes(ast.For):
        # Not below an if, which selects
        for statement in (s for s in loop.body if isinstance(s, (ast.Expr, ast.Assign))):
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
    if not calls_of(script, FSDP, "fully_shard"):
        return
    loads = {call.node: call for call in script.calls if call.name == "torch.load"}
    guarded = {
        inner
        for node in ast.walk(script.tree)
        if isinstance(node, (ast.If, ast.IfExp)) and "rank" in ast.unparse(node.test).lower()
        for inner in ast.walk(node)
    }
    for node in (n for n in script.nodes(ast.Call) if last_name(n) == "load_state_dict"):
        loaded = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "state_dict")]
        origins = {origin for expr in loaded for origin in script.flow.reach(expr)}
        if _SMALL_STATE.search(ast.unparse(node.func).lower()):
            continue
        # pop(): once for each file
        for call in [loads.pop(source) for source in [*loads] if source in origins]:
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
    # Without set_device the launcher may show each process one device, which is cuda:0 for each
    if not calls_of(script, *WRAPPERS) or "set_device" not in script.words:
        return
    for call in script.calls:
        node = script.argument(call, "map_location", 1) if call.name == "torch.load" else None
        if script.value(node) != "cuda:0" or runs_on_one_rank(script, call.node):
            continue
        message = "every rank loads the whole checkpoint into the memory of device 0"
        fix = 'map_location="cpu"'
        yield script.problem("ZM704", "warning", call.node, message, fix, "map_location")


_BF16_ARGUMENTS: Mapping[str, tuple[str, int, Any]] = NAMES["torch"]["bf16_arguments"]
"""Call -> its argument for the precision, the position of it, and the value for bf16."""


def bf16_device(script: Script, machine: Machine) -> Iterator[Problem]:
    """Yields computation in bf16 on a device that emulates it."""
    # A script that asks torch.cuda.is_bf16_supported() chooses another type there
    if machine.device not in NO_BF16 or "is_bf16_supported" in script.words:
        return
    for call in script.calls:
        by_call = ("bf16", -1, True) if is_arguments(call) else ("", -1, None)
        name, position, value = _BF16_ARGUMENTS.get(call.short, by_call)
        node = script.argument(call, name, position)
        if node is not None and script.value(node) == value:
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


# ---- order and loop: optimizer, clipping, accumulation, seeds ---------------------------------------

_SYNC_NAMES = frozenset(NAMES["torch"]["gradient_sync"])


def optimizer_before_sharding(script: Script) -> Iterator[Problem]:
    """Yields optimizers that a function makes before it shards their model."""
    optimizers = [
        (call, set(map(script.flow.original_variable, _parameters_of(script, call.node))))
        for call in script.calls
        if _is_optimizer(call)
    ]
    for shards in calls_of(script, "fully_shard", FSDP):
        if not shards.node.args:
            continue
        model = script.flow.original_variable(shards.node.args[0])
        of_model = [call.node for call, models in optimizers if model in models]
        pairs = [pair for node in of_model if (pair := script.flow.parting_pair(node, shards.node))]
        line_pairs = [[getattr(node, "lineno", 1) for node in pair] for pair in pairs]
        if line_pairs and all(a < b for a, b in line_pairs):
            message = (
                f"the optimizer is made before {shards.short} shards {model.name}: it keeps the whole "
                "parameters, and the shards are never updated"
            )
            fix = f"make the optimizer after line {line_pairs[0][1]}"
            yield script.problem("ZM108", "error", pairs[0][0], message, fix, shards.short)
            return


def _is_optimizer(call: Call) -> bool:
    name = call.name.removeprefix("torch.optim.")
    return name != call.name and name[:1].isupper()


def _parameters_of(script: Script, node: ast.Call) -> list[ast.expr]:
    """Returns the models whose parameters are the first argument, also through names and helpers."""
    names = ("params", "parameters")
    starts = [*node.args[:1], *(k.value for k in node.keywords if k.arg in names)]
    return [
        inner.func.value
        for start in starts
        for inner in script.flow.reach(start)
        if isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in ("parameters", "named_parameters")
    ]


def norm_of_a_shard(script: Script) -> Iterator[Problem]:
    """Yields torch's ``clip_grad_norm_`` on FSDP1: each rank clips by the norm of its shard."""
    fsdp = {call.node for call in _sharding_calls(script)}
    for call in calls_of(script, "clip_grad_norm_"):
        models = [model for model in _parameters_of(script, call.node)
                  if not fsdp.isdisjoint(script.flow.values(model))]  # fmt: skip
        clipped = {
            ast.unparse(method.value)
            for method in script.nodes(ast.Attribute)
            if method.attr == "clip_grad_norm_"
        }
        # Where a model is clipped by its own method, this call is of another strategy
        if models and not clipped & set(map(ast.unparse, models)):
            message = "each rank clips by the norm of its own shard, so the ranks clip differently"
            fix = f"{ast.unparse(models[0])}.clip_grad_norm_(max_norm)"
            yield script.problem("ZM109", "error", call.node, message, fix, "clip_grad_norm_")


def accumulation_communicates(script: Script) -> Iterator[Problem]:
    """Yields loops that accumulate gradients and still reduce them in every micro-step."""
    wraps = calls_of(script, *WRAPPERS)
    # The engine of DeepSpeed reduces gradients only at the end of an accumulation
    engine = any(call.name == "deepspeed.initialize" for call in script.calls)
    if not wraps or engine or script.words & _SYNC_NAMES:
        return
    loops = [node for node in ast.walk(script.tree) if isinstance(node, (ast.For, ast.While))]
    inside = {loop: list(_nodes_in_body(loop)) for loop in loops}
    for loop in loops:
        if any(n in inside for n in inside[loop]):
            continue  # the innermost one decides
        backward = next((n for n in inside[loop] if _calls_method(n, "backward")), None)
        if backward is None:
            continue
        bodies = [nodes for outer, nodes in inside.items() if outer is not loop and loop in nodes]
        steps = max((_step_interval(script, n) for n in inside[loop]), default=0)
        if not any(_calls_method(n, "step") for n in inside[loop]) and any(
            _calls_method(n, "step") for nodes in bodies for n in nodes
        ):
            steps = _loop_turns(script, loop)
        if steps > 1:
            message = f"each of {steps} backwards before a step reduces the gradients"
            if steps == _SOME:
                message = "each backward of an accumulation reduces the gradients"
            fsdp2 = all(call.short == "fully_shard" for call in wraps)
            name = "set_requires_gradient_sync" if fsdp2 else "no_sync"
            call = f"model.{name}(False)" if fsdp2 else f"with model.{name}():"
            fix = f"{call} in all of them but the last; costs whole gradients"
            yield script.problem("ZM308", "info", backward, message, fix, name)
            return


def _nodes_in_body(loop: ast.For | ast.While) -> Iterator[ast.AST]:
    """Yields the nodes that *loop* runs itself: a closure may be called in an optimizer's step."""
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _calls_method(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


_SOME = 1 << 40
"""A number of micro-steps that is known only when the script runs."""


def _step_count(script: Script, node: ast.expr) -> int:
    value = script.value(node)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _SOME if value is UNKNOWN else 0


def _loop_turns(script: Script, loop: ast.For | ast.While) -> int:
    """Returns N of ``for i in range(N)``, and :data:`_SOME` for other loops."""
    expr = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(expr, ast.Call) and ast.unparse(expr.func) == "range" and len(expr.args) == 1:
        return _step_count(script, expr.args[0])
    return _SOME


def _step_interval(script: Script, node: ast.AST) -> int:
    """Returns N of ``if (i + 1) % N == 0: optimizer.step()``, also in an ``or``; 0 for other nodes."""
    if not isinstance(node, ast.If):
        return 0
    if not any(_calls_method(n, "step") for statement in node.body for n in ast.walk(statement)):
        return 0
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    for test in tests:
        operand = test.left if isinstance(test, ast.Compare) and len(test.ops) == 1 else None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            operand = test.operand
        elif not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
            continue
        if isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Mod):
            return _step_count(script, operand.right)
    return 0


_SEEDS = {"torch.manual_seed", "torch.random.manual_seed", "accelerate.utils.set_seed",
          "transformers.set_seed", "lightning.seed_everything"}  # fmt: skip


_SAME_ANYWAY = {"from_pretrained", "broadcast", "set_model_state_dict", "load_checkpoint"}
"""Names of a script that gives all ranks the same parameters, whatever they began with."""


_NOT_SENT = {FSDP: "FSDP1 sends rank 0's only with sync_module_states=True",
             "fully_shard": "fully_shard never sends rank 0's"}  # fmt: skip
"""Call that shards -> what becomes of initial parameters: ``_init_sharded_param`` of torch's FSDPParam
cuts each rank's own."""


def seed_of_each_rank(script: Script) -> Iterator[Problem]:
    """Yields a seed of the rank before a model that FSDP shards as each rank has made it."""
    seeds = [call.node for call in script.calls if call.name in _SEEDS]
    # A model on the meta device has no values before it is sharded
    is_meta = names_key(script, "meta")
    if not seeds or is_meta or script.words & _SAME_ANYWAY:
        return
    for shards in calls_of(script, "fully_shard", FSDP):
        syncs = script.argument(shards, "sync_module_states", 10)
        may_sync = is_open(shards) or script.value(syncs) is not (False if syncs else UNKNOWN)
        for model in () if may_sync else shards.node.args[:1]:
            built = _model_construction(script, model)
            seed = _last_seed(script, seeds, built) if built is not None else None
            if built is None or seed is None or not _depends_on_rank(script, seed):
                continue
            strategy = str(script.value(script.argument(shards, "sharding_strategy", 2)))
            replicates = "HYBRID" in strategy or script.argument(shards, "mesh") is not None
            message = (
                f"each rank makes {ast.unparse(model)} from another seed, and {_NOT_SENT[shards.short]}"
            )
            fix = (
                f"one seed for all ranks before line {built.lineno}, and this one after line "
                f"{shards.node.lineno}"
            )
            severity = "warning" if replicates else "info"  # replicas would never become equal
            yield script.problem("ZM412", severity, seed, message, fix, "manual_seed")
            return


def _model_construction(script: Script, model: ast.expr) -> ast.Call | None:
    """Returns the call that makes *model*, and does not wrap or move one; None if a file replaces it."""
    name = ast.unparse(model)
    if f"{name}.load_state_dict" in map(ast.unparse, script.nodes(ast.Attribute)):
        return None
    calls = [origin for origin in script.flow.values(model) if isinstance(origin, ast.Call)]
    return next(
        (call for call in calls if not re.search(rf"\b{re.escape(name)}\b", ast.unparse(call))), None
    )


def _last_seed(script: Script, seeds: list[ast.Call], built: ast.Call) -> ast.Call | None:
    """Returns the seed that counts where *built* runs; None where there is none or no certain one."""
    seed_lines: dict[ast.Call, int] = {}
    for seed in seeds:
        pair = script.flow.parting_pair(seed, built)
        if pair is None:
            return None
        seed_line, built_line = (getattr(node, "lineno", 0) for node in pair)
        seed_lines |= {seed: seed_line} if seed_line < built_line else {}
    return max(seed_lines, key=lambda seed: seed_lines[seed], default=None)


def _depends_on_rank(script: Script, seed: ast.Call) -> bool:
    names = {"process_index", "local_process_index", *RANKS}
    return any(
        (isinstance(node, ast.Constant) and str(node.value).lower() in names)  # os.environ["RANK"]
        or (isinstance(node, (ast.Name, ast.Attribute)) and last_name(node).lower() in names)
        for argument in (*seed.args[:1], *(k.value for k in seed.keywords if k.arg == "seed"))
        for node in script.flow.reach(argument)
    )


CHECKS: tuple[Check, ...] = (
    unknown_arguments, unscaled_fp16, policy_of_the_root, loaded_on_device_0, every_module,
    loaded_on_every_rank, no_host_backend, optimizer_before_sharding, norm_of_a_shard,
    accumulation_communicates, seed_of_each_rank,
)  # fmt: skip
