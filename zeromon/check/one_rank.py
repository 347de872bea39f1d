"""Checks for collectives that a part of the ranks calls: the ranks that call it wait for the others."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from zeromon.check.problem import NAMES, Problem
from zeromon.check.scripts import FSDP, Call, Check, Script, calls_of, is_open

RANKS = {
    "rank", "global_rank", "local_rank", "world_rank", "get_rank", "get_global_rank", "get_local_rank",
    "get_node_local_rank", "ddp_rank", "ddp_local_rank", "process_index", "local_process_index",
}  # fmt: skip
_FIRST = {
    "is_main_process", "is_local_main_process", "is_world_process_zero", "is_global_zero",
    "is_local_process_zero", "is_last_process",
}  # fmt: skip
"""Names of frameworks that are true on one rank."""
_FIRST_ONLY = {"rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only"}
"""Decorators of frameworks that run a function on the first rank."""

_FILE_TESTS = {"exists", "isfile", "isdir", "is_file", "is_dir", "lexists"}
_SINGLE = re.compile(r"(world_size|num_processes|get_world_size\(\)) ?(== 1|<= 1|< 2)\b")

# ---- what all ranks must call ---------------------------------------------------------------------

_ALL_RANKS = NAMES["on_all_ranks"]
_OF_TORCH: Sequence[str] = _ALL_RANKS["functions"]
"""Functions of ``torch.distributed``, and of ``deepspeed.comm``."""
_BY_NAME: Mapping[str, Sequence[str]] = {
    **_ALL_RANKS["modules"], "torch.distributed": _OF_TORCH, "deepspeed.comm": _OF_TORCH
}  # fmt: skip
"""Module -> its functions that all ranks must call."""

_ON_ANY = {"wait_for_everyone", "gather_for_metrics", "full_tensor", "summon_full_params"}
"""Methods of accelerate, DTensor and FSDP1 that no other class has."""

_FSDP1 = f"torch.distributed.fsdp.{FSDP}"
_BY_ORIGIN: Mapping[str, Sequence[str]] = _ALL_RANKS["origins"]
"""Class or function -> methods of its result that all ranks must call."""

_GATHERED = ("GatheredParameters", "summon_full_params", "unwrap_model_for_generation")
"""Contexts in which each rank already has the whole parameters."""


def one_rank_alone(script: Script) -> Iterator[Problem]:
    """Yields collectives that a condition on the rank, or on a file, keeps from a part of the ranks."""
    yield from _unmatched_calls(script, dict(_collective_calls(script)))
    for node, name in _collective_calls(script):
        # What is saved is loaded, or trained on, only where it is there: that is no mistake
        waits = name in _OF_TORCH or name in _ON_ANY
        test = _file_condition(script, node) if waits else None
        if test is not None:
            message = (
                f"{name} runs only where {ast.unparse(test)[:60]} holds, and ranks may see "
                "different files: those that call it then wait forever"
            )
            fix = "decide on one rank, broadcast the decision, and call it on all"
            yield script.problem("ZM003", "warning", node, message, fix, name)


def sharded_forward_alone(script: Script, *, launch_shards: bool) -> Iterator[Problem]:
    """Yields a forward, or a save, of a sharded model that one rank alone runs.

    *launch_shards*: the model of ``deepspeed.initialize`` or of accelerate is at ZeRO stage 3 or under
    FSDP. Where that is unknown only FSDP in the script itself counts.
    """
    calls = {}
    for node in script.nodes(ast.Call):
        name = _sharded_call(script, node, launch_shards)
        contexts = (p for p, _ in script.flow.around(node) if isinstance(p, ast.With))
        if name and not any(
            context in ast.unparse(w.items[0]) for w in contexts for context in _GATHERED
        ):
            calls[node] = name
    yield from _unmatched_calls(script, calls)


def _unmatched_calls(script: Script, calls: dict[ast.Call, str]) -> Iterator[Problem]:
    """Yields calls of the first rank alone, or of all but it, that the other side does not match."""
    sides = {node: _side_of(script, node) for node in calls}
    for node, side in sides.items():
        # The other side may have a call of its own: rank 0 downloads while the others wait in one
        if not side or any(sides[n] not in ("", side) for n in calls if calls[n] == calls[node]):
            continue
        name = calls[node]
        outcome = "only one calls it: it waits for the others forever"
        outcome = "rank 0 does not: they wait forever" if side == "others" else outcome
        message = f"{name} needs all ranks, and {outcome}"
        fix = "move it out of the condition: all ranks call it, and one prints or writes the result"
        yield script.problem("ZM003", "error", node, message, fix, name)


def _collective_calls(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Yields each call that all ranks must make, with its name."""
    named = {call.node: call for call in script.calls}
    shards = bool(calls_of(script, FSDP, "fully_shard"))
    for node in script.nodes(ast.Call):
        call, short = named.get(node), last_name(node.func)
        if call is not None and _is_collective(script, call, shards=shards):
            yield node, short
        elif isinstance(node.func, ast.Attribute):
            synced = short in ("log", "log_dict") and any(
                keyword.arg == "sync_dist" and script.value(keyword.value) is True
                for keyword in node.keywords
            )
            origins = [key for key, methods in _BY_ORIGIN.items() if short in methods]
            origin = origins and _origin_of(script, node.func.value)
            if short in _ON_ANY or synced or (origin and origin in origins):
                yield node, short


