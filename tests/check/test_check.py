"""zeromon check: what it says of configurations and scripts, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_models import from_config
from support import ROOT

from zeromon.check import runner
from zeromon.check.deepspeed import fields as deepspeed_fields
from zeromon.check.deepspeed.fields import wrong_values
from zeromon.check.documents import MAX_BYTES, UnreadableError, parse_config
from zeromon.check.problem import Config, Machine, Problem, load_schema
from zeromon.check.runner import check
from zeromon.cli import main
from zeromon.diagnosis.rule import all_pages
from zeromon.memory.models import from_count

SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data")) / "configs"
SNAPSHOT = Path(__file__).with_name("check_snapshot.json")

MACHINE = Machine(devices=8, device_bytes=80 << 30, model=from_count(7_000_000_000))


def problems_of(
    folder: Path, text: str, name: str = "ds.json", machine: Machine | None = None
) -> list[Problem]:
    file = folder / name
    file.write_text(text)
    return list(check([str(file)], machine).problems)


def found_in(
    folder: Path, text: str, name: str = "ds.json", machine: Machine | None = None
) -> set[tuple[str, str]]:
    return {(p.code, p.severity) for p in problems_of(folder, text, name, machine)}


def zero(stage: int, *, top: str = "", **settings: Any) -> str:
    """A DeepSpeed file without a finding of its own, changed by *settings* of its ZeRO section."""
    part = {
        "stage": stage,
        **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
        **({"overlap_comm": True} if stage in (1, 2) else {}),
    }
    base = {"bf16": {"enabled": True}, "train_batch_size": "auto", "zero_optimization": part | settings}
    return json.dumps(base | json.loads(top or "{}"))


def optimizer(kind: str, **params: Any) -> str:
    return zero(2, top=json.dumps({"optimizer": {"type": kind, "params": params}}))


def scheduler(kind: str, **params: Any) -> str:
    return zero(2, top=json.dumps({"scheduler": {"type": kind, "params": params}}))


def peak(kind: str, rate: float, **params: Any) -> str:
    """A scheduler beside an optimizer of its own rate."""
    parts = {"optimizer": {"type": "AdamW", "params": {"lr": rate}},
             "scheduler": {"type": kind, "params": params}}  # fmt: skip
    return zero(2, top=json.dumps(parts))


def launch(kind: str, section: str = "", top: str = "") -> str:
    """An accelerate file without a finding of its own."""
    good = {
        "DEEPSPEED": "deepspeed_config:\n  zero_stage: 2\n",
        "FSDP": "fsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
        "FSDP2": "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
    }
    lines = "".join(f"  {line}\n" for line in section.splitlines())
    base = good[kind]
    for line in section.splitlines():  # a setting that is given again replaces the base's
        base = re.sub(rf"  {line.partition(':')[0]}: .*\n", "", base)
    precision = "" if "mixed_precision" in top or "config_file" in section else "mixed_precision: bf16\n"
    kind = kind.removesuffix("2")
    return f"distributed_type: {kind}\nnum_processes: 8\n{precision}{base}{lines}{top}\n"


# ---- each rule, and the nearest good case -------------------------------------------------------

DEEPSPEED = [
    # bad, good, code, severity
    (zero(2, contiguous_gradients=False),
     zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}), "ZM205", "info"),
    (zero(2, reduce_scatter=False), zero(0, reduce_scatter=False), "ZM319", "warning"),
    (zero(2, top='{"bf16": {"enabled": false}, "fp16": {"enabled": true}}'),
     zero(2, top='{"bf16": {"enabled": false}, "fp16": {"enabled": true}, "gradient_clipping": 1.0}'),
     "ZM407", "info"),
    (zero(0, top='{"data_types": {"grad_accum_dtype": "fp32"}}'),
     zero(2, top='{"data_types": {"grad_accum_dtype": "fp32"}}'), "ZM105", "error"),
    (zero(3, stage3_prefetch_bucket_size=5e8), zero(3, stage3_prefetch_bucket_size=5e7), "ZM303",
     "info"),
    (zero(3, offload_optimizer={"device": "cpu", "nvme_path": "/n"}),
     zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "ZM106", "info"),
    (zero(2, overlap_com=True), zero(2, overlap_comm=True), "ZM102", "error"),
    (zero(2, top='{"zero_allow_untested_optimiser": true}'),
     zero(2, top='{"zero_allow_untested_optimizer": true}'), "ZM102", "warning"),
    (zero(2, top='{"overlap_comm": true}'), zero(2, overlap_comm=True), "ZM102", "warning"),
    (zero(2, top='{"my_project": 1}'), zero(2, top='{"_my_project": 1}'), "ZM102", "info"),
    (zero(2, top='{"aio": {"queue_deep": 8}}'), zero(2, top='{"aio": {"queue_depth": 8}}'), "ZM102",
     "warning"),
    (zero(3, offload_param={"devise": "cpu"}), zero(3, offload_param={"device": "cpu"}), "ZM102",
     "error"),
    (zero(2, reduce_bucket_size="5e8"), zero(2, reduce_bucket_size=5e8), "ZM103", "error"),
    (zero(2, reduce_bucket_size=0), zero(2, reduce_bucket_size="auto"), "ZM103", "error"),
    (zero(4), zero(2), "ZM103", "error"),
    (zero(2, overlap_comm="maybe"), zero(2, overlap_comm="true"), "ZM103", "error"),
    (zero(3, offload_param={"device": "gpu"}), zero(3, offload_param={"device": "none"}), "ZM103",
     "error"),
    (zero(2, offload_optimizer="cpu"), zero(2, offload_optimizer=None), "ZM103", "error"),
    (zero(2, top='{"bf16": true}'), zero(2, top='{"bf16": {"enabled": true}}'), "ZM103", "error"),
    (zero(2, top='{"activation_checkpointing": {"profile": "false"}}'),
     zero(2, top='{"activation_checkpointing": {"profile": false}}'), "ZM103", "warning"),
    (zero(2, top='{"train_batch_size": -8}'), zero(2, top='{"train_batch_size": 8}'), "ZM103", "error"),
    (zero(2, top='{"communication_data_type": "fp64"}'),
     zero(2, top='{"communication_data_type": "bf16"}'), "ZM103", "error"),
    (zero(2, cpu_offload=True), zero(2, offload_optimizer={"device": "cpu"}), "ZM104", "warning"),
    (zero(2, top='{"nebula": {}}'), zero(2, top='{"checkpoint": {}}'), "ZM104", "error"),
    (zero(3, mics_shard_size=8), zero(3, zero_hpz_partition_size=8), "ZM104", "error"),
    ('{"zero_optimization": true, "bf16": {"enabled": true}}', zero(1), "ZM104", "warning"),
    (zero(2, top='{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}'),
     zero(2, top='{"gradient_clipping": 1.0}'), "ZM104", "warning"),
    (zero(2, top='{"fp16": {"enabled": true}}'), zero(2, top='{"fp16": {"enabled": false}}'), "ZM105",
     "error"),
    (zero(2, top='{"fp16": {"enabled": true}}'), zero(2, top='{"fp16": {"enabled": "auto"}}'), "ZM105",
     "error"),
    (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
     zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ZM105", "error"),
    (zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), zero(2, cpu_offload=True), "ZM105",
     "error"),
    ('{"zero_optimization": {"stage": 1, "stage": 2}, "bf16": {"enabled": true}}', zero(2), "ZM105",
     "error"),
    (zero(3, top='{"gradient_allreduce_op": "sum"}'), zero(2, top='{"gradient_allreduce_op": "sum"}'),
     "ZM105", "error"),
    (zero(2, stage3_prefetch_bucket_size=1), zero(3, stage3_prefetch_bucket_size=1), "ZM106", "info"),
    (zero(2, offload_param={"device": "cpu"}), zero(2, offload_param={"device": "none"}), "ZM106",
     "info"),
    (zero(0, overlap_comm=True), zero(1, overlap_comm=True), "ZM106", "info"),
    (zero(3, round_robin_gradients=True), zero(2, round_robin_gradients=True), "ZM106", "info"),
    (zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
     zero(2, offload_optimizer={"device": "cpu", "nvme_path": "/n"}), "ZM106", "warning"),
    (zero(2, top='{"communication_data_type": "fp32"}'),
     zero(2, top='{"communication_data_type": "fp32", "bf16": {"enabled": false}}'), "ZM208", "info"),
    (zero(2, top='{"data_types": {"grad_accum_dtype": "fp32"}}'),
     zero(2, top='{"data_types": {"grad_accum_dtype": "bf16"}}'), "ZM208", "info"),
    (zero(3, overlap_comm=False), zero(3), "ZM302", "info"),
    (zero(2, overlap_comm=False), zero(2), "ZM302", "info"),
    (zero(2, overlap_comm=None), zero(0, overlap_comm=None), "ZM302", "info"),
    (zero(1, overlap_comm=None), zero(3, overlap_comm=None), "ZM302", "info"),
    (scheduler("WarmupDecayLR", total_num_steps=100), scheduler("WarmupLR"), "ZM105", "warning"),
    (scheduler("WarmupDecayLR", total_num_steps=100),
     scheduler("WarmupCosineLR", total_num_steps=100), "ZM105", "warning"),
    (scheduler("LRRangeTest", lr_range_test_step_size=9),
     scheduler("LRRangeTest", lr_range_test_min_lr=1e-4), "ZM105", "warning"),
    (peak("WarmupLR", 1e-4, warmup_max_lr=3e-5), peak("WarmupLR", 3e-5, warmup_max_lr=3e-5), "ZM105",
     "warning"),
    (peak("WarmupDecayLR", 5e-7, total_num_steps=9), peak("WarmupDecayLR", 1e-3, total_num_steps=9),
     "ZM105", "warning"),
    (peak("OneCycle", 1e-2, cycle_min_lr=1e-5, cycle_max_lr=1e-3),
     peak("OneCycle", 1e-3, cycle_min_lr=1e-5, cycle_max_lr=1e-3), "ZM105", "warning"),
    (zero(2, top='{"scheduler": {"type": "WarmupLR"}}'), scheduler("WarmupLR"), "ZM103", "error"),
    (zero(3, offload_optimizer={"device": "cpu", "fast_init": True}),
     zero(3, offload_optimizer={"device": "cpu"}), "ZM106", "info"),
    (zero(1, overlap_comm=False), zero(1, overlap_comm="auto"), "ZM302", "info"),
    (zero(2, reduce_bucket_size=500_000), zero(2, reduce_bucket_size=1_000_000), "ZM303", "warning"),
    (zero(1, allgather_bucket_size=1000), zero(3, allgather_bucket_size=1000), "ZM303", "warning"),
    (zero(3, top='{"bf16": {"enabled": false}, "fp16": {"enabled": true}}'),
     zero(2, top='{"bf16": {"enabled": false}, "fp16": {"enabled": true}}'), "ZM402", "info"),
    (zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "loss_scale": 128}}'),
     zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "loss_scale": 0}}'), "ZM404", "warning"),
    (zero(2, top='{"bf16": {}, "fp16": {"enabled": "auto", "initial_scale_power": 32}}'),
     zero(2, top='{"bf16": {}, "fp16": {"enabled": "auto", "initial_scale_power": 24}}'), "ZM404",
     "info"),
    (zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "initial_scale_power": 32}}'),
     zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "initial_scale_power": 24}}'), "ZM404",
     "warning"),
    (zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "loss_scale_window": 50}}'),
     zero(2, top='{"fp16": {"enabled": false, "loss_scale_window": 50}}'), "ZM404", "warning"),
    (zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "hysteresis": 0}}'),
     zero(2, top='{"bf16": {}, "fp16": {"enabled": true, "hysteresis": 1}}'), "ZM404", "warning"),
    (zero(2, top='{"bf16": {"enabled": false}}'), zero(0, top='{"bf16": {"enabled": false}}'), "ZM405",
     "info"),
    (zero(1, top='{"bf16": {}}'), zero(1, top='{"bf16": {"enabled": "auto"}}'), "ZM405", "info"),
    (zero(2, offload_optimizer={"device": "cpu", "pin_memory": False}),
     zero(2, offload_optimizer={"device": "cpu"}), "ZM502", "warning"),
    (zero(2, offload_optimizer={"device": "cpu", "pin_memory": False}),
     zero(2, offload_optimizer={"device": "none", "pin_memory": False}), "ZM502", "warning"),
    (zero(3, offload_optimizer={"device": "nvme"}),
     zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "ZM504", "error"),
    (zero(3, offload_param={"device": "nvme", "nvme_path": "/n"}),
     zero(3, offload_param={"device": "nvme", "nvme_path": "/n"}, top='{"aio": {"queue_depth": 32}}'),
     "ZM504", "info"),
    (zero(3, offload_param={"device": "nvme", "nvme_path": "/n"}, top='{"aio": {"queue_depth": 1}}'),
     zero(3, offload_param={"device": "cpu"}, top='{"aio": {"queue_depth": 1}}'), "ZM504", "warning"),
    (zero(2, top='{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4,'
                 ' "gradient_accumulation_steps": 2}'),
     zero(2, top='{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,'
                 ' "gradient_accumulation_steps": 2}'), "ZM602", "error"),
    (zero(3, stage3_gather_16bit_weights_on_model_save=False), zero(3), "ZM701", "info"),
    (zero(3, stage3_gather_16bit_weights_on_model_save=False),
     zero(3, stage3_gather_16bit_weights_on_model_save="auto"), "ZM701", "info"),
]  # fmt: skip

DEEPSPEED += [
    (optimizer("AdamWW"), optimizer("AdamW"), "ZM103", "error"),
    (optimizer("sgd"), optimizer("SGD", momentum=0.9), "ZM103", "error"),
    (optimizer("FusedAdam"), optimizer("Adam"), "ZM103", "error"),
    (optimizer("AdamW", learning_rate=1e-4), optimizer("AdamW", lr=1e-4, torch_adam=True), "ZM102",
     "error"),
    (optimizer("SGD", betas=[0.9, 0.99]), optimizer("Lion", betas=[0.9, 0.99]), "ZM102", "error"),
    (optimizer("OneBitAdam", freeze_step=2), optimizer("Adam"), "ZM105", "error"),
    (scheduler("WarmupDecayLR", warmup_num_steps=5),
     scheduler("WarmupDecayLR", warmup_num_steps=5, total_num_steps="auto"), "ZM103", "error"),
    (scheduler("WarmupLRR"), scheduler("WarmupLR"), "ZM103", "error"),
    (scheduler("WarmupLR", total_num_steps=9), scheduler("WarmupCosineLR", total_num_steps=9), "ZM102",
     "error"),
    (zero(2, sub_group_size="auto"), zero(2, reduce_bucket_size="auto"), "ZM103", "error"),
    (zero(2, top='{"gradient_accumulation_steps": "8"}'),
     zero(2, top='{"gradient_accumulation_steps": 8}'), "ZM103", "error"),
    (zero(2, top='{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 8}'),
     zero(2, top='{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}'), "ZM602", "error"),
    (zero(2, top='{"train_batch_size": null}'), zero(2, top='{"train_batch_size": 8}'), "ZM602",
     "warning"),
    (zero(2, top='{"train_batch_size": null, "gradient_clipping": "auto"}'),
     zero(2, top='{"train_batch_size": 8}'), "ZM602", "warning"),
    (zero(2)[:-1] + ",}", zero(2), "ZM101", "error"),  # with "auto": transformers reads it
]  # fmt: skip

FILE = "deepspeed_config_file: absent.json"
ACCELERATE = [
    (launch("DEEPSPEED", "zero_stage: 3\nzero3_save_16bit_model: true\nzero3_init_flag: false"),
     launch("DEEPSPEED", "zero_stage: 2\nzero3_init_flag: false"), "ZM704", "warning"),
    (launch("DEEPSPEED", "offload_optimizer_device: cpu\noffload_optimizer_nvme_path: /n"),
     launch("DEEPSPEED", "offload_optimizer_device: cpu"), "ZM106", "info"),
    (launch("FSDP", top="num_procesess: 4"), launch("FSDP", top="num_machines: 4"), "ZM102", "error"),
    (launch("FSDP", "fsdp_backward_prefetch_policy: BACKWARD_PRE"),
     launch("FSDP", "fsdp_backward_prefetch: BACKWARD_PRE"), "ZM102", "warning"),
    (launch("FSDP", "shardingstrategy: FULL_SHARD"), launch("FSDP", "sharding_strategy: FULL_SHARD"),
     "ZM102", "warning"),
    (launch("DEEPSPEED", "zero_stagee: 2"), launch("DEEPSPEED", "gradient_clipping: 2"), "ZM102",
     "warning"),
    ("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n", launch("FSDP"), "ZM103", "error"),
    (launch("FSDP").replace(": FSDP", ": FSPD"), launch("FSDP"), "ZM103", "error"),
    (launch("FSDP", top="mixed_precision: no"), launch("FSDP", top="mixed_precision: 'no'"), "ZM103",
     "error"),
    (launch("FSDP", top="mixed_precision: bf61"), launch("FSDP", top="mixed_precision: fp8"), "ZM103",
     "error"),
    (launch("FSDP", "fsdp_sharding_strategy: SHARD_ALL"), launch("FSDP", "fsdp_sharding_strategy: 1"),
     "ZM103", "error"),
    (launch("FSDP2", "fsdp_state_dict_type: LOCAL_STATE_DICT"),
     launch("FSDP", "fsdp_state_dict_type: LOCAL_STATE_DICT"), "ZM103", "error"),
    (launch("FSDP2", "fsdp_reshard_after_forward: FULL_SHARD"),
     launch("FSDP2", "fsdp_reshard_after_forward: true"), "ZM103", "error"),
    (launch("DEEPSPEED", "zero_stage: 4"), launch("DEEPSPEED", "zero_stage: 1"), "ZM103", "error"),
    (launch("DEEPSPEED", "offload_optimizer_device: disk"),
     launch("DEEPSPEED", "offload_optimizer_device: cpu"), "ZM103", "error"),
    (launch("FSDP", top="fp16: true"), launch("FSDP"), "ZM104", "info"),
    (launch("FSDP", top="num_machines: 3"), launch("FSDP", top="num_machines: 2"), "ZM105", "warning"),
    (launch("FSDP", top="use_cpu: true\nuse_cpu: false"), launch("FSDP", top="use_cpu: false"), "ZM105",
     "warning"),
    (launch("DEEPSPEED", f"zero_stage: 2\n{FILE}"),
     f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  {FILE}\n  zero3_init_flag: true\n", "ZM105",
     "error"),
    (f"distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  {FILE}\n",
     f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  {FILE}\n", "ZM105", "error"),
    (launch("DEEPSPEED", "zero_stage: 2\nzero3_init_flag: true"),
     launch("DEEPSPEED", "zero_stage: 3\nzero3_init_flag: true"), "ZM105", "warning"),
    (launch("FSDP", "fsdp_activation_checkpointing_offload: true"),
     launch("FSDP2", "fsdp_activation_checkpointing: true\nfsdp_activation_checkpointing_offload: true"),
     "ZM105", "error"),
    (launch("DEEPSPEED", "offload_param_device: cpu"), launch("DEEPSPEED", "offload_param_device: none"),
     "ZM106", "info"),
    (launch("FSDP2", "fsdp_sharding_strategy: SHARD_GRAD_OP"),
     launch("FSDP", "fsdp_sharding_strategy: SHARD_GRAD_OP"), "ZM106", "info"),
    (launch("FSDP", "fsdp_reshard_after_forward: true"),
     launch("FSDP2", "fsdp_reshard_after_forward: true"), "ZM106", "info"),
    (launch("FSDP", "fsdp_auto_wrap_policy: NO_WRAP"),
     launch("FSDP", "fsdp_auto_wrap_policy: SIZE_BASED_WRAP"), "ZM206", "warning"),
    (launch("FSDP").replace("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_version: 1"),
     launch("FSDP"), "ZM206", "info"),
    (launch("FSDP", "fsdp_backward_prefetch: NO_PREFETCH"),
     launch("FSDP", "fsdp_backward_prefetch: BACKWARD_POST"), "ZM304", "warning"),
    (launch("FSDP", "fsdp_sharding_strategy: FULL_SHARD", "num_machines: 2"),
     launch("FSDP", "fsdp_sharding_strategy: HYBRID_SHARD", "num_machines: 2"), "ZM307", "info"),
    (launch("FSDP", "", "num_machines: 2"), launch("FSDP", "", "num_machines: 1"), "ZM307", "info"),
    (launch("FSDP2", "fsdp_reshard_after_forward: true", "num_machines: 2"),
     launch("FSDP2", "fsdp_reshard_after_forward: true", "num_machines: 2\nparallelism_config:\n"
            "  parallelism_config_dp_replicate_size: 2"), "ZM307", "info"),
    (launch("DEEPSPEED", "zero_stage: 3", "mixed_precision: fp16"),
     launch("DEEPSPEED", "zero_stage: 2", "mixed_precision: fp16"), "ZM402", "info"),
    (launch("DEEPSPEED", "", "mixed_precision: 'no'"), launch("DEEPSPEED"), "ZM405", "info"),
    (launch("DEEPSPEED", "zero_stage: 3\noffload_optimizer_device: nvme"),
     launch("DEEPSPEED", "zero_stage: 3\noffload_optimizer_device: nvme\n"
            "offload_optimizer_nvme_path: /n"), "ZM504", "error"),
    (launch("DEEPSPEED", "zero_stage: 3\nzero3_save_16bit_model: false"),
     launch("DEEPSPEED", "zero_stage: 3\nzero3_save_16bit_model: true"), "ZM701", "info"),
    (launch("FSDP", "fsdp_state_dict_type: FULL_STATE_DICT"),
     launch("FSDP", "fsdp_state_dict_type: SHARDED_STATE_DICT"), "ZM702", "info"),
    (launch("FSDP", "fsdp_cpu_ram_efficient_loading: true\nfsdp_sync_module_states: false"),
     launch("FSDP", "fsdp_cpu_ram_efficient_loading: false\nfsdp_sync_module_states: false"), "ZM703",
     "error"),
]  # fmt: skip

HEAD = """
import torch, deepspeed
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from accelerate import DeepSpeedPlugin
from transformers import TrainingArguments
from transformers.trainer_utils import FSDPOption
"""
LOOP = """
model = DDP(model)
N = 4
for i, x in enumerate(data):
    {sync}
    loss = model(x)
    loss.backward()
    if (i + 1) % N == 0:
        optimizer.step()
