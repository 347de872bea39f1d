"""Operators of symmetric memory: a kernel is the collective, as in ``fused_all_gather_matmul``.

They pass no process group and return no work that could be waited for: part of them is computation. So
they are counted, with operation and bytes, and not timed. One that falls back to an ordinary collective
is left to the hook on that.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zeromon.ring.codes import Kind, Op, Untimed, operation_by_name
from zeromon.ring.events import pack_dtype
from zeromon_agents.hooks.backend import Backend, ImportHook
from zeromon_agents.hooks.functional import GROUP, in_place_of, is_real, operators_of
from zeromon_agents.hooks.process_groups import DTYPES
from zeromon_agents.runtime.guard import Guard

MODULE = "torch.distributed._symmetric_memory"
NAMESPACE = "symm_mem"


def collective_operators() -> Iterator[tuple[str, Op, list[str]]]:
    """Yields (name, operation, arguments) of each operator that is a collective of a named group."""
    for name in operators_of(NAMESPACE):
        schema = torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name}")[0]
        arguments = [argument.name for argument in schema.arguments]
        op = operation_by_name(name)
        if op is not Op.NONE and GROUP in arguments:
            yield name, op, arguments


class SymmetricMemory(Backend):
    """The hooks on the operators; installed with the module without which none of them can be used."""

    def hooks(self) -> Iterable[ImportHook]:
        """Patches the operators."""
        return ((MODULE, self._watch),)

    def _watch(self, _: Any) -> None:
        for name, op, arguments in collective_operators():
            operator = getattr(getattr(torch.ops, NAMESPACE), name)
            for owner in (operator, *(getattr(operator, overload) for overload in operator.overloads())):
                original = self.patches.find_original(owner, "_op")
                hook = self.hook(original, op, arguments.index(GROUP), arguments[0])
                self.patches.set(owner, "_op", in_place_of(original, hook))

    def hook(self, original: Any, op: Op, group_at: int, first_name: str) -> Callable[..., Any]:
        """Returns the wrapper of an operator whose first argument has the name *first_name*."""
        context = self.context

        def call_with_hook(*args: Any, **kwargs: Any) -> Any:
            group, issued = None, 0
            if context.mode:
                try:
                    payload = args[0] if args else kwargs[first_name]
                    if is_real([payload]):
                        pg = args[group_at] if group_at < len(args) else kwargs[GROUP]
                        if isinstance(pg, str):
                            pg = torch.distributed.distributed_c10d._resolve_process_group(pg)
                        group = self.collectives.group_of(pg)
                        issued = group.issued
                except Guard.CAUGHT as error:
                    context.guard.note(error, NAMESPACE)
            result = original(*args, **kwargs)
            try:
                # A greater number: it has called a collective, which another hook has counted
                if group is not None and group.issued == issued:
                    nbytes, dtype = payload.nbytes, DTYPES.get(payload.dtype, 0)
                    if op is Op.ALL_GATHER:
                        nbytes *= group.size
                    elif op is Op.REDUCE_SCATTER and isinstance(result, torch.Tensor):
                        nbytes = result.nbytes * group.size  # of a product, where it is fused
                    # fmt: off
                    context.write(time.monotonic_ns(), Kind.COUNTED, op, context.phase, 0, group.id, 0,
                                  1, nbytes, Untimed.IN_CPP, pack_dtype(dtype, context.engine))
                    # fmt: on
            except Guard.CAUGHT as error:
                context.guard.note(error, NAMESPACE)
            return result

        return call_with_hook
