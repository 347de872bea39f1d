"""Bytes by role under torch's own strategies, also for models that are not as plain as one hopes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromon.memory.reconcile import expected_rows, read_model_facts
from zeromon.ring.codes import Role
from zeromon.snapshot.memory import RoleRow
from zeromon_agents.observe.census import role_counts
from zeromon_agents.observe.model_metadata import of_fsdp1, of_fsdp2, of_optimizer, of_replicated
from zeromon_agents.observe.torch_roles import Models, fsdp1_handles, fsdp2_groups

WIDTH = 32
LINEAR = WIDTH * WIDTH * 4


def net(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    return optimizer


def found(*things: Any) -> dict[Role, int]:
    models = Models()
    for thing in things:
        is_module = isinstance(thing, nn.Module)
        (models.register_module if is_module else models.register_optimizer)(thing)
    rows = role_counts(models.claims())
    return {role: row.device + row.host for role, row in rows.items() if row.device + row.host}


def rows_of(measured: dict[Role, int]) -> list[RoleRow]:
    return [
        RoleRow(role=role.name.lower(), device_bytes=n, host_bytes=0, disk_bytes=0, pinned_bytes=0)
        for role, n in measured.items()
    ]


def test_a_plain_model_and_its_optimizer() -> None:
    """Parameters, gradients, two states; the optimizer's step counters are no state."""
    model = net()
    optimizer = one_step(model)
    assert found(model, optimizer) == {
        Role.UNSHARDED_PARAM: 2 * LINEAR,
        Role.UNSHARDED_GRAD: 2 * LINEAR,
        Role.OPTIMIZER_STATE: 4 * LINEAR,
    }


def test_an_optimizer_alone_tells_of_its_parameters() -> None:
    """No wrapper was seen."""
    optimizer = one_step(net())
    assert found(optimizer)[Role.UNSHARDED_PARAM] == 2 * LINEAR


def test_states_are_created_lazily() -> None:
    """Before the first step there are none."""
    model = net()
    assert Role.OPTIMIZER_STATE not in found(model, torch.optim.AdamW(model.parameters()))


def test_tied_weights_and_views_count_once() -> None:
    model = net()
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:4])
    assert found(model) == {Role.UNSHARDED_PARAM: LINEAR}


def test_frozen_parts_have_no_gradients() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = one_step(model, torch.optim.AdamW(model[1].parameters()))
    bytes_of = found(model, optimizer)
    assert bytes_of[Role.UNSHARDED_PARAM] == 2 * LINEAR
    assert bytes_of[Role.UNSHARDED_GRAD] == LINEAR
    facts = of_replicated(model, [optimizer])
    assert facts is not None
    assert (facts["numel"], facts["trainable"]) == (2 * WIDTH**2, WIDTH**2)


def test_meta_parameters_are_nothing() -> None:
    with torch.device("meta"):
        model = net()
    assert found(model) == {}
    assert of_replicated(model, []) is None


def test_a_model_that_grows_in_mid_run_and_one_that_goes() -> None:
    model = net()
    models = Models()
    models.register_module(model)
    model.append(nn.Linear(WIDTH, WIDTH, bias=False))
    assert role_counts(models.claims())[Role.UNSHARDED_PARAM].host == 3 * LINEAR
    del model
    gc.collect()
    assert role_counts(models.claims()) == {}
    assert models.modules == {}


def test_several_models_in_one_process() -> None:
    """An actor and a critic that share a trunk: the trunk counts once."""
    trunk = nn.Linear(WIDTH, WIDTH, bias=False)
    actor, critic = nn.Sequential(trunk, *net(1)), nn.Sequential(trunk, *net(1))
    assert found(actor, critic)[Role.UNSHARDED_PARAM] == 3 * LINEAR


def test_fp32_copies_that_an_optimizer_steps_are_masters() -> None:
    """A model in bf16 outside, fp32 copies inside the optimizer."""
    model = net().to(torch.bfloat16)
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    bytes_of = found(model, torch.optim.AdamW(copies))
    assert bytes_of[Role.MASTER_PARAM] == 2 * LINEAR
    assert bytes_of[Role.UNSHARDED_PARAM] == LINEAR


def test_sparse_gradients_are_counted_as_they_are() -> None:
    table = nn.Embedding(1000, WIDTH, sparse=True)
    table(torch.tensor([1, 5])).sum().backward()
    assert found(table)[Role.UNSHARDED_GRAD] == 2 * 8 + 2 * WIDTH * 4


