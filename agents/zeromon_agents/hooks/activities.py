"""Work of a loop beside training: checkpoints, evaluations, generation, compilation, garbage.

Each is a phase of its own. The function that ends last on the training thread owns the time: a
``torch.save`` within ``Engine.save_checkpoint`` adds its bytes to the outer one. What another thread
does, such as the writing of an asynchronous checkpoint, is recorded and belongs to no step.
"""

import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromon.ring.codes import Activity, Flag, Kind, Phase
from zeromon_agents.hooks.backend import Backend, ImportHook, Services
from zeromon_agents.hooks.fsdp1 import WRAPPER
from zeromon_agents.runtime.around import RAISED, SKIP, around
from zeromon_agents.runtime.hook_context import OFF

DCP = "torch.distributed.checkpoint"
ENGINE = "deepspeed.runtime.engine"
COMPILER = "torch._dynamo.callback"
CUDA_GRAPHS = "torch.cuda.graphs"

_SAVE, _LOAD = (Phase.CHECKPOINT, Activity.SAVE), (Phase.CHECKPOINT, Activity.LOAD)
_EVALUATION = (Phase.EVALUATION, Activity.NONE)
_GENERATION = (Phase.GENERATION, Activity.NONE)
_WRAP = (Phase.OTHER, Activity.WRAP)
FUNCTIONS = (
    ("torch", "save", _SAVE),
    ("torch", "load", _LOAD),
    ("torch.serialization", "save", _SAVE),
    ("torch.serialization", "load", _LOAD),
    (DCP, "save", _SAVE),
    (DCP, "async_save", _SAVE),
    (DCP, "load", _LOAD),
    (f"{DCP}.state_dict_saver", "save", _SAVE),
    (f"{DCP}.state_dict_saver", "async_save", _SAVE),
    (f"{DCP}.state_dict_loader", "load", _LOAD),
    ("safetensors.torch", "save_file", _SAVE),
    ("safetensors.torch", "load_file", _LOAD),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _WRAP),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.__init__", _WRAP),
    (WRAPPER, "FullyShardedDataParallel.__init__", _WRAP),
    (ENGINE, "DeepSpeedEngine.__init__", _WRAP),
    (ENGINE, "DeepSpeedEngine.save_checkpoint", _SAVE),
    (ENGINE, "DeepSpeedEngine.load_checkpoint", _LOAD),
    ("accelerate.accelerator", "Accelerator.save_state", _SAVE),
    ("accelerate.accelerator", "Accelerator.load_state", _LOAD),
    ("transformers.trainer", "Trainer._save_checkpoint", _SAVE),
    ("transformers.trainer", "Trainer._load_from_checkpoint", _LOAD),
    ("transformers.trainer", "Trainer.evaluate", _EVALUATION),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint", _SAVE),
    ("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop.run", _EVALUATION),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint", _SAVE),
    ("pytorch_lightning.loops.evaluation_loop", "_EvaluationLoop.run", _EVALUATION),
    ("transformers.generation.utils", "GenerationMixin.generate", _GENERATION),
    ("trl.generation.vllm_generation", "VLLMGeneration.generate", _GENERATION),
    ("vllm.entrypoints.llm", "LLM.generate", _GENERATION),
    ("deepspeed.runtime.hybrid_engine", "DeepSpeedHybridEngine.generate", _GENERATION),
)
"""Module, function or method, and what it does. A function that two modules hold stands for each."""

_WITHOUT_GRADIENTS = (Phase.EVALUATION, Phase.GENERATION)
"""The phases that forwards within them belong to."""
_MIN_COLLECTION_NS = 200_000
"""A shorter collection belongs to the phase in which it happened."""
_MAX_FILES = 4096
_MAX_NUMBER = (1 << 53) - 1


class _Begun(NamedTuple):
    phase: Phase
    start_ns: int
    before: int
    """The phase that goes on afterwards."""
    in_training: bool
    """True if the training thread runs it."""
    where: tuple[Any, ...] = ()
    """The arguments that may be a path or a file."""
    maps: bool = False
    """The file is mapped, and not read into memory."""


