"""ZeRO-3: which sub-module's parameters are gathered, prefetched and released, and how many bytes."""

import time
from typing import Any

from zeromon.ring.events import Flag, Kind, Path, UnitEvent
from zeromon.ring.model_metadata import PERSISTENT
from zeromon_agents.hooks.deepspeed.engines import Engines, own_parameters
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.runtime.around import RAISED
from zeromon_agents.runtime.hook_context import HookContext


class Gathers:
    """Runs before and after the methods of PartitionedParameterCoordinator."""

    def __init__(self, context: HookContext, engines: Engines, transfers: Transfers) -> None:
        self._context = context
        self._engines = engines
        self._transfers = transfers
        self._fetching: Any = None
        """The sub-module that is being fetched."""
        self._gathered: dict[int, int] = {}
        """ds_id -> bytes of the parameters that are gathered and not yet partitioned."""
        self._gathered_bytes = 0
        self.not_available: Any = None
        """``ZeroParamStatus.NOT_AVAILABLE`` of this DeepSpeed."""

    def fetch_begins(self, _: Any, module: Any, *__: Any, **___: Any) -> Any:
        """Gives the unit of *module* to the gathers that follow; returns the module fetched around."""
        outer, self._fetching = self._fetching, module
        unit, engine, _ = self._engines.sub_module(module)
        if unit:
            self._context.unit, self._context.engine = unit, engine
        return outer

    def fetch_ends(self, outer: Any, *_: Any) -> None:
        """Ends the fetch."""
        self._fetching = outer

    def gather_begins(self, _: Any, params: Any, *__: Any, **___: Any) -> None:
        """Writes the gather of the *params* that are not available: needed now, or a prefetch."""
        if self._fetching is None:
            return
        wanted = [param for param in params if param.ds_status == self.not_available]
        if not wanted:
            return
        context = self._context
        first = min(wanted, key=lambda param: param.ds_id)
        ahead = all(first is not param for param in own_parameters(self._fetching))
        engine = self._engines.by_parameter(first.ds_id)
        if ahead and engine is not None:
            context.unit = engine.owners[first.ds_id]
        context.prefetch(ahead=ahead)
        nbytes = self._add_gathered(wanted)
        # fmt: off
        context.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.UNSHARD, context.phase,
                      Flag.AHEAD if ahead else 0, 0, context.unit, 0, -1, nbytes,
                      self._gathered_bytes)
        # fmt: on
        if engine is not None and engine.offloads_params:
            moved = sum(p.ds_tensor.ds_numel * p.element_size() for p in wanted)
            self._transfers.add(Path.HOST_TO_DEVICE, moved)

    def gather_ends(self, *_: Any) -> None:
        """Ends the gather; a collective issued after it is no prefetch."""
        if self._context.ahead:
            self._context.prefetch(ahead=False)

    def release_ends(self, _: None, result: Any, __: Any, module: Any, *___: Any) -> None:
        """Writes that *module* was partitioned, where it freed anything."""
        if result is RAISED or not self._gathered:
            return
        unit, _engine, held = self._engines.sub_module(module)
        if not unit or self._gathered.keys().isdisjoint(held):
            return
        if self._subtract_partitioned(module):
            # fmt: off
            self._context.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.RESHARD,
                                self._context.phase, 0, 0, unit, 0, -1, 0, self._gathered_bytes)
            # fmt: on

    def persistent_begins(self, *_: Any, **__: Any) -> None:
        """Gives a unit to the gather, after a step, of parameters that ZeRO-3 never partitions."""
        self._context.unit = self._context.unit_id(PERSISTENT, {"kind": "zero3"})

    def all_partitioned(self) -> None:
        """Resets the gathered bytes: the end of backward partitions what no release has freed."""
        self._gathered.clear()
        self._gathered_bytes = 0

    def _add_gathered(self, params: list[Any]) -> int:
        """Adds *params* to what is gathered; returns their bytes."""
        total = 0
        for param in params:
            nbytes = param.ds_numel * param.element_size()
            total += nbytes
            self._gathered_bytes += nbytes - self._gathered.get(param.ds_id, 0)
            self._gathered[param.ds_id] = nbytes
        return total

    def _subtract_partitioned(self, module: Any) -> bool:
        """Subtracts what *module* has partitioned; returns whether that was anything."""
        freed = 0
        for param in own_parameters(module):
            if param.ds_status == self.not_available:
                freed += self._gathered.pop(param.ds_id, 0)
        self._gathered_bytes -= freed
        return freed > 0
