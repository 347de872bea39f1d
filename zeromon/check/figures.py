"""Each figure of a launch once: what wins, and what says otherwise. Pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, kind_of
from zeromon.check.deepspeed.settings import ZERO
from zeromon.check.launch import COMMAND, Command
from zeromon.check.problem import AUTO, Config, Path, is_on, whole
from zeromon.check.scripts import Call, Script, Unknown, is_arguments

Said = tuple[Any, str]
"""A value, and the file that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a launch."""

    name: str
    value: Any
    source: str
    """The file, or ``command``."""
    others: tuple[Said, ...] = ()
    """Other values that lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """All that a launch is made of."""

    command: Command
    launch: Config | None
    """The accelerate file as the command changes it."""
    file: Config | None
    """The accelerate file as it is."""
    deepspeed: Config | None
    scripts: tuple[Script, ...]


_OFFLOAD = {"optimizer": "offload_optimizer", "parameters": "offload_param"}


def figures(s: Sources) -> list[Figure]:
    """Returns the known figures; DeepSpeed's own file wins over accelerate's section and the script."""
    found = []
    for name, said in (
        ("ranks", _ranks(s)),
        ("micro-batch", [*_of(s, "train_micro_batch_size_per_gpu"),
                         *_arguments(s, "per_device_train_batch_size")]),
        ("accumulation", [*_of(s, "gradient_accumulation_steps"),
                          *_arguments(s, "gradient_accumulation_steps")]),
        ("precision", precisions(s)),
        ("clipping", [*_of(s, "gradient_clipping"), *_arguments(s, "max_grad_norm")]),
        ("ZeRO stage", _of(s, ZERO, "stage", option="zero_stage")),
        *((f"offload of {what}", _of(s, ZERO, key, "device", option=f"{key}_device"))
          for what, key in _OFFLOAD.items()),
        ("FSDP offload", _section(s, (FSDP, "fsdp_offload_params"))),
    ):  # fmt: skip
        known = [(v, where) for v, where in said if v not in (None, AUTO, "none")]
        if known:
            value, source = known[0]
            others = dict.fromkeys((v, w) for v, w in known[1:] if v != value)
            found.append(Figure(name=name, value=value, source=source, others=tuple(others)))
    by_name = {figure.name: whole(figure.value) for figure in found}
    parts = [by_name.get(name) for name in ("micro-batch", "accumulation", "ranks")]
    if all(parts):
        value = math.prod(part for part in parts if part)
        made = " x ".join(map(str, parts))
        found.append(Figure(name="whole batch", value=value, source=made))
    return found


def _ranks(s: Sources) -> Iterator[Said]:
    if s.command.ranks:
        yield s.command.ranks, COMMAND
    if s.file is not None:
        yield whole(s.file.get("num_processes")), s.file.file


def _of(s: Sources, *path: str, option: str = "") -> list[Said]:
    """Returns a setting of the DeepSpeed file, else of accelerate's section for DeepSpeed."""
    found: list[Said] = []
    if s.deepspeed is not None:
        found.append((s.deepspeed.get(*path), s.deepspeed.file))
    return [*found, *_section(s, (DEEPSPEED, option or path[-1]))]


def _section(s: Sources, path: Path) -> Iterator[Said]:
    """Yields a setting of the accelerate file, as the command changes it and as it is."""
    kinds = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}
    for config in (s.launch, s.file):
        if config is not None and kind_of(config) == kinds.get(path[0], kind_of(config)):
            yield config.get(*path), config.where(path[-1])


def _calls(s: Sources) -> Iterator[tuple[Script, Call]]:
    for script in s.scripts:
        for call in script.calls:
            if is_arguments(call) or call.short == "Accelerator":
                yield script, call


def _arguments(s: Sources, name: str) -> Iterator[Said]:
    """Yields an argument of the script: on the command line, then in its text."""
    if name in s.command.arguments:
        yield s.command.arguments[name], COMMAND
    for script, call in _calls(s):
        value = script.value(script.argument(call, name))
        if not isinstance(value, Unknown):
            yield value, script.file


def precisions(s: Sources) -> Iterator[Said]:
    """Yields the precision; the script's own wins over that of the launch file."""
    if s.deepspeed is not None:
        for name in ("bf16", "fp16"):
            if is_on(s.deepspeed.get(name, "enabled")) is True:
                yield name, s.deepspeed.file
    for name in ("bf16", "fp16"):
        if s.command.arguments.get(name) is True:
            yield name, COMMAND
    for script, call in _calls(s):
        said = script.value(script.argument(call, "mixed_precision"))
        if isinstance(said, str):
            yield said, script.file
        for name in ("bf16", "fp16"):
            if script.value(script.argument(call, name)) is True:
                yield name, script.file
    yield from _section(s, ("mixed_precision",))


def as_lines(found: Iterable[Figure]) -> list[str]:
    """Returns the figures as text, one a line."""
    rows = [
        (f.name, str(f.value), f.source + "".join(f"; {v} in {w}" for v, w in f.others))
        for f in found
    ]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(2)]
    return [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
