"""A test double for ZeRO++'s CUDA quantizer: plain torch, symmetric, same shapes on the wire.

DeepSpeed has no such kernels for CPUs. The collectives of qwZ and qgZ are real with it; how fast and
how exact the kernels are it cannot show.
"""

from types import SimpleNamespace

import torch


def _groups(values: torch.Tensor, groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = values.reshape(groups, -1).float()
    most = 2 ** (bits - 1) - 1
    scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
    return (rows / scales).round().clamp(-most, most).to(torch.int8), scales.view(-1)


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    low, high = nibbles.reshape(-1, 2).to(torch.uint8).unbind(1)
    return ((low & 15) | (high << 4)).view(torch.int8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    raw = packed.reshape(-1).view(torch.uint8)
    nibbles = torch.stack([(raw & 15).to(torch.int8), (raw >> 4).to(torch.int8)], 1)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def quantize(values, groups, bits, symmetric):
    quantized, scales = _groups(values, groups, bits)
    return quantized.reshape(values.shape), scales


def dequantize(quantized, scales, groups, bits, symmetric):
    values = _unpack(quantized) if bits == 4 else quantized.reshape(-1)
    whole = (values.reshape(groups, -1).float() * scales.reshape(groups, 1)).half()
    return whole.reshape(-1 if bits == 4 else quantized.shape)


def swizzle_quant(values, groups, bits, symmetric, pipeline, nodes, local_ranks):
    by_rank = values.reshape(nodes, local_ranks, -1).transpose(0, 1).contiguous()
    quantized, scales = _groups(by_rank, groups, bits)
    return _pack(quantized), scales


def quantized_reduction(packed, scales, in_groups, out_groups, bits, symmetric, local_ranks):
    rows = _unpack(packed).reshape(in_groups, -1).float() * scales.reshape(in_groups, 1)
    quantized, new_scales = _groups(rows.reshape(local_ranks, -1).mean(0), out_groups, bits)
    return _pack(quantized), new_scales


def install() -> None:
    """Puts the double where DeepSpeed looks for the compiled module."""
    import deepspeed.ops.op_builder as builders
    import deepspeed.runtime.comm.coalesced_collectives as collectives
    import deepspeed.runtime.zero.partition_parameters as parameters

    double = SimpleNamespace(
        Symmetric=1, Asymmetric=0, quantize=quantize, dequantize=dequantize,
        swizzle_quant=swizzle_quant, quantized_reduction=quantized_reduction,
    )  # fmt: skip

    class QuantizerBuilder:
        NAME = "quantizer"

        def load(self, verbose: bool = True) -> SimpleNamespace:
            return double

    builders.QuantizerBuilder = QuantizerBuilder
    parameters.CUDAQuantizer.quantizer_cuda_module = double
    collectives.quantizer_module = double
