"""Supervised fine-tuning of Mistral-7B on an instruction set with HF Trainer + ZeRO-2."""
from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArgs:
    model_name: str = field(default="mistralai/Mistral-7B-v0.1")
    attn_impl: str = field(default="flash_attention_2")


@dataclass
class DataArgs:
    train_file: str = field(default="data/sft_train.jsonl")
    eval_file: Optional[str] = field(default=None)
    max_len: int = field(default=2048)


PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"


def make_encoder(tok, max_len):
    def encode(ex):
        prompt = tok(PROMPT.format(**ex), add_special_tokens=True)["input_ids"]
        answer = tok(ex["output"], add_special_tokens=False)["input_ids"] + [tok.eos_token_id]
        ids = (prompt + answer)[:max_len]
        labels = ([-100] * len(prompt) + answer)[:max_len]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    return encode


def load_split(path, tok, max_len, targs):
    ds = load_dataset("json", data_files=path, split="train")
    with targs.main_process_first(desc="tokenize"):
        return ds.map(make_encoder(tok, max_len), remove_columns=ds.column_names, num_proc=8)


def main():
    parser = HfArgumentParser((ModelArgs, DataArgs, TrainingArguments))
    margs, dargs, targs = parser.parse_args_into_dataclasses()
    set_seed(targs.seed)

    tok = AutoTokenizer.from_pretrained(margs.model_name)
    if tok.pad_token is None:
        tok.pad_token = tok.unk_token

    train = load_split(dargs.train_file, tok, dargs.max_len, targs)
    evals = load_split(dargs.eval_file, tok, dargs.max_len, targs) if dargs.eval_file else None

    model = AutoModelForCausalLM.from_pretrained(
        margs.model_name,
        torch_dtype=torch.bfloat16,
        attn_implementation=margs.attn_impl,
    )
    model.config.use_cache = False

    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=train,
        eval_dataset=evals,
        data_collator=DataCollatorForSeq2Seq(tok, padding="longest", label_pad_token_id=-100),
        processing_class=tok,
    )
    result = trainer.train(resume_from_checkpoint=targs.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
