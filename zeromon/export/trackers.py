"""A run for TensorBoard and for Weights & Biases: the scalars of each step and rank, and the ledger.

Both are used only when they are installed, and an export asks neither to reach a network. What a live
run gets has the same figures under the same names.
"""

import importlib
import json
import os
import re
import shutil
import ssl
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from zeromon.base.errors import ExportError, package_install_hint
from zeromon.export.files import Export
from zeromon.readout.breakdown import PHASES
from zeromon.readout.ledger import job_ledger
from zeromon.readout.throughput import how_far
from zeromon.readout.verdict import Health, judge_run
from zeromon.ring.model_metadata import url_without_secrets
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import NOT_TIMED

_SCALARS = (
    ("time/step_seconds", "duration_us"),
    *((f"time/{phase}_seconds", f"{phase}_us") for phase in PHASES if phase != "other"),
    ("time/offload_wait_seconds", "offload_blocked_us"),
    ("communication/exposed_seconds", "exposed_us"),
    ("communication/seconds", "communication_us"),
    ("communication/payload_bytes", "collective_bytes"),
    ("memory/allocated_bytes", "allocated_bytes"),
    ("memory/reserved_bytes", "reserved_bytes"),
    ("memory/rss_bytes", "rss_bytes"),
)
"""Tag of a scalar and its column."""
_ONLY_TIMED = ("exposed_us", "communication_us")
_SUFFIX = ".zeromon"
MAX_RANKS = 64
"""Maximum number of ranks; of more, a live tracker gets the maximum and the median of each scalar."""

Row = dict[str, Any]
"""A row of the step history by the names of its columns."""


def step_scalars(row: Row) -> Iterator[tuple[str, float]]:
    """(tag, value) of a row, in seconds and bytes; what is unknown is left out."""
    untimed = row["flags"] & NOT_TIMED
    for tag, column in _SCALARS:
        value = row[column]
        if value < 0 or (untimed and column in _ONLY_TIMED):
            continue
        yield tag, value / 1e6 if column.endswith("_us") else value
    if row["duration_us"] and not untimed:
        yield "communication/exposed_share", row["exposed_us"] / row["duration_us"]


def ledger_scalars(run: RunSnapshot) -> dict[str, float]:
    """Goodput and the seconds of each cause, of all ranks and attempts up to now."""
    ledger = job_ledger([run])
    tagged = {} if ledger.goodput is None else {"ledger/goodput_share": ledger.goodput}
    for row in ledger.rows:
        tag = f"ledger/{row.cause}_seconds"
        tagged[tag] = tagged.get(tag, 0.0) + row.seconds
    return tagged


def import_needed(module: str, package: str) -> Any:
    """Imports *module*; raises :class:`ExportError` where *package* is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"that needs {package}, which is not installed"
        raise ExportError(problem, f"pip install {package}") from error


# ---- TensorBoard -----------------------------------------------------------------------------------


class EventFiles:
    """An event file for each rank and one for the job, each in a folder: a run of TensorBoard.

    TensorBoard follows one file of a folder at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = import_needed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = import_needed("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writing = import_needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writers: dict[str, Any] = {}

    def add_row(self, row: Row) -> None:
        """Adds the scalars of a step of a rank."""
        seconds = (row["start_us"] + row["duration_us"]) / 1e6
        self.add(f"rank{row['rank']}", seconds, row["step"], step_scalars(row))

    def add(self, name: str, seconds: float, step: int, values: Iterable[tuple[str, float]]) -> None:
        """Adds *values* to the file in the folder *name*."""
        if name not in self._writers:
            path = str(self._folder / name)
            self._writers[name] = self._writing.EventFileWriter(path, filename_suffix=_SUFFIX)
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[value(tag=t, simple_value=v) for t, v in values])
        self._writers[name].add_event(self._events.Event(wall_time=seconds, step=step, summary=summary))

    def flush(self) -> None:
        """Writes what was added."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Ends the files."""
        for writer in self._writers.values():
            writer.close()


