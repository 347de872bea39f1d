"""In one process, on a gloo group of one: what the hooks do. Prints one JSON object.

Run by tests/agents/hooks/test_hooks.py as `hooks.py CASE`, so that each case has a fresh interpreter.
"""

import gc
import json
import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zeromon_agents
from zeromon.ring.buffer import RingReader


def begin() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def agent():
    from zeromon_agents.runtime.bootstrap import BOOTSTRAP

    return BOOTSTRAP.agent


def watched_names() -> dict[str, dict]:
    import torch.distributed.fsdp
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as group
    import torch.distributed.fsdp._fully_shard._fsdp_state as state
    import torch.distributed.fsdp._runtime_utils as runtime
    import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp1
    import torch.nn.parallel.distributed as ddp
    import torch.optim.optimizer as optimizer
    import torch.utils.data.dataloader as data
    from torch._C._distributed_c10d import ProcessGroup, Work

    owners = (
        ProcessGroup, Work, group.FSDPParamGroup, state.FSDPState, runtime,
        fsdp1.FullyShardedDataParallel, ddp.DistributedDataParallel, torch.autograd,
        data._BaseDataLoaderIter, data._utils.fetch._MapDatasetFetcher, dist, dist.distributed_c10d,
    )  # fmt: skip
    operators = torch.ops._c10d_functional
    found = {repr(o): dict(vars(o)) for o in owners}
    for operator in (operators.all_reduce, operators.wait_tensor):
        for owner in (operator, operator.default):
            found[repr(owner)] = {"_op": vars(owner)["_op"]}
    found["optimizer hooks"] = {
        "pre": dict(optimizer._global_optimizer_pre_hooks),
        "post": dict(optimizer._global_optimizer_post_hooks),
    }
    found["sys"] = {"excepthook": sys.excepthook, "meta_path": list(sys.meta_path)}
    return found


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    return [
        f"{owner}.{name}"
        for owner, names in before.items()
        for name in {*names, *after[owner]}
        if names.get(name) is not after[owner].get(name) and names.get(name) != after[owner].get(name)
    ]


def restored() -> dict:
    begin()  # torch itself changes names here
    before = watched_names()
    zeromon_agents.start()
    during = differences(before, watched_names())
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    kept = zeromon_agents.stop()
    return {"during": len(during), "after": differences(before, watched_names()), "kept": kept}


def patched_over() -> dict:
    begin()
    zeromon_agents.start()
    ours = dist.ProcessGroup.allreduce
    calls = []

    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    dist.ProcessGroup.allreduce = theirs
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    kept = zeromon_agents.stop()
    dist.all_reduce(tensor)
    return {"kept": kept, "calls": len(calls), "still_theirs": dist.ProcessGroup.allreduce is theirs}


def hook_fails() -> dict:
    begin()
    zeromon_agents.start()

    def broken(*_, **__):
        raise ValueError("injected")

    collectives = agent().collectives
    collectives.groups.clear()
    collectives.group_of = broken
    tensor = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor)
    agent()._one_heartbeat(1)
    agent()._one_heartbeat(2)
    return {"errors": agent().guard.errors, "value": tensor.tolist()}


def unit_hook_fails() -> dict:
    from torch.distributed.fsdp import fully_shard

    from zeromon_agents.hooks.backend import Units
    from zeromon_agents.hooks.fsdp2 import Fsdp2

    def broken(*_):
        raise ValueError("injected")

    Fsdp2.describe_unit = broken
    Units._mark = broken
    begin()
    zeromon_agents.start()
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {"errors": agent().guard.errors > 5, "steps": agent().context.step}


def optimizer_raises() -> dict:
    """A step that raises leaves torch's post hook uncalled; the next steps count all the same."""
    begin()
    zeromon_agents.start()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def failing():
        raise ValueError("injected")

    for number in range(6):
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step(failing if number == 2 else None)
        except ValueError:
            pass
    return {"steps": agent().context.step, "errors": agent().guard.errors}


def sample_fails() -> dict:
    """A sample that cannot be taken costs no step, and no other sample."""
    begin()
    zeromon_agents.start()
    others: list[int] = []
    agent()._sampling = (lambda: 1 / 0, lambda: others.append(agent().context.step))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    errors = agent().guard.errors
    return {"steps": agent().context.step, "errors": errors, "others": others}


