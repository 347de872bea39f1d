"""Scripts as texts and users write them: loops of units, loads, seeds and offload under FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromon.check.problem import Machine, Problem
from zeromon.check.runner import check
from zeromon.memory.models import from_count

HEAD = """\
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy
from accelerate.utils import set_seed
"""
EIGHT_A100 = Machine(devices=8, device_bytes=80 << 30, host_bytes=1 << 40, device="a100",
                     model=from_count(7_000_000_000))  # fmt: skip


def problems_of(folder: Path, script: str, machine: Machine | None = None) -> list[Problem]:
    file = folder / "train.py"
    file.write_text(HEAD + script)
    return list(check([str(file)], machine).problems)


def severities(folder: Path, script: str, code: str) -> list[str]:
    return [p.severity for p in problems_of(folder, script) if p.code == code]


PARTS = {
    "nested": "for layer in model.layers:\n    for sublayer in layer:\n        FSDP(sublayer)",
    "index": "for layer in model.layers:\n    for i, sub in enumerate(layer):\n"
    "        layer[i] = FSDP(sub)",
    "children": "for block in model.blocks:\n    for child in block.children():\n"
    "        fully_shard(child)\nfully_shard(model)",
    "named": "for block in model.transformer.h:\n    for name, child in block.named_children():\n"
    "        setattr(block, name, FSDP(child))",
    "enumerate": "for i, block in enumerate(model.model.layers):\n"
    "    for child in list(block.children()):\n        fully_shard(child, mesh=mesh)",
    "one block": "def shard(block):\n    for name, child in block.named_children():\n"
    "        fully_shard(child)",
    "by index": "for i in range(n):\n    for part in model.layers[i].children():\n"
    "        fully_shard(part)",
    "modules": "for m in model.modules():\n    FSDP(m)",
}
BLOCKS = {
    "blocks": "for layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)",
    "stages": "for stage in model.stages:\n    for block in stage:\n        fully_shard(block)",
    "resnet": "for layer in (model.layer1, model.layer2):\n    for block in layer:\n"
    "        fully_shard(block)",
    "swin": "for layer in model.layers:\n    for blk in layer.blocks:\n        fully_shard(blk)",
    "swin's children": "for stage in model.layers:\n    for block in stage.children():\n"
    "        fully_shard(block)",
    "two stacks": "for stack in (model.encoder, model.decoder):\n    for layer in stack.layers:\n"
    "        fully_shard(layer)",
    "selected": "for layer in model.layers:\n    for part in layer.children():\n"
    "        if isinstance(part, MoE):\n            fully_shard(part)",
    "top": "for child in model.children():\n    fully_shard(child)",
    "checkpoint": "for block in model.layers:\n    for p in block.children():\n        p.train()",
}


@pytest.mark.parametrize("script", PARTS.values(), ids=PARTS)
def test_units_that_are_parts_of_a_block_are_too_fine(tmp_path: Path, script: str) -> None:
    assert severities(tmp_path, script, "ZM312") == ["warning"]


@pytest.mark.parametrize("script", BLOCKS.values(), ids=BLOCKS)
def test_units_that_are_blocks_are_not(tmp_path: Path, script: str) -> None:
    """Also those of a stage, as a ResNet's or a Swin transformer's."""
    assert severities(tmp_path, script, "ZM312") == []


WRAPPED = "model = FSDP(model, auto_wrap_policy=policy)\n"
LOADS = {
    "one line": 'model.load_state_dict(torch.load("checkpoint.pt"))',
    "two lines": 'sd = torch.load("checkpoint.pt")\nmodel.load_state_dict(sd)',
    "a key": 'ckpt = torch.load("c.pt", map_location="cpu")\nmodel.load_state_dict(ckpt["model"])',
    "a key of a line": 'model.load_state_dict(torch.load("c.pt")["state_dict"], strict=False)',
    "two states": 'c = torch.load("c.pt")\nmodel.load_state_dict(c["m"])\nopt.load_state_dict(c["o"])',
    "a variable for the key": 'c = torch.load(p)\nstate = c["model"]\nmodel.load_state_dict(state)',
    "the same name": 'sd = torch.load(p)\nsd = sd["model"]\nmodel.load_state_dict(sd)',
    "renamed keys": "sd = torch.load(p)\nsd = {k.removeprefix('m.'): v for k, v in sd.items()}\n"
    "model.load_state_dict(sd)",
    "a function": "def state_of(path):\n    return torch.load(path)\n"
    "model.load_state_dict(state_of(path))",
    "a keyword": "sd = torch.load(path)\nmodel.load_state_dict(state_dict=sd)",
}
SPARING = {
    "mapped": 'sd = torch.load("c.pt", mmap=True)\nmodel.load_state_dict(sd)',
    "meta": 'sd = torch.load("c.pt", map_location="meta")\nmodel.load_state_dict(sd, assign=True)',
    "rank 0": "sd = torch.load(p) if rank == 0 else {}\nmodel.load_state_dict(sd)",
    "guarded": "if dist.get_rank() == 0:\n    sd = torch.load(p)\n    model.load_state_dict(sd)",
    "small": 'scheduler.load_state_dict(torch.load("scheduler.pt"))',
    "unused": "sd = torch.load(p)\nprint(sd.keys())",
}


@pytest.mark.parametrize("script", LOADS.values(), ids=LOADS)
def test_a_whole_checkpoint_on_every_rank_is_found_once(tmp_path: Path, script: str) -> None:
    assert severities(tmp_path, WRAPPED + script, "ZM704") == ["info"]


@pytest.mark.parametrize("script", SPARING.values(), ids=SPARING)
def test_a_load_that_spares_the_hosts_memory_is_not(tmp_path: Path, script: str) -> None:
    assert severities(tmp_path, WRAPPED + script, "ZM704") == []


SHARD = "model = FSDP(model, auto_wrap_policy=policy)"
OTHER_SEEDS = {
    "text": f"torch.manual_seed(seed + rank)\nmodel = Net()\n{SHARD}",
    "fsdp2": "torch.manual_seed(0 + dist.get_rank())\nmodel = Net().cuda()\n"
    "for layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)",
    "a name": f"my_seed = 1 + rank\ntorch.manual_seed(my_seed)\nmodel = build_model(cfg)\n{SHARD}",
    "environment": f'torch.manual_seed(int(os.environ["RANK"]))\nmodel = Net()\n{SHARD}',
    "accelerate": f"set_seed(seed + accelerator.process_index)\nmodel = Net()\n{SHARD}",
    "moved": f"torch.manual_seed(42 + rank)\nmodel = Net()\nmodel = model.to(device)\n{SHARD}",
    "in main": "def main():\n    rank = dist.get_rank()\n    torch.manual_seed(1 + rank)\n"
    f"    model = Net()\n    {SHARD}\nmain()",
    "a helper": "def seed_all(n):\n    torch.manual_seed(n)\nseed_all(args.seed + rank)\n"
    f"model = Net()\n{SHARD}",
    "no sync": "torch.manual_seed(rank)\nmodel = Net()\n"
    "model = FSDP(model, auto_wrap_policy=policy, sync_module_states=False)",
    "second": f"torch.manual_seed(0)\ntorch.manual_seed(rank)\nmodel = Net()\n{SHARD}",
}
SAME_SEEDS = {
    "equal": f"torch.manual_seed(42)\nmodel = Net()\n{SHARD}",
    "afterwards": f"torch.manual_seed(0)\nmodel = Net()\n{SHARD}\ntorch.manual_seed(seed + rank)",
    "between": "torch.manual_seed(0)\nmodel = Net()\ntorch.manual_seed(rank)\n"
    f"model = model.to(d)\n{SHARD}",
    "synced": "torch.manual_seed(seed + rank)\nmodel = Net()\n"
    "model = FSDP(model, auto_wrap_policy=policy, sync_module_states=True)",
    "reset": f"torch.manual_seed(rank)\ntorch.manual_seed(0)\nmodel = Net()\n{SHARD}",
    "pretrained": f"torch.manual_seed(rank)\nmodel = Net.from_pretrained(name)\n{SHARD}",
    "loaded": f"torch.manual_seed(rank)\nmodel = Net()\nmodel.load_state_dict(sd)\n{SHARD}",
    "sent": "torch.manual_seed(rank)\nmodel = Net()\nfor p in model.parameters():\n"
    f"    dist.broadcast(p, 0)\n{SHARD}",
    "meta": f'torch.manual_seed(rank)\nwith torch.device("meta"):\n    model = Net()\n{SHARD}',
    "unknown": f"torch.manual_seed(args.seed)\nmodel = Net()\n{SHARD}",
    "ddp": "torch.manual_seed(rank)\nmodel = Net()\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)",
}


@pytest.mark.parametrize("script", OTHER_SEEDS.values(), ids=OTHER_SEEDS)
def test_a_seed_of_the_rank_before_the_model_is_told(tmp_path: Path, script: str) -> None:
    [problem] = [p for p in problems_of(tmp_path, script) if p.code == "ZM412"]
    assert problem.severity == "info"
    assert "another seed" in problem.message


@pytest.mark.parametrize("script", SAME_SEEDS.values(), ids=SAME_SEEDS)
def test_a_seed_that_leaves_the_model_equal_is_not(tmp_path: Path, script: str) -> None:
    assert severities(tmp_path, script, "ZM412") == []


def test_replicas_with_seeds_of_their_own_never_become_equal(tmp_path: Path) -> None:
    script = OTHER_SEEDS["text"].replace(
        "policy)", "policy, sharding_strategy=ShardingStrategy.HYBRID_SHARD)"
    )
    assert severities(tmp_path, script, "ZM412") == ["warning"]


OFFLOADS = {
    "argument": "model = FSDP(model, auto_wrap_policy=p, cpu_offload=CPUOffload(offload_params=True))",
    "variable": "offload = CPUOffload(True)\n"
    "model = FSDP(model, auto_wrap_policy=p, cpu_offload=offload)",
    "position": "model = FSDP(model, None, None, CPUOffload(offload_params=True), p)",
    "fsdp2": "policy = CPUOffloadPolicy()\nfor layer in model.layers:\n"
    "    fully_shard(layer, offload_policy=policy)\nfully_shard(model, offload_policy=policy)",
}
YAML = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n" \
       "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: {}\n"  # fmt: skip


@pytest.mark.parametrize("script", OFFLOADS.values(), ids=OFFLOADS)
def test_an_offload_of_fsdp_that_the_model_does_not_need(tmp_path: Path, script: str) -> None:
    """7 B in fp32 over 8 A100: 14 GB of states, and at most 28 GB gathered at once."""
    [problem] = [p for p in problems_of(tmp_path, script, EIGHT_A100) if p.code == "ZM505"]
    assert "at most 35.9 GiB of 75.2 GiB" in problem.message
    off = script.replace("True", "False").replace("CPUOffloadPolicy()", "OffloadPolicy()")
    others = [
        problems_of(tmp_path, off, EIGHT_A100),
        problems_of(tmp_path, script),
        problems_of(tmp_path, script, Machine(devices=2, device_bytes=40 << 30, host_bytes=1 << 40,
                                              model=EIGHT_A100.model)),
    ]  # fmt: skip
    assert "ZM505" not in {p.code for problems in others for p in problems}


@pytest.mark.parametrize("value", ["true", "True", "yes", "1"])
def test_an_offload_of_accelerates_fsdp_that_the_model_does_not_need(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(YAML.format(value))
    [problem] = [p for p in check([str(file)], EIGHT_A100).problems if p.code == "ZM505"]
    assert (problem.key, problem.fix) == (
        "fsdp_config.fsdp_offload_params",
        "remove fsdp_offload_params",
    )
    large = Machine(devices=8, device_bytes=80 << 30, host_bytes=1 << 42, model=from_count(70 * 10**9))
    assert "ZM505" not in {p.code for p in check([str(file)], large).problems}