class Activities(Backend):
    """The hooks on everything in :data:`FUNCTIONS`, on the compiler and on the garbage collector."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._open: list[_Begun] = []
        """On the training thread, the outermost first."""
        self._nbytes = 0
        """Saved or loaded within the outermost checkpoint function."""
        self._collection_ns = 0
        self._compilation: _Begun | None = None
        self._forget: list[Callable[[], Any]] = []
        self.steps.evaluation.on_end = functools.partial(self._write, Phase.EVALUATION)

    def hooks(self) -> Iterable[ImportHook]:
        """Patches each module once, when it is loaded."""
        modules = dict.fromkeys(module for module, _, _ in FUNCTIONS)
        return (
            *((module, self._watch_functions) for module in modules),
            ("torch.nn.modules.module", self._watch_evaluation),
            (COMPILER, self._watch_compiler),
            (CUDA_GRAPHS, self._watch_capture),
            ("gc", self._watch_collections),
        )

    def _watch_functions(self, module: Any) -> None:
        for name, function, (phase, activity) in FUNCTIONS:
            if name == module.__name__:
                self._watch(module, function, phase, activity)
        if module.__name__ == ENGINE:  # it does not call Module.eval
            self.wrap(module.DeepSpeedEngine, "eval", after=self._evaluates_engine)

    def _watch(self, module: Any, function: str, phase: Phase, activity: Activity) -> None:
        begin_hook = functools.partial(self._begins, phase)
        end_hook = functools.partial(self._ends, activity)
        hook = around(self.context, begin_hook, end_hook, where=function)
        self.patches.wrap_in(module, function, hook)

    # ---- functions ----------------------------------------------------------------------------

    def _begins(self, phase: Phase, *args: Any, **kwargs: Any) -> Any:
        in_training = self.steps.is_training_thread()
        if phase is Phase.OTHER and self.steps.in_loop:
            return SKIP  # a model beside the one that is trained
        if in_training and self.context.phase == Phase.DATA_WAIT:
            return SKIP  # a data set that reads its samples with torch.load
        phases = self.steps.evaluation.functions
        if in_training and phase is Phase.GENERATION and Phase.EVALUATION in phases:
            return SKIP  # a framework evaluates what the model generates
        files = (*args[:3], *kwargs.values()) if phase is Phase.CHECKPOINT else ()
        paths = tuple(filter(_is_place, files))
        maps = bool(kwargs.get("mmap"))
        opening = _Begun(phase, time.monotonic_ns(), self.context.phase, in_training, paths, maps)
        if in_training:
            if not self._open:
                self._nbytes = 0
            self._open.append(opening)
            self.context.enter(phase)
            if phase in _WITHOUT_GRADIENTS:
                phases.append(phase)
        return opening

    def _ends(self, activity: Activity, opening: _Begun | None, result: Any, *_: Any) -> None:
        if opening is None:
            return
        end_ns = time.monotonic_ns()
        nbytes = 0 if result is RAISED else sum(map(_bytes_at, opening.where))
        if not opening.in_training:
            self._write(opening.phase, opening.start_ns, end_ns, activity, nbytes, Flag.ASYNC)
            return
        self._open.remove(opening)
        self.context.enter(opening.before)
        if opening.phase in _WITHOUT_GRADIENTS:
            self.steps.evaluation.functions.pop()
        # what a function within has written is a part of what is at the outer one's path
        self._nbytes = max(self._nbytes, nbytes) if opening.where else self._nbytes + nbytes
        if not any(outer.phase is opening.phase for outer in self._open):
            loads = activity is Activity.LOAD and result is not RAISED and not opening.maps
            file = next(filter(None, map(_file_at, opening.where)), 0) if loads else 0
            self._write(opening.phase, opening.start_ns, end_ns, activity, self._nbytes, 0, file)
            self._nbytes = 0
        # async_save returns a future, or an AsyncSaveResponse that has one
        upload = getattr(result, "upload_completion", result)
        if activity is Activity.SAVE and callable(getattr(upload, "add_done_callback", None)):
            write = self.context.guard.guarded(functools.partial(self._written, end_ns))
            upload.add_done_callback(write)

    def _written(self, start_ns: int, _: Any) -> None:
        """An asynchronous checkpoint is on the disk."""
        self._write(Phase.CHECKPOINT, start_ns, time.monotonic_ns(), Activity.SAVE, 0, Flag.ASYNC)

    # ---- evaluation ---------------------------------------------------------------------------

    def _watch_evaluation(self, module: Any) -> None:
        self.wrap(module.Module, "eval", after=self._evaluation_begins)

    def _evaluation_begins(self, _: None, result: Any, module: Any) -> None:
        if result is not RAISED and self.steps.is_training_thread():
            self.steps.evaluation.begins(module)

    def _evaluates_engine(self, _: None, result: Any, engine: Any) -> None:
        self._evaluation_begins(None, result, engine.module)

    # ---- compiler -----------------------------------------------------------------------------

    def _watch_compiler(self, module: Any) -> None:
        handler = module.callback_handler
        on_start, on_end = map(self.context.guard.guarded, (self._compile_begins, self._compiled))
        handler.register_start_callback(on_start)
        handler.register_end_callback(on_end)
        self._forget += [
            functools.partial(handler.remove_start_callback, on_start),
            functools.partial(handler.remove_end_callback, on_end),
        ]

    def _compile_begins(self, *_: Any) -> None:
        """The outermost compilation begins; torch calls this once for those within it."""
        prior_phase, in_training = self.context.phase, self.steps.is_training_thread()
        self._compilation = _Begun(Phase.COMPILE, time.monotonic_ns(), prior_phase, in_training)
        if in_training:
            self.context.enter(Phase.COMPILE)

    def _compiled(self, *args: Any) -> None:
        opening, self._compilation = self._compilation, None
        if opening is None or self.context.mode == OFF:
            return
        name = str(getattr(args[0], "compile_id", "") if args else "")
        # FRAME/NUMBER_ATTEMPT: the first compilation of a frame has the number 0
        compile_number = name.rpartition("/")[2].partition("_")[0]
        activity = Activity.RECOMPILE if compile_number.strip("0") else Activity.FIRST_COMPILE
        flags = 0 if opening.in_training else Flag.ASYNC
        if opening.in_training:
            self.context.enter(opening.before)
        self._write(opening.phase, opening.start_ns, time.monotonic_ns(), activity, 0, flags)

    def _watch_capture(self, module: Any) -> None:
        self.wrap(module.graph, "__enter__", after=self._compile_begins)
        self.wrap(module.graph, "__exit__", after=self._capture_ends)

    def _capture_ends(self, *_: Any) -> None:
        opening, self._compilation = self._compilation, None
        if opening is not None:
            self.context.enter(opening.before)
            end_ns = time.monotonic_ns()
            self._write(opening.phase, opening.start_ns, end_ns, Activity.GRAPH_CAPTURE)

    # ---- garbage collection -------------------------------------------------------------------

    def _watch_collections(self, _: Any) -> None:
        collects = self.context.guard.guarded(self._note_collection)
        gc.callbacks.append(collects)
        self._forget.append(functools.partial(gc.callbacks.remove, collects))

    def _note_collection(self, gc_phase: str, details: dict[str, int]) -> None:
        if gc_phase == "start":
            self._collection_ns = time.monotonic_ns()
            return
        end_ns, start = time.monotonic_ns(), self._collection_ns
        if end_ns - start < _MIN_COLLECTION_NS or self.context.mode == OFF:
            return
        activity = Activity(Activity.COLLECT_YOUNGEST + min(2, details["generation"]))
        flags = 0 if self.steps.is_training_thread() else Flag.ASYNC
        self._write(Phase.GARBAGE_COLLECTION, start, end_ns, activity, 0, flags)

    # ---- writing ------------------------------------------------------------------------------

    def _write(
        self,
        phase: Phase,
        start_ns: int,
        end_ns: int,
        activity: Activity = Activity.NONE,
        nbytes: int = 0,
        flags: int = 0,
        file: int = 0,
    ) -> None:
        if not self.steps.attached_mid_step:
            # fmt: off
            self.context.write(end_ns, Kind.PHASE, activity, phase, flags, 0, 0,
                               start_ns, nbytes, file, 0)
            # fmt: on

    def stop(self) -> None:
        """Takes the callbacks back."""
        self.steps.evaluation.stop()
        for forget in self._forget:
            # list.remove raises it where the script has emptied gc.callbacks
            with suppress(ValueError):
                forget()
        self._forget.clear()


def _is_place(value: Any) -> bool:
    """Returns whether *value* is a path, or a file that knows its position."""
    return isinstance(value, (str, os.PathLike)) or callable(getattr(value, "tell", None))


def _file_at(target: Any) -> int:
    """Returns a number for the file at a path; 0 for a folder, or where there is none."""
    with suppress(OSError, ValueError):
        if isinstance(target, (str, os.PathLike)) and Path(target).is_file():
            status = os.stat(target)
            return (status.st_dev << 40 ^ status.st_ino) & _MAX_NUMBER
    return 0


def _bytes_at(target: Any) -> int:
    """Returns the bytes that this rank has written to, or read from, a path or file; 0 if unknown."""
    with suppress(OSError, ValueError, TypeError):
        if not isinstance(target, (str, os.PathLike)):
            return int(target.tell())
        path = Path(target)
        if not path.is_dir():
            return path.stat().st_size
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        # The other files of a DCP folder are those of other ranks
        files = itertools.islice(path.glob(f"__{rank}_*"), _MAX_FILES)
        return sum(file.stat().st_size for file in files)
    return 0
