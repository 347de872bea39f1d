import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullStateDictConfig
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM, default_data_collator
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


def wrap_model(model, local_rank, hybrid):
    strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    return FSDP(
        model,
        transformer_layer_cls={LlamaDecoderLayer},
        sharding_strategy=strategy,
        mixed_precision=BF16,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=local_rank,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def save(model, path):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="meta-llama/Llama-3.2-3B")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--hybrid", action="store_true")
    a = p.parse_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = LlamaForCausalLM.from_pretrained(a.model, torch_dtype=torch.float32, use_cache=False)
    model = wrap_model(model, local_rank, a.hybrid)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    data = load_from_disk("data/packed")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 2, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True,
                        collate_fn=default_data_collator)
    model.train()
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(local_rank, non_blocking=True) for k, v in batch.items()}
            opt.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
    save(model, "llama.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
