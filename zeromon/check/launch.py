"""The launch command, read together with the files: what it sets, overrides and ignores.

Sources: ``launch_command_parser`` and ``_validate_launch_command`` of accelerate (an option of the
command wins over the file; without ``--config_file`` only the user's default file is read), the options
of ``torch.distributed.run`` and of ``deepspeed.launcher.runner``.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, kind_of
from zeromon.check.problem import Config, Machine, Path, Problem, schema, whole

COMMAND = "the command"
"""Stands for a file where a figure comes from the launch command."""

_FILE = "command"
"""The file of a problem of the command."""

_FLAGS = {
    "accelerate": {
        "quiet", "q", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph",
        "dynamo_use_dynamic", "dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp",
        "use_parallelism_config", "use_megatron_lm", "same_network", "module", "no_python", "m",
        "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16", "debug",
    },
    "torchrun": {"standalone", "no_python", "run_path", "module", "m"},
    "deepspeed": {
        "force_multi", "save_pid", "enable_each_rank_log", "no_python", "no_local_rank", "module",
        "elastic_training", "no_ssh", "no_ssh_check", "bind_cores_to_rank",
    },
}  # fmt: skip
"""Launcher -> its options without a value."""

_SHORT = {"nproc": "nproc_per_node", "H": "hostfile", "i": "include", "e": "exclude"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A launch command: the launcher with its options, the script with its arguments."""

    launcher: str
    """``accelerate``, ``torchrun``, ``deepspeed``, or "" for another program."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Name with underscores -> value; True for an option without one."""
    script: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    """Name of an option or argument -> its column in the command."""
    file: str = _FILE
    line: int = 1

    def problem(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at the option or argument *name*."""
        place = self.line, self.places.get(name, 1)
        return Problem(self.file, *place, code, severity, message, fix, name)

    @property
    def ranks(self) -> int | None:
        """Number of ranks; None where the command does not say."""
        given = self.options.get
        if self.launcher == "accelerate":
            return whole(given("num_processes"))
        if self.launcher == "torchrun":
            each, nodes = whole(given("nproc_per_node", 1)), whole(given("nnodes", 1))
            return each * nodes if each and nodes else None
        if self.launcher == "deepspeed":
            each, nodes = whole(given("num_gpus")), whole(given("num_nodes", 1))
            return each * nodes if each and nodes else None
        return None


def read_command(words: Sequence[str]) -> Command:
    """Returns the launch command in *words*; what stands before the launcher is left out."""
    launcher, at = _launcher(words)
    if not launcher:
        at = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    columns = [1 + sum(len(word) + 1 for word in words[:n]) for n in range(len(words))]
    places: dict[str, int] = {}
    options, stop = _options(words, at, _FLAGS.get(launcher, set()), places, columns, own=True)
    script = words[stop] if stop < len(words) else ""
    arguments, _ = _options(words, stop + 1, set(), places, columns, own=False)
    return Command(
        launcher=launcher, options=options, script=script, arguments=arguments, places=places
    )


def is_launch(words: Sequence[str]) -> bool:
    """Returns whether *words* are a command of a launcher with a script or a module."""
    launcher, at = _launcher(words)
    return bool(launcher) and at < len(words)


def _launcher(words: Sequence[str]) -> tuple[str, int]:
    """Returns the launcher, and where its options begin."""
    for n, word in enumerate(words):
        name, following = PurePath(word).name, [*words[n + 1 : n + 2], ""][0]
        if name == "accelerate" and following == "launch":
            return "accelerate", n + 2
        if name in ("torchrun", "deepspeed"):
            return name, n + 1
        module = following if word == "-m" else ""
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return "torchrun", n + 2
        if module == "accelerate.commands.launch":
            return "accelerate", n + 2
    return "", 0


def _options(
    words: Sequence[str],
    at: int,
    flags: set[str],
    places: dict[str, int],
    columns: Sequence[int],
    *,
    own: bool,
) -> tuple[dict[str, Any], int]:
    """Returns the options from *at* on, and where they end; *own*: at the first word of another kind."""
    found: dict[str, Any] = {}
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or word == "-":
            if own:
                break
            at += 1
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("-", "_")
        places.setdefault(name, columns[at])
        at += 1
        if equals:
            found[name] = _value(value)
        elif name in flags or at == len(words) or words[at].startswith("--"):
            found[name] = True
        else:
            found[name] = _value(words[at])
            at += 1
    return found, at


def _value(text: str) -> Any:
    """Returns a number or truth value for the text of one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (int, float)) else text


# ---- the accelerate file ---------------------------------------------------------------------------


