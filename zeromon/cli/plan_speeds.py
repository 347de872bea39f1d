"""The options of ``zeromon plan`` on speeds, and the machine that they describe."""

import argparse
import os
from dataclasses import replace

from zeromon.base.errors import PlanError
from zeromon.base.units import human_bytes
from zeromon.cli import tell_user
from zeromon.cli.options import add_option
from zeromon.memory.devices import COMPUTE, find_named_device, parse_link_peak
from zeromon.memory.plan import hosts_of, parse_size
from zeromon.memory.reconcile import micro_batch_of_rank
from zeromon.memory.speeds import Machine, RunSpeeds, with_larger_batch
from zeromon.probes.host_memory import memory_capacity
from zeromon.snapshot import RunSnapshot


def add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    add_option(
        group, "--interconnect", "SPEED",
        "slowest link between ranks, all adapters of a host: 8x400Gb (bits), 25GB/s, ib-ndr; "
        "required for several hosts (default: that of --gpu)",
        link_speed,
    )  # fmt: skip
    add_option(
        group, "--efficiency", "SHARE",
        f"share of the peak FLOP/s that compute reaches (default: {COMPUTE.likely})", parse_share,
    )  # fmt: skip
    add_option(group, "--pcie", "SPEED", "between device and host: pcie4, 32GB/s", link_speed)
    add_option(
        group, "--host-bandwidth", "SPEED",
        "host memory bandwidth available to the optimizer (default: 109GB/s)", link_speed,
    )  # fmt: skip
    add_option(
        group, "--nvme-bandwidth", "SPEED", "of all NVMe drives of a host: 6GB/s", link_speed
    )
    add_option(
        group, "--link", "FACTOR",
        "multiply the speed of links between ranks by FACTOR", parse_factor, 1.0,
    )  # fmt: skip
    group.add_argument(
        "--straggler", choices=("as-is", "median"), default="as-is",
        help="with --from RUN; median: assume the slowest rank computes as fast as the median rank",
    )  # fmt: skip


def parse_factor(typed: str) -> float:
    """Reads a factor above 0; ``2x`` is 2."""
    number = float(typed.strip().lower().removesuffix("x"))
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, not {typed}")
    return number


def parse_share(typed: str) -> float:
    """Reads a share, from 0 to less than 1."""
    number = float(typed)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to less than 1, not {typed}")
    return number


def machine_of_options(options: argparse.Namespace, devices: int) -> Machine:
    """The speeds of the devices that --gpu names, and of the links between them."""
    named = [find_named_device(name) for name in (options.gpu or "").split(",")]
    specs = [device for device in named if device is not None]
    slowest = min(specs, key=lambda d: d.half_flops) if len(specs) == len(named) else None
    hosts = options.nodes or hosts_of(devices)
    host_link = slowest.link if slowest is not None else None
    link = options.interconnect
    if link is None and hosts == 1:
        link = host_link
    return Machine(
        device=slowest,
        efficiency=options.efficiency,
        link=link,
        within=host_link,
        pcie=options.pcie,
        host=options.host_bandwidth,
        nvme=options.nvme_bandwidth,
        ranks_per_host=-(-devices // hosts),
        link_times=options.link,
        late_ranks=options.straggler == "as-is",
    )


def calibrate_speeds(
    measured: RunSpeeds | None, run: RunSnapshot, options: argparse.Namespace, hosts: int
) -> RunSpeeds | None:
    """Returns the speeds *measured* in *run*, for another micro-batch, checkpointing, or more hosts."""
    if measured is None:
        return None
    rank = next(rank for rank in run.ranks if rank.models)
    size, speeds = micro_batch_of_rank(rank), measured.speeds
    if options.micro_batch and not size:  # the compute of a sample is not known
        speeds = replace(speeds, forward_seconds=None, backward_seconds=None)
    elif options.micro_batch and size:
        speeds = with_larger_batch(speeds, options.micro_batch / size)
    if options.checkpointing and not rank.models[0].get("recomputes"):
        speeds = replace(speeds, recompute_seconds=speeds.forward_seconds or 0.0)
    if hosts > measured.hosts:
        speeds = replace(speeds, gather=None, reduce=None, all_reduce=None)  # over another link
    return replace(measured, speeds=speeds)


def parse_memory_size(option: str, size: str) -> int:
    """Returns the bytes of the *size* of *option*, and says how a number without a unit was read.

    Raises :class:`PlanError` for anything but a size.
    """
    nbytes = parse_size(size)
    if not size.strip()[-1].isalpha() and not size.strip()[:1].isalpha():
        tell_user(f"{option} {size} is read as {human_bytes(nbytes)}")
    return nbytes


def link_speed(speed: str) -> float:
    """Returns the bytes/s of --interconnect and its like."""
    try:
        return parse_link_peak(speed)
    except PlanError as error:
        raise argparse.ArgumentTypeError(f"{error}. {error.hint}") from error


def parse_host_memory(size: str | None) -> int | None:
    """Returns the bytes of --host-memory; "here" is the memory of this machine."""
    if size is None:
        return None
    nbytes = (
        memory_capacity(os.getpid()) if size == "here" else parse_memory_size("--host-memory", size)
    )
    if nbytes < 0:
        raise PlanError("the memory size of this machine is unknown", "Give --host-memory 512GiB.")
    return nbytes
