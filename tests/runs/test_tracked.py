"""`zeromon run --track`: what a real run leaves in each tracker, against the record of the run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from receivers import Webhook, webhook
from support import LAUNCH, PROGRAMS, ZEROMON, clean_environment, free_port, wait_for
from wandb_files import wandb_history

from zeromon.export import trackers
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.queries import readable_segment_tables

pytestmark = pytest.mark.long
NAMES = ("wandb", "mlflow", "tensorboard")
STEPS = 60
SECRET = "s3cr3t" * 8


@dataclass
class Tracked:
    """A run that has ended, and what its script has opened."""

    folder: Path
    said: str
    seconds: float

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    @property
    def run(self) -> RunSnapshot:
        return self.store.load("r")

    def recorded(self) -> dict[tuple[str, int], float]:
        """(name, step) -> value of all scalars, from the record that the collector has written."""
        steps, broken = readable_segment_tables(self.store.history("r"))
        assert not broken
        rows = [row for piece in steps for row in piece.collect().iter_rows(named=True)]
        return {
            (f"rank{row['rank']}/{tag}", row["step"]): value
            for row in rows
            for tag, value in trackers.step_scalars(row)
        }


def trained(folder: Path, opened: tuple[str, ...], tracked: tuple[str, ...], **extra: str) -> Tracked:
    ours = ("WANDB", "MLFLOW")  # what these libraries have set in this process
    kept = {name: v for name, v in clean_environment().items() if not name.startswith(ours)}
    environment = kept | {
        "ZEROMON_DIR": str(folder / "rings"), "ZEROMON_STORE": str(folder / "store"),
        "STEPS": str(STEPS), "PAUSE": "0.2", "WANDB_MODE": "offline", "WANDB_API_KEY": SECRET,
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true", **extra,
    }  # fmt: skip
    options = [word for name in tracked for word in ("--track", name)]
    words = ["run", "--name", "r", "--port", str(free_port()), *options, "--"]
    command = [*ZEROMON, *words, *LAUNCH, "2", str(PROGRAMS / "tracked.py"), *opened]
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=180, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Tracked(folder, done.stderr, time.monotonic() - began)
    wait_for(lambda: found.store.names() and found.run.ended)
    return found


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    names = tuple(name for name in NAMES if _is_installed(name))
    if not names:
        pytest.skip("none of wandb, mlflow and tensorboard is installed")
    folder = tmp_path_factory.mktemp("tracked")
    yield trained(folder, names, names)


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def same(found: dict[tuple[str, int], float], tracked: Tracked) -> None:
    """Each scalar of each step of both ranks, once, and no other."""
    expected = tracked.recorded()
    assert {step for _, step in expected} == set(range(1, STEPS + 1))
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx([expected[key] for key in found], rel=1e-6)


def test_tensorboard_shows_every_step_of_every_rank(everywhere: Tracked) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is missing"
    )
    folder, found = everywhere.folder / "board" / "zeromon", {}

    def read() -> dict[tuple[str, int], float]:
        for path in folder.glob("rank*"):
            board = reading.EventAccumulator(str(path)).Reload()
            for tag in board.Tags()["scalars"]:
                for event in board.Scalars(tag):
                    found[f"{path.name}/{tag}", event.step] = event.value
        return found

    wait_for(lambda: ("rank1/time/step_seconds", STEPS) in read(), timeout=60, pause=1.0)
    same(found, everywhere)
    ours = reading.EventAccumulator(str(everywhere.folder / "board")).Reload()
    assert ours.Tags()["scalars"] == ["train/loss"] and len(ours.Scalars("train/loss")) == STEPS


def test_mlflow_has_every_step_in_the_scripts_own_run(
    everywhere: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is missing")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file://{everywhere.folder}/mlruns")
    (ours,) = client.search_runs(["0"])

    def read(key: str) -> list[Any]:
        return list(client.get_metric_history(ours.info.run_id, key))

    wait_for(
        lambda: any(m.step == STEPS for m in read("zeromon/rank1/time/step_seconds")),
        timeout=60, pause=1.0,
    )  # fmt: skip
    metrics = client.get_run(ours.info.run_id).data.metrics
    found = {
        (key.removeprefix("zeromon/"), one.step): one.value
        for key in metrics
        if key.startswith("zeromon/rank")
        for one in read(key)
    }
    same(found, everywhere)
    ledger = trackers.ledger_scalars(everywhere.run)
    assert {key: metrics[f"zeromon/{key}"] for key in ledger} == pytest.approx(ledger)
    assert len(read("loss")) == STEPS and ours.info.status == "FINISHED"


def test_wandb_has_every_step_beside_the_scripts_own_run(everywhere: Tracked) -> None:
    pytest.importorskip("wandb", reason="wandb is missing")
    folder = everywhere.folder / "wandb"
    (path,) = folder.glob("offline-run-*-zeromon/*.wandb")
    wait_for(lambda: wandb_history(path)[-1].get("step") == STEPS, timeout=60, pause=1.0)
    time.sleep(2.0)
    history = wandb_history(path)
    same(
        {
            (key, values["step"]): value
            for values in history
            for key, value in values.items()
            if key.startswith("rank")
        },
        everywhere,
    )
    ledger = trackers.ledger_scalars(everywhere.run)
    assert {key: history[-1][key] for key in ledger} == pytest.approx(ledger)
    others = [one for one in folder.glob("offline-run-*/*.wandb") if one != path]
    assert len(others) == 1 and len(wandb_history(others[0])) == STEPS


def test_no_key_is_in_the_record(everywhere: Tracked) -> None:
    assert SECRET not in everywhere.said
    kept = [path for path in (everywhere.folder / "store").rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_a_script_that_opens_no_run_gets_a_note_and_nothing_else(tmp_path: Path) -> None:
    name = next((name for name in NAMES if _is_installed(name)), None)
    if name is None:
        pytest.skip("none of wandb, mlflow and tensorboard is installed")
    found = trained(tmp_path, (), (name,))
    assert f"the script has no run of {name} open" in found.run.note
    assert {path.name for path in tmp_path.iterdir()} == {"rings", "store"}


def test_a_server_that_never_answers_delays_neither_training_nor_the_collector(tmp_path: Path) -> None:
    """Kubeflow's, which needs no library: the token is renewed, and its text is in no record."""
    (tmp_path / "token").write_text(SECRET)
    server: Webhook
    with webhook() as server:
        server.pause = 60.0
        found = trained(
            tmp_path, (), ("kubeflow",),
            KUBEFLOW_TRAINER_SERVER_URL=f"http://127.0.0.1:{server.port}/status",
            KUBEFLOW_TRAINER_SERVER_TOKEN=str(tmp_path / "token"),
        )  # fmt: skip
        assert server.requests and server.requests[0].json["trainerStatus"]["metrics"]
        assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"
    assert "kubeflow does not take the figures: TimeoutError" in found.run.note
    assert found.seconds < STEPS * 0.2 + 30
    assert found.run.ranks[0].steps.watched_steps == STEPS
    assert SECRET not in found.said
