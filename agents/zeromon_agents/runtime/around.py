"""Wraps a function of torch or of a framework so that a failing hook never reaches the training loop.

The collective hook in :mod:`zeromon_agents.hooks.c10d` is inlined instead: it runs hundreds of times a
step, and each call inside of a wrapper costs about 50 ns.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch

from zeromon.ring.codes import Kind
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, HookContext, compiled_hooks

Function = TypeVar("Function")

RAISED: Final = object()
"""The *result* that *after* receives when the wrapped function raised."""
# A line that is added above that call in the wrapper, also a comment, must raise this number
_CALL: Final = 16
"""Line of the wrapper, by its first one, that calls the wrapped function."""
_CALL_OF_COMPILED: Final = 2
"""Line of the function around a compiled wrapper that calls it."""
SKIP: Final = object()
"""The value that *before* returns for a call that *after* has nothing to do with."""
if compiled_hooks is not None:
    compiled_hooks.settle(HookContext, SKIP, RAISED, int(Kind.UNIT))


class UnitEntry(NamedTuple):
    """How *before* handles the unit of an argument, for the compiled wrapper to do in its place."""

    subject: int
    """Position of the argument whose attribute ``_zeromon_unit`` has context and id of the unit."""
    event: int = -1
    """The event to write; -1 for none."""
    happens: Callable[..., bool] | None = None
    """Called with the positional arguments: whether the event happens."""
    units: dict[int, Any] | None = None
    """id of the argument -> a tuple that begins with unit and engine, in place of that attribute."""


_NO_UNIT: Final = UnitEntry(-1)


def leave_to_python(function: Function, *, and_callees: bool) -> Function:
    """Returns *function*, whose frames dynamo does not compile when eager code calls it.

    Inside of a region under torch.compile each Python frame is tried, also ours: FSDP1's functions run
    there between two graphs.
    """
    code = getattr(function, "__code__", None)
    evaluation: Any = getattr(torch._C._dynamo, "eval_frame", None)
    # Functions of pybind have no code object that dynamo could compile
    if code is None:
        return function
    if hasattr(evaluation, "set_code_exec_strategy"):
        skip, default = evaluation._FrameAction.SKIP, evaluation._FrameAction.DEFAULT
        strategy = evaluation._FrameExecStrategy(skip, skip if and_callees else default)
        evaluation.set_code_exec_strategy(code, strategy)
    elif hasattr(evaluation, "skip_code"):  # torch before 2.7
        evaluation.skip_code(code)
    return function


def _untraced_hook(hook: Function) -> Function:
    """Returns *hook* with what it calls left to Python; before torch 2.7 no frame leaves its callees."""
    evaluation: Any = getattr(torch._C._dynamo, "eval_frame", None)
    newer = hasattr(evaluation, "set_code_exec_strategy")
    if hook is None or newer or not hasattr(evaluation, "set_eval_frame"):
        return leave_to_python(hook, and_callees=True)

    def call_outside(*args: Any, **kwargs: Any) -> Any:
        tracer = evaluation.set_eval_frame(None)
        try:
            return hook(*args, **kwargs)  # type: ignore[operator]
        finally:
            evaluation.set_eval_frame(tracer)

    return leave_to_python(call_outside, and_callees=False)  # type: ignore[return-value]


def around(
    context: HookContext,
    before: Callable[..., Any] | None = None,
    after: Callable[..., None] | None = None,
    *,
    where: str = "",
    active_from: int = IDLE,
    scoped: bool = False,
    traced: bool = False,
    unit_entry: UnitEntry = _NO_UNIT,
) -> Callable[[Any], Any]:
    """Returns a decorator that runs *before* and *after* around each call of a function.

    ``before(*args, **kwargs)`` returns any state for ``after(state, result, *args)``. *state* is None
    when *before* failed, and *result* is :data:`RAISED` when the function raised. *after* does not run
    when *before* returned :data:`SKIP`. An error of either goes to the guard under the name *where*, by
    default the function's qualified name. The function's own result or exception is passed on unchanged.

    *active_from* is the lowest mode of *context* in which the two run. A *scoped* wrapper restores the
    unit and the engine of *context* after the call. *traced* says that torch.compile may trace through
    the function: it then traces the function alone, and decides by its file, as without the wrapper.
    A wrapper that is compiled does what *unit_entry* says without *before*.
    """
    # The wrapper calls it, and leaves no more than its own frame to Python
    leave_to_python(HookContext.sample, and_callees=True)
    before, after = _untraced_hook(before), _untraced_hook(after)
    if context.recorder is not None:
        unit_entry = unit_entry._replace(happens=_untraced_hook(unit_entry.happens))
        compile_hook = _compiled_decorator(
            context, before, after, where, active_from, scoped, unit_entry
        )
        return (lambda f: _call_compiled(compile_hook(f), f)) if traced else compile_hook
    decorate = _hook_decorator(context, before, after, where, active_from, scoped, traced)
    if traced:
        return decorate
    return lambda original: leave_to_python(decorate(original), and_callees=False)


def _compiled_decorator(
    context: HookContext,
    before_hook: Callable[..., Any] | None,
    after_hook: Callable[..., None] | None,
    hook_name: str,
    active_from: int,
    scoped: bool,
    unit_entry: UnitEntry,
) -> Callable[[Any], Any]:
    subject, event, happens, units = unit_entry

    def decorate_function(original: Any) -> Any:
        label = hook_name or getattr(original, "__qualname__", getattr(original, "__name__", "hook"))
        objects = context.guard.note, label, before_hook, after_hook, happens, units
        numbers = active_from, scoped, subject, event
        hook = compiled_hooks.Wrapped(context, original, None, context.recorder, *objects, *numbers)
        return functools.wraps(original)(hook)

    return decorate_function


def _hook_decorator(
    context: HookContext,
    before_hook: Callable[..., Any] | None,
    after_hook: Callable[..., None] | None,
    hook_name: str,
    active_from: int,
    scoped: bool,
    traced: bool,
) -> Callable[[Any], Any]:
    note, now_ns = context.guard.note, time.perf_counter_ns
    compiler = torch.compiler

    def decorate_function(original: Any) -> Any:
        name = getattr(original, "__name__", "hook")
        label = hook_name or getattr(original, "__qualname__", name)

        def hooked_call(*args: Any, **kwargs: Any) -> Any:
            # Not is_compiling(), which enters two functions; dynamo traces the original alone
            if (traced and compiler._is_compiling_flag) or context.mode < active_from:
                return original(*args, **kwargs) if kwargs else original(*args)
            context.calls += 1
            unit, engine = context.unit, context.engine
            state, result = None, RAISED
            began_ns = now_ns() - context.spent_ns if context.timing else 0
            if before_hook is not None:
                try:  # an empty ** costs a copy, so it is left out where it can be
                    state = before_hook(*args, **kwargs) if kwargs else before_hook(*args)
                except Guard.CAUGHT as error:
                    note(error, label)
            if began_ns:
                context.sample(began_ns, calls=1)
            try:
                result = original(*args, **kwargs) if kwargs else original(*args)
                return result
            finally:
                if after_hook is not None and state is not SKIP:
                    began_ns = now_ns() - context.spent_ns if context.timing else 0
                    try:
                        after_hook(state, result, *args)
                    except Guard.CAUGHT as error:
                        note(error, label)
                    if began_ns:
                        context.sample(began_ns)
                if scoped:
                    context.unit, context.engine = unit, engine

        hooked_call.__code__ = hooked_call.__code__.replace(co_name=name)  # what a profiler shows
        wrapped = functools.wraps(original)(hooked_call)
        return _as_traced(wrapped, original, _CALL) if traced else wrapped

    return decorate_function


def _as_traced(wrapped: Any, original: Any, call_line: int) -> Any:
    """Returns *wrapped*, for which dynamo traces *original*, which it calls in *call_line*."""
    code = getattr(original, "__code__", None)
    if code is not None:
        # dynamo takes a code for torch's by its file, and traces what _torchdynamo_inline names; a
        # traceback shows the line of the function
        wrapped.__code__ = wrapped.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=max(1, code.co_firstlineno - call_line)
        )
        wrapped._torchdynamo_inline = original
    return wrapped


def _call_compiled(hook: Any, original: Any) -> Any:
    """Returns a function of Python that calls *hook*, a compiled wrapper: dynamo knows no other."""
    compiler = torch.compiler

    def hooked_call(*args: Any, **kwargs: Any) -> Any:
        called = original if compiler._is_compiling_flag else hook
        return called(*args, **kwargs) if kwargs else called(*args)

    name = getattr(original, "__name__", "hook")
    hooked_call.__code__ = hooked_call.__code__.replace(co_name=name)
    return _as_traced(functools.wraps(original)(hooked_call), original, _CALL_OF_COMPILED)


# ---- replaces attributes of classes and modules, and restores exactly what was there before -----

_ABSENT = object()


class Patches:
    """A stack of replaced attributes.

    Originals are read from ``owner.__dict__``: ``getattr`` on a pybind class strips the descriptor, and
    restoring the stripped value would lose ``self``.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def find_original(self, owner: Any, name: str) -> Any:
        """Returns what *owner* itself holds under *name*. Raises KeyError when *owner* inherits it."""
        return vars(owner)[name]

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Puts *replacement* in place of *owner*.*name*."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replaces *owner*.*name* by ``wrapper(original)``. Raises KeyError as :meth:`find_original`."""
        self.set(owner, name, wrapper(self.find_original(owner, name)))

    def wrap_in(self, module: Any, function: str, wrapper: Callable[[Any], Any]) -> None:
        """Wraps a function or a ``Class.method`` of *module*, if its version has it."""
        owner_name, _, name = function.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if owner is not None and name in vars(owner):
            self.wrap(owner, name, wrapper)

    def restore(self) -> list[str]:
        """Restores every original, newest first, and returns the names that could not be restored.

        An attribute that another tool has replaced since keeps the other tool's version, because
        restoring the original would remove that patch. The wrapper underneath then only passes calls on.
        """
        kept_names: list[str] = []
        while self._replaced:
            # Newest first: of two wrappers of one name, only the older one has the true original
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name, _ABSENT) is not replacement:
                kept_names.append(f"{getattr(owner, '__name__', owner)}.{name}")
            # The owner inherits the name: a copy of its own would hide later patches of the base
            elif original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return kept_names
