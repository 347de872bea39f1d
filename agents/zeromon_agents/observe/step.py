"""Follows steps and phases without any call in the training script.

Optimizer steps come from torch's global optimizer hooks, or from the DeepSpeed engine that owns the
optimizer. Where neither is called (torch.compile leaves hooks out of a step that it compiles, and some
optimizers are not torch's), a step has ended when parameters changed since the last backward. Backward
comes from the one function that every backward passes. Forward comes from the wrappers (DDP, FSDP,
DeepSpeed); without a wrapper it is the time between the data and the backward. Data wait comes from the
DataLoader's iterator.

Without a wrapper and without a DataLoader, what follows a backward is another forward, or what comes
before the optimizer (clipping, a sum of the losses). Only the next backward tells which: the time is
then that of forward, and what was communicated meanwhile has been written as of no phase.
"""

import numbers
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from zeromon.ring.codes import Flag, Kind, Outcome, Phase
from zeromon.ring.model_metadata import LoaderMetadata
from zeromon_agents.observe.batches import Batches, Beginnings, Evaluation
from zeromon_agents.observe.process_metadata import Goal, autocast_dtype, process_start_ns
from zeromon_agents.runtime.around import RAISED, Patches, around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, OFF, ON, HookContext

DETAIL_EVERY, _DETAIL_AT = 9, 4
"""Differs from the period of control steps: a control step's neighbours must be ordinary steps."""
_CONTINUED, _IDLE = int(Flag.CONTINUED), int(Flag.IDLE)
"""As integers: what an enumeration of flags computes with itself are several calls in Python."""
_SETTLED = 10
_OFTEN, _OFTEN_UNTIL, _SELDOM = 8, 250, 64
_MAX_LOADER_RECORDS = 32
_MAX_COUNTS = 64
_WATCHED_PARAMETERS = 8


def control_step(step: int, steps_before: int = 0) -> bool:
    """Returns whether *step* is a control step, in which hooks count but do not time.

    The same steps are control steps on every rank. They are frequent at first, so that the overhead is
    known soon, and rare later. *steps_before* is the number taken before the agent was attached.
    """
    watched = step - steps_before
    if watched <= _SETTLED:
        return False
    return step % (_OFTEN if watched < _OFTEN_UNTIL else _SELDOM) == 0


def steps_taken(optimizer: Any) -> int:
    """Returns the number of steps in *optimizer*'s state; 0 where it keeps none, or on a device."""
    states = getattr(optimizer, "state", {})
    counts = (state.get("step") for state in islice(states.values(), _MAX_COUNTS))
    # A parameter whose first gradient came later has a lower count
    return max((int(n) for n in map(known_number, counts) if n is not None), default=0)


def known_number(value: Any) -> float | None:
    """Returns *value* as a float; None where reading it would wait for a device or communicate."""
    if type(value) is float:
        return value
    # By type: isinstance() takes a DTensor, whose float() may communicate with other ranks
    if type(value) is torch.Tensor:
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, numbers.Real) else None


class ParameterVersions:
    """The versions that autograd counts for some parameters: an update in place raises them.

    Forward and backward do not. Reading a version waits for no device.
    """

    def __init__(self) -> None:
        self.module: Callable[[], Any] = lambda: None
        """A weak reference to the module that trains."""
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._versions: list[int] = []
        self.are_needed = True
        """False after the first call of an optimizer hook."""
        self.showed_step = False
        """True after the first step that only the versions showed."""

    def remember(self) -> None:
        """Remembers the versions at the end of a backward: FSDP has sharded its parameters again."""
        if not self._read() and isinstance(module := self.module(), torch.nn.Module):
            trained = (p for p in module.parameters() if p.requires_grad)
            self._parameters = [weakref.ref(p) for p in islice(trained, _WATCHED_PARAMETERS)]
        self._versions = self._read()

    def have_changed(self) -> bool:
        """True if a parameter was updated since the last backward."""
        return bool(self._versions) and self._versions != self._read()

    def _read(self) -> list[int]:
        parameters = [p for reference in self._parameters if (p := reference()) is not None]
        # what is compiled may update a DTensor, or its local part alone
        return [p._version + getattr(p, "_local_tensor", p)._version for p in parameters]


