"""`zeromon plan`: what it says, of what, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import changed, device_memory, rank, run, summary
from hub_models import written
from memory.test_whole import parts_of_all
from support import LAUNCH, PROGRAMS, ROOT, clean_environment, start

from zeromon.base.errors import PlanError
from zeromon.cli import build_parser, main
from zeromon.cli.plan_setup import (
    describe_entry,
    read_config_changes,
    read_config_file,
    read_model,
    setup_of_run,
)
from zeromon.memory.config_files import changes_of_config
from zeromon.memory.plan import choose_row, of_run, parse_count, parse_size, plan_table, predict_row
from zeromon.memory.spec import ZeroStage
from zeromon.snapshot.memory import RoleRow

GIB = 1 << 30
MODELS = ROOT / "tests/data/models.jsonl"
SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data"))
CONFIGS = sorted((SHARED / "configs").glob("*")) if SHARED.is_dir() else []


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], str]:
    """Writes a config.json, which hub_models.py describes: a child process takes seconds."""
    return partial(written, tmp_path, monkeypatch)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_seven_billion_on_four_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of every text on ZeRO, and the lowest stage that fits."""
    code, found = planned(capsys, "7B", "--devices", "4", "--gpu", "a100-40")
    plain = {r["stage"]: r for r in found["rows"] if r["optimizer_on"] == "device"}
    gigabytes = [plain[stage]["plain_bytes"] / 1e9 for stage in (0, 2, 3)]
    assert gigabytes == pytest.approx([112, 38.5, 28])
    # With DeepSpeed's bucket, and in the step the gradients in fp32 and the optimizer's temporaries of
    # the largest sub-group, which has the 1e9 elements of `sub_group_size`
    assert plain[3]["bytes"]["device"] / 1e9 == pytest.approx(28 + 1 + 8)
    assert [plain[stage]["fits"] for stage in range(4)] == [False, False, False, True]
    assert found["recommended"] == "ZeRO-3"
    assert "ZeRO-2 would need" in found["why"]
    assert code == 0
    sent, paper = (
        [plain[stage][key] for stage in range(4)]
        for key in ("communication_bytes", "paper_communication_bytes")
    )
    assert paper[3] == pytest.approx(1.5 * paper[2]) == sent[2]
    assert sent[3] == pytest.approx(paper[3] * (1 - 0.5 / 7 / 3))  # kept from forward to backward


def test_what_is_not_known_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """All states on the host, and of a bare size nobody knows what is gathered: no 0 B that fits."""
    arguments = ("7B", "--devices", "4", "--framework", "fsdp2")
    _, found = planned(capsys, *arguments)
    row = found["rows"][-1]
    assert (row["params_on"], row["bytes"]["device"], row["fits"]) == ("host", None, None)
    main(["plan", *arguments])
    line = next(x for x in capsys.readouterr().out.splitlines() if "parameters on host" in x)
    assert line.split("GiB")[1].split()[0] == "n/a" and " 0 B" not in line
    moved = ("--stage", "3", "--offload-params", "host", "--offload-optimizer", "host")
    _, given = planned(capsys, *arguments, *moved)
    assert (
        "what the given strategy, FSDP2 (ZeRO-3) + optimizer on host + parameters on host, needs"
        in (given["why"])
    )
    assert given["ladder"] == []
    _, small = planned(capsys, *arguments, "--gpu", "1GiB")
    assert small["recommended"] is None and "still needs 0 B" not in small["why"]
    moved = ("--stage", "3", "--offload-optimizer", "host", "--set", "offload-params=host")
    main(["plan", *arguments, "--gpu", "a100", *moved])
    line = next(x for x in capsys.readouterr().out.splitlines() if "offload-params=host" in x)
    assert line.split()[-2:] == ["n/a", "n/a"]


def test_what_nearly_does_not_fit_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 7B under ZeRO-2 on eight V100, which ran out with 28.28 GiB allocated in Adam's step."""
    for device, told in (("v100", "tight"), ("a100", "yes"), ("24GiB", "no")):
        main(["plan", "6.74B", "--devices", "8", "--gpu", device])
        text = capsys.readouterr().out
        line = next(x for x in text.splitlines() if x[4:].startswith("ZeRO-2  "))
        assert "28.2 GiB" in line and f" {told} " in line
        assert ("tight: over 90 %" in text) is (told == "tight")


