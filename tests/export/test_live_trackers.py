"""What a live run gets in each tracker, read back by the tracker's own library."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, rank, run, summary
from receivers import Webhook, webhook
from wandb_files import wandb_history, wandb_records

from zeromon.base.errors import ExportError
from zeromon.export import trackers
from zeromon.export.trackers import TRACKERS, LiveTracker
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import ScalarRow
from zeromon.storage.step_history.rows import NAMES, row_of

TOKEN = "t0k3n"


def rows(first: int, last: int, ranks: int = 2) -> list[dict[str, Any]]:
    """The steps of a read, rank by rank as a collector sends them."""
    return [
        dict(zip(NAMES, row_of(number, summary(step, rss_bytes=step << 20), 0), strict=True))
        for number in range(ranks)
        for step in range(first, last + 1)
    ]


def snapshot(**facts: Any) -> RunSnapshot:
    return run(rank(0, last_step=20), rank(1, last_step=20), **facts)


def sent(board: LiveTracker) -> None:
    """Twenty steps in two reads, and the end."""
    board.push(snapshot(), rows(1, 12))
    board.push(snapshot(), rows(13, 20))
    board.close()


def test_of_many_ranks_the_largest_and_the_median_are_sent() -> None:
    together = list(trackers.live_step_scalars(rows(1, 2, trackers.MAX_RANKS + 1), 65))
    assert [step for step, _ in together] == [1, 2]
    assert together[1][1]["max/memory/rss_bytes"] == 2 << 20
    assert together[1][1]["median/time/step_seconds"] == 0.1
    few = list(trackers.live_step_scalars(rows(1, 2), 2))
    assert few[0][1]["rank1/time/step_seconds"] == 0.1


def test_tensorboard_shows_the_ranks_beside_the_scripts_own_run(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is missing"
    )
    sent(TRACKERS["tensorboard"](snapshot(), {"folder": str(tmp_path)}))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
    for number in range(2):
        found = reading.EventAccumulator(str(tmp_path / "zeromon" / f"rank{number}")).Reload()
        assert [event.step for event in found.Scalars("time/step_seconds")] == list(range(1, 21))
        assert found.Scalars("memory/rss_bytes")[4].value == 5 << 20
    job = reading.EventAccumulator(str(tmp_path / "zeromon" / "job")).Reload()
    goodput = trackers.ledger_scalars(snapshot())["ledger/goodput_share"]
    values = [event.value for event in job.Scalars("ledger/goodput_share")]
    assert values == pytest.approx([goodput, goodput])


def test_wandb_has_a_run_beside_the_scripts_own(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is missing")
    facts = {
        "id": "abc", "project": "p", "entity": "", "mode": "offline", "folder": str(tmp_path),
        "name": "mine", "group": "", "base_url": "https://api.example",
    }  # fmt: skip
    sent(TRACKERS["wandb"](snapshot(), facts))
    (path,) = tmp_path.glob("wandb/offline-run-*-abc-zeromon/*.wandb")
    (made,) = (r.run for r in wandb_records(path) if r.WhichOneof("record_type") == "run")
    assert (made.run_id, made.project, made.run_group) == ("abc-zeromon", "p", "abc")
    assert made.display_name == "mine-zeromon"
    history = wandb_history(path)
    steps = [one for one in history if "rank0/time/step_seconds" in one]
    assert [one["step"] for one in steps] == list(range(1, 21))
    assert all(one["rank1/memory/rss_bytes"] == one["step"] << 20 for one in steps)
    ledger = trackers.ledger_scalars(snapshot())
    last = {key: value for key, value in history[-1].items() if key in ledger}
    assert last == pytest.approx(ledger)


def test_mlflow_has_the_metrics_in_the_scripts_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is missing")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(trackers, "_MAX_METRICS", 7)
    uri = f"file://{tmp_path}/mlruns"
    client = mlflow.MlflowClient(uri)
    ours = client.create_run("0").info.run_id
    client.log_metric(ours, "loss", 1.0)
    sent(TRACKERS["mlflow"](snapshot(), {"run_id": ours, "tracking_uri": uri}))
    steps = client.get_metric_history(ours, "zeromon/rank1/memory/rss_bytes")
    assert [(one.step, one.value) for one in steps] == [(n, n << 20) for n in range(1, 21)]
    found = client.get_run(ours).data.metrics
    ledger = trackers.ledger_scalars(snapshot())
    assert {key: found[f"zeromon/{key}"] for key in ledger} == pytest.approx(ledger)
    assert found["loss"] == 1.0


# ---- Kubeflow Trainer ------------------------------------------------------------------------------


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    """A server in the controller's place, and the variables that it sets in every container."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with webhook() as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        yield server


