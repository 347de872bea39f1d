"""Where zeromon is installed: beside the torch of a training, or in an environment of its own."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from zeromon.base.errors import LaunchError
from zeromon.ring import paths

_TOOLS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}
"""The file by which a tool's environment is known, and the command that makes one."""


def package_install_hint(extra: str) -> str:
    """How to install *extra* where this zeromon is, and not where a ``pip`` of the path would."""
    commands = (command for file, command in _TOOLS.items() if Path(sys.prefix, file).is_file())
    return f"{next(commands, 'pip install')} 'zeromon[{extra}]'"


def find_training_python() -> str:
    """Returns this Python if it has torch, else that of the path: a tool's environment has none."""
    has_torch = find_spec("torch") is not None
    return sys.executable if has_torch else shutil.which("python") or sys.executable


def own_package_folders() -> tuple[str, str]:
    """The folders of the packages ``zeromon`` and ``zeromon_agents``, for another Python to load."""
    agents = find_spec("zeromon_agents")
    if agents is None or agents.origin is None:
        raise LaunchError("this installation has no zeromon_agents", "Reinstall zeromon.")
    return str(paths.CORE), str(Path(agents.origin).resolve().parents[1])
