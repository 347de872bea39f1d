"""Which run of W&B and of MLflow this process has open. Imports nothing, and only reads."""

import os
import sys
from typing import Any

from zeromon.ring.model_metadata import TrackersMetadata, url_without_secrets

_LONGEST = 500
_WANDB = {
    "id": "run_id", "project": "project", "entity": "entity", "base_url": "base_url", "mode": "mode",
    "folder": "root_dir", "name": "run_name", "group": "run_group",
}  # fmt: skip
"""Name of a fact about a run of W&B -> the setting that has it."""
_SQLITE = "sqlite:///"


class Trackers:
    """Tells when the process has opened another run; the heartbeat asks, never the training thread."""

    def __init__(self) -> None:
        self._wandb: Any = None
        self._mlflow = ""
        self._failed = False

    def news(self) -> TrackersMetadata:
        """Returns the runs that were opened since the last call; empty without one.

        After an error it does not look again: a thousand errors would end the agent.
        """
        if self._failed:
            return {}
        self._failed = True
        opened_runs: TrackersMetadata = {}
        run = getattr(sys.modules.get("wandb"), "run", None)
        settings = getattr(run, "_settings", None)
        key = getattr(settings, "run_id", None)
        if key and key != self._wandb and getattr(settings, "mode", "") != "disabled":
            self._wandb = key
            facts = {name: _short_text(getattr(settings, of, "")) for name, of in _WANDB.items()}
            facts["folder"] = os.path.abspath(facts["folder"])
            facts["base_url"] = url_without_secrets(facts["base_url"])
            opened_runs["wandb"] = facts
        active = _mlflow_run()
        if active and active != self._mlflow:
            self._mlflow = active
            uri = _absolute_uri(_short_text(sys.modules["mlflow"].get_tracking_uri()))
            opened_runs["mlflow"] = {"run_id": active, "tracking_uri": url_without_secrets(uri)}
        self._failed = False
        return opened_runs


def _short_text(value: Any) -> str:
    return str(value or "")[:_LONGEST]


def _mlflow_run() -> str:
    """The id of the run that any thread has open, "" without one; the stacks belong to threads."""
    stack = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_run_stack", None)
    if stack is None:
        return ""
    stacks = [stack] if isinstance(stack, list) else list(stack.get_all_thread_values().values())
    # a thread may end its run meanwhile
    return next((_short_text(run.info.run_id) for runs in stacks for run in runs[-1:]), "")


def _absolute_uri(uri: str) -> str:
    """*uri*, where it names a file or a folder its absolute path; ``databricks`` is a place, too."""
    if uri.startswith(_SQLITE):
        return _SQLITE + os.path.abspath(uri.removeprefix(_SQLITE))
    return os.path.abspath(uri) if os.path.isdir(uri) else uri
