"""Checks of FSDP options: of an accelerate file, and of what a script passes to transformers' Trainer.

Of a script only literal values are checked. A check is one function, and one line in :data:`CHECKS` or
:data:`OF_TRAINER`.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromon.check.problem import (
    ENVIRONMENT_DIALECT,
    NAMES,
    Config,
    Path,
    Problem,
    did_you_mean,
    join_names,
    load_schema,
    set_instead,
    without_effect,
)
from zeromon.check.scripts import UNKNOWN, Call, Script
from zeromon.memory.config_files import AUTO, is_on, parse_number, parse_whole

_OF_FSDP_1: Sequence[str] = NAMES["accelerate"]["fsdp1_options"]
"""Options that only FSDP1 reads."""

_COSTLY: Sequence[Sequence[Any]] = NAMES["accelerate"]["costly_options"]
"""Option, its costly values, code, severity, a better value, message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """FSDP options, and the library that reads them."""

    config: Config
    section: Path
    """The path of the options; empty where they are the whole configuration."""
    reader: str
    """accelerate or transformers."""

    @property
    def known(self) -> set[str]:
        """The names of the options that the library reads, without ``fsdp_``."""
        return {name.removeprefix("fsdp_") for name in load_schema()[self.reader]["fsdp_config"]}

    @property
    def version(self) -> int | None:
        """The version of FSDP, 1 or 2; None where unknown."""
        version = parse_whole(self.get("version", load_schema()[self.reader].get("fsdp_version", 1)))
        return version if version in (1, 2) else None

    @property
    def strategy(self) -> str:
        """The name of accelerate's sharding strategy, also for a number; FULL_SHARD by default."""
        value = str(self.get("sharding_strategy", "FULL_SHARD")).upper()
        names: list[str] = load_schema()["accelerate"]["fsdp_sharding_strategy"]
        return names[int(value) - 1] if value in map(str, range(1, len(names) + 1)) else value

    def path(self, name: str) -> Path:
        """Returns the path of an option as the configuration writes it: with ``fsdp_`` or without."""
        long = (*self.section, f"fsdp_{name}")
        short = (*self.section, name)
        prefers_long = self.reader == "accelerate" and not self.config.has(*short)
        return long if prefers_long or self.config.has(*long) else short

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option; *default* where it is not given or not known."""
        return self.config.get(*self.path(name), default=default) if name in self.known else default

    def word(self, name: str) -> str:
        """Returns the value as the library compares it: in capitals, but Trainer's policy as it is."""
        value = str(self.get(name))
        is_exact = name == "auto_wrap_policy" and self.reader == "transformers"
        return value if is_exact else value.upper()

    def write(self, name: str, value: Any) -> str:
        """Returns an option with *value* in the syntax of the configuration."""
        return self.config.write(self.path(name)[-1], value)

    def problem(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at an option."""
        return self.config.problem(code, severity, self.path(name), message, fix)


Check = Callable[[Options], Iterable[Problem]]


def unknown_options(options: Options) -> Iterator[Problem]:
    """Yields options that the library does not know."""
    for name in options.config.section(*options.section):
        if str(name).removeprefix("fsdp_") not in options.known:
            message = f"fsdp_config has no {name}: {options.reader} ignores the option"
            fix = did_you_mean(name, load_schema()[options.reader]["fsdp_config"]) or f"remove {name}"
            path = (*options.section, str(name))
            yield options.config.problem("ZM102", "warning", path, message, fix)


def wrong_values(options: Options) -> Iterator[Problem]:
    """Yields values that transformers or accelerate refuses."""
    for name, choices in _option_choices(options).items():
        value = options.get(name)
        # In a script "auto" stands for a computed value, and not for the text
        is_computed = value == AUTO and options.config.dialect == "python"
        if value is not None and not is_computed and options.word(name) not in choices:
            message = f"there is no {options.path(name)[-1]} {value}"
            spelled = [choice for choice in choices if not choice.isdigit()] or choices
            yield options.problem("ZM103", "error", name, message, f"one of {', '.join(spelled)}")


def _option_choices(options: Options) -> dict[str, list[str]]:
    library, version = load_schema()["accelerate"], options.version
    allowed = {"auto_wrap_policy": library["fsdp_auto_wrap_policy"], "version": ["1", "2"]}
    if version == 2:
        allowed["state_dict_type"] = ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "1", "3"]
        allowed["reshard_after_forward"] = ["TRUE", "FALSE", "1", "0", "YES", "NO", "ON", "OFF"]
        return allowed
    for name in ("backward_prefetch", "state_dict_type", *(("sharding_strategy",) if version else ())):
        choices = library[f"fsdp_{name}"]
        # transformers takes the strategy of FSDP1 as reshard_after_forward
        is_renamed = name == "sharding_strategy" and options.reader == "transformers"
        option = "reshard_after_forward" if is_renamed else name
        allowed[option] = [*choices, *map(str, range(1, len(choices) + 1))]
    return allowed


def other_version(options: Options) -> Iterator[Problem]:
    """Yields one problem for all options that the version of FSDP ignores."""
    ignored, condition = list(_OF_FSDP_1), "under FSDP2"
    if options.version != 2:  # Trainer's strategy of FSDP1 is reshard_after_forward
        ignored = ["reshard_after_forward"] if options.reader == "accelerate" else []
        condition = "under FSDP1, where fsdp_sharding_strategy decides"
    unused = [name for name in ignored if options.get(name) is not None]
    if not unused:
        return
    message, fix = without_effect([options.path(name)[-1] for name in unused], condition)
    if "sharding_strategy" in unused and options.get("reshard_after_forward") is None:
        keeps = options.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        old = options.path("sharding_strategy")[-1]
        fix = set_instead(old, options.write("reshard_after_forward", not keeps))
    yield options.problem("ZM106", "info", unused[0], message, fix)


def costly_values(options: Options) -> Iterator[Problem]:
    """Yields valid values that cost memory or time."""
    ranks = options.config.whole("num_processes") or 1
    # With one rank nobody waits while a checkpoint is gathered
    waits = options.reader != "accelerate" or ranks > 1
    for name, costs, code, severity, better, message in _COSTLY:
        is_read = options.version == 1 or name not in _OF_FSDP_1
        counts = is_read and (waits or name != "state_dict_type")
        if counts and options.word(name) in costs:
            fix = options.write(name, better)
            yield options.problem(code, severity, name, message, fix)


def rank0_loading(options: Options) -> Iterator[Problem]:
    """Yields loading on rank 0 alone without a broadcast; transformers refuses that before version 5."""
    # The launcher refuses; the plugin, which reads the environment, broadcasts nevertheless
    refuses = options.reader == "accelerate" or not _fsdp_is_bool()
    refuses &= options.config.dialect != ENVIRONMENT_DIALECT
    loads = is_on(options.get("cpu_ram_efficient_loading", options.reader == "accelerate"))
    if refuses and loads and is_on(options.get("sync_module_states")) is False:
        message = (
            f"cpu_ram_efficient_loading loads on rank 0 alone, and {options.reader} refuses that "
            "without sync_module_states"
        )
        fix = options.write("sync_module_states", True)
        yield options.problem("ZM703", "error", "sync_module_states", message, fix)


def across_nodes(options: Options) -> Iterator[Problem]:
    """Yields full sharding over several nodes: each step gathers the parameters twice between nodes."""
    machines, section = options.config.whole("num_machines") or 1, "parallelism_config"
    message = f"parameters are gathered across {machines} nodes, in forward and in backward"
    name, fix = "sharding_strategy", options.write("sharding_strategy", "HYBRID_SHARD")
    shards = options.version == 1 and options.strategy == "FULL_SHARD"
    if options.version == 2:
        name, fix = "reshard_after_forward", f"{section}: {{{section}_dp_replicate_size: {machines}}}"
        replicas = options.config.whole(section, f"{section}_dp_replicate_size") or 1
        shards = is_on(options.get(name, True)) is True and replicas < 2
    if machines > 1 and shards:
        fix = f"{fix}, costs the memory of a whole copy a node"
        yield options.problem("ZM307", "info", name, message, fix)


def activation_offload(options: Options) -> Iterator[Problem]:
    """Yields offload of activations without checkpointing, which accelerate refuses."""
    name = "activation_checkpointing_offload"
    can = is_on(options.get("activation_checkpointing")) and options.version == 2
    if is_on(options.get(name)) and not can:
        message = "offloading activations needs fsdp_activation_checkpointing and FSDP2"
        fix = "fsdp_activation_checkpointing: true, fsdp_version: 2"
        yield options.problem("ZM105", "error", name, message, fix)


CHECKS: tuple[Check, ...] = (
    wrong_values, costly_values, rank0_loading, other_version, across_nodes, activation_offload,
)  # fmt: skip


# ---- what a script passes to Trainer --------------------------------------------------------------

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_REMOVED: Mapping[str, str] = NAMES["transformers"]["removed_arguments"]
"""Removed argument of TrainingArguments -> its name in ``fsdp_config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Options):
    """The FSDP arguments of one call."""

    script: Script
    call: Call
    given: Any
    """The value of ``fsdp``, a bool or a list of words; None: not given, UNKNOWN: not a literal."""

    @property
    def words(self) -> list[str]:
        """The options of the old form of ``fsdp``, a list of words; empty for other forms."""
        return self.given if isinstance(self.given, list) else []

    def of_argument(self, code: str, severity: str, name: str, message: str, fix: str) -> Problem:
        """Returns a problem at an argument of the call."""
        node = self.script.argument(self.call, name) or self.call.node
        return self.script.problem(code, severity, node, message, fix, name)


