"""How a micro-batch and a stage get into a command: words, variables, a copy of its configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromon.cli.plan import read_config
from zeromon.errors import LaunchError

FIELDS = ("micro_batch", "stage", "accumulation")
Values = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The user's command with its places for values."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    config: Path | None = None
    """A DeepSpeed JSON or an accelerate YAML that the command names."""

    def uses(self, field: str) -> bool:
        """Whether *field* has a place in the command, in a variable, or in the configuration."""
        texts = (*self.command, *self.environment.values())
        if any(f"{{{field}}}" in text for text in texts):
            return True
        return self.config is not None and field in _settable(read_config(self.config))

    def filled(
        self, values: Values, folder: Path
    ) -> tuple[list[str], dict[str, str], dict[Path, str]]:
        """Returns command, variables, and the files that they need, by their paths in *folder*."""
        words = [_fill(word, values) for word in self.command]
        environment = {name: _fill(text, values) for name, text in self.environment.items()}
        if self.config is None:
            return words, environment, {}
        written, files = _rewritten(self.config, values, folder)
        name = str(self.config)
        replaced = [
            str(written) if word == name
            else word.removesuffix(name) + str(written) if word.endswith("=" + name)
            else word
            for word in words
        ]  # fmt: skip
        if replaced == words:
            raise LaunchError(
                f"the command does not name {name}", "Give --config the path as the command has it."
            )
        return replaced, environment, files


def template(command: Sequence[str], variables: Sequence[str], config: str | None) -> Template:
    """Returns the template; raises :class:`LaunchError` where nothing would set the micro-batch."""
    environment = {}
    for each in variables:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise LaunchError(f"{each!r} sets no variable", "Like --env BATCH={micro_batch}.")
        environment[name] = value
    made = Template(
        command=tuple(command), environment=environment, config=Path(config) if config else None
    )
    if not made.uses("micro_batch"):
        raise LaunchError(
            "nothing in the command says where the micro-batch goes",
            "Write {micro_batch} in its place: -- torchrun ... train.py --batch {micro_batch}; or give "
            "--env BATCH={micro_batch}, or --config ds_config.json.",
        )
    return made


def _fill(text: str, values: Values) -> str:
    for field in FIELDS:
        if field in values:
            text = text.replace(f"{{{field}}}", values[field])
    return text


def _settable(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a configuration can take."""
    if "zero_optimization" in config or any(str(key).startswith("train_") for key in config):
        return FIELDS if "train_micro_batch_size_per_gpu" in config else ("stage", "accumulation")
    section = config.get("deepspeed_config")
    if not isinstance(section, Mapping):
        return ()
    inner = section.get("deepspeed_config_file")
    return _settable(read_config(Path(inner))) if inner else ("stage", "accumulation")


def _rewritten(path: Path, values: Values, folder: Path) -> tuple[Path, dict[Path, str]]:
    """The path of a copy of *path* with *values*, and all files that it needs. JSON is YAML, too."""
    config = json.loads(json.dumps(read_config(path)))
    files: dict[Path, str] = {}
    section = config.get("deepspeed_config")
    if isinstance(section, dict):
        if inner := section.get("deepspeed_config_file"):
            copy, files = _rewritten(Path(inner), values, folder)
            section["deepspeed_config_file"] = str(copy)
        else:
            _put(section, "zero_stage", values.get("stage"))
            _put(section, "gradient_accumulation_steps", values.get("accumulation"))
    else:
        if "train_micro_batch_size_per_gpu" in config:
            _put(config, "train_micro_batch_size_per_gpu", values.get("micro_batch"))
            config.pop("train_batch_size", None)  # DeepSpeed computes it from the others
        _put(config, "gradient_accumulation_steps", values.get("accumulation"))
        if "stage" in values:
            _put(config.setdefault("zero_optimization", {}), "stage", values["stage"])
    made = folder / path.name
    files[made] = json.dumps(config, indent=2) + "\n"
    return made, files


def _put(section: dict[str, Any], key: str, value: str | None) -> None:
    if value is not None:
        section[key] = int(value)
