"""Takes the steps of a specification: the model sharded by FSDP2, forward, backward, AdamW."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zeromon_virtual import models
from zeromon_virtual.clock import Link
from zeromon_virtual.collectives import world
from zeromon_virtual.device import NAME
from zeromon_virtual.engine import Engine
from zeromon_virtual.result import Result, summarize
from zeromon_virtual.spec import LinkSpec, ShardingSpec, Spec, SpecError


class Job:
    """A model on the virtual device, and the loop that trains it."""

    def __init__(self, spec: Spec, engine: Engine, mesh: Any) -> None:
        self.spec, self.engine = spec, engine
        model, sharding = spec.model, spec.sharding
        with torch.device(NAME), engine.memory.within("sharded param"):
            self.model = models.build(model)
            shard(self.model, sharding, mesh, model.blocks)
        shape = (spec.micro_batch, model.sequence)
        with torch.device(NAME), engine.memory.within("batch"):
            self.tokens = torch.zeros(shape, dtype=torch.int64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        engine.clock.synchronize()
        engine.forget()

    def step(self) -> None:
        """Takes one optimizer step; the host waits for its end, as a loop that reads its loss does."""
        sharding, phase = self.spec.sharding, self.engine.phase
        for micro_step in range(sharding.micro_steps):
            last = micro_step == sharding.micro_steps - 1
            if sharding.micro_steps > 1:
                self.model.set_requires_gradient_sync(last or sharding.sync_each_micro_step)
                self.model.set_reshard_after_backward(last or sharding.reshard_after_backward)
            with phase("forward"):
                logits = self.model(self.tokens)
                loss = logits.flatten(0, 1).float().log_softmax(-1).mean()
                del logits
            with phase("backward"):
                loss.backward()
            del loss
        with phase("optimizer"):
            if self.spec.clip_gradients:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.engine.clock.synchronize()


def mesh_of(sharding: ShardingSpec) -> Any:
    """Returns the device mesh: replicas times shards, or shards alone."""
    if sharding.replicas > 1:
        shape, names = (sharding.replicas, sharding.shards), ("replicate", "shard")
        return init_device_mesh(NAME, shape, mesh_dim_names=names)
    return init_device_mesh(NAME, (sharding.shards,), mesh_dim_names=("shard",))


def shard(model: Any, sharding: ShardingSpec, mesh: Any, blocks: str) -> None:
    """Shards *model* with FSDP2, each of its *blocks* as a unit."""
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(sharding.param_dtype), reduce_dtype=_dtype(sharding.reduce_dtype)
    )
    settings = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": sharding.reshard_after_forward,
    }
    units = list(model.get_submodule(blocks))
    for index, unit in enumerate(units):
        if sharding.activation_checkpointing:
            checkpoint(unit, preserve_rng_state=False)
        units[index] = fully_shard(unit, **settings)
    fully_shard(model, **settings)
    _set_prefetch(model, units, sharding.prefetch)


def _set_prefetch(model: Any, units: list[Any], ahead: int | None) -> None:
    if ahead is None:
        return
    if ahead == 0:  # a gather in the compute stream's order, and no unit ahead in backward
        for unit in [model, *units]:
            unit._set_unshard_async_op(True)
            unit.set_modules_to_backward_prefetch([unit])
        return
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1])


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"spec.sharding: torch has no dtype {name!r}")
    return dtype


@contextmanager
def job(spec: Spec) -> Iterator[Job]:
    """Builds what *spec* describes, on a virtual device of its own."""
    link = _link(spec.link)
    between_replicas = _link(spec.replica_link) if spec.replica_link else link

    def link_of(ranks: list[int]) -> Link:
        neighbours = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        return link if neighbours else between_replicas

    engine = Engine(spec.device, link_of)
    with world(spec.sharding.shards * spec.sharding.replicas):
        mesh = mesh_of(spec.sharding)  # before tensors are fake: a mesh reads its own
        with engine.running():
            yield Job(spec, engine, mesh)


def _link(link: LinkSpec) -> Link:
    return Link(link.latency_seconds * 1e9, 1e9 / link.bytes_per_second)


def run(spec: Spec) -> Result:
    """Takes the steps of *spec* and returns what the last of them did."""
    with job(spec) as running:
        clock = running.engine.clock
        began = 0
        for _ in range(spec.steps):
            running.engine.forget()
            began = clock.host_ns
            running.step()
        return summarize(running.engine, began, with_spans=spec.spans)