@pytest.mark.parametrize(("framework", "said"), [("fsdp1", True), ("fsdp2", False)])
def test_the_limit_of_gathers_that_fsdp1_assumes_is_shown(
    capsys: pytest.CaptureFixture[str], framework: str, said: bool
) -> None:
    """Before torch 2.0 FSDP1 had it off: stanford_alpaca#39 ran out where `plan` says yes."""
    main(["plan", "7B", "--framework", framework])
    assert ("limit_all_gathers=True" in capsys.readouterr().out) is said


def test_the_ranks_of_a_host_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO-3 with all of 16 bytes a parameter on the host, and fp32 gradients besides.

    Parameters, gradients and fp32 gradients are pinned, each rounded up to a power of two.
    """
    arguments = ("7B", "--devices", "16", "--gpu", "8GiB", "--host-memory")
    _, one = planned(capsys, *arguments, "1TiB", "--nodes", "1")
    offloaded = next(r for r in one["rows"] if r["params_on"] == "host")
    rounded = 2 * 2**30 + 2**31 - 7e9 / 16 * (2 + 2 + 4)
    assert (offloaded["bytes"]["host"] - rounded) * 16 / 7e9 == pytest.approx(20, rel=0.01)
    assert (offloaded["fits"], one["hosts"]) == (True, 1)
    _, small = planned(capsys, *arguments, "100GiB")
    offloaded = next(r for r in small["rows"] if r["params_on"] == "host")
    assert (offloaded["fits_host"], offloaded["fits"], small["hosts"]) == (True, True, 2)
    _, short = planned(capsys, *arguments, "100GiB", "--nodes", "1")
    offloaded = next(r for r in short["rows"] if r["params_on"] == "host")
    assert (offloaded["fits_host"], offloaded["fits"]) == (False, False)
    assert main(["plan", *arguments, "here"]) in (0, 1)
    assert "usable a rank)" in capsys.readouterr().out
    assert main(["plan", *arguments, "lots"]) == 2


def test_nothing_fits_is_a_finding(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer of it is larger than the device."""
    shape = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
             "num_attention_heads": 64, "intermediate_size": 28672, "vocab_size": 32000}  # fmt: skip
    code, found = planned(capsys, model(shape), "--devices", "1", "--gpu", "1GiB")
    assert code == 1
    assert found["recommended"] is None
    assert "nothing fits" in found["why"]


def test_the_text_names_what_takes_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns are not enough for a table of seven; what matters is on its left."""
    assert main(["plan", "7B", "--devices", "4", "--gpu", "a100-40"]) == 0
    text = capsys.readouterr().out
    assert "7 B parameters on 4 devices of 39.4 GiB" in text
    assert "> ZeRO-3" in text
    assert "\nchoose ZeRO-3\n  - ZeRO-2 would need 45.6 GiB\n" in text
    assert "sent/step: the ZeRO paper has 19.6 GiB for ZeRO-1 and ZeRO-2." in text
    assert "optimizer state" in text


def test_a_config_json_with_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 in a folder as transformers saves it; activations and the largest micro-batch."""
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
         "n_positions": 1024}
    ))  # fmt: skip
    common = (str(tmp_path), "--gpu", "24GiB", "--length", "1024", "--micro-batch", "4")
    _, plain = planned(capsys, *common)
    _, saved = planned(capsys, *common, "--checkpointing")
    assert plain["params"] == 124_439_808
    by_stage = {r["stage"]: r for r in plain["rows"] if r["optimizer_on"] == "device"}
    small = {r["stage"]: r for r in saved["rows"] if r["optimizer_on"] == "device"}
    kept = [rows[0]["roles"]["device"]["activation"] for rows in (by_stage, small)]
    assert kept[0] > 1.4 * kept[1]  # logits and loss are most of a small model
    assert by_stage[0]["largest_micro_batch"] < small[0]["largest_micro_batch"]
    assert by_stage[0]["largest_micro_batch"] <= by_stage[3]["largest_micro_batch"]


