"""Each fix that check offers does what it says: applied to the letter, the finding is gone.

The inputs are those of test_check.py. A fix of JSON or YAML is merged into the file, and DeepSpeed or
accelerate reads the result; an argument is set in the script, which then compiles.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from check.test_check import cases

from zeromon.check.deepspeed import fields
from zeromon.check.documents import parse_config
from zeromon.check.problem import Problem, load_schema
from zeromon.check.runner import check

Keys = tuple[str, ...]
ZERO = "zero_optimization"
LIBRARY = load_schema()


class ProseError(Exception):
    """A fix is a sentence, which no program can apply."""


class ComputedError(Exception):
    """The dict of a script is made by functions, or has values that only a run knows."""


# ---- what a fix says -----------------------------------------------------------------------------


def settings_in(fix: str, dialect: str) -> list[tuple[str, Any, str]]:
    """Returns the settings at the beginning of a fix: name, value, and the section that it names."""
    settings, rest = [], fix
    name = re.compile({"yaml": r"(\w+): ", "script": r"(\w+)="}.get(dialect, r'"(\w+)": '))
    read = {"yaml": yaml_value, "script": expression}.get(dialect, json_value)
    while match := name.match(rest):
        value, end = read(rest[match.end() :])
        rest = rest[match.end() + end :]
        place = re.match(r" (?:in|at) (?:the )?(\w+)", rest)
        settings.append((match[1], value, place[1] if place else ""))
        rest = re.sub(r"^(?: in \w+)?(, | and )?", "", rest)
    if not settings:
        raise ProseError(fix)
    return settings


def json_value(text: str) -> tuple[Any, int]:
    """Returns the JSON or Python value at the beginning of *text*, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        value, end = expression(text)
        return ast.literal_eval(value), end


def expression(text: str) -> tuple[Any, int]:
    text = re.split(r", (?:or|unless|if|not) ", text)[0]
    for end in range(len(text), 0, -1):
        try:
            return ast.unparse(ast.parse(text[:end].strip(), mode="eval").body), end
        except SyntaxError:
            continue
    raise ProseError(text)


def yaml_value(text: str) -> tuple[Any, int]:
    """Returns the YAML value before a comma, or before a word that explains it."""
    match = re.match(r"\{.*?\}|'[^']*'|[^\s,;]+", text)
    assert match is not None
    return yaml.safe_load(match[0]), match.end()


def names_in(listing: str) -> list[str]:
    return re.split(r", (?:or )?| and ", listing)


# ---- configurations ------------------------------------------------------------------------------

Section = dict[str, Any]


def find_parent(data: Section, name: str) -> Section:
    """Returns the section that has *name*, the outermost one first."""
    if name in data:
        return data
    for value in data.values():
        if isinstance(value, dict):
            try:
                return find_parent(value, name)
            except ProseError:
                continue
    raise ProseError(name)


def section_at(data: Section, keys: Keys) -> Section:
    for key in keys:
        value = data.get(key)
        if not isinstance(value, dict):
            value = data[key] = {}
        data = value
    return data


