"""DistributedDataParallel: forward, the reducer's buckets, and the reducer's own timing of backward.

DDP issues its all-reduces from C++, where no Python hook sees them. The reducer keeps when each
backward's communication began and ended, when its computation ended, and when each gradient was
complete. The hook reads that once a step: two calls into C++ that copy about thirty integers, and one
integer per parameter. The reducer reduces buckets in order, so a bucket begins when its gradients and
those of all buckets before it are complete.
"""

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any

import torch

from zeromon.ring.codes import Flag, Kind, Op, Phase
from zeromon.ring.events import pack_head
from zeromon.ring.model_metadata import ProcessMetadata
from zeromon.ring.strategy import DDP, ZERO_REDUNDANCY
from zeromon_agents.hooks.backend import Backend, FromCpp, ImportHook, Services
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import DTYPES, Group, backend_of, sequence_number
from zeromon_agents.observe.device_timer import Bucket, DeviceTimer, HiddenWait, copy_size
from zeromon_agents.observe.stall_detector import HOOK_ID
from zeromon_agents.runtime.around import RAISED, around
from zeromon_agents.runtime.hook_context import HELD_NS, ISSUED_NS, OFF, ON, HookContext

DISTRIBUTED = "torch.nn.parallel.distributed"
BROADCASTS = "_broadcast_coalesced"
VERIFIES = "_verify_param_shape_across_processes"
_DEFAULT_SAMPLE_RATE = 100
"""The sample rate of torch's reducer."""
_INDEX_BYTES = 4
"""Bytes of a parameter's or a bucket's number in C++; also of whether a parameter was used."""
_MAX_WAYS = 1000
_CLOCK_SLACK_NS = 10_000_000
_BUCKETS_OF_MODEL = 1 << 44
"""More than the buckets that a model sends: those of several models have different numbers."""
_EXTENT_BYTES = 8
"""Bytes of one size or stride of a parameter."""


class DdpModel:
    """The state that the hooks keep of one DDP model, without keeping the model alive."""

    def __init__(self, ddp: Any, group: int, number: int, *, on_cpu: bool) -> None:
        self.ref = weakref.ref(ddp)
        self.group = group
        self.on_cpu = on_cpu
        self.iteration = -1
        self.read_ns = 0
        """When the reducer's figures were read last."""
        self.forwards = 0
        """Passes in this step whose backward reduces."""
        self.unfinished = 0
        """Those of them whose backward has not begun; of a model on a device."""
        self.buckets: list[int] = []
        self.members: list[list[int]] = []
        """Indices of the parameters in each bucket."""
        self.ends_of: list[Callable[[Any], Any]] = []
        """Each bucket -> a function that takes its times from those of all parameters."""
        self.first_sequence = number * _BUCKETS_OF_MODEL
        self.copies = not getattr(ddp, "gradient_as_bucket_view", False)
        """True where the reducer copies the gradients out of its buckets."""
        self.parameters = sum(p.requires_grad for p in ddp.parameters())
        self.finds_unused = getattr(ddp, "find_unused_parameters", False) and not ddp.static_graph
        """True if it looks for unused parameters: torch never rebuilds the buckets then."""
        self.used = [_INDEX_BYTES * self.parameters] if self.finds_unused else []
        """Bytes of what the reducer sends besides the buckets: which parameters a backward has used."""
        self.sizes: tuple[int, ...] = ()
        """Bytes of all that a backward sends; () before the buckets are known."""
        self.units: list[int] = []
        self.are_final = False
        """True if the buckets will not change any more."""
        self.agreeing = False
        """True if the ranks have agreed in this step on which bucket holds which parameter."""
        self.has_agreed = bool(getattr(ddp, "_has_rebuilt_buckets", True))
        self.compiled = True
        """True if forward has not passed the hook: torch.compile traces it and leaves hooks out."""