def _path(name: str) -> Path | None:
    """Returns where the accelerate file has what the option *name* sets; None where it has nothing."""
    known = schema()["accelerate"]
    if name.startswith("fsdp_"):
        return FSDP, name
    if name in known[DEEPSPEED] or name in ("gradient_accumulation_steps", "gradient_clipping"):
        return DEEPSPEED, name
    return (name,) if name in known["top"] else None


def effective(command: Command, file: Config | None) -> Config | None:
    """Returns *file* as the command changes it, or what the command sets without one.

    None where another launcher reads neither.
    """
    if command.launcher != "accelerate":
        return file
    data: dict[str, Any] = dict(file.data) if file is not None else {}
    kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
    for option, kind in kinds.items():
        if command.options.get(option):
            data["distributed_type"] = kind
    data.setdefault("distributed_type", "MULTI_GPU")
    origins, places = {}, {}
    for name, value in command.options.items():
        path = _path(name)
        if path is None or name == "config_file":
            continue
        origins[path[-1]] = COMMAND
        places[path] = 1, command.places[name]
        if len(path) == 1:
            data[name] = value
        else:
            part = data.get(path[0])
            data[path[0]] = {**(part if isinstance(part, Mapping) else {}), name: value}
    if file is None:
        return Config(file=_FILE, origins=origins, data=data, places=places, dialect="yaml")
    return replace(file, data=data, origins=origins)


def overrides(command: Command, file: Config) -> Iterator[Problem]:
    """Yields options that replace a setting of *file*, and the file where nothing reads it."""
    if command.launcher != "accelerate":
        who = command.launcher or "this command"
        message = f"{who} does not read {file.file}"
        fix = f"accelerate launch --config_file {file.file}"
        yield command.problem("ZM106", "warning", "", message, fix)
        return
    if "config_file" not in command.options:
        message = f"without --config_file accelerate launch does not read {file.file}"
        fix = f"--config_file {file.file}"
        yield command.problem("ZM106", "warning", "", message, fix)
    for name, value in command.options.items():
        path = _path(name)
        theirs = file.get(*path) if path is not None else None
        if path is None or theirs is None or str(theirs).lower() == str(value).lower():
            continue
        if name == "machine_rank" or "$" in str(value):  # another on each machine; of the shell
            continue
        code = "ZM602" if name in ("num_processes", "gradient_accumulation_steps") else "ZM105"
        message = f"{name} is {value} here and {theirs} in {file.file}: the command wins"
        fix = f"remove --{name}, or {file.write(name, value)} there"
        yield command.problem(code, "warning", name, message, fix)


def without_effect(command: Command, launch: Config) -> Iterator[Problem]:
    """Yields options of DeepSpeed or FSDP where accelerate starts neither."""
    if command.launcher != "accelerate":
        return
    kind = kind_of(launch)
    for name in command.options:
        path = _path(name)
        part = path[0] if path is not None and len(path) > 1 else ""
        needs = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}.get(part, kind)
        if needs != kind and not (needs == "DEEPSPEED" and name.startswith("gradient_")):
            message = f"{name} has no effect: accelerate starts {kind}"
            fix = f"--use_{needs.lower()}"
            yield command.problem("ZM106", "warning", name, message, fix)


def processes(command: Command) -> Iterator[Problem]:
    """Yields a launcher that starts one rank where nobody says so."""
    if command.launcher == "torchrun" and "nproc_per_node" not in command.options:
        message = "torchrun starts one rank a node without --nproc-per-node"
        yield command.problem("ZM602", "warning", "", message, "--nproc-per-node 8, or gpu")


# ---- A launch file ------------------------------------------------------------------------------

SUFFIXES = (".txt", ".sh")

_OF_FAMILY = {
    "p3": "v100", "p3dn": "v100", "g4dn": "t4", "g5": "a10", "g6": "l4", "g6e": "l40s", "p4d": "a100",
    "p4de": "a100", "p5": "h100", "p5e": "h200", "p5en": "h200",
}  # fmt: skip
"""Family of instances of AWS -> the device, as ``--gpu`` takes it."""

_EIGHT = ("p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge",
          "p5e.48xlarge", "p5en.48xlarge")  # fmt: skip
"""Instances with eight devices."""

_INSTANCE = re.compile(r"\b([a-z]\d+[a-z]*)\.(?:\d*xlarge|metal)\b")
_DEVICE = re.compile(r"\b(v100|t4|a100|h100|h200|b200|l4|l40s|a10|mi300x)(?:-\w+|g)?\b")


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of a launch file; a field is None or "" where it sets nothing, or several things."""

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