def _is_collective(script: Script, call: Call, *, shards: bool) -> bool:
    """Returns whether *call* is a collective of all ranks, and of no group of fewer."""
    module = call.name.rpartition(".")[0]
    if shards and module == "torch.distributed.checkpoint.state_dict":
        return call.short.startswith("get_") and call.short.endswith("state_dict")
    if call.short in _ON_ANY:
        return True
    if call.short not in _BY_NAME.get(module, ()) or is_open(call):
        return False
    passed = [keyword.arg for keyword in call.node.keywords if script.value(keyword.value) is not None]
    # The third argument of a collective is its group, and the only one of a barrier
    positional = 1 if call.short == "barrier" else 3
    grouped = {"group", "process_group", "no_dist"} & set(passed) or len(call.node.args) >= positional
    return call.short == "new_group" or not grouped


def _sharded_call(script: Script, node: ast.Call, launch_shards: bool) -> str:
    """Returns the name of a call that gathers parameters of a sharded model; "" for any other."""
    func, short = node.func, last_name(node.func)
    model: ast.expr = func
    if isinstance(func, ast.Attribute):
        if short not in ("generate", "forward", "module", "save_model", "state_dict"):
            return ""
        model = func if short == "module" else func.value
    if isinstance(model, ast.Call) and last_name(model) == "unwrap_model" and model.args:
        model = model.args[0]
    if isinstance(model, ast.Attribute) and model.attr == "module":
        model = model.value
    origin = _origin_of(script, model)
    is_fsdp = origin == _FSDP1
    own_shards = script.words & {"SHARDED_STATE_DICT", "LOCAL_STATE_DICT"}
    if short == "state_dict":  # FSDP2 and ZeRO return the shards that a rank has
        return short if is_fsdp and not own_shards else ""
    if origin == "transformers.Trainer" or short == "save_model":
        matches = origin == "transformers.Trainer" and short == "save_model" and launch_shards
        return short if matches else ""
    variable = script.flow.original_variable(model)
    sharded = {script.flow.original_variable(call.node.args[0])
               for call in calls_of(script, "fully_shard") if call.node.args}  # fmt: skip
    by_launch = launch_shards and origin in ("deepspeed.initialize", "accelerate.prepare")
    if not (is_fsdp or variable in sharded or by_launch):
        return ""
    return short if short == "generate" else f"a forward of {ast.unparse(model)}"


