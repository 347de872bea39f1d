"""Matrix products: FLOPs by hand, times by another count, peaks of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_traces import analyzed, event, events_of, host, launched_by, real, write

from zeromon.cli import main
from zeromon.memory.speeds import DEVICES, peak_flops
from zeromon.traces.analysis import ATTENTIONS, overall_rates, product_of

H100 = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}]
BF16 = "c10::BFloat16"


def operator(
    name: str, at: float, long: float, dims: list[Any], dtype: str = BF16, **more: Any
) -> dict[str, Any]:
    args = {"Input Dims": dims, "Input type": [dtype] * len(dims), **more}
    return {**host(name, at, long, 1), "args": args}


def test_products_that_can_be_counted_by_hand(tmp_path: Path) -> None:
    """An addmm of two kernels, twice; a bmm of float32 in TF32 with a reduction; another kernel."""
    linear = [[512], [4096, 1024], [1024, 512], [], []]
    path = write(tmp_path, [
        operator("aten::addmm", 0, 20, linear),
        *launched_by(5, event("gemm", 30, 8, correlation=1)),
        *launched_by(9, event("splitKreduce", 40, 2, correlation=2)),
        *launched_by(15, event("Memset", 45, 5, cat="gpu_memset", correlation=3)),
        operator("aten::addmm", 25, 20, linear),
        *launched_by(30, event("gemm", 60, 10, correlation=4)),
        operator("aten::bmm", 50, 20, [[8, 256, 64], [8, 64, 128]], "float"),
        *launched_by(55, event("cutlass_80_tensorop_s1688gemm_64x64", 80, 40, correlation=5)),
        *launched_by(58, event("reduce", 120, 10, correlation=6)),
        *launched_by(75, event("add", 140, 100, correlation=7)),
    ], deviceProperties=H100)  # fmt: skip
    first, second = analyzed(path).products
    assert (first.op, first.shape, first.dtype, first.count) == ("bmm", "8x256x128x64", "tf32", 1)
    assert first.flops == 2 * 8 * 256 * 128 * 64 and round(first.seconds * 1e6) == 50
    assert first.nbytes == 4 * 8 * (256 * 64 + 64 * 128 + 256 * 128)
    assert first.peak_flops == 989e12 / 2 and first.is_memory_bound
    assert first.roofline_ratio == pytest.approx(first.nbytes / 3350e9 / 50e-6)
    assert (second.op, second.shape, second.count) == ("addmm", "4096x512x1024", 2)
    assert round(second.seconds * 1e6) == 20 and not second.is_memory_bound
    assert second.peak_ratio == pytest.approx(2 * 2 * 4096 * 512 * 1024 / 20e-6 / 989e12)
    speed, *ratios = overall_rates([second])
    assert speed == pytest.approx(ratios[0] * 989e12) and ratios == [second.peak_ratio] * 2


def test_what_cannot_be_known_has_a_reason(tmp_path: Path) -> None:
    dims, gemm = [[1024, 1024], [1024, 1024]], event("gemm", 30, 1, correlation=1)
    inside = launched_by(5, gemm)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "record_shapes": (host("aten::mm", 0, 20, 1), {"deviceProperties": H100}),
        "peak FLOP/s of the device unknown": (operator("aten::mm", 0, 20, dims), {}),
        "float64": (operator("aten::mm", 0, 20, dims, "double"), {"deviceProperties": H100}),
        "faster than": (operator("aten::mm", 0, 20, dims, BF16), {"deviceProperties": H100}),
    }
    for why, (call, head) in cases.items():
        (found,) = analyzed(write(tmp_path, [call, *inside], **head)).products
        assert why in found.unknown and found.peak_ratio is found.roofline_ratio is None
    assert analyzed(write(tmp_path, [event("gemm", 0, 1)])).products == ()


@pytest.mark.parametrize("short", ATTENTIONS)
def test_the_flops_of_attention(short: str) -> None:
    """Two products of q x k and 128 a head; half of them with a causal mask; 5 products backward."""
    first, causal = ATTENTIONS[short]
    for is_causal in (False, True):
        dims = [[0]] * first + [[2, 16, 512, 128], [2, 4, 1024, 128], [2, 4, 1024, 128]]
        values = [""] * causal + [str(is_causal)]
        name = f"aten::_scaled_dot_product_{short}"
        found = product_of(name, dims, [BF16] * len(dims), values)
        one = 2 * 2 * 16 * 512 * 1024 * 128
        assert found.flops == one * (5 if "backward" in short else 2) / (2 if is_causal else 1)
        assert found.nbytes % (2 * (2 * 16 * 512 * 256 + 2 * 2 * 4 * 1024 * 128)) == 0
        assert product_of(name, dims, [BF16] * len(dims), None).flops is None


H100_REPORT = {
    ("_scaled_dot_product_flash_attention", 16, 16, 559, 64): (10.239377408, 69.875),
    ("mm", 8944, 1024, 2816): (51.581550592, 71.0078125),
    ("mm", 8944, 2816, 1024): (51.581550592, 71.0078125),
    ("mm", 8944, 1024, 1024): (18.756927488, 36.9375),
}
"""Operator and sizes -> GFLOP and MiB in TraceLens' report of Qwen1.5-0.5B on an H100 (tests/traces)."""


