"""Free blocks by size and by both ends, as the caching allocator keeps them: neighbours are one block."""

from bisect import bisect_left, insort
from collections.abc import Callable

ENDLESS = 1 << 60
"""Unmapped bytes behind everything that is mapped."""


class Holes:
    """Free blocks. by_size: (size, start) of each, smallest first, the lowest of equal ones first."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}

    def ending_at(self, end: int) -> int | None:
        """Where the block that ends there starts."""
        return self._by_end.get(end)

    def starting_at(self, start: int) -> int | None:
        """The size of the block that starts there."""
        return self._by_start.get(start)

    def best(self, size_bytes: int, unmapped_behind: Callable[[int], int]) -> tuple[int, int] | None:
        """(start, size) of the block that an allocation takes; None where none is large enough.

        The smallest that fits, the lowest of those; one with unmapped bytes behind its end counts as long as it could
        grow (c10/cuda/CUDACachingAllocator.cpp).
        """
        i = bisect_left(self.by_size, (size_bytes, 0))
        if i == len(self.by_size):
            return None

        def length(at: int) -> int:
            size, start = self.by_size[at]
            return size + unmapped_behind(start + size)

        while i + 1 < len(self.by_size) and length(i + 1) < length(i):
            i += 1
        size, start = self.by_size[i]
        return start, size

    def use(self, start: int, size: int, size_bytes: int) -> None:
        """Take the low part of a block."""
        self.remove(start, size)
        if size > size_bytes:
            self.add(start + size_bytes, size - size_bytes)

    def give(self, start: int, size: int) -> None:
        """Free a block and join it with its neighbours."""
        if (before := self._by_end.get(start)) is not None:
            self.remove(before, start - before)
            start, size = before, size + start - before
        if (behind := self._by_start.get(start + size)) is not None:
            self.remove(start + size, behind)
            size += behind
        self.add(start, size)

    def add(self, start: int, size: int) -> None:
        """A block whose neighbours are in use or no memory."""
        insort(self.by_size, (size, start))
        self._by_start[start] = size
        self._by_end[start + size] = start

    def remove(self, start: int, size: int) -> None:
        """Take a whole block."""
        del self.by_size[bisect_left(self.by_size, (size, start))]
        del self._by_start[start]
        del self._by_end[start + size]
