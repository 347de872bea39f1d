"""`zeromon export`: where it goes, what it replaces, and what it says when it cannot."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path

import polars as pl
import pytest
from builders import rank, run, summary
from command_line import zeromon_here
from trace_format import checked

from zeromon.storage.run_store import Store, encode_snapshot
from zeromon.storage.step_history.rows import row_of, seg_files
from zeromon.storage.step_history.writer import Writer

STEPS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of two ranks, and one that never took a step."""
    folder = tmp_path_factory.mktemp("home")
    store = Store(folder / "store")
    writer = Writer(store.history("train-1"), segment_rows=50)
    for step in range(1, STEPS + 1):
        writer.append([row_of(number, summary(step), 0) for number in range(2)])
    writer.close()
    store.save(run(rank(0), rank(1), ended=True))
    store.save(run(rank(0, recent=()), run="empty", started_wall=1.0))
    return folder


def read(path: Path) -> int:
    """Rows of an export, whatever its form."""
    if path.suffix == ".parquet":
        return pl.read_parquet(path).height
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return len(list(csv.DictReader(file)))
    events = checked(json.loads(path.read_text()))
    return sum(e["ph"] == "X" for e in events)


@pytest.mark.parametrize("form", ["parquet", "csv", "chrome-trace"])
def test_it_is_written_whole_private_and_replaced_only_when_asked(
    home: Path, tmp_path: Path, form: str
) -> None:
    path = tmp_path / {"chrome-trace": "out.json"}.get(form, f"out.{form}")
    words = ("export", "train", "--to", form, "-o", str(path))
    done = zeromon_here(home, *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"wrote {path}: 80 rows" in done.stderr
    assert read(path) == 2 * STEPS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("mine")
    again = zeromon_here(home, *words)
    assert (again.returncode, path.read_text()) == (2, "mine")
    assert "exists already" in again.stderr and "--force" in again.stderr
    assert zeromon_here(home, *words, "--force").returncode == 0
    assert read(path) == 2 * STEPS
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nope", "--to", "csv"], "no run named nope"),
        (["empty", "--to", "csv", "-o", "x.csv"], "has no step yet"),
        (["train", "--to", "csv", "-o", "/nowhere/x.csv"], "cannot write /nowhere/x.csv"),
        (["train", "--to", "tensorboard", "-o", "/dev/null"], "tensorboard"),
        (["train", "--to", "excel"], "there is no excel; there are parquet"),
        (["train"], "the following arguments are required: --to"),
    ],
)
def test_what_cannot_be_exported_is_said_without_a_traceback(
    home: Path, words: list[str], text: str
) -> None:
    done = zeromon_here(home, "export", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr and "Traceback" not in done.stderr


def test_a_segment_that_cannot_be_read_is_named_and_the_others_are_written(
    home: Path, tmp_path: Path
) -> None:
    """Cut short in its middle, where its footer is missing."""
    store = Store(home / "store")
    writer = Writer(store.history("torn"), segment_rows=10)
    for step in range(1, 31):
        writer.append([row_of(0, summary(step), 0)])
    store.save(run(rank(0), run="torn"))
    first = next(iter(seg_files(store.history("torn")).values()))
    first.write_bytes(first.read_bytes()[:100])
    done = zeromon_here(home, "export", "torn", "--to", "parquet", "-o", str(tmp_path / "t.parquet"))
    assert done.returncode == 0
    assert f"segment {first.name} of the history cannot be read" in done.stderr
    assert pl.read_parquet(tmp_path / "t.parquet")["step"].to_list() == list(range(11, 31))


def test_a_picture_in_a_file_is_exported_with_the_steps_it_has(home: Path, tmp_path: Path) -> None:
    """Under a name that cannot lead out of the folder; a run of that name here is another one."""
    evil = run(rank(0), run="../../evil")
    (tmp_path / "a.json").write_bytes(encode_snapshot(evil))
    done = zeromon_here(home, "export", str(tmp_path / "a.json"), "--to", "csv", cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run.csv") == 20
    (tmp_path / "b.json").write_bytes(
        encode_snapshot(run(rank(0)))
    )  # train-1, whose history has 80 rows
    done = zeromon_here(home, "export", str(tmp_path / "b.json"), "--to", "csv", cwd=str(tmp_path))
    assert read(tmp_path / "train-1.csv") == 20
