"""`zeromon plan --set` and `--sweep`: changes against what is there, and why one is unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import METADATA, MS, changed, device_memory, rank, run, summary
from evidence import row as traffic_row

from zeromon.cli import main
from zeromon.snapshot.step import BatchRow
from zeromon.storage.run_store import encode_snapshot

MODEL = ("7B", "--devices", "8", "--gpu", "h100", "--micro-batch", "1", "--length", "4096")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["points"]


def trained(number: int, spent: tuple[int, ...], exposed: tuple[int, ...]) -> Any:
    steps = tuple(
        summary(n, start_ns=0, end_ns=sum(spent) * MS, phase_ns=tuple(x * MS for x in spent),
                phase_exposed_ns=tuple(x * MS for x in exposed), samples=4, tokens=400)
        for n in range(2, 12)
    )  # fmt: skip
    flow = (traffic_row("all_reduce", group_size=2, nbytes=4e8, busbw_bytes_per_second=2e9),)
    batches = BatchRow(steps=10, samples=40, tokens=4000, positions=4000, pairs=400_000, padding=0)
    return rank(
        number, recent=steps, traffic=flow, models=(METADATA,), memory_device=device_memory(),
        batches=batches, strategy="ddp", world_size=2,
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """DDP on two ranks: a step of 1 s, of which rank 1 computes 300 ms longer than rank 0."""
    fast = trained(0, (0, 200, 700, 100, 0, 0), (0, 0, 350, 0, 0, 0))
    slow = trained(1, (0, 200, 700, 100, 0, 0), (0, 0, 50, 0, 0, 0))
    path = tmp_path / "run.json"
    path.write_bytes(encode_snapshot(run(fast, slow)))
    return str(path)


def test_one_change_against_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    base, other = asked(capsys, *MODEL, "--set", "stage=1")
    assert (base["change"], other["change"]) == ({}, {"stage": "1"})
    gain = other["step_seconds"] - base["step_seconds"]
    assert other["difference_seconds"] == pytest.approx(gain)
    assert other["bytes"]["device"] > base["bytes"]["device"]
    assert 0.2 < base["mfu"] < 0.5
    assert base["tokens_per_second"] == pytest.approx(8 * 4096 / base["step_seconds"])
    assert sum(base["exposed_seconds"].values()) == pytest.approx(base["step_parts"]["communication"])


def test_sweeps_multiply_and_keep_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(
        capsys, *MODEL, "--set", "link=2", "--sweep", "stage=1,2,3", "--sweep", "micro_batch=1,2"
    )
    assert [tuple(p["change"].values()) for p in found[1:]] == [
        ("2", stage, size) for stage in "123" for size in "12"
    ]
    best = [p for p in found if p["pareto"]]
    memory = [p["bytes"]["device"] for p in best]
    assert memory == sorted(memory) and 0 < len(best) < len(found)


def test_the_same_options_give_the_seconds_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, other = asked(capsys, *MODEL, "--set", "stage=2", "--set", "accumulation=4")
    main(["plan", *MODEL, "--stage", "2", "--accumulation", "4", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    given = next(row for row in rows if row["given"])
    assert given["step_seconds"] == other["step_seconds"]


def test_a_run_is_calibrated_and_its_straggler_can_be_taken_away(
    capsys: pytest.CaptureFixture[str], recorded: str
) -> None:
    base, other = asked(capsys, "--from", recorded, "--set", "straggler=median")
    assert base["step_seconds"] == pytest.approx(1.0, rel=0.05)
    assert base["step_parts"]["waiting"] == pytest.approx(0.3)
    assert other["difference_seconds"] == pytest.approx(-0.3)
    assert base["tokens_per_second"] == pytest.approx(800 / base["step_seconds"])
    _, twice = asked(capsys, "--from", recorded, "--set", "micro-batch=8")
    assert twice["samples"] == 2 * base["samples"]


def test_a_batch_of_other_size_is_unknown_where_the_compute_of_a_sample_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The engine and the DataLoader say how many samples a micro-batch has; without them nobody does."""
    facts = {name: value for name, value in METADATA.items() if name != "micro_batch"}
    path = tmp_path / "run.json"
    for loader, known in (({}, False), ({"batch_size": 4}, True)):
        ranks = [
            changed(
                trained(n, (0, 200, 700, 100, 0, 0), (0, 0, 50, 0, 0, 0)),
                models=(facts,), loader=loader,
            )
            for n in (0, 1)
        ]  # fmt: skip
        path.write_bytes(encode_snapshot(run(*ranks)))
        base, *others = asked(capsys, "--from", str(path), "--sweep", "micro-batch=2,8")
        assert base["step_seconds"] is not None
        for other in others:
            assert (other["step_seconds"] is not None, other["pareto"] and not known) == (known, False)
            assert (other["tokens_per_second"] is not None) == known
        if known:
            assert others[1]["step_seconds"] > base["step_seconds"] > others[0]["step_seconds"]


