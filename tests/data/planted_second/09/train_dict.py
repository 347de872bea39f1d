import os
from dataclasses import dataclass

import deepspeed
import torch
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator


@dataclass
class Opts:
    micro: int = 2
    accum: int = 8
    lr: float = 2e-4
    clip: float = 1.0
    steps: int = 20000


def zero_section():
    zero = dict(stage=3, overlap_comm=True, contiguous_gradients=True, reduce_bucket_size=int(1e8))
    zero["stage3_prefetch_bucket_size"] = int(5e7)
    zero["stage3_param_persistence_threshold"] = int(1e5)
    zero["stage3_max_live_params"] = int(1e9)
    zero["stage3_max_reuse_distance"] = int(1e9)
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


def ds_config(o):
    return {
        "train_micro_batch_size_per_gpu": o.micro,
        "gradient_accumulation_steps": o.accum,
        "gradient_clipping": o.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero_section(),
        "optimizer": {"type": "AdamW", "params": {"lr": o.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    o = Opts()
    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cfg = ds_config(o)
    with deepspeed.zero.Init(config_dict_or_path=cfg):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("EleutherAI/pythia-6.9b"))
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=cfg)
    data = load_from_disk("data/pile_packed")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, o.micro, sampler=sampler, num_workers=4, pin_memory=True,
                        drop_last=True, collate_fn=default_data_collator)
    stream = batches(loader, sampler)
    for step in range(o.steps * o.accum):
        batch = {k: v.to(engine.device, non_blocking=True) for k, v in next(stream).items()}
        engine.backward(engine(**batch).loss)
        engine.step()
        if (step + 1) % (1000 * o.accum) == 0:
            engine.save_checkpoint("ckpt69")


if __name__ == "__main__":
    main()
