"""What NCCL itself says of a run: Inspector's records of each rank, RAS while a collective hangs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zeromon.diagnosis.communicators import ras_of, with_groups
from zeromon.probes.nccl_inspector import InspectorReader
from zeromon.probes.nccl_ras import RasReader, is_here
from zeromon.snapshot import Hang, RankSnapshot, Ras


class Nccl:
    """The readers of one run."""

    def __init__(self) -> None:
        self._inspectors: dict[int, InspectorReader] = {}
        """Pid -> its reader."""
        self._ras = RasReader()

    def inspected(self, ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
        """Returns the ranks with what Inspector has written of them."""
        rows, notes = {}, {}
        for rank in ranks:
            reader = self._inspectors.get(rank.pid) or self._inspector(rank)
            if reader is not None:
                rows[rank.rank], notes[rank.rank] = reader.read(), reader.note
        return tuple(
            replace(rank, inspector_note=notes[rank.rank]) if notes.get(rank.rank) else rank
            for rank in with_groups(ranks, rows)
        )

    def _inspector(self, rank: RankSnapshot) -> InspectorReader | None:
        variables = _variables(rank)
        if not variables:
            return None
        try:
            folder = Path(os.readlink(f"/proc/{rank.pid}/cwd"))
        except OSError:
            folder = Path(rank.process.get("folder", ""))
        made = self._inspectors[rank.pid] = InspectorReader(rank.pid, variables, folder)
        return made

    def ras(self, ranks: Sequence[RankSnapshot], hangs: Iterable[Hang], now_ns: int) -> Ras | None:
        """Returns RAS's newest answer while a collective of NCCL hangs; None before the first."""
        asked = next((rank for rank in ranks if rank.alive and _uses_nccl(rank)), None)
        if asked is None or not any(hang.seconds and not hang.pause for hang in hangs):
            self._ras = RasReader()  # an answer about another hang is none about the next
            return None
        self._ras.ask(_variables(asked), now_ns)
        answer = self._ras.answer
        return ras_of(answer, ranks, is_here) if answer is not None else None


def _variables(rank: RankSnapshot) -> Mapping[str, str]:
    return rank.process.get("variables", {})


def _uses_nccl(rank: RankSnapshot) -> bool:
    return "nccl" in rank.process.get("packages", {}) and rank.device.startswith("cuda")
