"""Sizes of memory and speeds of links on the command line, read alike by every verb."""

import argparse
import os

from zeromon.cli import say
from zeromon.errors import PlanError
from zeromon.memory.devices import link_peak
from zeromon.memory.plan import parse_size
from zeromon.probes.host_memory import capacity
from zeromon.units import human_bytes


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
