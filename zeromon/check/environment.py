"""accelerate's environment variables, as the options of its launcher that they stand for.

Sources: ``__post_init__`` of ``DeepSpeedPlugin`` and ``FullyShardedDataParallelPlugin`` in
``accelerate/utils/dataclasses.py``, which read them; ``accelerate/utils/launch.py``, which sets them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from zeromon.check.problem import Config, Path, Problem, is_on, load_schema, without_effect

ENVIRONMENT = "the environment"
"""Stands for a file where a figure comes from an environment variable."""

DIALECT = "environment"
"""The syntax of a configuration that a program passes to accelerate in its environment."""

_KINDS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
_PREFIXES = ("ACCELERATE_", "FSDP_")

_ONLY_IF_GIVEN = {
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch",
    "fsdp_state_dict_type", "fsdp_ignored_modules",
}  # fmt: skip
"""Options of FSDP that ``accelerate launch`` passes on only where they are set; it sets all others."""


@dataclass(frozen=True, slots=True)
class Variable:
    """The value of an environment variable, and where it is set."""

    value: Any
    line: int
    column: int


Variables = Mapping[str, Variable]


def option_of(name: str) -> str:
    """Returns the option of ``accelerate launch`` that sets the variable *name*; "" without one."""
    option: str = load_schema()["accelerate"]["environment"].get(name, "")
    return option


def read_kind(variables: Variables) -> str:
    """Returns FSDP or DEEPSPEED, where the environment turns it on; else ""."""
    # Accelerator and its state compare the text with "true" alone
    return next(
        (kind for n, kind in _KINDS.items() if n in variables and variables[n].value is True), ""
    )


def read_options(variables: Variables) -> dict[str, Variable]:
    """Returns option -> variable, for each variable with a known value."""
    settings = {option_of(name): v for name, v in variables.items() if "$" not in str(v.value)}
    return {option: variable for option, variable in settings.items() if option}


def merge_options(
    data: dict[str, Any], variables: Variables, paths: Mapping[str, Path]
) -> dict[Path, tuple[int, int]]:
    """Adds what the environment turns on to *data*; returns the positions of what was added.

    *paths*: option -> where accelerate's file has it. ``accelerate launch`` overwrites the variables of
    the strategy that it starts itself.
    """
    kind, launched = read_kind(variables), str(data.get("distributed_type", ""))
    if not kind or launched not in ("", "NO", "MULTI_GPU", kind):
        return {}
    data["distributed_type"] = kind
    positions: dict[Path, tuple[int, int]] = {}
    for option, variable in read_options(variables).items():
        path = paths.get(option, ())
        if len(path) != 2 or (launched == "FSDP" and option not in _ONLY_IF_GIVEN):
            continue
        section = data.get(path[0]) or {}
        if option not in section:
            data[path[0]] = {**section, option: variable.value}
            positions[path] = variable.line, variable.column
    return positions


def merge_precision(data: dict[str, Any], variables: Variables) -> dict[Path, tuple[int, int]]:
    """Adds the precision of the environment to *data*; returns its position."""
    variable = read_options(variables).get("mixed_precision")
    if variable is None:
        return {}
    data["mixed_precision"] = variable.value
    return {("mixed_precision",): (variable.line, variable.column)}


def unknown_variables(variables: Variables, file: str, used: str) -> Iterator[Problem]:
    """Yields variables with a misspelt name; *used*: the text of the launch, which may read its own."""
    library = load_schema()["accelerate"]
    plain_names = {_plain_name(name): name for name in library["environment"]}
    for name, variable in variables.items():
        is_known = name in library["environment"] or not name.startswith(_PREFIXES)
        matches = get_close_matches(_plain_name(name), plain_names, 1, 0.8)
        # Without a name like it the variable may be one of the script; a shell may read it itself
        if matches and not is_known and not re.search(rf"\$\{{?{name}\b", used):
            message = f"accelerate {library['version']} does not read {name}"
            fix = f"did you mean {plain_names[matches[0]]}?"
            yield _variable_problem("ZM102", variable, file, message, fix, name)


def wrong_switches(variables: Variables, file: str) -> Iterator[Problem]:
    """Yields switches that are on for other programs, such as 1 and yes, and off for accelerate."""
    for name in _KINDS:
        variable = variables.get(name)
        if variable is not None and not isinstance(variable.value, bool) and is_on(variable.value):
            message = f"{name} is {variable.value}, and accelerate takes only true"
            yield _variable_problem("ZM103", variable, file, message, f"{name}=true", name)


def _plain_name(name: str) -> str:
    return re.sub(r"^((ACCELERATE|FSDP)_)+", "", name)


def _variable_problem(
    code: str, variable: Variable, file: str, message: str, fix: str, name: str
) -> Problem:
    return Problem(file, variable.line, variable.column, code, "warning", message, fix, name)


def overwritten_variables(variables: Variables, launch: Config, file: str) -> Iterator[Problem]:
    """Yields variables that ``accelerate launch`` replaces by its own options, or by their defaults."""
    has_fsdp = launch.get("distributed_type") == "FSDP"
    has_fsdp &= launch.origins.get("distributed_type") != ENVIRONMENT
    for name, variable in variables.items():
        option = option_of(name)
        is_set = has_fsdp and option.startswith("fsdp_") and option not in _ONLY_IF_GIVEN
        path = (option,) if option == "mixed_precision" else ("fsdp_config", option)
        value = launch.get(*path, default="its default")
        differs = str(value).lower() != str(variable.value).lower() and "$" not in str(variable.value)
        if differs and (is_set or option == "mixed_precision"):
            message = f"{name} has no effect: accelerate launch sets it to {value}"
            fix = f"--{option} {variable.value}"
            yield _variable_problem("ZM106", variable, file, message, fix, name)


def idle_variables(variables: Variables, file: str) -> Iterator[Problem]:
    """Yields one problem for all variables of FSDP, where nothing turns FSDP on."""
    names = [name for name in variables if option_of(name).startswith("fsdp_")]
    is_unknown = any("$" in str(variables[name].value) for name in _KINDS if name in variables)
    if names and not is_unknown and not read_kind(variables):
        message, _ = without_effect(names, "unless ACCELERATE_USE_FSDP is true")
        fix = "ACCELERATE_USE_FSDP=true"
        yield _variable_problem("ZM106", variables[names[0]], file, message, fix, names[0])


def spell_variables(problem: Problem) -> Problem:
    """Returns *problem* with the names of variables instead of options."""
    message, fix = problem.message, problem.fix
    for name, option in load_schema()["accelerate"]["environment"].items():
        if option and option in message + fix:
            message = re.sub(rf"\b{option}\b", name, message)
            fix = re.sub(rf"\b{option}\b(: )?", lambda m, n=name: n + "=" * bool(m[1]), fix)  # type: ignore[misc]
    return replace(problem, message=message, fix=fix)
