from datasets import load_from_disk
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


def main():
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=1e-5,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_train_epochs=1,
        save_steps=500,
        dataloader_num_workers=4,
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", use_cache=False)
    trainer = Trainer(model=model, args=args, train_dataset=load_from_disk("data/packed"),
                      data_collator=default_data_collator)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
