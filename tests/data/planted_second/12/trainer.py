import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (BackwardPrefetch, FullOptimStateDictConfig, FullStateDictConfig,
                                    MixedPrecision, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPTNeoXForCausalLM, default_data_collator
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer


class FSDPTrainer:
    max_norm = 1.0

    def __init__(self, name, data, lr=1e-5, batch=4):
        self.dev = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.dev)
        base = GPTNeoXForCausalLM.from_pretrained(name, torch_dtype=torch.float32, use_cache=False)
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer})
        self.model = FSDP(base, auto_wrap_policy=wrap, device_id=self.dev, use_orig_params=True,
                          limit_all_gathers=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                          mixed_precision=MixedPrecision(param_dtype=torch.bfloat16,
                                                         reduce_dtype=torch.float32,
                                                         buffer_dtype=torch.bfloat16))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch, sampler=self.sampler, num_workers=4, pin_memory=True,
                                 drop_last=True, collate_fn=default_data_collator)

    def step(self, batch):
        batch = {k: v.to(self.dev, non_blocking=True) for k, v in batch.items()}
        self.opt.zero_grad(set_to_none=True)
        loss = self.model(**batch).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.opt.step()
        return loss.detach()

    def fit(self, epochs):
        self.model.train()
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for i, batch in enumerate(self.loader):
                loss = self.step(batch)
                if i % 50 == 0 and dist.get_rank() == 0:
                    print(epoch, i, loss.item(), flush=True)

    def save(self, path):
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT,
                                  FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                                  FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            state = {"model": self.model.state_dict(), "opt": FSDP.optim_state_dict(self.model, self.opt)}
        if dist.get_rank() == 0:
            torch.save(state, path)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    t = FSDPTrainer("EleutherAI/pythia-2.8b", load_from_disk("data/packed"))
    t.fit(epochs=2)
    t.save("pythia.pt")
    dist.destroy_process_group()
