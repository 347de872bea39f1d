"""`trl.SFTTrainer` on a Llama made from a configuration, a tokenizer made here, and rows of chance."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(60)]


def tokenizer():
    known = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def rows(count, seed):
    drawn = torch.randint(0, 60, (count, 20), generator=torch.Generator().manual_seed(seed))
    return Dataset.from_dict({"text": [" ".join(WORDS[n] for n in row) for row in drawn]})


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir="out", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=4, logging_steps=1, learning_rate=1e-3, max_length=32,
        bf16=False, report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
        gradient_checkpointing=True, packing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=rows(80, 1), eval_dataset=rows(16, 2),
        processing_class=tokenizer(),
    )  # fmt: skip
    print({name: str(value) for name, value in trainer.train().metrics.items()})


if __name__ == "__main__":
    main()
