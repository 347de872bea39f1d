"""Runs the checks: selects the training files, parses each of them, and applies its checks."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeromon.base.errors import CheckError
from zeromon.check import (
    accelerate,
    deepspeed,
    fsdp_options,
    fsdp_scripts,
    launch,
    launch_figures as figures,
    loaders,
    plans,
    scripts,
    training_loop,
)
from zeromon.check.deepspeed.fields import not_json
from zeromon.check.documents import (
    SUFFIXES,
    UnreadableError,
    dialect_of,
    parse_config,
    parse_python,
    read_text,
)
from zeromon.check.launch_figures import Figure, Sources, stated_precisions
from zeromon.check.problem import SEVERITIES, Config, Machine, Problem
from zeromon.diagnosis.rule import all_pages

_SIGNS = (
    "zero_optimization", "train_micro_batch_size_per_gpu", "distributed_type", "fsdp_config",
    "deepspeed_config", "FullyShardedDataParallel", "fully_shard", "deepspeed.initialize",
)  # fmt: skip
"""An unreadable file with one of these words counts as a training configuration."""

_WORDS = (
    *_SIGNS, "train_batch_size", "compute_environment", "deepspeed", "TrainingArguments", "trl",
    "MixedPrecision", "DistributedDataParallel", "FullStateDictConfig",
)  # fmt: skip
"""A file found in a folder is parsed only if it has one of these words."""

_HALF = ("bf16", "fp16", "fp8")

_OF_NEOX = {"pipe_parallel_size", "model_parallel_size"}
"""Settings of GPT-NeoX, whose files mix DeepSpeed's settings with those of the model."""

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check."""

    files: int
    problems: tuple[Problem, ...]
    figures: tuple[Figure, ...] = ()
    """Those of a launch command, with its files."""

    @property
    def failed(self) -> bool:
        """True if there is an error or a warning."""
        return any(problem.severity != "info" for problem in self.problems)


def check(paths: Iterable[str], machine: Machine | None = None, command: Sequence[str] = ()) -> Result:
    """Returns all problems of files and folders, in order of files and lines.

    *command*: the launch command, with which the files are read together; a launch file has its own.
    """
    launched = launch.read_command(command) if command else None
    machine = machine or Machine()
    pending = list(paths)
    # A copy: the loop removes what it goes over
    for path in [path for path in pending if _is_launch_file(path)]:
        launch_file = launch.read_launch(_text_or_empty(path), path)
        if launch_file.command is not None or launched is not None:
            launched, machine = launched or launch_file.command, launch_file.on(machine)
            pending.remove(path)
    if launched is not None:
        machine = replace(machine, devices=machine.devices or launched.ranks)
    run = _Run(machine)
    for path in pending:
        run.path(path)
    stated: list[Figure] = []
    if launched is not None:
        stated = run.launched(launched)
    elif not any(
        _path_holds(Path(path).is_dir) for path in pending
    ):  # files of a folder may not belong together
        run.across()
    order = {severity: index for index, severity in enumerate(SEVERITIES)}
    # A set: two calls of a script that take one configuration find its problems twice
    ordered = sorted(
        set(run.problems), key=lambda p: (p.file, p.line, p.column, order[p.severity], p.code, p.key)
    )
    return Result(len(run.checked), tuple(ordered), tuple(stated))


def _is_launch_file(path: str) -> bool:
    file = Path(path)
    return file.suffix in launch.SUFFIXES and _path_holds(file.is_file)


def _text_or_empty(path: str) -> str:
    try:
        return read_text(Path(path))
    except UnreadableError:  # the check of the file reports it
        return ""


def parse_codes(selection: str) -> frozenset[str]:
    """Returns the codes of ``ZM302,ZM5`` or of names; raises :class:`CheckError` for an unknown one."""
    by_code = all_pages()
    selected = set()
    for name in filter(None, (item.strip() for item in selection.split(","))):
        matching = {c for c, page in by_code.items() if c.startswith(name.upper()) or page.name == name}
        if not matching:
            raise CheckError(f"there is no rule {name}", "zeromon rule lists them all.")
        selected |= matching
    return frozenset(selected)


class _Run:
    """One check of several paths; no file is checked twice."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.checked: set[Path] = set()
        self.problems: list[Problem] = []
        self.launches: list[tuple[Config, Config | None]] = []
        """Accelerate files, each with the DeepSpeed configuration that it names."""
        self.deepspeeds: list[Config] = []
        self.scripts: list[scripts.Script] = []

    def across(self) -> None:
        """Compares the scripts with the accelerate file, where there is one."""
        file, ds_config = self.launches[0] if len(self.launches) == 1 else (None, None)
        if file is not None:
            for script in self.scripts:
                self.problems += figures.other_figures(script, file, ds_config)
        self.apply_precision(
            Sources(
                command=launch.Command(launcher=""), launch=file, file=None, deepspeed=ds_config,
                scripts=tuple(self.scripts),
            )
        )  # fmt: skip

    def launched(self, command: launch.Command) -> list[Figure]:
        """Reads the files that *command* names, too; compares all, and returns the figures."""
        named = [command.options.get("config_file"), command.script]
        for name in (*named, *map(command.arguments.get, ("deepspeed", "deepspeed_config"))):
            if isinstance(name, str) and _path_holds(Path(name).is_file):
                self.file(Path(name), named=True)
        file, ds_config = self.launches[0] if self.launches else (None, None)
        if file is not None:
            self.problems += launch.overridden_settings(command, file)
        merged = launch.effective_config(command, file)
        if merged is not None:
            if file is None:
                for test in accelerate.CHECKS:
                    self.problems += test(merged, None, self.machine)
            self.problems += launch.idle_options(command, merged)
        named_configs = (command.options, "deepspeed_config_file"), (command.arguments, "deepspeed"), (
            command.arguments, "deepspeed_config")  # fmt: skip
        for values, key in named_configs:
            if isinstance(name := values.get(key), str):
                ds_config = self.other(name, Path(name), command.ranks) or ds_config
        if ds_config is None and len(self.deepspeeds) == 1:
            [ds_config] = self.deepspeeds
        if merged is not None:
            for script in self.scripts:
                self.problems += figures.other_figures(script, merged, ds_config)
        self.problems += launch.single_process(command)
        self.problems += figures.command_line_conflicts(command, self.scripts, merged, ds_config)
        sources = Sources(
            command=command, launch=merged, file=file, deepspeed=ds_config, scripts=tuple(self.scripts)
        )
        self.apply_precision(sources)
        return figures.collect_figures(sources)

    def apply_precision(self, sources: Sources) -> None:
        """Drops ZM405 of a DeepSpeed file where the launch sets the precision, which is added to it."""
        if any(value in _HALF for value, _ in stated_precisions(sources)):
            self.problems = [problem for problem in self.problems if problem.code != "ZM405"]

    def path(self, path: str) -> None:
        """Checks a file or a folder from the command line."""
        start = Path(path)
        if _path_holds(start.is_dir):
            for file in _training_files(start):
                self.file(file, named=False)
        elif os.path.lexists(start):
            self.file(start, named=True)
        else:
            raise CheckError(f"{path} does not exist")

    def file(self, file: Path, *, named: bool, ranks: int | None = None) -> Config | None:
        """Checks one file, and returns its configuration; None for a script and for no training file.

        A file that is not *named* on the command line comes from a folder, and may be no training file.
        """
        if _resolved_path(file) in self.checked:
            return None
        source = ""
        try:
            source = read_text(file)
            if named or any(term in source for term in _WORDS):
                return READERS[dialect_of(file, source)](self, file, source, named, ranks)
        except UnreadableError as error:
            if named or any(sign in source for sign in _SIGNS):
                self.checked.add(_resolved_path(file))
                self.unreadable(file, error)
        return None

    def read_script(self, file: Path, source: str, named: bool, _: int | None) -> None:
        """Checks a Python script."""
        script = scripts.read_script(str(file), parse_python(source))
        if named or scripts.is_training(script):
            self.checked.add(_resolved_path(file))
            self.script(script, file)

    def read_config(self, file: Path, source: str, named: bool, ranks: int | None) -> Config | None:
        """Checks a JSON or YAML configuration, and returns it."""
        config = parse_config(source, str(file), dialect_of(file, source))
        kind = kind_of(config.data)
        if kind == "gpt-neox":
            message = "this is a configuration of GPT-NeoX, which zeromon does not check"
            fix = "check the DeepSpeed configuration that GPT-NeoX makes of it"
        elif kind:
            self.checked.add(_resolved_path(file))
            self.config(config.on(ranks), kind, file)
            return config
        else:
            message = "zeromon does not recognize a training configuration in this file"
            fix = "DeepSpeed's has zero_optimization, accelerate's distributed_type"
        if named:
            self.checked.add(_resolved_path(file))
            self.unreadable(file, UnreadableError(message, fix=fix))
        return None

    def unreadable(self, file: Path, error: UnreadableError) -> None:
        """Reports a file that cannot be read."""
        position = error.line, error.column
        fix = error.fix or "give a JSON or YAML configuration, or a Python script"
        self.problems.append(Problem(str(file), *position, "ZM101", "error", error.message, fix))

    def config(self, config: Config, kind: str, file: Path) -> None:
        """Checks one configuration, and the file that it names."""
        if kind == "accelerate":
            ds_config = self.follow(config, file)
            self.launches.append((config, ds_config))
            for test in accelerate.CHECKS:
                self.problems += test(config, ds_config, self.machine)
            if ds_config is None and not config.get(accelerate.DEEPSPEED, "deepspeed_config_file"):
                self.problems += plans.stage_problems(config, self.machine)
            return
        self.deepspeeds.append(config)
        for check_one in deepspeed.CHECKS:
            self.problems += check_one(config, self.machine)
        self.problems += plans.stage_problems(config, self.machine)

    def follow(self, config: Config, file: Path) -> Config | None:
        """Returns the DeepSpeed configuration that an accelerate file names; None without one."""
        name = config.get(accelerate.DEEPSPEED, "deepspeed_config_file")
        ranks = config.get("num_processes")
        ds_config = self.other(name, file, ranks if isinstance(ranks, int) and ranks > 0 else None)
        if ds_config is not None and ds_config.refused is not None:
            path = (accelerate.DEEPSPEED, "deepspeed_config_file")
            message, fix = not_json(ds_config, "accelerate")
            self.problems.append(config.problem("ZM101", "error", path, message, fix))
        return ds_config

    def other(self, name: object, file: Path, ranks: int | None = None) -> Config | None:
        """Checks and returns the DeepSpeed configuration that *file* names; None where there is none."""
        named_file = _find_beside(file, name)
        if named_file is None:
            return None
        self.file(named_file, named=True, ranks=ranks)
        try:
            return _parse_file(named_file)
        except UnreadableError:  # the check has reported it
            return None

    def script(self, script: scripts.Script, file: Path) -> None:
        """Checks a script, and the configurations in it."""
        self.scripts.append(script)
        checks = (*scripts.CHECKS, *training_loop.CHECKS, *fsdp_scripts.CHECKS, *loaders.CHECKS)
        for test in checks:
            self.problems += test(script)
        self.problems += fsdp_scripts.bf16_device(script, self.machine)
        self.problems += plans.script_problems(script, self.machine)
        for call in filter(scripts.is_arguments, script.calls):
            fsdp = fsdp_options.fsdp_of(script, call, self.fsdp_config(script, call, file))
            for fsdp_check in fsdp_options.OF_TRAINER:
                self.problems += fsdp_check(fsdp)
        for source, call in scripts.deepspeed_configs(script):
            config = self.other(source, file) if isinstance(source, str) else source
            if config is None:
                continue
            if not isinstance(source, str):
                for check_one in deepspeed.CHECKS:
                    self.problems += check_one(config, self.machine)
            for call_check in figures.CHECKS:
                self.problems += call_check(script, call, config, self.machine.devices)

    def fsdp_config(self, script: scripts.Script, call: scripts.Call, file: Path) -> Config | None:
        """Returns the FSDP configuration of a Trainer, from the script or a file; None without one."""
        node = script.argument(call, "fsdp_config")
        config = scripts.config_at(script, node) if node is not None else None
        if not isinstance(config, str):
            return config
        named_file = _find_beside(file, config)
        try:
            section = _parse_file(named_file) if named_file is not None else None
        except UnreadableError as error:
            self.unreadable(named_file or file, error)
            return None
        if section is not None and section.refused is not None:
            message, fix = not_json(section, call.short)
            self.problems.append(script.problem("ZM101", "error", call.node, message, fix))
        return section


