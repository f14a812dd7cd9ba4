"""Where blocks whose lives are known should lie so that they reach least far: a two-dimensional packing.

    lives (size, from, until) + blocks that lie fixed  ->  an address for each life, and how far they reach

Greedy: in some order, each block goes to the lowest place that is free for all of its life. Several orders are tried;
then what stands in the way is placed earlier, again and again. The same lives and seed give the same packing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, Allocation

NEVER = 1 << 62
ROUNDS = 6000
"""Further tries of an order, at most."""
STARTS = 4
"""Climbs that begin together; the better half of them goes on twice as long, and so on."""
SWEEPS = 100
"""Tries, at most, that move everything in the way at once."""
WORK = 1_500_000_000
"""Steps of the innermost loop, at most, that all tries may take."""
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
    enough = _least_top(round((1 + CLOSE_SHARE) * most_alive(lives, fixed, base)), fixed, base)
    rounds = min(rounds, WORK // len(lives) ** 2)
    greedy = [field.climber(sorted(range(len(lives)), key=key)) for key in _orders(lives)]
    best = min(greedy, key=lambda climber: climber.top)
    swept = best
    for _ in range(min(rounds // 4, SWEEPS)):
        if best.top <= enough:
            break
        swept = field.climber(_highest_first(lives, swept))
        best = min(best, swept, key=lambda climber: climber.top)
    if best.top > enough and rounds:
        # What moved everything in the way at once gets no further: one at a time, from where most can be reached.
        starts = (
            [field.climber(greedy[LONGEST_FIRST].order) for _ in range(STARTS)] if rounds >= ROUNDS // 2 else [best]
        )
        best = min(best, _climbed(field, starts, rounds, seed, enough), key=lambda climber: climber.top)
    return Packing(tuple(best.addresses.tolist()), best.top)


def _climbed(field: _Field, climbers: list[_Climber], rounds: int, seed: int, enough: int) -> _Climber:
    """The best of some climbs, of which only the better half goes on each time."""
    stages = len(climbers).bit_length()
    draw = random.Random(seed)
    while True:
        share = rounds // (stages * len(climbers))
        climbers = sorted(
            (field.climbed(climber, share, draw.getrandbits(62), enough) for climber in climbers),
            key=lambda climber: climber.top,
        )
        if len(climbers) == 1 or climbers[0].top <= enough:
            return climbers[0]
        climbers = climbers[: len(climbers) // 2]


def _highest_first(lives: Sequence[Life], climber: _Climber) -> list[int]:
    """The order with all of the lives that reach farthest placed first."""
    ends = [climber.addresses[i] + lives[i].size_bytes for i in climber.order]
    is_highest = np.array([end == climber.top for end in ends])
    return [*climber.order[is_highest], *climber.order[~is_highest]]


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


def _least_top(size_bytes: int, fixed: Sequence[Fixed], base: int) -> int:
    """How far so many bytes reach at least, above `base` and beside what lies fixed for ever."""
    reached = base
    for wall in sorted((f for f in fixed if f.stop == NEVER and f.start < 0), key=lambda f: f.address):
        free_bytes = max(0, wall.address - reached)
        if free_bytes >= size_bytes:
            break
        size_bytes -= free_bytes
        reached = max(reached, wall.address + wall.size_bytes)
    return reached + size_bytes


LONGEST_FIRST = 1
"""Of the orders below, the one from which climbs get farthest."""


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


@dataclass(frozen=True)
class _Climber:
    """An order of lives, the address of each life, and how far they reach."""

    order: Ints
    addresses: Ints
    top: int


class _Field:
    """What lies fixed, sorted by address, and the lives that are placed around it."""

    def __init__(self, lives: Sequence[Life], fixed: Sequence[Fixed], base: int) -> None:
        ordered = sorted((item for item in fixed if item.address + item.size_bytes > base), key=lambda f: f.address)
        self.base = base
        # Rows: first address, address behind, first event, event behind.
        self.fixed = np.array([(f.address, f.address + f.size_bytes, f.start, f.stop) for f in ordered], np.int64)
        self.fixed = np.ascontiguousarray(self.fixed.reshape(-1, 4).T)
        self.lives = np.array([(life.size_bytes, life.start, life.stop) for life in lives], np.int64)

    def climber(self, order: Sequence[int] | Ints) -> _Climber:
        """Each life in turn, at the lowest place that is free for all of it."""
        placed = np.empty((4, self.fixed.shape[1] + len(self.lives)), np.int64)
        addresses = np.empty(len(self.lives), np.int64)
        found = np.array(order, np.int64)
        top = _place(found, 0, self.lives, self.fixed, placed, self.base, addresses, NEVER)
        return _Climber(found, addresses, int(top))

    def climbed(self, climber: _Climber, rounds: int, seed: int, enough: int) -> _Climber:
        """After so many tries to place one of the lives that reach farthest, or one that meets it, earlier."""
        order, addresses = climber.order.copy(), climber.addresses.copy()
        top = _climb(order, addresses, climber.top, self.lives, self.fixed, self.base, rounds, seed, enough)
        return _Climber(order, addresses, int(top))


@njit(cache=True)
def _place(
    order: Ints, known: int, lives: Ints, fixed: Ints, placed: Ints, base: int, addresses: Ints, limit: int
) -> int:
    """How far the lives reach; more than `limit` where one does, and the rest is not placed. The first `known` ones lie
    at their addresses already. placed: room for the rows of what is fixed and of all lives.
    """
    count = fixed.shape[1]
    for row in range(4):
        for k in range(count):
            placed[row, k] = fixed[row, k]
    top = 0
    for number in range(len(order)):
        i = order[number]
        size, start, stop = lives[i]
        if number < known:
            reached = addresses[i]
            at = 0
            while at < count and placed[0, at] <= reached:
                at += 1
        else:
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
            # What is not met may stand higher up than the gap: one before it need not be before all that is met.
            while at > 0 and placed[0, at - 1] > reached:
                at -= 1
            addresses[i] = reached
        top = max(top, reached + size)
        if top > limit:
            break
        for row in range(4):
            for k in range(count, at, -1):
                placed[row, k] = placed[row, k - 1]
        placed[0, at], placed[1, at], placed[2, at], placed[3, at] = reached, reached + size, start, stop
        count += 1
    return top


@njit(cache=True)
def _climb(
    order: Ints, addresses: Ints, top: int, lives: Ints, fixed: Ints, base: int, rounds: int, seed: int, enough: int
) -> int:
    """Change `order` and `addresses` for the better, or at least not for the worse; how far they reach."""
    placed = np.empty((4, fixed.shape[1] + len(order)), np.int64)
    tried, moved = order.copy(), addresses.copy()
    chosen = np.empty(len(order), np.int64)
    state = np.uint64(seed)
    for _ in range(rounds):
        if top <= enough:
            break
        count = 0
        for i in order:
            if addresses[i] + lives[i, 0] == top:
                chosen[count] = i
                count += 1
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        highest = chosen[int(state >> np.uint64(33)) % count]
        count = 0
        for k in range(1, len(order)):
            i = order[k]
            if lives[i, 1] < lives[highest, 2] and lives[i, 2] > lives[highest, 1]:
                chosen[count] = k
                count += 1
        if count == 0:
            continue
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        at = chosen[int(state >> np.uint64(33)) % count]
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        to = int(state >> np.uint64(33)) % at
        for k in range(len(order)):
            tried[k] = order[k - 1] if to < k <= at else order[k]
            moved[k] = addresses[k]
        tried[to] = order[at]
        reached = _place(tried, to, lives, fixed, placed, base, moved, top)
        if reached <= top:
            top = reached
            for k in range(len(order)):
                order[k], addresses[k] = tried[k], moved[k]
    return top
