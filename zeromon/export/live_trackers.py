"""Where ``zeromon track`` sends the figures of a live run: W&B, MLflow, TensorBoard, Kubeflow Trainer.

Each goes to the run that the script has opened, or beside it where a second writer would harm that run.
Keys and passwords are in the environment alone, where the libraries look for them.
"""

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zeromon.errors import ExportError
from zeromon.export.trackers import (
    EventFiles,
    Row,
    ledger_scalars,
    live_steps,
    needed,
    open_wandb,
    scalars,
    wandb_id,
)
from zeromon.probes.installation import install_hint
from zeromon.readout.throughput import progress
from zeromon.readout.verdict import Health, verdict
from zeromon.ring.model_metadata import without_secrets
from zeromon.snapshot import RunSnapshot

OpenRun = Mapping[str, str]
_URL, _TOKEN, _CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
_MOST_METRICS = 1000
"""MLflow takes no more at once."""
_SECONDS = 10.0


class LiveTracker:
    """One run of a tracker."""

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        """Sends the new *rows* of the steps and what *run* says now; raises what the library raises."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends it, once the run has ended."""


class _TensorBoard(LiveTracker):
    """Event files below the folder of the script's SummaryWriter: a folder has one that is followed."""

    def __init__(self, _: RunSnapshot, facts: OpenRun) -> None:
        self._files = EventFiles(Path(facts["folder"]) / "zeromon")

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        for row in rows:
            self._files.add_row(row)
        self._files.add("job", run.taken_wall, _step(run), ledger_scalars(run).items())
        self._files.flush()

    def close(self) -> None:
        self._files.close()


class _Wandb(LiveTracker):
    """A run beside that of the script: a second writer overwrites the history of a run."""

    def __init__(self, run: RunSnapshot, facts: OpenRun) -> None:
        os.environ.pop("WANDB_SERVICE", None)  # of the process that has started this one
        is_offline = facts.get("mode") in ("offline", "dryrun")
        name = facts["id"]
        self._run = open_wandb(
            run,
            {"base_url": facts["base_url"]} if not is_offline and facts.get("base_url") else None,
            id=wandb_id(f"{name}-zeromon"),
            name=f"{facts.get('name') or name}-zeromon",
            group=facts.get("group") or name,
            job_type="zeromon",
            project=facts.get("project") or None,
            entity=facts.get("entity") or None,
            dir=facts.get("folder") or None,
            mode="offline" if is_offline else "online",
            resume=None if is_offline else "allow",
        )

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        for step, values in live_steps(rows, len(run.ranks)):
            self._run.log({"step": step, **values})
        self._run.log({"step": _step(run), **ledger_scalars(run)})

    def close(self) -> None:
        self._run.finish()
        needed("wandb", "wandb").teardown()  # only then the last of it is in the file


class _Mlflow(LiveTracker):
    """Metrics of the script's own run, which may have several writers."""

    def __init__(self, _: RunSnapshot, facts: OpenRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(_SECONDS)))
        uri, ours = facts["tracking_uri"], os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri.startswith("file:") or "://" not in uri:  # the script was allowed to
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = needed("mlflow", "mlflow-skinny").MlflowClient
        self._client = client(ours if ours and without_secrets(ours) == uri else uri)
        self._metric = needed("mlflow.entities", "mlflow-skinny").Metric
        self._id = facts["run_id"]

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        now, metric = int(1000 * time.time()), self._metric
        found = [
            metric(f"zeromon/{tag}", float(value), now, step)
            for step, values in live_steps(rows, len(run.ranks))
            for tag, value in values.items()
        ]
        for tag, value in ledger_scalars(run).items():
            found.append(metric(f"zeromon/{tag}", value, now, _step(run)))
        for first in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=found[first : first + _MOST_METRICS])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Urllib would pass the token on to another server, and the figures to none."""

    def redirect_request(self, *_: Any) -> None:
        """Refuses: the redirect is the error that it is without this handler."""


class _Kubeflow(LiveTracker):
    """The status of the TrainJob (KEP-2779), as the callback of transformers sends it for a Trainer."""

    def __init__(self, _: RunSnapshot, __: OpenRun) -> None:
        self._url = os.environ[_URL]
        trusted = ssl.create_default_context(cafile=os.environ.get(_CA) or None)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=trusted),
            _NoRedirect(),
        )
        self._last: dict[str, float] = {}

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        token = Path(os.environ[_TOKEN]).read_text().strip()  # it is renewed
        body = json.dumps({"trainerStatus": self._status(run, rows)}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        with self._opener.open(request, timeout=_SECONDS):
            pass

    def _status(self, run: RunSnapshot, rows: Sequence[Row]) -> dict[str, Any]:
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat()}
        values: dict[str, float] = {"current_step": _step(run)}
        known = progress(run)
        if known is not None:
            values |= {"current_step": known.step, "total_steps": known.of}
            done = verdict(run).health is Health.FINISHED
            # 100 is for the end, as the callback of transformers has it
            status["progressPercentage"] = 100 if done else min(99, 100 * known.step // known.of)
            left = 0.0 if done else known.left_seconds
            if left is not None:
                status["estimatedRemainingSeconds"] = int(left)
        for rank in run.ranks[:1]:
            values |= {row.name: row.value for row in rank.scalars if row.value is not None}
        if rows:
            self._last = dict(scalars(max(rows, key=lambda row: (row["step"], -row["rank"]))))
        values |= self._last
        goodput = ledger_scalars(run).get("ledger/goodput_share")
        values |= {} if goodput is None else {"ledger/goodput_share": goodput}
        status["metrics"] = [{"name": name, "value": str(value)} for name, value in values.items()]
        return status


TRACKERS: dict[str, Callable[[RunSnapshot, OpenRun], LiveTracker]] = {
    "wandb": _Wandb, "mlflow": _Mlflow, "tensorboard": _TensorBoard, "kubeflow": _Kubeflow
}  # fmt: skip
"""Name after ``--to`` and ``--track`` -> what sends to it."""
_LIBRARIES = ("wandb", "mlflow", "tensorboard")


def check(name: str) -> None:
    """Raises :class:`ExportError` where nothing can be sent to the tracker *name* from here."""
    if name in _LIBRARIES:
        from importlib.util import find_spec

        if find_spec(name) is None:
            text = f"tracking needs {name}, which is not installed beside zeromon"
            raise ExportError(text, install_hint(name))
    elif not (os.environ.get(_URL) and os.environ.get(_TOKEN)):
        text = f"there is no {_URL} and {_TOKEN}"
        raise ExportError(
            text, "Kubeflow Trainer sets them with its feature gate TrainJobRuntimeStatus."
        )


def opened(name: str, run: RunSnapshot) -> OpenRun | None:
    """What the script has open in the tracker *name*; None: nothing. Of several ranks the first one."""
    if name == "kubeflow":
        return {}
    found: list[Any] = [rank.trackers.get(name) for rank in run.ranks]
    return next((facts for facts in found if facts), None)


def _step(run: RunSnapshot) -> int:
    return max((rank.step for rank in run.ranks), default=0)
