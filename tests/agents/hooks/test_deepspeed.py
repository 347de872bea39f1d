"""DeepSpeed at every stage, for real: counts, bytes, steps, memory by role, and what stays the same."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flight import AS_GLOO_SAYS, by_gloo_op, flight_counts
from support import ENDED_WELL, LAUNCH, PROGRAMS, ROOT, Node, Result, free_port, train_command

from zeromon.memory.plan import of_run, predict_row
from zeromon.memory.reconcile import host_model_bytes
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.codes import Op
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import BUS_FACTOR

STEPS = 6
RANKS = 2
CASES = [(config, 2) for config in ("zero0", "zero1", "zero2", "zero2-offload", "zero3-offload")] + [
    ("zero0-fp32", 1),
    ("zero2-fp16", 1),
    ("zero3", 1),
    ("zero3-hpz", 1),
]
ACCUMULATE = dict(CASES)
"""One run a configuration serves all tests of it."""
LONG = [
    pytest.param(config, 1, marks=pytest.mark.long)
    for config in ("zero0", "zero1", "zero2", "zero3-offload")
] + [pytest.param("zero3", 2, marks=pytest.mark.long)]


@dataclass
class Trained:
    result: Result
    facts: dict[str, Any]
    metrics: dict[str, dict[tuple[str, ...], float]]

    @property
    def rank(self) -> RankSnapshot:
        return self.result.snapshot.ranks[0]


_done: dict[str, Trained] = {}


def trained(node: Node, config: str, accumulate: int) -> Trained:
    """The watched run of that case; made once."""
    case = f"{config}:{accumulate}"
    if case not in _done:
        out = node.folder / case
        command = train_command(
            RANKS, "--cases", case, "--steps", str(STEPS), "--out", str(out),
            program="train_deepspeed.py",
        )  # fmt: skip
        result = node.run(command, run="deepspeed-" + case.replace(":", "-"), DS_ACCELERATOR="cpu")
        assert result.code == 0, result.output
        facts = json.loads((out / "0.json").read_text())
        assert facts["watched"]
        _done[case] = Trained(result, facts, node.metrics(result.run))
    return _done[case]


def by_op(series: dict[tuple[str, ...], float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (rank, _, op), value in series.items():
        if rank == "0":
            found[op] += int(value)
    return found


def padded(numel: int, to: int) -> int:
    return math.ceil(numel / to) * to


@pytest.mark.parametrize(("config", "accumulate"), [*CASES, *LONG])
def test_counts_and_bytes_equal_the_flight_recorders(
    shared_node: Node, config: str, accumulate: int
) -> None:
    """Every collective of the run, from the engine's first broadcast to the last step."""
    run = trained(shared_node, config, accumulate)
    calls, nbytes = flight_counts(run.facts)
    assert sum(calls.values()) > STEPS
    assert by_gloo_op(run.metrics["zeromon_collectives_total"], "0") == calls
    assert by_gloo_op(run.metrics["zeromon_collective_bytes_total"], "0") == nbytes
    assert "zeromon_collectives_unattributed_total" not in run.metrics
    assert (
        run.rank.agent.errors == 0 and not run.rank.agent.unseen and run.rank.status.ended in ENDED_WELL
    )


@pytest.mark.parametrize(("config", "accumulate"), [*CASES, *LONG])
def test_bytes_equal_the_arithmetic_of_the_stage(
    shared_node: Node, config: str, accumulate: int
) -> None:
    """What a stage reduces and gathers follows from the parameters, the buckets and the padding."""
    run = trained(shared_node, config, accumulate)
    sizes, item = run.facts["params"], 4 if config.endswith("fp32") else 2
    applied = STEPS - run.facts["cases"][f"{config}:{accumulate}"]["skipped_steps"]
    nbytes = by_op(run.metrics["zeromon_collective_bytes_total"])
    whole = sum(sizes)
    if config.startswith("zero3"):
        # each parameter is padded to the ranks by itself, and reduced in every micro-step
        shards = sum(padded(size, RANKS) for size in sizes)
        assert nbytes["reduce_scatter"] == shards * item * accumulate * STEPS
    elif config.startswith("zero2"):
        assert whole * item * accumulate * STEPS <= nbytes["all_reduce"]
        # besides: the overflow flag and the norm, a few bytes a step
        assert nbytes["all_reduce"] - whole * item * accumulate * STEPS <= 64 * STEPS
    else:
        assert 0 <= nbytes["all_reduce"] - whole * item * STEPS <= 64 * STEPS
    if config.startswith(("zero1", "zero2")):
        # the flat group is padded to twice the ranks; gathered after each applied step
        assert nbytes["all_gather"] == padded(whole, 2 * RANKS) * item * applied


