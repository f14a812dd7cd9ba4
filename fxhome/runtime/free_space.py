"""Best-fit allocation of exact-size address ranges with coalescing. Pure bookkeeping: no memory is touched here.

Runs once per swap on the training thread, hence named tuples (cheaper to make than frozen dataclasses).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable
from typing import Any, NamedTuple

ALIGNMENT_BYTES = 512  # a copy engine's and the device allocator's own granularity; never a power-of-two class


def round_up(size_bytes: int) -> int:
    """The bytes a slot of `size_bytes` occupies; an empty tensor still owns an address."""
    return max(ALIGNMENT_BYTES, -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


class Fence(NamedTuple):
    """A point in a queue of device work. Points of one queue pass in increasing `order`."""

    queue: Hashable
    order: int
    event: Any  # torch.cuda.Event; opaque here


def latest_fences(*groups: tuple[Fence, ...]) -> tuple[Fence, ...]:
    """The last fence of each queue: it implies the earlier ones, so a merged range never collects a long list."""
    if not any(groups):
        return ()
    latest: dict[Hashable, Fence] = {}
    for fence in itertools.chain.from_iterable(groups):
        known = latest.get(fence.queue)
        if known is None or known.order < fence.order:
            latest[fence.queue] = fence
    return tuple(latest.values())


class Block(NamedTuple):
    """A range of host addresses, and the fences that must have passed before anyone writes into it."""

    address: int
    size_bytes: int
    fences: tuple[Fence, ...] = ()


class FreeSpace:
    """Free ranges of several slabs. Not thread-safe: the pool holds its lock around every call."""

    def __init__(self) -> None:
        self._by_address: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self._sizes: list[tuple[int, int]] = []  # (size, address), sorted
        self._edges: set[int] = set()  # first addresses of slabs: ranges never merge across two slabs

    def add_slab(self, address: int, size_bytes: int) -> None:
        """Make a whole slab free."""
        self._edges.add(address)
        self._insert(Block(address, size_bytes))

    def take(self, size_bytes: int) -> Block | None:
        """The smallest free range that holds `size_bytes` (a rounded size), cut to it; None when none does."""
        place = bisect.bisect_left(self._sizes, (size_bytes, 0))
        if place == len(self._sizes):
            return None
        block = self._remove(self._by_address[self._sizes[place][1]])
        if block.size_bytes > size_bytes:
            self._insert(Block(block.address + size_bytes, block.size_bytes - size_bytes, block.fences))
        return Block(block.address, size_bytes, block.fences)

    def give(self, block: Block) -> None:
        """Return a range; neighbours merge and keep each other's fences."""
        before = self._by_end.get(block.address) if block.address not in self._edges else None
        end = block.address + block.size_bytes
        after = self._by_address.get(end) if end not in self._edges else None
        for neighbour in (before, after):
            if neighbour is not None:
                self._remove(neighbour)
                fences = latest_fences(block.fences, neighbour.fences)
                start = min(block.address, neighbour.address)
                block = Block(start, block.size_bytes + neighbour.size_bytes, fences)
        self._insert(block)

    @property
    def free_bytes(self) -> int:
        """Bytes in all free ranges."""
        return sum(size for size, _ in self._sizes)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest free range."""
        return self._sizes[-1][0] if self._sizes else 0

    def _insert(self, block: Block) -> None:
        self._by_address[block.address] = block
        self._by_end[block.address + block.size_bytes] = block
        bisect.insort(self._sizes, (block.size_bytes, block.address))

    def _remove(self, block: Block) -> Block:
        del self._by_address[block.address]
        del self._by_end[block.address + block.size_bytes]
        del self._sizes[bisect.bisect_left(self._sizes, (block.size_bytes, block.address))]
        return block
