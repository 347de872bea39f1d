"""Steps and phases, without any call in the script.

Optimizer steps come from torch's global optimizer hooks, or from the DeepSpeed engine that owns the
optimizer; backward from the one function that every
backward passes; forward from the wrappers (DDP, FSDP) where there is one, else it is what lies
between the data and the backward; data wait from the DataLoader's iterator.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from zeromon.events import Flag, Kind, Outcome, Phase
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.recorder import IDLE, OFF, ON, Recorder

DETAIL_EVERY, _DETAIL_AT = (
    9,
    4,
)  # not the rhythm of idle steps: their neighbours must be as any other
_SETTLED = 10
_OFTEN, _OFTEN_UNTIL, _SELDOM = 8, 250, 64
_MOST_TOLD = 32
_MOST_COUNTS = 64


def idle_step(step: int, before: int = 0) -> bool:
    """Whether *step* runs with idle hooks: the same steps on every rank, so that all idle together.

    Often at first, for a figure soon; then seldom. *before*: steps taken before the agent came.
    """
    seen = step - before
    if seen <= _SETTLED:
        return False
    return step % (_OFTEN if seen < _OFTEN_UNTIL else _SELDOM) == 0


def steps_taken(optimizer: Any) -> int:
    """How many steps *optimizer* says it has taken; 0 where it does not count, or on a device."""
    states = getattr(optimizer, "state", {})
    counts = (state.get("step") for state in islice(states.values(), _MOST_COUNTS))
    return max((int(n) for n in map(known_number, counts) if n is not None), default=0)


def known_number(value: Any) -> float | None:
    """*value* as a float where reading it costs no wait for a device and no collective, else None."""
    if type(value) is torch.Tensor:
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


class Steps:
    """Follows the training loop and writes its phases and steps."""

    def __init__(
        self,
        recorder: Recorder,
        before_step_mark: Callable[[int], None],
        before_first_step: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._before_first_step = before_first_step
        self._before_step_mark = before_step_mark
        now = time.monotonic_ns()
        self.step_start_ns = now
        self._free_since = now
        self._micro_steps = 0
        self._micro_of_last = 0
        self._forward_from = 0
        self._forward_seen_ns = 0
        self._has_wrapper = False
        self._backward_depth = 0
        self._backward_from = 0
        self._open_optimizers: list[int] = []
        self._optimizer_from = 0
        self._cpu_optimizer_from = 0
        self._in_engine = False
        self._engine_of_last = 0
        self.constructing = 0
        """DeepSpeed engines under construction: they step their optimizer once, to make its state."""
        self.offloads_optimizer = False
        """Whether the optimizer of the engine that steps now runs on the host."""
        self.joining = False
        """Whether a step is under way of which the agent has not seen the beginning."""
        self._data_from = 0
        self._loader: Callable[[], Any] = lambda: None
        """A weak reference to the iterator that was asked last."""
        self._loader_facts: dict[str, Any] = {}
        self._loader_told: dict[str, Any] = {}
        self._times_told = 0
        self._length = 0
        """Tokens of a sequence in the last batch, 0 where it has none."""
        self.on_optimizer: Callable[[Any], None] | None = None
        """Called with the optimizer before its step; must not raise."""
        self.on_boundary: Callable[[int], None] | None = None
        """Called between two steps with the number of the one that begins; must not raise."""
        self.on_backward: Callable[[], None] | None = None
        """Called when the first backward of a step begins, when activations are at their most."""

    # ---- forward ------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The outermost wrapped module starts its forward."""
        if self._backward_depth or self._recorder.mode == OFF:
            return  # recomputation of activation checkpointing belongs to backward
        self._close_forward()
        self._has_wrapper = True
        self._forward_from = self._forward_seen_ns = time.monotonic_ns()
        self._recorder.phase = Phase.FORWARD

    def forward_seen(self) -> None:
        """Forward has come at least this far; it ends where it was last seen."""
        if self._forward_from and not self._backward_depth:
            self._forward_seen_ns = time.monotonic_ns()

    def forward_ends(self) -> None:
        """The outermost wrapped module has returned."""
        self.forward_seen()
        self._close_forward()

    def _close_forward(self) -> None:
        if self._forward_from:
            self._span(Phase.FORWARD, self._forward_from, self._forward_seen_ns)
            self._forward_from = 0
            self._recorder.phase = Phase.OTHER

    # ---- backward -----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """The autograd engine starts."""
        self._backward_depth += 1
        if self._backward_depth > 1 or self._recorder.mode == OFF:
            return
        if self.on_backward is not None and not self._micro_steps:
            self.on_backward()
        if self._loader_facts:
            self._tell_loader()
        now = time.monotonic_ns()
        if self._forward_from:
            self._close_forward()
        elif not self._has_wrapper:
            self._span(Phase.FORWARD, self._free_since, now, Flag.INFERRED)
        self._backward_from = now
        self._recorder.phase = Phase.BACKWARD

    def backward_ends(self) -> None:
        """The autograd engine has returned."""
        self._backward_depth -= 1
        if self._backward_depth or not self._backward_from:
            return
        self._micro_steps += 1
        self._free_since = time.monotonic_ns()
        self._span(Phase.BACKWARD, self._backward_from, self._free_since)
        self._backward_from = 0
        self._recorder.phase = Phase.OTHER

    # ---- optimizer ----------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step; nested ones (ZeroRedundancyOptimizer) count once."""
        try:
            if self.constructing:
                return
            if self._in_engine:
                self._inner_optimizer_begins()
                return
            if id(optimizer) in self._open_optimizers:
                self._open_optimizers.clear()  # its last step raised: torch calls no post hook then
            self._open_optimizers.append(id(optimizer))
            if len(self._open_optimizers) > 1:
                return
            if self.on_optimizer is not None:
                self.on_optimizer(optimizer)  # guarded: what it does must not cost the step
            self._begin_optimizer_phase()
        except Guard.CAUGHT as error:
            self._recorder.guard.note(error, "optimizer_begins")

    def optimizer_ends(self, optimizer: Any = None) -> None:
        """An optimizer has stepped: the step ends here, unless another one follows."""
        try:
            if self.constructing:
                return
            if self._in_engine:
                self._inner_optimizer_ends()
                return
            if self._open_optimizers:
                self._open_optimizers.pop()
            if not self._open_optimizers and self._recorder.mode != OFF and self._optimizer_from:
                self._end_step(taken=steps_taken(optimizer) if self.joining else 0)
        except Guard.CAUGHT as error:
            self._recorder.guard.note(error, "optimizer_ends")

    def engine_step_begins(self, *, offloads: bool) -> None:
        """A DeepSpeed engine takes its optimizer step; *offloads*: on the host."""
        self._in_engine, self.offloads_optimizer = True, offloads
        self._cpu_optimizer_from = 0
        self._begin_optimizer_phase()

    def engine_step_ends(self, outcome: Outcome | None, engine: int, taken: int = 0) -> None:
        """It has, its *taken*-th; None: it raised, and there is no step to mark."""
        self._inner_optimizer_ends()
        self._in_engine = False
        if self._recorder.mode == OFF or not self._optimizer_from:
            return
        if outcome is None:
            self._span(Phase.OPTIMIZER, self._optimizer_from, time.monotonic_ns())
            self._optimizer_from = 0
            self._recorder.phase = Phase.OTHER
            return
        self._end_step(outcome, engine, taken)

    def _begin_optimizer_phase(self) -> None:
        if self._recorder.mode != OFF:
            self._close_forward()
            self._optimizer_from = time.monotonic_ns()
            self._recorder.phase = Phase.OPTIMIZER

    def _inner_optimizer_begins(self) -> None:
        """The optimizer within an engine's step; on the host its time is a phase of its own."""
        if self.offloads_optimizer and self._optimizer_from:
            now = time.monotonic_ns()
            self._span(Phase.OPTIMIZER, self._optimizer_from, now)
            self._optimizer_from = self._cpu_optimizer_from = now
            self._recorder.phase = Phase.CPU_OPTIMIZER

    def _inner_optimizer_ends(self) -> None:
        if self._cpu_optimizer_from:
            now = time.monotonic_ns()
            self._span(Phase.CPU_OPTIMIZER, self._cpu_optimizer_from, now)
            self._optimizer_from, self._cpu_optimizer_from = now, 0
            self._recorder.phase = Phase.OPTIMIZER

    def _end_step(
        self, outcome: Outcome = Outcome.APPLIED, engine: int = 0, taken: int = 0
    ) -> None:
        recorder = self._recorder
        now = time.monotonic_ns()
        if self.joining:
            self._begin_to_count(now, taken)
            return
        self._span(Phase.OPTIMIZER, self._optimizer_from, now)
        self._optimizer_from = 0
        self._before_step_mark(recorder.step + 1)
        now = time.monotonic_ns()  # what we do at the end of a step is part of its cost
        recorder.phase = Phase.OTHER
        recorder.unit = 0
        flags = Flag.IDLE if recorder.mode == IDLE else Flag(0)
        again = (
            engine and engine == self._engine_of_last
        )  # without a backward in between, but a step
        if self._micro_steps or not recorder.step or again:
            recorder.step += 1
            self._micro_of_last = self._micro_steps
        else:  # no backward since the last optimizer: another optimizer of the same step
            flags |= Flag.CONTINUED
        # fmt: off
        recorder.write(now, Kind.STEP, outcome, 0, flags, 0, 0,
                       recorder.step, self.step_start_ns, self._micro_of_last, engine)
        # fmt: on
        self.step_start_ns = self._free_since = now
        self._micro_steps = 0
        self._engine_of_last = engine
        following = recorder.step + 1
        if recorder.mode != OFF:  # the agent may have been switched off meanwhile
            idle = idle_step(following, recorder.before) and self.on_boundary is None
            recorder.mode = IDLE if idle else ON
        boundary = self.on_boundary  # another thread may take it away
        if boundary is not None:
            boundary(following)
            # what a trace costs between two steps belongs to neither
            self.step_start_ns = self._free_since = time.monotonic_ns()
        recorder.detailed = recorder.mode == ON and following % DETAIL_EVERY == _DETAIL_AT

    def _begin_to_count(self, now: int, taken: int) -> None:
        """The step that was under way when the agent came has ended: the next one is seen whole."""
        recorder = self._recorder
        self.joining = False
        recorder.step = recorder.before = taken
        recorder.meta(steps_before=taken)
        self._before_first_step()
        self._micro_steps = self._forward_from = self._optimizer_from = 0
        self.step_start_ns = self._free_since = now
        recorder.phase, recorder.unit, recorder.mode = Phase.OTHER, 0, ON

    # ---- data ---------------------------------------------------------------------------------

    def data_begins(self) -> None:
        """The loop asks its DataLoader for the next batch."""
        if self._recorder.mode != OFF and not self._backward_depth:
            self._close_forward()
            self._data_from = time.monotonic_ns()
            self._recorder.phase = Phase.DATA_WAIT

    def data_ends(self) -> None:
        """The batch has come."""
        if self._data_from:
            self._free_since = time.monotonic_ns()
            self._span(Phase.DATA_WAIT, self._data_from, self._free_since)
            self._data_from = 0
            self._recorder.phase = Phase.OTHER

    def _span(self, phase: Phase, start_ns: int, end_ns: int, flags: int = 0) -> None:
        if end_ns > start_ns and not self.joining:
            self._recorder.write(end_ns, Kind.PHASE, 0, phase, flags, 0, 0, start_ns, 0, 0, 0)

    # ---- installation -------------------------------------------------------------------------

    def watch_backward(self, autograd: Any, patches: Patches) -> None:
        """Wraps the function that ``Tensor.backward``, ``autograd.backward`` and ``grad`` share."""
        name = "_engine_run_backward" if hasattr(autograd, "_engine_run_backward") else "backward"
        original = patches.original(autograd, name)
        note = self._recorder.guard.note

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                self.backward_begins()
            except Guard.CAUGHT as error:
                note(error, name)
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    self.backward_ends()
                except Guard.CAUGHT as error:
                    note(error, name)

        run_backward.__name__ = name
        patches.set(autograd, name, run_backward)

    def watch_data(self, dataloader: Any, patches: Patches) -> None:
        """Wraps the iterator that every DataLoader uses."""
        iterator = dataloader._BaseDataLoaderIter
        original = patches.original(iterator, "__next__")
        note = self._recorder.guard.note

        def next_batch(loader: Any) -> Any:
            try:
                if loader is not self._loader():
                    self._loader = weakref.ref(loader)
                    self._describe_loader(loader)
                self.data_begins()
            except Guard.CAUGHT as error:
                note(error, "DataLoader")
            try:
                batch = original(loader)
            finally:
                try:
                    self.data_ends()
                except Guard.CAUGHT as error:
                    note(error, "DataLoader")
            try:
                self._length = sequence_length(batch)
            except Guard.CAUGHT as error:
                note(error, "DataLoader")
            return batch

        patches.set(iterator, "__next__", next_batch)

    def _describe_loader(self, iterator: Any) -> None:
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        self._loader_facts = {
            "num_workers": int(getattr(iterator, "_num_workers", 0)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
            "batch_size": size if isinstance(size, int) else 0,
        }

    def _tell_loader(self) -> None:
        """What is trained on, when backward begins: no backward follows the loader of an evaluation.

        Told again only when it differs: a loop makes a new iterator each epoch.
        """
        told = self._loader_told
        same = told.get("length", self._length) == self._length
        facts = {**self._loader_facts, "length": self._length if same else 0}
        if facts != told and self._times_told < _MOST_TOLD:  # a loop may train on two in turns
            self._loader_told = facts
            self._times_told += 1
            self._recorder.meta(loader=facts)


def sequence_length(batch: Any) -> int:
    """Tokens of a sequence in a batch of ``input_ids`` or that begins with such a tensor; else 0."""
    first: Any = batch
    if isinstance(batch, Mapping):
        first = batch.get("input_ids")
    elif isinstance(batch, (list, tuple)) and batch:
        first = batch[0]
    is_float = getattr(first, "is_floating_point", None)
    is_tokens = is_float is not None and not is_float() and len(first.shape) == 2
    return int(first.shape[1]) if is_tokens else 0
