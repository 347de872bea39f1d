"""Measured against predicted: what a rank's model should take, role by role, and what it takes. Pure.

The agent sends sizes and settings of each model (:mod:`zeromon.ring.model_metadata`); the arithmetic of
:mod:`zeromon.memory.predict` turns them into bytes and causes; the census of the agent measures. Bytes
beyond the arithmetic of the ZeRO paper are shown with their cause; bytes without a cause as unexplained.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, cast

from zeromon.base.errors import PlanError
from zeromon.memory.predict import STEP_TEMP, During, MemoryBreakdown, Term, memory_of
from zeromon.memory.spec import ROOT, Optimizer, Precision, ShardPlan, Sizes, ZeroStage, optim_named
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.snapshot import Pool, RankSnapshot
from zeromon.snapshot.host import Device
from zeromon.snapshot.memory import Cause, ExpectedRow, RoleRow, Unattributed

_MAX_COUNT = 1 << 60
_NEARLY_EACH = 0.9
"""From this share of the micro-steps on, each of them reduces."""

_PADDED = 1.1
"""Elements of the gathered units are at most so many times those of the parameters."""

PEAK_ROLES = frozenset(("unsharded_param",))
"""Roles that are measured at their peak within the step, from the units' marks."""

UNSEEN_ROLES = frozenset(("reduce_scatter", STEP_TEMP))
"""Roles that a framework may keep where no census reaches: DDP's buckets are in C++, and the census is
taken before the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Described:
    """One model as its rank describes it, in the terms of the prediction."""

    sizes: Sizes
    plan: ShardPlan
    optimizer_known: bool
    optimizer_numel: int | None
    """Elements whose state this rank keeps, where the optimizer splits them by whole parameters."""


def read_model_facts(facts: ModelMetadata) -> Described | None:
    """Reads the description in *facts*; None where a needed key is missing or has no valid value."""
    try:
        stage = ZeroStage(_as_count(facts["stage"]))
        matched = optim_named(
            str(facts.get("optimizer", "")),
            float(facts.get("momentum", 0.0)),
            str(facts.get("optimizer_step", "")),
        )
        numel = facts.get("optimizer_numel")
        units = tuple(_as_count(n) for n in facts.get("units", ()))
        sizes = Sizes(**_matching_fields(Sizes, facts), unit_numels=units)
        precision = Precision(
            param_bytes=_as_itemsize(facts["param_bytes"]),
            compute_bytes=_as_count(facts["compute_bytes"]),
            grad_bytes=_as_itemsize(facts["grad_bytes"]),
            has_master=bool(facts.get("has_master", False)),
            reduce_bytes=_as_itemsize(facts.get("reduce_bytes", facts["grad_bytes"])),
            state_bytes=_as_itemsize(facts["param_bytes"]),
        )
        chosen = {"framework": str(facts["framework"]), **_matching_fields(ShardPlan, facts)}
        # To a plan 0 means one process without DDP, which a rank that described a model is not
        if not chosen.get("bucket_cap_bytes", 1):
            del chosen["bucket_cap_bytes"]
        optimizer = matched or Optimizer(name="unknown", full_states=0)
        plan = ShardPlan(**chosen, stage=stage, precision=precision, optimizer=optimizer)
        return Described(sizes, plan, matched is not None, None if numel is None else _as_count(numel))
    except (KeyError, TypeError, ValueError, ArithmeticError, PlanError):
        return None


def _matching_fields(record: type[Sizes | ShardPlan], facts: ModelMetadata) -> dict[str, Any]:
    """The fields of *record* that *facts* have under the same name, read as their type says."""
    readers: dict[Any, Callable[[Any], Any]] = {int: _as_count, bool: bool, str: str}
    stated = cast("dict[str, Any]", facts)
    return {
        field.name: readers[field.type](stated[field.name])
        for field in fields(record)
        if field.type in readers and field.name in stated
    }


def with_micro_steps(rank: RankSnapshot, plan: ShardPlan) -> ShardPlan:
    """Returns *plan* with the micro-steps that *rank* takes, and whether each of them reduces.

    The wrappers of torch do not know either; DeepSpeed's settings tell both.
    """
    micro_counts = [step.micro_steps for step in rank.steps.recent if step.micro_steps]
    micro = round(median(micro_counts)) if micro_counts else 1
    if micro < 2 or plan.accumulation > 1:
        return plan
    reduces = [
        row.calls for row in rank.communication.traffic
        if row.unit and row.phase == "backward" and row.op in ("all_reduce", "reduce_scatter")
    ]  # fmt: skip
    reduces_each = median(reduces) >= _NEARLY_EACH * micro if reduces else None
    return replace(plan, accumulation=micro, reduces_each=reduces_each)


def sizes_in_layers(sizes: Sizes, ran: ShardPlan, blocks: list[int], rank: RankSnapshot) -> Sizes:
    """Returns *sizes* with their units, one for each layer where the run gathers all at once."""
    if ran.stage == ZeroStage.PARAMETERS:
        largest = next(iter(sizes.unit_numels), 0)
        return replace(
            sizes, layer_numel=largest, root_numel=sizes.kept_numel,
            named_units=_named_units(rank, ran, sizes.numel),
        )  # fmt: skip
    layers, largest = blocks if len(blocks) == 2 else (0, 0)
    root_numel = max(0, sizes.numel - layers * largest) if layers else 0
    return replace(
        sizes,
        unit_numels=(largest,) * min(layers, 4),
        kept_numel=root_numel,
        layer_numel=largest,
        root_numel=root_numel,
    )


def _named_units(rank: RankSnapshot, plan: ShardPlan, numel: int) -> tuple[tuple[str, int], ...]:
    """Returns (name, elements) of each FSDP unit that *rank* gathers, the root first.

    () where the gathered bytes are not those of *numel* parameters: a part was not gathered yet.
    """
    if not plan.framework.startswith("fsdp"):
        return ()
    itemsize = plan.precision.compute_bytes
    sizes = {
        row.unit: round(row.nbytes / row.calls / itemsize)
        for row in rank.communication.traffic
        if row.op == "all_gather" and row.unit and row.calls
    }
    if not numel <= sum(sizes.values()) <= numel * _PADDED:
        return ()
    return tuple(sorted(sizes.items(), key=lambda unit: (unit[0] != ROOT, _natural_key(unit[0]))))


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.10`` after ``layers.9``."""
    return [(int(level), "") if level.isdecimal() else (-1, level) for level in name.split(".")]