def _origin_of(script: Script, node: ast.expr) -> str:
    """Returns the key of :data:`_BY_ORIGIN` that made *node*, or ``prepare`` of accelerate; else ""."""
    for origin in script.flow.values(node):
        source = origin.value if isinstance(origin, ast.Subscript) else origin
        if not isinstance(source, ast.Call):
            continue
        name = _class_of(script, source)
        receiver = source.func.value if isinstance(source.func, ast.Attribute) else None
        if receiver is not None and last_name(source) in ("prepare", "prepare_model"):
            makers = (value for value in script.flow.values(receiver) if isinstance(value, ast.Call))
            if any(_class_of(script, maker) == "accelerate.Accelerator" for maker in makers):
                return "accelerate.prepare"
        if name:
            return name
    return ""


def _class_of(script: Script, call: ast.Call) -> str:
    """Returns the key of :data:`_BY_ORIGIN` that *call* calls; "" for any other."""
    name = script.name_of(call.func)
    top, short = name.partition(".")[0], name.rpartition(".")[2]
    if top in ("transformers", "trl") and short.endswith("Trainer"):
        return "transformers.Trainer"
    keys = {(key.partition(".")[0], key.rpartition(".")[2]): key for key in _BY_ORIGIN}
    return keys.get((top, short), "")


# ---- which ranks get there ------------------------------------------------------------------------

_Side = Literal["", "first", "others"]


def runs_on_one_rank(script: Script, node: ast.AST) -> bool:
    """Returns whether a condition on the way to *node* lets the first rank alone pass."""
    return _side_of(script, node) == "first"


def _side_of(script: Script, node: ast.AST) -> _Side:
    """Returns which ranks alone reach *node* on one of the ways there; "" for all, and for unknown."""
    sides = [_guard_of(script, step) for path in script.flow.call_chains(node) for step in path]
    return next((side for side in sides if side), "")


def _guard_of(script: Script, node: ast.AST) -> _Side:
    """Returns which ranks an ``if`` around *node*, or a return before it, leaves in its function."""
    tests = [p.test for p, c in script.flow.around(node) if isinstance(p, ast.If) and c in p.body]
    if any(_SINGLE.search(ast.unparse(test)) for test in tests):  # there are no other ranks
        return ""
    for parent, child in script.flow.around(node):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            mine = child in body
            if _is_by_rank(script, parent.test, on_first=mine):
                return "first"
            # With an "and" or "or" the first rank may come here, too
            exact = not isinstance(parent.test, ast.BoolOp)
            if exact and _is_by_rank(script, parent.test, on_first=not mine):
                return "others"
        if side := _left_before(script, parent, child):
            return side
    # around() stops below the function, whose own body may have the early return
    top = [node, *(parent for parent, _ in script.flow.around(node))][-1]
    scope = script.flow.scopes[node]
    if any(last_name(mark) in _FIRST_ONLY for mark in getattr(scope, "decorator_list", ())):
        return "first"
    return _left_before(script, scope, top)


def _left_before(script: Script, parent: ast.AST, child: ast.AST) -> _Side:
    """Returns which ranks are left where the others leave a block of *parent* before *child*."""
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    for block in blocks:
        at = block.index(child) if isinstance(block, list) and child in block else 0
        for statement in block[:at] if at and block else ():
            if not isinstance(statement, ast.If) or statement.orelse or not _leaves(statement.body[-1]):
                continue
            if _is_by_rank(script, statement.test, on_first=False):
                return "first"
    return ""


