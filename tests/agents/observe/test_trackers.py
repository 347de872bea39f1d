"""What is told of the runs of trackers: which, where, no secret; of real libraries where they are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeromon.ring.model_metadata import TrackersMetadata, declared_keys, url_without_secrets
from zeromon_agents.hooks.loggers import Loggers
from zeromon_agents.observe.process_metadata import Trackers

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://me:{SECRET}@host:5000/a?token={SECRET}", "https://host:5000/a"),
        (f"postgresql+psycopg://me:{SECRET}@db/mlflow", "postgresql+psycopg://db/mlflow"),
        (f"postgresql://me:{SECRET}/?#{SECRET}@db/mlflow", "postgresql://db/mlflow"),
        (f"https://me:a@{SECRET}@host/a", "https://host/a"),
        (f"https://host?token={SECRET}", "https://host"),
        (f"https://host:5000#{SECRET}", "https://host:5000"),
        ("https://host:5000/a@b", "https://host:5000/a@b"),
        ("https://[::1]:5000/a@b", "https://[::1]:5000/a@b"),
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"), ("file:///tmp/a@b", "file:///tmp/a@b"),
        ("databricks://profile", "databricks://profile"), ("databricks", "databricks"),
    ],
)  # fmt: skip
def test_an_address_is_told_without_its_secrets(url: str, shown: str) -> None:
    assert url_without_secrets(url) == shown


def test_a_process_without_trackers_and_one_that_uses_none_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("wandb", "mlflow", "mlflow.tracking.fluent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert Trackers().news() == {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", SimpleNamespace())  # type: ignore[arg-type]
    assert Trackers().news() == {}
    disabled = SimpleNamespace(run_id="dummy", mode="disabled")
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(run=SimpleNamespace(_settings=disabled)),  # type: ignore[arg-type]
    )
    assert Trackers().news() == {}


def test_a_library_with_other_insides_costs_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fluent = SimpleNamespace(_active_run_stack=object())
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)  # type: ignore[arg-type]
    trackers = Trackers()
    with pytest.raises(AttributeError):
        trackers.news()
    assert trackers.news() == {}


def test_a_run_of_wandb_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(project="p", name="n", settings=wandb.Settings(silent=True))
    try:
        trackers = Trackers()
        facts = trackers.news()["wandb"]
        assert (facts["id"], facts["project"], facts["name"]) == (run.id, "p", "n")
        assert (facts["mode"], facts["folder"]) == ("offline", str(tmp_path))
        assert trackers.news() == {}
        assert declared_keys(TrackersMetadata, {"wandb": facts, "rank": 0}) == {"wandb": facts}
    finally:
        run.finish()


def test_a_run_of_mlflow_is_told_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its stack of runs belongs to the thread that opened them; in older versions it is a list."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is missing")
    import threading

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    told: list[Any] = []
    mlflow.set_tracking_uri("mlruns")
    try:
        mlflow.set_experiment("e")
        with mlflow.start_run() as run:
            heart = threading.Thread(target=lambda: told.append(Trackers().news()))
            heart.start()
            heart.join()
        place = {"run_id": run.info.run_id, "tracking_uri": str(tmp_path / "mlruns")}
        assert told == [{"mlflow": place}]
        fluent: Any = SimpleNamespace(_active_run_stack=[run])
        monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)
        assert Trackers().news() == {"mlflow": place}
    finally:
        mlflow.set_tracking_uri(None)


def test_the_first_writer_of_tensorboard_is_told() -> None:
    told: list[dict[str, Any]] = []
    hooks = Loggers.__new__(Loggers)
    hooks.context = SimpleNamespace(add_metadata=lambda **facts: told.append(facts))  # type: ignore[assignment]
    hooks.scalars = SimpleNamespace(give_named=lambda *_: None)  # type: ignore[assignment]
    for folder in ("/runs/a", "/runs/a/hparams"):
        hooks._tag_logged(SimpleNamespace(log_dir=folder), "loss", 1.0)
    assert told == [{"tensorboard": {"folder": "/runs/a"}}]
