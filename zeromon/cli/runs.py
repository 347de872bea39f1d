"""Lists the runs of this node, and orders their records: rename, note, tag, delete.

  zeromon runs                          with verdict, duration and size
  zeromon runs --json                   the same for scripts
  zeromon runs note RUN "with the new loader"
  zeromon runs tag RUN baseline zero2   --remove TAG takes one off
  zeromon runs rename RUN NAME          of a run that has ended
  zeromon runs rm RUN RUN               asks first; never one that is running

RUN is a run id or its beginning; rm takes whole names only. Notes and tags are kept in the run's record,
and zeromon report shows them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from zeromon.cli import agreed, say
from zeromon.cli.options import flag, several
from zeromon.cli.terminal import show, show_json, working
from zeromon.collector.run import read_folder
from zeromon.errors import RunNotFound, RunRefused, SourceError, os_errors_as
from zeromon.readout.verdict import Health
from zeromon.report.table import column_table
from zeromon.ring import paths
from zeromon.sources.live import node_runs
from zeromon.storage.run_store import About, Manifest, Store, manifest_of
from zeromon.units import human_bytes, human_seconds, printable

_MOST_TAG, _MOST_NOTE = 64, 4000
_CLOCK = "%Y-%m-%d %H:%M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon runs [--json]``, ``zeromon runs rm | rename | note | tag``"""
    flag(parser, "--json", "print JSON")
    parser.set_defaults(act=_list)
    actions = parser.add_subparsers(metavar="ACTION")
    note = _action(actions, "note", "write a note on a run; without TEXT, print it", _note)
    note.add_argument("run", metavar="RUN", help="run id or its beginning")
    note.add_argument("text", metavar="TEXT", nargs="?", help='the note; "" deletes it')
    tag = _action(actions, "tag", "tag a run; without TAG, print its tags", _tag)
    tag.add_argument("run", metavar="RUN", help="run id or its beginning")
    tag.add_argument("tags", metavar="TAG", nargs="*", help="one word each")
    several(tag, "--remove", "TAG", "take it off; may be repeated")
    name = _action(actions, "rename", "give the record of a run another name", _rename)
    name.add_argument("run", metavar="RUN", help="run id or its beginning")
    name.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes, underscores")
    remove = _action(actions, "rm", "delete the records of runs that have ended", _remove)
    remove.add_argument("runs", metavar="RUN", nargs="+", help="run id, in full")
    flag(remove, "--yes", "do not ask")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    act: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    made = actions.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
    made.set_defaults(act=act)
    return made