def _leaves(statement: ast.stmt) -> bool:
    """Returns whether nothing behind *statement* runs in its block."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_name(statement.value) in ("exit", "_exit", "quit")
    return isinstance(statement, (ast.Return, ast.Continue, ast.Break))


def _is_by_rank(script: Script, test: ast.expr, *, on_first: bool) -> bool:
    """Returns whether *test* decides by the rank: true on the first alone, or on the others.

    An ``and`` holds on the first rank alone if a part does; an ``or`` lets all others leave if a part
    does, and holds on the first alone if all parts but that of a single process do.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_by_rank(script, test.operand, on_first=not on_first)
    if isinstance(test, ast.BoolOp):
        verdicts = [_is_by_rank(script, operand, on_first=on_first) for operand in test.values]
        if isinstance(test.op, ast.And) is on_first:
            return any(verdicts)
        init_tests = ["is_initialized" in ast.unparse(operand) for operand in test.values]
        return any(verdicts) and all(p or a for p, a in zip(verdicts, init_tests, strict=True))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compares_rank(script, test, on_first=on_first)
    # A function or variable of the script may have such a name, and mean something else
    of_framework = script.flow.function(_func_of(test)) is None and script.flow.owner(test) is None
    if on_first and last_name(test) in _FIRST and of_framework:
        return True
    # A rank alone as a condition is true on all ranks but 0
    if last_name(test).lower() in RANKS:
        return not on_first
    sources = script.flow.step(test)
    expr = sources[0] if len(sources) == 1 else None
    return expr is not None and expr is not test and _is_by_rank(script, expr, on_first=on_first)


def _compares_rank(script: Script, test: ast.Compare, *, on_first: bool) -> bool:
    """Returns whether *test* compares a rank so that the first, or all others, pass."""
    subject, value_node, sign = test.left, test.comparators[0], test.ops[0]
    if isinstance(subject, ast.Constant):  # 0 == rank
        subject, value_node = value_node, subject
    if not _is_rank(script, subject):
        return False
    try:
        value = ast.literal_eval(value_node)
    except (ValueError, TypeError, SyntaxError):
        return False
    if isinstance(value, (tuple, list, set)):
        # -1 is the rank of a program that is not distributed
        kinds: tuple[type, ...] = (ast.In,) if on_first else (ast.NotIn,)
        return set(value) in ({0}, {-1, 0}) and isinstance(sign, kinds)
    if value == 1:
        return isinstance(sign, ast.Lt if on_first else ast.GtE)
    kinds = (ast.Eq, ast.LtE) if on_first else (ast.NotEq, ast.Gt)
    return value in (0, "0") and isinstance(sign, kinds)


def _is_rank(script: Script, node: ast.expr) -> bool:
    """Returns whether *node* is the rank, by its name or by where its value comes from."""
    if last_name(node).lower() in RANKS:
        return True
    origins = [ast.unparse(origin) if origin is not None else "" for origin in script.flow.values(node)]
    return all(_ENVIRONMENT.search(origin) or origin.endswith("get_rank()") for origin in origins)


_ENVIRONMENT = re.compile(r"(environ|getenv)\W.*['\"](LOCAL_)?RANK['\"]")


def _file_condition(script: Script, node: ast.Call) -> ast.expr | None:
    """Returns the condition on a file that decides whether a rank calls *node*; None without one."""
    for parent, child in script.flow.around(node):
        if not isinstance(parent, ast.If) or child is parent.test:
            continue
        test: ast.expr = parent.test
        while isinstance(test, ast.UnaryOp):
            test = test.operand
        operands = test.values if isinstance(test, ast.BoolOp) else [test]
        origins = [origin for operand in operands for origin in script.flow.step(operand)]
        other_arm = parent.orelse if child in parent.body else parent.body
        calls = (n for arm in other_arm for n in ast.walk(arm) if isinstance(n, ast.Call))
        if any(last_name(call) == last_name(node) for call in calls):
            continue
        if any(isinstance(o, ast.Call) and last_name(o) in _FILE_TESTS for o in origins):
            return parent.test
    return None


def _func_of(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def last_name(node: ast.expr) -> str:
    """Returns the name of a variable, attribute or called function; "" for anything else."""
    node = _func_of(node)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


CHECKS: tuple[Check, ...] = (one_rank_alone,)