"""
BLOCKS = "for block in model.layers:\n    fully_shard(block)\nfully_shard(model)"
MIXED = (
    "mixed = MixedPrecision(param_dtype=torch.float16)\n"
    "FSDP(m, auto_wrap_policy=p, mixed_precision=mixed)\n"
)
ROOT_POLICY = "policy = MixedPrecisionPolicy(torch.bfloat16)\nfor block in model.layers:\n    {}\n{}"
RESUME = "torch.cuda.set_device(local)\nDDP(model)\n"
EPOCHS = """
loader = DataLoader(data, sampler=DistributedSampler(data{shuffle}))
def epoch_of(model):
    for batch in loader:
        model(batch).backward()
for epoch in range({epochs}):
    {line}
    epoch_of(model)
"""
STATE = """
fully_shard(model.a)
def main_rank():
    return torch.distributed.get_rank() == 0
def save(model):
    {guard}
        return
    get_model_state_dict(model)
save(model)
"""
ENGINE = """
class Saver:
    def __init__(self, engine):
        self.engine = engine
    def save(self):
        {guard}
            self.engine.save_checkpoint('x')
engine, *_ = deepspeed.initialize(model=m)
Saver({given}).save()
"""
HELPERS = """
def shard(model, policy):
    return fully_shard(model, mp_policy=policy)
