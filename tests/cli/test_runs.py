"""`zeromon runs`: the list, and what changes the record of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from builders import rank, run
from command_line import zeromon, zeromon_here

from zeromon.cli import main, runs as verb
from zeromon.snapshot.run import About
from zeromon.sources.live import LiveRun
from zeromon.storage.run_store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "store")
    ended = {"ended": True, "taken_wall": 1090.0}
    found.save(run(rank(0, alive=False, ended="finished"), run="base", **ended))
    killed = rank(0, failed=True, ended="SIGKILL", alive=False)
    found.save(run(killed, run="broken", started_wall=2000.0, taken_wall=2030.0, ended=True))
    found.save(run(rank(0), run="lost", started_wall=500.0, taken_wall=510.0))
    return found


def listing(home: Path) -> dict[str, dict[str, object]]:
    done = zeromon_here(home, "runs", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {one["run"]: one for one in json.loads(done.stdout)}


def test_lists_every_record_with_its_verdict(tmp_path: Path, store: Store) -> None:
    """The newest first; a record that nobody ended is not called healthy."""
    done = zeromon_here(tmp_path, "runs")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split()[:3] == ["run", "verdict", "started"]
    assert [line.split()[:2] for line in lines] == [
        ["broken", "dead"],
        ["base", "finished"],
        ["lost", "unknown"],
    ]
    assert "\x1b" not in done.stdout
    base = listing(tmp_path)["base"]
    assert (base["health"], base["seconds"], base["live"]) == ("finished", 90.0, False)
    assert base["record_bytes"] == store.nbytes("base") > 0


def test_on_a_narrow_terminal_the_cause_stands_below_its_run(store: Store) -> None:
    """80 columns, whole clauses; a wide terminal and a pipe have one line a run."""
    note = "no rank ever reported; the command ended before init_process_group"
    store.save(run(run="early", started_wall=3000.0, taken_wall=3001.0, ended=True, note=note))
    runs = verb.list_runs(store)
    narrow = verb.runs_as_text(store, runs, 80).splitlines()
    assert all(len(line) <= 80 for line in narrow)
    at = next(n for n, line in enumerate(narrow) if line.startswith("  early"))
    assert narrow[at + 1].strip() == note  # 6 + 66 columns
    assert verb.runs_as_text(store, runs, 60).splitlines()[at + 1].strip() == "no rank ever reported"
    for width in (0, 200):
        assert len(verb.runs_as_text(store, runs, width).splitlines()) == 1 + len(runs)


def test_an_empty_store_says_how_to_begin(tmp_path: Path) -> None:
    """No error: there are no runs."""
    done = zeromon_here(tmp_path, "runs")
    assert (done.returncode, done.stdout) == (0, "")
    assert "zeromon run --" in done.stderr
    assert listing(tmp_path) == {}


def test_records_of_earlier_versions_have_a_verdict(tmp_path: Path, store: Store) -> None:
    """Their headline has none: it comes from the snapshot."""
    path = store.folder("broken") / "manifest.json"
    old = json.loads(path.read_text())
    del old["health"]
    path.write_text(json.dumps(old))
    assert listing(tmp_path)["broken"]["health"] == "dead"


def test_notes_and_tags_are_kept_and_reported(tmp_path: Path, store: Store) -> None:
    """In the run's own folder; the next tag is added, --remove takes off, "" deletes a note."""
    for words in (
        ("tag", "base", "zero2", "größe"),
        ("tag", "base", "zero2", "new"),
        ("tag", "base", "--remove", "größe"),
        ("note", "bas", "loader with 4 workers"),
    ):
        assert zeromon_here(tmp_path, "runs", *words).returncode == 0
    assert store.about("base") == About(note="loader with 4 workers", tags=("zero2", "new"))
    assert zeromon_here(tmp_path, "runs", "tag", "base").stdout == "zero2\nnew\n"
    assert zeromon_here(tmp_path, "runs", "note", "base").stdout == "loader with 4 workers\n"
    report = zeromon_here(tmp_path, "report", "base").stdout
    assert "tags      zero2, new" in report
    assert "note      loader with 4 workers" in report
    assert "#zero2 #new loader with 4 workers" in zeromon_here(tmp_path, "runs").stdout
    zeromon_here(tmp_path, "runs", "note", "base", "")
    assert store.about("base").note == ""


