"""Counts the samples and tokens of a model's batches, and follows evaluations between them.

Only shapes are read, and an attention mask on the CPU. No tensor is kept. A forward of an evaluation,
one without gradients (a reference model) and one that a checkpoint repeats do not count. Where no
forward of a wrapped model was seen in a step, the batches of the DataLoader count.
"""

import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from zeromon.ring.codes import Kind, Padding, Phase
from zeromon.ring.model_metadata import ProcessMetadata
from zeromon_agents.runtime.around import Patches, around
from zeromon_agents.runtime.hook_context import OFF, HookContext

_IDS, _EMBEDDED, _MASK = "input_ids", "inputs_embeds", "attention_mask"
_NOT_INPUTS = frozenset((_MASK, "labels", "target", "targets", "position_ids", "token_type_ids"))
_MAX_MODELS = 8


class Count:
    """The samples and tokens that were received since the last step."""

    __slots__ = ("padding", "pairs", "positions", "samples", "tokens")

    def __init__(self) -> None:
        self.samples = self.tokens = self.positions = self.pairs = 0
        self.padding = Padding.NO_MASK

    def add(self, sizes: tuple[int, int], mask: Any) -> None:
        """Adds a batch of *sizes*: samples, and tokens of each, 0 where it holds none."""
        samples, length = sizes
        positions = tokens = samples * length
        if length and getattr(mask, "shape", None) == (samples, length):
            if mask.device.type == "cpu":
                tokens = int(torch.count_nonzero(mask))
                self.padding = max(self.padding, Padding.LEFT_OUT)
            else:
                self.padding = Padding.INCLUDED
        self.samples += samples
        self.tokens += tokens
        self.positions += positions
        self.pairs += positions * length


class Batches:
    """The batches of the step under way, by the model that received them."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._of_models: dict[int, Count] = {}
        self._of_loader: Count | None = None
        self.whole = False
        """A pipeline's schedule divides batches: what its stages and loaders have does not count."""

    def received(self, model: int, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        """Counts what the model with the id *model* is called with."""
        if not torch.is_grad_enabled():
            return
        inputs, counts = named_inputs(args, kwargs or {}), self._of_models
        sizes = sizes_of(inputs)
        if sizes is not None and (model in counts or len(counts) < _MAX_MODELS):
            if model not in counts:
                counts[model] = Count()
            counts[model].add(sizes, _attention_mask(inputs))

    def loaded(self, batch: Any) -> int:
        """Counts a batch of a DataLoader; returns its tokens a sequence, 0 where it holds none.

        Of a tuple the first part counts, because targets follow.
        """
        inputs = named_inputs(batch[:1] if isinstance(batch, (list, tuple)) else (batch,), {})
        sizes = sizes_of(inputs)
        if sizes is None:
            return 0
        count = self._of_loader
        if count is None:  # a step that ends meanwhile forgets it
            count = self._of_loader = Count()
        count.add(sizes, _attention_mask(inputs))
        return sizes[1]

    def forget(self) -> None:
        """Forgets what was counted since the last step."""
        self._of_models.clear()
        self._of_loader = None

    def write(self, now_ns: int) -> None:
        """Writes the count of the step that ends: that of the model which received most."""
        counts = self._of_models.values()
        largest = max(counts, key=lambda tally: (tally.positions, tally.samples), default=None)
        count = largest or (None if self.whole else self._of_loader)
        if count is not None and count.samples:
            # fmt: off
            self._context.write(now_ns, Kind.BATCH, count.padding, 0, 0, 0, 0,
                                count.samples, count.tokens if count.positions else -1,
                                count.positions, count.pairs)
            # fmt: on
        self.forget()


def sizes_of(inputs: list[tuple[str, Any]]) -> tuple[int, int] | None:
    """Returns samples, and tokens of each or 0, of the *inputs* of a model; None for no tensor.

    Token ids are ``input_ids``, else the first matrix of integers; ``inputs_embeds`` has a vector for
    each token. Without those, the first dimension of the first tensor counts samples.
    """
    first_shape = None
    for name, value in inputs:
        shape = getattr(value, "shape", None)
        # An array of NumPy has a shape, too, but no is_floating_point()
        if name in _NOT_INPUTS or not shape or not hasattr(value, "is_floating_point"):
            continue
        # A matrix of booleans is a mask
        is_ids = len(shape) == 2 and not (value.is_floating_point() or value.dtype is torch.bool)
        if is_ids or (name == _EMBEDDED and len(shape) == 3):
            return int(shape[0]), int(shape[1])
        first_shape = shape if first_shape is None else first_shape
    return None if first_shape is None else (int(first_shape[0]), 0)


def named_inputs(args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns names and values, what is in mappings and lists included; ``input_ids`` first."""
    inputs: list[tuple[str, Any]] = []
    for value in (*args, kwargs):
        # The abstract class is slow to ask, and most are tensors
        if type(value) is torch.Tensor:
            inputs.append(("", value))
        elif isinstance(value, Mapping):
            # A caller may pass input_ids=None beside inputs_embeds
            if value.get(_IDS) is not None:
                inputs.insert(0, (_IDS, value[_IDS]))
            inputs += value.items()
        elif isinstance(value, (list, tuple)):
            inputs += [("", element) for element in value]
        else:
            inputs.append(("", value))
    return inputs


def _attention_mask(inputs: list[tuple[str, Any]]) -> Any:
    for name, value in inputs:
        if name == _MASK and value is not None:
            return value
    return None


# ---- what ranks begin with and should have equal or different -----------------------------------

_BATCHES = 3
_MAX_TRIES = 64
_MAX_TENSORS = 64
_MAX_NUMBERS = 1024


def tensors_checksum(tensors: list[Any], max_numbers: int = _MAX_NUMBERS) -> int | None:
    """Returns a checksum of about *max_numbers*, spread over *tensors*; None where one is elsewhere."""
    if not tensors or not all(map(_is_here, tensors)):
        return None
    every = max(1, -(-len(tensors) // _MAX_TENSORS))
    chosen = tensors[::every]
    per_tensor, crc = max(1, max_numbers // len(chosen)), 0
    for tensor in chosen:
        # reshape() would copy the whole of a tensor that is not contiguous, so one row stands for it
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // per_tensor))]
        crc = zlib.crc32(array("d", sample.to(torch.float64).tolist()).tobytes(), crc)
    return crc


def _is_here(tensor: Any) -> bool:
    """Returns whether *tensor* is a plain one on the CPU with numbers in it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_quantized or tensor.is_nested)
    )