def fsdp_of(script: Script, call: Call, section: Config | None) -> Arguments:
    """Returns the FSDP arguments of *call*; *section*: the value of ``fsdp_config``, None if unknown."""
    empty = Config(file=script.file, data={}, places={}, dialect=script.dialect)
    return Arguments(
        config=section or empty, section=(), reader="transformers", script=script, call=call,
        given=_fsdp_value(script, call),
    )  # fmt: skip


def _fsdp_value(script: Script, call: Call) -> Any:
    node = script.argument(call, "fsdp")
    if node is None:
        return None if all(keyword.arg for keyword in call.node.keywords) else UNKNOWN
    if isinstance(node, (ast.List, ast.Tuple)):
        options = [_option_word(script, item) for item in node.elts]
        return UNKNOWN if None in options else options
    value = script.value(node)
    return (_option_word(script, node) or "").split() if isinstance(value, str) else value


def _option_word(script: Script, node: ast.expr) -> str | None:
    """Returns a string, or the name of an ``FSDPOption`` in lower case; None for anything else."""
    value = script.value(node)
    if isinstance(node, ast.Attribute) and isinstance(value, str):
        return value.rpartition(".")[2].lower()
    return value if isinstance(value, str) else None


def removed_arguments(fsdp: Arguments) -> Iterator[Problem]:
    """Yields removed arguments."""
    for old, new in _REMOVED.items():
        if fsdp.script.argument(fsdp.call, old) is not None:
            is_gone = old not in load_schema()["transformers"]["arguments"]
            does = "refuses" if is_gone else "will not take"
            message = f"transformers {does} {old}: it is an option of fsdp_config now"
            value = ast.unparse(fsdp.script.argument(fsdp.call, old) or ast.Constant(...))
            has_section = fsdp.script.argument(fsdp.call, "fsdp_config") is not None
            option = (
                f'"{new}": {value} in fsdp_config'
                if has_section
                else f'fsdp_config={{"{new}": {value}}}'
            )
            fix = set_instead(old, option)
            yield fsdp.of_argument("ZM104", "error" if is_gone else "warning", old, message, fix)


