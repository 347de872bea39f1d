# Full fine-tune of a 7B model with the HF Trainer; DeepSpeed comes from the accelerate YAML.
import argparse
import math

import torch
import transformers
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    ap.add_argument("--data", default="/mnt/efs/datasets/domain_tokenized")
    ap.add_argument("--out", default="/mnt/efs/runs/llama7b-domain")
    ap.add_argument("--lr", type=float, default=1.5e-5)
    ap.add_argument("--epochs", type=float, default=2)
    ap.add_argument("--seed", type=int, default=7)
    return ap.parse_args()


def training_arguments(ns) -> TrainingArguments:
    common = dict(
        output_dir=ns.out,
        num_train_epochs=ns.epochs,
        learning_rate=ns.lr,
        lr_scheduler_type="cosine",
        warmup_ratio=0.02,
        weight_decay=0.0,
        seed=ns.seed,
    )
    batch = dict(
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    io = dict(logging_steps=5, save_steps=400, save_total_limit=2, report_to=["tensorboard"])
    return TrainingArguments(bf16=True, max_grad_norm=1.0, **common, **batch, **io)


def collate(pad_id):
    def fn(rows):
        width = max(len(r["input_ids"]) for r in rows)
        ids = torch.full((len(rows), width), pad_id)
        labels = torch.full((len(rows), width), -100)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, r in enumerate(rows):
            n = len(r["input_ids"])
            ids[i, :n] = torch.tensor(r["input_ids"])
            labels[i, :n] = torch.tensor(r["input_ids"])
            mask[i, :n] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    return fn


def main():
    ns = parse()
    targs = training_arguments(ns)
    transformers.set_seed(ns.seed)

    tok = AutoTokenizer.from_pretrained(ns.model)
    tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(ns.model, torch_dtype=torch.bfloat16)
    model.config.use_cache = False

    ds = load_from_disk(ns.data)
    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=ds["train"],
        eval_dataset=ds["validation"],
        data_collator=collate(tok.pad_token_id),
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("ppl", math.exp(metrics["eval_loss"]))
    trainer.save_model(ns.out)


if __name__ == "__main__":
    main()
