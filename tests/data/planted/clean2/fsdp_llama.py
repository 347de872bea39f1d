"""FSDP1 full-shard training, fp16 on pre-Ampere GPUs, with accumulation."""
import argparse
import contextlib
import os
from functools import partial as P
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as by_layer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Windows(Dataset):
    def __init__(self, path, n):
        self.d, self.n = np.memmap(path, dtype=np.uint16, mode="r"), n

    def __len__(self):
        return len(self.d) // self.n

    def __getitem__(self, i):
        return torch.from_numpy(self.d[i * self.n:(i + 1) * self.n].astype(np.int64))


def make_optimizer(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def make_model(local):
    cfg = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=22,
                      num_attention_heads=32, num_key_value_heads=4, use_cache=False)
    half = torch.float16
    return FSDP(
        LlamaForCausalLM(cfg),
        auto_wrap_policy=P(by_layer, transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32, buffer_dtype=half),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=local,
        sync_module_states=True,
        use_orig_params=True,
    )


def new_epoch(loader, epoch, whole):
    loader.sampler.set_epoch(epoch)
    return islice(loader, whole)


def full_weights(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        return model.state_dict()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bin", default="train.bin")
    ap.add_argument("--bs", type=int, default=4)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-4)
    a = ap.parse_args()

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(77)

    model = make_model(local)
    opt = make_optimizer(model, a.lr)
    scaler = ShardedGradScaler(init_scale=2.0**13)
    ds = Windows(a.bin, 1024)
    loader = DataLoader(ds, a.bs, sampler=DistributedSampler(ds, drop_last=True), num_workers=4, pin_memory=True)
    whole = len(loader) // a.accum * a.accum

    for epoch in range(a.epochs):
        for n, x in enumerate(new_epoch(loader, epoch, whole), 1):
            last = n % a.accum == 0
            x = x.to(local, non_blocking=True)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(input_ids=x, labels=x).loss
                scaler.scale(loss / a.accum).backward()
            if not last:
                continue
            scaler.unscale_(opt)
            model.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and n % (25 * a.accum) == 0:
                print(epoch, n // a.accum, f"{loss.item():.4f}", flush=True)
        state = full_weights(model)
        if rank == 0:
            torch.save(state, f"llama_e{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
