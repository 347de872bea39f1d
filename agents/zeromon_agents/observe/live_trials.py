"""Tries a change in the live rank: on in the same steps of all ranks, and undone by itself.

A request is a file beside the rings, which the heartbeat checks once a second. Everything else happens
on the training thread between two steps, where no collective is under way. A block of steps is entered
only if all ranks agreed to it (:mod:`zeromon.ring.trial_words`); a rank agrees while the request is
there and was renewed lately. Where one rank does not, all ranks undo the change at the same step. So a
request whose command was killed ends by itself.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zeromon.ring.codes import Kind, TrialState
from zeromon.ring.trial_words import LEASE_SECONDS, MARGIN, REQUEST, WORD, WORDS, Change, Plan
from zeromon_agents.observe.step import Steps
from zeromon_agents.observe.torch_roles import Models, fsdp2_groups, param_groups
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext


class Trials:
    """Waits for requests, and tries one change at a time."""

    def __init__(
        self, context: HookContext, steps: Steps, models: Models, run_dir: Path, rank: int
    ) -> None:
        self._context, self._steps, self._models = context, steps, models
        self._file, self._words = run_dir / REQUEST, run_dir / WORDS
        self._rank = rank
        self._plan: Plan | None = None
        self._served = 0
        self._seen_ns = 0
        self._word = -1
        """The open file of words; -1 without a plan."""
        self._block = 0
        """The block to enter next."""
        self._agreed = False
        self._change: Any = None
        """The generator of the change, made or only examined."""
        self._is_on = False
        self._last = 0
        """The step before which the training thread came here last."""
        self._why = ""
        """Why this rank agrees to no other block."""
        self._then: Any = None

    @property
    def is_open(self) -> bool:
        """True if a change is being tried."""
        return self._plan is not None

    # ---- the heartbeat's thread ---------------------------------------------------------------

    def check(self) -> None:
        """Accepts a new request."""
        if self._plan is not None:
            return
        try:
            seen_ns = self._file.stat().st_mtime_ns
        except OSError:
            return
        if seen_ns != self._seen_ns:
            self._seen_ns = seen_ns
            self._accept_plan()

    def _accept_plan(self) -> None:
        content = json.loads(self._file.read_text())
        content["change"] = Change(content["change"])  # the closed list
        content["rings"] = tuple(content["rings"])
        plan = Plan(**content)
        mine = self._context.ring.path.name
        if plan.number <= self._served or plan.rings[self._rank : self._rank + 1] != (mine,):
            return
        self._served = plan.number
        if self._steps.on_boundary is not None:
            self._write_state(TrialState.REFUSED, plan, 0, "a trace is being recorded")
            return
        self._word = os.open(self._words, os.O_RDWR | os.O_NOFOLLOW)
        self._block, self._agreed, self._last, self._why = 0, False, 0, ""
        self._plan = plan
        # Last: from here on the training thread may call it
        self._steps.on_boundary = self._context.guard.guarded(self._boundary)

    # ---- the training thread ------------------------------------------------------------------

    def _boundary(self, next_step: int) -> None:
        """Runs between two steps; *next_step* is the next one."""
        plan = self._plan
        if plan is None:
            self._steps.on_boundary = None
            return
        mode, self._context.mode = self._context.mode, OFF  # what a change does is not training
        try:
            if self._is_on:
                next(self._change)
            # A second optimizer of the same step comes here with the same number
            if next_step != self._last:
                self._last = next_step
                self._advance_plan(plan, next_step)
        except Guard.CAUGHT as error:
            self._end(plan, next_step, TrialState.WITHDRAWN, f"{type(error).__name__}: {error}")
        finally:
            self._context.mode = mode
            # After the mode is restored: pause() sets it to OFF for good
            follow_up = self._then if self._plan is None else None
            if follow_up is not None:
                self._then = None
                follow_up()

    def _advance_plan(self, plan: Plan, next_step: int) -> None:
        start = plan.start(self._block)
        if next_step > start:
            reason = f"step {start} was over when the rank read the request"
            self._end(plan, next_step, TrialState.REFUSED, reason)
        elif next_step == start:
            self._enter_block(plan, next_step)
        elif next_step == start - MARGIN or (self._block == 0 and next_step < start - MARGIN):
            if self._models.order is None:
                self._models.order = []  # the next step shows in which order units run
            elif not self._agreed and self._block < plan.blocks:
                self._agree_to_block(plan)

    def _agree_to_block(self, plan: Plan) -> None:
        """Writes this rank's word for the next block, unless the request is gone."""
        if not self._why:
            self._why = self._withdrawn()
        if not self._why and self._change is None and (self._block == 0 or plan.is_on(self._block)):
            try:
                self._change = CHANGES[plan.change](self._models)
                next(self._change)
            except Unfit as unfit:
                self._change, self._why = None, str(unfit)
        if self._why:
            if self._block == 0:
                self._end(plan, self._last, TrialState.REFUSED, self._why)
            return
        os.pwrite(self._word, WORD.pack(plan.number, self._block + 1), WORD.size * self._rank)
        self._agreed = True
        if self._block == 0:
            self._write_state(TrialState.READY, plan, self._last)

    def _withdrawn(self) -> str:
        """Why the request does not hold any more; "" while it does."""
        try:
            age = time.time() - self._file.stat().st_mtime
        except OSError:
            return "it was withdrawn"
        return "" if age < LEASE_SECONDS else f"the command was silent for {age:.0f} s"

    def _enter_block(self, plan: Plan, next_step: int) -> None:
        """Begins a block, or ends the trial: with the last block, or where a rank did not agree."""
        block = self._block
        if block == plan.blocks:
            self._end(plan, next_step, TrialState.DONE)
            return
        ranks = range(len(plan.rings))
        agreed = list(WORD.iter_unpack(os.pread(self._word, WORD.size * len(ranks), 0)))
        silent = [r for r in ranks if agreed[r][0] != plan.number or agreed[r][1] <= block]
        if silent:
            state = TrialState.WITHDRAWN if block else TrialState.REFUSED
            self._end(plan, next_step, state, self._why or f"rank {silent[0]} did not agree")
            return
        cost_ns = 0
        is_on = plan.is_on(block)
        if is_on and not self._is_on:
            next(self._change)
            self._is_on = True
        elif not is_on:
            cost_ns = self._undo_change()
        self._write_state(TrialState.ON if is_on else TrialState.OFF, plan, next_step, cost_ns=cost_ns)
        self._block, self._agreed = block + 1, False

    def _undo_change(self) -> int:
        """Undoes the change; returns how long that took, nanoseconds."""
        change: Generator[None] | None
        change, self._change = self._change, None
        self._is_on = False
        began_ns = time.monotonic_ns()
        if change is not None:
            change.close()
        return time.monotonic_ns() - began_ns

    def _end(self, plan: Plan, step: int, state: TrialState, reason: str = "") -> None:
        self._plan, self._models.order = None, None
        self._steps.on_boundary = None
        try:
            cost_ns = self._undo_change()
        except Guard.CAUGHT as error:
            cost_ns, reason = 0, f"cannot be undone: {type(error).__name__}: {error}"
            self._context.guard.note(error, "undo of a trial")
        os.close(self._word)
        self._word = -1
        self._write_state(state, plan, step, reason, cost_ns)

    def after(self, work: Any) -> bool:
        """Ends the trial as soon as all ranks can, then calls *work*; returns False without a trial."""
        if self._plan is None:
            return False
        self._why, self._then = "the agent stops", work
        return True

    def close(self, reason: str) -> None:
        """Undoes a change at once: the script itself removes the agent, at one place of all ranks."""
        plan = self._plan
        if plan is not None:
            self._end(plan, self._context.step + 1, TrialState.WITHDRAWN, reason)

    def _write_state(
        self, state: TrialState, plan: Plan, step: int, reason: str = "", cost_ns: int = 0
    ) -> None:
        text_id = self._context.text(reason) if reason else 0
        self._context.emit(Kind.TRIAL, plan.number, step, text_id, cost_ns, op=state)


