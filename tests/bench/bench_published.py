"""Predicted against published steps on A100 and H100: `python tests/bench/bench_published.py`.

Nothing was tuned to these figures: shares of peaks, latencies and links are the defaults of `zeromon
plan` (zeromon/memory/speeds.py), the rest is the configuration that the source gives. The last column
takes the share of the peak from the first row of the same source and device, as a user does who knows
one of his own runs. ``--publish`` stores the figures for docs/evidence/accuracy.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from evidence_pages import Entry, markdown_table, measured_here, publish, published_steps_table
from hub_models import described, from_config

from zeromon.cli import build_parser, plan_setup
from zeromon.cli.plan_setup import setup_from_model
from zeromon.memory.plan import Point, point_of, work_of
from zeromon.memory.predict import Batch
from zeromon.memory.seconds import forward_pass_flops

FOUNDRY = (
    "[LLM Foundry](https://github.com/mosaicml/llm-foundry/blob/"
    "061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/benchmarking/README.md)"
)
MEGATRON = "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 2"
FSDP = "[Zhao et al. 2023](https://arxiv.org/abs/2304.11277), section 5.4"


class Shape(NamedTuple):
    """Width, layers, heads, vocabulary."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 50368


MPT = {
    "3b": Shape(2560, 32, 32), "7b": Shape(4096, 32, 32), "13b": Shape(5120, 40, 40),
    "30b": Shape(7168, 48, 56), "70b": Shape(8192, 80, 64),
}  # fmt: skip
GPT_175B, GPT_530B = Shape(12288, 96, 96, 51200), Shape(20480, 105, 128, 51200)


class Published(NamedTuple):
    """A configuration and its figure: tokens/s of a GPU, or TFLOP/s of a GPU with recomputation."""

    source: str
    name: str
    shape: Shape
    options: str
    length: int = 2048
    tokens_per_second: float = 0.0
    tflops: float = 0.0


def foundry(name: str, gpu: str, devices: int, micro: int, of: tuple[int, bool], rate: float,
            length: int = 2048) -> Published:  # fmt: skip
    """A row of LLM Foundry: FULL_SHARD, mixed precision; A100s with 1600 Gbit/s between hosts."""
    accumulation, recomputes = of
    options = f"--framework fsdp2 --stage 3 --precision fsdp-mixed --gpu {gpu} --devices {devices}"
    options += f" --micro-batch {micro} --accumulation {accumulation}"
    options += " --checkpointing" * recomputes + " --interconnect 1600Gb" * (devices > 8)
    return Published(FOUNDRY, f"MPT-{name}", MPT[name], options, length, rate)


def zero_3(name: str, shape: Shape, devices: int, micro: int, tflops: float) -> Published:
    """A row of Megatron's comparison: DeepSpeed's stage 3 on DGX A100, eight HDR adapters a host."""
    options = f"--stage 3 --gpu a100 --devices {devices} --micro-batch {micro} --checkpointing"
    return Published(MEGATRON, name, shape, options + " --interconnect 8xib-hdr", tflops=tflops)


def fsdp(micro: int, tflops: float) -> Published:
    """GPT-175B on 128 A100 with 2 Tbit/s between hosts; its TFLOPS are taken with recomputation."""
    options = "--framework fsdp2 --stage 3 --precision fsdp-mixed --gpu a100 --devices 128"
    options += f" --micro-batch {micro} --checkpointing --interconnect 2000Gb"
    shape = GPT_175B._replace(vocabulary=50000)
    return Published(FSDP, "GPT-175B", shape, options, tflops=tflops)


ROWS = (
    foundry("7b", "h100", 8, 6, (1, False), 10643),
    foundry("13b", "h100", 8, 10, (3, True), 4717, 4096),
    foundry("30b", "h100", 8, 3, (21, True), 2002),
    foundry("3b", "a100", 8, 10, (2, False), 10811),
    foundry("7b", "a100", 8, 6, (2, False), 4641),
    foundry("30b", "a100", 8, 3, (21, True), 916),
    foundry("70b", "a100", 32, 2, (16, True), 373),
    foundry("70b", "a100", 64, 8, (4, True), 410),
    foundry("13b", "a100-40", 128, 16, (1, True), 1972),
    foundry("30b", "a100-40", 32, 4, (1, True), 857),
    foundry("70b", "a100-40", 64, 2, (1, True), 276),
    zero_3("GPT-3 175B", GPT_175B, 384, 4, 144),
    zero_3("GPT-3 175B", GPT_175B, 768, 2, 88),
    zero_3("GPT-3 175B", GPT_175B, 1536, 1, 44),
    zero_3("GPT 530B", GPT_530B, 640, 4, 138),
    zero_3("GPT 530B", GPT_530B, 1120, 2, 98),
    zero_3("GPT 530B", GPT_530B, 2240, 1, 48),
    fsdp(1, 173),
    fsdp(2, 186),
)  # fmt: skip