def apply_to_config(data: Section, problem: Problem, dialect: str) -> dict[str, str]:
    """Changes *data* as the fix says; returns other files that it writes."""
    keys, fix = tuple(filter(None, problem.key.split("."))), problem.fix
    top = LIBRARY["accelerate" if dialect == "yaml" else "deepspeed"]["top"]
    if fix in ("keep one", fields.HJSON_FIX):
        return {}  # a file that is written again is JSON, and has each key once
    head, _, block = fix.partition(":\n")
    if match := re.match(r"set deepspeed_config_file: (\S+), remove (.*), and write", head):
        data["deepspeed_config"]["deepspeed_config_file"] = match[1]
        for name in names_in(match[2]):
            del find_parent(data, name)[name]
        return {match[1]: block}
    if match := re.match(r"remove ([\w., ]+?)(?: here)?(, (?:if|or|and set) .*)?$", fix):
        for name in [keys[-1]] if match[1] == "it" else names_in(match[1]):
            del find_parent(data, name.split(".")[-1])[name.split(".")[-1]]
        if not (match[2] or "").startswith(", and set ") or " it in " in fix:
            return {}
        fix = (match[2] or "").removeprefix(", and set ")
    parent = section_at(data, keys[:-1]) if keys else data
    if match := re.fullmatch(r"(?:did you mean|write) (\w+)\??", fix):
        if keys[-1] in parent and problem.code != "ZM103":
            parent[match[1]] = parent.pop(keys[-1])
        else:
            parent[keys[-1]] = match[1]
    elif match := re.fullmatch(r"move it into (\w+)", fix):
        section_at(data, (match[1],))[keys[-1]] = data.pop(keys[-1])
    elif match := re.match(r"one of (.*)", fix):
        parent[keys[-1]] = yaml.safe_load(names_in(match[1])[0])
    else:
        for name, value, place in settings_in(fix, dialect):
            if place not in ("", "top"):
                at = (
                    section_at(parent, (place,))
                    if place == "params"
                    else find_parent(data, place)[place]
                )
            else:
                at = data if name in top or place == "top" or not keys else parent
                in_zero = keys[-1:] == (ZERO,) and name != ZERO and at is parent
                at = section_at(data, keys) if in_zero else at
            at[name] = value
    return {}


# ---- scripts -------------------------------------------------------------------------------------


def apply_to_script(source: str, problem: Problem) -> str:
    """Returns the script with an argument, or an entry of a dict, changed as the fix says."""
    tree, fix = ast.parse(source), problem.fix
    if fix.startswith(("did you mean ", "one of ")):
        return in_a_literal(tree, problem)
    is_argument = re.search(r"(^|set )\w+=", fix)
    is_setting = fix.startswith('"') or problem.key.partition(".")[0] in LIBRARY["deepspeed"]["top"]
    if not is_argument and is_setting:
        return in_a_dict(tree, problem)
    if not is_argument and any(
        isinstance(n, ast.Dict) and is_in_dict(n, problem) for n in ast.walk(tree)
    ):
        return in_a_dict(tree, problem)
    call = next((n for n in reversed([*ast.walk(tree)])
                 if isinstance(n, ast.Call) and is_at(n, problem)), None)  # fmt: skip
    if call is None:
        raise ProseError(fix)
    if match := re.match(r"remove (\w+)(?:, or \w+)?(?:, and set (.*))?$", fix):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != match[1]]
        fix = match[2]
    if fix:
        for name, value, _ in settings_in(fix, "script"):
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
            call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
    return ast.unparse(tree)


def is_at(call: ast.Call, problem: Problem) -> bool:
    """Returns whether the problem is at the call, or at an argument of it."""
    nodes = [call, *call.args, *(keyword.value for keyword in call.keywords)]
    return (problem.line, problem.column) in [(n.lineno, n.col_offset + 1) for n in nodes]


def in_a_dict(tree: ast.Module, problem: Problem) -> str:
    """Changes the outermost dict that has the place of *problem*, where it is all literals."""
    for node in ast.walk(tree):
        inner = [n for n in ast.walk(node) if isinstance(n, ast.Dict)]
        if isinstance(node, ast.Dict) and any(is_in_dict(n, problem) for n in inner):
            try:
                data = ast.literal_eval(node)
            except ValueError:
                raise ComputedError from None
            apply_to_config(data, problem, "json")
            replaced = ast.parse(repr(data), mode="eval").body
            assert isinstance(replaced, ast.Dict)
            node.keys, node.values = replaced.keys, replaced.values
            return ast.unparse(tree)
    raise ComputedError


