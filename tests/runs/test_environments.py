"""The same training with and without zeromon in each environment that a job may have.

Losses, states of the random generators, output and exit code are the same; and where less is watched or
kept than elsewhere, the user is told. docs/evidence/data/reliability.json has the same rows.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from environments import PROGRAM, STEPS, Environment, run
from support import LAUNCH, Node, without_zeromon

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="mounts file systems of its own"
    ),
]

PYTHON = sys.executable
BARE_RANKS = (*LAUNCH, "2", "--no-python")


NOT_KEPT = "history on disk has stopped"
FILL = "head -c 4g /dev/zero > /dev/shm/x"
COLLECTOR = "sed 's/.*\"pid\": \\([0-9]*\\).*/\\1/' /dev/shm/zeromon-*/collector.json"
OTEL = "$TOOLS/bin/opentelemetry-instrument"
WITH_TOOLS = {"PYTHONPATH": "$TOOLS"} | {
    f"OTEL_{kind}_EXPORTER": "none" for kind in ("TRACES", "METRICS", "LOGS")
}
DEEP = "$W" + f"/{'d' * 240}" * 14
THEIRS = """
import atexit, random, sys
random.seed(5)
sys.setrecursionlimit(1500)
if sys.argv[0].endswith("identical.py"):
    atexit.register(lambda: print("theirs", sys.getrecursionlimit(), flush=True))
"""

MOVABLE_CLOCK = (
    f"cc -shared -fPIC -o $W/clock.so {Path(__file__).with_name('clock.c')} -ldl\n"
    "export LD_PRELOAD=$W/clock.so"
)
AT_TIMES = {"CLOCK": "$W/clock", "PAUSE": "0.6"}

ENVIRONMENTS = {
    "nothing special": Environment(),
    "a rank exits with 7": Environment(settings={"CODE": "7"}, code=1, told="died: rank [01]"),
    "ulimit -n 64": Environment("ulimit -n 64"),
    "full /dev/shm": Environment(FILL + " || true"),
    "/dev/shm fills up": Environment(settings={"AT_0_3": FILL, "PAUSE": "0.5"}),
    "full store": Environment(
        "mkdir $W/store; mount -t tmpfs -o size=1m none $W/store; head -c 2m /dev/zero > $W/store/x"
        " || true",
        {"ZEROMON_STORE": "$W/store"},
        told=NOT_KEPT,
    ),
    "read-only HOME": Environment("mount -t tmpfs -o ro none $W/home", told=NOT_KEPT),
    "no HOME, no user": Environment(
        "unset HOME", as_user=("unshare", "--user", "--map-user=12345")
    ),
    "no folder of TMPDIR": Environment("export TMPDIR=$W/nowhere"),
    "paths of 3,400 letters": Environment(
        f"mkdir -p {DEEP}; cp launch.py identical.py {DEEP}",
        command=(*LAUNCH, "2", f"{DEEP}/identical.py"),
    ),
    "rings below a path that is too long": Environment(
        settings={"ZEROMON_DIR": "$W" + "/rings" * 800}, told="not watched.*name too long", ranks=()
    ),
    "names that are no ASCII": Environment(
        f"{PYTHON} -c 'import socket; socket.sethostname(\"knöten-мир\")'\n"
        "mkdir $W/Läufe; cp launch.py $W/Läufe; cp identical.py $W/Läufe/☃.py",
        {"ZEROMON_DIR": "$W/Läufe ☃/№ 7"},
        command=(*LAUNCH, "2", "$W/Läufe/☃.py"),
    ),
    "names that are no UTF-8": Environment(
        f"{PYTHON} -c 'import socket; socket.sethostname(b\"kn\\xf6ten\")'\n"
        "mkdir $W/$'\\xff'; cp launch.py identical.py $W/$'\\xff'; cd $W/$'\\xff'",
        command=("bash", "-c", shlex.join((*LAUNCH, "2")) + " \"$PWD/identical.py\""),
    ),
    "the clock jumps by a day forth and back": Environment(
        MOVABLE_CLOCK, AT_TIMES | {"AT_0_3": "echo 90000 > $W/clock", "AT_0_6": "echo -90000 > $W/clock"}
    ),
    "the clock jumps by an hour forth and back": Environment(
        MOVABLE_CLOCK, AT_TIMES | {"AT_0_3": "echo 3600 > $W/clock", "AT_0_6": "echo -3600 > $W/clock"}
    ),
    "python -P -O -B": Environment(
        settings={
            "PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(Path(PROGRAM).parent),
        }
    ),
    "the collector is stopped": Environment(
        settings={
            "PAUSE": "1",
            "AT_0_2": f"p=$({COLLECTOR}); (sleep 5; kill -CONT $p) & kill -STOP $p",
        }
    ),
    "a rank is stopped": Environment(
        settings={"AT_1_3": "(sleep 20; kill -CONT $PPID) & kill -STOP $PPID"},
        told="suspended by a signal",
    ),
    "spawn": Environment(command=(PYTHON, PROGRAM, "spawn")),
    "forkserver": Environment(command=(PYTHON, PROGRAM, "forkserver")),
    "coverage": Environment(
        settings={**WITH_TOOLS, "COVERAGE_FILE": "$W/coverage"},
        command=(*BARE_RANKS, PYTHON, "-m", "coverage", "run", "--parallel-mode", PROGRAM),
    ),
    "debugpy": Environment(
        settings=WITH_TOOLS,
        command=(*BARE_RANKS, PYTHON, "-m", "debugpy", "--listen", "127.0.0.1:0", PROGRAM),
    ),
    "opentelemetry-instrument zeromon run": Environment(settings=WITH_TOOLS, around=(OTEL,)),
    "zeromon run opentelemetry-instrument": Environment(
        settings=WITH_TOOLS,
        command=(OTEL, *LAUNCH, "2", PROGRAM),
        told="put it first",
        ranks=(),
    ),
    "the user's own sitecustomize": Environment(
        f"echo {shlex.quote(THEIRS)} > $W/sitecustomize.py", {"PYTHONPATH": "$W"}
    ),
    "an environment without zeromon": Environment(command=(*BARE_RANKS, "$PYTHON", PROGRAM)),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What others put into the process of a training, and a Python without zeromon."""
    tools = tmp_path_factory.mktemp("tools")
    packages = ["coverage", "debugpy", "opentelemetry-distro"]
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--target", str(tools), *packages]
    subprocess.run(pip, check=True, capture_output=True)
    return {"$TOOLS": str(tools), "$PYTHON": without_zeromon(tmp_path_factory.mktemp("venv"))}