@pytest.mark.parametrize(("config", "accumulate"), [*CASES, *LONG])
def test_steps_are_the_engines(shared_node: Node, config: str, accumulate: int) -> None:
    """global_steps, skipped_steps, micro-steps; the phases add up."""
    run = trained(shared_node, config, accumulate)
    facts = run.facts["cases"][f"{config}:{accumulate}"]
    (engine,) = run.rank.config.engines
    assert engine.steps == run.rank.steps.watched_steps == facts["global_steps"] == STEPS
    assert engine.skipped == run.rank.steps.skipped_steps == facts["skipped_steps"]
    assert run.rank.steps.micro_steps == STEPS * accumulate
    assert all(step.micro_steps == accumulate for step in run.rank.steps.recent)
    spent = run.rank.steps.phase_seconds
    assert sum(spent.values()) == pytest.approx(run.rank.steps.total_seconds, rel=1e-6)
    assert all(spent[p] > 0 for p in ("forward", "backward", "optimizer", "data_wait"))
    assert (spent["cpu_optimizer"] > 0) == ("offload" in config)
    (model,) = run.rank.config.models
    half = {"zero0-fp32": "float32", "zero2-fp16": "float16"}
    assert model["compute_dtype"] == half.get(config, "bfloat16")
    # of stage 3 the example makes it within deepspeed.zero.Init
    assert model.get("built_bytes") == (0 if config.startswith("zero3") else None)
    scalars = {row.name: row for row in run.rank.training.scalars}
    assert scalars["learning_rate"].value == run.rank.steps.recent[-1].learning_rate > 0  # type: ignore[operator]
    norm = scalars["grad_norm"].value if "grad_norm" in scalars else None
    assert norm == engine.grad_norm == run.rank.steps.recent[-1].grad_norm
    assert (norm is None) == (config == "zero0-fp32")  # there DeepSpeed computes none