def mesh() -> dict:
    """start() first, then a mesh: device_mesh took init_process_group over long before."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"], RANK="0", WORLD_SIZE="1")
    zeromon_agents.start()
    init_device_mesh("cpu", (1,))
    return {"started": agent() is not None}


def early_import() -> dict:
    """init_process_group was taken over before start(): the first optimizer step starts it."""
    from torch.distributed import init_process_group

    zeromon_agents.start()
    init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    os.environ.update(RANK="0", WORLD_SIZE="2")
    weight = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([weight], 0.1).step()
    return {"started": agent() is not None}


def subclass() -> dict:
    """A process group written in Python calls its base class through pybind."""
    begin()
    zeromon_agents.start()
    calls = []

    class Theirs(dist.ProcessGroup):
        def allreduce(self, tensors, opts=None):
            calls.append("theirs")
            try:
                return super().allreduce(tensors, opts or dist.AllreduceOptions())
            except RuntimeError:
                return None  # the base class has no backend

    group = Theirs(0, 1)
    group.allreduce([torch.ones(1)])
    return {"calls": calls, "errors": agent().guard.errors}


def hook_fails_often() -> dict:
    begin()
    zeromon_agents.start()
    collectives = agent().collectives
    collectives.groups.clear()
    collectives.group_of = None
    tensor = torch.ones(1)
    for _ in range(1100):
        dist.all_reduce(tensor)
    return {"errors": agent().guard.errors, "mode": agent().context.mode}


def forked() -> dict:
    begin()
    zeromon_agents.start()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    ring = agent().ring
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(100):
            agent().context.emit(11)
        os.write(write, b"%d" % agent().context.mode)
        os._exit(0)
    os.waitpid(child, 0)
    dist.all_reduce(tensor)
    from zeromon.ring.buffer import RingReader
    from zeromon.ring.codes import Kind
    from zeromon.ring.events import kind_of_record

    records = RingReader(ring.path).read()
    numbers = [r[0] for r in records]
    return {
        "child_mode": int(os.read(read, 9)),
        "in_order": numbers == list(range(1, len(numbers) + 1)),
        "issued": sum(kind_of_record(r) == Kind.ISSUED for r in records),
    }


def stands_still() -> dict:
    """What the agent writes of its own accord while the training thread does nothing."""
    begin()
    zeromon_agents.start()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    reader = RingReader(agent().ring.path)
    reader.read()
    for beat in range(20):
        agent()._one_heartbeat(beat)
    return {"records": reader.read()}


def lifetimes() -> dict:
    """What stays alive after collectives, with the agent and without."""
    begin()
    if "watch" in sys.argv:
        zeromon_agents.start()
    alive = {}
    for wait in (True, False):
        tensor = torch.ones(1 << 18)
        work = dist.all_reduce(tensor, async_op=True)
        refs = [weakref.ref(tensor), weakref.ref(work), weakref.ref(tensor.untyped_storage())]
        if wait:
            work.wait()
        else:
            while not work.is_completed():
                pass
        del tensor, work
        for _ in range(100):  # gloo's own thread lets go a moment after completion
            gc.collect()
            if not any(ref() is not None for ref in refs):
                break
            time.sleep(0.02)
        alive[f"waited={wait}"] = [ref() is not None for ref in refs]
    return alive


def peak() -> dict:
    """By how many tensors the peak of resident memory grows over many collectives of big tensors."""
    begin()
    if "watch" in sys.argv:
        zeromon_agents.start()
    tensor_kib, peaks = 16 * 1024, []
    dist.all_reduce(torch.ones(1))
    limit = time.monotonic() + 60
    for count in (20, 80):
        for _ in range(count):
            tensor = torch.ones(tensor_kib * 256)
            storage = weakref.ref(tensor.untyped_storage())
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            del tensor, work
            # gloo's own thread frees the tensor a moment later
            while storage() is not None and time.monotonic() < limit:
                time.sleep(0.001)
        status = Path("/proc/self/status").read_text()
        line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
        peaks.append(int(line.split()[1]))
    return {"grown_tensors": (peaks[1] - peaks[0]) / tensor_kib, "peak_kib": peaks[1]}


def graph_breaks() -> dict:
    """torch.compile of a DDP model's forward and of a plain model: breaks and recompiles."""
    import torch._dynamo as dynamo

    begin()
    if "watch" in sys.argv:
        zeromon_agents.start()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):  # idle steps included
        compiled(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = agent().context.step if agent() else 0
    counters = dynamo.utils.counters
    found = [sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]]
    counters.clear()
    dynamo.reset()
    # FSDP1 runs between two graphs, where dynamo tries each Python frame, also of the hooks
    cpu = torch.device("cpu")
    sharded = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, device_id=cpu)
    compiled = torch.compile(sharded, backend="aot_eager")
    for _ in range(3):
        compiled(torch.ones(2, 8)).sum().backward()
    return {
        "breaks": found[0],
        "graphs": found[1],
        "steps": steps,
        "fsdp1_breaks": sum(counters["graph_break"].values()),
        "fsdp1_graphs": counters["stats"]["unique_graphs"],
    }


