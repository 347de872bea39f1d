"""Where the names of a script get their values: assignments, parameters, and what functions return.

A call of a function of the file counts as its body at the place of the call. Parameters are followed
only in a program: the functions of a library have callers elsewhere. What is not certain is None.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Values: TypeAlias = "list[ast.expr | None]"
"""The expressions that a value may come from; None stands for one that is not known."""

LOOPS = (
    ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp,
)  # fmt: skip
_BRANCHES = (*LOOPS, ast.If, ast.Try, ast.With, ast.ExceptHandler)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COPIES = ("deepcopy", "copy")
_DEPTH = 12
_MAX_FOLLOWED = 30


class Variable(NamedTuple):
    """A name in its function, class or module; an attribute of ``self`` belongs to the class."""

    scope: ast.AST
    name: str


class Store(NamedTuple):
    """``variable[keys...] = value``; the value is None where it is not certain."""

    keys: tuple[str, ...]
    value: ast.expr | None
    place: ast.expr


@dataclass(frozen=True, slots=True)
class Flow:
    """The names and calls of one script."""

    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, ast.AST] = field(default_factory=dict)
    """Node -> its innermost function, class or module."""
    bindings: dict[Variable, list[ast.AST | None]] = field(default_factory=dict)
    stores: dict[Variable, list[Store]] = field(default_factory=dict)
    callers: dict[ast.AST, list[ast.Call]] = field(default_factory=dict)
    """Function -> its calls; a function that is also used as a value has none."""
    shared: set[str] = field(default_factory=set)
    """Names that a function declares ``global`` or ``nonlocal``."""

    # ---- values -----------------------------------------------------------------------------------

    def values(self, node: ast.expr) -> Values:
        """Returns the expressions that *node* may stand for, as far back as they can be followed."""
        expressions: Values = []
        stack, visited = [node], {node}
        while stack:
            top = stack.pop()
            for expr in self.step(top):
                if expr is None or expr is top:
                    expressions.append(expr)
                elif expr not in visited:  # a cycle adds no value
                    visited.add(expr)
                    stack.append(expr)
        # Beyond the bound nothing is certain: a script can lead back to itself in endless variants
        return expressions if expressions and len(visited) <= _MAX_FOLLOWED else [None]

    def step(self, node: ast.expr) -> Values:
        """Returns the expressions that *node* stands for, one assignment, argument or return back."""
        if isinstance(node, ast.IfExp):
            return [node.body, node.orelse]
        if isinstance(node, ast.Call):
            function = self.function(node.func)
            if function is not None and not isinstance(node.func, ast.Attribute):
                return self._returned_values(function) if function.name != "__init__" else [node]
            return [_copy_source(node) or node]
        variable = self.owner(node)
        if variable is None:
            return [node]
        # Any function may assign such a name, at a moment that the text does not show
        if variable.name in self.shared:
            return [None]
        sources: Values = []
        for bound in self.bindings[variable]:
            if isinstance(bound, ast.arg):
                sources += self._given_values(variable.scope, bound.arg)
            elif isinstance(bound, ast.alias):
                sources.append(node)
            else:
                sources.append(bound if isinstance(bound, ast.expr) else None)
        return sources

    def owner(self, node: ast.expr) -> Variable | None:
        """Returns the variable that *node* reads; None for other expressions and unbound names."""
        scope = self.scopes.get(node)
        if _is_on_self(node):
            variable = Variable(self._enclosing_class(scope) or self.tree, _name_of(node))
            return variable if variable in self.bindings else None
        while isinstance(node, ast.Name) and scope is not None:
            if (candidate := Variable(scope, node.id)) in self.bindings:
                return candidate
            scope = self.scopes.get(scope)
            while isinstance(scope, ast.ClassDef):  # a method does not see the names of its class
                scope = self.scopes.get(scope)
        return None

    def original_variable(self, node: ast.expr, depth: int = _DEPTH) -> Variable:
        """Returns the variable that *node* is, in the function that passed it where one call does."""
        variable = self.owner(node)
        if variable is None:
            return Variable(self.scopes.get(node, self.tree), ast.unparse(node))
        bound = self.bindings[variable]
        if depth and any(isinstance(binding, ast.arg) for binding in bound):
            passed = self._given_values(variable.scope, variable.name)
            if len(passed) == 1 and passed[0] is not None:
                return self.original_variable(passed[0], depth - 1)
        return variable

    def reach(self, node: ast.expr) -> Iterator[ast.AST]:
        """Yields the nodes of *node*, and of the expressions that its names stand for."""
        stack, visited = [node], set[ast.AST]()
        while stack and len(visited) < 100:
            if (top := stack.pop()) in visited:
                continue
            visited.add(top)
            for inner in ast.walk(top):
                yield inner
                if isinstance(inner, (ast.Name, ast.Call)):
                    stack += [expr for expr in self.step(inner) if expr is not None]

    def _given_values(self, function: ast.AST, name: str) -> Values:
        calls = self.callers.get(function, [])
        if not calls or not isinstance(function, _FUNCTIONS):
            return [None]
        return [_passed_argument(function, call, name) for call in calls]

    def _returned_values(self, function: Function) -> Values:
        returns: Values = []
        for node in (n for n in ast.walk(function) if self.scopes.get(n) is function):
            # A call of a generator gives an iterator, and not what its body returns
            if isinstance(node, (ast.Yield, ast.YieldFrom)):
                return [None]
            if isinstance(node, ast.Return):
                returns.append(node.value)
        tail = function.body[-1]
        end_types = (ast.Return, ast.Raise, ast.If, ast.With, ast.Try)
        through = not isinstance(tail, end_types) or (isinstance(tail, ast.If) and not tail.orelse)
        # A body that may end without a return gives None, and a decorator may return anything
        return [*returns, None] if through or not returns or function.decorator_list else returns

    # ---- calls ------------------------------------------------------------------------------------

    def function(self, node: ast.expr) -> Function | None:
        """Returns the function of the file that a call of *node* runs; None for any other."""
        bound: list[ast.AST | None] = []
        if isinstance(node, ast.Name):
            variable = self.owner(node)
            bound = self.bindings[variable] if variable is not None else []
        elif _is_on_self(node):
            inside = self._enclosing_class(self.scopes.get(node))
            name = _name_of(node).removeprefix("self.")
            bound = self.bindings.get(Variable(inside, name), []) if inside else []
        if len(bound) == 1 and isinstance(bound[0], ast.ClassDef):
            bound = self.bindings.get(Variable(bound[0], "__init__"), [])
        # Of two definitions of one name, which one runs is not certain
        target = bound[0] if len(bound) == 1 else None
        return target if isinstance(target, _FUNCTIONS) else None

    def call_chains(self, node: ast.AST) -> list[tuple[ast.AST, ...]]:
        """Returns the calls from where the program begins to *node*, for each way; none for too many."""
        complete: list[tuple[ast.AST, ...]] = []
        pending: list[tuple[ast.AST, ...]] = [(node,)]
        while pending:
            chain = pending.pop()
            calls = self.callers.get(self.scopes.get(chain[0], self.tree), [])
            # A function that calls itself would make the chain endless
            pending += [(call, *chain) for call in calls if call not in chain]
            complete += [] if calls else [chain]
            if len(pending) + len(complete) > _MAX_FOLLOWED or len(chain) > _DEPTH:
                return []
        return complete

    def parting_pair(self, node: ast.AST, second: ast.AST) -> tuple[ast.AST, ast.AST] | None:
        """Returns the two statements of one function, in their order there, that lead to the nodes.

        None where the two nodes have no function in common, or more than one order.
        """
        chain_pairs = [(a, b) for a in self.call_chains(node) for b in self.call_chains(second)]
        pairs = [
            next(((x, y) for x, y in zip(a, b, strict=False) if x is not y), None)
            for a, b in chain_pairs
        ]
        orders = {self._source_order(*pair) if pair is not None else None for pair in pairs}
        return pairs[0] if len(orders) == 1 and None not in orders else None

    def _source_order(self, node: ast.AST, second: ast.AST) -> bool | None:
        is_same_scope = self.scopes.get(node) is self.scopes.get(second)
        numbers = getattr(node, "lineno", 0), getattr(second, "lineno", 0)
        return numbers[0] < numbers[1] if is_same_scope and numbers[0] != numbers[1] else None

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yields the statements and expressions around *node* in its function, each with its child."""
        scope = self.scopes.get(node)
        while (parent := self.parents.get(node)) is not None and parent is not scope:
            yield parent, node
            node = parent

    def repeats(self, node: ast.AST) -> bool:
        """Returns whether a loop may be around *node*, or around a call on a way there."""
        chains = self.call_chains(node)
        steps = (step for chain in chains for step in chain)
        # With too many ways to follow, a loop on one of them is possible
        return not chains or any(
            isinstance(parent, LOOPS) for step in steps for parent, _ in self.around(step)
        )

    def _enclosing_class(self, scope: ast.AST | None) -> ast.AST | None:
        while scope is not None and not isinstance(scope, ast.ClassDef):
            scope = self.scopes.get(scope)
        return scope


