"""Folds memory: the allocator, the host, roles, offloaded state in motion."""

from zeromon.fold.state import RankState, folds
from zeromon.ring.events import HostSample, MemoryPeak, MemorySample, Oom, RoleBytes, Transfer

_WARM_UP = 5
"""Steps before the growth of a role is measured."""


@folds(MemorySample)
def _fold_memory(state: RankState, e: MemorySample) -> None:
    state.memory = e
    state.window.allocated = max(state.window.allocated, e.allocated_bytes)
    state.window.reserved = max(state.window.reserved, e.reserved_bytes)


@folds(MemoryPeak)
def _fold_memory_peak(state: RankState, e: MemoryPeak) -> None:
    state.memory_peak = e
    if e.ooms >= 0:
        state.new_ooms = 0
    state.reserved_at_peak = state.memory.reserved_bytes if state.memory else 0


@folds(HostSample)
def _fold_host(state: RankState, e: HostSample) -> None:
    state.host = e
    state.window.rss = max(state.window.rss, e.rss_bytes)
    if e.available_bytes >= 0:
        state.available_bytes = e.available_bytes
    if e.pinned_bytes >= 0:
        state.pinned_bytes = e.pinned_bytes


@folds(Oom)
def _fold_oom(state: RankState, e: Oom) -> None:
    state.oom = e
    state.new_ooms += 1


@folds(RoleBytes)
def _fold_role(state: RankState, e: RoleBytes) -> None:
    state.roles[e.role] = e
    if state.steps >= _WARM_UP:
        state.first_roles.setdefault(e.role, e.device_bytes + e.host_bytes)


@folds(Transfer)
def _fold_transfer(state: RankState, e: Transfer) -> None:
    way = state.transfers[e.path]
    way.nbytes += e.nbytes
    way.of_step += e.nbytes
    way.busy_ns += e.busy_ns
    way.blocked_ns += e.blocked_ns
    if e.busy_ns:
        way.recent_bytes += e.nbytes
        way.recent_ns += e.busy_ns
    state.window.offload_ns += e.blocked_ns
