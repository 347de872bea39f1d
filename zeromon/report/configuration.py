"""DeepSpeed's engines and settings, as text. Pure."""

from collections import Counter

from zeromon.report.table import table
from zeromon.snapshot import RunSnapshot, Setting
from zeromon.units import human_bytes, human_count, human_seconds


def engines(run: RunSnapshot) -> str:
    """The DeepSpeed engines of the first rank that has some; "" without any."""
    rank = next((r for r in run.ranks if r.engines), None)
    if rank is None:
        return ""
    header = ("engine", "steps", "skipped", "bytes", "exposed", "loss scale", "grad norm")
    rows = [
        (
            f"{engine.engine} {engine.strategy}{' (dropped)' * engine.dropped}",
            human_count(engine.steps),
            human_count(engine.skipped),
            human_bytes(engine.nbytes),
            human_seconds(engine.exposed_seconds),
            "-" if engine.loss_scale is None else f"{engine.loss_scale:g}",
            "-" if engine.grad_norm is None else f"{engine.grad_norm:.4g}",
        )
        for engine in rank.engines
    ]
    return f"DeepSpeed engines of rank {rank.rank}\n{table(header, rows)}"


def settings(run: RunSnapshot, *, written_only: bool) -> str:
    """The configuration: what took effect, beside what was written where the two differ.

    A setting that all engines have in common is shown once.
    """
    rank = next((r for r in run.ranks if r.settings), None)
    if rank is None:
        return ""
    known = [s for s in rank.settings if s.written or not written_only or s.name in _ALWAYS_SHOWN]
    engines = len({setting.engine for setting in known})
    alike = Counter((s.name, s.effective, s.written) for s in known)
    lines = dict.fromkeys(
        (
            s.name
            if alike[s.name, s.effective, s.written] == engines
            else f"engine {s.engine}: {s.name}",
            s.effective,
            _origin(s),
        )
        for s in known
    )
    width = max((len(name) for name, _, _ in lines), default=0)
    text = "\n".join(f"  {name.ljust(width)}  {value}{note}" for name, value, note in lines)
    hint = "written, and what follows from it" if written_only else "as it took effect"
    return f"Configuration ({hint})\n{text}"


_ALWAYS_SHOWN = ("zero_optimization.overlap_comm", "train_batch_size")


def _origin(setting: Setting) -> str:
    if not setting.written:
        return "  (default)"
    return "" if setting.written == setting.effective else f"  (written: {setting.written})"