def unknown_words(fsdp: Arguments) -> Iterator[Problem]:
    """Yields words of ``fsdp`` that transformers does not know."""
    options: list[str] = load_schema()["transformers"]["fsdp"]
    for name in fsdp.words:
        if name.lower() not in options:
            fix = did_you_mean(name, options) or f"one of {', '.join(options)}"
            yield fsdp.of_argument("ZM103", "error", "fsdp", f"there is no fsdp option {name}", fix)


def deprecated_forms(fsdp: Arguments) -> Iterator[Problem]:
    """Yields the old form of ``fsdp`` and version 1, which transformers 5 deprecates."""
    if not _fsdp_is_bool():
        return
    if fsdp.words:
        message = "fsdp as words is deprecated: transformers takes fsdp=True and fsdp_config"
        yield fsdp.of_argument("ZM104", "info", "fsdp", message, _new_form(fsdp.words))
    if fsdp.get("version") is not None and fsdp.version == 1:
        message = "version 1 of FSDP is deprecated in transformers"
        yield fsdp.problem("ZM104", "info", "version", message, fsdp.write("version", 2))


def _fsdp_is_bool() -> bool:
    """Returns whether ``fsdp`` is a bool, as from transformers 5 on."""
    return (parse_number(load_schema()["transformers"]["version"].partition(".")[0]) or 0) >= 5


