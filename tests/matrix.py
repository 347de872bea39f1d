"""The core on each Python here, with its oldest and newest dependencies: ``matrix.py [PYTHON ...]``.

Each pair gets an environment without torch of its own, which is removed afterwards. There the tests run
that touch a dependency and need no torch. --publish stores the table for docs/evidence/reliability.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

from evidence_pages import markdown_table, measured_here, publish  # noqa: E402

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TOOLS = ("pytest>=8", "pytest-asyncio", "hypothesis", "psutil", "numpy", "packaging")
TOUCHED = {
    "hjson, PyYAML": ("check/test_check.py", "check/test_launch.py", "check/test_planted.py"),
    "msgspec": ("storage/test_run_store.py", "storage/test_recorder.py", "fold/test_checkpoint.py",
                "sources/prometheus/test_decode.py", "collector/test_cluster.py",
                "traces/test_hostile.py"),
    "nvidia-ml-py": ("probes/test_nvml.py", "probes/test_devices.py"),
    "polars": ("storage/test_step_history.py", "export/test_exports.py"),
    "prometheus-client": ("export/prometheus/test_exposition.py", "export/prometheus/test_metrics.py"),
    "textual": ("tui/test_lines.py", "tui/test_plain.py"),
    "none": ("ring/test_buffer.py", "ring/test_events.py", "fold/test_fold.py", "report/test_render.py",
             "diagnosis/test_rules.py"),
}  # fmt: skip
"""What a dependency does for the core, as tests."""
SELECTED = "not long and not alone and not quiet and not bench and not trains"


def interpreters() -> Iterator[tuple[str, str]]:
    """(version, path) of each Python of :data:`VERSIONS`; "" where this machine has none."""
    for version in VERSIONS:
        pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        found = str(pyenv[-1]) if pyenv else shutil.which(f"python{version}") or ""
        works = found and not subprocess.run([found, "-c", ""], check=False).returncode
        yield version, found if works else ""


def install(python: str, resolution: str, folder: Path) -> str:
    """Makes an environment; returns its Python. Raises where a dependency has no such version for it."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    own = str(folder / "bin" / "python")
    uv = [shutil.which("uv") or "uv", "pip", "install", "--quiet", "--python", own]
    subprocess.run([*uv, "--resolution", resolution, str(ROOT)], check=True, capture_output=True)
    subprocess.run([*uv, *TOOLS], check=True, capture_output=True)
    return own


def tested(python: str, folder: Path) -> tuple[int, list[str]]:
    """Runs the tests; returns how many passed, and the names of those that did not."""
    files = [str(ROOT / "tests" / name) for names in TOUCHED.values() for name in names]
    report = folder / "report.xml"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}:{ROOT / 'dashboard'}"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", SELECTED]
    subprocess.run(
        [*command, f"--junitxml={report}", "--continue-on-collection-errors", *files],
        cwd=ROOT, env=environment, check=False, capture_output=True,
    )  # fmt: skip
    cases = list(xml.parse(report).iter("testcase"))
    bad = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - len(bad) - skipped, bad


_ASK = """
import importlib.metadata as m, json
print(json.dumps({d.metadata["Name"].lower(): [d.version, d.metadata.get("License-Expression")
    or d.metadata.get("License") or "", sum(f.locate().stat().st_size for f in d.files or ()
    if f.locate().is_file())] for d in m.distributions()}))
"""


def distributions(python: str) -> dict[str, tuple[str, str, int]]:
    """Returns name -> version, license, bytes of all that is installed."""
    found: dict[str, tuple[str, str, int]] = json.loads(
        subprocess.run([python, "-c", _ASK], check=True, capture_output=True, text=True).stdout
    )
    return found


def direct() -> list[str]:
    """The names of zeromon's own dependencies."""
    required = importlib.metadata.requires("zeromon") or []
    names = [line.split(";")[0].split(">")[0].strip() for line in required if "extra" not in line]
    return sorted(name.lower() for name in names)


@dataclass
class Outcome:
    """What the tests did with the oldest or the newest dependencies of one Python."""

    dependencies: str
    passed: int = 0
    faults: str = "0"
    """Tests that failed, or why nothing was installed."""
    sizes: Sequence[str] = ()


def outcome(python: str, resolution: str) -> Outcome:
    """Installs, and runs the tests."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            own = install(python, resolution, Path(scratch, "environment"))
        except subprocess.CalledProcessError as error:
            why = (error.stderr or b"").decode().strip().splitlines()
            return Outcome(resolution, faults=f"not installable: {why[-1] if why else error}")
        found = distributions(own)
        passed, bad = tested(own, Path(scratch))
        core = "; ".join(f"{name} {found[name][0]}" for name in direct() if name in found)
        rows = sorted(found.items(), key=lambda pair: -pair[1][2])
        sizes = [
            f"    {name} {v}: {size / 1e6:.1f} MB, {text.splitlines()[0] if text else '-'}"
            for name, (v, text, size) in rows
        ]
        return Outcome(core, passed, "; ".join(bad) or "0", sizes)


HEAD = ("Python", "oldest dependencies", "newest dependencies", "passed with each", "failed")


def cells_of(version: str, oldest: Outcome, newest: Outcome) -> list[str]:
    """The cells of :data:`HEAD`."""
    passed = dict.fromkeys(f"{one.passed:,}" for one in (oldest, newest))
    faults = [one.faults for one in (oldest, newest) if one.faults != "0"]
    dependencies = oldest.dependencies, newest.dependencies
    return [version, *dependencies, " and ".join(passed), "; ".join(faults) or "0"]


def main() -> int:
    """Prints a line per Python, and what is installed there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--publish", action="store_true", help="store the lines for the page")
    options = parser.parse_args()
    print(markdown_table((HEAD, [])))
    failed = False
    for version, python in interpreters():
        if version not in options.versions:
            continue
        if not python:
            print(f"| {version} | no interpreter here: `mypy --python-version {version}` | - | - | - |")
            continue
        oldest, newest = (outcome(python, resolution) for resolution in ("lowest-direct", "highest"))
        cells = cells_of(version, oldest, newest)
        failed |= cells[-1] != "0"
        print(
            f"| {' | '.join(cells)} |",
            *(newest.sizes if version == "3.11" else ()),
            sep="\n",
            flush=True,
        )
        if options.publish:
            cores = f"{os.cpu_count()} cores, no torch"
            entry = measured_here("tests/matrix.py", machine=cores, head=list(HEAD), rows=[cells])
            publish("reliability", {f"python-{version}": entry})
    return failed


if __name__ == "__main__":
    sys.exit(main())
