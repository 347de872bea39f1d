"""A rollout of an RL loop is a phase of its own, with the forwards within it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Phase
from zeromon.ring.events import PhaseSpan, decode_record
from zeromon_agents.hooks.activities import FUNCTIONS, Activities
from zeromon_agents.observe.step import Steps
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext


class Loop:
    """A training loop with the hooks, and what a model's ``generate`` calls."""

    def __init__(self, folder: Path) -> None:
        self.context = HookContext(RingWriter(folder / "rank0.1.ring", rank=0, pid=1), Guard())
        self.context.mode = ON
        self.steps = Steps(self.context, lambda _: None, lambda: None)
        self.reader = RingReader(folder / "rank0.1.ring")
        self.patches = Patches()
        shared: Any = SimpleNamespace(
            context=self.context, patches=self.patches, steps=self.steps, collectives=None, device=None,
            models=None, census=None, units=None, transfers=None, scalars=None,
        )  # fmt: skip
        self.activities = Activities(shared)
        self.seen: list[Phase] = []

    def hook(self, module: str, owner: str, name: str, body: Callable[[], None]) -> Any:
        """An object of class *owner* in *module*, whose method *name* runs *body*."""
        made = type(owner, (), {name: lambda _: body()})
        package: Any = ModuleType(module)
        setattr(package, owner, made)
        self.activities._watch_functions(package)
        return made()

    def forward(self) -> None:
        self.steps.forward_begins()
        self.seen.append(self.context.phase)
        self.steps.forward_ends()
        self.seen.append(self.context.phase)

    def phases(self) -> list[Phase]:
        """Of the spans that ended."""
        return [
            e.phase
            for raw in self.reader.read(final=True)
            if isinstance(e := decode_record(raw), PhaseSpan)
        ]


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path)


UTILS = "transformers.generation.utils"


def test_a_rollout_and_what_follows_it(loop: Loop) -> None:
    loop.hook(UTILS, "GenerationMixin", "generate", loop.forward).generate()
    loop.forward()
    assert loop.seen == [Phase.GENERATION] * 2 + [Phase.FORWARD, Phase.OTHER]
    assert loop.phases() == [Phase.FORWARD, Phase.GENERATION, Phase.FORWARD]
    loop.patches.restore()
    assert not loop.context.guard.errors


def test_what_an_evaluation_generates_belongs_to_it(loop: Loop) -> None:
    model = loop.hook(UTILS, "GenerationMixin", "generate", loop.forward)
    loop.hook("transformers.trainer", "Trainer", "evaluate", model.generate).evaluate()
    assert loop.seen == [Phase.EVALUATION] * 2
    assert loop.phases() == [Phase.FORWARD, Phase.EVALUATION]
    loop.patches.restore()


def test_a_file_that_is_loaded_whole_has_a_number(loop: Loop, tmp_path: Path) -> None:
    """The same for each rank; none for a file that is mapped, and none for an object."""
    path = tmp_path / "all.pt"
    path.write_bytes(b"x" * 1000)
    torch: Any = ModuleType("torch")
    torch.load = lambda *_, **__: None
    loop.activities._watch_functions(torch)
    torch.load(path)
    torch.load(str(path), mmap=False)
    torch.load(path, mmap=True)
    torch.load(object())
    events = [decode_record(raw) for raw in loop.reader.read(final=True)]
    spans = [event for event in events if isinstance(event, PhaseSpan)]
    assert [span.nbytes for span in spans] == [1000, 1000, 1000, 0]
    first, second, *others = (span.file for span in spans)
    assert first == second > 0 and others == [0, 0]
    loop.patches.restore()


@pytest.mark.parametrize(
    ("module", "owner"),
    [(m, f.partition(".")[0]) for m, f, (phase, _) in FUNCTIONS if phase is Phase.GENERATION],
)
def test_what_generates_is_where_the_hooks_expect_it(module: str, owner: str) -> None:
    """In those of the packages that are installed."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    source = Path(spec.origin).parent.joinpath(*rest.split(".")).with_suffix(".py").read_text()
    assert re.search(rf"^class {owner}\b.*?^    def generate\(", source, re.DOTALL | re.MULTILINE)