def in_a_literal(tree: ast.Module, problem: Problem) -> str:
    """Changes the literal, or the word of it, that the message ends with."""
    choice = re.sub(r"did you mean (\w+)\?|one of ([^,]+).*", r"\1\2", problem.fix)
    wrong = re.split(r" has no |: ", problem.message)[-2 if ": " in problem.message else -1].split()[-1]
    for node in ast.walk(tree):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if key is not None and is_place(key, problem):
                literal = key if problem.code == "ZM102" else value
                assert isinstance(literal, ast.Constant)
                literal.value = ast.literal_eval(choice) if choice.isdigit() else choice
                return ast.unparse(tree)
        for word in ast.walk(node) if is_place(node, problem) else ():
            if isinstance(word, ast.Constant) and isinstance(word.value, str) and wrong in word.value:
                word.value = word.value.replace(wrong, choice)
                return ast.unparse(tree)
    raise ProseError(problem.fix)


def is_in_dict(node: ast.Dict, problem: Problem) -> bool:
    return any(is_place(n, problem) for n in (node, *filter(None, node.keys)))


def is_place(node: ast.AST, problem: Problem) -> bool:
    at = getattr(node, "lineno", 0), getattr(node, "col_offset", 0) + 1
    return at == (problem.line, problem.column)


# ---- the test ------------------------------------------------------------------------------------


def apply_fix(file: Path, problem: Problem) -> None:
    text = file.read_text()
    if file.suffix == ".py":
        file.write_text(apply_to_script(text, problem))
        return
    dialect = "yaml" if file.suffix == ".yaml" else "json"
    data = dict(parse_config(text, file.name, dialect).data)
    for name, content in apply_to_config(data, problem, dialect).items():
        (file.parent / name).write_text(content)
    file.write_text(yaml.safe_dump(data) if dialect == "yaml" else json.dumps(data))


