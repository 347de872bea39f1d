import sys

from datasets import load_from_disk
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


def training_args(config):
    return TrainingArguments(
        output_dir="out/llama70b",
        deepspeed=config,
        bf16=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=16,
        gradient_checkpointing=True,
        learning_rate=5e-6,
        max_grad_norm=1.0,
        max_steps=300,
        save_steps=100,
        dataloader_num_workers=2,
        report_to="none",
    )


def main(config):
    args = training_args(config)  # made first, so that from_pretrained shards under ZeRO-3
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-70b-hf", torch_dtype="auto",
                                                 use_cache=False)
    trainer = Trainer(model=model, args=args, train_dataset=load_from_disk("data/packed"),
                      data_collator=default_data_collator)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(next(a for a in sys.argv[1:] if a.endswith(".json")))
