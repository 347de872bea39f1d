"""In which environment each run ran: commit, command, driver, packages, variables. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from zeromon.readout.text import CHANGED, commit_text
from zeromon.snapshot import RunSnapshot

UNKNOWN, NOT_SET = "n/a", "not set"
_COMMIT, *_ = _OF_MACHINE = ("git commit", "device", "driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is not the same in all columns."""

    name: str
    values: tuple[str, ...]
    """One for each column; those of repeats that differ among themselves with `` / `` between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environments of all columns."""

    differences: tuple[Difference, ...]
    same: int
    """How many values are known of each column and the same."""
    unknown: tuple[int, ...]
    """Columns, from 0, whose runs did not record their environment."""


def environment(columns: Sequence[Sequence[RunSnapshot]]) -> Environment:
    """Returns what differs between the environments of *columns*; a column is repeats of one run."""
    known = [[found for run in runs if (found := of_run(run))] for runs in columns]
    told = [found for runs in known for found in runs]
    names = dict.fromkeys(name for found in told for name in found)
    rows = [
        Difference(name=name, values=tuple(_value(name, runs) for runs in known)) for name in names
    ]
    commands = _commands(columns)
    differ = [
        row for row in rows if len({v for v in row.values if v != UNKNOWN}) > 1 or _doubtful(row)
    ]
    return Environment(
        differences=(*([commands] if commands is not None else []), *_settings(columns), *differ),
        same=len(rows) - len(differ) if all(known) else 0,
        unknown=tuple(number for number, runs in enumerate(known) if not runs),
    )


def of_run(run: RunSnapshot) -> dict[str, str]:
    """Returns name -> value of the environment of a run, by its first rank; {} where it told none."""
    first = next((rank for rank in run.ranks if rank.process.get("packages")), None)
    if first is None:
        return {}
    process = first.process
    of_machine = zip(
        _OF_MACHINE, (commit_text(run.revision), first.device, run.driver), strict=True
    )
    return {
        **{name: value for name, value in of_machine if value},
        **process.get("packages", {}),
        **{name: value for name, value in process.get("variables", {}).items() if value},
    }


def _value(name: str, runs: Sequence[dict[str, str]]) -> str:
    otherwise = UNKNOWN if name in _OF_MACHINE else NOT_SET
    return " / ".join(dict.fromkeys(run.get(name, otherwise) for run in runs)) or UNKNOWN


def _doubtful(row: Difference) -> bool:
    """Whether equal values may hide a difference: two working copies with changes of one commit."""
    return row.name == _COMMIT and any(CHANGED in value for value in row.values)


def _commands(columns: Sequence[Sequence[RunSnapshot]]) -> Difference | None:
    """Returns the words of the commands that are not in all of them; None where all are alike."""
    commands = [runs[0].command for runs in columns]
    if not all(commands) or len(set(commands)) == 1:
        return None
    options = [_options(words) for words in commands]
    common = set.intersection(*map(set, options))
    own = (" ".join(one for one in words if one not in common) for words in options)
    return Difference(name="command", values=tuple(text or "nothing more" for text in own))


def _settings(columns: Sequence[Sequence[RunSnapshot]]) -> list[Difference]:
    """Returns the settings of DeepSpeed that differ, where all columns have them."""
    told = [_first_settings(runs[0]) for runs in columns]
    names = dict.fromkeys(name for found in told for name in found) if all(told) else {}
    rows = (
        Difference(name=name, values=tuple(found.get(name, NOT_SET) for found in told))
        for name in names
    )
    return [row for row in rows if len(set(row.values)) > 1]


def _first_settings(run: RunSnapshot) -> dict[str, str]:
    rank = next((rank for rank in run.ranks if rank.settings), None)
    return {one.name: one.effective for one in rank.settings} if rank is not None else {}


def _options(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, each option with its value: ``--steps 12``."""
    joined: list[str] = []
    for word in words:
        if (
            joined
            and joined[-1].startswith("-")
            and "=" not in joined[-1]
            and " " not in joined[-1]
        ):
            alone = word.startswith("-")
            joined[-1:] = [joined[-1], word] if alone else [f"{joined[-1]} {word}"]
        else:
            joined.append(word)
    return joined
