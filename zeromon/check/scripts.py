"""Checks of a training script by its syntax tree; the script is never executed.

A check uses literals, and names that :mod:`zeromon.check.flow` follows to one literal. Each check is
one function, and one line in :data:`CHECKS`.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zeromon.check.flow import LOOPS, Flow, Store, read_flow
from zeromon.check.problem import NAMES, Config, Path, Problem
from zeromon.memory.config_files import AUTO, parse_number

FRAMEWORKS = (
    "torch", "deepspeed", "accelerate", "transformers", "trl", "lightning", "pytorch_lightning",
)  # fmt: skip
"""Packages whose calls are checked."""

FSDP = "FullyShardedDataParallel"
WRAPPERS = (FSDP, "DistributedDataParallel", "fully_shard")
NONEXISTENT: Mapping[str, str] = NAMES["deepspeed"]["nonexistent"]
"""Names that no framework has though scripts use them -> the replacement."""


_MAX_KEYS = 2000
"""A configuration has fewer keys; a script may refer to dicts so that they have endlessly many."""


Node = TypeVar("Node", bound=ast.AST)


class Unknown:
    """A value that is known only when the script runs."""


UNKNOWN = Unknown()


class Computed(str):
    """The text "auto", for a value of a configuration that a script computes."""

    __slots__ = ()


COMPUTED = Computed(AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function or class of a framework."""

    name: str
    """Dotted name, such as ``torch.distributed.fsdp.FullyShardedDataParallel``."""
    node: ast.Call
    loops: int
    """Number of loops and comprehensions around the call."""

    @property
    def short(self) -> str:
        """The part of the name after the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script, with the facts that the checks need."""

    file: str
    tree: ast.Module
    calls: tuple[Call, ...]
    flow: Flow
    """Where its names get their values."""
    names: Mapping[str, str]
    """Imported name -> its dotted name."""
    words: frozenset[str]
    """All names and attributes of the script."""
    dialect: str = "python"
    """yaml for the arguments of a Trainer that stand in a configuration."""
    passed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the launch command."""

    def argument(self, call: Call, name: str, position: int = -1) -> ast.expr | None:
        """Returns the expression of an argument; None where the call does not give the argument."""
        for keyword in call.node.keywords:
            if keyword.arg == name:
                return keyword.value
        args = call.node.args
        is_there = 0 <= position < len(args)
        # Behind *args no position of an argument is certain
        starred = any(isinstance(arg, ast.Starred) for arg in args)
        return args[position] if is_there and not starred else None

    def value(self, node: ast.expr | None) -> Any:
        """Returns the literal of *node*, or its dotted name in a framework; else :data:`UNKNOWN`."""
        if node is None:
            return UNKNOWN
        values = [self._literal_value(expr) for expr in self.flow.values(node)]
        value = values[0]
        # True == 1 in Python: without the types, both would be one value
        return value if all(type(v) is type(value) and v == value for v in values) else UNKNOWN

    def _literal_value(self, node: ast.expr | None) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        return dotted_name(node, self.names) or UNKNOWN if node is not None else UNKNOWN

    def nodes(self, kind: type[Node]) -> Iterator[Node]:
        """Yields all nodes of a type, in the order of :func:`ast.walk`."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

    def name_of(self, node: ast.expr) -> str:
        """Returns the dotted name of a framework that *node* is; else ""."""
        return dotted_name(node, self.names)

    def problem(
        self, code: str, severity: str, node: ast.AST, message: str, fix: str, key: str = ""
    ) -> Problem:
        """Returns a problem at *node*."""
        position = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        return Problem(self.file, *position, code, severity, message, fix, key)


Check = Callable[[Script], Iterable[Problem]]


