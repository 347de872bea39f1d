"""From paths to problems: which files are training configurations, and which checks they get."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zeromon.check import accelerate, deepspeed, loaders, plans, scripts, trainer
from zeromon.check.documents import (
    SUFFIXES,
    UnreadableError,
    dialect_of,
    parse,
    parse_python,
    read_text,
)
from zeromon.check.problem import SEVERITIES, Config, Machine, Problem, problem_at
from zeromon.errors import CheckError
from zeromon.rules import pages

_SIGNS = (
    "zero_optimization", "train_micro_batch_size_per_gpu", "distributed_type", "fsdp_config",
    "deepspeed_config", "FullyShardedDataParallel", "fully_shard", "deepspeed.initialize",
)  # fmt: skip
"""Words by which a file that cannot be read is still taken for a training configuration."""

_WORDS = (
    *_SIGNS, "train_batch_size", "compute_environment", "deepspeed", "TrainingArguments", "trl",
    "MixedPrecision", "DistributedDataParallel", "FullStateDictConfig",
)  # fmt: skip
"""Without any of these a file that was only found is not even parsed."""

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check."""

    files: int
    problems: tuple[Problem, ...]

    @property
    def failed(self) -> bool:
        """Whether there is more than information."""
        return any(problem.severity != "info" for problem in self.problems)


def check(paths: Iterable[str], machine: Machine | None = None) -> Result:
    """All problems of files and folders, in order of files and lines."""
    run = _Run(machine or Machine())
    for path in paths:
        run.take(path)
    order = {severity: place for place, severity in enumerate(SEVERITIES)}
    found = sorted(
        set(run.problems),
        key=lambda p: (p.file, p.line, p.column, order[p.severity], p.code, p.key),
    )
    return Result(len(run.seen), tuple(found))


def codes(text: str) -> frozenset[str]:
    """``ZM302,ZM5`` and names as codes; raises :class:`CheckError` for what is none."""
    known = pages()
    found = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        matching = {
            c for c, page in known.items() if c.startswith(word.upper()) or page.name == word
        }
        if not matching:
            raise CheckError(f"there is no rule {word}", "zeromon rule lists them all.")
        found |= matching
    return frozenset(found)


