"""examples/kubernetes: what the API servers' schemas accept, and what zeromon needs of a pod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT, wait_for

from zeromon.cli import build_parser
from zeromon.collector.collector_process import DEFAULT_PORT

FOLDER = ROOT / "examples" / "kubernetes"


def resources(name: str) -> dict[str, Any]:
    """Kind -> resource of a file."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def trainer(name: str) -> dict[str, Any]:
    """The container that trains."""
    found: dict[str, Any]
    if name == "trainjob.yaml":
        found = resources(name)["TrainJob"]["spec"]["trainer"]
    else:
        (found,) = resources(name)["Job"]["spec"]["template"]["spec"]["containers"]
    return found


def test_the_job_is_valid_for_kubernetes() -> None:
    """The schemas of its own OpenAPI; unknown fields are refused."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    for resource in resources("job.yaml").values():
        validator.validate(resource, validator.latest_version(), strict=True)
    wrong = resources("job.yaml")["Job"]
    wrong["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerport"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, validator.latest_version(), strict=True)


def test_the_monitor_is_valid_for_the_prometheus_operator() -> None:
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator.v1", reason="the operator's models are missing"
    )
    monitor = resources("podmonitor.yaml")["PodMonitor"]
    read = models.PodMonitor.model_validate(monitor)
    # what the schema does not have would be gone
    assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == monitor


def test_the_trainjob_is_valid_for_kubeflow_trainer() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="its models are missing")
    job = resources("trainjob.yaml")["TrainJob"]
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read is not None and read.to_dict() == job


def test_prometheus_finds_the_pods_and_has_their_token() -> None:
    spec = resources("podmonitor.yaml")["PodMonitor"]["spec"]
    job = resources("job.yaml")
    template, (endpoint,) = job["Job"]["spec"]["template"], spec["podMetricsEndpoints"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert job["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == job["Service"]["metadata"]["name"]
    (port,) = trainer("job.yaml")["ports"]
    assert (port["name"], port["containerPort"]) == (endpoint["port"], DEFAULT_PORT)
    secret = endpoint["authorization"]["credentials"]
    for name in ("job.yaml", "trainjob.yaml"):
        variables = {one["name"]: one for one in trainer(name)["env"]}
        assert variables["ZEROMON_HOST"]["value"] == "0.0.0.0"
        assert variables["ZEROMON_TOKEN"]["valueFrom"]["secretKeyRef"] == secret


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
@pytest.mark.parametrize("ended_by", ["itself", "SIGTERM", "SIGKILL"])
def test_the_container_waits_for_the_end_and_passes_on_signal_and_code(
    tmp_path: Path, name: str, ended_by: str
) -> None:
    """Its script, with a stand-in for `zeromon run` that notes what it gets."""
    (tmp_path / "zeromon").write_text(
        f"""#!{sys.executable}
import signal, sys, time
def end(*_):
    time.sleep(0.3)  # a checkpoint
    open("terminated", "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
open("words", "w").write("\\n".join(sys.argv[1:]))
if {ended_by == "itself"}:
    sys.exit(7)
time.sleep(60)
"""
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\necho waited > waited\n")
    for tool in ("zeromon", "sleep"):
        (tmp_path / tool).chmod(0o755)
    container = trainer(name)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK_OF_NODE": "1"}
    pod = subprocess.Popen([*container["command"], *container["args"]], cwd=tmp_path, env=environment)
    wait_for((tmp_path / "words").exists)
    time.sleep(0.2)
    if ended_by == "SIGTERM":
        pod.send_signal(signal.SIGTERM)
    elif ended_by == "SIGKILL":
        children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
    assert pod.wait(20) == {"itself": 7, "SIGTERM": 3, "SIGKILL": 137}[ended_by]
    assert (tmp_path / "terminated").exists() is (ended_by == "SIGTERM")
    assert (tmp_path / "waited").exists()
    words = (tmp_path / "words").read_text().split("\n")
    options = build_parser("run").parse_args(words)
    assert options.command[:2] == ["--", "torchrun"]
    assert options.track == (["kubeflow"] if name == "trainjob.yaml" else [])