@pytest.mark.parametrize("called", H100_REPORT)
def test_flops_and_bytes_are_those_of_tracelens(called: tuple[Any, ...]) -> None:
    """It adds a bias' m n to an addmm, which is left out here: 0.05 % of 8944 x 1024 x 1024."""
    name, *sizes = called
    if name == "mm":
        m, k, n = sizes
        found = product_of("aten::mm", [[m, k], [k, n]], [BF16] * 2, ["", ""])
    else:
        values = ["", "", "", "0.", "True", "False", "0.125"]
        found = product_of(f"aten::{name}", [sizes] * 3 + [[]] * 4, [BF16] * 3, values)
    assert found.flops is not None
    assert (found.flops / 1e9, found.nbytes / (1 << 20)) == pytest.approx(H100_REPORT[called])


def test_the_arguments_of_attention_are_where_torch_has_them() -> None:
    torch = pytest.importorskip("torch")
    for short, (first, causal) in ATTENTIONS.items():
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{short}", None)
        if operator is not None:  # a torch without it never records it
            names = [one.name for one in operator.default._schema.arguments]
            assert names[first : first + 3] == ["query", "key", "value"]
            assert names[causal] == "is_causal"


@pytest.mark.parametrize("dims", [
    None, [], [[1, 2]], [[1, 2], [3, 4]], [[0, 2], [2, 4]], [["x", 2], [2, 4]], [[2], [2]], "x",
    [[1, 2, 3], [2, 3, 4]], [[-1, 2], [2, 4]], [1, 2], [[1e300, 2], [2, 4]], [[1 << 99, 2], [2, 4]],
])  # fmt: skip
def test_shapes_that_cannot_be(dims: Any) -> None:
    assert product_of("aten::mm", dims, [BF16, BF16], None).flops is None


def test_the_products_of_a_real_trace_by_another_count() -> None:
    """One pass over calls, launches and kernels of the whole file, by json."""
    path = real("eight_rank_dlrm_rank3.json.gz")
    kernels = {e["args"]["correlation"]: e for e in events_of(path) if e.get("cat") == "kernel"}
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    current: dict[int, dict[str, Any]] = {}
    flops, spent, seen = 0, 0, set()
    for e in sorted((e for e in events_of(path) if e.get("ph") == "X"), key=lambda e: e["ts"]):
        if e["name"] in names:
            current[e["tid"]] = e
        elif e["name"] == "cudaLaunchKernel" and e["args"]["correlation"] in kernels:
            call = current.get(e["tid"])
            if call is None or e["ts"] > call["ts"] + call["dur"]:
                continue
            spent += kernels[e["args"]["correlation"]]["dur"]
            if id(call) not in seen:
                seen.add(id(call))
                first, second = [d for d in call["args"]["Input Dims"] if len(d) > 1][-2:]
                flops += 2 * second[-1] * eval("*".join(map(str, first)))
    found = analyzed(path)
    assert found.device_name == "NVIDIA A100-PG509-200 40GB"
    assert sum(one.flops or 0 for one in found.products) == flops
    assert round(sum(one.seconds for one in found.products) * 1e6) == spent
    assert sum(one.count for one in found.products) == len(seen)
    assert not any(one.unknown for one in found.products)


def test_tensorfloat_is_half_of_half_precision() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "tf32") == "Tesla V100-SXM2-32GB has no tf32"
    assert DEVICES["a100-40"].memory == 1555e9


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = str(real("eight_rank_dlrm_rank3.json.gz"))
    assert main(["trace", "analyze", name, "--gemm"]) == 0
    text = capsys.readouterr().out
    assert "on NVIDIA A100-PG509-200 40GB: 25.0 TFLOP/s" in text and "1024x512x9375" in text
    assert max(map(len, text.splitlines())) <= 90
    assert main(["trace", "analyze", name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["ranks"][0]["products"]
    assert rows[0]["seconds"] >= rows[1]["seconds"]
