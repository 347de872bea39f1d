from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling,
                          HfArgumentParser, Trainer, TrainingArguments)


@dataclass
class ScriptArgs:
    model_name: str = field(default="Qwen/Qwen2.5-1.5B")
    data_file: str = field(default="data/train.jsonl")
    max_len: int = field(default=2048)


def build_dataset(tok, args):
    ds = load_dataset("json", data_files=args.data_file, split="train")

    def encode(rows):
        return tok(rows["text"], truncation=True, max_length=args.max_len)

    return ds.map(encode, batched=True, remove_columns=ds.column_names)


def main():
    (args,) = HfArgumentParser(ScriptArgs).parse_args_into_dataclasses()
    training_args = TrainingArguments(
        output_dir="out/qwen-sft",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-5,
        warmup_ratio=0.03,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_train_epochs=2,
        logging_steps=10,
        save_steps=500,
        save_total_limit=2,
        dataloader_num_workers=4,
        report_to="none",
    )
    tok = AutoTokenizer.from_pretrained(args.model_name)
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model_name)
    model.config.use_cache = False
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=build_dataset(tok, args),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
