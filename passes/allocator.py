"""What torch's caching allocator takes from the device for the allocations of a step: more than is allocated at once.

    allocated at the worst moment  <=  reserved: the end of the last block, with the holes that nothing fitted into

A model of one expandable segment (c10/cuda/CUDACachingAllocator.cpp): the smallest free block that fits, the lowest of
those; neighbours merge when freed; what fits nowhere extends the end. Where what is reserved may not grow, the
allocator stops the device, gives its holes back and maps them elsewhere: milliseconds per GiB, in every step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxhome.passes.holes import ENDLESS, Holes

SMALL_BYTES = 1 << 20
"""Allocations up to this size live in a segment of their own, which is small."""
PAGE_BYTES = 20 << 20
"""Granularity in which the segment of the larger ones grows."""
STEPS = 3
"""Training steps that are run: the free blocks that one step leaves are what the next one starts from."""


@dataclass(frozen=True)
class Allocation:
    """One event: `size_bytes` of `name` are allocated, or freed where the size is zero."""

    name: str
    size_bytes: int


def whole_pages(size_bytes: int) -> int:
    """So many bytes, or the first ones more that are whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def reserved_bytes(step: Sequence[Allocation]) -> tuple[int, int]:
    """(bytes reserved, bytes allocated at the worst moment) of a step that is run again and again.

    What a step leaves allocated (its results) is freed before the next one.
    """
    segment = _Segment()
    for _ in range(STEPS):
        for event in step:
            if event.size_bytes:
                segment.allocate(event.name, event.size_bytes)
            else:
                segment.free(event.name)
        for name in list(segment.placed):
            segment.free(name)
    return segment.mapped_bytes, segment.peak_bytes


def events(names: Iterable[tuple[str, int, int, int]], total: int) -> list[Allocation]:
    """Allocations in order from (name, size in bytes, first step, last step); last == total: never freed.

    At one step everything is allocated before anything is freed.
    """
    starts: list[list[Allocation]] = [[] for _ in range(total + 1)]
    stops: list[list[Allocation]] = [[] for _ in range(total + 1)]
    for name, size_bytes, first, last in names:
        if size_bytes and first >= 0:
            starts[first].append(Allocation(name, size_bytes))
        if size_bytes and last < total:
            stops[last].append(Allocation(name, 0))
    return [event for i in range(total + 1) for event in (*starts[i], *stops[i])]


class _Segment:
    def __init__(self) -> None:
        self.placed: dict[str, tuple[int, int]] = {}
        self.mapped_bytes = 0
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._holes = Holes()

    def allocate(self, name: str, size_bytes: int) -> None:
        if size_bytes <= SMALL_BYTES:
            return
        # The block at the end could grow: it is taken last.
        hole = self._holes.best(size_bytes, lambda end: ENDLESS if end == self.mapped_bytes else 0)
        start, size = hole if hole is not None else self._grown(size_bytes)
        self._holes.use(start, size, size_bytes)
        self.placed[name] = (start, size_bytes)
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _grown(self, size_bytes: int) -> tuple[int, int]:
        """(start, size) of the block at the end, with pages mapped behind it until it fits."""
        last = self._holes.ending_at(self.mapped_bytes)
        start = self.mapped_bytes if last is None else last
        missing = whole_pages(start + size_bytes - self.mapped_bytes)
        self._holes.give(self.mapped_bytes, missing)
        self.mapped_bytes += missing
        return start, self.mapped_bytes - start

    def free(self, name: str) -> None:
        if name not in self.placed:
            return
        start, size = self.placed.pop(name)
        self.allocated_bytes -= size
        self._holes.give(start, size)