def _as_count(value: Any) -> int:
    """*value* as a count; raises ValueError for anything else."""
    # Text is refused below because int() takes it, and a damaged ring may hold any type
    number = int(value)
    if isinstance(value, str) or not 0 <= number < _MAX_COUNT:
        raise ValueError(f"{value!r} is no count")
    return number


def _as_itemsize(value: Any) -> float:
    """*value* as bytes an element; raises ValueError for anything else."""
    number = float(value)
    if isinstance(value, str) or not 0 < number <= 64:
        raise ValueError(f"{value!r} bytes an element cannot be")
    return int(number) if number == int(number) else number


def _describe_all_models(models: Iterable[ModelMetadata]) -> list[Described]:
    return [model for metadata in models if (model := read_model_facts(metadata)) is not None]


def terms_of_model(described: Described) -> list[Term]:
    """The memory terms of one model, peaks of gathered parameters included."""
    terms = _all_terms(described)
    return [term for term in terms if term.during & During.STEP or term.role in PEAK_ROLES]


def _all_terms(described: Described) -> list[Term]:
    terms = list(memory_of(described.sizes, described.plan).terms)
    if described.optimizer_numel is not None:  # split by whole parameters: this rank's own share
        state_size = described.plan.optimizer.full_states * described.plan.precision.state_bytes
        terms = [t for t in terms if t.role != "optimizer_state"]
        nbytes = round(described.optimizer_numel * state_size)
        terms.append(Term("optimizer_state", nbytes))
    if not described.optimizer_known:
        terms = [t for t in terms if t.role != "optimizer_state"]
    return terms


def host_model_bytes(models: Iterable[ModelMetadata], *, on_cpu: bool) -> int:
    """Bytes of host memory of *models* at the peak of a step, without activations; 0 without a model.

    *on_cpu*: their device is the host.
    """
    described = _describe_all_models(models)
    memory = MemoryBreakdown(tuple(term for model in described for term in _all_terms(model)))
    return memory.peak_bytes(("host", "device") if on_cpu else ("host",))


def expected_rows(
    models: Iterable[ModelMetadata], roles: Iterable[RoleRow], unsharded_peak_bytes: int, steps: int
) -> tuple[ExpectedRow, ...]:
    """One row a role: measured bytes, the arithmetic of ZeRO, and the causes of what exceeds it.

    Empty while no model is described or no census was taken. *steps*: optimizer steps so far; before
    the second step there is no optimizer state, and none is expected.
    """
    described = _describe_all_models(models)
    measured = {row.role: row.device_bytes + row.host_bytes + row.disk_bytes for row in roles}
    if not described or not measured:
        return ()
    terms = [term for model in described for term in terms_of_model(model)]
    if steps < 2:
        terms = [t for t in terms if t.role != "optimizer_state"]
    if unsharded_peak_bytes > 0:  # on top of what stays gathered when backward is over
        stays = measured.get("unsharded_param", 0)
        # units that are gathered once and stay so are marked, too; the sum is never more than the whole
        total = sum(m.sizes.numel * m.plan.precision.compute_bytes for m in described)
        measured["unsharded_param"] = min(stays + unsharded_peak_bytes, total)
    names = dict.fromkeys([*(t.role for t in terms), *(r for r, n in measured.items() if n)])
    unknown = not all(model.optimizer_known for model in described)
    return tuple(
        _role_row(name, measured.get(name), [t for t in terms if t.role == name], unknown=unknown)
        for name in names
    )


