"""Runs one training in an environment of its own, alone and below the real `zeromon run`."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import LAUNCH, PROGRAMS, ZEROMON, clean_environment, free_port

PROGRAM = str(PROGRAMS / "identical.py")
STEPS = 8


@dataclass(frozen=True)
class Environment:
    """What is special, for zeromon and for the command alone. $W is an empty folder."""

    before: str = ""
    """Shell commands in a mount namespace of its own."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    command: tuple[str, ...] = (*LAUNCH, "2", PROGRAM)
    around: tuple[str, ...] = ()
    """Words before `zeromon run`."""
    as_user: tuple[str, ...] = ()
    """Who runs it all, in words before the shell."""
    told: str = ""
    """What the user reads on stderr or in the report; "": nothing but where the views are."""
    code: int = 0
    """The exit code, with and without."""
    after: str = ""
    """Shell commands after the report; what they write is :attr:`Told.after`."""
    ranks: tuple[int, ...] = (0, 1)
    """The ranks whose steps are all in the record; () where the run cannot be watched."""
    wait_seconds: int = 20
    """How long the report waits for the end of the record."""


@dataclass
class Told:
    """What a command said."""

    code: int
    output: list[str]
    errors: list[str]
    report: str = ""
    after: str = ""
    record: dict[str, Any] = field(default_factory=dict)


def run(one: Environment, folder: Path, places: dict[str, str], *, watched: bool) -> Told:
    """Runs the command in the environment *one*, below the real `zeromon run` if it is *watched*."""
    (folder / "home").mkdir(parents=True)
    places = places | {"$W": str(folder)}

    def placed(text: str) -> str:
        for name, value in places.items():
            text = text.replace(name, value)
        return text

    begin = [*ZEROMON, "run", "--name", "r", "--"] if watched else []
    words = shlex.join(map(placed, (*one.around, *begin, *one.command)))
    script = ["set -e", placed(one.before), "set +e"]
    script += [f"{words} > {folder}/out 2> {folder}/err; echo $? > {folder}/code"]
    if watched:
        report = shlex.join([*ZEROMON, "report", "r"])
        script += [
            f"{report} --wait {one.wait_seconds} > {folder}/report 2>&1",
            f"{report} --json > {folder}/record 2> {folder}/record.err",
            f"{{ {placed(one.after) or ':'}; }} > {folder}/after 2>&1",
        ]
    environment = clean_environment() | {
        "HOME": str(folder / "home"),
        "ZEROMON_PORT": str(free_port()),
        **{name: placed(value) for name, value in one.settings.items()},
    }
    shared = 'mount -t tmpfs -o size=2g none /dev/shm && exec "$@"'
    outer = ["unshare", "--mount", "--uts", "bash", "-c", shared, "bash", *one.as_user]
    done = subprocess.run(
        [*outer, "bash", "-c", "\n".join(script)],
        env=environment, cwd=PROGRAMS, timeout=900, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (folder / "code").exists(), done.stderr
    text = {name: (folder / name).read_text(errors="replace") for name in ("code", "out", "err")}
    told = Told(int(text["code"]), sorted(text["out"].splitlines()), text["err"].splitlines())
    if watched:
        told.report = (folder / "report").read_text(errors="replace")
        told.report += "".join(path.read_text() for path in folder.rglob("findings.jsonl"))
        told.after = (folder / "after").read_text(errors="replace")
        record = (folder / "record").read_text()
        told.record = json.loads(record) if record else {}
    return told