def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters()])
{first}
{second}
"""
OFFLOAD = """
import copy
CPU = {{'device': 'cpu'}}
ZERO = dict(overlap_comm=True, offload_param=CPU)
def config(micro):
    made = copy.deepcopy({{'zero_optimization': {{**ZERO, 'stage': {stage}}}}})
    made['bf16'] = {{'enabled': True}}
    made['train_micro_batch_size_per_gpu'] = micro
    {line}
    return made
deepspeed.initialize(model=m, config=config(2))
"""
SCRIPTS = [
    (MIXED + "scaler = torch.amp.GradScaler('cuda')", MIXED + "scaler = ShardedGradScaler()", "ZM408",
     "error"),
    (MIXED + "scaler = torch.amp.GradScaler('cuda')",
     "MixedPrecisionPolicy(torch.float16)\nfully_shard(m.a)\ntorch.amp.GradScaler('cuda')", "ZM408",
     "error"),
    (ROOT_POLICY.format("fully_shard(block)", "fully_shard(model, mp_policy=policy)"),
     ROOT_POLICY.format("fully_shard(block, mp_policy=policy)", "fully_shard(model, mp_policy=policy)"),
     "ZM106", "warning"),
    (ROOT_POLICY.format("fully_shard(block)", "fully_shard(model, mp_policy=policy)"),
     ROOT_POLICY.format("fully_shard(block, **options)", "fully_shard(model, mp_policy=policy)"),
     "ZM106", "warning"),
    (RESUME + "torch.load('x', map_location='cuda:0')",
     RESUME + "torch.load('x', map_location=f'cuda:{local}')", "ZM704", "warning"),
    (RESUME + "torch.load('x', map_location='cuda:0')",
     RESUME + "if rank == 0:\n    torch.load('x', map_location='cuda:0')", "ZM704", "warning"),
    (EPOCHS.format(epochs="n", line="pass", shuffle=""),
     EPOCHS.format(epochs="n", line="loader.sampler.set_epoch(epoch)", shuffle=""), "ZM604", "warning"),
    (EPOCHS.format(epochs="n", line="pass", shuffle=""),
     EPOCHS.format(epochs="1", line="pass", shuffle=""), "ZM604", "warning"),
    (EPOCHS.format(epochs="n", line="pass", shuffle=""),
     EPOCHS.format(epochs="n", line="pass", shuffle=", shuffle=False"), "ZM604", "warning"),
    (STATE.format(guard="if not main_rank():"), STATE.format(guard="if model is None:"), "ZM003",
     "error"),
    (STATE.format(guard="if torch.distributed.get_rank() != 0 or skip:"),
     STATE.format(guard="if torch.distributed.get_rank() != 0 and skip:"), "ZM003", "error"),
    (STATE.format(guard="if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:"),
     STATE.format(guard="if torch.distributed.is_initialized() and done:"), "ZM003", "error"),
    (ENGINE.format(guard="if is_main_process:", given="engine"),
     ENGINE.format(guard="if True:", given="engine"), "ZM003", "error"),
    (ENGINE.format(guard="if rank == 0 and due:", given="engine"),
     ENGINE.format(guard="if rank == 0 or due:", given="engine"), "ZM003", "error"),
    (ENGINE.format(guard="if rank == 0:", given="engine"),
     ENGINE.format(guard="if rank == 0:", given="other"), "ZM003", "error"),
    ("def wrap(m):\n    return FSDP(m, auto_wrap_policy=p)\ndef clip(m):\n"
     "    torch.nn.utils.clip_grad_norm_(m.parameters(), 1)\nmodel = wrap(m)\nclip(model)",
     "def wrap(m):\n    return FSDP(m, auto_wrap_policy=p)\ndef clip(m):\n"
     "    torch.nn.utils.clip_grad_norm_(m.parameters(), 1)\nmodel = wrap(m)\nclip(other)", "ZM109",
     "error"),
    (HELPERS.format(first="o = optimizer_of(model)", second="shard(model, p)"),
     HELPERS.format(first="shard(model, p)", second="o = optimizer_of(model)"), "ZM108", "error"),
    (HELPERS.format(first="o = optimizer_of(model)", second="shard(model, p)"),
     HELPERS.format(first="o = optimizer_of(other)", second="shard(model, p)"), "ZM108", "error"),
    (HELPERS.format(first="model = build()", second="shard(model, p)"),
     HELPERS.format(first="for block in model.layers:", second="    shard(block, p)"), "ZM206",
     "warning"),
    (HELPERS.format(first="model = build()", second="shard(model, p)"),
     HELPERS.format(first="model = build()", second="model.apply(shard)"), "ZM206", "warning"),
    (OFFLOAD.format(stage=2, line="pass"), OFFLOAD.format(stage=3, line="pass"), "ZM106", "info"),
    (OFFLOAD.format(stage=2, line="pass"),
     OFFLOAD.format(stage=2, line="made['zero_optimization']['stage'] = args.stage"), "ZM106", "info"),
    (OFFLOAD.format(stage=3, line="made['zero_optimization']['stage'] = 2"),
     OFFLOAD.format(stage=3, line="if small: made['zero_optimization']['stage'] = 2"), "ZM106", "info"),
    ("def policy(name):\n    if name:\n        return transformer_auto_wrap_policy\n    return other\n"
     "FSDP(model, auto_wrap_policy=policy(n))",
     "def policy(name):\n    if name:\n        return partial(transformer_auto_wrap_policy, x=y)\n"
     "    return other\nFSDP(model, auto_wrap_policy=policy(n))", "ZM107", "error"),
    ("FSDP(model, transformer_layer_cls={Block})", "FSDP(model, auto_wrap_policy=policy)", "ZM107",
     "error"),
    ("FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)", "DDP(model)", "ZM104", "warning"),
    ("MixedPrecision(param_dtype=torch.float16)",
     "MixedPrecision(param_dtype=torch.float16)\nscaler = ShardedGradScaler()", "ZM408", "warning"),
    ("for m in model.modules():\n    fully_shard(m)",
     "for m in model.modules():\n    if isinstance(m, Block):\n        fully_shard(m)", "ZM312",
     "warning"),
    ("model.load_state_dict(torch.load('x'))\nfully_shard(model.a)",
     "if rank == 0:\n    model.load_state_dict(torch.load('x'))\nfully_shard(model.a)", "ZM704",
     "info"),
    ("policy = FSDP(policy)\nvalue = FSDP(value)", "FSDP(policy.a)\nFSDP(value)", "ZM206", "warning"),
    ("TrainingArguments('o', fp16=True, bf16=True)", "TrainingArguments('o', fp16=False, bf16=True)",
     "ZM105", "error"),
    ("deepspeed.Profiling()", "deepspeed.init_distributed()", "ZM107", "error"),
    ("FSDP(model)", "FSDP(model, auto_wrap_policy=policy)", "ZM206", "warning"),
    ("FSDP(model)", "FSDP(FSDP(model.a) + model)", "ZM206", "warning"),
    ("FSDP(model)", "FSDP(model, **options)", "ZM206", "warning"),
    ("FSDP(model)", "def shard(module):\n    return FSDP(module)", "ZM206", "warning"),
    ("FSDP(model)", "class FSDP: pass\nprint(FSDP)", "ZM206", "warning"),
    ("fully_shard(model)", BLOCKS, "ZM206", "warning"),
    ("fully_shard(model)", "def f(m):\n    fully_shard(m)", "ZM206", "warning"),
    ("MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
     "MixedPrecision(param_dtype=torch.bfloat16)", "ZM208", "info"),
    ("MixedPrecisionPolicy(torch.bfloat16, torch.float32)", "MixedPrecisionPolicy(torch.bfloat16)",
     "ZM208", "info"),
    ("FSDP(m, auto_wrap_policy=p, limit_all_gathers=False)",
     "FSDP(m, auto_wrap_policy=p, limit_all_gathers=flag)", "ZM209", "warning"),
    ("DDP(model, bucket_cap_mb=0.1)", "DDP(model, bucket_cap_mb=25)", "ZM303", "warning"),
    ("FSDP(m, auto_wrap_policy=p, backward_prefetch=None)", "FSDP(m, auto_wrap_policy=p)", "ZM304",
     "warning"),
    (LOOP.format(sync="pass"), LOOP.format(sync="model.no_sync()"), "ZM308", "info"),
    (LOOP.format(sync="pass"), LOOP.format(sync="pass").replace("N = 4", "N = 1"), "ZM308", "info"),
    (LOOP.format(sync="pass"), LOOP.format(sync="pass").replace("DDP(", "("), "ZM308", "info"),
    ("FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT)",
     "FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT, c)", "ZM702", "warning"),
    ("FullStateDictConfig(offload_to_cpu=True)", "FullStateDictConfig(True, rank0_only=True)", "ZM702",
     "warning"),
    ("deepspeed.initialize(config={'zero_optimization': {'stag': 2}, 'bf16': {'enabled': True}})",
     "deepspeed.initialize(config={'zero_optimization': {'stage': s}, 'bf16': {'enabled': True}})",
     "ZM102", "error"),
    ("DeepSpeedPlugin(hf_ds_config={'zero_optimization': {'stag': 2}, 'bf16': {'enabled': True}})",
     "DeepSpeedPlugin(hf_ds_config={'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}})",
     "ZM102", "error"),
    ("TrainingArguments('o', deepspeed={'zero_optimization': {'stage': 2, 'overlap_com': True}})",
     "TrainingArguments('o', deepspeed={'zero_optimization': {'stage': 2, 'overlap_comm': True}})",
     "ZM102", "error"),
    ("c = {'zero_optimization': {'stage': 4}}\ndeepspeed.initialize(model=m, config=c)",
     "c = {'zero_optimization': {'stage': 2}}\ndeepspeed.initialize(model=m, config=c)", "ZM103",
     "error"),
]  # fmt: skip


ON = "fsdp=True, fsdp_config="
TRAINER = [
    # of TrainingArguments('o', ...)
    (f"{ON}{{'transformer_layer_cls_to_wrapp': 'A'}}", f"{ON}{{'transformer_layer_cls_to_wrap': 'A'}}",
     "ZM102", "warning"),
    (f"{ON}{{'fsdp_offload_params': True}}", f"{ON}{{'fsdp_cpu_offload': True}}", "ZM102", "warning"),
    ("fsdp='full_shrad'", "fsdp='full_shard auto_wrap offload'", "ZM103", "error"),
    ("fsdp=['full_shard', 'autowrap']", "fsdp=['full_shard', 'auto_wrap']", "ZM103", "error"),
    ("fsdp=[FSDPOption.FULL_SHARD, 'x']", "fsdp=[FSDPOption.FULL_SHARD]", "ZM103", "error"),
    ("fsdp=['full_shard', 'autowrap']", "fsdp=['full_shard', name]", "ZM103", "error"),
    (f"{ON}{{'auto_wrap_policy': 'transformer_based_wrap'}}",
     f"{ON}{{'auto_wrap_policy': 'TRANSFORMER_BASED_WRAP'}}", "ZM103", "error"),
    (f"{ON}{{'version': 1, 'backward_prefetch': 'pre'}}",
     f"{ON}{{'version': 1, 'backward_prefetch': 'backward_pre'}}", "ZM103", "error"),
    (f"{ON}{{'version': 1, 'backward_prefetch': 'pre'}}",
     f"{ON}{{'version': 2, 'backward_prefetch': 'pre'}}", "ZM103", "error"),
    (f"{ON}{{'state_dict_type': 'SHARDED'}}", f"{ON}{{'state_dict_type': 'SHARDED_STATE_DICT'}}",
     "ZM103", "error"),
    (f"{ON}{{'state_dict_type': 'LOCAL_STATE_DICT'}}", f"{ON}{{'state_dict_type': 'full_state_dict'}}",
     "ZM103", "error"),
    (f"{ON}{{'reshard_after_forward': 'full_shard'}}", f"{ON}{{'reshard_after_forward': 'false'}}",
     "ZM103", "error"),
    (f"{ON}{{'version': 1, 'reshard_after_forward': True}}",
     f"{ON}{{'version': 1, 'reshard_after_forward': 'shard_grad_op'}}", "ZM103", "error"),
    (f"{ON}{{'version': 3}}", f"{ON}{{'version': n}}", "ZM103", "error"),
    ("fsdp_transformer_layer_cls_to_wrap='A'", f"{ON}{{'transformer_layer_cls_to_wrap': 'A'}}", "ZM104",
     "error"),
    ("fsdp='full_shard'", "fsdp=True", "ZM104", "info"),
    (f"{ON}{{'version': 1}}", f"{ON}{{'version': 2}}", "ZM104", "info"),
    ("fsdp='full_shard shard_grad_op'", "fsdp='full_shard offload'", "ZM105", "warning"),
    ("fsdp='hybrid_shard'", "fsdp='hybrid_shard', fsdp_config={'version': 1}", "ZM105", "error"),
    ("fsdp=True, deepspeed='ds.json'", "fsdp=False, deepspeed='ds.json'", "ZM105", "error"),
    ("fsdp=True, deepspeed='ds.json'", "fsdp=True, deepspeed=None", "ZM105", "error"),
    ("fsdp=True, deepspeed='ds.json'", "fsdp=args.fsdp, deepspeed='ds.json'", "ZM105", "error"),
    (f"gradient_checkpointing=True, {ON}{{'activation_checkpointing': True}}",
     f"gradient_checkpointing=False, {ON}{{'activation_checkpointing': True}}", "ZM105", "error"),
    ("fsdp_config={'cpu_offload': True}", "fsdp=True, fsdp_config={'cpu_offload': True}", "ZM106",
     "warning"),
    ("fsdp_config={'cpu_offload': True}", "fsdp_config={'cpu_offload': True}, **more", "ZM106",
     "warning"),
    (f"{ON}{{'use_orig_params': True}}", f"{ON}{{'version': 1, 'use_orig_params': True}}", "ZM106",
     "info"),
    (f"{ON}{{'min_num_params': 1000}}",
     f"{ON}{{'min_num_params': 1000, 'auto_wrap_policy': 'SIZE_BASED_WRAP'}}", "ZM106", "warning"),
    (f"{ON}{{'auto_wrap_policy': 'NO_WRAP'}}", f"{ON}{{'auto_wrap_policy': p}}", "ZM206", "warning"),
    (f"{ON}{{'version': 1, 'limit_all_gathers': False}}",
     f"{ON}{{'version': 1, 'limit_all_gathers': True}}", "ZM209", "warning"),
    (f"{ON}{{'version': 1, 'backward_prefetch': 'no_prefetch'}}",
     f"{ON}{{'version': 1, 'backward_prefetch': 'backward_post'}}", "ZM304", "warning"),
    (f"{ON}{{'state_dict_type': 'FULL_STATE_DICT'}}", f"{ON}{{'state_dict_type': 'SHARDED_STATE_DICT'}}",
     "ZM702", "info"),
    ("dataloader_prefetch_factor=2", "dataloader_prefetch_factor=2, dataloader_num_workers=2", "ZM604",
     "error"),
    ("dataloader_persistent_workers=True", "dataloader_persistent_workers=False", "ZM604", "error"),
    ("dataloader_num_workers=0", "dataloader_num_workers=0, use_cpu=True", "ZM601", "info"),
    ("dataloader_pin_memory=False", "dataloader_pin_memory=flag", "ZM604", "info"),
]  # fmt: skip

EPOCHS = """
loader = DataLoader(data, num_workers=2{more})
for epoch in range(3):
    {over}:
        f(x)
