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
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from zeromon.base.errors import RunNotFound, RunRefused, SourceError, os_errors_as
from zeromon.base.units import human_bytes, printable
from zeromon.cli import tell_user, user_agrees
from zeromon.cli.parser import add_flag, add_list
from zeromon.cli.terminal import show_json, show_text, show_working
from zeromon.collector.run import snapshot_of_folder
from zeromon.readout.figures import BYTES, SECONDS
from zeromon.readout.tables import Column, text_table
from zeromon.readout.text import leading_clauses
from zeromon.readout.verdict import Health
from zeromon.ring import paths
from zeromon.snapshot.run import About
from zeromon.sources.live import runs_of_node
from zeromon.storage.run_store import ListedRun, Manifest, Store, manifest_of_run

_MAX_TAG_CHARS, _MAX_NOTE_CHARS = 64, 4000
_CLOCK = "%Y-%m-%d %H:%M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon runs [--json]``, ``zeromon runs rm | rename | note | tag``"""
    add_flag(parser, "--json", "print JSON")
    parser.set_defaults(act=_print_runs)
    actions = parser.add_subparsers(metavar="ACTION")
    note = _add_action(actions, "note", "write a note on a run; without TEXT, print it", _edit_note)
    note.add_argument("run", metavar="RUN", help="run id or its beginning")
    note.add_argument("text", metavar="TEXT", nargs="?", help='the note; "" deletes it')
    tag = _add_action(actions, "tag", "tag a run; without TAG, print its tags", _edit_tags)
    tag.add_argument("run", metavar="RUN", help="run id or its beginning")
    tag.add_argument("tags", metavar="TAG", nargs="*", help="one word each")
    add_list(tag, "--remove", "TAG", "take it off; may be repeated")
    name = _add_action(actions, "rename", "give the record of a run another name", _rename_run)
    name.add_argument("run", metavar="RUN", help="run id or its beginning")
    name.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes, underscores")
    remove = _add_action(actions, "rm", "delete the records of runs that have ended", _remove_runs)
    remove.add_argument("runs", metavar="RUN", nargs="+", help="run id, in full")
    add_flag(remove, "--yes", "do not ask")


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    act: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    sub = actions.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
    sub.set_defaults(act=act)
    return sub


def call(options: argparse.Namespace) -> int:
    """Lists the runs, or changes the record of one."""
    code: int = options.act(options)
    return code


def list_runs(store: Store) -> list[ListedRun]:
    """Running runs of this user on this node, then recorded ones by start, the newest first."""
    running: dict[str, Manifest] = {}
    for live in runs_of_node():
        if not live.ended:
            # A collector that ends at this moment has left a record, which is listed below
            with suppress(SourceError):
                running[live.run] = manifest_of_run(live.open().latest())
    recorded = [manifest for manifest in store.list_manifests() if manifest.run not in running]
    recorded.sort(key=lambda manifest: -manifest.started_wall)
    return [
        ListedRun(manifest, manifest.run in running, store.about(manifest.run))
        for manifest in (*running.values(), *recorded)
    ]


def _run_facts(store: Store, listed: ListedRun) -> dict[str, Any]:
    """Everything about a run of the list, for scripts."""
    facts = asdict(listed.manifest) | asdict(listed.about)
    return facts | {
        "live": listed.live, "health": _health_word(listed), "state": listed.watched_verdict,
        "seconds": _lasted_seconds(listed), "record_bytes": store.nbytes(listed.manifest.run),
    }  # fmt: skip


def _health_word(listed: ListedRun) -> str:
    return listed.manifest.health if listed.live or listed.manifest.ended else Health.UNKNOWN


def _lasted_seconds(listed: ListedRun) -> float:
    """From its start to its end, or to the last snapshot."""
    return max(0.0, listed.manifest.taken_wall - listed.manifest.started_wall)


def _print_runs(options: argparse.Namespace) -> int:
    store = Store()
    with show_working("reading the runs"):
        runs = list_runs(store)
    if options.json:
        show_json([_run_facts(store, run) for run in runs])
    elif runs:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        show_text(runs_as_text(store, runs, width) + "\n")
    else:
        reason = store.refusal() or "none has been recorded yet"
        tell_user(
            f"no run is live, and {reason}", paths.OWN_FOLDER if store.refusal() else RunNotFound.hint
        )
    return 0


