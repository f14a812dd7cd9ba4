"""Where blocks whose lives are known should lie so that they reach least far: a two-dimensional packing.

    lives (size, from, until) + blocks that lie fixed  ->  an address for each life, and how far they reach

Greedy: in some order, each block goes to the lowest place that is free for all of its life. Several orders are tried;
then what stands in the way of the best one is placed earlier, again and again. The same lives give the same packing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, Allocation

NEVER = 1 << 62
ROUNDS = 500
WORK = 80_000_000
"""Further tries of the best order, at most: so many, and so many steps of the innermost loop."""
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


def pack(lives: Sequence[Life], fixed: Sequence[Fixed], base: int, rounds: int = ROUNDS, seed: int = 0) -> Packing:
    """Place lives at `base` or above, around what is fixed. Another seed gives another packing that is as good."""
    if not lives:
        return Packing((), 0)
    field = _Field(lives, fixed, base)
    enough = base + round((1 + CLOSE_SHARE) * most_alive(lives, fixed, base))
    found, top = np.empty(0, np.int64), NEVER
    for key in _orders(lives):
        tried = np.array(sorted(range(len(lives)), key=key), np.int64)
        addresses, reached = field.place(tried)
        if reached < top:
            found, top, best = addresses, reached, tried
    order = best
    draw = random.Random(seed)
    current, reached = found, top
    rounds = min(rounds, WORK // len(lives) ** 2)
    for number in range(rounds):
        if top <= enough:
            break
        if number == rounds // 4:  # what moved everything in the way at once gets no further: one at a time
            order, current, reached = best, found, top
        is_whole = number < rounds // 4
        tried = (
            _highest_first(lives, order, current, reached)
            if is_whole
            else _earlier(lives, order, current, reached, draw)
        )
        addresses, higher = field.place(tried)
        if higher <= reached or is_whole:
            order, current, reached = tried, addresses, higher
        if higher < top:
            found, top, best = addresses, higher, tried
    return Packing(tuple(found.tolist()), top)


def _highest_first(lives: Sequence[Life], order: Ints, addresses: Ints, top: int) -> Ints:
    """The order with all of the lives that reach farthest placed first."""
    is_highest = np.array([addresses[i] + lives[i].size_bytes == top for i in order])
    return np.concatenate([order[is_highest], order[~is_highest]])


def _earlier(lives: Sequence[Life], order: Ints, addresses: Ints, top: int, draw: random.Random) -> Ints:
    """The order with one of the lives that reach farthest, or one that meets it, placed earlier."""
    highest = [i for i in order if addresses[i] + lives[i].size_bytes == top]
    life = lives[draw.choice(highest)]
    near = [k for k, i in enumerate(order) if lives[i].start < life.stop and lives[i].stop > life.start and k]
    if not near:
        return order
    at = draw.choice(near)
    to = draw.randrange(at)
    return np.concatenate([order[:to], order[at : at + 1], order[to:at], order[at + 1 :]])


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
    """What lies fixed, sorted by address, and the lives that are placed around it."""

    def __init__(self, lives: Sequence[Life], fixed: Sequence[Fixed], base: int) -> None:
        ordered = sorted((item for item in fixed if item.address + item.size_bytes > base), key=lambda f: f.address)
        self.base = base
        self.count = len(ordered)
        room = len(ordered) + len(lives)
        # Rows: first address, address behind, first event, event behind.
        self.placed = np.empty((4, room), np.int64)
        self.placed[:, : self.count] = (
            np.array([(f.address, f.address + f.size_bytes, f.start, f.stop) for f in ordered], np.int64)
            .reshape(-1, 4)
            .T
        )
        self.lives = np.array([(life.size_bytes, life.start, life.stop) for life in lives], np.int64)

    def place(self, order: Ints) -> tuple[Ints, int]:
        """Each life in turn, at the lowest place that is free for all of it: addresses, and how far they reach."""
        addresses = np.empty(len(order), np.int64)
        top = _place(order, self.lives, self.placed.copy(), self.count, self.base, addresses)
        return addresses, int(top)


@njit(cache=True)
def _place(order: Ints, lives: Ints, placed: Ints, count: int, base: int, addresses: Ints) -> int:
    top = 0
    for i in order:
        size, start, stop = lives[i]
        # The first gap of this size between what is met while it lives; `at`: where it stands among all.
        reached = base
        at = count
        for k in range(count):
            low = placed[0, k]
            if low - reached >= size:
                at = k
                break
            if placed[2, k] < stop and placed[3, k] > start and placed[1, k] > reached:
                reached = placed[1, k]
        else:
            at = count
        # What is not met may stand higher up than the gap: a gap before it need not be one before all that is met.
        while at > 0 and placed[0, at - 1] > reached:
            at -= 1
        for row in range(4):
            for k in range(count, at, -1):
                placed[row, k] = placed[row, k - 1]
        placed[0, at], placed[1, at], placed[2, at], placed[3, at] = reached, reached + size, start, stop
        count += 1
        addresses[i] = reached
        top = max(top, reached + size)
    return top
