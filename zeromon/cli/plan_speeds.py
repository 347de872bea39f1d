"""The options of ``zeromon plan`` on speeds, and the machine that they describe."""

import argparse
import os
from dataclasses import replace

from zeromon.cli import say
from zeromon.cli.options import option
from zeromon.errors import PlanError
from zeromon.memory.devices import COMPUTE, device_named, link_peak
from zeromon.memory.plan import hosts_of, parse_size
from zeromon.memory.reconcile import micro_batch
from zeromon.memory.speeds import Machine, RunSpeeds, larger
from zeromon.probes.host_memory import capacity
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_bytes


def add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    option(
        group, "--interconnect", "SPEED",
        "of the slowest link between ranks, with all adapters of a host: 8x400Gb (bits), "
        "25GB/s, ib-ndr; needed for several hosts (default: that of the device of --gpu)",
        link_speed,
    )  # fmt: skip
    option(
        group, "--efficiency", "SHARE",
        f"share of the peak FLOP/s that compute reaches (default: {COMPUTE.likely})", share,
    )  # fmt: skip
    option(group, "--pcie", "SPEED", "between device and host: pcie4, 32GB/s", link_speed)
    option(
        group, "--host-bandwidth", "SPEED",
        "by which the optimizer reads and writes the memory of a host (default: 109GB/s)", link_speed,
    )  # fmt: skip
    option(group, "--nvme-bandwidth", "SPEED", "of all NVMe drives of a host: 6GB/s", link_speed)
    option(
        group, "--link", "FACTOR",
        "so many times the speed of the links between ranks: 2", times, 1.0,
    )  # fmt: skip
    group.add_argument(
        "--straggler", choices=("as-is", "median"), default="as-is",
        help="of --from RUN: median: the slowest rank computes as fast as the median one",
    )  # fmt: skip


def times(text: str) -> float:
    """Reads a factor above 0; ``2x`` is 2."""
    number = float(text.strip().lower().removesuffix("x"))
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def share(text: str) -> float:
    """Reads a share, from 0 to less than 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to less than 1, not {text}")
    return number


def machine_of(options: argparse.Namespace, devices: int) -> Machine:
    """The speeds of the devices that --gpu names, and of the links between them."""
    named = [device_named(text) for text in (options.gpu or "").split(",")]
    known = [device for device in named if device is not None]
    slowest = min(known, key=lambda d: d.half_flops) if len(known) == len(named) else None
    hosts = options.nodes or hosts_of(devices)
    within = slowest.link if slowest is not None else None
    link = options.interconnect
    if link is None and hosts == 1:
        link = within
    return Machine(
        device=slowest,
        efficiency=options.efficiency,
        link=link,
        within=within,
        pcie=options.pcie,
        host=options.host_bandwidth,
        nvme=options.nvme_bandwidth,
        ranks_per_host=-(-devices // hosts),
        link_times=options.link,
        late_ranks=options.straggler == "as-is",
    )


def calibrated(
    found: RunSpeeds | None, run: RunSnapshot, options: argparse.Namespace, hosts: int
) -> RunSpeeds | None:
    """Returns the speeds *found* in *run*, for another micro-batch, checkpointing, or more hosts."""
    if found is None:
        return None
    rank = next(rank for rank in run.ranks if rank.models)
    size, speeds = micro_batch(rank), found.speeds
    if options.micro_batch and not size:  # the compute of a sample is not known
        speeds = replace(speeds, forward_seconds=None, backward_seconds=None)
    elif options.micro_batch and size:
        speeds = larger(speeds, options.micro_batch / size)
    if options.checkpointing and not rank.models[0].get("recomputes"):
        speeds = replace(speeds, recompute_seconds=speeds.forward_seconds or 0.0)
    if hosts > found.hosts:
        speeds = replace(speeds, gather=None, reduce=None, all_reduce=None)  # over another link
    return replace(found, speeds=speeds)


def memory_size(option: str, text: str) -> int:
    """Returns the bytes of the *text* of *option*, and says how a number without a unit was read.

    Raises :class:`PlanError` for anything but a size.
    """
    nbytes = parse_size(text)
    if not text.strip()[-1].isalpha() and not text.strip()[:1].isalpha():
        say(f"{option} {text} is read as {human_bytes(nbytes)}")
    return nbytes


def link_speed(text: str) -> float:
    """Returns the bytes/s of --interconnect and its like."""
    try:
        return link_peak(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(f"{error}. {error.hint}") from error


def host_memory(text: str | None) -> int | None:
    """Returns the bytes of --host-memory; "here" is the memory of this machine."""
    if text is None:
        return None
    nbytes = capacity(os.getpid()) if text == "here" else memory_size("--host-memory", text)
    if nbytes < 0:
        raise PlanError("the memory size of this machine is unknown", "Give --host-memory 512GiB.")
    return nbytes
