"""Trains one part of what torch leaves to cuDNN and prints the peak of each step: ``cudnn.py PART``.

``cudnn.py values`` prints by how much convolutions, batch norms and gradients differ from the CPU's.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from vgpu.marks import mark


class Block(nn.Module):
    """Two convolutions with batch norms beside an identity, as in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(hidden)) + x).relu()


class Attention(nn.Module):
    """Attention whose queries, keys and values are parameters."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.operands = nn.ParameterList(torch.randn(2, 16, 4096, 128).bfloat16() for _ in range(3))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return nn.functional.scaled_dot_product_attention(*self.operands, is_causal=self.causal)


def make_resnet() -> nn.Module:
    """A stem, two blocks and one convolution more, for images of 224 pixels."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    end = nn.Conv2d(64, 128, 3, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    return nn.Sequential(*stem, Block(64), Block(64), *end, *head)


def make_lstm() -> nn.Module:
    """Two layers of 512."""
    return nn.LSTM(512, 512, 2)


PARTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (make_resnet, (32, 3, 224, 224)),
    "attention": (Attention, (1,)),
    "lstm": (make_lstm, (128, 64, 512)),
}


def print_differences() -> None:
    """The largest difference of the result and of each gradient."""
    torch.manual_seed(0)
    model, inputs = Block(8), torch.randn(2, 8, 12, 12)
    gradients = []
    for device in ("cpu", "cuda"):
        model, inputs = model.to(device), inputs.to(device)
        model.zero_grad()
        output = model(inputs)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output = nn.functional.scaled_dot_product_attention(output, output, output)
        output.square().mean().backward()
        parameters = [parameter.grad.cpu().clone() for parameter in model.parameters()]
        gradients.append([output.detach().cpu(), *parameters])
    pairs = zip(*gradients, strict=True)
    differences = [float((first - second).abs().max()) for first, second in pairs]
    print("differences", *differences, float(gradients[0][0].abs().max()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS, "values"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--no-tf32", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    if options.part == "values":
        print_differences()
        return
    torch.backends.cudnn.allow_tf32 = not options.no_tf32
    Attention.causal = options.causal
    make, sizes = PARTS[options.part]
    form: Any = torch.channels_last if options.channels_last else torch.contiguous_format
    model = make().cuda().to(memory_format=form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.empty(*sizes, device="cuda").to(memory_format=form)
    print("cudnn", torch.backends.cudnn.version(), torch.backends.cudnn.is_available(), flush=True)
    for step in range(options.steps):
        mark(f"step {step}")
        torch.cuda.reset_peak_memory_stats()
        output = model(inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        del output
        optimizer.step()
        optimizer.zero_grad()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        print("peak", torch.cuda.max_memory_allocated(), "parameters", parameters, flush=True)
    mark(f"step {options.steps}")


if __name__ == "__main__":
    main()