def _new_form(options: list[str]) -> str:
    section: dict[str, bool] = {}
    if "shard_grad_op" in options:
        section["reshard_after_forward"] = False
    if "offload" in options:
        section["cpu_offload"] = True
    return f"fsdp=True, fsdp_config={section}" if section else "fsdp=True"


def excluding_arguments(fsdp: Arguments) -> Iterator[Problem]:
    """Yields arguments that exclude each other."""
    chosen = [name for name in fsdp.words if name.lower() in _STRATEGIES]
    if len(chosen) > 1:
        message = f"fsdp names {join_names(chosen)}, and one strategy counts"
        severity = "warning" if _fsdp_is_bool() else "error"
        yield fsdp.of_argument("ZM105", severity, "fsdp", message, f"keep {chosen[0]}")
    only_1 = [name for name in chosen if name not in ("full_shard", "shard_grad_op")]
    if only_1 and fsdp.version == 2:
        message = f"{only_1[0]} is a strategy of FSDP1, and this is version 2"
        fix = 'fsdp_config={"version": 1}, or full_shard'
        yield fsdp.of_argument("ZM105", "error", "fsdp", message, fix)
    deepspeed = fsdp.script.argument(fsdp.call, "deepspeed")
    has_deepspeed = deepspeed is not None and fsdp.script.value(deepspeed) is not None
    if has_deepspeed and fsdp.given not in (None, False, [], UNKNOWN):
        message = "fsdp and deepspeed are both given, and Trainer refuses that"
        yield fsdp.of_argument("ZM105", "error", "deepspeed", message, "remove deepspeed, or fsdp")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        node = fsdp.script.argument(fsdp.call, name)
        if is_on(fsdp.get("activation_checkpointing")) and fsdp.script.value(node) is True:
            message = f"{name} and fsdp_config's activation_checkpointing are both on"
            yield fsdp.of_argument("ZM105", "error", name, message, f"{name}=False")


def no_effect(fsdp: Arguments) -> Iterator[Problem]:
    """Yields options without effect: FSDP is off, is of the other version, or wraps by class."""
    if fsdp.given in (None, False, []) and fsdp.config.data:
        message = "fsdp_config has no effect: fsdp is not given"
        fix = "fsdp=True" if _fsdp_is_bool() else 'fsdp="full_shard auto_wrap"'
        yield fsdp.of_argument("ZM106", "warning", "fsdp_config", message, fix)
        return
    yield from other_version(fsdp)
    by_size = fsdp.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") == "SIZE_BASED_WRAP"
    if _fsdp_is_bool() and (parse_number(fsdp.get("min_num_params")) or 0) > 0 and not by_size:
        message = "min_num_params has no effect: modules are wrapped by their class"
        fix = fsdp.write("auto_wrap_policy", "SIZE_BASED_WRAP")
        yield fsdp.problem("ZM106", "warning", "min_num_params", message, fix)


def no_auto_wrap(fsdp: Arguments) -> Iterator[Problem]:
    """Yields words without auto_wrap: transformers 4 wraps only with it."""
    if fsdp.words and "auto_wrap" not in fsdp.words and not _fsdp_is_bool():
        message = "without auto_wrap the whole model is one unit: it is gathered at once"
        fix = f'fsdp="{" ".join([*fsdp.words, "auto_wrap"])}"'
        yield fsdp.of_argument("ZM206", "warning", "fsdp", message, fix)


OF_TRAINER: tuple[Callable[[Arguments], Iterable[Problem]], ...] = (
    unknown_options, wrong_values, costly_values, rank0_loading, removed_arguments, unknown_words,
    deprecated_forms, excluding_arguments, no_effect, no_auto_wrap,
)  # fmt: skip
