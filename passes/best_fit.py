"""The caching allocator's large pool of one stream, where nothing grows: which free block an allocation takes.

    mapped ranges of one expandable segment + blocks in use  ->  where each allocation goes, in order

The smallest free block that fits, the lowest of those, and the low part of it; neighbours merge when freed. A free
block with unmapped addresses behind it counts as long as it could grow (c10/cuda/CUDACachingAllocator.cpp). Sizes and
addresses are bytes; sizes are multiples of GRANULE_BYTES above SMALL_BYTES. Best fit never maps: None says that it
would have to.
"""

from collections.abc import Hashable, Iterable, Mapping

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.holes import ENDLESS, Holes

GRANULE_BYTES = 512


def rounded(size_bytes: int) -> int:
    """What an allocation of a size takes."""
    return max(GRANULE_BYTES, -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES)


class Heap:
    """Blocks in use and holes between them. Keys name the blocks in use."""

    def __init__(self, ranges: Iterable[tuple[int, int]], used: Mapping[Hashable, tuple[int, int]]) -> None:
        """ranges: (start, end) of what is mapped, in any order. used: (address, size) inside of them."""
        self.used = dict(used)
        self.ranges = tuple(sorted(ranges))
        starts = [start for start, _ in self.ranges[1:]]
        self._behind = {
            end: (following - end if following is not None else ENDLESS)
            for (_, end), following in zip(self.ranges, [*starts, None], strict=True)
        }
        self._holes = Holes()
        blocks = sorted(self.used.values())
        for start, end in self.ranges:
            cursor = start
            for address, size in blocks:
                if start <= address < end:
                    assert cursor <= address, "blocks in use do not overlap"
                    if address > cursor:
                        self._holes.add(cursor, address - cursor)
                    cursor = address + size
            if end > cursor:
                self._holes.add(cursor, end - cursor)

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """(size, address) of every free block, smallest first: what the next allocation depends on."""
        return tuple(self._holes.by_size)

    def best(self, size_bytes: int) -> tuple[int, int] | None:
        """(address, size) of the hole that an allocation would take; None where it would have to grow."""
        return self._holes.best(size_bytes, lambda end: self._behind.get(end, 0))

    def take(self, key: Hashable, size_bytes: int) -> int | None:
        """Allocate; the address, or None (and nothing is changed) where the segment would have to grow."""
        assert size_bytes > SMALL_BYTES, "small allocations live elsewhere"
        assert key not in self.used, "a block is taken once"
        hole = self.best(size_bytes)
        if hole is None:
            return None
        self._holes.use(*hole, size_bytes)
        self.used[key] = (hole[0], size_bytes)
        return hole[0]

    def give(self, key: Hashable) -> None:
        """Free a block."""
        start, size = self.used.pop(key)
        self._holes.give(start, size)
