"""``python -m zeromon_virtual``: a specification on stdin, the result on stdout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from support import clean_environment

from zeromon.memory.schedule import Hides, Rates, exposed
from zeromon.memory.spec import Precision, ShardPlan, Sizes, ZeroStage
from zeromon_virtual.__main__ import main

SPEC: dict[str, Any] = {
    "model": {
        "layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocabulary": 1000, "sequence": 128,
    },
    "device": {"flops_per_second": {"default": 20e12}, "bytes_per_second": 1e12},
    "sharding": {"shards": 8},
    "link": {"latency_seconds": 2e-5, "bytes_per_second": 20e9},
    "clip_gradients": True,
    "spans": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """A virtual device stays registered in its process: the tests of others must not see it."""
    environment = clean_environment() | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "zeromon_virtual"]
    done = subprocess.run(
        command, input=json.dumps(SPEC), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_parts_of_the_compute_stream_sum_to_the_step(result: dict[str, Any]) -> None:
    parts = ("compute_seconds", "exposed_seconds", "other_wait_seconds", "idle_seconds")
    assert sum(result[part] for part in parts) == pytest.approx(result["step_seconds"], abs=1e-9)
    assert all(result[part] >= 0 for part in parts)
    assert sum(row["seconds"] for row in result["exposed"]) == pytest.approx(
        result["exposed_seconds"], abs=1e-9
    )


def test_the_schedule_is_that_of_fsdp2(result: dict[str, Any]) -> None:
    """Two gathers a unit, one for the root, which stays gathered; one reduction for each."""
    found: dict[str, list[str]] = {}
    for span in result["spans"]:
        if span["kind"] == "collective":
            found.setdefault(span["name"], []).append(f"{span['unit']} {span['phase']}")
    assert found["all_gather"] == [
        "(root) forward", "blocks.0 forward", "blocks.1 forward",
        "blocks.1 backward", "blocks.0 backward",
    ]  # fmt: skip
    assert found["reduce_scatter"] == [
        "blocks.1 backward", "blocks.0 backward", "(root) backward",
    ]  # fmt: skip


def test_a_collective_takes_latency_and_bytes_over_bandwidth(result: dict[str, Any]) -> None:
    """The gather of a block: 12 hidden² weights and 4 hidden of the norms, in fp32, 7/8 on the bus."""
    gathers = [
        span
        for span in result["spans"]
        if span["name"] == "all_gather" and span["unit"] == "blocks.1"
    ]
    nbytes = (12 * 256**2 + 4 * 256) * 4
    for span in gathers:
        seconds = span["end_seconds"] - span["start_seconds"]
        assert seconds == pytest.approx(2e-5 + nbytes * 7 / 8 / 20e9, abs=2e-9)


def test_the_norm_of_the_gradients_is_waited_for(result: dict[str, Any]) -> None:
    """DTensor reduces it by a functional collective, which nothing hides: 20 us of latency."""
    (row,) = [row for row in result["exposed"] if row["phase"] == "optimizer"]
    assert (row["op"], row["unit"]) == ("all_reduce", "")
    assert 2e-5 <= row["seconds"] < 2.1e-5


def test_a_matrix_product_takes_its_flops_over_the_rate_or_its_bytes_over_the_bandwidth(
    result: dict[str, Any],
) -> None:
    """The output layer: (128, 256) by (256, 1000) is short of FLOPs, so its bytes decide."""
    nbytes = 4 * (128 * 256 + 256 * 1000 + 128 * 1000)
    expected = max(2 * 128 * 256 * 1000 / 20e12, nbytes / 1e12)
    products = [s for s in result["spans"] if s["name"] == "mm"]
    seconds = [s["end_seconds"] - s["start_seconds"] for s in products]
    assert any(one == pytest.approx(expected, abs=2e-9) for one in seconds)


def test_memory_is_counted_by_where_it_was_allocated(result: dict[str, Any]) -> None:
    """AdamW's two states are twice the sharded parameters, in 512-byte blocks."""
    places = result["peak_bytes_by_place"]
    assert sum(places.values()) == result["peak_bytes"]
    numel = 2 * (12 * 256**2 + 4 * 256) + 2 * 1000 * 256 + 2 * 256
    assert places["sharded param"] == pytest.approx(numel * 4 / 8, rel=0.01)
    assert places["optimizer"] == pytest.approx(2 * numel * 4 / 8, rel=0.01)


def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(SPEC | {"link": 3})))
    assert main() == 2
    assert capsys.readouterr().err == "zeromon_virtual: spec.link: expected an object, found 3\n"


def test_the_engine_of_plan_and_whatif_exposes_what_fsdp2_exposes(result: dict[str, Any]) -> None:
    """Within 10 % of FSDP2's own code, unit by unit."""
    kernels = [s for s in result["spans"] if s["kind"] == "kernel" and s["stream"] == "compute"]
    gathers = [s for s in result["spans"] if s["phase"] == "backward"]
    begins = min(s["start_seconds"] for s in gathers)
    ends = max(s["end_seconds"] for s in gathers if s["name"] == "reduce_scatter")
    spent = [(s["start_seconds"], s["end_seconds"] - s["start_seconds"]) for s in kernels]
    layer, root = 4 * 256**2 + 2 * 1024 * 256 + 4 * 256, 2 * 1000 * 256 + 2 * 256
    numel = 2 * layer + root
    sizes = Sizes(
        numel=numel, trainable=numel, shard_numel=numel // 8, trainable_shard_numel=numel // 8,
        layer_numel=layer, root_numel=root,
    )  # fmt: skip
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, framework="fsdp2", ranks=8, precision=Precision.full()
    )
    rates = Rates(
        forward=sum(seconds for at, seconds in spent if at < begins),
        backward=sum(seconds for at, seconds in spent if begins <= at < ends),
        gather=20e9, reduce=20e9, between=20e9, latency=2e-5, hides=Hides.STREAMS,
    )  # fmt: skip
    truth: dict[str, float] = {}
    for row in result["exposed"]:
        if row["op"] != "all_reduce":  # of the gradient's norm
            truth[row["unit"]] = truth.get(row["unit"], 0.0) + row["seconds"]
    found = exposed(sizes, plan, rates)
    assert sum(found.values()) == pytest.approx(sum(truth.values()), rel=0.1)