def end_without_options() -> dict:
    """A collective whose options do not say that it is asynchronous, as none do on torch 2.6."""
    from zeromon_agents.runtime.hook_context import END

    begin()
    zeromon_agents.start()
    work = dist.group.WORLD.allreduce([torch.ones(4)])
    entry = next(iter(agent().collectives.open.values()))
    deadline = time.monotonic() + 20
    while not entry[END] and time.monotonic() < deadline:
        time.sleep(0.01)
    known = bool(entry[END])
    work.wait()
    return {"end_known_before_wait": known, "errors": agent().guard.errors}


def coalescing_fails() -> dict:
    """Coalescing that does not begin, as gloo has none, and one whose end raises."""
    from zeromon.ring.codes import Flag
    from zeromon.ring.events import Done, Issued, decode_record

    begin()
    device, fails = torch.device("cpu"), iter((True, False, True))

    def raise_if_asked(_, __):
        if next(fails):
            raise RuntimeError("injected")

    dist.ProcessGroup._start_coalescing = dist.ProcessGroup._end_coalescing = raise_if_asked
    zeromon_agents.start()
    reader = RingReader(agent().ring.path)
    group = dist.group.WORLD
    for _ in range(2):
        with suppress(RuntimeError):
            group._start_coalescing(device)
            dist.all_reduce(torch.ones(4))
            group._end_coalescing(device)
        dist.all_reduce(torch.ones(4))
    events = [decode_record(raw) for raw in reader.read()]
    failed = [bool(e.flags & Flag.FAILED) for e in events if isinstance(e, Done)]
    issued = sum(isinstance(e, Issued) for e in events)
    return {"issued": issued, "failed": failed, "errors": agent().guard.errors}


def works_dropped() -> dict:
    """All-reduces of which nobody keeps the work, each with the id of the one before."""
    from zeromon.ring.events import Done, Issued, decode_record
    from zeromon_agents.hooks import c10d

    begin()
    zeromon_agents.start()
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    reader = RingReader(agent().ring.path)
    c10d.id = lambda _: 7
    futures = [dist.all_reduce(torch.ones(1 << 15), async_op=True).get_future() for _ in range(5)]
    for future in futures:
        future.wait()
    agent().collectives.completions.settle(5_000_000_000)  # of the newest callback
    optimizer.step()
    kinds = [type(decode_record(raw)) for raw in reader.read()]
    return {"issued": kinds.count(Issued), "done": kinds.count(Done)}


def bursts() -> dict:
    """Rounds of eight asynchronous all-reduces while a callback is to come: known and unknown ends."""
    from zeromon.ring.codes import Flag
    from zeromon.ring.events import Done, decode_record

    begin()
    zeromon_agents.start()
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    reader, found = RingReader(agent().ring.path), {}

    def a_round(name: str, size: int, wait) -> None:
        agent().collectives.completions._last = [0] * 8
        works = [dist.all_reduce(torch.ones(size), async_op=True) for _ in range(8)]
        time.sleep(0.1)
        for work in works:
            wait(work)
        optimizer.step()
        ends = [
            e.flags & Flag.SPAN_KNOWN for raw in reader.read() if type(e := decode_record(raw)) is Done
        ]
        found[name] = [sum(map(bool, ends)), ends.count(0)]

    def of_future(work) -> None:
        work.get_future().wait()

    a_round("first", 8, dist.Work.wait)
    a_round("again", 8, dist.Work.wait)
    a_round("large", 1 << 15, dist.Work.wait)
    a_round("large again", 1 << 15, dist.Work.wait)
    a_round("futures", 8, of_future)
    a_round("futures again", 8, of_future)
    return found


