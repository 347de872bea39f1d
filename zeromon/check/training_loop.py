"""Checks of the order and the loop of a training script: wrapping, optimizer, accumulation, clipping."""

import ast
import re
from collections.abc import Iterator

from zeromon.check.one_rank import RANKS, last_name
from zeromon.check.problem import Problem
from zeromon.check.scripts import FSDP, UNKNOWN, WRAPPERS, Call, Check, Script, calls_of, is_open

_SYNC_NAMES = {
    "no_sync", "set_requires_gradient_sync", "set_is_last_backward", "accumulate",
    "require_backward_grad_sync",
}  # fmt: skip


def optimizer_before_sharding(script: Script) -> Iterator[Problem]:
    """Yields optimizers that a function makes before it shards their model."""
    optimizers = [
        (call, set(map(script.flow.original_variable, _parameters_of(script, call.node))))
        for call in script.calls
        if _is_optimizer(call)
    ]
    for shards in (*calls_of(script, "fully_shard"), *calls_of(script, FSDP)):
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
    # Under NO_SHARD each rank has whole gradients, so the norm by torch is right
    unsharded = {
        call.node
        for call in calls_of(script, FSDP)
        if str(script.value(script.argument(call, "sharding_strategy", 2))).endswith("NO_SHARD")
    }
    fsdp = {call.node for call in calls_of(script, FSDP)} - unsharded
    for call in calls_of(script, "clip_grad_norm_"):
        models = [model for model in _parameters_of(script, call.node)
                  if not fsdp.isdisjoint(script.flow.values(model))]  # fmt: skip
        clipped = {ast.unparse(node.func.value) for node in ast.walk(script.tree)
               if _calls_method(node, "clip_grad_norm_") and isinstance(node, ast.Call)
               and isinstance(node.func, ast.Attribute)}  # fmt: skip
        if models and not clipped & set(
            map(ast.unparse, models)
        ):  # else this one is of another strategy
            message = "each rank clips by the norm of its own shard, so the ranks clip differently"
            fix = f"{ast.unparse(models[0])}.clip_grad_norm_(max_norm)"
            yield script.problem("ZM109", "error", call.node, message, fix, "clip_grad_norm_")


def accumulation_communicates(script: Script) -> Iterator[Problem]:
    """Yields loops that accumulate gradients and still reduce them in every micro-step."""
    wraps = any(call.short in WRAPPERS for call in script.calls)
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
            fsdp2 = all(call.short == "fully_shard" for call in script.calls if call.short in WRAPPERS)
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
    is_meta = any(isinstance(n, ast.Constant) and n.value == "meta" for n in ast.walk(script.tree))
    if not seeds or is_meta or script.words & _SAME_ANYWAY:
        return
    for shards in (*calls_of(script, "fully_shard"), *calls_of(script, FSDP)):
        syncs = script.argument(shards, "sync_module_states", 10)
        may_sync = is_open(shards) or script.value(syncs) is not (False if syncs else UNKNOWN)
        for model in () if may_sync else shards.node.args[:1]:
            built = _construction(script, model)
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


def _construction(script: Script, model: ast.expr) -> ast.Call | None:
    """Returns the call that makes *model*, and does not wrap or move one; None if a file replaces it."""
    name = ast.unparse(model)
    attributes = [node for node in ast.walk(script.tree) if isinstance(node, ast.Attribute)]
    if f"{name}.load_state_dict" in map(ast.unparse, attributes):
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
    optimizer_before_sharding, norm_of_a_shard, accumulation_communicates, seed_of_each_rank,
)  # fmt: skip