WATCHING = re.compile(
    r"zeromon: watching run r \(http://[^)]*/metrics\); look at it with: zeromon attach"
)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_training_is_the_same_and_the_user_is_told(
    name: str, tmp_path: Path, places: dict[str, str]
) -> None:
    one = ENVIRONMENTS[name]
    bare = run(one, tmp_path / "bare", places, watched=False)
    ours = run(one, tmp_path / "ours", places, watched=True)
    words = [line for line in ours.errors if line.startswith("zeromon:") and not WATCHING.match(line)]
    print("\n".join(words), ours.report, sep="\n")
    assert bare.code == one.code, bare.errors
    assert (ours.code, ours.output) == (bare.code, bare.output), ours.errors
    assert len(bare.output) >= 2
    if one.told:
        assert re.search(one.told, "\n".join([*words, ours.report]))
    else:
        assert words == []
        assert not re.search("stalled|hung|silent", ours.report)
    ranks = [
        (rank["rank"], rank["steps"]["watched_steps"], rank["agent"]["errors"])
        for rank in ours.record.get("ranks", ())
    ]
    assert ranks == [(rank, STEPS, 0) for rank in one.ranks]
    for rank in ours.record.get("ranks", ()):
        assert 0 <= rank["communication"]["exposed_ratio"] <= 1
        assert 0 < rank["steps"]["median_seconds"] < 60
        assert all(risk["ratio"] < 0.5 for risk in rank["memory"]["risks"])
        assert 0 < ours.record["taken_wall"] - ours.record["started_wall"] < 250


def test_sixty_four_ranks_on_this_machine(node: Node) -> None:
    """Forked from one process that has imported torch."""
    command = [*LAUNCH, "64", PROGRAM]
    bare, ours = node.run(command, watched=False), node.run(command)
    assert (ours.code, sorted(ours.output.splitlines())) == (0, sorted(bare.output.splitlines()))
    ranks = [
        (rank.rank, rank.steps.watched_steps, rank.agent.errors, rank.agent.dropped)
        for rank in ours.snapshot.ranks
    ]
    assert ranks == [(number, STEPS, 0, 0) for number in range(64)]