"""
LOADERS = [
    ("DataLoader(data, prefetch_factor=4)", "DataLoader(data, prefetch_factor=4, num_workers=2)",
     "ZM604", "error"),
    ("DataLoader(data, persistent_workers=True)", "DataLoader(data, persistent_workers=True, **more)",
     "ZM604", "error"),
    ("DataLoader(data, 8, False, None, None, 0, timeout=3)", "DataLoader(data, 8, False, None, None, n)",
     "ZM604", "error"),
    ("DataLoader(data, shuffle=True, sampler=s())", "DataLoader(data, shuffle=s is None, sampler=s)",
     "ZM604", "error"),
    ("DataLoader(data, batch_size=4, batch_sampler='b')", "DataLoader(data, batch_size=4, sampler='b')",
     "ZM604", "error"),
    ("m.cuda()\nDataLoader(data, num_workers=0)", "m.cpu()\nDataLoader(data, num_workers=0)", "ZM601",
     "info"),
    ("torch.device('cuda:0')\nDataLoader(data, num_workers=0)",
     "torch.device('cuda:0')\nDataLoader(data)", "ZM601", "info"),
    ("DataLoader(data)\nx.to(d, non_blocking=True)", "DataLoader(data)\nx.to(d)", "ZM604", "info"),
    ("DataLoader(data)\nx.to(d, non_blocking=True)",
     "DataLoader(data, pin_memory=on)\nx.to(d, non_blocking=True)", "ZM604", "info"),
    (EPOCHS.format(more="", over="for x in loader"),
     EPOCHS.format(more=", persistent_workers=True", over="for x in loader"), "ZM604", "info"),
    (EPOCHS.format(more="", over="for i, x in enumerate(tqdm(loader))"),
     EPOCHS.format(more="", over="for x in other"), "ZM604", "info"),
]  # fmt: skip
NESTED = """
model = DDP(model)
for step in range(100):
    for micro in range({n}):
        model(x).backward()
    {step}
