"""Prints a script that completes this command: verbs, options, choices, files and the names of runs.

  zeromon completion bash > ~/.local/share/bash-completion/completions/zeromon
  zeromon completion zsh > ~/.zfunc/_zeromon                 with ~/.zfunc in fpath
  zeromon completion fish > ~/.config/fish/completions/zeromon.fish

Needs pip install 'zeromon[completion]' to make the script, not to use it.
"""

import argparse
import sys
from collections.abc import Iterator

from zeromon.cli import build_parser
from zeromon.cli.options import package

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon completion bash | zsh | fish``"""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def call(options: argparse.Namespace) -> int:
    """Prints the script."""
    sys.stdout.write(script(options.shell))
    return 0


def script(shell: str) -> str:
    """The script for *shell*, made from the parsers of all verbs."""
    shtab = package("shtab", "completion", "completion")
    parser = build_parser()
    for action in actions(parser):
        if action.dest in _OF_RUNS and action.choices is None:
            action.complete = _RUNS  # type: ignore[attr-defined]
        elif action.metavar in _OF_FILES or action.dest in ("files", "config"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _OF_FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    made: str = shtab.complete(parser, shell, preamble=_PREAMBLE)
    return made


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of *parser* and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from actions(sub)