def test_where_no_step_is_known_one_sentence_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No table of n/a: what is missing, and the way out."""
    one = changed(trained(0, (0, 200, 700, 100, 0, 0), (0,) * 6), recent=(), memory_device=None)
    path = tmp_path / "run.json"
    path.write_bytes(encode_snapshot(run(one, replace(one, rank=1))))
    assert main(["plan", "--changes", "--from", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "n/a" not in out
    assert "cannot be predicted without --micro-batch and a named device" in err
    assert "timed forward and backward" in err


def test_torchs_wrappers_follow_the_stage(capsys: pytest.CaptureFixture[str], recorded: str) -> None:
    labels = [p["label"] for p in asked(capsys, "--from", recorded, "--sweep", "stage=0,2,3")]
    assert labels == ["DDP", "DDP", "FSDP2 (ZeRO-2)", "FSDP2 (ZeRO-3)"]
    _, zero = asked(capsys, "--from", recorded, "--set", "framework=deepspeed", "--set", "stage=2")
    assert zero["label"] == "ZeRO-2"


def test_the_usual_changes_are_shown(capsys: pytest.CaptureFixture[str], recorded: str) -> None:
    assert main(["plan", "--changes", "--from", recorded]) == 0
    text = capsys.readouterr().out
    for line in ("as it is", "stage=3", "accumulation=2", "link=2", "straggler=median"):
        assert line in text
    _, *points = asked(capsys, "--from", recorded, "--changes", "--set", "devices=4")
    assert {"devices": "4", "stage": "3"} in [point["change"] for point in points]


def test_what_cannot_be_is_said_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--framework", "fsdp2", "--set", "stage=1"]) == 0
    assert "stage=1: FSDP is stage 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "stage"), "sets nothing"),
        (("--set", "steps=3"), "no setting"),
        (("--set", "model=3B"), "no setting"),
        (("--set", "stage=5"), "stage is one of 0, 1, 2, 3"),
        (("--sweep", "micro-batch=1,many"), "micro-batch=many"),
        (("--set", "checkpointing=maybe"), "yes or no"),
    ],
)
def test_wrong_changes_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["plan", *MODEL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_gives_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeromon.cli import plan as plan_changes

    real, calls = plan_changes.point_of, []

    def point(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(plan_changes, "point_of", point)
    assert main(["plan", *MODEL, "--sweep", "accumulation=1,2,3,4,5"]) == 0
    said = capsys.readouterr()
    assert "interrupted: 2 of 5 points" in said.err
    assert "accumulation=2" in said.out and "accumulation=3" not in said.out


def test_a_thousand_points_give_the_best_ones(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ",".join(map(str, range(1, 17)))
    sweeps = ("--sweep", "stage=0,1,2,3", "--sweep", f"micro-batch={sizes}")
    assert main(["plan", *MODEL, *sweeps, "--sweep", f"accumulation={sizes}"]) == 0
    text = capsys.readouterr().out
    assert "1024 points; the table has those marked *" in text


def gathered(unit: str, numel: int) -> Any:
    return traffic_row("all_gather", unit=unit, phase="forward", nbytes=4.0 * numel, seconds=0.02)


def test_exposed_seconds_have_the_names_of_the_units(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ["layers.10", "layers.9", "(root)"]
    facts = METADATA | {
        "framework": "fsdp2", "stage": 3, "numel": 3 * 10**7, "trainable": 3 * 10**7,
        "shard_numel": 15 * 10**6, "trainable_shard_numel": 15 * 10**6, "units": [10**7],
        "kept_numel": 10**7,
    }  # fmt: skip
    one = trained(0, (0, 200, 700, 100, 0, 0), (0, 40, 60, 0, 0, 0))
    one = changed(one, models=(facts,), traffic=tuple(gathered(n, 10**7) for n in names))
    path = tmp_path / "run.json"
    path.write_bytes(encode_snapshot(run(one, replace(one, rank=1))))
    base, other = asked(capsys, "--from", str(path), "--set", "link=2")
    assert {"(root)", "layers.9"} <= set(base["exposed_seconds"]) <= set(names)
    assert main(["plan", "--from", str(path), "--set", "link=2"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith("  layers.9 ")]
    assert float(rows[0][1]) == pytest.approx(1e3 * base["exposed_seconds"]["layers.9"], rel=0.02)
    assert float(rows[0][3]) == pytest.approx(1e3 * other["exposed_seconds"]["layers.9"], rel=0.02)
    assert other["exposed_seconds"]["layers.9"] < base["exposed_seconds"]["layers.9"]


def test_what_fits_is_unknown_without_a_capacity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = changed(trained(0, (0, 200, 700, 100, 0, 0), (0, 0, 50, 0, 0, 0)), memory_device=None)
    path = tmp_path / "run.json"
    path.write_bytes(encode_snapshot(run(one, replace(one, rank=1))))
    assert {p["fits"] for p in asked(capsys, "--from", str(path), "--set", "link=2")} == {None}
    assert main(["plan", "--changes", "--from", str(path)]) == 0
    assert "what fits is n/a" in capsys.readouterr().out
    told = asked(capsys, "--from", str(path), "--gpu", "80GiB", "--set", "link=2")
    assert {p["fits"] for p in told} == {True}


def test_a_sweep_of_stages_ends_with_the_command_that_launches_them(
    capsys: pytest.CaptureFixture[str], recorded: str
) -> None:
    def last_line(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    sweeps = ("--sweep", "stage=2,3", "--sweep", "devices=4,8")
    given = last_line(*MODEL, *sweeps)
    assert given == "  zeromon fit --gpu h100 --stages 2,3 --devices 4,8 -- COMMAND"
    # A number of devices is one of each node there: with several the two differ
    assert "zeromon fit" not in last_line(*MODEL, *sweeps, "--nodes", "2", "--interconnect", "25GB/s")
    assert "zeromon fit" not in last_line(*MODEL, "--sweep", "micro-batch=1,2")
    ran = last_line("--from", recorded, "--gpu", "a100", "--sweep", "stage=0,2")
    assert ran.startswith("  zeromon fit --gpu a100 --stages 0,2 -- ") and "COMMAND" not in ran
