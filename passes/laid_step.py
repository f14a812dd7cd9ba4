"""A step of the caching allocator, statement by statement, and what it takes to send its blocks to their places."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from fxhome.passes.ranges import Ranges, total_bytes

Used = Mapping[Hashable, tuple[int, int]]


@dataclass(frozen=True)
class Event:
    """Block `block` of `size_bytes` (a multiple of 512 above SMALL_BYTES) is allocated; freed where that is zero."""

    block: int
    size_bytes: int


@dataclass(frozen=True)
class Statement:
    """What happens from one hook to the next. hook: None where nothing can be plugged."""

    hook: int | None
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Plugs:
    """What becomes of raw allocations before a statement, in this order.

    gives: addresses of those that are held and go back. takes: (size in bytes, address that it must get) of new ones.
    stand_ins: which of the new ones are given back at once, for the statement takes their place; the others are held
    until they are given back before a later statement, or until the call that runs the statements ends.
    """

    gives: tuple[int, ...] = ()
    takes: tuple[tuple[int, int], ...] = ()
    stand_ins: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Laid:
    """A step whose blocks fit into `ranges`. end: (address, size) of what is in use at its end, by the names at the
    start of the next step.
    """

    ranges: Ranges
    plugs: Mapping[int, Plugs]
    addresses: Mapping[int, int]
    end: Used

    @property
    def mapped_bytes(self) -> int:
        """What the allocator has reserved for blocks of this pool."""
        return total_bytes(self.ranges)


class NoRoomError(Exception):
    """A step does not fit into what is mapped, or may be."""

    def __init__(self, message: str = "no packing of its blocks was found that fits into what is mapped") -> None:
        super().__init__(message)


def in_use(step: Sequence[Statement], used: Used) -> list[tuple[int, int]]:
    """Bytes in use before each statement, and at its worst moment."""
    sizes = {key: size for key, (_, size) in used.items()}
    now = sum(sizes.values())
    found = []
    for statement in step:
        before = peak = now
        for event in statement.events:
            if event.size_bytes:
                sizes[event.block] = event.size_bytes
                now += event.size_bytes
            else:
                now -= sizes.pop(event.block)
            peak = max(peak, now)
        found.append((before, peak))
    return found
