"""A training loop of one's own by accelerate, with guards against NaN and counts of tokens."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Convolutions with batch norms, as those of ResNet."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images)


def main() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    model: Any = Classifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = TensorDataset(torch.randn(32, 3, 64, 64), torch.randint(1, 10, (32,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(images, batch_size=4))
    total, count, best = 0.0, 0, float("inf")
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(model(batch), labels)
        if torch.isnan(loss).any() or not torch.isfinite(loss):
            raise SystemExit("loss is not finite")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        counted = (labels > 0).sum().item()
        total, count = total + loss.item() * counted, count + counted
        best = min(best, accelerator.gather(loss.detach()).mean().item())
    names = accelerator.gather_for_metrics(
        ["x" * (1 + accelerator.process_index)], use_gather_object=True
    )
    sys.stdout.write(f"trained {len(loader)} {total / count} {best} {names}\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
