"""Where blocks whose lives are known should lie so that they reach least far: a two-dimensional packing.

    lives (size, from, until) + blocks that lie fixed  ->  an address for each life, and how far they reach

Greedy: in some order, each block goes to the lowest place that is free for all of its life. Several orders are tried;
then what reaches farthest in the best one is placed earlier, again and again. The same lives give the same packing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, Allocation

NEVER = 1 << 62
ROUNDS = 60
"""Further tries of the best order, at most."""
CLOSE_SHARE = 0.002
"""Packings this close to what is alive at once are not improved."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Life:
    """A block that is needed from event `start` up to event `stop`, which frees it."""

    size_bytes: int
    start: int
    stop: int


@dataclass(frozen=True)
class Fixed:
    """What lies at an address from event `start` up to event `stop`: a block, or what is no memory at all."""

    address: int
    size_bytes: int
    start: int = -1
    stop: int = NEVER


@dataclass(frozen=True)
class Packing:
    """An address for each life, and the end of the one that reaches farthest (0 without any)."""

    addresses: tuple[int, ...]
    top: int


def pack(lives: Sequence[Life], fixed: Sequence[Fixed], base: int, rounds: int = ROUNDS) -> Packing:
    """Place lives at `base` or above, around what is fixed."""
    if not lives:
        return Packing((), 0)
    field = _Field(fixed, base)
    orders = [sorted(range(len(lives)), key=key) for key in _orders(lives)]
    tried = [(field.place(lives, order), order) for order in orders]
    best, order = min(tried, key=lambda item: item[0].top)
    enough = base + round((1 + CLOSE_SHARE) * most_alive(lives, fixed, base))
    current, around = best, order
    for _ in range(rounds):
        if best.top <= enough:
            break
        highest = {i for i in order if current.addresses[i] + lives[i].size_bytes == current.top}
        if around[: len(highest)] == sorted(highest, key=around.index):
            break
        around = [*(i for i in around if i in highest), *(i for i in around if i not in highest)]
        current = field.place(lives, around)
        best = min(best, current, key=lambda packing: packing.top)
    return best


def most_alive(lives: Sequence[Life], fixed: Sequence[Fixed], base: int) -> int:
    """Bytes that are needed at once, with what lies fixed for a time: no packing reaches less far above `base`."""
    changes: dict[int, int] = {}
    passing = [Life(f.size_bytes, f.start, f.stop) for f in fixed if f.stop != NEVER and f.address >= base]
    for life in (*lives, *passing):
        changes[life.start] = changes.get(life.start, 0) + life.size_bytes
        changes[life.stop] = changes.get(life.stop, 0) - life.size_bytes
    most = running = 0
    for event in sorted(changes):
        running += changes[event]
        most = max(most, running)
    return most


def _orders(lives: Sequence[Life]) -> list[Callable[[int], tuple[int, ...]]]:
    def size(i: int) -> int:
        return -lives[i].size_bytes

    def long(i: int) -> int:
        return lives[i].start - lives[i].stop

    return [
        lambda i: (size(i), long(i), i),
        lambda i: (long(i), size(i), i),
        lambda i: (-size(i) * long(i), i),
        lambda i: (lives[i].start, long(i), i),
        lambda i: (-lives[i].stop, size(i), i),
    ]


def packed_bytes(step: Sequence[Allocation]) -> int:
    """What the large blocks of a step need where each is sent to its place, in whole pages. What the step frees and
    did not allocate is not counted.
    """
    alive: dict[str, tuple[int, int]] = {}
    lives = []
    for number, event in enumerate(step):
        if event.size_bytes > SMALL_BYTES:
            alive[event.name] = (event.size_bytes, number)
        elif not event.size_bytes and event.name in alive:
            size_bytes, start = alive.pop(event.name)
            lives.append(Life(size_bytes, start, number))
    lives += [Life(size_bytes, start, len(step)) for size_bytes, start in alive.values()]
    return -(-pack(lives, (), 0).top // PAGE_BYTES) * PAGE_BYTES


def gaps(life: Life, fixed: Sequence[Fixed], base: int) -> list[tuple[int, int]]:
    """(start, end) of everything from `base` on that is free for all of a life and large enough, lowest first; the
    last one ends at NEVER.
    """
    met = sorted((f.address, f.address + f.size_bytes) for f in fixed if f.start < life.stop and f.stop > life.start)
    found = []
    reached = base
    for low, high in met:
        if low - reached >= life.size_bytes:
            found.append((reached, low))
        reached = max(reached, high)
    return [*found, (reached, NEVER)]


class _Field:
    """What is placed, sorted by address."""

    def __init__(self, fixed: Sequence[Fixed], base: int) -> None:
        ordered = sorted((item for item in fixed if item.address + item.size_bytes > base), key=lambda f: f.address)
        self.base = base
        self.fixed = (
            np.array([f.address for f in ordered], np.int64),
            np.array([f.address + f.size_bytes for f in ordered], np.int64),
            np.array([f.start for f in ordered], np.int64),
            np.array([f.stop for f in ordered], np.int64),
        )

    def place(self, lives: Sequence[Life], order: Sequence[int]) -> Packing:
        """Each life in turn, at the lowest place that is free for all of it."""
        total = len(self.fixed[0]) + len(lives)
        columns = [np.empty(total, np.int64) for _ in range(4)]
        count = len(self.fixed[0])
        for column, known in zip(columns, self.fixed, strict=True):
            column[:count] = known
        low, high, first, last = columns
        addresses = [0] * len(lives)
        top = 0
        for i in order:
            life = lives[i]
            met = (first[:count] < life.stop) & (last[:count] > life.start)
            address = self._lowest(low[:count][met], high[:count][met], life.size_bytes)
            at = int(np.searchsorted(low[:count], address))
            for column, value in zip(columns, (address, address + life.size_bytes, life.start, life.stop), strict=True):
                column[at + 1 : count + 1] = column[at:count]
                column[at] = value
            count += 1
            addresses[i] = address
            top = max(top, address + life.size_bytes)
        return Packing(tuple(addresses), top)

    def _lowest(self, low: Ints, high: Ints, size_bytes: int) -> int:
        """The start of the first gap of a size between intervals that are sorted by where they begin."""
        if not len(low):
            return self.base
        reached = np.maximum(np.maximum.accumulate(high), self.base)
        if low[0] - self.base >= size_bytes:
            return self.base
        gaps = np.flatnonzero(low[1:] - reached[:-1] >= size_bytes)
        return int(reached[gaps[0]] if len(gaps) else reached[-1])