def read_script(file: str, tree: ast.Module) -> Script:
    """Returns the calls, literals, imports and names of a syntax tree."""
    names = dict(_imported_names(tree))
    identifiers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            identifiers.add(node.id)
        elif isinstance(node, ast.Attribute):
            identifiers.add(node.attr)
    return Script(
        file=file,
        tree=tree,
        calls=tuple(_framework_calls(tree, names)),
        flow=read_flow(tree),
        names=names,
        words=frozenset(identifiers),
    )


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # "import torch.distributed" binds the name torch alone
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        # A relative import is a module of the script's own package, even if it is called torch
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted_name(node: ast.expr, names: Mapping[str, str]) -> str:
    """Returns the dotted name of an expression that starts with an import of a framework; else ""."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    name = ".".join([names[node.id], *attributes])
    return name if name.partition(".")[0] in FRAMEWORKS else ""


def _framework_calls(tree: ast.Module, names: Mapping[str, str]) -> Iterator[Call]:
    """Yields all calls of frameworks, with their loops; iterative, for deep trees."""
    stack: list[tuple[ast.AST, int]] = [(tree, 0)]
    while stack:
        node, loops = stack.pop()
        if isinstance(node, LOOPS):
            loops += 1
        if isinstance(node, ast.Call):
            name = dotted_name(node.func, names)
            if name:
                yield Call(name=name, node=node, loops=loops)
        stack.extend((child, loops) for child in ast.iter_child_nodes(node))


def is_training(script: Script) -> bool:
    """Returns whether the script uses anything that the checks know."""
    names = {
        *WRAPPERS, "MixedPrecision", "MixedPrecisionPolicy", "FullStateDictConfig", "HfDeepSpeedConfig",
        "DeepSpeedStrategy",
    }  # fmt: skip
    starts = any(
        call.short in names or call.name == "deepspeed.initialize" or is_arguments(call)
        for call in script.calls
    )
    return starts or any(_nonexistent_names(script))


# ---- configurations inside scripts ----------------------------------------------------------------


def is_arguments(call: Call) -> bool:
    """Returns whether *call* creates the arguments of a Trainer of transformers or trl."""
    top = call.name.partition(".")[0]
    if call.short.endswith("TrainingArguments") and top == "transformers":
        return True
    return top == "trl" and call.short in NAMES["transformers"]["arguments_of_trl"]


def deepspeed_configs(script: Script) -> Iterator[tuple[Config | str, Call]]:
    """Yields DeepSpeed configurations of the script, or their paths, each with its call."""
    for call, node in _config_nodes(script):
        config = config_at(script, node) if node is not None else None
        if config is not None:
            yield config, call


def open_configs(script: Script) -> Iterator[Call]:
    """Yields calls that take a DeepSpeed configuration which the script does not show."""
    for call, node in _config_nodes(script):
        # The arguments of a Trainer need none, and deepspeed.initialize takes it from the command
        if node is None and (call.name != "deepspeed.initialize" or is_open(call)):
            continue
        if node is None or (config_at(script, node) is None and script.value(node) is not None):
            yield call


def _config_nodes(script: Script) -> Iterator[tuple[Call, ast.expr | None]]:
    for call in script.calls:
        if call.name == "deepspeed.initialize":
            node = script.argument(call, "config", 7) or script.argument(call, "config_params")
        elif is_arguments(call):
            node = script.argument(call, "deepspeed")
        elif call.name.startswith("accelerate.") and call.short == "DeepSpeedPlugin":
            node = script.argument(call, "hf_ds_config", 0)
        elif call.short in ("HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig"):
            node = script.argument(call, "config_file_or_dict", 0)
        elif call.short == "DeepSpeedStrategy":
            node = script.argument(call, "config")
        else:
            continue
        yield call, node


def config_at(script: Script, node: ast.expr) -> Config | str | None:
    """Returns the configuration of a dict that the script makes, or the path of a JSON file."""
    reader = _DictReader(script, {(): (node.lineno, node.col_offset + 1)})
    data = reader.read(node, ())
    if data is not None:
        return Config(file=script.file, data=data, places=reader.positions, dialect=script.dialect)
    value = script.value(node)
    return value if isinstance(value, str) and value.endswith(".json") else None


@dataclass(frozen=True, slots=True)
class _DictReader:
    """Reads a dict that a script makes as data, :data:`COMPUTED` for computed values.

    A dict is a display, a call of ``dict``, a union, a variable with what is assigned to its keys, a
    copy, or what a function of the file returns.
    """

    script: Script
    positions: dict[Path, tuple[int, int]]

    def read(self, node: ast.expr, path: Path, depth: int = 12) -> dict[str, Any] | None:
        """Returns the data of *node*; None where it is no known dict."""
        if depth == 0 or len(self.positions) > _MAX_KEYS:
            return None
        if isinstance(node, ast.Dict):
            return self._read_items(zip(node.keys, node.values, strict=True), path, depth - 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._read_items(((None, node.left), (None, node.right)), path, depth - 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            keywords = [(_keyword_key(keyword), keyword.value) for keyword in node.keywords]
            return self._read_items([*((None, arg) for arg in node.args), *keywords], path, depth - 1)
        sources = self.script.flow.step(node)
        source = sources[0] if len(sources) == 1 else None
        if source is None or source is node:
            return None
        data = self.read(source, path, depth - 1)
        variable = self.script.flow.owner(node)
        stores = self.script.flow.stores.get(variable, []) if variable is not None else []
        for store in stores if data is not None else ():
            self._apply_store(data, path, store, depth - 1)
        return data

    def _read_items(
        self, items: Iterable[tuple[ast.expr | None, ast.expr]], path: Path, depth: int
    ) -> dict[str, Any] | None:
        data: dict[str, Any] = {}
        for key, value in items:
            if key is None:
                merged = self.read(value, path, depth)
                if merged is None:
                    return None
                data |= merged
            elif isinstance(name := self.script.value(key), str):
                data[name] = self._read_value(value, (*path, name), key, depth)
        return data

    def _apply_store(self, data: dict[str, Any] | None, path: Path, store: Store, depth: int) -> None:
        """Does ``data[keys...] = value``; a value that is not certain is :data:`COMPUTED`."""
        for name in store.keys[:-1]:
            below = data.get(name) if data is not None else None
            data = below if isinstance(below, dict) else None
        if data is not None and store.keys:
            key_path = (*path, *store.keys)
            data[store.keys[-1]] = self._read_value(store.value, key_path, store.place, depth)

    def _read_value(self, node: ast.expr | None, path: Path, key: ast.expr, depth: int) -> Any:
        self.positions[path] = key.lineno, key.col_offset + 1
        if node is None:
            return COMPUTED
        section = self.read(node, path, depth)
        return _plain_value(self.script, node) if section is None else section


def _keyword_key(keyword: ast.keyword) -> ast.expr | None:
    return None if keyword.arg is None else ast.copy_location(ast.Constant(keyword.arg), keyword)


def _plain_value(script: Script, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = script.value(node)
        scalar = isinstance(value, (bool, int, float)) or value is None
        return value if scalar or (isinstance(value, str) and isinstance(node, ast.Name)) else COMPUTED


# ---- the checks -----------------------------------------------------------------------------------


def two_precisions(script: Script) -> Iterator[Problem]:
    """Yields arguments of a Trainer with both fp16 and bf16."""
    for call in filter(is_arguments, script.calls):
        if all(script.value(script.argument(call, name)) is True for name in ("fp16", "bf16")):
            node = script.argument(call, "fp16") or call.node
            message = "fp16 and bf16 are both true, and transformers takes one"
            yield script.problem("ZM105", "error", node, message, "fp16=False", "fp16")


def _nonexistent_names(script: Script) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(script.tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            name = dotted_name(node, script.names)
            if name in NONEXISTENT:
                yield node, name


def nonexistent_api(script: Script) -> Iterator[Problem]:
    """Yields names that no version of the framework has."""
    for node, name in _nonexistent_names(script):
        message = f"there is no {name}"
        yield script.problem("ZM107", "error", node, message, NONEXISTENT[name], name)


def names_key(script: Script, key: str) -> bool:
    """Returns whether *script* has *key* as a text, and so may set it in a configuration."""
    return any(node.value == key for node in script.nodes(ast.Constant))


def calls_of(script: Script, *names: str) -> list[Call]:
    """Returns the calls of functions and classes with the last names *names*, in their order."""
    return [call for name in names for call in script.calls if call.short == name]


def is_open(call: Call) -> bool:
    """Returns whether *call* passes ``**kwargs``, so that any argument may be given."""
    return any(keyword.arg is None for keyword in call.node.keywords)


def whole_model_unit(script: Script) -> Iterator[Problem]:
    """Yields FSDP around the whole model, where the file wraps no other module."""
    fsdp = calls_of(script, FSDP)
    # wrap() makes units within enable_wrap, and no call of FSDP shows them
    helpers = script.words & {"wrap", "enable_wrap", "auto_wrap"}
    models = [call.node.args[0] if call.node.args else None for call in fsdp]
    names = {node.id for node in models if isinstance(node, ast.Name)}
    is_separate = len(fsdp) == 1 or len(names) == len(fsdp)  # several models, each wrapped whole
    for call in fsdp if is_separate and not helpers else ():
        policy = script.value(script.argument(call, "auto_wrap_policy", 4))
        has_policy = script.argument(call, "auto_wrap_policy", 4) is not None
        is_single = not (is_open(call) or _may_be_a_part(script, call))
        if (not has_policy or policy is None) and is_single:
            message = "FSDP without auto_wrap_policy makes the whole model one unit"
            fix = "auto_wrap_policy=ModuleWrapPolicy({TransformerBlock})"
            yield script.problem("ZM206", "warning", call.node, message, fix, "auto_wrap_policy")
    shards = calls_of(script, "fully_shard")
    if len(shards) == 1 and not _may_be_a_part(script, shards[0]):
        model = shards[0].node.args[0] if shards[0].node.args else None
        if isinstance(model, ast.Name):
            message = "fully_shard is called on the whole model alone, which makes it one unit"
            fix = "for block in model.layers: fully_shard(block), then fully_shard(model)"
            yield script.problem("ZM206", "warning", shards[0].node, message, fix, "fully_shard")


def _may_be_a_part(script: Script, call: Call) -> bool:
    """Returns whether a loop, or a caller of the function, may pass each block as the module."""
    module = call.node.args[0] if call.node.args else None
    if call.loops or script.flow.repeats(call.node):
        return True
    if module is None:
        return False
    bound = script.flow.bindings.get(script.flow.original_variable(module), [])
    return any(binding is None or isinstance(binding, ast.arg) for binding in bound)


def fp32_reduction(script: Script) -> Iterator[Problem]:
    """Yields reduction of gradients in fp32 with parameters in a lower precision."""
    for call in calls_of(script, "MixedPrecision", "MixedPrecisionPolicy"):
        low = script.value(script.argument(call, "param_dtype", 0))
        node = script.argument(call, "reduce_dtype", 1)
        lowers = low in ("torch.bfloat16", "torch.float16", "torch.half")
        if node is not None and lowers and script.value(node) in ("torch.float32", "torch.float"):
            message = "gradients are reduced in fp32: twice the bytes on the wire"
            fix = f"reduce_dtype={low}, if the loss stays as it is"
            yield script.problem("ZM208", "info", node, message, fix, "reduce_dtype")


_COSTLY: Sequence[Sequence[Any]] = NAMES["torch"]["costly_arguments"]
"""Argument of FSDP1, its position, a costly value, code, fix, message."""


def fsdp_arguments(script: Script) -> Iterator[Problem]:
    """Yields arguments of FSDP1 that cost memory or time."""
    for call in calls_of(script, FSDP):
        for name, position, value, code, fix, message in _COSTLY:
            node = script.argument(call, name, position)
            if node is not None and str(script.value(node)).endswith(str(value)):
                yield script.problem(code, "warning", node, message, fix, name)


def bucket_size(script: Script) -> Iterator[Problem]:
    """Yields DDP buckets below 1 MiB."""
    for call in calls_of(script, "DistributedDataParallel"):
        node = script.argument(call, "bucket_cap_mb")
        size = parse_number(script.value(node))
        if node is not None and size is not None and 0 < size < 1:
            message = f"buckets of {size:g} MiB make many small messages"
            yield script.problem("ZM303", "warning", node, message, "bucket_cap_mb=25", "bucket_cap_mb")


def full_state_dict(script: Script) -> Iterator[Problem]:
    """Yields full state dicts that every rank holds on its device."""
    for call in script.calls:
        if call.short in ("state_dict_type", "set_state_dict_type"):
            kind = script.value(script.argument(call, "state_dict_type", 1))
            config = script.argument(call, "state_dict_config", 2)
            if str(kind).endswith("StateDictType.FULL_STATE_DICT") and config is None:
                yield _whole_state_problem(script, call)
        elif call.short == "FullStateDictConfig" and not is_open(call):
            names = ("offload_to_cpu", "rank0_only")
            settings = [script.argument(call, name, n) for n, name in enumerate(names)]
            if any(node is None or script.value(node) is False for node in settings):
                yield _whole_state_problem(script, call)


def _whole_state_problem(script: Script, call: Call) -> Problem:
    message = "without offload_to_cpu and rank0_only every rank holds the whole model at once"
    fix = "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)"
    return script.problem("ZM702", "warning", call.node, message, fix, "state_dict_config")


CHECKS: tuple[Check, ...] = (
    two_precisions, nonexistent_api, whole_model_unit, fp32_reduction, fsdp_arguments, bucket_size,
    full_state_dict,
)  # fmt: skip
