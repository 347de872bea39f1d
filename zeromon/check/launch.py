"""The launch command, read together with the files: what it sets, overrides and ignores.

Sources: ``launch_command_parser`` and ``_validate_launch_command`` of accelerate (an option of the
command wins over the file; without ``--config_file`` only the user's default file is read), the options
of ``torch.distributed.run`` and of ``deepspeed.launcher.runner``.
"""

import ast
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, kind_of
from zeromon.check.problem import (
    ENVIRONMENT_DIALECT,
    NAMES,
    Config,
    Machine,
    Path,
    Problem,
    load_schema,
    without_effect,
)
from zeromon.memory.config_files import is_on, parse_whole

COMMAND = "the command"
"""Stands for a file where a figure comes from the launch command."""


@dataclass(frozen=True, slots=True)
class Variable:
    """The value of an environment variable, and where it is set."""

    value: Any
    line: int
    column: int


ENVIRONMENT = "the environment"
"""Stands for a file where a figure comes from an environment variable."""

_FILE = "command"
"""The file of a problem of the command."""

_FLAGS: Mapping[str, Sequence[str]] = NAMES["launchers"]["flags"]
"""Launcher -> its options without a value."""

_SHORT = {"nproc": "nproc_per_node", "H": "hostfile", "i": "include", "e": "exclude"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A launch command: the launcher with its options, the script with its arguments."""

    launcher: str
    """``accelerate``, ``torchrun``, ``deepspeed``, a trainer of its own, or "" for another program."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Name with underscores -> value; True for an option without one."""
    script: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    """Name of an option or argument -> its column in the command."""
    file: str = _FILE
    line: int = 1
    positionals: tuple[str, ...] = ()
    """Arguments of the script without a name, such as the YAML of a trainer."""
    environment: Mapping[str, Variable] = field(default_factory=dict)
    launch_text: str = ""
    """All that the command and its file say."""

    def problem(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at the option or argument *name*."""
        position = self.line, self.places.get(name, 1)
        if name in self.environment:
            position = self.environment[name].line, self.environment[name].column
        return Problem(self.file, *position, code, severity, message, fix, name)

    @property
    def ranks(self) -> int | None:
        """Number of ranks; None where the command does not say."""
        option = self.options.get
        if self.launcher == "accelerate":
            return parse_whole(option("num_processes"))
        per_node, nodes = option("nproc_per_node", 1), option("nnodes", 1)
        if self.launcher == "deepspeed":
            per_node, nodes = option("num_gpus"), option("num_nodes", 1)
        elif self.launcher == "llamafactory-cli":  # launch() in llamafactory/launcher.py
            variables = {name: variable.value for name, variable in self.environment.items()}
            visible = str(variables.get("CUDA_VISIBLE_DEVICES", "$"))
            devices = None if "$" in visible else len(visible.split(","))
            per_node, nodes = variables.get("NPROC_PER_NODE", devices), variables.get("NNODES", 1)
        elif self.launcher not in ("torchrun", "tune"):
            return None
        counts = parse_whole(per_node), parse_whole(nodes)
        return counts[0] * counts[1] if counts[0] and counts[1] else None


def read_command(argv: Sequence[str]) -> Command:
    """Returns the launch command in *argv*; what stands before the launcher is left out."""
    launcher, at = _find_launcher(argv)
    if not launcher:
        scripts = (n for n, token in enumerate(argv) if token.endswith(".py"))
        at = next(scripts, argv.index("-m") + 1 if "-m" in argv[:-1] else len(argv))
    columns = _token_columns(argv)
    positions: dict[str, int] = {}
    options: dict[str, Any] = {}
    stop = at - 1 if argv[at : at + 1] == [] or argv[at].startswith("-") else at
    if launcher not in _TRAINERS:
        flags = _FLAGS["torchrun" if launcher == "tune" else launcher] if launcher else set()
        options, stop = _options_at(argv, at, flags, positions, columns)
    script = argv[stop] if stop < len(argv) else ""
    positionals: list[str] = [script] if launcher in _TRAINERS and stop == at else []
    arguments, _ = _options_at(argv, stop + 1, set(), positions, columns, positionals)
    command = Command(
        launcher=launcher, options=options, script=script, arguments=arguments, places=positions,
        positionals=tuple(positionals), launch_text=" ".join(argv),
        environment=_read_variables(argv[:at], columns),
    )  # fmt: skip
    return _as_accelerate(command) if launcher in _TRAINERS else command


_TRAINERS = {"llamafactory-cli": ("train",), "lmf": ("train",), "axolotl": ("train",),
             "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo")}  # fmt: skip
"""Programs that start the training themselves -> their commands that do."""

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def _read_variables(
    argv: Sequence[str], columns: Sequence[int], line_number: int = 1
) -> dict[str, Variable]:
    """Returns the environment variables that ``NAME=value`` in *argv* set."""
    pairs = [(_VARIABLE.fullmatch(token), column) for token, column in zip(argv, columns, strict=False)]
    return {m[1]: Variable(_literal_value(m[2]), line_number, column) for m, column in pairs if m}


def _as_accelerate(command: Command) -> Command:
    """Returns the command of accelerate that axolotl and TRL start.

    Sources: ``resolve_accelerate_config_argument`` in ``trl/cli/accelerate_config.py``, which passes on
    what the trainer's parser does not know; ``launch_training`` in ``axolotl/cli/utils/train.py``.
    """
    if command.launcher in ("llamafactory-cli", "lmf"):
        return replace(command, launcher="llamafactory-cli")
    schema, renamed = load_schema(), {"accelerate_config": "config_file"}
    of_launcher = {*schema["accelerate"]["options"], "accelerate_config"}
    of_launcher -= {*schema["transformers"]["arguments"]}
    launcher = str(command.arguments.get("launcher", "accelerate"))
    if launcher == "torchrun":
        of_launcher = {"nproc_per_node", "nnodes", "standalone"}
    options = {renamed.get(k, k): v for k, v in command.arguments.items() if k in of_launcher}
    positions = {renamed.get(name, name): column for name, column in command.places.items()}
    launcher = "" if launcher == "python" else launcher
    return replace(command, launcher=launcher, options=options, places=positions)


def _token_columns(argv: Sequence[str]) -> list[int]:
    return [1 + sum(len(token) + 1 for token in argv[:n]) for n in range(len(argv))]


def _runs_script(argv: Sequence[str]) -> bool:
    """Returns whether *argv* start one process of Python, without a launcher."""
    program = next((token for token in argv if not _VARIABLE.fullmatch(token)), "")
    return PurePath(program).name.startswith("python") and any(t.endswith(".py") for t in argv)


def is_launch_command(argv: Sequence[str]) -> bool:
    """Returns whether *argv* are a command of a launcher with a script or a module."""
    launcher, at = _find_launcher(argv)
    return bool(launcher) and at < len(argv)


def _find_launcher(argv: Sequence[str]) -> tuple[str, int]:
    """Returns the launcher, and where its options begin."""
    for n, token in enumerate(argv):
        name, next_token = PurePath(token).name, [*argv[n + 1 : n + 2], ""][0]
        if name == "accelerate" and next_token == "launch":
            return "accelerate", n + 2
        if name in ("torchrun", "deepspeed"):
            return name, n + 1
        if next_token in _TRAINERS.get(name, ()) or (name, next_token) == ("tune", "run"):
            return name, n + 2
        module = next_token if token == "-m" else ""
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return "torchrun", n + 2
        if module == "accelerate.commands.launch":
            return "accelerate", n + 2
    return "", 0


def _options_at(
    argv: Sequence[str],
    at: int,
    flags: Collection[str],
    positions: dict[str, int],
    columns: Sequence[int],
    positionals: list[str] | None = None,
) -> tuple[dict[str, Any], int]:
    """Returns the options from *at* on, and where they end: by default at the first other word.

    Other words are added to *positionals*, if given; ``name=value`` is an option of Hydra's kind.
    """
    options: dict[str, Any] = {}
    while at < len(argv):
        token = argv[at]
        if not token.startswith("-") or token in ("-", "--"):
            if positionals is None:
                break
            if pair := re.fullmatch(r"([\w.]+)=(.*)", token):
                positions.setdefault(pair[1], columns[at])
                options[pair[1]] = _literal_value(pair[2])
            positionals += [] if pair or token == "--" else [token]
            at += 1
            continue
        name, options_value, after = _option_at(argv, at, flags)
        positions.setdefault(name, columns[at])
        options[name], at = options_value, after
    return options, at


def _option_at(argv: Sequence[str], at: int, flags: Collection[str]) -> tuple[str, Any, int]:
    """Returns the name and the value of the option at *at*, and where the next word is."""
    name, equals, value = argv[at].lstrip("-").partition("=")
    name = _SHORT.get(name, name).replace("-", "_")
    if equals:
        return name, _literal_value(value), at + 1
    # One dash alone may begin a negative number, which is a value
    if name in flags or at + 1 == len(argv) or argv[at + 1].startswith("--"):
        return name, True, at + 1
    return name, _literal_value(argv[at + 1]), at + 2


_OF_PLACES: Mapping[str, Sequence[str]] = NAMES["launchers"]["places"]
"""Launcher -> its options for how many processes run, and where."""
_PROCESSES = {
    "accelerate": ("--num_machines=1", "--num_processes={}"),
    "torchrun": ("--standalone", "--nproc-per-node={}"),
    "deepspeed": ("--hostfile=", "--num_gpus={}"),
}


def on_one_machine(argv: Sequence[str], processes: int) -> list[str]:
    """Returns the command with so many processes, all on this machine; of another program, as it is."""
    launcher, at = _find_launcher(argv)
    if launcher not in _OF_PLACES:
        return list(argv)
    local_argv = [*argv[:at], *(option.format(processes) for option in _PROCESSES[launcher])]
    while at < len(argv) and argv[at].startswith("-"):
        name, _, after = _option_at(argv, at, _FLAGS[launcher])
        if name not in _OF_PLACES[launcher]:
            local_argv += argv[at:after]
        at = after
    return [*local_argv, *argv[at:]]


def _literal_value(token: str) -> Any:
    """Returns a number or truth value for the text of one."""
    if token.lower() in ("true", "false"):
        return token.lower() == "true"
    try:
        value = ast.literal_eval(token)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return token
    return value if isinstance(value, (int, float)) else token


# ---- the accelerate file ---------------------------------------------------------------------------


def _setting_path(name: str) -> Path | None:
    """Returns where the accelerate file has what the option *name* sets; None where it has nothing."""
    library = load_schema()["accelerate"]
    if name.startswith("fsdp_"):
        return FSDP, name
    if name in library[DEEPSPEED] or name in ("gradient_accumulation_steps", "gradient_clipping"):
        return DEEPSPEED, name
    if name.startswith("parallelism_config_"):
        return "parallelism_config", name
    return (name,) if name in library["top"] else None


def effective_config(command: Command, file: Config | None) -> Config | None:
    """*file* as the command changes it, or what it sets without one; None for another launcher."""
    is_launched = command.launcher == "accelerate"
    # A copy: the checks of the file itself must not see what the command sets
    data: dict[str, Any] = dict(file.data) if file is not None and is_launched else {}
    origins: dict[str, str] = {}
    positions: dict[Path, tuple[int, int]] = {(): (command.line, 1)}
    kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
    for name, value in command.options.items() if is_launched else ():
        if name in kinds:
            data["distributed_type"], origins["distributed_type"] = kinds[name], COMMAND
        path = _setting_path(name)
        if path is None or name == "config_file":
            continue
        origins[path[-1]] = COMMAND
        positions[path] = command.line, command.places[name]
        if len(path) == 1:
            data[name] = value
        else:
            section = data.get(path[0])
            data[path[0]] = {**(section if isinstance(section, Mapping) else {}), name: value}
    launched_kind = data.get("distributed_type")
    added = _merge_environment(data, command)
    if not is_launched:
        if not data:
            return file
        data |= {"num_processes": command.ranks, "num_machines": command.options.get("nnodes")}
    positions |= added
    origins |= {path[-1]: ENVIRONMENT for path in added}
    data.setdefault("distributed_type", "MULTI_GPU")
    is_from_env = launched_kind != data["distributed_type"] == _environment_kind(command)
    if is_from_env:
        origins["distributed_type"] = ENVIRONMENT
    if file is None or not is_launched:
        dialect = "yaml" if is_launched and not is_from_env else ENVIRONMENT_DIALECT
        return Config(file=command.file, origins=origins, data=data, places=positions, dialect=dialect)
    return replace(file, data=data, origins=origins)


def overridden_settings(command: Command, file: Config) -> Iterator[Problem]:
    """Yields options that replace a setting of *file*, and the file where nothing reads it."""
    if command.launcher != "accelerate":
        launcher = command.launcher or "this command"
        message = f"{launcher} does not read {file.file}"
        fix = f"accelerate launch --config_file {file.file}"
        yield command.problem("ZM106", "warning", "", message, fix)
        return
    if "config_file" not in command.options:
        message = f"without --config_file accelerate launch does not read {file.file}"
        fix = f"--config_file {file.file}"
        yield command.problem("ZM106", "warning", "", message, fix)
    for name, value in command.options.items():
        path = _setting_path(name)
        theirs = file.get(*path) if path is not None else None
        # The command has texts: "true" and true, "8" and 8 are no difference
        if path is None or theirs is None or str(theirs).lower() == str(value).lower():
            continue
        if name == "machine_rank" or "$" in str(value):  # another on each machine; of the shell
            continue
        code = "ZM602" if name in ("num_processes", "gradient_accumulation_steps") else "ZM105"
        message = f"{name} is {value} here and {theirs} in {file.file}: the command wins"
        fix = f"remove --{name}, or {file.write(name, value)} there"
        yield command.problem(code, "warning", name, message, fix)


def spell_options(problem: Problem) -> Problem:
    """Returns *problem* with a fix in the syntax of a command."""
    return replace(problem, fix=re.sub(r"(?<!\w)([a-z]\w+): (\w+)", r"--\1 \2", problem.fix))


def idle_options(command: Command, launch: Config) -> Iterator[Problem]:
    """Yields options of DeepSpeed or FSDP where accelerate starts neither."""
    if command.launcher != "accelerate":
        return
    kind = kind_of(launch)
    for name in command.options:
        path = _setting_path(name)
        section = path[0] if path is not None and len(path) > 1 else ""
        needs = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}.get(section, kind)
        if needs != kind:
            message = f"{name} has no effect: accelerate starts {kind}"
            fix = f"--use_{needs.lower()}"
            yield command.problem("ZM106", "warning", name, message, fix)


def single_process(command: Command) -> Iterator[Problem]:
    """Yields a launcher that starts one rank where nobody says so."""
    if command.launcher == "torchrun" and "nproc_per_node" not in command.options:
        message = "torchrun starts one rank a node without --nproc-per-node"
        yield command.problem("ZM602", "warning", "", message, "--nproc-per-node 8, or gpu")


# ---- accelerate's environment variables, as the options that they stand for ------------------------

_KINDS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}


_ONLY_IF_GIVEN: Sequence[str] = NAMES["accelerate"]["only_if_given"]
"""Options of FSDP that ``accelerate launch`` passes on only where they are set; it sets all others."""


def _option_of(name: str) -> str:
    """Returns the option of ``accelerate launch`` that sets the variable *name*; "" without one."""
    return str(load_schema()["accelerate"]["environment"].get(name, ""))


def _environment_kind(command: Command) -> str:
    """Returns FSDP or DEEPSPEED, where the environment turns it on; else ""."""
    # Accelerator and its state compare the text with "true" alone
    enabled = [name for name, variable in command.environment.items() if variable.value is True]
    return next((kind for name, kind in _KINDS.items() if name in enabled), "")


def _merge_environment(data: dict[str, Any], command: Command) -> dict[Path, tuple[int, int]]:
    """Adds what the environment turns on to *data*; returns the positions of what was added.

    ``accelerate launch`` sets the precision, and the variables of the strategy that it starts, itself.
    """
    kind, launched = _environment_kind(command), str(data.get("distributed_type", ""))
    is_used = kind and launched in ("", "NO", "MULTI_GPU", kind)
    positions: dict[Path, tuple[int, int]] = {}
    for name, variable in command.environment.items():
        path = _setting_path(_option_of(name)) or ()
        if "$" in str(variable.value):
            continue
        if path == ("mixed_precision",) and command.launcher != "accelerate":
            data[path[0]], positions[path] = variable.value, (variable.line, variable.column)
        if not is_used or len(path) != 2 or (launched == "FSDP" and path[1] not in _ONLY_IF_GIVEN):
            continue
        section = data.get(path[0]) or {}
        if path[1] not in section:
            data[path[0]] = {**section, path[1]: variable.value}
            positions[path] = variable.line, variable.column
    data |= {"distributed_type": kind} if is_used else {}
    return positions


def wrong_variables(command: Command) -> Iterator[Problem]:
    """Yields variables with a misspelt name, and switches that are off for accelerate, such as 1."""
    library = load_schema()["accelerate"]
    prefixes = re.compile(r"^((ACCELERATE|FSDP)_)+")
    plain_names = {prefixes.sub("", name): name for name in library["environment"]}
    for name, variable in command.environment.items():
        is_known = name in library["environment"] or not prefixes.match(name)
        matches = get_close_matches(prefixes.sub("", name), plain_names, 1, 0.8)
        # Without a name like it the variable may be one of the script; a shell may read it itself
        if matches and not is_known and not re.search(rf"\$\{{?{name}\b", command.launch_text):
            message = f"accelerate {library['version']} does not read {name}"
            fix = f"did you mean {plain_names[matches[0]]}?"
            yield command.problem("ZM102", "warning", name, message, fix)
        if name in _KINDS and not isinstance(variable.value, bool) and is_on(variable.value):
            message = f"{name} is {variable.value}, and accelerate takes only true"
            yield command.problem("ZM103", "warning", name, message, f"{name}=true")


def overwritten_variables(command: Command, launch: Config) -> Iterator[Problem]:
    """Yields variables that ``accelerate launch`` replaces by its own options, or by their defaults."""
    has_fsdp = launch.get("distributed_type") == "FSDP"
    has_fsdp &= launch.origins.get("distributed_type") != ENVIRONMENT
    for name, variable in command.environment.items():
        option = _option_of(name)
        is_set = has_fsdp and option.startswith("fsdp_") and option not in _ONLY_IF_GIVEN
        path = (option,) if option == "mixed_precision" else (FSDP, option)
        value = launch.get(*path, default="its default")
        differs = str(value).lower() != str(variable.value).lower() and "$" not in str(variable.value)
        if differs and (is_set or option == "mixed_precision"):
            message = f"{name} has no effect: accelerate launch sets it to {value}"
            yield command.problem("ZM106", "warning", name, message, f"--{option} {variable.value}")


def idle_variables(command: Command) -> Iterator[Problem]:
    """Yields one problem for all variables of FSDP, where nothing turns FSDP on."""
    names = [name for name in command.environment if _option_of(name).startswith("fsdp_")]
    switches = [str(v.value) for name, v in command.environment.items() if name in _KINDS]
    if names and not any("$" in value for value in switches) and not _environment_kind(command):
        message, _ = without_effect(names, "unless ACCELERATE_USE_FSDP is true")
        yield command.problem("ZM106", "warning", names[0], message, "ACCELERATE_USE_FSDP=true")


def spell_variables(problem: Problem) -> Problem:
    """Returns *problem* with the names of variables instead of options."""
    message, fix = problem.message, problem.fix
    for name, option in load_schema()["accelerate"]["environment"].items():
        if option and option in message + fix:
            message = re.sub(rf"\b{option}\b", name, message)
            fix = re.sub(rf"\b{option}\b(: )?", lambda m, n=name: n + "=" * bool(m[1]), fix)  # type: ignore[misc]
    return replace(problem, message=message, fix=fix)


# ---- A launch file ------------------------------------------------------------------------------

SUFFIXES = (".txt", ".sh", ".bash", ".slurm", ".sbatch")

_OF_FAMILY: Mapping[str, str] = NAMES["launchers"]["device_of_family"]
"""Family of instances of AWS -> the device, as ``--gpu`` takes it."""

_EIGHT: Sequence[str] = NAMES["launchers"]["instances_of_eight"]
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


def read_launch(content: str, file: str) -> Launch:
    """Returns the command and the machine of a launch file."""
    commands: list[Command] = []
    processes: list[Command] = []
    comments, at = [], 1
    exported: dict[str, Variable] = {}
    # The mark of a continued line is kept, or the lines behind it would be counted too low
    for row in re.sub(r"\\\n", "\\\\ ", content).splitlines():
        code, _, comment = row.partition("#") if row.lstrip().startswith("#") else (row, "", "")
        comments.append(comment.lower())
        argv = _shell_tokens(code)
        if argv[:1] in (["export"], ["declare"]):
            # A shell's own NAME=value is no variable of the programs that it starts
            exported |= _read_variables(argv, _token_columns(argv), at)
        elif is_launch_command(argv) or _runs_script(argv):
            command = read_command(argv)
            own_variables = {name: replace(v, line=at) for name, v in command.environment.items()}
            command = replace(
                command, file=file, line=at, environment=exported | own_variables, launch_text=content
            )
            (commands if command.launcher else processes).append(command)
        at += 1 + row.count("\\ ")
    remarks = "\n".join(comments)
    # A family without a known device makes the device uncertain, also beside a known one
    families = [_OF_FAMILY.get(name, "?") for name in _INSTANCE.findall(remarks)]
    devices = {*families, *_DEVICE.findall(_INSTANCE.sub("", remarks))}
    instances = {match.group() for match in _INSTANCE.finditer(remarks)}
    full = len(instances) == 1 and instances < set(_EIGHT)
    return Launch(
        command=(commands or processes)[0] if len(commands or processes) == 1 else None,
        device=next(iter(devices)) if len(devices) == 1 and "?" not in devices else "",
        devices_per_host=8 if full else None,
    )


def _shell_tokens(row: str) -> list[str]:
    try:
        return shlex.split(row.replace("\\ ", " "), comments=True)
    except ValueError:  # an open quotation
        return []