class Beginnings:
    """The checksums of the initial parameters, and of the first batches that the rank trains on."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._batches: list[int] = []
        self._newest: int | None = None
        self._tries = 0
        self.read_parameters = context.guard.guarded(self._read_parameters)

    def _read_parameters(self, optimizer: Any) -> None:
        """Writes the checksum of *optimizer*'s parameters, unless they are shards or on a device."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        # ZeRO-3 marks its parameters by ds_id, and each rank holds another part of them
        if all(type(p) is torch.nn.Parameter and not hasattr(p, "ds_id") for p in params):
            mark = tensors_checksum(params)
            if mark is not None:
                nbytes = sum(p.numel() * p.element_size() for p in params)
                initial: ProcessMetadata = {"params_mark": mark, "params_bytes": nbytes}
                self._context.add_metadata(initial=initial)

    def batch_arrived(self, batch: Any) -> None:
        """Keeps the checksum of a batch that came from a DataLoader."""
        if len(self._batches) < _BATCHES and self._tries < _MAX_TRIES:
            self._tries += 1
            tensors = [t for t in islice(_batch_tensors(batch), _MAX_TENSORS) if t.numel()]
            self._newest = tensors_checksum(tensors)

    def batch_trained(self) -> None:
        """A backward begins: the newest batch is one of training, and not of an evaluation."""
        if self._newest is not None and len(self._batches) < _BATCHES:
            self._batches.append(self._newest)
            if len(self._batches) == _BATCHES:
                self._context.add_metadata(batches=self._batches)
        self._newest = None


def _batch_tensors(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _batch_tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _batch_tensors(value)


# ---- evaluations: from ``model.eval()`` to ``model.train()`` -------------------------------------

# Some scripts put a frozen part of a model into evaluation mode and train on; some forget to go back. So
# what ``eval()`` began counts as an evaluation only when it ends with ``train()``, or when something ran
# without gradients before the next backward.


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
            self._close_batch(time.monotonic_ns())

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
            self._close_batch(now_ns)
        self._asked_ns = now_ns
        self._untrained = not (self.is_open or torch.is_grad_enabled())

    def backward_begins(self) -> None:
        """Ends the evaluation with the last thing that ran without gradients."""
        self._untrained = False
        if self._since:
            module = self._module()
            if not self._seen_ns and module is not None:
                self._never.add(module)
            self._close_batch(self._seen_ns)

    def stop(self) -> None:
        """Forgets the evaluation under way."""
        self._close_batch(0)

    def training_ends(self) -> None:
        """Ends the evaluation under way, if any, with its last forward."""
        self._close_batch(self._seen_ns if self._since else 0)

    def _close_batch(self, end_ns: int) -> None:
        since_ns, self._since, self._untrained = self._since, 0, False
        self._patches.restore()
        if end_ns > since_ns:
            self.on_end(since_ns, end_ns)
