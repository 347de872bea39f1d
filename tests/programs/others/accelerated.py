"""A loop in the style of accelerate's examples: accumulation, clipping, metrics, a saved state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100, (count, 16), generator=generator)
    return TensorDataset(tokens, (tokens[:, 0] > 50).long())


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(42)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    train, test = DataLoader(rows(128, 1), 8, shuffle=True), DataLoader(rows(40, 2), 8)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    for epoch in range(3):
        model.train()
        for tokens, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens).logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for tokens, labels in test:
            with torch.no_grad():
                guesses = model(tokens).logits.argmax(-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right.append((guesses == labels).float())
        accelerator.print(f"epoch {epoch}: {loss.item().hex()} {torch.cat(right).mean().item():.4f}")
        accelerator.save_state(f"epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
