"""Whether torch's caching allocator can run a step where what it may reserve is bounded.

    nothing fits, nothing may grow  ->  every whole page of a free block is given back, and mapped at another address
    still over the bound            ->  out of memory, although there is enough: it lies in parts of pages

A model of one expandable segment under a cap (c10/cuda/CUDACachingAllocator.cpp): what fits nowhere is asked for in
full, also where part of its addresses is mapped already. See allocator.py for the same without a cap.
"""

from collections.abc import Sequence

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, STEPS, Allocation, whole_pages
from fxhome.passes.holes import ENDLESS, Holes
from fxhome.passes.ranges import joined

_RESIDENT = "what is resident"
GROWTH_BYTES = 2 << 20
"""What is asked for beyond half a page is a multiple of this; below, a page."""


STARTS = (0, PAGE_BYTES // 4, PAGE_BYTES // 2, 3 * PAGE_BYTES // 4)
"""How far into its first page a step may begin: what is resident before it ends anywhere. It decides which free blocks
have a whole page to give back.
"""


def runs_within(step: Sequence[Allocation], cap_bytes: int, start_bytes: int = 0) -> bool:
    """Whether a step that is run again and again never needs more than `cap_bytes` for its large blocks.

    What a step leaves allocated (its results) is freed before the next one. start_bytes: how far into a page the step
    begins; what is before it is not the step's, nor is the rest of that page counted.
    """
    segment = _CappedSegment(cap_bytes + (PAGE_BYTES if start_bytes else 0))
    if start_bytes:
        segment.allocate(_RESIDENT, start_bytes)
    for _ in range(STEPS):
        for event in step:
            if not event.size_bytes:
                segment.free(event.name)
            elif event.size_bytes > SMALL_BYTES and not segment.allocate(event.name, event.size_bytes):
                return False
        for name in list(segment.placed):
            if name != _RESIDENT:
                segment.free(name)
    return True


def least_cap(step: Sequence[Allocation], alive_bytes: int, reserved_bytes: int) -> int:
    """The least cap in bytes, to a page, in which a step runs wherever in a page it begins: between what is alive at
    once and what it takes without a cap.
    """
    least = alive_bytes // PAGE_BYTES
    highest = -(-reserved_bytes // PAGE_BYTES) + 1
    for start_bytes in STARTS:
        low, high = least, highest
        while low < high:
            middle = (low + high) // 2
            if runs_within(step, middle * PAGE_BYTES, start_bytes):
                high = middle
            else:
                low = middle + 1
        least = high
    # With more room other holes are taken: what runs under one cap need not run under a higher one.
    while not all(runs_within(step, least * PAGE_BYTES, start) for start in STARTS):
        least += 1
    return least * PAGE_BYTES


class _CappedSegment:
    """Pages are mapped from address zero on: `_gaps` are unmapped ones between mapped ones, `_end` is behind all."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.mapped_bytes = 0
        self.placed: dict[str, tuple[int, int]] = {}
        self._end = 0
        self._gaps: list[tuple[int, int]] = []
        self._holes = Holes()

    def allocate(self, name: str, size_bytes: int) -> bool:
        """Place a block; False where there is no room."""
        hole = self._holes.best(size_bytes, self._unmapped_behind)
        if hole is None:
            asked = -(-size_bytes // GROWTH_BYTES) * GROWTH_BYTES if size_bytes >= PAGE_BYTES // 2 else PAGE_BYTES
            if self.mapped_bytes + asked > self.cap_bytes:
                self._give_back()
                if self.mapped_bytes + asked > self.cap_bytes:
                    return False
            hole = self._grown(asked)
        self._holes.use(*hole, size_bytes)
        self.placed[name] = (hole[0], size_bytes)
        return True

    def _unmapped_behind(self, end: int) -> int:
        if end == self._end:
            return ENDLESS
        return next((last - first for first, last in self._gaps if first == end), 0)

    def free(self, name: str) -> None:
        if name in self.placed:
            self._holes.give(*self.placed.pop(name))

    def _give_back(self) -> None:
        for size, start in list(self._holes.by_size):
            first, last = whole_pages(start), (start + size) // PAGE_BYTES * PAGE_BYTES
            if last <= first:
                continue
            self._holes.remove(start, size)
            if first > start:
                self._holes.add(start, first - start)
            if start + size > last:
                self._holes.add(last, start + size - last)
            self._gaps.append((first, last))
            self.mapped_bytes -= last - first
        self._gaps = list(joined(self._gaps))
        if self._gaps and self._gaps[-1][1] == self._end:
            self._end = self._gaps.pop()[0]

    def _grown(self, size_bytes: int) -> tuple[int, int]:
        """(address, size) of a free block that fits, in the lowest unmapped addresses with enough room around them."""
        for first in (*(gap[0] for gap in self._gaps), self._end):
            before = self._holes.ending_at(first)
            start = first if before is None else before
            if self._reaches(start, size_bytes):
                break
        needed = start + size_bytes
        gaps, self._gaps = self._gaps, []
        for first, last in gaps:
            end = min(last, whole_pages(needed))
            if last <= start or first >= needed:
                self._gaps.append((first, last))
                continue
            self._map(first, end)
            if end < last:
                self._gaps.append((end, last))
        if needed > self._end:
            first, self._end = self._end, whole_pages(needed)
            self._map(first, self._end)
        size = self._holes.starting_at(start)
        assert size is not None, "what was mapped joins what was free"
        return start, size

    def _reaches(self, start: int, size_bytes: int) -> bool:
        """Whether addresses from `start` on are free for so long, mapped or not."""
        unmapped = dict(self._gaps)
        end = start
        while end - start < size_bytes and end != self._end:
            if (hole := self._holes.starting_at(end)) is not None:
                end += hole
            elif end in unmapped:
                end = unmapped[end]
            else:
                return False
        return True

    def _map(self, first: int, end: int) -> None:
        self.mapped_bytes += end - first
        self._holes.give(first, end - first)
