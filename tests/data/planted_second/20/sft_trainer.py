import argparse

from datasets import load_from_disk
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    p.add_argument("--data", default="data/packed_4k")
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def main():
    a = cli()
    args = TrainingArguments(
        output_dir="/shared/out/llama8b",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=a.lr,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        max_grad_norm=1.0,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_train_epochs=2,
        save_steps=500,
        save_total_limit=2,
        logging_steps=10,
        dataloader_num_workers=4,
        ddp_timeout=3600,
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(a.model, use_cache=False)
    trainer = Trainer(model=model, args=args, train_dataset=load_from_disk(a.data),
                      data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=a.resume or None)
    trainer.save_model()


if __name__ == "__main__":
    main()
