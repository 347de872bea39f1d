"""YAML of trainers such as LLaMA-Factory and axolotl, and the environment variables of accelerate."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from zeromon.check.runner import Result, check

SHARED = Path(os.environ.get("ZEROMON_SHARED_DATA", ROOT.parent / "shared" / "data")) / "configs"
CASES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "corpus" / "trainers.yaml").read_text()
)["cases"]


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    dump = json.dumps if file.suffix == ".json" else yaml.safe_dump
    file.write_text(content if isinstance(content, str) else dump(content))


def run_case(case: dict[str, Any], folder: Path) -> Result:
    """Writes the files of a case into *folder*, the working directory, and checks them."""
    content = case["is"]
    for name in case.get("drop", ()):
        content = {key: value for key, value in content.items() if key != name}
    write(folder / case.get("file", "recipe.yaml"), content)
    given = [case.get("file", "recipe.yaml")]
    for name, other in case.get("beside", {}).items():
        write(folder / name, other)
        given += [name] if name.endswith(".sh") else []
    return check(given, None, shlex.split(case.get("run", "")))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_corpus(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_case(case, tmp_path)
    said = [f"{p.code} {p.key}" for p in result.problems if p.severity != "info"]
    assert sorted(said) == sorted(case.get("says", [])), result.problems
    infos = {p.code for p in result.problems if p.severity == "info" and not p.quiet}
    assert infos == set(case.get("infos", [])), result.problems
    stated = {figure.name: figure.value for figure in result.figures}
    assert {name: stated.get(name) for name in case.get("figures", {})} == case.get("figures", {})


def test_the_corpus_is_of_all_projects() -> None:
    assert len(CASES) >= 60
    assert len({case["name"] for case in CASES}) == len(CASES)


def test_a_folder_of_trainers_is_found(tmp_path: Path) -> None:
    for case in CASES:
        if "run" not in case and case["name"].startswith(("lf-lora", "ax-lora", "tt-full", "hf-sft")):
            write(tmp_path / f"{case['name']}.yaml", case["is"])
    result = check([str(tmp_path)])
    assert (result.files, result.problems) == (3, ())


@pytest.mark.parametrize("path", sorted(SHARED.glob("*.yaml")), ids=lambda path: path.name)
def test_published_configurations_are_not_accused(path: Path) -> None:
    assert [p for p in check([str(path)]).problems if p.severity == "error"] == []


def test_a_fix_is_in_the_syntax_of_the_file_and_works(tmp_path: Path) -> None:
    case = next(case for case in CASES if case["name"] == "lf-both-precisions")
    file = tmp_path / "recipe.yaml"
    write(file, case["is"])
    (problem,) = check([str(file)]).problems
    assert (problem.fix, problem.line) == (
        "fp16: false",
        1 + file.read_text().split("\n").index("fp16: true"),
    )
    file.write_text(file.read_text().replace("fp16: true", problem.fix))
    assert check([str(file)]).problems == ()


def test_a_problem_has_the_names_of_the_trainer(tmp_path: Path) -> None:
    case = next(case for case in CASES if case["name"] == "ax-micro")
    for name, content in {"recipe.yaml": case["is"], **case["beside"]}.items():
        write(tmp_path / name, content)
    (problem,) = [p for p in check([str(tmp_path / "recipe.yaml")]).problems if p.severity == "error"]
    assert problem.message.startswith(
        "micro_batch_size is 2 here, and train_micro_batch_size_per_gpu is 4"
    )


def test_the_arguments_of_llama_factory_without_a_yaml(tmp_path: Path) -> None:
    arguments = (
        "--stage sft --model_name_or_path org/m --finetuning_type full --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4 --fp16 true --bf16 true --quantization_bit 4"
    )
    for start in ("llamafactory-cli train", "torchrun --nproc_per_node 8 src/train.py"):
        result = check([], None, f"NPROC_PER_NODE=8 {start} {arguments}".split())
        fixes = {problem.key: problem.fix for problem in result.problems}
        assert fixes == {
            "fp16": "--fp16 false",
            "quantization_bit": "remove quantization_bit, or --finetuning_type lora",
        }
        assert [f.value for f in result.figures if f.name == "whole batch"] == [64]


def test_a_misspelt_variable_has_the_line_of_its_export(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(
        "#!/bin/bash\nexport ACCELERATE_USE_FSDP=true \\\n  FSDP_VERSION=2\n"
        "export FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP=Block\n"
        "FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP torchrun --nproc_per_node 4 train.py\n"
    )
    (problem,) = check([str(script)]).problems
    assert (problem.line, problem.column) == (4, 8)
    assert problem.fix == "did you mean FSDP_TRANSFORMER_CLS_TO_WRAP?"
