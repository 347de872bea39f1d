"""Prints microseconds of attention's kernels on the device: ``KERNEL CAUSAL FORWARD BACKWARD``."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, LENGTH, HEAD = 4, 16, 2048, 128


def main() -> None:
    shape = (BATCH, HEADS, LENGTH, HEAD)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for number, causal in enumerate((False, False, True)):
            tensors = [
                torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            ]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(100_000_000)  # the host is ahead of the device
            with sdpa_kernel(kernel):
                events[0].record()
                output = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
                events[1].record()
                output.backward(output)
                events[2].record()
            torch.cuda.synchronize()
            times = [round(events[i].elapsed_time(events[i + 1]) * 1e3) for i in range(2)]
            if number:  # the first time loads the kernels
                print(kernel.name, causal, *times, flush=True)


if __name__ == "__main__":
    main()
