import argparse
import functools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import OPTForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.opt.modeling_opt import OPTDecoderLayer


class Tokens(Dataset):
    """Fixed-length windows of one long uint16 stream."""

    def __init__(self, path, block):
        self.buf = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return self.buf.shape[0] // self.block

    def __getitem__(self, i):
        s = i * self.block
        return torch.from_numpy(self.buf[s:s + self.block].astype("int64"))


HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


def wrap(model, local_rank):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={OPTDecoderLayer})
    return FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=HALF,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=local_rank,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def save_full(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", default="/scratch/opt/train.bin")
    ap.add_argument("--model", default="facebook/opt-2.7b")
    ap.add_argument("--bs", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--clip", type=float, default=1.0)
    a = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(42)

    model = wrap(OPTForCausalLM.from_pretrained(a.model, torch_dtype=torch.float32), local_rank)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = GradScaler("cuda", init_scale=2.0**14)

    ds = Tokens(a.tokens, 1024)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    dl = DataLoader(ds, batch_size=a.bs, sampler=sampler, num_workers=4, pin_memory=True)
    sched = get_cosine_schedule_with_warmup(opt, 200, a.epochs * len(dl))

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, x in enumerate(dl):
            x = x.to(local_rank, non_blocking=True)
            loss = model(input_ids=x, labels=x).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            model.clip_grad_norm_(a.clip)
            scaler.step(opt)
            scaler.update()
            sched.step()
            opt.zero_grad(set_to_none=True)
            if i % 50 == 0 and dist.get_rank() == 0:
                print(f"e{epoch} i{i} loss={loss.item():.4f} scale={scaler.get_scale():.0f}", flush=True)
        save_full(model, f"opt27_e{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