class Ddp(Backend):
    """The hooks on DDP's constructor and forward, and the list of DDP models."""

    classes = ((DISTRIBUTED, "DistributedDataParallel"),)

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._known: dict[int, DdpModel] = {}
        self._made_models = 0
        self._agreed: defaultdict[int, list[FromCpp]] = defaultdict(list)
        """Group -> what C++ issued in this step beside the buckets, which no hook sees."""
        self.steps.on_loss.append(self.context.guard.guarded(self._backward_begins))
        self._calls = ReducerCalls(self.context, self.collectives, self.device)

    def hooks(self) -> Iterable[ImportHook]:
        """Patches ``DistributedDataParallel``."""
        return ((DISTRIBUTED, self.watch),)

    def watch(self, module: Any) -> None:
        """Patches ``DistributedDataParallel`` of *module*."""
        wrapper, forward_hook = module.DistributedDataParallel, self._forward_begins
        self.wrap(wrapper, "__init__", after=self._made)
        self.wrap(wrapper, "forward", forward_hook, self._forward_ends, traced=True)
        # its constructor sends parameters, and each forward of a model with buffers sends those
        begin_hook, end_hook = self.collectives.broadcasts_begin, self.collectives.broadcasts_end
        self.wrap(module.dist, BROADCASTS, begin_hook, end_hook, where=BROADCASTS, traced=True)
        verifies = around(
            self.context, lambda pg, *_: sequence_number(pg), self._note_check, where=VERIFIES
        )
        self.patches.wrap_in(module, VERIFIES, verifies)

    def adopt(self, instance: Any) -> None:
        """Registers a DDP model."""
        self.models.register_module(instance)

    def reducers_sent(self, group: int, calls: int) -> list[FromCpp] | None:
        """Names *calls* collectives of the models on *group*: see the base class.

        A backward sends the buckets of a model once. Where the models' buckets add up to *calls* in
        several ways, it is unknown which were sent.
        """
        models = [m for m in self._known.values() if m.group == group and m.ref() is not None]
        agreed, backwards = self._agreed.pop(group, []), self.steps.micro_steps
        if not models:
            return None
        # torch.compile leaves out the hook on forward: each backward may then send this model's buckets
        max_times = [
            backwards if m.compiled or len(models) == 1 else min(m.forwards, backwards) for m in models
        ]
        # Before the returns: the passes of this step must not count in the next one
        for model in models:
            model.forwards = 0
        calls -= sum(count for _, _, count, _ in agreed)
        agreeing = [m for m in models if m.agreeing]
        if agreeing:  # the reducer tells the new buckets at the next forward
            agreeing[0].agreeing = False
            if sum(max_times) != 1 or max_times[models.index(agreeing[0])] != 1 or calls < 3:
                return []
            # The ranks broadcast the order of the parameters, and the number and sizes of buckets
            indices = agreeing[0].parameters + 1 + calls - 2
            agreed.append((Op.BROADCAST, Phase.FORWARD, 2, _INDEX_BYTES * indices))
            agreed.append((Op.ALL_REDUCE, Phase.BACKWARD, calls - 2, sum(agreeing[0].buckets)))
            return agreed
        sums = _possible_sums(tuple([m.sizes for m in models]), tuple(max_times), calls)
        if len(sums) != 1:
            return []
        if calls:
            (nbytes,) = sums
            agreed.append((Op.ALL_REDUCE, Phase.BACKWARD, calls, nbytes))
        return agreed

    def stop(self) -> None:
        """Restores the sampling rate of the reducers, and removes the hooks of their groups."""
        self._calls.stop()
        for model in self._known.values():
            ddp = model.ref()
            if ddp is not None and model.on_cpu:
                ddp._set_ddp_runtime_logging_sample_rate(_DEFAULT_SAMPLE_RATE)
        self._known.clear()
        self._agreed.clear()

    def end_step(self) -> None:
        """Reads the reducers of models whose forward is compiled."""
        self._calls.end()  # of a backward that raised
        for model in self._known.values():
            ddp = model.ref() if model.compiled else None
            if ddp is not None:
                self._read(model, ddp)

    def _made(self, _: None, result: Any, ddp: Any, *__: Any) -> None:
        if result is not RAISED:
            self._model(ddp)

    def _note_check(self, number: int | None, _: Any, pg: Any, parameters: Any, *__: Any) -> None:
        """Notes that the ranks have compared their numbers of parameters, then sizes and strides."""
        # A torch that compares something else here takes another number of calls: nothing is named then
        if number is not None and sequence_number(pg) == number + 2:
            group = self.collectives.group_of(pg)
            extents = 2 * sum(p.dim() for p in parameters)
            self._agreed[group.id] += [
                (Op.ALL_GATHER, Phase.OTHER, 1, _EXTENT_BYTES * group.size),
                (Op.BROADCAST, Phase.OTHER, 1, _EXTENT_BYTES * extents),
            ]

    def _forward_begins(self, ddp: Any, *args: Any, **kwargs: Any) -> None:
        self.steps.forward_begins(ddp, args, kwargs)
        # Without it, the stream of the optimizer would be taken for that of the model
        self.device.mark_compute_stream()

    def _forward_ends(self, _: None, __: Any, ddp: Any, *___: Any) -> None:
        self.steps.forward_ends()
        model = self._model(ddp)
        model.compiled = False
        self._read(model, ddp)
        # A pass under no_sync() or no_grad() sends no bucket
        reduces = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        model.forwards += reduces
        model.unfinished += reduces and not model.on_cpu

    # ---- the end of a backward on a device ------------------------------------------------------

    def _backward_begins(self, tensors: Any) -> None:
        """Times how long the reducer lets the compute stream wait when a backward has been computed.

        Autograd calls what was queued during a backward at its end, in that order. The reducer queues
        its wait with the last bucket, so what the first node queues comes before it.
        """
        reduced_by, calls, copied = list[DdpModel](), 0, 0
        for model in self._known.values():
            if model.unfinished and model.sizes:
                reduced_by.append(model)
                calls += model.unfinished * len(model.sizes)
                copied += model.copies * copy_size(sum(model.buckets), model.parameters)
            # Also where nothing is timed: a later backward would take these passes for its own
            model.unfinished = 0
        if not reduced_by or self.context.mode != ON:
            return
        losses = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        node = next((t.grad_fn for t in losses if getattr(t, "grad_fn", None) is not None), None)
        if node is None:
            return
        guarded, queue = self.context.guard.guarded, torch.autograd.Variable._execution_engine

        def on_backward(*_: Any) -> None:
            # With retain_graph the node runs again, in a backward that may reduce nothing
            handle.remove()
            if len(reduced_by) == 1:  # of several models it is not known whose bucket a call sends
                (model,) = reduced_by
                self._calls.begin(model.units, [len(indices) for indices in model.members])
            queue.queue_callback(guarded(on_computed))

        def on_computed() -> None:
            reached = self.device.mark()
            if reached is None:
                self._calls.end()
            else:
                queue.queue_callback(guarded(functools.partial(on_reduced, reached)))

        def on_reduced(reached: Any) -> None:
            ddp = reduced_by[0].ref()
            number = 0 if ddp is None else max(0, sequence_number(ddp.process_group))
            wait_fields = reduced_by[0].group, calls, number, self._calls.end(), copied
            wait = HiddenWait(reached, *wait_fields)
            self.device.waited_hidden(wait)

        handle = node.register_prehook(guarded(on_backward))

    def _model(self, ddp: Any) -> DdpModel:
        model = self._known.get(id(ddp))
        # A new model may have the address of a deleted one
        if model is None or model.ref() is None:
            on_cpu = ddp.device_type == "cpu"
            group = self.collectives.group_of(ddp.process_group)
            model = self._known[id(ddp)] = DdpModel(ddp, group.id, self._made_models, on_cpu=on_cpu)
            self._made_models += 1
            self.context.add_metadata(**DDP.metadata())
            self.models.register_module(ddp)
            if group.on_device:
                reducer: ProcessMetadata = {"ddp_backend": backend_of(ddp.process_group)}
                self.context.add_metadata(ddp=reducer)
                self._calls.watch(ddp.process_group, group)
            if on_cpu:
                # on CUDA, reading a sampled iteration waits for its events: keep torch's own rate
                ddp._set_ddp_runtime_logging_sample_rate(1)
        return model

    def _read(self, model: DdpModel, ddp: Any) -> None:
        if not model.has_agreed:
            model.agreeing = model.has_agreed = ddp._has_rebuilt_buckets
        if self.steps.attached_mid_step:
            return  # the reducer's figures are of a backward before the agent was attached
        if not model.on_cpu and model.are_final:
            return  # on a device, starts are of the host's clock and durations of the device's
        data = ddp.logger._get_ddp_logging_data()
        counters = data.ints_map
        if not model.are_final:
            self._read_buckets(model, ddp, data.strs_map, counters)
        if not model.on_cpu:
            return
        start, end_ns = counters.get("backward_comm_time_start", 0), 0
        if start:
            end_ns = start + counters.get("backward_comm_time", 0)
        compute_end = counters.get("backward_compute_time_end", 0)
        # After a pass that reduced nothing, the logger still shows the previous backward
        if not start or model.iteration == start or not compute_end:
            return
        model.iteration = start
        now_ns = time.monotonic_ns()
        shift, last_read_ns, model.read_ns = now_ns - time.time_ns(), model.read_ns, now_ns
        first_ns, last_ns = min(start, compute_end) + shift, max(end_ns, compute_end) + shift
        if first_ns < last_read_ns - _CLOCK_SLACK_NS or last_ns > now_ns + _CLOCK_SLACK_NS:
            return  # the wall clock, which the reducer reads, was set meanwhile
        if self.context.mode == ON and model.units:
            begin_ns = counters.get("backward_compute_time_start", 0)
            self._write_buckets(model, ddp.reducer, begin_ns + shift, counters.get("iteration", 0))
        # fmt: off
        self.context.write(end_ns + shift, Kind.BACKWARD_COMM, 0, 0, 0, model.group, 0,
                             start + shift, compute_end + shift,
                             len(model.buckets) + len(model.used), 0)
        # fmt: on

    def _read_buckets(
        self, model: DdpModel, ddp: Any, lists: dict[str, str], counters: dict[str, int]
    ) -> None:
        rebuilt = bool(counters.get("has_rebuilt_buckets", 0))
        size_list = lists.get("rebuilt_bucket_sizes") if rebuilt else lists.get("bucket_sizes")
        model.buckets = [int(size) for size in (size_list or "").split(",") if size.strip()]
        model.sizes = (*model.buckets, *model.used) if model.buckets else ()
        model.are_final = rebuilt or (model.finds_unused and bool(model.buckets))
        if not model.are_final:
            return
        members = lists.get("rebuilt_per_bucket_param_indices") or ""
        model.members = (
            [[int(i) for i in indices.split()] for indices in members.split(",")]
            if rebuilt
            else _first_members(ddp, model.buckets)
        )
        # a torch without these statistics: buckets are counted and not timed
        timed = hasattr(ddp.reducer, "get_backward_stats")
        if timed and len(model.members) == len(model.buckets):
            model.units = [
                self.context.unit_id(f"bucket {number}", {"kind": "ddp"})
                for number in range(len(model.buckets))
            ]
            # One index twice: of a single one an itemgetter returns no tuple
            in_buckets = (indices or model.members[0] for indices in model.members)
            model.ends_of = [itemgetter(*indices, *indices[:1]) for indices in in_buckets]

    def _write_buckets(self, model: DdpModel, reducer: Any, began_ns: int, iteration: int) -> None:
        """Writes when each bucket could be sent: when its last gradient was complete."""
        times_ns, ready_ns = reducer.get_backward_stats(), 0
        write, count = self.context.write, len(model.units)
        for number, (unit, ends_of) in enumerate(zip(model.units, model.ends_of, strict=True)):
            ready_ns = max(ready_ns, *ends_of(times_ns))
            sequence = -(model.first_sequence + iteration * count + number + 1)
            # fmt: off
            write(began_ns + ready_ns, Kind.BUCKET, 0, 0, 0, model.group, unit,
                  model.buckets[number], sequence, number, 0)
            # fmt: on


