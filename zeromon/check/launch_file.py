"""A launch file: one launch command, and comments that may name the machine that it runs on."""

import re
import shlex
from dataclasses import dataclass, replace

from zeromon.check.launch import Command, is_launch, read_command
from zeromon.check.problem import Machine

SUFFIXES = (".txt", ".sh")

_OF_FAMILY = {
    "p3": "v100", "p3dn": "v100", "g4dn": "t4", "g5": "a10", "g6": "l4", "g6e": "l40s", "p4d": "a100",
    "p4de": "a100", "p5": "h100", "p5e": "h200", "p5en": "h200",
}  # fmt: skip
"""Family of instances of AWS -> the device, as ``--memory`` takes it."""

_EIGHT = ("p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge",
          "p5e.48xlarge", "p5en.48xlarge")  # fmt: skip
"""Instances with eight devices."""

_INSTANCE = re.compile(r"\b([a-z]\d+[a-z]*)\.(?:\d*xlarge|metal)\b")
_DEVICE = re.compile(r"\b(v100|t4|a100|h100|h200|b200|l4|l40s|a10|mi300x)(?:-\w+|g)?\b")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch file says; a field is None or "" where it says nothing, or several things."""

    command: Command | None
    device: str
    devices_per_host: int | None

    def on(self, machine: Machine) -> Machine:
        """Returns *machine* with what the file adds to it."""
        per_host = machine.devices_per_host or self.devices_per_host
        return replace(machine, device=machine.device or self.device, devices_per_host=per_host)


def read_launch(text: str, file: str) -> Launch:
    """Returns the command and the machine of a launch file."""
    commands, comments, at = [], [], 1
    for line in re.sub(r"\\\n", "\\\\ ", text).splitlines():
        plain, _, comment = line.partition("#") if line.lstrip().startswith("#") else (line, "", "")
        comments.append(comment.lower())
        words = _words(plain)
        if is_launch(words):
            commands.append(replace(read_command(words), file=file, line=at))
        at += 1 + line.count("\\ ")
    said = "\n".join(comments)
    families = [_OF_FAMILY.get(name, "?") for name in _INSTANCE.findall(said)]
    devices = {*families, *_DEVICE.findall(_INSTANCE.sub("", said))}
    instances = {found.group() for found in _INSTANCE.finditer(said)}
    full = len(instances) == 1 and instances < set(_EIGHT)
    return Launch(
        command=commands[0] if len(commands) == 1 else None,
        device=next(iter(devices)) if len(devices) == 1 and "?" not in devices else "",
        devices_per_host=8 if full else None,
    )


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("\\ ", " "), comments=True)
    except ValueError:  # an open quotation
        return []
