"""Dimensions of the parallelism: DeviceMeshes, and what frameworks use which process group for.

A mesh over all ranks reuses the world group, and a mesh may have no names; then the use of the group
says what it is for: the shards of FSDP, the parameters that tensor parallelism divides, the stages of a
pipeline. Meshes are held weakly, and read once, at the end of a step, when something is new.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from zeromon.ring.strategy import Dim, DimensionMetadata, dim_by_name
from zeromon_agents.hooks.backend import Backend, ImportHook, Services
from zeromon_agents.hooks.process_groups import member_ranks, nodes_of, sequence_number, text_of
from zeromon_agents.observe.torch_roles import fsdp1_handles, fsdp2_groups
from zeromon_agents.runtime.around import RAISED

MESH = "torch.distributed.device_mesh"
STAGE = "torch.distributed.pipelining.stage"
GRID = "deepspeed.runtime.pipe.topology"
GRID_GROUPS = {"pp_proc_group": Dim.PP, "dp_proc_group": Dim.DP, "slice_proc_group": Dim.TP}
"""The process groups of DeepSpeed's grid of stages, replicas and slices."""
_MAX_PENDING = 256
_MAX_DIMENSIONS = 32
_LONGEST = 40
_UNCLEAR = (Dim.OTHER, Dim.WORLD)


class Dimensions(Backend):
    """The hooks on DeviceMesh and on the stages of pipelines."""

    classes = ((MESH, "DeviceMesh"), (STAGE, "_PipelineStageBase"), (GRID, "PipelineParallelGrid"))

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._new: list[weakref.ref[Any]] = []
        """Meshes that are not read yet: a slice is made wherever a script asks for a dimension."""
        self._named: dict[int, tuple[weakref.ref[Any], list[str]]] = {}
        """Id of a process group -> the group, and the names that meshes give it, the oldest first."""
        self._stages: list[weakref.ref[Any]] = []
        self._seen: tuple[int, ...] = ()
        self._written: list[DimensionMetadata] = []

    def hooks(self) -> Iterable[ImportHook]:
        """Patches the constructors of meshes and of pipeline stages."""
        return ((MESH, self.watch_mesh), (STAGE, self.watch_stage), (GRID, self.watch_grid))

    def watch_mesh(self, module: Any) -> None:
        """Patches DeviceMesh of *module*."""
        self.wrap(module.DeviceMesh, "__init__", after=self._mesh_made, traced=True)

    def watch_stage(self, module: Any) -> None:
        """Patches the base class of the stages in *module*."""
        self.wrap(module._PipelineStageBase, "__init__", after=self._stage_made)

    def watch_grid(self, module: Any) -> None:
        """Patches the grid of DeepSpeed's pipelines."""
        self.wrap(module.PipelineParallelGrid, "__init__", after=self._stage_made)

    def adopt(self, instance: Any) -> None:
        """Notes a mesh, a stage or a grid."""
        is_mesh = hasattr(instance, "mesh_dim_names")
        note_instance = self._mesh_made if is_mesh else self._stage_made
        note_instance(None, None, instance)

    def look(self) -> None:
        """Writes the dimensions if meshes, groups, models, optimizers or stages are new."""
        fresh, self._new = self._new, []
        new_names = [self._read(mesh) for ref in fresh if (mesh := ref()) is not None]
        models, collectives = self.models, self.collectives
        counts = (
            len(models.modules), len(models.optimizers), len(collectives.groups), len(self._stages),
        )  # fmt: skip
        if counts == self._seen and not any(new_names):
            return
        self._seen = counts
        dimensions = self.dimensions()
        # none are left where the script has destroyed its groups
        if dimensions and dimensions != self._written:
            self._written = dimensions
            self.context.add_metadata(dimensions=dimensions)

    # ---- hooks --------------------------------------------------------------------------------

    def _mesh_made(self, _: None, result: Any, mesh: Any, *__: Any) -> None:
        if result is RAISED:
            return
        if len(self._new) >= _MAX_PENDING:  # most are slices that are gone
            self._new = [ref for ref in self._new if ref() is not None]
        if len(self._new) < _MAX_PENDING:
            self._new.append(weakref.ref(mesh))

    def _stage_made(self, _: None, result: Any, stage: Any, *__: Any) -> None:
        if result is not RAISED:
            self._stages.append(weakref.ref(stage))

    def _read(self, mesh: Any) -> bool:
        """Keeps the names of the mesh's groups, and returns whether one is new."""
        is_new = False
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            pg = group_of_mesh(mesh, dim)
            if pg is None:
                continue
            _, names = self._named.setdefault(id(pg), (weakref.ref(pg, self._forget_stage(id(pg))), []))
            if name not in names:
                names.append(name)
                is_new = True
        return is_new

    def _forget_stage(self, key: int) -> Any:
        named = self._named
        return lambda _: named.pop(key, None)

    # ---- what is found ------------------------------------------------------------------------

    def dimensions(self) -> list[DimensionMetadata]:
        """Returns the dimensions whose groups are named by a mesh or known by their use."""
        # Id of a group -> the group, and what a framework uses it for
        modules, optimizers = self.models.live()
        data = {id(pg): (pg, str(dim)) for m in modules for pg, dim in data_groups(m)}
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        # FSDP2 keeps its shards as DTensors, too: without the test they pass for tensor parallelism
        split = {id(pg): (pg, str(Dim.TP)) for pg in split_along(params) if id(pg) not in data}
        alive = [stage for ref in self._stages if (stage := ref()) is not None]
        stages = {id(pg): (pg, str(dim)) for stage in alive for pg, dim in groups_of_stage(stage)}
        used = data | split | stages
        groups = {id(pg): pg for pg, _ in used.values()}
        groups |= {key: pg for key, (ref, _) in self._named.items() if (pg := ref()) is not None}
        dims: dict[str, DimensionMetadata] = {}
        for key, pg in groups.items():
            use, is_sure = (used[key][1], True) if key in used else ("", False)
            name = self._name(key, use)
            if name:
                self._add(dims, name, pg, is_sure=is_sure)
        return list(dims.values())[:_MAX_DIMENSIONS]

    def _name(self, key: int, use: str) -> str:
        """Returns the clearest name: a mesh's that says what it is, else the use, else a mesh's."""
        names = self._named[key][1] if key in self._named else []
        clear = next((name for name in names if dim_by_name(name) not in _UNCLEAR), "")
        return (clear or use or next(iter(names), ""))[:_LONGEST]

    def _add(self, dims: dict[str, DimensionMetadata], name: str, pg: Any, *, is_sure: bool) -> None:
        group = self.collectives.groups.get(id(pg))
        dim = dims.setdefault(name, {"name": name, "size": 1, "nodes": 0, "groups": [], "used": False})
        dim["size"] = max(dim["size"], pg.size())
        dim["nodes"] = max(dim["nodes"], nodes_of(member_ranks(pg)))
        dim["groups"] += [group.id] if group is not None else []
        dim["used"] = dim["used"] or is_sure or group is not None or sequence_number(pg) > 0


