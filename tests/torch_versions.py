"""The agents' tests, and a live run per strategy, on other torches: `torch_versions.py 2.6.0 ...`.

Each version gets an environment of its own, one after the other, which takes 6 GB where the index has no
CPU build and is removed afterwards. tests/agents, without its long tests and those that measure time,
takes about a quarter of an hour; with --live it is left out. A live run is what a user does:
`zeromon run -- torchrun ...`, then `zeromon report`. --publish stores the rows for
docs/evidence/versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

from evidence_pages import Entry, markdown_table, measured_here, publish  # noqa: E402

SELECTED = "not nvme and not bench and not quiet and not long and not alone"
STEPS = 6
LIMIT_SECONDS = 300
SMALL = f"--steps {STEPS} --width 32 --layers 2 --heads 2 --length 32 --batch 2".split()
EXAMPLES, PROGRAMS = ROOT / "examples", ROOT / "tests" / "programs"
LIVE = {
    **{
        name: [str(EXAMPLES / "train_gpt.py"), "--strategy", name, *SMALL]
        for name in ("ddp", "zero1", "fsdp1-full", "fsdp2")
    },
    **{
        f"deepspeed-zero{stage}": [
            str(EXAMPLES / "train_gpt_deepspeed.py"), "--no-compile", "--config",
            str(EXAMPLES / "deepspeed" / f"zero{stage}.json"), *SMALL,
        ]
        for stage in (1, 2, 3)
    },
    "ddp compiled": [str(PROGRAMS / "functional.py"), "{folder}", "ddp_compiled"],
    "tp": [str(PROGRAMS / "functional.py"), "{folder}", "tp"],
    "pp": [str(PROGRAMS / "pipelines.py"), "1F1B", "--steps", str(STEPS)],
}  # fmt: skip
"""The strategy that the report must tell (its first word) -> the script that trains under it."""


class Tested(NamedTuple):
    """What one version did."""

    version: str
    passed: int
    skipped: Counter[str]
    """Reason -> tests."""
    failed: list[str]
    live: dict[str, str]
    """Strategy -> why it did not work; "" where it did."""

    @property
    def cells(self) -> list[str]:
        """The cells of :data:`HEAD`."""
        why = "; ".join(f"{count}: {reason}" for reason, count in sorted(self.skipped.items()))
        well = [name for name, error in self.live.items() if not error]
        ill = {error: "" for error in self.live.values() if error}
        for name, error in self.live.items():
            if error:
                ill[error] += f", {name}"
        not_run = "; ".join(f"{names[2:]}: {error}" for error, names in ill.items())
        counts = str(self.passed), why or "0", ", ".join(self.failed) or "0"
        live = ", ".join(well), f"{len(well)} of {len(self.live)}", not_run or "-"
        return [self.version, *counts, *live]


TORCH = "not without zeromon either"
"""What is wrong with a live run that this torch itself cannot do here."""
HEAD = ("torch", "passed", "skipped", "failed", "strategies", "live runs", "not run")


def install(version: str, folder: Path) -> Path:
    """An environment with that torch and everything else as pinned; returns its bin folder.

    What torch itself brought stays, where the pins differ (sympy of torch 2.6).
    """
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    pip = [*uv, "pip"]
    into = ["--quiet", "--no-cache", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", *into, f"torch=={version}", "numpy"], check=True)
    freeze = [*pip, "freeze", "--python", str(folder / "bin" / "python")]
    has = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    names = {_name(line) for line in has}
    kept = folder / "constraints.txt"
    kept.write_text("\n".join([*has, *(pin for pin in pins if _name(pin) not in names)]))
    install = [*pip, "install", *into, "-c", str(kept)]
    subprocess.run([*install, "-e", f"{ROOT}[dev]"], check=True)
    subprocess.run(
        [*install, "--no-build-isolation", "deepspeed"],
        check=True, env={**os.environ, "DS_BUILD_OPS": "0"},
    )  # fmt: skip
    return folder / "bin"


def _name(requirement: str) -> str:
    return requirement.partition("==")[0].strip().lower().replace("_", "-")


def tests(bin_folder: Path, environment: Mapping[str, str]) -> tuple[int, Counter[str], list[str]]:
    """Runs tests/agents; returns how many passed, reasons of skipped ones, names of failed ones."""
    results = bin_folder.parent / "results.xml"
    subprocess.run(
        [str(bin_folder / "python"), "-m", "pytest", "-p", "no:cacheprovider", "tests/agents",
         "-m", SELECTED, "--junitxml", str(results)],
        cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    return read(results)


def read(results: Path) -> tuple[int, Counter[str], list[str]]:
    """What a JUnit file says: passed, skipped by reason, failed."""
    passed, skipped, failed = 0, Counter[str](), list[str]()
    for case in xml.parse(results).getroot().iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        else:
            passed += 1
    return passed, skipped, failed


def live(strategy: str, script: Sequence[str], bin_folder: Path, environment: Mapping[str, str]) -> str:
    """Trains under zeromon and reads the report; returns what is wrong with it, "" for nothing."""
    python, name = str(bin_folder / "python"), f"live-{strategy.replace(' ', '-')}"
    zeromon = [python, "-m", "zeromon"]
    train = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *(word.format(folder=bin_folder.parent / name) for word in script),
    ]
    done = _finished([*zeromon, "run", "--name", name, "--", *train], environment)
    if done.returncode:
        bare = _finished(train, environment)
        return TORCH if bare.returncode else f"fails under zeromon: {done.stderr[-300:]}"
    told = _finished([*zeromon, "report", name, "--json", "--wait", "30"], environment)
    return wrong(json.loads(told.stdout), strategy.split()[0])


def _finished(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Ends what takes too long, as torchrun does with its ranks; its exit code is then not 0."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            told = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            told = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, *told)


def wrong(report: Mapping[str, object], strategy: str) -> str:
    """What the report of a live run lacks; "" where nothing."""
    ranks = report["ranks"]
    assert isinstance(ranks, list)
    found = [
        (rank["strategy"], rank["steps"], rank["errors"], rank["exposed_ratio"] is not None)
        for rank in ranks
    ]
    return "" if found == [(strategy, STEPS, 0, True)] * 2 else f"reports {found}"


def version_tested(version: str, *, live_only: bool) -> Tested:
    """Makes the environment, runs everything, removes it."""
    folder = Path(tempfile.mkdtemp(prefix=f"torch-{version}-", dir=ROOT / ".venv"))
    try:
        bin_folder = install(version, folder)
        own = {name: text for name, text in os.environ.items() if not name.startswith("ZEROMON_")}
        own |= {
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        places = {
            "ZEROMON_DIR": str(folder / "rings"),
            "ZEROMON_STORE": str(folder / "store"),
            "ZEROMON_PORT": str(free_port()),
        }
        found = {name: live(name, script, bin_folder, own | places) for name, script in LIVE.items()}
        agents = (0, Counter[str](), list[str]()) if live_only else tests(bin_folder, own)
        return Tested(version, *agents, found)
    finally:
        shutil.rmtree(folder)


def main(words: Sequence[str]) -> int:
    """Prints a row a version; returns whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--live", action="store_true", help="leave out tests/agents")
    parser.add_argument("--publish", action="store_true", help="store the rows for the page")
    options = parser.parse_args(words)
    if options.live and options.publish:
        parser.error("--publish needs the tests that --live leaves out")
    tested = []
    for version in options.versions:
        tested.append(version_tested(version, live_only=options.live))
        print(markdown_table((HEAD, [one.cells for one in tested])), flush=True)
    if options.publish:
        publish("versions", entries_of(tested))
    faults = [why for one in tested for why in one.live.values() if why not in ("", TORCH)]
    return int(bool(faults) or any(one.failed for one in tested))


def entries_of(tested: Iterable[Tested]) -> dict[str, Entry]:
    """One entry per version."""
    return {
        f"torch-{one.version}": measured_here(
            "tests/torch_versions.py", head=list(HEAD), rows=[one.cells]
        )
        for one in tested
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