def every_op() -> dict:
    """Each collective once, through the public functions; those that this torch's gloo has."""
    begin()
    t, one = torch.ones(4), [torch.ones(4)]
    calls = {
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(4), [t]),
        "gather_single": lambda: dist.gather_single(torch.ones(4), t, 0),
    }
    has = {name: supported(call) for name, call in calls.items()}
    zeromon_agents.start()
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    dist.reduce(t, 0)
    dist.all_gather([torch.ones(4)], t)
    dist.all_gather_into_tensor(torch.ones(4), t)
    for name in calls:
        if has[name]:
            calls[name]()
    dist.reduce_scatter_tensor(torch.ones(4), t)
    dist.gather(t, one, 0)
    dist.scatter(t, one, 0)
    dist.all_to_all_single(torch.ones(4), t)
    dist.barrier()
    dist.all_reduce_coalesced([t, t])
    dist.all_gather_object([None], 1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    agent().steps.optimizer_begins(optimizer)
    agent().steps.backward_begins()
    agent().steps.backward_ends()
    agent().steps.optimizer_ends()
    assert agent().guard.errors == 0, agent().guard.first
    zeromon_agents.stop()
    return has


def supported(call) -> bool:
    """Whether torch and its gloo have a collective."""
    try:
        call()
    except (RuntimeError, AttributeError):
        return False
    return True


def counts_to_the_end() -> dict:
    """Sixteen steps, of which the last is a control step; then collectives of both interfaces.

    Four of the steps run under torch's own profiler, and at the twelfth the process forks.
    """
    from torch.distributed import _functional_collectives as functional

    begin()
    zeromon_agents.start()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(4)
    train(4)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    train(4)
    for _ in range(100):
        functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum()
    for _ in range(50):
        dist.all_reduce(torch.ones(4))
    group = dist.group.WORLD
    issued = group._get_sequence_number_for_group()
    dist.destroy_process_group()
    zeromon_agents.stop()
    has_recorder = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
    return {"issued": issued, "recorder": has_recorder}


def buffers_and_unused() -> dict:
    """A DDP model with buffers, which looks for unused parameters; every other backward is local.

    Then a second one, made after the steps in which the Flight Recorder is read.
    """
    begin()
    zeromon_agents.start()
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(14):
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    later = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(later.parameters(), 0.1)
    for _ in range(4):
        later(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    issued = dist.group.WORLD._get_sequence_number_for_group()
    zeromon_agents.stop()
    return {"issued": issued}


def two_optimizers() -> dict:
    """Two optimizers after one backward are one step; without a backward in between."""
    begin()
    zeromon_agents.start()
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second = torch.optim.SGD(a.parameters(), 0.1), torch.optim.AdamW(b.parameters(), 0.1)
    for _ in range(3):
        for _ in range(2):
            b(a(torch.ones(2, 4))).sum().backward()
        first.step()
        second.step()
    zeromon_agents.stop()
    return {}


def loader_facts() -> dict:
    """What is told of the loader that is trained on, beside one of an evaluation; then lengths vary."""
    begin()
    zeromon_agents.start()
    ring, told = agent().context.ring, []
    name = ring.name

    def noted(kind, payload):
        told.extend([payload["loader"]] if "loader" in payload else [])
        return name(kind, payload)

    ring.name = noted

    def batches(length, size, count=8):
        return torch.utils.data.DataLoader(torch.ones(count, length, dtype=torch.long), size)

    layer = nn.Linear(1, 1)
    for _ in range(2):
        for batch in batches(16, 4):
            layer(batch.float().mean().view(1)).backward()
        next(iter(batches(99, 7)))
    after_evaluation = len(told)
    for length in (16, 17, 16):
        for batch in batches(length, 4):
            layer(batch.float().mean().view(1)).backward()
    varied = told[-1]
    for turn in range(200):  # two loaders in turns: the name table is not filled with them
        next(iter(batches(4, 2 + turn % 2)))
        layer(torch.ones(1)).backward()
    facts = {
        "first": told[0], "after_evaluation": after_evaluation, "varied": varied,
        "told": len(told), "errors": agent().guard.errors,
    }  # fmt: skip
    zeromon_agents.stop()
    return facts


def stopped_and_started_again() -> dict:
    begin()
    for _ in range(2):
        zeromon_agents.start()
        dist.all_reduce(torch.ones(4))
        zeromon_agents.stop()
    return {}


if __name__ == "__main__":
    facts = globals()[sys.argv[1]]()
    os.write(1, f"\n{json.dumps(facts)}\n".encode())  # whole, whatever another thread prints
    if dist.is_initialized():
        dist.destroy_process_group()
    leave()
