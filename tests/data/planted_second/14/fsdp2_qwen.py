import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datasets import load_from_disk
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator


class Job:
    def __init__(self, name="Qwen/Qwen2.5-7B", micro=1, lr=1e-5):
        self.dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32, use_cache=False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = self.parallelize(model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        data = load_from_disk("data/packed")
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, micro, sampler=self.sampler, num_workers=4, pin_memory=True,
                                 drop_last=True, collate_fn=default_data_collator)

    def parallelize(self, model):
        mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=self.mesh, mp_policy=mp, reshard_after_forward=True)
        return model

    def fit(self, epochs=1):
        self.model.train()
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                batch = {k: v.to(self.dev, non_blocking=True) for k, v in batch.items()}
                loss = self.model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)
            self.save(f"ckpt/epoch{epoch}")

    def save(self, path):
        model_sd, opt_sd = get_state_dict(self.model, self.opt)
        dcp.save({"model": model_sd, "optim": opt_sd}, checkpoint_id=path)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    Job().fit(epochs=2)
    dist.destroy_process_group()
