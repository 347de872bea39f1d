"""Runs the checks: selects the training files, parses each of them, and applies its checks."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeromon.base.errors import CheckError
from zeromon.check import (
    accelerate,
    deepspeed,
    fsdp_options,
    fsdp_scripts,
    launch,
    launch_figures as figures,
    loaders,
    one_rank,
    plans,
    recipes,
    scripts,
)
from zeromon.check.deepspeed.conflicts import BATCH, NO_BATCH
from zeromon.check.deepspeed.fields import not_json, stage_of
from zeromon.check.documents import (
    SUFFIXES,
    UnreadableError,
    dialect_of,
    parse_config,
    parse_python,
    read_text,
)
from zeromon.check.launch_figures import Figure, Sources, stated_precisions
from zeromon.check.problem import ENVIRONMENT_DIALECT, NAMES, SEVERITIES, Config, Machine, Problem
from zeromon.diagnosis.rule import all_pages

_SIGNS: Sequence[str] = NAMES["files"]["signs"]
"""An unreadable file with one of these words counts as a training configuration."""

_WORDS: Sequence[str] = (*_SIGNS, *NAMES["files"]["words"])
"""A file found in a folder is parsed only if it has one of these words."""

_HALF = ("bf16", "fp16", "fp8")

_PLUGINS = {"FullyShardedDataParallelPlugin", "fsdp_plugin"}
"""Names in a script that turns FSDP on itself."""

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
    suffixed = [path for path in pending if Path(path).suffix in launch.SUFFIXES]
    for path in [path for path in suffixed if _path_holds(Path(path).is_file)]:
        launch_file = launch.read_launch(_text_or_empty(path), path)
        if launch_file.command is not None or launched is not None:
            launched, machine = launched or launch_file.command, launch_file.on(machine)
            pending.remove(path)
    if launched is not None:
        machine = replace(machine, devices=machine.devices or launched.ranks)
    run = _Run(machine, launched)
    # JSON last: another file may say who reads it, and on how many ranks
    for path in sorted(pending, key=lambda path: path.endswith(".json")):
        run.path(path)
    stated: list[Figure] = []
    # Files of a folder may not belong together
    together = launched is not None or not any(_path_holds(Path(path).is_dir) for path in pending)
    if launched is not None:
        stated = run.launched(launched)
    elif together:
        stated = run.across()
    run.forwards(together=together)
    run.apply_batch_size(together=together)
    order = {severity: index for index, severity in enumerate(SEVERITIES)}
    # A set: two calls of a script that take one configuration find its problems twice
    ordered = sorted(
        set(run.spelled_problems()),
        key=lambda p: (p.file, p.line, p.column, order[p.severity], p.code, p.key),
    )
    return Result(len(run.checked), tuple(ordered), tuple(stated))


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

    def __init__(self, machine: Machine, command: launch.Command | None = None) -> None:
        self.machine = machine
        self.command = command
        self.checked: set[Path] = set()
        self.problems: list[Problem] = []
        self.launches: list[tuple[Config, Config | None]] = []
        """Accelerate files, each with the DeepSpeed configuration that it names."""
        self.deepspeeds: list[Config] = []
        self.scripts: list[scripts.Script] = []
        self.trainers: list[tuple[Config, recipes.Recipe]] = []
        self.sharded: set[str] = set()
        """Scripts whose engine is at ZeRO stage 3."""

    def forwards(self, *, together: bool) -> None:
        """Checks the forwards of models that the files shard; *together*: they make one launch."""
        launch_shards = together and (
            any(accelerate.shards_parameters(*named) for named in self.launches)
            or any(stage_of(config) == 3 for config in self.deepspeeds)
        )
        for script in self.scripts:
            shards = launch_shards or script.file in self.sharded
            self.problems += one_rank.sharded_forward_alone(script, launch_shards=shards)

    def across(self) -> list[Figure]:
        """Compares the scripts with the accelerate file, and returns the figures of a trainer's YAML."""
        file, ds_config = self.launches[0] if len(self.launches) == 1 else (None, None)
        if not self.launches and self.only_deepspeed is not None:
            self.named_elsewhere(self.only_deepspeed, self.machine.devices)
        if file is not None:
            for script in self.scripts:
                self.problems += figures.other_figures(script, file, ds_config)
        sources = self.sources(launch.Command(launcher=""), file, None, ds_config or self.only_deepspeed)
        self.apply_precision(sources)
        return figures.collect_figures(sources) if len(self.trainers) == 1 else []

    @property
    def only_deepspeed(self) -> Config | None:
        """The one DeepSpeed configuration; None where there is none, or are several."""
        return self.deepspeeds[0] if len(self.deepspeeds) == 1 else None

    def sources(
        self, command: launch.Command, merged: Config | None, file: Config | None, ds: Config | None
    ) -> Sources:
        """Returns all that a launch is made of."""
        fsdp_configs = [
            recipes.fsdp_config(c) for c, recipe in self.trainers if recipe is recipes.AXOLOTL
        ]
        return Sources(
            command=command, launch=merged, file=file, deepspeed=ds, scripts=tuple(self.scripts),
            trainers=tuple(filter(None, fsdp_configs)),
        )  # fmt: skip

    def launched(self, command: launch.Command) -> list[Figure]:
        """Reads the files that *command* names, too; compares all, and returns the figures."""
        named = [command.options.get("config_file"), command.script]
        for name in (*named, *map(command.arguments.get, ("deepspeed", "deepspeed_config"))):
            if isinstance(name, str) and _path_holds(Path(name).is_file):
                self.file(Path(name), named=True)
        for name in (*command.positionals, command.arguments.get("config")):
            # A script's own configuration may be of any kind
            if isinstance(name, str) and _path_holds(Path(name).is_file):
                self.file(Path(name), named=False)
        if not self.trainers and (arguments := recipes.command_config(command)) is not None:
            self.trainer(arguments, recipes.LLAMA_FACTORY, Path(command.script or "."))
        if len(self.trainers) == 1:
            command = recipes.translate_arguments(command, self.trainers[0][1])
        file, ds_config = self.launches[0] if self.launches else (None, None)
        if file is not None:
            self.problems += launch.overridden_settings(command, file)
        merged = launch.effective_config(command, file)
        if merged is not None:
            if file is None or merged.dialect == ENVIRONMENT_DIALECT:
                self.problems += self.merged_problems(merged)
            self.problems += launch.idle_options(command, merged)
        self.problems += self.environment_problems(command, merged)
        named_configs = (
            merged and merged.get(accelerate.DEEPSPEED, "deepspeed_config_file"),
            command.arguments.get("deepspeed"), command.arguments.get("deepspeed_config"),
        )  # fmt: skip
        for name in named_configs:
            if isinstance(name, str):
                ds_config = self.other(name, Path(name), ranks=command.ranks) or ds_config
        ds_config = ds_config or self.only_deepspeed
        if merged is not None:
            for script in self.scripts:
                self.problems += figures.other_figures(script, merged, ds_config)
        if ds_config is not None:
            self.named_elsewhere(ds_config, command.ranks)
        self.problems += launch.single_process(command)
        self.problems += figures.command_line_conflicts(command, self.scripts, merged, ds_config)
        sources = self.sources(command, merged, file, ds_config)
        self.apply_precision(sources)
        stated = figures.collect_figures(sources)
        # Where the engine refuses another accumulation, there is no batch
        refused = any(p.code == "ZM602" and p.severity == "error" for p in self.problems)
        return [f for f in stated if not (refused and f.others and f.name == "whole batch")]

    def named_elsewhere(self, config: Config, ranks: int | None) -> None:
        """Checks the calls that take a DeepSpeed configuration from an argument of the script."""
        for script in self.scripts:
            for call in scripts.open_configs(script):
                for call_check in figures.CHECKS:
                    self.problems += call_check(script, call, config, ranks)

    def apply_batch_size(self, *, together: bool) -> None:
        """Drops a missing batch size that a script sets; one that no script sets is an error."""
        if not self.scripts:
            return
        sets = any(scripts.names_key(script, name) for script in self.scripts for name in BATCH[:2])
        problems = [problem for problem in self.problems if problem.message != NO_BATCH]
        missing = [problem for problem in self.problems if problem.message == NO_BATCH]
        if together and not sets:
            message = NO_BATCH.partition(", unless")[0]
            problems += [replace(problem, severity="error", message=message) for problem in missing]
        elif not sets:
            problems += missing
        self.problems = problems

    def environment_problems(self, command: launch.Command, merged: Config | None) -> Iterator[Problem]:
        """Yields environment variables that accelerate does not read, replaces or ignores."""
        yield from launch.wrong_variables(command)
        if merged is not None and command.launcher == "accelerate":
            yield from launch.overwritten_variables(command, merged)
        # A Trainer turns FSDP on by its own arguments, and a plugin in the script by being there
        script_words = frozenset[str]().union(*(script.words for script in self.scripts))
        has_trainer = any(
            name.endswith(("Trainer", "TrainingArguments", "HfArgumentParser")) for name in script_words
        )
        is_plain = "Accelerator" in script_words and not has_trainer and not script_words & _PLUGINS
        if is_plain and (merged is None or accelerate.kind_of(merged) != "FSDP"):
            yield from launch.idle_variables(command)

    def merged_problems(self, merged: Config) -> Iterator[Problem]:
        """Yields the problems of what a command sets without an accelerate file."""
        is_env = merged.dialect == ENVIRONMENT_DIALECT
        for test in accelerate.CHECKS:
            for problem in test(merged, None, self.machine):
                spell = launch.spell_variables if is_env else launch.spell_options
                yield spell(problem)

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
            # A script's own configuration may be of any kind
            is_own = self.command is not None and recipes.is_named(path, self.command)
            self.file(start, named=not is_own or start.suffix == ".py")
        else:
            raise CheckError(f"{path} does not exist")

    def file(self, file: Path, *, named: bool, **facts: Any) -> Config | None:
        """Checks one file, and returns its configuration; None for a script and for no training file.

        A file that is not *named* on the command line comes from a folder, and may be no training file.
        *facts*: fields of the configuration that the file which names it sets.
        """
        if _resolved_path(file) in self.checked:
            return None
        source = ""
        try:
            source = read_text(file)
            if named or any(term in source for term in _WORDS):
                if dialect_of(file, source) != "python":
                    return self.read_config(file, source, named, facts)
                self.read_script(file, source, named)
        except UnreadableError as error:
            if named or any(sign in source for sign in _SIGNS):
                self.checked.add(_resolved_path(file))
                self.unreadable(file, error)
        return None

    def read_script(self, file: Path, source: str, named: bool) -> None:
        """Checks a Python script."""
        script, path = scripts.read_script(str(file), parse_python(source)), _resolved_path(file)
        if self.command is not None and _resolved_path(Path(self.command.script)) == path:
            script = replace(script, passed=self.command.arguments)
        if named or scripts.is_training(script):
            self.checked.add(path)
            self.script(script, file)

    def read_config(
        self, file: Path, source: str, named: bool, facts: Mapping[str, Any]
    ) -> Config | None:
        """Checks a JSON or YAML configuration, and returns it."""
        config = replace(parse_config(source, str(file), dialect_of(file, source)), **facts)
        kind = kind_of(config.data)
        project, severity = recipes.project_of(config.data), "info"
        if kind in recipes.RECIPES:
            self.checked.add(_resolved_path(file))
            self.trainer(config, recipes.RECIPES[kind], file)
            return None
        if kind and not project:
            self.checked.add(_resolved_path(file))
            self.config(config, kind, file)
            return config
        if project:
            message = f"this is a configuration of {project}, which zeromon does not check"
            fix = "check the DeepSpeed or accelerate configuration that it names or makes"
        else:
            severity = "error"
            message = "zeromon does not recognize a training configuration in this file"
            fix = "DeepSpeed's has zero_optimization, accelerate's distributed_type"
        if named:
            self.checked.add(_resolved_path(file))
            self.unreadable(file, UnreadableError(message, fix=fix), severity)
        return None

    def trainer(self, config: Config, recipe: recipes.Recipe, file: Path) -> None:
        """Checks a trainer's YAML, and the DeepSpeed file that it names."""
        config = recipes.override(config, self.command)
        self.trainers.append((config, recipe))
        stage = None
        script = recipes.as_script(config, recipe)
        self.script(script, file)
        for source, call in scripts.deepspeed_configs(script):
            ds_config = _read_beside(file, source) if isinstance(source, str) else source
            stage = ds_config.whole("zero_optimization", "stage") if ds_config else None
            if ds_config is not None and not isinstance(source, str):
                self.deepspeeds.append(ds_config)
            if ds_config is None:
                message = f"{source} is not found from here: the DeepSpeed settings are not checked"
                fix = f"zeromon check {file} in the folder where you start the training"
                self.problems.append(script.problem("ZM101", "info", call.node, message, fix))
        self.problems += recipes.exclusions(config, recipe, stage)
        self.problems += recipes.misspelt_arguments(config, recipe)
        fsdp_config = recipes.fsdp_config(config) if recipe is recipes.AXOLOTL else None
        if fsdp_config is not None:
            self.problems += accelerate.fsdp_problems(fsdp_config, None, self.machine)

    def spelled_problems(self) -> Iterator[Problem]:
        """Yields the problems, those of a trainer's YAML in its own words."""
        by_file = {config.file: (config, recipe) for config, recipe in self.trainers}
        for problem in self.problems:
            trainer = by_file.get(problem.file)
            yield recipes.spell(problem, *trainer) if trainer is not None else problem

    def unreadable(self, file: Path, error: UnreadableError, severity: str = "error") -> None:
        """Reports a file that cannot be read."""
        position = error.line, error.column
        fix = error.fix or "give a JSON or YAML configuration, or a Python script"
        self.problems.append(Problem(str(file), *position, "ZM101", severity, error.message, fix))

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
        ranks = ranks if isinstance(ranks, int) and ranks > 0 else None
        ds_config = self.other(name, file, ranks=ranks, is_filled=True)
        if ds_config is not None and ds_config.refused is not None:
            path = (accelerate.DEEPSPEED, "deepspeed_config_file")
            message, fix = not_json(ds_config, "accelerate")
            self.problems.append(config.problem("ZM101", "error", path, message, fix))
        return ds_config

    def other(self, name: object, file: Path, **facts: Any) -> Config | None:
        """Checks and returns the DeepSpeed configuration that *file* names; None where there is none."""
        named_file = _find_beside(file, name)
        if named_file is None:
            return None
        self.file(named_file, named=True, **facts)
        return _read_beside(file, name)

    def script(self, script: scripts.Script, file: Path) -> None:
        """Checks a script, and the configurations in it."""
        self.scripts.append(script)
        checks = (scripts, fsdp_scripts, one_rank, loaders)
        for test in (test for module in checks for test in module.CHECKS):
            self.problems += test(script)
        self.problems += fsdp_scripts.bf16_device(script, self.machine)
        self.problems += plans.script_problems(script, self.machine)
        for call in filter(scripts.is_arguments, script.calls):
            fsdp = fsdp_options.fsdp_of(script, call, self.fsdp_config(script, call, file))
            for fsdp_check in fsdp_options.OF_TRAINER:
                self.problems += fsdp_check(fsdp)
        for source, call in scripts.deepspeed_configs(script):
            is_engine = call.name == "deepspeed.initialize"
            if isinstance(source, str):
                config = self.other(source, file, is_filled=not is_engine)
            else:
                config = replace(source, is_filled=not is_engine)
            if config is None:
                continue
            if stage_of(config) == 3 and is_engine:
                self.sharded.add(script.file)
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


def _find_beside(file: Path, name: object) -> Path | None:
    """Returns the file that *file* names: beside it, in the working directory, or above it.

    A name with a folder begins at the top of its project, from which users start the training.
    """
    if not isinstance(name, str):
        return None
    above = _resolved_path(file).parents[1:] if "/" in name else ()
    candidates = (folder / name for folder in (file.parent, Path(), *above))
    return next((candidate for candidate in candidates if _path_holds(candidate.is_file)), None)


def _read_beside(file: Path, name: object) -> Config | None:
    """Returns the configuration that *file* names; None where there is none, or none can be read."""
    named_file = _find_beside(file, name)
    try:
        return _parse_file(named_file) if named_file is not None else None
    except UnreadableError:  # the check has reported it
        return None


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
    """Returns "deepspeed", "accelerate", the name of a trainer's recipe, or "" for anything else."""
    if "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data:
        return "deepspeed"
    if "distributed_type" in data or ("compute_environment" in data and "num_processes" in data):
        return "accelerate"
    has_section = any(isinstance(data.get(name), dict) for name in ("bf16", "fp16", "optimizer"))
    return "deepspeed" if has_section and "train_batch_size" in data else recipes.recipe_of(data)


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
