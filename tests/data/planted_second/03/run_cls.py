import argparse

import numpy as np
from datasets import load_dataset
from transformers import (AutoModelForSequenceClassification, AutoTokenizer,
                          DataCollatorWithPadding, Trainer, TrainingArguments)


def accuracy(pred):
    return {"accuracy": float((np.argmax(pred.predictions, -1) == pred.label_ids).mean())}


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="microsoft/deberta-v2-xxlarge")
    p.add_argument("--deepspeed", default=None)
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--lr", type=float, default=5e-6)
    return p.parse_args()


def main():
    a = parse()
    targs = TrainingArguments(
        output_dir="out/mnli",
        deepspeed=a.deepspeed,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=a.lr,
        max_grad_norm=1.0,
        warmup_steps=500,
        num_train_epochs=3,
        bf16=True,
        dataloader_num_workers=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    tok = AutoTokenizer.from_pretrained(a.model)
    raw = load_dataset("glue", "mnli")
    enc = raw.map(lambda r: tok(r["premise"], r["hypothesis"], truncation=True, max_length=256),
                  batched=True, remove_columns=["premise", "hypothesis", "idx"])
    model = AutoModelForSequenceClassification.from_pretrained(a.model, num_labels=3)
    trainer = Trainer(model=model, args=targs, train_dataset=enc["train"],
                      eval_dataset=enc["validation_matched"],
                      data_collator=DataCollatorWithPadding(tok), compute_metrics=accuracy)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