def test_a_config_json_is_counted_on_transformers_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3 was 38.6 B, and fitted; its latent attention has no formula of activations."""
    row = next(r for r in map(json.loads, MODELS.read_text().splitlines())
               if r["config"]["model_type"] == "deepseek_v3")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    arguments = (str(tmp_path), "--devices", "8", "--gpu", "h100", "--micro-batch", "1")
    _, found = planned(capsys, *arguments)
    assert found["params"] == 671_026_404_352
    assert not any(r["fits"] for r in found["rows"] if r["optimizer_on"] == "device")
    assert any("DeepseekV3ForCausalLM of transformers" in note for note in found["notes"])
    assert any("activations are not counted" in note for note in found["notes"])
    assert {r["largest_micro_batch"] for r in found["rows"]} <= {None, 0}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')")
    read_model.cache_clear()
    describe_entry.cache_clear()
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert "no transformers here" in said
    assert "A config.json needs transformers" in said


def test_a_model_that_transformers_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of its repository never runs."""
    from zeromon_agents.describe import hub_model

    known = SimpleNamespace(from_dict=lambda _: None)
    library = SimpleNamespace(__version__="5.0.0", CONFIG_MAPPING={"llama": known})
    monkeypatch.setitem(sys.modules, "transformers", library)
    config = {"model_type": "llama", "architectures": ["OwnForCausalLM"], "auto_map": {"x": "y"}}
    for change, says in (({}, "has no OwnForCausalLM"), ({"model_type": "own"}, "no model type 'own'")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=says):
            hub_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configurations_that_real_projects_ship(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is read, and its own strategy is among the rows."""
    config = changes_of_config(read_config_file(path))
    if "deepspeed_config_file" in path.read_text():  # names a file of its author's machine
        assert main(["plan", "7B", "--config", str(path)]) == 2
        assert "cannot read" in capsys.readouterr().err
        return
    _, found = planned(capsys, "7B", "--config", str(path))
    mine = [
        r for r in found["rows"]
        if r["framework"] == config["framework"] and r["stage"] == config["stage"]
        and r["optimizer_on"] == config.get("optimizer_on", "device")
    ]  # fmt: skip
    assert mine
    assert found["ranks"] == config.get("ranks", 8)


def test_what_a_deepspeed_file_says() -> None:
    found = changes_of_config(
        {
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 1e4,
                "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto",
                "zero_hpz_partition_size": 8,
            },
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": "auto",
        },
        hidden=100,
    )  # fmt: skip
    assert found["stage"] == ZeroStage.PARAMETERS
    assert (found["optimizer_on"], found["params_on"]) == ("host", "nvme")
    assert (found["persistence_numel"], found["secondary_ranks"]) == (10_000, 8)
    assert (found["prefetch_numel"], found["grad_bucket_numel"]) == (9000, 10_000)
    assert found["optimizer"].name == "sgd-momentum"
    assert (found["micro_batch"], found["accumulation"]) == (3, 1)
    assert found["precision"].has_master


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "cannot read"),
        ("a.yaml", "a: [", "cannot read"),
        ("a.json", "[1]", "the file contains a list, not a configuration"),
        ("a.yaml", "name: x", "neither a DeepSpeed configuration"),
        ("a.json", '{"zero_optimization": {"stage": "three"}}', "stage must be a number"),
        ("a.json", '{"zero_optimization": {"stage": 9}}', "stage"),
        ("a.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}', "tape"),
        ("a.json", '{"zero_optimization": {"stage": 3, "reduce_bucket_size": true}}', "a number"),
        ("a.json", '{"zero_optimization": [3]}', "zero_optimization"),
        ("a.json", '{"zero_optimization": {"stage": 3.5}}', "whole number"),
        ("a.json", '{"zero_optimization": {"reduce_bucket_size": -1}}', "not negative"),
        ("a.json", '{"zero_optimization": {"stage": 3, "offload_param": "cpu"}}', "a section"),
        ("a.json", '{"zero_optimization": {"offload_optimizer": {"device": ["cpu"]}}}', "device"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.yaml", "1: 2", "neither a DeepSpeed configuration"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: 3", "deepspeed_config"),
    ],
)
def test_wrong_configurations_get_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    """Exit code 2, one line and a way out, no traceback."""
    (tmp_path / name).write_text(text)
    assert main(["plan", "7B", "--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [["--reserve", "2"], ["--reserve", "nan"], ["--micro-batch", "-3"], ["--devices", "0"],
     ["--length", "many"], ["--accumulation", "0"]],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_no_such_numbers(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "7B", *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no model is given"),
        (["tiny"], "neither a number of parameters"),
        (["7B", "--gpu", "much"], "nor a memory size"),
        (["7B", "--config", "/nowhere.json"], "cannot read"),
        (["7B", "--trace"], "module:factory"),
        (["7B", "--stage", "0", "--offload-optimizer", "host"], "from stage 1 on"),
        (["7B", "--devices", "6", "--shard-ranks", "4"], "cannot be split"),
        (["nowhere:build"], "cannot build nowhere:build"),
        (["7B", "--gpu", "infGB"], "nor a memory size"),
        (["7B", "--gpu", "0"], "nor a memory size"),
        (["7B", "--framework", "ddp", "--stage", "3"], "DDP has stages 0 and 1"),
        (["7B", "--framework", "fsdp2", "--stage", "1"], "FSDP is stage 2"),
        (["7B", "--stage", "2", "--offload-optimizer", "nvme"], "only DeepSpeed's stage 3"),
    ],
)
def test_wrong_arguments_get_a_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_hybrid_shards_divide_by_a_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two machines of eight: a shard is an eighth, not a sixteenth."""
    path = tmp_path / "a.yaml"
    text = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"
    for strategy, ranks in (("FULL_SHARD", 16), ("HYBRID_SHARD", 8)):
        path.write_text(f"{text}  fsdp_sharding_strategy: {strategy}\n")
        _, found = planned(capsys, "7B", "--config", str(path))
        roles = next(r for r in found["rows"] if r["stage"] == 3)["roles"]["device"]
        assert roles["sharded_param"] == 7_000_000_000 // ranks * 4


def test_fp32_under_deepspeed_keeps_a_flat_copy() -> None:
    """A configuration that names no half precision trains in fp32."""
    assert changes_of_config({"zero_optimization": {"stage": 2}})["precision"].has_master
    assert not changes_of_config({"zero_optimization": {"stage": 0}})["precision"].has_master
    assert changes_of_config({"zero_optimization": {"stage": 2}})["precision"].param_bytes == 4


def test_accelerate_may_leave_the_rest_to_a_file_of_deepspeeds(tmp_path: Path) -> None:
    """Relative to the YAML that names it."""
    ds = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\n"
        "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    options = build_parser().parse_args(["plan", "7B", "--config", str(tmp_path / "a.yaml")])
    found = read_config_changes(options, 0)
    assert (found["stage"], found["ranks"], found["precision"].param_bytes) == (3, 4, 2)


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("1.5b", 1_500_000_000), ("350M", 350 * 10**6), ("7e9", 7 * 10**9),
     ("124_439_808", 124_439_808), ("B", None), ("-1", None), ("nan", None), ("inf", None)],
)  # fmt: skip
def test_counts(text: str, count: int | None) -> None:
    assert parse_count(text) == count