def test_a_renamed_run_has_its_new_name_everywhere(tmp_path: Path, store: Store) -> None:
    """List, report and note; the old name is gone."""
    zeromon_here(tmp_path, "runs", "note", "base", "kept")
    assert zeromon_here(tmp_path, "runs", "rename", "base", "ddp-4.1").returncode == 0
    assert "run ddp-4.1: finished" in zeromon_here(tmp_path, "report", "ddp-4.1").stdout
    assert listing(tmp_path)["ddp-4.1"]["note"] == "kept"
    assert zeromon_here(tmp_path, "report", "base").returncode == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rename", "base", "broken"], "another record is called broken"),
        (["rename", "base", "../../evil"], "cannot name a run"),
        (["rename", "base", "-x"], "NAME"),
        (["rm", "../store"], "no record is called ../store"),
        (["rm", "bas", "--yes"], "whole names"),
        (["rm", "base"], "Add --yes"),
        (["tag", "base", "two words"], "cannot be a tag"),
        (["tag", "base", "\x1b[31m"], "cannot be a tag"),
        (["tag", "base", "x" * 65], "cannot be a tag"),
        (["tag", "base", "--remove"], "--remove: expected one argument"),
        (["note", "nope", "text"], "no run named nope"),
    ],
)
def test_what_is_refused(tmp_path: Path, store: Store, words: list[str], text: str) -> None:
    """Exit code 2, and nothing has changed."""
    before = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    done = zeromon_here(tmp_path, "runs", *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "\x1b" not in done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_note_cannot_write_on_the_terminal(tmp_path: Path, store: Store) -> None:
    """Also where another program put the control characters into the file."""
    (store.folder("base") / "about.json").write_text(json.dumps({"note": "\x1b]0;x\x07\n"}))
    for words in (("runs",), ("runs", "note", "base"), ("report", "base")):
        assert "\x1b" not in zeromon_here(tmp_path, *words).stdout
    (store.folder("base") / "about.json").write_text("{broken")
    assert listing(tmp_path)["base"]["note"] == ""


def test_a_list_says_when_each_run_started_and_a_writer_what_it_wrote_to(
    tmp_path: Path, store: Store
) -> None:
    """A prefix may mean another run than the user has in mind."""
    started = {one.run: one.started_wall for one in store.list_manifests()}
    lines = zeromon_here(tmp_path, "runs").stdout.splitlines()[1:]
    for line in lines:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(started[line.split()[0]]))
        assert at in line
    noted = zeromon_here(tmp_path, "runs", "note", "bas", "four workers")
    assert (noted.stdout, "wrote to base: four workers" in noted.stderr) == ("", True)
    assert "wrote to base: #x four workers" in zeromon_here(tmp_path, "runs", "tag", "ba", "x").stderr


def test_rm_deletes_ended_runs_and_no_running_one(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One running run keeps all that were named."""
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    live = LiveRun(
        address="127.0.0.1:1",
        run="lost",
        ended=False,
        detached=False,
        ranks=1,
        step=1,
        pids=(1,),
        command=(),
    )
    monkeypatch.setattr(verb, "runs_of_node", lambda: [live])
    assert main(["runs", "rm", "--yes", "base", "lost"]) == 2
    assert main(["runs", "rename", "lost", "other"]) == 2
    assert capsys.readouterr().err.count("lost is running") == 2
    assert main(["runs", "rm", "--yes", "base", "broken"]) == 0
    assert store.names() == ["lost"]


@pytest.mark.parametrize("verb", ["attach", "dash"])
def test_a_replay_needs_a_record_with_snapshots(tmp_path: Path, verb: str) -> None:
    """RUN is the beginning of a name, by default the newest run."""
    Store(tmp_path / "store").save(run(rank(0), run="baseline", ended=True))
    for words in ([], ["base"]):
        done = zeromon(tmp_path, verb, *words, "--replay", ZEROMON_PROMETHEUS="http://127.0.0.1:1")
        assert done.returncode == 2
        assert "the record of baseline has no snapshots from before its end" in done.stderr


def test_a_ring_that_cannot_be_read_does_not_hide_the_record(tmp_path: Path, store: Store) -> None:
    """A collector that is too busy to answer leaves the rings of a run that it has recorded."""
    folder = tmp_path / "rings" / "base"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "rank0.1.ring").write_text("")
    (folder / "run.json").write_text(json.dumps({"run": "base", "started": 1000.0}))
    done = zeromon_here(tmp_path, "report", "base")
    assert done.stdout.startswith("run base: finished"), done.stdout
    store.remove("base")
    alone = zeromon_here(tmp_path, "report", "base")
    assert "is not a ring" in alone.stdout, "it is all that is known"