"""
SHARDED = "for b in model.layers:\n    fully_shard(b)\nfully_shard(model)\n"
ADAM = "o = torch.optim.AdamW(model.parameters())\n"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
POLICY = "auto_wrap_policy=p"
SCRIPTS += [
    (ADAM + SHARDED, SHARDED + ADAM, "ZM108", "error"),
    (ADAM + SHARDED, ADAM + SHARDED + ADAM, "ZM108", "error"),
    (ADAM + SHARDED, ADAM.replace("model", "other") + SHARDED, "ZM108", "error"),
    (ADAM + SHARDED, f"def f(model):\n    {ADAM}\n{SHARDED}", "ZM108", "error"),
    (f"{ADAM}model = FSDP(model, {POLICY})", f"{ADAM}model = DDP(model)", "ZM108", "error"),
    (f"o = torch.optim.SGD([{{'params': self.m.parameters()}}])\nx = FSDP(self.m, {POLICY})",
     f"x = FSDP(self.m, {POLICY})\no = torch.optim.SGD(x.parameters())", "ZM108", "error"),
    (f"model = FSDP(m, {POLICY})\n{CLIP}", f"model = FSDP(m, {POLICY})\nmodel.clip_grad_norm_(1.0)",
     "ZM109", "error"),
    (f"model = FSDP(m, {POLICY})\n{CLIP}", f"{SHARDED}{CLIP}", "ZM109", "error"),
    (f"model = FSDP(m, {POLICY})\n{CLIP}",
     f"model = FSDP(m, {POLICY})\nif fsdp:\n    model.clip_grad_norm_(1.0)\nelse:\n    {CLIP}", "ZM109",
     "error"),
    (f"model = FSDP(m, {POLICY})\n{CLIP}",
     f"model = FSDP(m, sharding_strategy=ShardingStrategy.NO_SHARD, {POLICY})\n{CLIP}", "ZM109",
     "error"),
    (NESTED.format(n=4, step="o.step()"), NESTED.format(n=1, step="o.step()"), "ZM308", "info"),
    (NESTED.format(n="n", step="o.step()"), NESTED.format(n="n", step="log()"), "ZM308", "info"),
    (LOOP.format(sync="pass").replace("N = 4", "N = args.n"),
     LOOP.format(sync="pass").replace("(i + 1) % N == 0", "i == N"), "ZM308", "info"),
    (LOOP.format(sync="pass").replace("(i + 1) % N == 0", "not (i + 1) % N or i == last"),
     LOOP.format(sync="pass").replace("(i + 1) % N == 0", "i or i == last"), "ZM308", "info"),
]  # fmt: skip
LBFGS = """
model = DDP(model)
o = torch.optim.LBFGS(model.parameters())
for i, x in enumerate(data):
    def closure():
        o.zero_grad()
        loss = model(x)
        loss.backward()
        return loss
    if (i + 1) % 4 == 0:
        o.step(closure)
"""
SCRIPTS += [(LOOP.format(sync="pass"), LBFGS, "ZM308", "info")]
HOST = """
from torch.distributed.fsdp import CPUOffloadPolicy
torch.distributed.init_process_group({group})
policy = {policy}()
for block in model.layers:
    fully_shard(block, offload_policy=policy)
fully_shard(model, offload_policy=policy)
{line}
"""
ON_HOST = {"group": "'nccl'", "policy": "CPUOffloadPolicy", "line": CLIP}
SCRIPTS += [
    (HOST.format(**ON_HOST | bad), HOST.format(**ON_HOST | good), "ZM105", "error")
    for bad, good in (
        ({}, {"group": "'cpu:gloo,cuda:nccl'"}),
        ({"group": "backend='nccl'"}, {"group": ""}),
        ({"group": "'nccl' if cuda else 'gloo'"}, {"policy": "dict"}),
        ({}, {"policy": "(CPUOffloadPolicy if offload else dict)"}),
        ({}, {"policy": "dict", "line": CLIP + "\nif offload:\n    CPUOffloadPolicy()"}),
        ({"line": "[p.full_tensor() for p in model.parameters()]"}, {"line": "optimizer.step()"}),
    )
]
SCRIPTS += [
    ("torch.manual_seed(rank)\nm = Net()\nfully_shard(m.a)\nfully_shard(m)",
     "torch.manual_seed(0)\nm = Net()\nfully_shard(m.a)\nfully_shard(m)", "ZM412", "info"),
]  # fmt: skip
SCRIPTS += LOADERS
SCRIPTS += [
    (f"TrainingArguments('o', {bad})", f"TrainingArguments('o', {good})", code, severity)
    for bad, good, code, severity in TRAINER
]


def cases() -> list[Any]:
    found = []
    for name, table in (("ds.json", DEEPSPEED), ("a.yaml", ACCELERATE), ("t.py", SCRIPTS)):
        head = HEAD if name == "t.py" else ""
        for number, (bad, good, code, severity) in enumerate(table):
            case = (name, head + bad, head + good, code, severity)
            found.append(pytest.param(*case, id=f"{code}-{name}-{number}"))
    return found


@pytest.mark.parametrize(("name", "bad", "good", "code", "severity"), cases())
def test_a_rule_fires_and_leaves_the_nearest_good_case_alone(
    tmp_path: Path, name: str, bad: str, good: str, code: str, severity: str
) -> None:
    assert (code, severity) in found_in(tmp_path, bad, name)
    assert (code, severity) not in found_in(tmp_path, good, name)


@pytest.mark.parametrize(
    ("wraps", "call"),
    [
        ("model = DDP(model)", "no_sync()"),
        ("model = FSDP(model, auto_wrap_policy=p)", "no_sync()"),
        ("fully_shard(model)", "set_requires_gradient_sync(False)"),
    ],
)
def test_accumulation_is_advised_by_what_the_wrapper_has(tmp_path: Path, wraps: str, call: str) -> None:
    loop = LOOP.format(sync="pass").replace("model = DDP(model)", wraps)
    (fix,) = (p.fix for p in problems_of(tmp_path, HEAD + loop, "t.py") if p.code == "ZM308")
    assert f"model.{call}" in fix


@pytest.mark.parametrize(
    ("script", "command", "fires"),
    [
        ("", "torchrun train.py --deepspeed ds.json", True),
        ("", "torchrun train.py --deepspeed ds.json --bf16 true", False),
        ("", "torchrun train.py --deepspeed ds.json --fp16 true", False),
        ("", "accelerate launch --mixed_precision bf16 train.py --deepspeed ds.json", False),
        ("TrainingArguments('o', bf16=True, deepspeed='ds.json')", "torchrun train.py", False),
        ("TrainingArguments('o', bf16=True, deepspeed='ds.json')", "", False),
        ("TrainingArguments('o', deepspeed='ds.json')", "", True),
        ("from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')", "", False),
        ("from accelerate import Accelerator\nAccelerator(mixed_precision='no')", "", True),
    ],
)
def test_the_precision_that_a_launch_adds_to_deepspeeds_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, command: str, fires: bool
) -> None:
    """accelerate and the Trainer write it into the configuration of the engine."""
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1})
    (tmp_path / "ds.json").write_text(text)
    (tmp_path / "train.py").write_text(HEAD + script)
    found = check(["ds.json", "train.py"], command=command.split())
    assert ("ZM405" in {problem.code for problem in found.problems}) is fires


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_configuration_has_no_problem(tmp_path: Path, stage: int) -> None:
    assert problems_of(tmp_path, zero(stage)) == []


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "FSDP2"])
def test_a_plain_launch_file_has_no_problem(tmp_path: Path, kind: str) -> None:
    assert problems_of(tmp_path, launch(kind), "a.yaml") == []


# ---- with a model and a machine -----------------------------------------------------------------

OFFLOAD = {"device": "cpu"}
COUNTS = {f"{n}B": from_count(round(n * 1e9)) for n in (0.35, 1, 7, 60)}
SMALL, LARGE = (
    from_config({
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "vocab_size": 32000,
        "num_attention_heads": 32, "intermediate_size": 4 * width,
    })
    for width, layers in ((1024, 24), (6144, 38))
)  # fmt: skip
MODELS = {**COUNTS, "small": SMALL, "large": LARGE}


@pytest.mark.parametrize(
    ("text", "name", "model", "expected"),
    [
        (zero(3), "ds.json", "7B", {"ZM202"}),
        (zero(3), "ds.json", "0.35B", set()),  # stays gathered (stage3_max_reuse_distance)
        (zero(0), "ds.json", "0.35B", set()),
        (zero(0), "ds.json", "7B", {"ZM203"}),
        (zero(2), "ds.json", "7B", set()),
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", "1B", {"ZM505"}),
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", "60B", set()),
        (launch("FSDP"), "a.yaml", "small", {"ZM202"}),
        (launch("FSDP"), "a.yaml", "0.35B", set()),  # what is gathered is not known
        (launch("FSDP", "fsdp_sharding_strategy: SHARD_GRAD_OP"), "a.yaml", "large", {"ZM203"}),
        (launch("FSDP", "fsdp_sharding_strategy: FULL_SHARD"), "a.yaml", "large", set()),
    ],
)
def test_the_strategy_is_held_against_the_model(
    tmp_path: Path, text: str, name: str, model: str, expected: set[str]
) -> None:
    machine = Machine(devices=8, device_bytes=80 << 30, model=MODELS[model])
    assert {code for code, _ in found_in(tmp_path, text, name, machine)} == expected


@pytest.mark.parametrize(
    ("text", "name", "host_gib", "hosts", "expected"),
    [
        # 18 bytes of each of 60e9 parameters, 4 of fp32 gradients: 1006 GiB; 90 % may be used
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", 1100, None, {"ZM210"}),
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", 1180, None, set()),
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", None, None, set()),
        (zero(3, offload_optimizer=OFFLOAD), "ds.json", 600, 2, set()),
        (zero(3), "ds.json", 100, None, {"ZM203"}),
        (launch("DEEPSPEED", "zero_stage: 3\noffload_optimizer_device: cpu\n"
                "zero3_save_16bit_model: true"), "a.yaml", 600, None, {"ZM210"}),
        (launch("DEEPSPEED", "zero_stage: 3\noffload_optimizer_device: cpu\n"
                "zero3_save_16bit_model: true", "num_machines: 2"), "a.yaml", 600, None, set()),
    ],
)  # fmt: skip
def test_offload_is_held_against_the_host(
    tmp_path: Path, text: str, name: str, host_gib: int | None, hosts: int | None, expected: set[str]
) -> None:
    machine = Machine(
        devices=8, device_bytes=80 << 30, model=MODELS["60B"], hosts=hosts,
        host_bytes=host_gib and host_gib << 30,
    )  # fmt: skip
    assert {code for code, _ in found_in(tmp_path, text, name, machine)} == expected


def test_a_bucket_is_held_against_the_memory(tmp_path: Path) -> None:
    text = zero(2, reduce_bucket_size=1_200_000_000, overlap_comm=True)
    assert not found_in(tmp_path, text, machine=Machine(device_bytes=80 << 30))
    assert found_in(tmp_path, text, machine=Machine(device_bytes=40 << 30)) == {("ZM303", "warning")}


@pytest.mark.parametrize(("devices", "expected"), [(4, set()), (8, {("ZM602", "error")})])
def test_the_batch_is_held_against_the_ranks(
    tmp_path: Path, devices: int, expected: set[tuple[str, str]]
) -> None:
    sizes = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    found = found_in(tmp_path, zero(2, top=json.dumps(sizes)), machine=Machine(devices=devices))
    assert found - {("ZM603", "info")} == expected


# ---- files that belong together -----------------------------------------------------------------


def test_the_file_that_a_launch_file_names_is_checked_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "ds.json").write_text(
        zero(2, top='{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}')
    )
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config:\n  deepspeed_config_file: ../ds.json\n  zero3_init_flag: true\n"
    )
    (tmp_path / "sub" / "a.yaml").write_text(text)
    result = check([str(tmp_path / "sub")])
    assert result.files == 2
    assert {(p.code, Path(p.file).name, p.key) for p in result.problems} == {
        ("ZM105", "a.yaml", "deepspeed_config.zero3_init_flag"),
        ("ZM602", "ds.json", "train_batch_size"),
    }


def test_trainer_arguments_are_held_against_their_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        zero(2, top='{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}')
    )
    head = "from transformers import TrainingArguments as A\n"
    bad = head + "A('o', deepspeed='ds.json', per_device_train_batch_size=2, bf16=False)"
    (problem, other) = problems_of(tmp_path, bad, "t.py")
    assert (problem.code, problem.line, problem.column) == ("ZM602", 2, 57)
    assert (other.code, other.key) == ("ZM105", "bf16.enabled")
    good = "A('o', deepspeed='ds.json', per_device_train_batch_size=4, bf16=True)"
    assert problems_of(tmp_path, head + good, "t.py") == []


def test_options_of_fsdp_in_a_file_are_held_against_the_call(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(
        '{\n "fsdp_backward_prefetch": "backward_pre",\n "xlaa": true\n}'
    )
    text = "from transformers import TrainingArguments as A\nA('o', fsdp=True, fsdp_config='fsdp.json')"
    found = [(p.code, Path(p.file).name, p.line, p.key) for p in problems_of(tmp_path, text, "t.py")]
    assert found == [
        ("ZM106", "fsdp.json", 2, "fsdp_backward_prefetch"),
        ("ZM102", "fsdp.json", 3, "xlaa"),
    ]
    (tmp_path / "fsdp.json").write_text("{,}")
    (problem,) = problems_of(tmp_path, text, "t.py")
    assert (problem.code, Path(problem.file).name) == ("ZM101", "fsdp.json")
    (tmp_path / "fsdp.json").unlink()
    assert problems_of(tmp_path, text, "t.py") == []


def test_before_transformers_5_words_were_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a strategy without auto_wrap made the whole model one unit."""
    old = {**load_schema()["transformers"], "version": "4.57.1", "fsdp_version": 1}
    monkeypatch.setitem(load_schema(), "transformers", old)
    head = "from transformers import TrainingArguments as A\n"
    assert found_in(tmp_path, head + "A('o', fsdp='full_shard auto_wrap')", "t.py") == set()
    assert found_in(tmp_path, head + "A('o', fsdp='full_shard')", "t.py") == {("ZM206", "warning")}
    assert found_in(tmp_path, head + "A('o', fsdp='hybrid_shard auto_wrap')", "t.py") == set()
    loads = "{'cpu_ram_efficient_loading': True, 'sync_module_states': False}"
    text = head + f"A('o', fsdp='full_shard auto_wrap', fsdp_config={loads})"
    assert found_in(tmp_path, text, "t.py") == {("ZM703", "error")}