class _Run:
    """One look at several paths: no file twice."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seen: set[Path] = set()
        self.problems: list[Problem] = []

    def take(self, path: str) -> None:
        """A file or a folder from the command line."""
        start = Path(path)
        if start.is_dir():
            for file in _below(start):
                self.file(file, named=False)
        elif os.path.lexists(start):
            self.file(start, named=True)
        else:
            raise CheckError(f"there is no {path}")

    def file(self, file: Path, *, named: bool, ranks: int | None = None) -> Config | None:
        """Checks one file; one that was only found may be none of ours."""
        known = _resolve(file)
        if known in self.seen:
            return None
        text = ""
        try:
            text = read_text(file)
            if not named and not any(word in text for word in _WORDS):
                return None
            dialect = dialect_of(file, text)
            if dialect == "python":
                script = scripts.read_script(str(file), parse_python(text))
                if scripts.is_training(script) or named:
                    self.seen.add(known)
                    self.script(script, file)
                return None
            config = parse(text, str(file), dialect)
            kind = kind_of(config.data)
            if kind:
                self.seen.add(known)
                self.config(config.on(ranks), kind, file)
                return config
            message = "this is no training configuration that zeromon knows"
            fix = "DeepSpeed's has zero_optimization, accelerate's distributed_type"
            error, is_ours = UnreadableError(message, fix=fix), False
        except UnreadableError as refused:
            error, is_ours = refused, any(sign in text for sign in _SIGNS)
        if named or is_ours:
            self.seen.add(known)
            self.refused(file, error)
        return None

    def refused(self, file: Path, error: UnreadableError) -> None:
        """A file that cannot be read."""
        place = error.line, error.column
        fix = error.fix or "give a JSON or YAML configuration, or a Python script"
        self.problems.append(problem_at(str(file), place, "ZM101", "error", error.message, fix))

    def config(self, config: Config, kind: str, file: Path) -> None:
        """The checks of one configuration, and of the file that it names."""
        if kind == "accelerate":
            other = self.follow(config, file)
            for test in accelerate.CHECKS:
                self.problems += test(config, other, self.machine)
            if other is None and not config.get(accelerate.DEEPSPEED, "deepspeed_config_file"):
                self.problems += plans.stages(config, self.machine)
            return
        for check_one in deepspeed.CHECKS:
            self.problems += check_one(config, self.machine)
        self.problems += plans.stages(config, self.machine)

    def follow(self, config: Config, file: Path) -> Config | None:
        """The DeepSpeed file that an accelerate file names, beside it or from here."""
        name = config.get(accelerate.DEEPSPEED, "deepspeed_config_file")
        ranks = config.get("num_processes")
        return self.other(name, file, ranks if isinstance(ranks, int) and ranks > 0 else None)

    def other(self, name: object, file: Path, ranks: int | None = None) -> Config | None:
        """A DeepSpeed file that *file* names; it is checked, too. None where it is not found."""
        place = _beside(file, name)
        if place is None:
            return None
        self.file(place, named=True, ranks=ranks)
        try:
            return _parsed(place)
        except UnreadableError:  # said where it was checked
            return None

    def script(self, script: scripts.Script, file: Path) -> None:
        """The checks of a script, and of the configurations in it."""
        for test in (*scripts.CHECKS, *loaders.CHECKS):
            self.problems += test(script)
        for call in filter(scripts.is_arguments, script.calls):
            fsdp = trainer.fsdp_of(script, call, self.fsdp_config(script, call, file))
            for look in trainer.CHECKS:
                self.problems += look(fsdp)
        for found, call in scripts.configs(script):
            config = self.other(found, file) if isinstance(found, str) else found
            if config is None:
                continue
            if not isinstance(found, str):
                for check_one in deepspeed.CHECKS:
                    self.problems += check_one(config, self.machine)
            if scripts.is_arguments(call):
                self.problems += scripts.against_arguments(script, call, config)

    def fsdp_config(self, script: scripts.Script, call: scripts.Call, file: Path) -> Config | None:
        """What the Trainer is told of FSDP, in the script or in a file of its own."""
        node = script.argument(call, "fsdp_config")
        found = scripts.config_at(script, node) if node is not None else None
        if not isinstance(found, str):
            return found
        place = _beside(file, found)
        try:
            return _parsed(place) if place is not None else None
        except UnreadableError as error:
            self.refused(place or file, error)
            return None


def _beside(file: Path, name: object) -> Path | None:
    """The file that *file* names, beside it or from here."""
    if not isinstance(name, str) or "\0" in name:
        return None
    return next((place for place in (file.parent / name, Path(name)) if place.is_file()), None)


def _parsed(place: Path) -> Config:
    text = read_text(place)
    return parse(text, str(place), dialect_of(place, text))


def kind_of(data: Mapping[str, object]) -> str:
    """deepspeed, accelerate, or "" for anything else."""
    if "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data:
        return "deepspeed"
    if "distributed_type" in data or ("compute_environment" in data and "num_processes" in data):
        return "accelerate"
    half = any(isinstance(data.get(name), dict) for name in ("bf16", "fp16", "optimizer"))
    return "deepspeed" if half and "train_batch_size" in data else ""


def _below(folder: Path) -> Iterator[Path]:
    """The files of a folder that may be ours; links to folders are not followed."""
    for at, names, found in os.walk(folder):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED)
        for name in sorted(found):
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                yield Path(at) / name


def _resolve(file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return file.absolute()


def chosen(result: Result, select: frozenset[str], ignore: frozenset[str], *, all: bool) -> Result:
    """The problems that are asked for; *all*: also those that only state a fact."""
    kept = tuple(
        problem
        for problem in result.problems
        if (not select or problem.code in select)
        and problem.code not in ignore
        and (all or not problem.quiet)
    )
    return replace(result, problems=kept)