def status(server: Webhook) -> dict[str, Any]:
    """What was posted last, as KEP-2779 has it."""
    request = server.requests[-1]
    assert request.headers["Authorization"] == f"Bearer {TOKEN}"
    assert request.headers["Content-Type"] == "application/json"
    (name,) = request.json
    assert name == "trainerStatus"
    found: dict[str, Any] = request.json[name]
    with suppress(ImportError):  # the API's own schema
        from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Known

        read = Known.from_dict(request.json)
        assert read is not None and read.to_dict()["trainerStatus"].keys() == found.keys()
    assert all(set(one) == {"name", "value"} and one["value"] for one in found["metrics"])
    return found


def test_kubeflow_gets_progress_and_metrics_of_any_script(controller: Webhook) -> None:
    loss = (ScalarRow(name="loss", value=0.5, step=20, nonfinite=0, first_nonfinite_step=0),)
    known = run(rank(0, last_step=20, scalars=loss), rank(1, last_step=20), planned_steps=50)
    board = TRACKERS["kubeflow"](known, {})
    board.push(known, rows(20, 20))
    found = status(controller)
    assert found["progressPercentage"] == 40
    assert found["estimatedRemainingSeconds"] == 3
    metrics = {one["name"]: float(one["value"]) for one in found["metrics"]}
    assert (metrics["loss"], metrics["current_step"], metrics["total_steps"]) == (0.5, 20, 50)
    assert metrics["time/step_seconds"] == 0.1
    over = tuple(changed(one, alive=False, ended="finished", last_step=50) for one in known.ranks)
    board.push(replace(known, ranks=over, ended=True), [])
    found = status(controller)
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (100, 0)


def test_the_token_follows_no_redirect(controller: Webhook) -> None:
    controller.status, controller.location = 302, f"http://localhost:{controller.port}/other"
    with pytest.raises(OSError, match="302"):
        TRACKERS["kubeflow"](snapshot(), {}).push(snapshot(), [])
    assert [request.path for request in controller.requests] == ["/status"]


def test_what_is_not_known_is_left_out_and_the_end_of_a_failed_run_is_not_100(
    controller: Webhook,
) -> None:
    board = TRACKERS["kubeflow"](snapshot(), {})
    board.push(snapshot(), [])
    assert set(status(controller)) == {"lastUpdatedTime", "metrics"}
    dead = rank(0, last_step=50, alive=False, failed=True, ended="SIGKILL")
    board.push(run(dead, planned_steps=50, ended=True), [])
    assert status(controller)["progressPercentage"] == 99
    controller.status = 500
    with pytest.raises(OSError, match="500"):
        board.push(snapshot(), [])


def test_kubeflows_server_is_trusted_by_its_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token goes to nobody whom the authority of the controller has not signed."""
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run(
        [*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    with webhook(tls=context) as server:
        url = f"https://localhost:{server.port}/status"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        with pytest.raises(OSError, match="certificate verify failed"):
            TRACKERS["kubeflow"](snapshot(), {}).push(snapshot(), [])
        assert server.requests == []
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        TRACKERS["kubeflow"](snapshot(), {}).push(snapshot(), [])
        assert status(server)["metrics"]


@pytest.mark.long
def test_kubeflow_gets_what_the_callback_of_transformers_sends(controller: Webhook) -> None:
    """The same envelope and names, with the same types."""
    integrations = pytest.importorskip("transformers.integrations.integration_utils")
    state = type(
        "State", (), {"is_world_process_zero": True, "max_steps": 50, "global_step": 20, "epoch": 1.0}
    )  # fmt: skip
    theirs = integrations.KubeflowCallback()
    theirs.on_train_begin(None, state, None)
    theirs.on_log(None, state, None, {"loss": 0.5})
    theirs._last_update_time = -1e9
    theirs.on_step_end(None, state, None)
    reference = status(controller)
    known = run(rank(0, last_step=20), planned_steps=50)
    TRACKERS["kubeflow"](known, {}).push(known, [])
    mine = status(controller)
    assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in reference.items()}
    assert mine["progressPercentage"] == reference["progressPercentage"] == 40
    named = {one["name"] for one in reference["metrics"]} - {"current_epoch", "loss"}
    assert named <= {one["name"] for one in mine["metrics"]}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_cannot_be_reached_from_here_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ExportError) as caught:
        trackers.check_tracker(name)
    assert name in json.dumps([str(caught.value), caught.value.hint]).lower()
    assert os.environ.get("KUBEFLOW_TRAINER_SERVER_URL") is None
