"""One pool of host memory for everything that leaves the device.

    empty(size_bytes) -> (tensor, slot)     a uint8 tensor on a slot; best fit, exact size, no power-of-two classes
    tensor dies                             its slot returns, with the fences of the copies that may still run on it
    empty(...) on the same bytes            hands the fences on: the next writer's stream waits, never the host

Slots come from slabs of huge pages that are page-locked once (see slab.py). All methods may be called from any thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from pathlib import Path

import torch

from fxhome.errors import HostMemoryError
from fxhome.runtime.free_space import Block, FreeSpace, round_up
from fxhome.runtime.host_memory import HostLimits, read_host_limits
from fxhome.runtime.slab import HUGE_PAGE_BYTES, Slab
from fxhome.runtime.slot import HostSlot

logger = logging.getLogger(__name__)

_GROWTH_BYTES = 64 * 1024 * 1024  # smallest slab made on demand; a plan calls `reserve` and gets one large slab
_MARGIN_BYTES = 512 * 1024 * 1024  # left to the rest of the machine when no host budget was given
POISON = 0xFF


@dataclasses.dataclass(frozen=True)
class PoolStatus:
    """What the pool holds. `fallbacks` says in words what this machine refused, empty when nothing was."""

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int
    registered_bytes: int
    slab_count: int
    live_slots: int
    budget_bytes: int | None
    fallbacks: tuple[str, ...]


class HostPool:
    """A pool of host slots. Use `host_pool()` for the one of this process; others are for tests."""

    def __init__(self) -> None:
        self.poison_on_release = False
        self._lock = threading.RLock()
        self._space = FreeSpace()
        self._slabs: tuple[Slab, ...] = ()
        self._live: dict[int, tuple[weakref.ref[memoryview], HostSlot]] = {}
        # Tensors die in any thread and at any point, also inside our own critical section (garbage collection), so
        # a death only appends here; the next caller does the bookkeeping.
        self._dead: deque[HostSlot] = deque()
        self._in_use_bytes = 0
        self._peak_bytes = 0
        self._budget_bytes: int | None = None
        self._fallbacks: tuple[str, ...] = ()
        self._registering_refused = False

    def set_budget(self, budget_bytes: int | None) -> None:
        """Limit the pool to `budget_bytes` (None: what the host has left, less a margin).

        Raises HostMemoryError when the machine or this process's cgroup cannot give that much; nothing is allocated.
        """
        with self._lock:
            if budget_bytes is not None:
                limits = read_host_limits()
                most_bytes = limits.available_bytes + self._reserved_bytes()
                if budget_bytes > most_bytes:
                    raise HostMemoryError(_too_much("host_budget", budget_bytes, most_bytes, limits))
            self._budget_bytes = budget_bytes

    def reserve(self, total_bytes: int, *, pinned: bool) -> None:
        """Make the pool at least `total_bytes` large now, so that no step waits for page-locking.

        Raises HostMemoryError when that is above the budget or above what the host has.
        """
        with self._lock:
            self._collect()
            missing_bytes = total_bytes - self._reserved_bytes()
            if missing_bytes > 0:
                self._grow(missing_bytes, pinned=pinned)
            elif pinned:
                self._register_all()

    def room_bytes(self) -> int:
        """Bytes of slots that could still be taken, free ones in existing slabs included."""
        with self._lock:
            self._collect()
            limits = read_host_limits()
            return max(0, self._reserved_bytes() - self._in_use_bytes + self._growth_room(limits))

    def empty(self, size_bytes: int, *, pinned: bool) -> tuple[torch.Tensor, HostSlot | None]:
        """A uint8 tensor of `size_bytes` bytes of unspecified content, and its slot (None for zero bytes).

        Whoever writes into it first waits for `slot.fences` (on its stream). The slot returns to the pool when the
        last tensor on its storage dies. Raises HostMemoryError when the host has no room.
        """
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), None
        with self._lock:
            self._collect()
            if pinned:
                self._register_all()
            block = self._space.take(round_up(size_bytes))
            if block is None:
                self._grow(max(round_up(size_bytes), _GROWTH_BYTES), pinned=pinned, least_bytes=round_up(size_bytes))
                block = self._space.take(round_up(size_bytes))
                assert block is not None
            self._in_use_bytes += block.size_bytes
            self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)
            slot = HostSlot(block)
            view = self._slab_of(block.address).view(block.address, size_bytes)
            death = weakref.ref(view, functools.partial(self._note_death, slot))
            self._live[block.address] = (death, slot)
        return torch.frombuffer(view, dtype=torch.uint8), slot

    def slot_of(self, host: torch.Tensor) -> HostSlot | None:
        """The live slot that holds `host`'s storage; None when the storage is not from this pool (or empty)."""
        entry = self._live.get(host.untyped_storage().data_ptr())
        return entry[1] if entry is not None else None

    def owns(self, address: int) -> bool:
        """Whether `address` lies in the pool's memory."""
        for slab in self._slabs:  # a plain loop: the meter asks for every storage it sees
            if slab.address <= address < slab.address + slab.size_bytes:
                return True
        return False

    def status(self) -> PoolStatus:
        """A snapshot, after returning the slots of tensors that died."""
        with self._lock:
            self._collect()
            return PoolStatus(
                in_use_bytes=self._in_use_bytes,
                peak_bytes=self._peak_bytes,
                reserved_bytes=self._reserved_bytes(),
                registered_bytes=sum(slab.size_bytes for slab in self._slabs if slab.registered),
                slab_count=len(self._slabs),
                live_slots=len(self._live),
                budget_bytes=self._budget_bytes,
                fallbacks=self._fallbacks,
            )

    def reset_peak(self) -> None:
        """Start a new measurement of `peak_bytes`."""
        with self._lock:
            self._collect()
            self._peak_bytes = self._in_use_bytes

    def close(self) -> None:
        """Give all memory back to the system. Raises RuntimeError while a tensor still lives on it."""
        with self._lock:
            self._collect()
            if self._live:
                raise RuntimeError(
                    f"host pool: {len(self._live)} tensors still live in it, so its memory cannot be given back; "
                    "drop them (a pending backward keeps its swapped activations) and close again"
                )
            if any(slab.registered for slab in self._slabs):
                torch.cuda.synchronize()  # a copy of a dead tensor may still run
            for slab in self._slabs:
                slab.unregister()
            self._slabs, self._space = (), FreeSpace()

    def _note_death(self, slot: HostSlot, _: weakref.ref[memoryview]) -> None:
        # The entry goes now, under its own address: nobody else gets this address before _collect returns it.
        self._live.pop(slot.block.address, None)
        if self.poison_on_release:
            ctypes.memset(slot.block.address, POISON, slot.block.size_bytes)
        self._dead.append(slot)

    def _collect(self) -> None:
        while self._dead:
            slot = self._dead.popleft()
            slot.abandon_incoming()
            self._in_use_bytes -= slot.block.size_bytes
            self._space.give(Block(slot.block.address, slot.block.size_bytes, slot.fences))

    def _reserved_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs)

    def _slab_of(self, address: int) -> Slab:
        for slab in self._slabs:
            if slab.address <= address < slab.address + slab.size_bytes:
                return slab
        raise AssertionError(f"no slab holds address {address:#x}")

    def _grow(self, wanted_bytes: int, *, pinned: bool, least_bytes: int | None = None) -> None:
        """Add a slab of `wanted_bytes`, or of less but at least `least_bytes` where the budget is nearly used."""
        least = -(-(wanted_bytes if least_bytes is None else least_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        limits = read_host_limits()
        room_bytes = self._growth_room(limits)
        if least > room_bytes:
            raise HostMemoryError(_too_much("swapping", least, room_bytes, limits, self._budget_bytes))
        try:
            slab = Slab(max(least, min(wanted_bytes, room_bytes)))
        except OSError as error:
            raise HostMemoryError(_too_much("swapping", least, room_bytes, limits, self._budget_bytes)) from error
        if pinned:
            slab.touch()
        self._slabs = (*self._slabs, slab)
        self._space.add_slab(slab.address, slab.size_bytes)
        if pinned:
            self._register_all()
            if not slab.huge_pages or _huge_pages_disabled():
                self._announce("the kernel gives no huge pages: page-locking is slower and reads by the device too")

    def _growth_room(self, limits: HostLimits) -> int:
        """Bytes that new slabs may take under the budget and the limits of the host."""
        room_bytes = limits.available_bytes - _MARGIN_BYTES
        if self._budget_bytes is not None:
            room_bytes = min(limits.available_bytes, self._budget_bytes - self._reserved_bytes())
        return max(0, room_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)

    def _register_all(self) -> None:
        for slab in self._slabs:
            if slab.registered or self._registering_refused:
                continue
            reason = slab.register()
            if reason is not None:
                self._registering_refused = True
                memlock = read_host_limits().memlock_bytes
                self._announce(
                    f"CUDA refused to page-lock {slab.size_bytes} bytes ({reason}; RLIMIT_MEMLOCK is "
                    f"{'unlimited' if memlock is None else memlock}): copies work but do not overlap with compute; "
                    "lower host_budget or raise the limit (ulimit -l)"
                )

    def _announce(self, fallback: str) -> None:
        if fallback not in self._fallbacks:
            self._fallbacks = (*self._fallbacks, fallback)
            warnings.warn(f"fxhome host pool: {fallback}", RuntimeWarning, stacklevel=2)


def _huge_pages_disabled() -> bool:
    try:
        return "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False


def _too_much(what: str, asked_bytes: int, room_bytes: int, limits: HostLimits, budget_bytes: int | None = None) -> str:
    cgroup = limits.cgroup_available_bytes
    return (
        f"host pool: {what} needs {asked_bytes} bytes of host memory, {room_bytes} can be given "
        f"(machine: {limits.machine_available_bytes} available, cgroup: {'no limit' if cgroup is None else cgroup}, "
        f"host_budget: {'none' if budget_bytes is None else budget_bytes}); "
        "raise host_budget or the container's memory limit, or raise memory_budget so that less is swapped"
    )


_pool = HostPool()


def host_pool() -> HostPool:
    """The pool of this process."""
    return _pool


def _forget_pool() -> None:
    """In a forked child the slabs do not exist (MADV_DONTFORK): start empty, never touch the parent's."""
    global _pool
    _pool.poison_on_release = False  # the parent's tensors die here too
    _kept_from_deallocation.append(_pool)
    _pool = HostPool()


_kept_from_deallocation: list[HostPool] = []
os.register_at_fork(after_in_child=_forget_pool)