def _first_members(ddp: Any, nbytes: list[int]) -> list[list[int]]:
    """Returns the indices of the parameters in each of the first buckets, which torch does not tell.

    Parameters fill the buckets in the reverse of their order, each up to its size. Where that does not
    explain *nbytes*, as with parameters of several types, all buckets count as ready with the last
    gradient.
    """
    parameters = list(enumerate(ddp._build_params_for_reducer()[0]))
    members: list[list[int]] = []
    for size in reversed(nbytes):
        members.insert(0, [])
        while parameters and size > 0:
            index, parameter = parameters.pop(0)
            members[0].append(index)
            size -= parameter.numel() * parameter.element_size()
        if size:
            return [[*range(len(ddp._build_params_for_reducer()[0]))], *([] for _ in nbytes[1:])]
    return members


@functools.lru_cache(64)
def _possible_sums(
    sizes: tuple[tuple[int, ...], ...], max_times: tuple[int, ...], calls: int
) -> frozenset[int]:
    """Returns how many bytes *calls* buckets may have, in every way that whole models add up to them.

    Model *i* sends its ``sizes[i]`` at most ``max_times[i]`` times. The next step asks the same again.
    """
    # The ways multiply with each model, and the training thread would try them all
    if prod(times + 1 for times in max_times) > _MAX_WAYS:
        return frozenset()
    return frozenset(
        sum(n * sum(bucket_sizes) for n, bucket_sizes in zip(times, sizes, strict=True))
        for times in product(*(range(n + 1) for n in max_times))
        if sum(n * len(bucket_sizes) for n, bucket_sizes in zip(times, sizes, strict=True)) == calls
    )


