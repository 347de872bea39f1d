"""Parses configurations and scripts, with the line and column of every key. No code is executed.

The positions of YAML keys come from the marks of the YAML composer. :mod:`json` parses JSON, and
:mod:`hjson` what that refuses, as in DeepSpeed; a separate scan over the tokens locates the keys. Lines
and columns count from 1.
"""

import ast
import json
import math
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import hjson
import yaml

from zeromon.check.problem import Config, Path, Refused

MOST_BYTES = 1 << 20
"""Largest file that is read, in bytes."""
_MOST_YAML = 256 << 10
"""Largest YAML file that is read, in characters: the YAML parser is slow."""
_MOST_KEYS = 100_000
_DEEPEST = 60
_MOST_BRACKETS = 200

SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".py": "python"}
"""Suffix of a file -> its dialect; other files of a folder are not read."""


class UnreadableError(Exception):
    """A file cannot be read; carries the position of the fault and a fix."""

    def __init__(self, message: str, line: int = 1, column: int = 1, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column
        self.fix = fix


def read_text(file: File) -> str:
    """Returns the text of *file*.

    Raises :class:`UnreadableError` for a special file, a file of more than :data:`MOST_BYTES`, and a
    file that is not UTF-8.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("this is not a regular file")
        if status.st_size > MOST_BYTES:
            size = -(-status.st_size >> 20)
            raise UnreadableError(f"{size} MiB is too large for a configuration or a script")
        content = file.read_bytes()
    except OSError as error:
        raise UnreadableError(f"the file cannot be opened: {error.strerror}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        message = f"byte {error.start} is not UTF-8 text"
        raise UnreadableError(message, line, column, "save it as UTF-8") from error


def dialect_of(file: File, text: str) -> str:
    """Returns json, yaml or python, by the suffix of *file*, else by the first character of *text*."""
    known = SUFFIXES.get(file.suffix.lower())
    return known or ("json" if text.lstrip().startswith("{") else "yaml")


def parse(text: str, name: str, dialect: str) -> Config:
    """Returns the configuration in a JSON or YAML text; raises :class:`UnreadableError`."""
    refused = None
    if dialect == "json":
        (data, places, duplicates), refused = _parse_json(text)
    else:
        data, places, duplicates = _parse_yaml(text)
    if not isinstance(data, dict):
        what = "nothing" if data is None else f"a {type(data).__name__}"
        raise UnreadableError(f"the file contains {what}, not a configuration")
    return Config(
        file=name,
        data=data,
        places=places,
        dialect=dialect,
        duplicates=duplicates,
        text=text,
        refused=refused,
    )


def parse_python(text: str) -> ast.Module:
    """Returns the syntax tree of a script; raises :class:`UnreadableError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in the script's strings
            return ast.parse(text)
    except SyntaxError as error:
        message = f"Python cannot read it: {error.msg}"
        raise UnreadableError(message, error.lineno or 1, error.offset or 1) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"Python cannot read it: {error or 'nested too deep'}") from error


_Read = tuple[Any, dict[Path, tuple[int, int]], tuple[Path, ...]]


def _parse_json(text: str) -> tuple[_Read, Refused | None]:
    """Returns what JSON or Hjson contains, and why and where JSON refuses it; None for JSON."""
    refused = None
    try:
        data = json.loads(text)
        token = _TOKEN
    except json.JSONDecodeError as error:
        if not text.strip():
            raise UnreadableError("the file is empty") from error
        refused = Refused(f"{error.msg[:1].lower()}{error.msg[1:]}", error.lineno, error.colno)
        data = _parse_hjson(text, refused)
        token = _HJSON_TOKEN
    except RecursionError as error:
        raise UnreadableError("the file is nested too deep") from error
    except ValueError as error:  # a number of thousands of digits
        raise UnreadableError(str(error).partition(":")[0]) from error
    try:
        places, duplicates = _json_places(text, token)
    except IndexError:  # Hjson without braces around it
        places, duplicates = {(): (1, 1)}, ()
    return (data, places, duplicates), refused


def _parse_hjson(text: str, refused: Refused) -> Any:
    """Returns what Hjson contains, as DeepSpeed reads it: comments, trailing commas, unquoted keys."""
    message = f"neither JSON nor Hjson: {refused.message}"
    if len(text) > _MOST_YAML:
        raise UnreadableError(message, refused.line, refused.column)
    try:
        return hjson.loads(text, object_pairs_hook=dict)
    except RecursionError as error:
        raise UnreadableError("the file is nested too deep") from error
    except (ValueError, IndexError, OverflowError) as error:
        raise UnreadableError(message, refused.line, refused.column) from error


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')
_HJSON_TOKEN = re.compile(
    r"""(?:\#|//)[^\n]*|/\*.*?\*/|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
    r"""|[{}\[\]:,]|[^\s{}\[\]:,"'\#/][^\s{}\[\]:,]*(?=\s*:)""",
    re.DOTALL,
)


def _json_places(
    text: str, tokens: re.Pattern[str]
) -> tuple[dict[Path, tuple[int, int]], tuple[Path, ...]]:
    """Returns the positions of the keys of valid JSON, and duplicate keys; skips keys in lists."""
    places: dict[Path, tuple[int, int]] = {(): (1, 1)}
    duplicates = []
    path: list[str] = []
    kinds: list[str] = []
    line, start = 1, 0
    last, at = "", (1, 1)
    for token in tokens.finditer(text):
        line += text.count("\n", start, token.start())
        start = token.start()
        symbol = token.group()
        if symbol in "{[":
            kinds.append(symbol)
            path.append("")
        elif symbol in "}]":
            kinds.pop()
            path.pop()
        elif symbol == ":" and last:
            path[-1] = last
            if "[" not in kinds and len(places) < _MOST_KEYS:
                here = tuple(path)
                if here in places:
                    duplicates.append(here)
                places[here] = at
        elif symbol not in ":," and not symbol.startswith(("#", "/")):
            last = json.loads(symbol, strict=False) if symbol[0] == '"' else symbol.strip("'")
            at = line, start - text.rfind("\n", 0, start)
    return places, tuple(duplicates)


def _brackets(text: str) -> int:
    """How many brackets are open at once, at most: the time of PyYAML grows with their square."""
    opened = most = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        opened = opened + 1 if bracket in "[{" else max(0, opened - 1)
        most = max(most, opened)
    return most


def _parse_yaml(text: str) -> _Read:
    if len(text) > _MOST_YAML:
        raise UnreadableError(f"{len(text) >> 10} KiB of YAML is too large for a configuration")
    if _brackets(text) > _MOST_BRACKETS:
        raise UnreadableError("the file is nested too deep")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        places: dict[Path, tuple[int, int]] = {(): (1, 1)}
        duplicates: list[Path] = []
        if node is None:
            raise UnreadableError("the file is empty")
        if _expanded(node, {}) > _MOST_KEYS:
            raise UnreadableError("YAML aliases expand to too many nodes, or contain themselves")
        for path, mark in _yaml_keys(node, (), set()):
            if path in places:
                duplicates.append(path)
            places[path] = mark.line + 1, mark.column + 1
            if len(places) > _MOST_KEYS:
                break
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise UnreadableError(f"not YAML: {error.problem or error.context}", *place) from error
    except yaml.YAMLError as error:
        raise UnreadableError(f"not YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UnreadableError("the file is nested too deep") from error
    except (ValueError, OverflowError) as error:  # 2026-99-99, a number of thousands of digits
        raise UnreadableError(f"not YAML: {str(error).partition(':')[0]}") from error
    return data, places, tuple(duplicates)


def _expanded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Returns the number of nodes with all aliases expanded; infinite for a node inside itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in inner)
    return sizes[id(node)]


def _yaml_keys(node: yaml.Node, path: Path, visited: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yields the path and mark of each key of nested mappings; visits an aliased node once."""
    if not isinstance(node, yaml.MappingNode) or id(node) in visited or len(path) > _DEEPEST:
        return
    visited.add(id(node))
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            here = (*path, str(key.value))
            yield here, key.start_mark
            yield from _yaml_keys(value, here, visited)