def _copy_source(call: ast.Call) -> ast.expr | None:
    """Returns what ``copy.deepcopy(x)`` or ``x.copy()`` copies; None for other calls."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    if name not in _COPIES or call.keywords:
        return None
    if len(call.args) == 1:
        return call.args[0]
    is_method = isinstance(call.func, ast.Attribute) and not call.args
    return call.func.value if is_method and isinstance(call.func, ast.Attribute) else None


def _passed_argument(function: Function, call: ast.Call, name: str) -> ast.expr | None:
    """Returns what *call* passes as *name*, or its default; None where that is not certain."""
    has_star = any(isinstance(arg, ast.Starred) for arg in call.args)
    if has_star or any(keyword.arg is None for keyword in call.keywords):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    parameters = [*function.args.posonlyargs, *function.args.args]
    names = [parameter.arg for parameter in parameters]
    defaults = [None] * (len(names) - len(function.args.defaults)) + function.args.defaults
    if name in names:
        at = names.index(name)
        position = at - 1 if names[:1] == ["self"] else at
        return call.args[position] if 0 <= position < len(call.args) else defaults[at]
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return next((default for parameter, default in pairs if parameter.arg == name), None)


# ---- reading ----------------------------------------------------------------------------------------


def read_flow(tree: ast.Module) -> Flow:
    """Returns the names, calls and scopes of a syntax tree; iterative, for deep trees."""
    flow = Flow(tree)
    stack: list[tuple[ast.AST, ast.AST]] = [(child, tree) for child in ast.iter_child_nodes(tree)]
    flow.parents.update((child, tree) for child, _ in stack)
    bound: set[ast.AST] = set()
    while stack:
        node, scope = stack.pop()
        flow.scopes[node] = scope
        for name, value in _bound_names(node, bound):
            inside = flow._enclosing_class(scope) if name.startswith("self.") else scope
            flow.bindings.setdefault(Variable(inside or scope, name), []).append(value)
            if isinstance(value, ast.expr):
                # _unpacked_names() makes an item that is not in the tree, and so has no scope yet
                flow.scopes.setdefault(value, scope)
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            flow.shared.update(node.names)
        if isinstance(node, ast.arguments):  # of the function, not of what is around it
            scope = flow.parents[node]
        inner = node if isinstance(node, _SCOPES) else scope
        for child in ast.iter_child_nodes(node):
            flow.parents[child] = node
            # A decorator runs outside of the function, where the parameters are unknown
            outside = isinstance(node, _FUNCTIONS) and child in node.decorator_list
            stack.append((child, scope if outside else inner))
    _read_stores(flow)
    if _is_program(flow):
        _read_calls(flow)
    return flow


def _bound_names(node: ast.AST, done: set[ast.AST]) -> Iterator[tuple[str, ast.AST | None]]:
    """Yields the names that *node* binds, and to what; adds the targets to *done*."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name, node
    elif isinstance(node, ast.arg):
        yield node.arg, node
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name.partition(".")[0], alias) for alias in node.names)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked_names(target, node.value, done)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            yield from _unpacked_names(node.target, node.value, done)
        done.add(node.target)
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name, None
    elif isinstance(node, (ast.Name, ast.Attribute)) and node not in done:
        is_set = isinstance(node.ctx, (ast.Store, ast.Del))
        yield from ((name, None) for name in (_name_of(node),) if is_set and name)


