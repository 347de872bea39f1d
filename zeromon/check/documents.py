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

MAX_BYTES = 1 << 20
"""Largest file that is read, in bytes."""
_MAX_YAML_CHARS = 256 << 10
"""Largest YAML file that is read, in characters: the YAML parser is slow."""
_MAX_KEYS = 100_000
_MAX_DEPTH = 60
_MAX_BRACKETS = 200

SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".py": "python"}
"""Suffix of a file -> its dialect; other files of a folder are not read."""


class UnreadableError(Exception):
    """A file cannot be read; carries the position of the fault and a fix."""

    def __init__(self, message: str, line_number: int = 1, column: int = 1, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line_number
        self.column = column
        self.fix = fix


def read_text(file: File) -> str:
    """Returns the text of *file*.

    Raises :class:`UnreadableError` for a special file, a file of more than :data:`MAX_BYTES`, and a
    file that is not UTF-8.
    """
    try:
        status = file.stat()
        # Reading a named pipe waits for a writer for ever, and /dev/zero has no end
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("this is not a regular file")
        if status.st_size > MAX_BYTES:
            size = -(-status.st_size >> 20)
            raise UnreadableError(f"{size} MiB is too large for a configuration or a script")
        content = file.read_bytes()
    except OSError as error:
        raise UnreadableError(f"the file cannot be opened: {error.strerror}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        line_start = content.rfind(b"\n", 0, error.start) + 1
        column = len(content[line_start : error.start].decode()) + 1
        message = f"byte {error.start} is not UTF-8 text"
        raise UnreadableError(message, line_number, column, "save it as UTF-8") from error


def dialect_of(file: File, content: str) -> str:
    """Returns json, yaml or python, by the suffix of *file*, else by the first sign of *content*."""
    dialect = SUFFIXES.get(file.suffix.lower())
    return dialect or ("json" if content.lstrip().startswith("{") else "yaml")


def parse_config(content: str, name: str, dialect: str) -> Config:
    """Returns the configuration in a JSON or YAML text; raises :class:`UnreadableError`."""
    refused = None
    if dialect == "json":
        (data, positions, duplicates), refused = _parse_json(content)
    else:
        data, positions, duplicates = _parse_yaml(content)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise UnreadableError(f"the file contains {kind}, not a configuration")
    return Config(
        file=name,
        data=data,
        places=positions,
        dialect=dialect,
        duplicates=duplicates,
        text=content,
        refused=refused,
    )


def parse_python(source: str) -> ast.Module:
    """Returns a script's syntax tree, its columns in characters; raises :class:`UnreadableError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in the script's strings
            tree = ast.parse(source)
    except SyntaxError as error:
        message = f"Python cannot read it: {error.msg}"
        raise UnreadableError(message, error.lineno or 1, error.offset or 1) from error
    # ast.parse raises these for null bytes and for deep nests, besides SyntaxError
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"Python cannot read it: {error or 'nested too deep'}") from error
    if not source.isascii():
        # Columns of ast count the bytes of UTF-8: from here on they count characters
        encoded_lines = [row.encode() for row in re.split(r"\r\n?|\n", source)]
        for node in ast.walk(tree):
            if isinstance(node, (ast.expr, ast.stmt, ast.keyword)):
                prefix = encoded_lines[node.lineno - 1][: node.col_offset]
                node.col_offset = len(prefix.decode(errors="replace"))
    return tree


_Read = tuple[Any, dict[Path, tuple[int, int]], tuple[Path, ...]]


def _parse_json(content: str) -> tuple[_Read, Refused | None]:
    """Returns what JSON or Hjson contains, and why and where JSON refuses it; None for JSON."""
    refused = None
    try:
        data = json.loads(content)
        token = _TOKEN
    except json.JSONDecodeError as error:
        if not content.strip():
            raise UnreadableError("the file is empty") from error
        refused = Refused(f"{error.msg[:1].lower()}{error.msg[1:]}", error.lineno, error.colno)
        data = _parse_hjson(content, refused)
        token = _HJSON_TOKEN
    except RecursionError as error:
        raise UnreadableError("the file is nested too deep") from error
    except ValueError as error:  # a number of thousands of digits
        raise UnreadableError(str(error).partition(":")[0]) from error
    try:
        positions, duplicates = _json_key_places(content, token)
    except IndexError:  # Hjson without braces around it
        positions, duplicates = {(): (1, 1)}, ()
    return (data, positions, duplicates), refused


def _parse_hjson(content: str, refused: Refused) -> Any:
    """Returns what Hjson contains, as DeepSpeed reads it: comments, trailing commas, unquoted keys."""
    message = f"neither JSON nor Hjson: {refused.message}"
    # hjson is written in Python, and as slow as the YAML parser
    if len(content) > _MAX_YAML_CHARS:
        raise UnreadableError(message, refused.line, refused.column)
    try:
        return hjson.loads(content, object_pairs_hook=dict)
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


def _json_key_places(
    content: str, tokens: re.Pattern[str]
) -> tuple[dict[Path, tuple[int, int]], tuple[Path, ...]]:
    """Returns the positions of the keys of valid JSON, and duplicate keys; skips keys in lists."""
    positions: dict[Path, tuple[int, int]] = {(): (1, 1)}
    duplicates = []
    path: list[str] = []
    kinds: list[str] = []
    line_number, start = 1, 0
    key, at = "", (1, 1)
    for token in tokens.finditer(content):
        line_number += content.count("\n", start, token.start())
        start = token.start()
        symbol = token.group()
        if symbol in "{[":
            kinds.append(symbol)
            path.append("")
        elif symbol in "}]":
            kinds.pop()
            path.pop()
        elif symbol == ":" and key:
            path[-1] = key
            if "[" not in kinds and len(positions) < _MAX_KEYS:
                key_path = tuple(path)
                if key_path in positions:
                    duplicates.append(key_path)
                positions[key_path] = at
        elif symbol not in ":," and not symbol.startswith(("#", "/")):
            # Hjson takes control characters in a text, which strict JSON refuses
            key = json.loads(symbol, strict=False) if symbol[0] == '"' else symbol.strip("'")
            at = line_number, start - content.rfind("\n", 0, start)
    return positions, tuple(duplicates)


def _parse_yaml(content: str) -> _Read:
    if len(content) > _MAX_YAML_CHARS:
        raise UnreadableError(f"{len(content) >> 10} KiB of YAML is too large for a configuration")
    # The time of PyYAML grows with the square of the brackets that are open at once
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", content):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    if deepest > _MAX_BRACKETS:
        raise UnreadableError("the file is nested too deep")
    try:
        # SafeLoader makes no Python objects; within the try, as it refuses characters when it is made
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        positions: dict[Path, tuple[int, int]] = {(): (1, 1)}
        duplicates: list[Path] = []
        if node is None:
            raise UnreadableError("the file is empty")
        # A few lines of aliases of aliases stand for billions of nodes, which each walk visits
        if _expanded_size(node, {}) > _MAX_KEYS:
            raise UnreadableError("YAML aliases expand to too many nodes, or contain themselves")
        for path, mark in _yaml_keys(node, (), set()):
            if path in positions:
                duplicates.append(path)
            positions[path] = mark.line + 1, mark.column + 1
            if len(positions) > _MAX_KEYS:
                break
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise UnreadableError(f"not YAML: {error.problem or error.context}", *position) from error
    except yaml.YAMLError as error:
        raise UnreadableError(f"not YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UnreadableError("the file is nested too deep") from error
    except (ValueError, OverflowError) as error:  # 2026-99-99, a number of thousands of digits
        raise UnreadableError(f"not YAML: {str(error).partition(':')[0]}") from error
    return data, positions, tuple(duplicates)


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Returns the number of nodes with all aliases expanded; infinite for a node inside itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in inner)
    return sizes[id(node)]


def _yaml_keys(node: yaml.Node, path: Path, visited: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yields the path and mark of each key of nested mappings; visits an aliased node once."""
    if not isinstance(node, yaml.MappingNode) or id(node) in visited or len(path) > _MAX_DEPTH:
        return
    visited.add(id(node))
    for key, value in node.value:
        # "<<" merges another mapping: it is no key of this one
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            key_path = (*path, str(key.value))
            yield key_path, key.start_mark
            yield from _yaml_keys(value, key_path, visited)
