"""Finds what one rank alone runs, and the collectives among it, in which all ranks must take part."""

import ast
from collections.abc import Iterator

from zeromon.check.problem import Problem
from zeromon.check.scripts import FSDP, Script, calls_of

_RANKS = {"rank", "global_rank", "local_rank", "world_rank", "get_rank", "get_global_rank"}
_FIRST = {
    "is_main_process", "is_local_main_process", "is_world_process_zero", "is_global_zero",
    "is_local_process_zero",
}  # fmt: skip
"""Names of frameworks that are true on the first rank."""

_STATE = "torch.distributed.checkpoint.state_dict."
_OF_THE_ENGINE = ("save_checkpoint", "save_16bit_model")
"""Methods of DeepSpeed's engine that all ranks must call."""


def one_rank(script: Script, node: ast.AST) -> bool:
    """Returns whether a condition on the way to *node* lets the first rank alone pass."""
    return any(_guarded(script, step) for way in script.flow.chains(node) for step in way)


def one_rank_alone(script: Script) -> Iterator[Problem]:
    """Yields a collective that gathers or saves shards and that the other ranks do not call."""
    found = [node for node in _collectives(script) if one_rank(script, node)]
    for node in found:
        name = _last(node.func)
        message = f"{name} needs all ranks, and only one calls it: it waits for the others forever"
        fix = f"call {name} on every rank, and write the result on one"
        yield script.problem("ZM003", "error", node, message, fix, name)


def _collectives(script: Script) -> Iterator[ast.Call]:
    if calls_of(script, FSDP) or calls_of(script, "fully_shard"):
        for call in script.calls:
            if call.name.startswith(f"{_STATE}get_") and call.short.endswith("state_dict"):
                yield call.node
    if any(call.name == "deepspeed.initialize" for call in script.calls):
        for node in ast.walk(script.tree):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_method or not isinstance(node, ast.Call):
                continue
            if _last(node.func) in _OF_THE_ENGINE and _is_engine(script, node.func):
                yield node


def _is_engine(script: Script, method: ast.expr) -> bool:
    for one in script.flow.values(method.value) if isinstance(method, ast.Attribute) else ():
        made = one.value if isinstance(one, ast.Subscript) else one
        if isinstance(made, ast.Call) and script.name_of(made.func) == "deepspeed.initialize":
            return True
    return False


def _guarded(script: Script, node: ast.AST) -> bool:
    """Returns whether an ``if`` around *node*, or a return before it, leaves the first rank alone."""
    for parent, child in script.flow.around(node):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            body, other = (
                part if isinstance(part, list) else [part] for part in (parent.body, parent.orelse)
            )
            mine = child in body
            others = (n for part in (other if mine else body) for n in ast.walk(part))
            if _holds(script, parent.test, on_first=mine) and not any(
                _is_like(node, n) for n in others
            ):
                return True
        if _left_before(script, parent, child):
            return True
    top = [node, *(parent for parent, _ in script.flow.around(node))][-1]
    return _left_before(script, script.flow.scopes[node], top)


def _is_like(node: ast.AST, other: ast.AST) -> bool:
    """Returns whether both are calls of the same name."""
    calls = isinstance(node, ast.Call) and isinstance(other, ast.Call)
    return calls and _last(node.func) == _last(other.func)  # type: ignore[attr-defined]


def _left_before(script: Script, parent: ast.AST, child: ast.AST) -> bool:
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return any(_left(script, block, child) for block in blocks if isinstance(block, list))


def _left(script: Script, block: list[ast.stmt], child: ast.AST) -> bool:
    """Returns whether all ranks but the first leave *block* before its statement *child*."""
    before = block[: next((n for n, one in enumerate(block) if one is child), 0)]
    return any(
        isinstance(one, ast.If)
        and isinstance(one.body[-1], (ast.Return, ast.Continue))
        and not one.orelse
        and _holds(script, one.test, on_first=False)
        for one in before
    )


def _holds(script: Script, test: ast.expr, *, on_first: bool) -> bool:
    """Returns whether *test* decides by the rank: true on the first alone, or on the others.

    An ``and`` holds on the first rank alone if a part does; an ``or`` lets all others leave if a part
    does, and holds on the first alone if all parts but that of a single process do.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _holds(script, test.operand, on_first=not on_first)
    if isinstance(test, ast.BoolOp):
        parts = [_holds(script, part, on_first=on_first) for part in test.values]
        if isinstance(test.op, ast.And) is on_first:
            return any(parts)
        alone = ["is_initialized" in ast.unparse(part) for part in test.values]
        return any(parts) and all(p or a for p, a in zip(parts, alone, strict=True))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        right = test.comparators[0]
        if _last(test.left).lower() not in _RANKS and not _is_rank_variable(script, test.left):
            return False
        is_zero = isinstance(right, ast.Constant) and right.value == 0
        kinds = (ast.Eq,) if on_first else (ast.NotEq, ast.Gt)
        return is_zero and isinstance(test.ops[0], kinds)
    of_framework = script.flow.function(_called(test)) is None and script.flow.owner(test) is None
    if on_first and _last(test) in _FIRST and of_framework:
        return True
    if _last(test).lower() in _RANKS:
        return not on_first
    return _follows(script, test, on_first=on_first)


def _follows(script: Script, test: ast.expr, *, on_first: bool) -> bool:
    found = script.flow.step(test)
    one = found[0] if len(found) == 1 else None
    return one is not None and one is not test and _holds(script, one, on_first=on_first)


def _is_rank_variable(script: Script, node: ast.expr) -> bool:
    found = script.flow.values(node)
    return all(one is not None and _last(one) == "get_rank" for one in found)


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _last(node: ast.expr) -> str:
    node = _called(node)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
