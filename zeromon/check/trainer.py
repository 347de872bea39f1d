"""Checks of the FSDP arguments that a script passes to transformers' Trainer.

Only literal values are checked. A check is one function, and one line in :data:`CHECKS`.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zeromon.check.problem import (
    AUTO,
    Config,
    Path,
    Problem,
    Schema,
    is_on,
    listed,
    meant,
    number,
    schema,
    whole,
    without_effect,
)
from zeromon.check.scripts import UNKNOWN, Call, Script

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OF_FSDP_1 = (
    "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states",
    "limit_all_gathers",
)  # fmt: skip
"""Options that TrainingArguments._process_fsdp_args reads only for version 1."""

_REMOVED = {
    "fsdp_min_num_params": "min_num_params",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
"""Removed argument of TrainingArguments -> its name in ``fsdp_config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """The FSDP arguments of one call."""

    script: Script
    call: Call
    given: Any
    """The value of ``fsdp``, a bool or a list of words; None: not given, UNKNOWN: not a literal."""
    section: Config
    """``fsdp_config``; empty where it is missing or unknown."""

    @property
    def words(self) -> list[str]:
        """The options of the old form of ``fsdp``, a list of words; empty for other forms."""
        return self.given if isinstance(self.given, list) else []

    @property
    def version(self) -> int | None:
        """The version of FSDP, 1 or 2; None where unknown."""
        value = self.get("version", schema()["transformers"]["fsdp_version"])
        version = whole(value)
        return version if version in (1, 2) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option of ``fsdp_config``, with or without the prefix ``fsdp_``."""
        return self.section.get(*self.path(name), default=default)

    def path(self, name: str) -> Path:
        """Returns the path of an option as the configuration writes it: with ``fsdp_`` or without."""
        long = f"fsdp_{name}"
        return (long,) if self.section.has(long) else (name,)

    def problem(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at an option of ``fsdp_config``."""
        return self.section.problem(code, severity, self.path(name), message, fix)

    def of_argument(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at an argument of the call."""
        node = self.script.argument(self.call, name) or self.call.node
        return self.script.problem(code, severity, node, message, fix, name)


Check = Callable[[Fsdp], Iterable[Problem]]


def fsdp_of(script: Script, call: Call, section: Config | None) -> Fsdp:
    """Returns the FSDP arguments of *call*; *section*: the value of ``fsdp_config``, None if unknown."""
    empty = Config(file=script.file, data={}, places={}, dialect="python")
    return Fsdp(script=script, call=call, given=_given(script, call), section=section or empty)


def _given(script: Script, call: Call) -> Any:
    node = script.argument(call, "fsdp")
    if node is None:
        return None if all(word.arg for word in call.node.keywords) else UNKNOWN
    if isinstance(node, (ast.List, ast.Tuple)):
        words = [_word(script, item) for item in node.elts]
        return UNKNOWN if None in words else words
    value = script.value(node)
    return (_word(script, node) or "").split() if isinstance(value, str) else value


def _word(script: Script, node: ast.expr) -> str | None:
    """Returns a string, or the name of an ``FSDPOption`` in lower case; None for anything else."""
    value = script.value(node)
    if isinstance(node, ast.Attribute) and isinstance(value, str):
        return value.rpartition(".")[2].lower()
    return value if isinstance(value, str) else None


# ---- FSDP -----------------------------------------------------------------------------------------


def names(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields unknown options of ``fsdp_config``, and removed arguments."""
    known: Schema = schema()["transformers"]
    for name in fsdp.section.data:
        bare = str(name).removeprefix("fsdp_")
        if bare not in known["fsdp_config"]:
            message = f"fsdp_config has no {name}: transformers ignores the option"
            fix = meant(bare, known["fsdp_config"]) or f"remove {name}"
            yield fsdp.section.problem("ZM102", "warning", (str(name),), message, fix)
    for old, new in _REMOVED.items():
        if fsdp.script.argument(fsdp.call, old) is not None:
            gone = old not in known["arguments"]
            does = "refuses" if gone else "will not take"
            message = f"transformers {does} {old}: it is an option of fsdp_config now"
            fix = f'fsdp_config={{"{new}": ...}}'
            yield fsdp.of_argument("ZM104", "error" if gone else "warning", old, message, fix)


def values(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields values that transformers or accelerate does not know."""
    options: list[str] = schema()["transformers"]["fsdp"]
    for word in fsdp.words:
        if word.lower() not in options:
            fix = meant(word, options) or f"one of {', '.join(options)}"
            yield fsdp.of_argument("ZM103", "error", "fsdp", f"there is no fsdp option {word}", fix)
    for name, choices in _choices(fsdp).items():
        value = fsdp.get(name)
        # transformers compares the policy case-sensitively, and the other options in capitals
        compared = str(value) if name == "auto_wrap_policy" else str(value).upper()
        if value not in (None, AUTO) and compared not in choices:
            message = f"there is no {name} {value}"
            words = [choice for choice in choices if not choice.isdigit()] or choices
            yield fsdp.problem("ZM103", "error", name, message, f"one of {', '.join(words)}")


def _choices(fsdp: Fsdp) -> dict[str, list[str]]:
    known = schema()["accelerate"]
    allowed = {"auto_wrap_policy": known["fsdp_auto_wrap_policy"], "version": ["1", "2"]}
    for name in ("backward_prefetch", "state_dict_type"):
        choices = known[f"fsdp_{name}"]
        allowed[name] = [*choices, *map(str, range(1, len(choices) + 1))]
    if fsdp.version == 2:
        allowed["state_dict_type"] = ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "1", "3"]
        allowed["reshard_after_forward"] = ["TRUE", "FALSE", "1", "0", "YES", "NO", "ON", "OFF"]
    elif fsdp.version == 1:
        allowed["reshard_after_forward"] = known["fsdp_sharding_strategy"]
    return allowed


def deprecated(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields the old form of ``fsdp`` and version 1, which transformers 5 deprecates."""
    if not _is_new():
        return
    if fsdp.words:
        message = "fsdp as words is deprecated: transformers takes fsdp=True and fsdp_config"
        yield fsdp.of_argument("ZM104", "info", "fsdp", message, _new_form(fsdp.words))
    if fsdp.get("version") is not None and fsdp.version == 1:
        message = "version 1 of FSDP is deprecated in transformers"
        yield fsdp.problem("ZM104", "info", "version", message, fsdp.section.write("version", 2))


def _is_new() -> bool:
    """Returns whether ``fsdp`` is a bool, as from transformers 5 on."""
    return (number(schema()["transformers"]["version"].partition(".")[0]) or 0) >= 5


def _new_form(words: list[str]) -> str:
    section: dict[str, bool] = {}
    if "shard_grad_op" in words:
        section["reshard_after_forward"] = False
    if "offload" in words:
        section["cpu_offload"] = True
    return f"fsdp=True, fsdp_config={section}" if section else "fsdp=True"


def contradictions(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields arguments that exclude each other."""
    chosen = [word for word in fsdp.words if word.lower() in _STRATEGIES]
    if len(chosen) > 1:
        message = f"fsdp names {listed(chosen)}, and one strategy counts"
        severity = "warning" if _is_new() else "error"
        yield fsdp.of_argument("ZM105", severity, "fsdp", message, f"keep {chosen[0]}")
    only_1 = [word for word in chosen if word not in ("full_shard", "shard_grad_op")]
    if only_1 and fsdp.version == 2:
        message = f"{only_1[0]} is a strategy of FSDP1, and this is version 2"
        fix = 'fsdp_config={"version": 1}, or full_shard'
        yield fsdp.of_argument("ZM105", "error", "fsdp", message, fix)
    deepspeed = fsdp.script.argument(fsdp.call, "deepspeed")
    has_deepspeed = deepspeed is not None and fsdp.script.value(deepspeed) is not None
    if has_deepspeed and fsdp.given not in (None, False, [], UNKNOWN):
        message = "fsdp and deepspeed are both given, and Trainer refuses that"
        yield fsdp.of_argument("ZM105", "error", "deepspeed", message, "remove one of them")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        node = fsdp.script.argument(fsdp.call, name)
        if is_on(fsdp.get("activation_checkpointing")) and fsdp.script.value(node) is True:
            message = f"{name} and fsdp_config's activation_checkpointing are both on"
            yield fsdp.of_argument("ZM105", "error", name, message, f"{name}=False")


def no_effect(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields options without effect: FSDP is off, has the other version, or wraps by another policy."""
    if fsdp.given in (None, False, []) and fsdp.section.data:
        message = "fsdp_config has no effect: fsdp is not given"
        fix = "fsdp=True" if _is_new() else 'fsdp="full_shard auto_wrap"'
        yield fsdp.of_argument("ZM106", "warning", "fsdp_config", message, fix)
        return
    unused = [name for name in _OF_FSDP_1 if fsdp.section.has(*fsdp.path(name))]
    if unused and fsdp.version == 2:
        message, fix = without_effect(unused, "under FSDP2")
        yield fsdp.problem("ZM106", "info", unused[0], message, fix)
    by_size = fsdp.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") == "SIZE_BASED_WRAP"
    if _is_new() and (number(fsdp.get("min_num_params")) or 0) > 0 and not by_size:
        message = "min_num_params has no effect: modules are wrapped by their class"
        fix = fsdp.section.write("auto_wrap_policy", "SIZE_BASED_WRAP")
        yield fsdp.problem("ZM106", "warning", "min_num_params", message, fix)


def costly(fsdp: Fsdp) -> Iterator[Problem]:
    """Yields valid settings that cost memory or time, and a broadcast that loading on rank 0 needs."""
    no_words = _is_new() or not fsdp.words or "auto_wrap" in fsdp.words
    if fsdp.get("auto_wrap_policy") == "NO_WRAP":
        message = "NO_WRAP makes the whole model one unit: all its parameters are gathered at once"
        fix = fsdp.section.write("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        yield fsdp.problem("ZM206", "warning", "auto_wrap_policy", message, fix)
    elif not no_words:  # transformers 4 wraps only with auto_wrap
        message = "without auto_wrap the whole model is one unit: it is gathered at once"
        fix = f'fsdp="{" ".join([*fsdp.words, "auto_wrap"])}"'
        yield fsdp.of_argument("ZM206", "warning", "fsdp", message, fix)
    if fsdp.version == 1 and fsdp.get("limit_all_gathers") is False:
        message = "limit_all_gathers off lets all-gathers run ahead, and memory with them"
        fix = fsdp.section.write("limit_all_gathers", True)
        yield fsdp.problem("ZM209", "warning", "limit_all_gathers", message, fix)
    if fsdp.version == 1 and str(fsdp.get("backward_prefetch")).upper() == "NO_PREFETCH":
        message = "without prefetch no all-gather of backward overlaps computation"
        fix = fsdp.section.write("backward_prefetch", "BACKWARD_PRE")
        yield fsdp.problem("ZM304", "warning", "backward_prefetch", message, fix)
    if str(fsdp.get("state_dict_type")).upper() == "FULL_STATE_DICT":
        message = "a checkpoint is gathered into the host memory of rank 0, while all others wait"
        fix = fsdp.section.write("state_dict_type", "SHARDED_STATE_DICT")
        fix += ", if nothing else reads the checkpoints"
        yield fsdp.problem("ZM702", "info", "state_dict_type", message, fix)
    loads = is_on(fsdp.get("cpu_ram_efficient_loading"))
    if not _is_new() and loads and is_on(fsdp.get("sync_module_states")) is False:
        message = (
            "cpu_ram_efficient_loading loads on rank 0 alone, and transformers refuses that without "
            "sync_module_states"
        )
        fix = fsdp.section.write("sync_module_states", True)
        yield fsdp.problem("ZM703", "error", "sync_module_states", message, fix)


CHECKS: tuple[Check, ...] = (names, values, deprecated, contradictions, no_effect, costly)