def group_of_mesh(mesh: Any, dim: int) -> Any:
    """Returns the process group of a dimension; None where the mesh has none on this rank."""
    with suppress(RuntimeError, AttributeError, IndexError, KeyError, AssertionError):
        pg = mesh.get_group(dim)
        return pg if text_of(pg, "group_name") is not None else None
    return None


def groups_of_stage(stage: Any) -> Iterator[tuple[Any, Dim]]:
    """Yields the process group of a pipeline's stage, by default that of all ranks; a grid has three."""
    from torch.distributed import distributed_c10d

    if hasattr(stage, "pp_proc_group"):
        groups = ((getattr(stage, name), dim) for name, dim in GRID_GROUPS.items())
        yield from ((pg, dim) for pg, dim in groups if dim is not Dim.TP or pg.size() > 1)
    elif (pg := getattr(stage, "group", None) or distributed_c10d._world.default_pg) is not None:
        yield pg, Dim.PP


def data_groups(module: Any) -> Iterator[tuple[Any, Dim]]:
    """Yields the groups over which a wrapper of *module* shards and replicates."""
    for group in fsdp2_groups(module):
        mesh = getattr(group, "mesh_info", None)
        for name, dim in (("shard", Dim.DP_SHARD), ("replicate", Dim.DP_REPLICATE)):
            pg = getattr(mesh, f"{name}_process_group", None)
            if pg is not None:
                yield pg, dim
    for handle in fsdp1_handles(module):
        yield handle.process_group, Dim.DP_SHARD if handle.uses_sharded_strategy else Dim.DP
    # FSDP1 has it under the hybrid strategies alone
    replicas = getattr(module, "_inter_node_pg", None)
    if replicas is not None:
        yield replicas, Dim.DP_REPLICATE
    if hasattr(module, "bucket_bytes_cap") and hasattr(module, "process_group"):  # DDP
        yield module.process_group, Dim.DP


def split_along(params: Iterable[Any]) -> Iterator[Any]:
    """Yields the groups along which DTensors among *params* are divided."""
    visited: set[tuple[int, int]] = set()
    for param in params:
        mesh = getattr(param, "device_mesh", None) if hasattr(type(param), "placements") else None
        for dim, placement in enumerate(param.placements if mesh is not None else ()):
            if placement.is_shard() and (id(mesh), dim) not in visited:
                visited.add((id(mesh), dim))
                pg = group_of_mesh(mesh, dim)
                if pg is not None:
                    yield pg