def call(options: argparse.Namespace) -> int:
    """Lists the runs, or changes the record of one."""
    code: int = options.act(options)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run of the list."""

    run: str
    live: bool
    health: str
    """The word of the verdict."""
    cause: str
    """The last threat to the run; "" without one."""
    state: str
    seconds: float
    """From its start to its end, or to the last snapshot."""
    steps: int
    ranks: int
    strategy: str
    started_wall: float
    """Seconds since the epoch."""
    record_bytes: int
    note: str
    tags: tuple[str, ...]
    node: str
    command: tuple[str, ...]


def listed(store: Store) -> list[Listed]:
    """Running runs of this user on this node, then recorded ones by start, the newest first."""
    running: dict[str, Manifest] = {}
    for live in node_runs():
        if not live.ended:
            with suppress(SourceError):
                running[live.run] = manifest_of(live.open().latest())
    recorded = [one for one in store.manifests() if one.run not in running]
    recorded.sort(key=lambda one: -one.started_wall)
    return [
        *(_listed(store, one, live=True) for one in running.values()),
        *(_listed(store, one, live=False) for one in recorded),
    ]


def _listed(store: Store, one: Manifest, *, live: bool) -> Listed:
    seen = live or one.ended
    about = store.about(one.run)
    return Listed(
        run=one.run,
        live=live,
        health=one.health if seen else Health.UNKNOWN,
        cause=one.cause,
        state=one.verdict if seen else f"no longer monitored: {one.verdict}",
        seconds=max(0.0, one.taken_wall - one.started_wall),
        steps=one.steps,
        ranks=one.ranks,
        strategy=one.strategy,
        started_wall=one.started_wall,
        record_bytes=store.nbytes(one.run),
        note=about.note,
        tags=about.tags,
        node=one.node,
        command=one.command,
    )


def _list(options: argparse.Namespace) -> int:
    store = Store()
    with working("reading the runs"):
        found = listed(store)
    if options.json:
        show_json(found)
    elif found:
        show(as_text(found) + "\n")
    else:
        why = store.refusal() or "none has been recorded yet"
        say(f"no run is live, and {why}", paths.OWN_FOLDER if store.refusal() else RunNotFound.hint)
    return 0


def as_text(found: list[Listed]) -> str:
    """The list as a table."""
    return column_table(
        found,
        ("run", lambda one: one.run),
        ("verdict", lambda one: f"{one.health}, running" if one.live else one.health),
        ("started", lambda one: time.strftime(_CLOCK, time.localtime(one.started_wall))),
        ("duration", lambda one: human_seconds(one.seconds)),
        ("steps", lambda one: f"{one.steps:,}"),
        ("ranks", lambda one: str(one.ranks)),
        ("strategy", lambda one: one.strategy or "n/a"),
        ("on disk", lambda one: human_bytes(one.record_bytes)),
        ("cause", lambda one: _cut(one.cause, 60)),
        ("tags, note", lambda one: _cut(_about(one), 40)),
    )


def _about(one: About | Listed) -> str:
    """``#baseline the note``."""
    return printable(" ".join([*(f"#{tag}" for tag in one.tags), one.note])).strip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _note(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    about = store.about(run)
    if options.text is None:
        sys.stdout.write(f"{printable(about.note)}\n" if about.note else "")
        return 0
    if len(options.text) > _MOST_NOTE:
        raise RunRefused(f"a note has at most {_MOST_NOTE:,} characters", "")
    _write(store, run, replace(about, note=printable(options.text)))
    return 0


def _tag(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    about = store.about(run)
    if not options.tags and not options.remove:
        sys.stdout.write("".join(f"{printable(tag)}\n" for tag in about.tags))
        return 0
    for tag in options.tags:
        if not tag.isprintable() or not 0 < len(tag) <= _MOST_TAG or " " in tag or "," in tag:
            shown = printable(tag[:_MOST_TAG])
            hint = f"A tag is one word of at most {_MOST_TAG} characters, without commas."
            raise RunRefused(f"{shown!r} cannot be a tag", hint)
    tags = dict.fromkeys([*about.tags, *options.tags])
    kept = tuple(tag for tag in tags if tag not in options.remove)
    _write(store, run, replace(about, tags=kept))
    return 0


def _write(store: Store, run: str, about: About) -> None:
    with os_errors_as(RunRefused, f"write the record of {run}", ""):
        store.write_about(run, about)
    say(f"wrote to {run}: {_about(about) or 'no note, no tags'}")


def _rename(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    if not paths.is_run_id(options.name):
        hint = "Use letters, digits, dots, dashes and underscores."
        raise RunRefused(f"{printable(options.name)} cannot name a run", hint)
    if options.name in store.names():
        raise RunRefused(f"another record is called {options.name}", "")
    _refuse_running(run)
    with os_errors_as(RunRefused, f"rename {run}", ""):
        store.rename(run, options.name)
    say(f"{run} is called {options.name} now")
    return 0


def _remove(options: argparse.Namespace) -> int:
    store = Store()
    names = store.names()
    for run in options.runs:
        if run not in names:
            hint = "zeromon runs lists them. rm takes whole names only."
            raise RunRefused(f"no record is called {printable(run)}", hint)
        _refuse_running(run)
    total = human_bytes(sum(store.nbytes(run) for run in options.runs))
    if not options.yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            hint = "Add --yes to delete without a question."
            raise RunRefused("rm asks at a terminal only", hint)
        if not agreed(f"Delete {', '.join(options.runs)} ({total})?"):
            say("nothing was deleted")
            return 1
    for run in dict.fromkeys(options.runs):
        with os_errors_as(RunRefused, f"delete {run}", ""):
            store.remove(run)
        say(f"deleted {run}")
    return 0


def _refuse_running(run: str) -> None:
    """Raises where ranks of *run* live: a collector follows it, or its rings wait for one."""
    followed = any(live.run == run and not live.ended for live in node_runs())
    folders = [root / run for root in paths.ring_roots()]
    if followed or any(
        any(folder.glob("rank*.ring")) and not read_folder(folder).ended for folder in folders
    ):
        raise RunRefused(f"{run} is running", "zeromon detach ends its record; training goes on.")
