"""What the terminal itself shows of a run: the title of its window, a bell, a notification. Pure."""

from zeromon.levels import Severity
from zeromon.readout.verdict import Verdict
from zeromon.tui.line import clean

KEEP_TITLE = "\x1b[22;2t"
RESTORE_TITLE = "\x1b[23;2t"
"""xterm's stack of titles; terminals without one ignore both."""


def announcement(run: str, judged: Verdict, before: Verdict | None) -> str:
    """The escape sequences for a verdict; "" for one whose health and severity are those of *before*.

    The title (OSC 2, which tmux shows as that of the pane) has the health and the run. What has become
    critical while somebody watched rings the bell and makes a notification (OSC 9).
    """
    if before is not None and (before.health, before.severity) == (judged.health, judged.severity):
        return ""
    text = f"\x1b]2;{clean(f'{judged.health} · {run} · zeromon')}\x07"
    if before is not None and judged.severity is Severity.CRITICAL:
        text += f"\x07\x1b]9;{clean(f'{run} {judged.text}')}\x07"
    return text