def refusal_of_deepspeed(file: Path) -> str:
    """Returns why DeepSpeed refuses a configuration that transformers or accelerate has filled in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def filled(section: Section) -> Section:
        return {key: filled(value) if isinstance(value, dict) else value
                for key, value in section.items() if value != "auto"}  # fmt: skip

    data = dict(parse_config(file.read_text(), file.name, "json").data)
    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1} | filled(data))
    except Exception as error:  # whatever DeepSpeed raises
        return f"{type(error).__name__}: {error}"
    return ""


# The two files of a tutorial: YAML 1.1 reads 5e8 as a text
LAUNCH = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: "
TEXTS = [
    ("a.yaml", f"{LAUNCH}2\n  offload_optimizer_device: none\n  gradient_accumulation_steps: 4\n"
     "  gradient_clipping: 1.0\n  overlap_comm: true\n  reduce_scatter: true\n"
     "  allgather_bucket_size: 5e8\n  reduce_bucket_size: 5e8\n"),
    ("a.yaml", f"{LAUNCH}3\n  stage3_prefetch_bucket_size: 5e8\n"
     "  stage3_param_persistence_threshold: 1e6\n  stage3_max_live_parameters: 1e9\n"
     "  stage3_gather_16bit_weights_on_model_save: true\n  offload_param_device: none\n"),
    ("a.yaml", f"{LAUNCH}3\n  offload_optimizer_device: cpu\n  offload_optimizer:\n"
     "    pin_memory: true\n  bf16:\n    enabled: true\n  train_micro_batch_size_per_gpu: '4'\n"),
    ("a.yaml", f"{LAUNCH}3\n  zero_optimization:\n    overlap_comm: true\n  wall_clock_breakdown: no\n"),
    ("a.yaml", f"{LAUNCH}3\n  offload_optimizer: cpu\n  overlap_comm: true\n".replace("bf16", "'no'")),
    ("a.yaml", f"{LAUNCH}2\n  bf16: true\n  sub_group_size: 1e9\n".replace("mixed_precision", "#")),
    ("a.yaml", "distributed_type: MULTI_GPU\ndynamo_backend: INDUCTOR\n"),
    ("ds.json", '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2,'
     ' "cpu_offload": false, "contiguous_gradients": "false"}}'),
    ("ds.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}'),
]  # fmt: skip


def refusal_of_accelerate(file: Path) -> str:
    """Returns why accelerate refuses a file, or its plugin the DeepSpeed file beside it."""
    from accelerate import DeepSpeedPlugin
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(str(file))
        if (file.parent / "ds.json").exists():
            DeepSpeedPlugin(hf_ds_config=str(file.parent / "ds.json"))
    except Exception as error:  # whatever accelerate raises
        return f"{type(error).__name__}: {error}"
    return ""


INPUTS = sorted({*((case.values[0], case.values[1]) for case in cases()), *TEXTS})
PROSE = {
    ("ZM003", "move it out"): "moves a call out of a condition",
    ("ZM103", "a number"): "the user knows the number",
    ("ZM104", "DistributedDataParallel(model)"): "another wrapper",
    ("ZM105", "give"): "the user knows the rate",
    ("ZM105", "keep"): "the user knows which",
    ("ZM106", "fully_shard(..., mp_policy=policy)"): "changes several calls",
    ("ZM107", "auto_wrap_policy=functools.partial"): "the user knows the class",
    ("ZM107", "deepspeed.profiling"): "another program",
    ("ZM108", "make the optimizer after"): "moves a line",
    ("ZM109", "model.clip_grad_norm_"): "another call",
    ("ZM206", "for block in"): "the user knows the blocks",
    ("ZM308", "with model.no_sync()"): "changes the loop",
    ("ZM312", "for block in"): "the user knows the blocks",
    ("ZM408", "ShardedGradScaler()"): "changes the loop",
    ("ZM408", "torch.distributed.fsdp.sharded"): "another class",
    ("ZM412", "one seed"): "moves a line",
    ("ZM604", "loader.sampler.set_epoch"): "changes the loop",
    ("ZM702", "FullStateDictConfig"): "the call has other arguments by position",
    ("ZM704", "torch.load"): "another call",
}  # fmt: skip
"""Rule and beginning of a fix that no program can apply -> why."""


def is_prose(problem: Problem) -> bool:
    fix = re.sub(r"\b(m|self\.m|model)\.clip", "model.clip", problem.fix)
    return any(problem.code == code and fix.startswith(start) for code, start in PROSE)


@pytest.mark.parametrize(("name", "text"), INPUTS)
def test_a_fix_does_what_it_says(tmp_path: Path, name: str, text: str) -> None:
    """The finding is gone, there is no other error, and DeepSpeed reads the file."""
    file = tmp_path / name
    file.write_text(text)
    before = check([str(file)]).problems
    readers = {".json": refusal_of_deepspeed, ".yaml": refusal_of_accelerate}
    refused = readers[file.suffix](file) if file.suffix in readers else ""
    for problem in before:
        file.write_text(text)
        if problem.file != str(file) or is_prose(problem):
            continue
        try:
            apply_fix(file, problem)
        except ComputedError:
            continue
        after = check([str(file)]).problems
        alike = [sum((p.code, p.key, p.message) == (problem.code, problem.key, problem.message)
                     for p in problems) for problems in (before, after)]  # fmt: skip
        assert alike[1] < alike[0], (problem, file.read_text())
        known = {(p.code, p.message) for p in before}
        assert [p for p in after if p.severity == "error" and (p.code, p.message) not in known] == []
        for config in tmp_path.glob("*.json"):
            assert refusal_of_deepspeed(config) in ("", refused), problem
        if file.suffix == ".yaml":
            assert refusal_of_accelerate(file) in ("", refused), problem
        # DeepSpeed alone refuses "auto" for a batch: whoever fills it in must be in the file or the fix
        is_filled = '"auto"' in text or "with transformers" in problem.fix
        assert file.suffix != ".json" or is_filled or '"auto"' not in file.read_text()


def test_the_table_of_prose_has_no_line_too_many(tmp_path: Path) -> None:
    """Each line of it is a fix of some input."""
    unused = set(PROSE)
    for name, text in INPUTS:
        (tmp_path / name).write_text(text)
        for p in check([str(tmp_path / name)]).problems:
            fix = re.sub(r"\b(m|self\.m|model)\.clip", "model.clip", p.fix)
            unused -= {(c, start) for c, start in unused if p.code == c and fix.startswith(start)}
    assert unused == set()
