"""Snapshots of torch's allocator as text: who holds the memory, and who held it at the peak. Pure."""

from collections.abc import Sequence

from zeromon.report.table import column_table, table
from zeromon.traces.allocations import (
    COMMUNICATION,
    OPTIMIZER_STATE,
    DeviceMemory,
    Grown,
    Holding,
    Peak,
    origin,
)
from zeromon.units import human_bytes, human_count, human_seconds, human_share, signed

_MOST_ROWS = 10
_SHORT = {OPTIMIZER_STATE: "optimizer", COMMUNICATION: "comm buffers"}


def as_text(name: str, devices: Sequence[DeviceMemory]) -> str:
    """One file: for each device its segments, roles, the peak, and allocations that failed."""
    blocks = [block for device in devices for block in _device(name, device)]
    return "\n\n".join(blocks or [f"{name} holds no memory"]) + "\n"


def as_growth(names: Sequence[str], rows: Sequence[Grown]) -> str:
    """The stacks that hold more in the second file, and those that hold less."""
    heads = [f"{letter}  {name}" for letter, name in zip("AB", names, strict=True)]
    if not rows:
        return "\n".join([*heads, "", "  every stack holds as much in both"]) + "\n"
    total = sum(row.after_bytes - row.before_bytes for row in rows)
    grown = column_table(
        [*rows[:_MOST_ROWS], *rows[_MOST_ROWS:][-3:]],
        ("where", lambda row: origin(row.stack)),
        ("role", lambda row: _SHORT.get(row.role, row.role)),
        ("count", lambda row: f"{row.count:+,}"),
        ("B", lambda row: human_bytes(row.after_bytes)),
        ("B - A", lambda row: signed(human_bytes, row.after_bytes - row.before_bytes)),
        cuts=[0],
    )
    return "\n".join([*heads, "", f"{signed(human_bytes, total)} in all", grown]) + "\n"


def _device(name: str, device: DeviceMemory) -> list[str]:
    reserved = device.reserved_bytes
    head = (
        f"Device {device.device} of {name}: {human_bytes(device.allocated_bytes)} allocated of "
        f"{human_bytes(reserved)} reserved"
    )
    rows = column_table(
        device.segments,
        ("segments", lambda row: row.kind or "-"),
        ("count", lambda row: human_count(row.count)),
        ("reserved", lambda row: human_bytes(row.reserved_bytes)),
        ("allocated", lambda row: human_bytes(row.allocated_bytes)),
        ("awaits free", lambda row: human_bytes(row.pending_bytes)),
        ("inactive", lambda row: human_bytes(row.inactive_bytes)),
    )
    share = human_share(device.stranded_bytes, reserved)
    fragments = (
        f"  fragmentation: {human_bytes(device.stranded_bytes)} ({share} of reserved) inactive in "
        f"segments in use\n  largest free block: {human_bytes(device.largest_inactive_bytes)}"
    )
    blocks = [f"{head}\n{rows}\n{fragments}", _roles(device)]
    if device.peak is None:
        blocks.append(
            "The peak is n/a: the file has no history of allocations\n"
            f"  torch.cuda.memory._record_memory_history() records it\n{_holdings(device.held)}"
        )
    else:
        blocks.append(f"{_peak(device.peak)}\n{_holdings(device.peak.held)}")
    if device.ooms:
        blocks.append(_ooms(device))
    return blocks


def _peak(peak: Peak) -> str:
    when = "" if peak.seconds is None else f", {human_seconds(peak.seconds)} after the first"
    text = (
        f"The peak: {human_bytes(peak.nbytes)} allocated of {human_bytes(peak.reserved_bytes)} "
        f"reserved\n  at event {peak.event + 1:,} of {peak.events:,}{when}"
    )
    if peak.untold_bytes:
        text += (
            f"\n  {human_bytes(abs(peak.untold_bytes))} of it belong to no allocation of the file"
        )
    return text


def _roles(device: DeviceMemory) -> str:
    now, most = device.roles["now"], device.roles.get("peak", {})
    rows = [
        (role, human_bytes(most.get(role, 0)) if most else "n/a", human_bytes(now.get(role, 0)))
        for role in dict.fromkeys([*most, *now])
    ]
    return f"By role, as far as stacks tell\n{table(('role', 'at the peak', 'now'), rows)}"


def _holdings(held: Sequence[Holding]) -> str:
    text = column_table(
        held[:_MOST_ROWS],
        ("where", lambda one: origin(one.stack)),
        ("role", lambda one: _SHORT.get(one.role, one.role)),
        ("count", lambda one: human_count(one.count)),
        ("bytes", lambda one: human_bytes(one.nbytes)),
        cuts=[0],
    )
    if len(held) > _MOST_ROWS:
        rest = held[_MOST_ROWS:]
        text += f"\n  and {human_bytes(sum(o.nbytes for o in rest))} of {len(rest):,} other stacks"
    return text


def _ooms(device: DeviceMemory) -> str:
    rows = column_table(
        device.ooms,
        ("where", lambda oom: origin(oom.stack)),
        ("after", lambda oom: human_seconds(oom.seconds)),
        ("asked for", lambda oom: human_bytes(oom.nbytes)),
        ("allocated", lambda oom: human_bytes(oom.allocated_bytes)),
        ("free", lambda oom: human_bytes(oom.device_free_bytes)),
        cuts=[0],
    )
    return f"Allocations that failed, and what the device had free\n{rows}"
