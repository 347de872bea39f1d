"""What torch sees of the virtual device: its clock, streams, copies, memory and captures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import Node

from vgpu.conftest import runner_of
from vgpu.environment import CUDA_12, DEFAULT

pytestmark = [pytest.mark.vgpu, pytest.mark.short]


@pytest.fixture(scope="module", params=[DEFAULT, CUDA_12])
def facts(
    request: pytest.FixtureRequest, shared_node: Node, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    run = runner_of(request.param, shared_node, tmp_path_factory.mktemp("device"))
    output = run("device.py", ranks=1).output
    line = next(line for line in output.splitlines() if line.startswith("facts "))
    found: dict[str, Any] = json.loads(line.removeprefix("facts "))
    return found


def test_it_is_an_h100(facts: dict[str, Any]) -> None:
    assert (facts["name"], facts["capability"], facts["sms"]) == ("NVIDIA H100 80GB HBM3", [9, 0], 132)


def test_a_sleep_lasts_as_long_as_it_says(facts: dict[str, Any]) -> None:
    for wanted, measured in facts["sleeps"]["sleeps"]:
        assert measured == pytest.approx(wanted, rel=1e-5)


def test_the_host_runs_ahead(facts: dict[str, Any]) -> None:
    assert facts["runs_ahead"] == {"early": False, "late": True}


def test_streams_overlap_unless_one_waits(facts: dict[str, Any]) -> None:
    assert 100 <= facts["streams"]["overlapped"] < 200 <= facts["streams"]["in turn"]


def test_copies_take_their_link_and_move_their_bytes(facts: dict[str, Any]) -> None:
    copies = facts["copies"]
    assert copies["right"]
    assert copies["pinned"] >= (64 << 20) / 54e9 * 1e3
    assert copies["pageable"] >= (64 << 20) / 10e9 * 1e3


def test_memory_ends_where_the_device_does(facts: dict[str, Any]) -> None:
    memory = facts["memory"]
    assert memory["total"] == 80 << 30 and memory["taken"] == 1 << 30
    assert memory["context"] == 520 << 20 and memory["given back"] >= 0
    assert memory["oom"].startswith("OutOfMemoryError: CUDA out of memory.") and memory["ooms"] == 1


def test_a_graph_is_replayed_and_a_query_breaks_a_capture(facts: dict[str, Any]) -> None:
    assert facts["graphs"]["replay"] >= 5
    assert "capture" in facts["graphs"]["violation"]
    assert facts["graphs"]["beside"] == ""


def test_products_on_two_streams_share_the_device(facts: dict[str, Any]) -> None:
    alone, two = facts["contention"]["alone"], facts["contention"]["beside another"]
    assert two == pytest.approx(2 * alone, rel=0.05)


def test_a_full_launch_queue_blocks_the_host(facts: dict[str, Any]) -> None:
    assert facts["queue"]["blocked"]


def test_what_has_no_model_is_an_error(facts: dict[str, Any]) -> None:
    assert "cuFFT error: CUFFT_NOT_SUPPORTED" in facts["refusals"]["fft"]


def test_a_child_of_fork_may_not_use_the_device(facts: dict[str, Any]) -> None:
    assert "re-initialize CUDA in forked subprocess" in facts["fork"]["in child"]
    assert facts["fork"]["in parent"] > 0
