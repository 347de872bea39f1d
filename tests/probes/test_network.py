"""Network adapters, as sysfs lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromon.probes.network import network_peak_bandwidth


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_infiniband_counts_its_active_ports(tmp_path: Path) -> None:
    for card in range(3):
        state = "4: ACTIVE\n" if card < 2 else "1: DOWN\n"
        ports = tmp_path / "infiniband" / f"mlx5_{card}" / "ports" / "1"
        write(ports, state=state, rate="400 Gb/sec (4X NDR)\n")
    write(tmp_path / "net" / "eth0", speed="1000\n", operstate="up\n", device="")
    assert network_peak_bandwidth(tmp_path) == (2 * 50e9, "2 InfiniBand ports")


def test_ethernet_counts_where_there_is_hardware(tmp_path: Path) -> None:
    write(tmp_path / "net" / "lo", speed="", operstate="unknown\n")
    write(tmp_path / "net" / "docker0", speed="10000\n", operstate="up\n")
    write(tmp_path / "net" / "eth0", speed="25000\n", operstate="up\n", device="")
    write(tmp_path / "net" / "eth1", speed="-1\n", operstate="up\n", device="")
    write(tmp_path / "net" / "eth2", speed="25000\n", operstate="down\n", device="")
    assert network_peak_bandwidth(tmp_path) == (25e9 / 8, "Ethernet")


@pytest.mark.parametrize("text", ["", "fast\n", "400\n", "400 furlongs\n"])
def test_what_says_nothing_is_unknown(tmp_path: Path, text: str) -> None:
    write(tmp_path / "infiniband" / "x" / "ports" / "1", state="4: ACTIVE\n", rate=text)
    assert network_peak_bandwidth(tmp_path) == (None, "")
    assert network_peak_bandwidth(tmp_path / "absent") == (None, "")