def write_tensorboard(export: Export) -> str:
    """Writes the event files of a run."""
    run, folder = export.run, export.path
    # First: where tensorboard is missing, the earlier export must stay
    files, step = EventFiles(folder), 0
    _remove_earlier_export(export, f"rank*/events.*{_SUFFIX}", f"job/events.*{_SUFFIX}")
    try:
        for row in export.rows():
            files.add_row(row)
            step = max(step, row["step"])
        files.add("job", run.taken_wall, step, ledger_scalars(run).items())
    finally:
        files.close()
    return ""


def _remove_earlier_export(export: Export, *patterns: str) -> None:
    """Removes the files of an earlier export with force, and nothing else."""
    ours = [path for pattern in patterns for path in export.path.glob(pattern)]
    if ours and not export.force:
        hint = "Give another -o, or --force to replace it."
        raise ExportError(f"{export.path} holds an export already", hint)
    for path in ours:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    export.path.mkdir(mode=0o700, parents=True, exist_ok=True)


# ---- Weights & Biases ------------------------------------------------------------------------------


def write_wandb(export: Export) -> str:
    """Writes an offline run for ``wandb sync``, with the step as x-axis and metrics by rank."""
    run = export.run
    wandb, name = import_needed("wandb", "wandb"), valid_wandb_id(run.run)
    _remove_earlier_export(export, f"wandb/offline-run-*-{name}")
    folder = str(export.path)
    board = open_wandb(run, id=name, name=run.run, project="zeromon", dir=folder, mode="offline")
    step = 0
    for step, rows in group_by_step(export.rows()):
        board.log({"step": step, **named_scalars(rows)})
    board.log({"step": step, **ledger_scalars(run)})
    board.finish()
    wandb.teardown()  # only then the last of it is in the file
    return ""


def open_wandb(run: RunSnapshot, settings: Row | None = None, **options: Any) -> Any:
    """Opens a run of W&B that has scalars alone over the step; *options*: as wandb.init has it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no word of this to anybody
    wandb = import_needed("wandb", "wandb")
    rank = run.ranks[0] if run.ranks else None
    board = wandb.init(
        config={
            "node": run.node,
            "strategy": rank.strategy if rank else "",
            "ranks": rank.world_size if rank else 0,
        },
        settings=wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            **settings or {},
        ),
        **options,
    )
    board.define_metric("step")
    # Without it, W&B draws over its own count of calls of log()
    board.define_metric("*", step_metric="step")
    return board


def valid_wandb_id(run: str) -> str:
    """Returns an id that wandb accepts, unique for the run."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:64]
    # Without the checksum, a.b and a/b would be one run of W&B
    return name if name == run else f"{name}-{zlib.crc32(run.encode()):08x}"