def test_one_that_cannot_be_read_does_not_cost_the_others() -> None:
    """A sparse buffer, parameters that are not made yet, an optimizer that keeps no list."""
    model = net()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    lazy = nn.LazyLinear(4)
    assert found(model, lazy)[Role.UNSHARDED_PARAM] == 2 * LINEAR
    facts = of_replicated(model, [])
    assert facts is not None and facts["buffer_bytes"] == 0
    noted: list[str] = []
    models = Models(lambda error, where: noted.append(where))
    optimizer = one_step(model)
    optimizer.param_groups = 3
    models.register_module(model)
    models.register_optimizer(optimizer)
    assert role_counts(models.claims())[Role.UNSHARDED_PARAM].host == 2 * LINEAR
    assert noted == ["census of an optimizer"]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process believes that it is rank 0 of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_dtensors_on_a_two_dimensional_mesh() -> None:
    """Tensor-parallel and data-parallel at once: this rank has a quarter of each weight."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert found(model) == {Role.SHARDED_PARAM: 2 * LINEAR // 4}


@pytest.mark.fsdp2
@pytest.mark.usefixtures("four_ranks")
def test_a_gathered_unit_is_seen_in_its_own_role() -> None:
    """One unit unsharded by hand."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].unshard()
    bytes_of = found(model)
    assert bytes_of[Role.SHARDED_PARAM] == 2 * LINEAR // 4
    assert bytes_of[Role.UNSHARDED_PARAM] == LINEAR
    facts = of_fsdp2(model, list(fsdp2_groups(model)), [])
    assert facts is not None
    assert (facts["shard_ranks"], facts["shard_numel"]) == (4, 2 * WIDTH**2 // 4)


@pytest.mark.fsdp2
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.usefixtures("four_ranks")
def test_the_largest_unit_is_a_layer_where_each_is_wrapped(by_layer: bool, reshards: bool) -> None:
    """Whether or not layers stay gathered from forward to backward."""
    from torch.distributed.fsdp import fully_shard

    model = net(4)
    for layer in model if by_layer else ():
        fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(model)
    for part in (*model, model) if by_layer else (model,):
        part.unshard()
    facts = of_fsdp2(model, list(fsdp2_groups(model)), [])
    assert facts is not None
    assert facts["largest_unit_numel"] == WIDTH**2 * (1 if by_layer else 4)
    assert facts["blocks"] == [4, WIDTH**2]


@pytest.mark.parametrize("keeps_originals", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.usefixtures("four_ranks")
def test_fsdp1_knows_its_layers_whatever_it_does_to_their_parameters(
    by_layer: bool, keeps_originals: bool
) -> None:
    """By default it replaces them by one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        net(4), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if by_layer else None,
        use_orig_params=keeps_originals, device_id=torch.device("cpu"),
    )  # fmt: skip
    facts = of_fsdp1(model, list(fsdp1_handles(model)), [])
    assert facts is not None
    assert facts["blocks"] == [4, WIDTH**2]
    assert facts["largest_unit_numel"] == WIDTH**2 * (1 if by_layer else 4)


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.usefixtures("four_ranks")
def test_fsdp1_has_gradients_of_frozen_weights_that_share_a_unit(is_apart: bool, strategy: str) -> None:
    """It has no optimizer state of them, and no gradients where the trained weights have own units."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        nn.Sequential(Adapted(), Adapted()),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear} if is_apart else {Adapted}),
        use_orig_params=not is_apart, device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
    )  # fmt: skip
    optimizer = one_step(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    facts = of_fsdp1(model, list(fsdp1_handles(model)), [optimizer])
    assert facts is not None
    lora, base, ranks = 2 * 2 * 4 * WIDTH, 2 * WIDTH**2, 1 if strategy == "NO_SHARD" else 4
    assert (facts["trainable"], facts["numel"]) == (lora, lora + base)
    measured = found(model, optimizer)
    grads = measured.get(Role.SHARDED_GRAD, 0) + measured.get(Role.UNSHARDED_GRAD, 0)
    assert grads == 4 * (facts["trainable_shard_numel"] + facts["frozen_grad_numel"])
    assert facts["frozen_grad_numel"] == (0 if is_apart else pytest.approx(base / ranks, abs=lora))
    assert measured.get(Role.OPTIMIZER_STATE, 0) == 8 * facts["trainable_shard_numel"]
    described = read_model_facts(facts)
    assert described is not None
    rows = {row.role: row for row in expected_rows([facts], rows_of(measured), -1, steps=2)}
    role = "unsharded_grad" if strategy == "NO_SHARD" else "sharded_grad"
    assert abs(rows[role].unexplained_bytes or 0) <= 4 * lora
    assert any("use_orig_params" in cause.text for cause in rows[role].causes) is not is_apart


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.usefixtures("four_ranks")
def test_fsdp1_tells_in_which_type_gradients_are_kept_and_reduced(keeps: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=keeps)
    model = FullyShardedDataParallel(net(), mixed_precision=precision, device_id=torch.device("cpu"))
    model(torch.ones(2, WIDTH)).sum().backward()
    (handle,) = fsdp1_handles(model)
    facts = of_fsdp1(model, [handle], [])
    assert facts is not None
    assert facts["grad_bytes"] == handle.flat_param.grad.element_size() == (2 if keeps else 4)
    assert facts["reduce_bytes"] == 2


@pytest.mark.parametrize(
    ("settings", "way"), [({}, "for-loop"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused")]
)
def test_how_an_optimizer_updates_is_described(settings: dict[str, bool], way: str) -> None:
    """torch chooses foreach for tensors on a device alone."""
    weight = torch.nn.Parameter(torch.zeros(2))
    facts = of_optimizer(torch.optim.AdamW([weight], **settings))
    assert (facts["optimizer"], facts["optimizer_step"]) == ("AdamW", way)
    none = torch.optim.LBFGS([weight])
    assert of_optimizer(none)["optimizer_step"] == ""
