"""A Prometheus of its own for a test or a benchmark, where the binary is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from support import free_port

from zeromon.ring.tokens import user_token_file

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


def scrape(**more: Any) -> dict[str, Any]:
    """A scrape job as our documentation recommends it; *more* says where its targets are."""
    return {
        "job_name": "zeromon",
        "honor_labels": True,
        "relabel_configs": [
            {"source_labels": ["__meta_zeromon_node"], "regex": "(.+)", "target_label": "node"}
        ],
        **access(),
        **more,
    }


def access() -> dict[str, Any]:
    """How this user's collectors are read: by a file with a token."""
    return {"authorization": {"credentials_file": str(user_token_file())}}


@dataclass
class Prometheus:
    """``with Prometheus([scrape(...)]) as server``: its folder goes with it."""

    jobs: list[dict[str, Any]]
    interval: str = "1s"
    rules: tuple[Path, ...] = ()
    arguments: tuple[str, ...] = ()
    data: Path | None = None
    """Where its series are, of one that has some from the start."""
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Prometheus:
        self.folder = Path(tempfile.mkdtemp(prefix="zeromon-prometheus-"))
        config = {
            "global": {
                "scrape_interval": self.interval,
                "scrape_timeout": self.interval,
                "evaluation_interval": self.interval,
            },
            "scrape_configs": self.jobs,
            "rule_files": [str(path) for path in self.rules],
        }
        path = self.folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        self._log = (self.folder / "log").open("wb")
        self.start()
        return self

    def start(self) -> None:
        """Starts it, again after a :meth:`stop`; what it had stored is there."""
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={self.folder}/prometheus.yml",
                f"--storage.tsdb.path={self.data or self.folder / 'data'}", "--log.level=warn",
                f"--web.listen-address=127.0.0.1:{self.port}", *self.arguments,
            ],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """Ends it; its folder stays."""
        self.process.terminate()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The elements of an instant vector, now or *at* a moment (seconds since the epoch)."""
        asked = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        address = f"{self.url}/api/v1/query?{urlencode(asked)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def number(self, expression: str) -> float:
        """The first value of it; 0 for an empty one."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0

    def wait(self, expression: str, least: float = 1.0, timeout: float = 60.0) -> None:
        """Until *expression* is at *least* that."""
        deadline = time.monotonic() + timeout
        while self.number(expression) < least:
            assert time.monotonic() < deadline, (expression, self.query(expression)[:3])
            time.sleep(0.1)


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> str:
    told = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def series(name: str, values: str, **labels: Any) -> dict[str, str]:
    """A series of a test: rank 3 of run r at one collector, but for *labels*."""
    found = {"instance": "a:9417", "run": "r", "rank": 3} | labels
    pairs = ",".join(f"{k}={json.dumps(str(v))}" for k, v in found.items() if v is not None)
    return {"series": f"{name}{{{pairs}}}", "values": values}
