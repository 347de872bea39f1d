import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator

SETTINGS = dict(name="meta-llama/Llama-3.2-3B", lr=1e-5, micro=2, epochs=2, clip=1.0,
                data="data/packed_2k", out="out/llama3b.pt")


def sharded(model):
    kw = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
          "reshard_after_forward": True}
    for layer in model.model.layers:
        fully_shard(layer, **kw)
    return fully_shard(model, **kw)


def export(model, path):
    if dist.get_rank() != 0:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    torch.save(weights, path)


def train(s, dev):
    model = AutoModelForCausalLM.from_pretrained(s["name"], torch_dtype=torch.float32, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = sharded(model)
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.95), fused=True)
    data = load_from_disk(s["data"])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, s["micro"], sampler=sampler, num_workers=4, pin_memory=True,
                        drop_last=True, collate_fn=default_data_collator)
    model.train()
    for epoch in range(s["epochs"]):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(dev, non_blocking=True) for k, v in batch.items()}
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
            opt.step()
            opt.zero_grad(set_to_none=True)
        export(model, s["out"])
        dist.barrier()


if __name__ == "__main__":
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    train(SETTINGS, local)
    dist.destroy_process_group()
