"""The strategies that hooks send, read from the tables and functions that make them."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.fsdp
from strategies import EVERY
from torch.distributed.fsdp import ShardingStrategy

import zeromon_agents
from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.strategy import DDP, ZERO_REDUNDANCY, Offload, Sharding, Strategy
from zeromon_agents.hooks import ddp, fsdp1, fsdp2
from zeromon_agents.hooks.backend import Services
from zeromon_agents.hooks.deepspeed import steps as engines
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import HookContext

LABELS = {strategy.label for strategy in EVERY}


def sent(strategy: Strategy) -> Strategy:
    """*strategy*, as a collector reads it from the metadata that an agent writes."""
    return Strategy.read(json.loads(json.dumps(strategy.metadata())))


def test_labels_are_distinct_and_read_back() -> None:
    assert len(LABELS) == len(EVERY)
    assert all(sent(strategy) == strategy == Strategy.parse(strategy.label) for strategy in EVERY)


def test_fields_of_another_version_fall_back_to_the_label() -> None:
    strategy = fsdp1.STRATEGIES["FULL_SHARD"]
    newer: dict[str, Any] = {"strategy": strategy.label, "strategy_fields": {"framework": "fsdp9"}}
    assert Strategy.read(newer) == strategy
    assert Strategy.read({}) == Strategy()


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("name", [*(s.name for s in ShardingStrategy), "NEW_IN_TORCH"])
def test_fsdp1_sends_each_of_torchs_sharding_strategies(name: str, offloads: bool) -> None:
    root = SimpleNamespace(
        sharding_strategy=SimpleNamespace(name=name),
        cpu_offload=SimpleNamespace(offload_params=offloads),
    )
    strategy = fsdp1.strategy_of(root)
    assert strategy.label in LABELS and sent(strategy) == strategy
    assert (strategy.sharding is Sharding.UNKNOWN) == (name == "NEW_IN_TORCH")
    assert strategy.hybrid == ("HYBRID" in name)
    assert (strategy.offload is Offload.HOST) == offloads


def test_fsdp1_knows_every_sharding_strategy_of_this_torch() -> None:
    assert set(fsdp1.STRATEGIES) == {strategy.name for strategy in ShardingStrategy}


@pytest.mark.parametrize(
    ("reshards", "replicas", "offloads"), itertools.product([False, True], [1, 2], [False, True])
)
def test_fsdp2_sends_what_its_param_group_says(reshards: bool, replicas: int, offloads: bool) -> None:
    group = SimpleNamespace(
        post_forward_mesh_info=object() if reshards else None,
        mesh_info=SimpleNamespace(replicate_mesh_size=replicas),
        fsdp_params=[SimpleNamespace(offload_to_cpu=offloads)],
    )
    state = SimpleNamespace(_auto_reshard_after_forward=False, _fsdp_param_group=group)
    strategy = fsdp2.strategy_of(state)
    assert strategy.label == ("fsdp2" if reshards else "fsdp2-zero2")
    assert (strategy.stage, strategy.hybrid) == (3 if reshards else 2, replicas > 1)
    assert (strategy.offload is Offload.HOST) == offloads
    assert strategy.label in LABELS and sent(strategy) == strategy


@pytest.mark.parametrize("reshards", [False, True])
def test_fsdp2_of_a_torch_that_keeps_no_choice_asks_the_units(reshards: bool) -> None:
    """torch 2.6 has no _auto_reshard_after_forward, and its root stays gathered once it has run."""
    root = SimpleNamespace(_fsdp_param_group=SimpleNamespace(post_forward_mesh_info=None))
    mesh = object() if reshards else None
    unit = SimpleNamespace(_fsdp_param_group=SimpleNamespace(post_forward_mesh_info=mesh))
    root._state_ctx = SimpleNamespace(all_states=[root, unit])
    assert fsdp2.strategy_of(root).label == ("fsdp2" if reshards else "fsdp2-zero2")


def test_a_compiled_root_of_fsdp1_is_registered_after_its_first_forward(tmp_path: Path) -> None:
    """When the first batch comes, torch has not decided yet which wrapper is the root."""

    class Wrapper(torch.nn.Module):
        sharding_strategy = ShardingStrategy.FULL_SHARD
        _is_root: bool | None = None

    registered: list[object] = []
    services: Any = SimpleNamespace(**dict.fromkeys(Services.__dataclass_fields__))
    services.context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0), Guard())
    services.models = SimpleNamespace(register_module=registered.append)
    backend = fsdp1.Fsdp1(services)
    root, inner = Wrapper(), Wrapper()
    for wrapper in (root, inner):
        backend._note(None, None, wrapper)
    backend.look()
    root._is_root, inner._is_root = True, False
    for _ in range(2):
        backend.look()
    assert registered == [root]


class FakeEngine:
    """The part of a DeepSpeed engine that says how it shards."""

    optimizer = None
    module = torch.nn.Linear(2, 2)

    def __init__(self, stage: int, **zero: Any) -> None:
        defaults: dict[str, Any] = {
            "offload_optimizer": None, "offload_param": None, "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False, "zero_quantized_gradients": False,
        }  # fmt: skip
        self._config = SimpleNamespace(zero_config=SimpleNamespace(**(defaults | zero)))
        self._stage = stage

    def zero_optimization_stage(self) -> int:
        return self._stage


DEVICES = (None, "cpu", "nvme")


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_sends_its_stage_its_offload_and_zero_plus_plus(stage: int) -> None:
    for optimizer, params, hpz in itertools.product(DEVICES, DEVICES, (1, 4)):
        places = {
            "offload_optimizer": SimpleNamespace(device=optimizer) if optimizer else None,
            "offload_param": SimpleNamespace(device=params) if params else None,
        }
        engine = FakeEngine(stage, zero_hpz_partition_size=hpz, **places)
        strategy = engines.Engine(1, engine, lambda _: None).strategy
        slowest = max(DEVICES.index(optimizer), DEVICES.index(params))
        assert strategy.stage == stage
        assert strategy.offload is (Offload.NONE, Offload.HOST, Offload.NVME)[slowest]
        assert strategy.plus_plus == strategy.hybrid == (hpz > 1)
        assert strategy.label in LABELS and sent(strategy) == strategy
    quantized = FakeEngine(stage, zero_quantized_weights=True)
    strategy = engines.Engine(1, quantized, lambda _: None).strategy
    assert strategy.plus_plus and not strategy.hybrid


def test_an_engine_that_is_gone_leaves_neither_settings_nor_a_model(tmp_path: Path) -> None:
    """A sweep makes one engine after another; what is written of each is replaced by its end."""
    context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0, pid=1), Guard())
    known = engines.Engines(context)
    first, second = FakeEngine(2), FakeEngine(3)
    known.of(first)
    known.of(second)
    known.write_dropped()
    del first
    gc.collect()
    known.write_dropped()
    names = RingReader(tmp_path / "rank0.1.ring").names()
    facts = {key: value for name in names for key, value in name.payload.items()}
    assert facts["engine1"]["dropped"] is True
    assert facts["engine1"].keys() == {"stage", "strategy", "strategy_fields", "dropped"}
    assert "dropped" not in facts["engine2"]


def test_ddp_and_the_redundancy_optimizer_send_a_known_strategy() -> None:
    assert {DDP.label, ZERO_REDUNDANCY.label} <= LABELS


def test_no_agent_composes_the_label_itself() -> None:
    """Each sends ``Strategy.metadata()``; so the members of EVERY are all that can be sent."""
    root = Path(zeromon_agents.__file__).parent
    texts = [file.read_text() for file in root.rglob("*.py")]
    assert not any('"strategy"' in text or "strategy=" in text for text in texts)
    senders = (ddp, engines, fsdp1, fsdp2, ddp)
    assert all(".metadata()" in inspect.getsource(sender) for sender in senders)


def test_private_names_that_the_strategy_is_read_from_are_still_set() -> None:
    assert "cpu_offload" in inspect.getsource(torch.distributed.fsdp._init_utils)
    shared = inspect.getsource(torch.distributed.fsdp._fully_shard._fsdp_common)
    assert "replicate_mesh_size" in shared
