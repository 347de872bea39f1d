"""`zeromon compare`: the table, the limits of CI, and what cannot be compared."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import MS, device_memory, noisy, rank, received, run, series, summary
from command_line import zeromon_here

from zeromon.cli.compare import as_text, read_figures
from zeromon.comparison.comparison import Comparison, compare
from zeromon.comparison.run_figures import figures_of
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.host import Pressure
from zeromon.storage.run_store import Store, encode_snapshot
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import Writer

STEPS = 120
MODEL = {
    "framework": "fsdp2", "stage": 3, "ranks": 2, "numel": 10_000, "trainable": 10_000,
    "shard_numel": 5_000, "trainable_shard_numel": 5_000, "param_bytes": 4, "compute_bytes": 4,
    "grad_bytes": 4, "optimizer": "AdamW",
}  # fmt: skip


def recorded(home: Path, name: str, ms: float, *, rss: int = 1 << 30, **facts: Any) -> RunSnapshot:
    """A kept run of two ranks whose steps take *ms* and a noise of 1 %."""
    store, chooser = Store(home / "store"), random.Random(name)
    writer, now = Writer(store.history(name)), 0
    for step in range(1, STEPS + 1):
        end = now + round(ms * MS * chooser.gauss(1, 0.01))
        one = summary(step, start_ns=now, end_ns=end, rss_bytes=rss)
        writer.append([row_of(number, one, 0) for number in range(2)])
        now = end
    writer.close()
    told = {
        "models": (MODEL,), "loader": {"batch_size": 4, "length": 64}, "ended": "finished",
        "batches": received(samples=4, length=64),
    }  # fmt: skip
    ranks = [rank(n, **(told | {"alive": False} | facts)) for n in range(2)]
    snapshot = run(*ranks, run=name, ended=True)
    store.save(snapshot)
    return snapshot


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some runs."""
    folder = tmp_path_factory.mktemp("home")
    recorded(folder, "base", 100)
    recorded(folder, "again", 100)
    recorded(folder, "slow", 112, rss=1200 << 20)
    recorded(folder, "dead", 90, failed=True, ended="exit code 1")
    starved = Pressure(cpu_wait_ratio=0.0, major_faults_per_second=0, steps_cpu_wait_ratio=0.4)
    recorded(folder, "starved", 130, pressure=starved)
    return folder


def test_the_table_says_what_differs_and_which_to_take(home: Path) -> None:
    done = zeromon_here(home, "compare", "base", "again", "slow")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {
        line.split("  ")[2].strip(): line for line in done.stdout.splitlines() if line[:4] == "    "
    }
    assert lines["step time, median"].count("*") == 1
    assert lines["step time, median"].rstrip().endswith("%*")
    assert lines["peak RSS"].endswith("+17.2 %*")
    # 8 samples of 64 tokens in 0.1 s
    assert 5_000 < int(lines["tokens/s"].split()[1].replace(",", "")) < 5_250
    assert "4 x 1 x 2 = 8" in done.stdout
    assert "* differs from A by more than the noise" in done.stdout
    assert "as fast as" in done.stdout or "any of A (base), B (again)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_what_the_machine_may_explain_is_not_marked(home: Path) -> None:
    """30 % slower, and its ranks had no CPU for 40 % of the time."""
    done = zeromon_here(home, "compare", "base", "starved")
    line = next(x for x in done.stdout.splitlines() if "step time" in x)
    assert line.endswith(" %?") and "*" not in line
    assert "? not comparable: the machine may be the reason; give 3 repeats of each" in done.stdout
    assert "ranks had no CPU for up to 40.0 % of the time" in done.stdout
    judged = zeromon_here(home, "compare", "base", "starved", "--json", "--fail-on", "step_time>+5%")
    content = json.loads(judged.stdout)
    assert judged.returncode == 2 and content["broken"] == []
    assert content["undecided"][0].startswith("step_time>+5% cannot be judged: B (starved) has 13")


