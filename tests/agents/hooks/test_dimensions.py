"""The strategy, the dimensions and the data-parallel size that an agent finds in each parallelism."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.fsdp._fully_shard._fsdp_common as fsdp2_common
import torch.distributed.fsdp._init_utils as fsdp1_init
from support import PROGRAMS, ROOT
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from zeromon_agents.hooks.dimensions import Dimensions


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("parallel")
    command = [sys.executable, str(PROGRAMS / "parallel.py"), str(folder)]
    environment = os.environ | {
        "ZEROMON_COLLECTOR": "off",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "agents"))),
    }
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    line = next(text for text in ran.stdout.splitlines() if text.startswith("{"))
    made: dict[str, dict[str, object]] = json.loads(line)
    return made


@pytest.mark.parametrize(
    ("case", "strategy", "batches", "dimensions"),
    [
        ("tp", "tp", 1, {"tp": 4}),
        ("tp without names", "tp", 1, {"tp": 4}),
        ("fsdp2 + tp", "fsdp2 + tp", 2, {"dp_shard": 2, "tp": 2}),
        ("hsdp", "fsdp2", 4, {"replicate": 2, "shard": 2}),
        ("hsdp of other names", "fsdp2", 4, {"dp_replicate": 2, "dp_shard": 2}),
        ("fsdp2", "fsdp2", 4, {"dp_shard": 4}),
        ("compiled fsdp2", "fsdp2", 4, {"dp_shard": 4}),
        ("ddp", "ddp", 4, {"dp": 4}),
        ("compiled ddp", "ddp", 4, {"dp": 4}),
        ("ddp of a compiled module", "ddp", 4, {"dp": 4}),
        ("compiled fsdp1", "fsdp1-full", 4, {"dp_shard": 4}),
        ("pp", "pp", 1, {"pp": 4}),
        ("none", "unknown", None, {}),
    ],
)
def test_a_rank_says_what_it_is(
    found: dict[str, dict[str, object]],
    case: str,
    strategy: str,
    batches: int | None,
    dimensions: dict[str, int],
) -> None:
    if case not in found:
        pytest.skip("FSDP2 of this torch does not run on a CPU")
    seen = found[case]
    named = {k: v for k, v in dict(seen["dimensions"]).items() if k != "world"}  # type: ignore[call-overload]
    assert (seen["strategy"], seen["batches"], named) == (strategy, batches, dimensions)
    assert (seen["steps"], seen["errors"], seen["kept"]) == (3, 0, [])


BLOCK = (8 * 16 + 16) + (16 * 8 + 8)


@pytest.mark.parametrize(
    ("case", "of_the_rank"),
    [
        ("fsdp2 + tp", 8 * 16 // 2 + 16 // 2 + 16 * 8 // 2 + 8),  # the bias of `down` is whole
        ("hsdp", BLOCK),
        ("fsdp2", BLOCK),
        ("ddp", BLOCK),
    ],
)
def test_a_rank_knows_how_large_the_whole_model_is(
    found: dict[str, dict[str, object]], case: str, of_the_rank: int
) -> None:
    """A rank of tensor parallelism has a part, and DTensor has the shape of the whole."""
    if case not in found:
        pytest.skip("FSDP2 of this torch does not run on a CPU")
    assert found[case]["numel"] == [[of_the_rank, BLOCK]]


def test_names_that_the_use_of_a_group_is_read_from_are_still_set() -> None:
    of_fsdp2 = inspect.getsource(fsdp2_common)
    assert "self.shard_process_group" in of_fsdp2 and "self.replicate_process_group" in of_fsdp2
    assert "_inter_node_pg" in inspect.getsource(fsdp1_init)
    assert "self.bucket_bytes_cap" in inspect.getsource(DistributedDataParallel)
    assert "self.group = group" in inspect.getsource(_PipelineStageBase)
    assert "self.stage_index" in inspect.getsource(_PipelineStageBase)


def test_dimensions_stay_when_the_script_has_destroyed_its_groups() -> None:
    """The end of a script is a step's end, too: a pipeline's rank was then of an unknown strategy."""
    written: list[object] = []
    kept: Any = SimpleNamespace(
        _new=[], _stages=[], _seen=(), _written=[], models=SimpleNamespace(modules=[], optimizers=[]),
        collectives=SimpleNamespace(groups={1: None}), dimensions=lambda: [{"name": "pp"}],
        context=SimpleNamespace(add_metadata=lambda **sent: written.append(sent)),
    )  # fmt: skip
    Dimensions.look(kept)
    kept.collectives.groups, kept.dimensions = {}, list
    Dimensions.look(kept)
    assert written == [{"dimensions": [{"name": "pp"}]}]
