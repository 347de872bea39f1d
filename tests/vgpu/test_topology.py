"""Links of a machine of several nodes: each collective takes those that its ranks span."""

from __future__ import annotations

import re

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.programs.topology import SIZES

pytestmark = pytest.mark.vgpu

NVLINK, PCIE, NETWORK = (12e3, 360e9), (20e3, 40e9), (30e3, 45e9)
"""Latency in ns, bytes a second."""


def check_links(run: CudaRun, rank: int, links: dict[str, tuple[float, float]]) -> None:
    """Asserts that each collective of a rank took the link of *links*, by its name in SIZES."""
    found = {one.bytes: one for one in run.truth(rank).of("collective")}
    for name, (latency, speed) in links.items():
        one = found[SIZES[name] * 4 * (2 if name == "next" else 1)]
        bus_bytes = int(one.detail.get("bus_bytes", SIZES[name] * 4))
        assert one.end - one.transfer == pytest.approx(latency + bus_bytes / speed * 1e9, abs=2), name


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_collective_takes_the_network_only_across_nodes(cuda_run: CudaRunner, ranks: int) -> None:
    run = cuda_run("topology.py", ranks=ranks, nodes=2)
    assert len(re.findall("is right", run.output)) == ranks
    inside = {"world": NETWORK, "node": NVLINK, "across": NETWORK, "pair": NVLINK}
    for rank in range(ranks):
        check_links(run, rank, inside)
    for rank in range(1, ranks // 2 - 1):  # both neighbours are on its node
        check_links(run, rank, {"next": NVLINK})
    used = {int(mib) for mib in re.findall(r"(\d+) MiB used", run.output)}
    assert max(used) < 2 * 520  # one context a device: the nodes' devices are not the same


def test_devices_without_nvlink_between_them_take_pcie(cuda_run: CudaRunner) -> None:
    run = cuda_run("topology.py", ranks=4, changes={"nvlink_devices": 2})
    for rank in range(4):
        check_links(run, rank, {"world": PCIE, "node": PCIE, "pair": NVLINK})


def test_hsdp_gathers_within_a_node_and_reduces_across(cuda_run: CudaRunner) -> None:
    shape = ("--layers", "2", "--hidden", "64", "--steps", "3")
    run = cuda_run("train.py", "hsdp", *shape, ranks=4, nodes=2)
    seen = set()
    for one in run.truth(0).of("collective"):
        function = one.name.partition("_")[2].split("_")[0]
        if function not in ("AllGather", "ReduceScatter", "AllReduce") or one.detail["ranks"] != "2":
            continue
        latency, speed = NETWORK if function == "AllReduce" else NVLINK
        wanted = latency + int(one.detail["bus_bytes"]) / speed * 1e9
        assert one.end - one.transfer == pytest.approx(wanted, abs=2), one.name
        seen.add(function)
    assert seen == {"AllGather", "ReduceScatter", "AllReduce"}
