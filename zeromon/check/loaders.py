"""Checks of the data loaders of a script: torch's DataLoader, and the one that a Trainer creates.

A loader without workers may be right: the cost of a sample is not in the script. The checks therefore
report settings that torch refuses, settings without effect, and explicit settings that make a GPU wait.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zeromon.check.one_rank import last_name
from zeromon.check.problem import NAMES, Problem
from zeromon.check.scripts import UNKNOWN, Call, Check, Script, is_arguments, is_open
from zeromon.memory.config_files import parse_number

_POSITIONS: Mapping[str, int] = NAMES["torch"]["loader_positions"]
"""Positions of the checked parameters of torch.utils.data.DataLoader."""

_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
_NOT_BESIDE_A_BATCH_SAMPLER = ("batch_size", "shuffle", "sampler", "drop_last")
_SAMPLERS = ("sampler", "batch_sampler")
_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A call that creates a data loader; setting names are those of DataLoader, without *prefix*."""

    script: Script
    call: Call
    prefix: str = ""
    """``dataloader_`` for the arguments of a Trainer, else empty."""

    def node(self, name: str) -> ast.expr | None:
        """Returns the expression of a setting; None where the call does not give the setting."""
        position = -1 if self.prefix else _POSITIONS.get(name, -1)
        return self.script.argument(self.call, self.prefix + name, position)

    def is_set(self, name: str) -> bool:
        """Returns whether a setting has a known value other than None, False and 0, or is a sampler."""
        node = self.node(name)
        is_made = name in _SAMPLERS and isinstance(node, ast.Call)
        return is_made or (node is not None and self.script.value(node) not in (None, False, 0, UNKNOWN))

    @property
    def workers(self) -> float | None:
        """Number of worker processes; 0 by default, None where the script does not determine it."""
        node = self.node("num_workers")
        if node is None:
            return None if is_open(self.call) else 0
        return parse_number(self.script.value(node))

    def problem(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at the setting *name*, or at the call where the setting is missing."""
        node = self.node(name) or self.call.node
        return self.script.problem(code, severity, node, message, fix, self.prefix + name)

    @property
    def on_gpu(self) -> bool:
        """True if the training that uses the loader runs on a GPU, as far as the script shows."""
        if not self.prefix:
            if not _TYPES.isdisjoint(self.script.words):
                return True
            literals = (str(node.value) for node in self.script.nodes(ast.Constant))
            return any(literal.split(":")[0] in _ON_DEVICE for literal in literals)
        nodes = (self.script.argument(self.call, name) for name in ("use_cpu", "no_cuda"))
        return not any(self.script.value(node) is True for node in nodes)


def find_loaders(script: Script) -> Iterator[Loader]:
    """Yields all data loaders of a script."""
    for call in script.calls:
        if call.name.startswith("torch.") and call.short == "DataLoader":
            yield Loader(script=script, call=call)
        elif is_arguments(call):
            yield Loader(script=script, call=call, prefix="dataloader_")


def needs_workers(script: Script) -> Iterator[Problem]:
    """Yields settings of workers in loaders without workers: torch refuses them."""
    for loader in find_loaders(script):
        for name in _NEED_WORKERS:
            if loader.workers == 0 and loader.is_set(name):
                message = f"{loader.prefix}{name} needs workers, and there are none: torch refuses it"
                p = loader.prefix
                fix = f"{p}num_workers={_WORKERS}, or no {p}{name}"
                yield loader.problem("ZM604", "error", name, message, fix)


def excluding_samplers(script: Script) -> Iterator[Problem]:
    """Yields settings that exclude each other in the choice of samples: torch refuses them."""
    for loader in find_loaders(script):
        if loader.prefix:
            continue
        if loader.is_set("shuffle") and loader.is_set("sampler"):
            message = "shuffle and sampler are both given, and torch takes one of them"
            yield loader.problem("ZM604", "error", "shuffle", message, "shuffle=False")
        for name in _NOT_BESIDE_A_BATCH_SAMPLER:
            if loader.is_set("batch_sampler") and loader.is_set(name):
                message = f"batch_sampler decides {name}, and torch refuses both"
                yield loader.problem("ZM604", "error", name, message, f"remove {name}")


def no_workers(script: Script) -> Iterator[Problem]:
    """Yields an explicit ``num_workers=0``: the training process makes each batch, the GPU waits."""
    for loader in find_loaders(script):
        if loader.node("num_workers") is not None and loader.workers == 0 and loader.on_gpu:
            message = "each batch is made by the training process, while the GPU waits"
            fix = f"{loader.prefix}num_workers={_WORKERS}, unless the samples are in memory already"
            yield loader.problem("ZM601", "info", "num_workers", message, fix)


def not_pinned(script: Script) -> Iterator[Problem]:
    """Yields loaders without pinned memory: ``non_blocking`` copies from pageable memory block."""
    asynchronous = any(_copies_asynchronously(script, call) for call in script.nodes(ast.Call))
    for loader in find_loaders(script):
        node = loader.node("pin_memory")
        if loader.prefix:
            if node is not None and script.value(node) is False and loader.on_gpu:
                message = "batches are copied to the GPU from pageable memory, and that blocks"
                fix = "dataloader_pin_memory=True"
                yield loader.problem("ZM604", "info", "pin_memory", message, fix)
        elif asynchronous and (script.value(node) is False if node else not is_open(loader.call)):
            message = "non_blocking=True does nothing for batches that are not in pinned memory"
            fix = "pin_memory=True"
            yield loader.problem("ZM604", "info", "pin_memory", message, fix)


def _copies_asynchronously(script: Script, call: ast.Call) -> bool:
    flags = (keyword.value for keyword in call.keywords if keyword.arg == "non_blocking")
    return last_name(call) in _TYPES | {"to"} and any(script.value(v) is True for v in flags)


def restarted_workers(script: Script) -> Iterator[Problem]:
    """Yields loaders that start their workers again in every epoch."""
    named = {
        name: loader
        for loader in find_loaders(script)
        if not loader.prefix and (name := _name_of(script, loader.call)) and not is_open(loader.call)
    }
    for outer in ast.walk(script.tree):
        if not isinstance(outer, (ast.For, ast.While)):
            continue
        for inner in (n for statement in outer.body for n in ast.walk(statement)):
            # pop: a loader within two nested loops is reported once
            # The variable that a loop iterates, also through enumerate()
            expr = inner.iter if isinstance(inner, ast.For) else None
            while isinstance(expr, ast.Call) and expr.args:
                expr = expr.args[0]
            loader = named.pop(expr.id if isinstance(expr, ast.Name) else "", None)
            if loader is None or not loader.workers or loader.node("persistent_workers"):
                continue
            message = f"{loader.workers:g} workers start again in every epoch"
            yield loader.problem(
                "ZM604", "info", "persistent_workers", message, "persistent_workers=True"
            )


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name in snake case or camel case."""
_VALIDATION = re.compile(r"(val(id(ation)?)?|eval(uation)?|test(ing)?)(set|data|dataset|ds|loader)?")
"""A word of the name of a validation set; as a part of a word it also stands in values and latest."""


def same_order(script: Script) -> Iterator[Problem]:
    """Yields a sampler that shuffles, in a script of several epochs that tells it no epoch."""
    # Accelerator, Trainer, Fabric and Lightning tell the sampler the epoch themselves
    if script.words & {"set_epoch", "Accelerator", "Trainer", "Fabric", "LightningModule"}:
        return
    for call in script.calls:
        if call.short != "DistributedSampler" or not call.name.startswith("torch."):
            continue
        node = script.argument(call, "shuffle", 3)
        dataset = ast.unparse(call.node.args[0]) if call.node.args else ""
        # Samples of a validation set may come in any order
        trains = not any(_VALIDATION.fullmatch(name.lower()) for name in _WORD.findall(dataset))
        shuffles = trains and (node is None or script.value(node) is True)
        if shuffles and not is_open(call) and _has_several_epochs(script):
            message = "without set_epoch the sampler gives the same order in every epoch"
            fix = "loader.sampler.set_epoch(epoch) at the beginning of each epoch"
            yield script.problem("ZM604", "warning", call.node, message, fix, "set_epoch")


def _has_several_epochs(script: Script) -> bool:
    """Returns whether a backward is in a loop over batches, in a loop of several numbered turns."""
    for node in (call for call in script.nodes(ast.Call) if last_name(call) == "backward"):
        for chain in script.flow.call_chains(node):
            outers = (outer for step in reversed(chain) for outer, _ in script.flow.around(step))
            overs = [outer.iter for outer in outers if isinstance(outer, ast.For)]
            count = _stop_arg(overs[-1]) if len(overs) > 1 and _stop_arg(overs[0]) is None else None
            if count is not None and script.value(count) != 1:
                return True
    return False


def _stop_arg(expr: ast.expr) -> ast.expr | None:
    """Returns the last argument of ``range(...)``; None for anything else."""
    is_range = isinstance(expr, ast.Call) and ast.unparse(expr.func) == "range"
    return expr.args[-1] if isinstance(expr, ast.Call) and is_range and expr.args else None


def _name_of(script: Script, call: Call) -> str:
    """Returns the variable that a loader is assigned to; "" for anything but one plain name."""
    node = script.flow.parents.get(call.node)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return ""
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


_TYPES = frozenset(("cuda", "xpu", "npu", "hpu", "mtia", "mlu", "musa"))
"""Device types of torch, and of its packages, to which a copy from pinned memory is faster."""
_ON_DEVICE = _TYPES | {"nccl", "xccl", "hccl"}


CHECKS: tuple[Check, ...] = (
    needs_workers, excluding_samplers, no_workers, not_pinned, restarted_workers, same_order,
)  # fmt: skip