def test_sizes() -> None:
    assert parse_size("80GiB") == parse_size("80") == 80 << 30
    assert parse_size("H100") == pytest.approx(79.11 * GIB)  # as an out-of-memory error says
    assert parse_size("4090") == parse_size("NVIDIA GeForce RTX 4090") == parse_size("rtx4090")
    assert parse_size("80GB") == parse_size("8e10") == 80 * 10**9
    assert (parse_size("0.5"), parse_size("4096"), parse_size("4097")) == (GIB // 2, 4 << 40, 4097)
    with pytest.raises(PlanError):
        parse_size("GiB")


@pytest.mark.parametrize("verb", ["plan 7B", "check ds.json --model 7B"])
def test_a_plain_number_is_one_size_in_every_verb(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--gpu 80 was 80 bytes in plan, and 80 GiB in check."""
    monkeypatch.chdir(tmp_path)
    ds = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": 8}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    said = []
    for size in ("80", "80GiB", "85899345920"):
        code = main([*verb.split(), "--devices", "8", "--gpu", size, "--host-memory", "2048"])
        out, err = capsys.readouterr()
        said.append((code, out))
        assert ("--gpu " + size + " is read as 80.0 GiB" in err) is size.isdigit()
        assert "--host-memory 2048 is read as 2.0 TiB" in err
    assert said[0] == said[1] == said[2]


SMALL = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000,
         "num_attention_heads": 16, "intermediate_size": 5504}  # fmt: skip


def test_the_best_is_what_the_user_asked_for(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A given micro-batch fits in 0, and stage 1 sends no less; for a larger one it leaves no room.

    Stage 2 takes no more: the gradients that it divides exist after the activations.
    """
    common = (model(SMALL), "--gpu", "24GiB", "--length", "2048")
    _, free = planned(capsys, *common)
    assert free["recommended"] == "ZeRO-1"
    most = {r["label"]: r["largest_micro_batch"] for r in free["rows"]}
    assert most["ZeRO-2"] == most["ZeRO-1"] >= 2 * most["ZeRO-0"] > 0
    assert "ZeRO-0 leaves too little for activations: it takes 21.0 GiB" in free["why"]
    assert free["settings"] == ['"use_multi_rank_bucket_allreduce": false']
    _, given = planned(capsys, *common, "--micro-batch", "1")
    assert given["recommended"] == "ZeRO-0"
    instead = f"ZeRO-1 costs about as much, and takes {most['ZeRO-1']} sequences instead of"
    assert instead in given["why"]
    _, sums = planned(capsys, *common, "--accumulation", "4")  # ZeRO-2 reduces in each micro-step
    assert sums["recommended"] == "ZeRO-1"


# ---- models that are built ------------------------------------------------------------------------


def in_programs(*arguments: str) -> Any:
    """`zeromon plan` where tests/programs/planned.py can be imported."""
    return subprocess.run(
        [sys.executable, "-m", "zeromon", "plan", *arguments],
        cwd=PROGRAMS, env=clean_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """What one real step of planned.build took, by torch's own profiler; see programs/peak.py."""
    with tempfile.TemporaryFile("w+") as output:
        done = start([*LAUNCH, "2", str(PROGRAMS / "peak.py")], clean_environment(), ROOT, output)
        assert done.wait(180) == 0
        output.seek(0)
        line = next(x for x in output.read().splitlines() if x.startswith("{"))
    found: dict[str, int] = json.loads(line)
    return found


STEP = ("--devices", "2", "--micro-batch", "8", "--length", "128", "--framework", "fsdp2",
        "--precision", "fp32", "--json")  # fmt: skip


def peak(found: Any) -> int:
    rows = [r for r in found["rows"] if r["label"] == "FSDP2 (ZeRO-3)"]
    return int(rows[0]["bytes"]["device"])


@pytest.mark.trains
def test_a_traced_peak_is_within_ten_percent_of_the_real_one(measured: dict[str, int]) -> None:
    """Fake tensors on fake ranks, against every allocation of a real step on two."""
    done = in_programs("planned:build", "--trace", *STEP)
    assert done.returncode == 0, done.stderr
    assert peak(json.loads(done.stdout)) == pytest.approx(measured["peak"], rel=0.10)


@pytest.mark.trains
def test_a_peak_by_formula_is_within_ten_percent_of_the_real_one(
    tmp_path: Path, measured: dict[str, int]
) -> None:
    """The same model as a config.json."""
    shape = {"model_type": "gpt2", "n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 256,
             "n_positions": 128, "tie_word_embeddings": False,
             "activation_function": "gelu"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    done = in_programs(str(tmp_path), *STEP)
    assert peak(json.loads(done.stdout)) == pytest.approx(measured["peak"], rel=0.10)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    done = in_programs("planned:no_module")
    assert done.returncode == 2
    assert "returned int, not a torch.nn.Module" in done.stderr
    assert "Traceback" not in done.stderr


# ---- what if --------------------------------------------------------------------------------------


def recorded(**facts: Any) -> Any:
    """A ZeRO-2 run of 7 B on 8 devices with 20 GiB of activations."""
    numel = 7_000_000_000
    model = {
        "framework": "deepspeed", "stage": 2, "ranks": 8, "numel": numel, "trainable": numel,
        "shard_numel": numel // 8, "trainable_shard_numel": numel // 8, "units": [200_000_000],
        "param_bytes": 2, "compute_bytes": 2, "grad_bytes": 2, "has_master": True,
        "optimizer": "AdamW",
    }  # fmt: skip
    states = round(numel * (2 + 14 / 8))
    one = rank(
        0, memory_device=device_memory(), recent=(summary(30, allocated_bytes=states + 20 * GIB),)
    )
    role = RoleRow(role="all", device_bytes=states, host_bytes=0, disk_bytes=0, pinned_bytes=0)
    return run(changed(one, models=(model | facts,), roles=(role,)))


def what_if(*arguments: str) -> Any:
    options = build_parser().parse_args(["plan", "--from", "x", "--gpu", "80GiB", *arguments])
    return setup_of_run(recorded(), options)


def test_a_run_as_it_is_then_changed() -> None:
    """Stage 2 to 3, 8 to 16 devices, twice the micro-batch, the optimizer on the host."""
    now = what_if()
    assert now.plan.stage == ZeroStage.GRADIENTS
    base = predict_row(now, now.plan).device_bytes
    assert base == pytest.approx(round(7e9 * (2 + 14 / 8)) + 20 * GIB, rel=0.05)
    stage_3 = what_if("--stage", "3")
    assert predict_row(stage_3, stage_3.plan).device_bytes < base - 10 * 10**9
    wide = what_if("--devices", "16")
    # gradients do not exist while activations do
    assert predict_row(wide, wide.plan).device_bytes == pytest.approx(base - 7e9 * 12 / 16, rel=0.01)
    twice = what_if("--micro-batch", "2")
    assert predict_row(twice, twice.plan).device_bytes == pytest.approx(base + 20 * GIB, rel=0.01)
    host = what_if("--offload-optimizer", "host")
    moved = predict_row(host, host.plan)
    assert moved.device_bytes < base - 10**10
    assert moved.memory.total("host") > 10**10
    assert choose_row(now, plan_table(now)).row is not None


def test_a_run_keeps_what_it_does_not_train_and_how_it_shards() -> None:
    """LoRA on 16 ranks in two copies; an optimizer that nobody knows."""
    numel = 7_000_000_000
    facts = {"stage": 3, "ranks": 16, "shard_ranks": 8, "trainable": 20_000_000,
             "trainable_shard_numel": 2_500_000, "optimizer": "Muon"}  # fmt: skip
    options = build_parser().parse_args(["plan", "--from", "x", "--gpu", "80GiB"])
    setup = setup_of_run(recorded(**facts), options)
    memory = predict_row(setup, setup.plan).memory
    assert memory.role("sharded_param") == numel // 8 * 2
    assert memory.role("master_param") == 20_000_000 // 8 * 4
    assert "Muon" in setup.model.notes[0]


def test_tensor_and_pipeline_ranks_of_a_run_take_room_on_hosts() -> None:
    """Four copies of a model in four parts: sixteen devices, on two hosts."""
    options = build_parser().parse_args(["plan", "--from", "x", "--gpu", "h100", "--devices", "16"])
    base = of_run(parts_of_all())
    assert base.measured is not None
    speeds = replace(base.measured.speeds, gather=3e11)
    base = replace(base, measured=replace(base.measured, speeds=speeds))
    setup = setup_of_run(parts_of_all(), options, base)
    assert (setup.plan.ranks, setup.hosts) == (4, 2)
    assert setup.machine is not None and setup.measured is not None
    assert setup.machine.ranks_per_host == 8
    assert setup.machine.link is None  # NVLink ends at the host
    assert setup.measured.speeds.gather is None  # measured on one host


def test_a_run_that_told_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = build_parser().parse_args(["plan", "--from", "x"])
    with pytest.raises(PlanError, match="reported no model metadata"):
        setup_of_run(run(rank(0)), options)
    with pytest.raises(PlanError, match="reported no model metadata"):
        setup_of_run(recorded(stage="many"), options)