def test_json_has_every_figure_in_base_units(home: Path) -> None:
    done = zeromon_here(home, "compare", "base", "slow", "--json", "--fail-on", "step_time>+5%")
    assert done.returncode == 1
    content = json.loads(done.stdout)
    rows = {row["name"]: row for row in content["comparison"]["rows"]}
    first, second = rows["step_time"]["cells"]
    assert first["value"] == pytest.approx(0.1, rel=0.01)
    assert second["difference"] == pytest.approx(0.012, rel=0.1)
    assert second["marked"] and not second["better"]
    assert rows["peak_reserved"]["cells"][0]["why"] == "the run used no device"
    assert content["comparison"]["advice"]["take"] == 0
    assert content["broken"] and content["broken"][0].startswith("step_time>+5%: B (slow) has 11")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["base", "again", "--fail-on", "step_time>+5%", "--fail-on", "peak_memory>+5%"], 0, ""),
        (["base", "slow", "--fail-on", "step_time>+15%"], 0, ""),
        (["base", "slow", "--fail-on", "step_time>+5%"], 1, "step_time>+5%: B (slow) has"),
        (["base", "slow", "--fail-on", "peak_memory>+5%"], 1, "1.2 GiB (+17.2 %, noise 3.0 %)"),
        (["base", "slow", "again", "--fail-on", "step_time>+5%"], 1, "B (slow)"),
        (["base", "dead", "--fail-on", "step_time>+5%"], 1, "B (dead) died: rank 0"),
        (["base", "starved", "--fail-on", "step_time>+5%"], 2, "give 3 repeats of each"),
        (["base", "starved", "slow", "--fail-on", "step_time>+5%"], 1, "B (starved) has"),
        (["base", "slow", "--fail-on", "step_time>5%"], 2, "Its limits are in"),
        (["base", "slow", "--fail-on", "nothing>+5%"], 2, "Known are peak_memory, step_time"),
        (["base", "slow", "--fail-on", "headroom<10%"], 2, "the run used no device"),
        (["base"], 2, "a comparison needs two runs"),
        (["base", "nope"], 2, "no run named nope"),
        (["base", "base,nope"], 2, "no run named nope"),
        ([], 2, "the following arguments are required: RUN"),
    ],
)  # fmt: skip
def test_exit_codes_are_for_scripts(home: Path, words: list[str], code: int, text: str) -> None:
    """0 fine, 1 a limit is broken, 2 a wrong call; never a traceback."""
    done = zeromon_here(home, "compare", *words)
    assert done.returncode == code
    assert text in done.stderr
    assert bool(done.stderr) is (code > 0)
    assert "Traceback" not in done.stderr


def test_a_picture_in_a_file_is_a_run_like_others(home: Path, tmp_path: Path) -> None:
    """What report --json wrote, kept by CI; its last steps are its history."""
    steps = tuple(summary(n, end_ns=(n * 100 + 100) * MS) for n in range(1, 200))
    kept = run(rank(0, recent=steps), run="main", ended=True)
    path = tmp_path / "main.json"
    path.write_bytes(encode_snapshot(kept))
    done = zeromon_here(home, "compare", str(path), "slow", "--fail-on", "step_time>+5%")
    assert done.returncode == 1
    assert "A  main" in done.stdout and "B (slow)" in done.stderr
    path.write_text("{}")
    broken = zeromon_here(home, "compare", str(path), "slow")
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "not a run snapshot" in broken.stderr


def test_an_exact_name_is_meant_before_those_that_begin_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(home, "base-2", 500)
    monkeypatch.setenv("ZEROMON_STORE", str(home / "store"))
    monkeypatch.setenv("ZEROMON_DIR", str(home / "rings"))
    assert read_figures("base").snapshot.run == "base"
    assert len(read_figures("base").seconds) == STEPS - STEPS // 10


def comparison(*snapshots: RunSnapshot) -> Comparison:
    return compare([[figures_of(p, series(noisy(i, 0.1 + 0.05 * i)))] for i, p in enumerate(snapshots)])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 30])
def test_many_runs_fit_eighty_columns(count: int) -> None:
    """The first one stands beside all others, and no figure is lost."""
    names = [f"run-{n}-{'x' * 60}" for n in range(count)]
    told = {"models": (MODEL,), "memory_device": device_memory()}
    text = as_text(comparison(*(run(rank(0, **told), run=name) for name in names)), 80)
    table, _, rest = text.partition("Not known")
    assert max(map(len, table.splitlines())) <= 80
    assert max(map(len, rest.splitlines())) <= 80
    rows = [line for line in table.splitlines() if "step time, median" in line]
    shown = sum(len(re.findall(r"\d m?s\b", line)) for line in rows)
    assert shown == count + len(rows) - 1
    headers = " ".join(x for x in table.splitlines() if x.split()[:1] == ["A"] and "run-" not in x)
    for number in range(count):
        assert (chr(65 + number) if number < 26 else f"#{number + 1}") in headers.split()


def test_colours_are_for_terminals_and_not_the_only_sign() -> None:
    found = comparison(run(rank(0), run="a"), run(rank(0), run="b"))
    plain, coloured = as_text(found, 80), as_text(found, 80, coloured=True)
    assert "\x1b" not in plain
    for code in ("\x1b[31m", "\x1b[32m", "\x1b[0m"):  # slower, and less of it exposed
        assert code in coloured
        coloured = coloured.replace(code, "")
    assert coloured == plain


def test_names_from_a_run_do_not_steer_the_terminal() -> None:
    """Run, strategy and exception are what a training script says they are."""
    evil = "x\x1b]0;owned\x07\x1b[2J\r\n\u202e"
    one = replace(
        run(rank(0, strategy=evil, failed=True, ended=evil, exception=evil), run=evil), note=evil
    )
    text = as_text(comparison(one, run(rank(0), run="b")), 80)
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert all(line.isprintable() for line in text.splitlines())