_Reader = Callable[[_Run, Path, str, bool, "int | None"], "Config | None"]

READERS: dict[str, _Reader] = {
    "json": _Run.read_config,
    "yaml": _Run.read_config,
    "python": _Run.read_script,
}
"""Dialect of a file -> the function that parses and checks a file of that dialect."""


def _find_beside(file: Path, name: object) -> Path | None:
    """Returns the file that *file* names, relative to it or to the working directory."""
    if not isinstance(name, str):
        return None
    candidates = file.parent / name, Path(name)
    return next((candidate for candidate in candidates if _path_holds(candidate.is_file)), None)


def _path_holds(question: Callable[[], bool]) -> bool:
    """Returns the answer to *question* about a path; False for names that the system refuses."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _parse_file(file: Path) -> Config:
    content = read_text(file)
    return parse_config(content, str(file), dialect_of(file, content))


def kind_of(data: Mapping[str, object]) -> str:
    """Returns "deepspeed", "accelerate", "gpt-neox", or "" for anything else."""
    if any(str(name).replace("-", "_") in _OF_NEOX for name in data):
        return "gpt-neox"
    if "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data:
        return "deepspeed"
    if "distributed_type" in data or ("compute_environment" in data and "num_processes" in data):
        return "accelerate"
    has_section = any(isinstance(data.get(name), dict) for name in ("bf16", "fp16", "optimizer"))
    return "deepspeed" if has_section and "train_batch_size" in data else ""


def _training_files(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder that may be training files; does not follow links to folders."""
    for at, names, files in os.walk(folder):
        # In place: os.walk descends into what is left in this list
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED)
        for name in sorted(files):
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                yield Path(at) / name


def _resolved_path(file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return file.absolute()


def select_problems(
    result: Result, select: frozenset[str], ignore: frozenset[str], *, with_quiet: bool
) -> Result:
    """Returns *result* with the selected problems; *with_quiet*: also those that only state a fact."""
    chosen = tuple(
        problem
        for problem in result.problems
        if (not select or problem.code in select)
        and problem.code not in ignore
        and (with_quiet or not problem.quiet)
    )
    return replace(result, problems=chosen)