def _role_row(role: str, measured: int | None, terms: list[Term], *, unknown: bool) -> ExpectedRow:
    if role in UNSEEN_ROLES and not measured:
        measured = None
    causes: dict[str, int] = {}
    for term in terms:
        if term.cause:
            causes[term.cause] = causes.get(term.cause, 0) + term.nbytes
    return ExpectedRow(
        role=role,
        measured_bytes=measured,
        plain_bytes=sum(t.nbytes for t in terms if not t.cause),
        predicted_bytes=None if role == "optimizer_state" and unknown else sum(t.nbytes for t in terms),
        causes=tuple(Cause(text=cause, nbytes=nbytes) for cause, nbytes in causes.items()),
    )


def role_bytes(rank: RankSnapshot, role: str) -> tuple[int, int, int] | None:
    """Bytes of *role* on device, host and disk, gathered parameters at their peak; None: no census."""
    row = next((r for r in rank.memory.roles if r.role == role), None)
    if row is None:
        return None
    device, host = row.device_bytes, row.host_bytes
    expected = next((e for e in rank.memory.expected if e.role == role), None)
    if expected is not None and expected.measured_bytes is not None:
        peak = expected.measured_bytes - row.device_bytes - row.host_bytes - row.disk_bytes
        # On a CPU the gathered parameters are in host memory
        device, host = (device, host + peak) if rank.memory.device is None else (device + peak, host)
    return device, host, row.disk_bytes


def micro_batch_of_rank(rank: RankSnapshot) -> int | None:
    """Samples of a forward, from the engine or the DataLoader of *rank*; None where neither has them."""
    of_engine = rank.config.models[0].get("micro_batch") if rank.config.models else None
    for samples in (of_engine, rank.config.loader.get("batch_size")):
        if isinstance(samples, int) and 0 < samples < _MAX_COUNT:
            return samples
    return None


def unattributed_memory(rank: RankSnapshot) -> tuple[Unattributed, ...]:
    """Memory that no role accounts for, by name; what needs an unknown figure is left out.

    - ``kept`` (device or host): what each step left behind, since the growth of :attr:`Risk.since_step`.
    - ``activation_temp`` (device): most bytes allocated in the last steps, less the roles at their peak.
    - ``reserved_unallocated`` (device): the caching allocator's own slack.
    - ``non_torch`` (device): what the process holds beyond the reserved bytes: context, NCCL. Where
      several processes use the device and the driver reports one sum, it is unknown.
    - ``other`` (host): resident set, less the roles on the host: code, workers' buffers, activations.
    """
    rows: list[Unattributed] = []
    gathered = max(0, rank.memory.unsharded_peak_bytes)
    memory = rank.memory.device
    if memory is not None:
        roles = sum(row.device_bytes for row in rank.memory.roles)
        peak = max([memory.allocated_bytes, *(s.allocated_bytes for s in rank.steps.recent[-_RECENT:])])
        if roles:
            nbytes = max(0, peak - roles - gathered)
            rows += _split_kept(rank, Pool.DEVICE, "activation_temp", nbytes)
        # the driver has freed what a dead process held, and torch's last figures stay
        used = _held_device_bytes(rank.machine.device) if rank.status.alive else None
        if memory.reserved_bytes >= 0:
            slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
            rows.append(Unattributed(kind="reserved_unallocated", place="device", nbytes=slack))
        if used is not None and memory.reserved_bytes >= 0:
            non_torch = max(0, used - memory.reserved_bytes)
            rows.append(Unattributed(kind="non_torch", place="device", nbytes=non_torch))
    host_roles = sum(row.host_bytes for row in rank.memory.roles)
    if host_roles and rank.memory.rss_bytes >= 0:
        rows += _split_kept(rank, Pool.HOST, "other", max(0, rank.memory.rss_bytes - host_roles))
    return tuple(rows)


def _split_kept(rank: RankSnapshot, pool: Pool, kind: str, nbytes: int) -> Iterator[Unattributed]:
    """*nbytes* of *kind* in *pool*, and apart from them what has grown there step by step."""
    grown = min(nbytes, kept_bytes(rank, pool))
    if grown:
        yield Unattributed(kind="kept", place=pool, nbytes=grown)
    yield Unattributed(kind=kind, place=pool, nbytes=nbytes - grown)


def kept_bytes(rank: RankSnapshot, pool: Pool) -> int:
    """Returns the bytes of *pool* that *rank* gained since the growth there began; 0 without growth."""
    since_step = next((r.since_step for r in rank.memory.risks if r.pool == pool and r.since_step), 0)
    steps = [step for step in rank.steps.recent if step.step >= since_step] if since_step else []
    used = [s.rss_bytes if pool == Pool.HOST else s.allocated_bytes for s in steps]
    return max(0, used[-1] - used[0]) if used and used[0] >= 0 else 0


def _held_device_bytes(device: Device | None) -> int | None:
    """Bytes of the device that the rank's process holds; None where other processes may hold them."""
    if device is None or device.own_bytes is not None:
        return None if device is None else device.own_bytes
    return None if (device.processes or 0) > 1 else device.used_bytes


_RECENT = 20
