"""What a large allocation maps where nothing mapped fits, and what stays mapped once free pages are given back."""

from collections.abc import Iterable
from dataclasses import dataclass

from fxhome.passes.allocator import PAGE_BYTES, whole_pages
from fxhome.passes.holes import ENDLESS
from fxhome.passes.laid_step import Used
from fxhome.passes.ranges import Ranges, joined, total_bytes


@dataclass(frozen=True)
class Extent:
    """One block to take and give back, so that a step finds room: its size, where it must lie, what is mapped then."""

    size_bytes: int
    address: int
    ranges: Ranges

    @property
    def mapped_bytes(self) -> int:
        """What the allocator has reserved for blocks of this pool then."""
        return total_bytes(self.ranges)


def grown(ranges: Iterable[tuple[int, int]], used: Used, size_bytes: int) -> Extent:
    """What an allocation that fits nowhere maps: behind the lowest range with enough unmapped addresses behind it.

    Unmapped addresses before the first range, of which nothing tells, are left out.
    """
    ordered = sorted(ranges)
    blocks = sorted(used.values())
    for i, (start, end) in enumerate(ordered):
        inside = [(address, size) for address, size in blocks if start <= address < end]
        last = max((address + size for address, size in inside), default=start)
        if i + 1 == len(ordered):
            room, following = ENDLESS, 0
        else:
            behind = ordered[i + 1]
            room = behind[0] - last
            following = min((a for a, _ in blocks if behind[0] <= a < behind[1]), default=behind[1]) - behind[0]
        if room + following < size_bytes:
            continue
        if size_bytes > room:
            return Extent(size_bytes, last, (*ordered[:i], (start, ordered[i + 1][1]), *ordered[i + 2 :]))
        new_end = end + max(0, whole_pages(last + size_bytes - end))
        if following and new_end == ordered[i + 1][0]:
            return Extent(size_bytes, last, (*ordered[:i], (start, ordered[i + 1][1]), *ordered[i + 2 :]))
        return Extent(size_bytes, last, (*ordered[:i], (start, new_end), *ordered[i + 1 :]))
    raise AssertionError("addresses behind the last range are endless")


def without_free_pages(ranges: Iterable[tuple[int, int]], used: Used) -> Ranges:
    """What stays mapped once all free pages are given back. Each range begins where a page does."""
    return joined(
        (
            start + (address - start) // PAGE_BYTES * PAGE_BYTES,
            min(end, start + whole_pages(address + size - start)),
        )
        for start, end in ranges
        for address, size in used.values()
        if start <= address < end
    )