class Steps:
    """Follows the training loop and writes its phases and steps into the ring."""

    autocast: str | None = None
    """The dtype that forward computes in under autocast; None while it was not on and may be."""
    updates_in_backward = False
    """True once hooks of gradients have stepped optimizers within a backward."""
    _updated_to: int | None = None
    """Steps that an optimizer has taken within this backward, 0 where unknown; None without one."""

    def __init__(
        self,
        context: HookContext,
        before_step_mark: Callable[[int], None],
        before_first_step: Callable[[], None],
        device_type: str = "",
    ) -> None:
        self._context = context
        self._before_first_step = before_first_step
        self._before_step_mark = before_step_mark
        self.evaluation, self.beginnings = Evaluation(context), Beginnings(context)
        self.batches, self.goal = Batches(context), Goal(context)
        self._parameters = ParameterVersions()
        self.step_start_ns = time.monotonic_ns()
        self._free_since = 0
        """When the last batch, backward or step ended; 0 before the first."""
        self.in_loop = False
        """True if the first backward has begun, and with it the training loop."""
        self.micro_steps = 0
        """Backward passes since the last step ended."""
        self._loss_from = 0
        """When the last forward ended, until a backward, a batch or a step follows."""
        self._has_wrapper = False
        self._device_type = device_type
        self._autocast_patches = Patches()
        self._forward_from = self._forward_seen_ns = self._data_from = self._backward_from = 0
        self._backward_depth = 0
        self._in_pipeline = self._counted = False
        """A pipeline's schedule runs, as one micro-step; that micro-step was counted."""
        self._open_optimizers: list[int] = []
        self._optimizer_from = self._cpu_optimizer_from = self._last_engine = 0
        self.in_engine = False
        """True while a DeepSpeed engine steps."""
        self.initializing = 0
        """DeepSpeed engines under construction: each steps its optimizer once, to create state."""
        self.offloads_optimizer = False
        """True if the engine that is stepping runs its optimizer on the host."""
        self.attached_mid_step = False
        """True if the agent was attached during the step under way, and so cannot time it."""
        self._loader: Callable[[], Any] = lambda: None
        """A weak reference to the DataLoader iterator that was used last."""
        self._loader_settings: LoaderMetadata = {}
        self._loader_written: LoaderMetadata = {}
        self._last_micro_steps = self._loader_records = self._length = 0
        """The length: tokens of each sequence in the last batch; 0 for a batch of something else."""
        self.on_start: Callable[[], None] | None = None
        """Called when the first step begins, to tell what came before it. It must not raise."""
        self.on_phase_end: Callable[[Phase], None] | None = None
        """Called when what comes before the first step has ended, and a backward. It must not raise."""
        self.on_optimizer: Callable[[Any], None] | None = None
        """Called with the optimizer before it steps. It must not raise."""
        self.on_boundary: Callable[[int], None] | None = None
        """Called between two steps with the number of the step that begins. It must not raise."""
        self.on_backward: Callable[[], None] | None = None
        """Called when the first backward of a step begins, where activations are at their peak."""
        self.on_loss: list[Callable[[Any], None]] = []
        """Called with the tensors that a backward begins from. They must not raise."""
        # torch calls these two without around(), which times the other hooks
        for name in ("optimizer_begins", "optimizer_ends"):
            setattr(self, name, context.timed(getattr(self, name)))

    @property
    def step_under_way(self) -> bool:
        """True if a forward or a backward has begun since the last step ended."""
        return bool(self.micro_steps or self._forward_from or self._loss_from or self._backward_from)

    def is_training_thread(self) -> bool:
        """Returns whether the caller's thread is that of the last backward, at first the main thread."""
        training = self._context.thread or threading.main_thread().ident
        return threading.get_ident() == training

    # ---- the first step -----------------------------------------------------------------------

    def _may_start(self, now_ns: int) -> None:
        """Begins the first step, again with each batch and forward until the first backward."""
        if not self.in_loop and not self.attached_mid_step:
            if self.on_start is not None:
                self.on_start()
            if self.on_phase_end is not None:
                self.on_phase_end(Phase.OTHER)
            self.step_start_ns = now_ns
            self._context.write(now_ns, Kind.START, 0, 0, 0, 0, 0, process_start_ns(), 0, 0, 0)

    # ---- forward ------------------------------------------------------------------------------

    def forward_begins(
        self, module: Any = None, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Starts the forward phase: the outermost wrapped *module* was called, with *args*."""
        if self._backward_depth or self._context.mode == OFF:
            return  # activation checkpointing recomputes forward as part of backward
        # Without an optimizer hook, the next forward or backward is the first sign that a step has ended
        if self._parameters.are_needed:
            self.end_unhooked_step()
            # A module under evaluation is not updated: watched in place of the model, it hides each step
            if module is not None and not self.evaluation.is_open:
                self._parameters.module = weakref.ref(module)
        is_batch = module is not None and not (self._in_pipeline or self.evaluation.is_open)
        trains = is_batch and self.evaluation.forward_trains()
        # FSDP2's hook reports the end of each unit, so no call has closed the previous forward
        self._close_forward()
        self._has_wrapper = True
        self._forward_from = self._forward_seen_ns = time.monotonic_ns()
        if not self._in_pipeline:
            self._may_start(self._forward_from)
        # the sooner a border is recorded, the less of the hook is outside of the phase
        self._context.enter(self.evaluation.phase or Phase.FORWARD)
        self._autocast_begins()
        if trains:
            self.batches.received(id(module), args, kwargs)

    def forward_seen(self) -> None:
        """Moves the end of the forward phase to now."""
        if self._forward_from and not self._backward_depth:
            self._forward_seen_ns = time.monotonic_ns()

    def forward_ends(self) -> None:
        """Ends the forward phase: the outermost wrapped module has returned."""
        self.forward_seen()
        self._close_forward()

    def _close_forward(self) -> None:
        if self._forward_from:
            began_ns, self._forward_from = self._forward_from, 0
            self._loss_from = self._forward_seen_ns
            self.evaluation.seen()
            self._context.enter(self._bare_phase())
            self._write_span(Phase.FORWARD, began_ns, self._forward_seen_ns)

    # ---- backward -----------------------------------------------------------------------------

    def backward_begins(self, tensors: Any = ()) -> None:
        """Starts the backward phase from *tensors*, unless this backward is nested in another."""
        self._backward_depth += 1
        if self._backward_depth > 1 or self._context.mode == OFF:
            return
        if self._parameters.are_needed:
            self.end_unhooked_step()
        now_ns = time.monotonic_ns()
        self._context.thread = threading.get_ident()
        self.evaluation.backward_begins()
        if self._forward_from:
            self._close_forward()
        elif self._loss_from:  # what the wrapped module returned becomes a loss
            self._infer_forward(self._loss_from, now_ns)
        elif not self._has_wrapper and self._free_since:
            self._infer_forward(self._free_since, now_ns)
        elif not self._has_wrapper:
            self._may_start(now_ns)
        self.in_loop, self._loss_from = True, 0
        self._backward_from = now_ns
        self._context.enter(Phase.BACKWARD)
        if self.on_backward is not None and not self.micro_steps:
            self.on_backward()
        for hook in self.on_loss:  # a pipeline infers shapes from uninitialized memory
            hook(() if self._in_pipeline else tensors)
        if self._loader_settings:
            # Written when backward begins, and again only when they differ: a loader that no backward
            # follows is one of an evaluation. A script makes a new iterator each epoch, and may
            # alternate between two loaders, so the number of records is bounded.
            last_written = self._loader_written
            # Where batches differ in length, 0 stays: each length would take one of the bounded records
            same_length = last_written.get("length", self._length) == self._length
            loader: LoaderMetadata = {
                **self._loader_settings,
                "length": self._length if same_length else 0,
            }
            if loader != last_written and self._loader_records < _MAX_LOADER_RECORDS:
                self._loader_written = loader
                self._loader_records += 1
                self._context.add_metadata(loader=loader)
            self.beginnings.batch_trained()
            self.goal.batch_trained(self._loader())

    def _infer_forward(self, start_ns: int, end_ns: int) -> None:
        self._write_span(Phase.FORWARD, start_ns, end_ns, Flag.INFERRED)
        # what a device did since the last border was forward, too
        self._context.phase = Phase.FORWARD

    def backward_ends(self) -> None:
        """Ends the backward phase and counts a micro-step."""
        self._backward_depth -= 1
        # The depth is counted in every mode, a beginning only while the agent is on
        if self._backward_depth or not self._backward_from:
            return
        closure = self._optimizer_from and self.micro_steps  # L-BFGS evaluates the loss again
        is_repeat = bool(closure) or (self._in_pipeline and self._counted)
        self.micro_steps += not is_repeat
        self._counted = True
        self._free_since = time.monotonic_ns()
        flags = _CONTINUED if is_repeat else 0
        began_ns, self._backward_from = self._backward_from, 0
        if self._parameters.are_needed:
            self._parameters.remember()
            if self._parameters.showed_step:  # unless it turns out to be another micro-step
                self._optimizer_from = self._free_since
        self._context.enter(Phase.OPTIMIZER if self._optimizer_from else Phase.OTHER)
        self._write_span(Phase.BACKWARD, began_ns, self._free_since, flags)
        if self._updated_to is not None:
            total_steps, self._updated_to, self.updates_in_backward = self._updated_to, None, True
            self._optimizer_from = self._free_since
            self._end_step(total_steps=total_steps)

    # ---- pipeline -----------------------------------------------------------------------------

    def pipeline_begins(self, schedule: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Starts a micro-step that a pipeline's *schedule* cuts into many forwards and backwards.

        Its first stage alone is called with the batch.
        """
        if self._context.mode != OFF:
            self.batches.whole = True
            if args and not self.evaluation.is_open:
                self.batches.received(id(schedule), args, kwargs)
            self._close_forward()
            self._has_wrapper, self._in_pipeline, self._counted = True, True, False
            self._may_start(time.monotonic_ns())

    def pipeline_ends(self) -> None:
        """Ends that micro-step."""
        self._in_pipeline = False

    # ---- optimizer ----------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        """Starts the optimizer phase; a nested optimizer (ZeroRedundancyOptimizer) counts once."""
        try:
            if self.initializing:
                return
            if self.in_engine:
                self._inner_optimizer_begins()
                return
            self._parameters.are_needed = False
            if id(optimizer) in self._open_optimizers:
                self._open_optimizers.clear()  # its last step raised, and torch called no post hook
            self._open_optimizers.append(id(optimizer))
            if len(self._open_optimizers) > 1:
                return
            # What an optimizer does within backward is a part of it, like the collectives around it
            if not self._backward_from:
                self._begin_optimizer_phase()
            if self.on_optimizer is not None:
                self.on_optimizer(optimizer)
        except Guard.CAUGHT as error:
            self._context.guard.note(error, "optimizer_begins")

    def optimizer_ends(self, optimizer: Any = None) -> None:
        """Ends the step when the outermost optimizer has stepped."""
        try:
            if self.initializing:
                return
            if self.in_engine:
                self._inner_optimizer_ends()
                return
            if self._open_optimizers:
                self._open_optimizers.pop()
            # No time where the agent was off when this optimizer began: the phase would start at 0
            if self._open_optimizers or self._context.mode == OFF:
                return
            # Only the first step needs the number, and reading the state of 64 parameters takes time
            counts = self.attached_mid_step or not self._context.step
            if self._backward_from:
                self._updated_to = steps_taken(optimizer) if counts else 0
            elif self._optimizer_from:
                self._end_step(total_steps=steps_taken(optimizer) if counts else 0)
        except Guard.CAUGHT as error:
            self._context.guard.note(error, "optimizer_ends")

    def end_unhooked_step(self) -> None:
        """Ends the step of an optimizer without hooks, if parameters have changed since the backward.

        Its optimizer phase goes from the end of backward to here; of the first such step it is unknown.
        """
        # Without the count of micro-steps, one update ends a step at each call until the next backward
        if not self._parameters.are_needed or not self.micro_steps or self._context.mode == OFF:
            return
        if self._parameters.have_changed():
            # An attach may have put the hooks in place during this step: only another one without
            # them shows that the optimizer calls none, and so that its count of steps is unknown
            is_unhooked = self._parameters.showed_step or not self.attached_mid_step
            self._parameters.showed_step = True
            if is_unhooked:
                self._optimizer_from = self._optimizer_from or time.monotonic_ns()
                self._end_step()
            else:
                self._parameters.remember()
        # Without a change, what followed the last backward is another micro-step and no optimizer
        self._optimizer_from = 0

    def engine_step_begins(self, *, offloads: bool) -> None:
        """Starts the step of a DeepSpeed engine; *offloads*: its optimizer runs on the host."""
        self._parameters.are_needed = False
        self.in_engine, self.offloads_optimizer = True, offloads
        self._cpu_optimizer_from = 0
        self._begin_optimizer_phase()

    def engine_step_ends(self, outcome: Outcome | None, engine: int, total_steps: int = 0) -> None:
        """Ends the step of DeepSpeed engine number *engine*, which has taken *total_steps* steps.

        *outcome* is None when the step raised: the phase ends, and no step is counted.
        """
        # torch calls no post hook of an optimizer that raised, so its phase is still open
        self._inner_optimizer_ends()
        self.in_engine = False
        if self._context.mode == OFF or not self._optimizer_from:
            return
        if outcome is None:
            self._write_span(Phase.OPTIMIZER, self._optimizer_from, time.monotonic_ns())
            self._optimizer_from = 0
            self._context.enter(Phase.OTHER)
            return
        self._end_step(outcome, engine, total_steps)

    def _begin_optimizer_phase(self) -> None:
        if self._context.mode != OFF:
            self._close_forward()
            if self.on_phase_end is not None:
                self.on_phase_end(Phase.BACKWARD)
            self._optimizer_from = time.monotonic_ns()
            self._context.enter(Phase.OPTIMIZER)

    def _inner_optimizer_begins(self) -> None:
        """Starts the phase of an offloaded optimizer within a DeepSpeed engine's step."""
        if self.offloads_optimizer and self._optimizer_from:
            now_ns = time.monotonic_ns()
            self._write_span(Phase.OPTIMIZER, self._optimizer_from, now_ns)
            self._optimizer_from = self._cpu_optimizer_from = now_ns
            self._context.enter(Phase.CPU_OPTIMIZER)

    def _inner_optimizer_ends(self) -> None:
        if self._cpu_optimizer_from:
            now_ns = time.monotonic_ns()
            self._write_span(Phase.CPU_OPTIMIZER, self._cpu_optimizer_from, now_ns)
            self._optimizer_from, self._cpu_optimizer_from = now_ns, 0
            self._context.enter(Phase.OPTIMIZER)

    def _end_step(
        self, outcome: Outcome = Outcome.APPLIED, engine: int = 0, total_steps: int = 0
    ) -> None:
        context = self._context
        t_ns = time.monotonic_ns()
        if self.attached_mid_step:
            self._end_partial_step(t_ns, total_steps)
            return
        self._write_span(Phase.OPTIMIZER, self._optimizer_from, t_ns)
        self._optimizer_from = 0
        if total_steps and not context.step:  # the optimizer counts those before a restart, too
            context.add_metadata(resumed_step=total_steps - 1)
        self._before_step_mark(context.step + 1)
        t_ns = time.monotonic_ns()  # the agent's own work at the end of a step belongs to the step
        context.unit = 0
        flags = _IDLE if context.mode == IDLE else 0
        # an engine that steps twice without a backward has taken two steps
        is_repeat = engine and engine == self._last_engine
        # Step 1 counts also without a backward: CONTINUED needs a previous step
        if self.micro_steps or not context.step or is_repeat:
            context.step += 1
            self._last_micro_steps = self.micro_steps
        else:  # no backward since the last optimizer: a second optimizer of the same step
            flags |= _CONTINUED
        self.batches.write(t_ns)
        fields = context.step, self.step_start_ns, self._last_micro_steps, engine
        context.write(t_ns, Kind.STEP, outcome, 0, flags, 0, 0, *fields)
        self.step_start_ns = self._free_since = t_ns
        self.micro_steps = self._loss_from = 0
        context.enter(self._bare_phase(), (outcome, flags, *fields))
        self._last_engine = engine
        next_step = context.step + 1
        if context.mode != OFF:  # another thread may have switched the agent off
            control = control_step(next_step, context.steps_before) and self.on_boundary is None
            context.mode = IDLE if control else ON
        boundary = self.on_boundary  # another thread may set it to None
        if boundary is not None:
            boundary(next_step)
            # starting or stopping a trace between two steps belongs to neither step
            self.step_start_ns = self._free_since = time.monotonic_ns()
        context.detailed = context.mode == ON and next_step % DETAIL_EVERY == _DETAIL_AT
        context.timing = context.detailed

    def _end_partial_step(self, now_ns: int, total_steps: int) -> None:
        """Ends the step during which the agent was attached: the next step is seen whole."""
        context = self._context
        self.attached_mid_step, self.in_loop = False, True
        context.step = context.steps_before = total_steps
        context.add_metadata(steps_before=total_steps)
        # These counts are of a part of this step, and would be added to the next one
        self._before_first_step()
        self.micro_steps = self._forward_from = self._optimizer_from = 0
        self.batches.forget()
        self.step_start_ns = self._free_since = now_ns
        context.enter(Phase.OTHER, (Outcome.APPLIED, 0, total_steps, now_ns, 0, 0))
        context.unit, context.mode = 0, ON

    # ---- data ---------------------------------------------------------------------------------

    def data_begins(self) -> None:
        """Starts the data wait: the script requests the next batch from its DataLoader."""
        if self._context.mode != OFF and not self._backward_depth:
            self.end_unhooked_step()
            self._close_forward()
            self._loss_from = 0
            self._data_from = time.monotonic_ns()
            self.evaluation.batch_requested(self._data_from, self.in_loop and not self.micro_steps)
            self._context.enter(Phase.DATA_WAIT)

    def data_ends(self, flags: int = 0) -> None:
        """Ends the data wait; *flags*: FAILED where no batch came."""
        if self._data_from:
            self._free_since = time.monotonic_ns()
            self._write_span(Phase.DATA_WAIT, self._data_from, self._free_since, flags)
            self._data_from = 0
            self.evaluation.seen()
            self._may_start(self._free_since)
            self._context.enter(self._bare_phase())  # also of a later micro-step: it has a batch

    def _bare_phase(self) -> Phase:
        """Returns the phase of what follows a step or a batch unmarked: forward, without a wrapper."""
        unmarked = Phase.FORWARD if self.in_loop and not self._has_wrapper else Phase.OTHER
        return self.evaluation.phase or unmarked

    def _write_span(self, phase: Phase, start_ns: int, end_ns: int, flags: int = 0) -> None:
        if end_ns > start_ns and not self.attached_mid_step:
            self._context.write(end_ns, Kind.PHASE, 0, phase, flags, 0, 0, start_ns, 0, 0, 0)

    # ---- installation -------------------------------------------------------------------------

    def watch_backward(self, autograd: Any, patches: Patches) -> None:
        """Patches the function that ``Tensor.backward``, ``autograd.backward`` and ``grad`` share."""
        # Fallback for a private name: the public backward() does not see calls of autograd.grad()
        name = "_engine_run_backward" if hasattr(autograd, "_engine_run_backward") else "backward"
        hook = around(
            self._context,
            lambda tensors=(), *_, **__: self.backward_begins(tensors),
            lambda *_, **__: self.backward_ends(),
            active_from=OFF,  # the nesting depth must be right when the mode changes
        )
        patches.wrap(autograd, name, hook)

    def watch_autocast(self, autocast_mode: Any) -> None:
        """Patches the entry of autocast: accelerate opens it within the model, where no hook looks."""
        hook = around(self._context, after=self._autocast_begins, where="autocast", traced=True)
        self._autocast_patches.wrap(autocast_mode.autocast, "__enter__", hook)

    def _autocast_begins(self, *_: Any) -> None:
        if self.autocast is None:
            self.autocast = autocast_dtype(self._device_type) or None

    def leave_autocast(self) -> str:
        """Ends the watch, which some frameworks call at every module; returns the dtype, "" if none."""
        self._autocast_patches.restore()
        self.autocast = self.autocast or ""
        return self.autocast

    def watch_data(self, dataloader: Any, patches: Patches) -> None:
        """Patches the iterator class that every DataLoader uses."""
        hook = around(
            self._context, self._next_begins, self._next_ends, where="DataLoader", active_from=OFF
        )
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", hook)

    def _next_begins(self, iterator: Any) -> None:
        if iterator is not self._loader():
            # Weak: the __del__ of an iterator stops its workers, which a reference would keep alive
            self._loader = weakref.ref(iterator)
            self._describe_loader(iterator)
        self.data_begins()

    def _next_ends(self, _: None, batch: Any, iterator: Any) -> None:
        self.data_ends(Flag.FAILED if batch is RAISED else 0)
        if batch is RAISED:
            self.goal.iterator_ended(iterator)
        elif not self.evaluation.is_open:
            self._length = self.batches.loaded(batch)
            self.beginnings.batch_arrived(batch)

    def _describe_loader(self, iterator: Any) -> None:
        batches = getattr(iterator, "_index_sampler", None)
        size, sampler = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
        self._loader_settings = {
            "num_workers": int(getattr(iterator, "_num_workers", 0)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
            "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
            "batch_size": size if isinstance(size, int) else 0,
            "sampler": "" if sampler is None else type(sampler).__name__,
        }