def test_a_plain_trainer_has_no_problem(tmp_path: Path) -> None:
    """As transformers' own documentation of FSDP writes it, and its defaults of data loading."""
    head = "from transformers import TrainingArguments as A\n"
    section = {"reshard_after_forward": True, "cpu_offload": False, "activation_checkpointing": True,
               "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "version": 2,
               "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}  # fmt: skip
    good = f"A('o', fsdp=True, fsdp_config={section}, dataloader_num_workers=4)"
    assert problems_of(tmp_path, head + good, "t.py") == []


def test_the_example_scripts_have_no_problem() -> None:
    problems = check([str(ROOT / "examples")]).problems
    own = {(Path(p.file).name, p.code) for p in problems if p.file.endswith(".py")}
    on_purpose = {("train_7b.py", "ZM208"), ("train.py", "ZM208")}
    assert own == on_purpose, "they reduce in fp32 on purpose"


# ---- what others reported, verbatim ---------------------------------------------------------------

TRLX_376 = """{
  "train_batch_size": 32,
  "fp16": {"enabled": true, "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},
    "allgather_bucket_size": 5e8,
    "contiguous_gradients": true
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-08}},
  "scheduler": {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 100}}
}"""
LLAMA_FACTORY_1116 = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "8",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000},
  "zero_optimization": {"stage": 2}
}"""
ACCELERATE_1644 = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {
    "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": "auto", "reduce_bucket_size": "auto"},
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"
}"""
ACCELERATE_2298 = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 1
deepspeed_config: {'train_micro_batch_size_per_gpu': 2, 'gradient_accumulation_steps': 1,
  'gradient_clipping': 1.0, 'offload_optimizer_device': 'cpu', 'zero3_init_flag': False,
  'zero_stage': 2}
"""
EARLY = """{"train_batch_size": %s, "train_micro_batch_size_per_gpu": %s,
  "gradient_accumulation_steps": %s, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}"""
AUTOS = """{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}"""
TRAIN = "from transformers import TrainingArguments\nTrainingArguments('o', deepspeed='ds.json', "
REGISTER = "from transformers.integrations import HfDeepSpeedConfig\nHfDeepSpeedConfig('ds.json')"
STRATEGY = """from lightning.pytorch.strategies import DeepSpeedStrategy
DeepSpeedStrategy(config='ds.json')"""

REPORTED = [
    # report, DeepSpeed file, the file that names it, devices, (code, severity, word of the message)
    ("CarperAI/trlx#376", TRLX_376,
     TRAIN + "per_device_train_batch_size=1, gradient_accumulation_steps=4)", None,
     ("ZM602", "info", "any number of ranks but 8")),
    ("CarperAI/trlx#376", TRLX_376,
     TRAIN + "per_device_train_batch_size=1, gradient_accumulation_steps=4)", 1,
     ("ZM602", "error", "Trainer refuses")),
    ("hiyouga/LLaMA-Factory#1116", LLAMA_FACTORY_1116, TRAIN + "gradient_accumulation_steps=8)", None,
     ("ZM602", "error", 'is the text "8"')),
    ("huggingface/accelerate#1644", ACCELERATE_1644, TRAIN + ")", None,
     ("ZM103", "error", "sub_group_size")),
    ("huggingface/accelerate#2298", "", ACCELERATE_2298, None,
     ("ZM102", "warning", "has no train_micro_batch_size_per_gpu: accelerate ignores")),
    ("Lightning-AI/pytorch-lightning#19891", EARLY % (256, 16, 2), STRATEGY, None,
     ("ZM105", "error", "Lightning refuses gradient_accumulation_steps")),
    ("Roblox/FAI-RL#72", EARLY % (16, 1, 8), REGISTER, None,
     ("ZM602", "error", "zero.Init counts one rank")),
    ("Roblox/FAI-RL#70", EARLY % ('"auto"', '"auto"', '"auto"'), REGISTER, None,
     ("ZM602", "error", "zero.Init refuses")),
    # the file was right: whatever made that batch was not in it
    ("modelscope/ms-swift#9351", AUTOS, TRAIN + "per_device_train_batch_size=1)", None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ds", "names_it", "devices", "expected"),
    [row[1:] for row in REPORTED],
    ids=[row[0] for row in REPORTED],
)
def test_a_reported_mismatch_is_found(
    tmp_path: Path, ds: str, names_it: str, devices: int | None, expected: Any
) -> None:
    if ds:
        (tmp_path / "ds.json").write_text(ds)
    name = "t.py" if "import" in names_it else "a.yaml"
    problems = problems_of(tmp_path, names_it, name, Machine(devices=devices))
    if expected is None:
        assert [p for p in problems if p.severity != "info"] == []
        return
    code, severity, says = expected
    assert any((p.code, p.severity) == (code, severity) and says in p.message for p in problems)


def test_hjson_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """Comments, trailing commas, unquoted keys; the positions of the keys stay right."""
    text = """{
  // batch
  train_batch_size: 8, # of all ranks
  "bf16": {"enabled": true,},
  /* sharding: {"stage": 1} */
  'zero_optimization': {
    "stage": 2, overlap_com: true, overlap_comm: true
  },
}"""
    first, second = problems_of(tmp_path, text)
    assert (first.code, first.severity, first.line) == ("ZM101", "info", 2)
    assert (second.code, second.line, second.column) == ("ZM102", 7, 17)
    assert second.key == "zero_optimization.overlap_com"
    rootless = (
        "train_batch_size: 8\nbf16: {enabled: true}\nzero_optimization: {stage: 2, overlap_comm: true}"
    )
    assert {p.code for p in problems_of(tmp_path, rootless)} == {"ZM101"}


@pytest.mark.parametrize(
    ("name", "text", "severity"),
    [
        ("a.yaml", launch("DEEPSPEED", "deepspeed_config_file: ds.json").replace("zero_stage: 2", ""),
         "error"),
        ("t.py", TRAIN + ")", "error"),
        ("t.py", "import deepspeed\ndeepspeed.initialize(config='ds.json')", "info"),
    ],
)  # fmt: skip
def test_hjson_is_an_error_for_other_readers(
    tmp_path: Path, name: str, text: str, severity: str
) -> None:
    (tmp_path / "ds.json").write_text(zero(2, top='{"train_batch_size": 8}')[:-1] + ",}")
    found = {(p.severity, Path(p.file).name) for p in problems_of(tmp_path, text, name)
             if p.code == "ZM101"}  # fmt: skip
    assert found == {("info", "ds.json")} | ({("error", name)} if severity == "error" else set())


def test_a_folder_of_gpt_neox_is_left_alone(tmp_path: Path) -> None:
    """40 of its files were 1,680 findings."""
    text = '{"pipe_parallel_size": 0, "num_layers": 12, "zero_optimization": {"stage": 0, "x": True}}'
    (tmp_path / "125M.yml").write_text(text)
    result = check([str(tmp_path)])
    assert (result.files, result.problems) == (0, ())


SAMPLED = """
from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(data, sampler=DistributedSampler({data}))
for epoch in range(n):
    for batch in loader:
        model(batch).backward()
