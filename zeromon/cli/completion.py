"""The script that completes the command: verbs, options, choices, files and the names of runs."""

import argparse
from collections.abc import Iterator

from zeromon.cli.options import import_extra

SHELLS = ("bash", "zsh", "fish")
_STORE = "${ZEROMON_STORE:-${XDG_STATE_HOME:-$HOME/.local/state}/zeromon}/runs"
_PREAMBLE = {
    "bash": f'_zeromon_runs() {{ compgen -W "$(command ls "{_STORE}" 2>/dev/null)" -- "$1"; }}',
    "zsh": f'_zeromon_runs() {{ compadd -- ${{(f)"$(command ls "{_STORE}" 2>/dev/null)"}} }}',
    "fish": "function _zeromon_runs; zeromon runs --json 2>/dev/null"
    ' | string match -ra \'(?<="run":")[^"]+\'; end',
}
_RUNS = {"bash": "_zeromon_runs", "zsh": "_zeromon_runs", "fish": "(_zeromon_runs)"}
_OF_RUNS = {"run", "runs", "target", "job"}
"""Where the name of a run is expected: the destinations of the arguments."""
_OF_FILES, _OF_FOLDERS = {"FILE", "PATH", "CONFIG"}, {"DIR"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for *shell* of the command that *parser* reads."""
    shtab = import_extra("shtab", "--completion", "completion")
    for action in walk_parser_actions(parser):
        if action.dest in _OF_RUNS and action.choices is None:
            action.complete = _RUNS  # type: ignore[attr-defined]
        elif action.metavar in _OF_FILES or action.dest in ("files", "config"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _OF_FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell, preamble=_PREAMBLE)
    return script


def walk_parser_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of *parser* and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from walk_parser_actions(sub)