@pytest.mark.parametrize(
    ("config", "params", "grads", "master", "state"),
    [
        ("zero0", 2, 2, 4, 8),
        ("zero1", 2, 1, 2, 4),
        ("zero2", 2, 1, 2, 4),
        ("zero3", 1, 1, 2, 4),
        ("zero2-offload", 2, 2, 2, 4),
        ("zero3-offload", 1, 3, 2, 4),
    ],
)
def test_bytes_a_parameter_and_role(
    shared_node: Node, config: str, params: int, grads: int, master: int, state: int
) -> None:
    """Two ranks, mixed-precision Adam: 2 + 2 + 12 at stage 0, to 16 / N at stage 3, within 1 %."""
    run = trained(shared_node, config, ACCUMULATE[config])
    whole = sum(run.facts["params"])
    found = {row.role: row.host_bytes / whole for row in run.rank.memory.roles}
    sharded = config.startswith("zero3")
    assert found["sharded_param" if sharded else "unsharded_param"] == pytest.approx(params, 0.01)
    assert found["master_param"] == pytest.approx(master, rel=0.01)
    assert found["optimizer_state"] == pytest.approx(state, rel=0.01)
    if config == "zero0":
        assert found["unsharded_grad"] == pytest.approx(2, rel=0.01)
    elif sharded or config.endswith("offload"):
        assert found["sharded_grad"] == pytest.approx(grads, rel=0.01)
    else:  # views of whole gradients: the one that straddles the boundary counts whole
        held = overlapping(run.facts["params"], padded(whole, 2 * RANKS) // RANKS)
        assert found["sharded_grad"] == pytest.approx(2 * held / whole, rel=0.01)
    if sharded:  # what is unsharded between steps: the parameters below the persistence threshold
        persistent = sum(size for size in run.facts["params"] if size <= 2000)
        assert found["unsharded_param"] == pytest.approx(2 * persistent / whole, rel=0.01)


@pytest.mark.parametrize(("config", "accumulate"), [*CASES, *LONG])
def test_memory_by_role_is_as_predicted(shared_node: Node, config: str, accumulate: int) -> None:
    """Model states within 2 %; every role explained, but for gradients that straddle partitions."""
    rank = trained(shared_node, config, accumulate).rank
    rows = {row.role: row for row in rank.memory.expected}
    assert {"optimizer_state", "unsharded_param"} <= set(rows)
    pairs = [
        (row.measured_bytes, row.predicted_bytes)
        for row in rows.values()
        if row.measured_bytes is not None and row.predicted_bytes is not None
    ]
    assert sum(m for m, _ in pairs) == pytest.approx(sum(p for _, p in pairs), rel=0.02)
    temporary = rows.pop("optimizer_temp", None)  # the census is taken before the step
    assert temporary is None or temporary.measured_bytes is None
    for role, row in rows.items():
        straddling = role.endswith("sharded_grad") and config.startswith(("zero1", "zero2"))
        assert row.measured_bytes == pytest.approx(
            row.predicted_bytes, rel=0.15 if straddling else 0.02
        ), row


def overlapping(sizes: list[int], partition: int) -> int:
    """Elements of the parameters of which rank 0's partition holds at least a part."""
    total = 0
    for size in sizes:
        if total >= partition:
            break
        total += size
    return total


def test_settings_show_what_took_effect_beside_what_was_written(shared_node: Node) -> None:
    """overlap_comm was left out and is on at stage 3; the bucket was written."""
    run = trained(shared_node, "zero3", 1)
    rows = {s.name: (s.effective, s.written) for s in run.rank.config.settings}
    assert rows["zero_optimization.stage"] == ("3", "3")
    assert rows["zero_optimization.overlap_comm"] == ("true", "")
    assert rows["zero_optimization.reduce_bucket_size"] == ("1000000", "1000000")
    assert rows["train_batch_size"] == ("4", "")
    assert rows["bf16.enabled"] == ("true", "true")
    series = run.metrics["zeromon_setting_info"]
    assert ("0", "false", "1", "fp16.enabled", "") in {  # labels in the order of their names
        (rank, *values) for rank, *values in series
    }
    assert run.rank.strategy == "deepspeed-zero3"


def test_units_are_sub_modules_and_buckets(shared_node: Node) -> None:
    """ZeRO-3 gathers sub-modules and reduces buckets; the parameters it keeps are a unit, too."""
    run = trained(shared_node, "zero3", 1)
    units = {unit.fqn: unit for unit in run.rank.communication.units}
    assert {"token", "layers.0.qkv", "head", "bucket 0", "(persistent parameters)"} <= set(units)
    assert units["layers.0.qkv"].unshards >= 1
    # from the third step on the order is known, and what comes is asked for ahead
    assert {g.outcome for g in run.rank.communication.gathers} == {"ahead", "late"}
    names = {unit.fqn for unit in trained(shared_node, "zero2", 2).rank.communication.units}
    assert "bucket 0" in names


def test_hpz_gathers_in_a_group_of_its_own(shared_node: Node) -> None:
    """Backward gathers within the secondary partition, whose bytes are a role."""
    run = trained(shared_node, "zero3-hpz", 1)
    groups = {c.group for c in run.rank.communication.collectives if c.op == "all_gather"}
    assert "zero_hpz" in groups
    roles = {row.role: row.host_bytes for row in run.rank.memory.roles}
    # dropped after each step and made anew in the forward pass
    assert 0 < roles["secondary_param"] <= sum(run.facts["params"]) * 1.01


def test_offload_moves_gradients_out_and_parameters_in(shared_node: Node) -> None:
    """Stage 3 with everything on the host: fp32 gradients out; a shard in for each gather."""
    run = trained(shared_node, "zero3-offload", 2)
    whole = sum(padded(size, RANKS) for size in run.facts["params"])
    moved = {t.path: t for t in run.rank.memory.transfers}
    assert moved["device_to_host"].nbytes == whole // RANKS * 4 * STEPS
    assert moved["device_to_host"].seconds > 0
    two = trained(shared_node, "zero2-offload", 2)
    moved = {t.path: t for t in two.rank.memory.transfers}
    whole = padded(sum(two.facts["params"]), 2 * RANKS)
    assert moved["host_to_device"].nbytes >= whole // RANKS * 2 * STEPS


def test_an_overflow_storm_is_counted_and_named(shared_node: Node) -> None:
    """fp16 from a scale of 2^16: DeepSpeed's own counters, and the scale where it has come to."""
    run = trained(shared_node, "zero2-fp16", 1)
    (engine,) = run.rank.config.engines
    assert engine.loss_scale is not None and engine.loss_scale <= 2**16
    assert engine.hysteresis >= 1
    assert math.log2(engine.loss_scale).is_integer()


def test_losses_are_bit_identical_without_the_agent(shared_node: Node) -> None:
    """All cases once more, unwatched, in one process."""
    # zero.Init leaves a linear function of its own behind: stage 3 last
    once = sorted(CASES, key=lambda case: (case[0].startswith("zero3"), case[0] == "zero3-hpz"))
    cases = ",".join(f"{config}:{accumulate}" for config, accumulate in once)
    out = shared_node.folder / "bare"
    command = train_command(
        RANKS, "--cases", cases, "--steps", str(STEPS), "--out", str(out),
        program="train_deepspeed.py",
    )  # fmt: skip
    result = shared_node.run(command, watched=False, DS_ACCELERATOR="cpu")
    assert result.code == 0, result.output
    facts = json.loads((out / "0.json").read_text())
    assert not facts["watched"]
    for config, accumulate in CASES:
        losses = facts["cases"][f"{config}:{accumulate}"]["losses"]
        watched = trained(shared_node, config, accumulate)
        assert losses == watched.facts["cases"][f"{config}:{accumulate}"]["losses"], config
        assert len(losses) == STEPS


def test_zero_plus_plus_is_counted_as_quantized(shared_node: Node) -> None:
    """qwZ gathers and qgZ all-to-alls in 8 bits, in groups of their own.

    The kernels are a double (there are none for CPUs); what is sent is DeepSpeed's own doing.
    """
    out = shared_node.folder / "plusplus"
    command = train_command(
        RANKS, "--cases", "zero3-plusplus:1", "--steps", "4", "--out", str(out),
        program="train_deepspeed.py",
    )  # fmt: skip
    # one rank a node: the second stage of qgZ then goes between nodes
    result = shared_node.run(command, DS_ACCELERATOR="cpu", QUANTIZER="1", LOCAL_SIZE="1")
    assert result.code == 0, result.output
    facts = json.loads((out / "0.json").read_text())
    metrics = shared_node.metrics(result.run)
    calls, nbytes = flight_counts(facts)
    assert by_gloo_op(metrics["zeromon_collectives_total"], "0") == calls
    assert by_gloo_op(metrics["zeromon_collective_bytes_total"], "0") == nbytes
    rank = result.snapshot.ranks[0]
    in_int8: Counter[str] = Counter()
    for entry in facts["flight"]:
        op = entry["profiling_name"].removeprefix("gloo:").lstrip("_")
        side = "output" if op == "all_gather" else "input"
        if entry[f"{side}_dtypes"][:1] == ["Char"]:
            in_int8[op] += sum(math.prod(size) for size in entry[f"{side}_sizes"])
    assert in_int8["all_gather"] > 0 and in_int8["all_to_all"] > 0
    seen: Counter[str] = Counter()
    for row in rank.communication.collectives:
        seen[row.op] += row.quantized_bytes
    assert {op: n for op, n in seen.items() if n} == dict(in_int8)
    groups = {row.group for row in rank.communication.collectives if row.op == "all_to_all"}
    assert groups == {"all_to_all:local_0", "all_to_all:global_0"}
    assert rank.strategy == "deepspeed-zero3++"
    sent = rank.strategy_fields
    assert sent is not None and (sent.stage, sent.plus_plus) == (3, True)
    assert rank.config.engines[0].strategy_fields == sent


# ---- launchers ----------------------------------------------------------------------------------

TINY = "--steps 6 --width 64 --layers 2 --batch 2 --length 32".split()
EXAMPLE = str(ROOT / "examples" / "train_gpt_deepspeed.py")
PLAIN = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
"""Spares each rank the import of the compiler, for an optimizer of DeepSpeed that is not used here."""


def losses(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", output)]


def test_the_deepspeed_launcher_starts_watched_ranks(node: Node) -> None:
    """`deepspeed train.py`, nothing changed; the launcher itself is not a rank."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    config = str(ROOT / "examples" / "deepspeed" / "zero1.json")
    words = ["--master_port", str(free_port()), EXAMPLE, "--no-compile", "--config", config, *TINY]
    result = node.run([*launcher, *words], **PLAIN)
    assert result.code == 0, result.output
    assert [(r.rank, r.world_size, r.steps.watched_steps) for r in result.snapshot.ranks] == [
        (0, 2, 6),
        (1, 2, 6),
    ]
    assert result.snapshot.ranks[0].strategy == "deepspeed-zero1"


@pytest.mark.long
def test_accelerate_launch_starts_watched_ranks(node: Node) -> None:
    """ZeRO-3 through accelerate's plugin, what it left at auto resolved; the loss goes down."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    config = str(ROOT / "examples" / "deepspeed" / "accelerate.yaml")
    script = str(ROOT / "examples" / "train_gpt_accelerate.py")
    words = [config, "--main_process_port", str(free_port()), script, *TINY, "--log-every", "1"]
    result = node.run([*launch, *words], **PLAIN)
    assert result.code == 0, result.output
    rank = result.snapshot.ranks[0]
    assert (rank.steps.watched_steps, rank.strategy, rank.agent.errors) == (6, "deepspeed-zero3", 0)
    rows = {s.name: s.effective for s in rank.config.settings}
    assert rows["train_micro_batch_size_per_gpu"] == "2"
    first, *_, last = losses(result.output)
    assert last < first


# ---- odd turns ----------------------------------------------------------------------------------

SOFT = (
    "rebuilt", "evaluated", "backward_raises", "direct_backward", "tied", "two_engines",
    "compiled", "mixture", "frozen", "diverged",
)  # fmt: skip


def odd(node: Node, *cases: str, **environment: str) -> tuple[dict[str, Any], Result]:
    """Runs those cases of the program; DeepSpeed's own figures, and what the collector saw."""
    command = [*LAUNCH, "2", str(PROGRAMS / "deepspeed_odd.py"), *cases]
    result = node.run(command, DS_ACCELERATOR="cpu", **environment)
    assert result.code == 0, result.output
    line = next(x for x in result.output.splitlines() if x.startswith("{"))
    return json.loads(line), result


def test_odd_turns_are_survived_and_still_counted(shared_node: Node) -> None:
    """Engines rebuilt, in pairs, compiled, with experts, with frozen or tied weights; evaluation
    in between; a backward that raises; a backward of the loss itself; a loss that is no number."""
    facts, result = odd(shared_node, *SOFT)
    rank = result.snapshot.ranks[0]
    assert rank.agent.errors == 0, result.output
    steps = [n for case in SOFT for n in facts[case]["steps"]]
    skipped = [n for case in SOFT for n in facts[case]["skipped"]]
    assert [e.steps for e in rank.config.engines] == steps
    assert [e.skipped for e in rank.config.engines] == skipped
    assert facts["backward_raises"]["raised"]
    assert all(e.collectives > 0 for e in rank.config.engines)
    assert sum(e.collectives for e in rank.config.engines) <= sum(
        c.count for c in rank.communication.collectives
    )
    assert {"expert_parallel:ep_size_2"} <= {c.group for c in rank.communication.collectives}
    assert "engine3:second" in {u.fqn for u in rank.communication.units}
    (diverged,) = (f for f in result.snapshot.findings if f.rule == "not_finite")
    assert diverged.rank == 1 and diverged.text.startswith("the loss is infinite or NaN")
    # that of "rebuilt" was destroyed; what DeepSpeed keeps alive of the others is measured and predicted
    assert [e.engine for e in rank.config.engines if e.dropped] == [1]
    (states,) = (row for row in rank.memory.expected if row.role == "optimizer_state")
    assert states.measured_bytes == pytest.approx(states.predicted_bytes, rel=0.1)


def test_a_frozen_engine_that_runs_by_its_module_alone_is_known(shared_node: Node) -> None:
    """Its gathers have units, and the rank's strategy is that of the engine that trains."""
    facts, result = odd(shared_node, "teacher")
    rank = result.snapshot.ranks[0]
    assert rank.agent.errors == 0, result.output
    assert facts["teacher"]["steps"] == [4, 0]
    assert [model["numel"] for model in rank.config.models] == [rank.config.models[0]["numel"]] * 2
    gathered = {row.unit for row in rank.communication.traffic if row.op == "all_gather"}
    assert {"first", "engine2:first"} <= gathered
    assert rank.sharding_strategy.stage == 3 and rank.config.models[0]["optimizer"] != ""


def test_an_overflow_storm_is_named(shared_node: Node) -> None:
    """20 steps in a row are skipped: DeepSpeed's count, its scale, and a finding."""
    facts, result = odd(shared_node, "storm")
    rank = result.snapshot.ranks[0]
    (engine,) = rank.config.engines
    assert [engine.skipped] == facts["storm"]["skipped"] and engine.skipped >= 20
    assert engine.loss_scale == facts["storm"]["scale"]
    assert engine.nonfinite >= 20
    assert [f.severity for f in result.snapshot.findings if f.rule == "overflow_storm"] == ["critical"]
    metrics = shared_node.metrics(result.run)
    assert metrics["zeromon_steps_skipped_total"]["0",] == engine.skipped
    assert metrics["zeromon_loss_scale"]["0", "1"] == engine.loss_scale


def test_a_starved_prefetch_is_named(shared_node: Node) -> None:
    """Without a prefetch bucket every gather is late, and waited for. No compiler is needed."""
    _, result = odd(shared_node, "starved", CXX="/bin/false", CC="/bin/false")
    rank = result.snapshot.ranks[0]
    assert rank.agent.errors == 0
    assert [g.outcome for g in rank.communication.gathers] == ["late"]
    found = [f for f in result.snapshot.findings if f.rule == "starved_prefetch"]
    assert found and "stage3_prefetch_bucket_size is 0" in found[0].text


def test_a_run_that_never_steps_says_so(shared_node: Node) -> None:
    """80 backward passes, no step: counted, and told."""
    _, result = odd(shared_node, "never_steps")
    assert result.snapshot.ranks[0].steps.watched_steps == 0
    assert result.snapshot.ranks[0].steps.micro_steps == 80
    assert "no_step" in {f.rule for f in result.snapshot.findings}


def test_stop_restores_deepspeed_and_training_goes_on(shared_node: Node) -> None:
    """In the middle of ZeRO-3, under its own module hooks."""
    facts, _ = odd(shared_node, "stopped")
    assert facts["stopped"]["during"] > 25
    assert facts["stopped"]["after"] == []
    assert facts["stopped"]["steps"] == [5]


def test_gloo_says_all_reduce(shared_node: Node) -> None:
    """The reason for comparing under gloo's names; on /metrics a reduce-scatter is one."""
    run = trained(shared_node, "zero3", 1)
    assert AS_GLOO_SAYS["reduce_scatter"] == "all_reduce"
    assert by_op(run.metrics["zeromon_collectives_total"])["reduce_scatter"] > 0


@pytest.mark.parametrize(("config", "accumulate"), [*(c for c in CASES if c[1] == 1), *LONG])
def test_what_an_engine_will_keep_is_told_before_it_is_made(
    shared_node: Node, tmp_path: Path, config: str, accumulate: int
) -> None:
    """The same facts as of the engine that it became; afterwards they are withdrawn."""
    run = trained(shared_node, config, accumulate)
    kept = next(shared_node.store.runs.glob(f"{run.result.run}/rank0.*.gz"))
    ring = tmp_path / "rank0.ring"
    ring.write_bytes(gzip.decompress(kept.read_bytes()))
    told = [name.payload for name in RingReader(ring).names() if name.kind == NameKind.META]
    planned = [facts["planned"] for facts in told if "planned" in facts]
    became = next(facts["engine1"]["model"] for facts in told if "engine1" in facts)
    assert planned[-1] is None
    differ = {key for key, value in planned[0].items() if value != became[key]}
    # the optimizer by the configuration's name for it; what stays gathered is decided later
    assert differ <= {"optimizer", "persistent_numel"}
    on_host = [host_model_bytes([facts], on_cpu=True) for facts in (planned[0], became)]
    assert on_host[0] == pytest.approx(on_host[1], rel=0.01)
    assert run.rank.config.planned == {}


@pytest.mark.parametrize(("config", "accumulate"), [*CASES, *LONG])
def test_plan_says_what_an_engine_sends(shared_node: Node, config: str, accumulate: int) -> None:
    """Gradients and parameters by ring collectives; norms and flags are below 1 %.

    Stage 3 does not yet know in the first of six steps what it may keep for backward.
    """
    run = trained(shared_node, config, accumulate)
    sent = sum(
        row.nbytes * BUS_FACTOR[Op[row.op.upper()]](row.group_size)
        for row in run.rank.communication.traffic
        if row.phase != "other"
    )
    setup = of_run(run.result.snapshot)
    tolerance = 0.09 if config.startswith("zero3") else 0.01
    assert predict_row(setup, setup.plan).communication_bytes == pytest.approx(sent, rel=tolerance)
