import functools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import OPTForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer

CFG = {"model": "facebook/opt-1.3b", "lr": 1e-5, "bs": 2, "epochs": 2, "seq": 1024, "clip": 1.0}


class Tokens(Dataset):
    def __init__(self, path, seq):
        self.t, self.seq = np.memmap(path, dtype=np.uint16, mode="r"), seq

    def __len__(self):
        return len(self.t) // self.seq

    def __getitem__(self, i):
        return torch.from_numpy(self.t[i * self.seq:(i + 1) * self.seq].astype(np.int64))


def shard(model, device):
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16,
                          buffer_dtype=torch.float16)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={OPTDecoderLayer})
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=half, device_id=device,
                use_orig_params=True, limit_all_gathers=True,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE)


def main():
    dist.init_process_group("nccl")
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    model = OPTForCausalLM.from_pretrained(CFG["model"], torch_dtype=torch.float32, use_cache=False)
    model = shard(model, device)
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    scaler = ShardedGradScaler()
    ds = Tokens("tokens.bin", CFG["seq"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, CFG["bs"], sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model.train()
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.to(device, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            model.clip_grad_norm_(CFG["clip"])
            scaler.step(opt)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