"""


@pytest.mark.parametrize(
    ("data", "trains"),
    [
        ("values", True), ("retrieval_train", True), ("latest_data", True), ("trainval", True),
        ("val_data", False), ("valset", False), ("self.evalDataset", False), ("splits['test']", False),
        ("ValidationSet(root)", False), ("XTest", False), ("test1", False),
    ],
)  # fmt: skip
def test_the_order_of_a_validation_set_does_not_matter(tmp_path: Path, data: str, trains: bool) -> None:
    found = {p.key for p in problems_of(tmp_path, SAMPLED.format(data=data), "t.py")}
    assert ("set_epoch" in found) == trains


# ---- positions ----------------------------------------------------------------------------------


def test_a_problem_stands_where_its_key_stands(tmp_path: Path) -> None:
    text = '{\n "bf16": {"enabled": true}, "x": [{"stage": 1}],\n "zero_optimization": {\n\t"stage": 9}}'
    (problem,) = [p for p in problems_of(tmp_path, text) if p.code == "ZM103"]
    assert (problem.line, problem.column, problem.key) == (4, 2, "zero_optimization.stage")
    text = "distributed_type: FSDP\nfsdp_config:\n    fsdp_auto_wrap_policy: NO_WRAP\n"
    (problem,) = problems_of(tmp_path, text, "a.yaml")
    assert (problem.line, problem.column) == (3, 5)
    assert problem.key == "fsdp_config.fsdp_auto_wrap_policy"


def test_a_column_counts_characters_and_not_bytes(tmp_path: Path) -> None:
    line = "é = '€😀'; TrainingArguments('o', fp16=True, bf16=True, deepspeed={'bf17': 1})"
    text = f"from transformers import TrainingArguments\r\n\x0c\r\n{line}\r\n"
    (tmp_path / "t.py").write_bytes(text.encode())
    found = {p.key: (p.line, p.column) for p in check([str(tmp_path / "t.py")]).problems}
    assert found["fp16"] == (3, line.index("True") + 1)
    assert found["bf17"] == (3, line.index("'bf17'") + 1)
    (tmp_path / "a.yaml").write_bytes("distributed_type: FSDP\n# é ".encode() + b"\xe9")
    (problem,) = check([str(tmp_path / "a.yaml")]).problems
    assert (problem.line, problem.column) == (2, 5)


def test_keys_are_found_among_strings_that_look_like_syntax() -> None:
    text = '{"a\\"b": "{[:,", "c": {"d": "\\\\", "é": [1, {"x": 2}], "f": 3}}'
    config = parse_config(text, "x", "json")
    places = {path: text[column - 1 :] for path, (_, column) in config.places.items() if path}
    assert {path: rest.partition(":")[0] for path, rest in places.items()} == {
        ('a"b',): '"a\\"b"', ("c",): '"c"', ("c", "d"): '"d"', ("c", "é"): '"é"', ("c", "f"): '"f"',
    }  # fmt: skip


# ---- what is hostile ----------------------------------------------------------------------------

BOMB = "a: &a [x, x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(20)
)

HOSTILE = [
    ("empty.json", b"", "empty"),
    ("empty.yaml", b"# nothing\n", "empty"),
    ("binary.json", bytes(range(256)), "UTF-8"),
    ("latin.yaml", "distributed_type: FSDP # é".encode("latin-1"), "UTF-8"),
    ("large.json", b"[" * (MAX_BYTES + 1), "too large"),
    ("large.yaml", b"distributed_type: FSDP\n" + b"- a\n" * 100_000, "too large"),
    ("deep.json", b'{"zero_optimization": ' + b"[" * 200_000, "deep"),
    ("deep.yaml", b"distributed_type: " + b"[" * 20_000, "deep"),
    ("comma.json", b'{\n"zero_optimization": {,}}', "neither JSON nor Hjson"),
    ("comment.json", b'{"zero_optimization": {} /* no', "neither JSON nor Hjson"),
    ("large_hjson.json", b'{"zero_optimization": {}, // no\n}' + b" " * (1 << 19), "nor Hjson"),
    ("inf_hjson.json", b'{"zero_optimization": {"stage": 1e999,}}', "nor Hjson"),
    ("neox.yaml", b'{"pipe-parallel-size": 1, "zero_optimization": {}}', "GPT-NeoX"),
    ("list.json", b"[1]", "list"),
    ("digits.json", b'{"zero_optimization": ' + b"9" * 5000 + b"}", "limit"),
    ("tag.yaml", b"distributed_type: !!python/object:os.system [x]\n", "not YAML"),
    ("two.yaml", b"distributed_type: FSDP\n---\na: 1\n", "not YAML"),
    ("date.yaml", b"distributed_type: 2026-99-99\n", "not YAML"),
    ("key.yaml", b"? [a]\n: b\n", "not YAML"),
    ("alias.yaml", b"distributed_type: *nowhere\n", "not YAML"),
    ("bomb.yaml", (BOMB + "\ndistributed_type: FSDP\nfsdp_config: *t\n").encode(), "aliases"),
    ("self.yaml", b"distributed_type: FSDP\nfsdp_config: &a\n  x: *a\n", "aliases"),
    ("other.json", b'{"name": "x"}', "does not recognize"),
    ("syntax.py", b"def f(:\n", "Python"),
    ("null.py", b"x = 1\0", "Python"),
    ("deep.py", b"x = " + b"(" * 5000 + b")" * 5000, "Python"),
]


@pytest.mark.parametrize(("name", "content", "says"), HOSTILE, ids=[name for name, *_ in HOSTILE])
def test_a_hostile_file_is_one_clear_problem(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = check([str(tmp_path / name)]).problems
    severity = "info" if says == "GPT-NeoX" else "error"
    assert (problem.code, problem.severity) == ("ZM101", severity)
    assert says in problem.message


def test_the_parsers_position_is_kept(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, '{\n"zero_optimization": {"stage": 2,,}}')
    assert (problem.line, problem.column) in {(2, 33), (2, 34)}  # Python 3.13 points at the comma


@pytest.mark.parametrize(
    "text",
    [
        "base: &b {distributed_type: FSDP}\n<<: *b\nfsdp_config: {fsdp_version: [1]}\n",
        "distributed_type: {a: 1}\nfsdp_config: 3\nnum_processes: x\nmixed_precision: [1]\n",
        "distributed_type: FSDP\n1: 2\nnull: 3\nfsdp_config: {1: 2, null: {}, fsdp_version: null}\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: 3, zero_stage: .inf}\n",
        'distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: "a\\0b"}\n',
    ],
)
def test_odd_yaml_is_no_crash(tmp_path: Path, text: str) -> None:
    found_in(tmp_path, text, "a.yaml", MACHINE)


ENDLESS = [
    "A = {'zero_optimization': A, 'b': A, **A}\ndeepspeed.initialize(config=A)",
    "c = {}\n" + "".join(f"c['a{i}'] = c\n" for i in range(12)) + "deepspeed.initialize(config=c)",
    "a = b\nb = a\ndeepspeed.initialize(config=a)\nfully_shard(a)",
    "def f(x):\n" + "    f(x + 1)\n" * 10 + "    fully_shard(x)\n    return f(x)\nFSDP(f(m))",
    "a0 = {'b': 1}\n"
    + "".join(f"a{i + 1} = dict({', '.join(f'k{j}=a{i}' for j in range(9))})\n" for i in range(9))
    + "deepspeed.initialize(config=a9)",
    "".join(f"def f{i}(x):\n" + f"    f{i + 1}(x)\n" * 4 for i in range(12))
    + "def f12(x):\n    fully_shard(x)\n    torch.optim.SGD(x.parameters())\nf0(m)",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_a_script_that_leads_back_to_itself_is_no_crash_and_takes_no_time(
    tmp_path: Path, text: str
) -> None:
    assert "ZM101" not in {code for code, _ in found_in(tmp_path, HEAD + text, "t.py")}


ODD = [None, True, -1, 1e999, "auto", "x", [], {}, [1], {"device": []}, {"enabled": {}}, 10**30]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_value_of_any_key_is_a_crash(tmp_path: Path, value: Any) -> None:
    """Every name that DeepSpeed and accelerate know, with a value that makes no sense."""
    known = load_schema()["deepspeed"]
    top = dict.fromkeys(known["top"], value)
    section = dict.fromkeys(
        deepspeed_fields.fields_by_name(known["sections"]["zero_optimization"]), value
    )
    for content in (top | {"zero_optimization": section}, top | {"zero_optimization": value}):
        found_in(tmp_path, json.dumps(content), machine=MACHINE)
    for kind in ("FSDP", "DEEPSPEED", value):
        names = load_schema()["accelerate"]
        parts = {p: dict.fromkeys(names[p], value) for p in ("fsdp_config", "deepspeed_config")}
        content = dict.fromkeys(names["top"], value) | {"distributed_type": kind}
        found_in(tmp_path, json.dumps(content), "a.json", MACHINE)
        found_in(tmp_path, json.dumps(content | parts), "a.json", MACHINE)


def test_a_folder_is_walked_once_and_only_for_what_is_ours(tmp_path: Path) -> None:
    inner = tmp_path / "configs"
    inner.mkdir()
    (inner / "loop").symlink_to(tmp_path)
    (inner / "ds.json").write_text(zero(9))
    (inner / "again.json").symlink_to(inner / "ds.json")
    (inner / "package.json").write_text('{"name": "x", "optimizer": 1}')
    (inner / "broken.json").write_text("{")
    (inner / "broken_ds.json").write_text('{"zero_optimization": {,}}')
    (inner / "docs.json").write_text('{"about": "zero_optimization"}')
    (inner / "plain.py").write_text("import torch\n")
    (inner / "gone.yaml").symlink_to(inner / "nowhere")
    (inner / "self.yaml").symlink_to(inner / "self.yaml")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "ds.json").write_text(zero(9))
    result = check([str(tmp_path), str(inner)])
    assert result.files == 2
    found = {(p.code, Path(p.file).name) for p in result.problems}
    assert found == {("ZM103", "again.json"), ("ZM101", "broken_ds.json")}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(zero(2))
    (tmp_path / "ds.json").chmod(0)
    (problem,) = check([str(tmp_path / "ds.json")]).problems
    assert "Permission denied" in problem.message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ds.json")
    (problem,) = check([str(tmp_path / "ds.json")]).problems
    assert "regular file" in problem.message


# ---- the frameworks -----------------------------------------------------------------------------


def test_the_bundled_names_are_those_of_the_installed_frameworks() -> None:
    path = ROOT / "tools" / "read_check_schema.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    if None in map(tool.folder_of, ("deepspeed", "accelerate", "transformers")):
        pytest.skip("deepspeed, accelerate and transformers are not installed")
    installed = tool.read_installed()
    bundled = (ROOT / "zeromon" / "check" / "schema.json").read_text()
    for name in installed:
        if installed[name]["version"] != json.loads(bundled)[name]["version"]:
            pytest.skip(f"the bundled names are those of another version of {name}")
    renew = "renew it: python tools/read_check_schema.py > zeromon/check/schema.json"
    assert tool.dumped(installed) == bundled, renew


def test_nothing_of_a_framework_is_imported(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(zero(2))
    code = (
        "import sys; from zeromon.check.runner import check; check(sys.argv[1:]);"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'deepspeed', 'accelerate', 'transformers', 'pydantic'}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ds.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


VALUES: list[tuple[str, Any]] = [
    (name, value)
    for name, table in {
        "reduce_bucket_size": ["5e8", 5e8, "500000000", "5_0", 5.5, True, None, 0, -1, "0", [], "1.0"],
        "overlap_comm": ["true", "yes", 1, 0, 2, 1.0, None, "maybe", [], "T", 0.5],
        "reduce_scatter": ["on", 1, 2, None, "off", {}],
        "stage": [3, "3", 4, 3.0, True, None, -1, "x", 2.5, []],
        "offload_param": [None, False, "cpu", {}, {"device": "CPU"}, {"device": "cpu"}, {"device": None},
                          {"nvme_path": 3}, {"buffer_count": -1}, {"devise": "cpu"}, {"device": "auto"}],
        "offload_optimizer": [{"ratio": 1.5}, {"ratio": "1.0"}, {"ratio": "x"}, {"pin_memory": "no"}],
        "leaf_module": [None, {"classes": "X"}, {"classes": ["X"]}],
        "zenflow": [None, {"topk_ratio": 0.5}, {"topk_ratio": 1.0}, {"topk": 1}],
        "overlap_com": [True],
        "prefetch_bucket_size": [1],
        "stage3_prefetch_bucket_size": [1, "x"],
    }.items()
    for value in table
]  # fmt: skip


def test_deepspeed_itself_takes_and_refuses_the_same_values(tmp_path: Path) -> None:
    """What is an error here raises there, and nothing else does; in a process of its own."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    code = """
