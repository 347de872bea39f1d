"""The list of all keys, read from the screens' bindings."""

from collections.abc import Iterable
from itertools import chain

from textual.binding import Binding, BindingType
from textual.widget import Widget

from zeromon.tui.line import fit
from zeromon.tui.screens.collectives import Collectives, SpanLanes
from zeromon.tui.screens.communication import Communication
from zeromon.tui.screens.findings import Findings
from zeromon.tui.screens.logs import Logs
from zeromon.tui.screens.ranks import Ranks
from zeromon.tui.screens.timeline import Timeline
from zeromon.tui.widgets.panel import Page, TimeAxis
from zeromon.tui.widgets.table import Table

_SIGNS = {
    "slash": "/", "question_mark": "?", "less_than_sign": "<", "greater_than_sign": ">",
    "left_square_bracket": "[", "right_square_bracket": "]", "percent_sign": "%", "plus": "+",
    "equals_sign": "=", "minus": "-", "pageup": "page up", "pagedown": "page down",
    "left": "←", "right": "→", "up": "↑", "down": "↓", "shift+left": "shift ←",
    "shift+right": "shift →",
}  # fmt: skip

_WORDS = """
A filter of ranks is one or more conditions, which must all hold. Ranks: 3, or 0-7,16. Comparisons:
exposed>10 (%), late>0.01 and step>0.5 (seconds), memory>=60 (GiB), risk>50 (%). Any other word must be
part of the rank's node, unit, state or device.

columns and figures
  exposed          communication that no compute hides, of the step
  overlap          the share of communication that compute hides
  waits            how long a rank is blocked in collectives, per step
  late             by how much a rank arrives after the first one
  transfer         a collective without the wait for late ranks
  busbw            bytes per second of the slowest link, as NCCL's tests count
  OOM risk         the next peak against the limit of the scarcest memory
  other            what no known phase took
  n/a              unknown; a note, a rule or `zeromon doctor` has the reason

A mark is stored in the run's folder on this machine; that of a run elsewhere is lost with the view.
Files are written to the working folder.
"""


OWNERS: dict[str, tuple[type[Widget], ...]] = {
    "in a table": (Table,), "in a text": (Page,), "timeline": (TimeAxis, Timeline),
    "collectives of the last steps": (SpanLanes, Collectives), "communication": (Communication,),
    "ranks": (Ranks,), "findings": (Findings,), "logs": (Logs,),
}  # fmt: skip
"""Where keys work -> the widgets and screens that bind them, besides the application."""


def list_all_keys(everywhere: Iterable[BindingType], screen_name: str) -> str:
    """All keys as text, a title for each group; those of *screen_name* are first."""
    groups = [("everywhere", everywhere)]
    groups += [(name, chain(*(o.BINDINGS for o in owners))) for name, owners in OWNERS.items()]
    groups.sort(key=lambda group: group[0] != screen_name)
    blocks = []
    for title, bindings in groups:
        rows = [
            f"  {fit(', '.join(sign(key) for key in binding.key.split(',')), 16)} {binding.description}"
            for binding in bindings
            if isinstance(binding, Binding) and binding.description
        ]
        blocks.append("\n".join([title, *rows]))
    return "\n\n".join(blocks) + "\n" + _WORDS


def sign(key: str) -> str:
    """The label of a key."""
    return _SIGNS.get(key.strip(), key.strip())