def runs_as_text(store: Store, runs: list[ListedRun], width: int = 0) -> str:
    """The list as a table; where it is wider than *width*, the cause of a run stands below its row."""
    columns: list[Column[ListedRun]] = [
        Column("run", lambda r: r.manifest.run),
        Column("verdict", lambda r: f"{_health_word(r)}{', running' * r.live}"),
        Column("started", lambda r: time.strftime(_CLOCK, time.localtime(r.manifest.started_wall))),
        Column("duration", _lasted_seconds, SECONDS),
        Column("steps", lambda r: f"{r.manifest.steps:,}"),
        Column("ranks", lambda r: str(r.manifest.ranks)),
    ]
    table = text_table(
        runs,
        *columns,
        Column("strategy", lambda r: r.manifest.strategy or "n/a"),
        Column("on disk", lambda r: store.nbytes(r.manifest.run), BYTES),
        Column("cause", lambda r: _cut_text(r.manifest.cause, max(60, width - 130)), left=True),
        Column("tags, note", lambda r: _cut_text(_remarks_text(r.about), 40), left=True),
    )
    if not width or max(map(len, table.splitlines())) <= width:
        return table
    header, *rows = text_table(runs, *columns).splitlines()
    below = ((printable(r.manifest.cause), _remarks_text(r.about)) for r in runs)
    lines = [
        (row, *(f"      {_cut_text(phrase, width - 6)}" for phrase in phrases if phrase))
        for row, phrases in zip(rows, below, strict=True)
    ]
    return "\n".join((header, *(line for group in lines for line in group)))


def _remarks_text(remarks: About) -> str:
    """``#baseline the note``."""
    return printable(" ".join([*(f"#{tag}" for tag in remarks.tags), remarks.note])).strip()


def _cut_text(phrase: str, width: int) -> str:
    phrase = leading_clauses(phrase, width)
    return phrase if len(phrase) <= width else f"{phrase[: width - 1]}…"


def _edit_note(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    remarks = store.about(run)
    if options.text is None:
        sys.stdout.write(f"{printable(remarks.note)}\n" if remarks.note else "")
        return 0
    if len(options.text) > _MAX_NOTE_CHARS:
        raise RunRefused(f"a note has at most {_MAX_NOTE_CHARS:,} characters", "")
    _write_remarks(store, run, replace(remarks, note=printable(options.text)))
    return 0


def _edit_tags(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    remarks = store.about(run)
    if not options.tags and not options.remove:
        sys.stdout.write("".join(f"{printable(tag)}\n" for tag in remarks.tags))
        return 0
    for tag in options.tags:
        if not tag.isprintable() or not 0 < len(tag) <= _MAX_TAG_CHARS or " " in tag or "," in tag:
            tag_text = printable(tag[:_MAX_TAG_CHARS])
            hint = f"A tag is one word of at most {_MAX_TAG_CHARS} characters, without commas."
            raise RunRefused(f"{tag_text!r} cannot be a tag", hint)
    tags = dict.fromkeys([*remarks.tags, *options.tags])
    remaining = tuple(tag for tag in tags if tag not in options.remove)
    _write_remarks(store, run, replace(remarks, tags=remaining))
    return 0


def _write_remarks(store: Store, run: str, remarks: About) -> None:
    with os_errors_as(RunRefused, f"write the record of {run}", ""):
        store.write_about(run, remarks)
    tell_user(f"wrote to {run}: {_remarks_text(remarks) or 'no note, no tags'}")


def _rename_run(options: argparse.Namespace) -> int:
    store = Store()
    run = store.resolve(options.run)
    if not paths.is_run_id(options.name):
        hint = "Use letters, digits, dots, dashes and underscores."
        raise RunRefused(f"{printable(options.name)} cannot name a run", hint)
    if options.name in store.names():
        raise RunRefused(f"another record is called {options.name}", "")
    _refuse_running_run(run)
    with os_errors_as(RunRefused, f"rename {run}", ""):
        store.rename(run, options.name)
    tell_user(f"{run} is called {options.name} now")
    return 0


def _remove_runs(options: argparse.Namespace) -> int:
    store = Store()
    names = store.names()
    # All names are tested before the first record is deleted
    for run in options.runs:
        if run not in names:
            hint = "zeromon runs lists them. rm takes whole names only."
            raise RunRefused(f"no record is called {printable(run)}", hint)
        _refuse_running_run(run)
    total = human_bytes(sum(store.nbytes(run) for run in options.runs))
    if not options.yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            hint = "Add --yes to delete without a question."
            raise RunRefused("rm asks at a terminal only", hint)
        if not user_agrees(f"Delete {', '.join(options.runs)} ({total})?"):
            tell_user("nothing was deleted")
            return 1
    # A name that is given twice would fail at its second deletion
    for run in dict.fromkeys(options.runs):
        with os_errors_as(RunRefused, f"delete {run}", ""):
            store.remove(run)
        tell_user(f"deleted {run}")
    return 0


def _refuse_running_run(run: str) -> None:
    """Raises where ranks of *run* live: a collector follows it, or its rings wait for one."""
    followed = any(live.run == run and not live.ended for live in runs_of_node())
    folders = [root / run for root in paths.user_ring_roots()]
    if followed or any(
        any(folder.glob("rank*.ring")) and not snapshot_of_folder(folder).ended for folder in folders
    ):
        raise RunRefused(f"{run} is running", "zeromon detach ends its record; training goes on.")