class ZeroRedundancy(Backend):
    """Recognizes the optimizer by its type."""

    def rank_metadata(self, optimizers: list[Any]) -> dict[str, Any]:
        """Returns the strategy where the first optimizer is a ``ZeroRedundancyOptimizer``."""
        class_name = type(optimizers[0]).__name__ if optimizers else ""
        return ZERO_REDUNDANCY.metadata() if class_name == "ZeroRedundancyOptimizer" else {}


_ID = HOOK_ID - 1
"""Before the hook that counts what no other hook has seen."""
_ISSUED = pack_head(Kind.ISSUED, Op.ALL_REDUCE, flags=Flag.ASYNC)
_DONE = pack_head(0, Op.ALL_REDUCE, flags=Flag.ASYNC)


class ReducerCalls:
    """The hooks on the groups of DDP models, and the buckets of the backward under way."""

    def __init__(self, context: HookContext, collectives: Collectives, device: DeviceTimer) -> None:
        self._context, self._collectives, self._device = context, collectives, device
        self._groups: dict[int, Group] = {}
        self._buckets: list[Bucket] | None = None
        """The buckets of the backward under way; None outside of one."""
        self._units: list[int] = []
        self._tensors: list[int] = []
        self._newest: Bucket | None = None
        """The bucket of the call that C++ is in."""
        self._seen: dict[int, int] = {}
        """Group -> the calls that had passed other hooks at the newest one."""

    def watch(self, pg: Any, group: Group) -> None:
        """Registers the hooks on *pg*, once; a torch without such hooks is left alone."""
        if group.id not in self._groups and hasattr(pg, "register_post_hook"):
            self._groups[group.id] = group
            guarded = self._context.guard.guarded
            pg.register_pre_hook(_ID, guarded(lambda call: self._before(group, call)))
            pg.register_post_hook(_ID, guarded(self._after_call))

    def stop(self) -> None:
        """Removes the hooks."""
        for group in self._groups.values():
            pg = group.ref()
            if pg is not None:
                with suppress(RuntimeError):
                    pg.unregister_pre_hook(_ID)
                    pg.unregister_post_hook(_ID)
        self._groups.clear()

    def begin(self, units: list[int], tensors: list[int]) -> None:
        """A backward begins that reduces buckets with these *units* and numbers of *tensors*."""
        self._buckets, self._newest = [], None
        self._units, self._tensors = units, tensors
        self._seen = {number: group.issued for number, group in self._groups.items()}

    def end(self) -> list[Bucket]:
        """Returns the buckets of the backward that ends."""
        buckets, self._buckets = self._buckets or [], None
        return buckets

    def _before(self, group: Group, call: Any) -> None:
        # Before the returns: `_after_call` would give the work of this call to the previous bucket
        self._newest = None
        if self._buckets is None or self._context.mode == OFF:
            return
        # Python issued it, as a communication hook does
        if group.issued != self._seen.get(group.id):
            self._seen[group.id] = group.issued
            return
        # C++ may issue other calls in a backward, such as those of a compiled graph
        if call.name.name != "ALLREDUCE" or not call.async_op:
            return
        ready_event = self._device.mark()
        if ready_event is None:
            return
        context, number = self._context, len(self._buckets)
        sequence = self._collectives.number_next(group)
        self._seen[group.id] = group.issued
        nbytes = sum(tensor.nbytes for tensor in call.input_tensors)
        dtype = DTYPES[call.input_tensors[0].dtype]
        at = group.id | (self._units[number] if number < len(self._units) else 0)
        issued_ns = time.monotonic_ns()
        issued = _ISSUED | context.head_word
        context.ring.write(issued_ns, issued, at, nbytes, sequence, dtype, context.engine)
        entry = [_DONE | context.head_word, at, nbytes, issued_ns, sequence, 0, ready_event, 0]
        self._newest = Bucket(entry, self._tensors[number] if number < len(self._tensors) else 1)
        self._buckets.append(self._newest)

    def _after_call(self, call: Any) -> None:
        bucket, self._newest = self._newest, None
        if bucket is None or call.work is None:
            return
        bucket.entry[HELD_NS] = time.monotonic_ns() - bucket.entry[ISSUED_NS]
        future = call.work.get_future()
        bucket.left = self._device.mark()
        bucket.end, bucket.recorded_ns = self._device.mark_end(future), time.monotonic_ns()