# ---- the changes that can be tried in a live rank -----------------------------------------------


class Unfit(Exception):
    """The change cannot be made in this process."""


def shared_collections(_: Models) -> Iterator[None]:
    """Python collects no garbage by itself; the undoing collects, at the same step of all ranks.

    Nothing is frozen: that matters to a full collection alone, and the script may have frozen objects.
    """
    if not gc.isenabled():
        raise Unfit("automatic garbage collection is off already")
    yield
    try:
        gc.disable()
        while True:
            yield
    finally:
        gc.collect(1)
        gc.enable()


def keep_gathered(models: Models) -> Iterator[None]:
    """FSDP2 keeps the parameters of each unit from its forward to its backward."""
    groups = [group for root in models.live()[0] for group in fsdp2_groups(root)]
    prior_infos = [(g, info) for g in groups if (info := g.post_forward_mesh_info) is not None]
    if not prior_infos:
        raise Unfit("no unit of FSDP2 frees its parameters after forward")
    yield
    try:
        for group, _ in prior_infos:
            group.post_forward_mesh_info = None
        while True:
            yield
            _free_gathered(prior_infos)
    finally:
        for group, info in prior_infos:
            group.post_forward_mesh_info = info
        _free_gathered(prior_infos)


def _free_gathered(units: list[tuple[Any, Any]]) -> None:
    """Frees what a forward without a backward has left: the optimizer does not update these copies."""
    for group, _ in units:
        if group.is_unsharded:
            group.reshard()


def prefetch_next(models: Models) -> Iterator[None]:
    """Each unit of FSDP2 asks for the parameters of the next one, in the order of the last forward."""
    roots = models.live()[0]
    by_group = {
        id(group): module
        for root in roots
        for module in root.modules()
        if module is not root and hasattr(module, "_get_fsdp_state")
        for group in param_groups(module._get_fsdp_state())
    }
    ran = dict.fromkeys(id(group) for group in models.order or ())
    units = list(dict.fromkeys(by_group[group] for group in ran if group in by_group))
    if len(units) < 2:
        raise Unfit("fewer than two units of FSDP2 ran in the last step")
    states = [unit._get_fsdp_state() for unit in units]
    originals = [(s, s._states_to_forward_prefetch, s._states_to_backward_prefetch) for s in states]
    if any(forward or backward for _, forward, backward in originals):
        raise Unfit("the script has set what units prefetch")
    groups = [group for root in roots for group in fsdp2_groups(root)]
    asynchronous = [(group, group.unshard_async_op) for group in groups]
    on_cpu = any(group.device.type == "cpu" for group in groups)
    yield
    try:
        for group in groups if on_cpu else ():  # gloo has no stream to run ahead on
            group.unshard_async_op = True
        for this, next_unit in pairwise(units):
            this.set_modules_to_forward_prefetch([next_unit])
            next_unit.set_modules_to_backward_prefetch([this])
        while True:
            yield
    finally:
        for state, forward, backward in originals:
            state._states_to_forward_prefetch = forward
            state._states_to_backward_prefetch = backward
        for group, was in asynchronous:
            group.unshard_async_op = was


CHANGES: dict[Change, Callable[[Models], Iterator[None]]] = {
    Change.SHARED_COLLECTIONS: shared_collections,
    Change.KEEP_GATHERED: keep_gathered,
    Change.PREFETCH: prefetch_next,
}