def _is_on_self(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(value, ast.Name) and value.id == "self"


def _name_of(node: ast.expr) -> str:
    """Returns the name of a variable, or ``self.name`` of an attribute; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"self.{node.attr}" if isinstance(node, ast.Attribute) and _is_on_self(node) else ""


def _unpacked_names(
    target: ast.expr, value: ast.expr, done: set[ast.AST]
) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        stars = [n for n, element in enumerate(target.elts) if isinstance(element, ast.Starred)]
        elements = value.elts if isinstance(value, (ast.Tuple, ast.List)) and not stars else None
        if elements is not None and len(elements) != len(target.elts):
            return
        # Behind a starred target the place depends on the length of the value, which is unknown
        for n, element in enumerate(target.elts[: stars[0]] if stars else target.elts):
            item = ast.copy_location(ast.Subscript(value, ast.Constant(n), ast.Load()), value)
            yield from _unpacked_names(element, elements[n] if elements is not None else item, done)
    elif name := _name_of(target):
        done.add(target)
        yield name, value


def _read_stores(flow: Flow) -> None:
    """Reads ``name["key"] = value``; a value below a condition, and a removed key, are not certain."""
    for node in list(flow.scopes):
        if not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load):
            continue
        keys: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Subscript) and isinstance(base.slice, ast.Constant):
            keys.insert(0, str(base.slice.value))
            base = base.value
        parent = flow.parents.get(node)
        is_assigned = isinstance(parent, ast.Assign) and node in parent.targets
        value = parent.value if is_assigned and isinstance(parent, ast.Assign) else None
        if any(isinstance(outer, _BRANCHES) for outer, _ in flow.around(node)):
            value = None
        variable = flow.owner(base)
        if variable is not None:
            flow.stores.setdefault(variable, []).append(Store(tuple(keys), value, node))
    for stores in flow.stores.values():
        # read_flow() walks by a stack, so stores do not come in the order of the lines
        stores.sort(key=lambda store: store.place.lineno)


def _is_program(flow: Flow) -> bool:
    """Returns whether the file is run: it names ``__main__``, or calls its own functions at the top."""
    for node in flow.tree.body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            return True
    calls = (node for node, scope in flow.scopes.items() if scope is flow.tree)
    return any(isinstance(node, ast.Call) and flow.function(node.func) for node in calls)


def _read_calls(flow: Flow) -> None:
    used: set[ast.AST] = set()
    for node in list(flow.scopes):
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        function = flow.function(node)
        parent = flow.parents.get(node)
        if function is None:
            continue
        if isinstance(parent, ast.Call) and parent.func is node:
            flow.callers.setdefault(function, []).append(parent)
        else:
            used.add(function)
    # A method called on any object may be this one: such calls are in no list of callers
    attributes = {n.attr for n in flow.scopes if isinstance(n, ast.Attribute) and not _name_of(n)}
    for called in list(flow.callers):
        is_method = isinstance(flow.scopes.get(called), ast.ClassDef)
        name = getattr(called, "name", "")
        decorated = bool(getattr(called, "decorator_list", []))
        if called in used or decorated or (is_method and name in attributes):
            del flow.callers[called]
    for calls in flow.callers.values():
        # read_flow() walks by a stack, so calls do not come in the order of the lines
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