import json, sys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
for name, value in json.load(sys.stdin):
    try:
        DeepSpeedZeroConfig(**{name: value})
        print("zeromon: taken")
    except Exception:
        print("zeromon: refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(VALUES),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("zeromon: ")]
    mine = []
    for name, value in VALUES:
        content = {"zero_optimization": {name: value}}
        config = Config(file="x", data=content, places={})
        found = [*deepspeed_fields.unknown_names(config, Machine()), *wrong_values(config, Machine())]
        mine.append("refused" if any(p.severity == "error" for p in found) else "taken")
    different = [(v, m, t) for v, m, t in zip(VALUES, mine, theirs, strict=True) if m != t]
    assert different == []


def test_transformers_itself_takes_and_refuses_the_same_options(tmp_path: Path) -> None:
    """What is an error here raises there or in accelerate's plugin, and nothing else does."""
    if None in map(importlib.util.find_spec, ("transformers", "accelerate", "torch")):
        pytest.skip("transformers, accelerate and torch are not installed")
    # a prefetch of FSDP1 is only looked up where there is a device, Trainer itself compares the rest
    elsewhere = ("deepspeed=", "checkpointing", "'version': 1", "'version': 3", "persistent_workers")
    texts = [
        text
        for row in TRAINER
        for text in row[:2]
        if not any(part in text for part in elsewhere)
        and not re.search(r"\bargs\.|\bmore\b|\bname\b|: [np]}|flag", text)
    ]
    code = """
import json, sys
from accelerate import FullyShardedDataParallelPlugin
from transformers import TrainingArguments
from transformers.trainer_utils import FSDPOption
for text in json.load(sys.stdin):
    try:
        found = eval(f"TrainingArguments('o', {text})")
        if found.fsdp_plugin_args:
            FullyShardedDataParallelPlugin(**found.fsdp_plugin_args)
        print("zeromon: taken")
    except Exception:
        print("zeromon: refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    theirs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("zeromon: ")]
    mine = []
    for text in texts:
        found = found_in(tmp_path, f"{HEAD}TrainingArguments('o', {text})", "t.py")
        mine.append("refused" if "error" in {severity for _, severity in found} else "taken")
    assert len(texts) > 30
    assert [(t, m, r) for t, m, r in zip(texts, mine, theirs, strict=True) if m != r] == []


# ---- the configurations of real projects --------------------------------------------------------


def rows(result: runner.Result) -> list[list[str]]:
    return [[p.code, Path(p.file).name, p.key, p.severity] for p in result.problems]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_real_configurations_have_the_problems_that_were_reviewed() -> None:
    """Written by accelerate, open-r1 and LLaMA-Factory; each line was looked up in the source."""
    result = check([str(SHARED)])
    assert result.files == len(list(SHARED.iterdir())) == 20
    assert rows(result) == json.loads(SNAPSHOT.read_text())


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_real_configurations_are_read_one_by_one() -> None:
    for file in SHARED.iterdir():
        assert "ZM101" not in {p.code for p in check([str(file)], MACHINE).problems}


# ---- the pages ----------------------------------------------------------------------------------


def emitted() -> set[str]:
    found = set()
    for file in (ROOT / "zeromon" / "check").rglob("*.*"):
        if file.suffix in (".py", ".json"):
            found |= set(re.findall(r'"(ZM\d{3})"', file.read_text()))
    return found


SECTIONS = ["## Why", "## What to change", "## What it costs", "## Sources"]


@pytest.mark.parametrize("code", sorted(emitted() | {"ZM506"}))
def test_every_code_has_a_whole_page(code: str) -> None:
    page = all_pages()[code]
    text = (ROOT / "zeromon" / "diagnosis" / "rules" / f"{code}.md").read_text()
    assert text.startswith(f"# {code} {page.name}\n\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert page.summary.endswith(".")
    assert page.summary.count(". ") == 0
    assert text.count("```") % 2 == 0


def test_every_code_is_tried() -> None:
    tried = {code for table in (DEEPSPEED, ACCELERATE, SCRIPTS) for _, _, code, _ in table}
    others = {"ZM406"}  # needs a device: tests/docs/test_taught.py
    others |= {"ZM101", "ZM202", "ZM203", "ZM210", "ZM505", "ZM603"}  # by tests of their own
    assert emitted() == tried | others


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(zero(3, reduce_bucket_size=1000))
    return tmp_path


def test_the_text_names_place_rule_and_fix(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ds.json"]) == 1
    first, fix, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ds\.json:1:\d+: ZM303 bucket_size  reduce_bucket_size of 1,000 .*[^.]", first)
    assert fix == '    fix: "reduce_bucket_size": 50000000'
    assert last == "Found 1 problem in 1 file (1 warning)"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ds.json"], 1),
        (["ds.json", "--ignore", "ZM303"], 0),
        (["ds.json", "--ignore", "zm3"], 0),
        (["ds.json", "--select", "ZM7,bucket_size"], 1),
        (["ds.json", "--select", "ZM7"], 0),
        (["ds.json", "--select", "ZM999"], 2),
        (["absent.json"], 2),
        (["ds.json", "--model", "7B"], 2),
        (["ds.json", "--model", "huge", "--gpu", "80"], 2),
        (["ds.json", "--gpu", "lots"], 2),
        (["ds.json", "--host-memory", "512"], 2),
        (["ds.json", "--model", "7B", "--gpu", "80", "--host-memory", "lots"], 2),
        (["ds.json", "--model", "7B", "--devices", "8", "--gpu", "80GiB", "--host-memory", "here"], 1),
        (["ds.json", "--json", "--sarif", "-"], 2),
        (["ds.json", "--sarif", "absent/x.sarif"], 2),
    ],
)
def test_the_exit_code(
    bad: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    assert main(["check", *arguments]) == code
    assert bool(capsys.readouterr().err) == (code == 2)


def test_information_alone_is_fine(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad / "ds.json").write_text(zero(2, overlap_comm=False))
    assert main(["check", "."]) == 0
    assert capsys.readouterr().out.endswith("Found 1 problem in 1 file (1 info)\n")
    (bad / "ds.json").write_text(zero(2))
    assert main(["check", "."]) == 0
    assert capsys.readouterr().out == "No problems in 1 file\n"


def test_facts_are_told_when_everything_is_asked_for(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bad / "ds.json").write_text(zero(2, top='{"train_micro_batch_size_per_gpu": 4}'))
    call = ["check", "ds.json", "--devices", "8"]
    assert main(call) == 0
    assert capsys.readouterr().out == "No problems in 1 file\n"
    assert main([*call, "--verbose"]) == 0
    assert "4 x 1 x 8 ranks = 32 samples" in capsys.readouterr().out
    assert main([*call, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["files"] == 1
    (problem,) = content["problems"]
    assert problem["code"] == "ZM603"
    assert set(problem) == {
        "code", "name", "severity", "file", "line", "column", "message", "fix", "key"
    }  # fmt: skip


def test_a_plain_number_of_memory_is_gib(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["check", "ds.json", "--model", "70B", "--devices", "8", "--select", "ZM203", "--gpu"]
    assert [main([*call, size]) for size in ("80", "80GiB", "h100", "4000")] == [1, 1, 1, 0]
    assert "ZM203" in capsys.readouterr().out


def test_sarif_has_what_its_schema_requires(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad / "a b.yaml").write_text(launch("FSDP", "fsdp_auto_wrap_policy: NO_WRAP"))
    assert main(["check", ".", "--sarif", "-"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["version"] == "2.1.0"
    (run,) = content["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "zeromon"
    rules = [rule["id"] for rule in driver["rules"]]
    assert rules == sorted(set(rules)) == ["ZM206", "ZM303"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert not re.search(r"[\s\\]", physical["artifactLocation"]["uri"])
        assert min(physical["region"].values()) >= 1
    assert {rule["shortDescription"]["text"] for rule in driver["rules"]} == {
        all_pages()[code].summary for code in rules
    }


def test_sarif_goes_to_a_file_beside_the_text(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ds.json", "--sarif", "out.sarif"]) == 1
    assert "Found 1 problem" in capsys.readouterr().out
    assert len(json.loads((bad / "out.sarif").read_text())["runs"][0]["results"]) == 1


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_that_want_it(
    bad: Path, monkeypatch: pytest.MonkeyPatch, variable: str, coloured: bool
) -> None:
    leader, follower = os.openpty()
    environment = {**os.environ, "NO_COLOR": variable}
    command = [sys.executable, "-m", "zeromon", "check", "ds.json"]
    done = subprocess.run(command, stdout=follower, env=environment, cwd=bad, check=False)
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 1
    assert ("\x1b[" in text) == coloured
    plain = subprocess.run(command, capture_output=True, text=True, cwd=bad, check=False)
    assert "\x1b[" not in plain.stdout


def test_an_error_names_its_place() -> None:
    with pytest.raises(UnreadableError) as error:
        parse_config("distributed_type: FSDP\n  x: [", "a.yaml", "yaml")
    assert error.value.line == 2
