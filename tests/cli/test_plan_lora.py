"""`zeromon plan` with LoRA and QLoRA, against published counts and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_models import describe_in_this_process

from zeromon.cli import main

SEVEN: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000}
SIXTY_FIVE = SEVEN | {
    "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
STEP = ("--micro-batch", "1", "--length", "512", "--checkpointing")


def planned(
    folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], *options: str
) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    main(["plan", str(path), *STEP, *options, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def row_of(content: dict[str, Any], framework: str, stage: int) -> dict[str, Any]:
    return next(
        row for row in content["rows"]
        if (row["framework"], row["stage"], row["optimizer_on"]) == (framework, stage, "device")
    )  # fmt: skip


@pytest.fixture
def described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    describe_in_this_process(monkeypatch)


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize(
    ("rank", "targets", "trained"),
    # As print_trainable_parameters() of peft has them for Llama-2 7B
    [("8", "q_proj,v_proj", 4_194_304), ("16", "all-linear", 39_976_960),
     ("16", "attention", 16_777_216)],
)  # fmt: skip
def test_trained_parameters_are_those_of_peft(
    rank: str, targets: str, trained: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lora-rank", rank, "--lora-targets", targets, "--framework", "fsdp1")
    content = planned(tmp_path, capsys, SEVEN, *options, "--devices", "4")
    assert content["trainable"] == trained
    assert content["params"] == 6_738_415_616 + trained
    # Only what is trained has an optimizer state, and the base is sharded in 16 bits
    roles = row_of(content, "fsdp1", 3)["roles"]["device"]
    assert roles["optimizer_state"] == pytest.approx(8 * trained / 4, rel=1e-3)
    expected = (2 * 6_738_415_616 + 4 * trained) / 4
    assert roles["sharded_param"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("described_here")
def test_qlora_of_65_billion_fits_48_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dettmers et al. 2023: a 65B model on one device of 48 GB, with an optimizer of 8 bits."""
    options = ("--lora-rank", "64", "--load-in", "4bit-double", "--framework", "ddp", "--devices", "1",
               "--gpu", "48GiB", "--optimizer", "adamw8bit")  # fmt: skip
    row = row_of(planned(tmp_path, capsys, SIXTY_FIVE, *options), "ddp", 0)
    assert row["fits"]
    assert row["bytes"]["device"] > 36e9


@pytest.mark.usefixtures("described_here")
def test_zero_3_shards_and_gathers_the_packed_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lora-rank", "16", "--devices", "4")
    whole = row_of(planned(tmp_path, capsys, SEVEN, *options), "deepspeed", 3)
    packed = row_of(planned(tmp_path, capsys, SEVEN, *options, "--load-in", "4bit"), "deepspeed", 3)
    linear = 6_476_005_376
    freed = whole["roles"]["device"]["sharded_param"] - packed["roles"]["device"]["sharded_param"]
    assert freed == pytest.approx(1.5 * linear / 4, rel=1e-3)
    assert packed["roles"]["device"]["buffer"] >= linear * 4 / 64, "constants are not sharded"
    assert packed["communication_bytes"] < 0.4 * whole["communication_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["7B", "--lora-rank", "8"], "--lora-rank needs the layers of the model"),
        (["config.json", "--load-in", "4bit"], "need --lora-rank"),
        (["module:factory", "--lora-rank", "8", "--trace"], "--trace counts no adapters"),
    ],
)
def test_what_lora_cannot_be_planned_for_is_said(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_target_that_no_layer_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SEVEN))
    assert main(["plan", str(path), "--lora-rank", "8", "--lora-targets", "query"]) == 2
    assert "no linear layer is named query; there are down_proj" in capsys.readouterr().err
