"""Plans that the host has room for: `host_budget`, the machine and its container, asked before anything runs.

    plan -> moves more than the host has room for -> plan again, moving only what fits (announced) -> or one error

A plan that was accepted gets its host memory at once: no step waits for page-locking, and none fails for want of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from fxhome.errors import HostMemoryError, InfeasibleBudgetError
from fxhome.passes.planned import Planned
from fxhome.placement import Placement, Plan, StoragePlacement
from fxhome.runtime.free_space import ALIGNMENT_BYTES
from fxhome.runtime.host_pool import host_pool
from fxhome.units import format_bytes

MAX_TRIALS = 3
"""Searches with ever fewer storages on the host before none is moved at all."""
SLOTS_PER_STORAGE = 2
"""A moved storage has one slot, and another small one where a codec keeps its state on the host."""
_MOVED = (Placement.SWAP, Placement.COMPRESS_SWAP)


def within_host(
    plan: Callable[[Collection[str]], Planned],
    room_bytes: int,
    announce: Callable[[str], None],
    *,
    replayed: bool = False,
) -> Planned:
    """`plan(off_host)` without the storages that do not fit in `room_bytes` of host memory.

    Raises HostMemoryError where a replayed plan does not fit, or the memory budget cannot be met with what does.
    """
    planned = plan(())
    needed = host_bytes_of(planned.plan)
    if needed <= room_bytes:
        return planned
    short = f"the plan moves {format_bytes(needed)} to the host, which has room for {format_bytes(room_bytes)}"
    if replayed:
        raise HostMemoryError(
            f"plan: {short}; raise host_budget or the container's memory limit, or plan this model again"
        )
    announce(f"{short}: planning with fewer copies")
    off_host: set[str] = set()
    try:
        for trial in range(MAX_TRIALS):
            everything = trial == MAX_TRIALS - 1
            off_host |= _without_room(planned, 0 if everything else room_bytes * (MAX_TRIALS - trial) // MAX_TRIALS)
            planned = plan(off_host)
            if host_bytes_of(planned.plan) <= room_bytes:
                planned.plan = replace(planned.plan, notes=(*planned.plan.notes, f"{short}: fewer copies planned"))
                return planned
    except InfeasibleBudgetError as error:
        raise HostMemoryError(
            f"host memory: {short}, and with fewer copies the memory budget cannot be met. Raise host_budget, the "
            f"container's memory limit or memory_budget. Without more of the host: {error}"
        ) from None
    raise AssertionError("a plan that may move nothing moves nothing")


def reserve_host(plan: Plan, *, pinned: bool) -> None:
    """Take the host memory of `plan` now, beside what pending backwards use. Raises HostMemoryError."""
    if not (needed := host_bytes_of(plan)):
        return
    pool = host_pool()
    status = pool.status()
    if not status.live_slots and status.reserved_bytes < needed:
        # One slab instead of several: a tensor has to lie in one piece.
        pool.close()
    pool.reserve(status.in_use_bytes + needed, pinned=pinned)


def host_bytes_of(plan: Plan) -> int:
    """Bytes of the slots that `plan` takes in the pool."""
    moved = sum(entry.placement in _MOVED for entry in plan.placements)
    return plan.host_bytes + moved * SLOTS_PER_STORAGE * ALIGNMENT_BYTES if moved else 0


def _without_room(planned: Planned, room_bytes: int) -> set[str]:
    """Every storage but those that the plan moves and that fit, largest first."""
    moved = [entry for entry in planned.plan.placements if entry.placement in _MOVED]
    left, fitting = room_bytes, set()
    for entry in sorted(moved, key=_largest_first):
        taken = entry.size_bytes + SLOTS_PER_STORAGE * ALIGNMENT_BYTES
        if taken <= left:
            left -= taken
            fitting.add(entry.name)
    return {storage.name for storage in planned.facts.storages} - fitting


def _largest_first(entry: StoragePlacement) -> tuple[int, str]:
    return -entry.size_bytes, entry.name
