"""What to take from a heap so that an allocation of best fit goes where it is to go.

holes: A fits best, B is meant   ->   take A, allocate; A is held until its place is needed
a place inside of hole B         ->   a spacer at its low end besides
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.best_fit import GRANULE_BYTES, Heap
from fxhome.passes.laid_step import Event


def is_reachable(heap: Heap, target: int, size_bytes: int) -> bool:
    """Whether there is a hole in which plugs can send an allocation to `target`."""
    for size, start in heap.holes:
        if start <= target and target + size_bytes <= start + size:
            return target == start or target - start > SMALL_BYTES
    return False


Plug = tuple[str, int]
"""The key of a block in a heap that is a plug: its number among all of the step."""


@dataclass(frozen=True)
class Plugged:
    """What was taken for a statement, under which keys, and whether every allocation would go to its place now.

    takes: (key, size in bytes, address), in order. stand_ins: those that are given back already.
    """

    takes: tuple[tuple[Plug, int, int], ...]
    stand_ins: frozenset[int]
    is_clear: bool

    @property
    def held(self) -> dict[Plug, tuple[int, int]]:
        """Those that are left taken, with their addresses and sizes in bytes."""
        return {key: (address, size) for i, (key, size, address) in enumerate(self.takes) if i not in self.stand_ins}


def plug(heap: Heap, made: Sequence[tuple[Event, int]], before_bytes: int, during_bytes: int, first: int) -> Plugged:
    """Take what sends each allocation to its place, as far as that can be done; all but stand-ins are left taken.

    before_bytes, during_bytes: what may be taken in all before the statement, and held while it runs. first: the number
    of the first plug.
    """
    takes: list[tuple[Plug, int, int]] = []
    stand_ins: list[int] = []

    def take(size_bytes: int, is_stand_in: bool = False) -> bool:
        taken_bytes = sum(size for _, size, _ in takes)
        held_bytes = taken_bytes - sum(takes[i][1] for i in stand_ins)
        if taken_bytes + size_bytes > before_bytes or (not is_stand_in and held_bytes + size_bytes > during_bytes):
            return False
        key = ("plug", first + len(takes))
        address = heap.take(key, size_bytes)
        if address is None:
            return False
        takes.append((key, size_bytes, address))
        return True

    is_clear = True
    for k, (event, target) in enumerate(made):
        before = len(takes)
        later = [(place, place + other.size_bytes) for other, place in made[k + 1 :]]
        if not _clear(heap, event.size_bytes, target, take, later):
            is_clear = False
            while len(takes) > before:
                heap.give(takes.pop()[0])
        if k + 1 < len(made) and take(event.size_bytes, True):
            stand_ins.append(len(takes) - 1)
    for i in stand_ins:
        heap.give(takes[i][0])
    return Plugged(tuple(takes), frozenset(stand_ins), is_clear)


def _clear(
    heap: Heap, size_bytes: int, target: int, take: Callable[[int], bool], later: Sequence[tuple[int, int]]
) -> bool:
    """Plug until an allocation would go to its place; False where that cannot be done.

    later: (start, end) of what the same statement allocates after it, where as little as possible is taken.
    """
    for _ in range(len(heap.holes) + 2):
        hole = heap.best(size_bytes)
        if hole is None:
            return False
        start, size = hole
        if start == target:
            return True
        wanted = size
        least = _least_plug(heap, size, size_bytes)
        if start < target and target + size_bytes <= start + size:
            spacer = target - start
            if spacer <= SMALL_BYTES:
                return False
            lies = heap.best(spacer)
            assert lies is not None, "the hole itself has room"
            wanted, least = (spacer, spacer) if lies[0] == start else (lies[1], _least_plug(heap, lies[1], spacer))
            start, size = lies
        if any(low < start + size and start < high for low, high in later):
            wanted = least
        if not take(wanted) and not take(least):
            return False
    return False


def _least_plug(heap: Heap, hole_bytes: int, refused_bytes: int) -> int:
    """The smallest plug that goes to the hole of a size and leaves less of it than would be refused."""
    i = bisect_left(heap.holes, (hole_bytes, 0))
    smaller = heap.holes[i - 1][0] if i else 0
    return min(hole_bytes, max(hole_bytes - refused_bytes, smaller, SMALL_BYTES) + GRANULE_BYTES)