def config_of(row: Published) -> dict[str, object]:
    h, layers, heads, vocabulary = row.shape
    return {
        "model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": heads,
        "vocab_size": vocabulary, "n_positions": row.length,
    }  # fmt: skip


def predicted(row: Published, folder: Path, share: float | None = None) -> tuple[Point, Namespace]:
    """The prediction, at *share* of the peak instead of the default."""
    path = folder / "config.json"
    path.write_text(json.dumps(config_of(row)))
    plan_setup.read_model.cache_clear()
    words = ["plan", str(path), *row.options.split(), "--length", str(row.length)]
    words += ["--efficiency", str(share)] if share else []
    options = build_parser("plan").parse_args(words)
    # Of plain layers, in no time; the tests of other files must not see it
    with patch.object(plan_setup, "describe_entry", lambda *_: described(config_of(row))):
        setup = setup_from_model(options)
    return point_of({}, setup, replace(work_of(setup), micro_batch=options.micro_batch)), options


def seconds(found: Point) -> float:
    assert found.time is not None, found.unknown
    return found.time.seconds


def share_of(row: Published, folder: Path) -> float:
    """The share of the peak at which *row* is predicted as it was published."""
    low, high = 0.05, 0.99
    for _ in range(20):
        middle = (low + high) / 2
        found, options = predicted(row, folder, middle)
        slower = seconds(found) > published_seconds(row, options)
        low, high = (middle, high) if slower else (low, middle)
    return high


def published_seconds(row: Published, options: Namespace) -> float:
    """Seconds of a step by the published figure."""
    micro_batches = options.accumulation or 1
    if row.tokens_per_second:
        return micro_batches * options.micro_batch * row.length / row.tokens_per_second
    batch = Batch(sequences=options.micro_batch, length=row.length, checkpointing=True)
    forward, again = forward_pass_flops(from_config(config_of(row)), batch)
    return micro_batches * (3 * forward + again) / (row.tflops * 1e12)


HEAD = (
    "source", "model", "devices", "micro-batch x accumulation", "published, s", "predicted, s",
    "from, s", "to, s", "error, %", "by the first, %",
)  # fmt: skip


def table_rows() -> Iterator[list[str | float | None]]:
    """The cells of :data:`HEAD` for each published step; the last one is None in a first row."""
    shares: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in ROWS:
            point, options = predicted(row, folder)
            truth, time = published_seconds(row, options), point.time
            assert time is not None, point.unknown
            key = row.source, options.gpu
            again = None
            if key in shares:
                again = seconds(predicted(row, folder, shares[key])[0]) / truth - 1
            else:
                shares[key] = share_of(row, folder)
            batch = f"{options.micro_batch} x {options.accumulation or 1}"
            batch += " of 4096" if row.length == 4096 else ""
            batch += ", checkpointing" if options.checkpointing else ""
            figures = (truth, time.seconds, time.least, time.most)
            errors = (time.seconds / truth - 1, again)
            yield [
                row.source, row.name, f"{options.devices} {options.gpu.upper()}", batch,
                *(round(figure, 2) for figure in figures),
                *(None if error is None else round(100 * error, 1) for error in errors),
            ]  # fmt: skip


def entry_here() -> Entry:
    """The figures as an entry of docs/evidence."""
    fields = {"view": "published-steps", "head": list(HEAD), "rows": list(table_rows())}
    return measured_here("tests/bench/bench_published.py", **{"machine": "any CPU", **fields})


if __name__ == "__main__":
    entry = entry_here()
    print(markdown_table(published_steps_table([entry])))
    if "--publish" in sys.argv[1:]:
        publish("accuracy", {"published": entry})
