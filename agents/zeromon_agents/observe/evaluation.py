"""Follows evaluations: from ``model.eval()`` to ``model.train()``, with the batches between.

Some scripts put a frozen part of a model into evaluation mode and train on; some forget to go back. So
what ``eval()`` began counts as an evaluation only when it ends with ``train()``, or when something ran
without gradients before the next backward.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zeromon.ring.codes import Phase
from zeromon_agents.runtime.around import Patches, around
from zeromon_agents.runtime.hook_context import OFF, HookContext


class Evaluation:
    """The evaluation under way, if there is one. All methods run on the training thread."""

    def __init__(self, context: HookContext) -> None:
        self.on_end: Callable[[int, int], None] = lambda *_: None
        """Called with the times of an evaluation that has ended."""
        self.functions: list[Phase] = []
        """Phases of a framework's functions under way, each as a whole, the outermost first."""
        self._context = context
        self._patches = Patches()
        """Patches of ``Module.train``: it runs once a module, so only an evaluation watches it."""
        self._module: Callable[[], Any] = lambda: None
        self._since = 0
        self._seen_ns = 0
        """When something without gradients ended last."""
        self._asked_ns, self._untrained = 0, False
        """When the last batch was requested, and whether nothing with gradients followed."""
        self._never: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules that were in evaluation mode while others were trained."""

    @property
    def is_open(self) -> bool:
        """True if a framework evaluates, or a model is in evaluation mode and was not trained since."""
        return bool(self.functions) or self._since > 0

    @property
    def phase(self) -> Phase | None:
        """The phase that a forward now belongs to; None for the training."""
        if self.functions:
            return self.functions[-1]
        return Phase.EVALUATION if self._since else None

    def begins(self, module: Any) -> None:
        """Notes that ``module.eval()`` has returned."""
        if not self.is_open and module not in self._never:
            self._module, self._since, self._seen_ns = weakref.ref(module), time.monotonic_ns(), 0
            watch = around(self._context, after=self._trained, active_from=OFF)
            self._patches.wrap(torch.nn.Module, "train", watch)

    def _trained(self, _: None, __: Any, module: Any, mode: bool = True) -> None:
        if mode and module is self._module():
            self._close(time.monotonic_ns())

    def seen(self) -> None:
        """Notes that a batch was taken, or that a forward has ended."""
        if self._since and not torch.is_grad_enabled():
            self._seen_ns = time.monotonic_ns()

    def forward_trains(self) -> bool:
        """Returns whether the forward that begins has gradients."""
        self._untrained = not torch.is_grad_enabled()
        return not self._untrained

    def batch_requested(self, now_ns: int, between_steps: bool) -> None:
        """Ends the evaluation where the request is the next one of training.

        A batch that nothing with gradients followed, and no backward, is an evaluation up to *now_ns*
        *between_steps* of the training, also without a call of ``eval()``.
        """
        if self._untrained and between_steps and not self.is_open:
            self.on_end(self._asked_ns, now_ns)
        if self._since and self._seen_ns and torch.is_grad_enabled():
            self._close(now_ns)
        self._asked_ns = now_ns
        self._untrained = not (self.is_open or torch.is_grad_enabled())

    def backward_begins(self) -> None:
        """Ends the evaluation with the last thing that ran without gradients."""
        self._untrained = False
        if self._since:
            module = self._module()
            if not self._seen_ns and module is not None:
                self._never.add(module)
            self._close(self._seen_ns)

    def stop(self) -> None:
        """Forgets the evaluation under way."""
        self._close(0)

    def _close(self, end_ns: int) -> None:
        since_ns, self._since, self._untrained = self._since, 0, False
        self._patches.restore()
        if end_ns > since_ns:
            self.on_end(since_ns, end_ns)
