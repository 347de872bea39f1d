"""Fine-tunes a Llama with LoRA by TRL's SFTTrainer."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        use_cache=False,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    rows = [{"input_ids": torch.randint(0, 32000, (100 + i,)).tolist()} for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, bf16=True,
            report_to="none", save_strategy="no", disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = SFTTrainer(
            LlamaForCausalLM(config), args=arguments, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )  # fmt: skip
        metrics = trainer.train().metrics
        sys.stdout.write(f"trained {trainer.state.global_step} {metrics['train_loss']}\n")


if __name__ == "__main__":
    main()