def live_step_scalars(rows: Iterable[Row], ranks: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the scalars of *rows* by step; of many *ranks*, the maximum and the median of each."""
    ordered = sorted(rows, key=lambda row: (row["step"], row["rank"]))
    for step, together in group_by_step(ordered):
        yield step, named_scalars(together) if ranks <= MAX_RANKS else _reduced_scalars(together)


def group_by_step(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yields the rows of all ranks by step, in the order in which the steps began."""
    together: list[Row] = []
    ranks = set[int]()
    for row in rows:
        # An elastic restart counts steps anew: a rank that comes twice begins another step
        if together and (row["step"] != together[0]["step"] or row["rank"] in ranks):
            yield together[0]["step"], together
            together, ranks = [], set()
        together.append(row)
        ranks.add(row["rank"])
    if together:
        yield together[0]["step"], together


def named_scalars(rows: Iterable[Row]) -> dict[str, float]:
    """``rank0/time/step_seconds`` and the other scalars of *rows*, which are of different ranks."""
    return {f"rank{row['rank']}/{tag}": value for row in rows for tag, value in step_scalars(row)}


def _reduced_scalars(rows: Iterable[Row]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for tag, value in step_scalars(row):
            values.setdefault(tag, []).append(value)
    return {
        f"{name}/{tag}": of(samples)
        for tag, samples in values.items()
        for name, of in (("max", max), ("median", median))
    }


# ---- where ``--track`` sends the figures of a live run -------------------------------------------

OpenRun = Mapping[str, str]
_URL, _TOKEN, _CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
_MAX_METRICS = 1000
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
        self._files.add("job", run.taken_wall, run.last_step, ledger_scalars(run).items())
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
            id=valid_wandb_id(f"{name}-zeromon"),
            name=f"{facts.get('name') or name}-zeromon",
            group=facts.get("group") or name,
            job_type="zeromon",
            project=facts.get("project") or None,
            entity=facts.get("entity") or None,
            dir=facts.get("folder") or None,
            mode="offline" if is_offline else "online",
            # A tracker that starts again goes on with its run
            resume=None if is_offline else "allow",
        )

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        for step, values in live_step_scalars(rows, len(run.ranks)):
            self._run.log({"step": step, **values})
        self._run.log({"step": run.last_step, **ledger_scalars(run)})

    def close(self) -> None:
        self._run.finish()
        import_needed("wandb", "wandb").teardown()  # only then the last of it is in the file


class _Mlflow(LiveTracker):
    """Metrics of the script's own run, which may have several writers."""

    def __init__(self, _: RunSnapshot, facts: OpenRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # By the defaults of MLflow, a server that is down holds each call for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(_SECONDS)))
        uri, ours = facts["tracking_uri"], os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri.startswith("file:") or "://" not in uri:  # the script was allowed to
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = import_needed("mlflow", "mlflow-skinny").MlflowClient
        # The agent masks the password in an address; the variable of this process has it
        self._client = client(ours if ours and url_without_secrets(ours) == uri else uri)
        self._metric = import_needed("mlflow.entities", "mlflow-skinny").Metric
        self._id = facts["run_id"]

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        now_ms, metric = int(1000 * time.time()), self._metric
        metrics = [
            metric(f"zeromon/{tag}", float(value), now_ms, step)
            for step, values in live_step_scalars(rows, len(run.ranks))
            for tag, value in values.items()
        ]
        for tag, value in ledger_scalars(run).items():
            metrics.append(metric(f"zeromon/{tag}", value, now_ms, run.last_step))
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MAX_METRICS])


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
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted), _NoRedirect()
        )
        self._last: dict[str, float] = {}

    def push(self, run: RunSnapshot, rows: Sequence[Row]) -> None:
        token = Path(os.environ[_TOKEN]).read_text().strip()  # it is renewed
        body = json.dumps({"trainerStatus": self._job_status(run, rows)}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        with self._opener.open(request, timeout=_SECONDS):
            pass

    def _job_status(self, run: RunSnapshot, rows: Sequence[Row]) -> dict[str, Any]:
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat()}
        values: dict[str, float] = {"current_step": run.last_step}
        reached = how_far(run)
        if reached is not None:
            values |= {"current_step": reached.step, "total_steps": reached.of}
            done = judge_run(run).health is Health.FINISHED
            # 100 is for the end, as the callback of transformers has it
            status["progressPercentage"] = 100 if done else min(99, 100 * reached.step // reached.of)
            seconds_left = 0.0 if done else reached.left_seconds
            if seconds_left is not None:
                status["estimatedRemainingSeconds"] = int(seconds_left)
        for rank in run.ranks[:1]:
            values |= {row.name: row.value for row in rank.training.scalars if row.value is not None}
        if rows:
            self._last = dict(step_scalars(max(rows, key=lambda row: (row["step"], -row["rank"]))))
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


def check_tracker(name: str) -> None:
    """Raises :class:`ExportError` where nothing can be sent to the tracker *name* from here."""
    if name in _LIBRARIES:
        from importlib.util import find_spec

        if find_spec(name) is None:
            problem = f"tracking needs {name}, which is not installed beside zeromon"
            raise ExportError(problem, package_install_hint(name))
    elif not (os.environ.get(_URL) and os.environ.get(_TOKEN)):
        problem = f"there is no {_URL} and {_TOKEN}"
        raise ExportError(
            problem, "Kubeflow Trainer sets them with its feature gate TrainJobRuntimeStatus."
        )


def open_run_of(name: str, run: RunSnapshot) -> OpenRun | None:
    """The run that is open in the tracker *name*, of the first rank that has one; None without."""
    if name == "kubeflow":
        return {}
    open_runs: list[Any] = [rank.config.trackers.get(name) for rank in run.ranks]
    return next((facts for facts in open_runs if facts), None)
