"""`transformers.Trainer` on a GPT-2 made from a configuration: `hf_trainer.py ddp|fsdp2|zero2|zero3`.

Accumulation, evaluation, checkpoints, and workers. The Trainer cannot evaluate with DeepSpeed on a CPU:
accelerate counts one rank there and gathers as if there were one. There it does not.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def deepspeed(stage):
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
        },
    }


WAYS = {
    "ddp": {},
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    },
    "zero2": {"deepspeed": deepspeed(2)},
    "zero3": {"deepspeed": deepspeed(3)},
}


def main():
    way = WAYS[sys.argv[1]]
    evaluates = "no" if "deepspeed" in way else "steps"
    arguments = TrainingArguments(
        output_dir="out", max_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        eval_strategy=evaluates, eval_steps=5, save_steps=5, logging_steps=1, learning_rate=1e-3,
        logging_nan_inf_filter=False, dataloader_num_workers=2, report_to=[], disable_tqdm=True,
        use_cpu="deepspeed" not in way, ddp_backend="gloo", bf16=False, fp16=False, **way,
    )  # fmt: skip
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=Rows(200), eval_dataset=Rows(16))
    print({name: str(value) for name, value in trainer.train().metrics.items()})


if __name__ == "__main__":
    main()
