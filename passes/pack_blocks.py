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
from numpy.typing import NDArray

from fxhome.passes.allocator import SMALL_BYTES, Allocation, whole_pages
from fxhome.passes.compiled import compiled

NEVER = 1 << 62
ROUNDS = 6000
"""Further tries of an order, at most."""
MANY_ROUNDS = 500
STARTS = 4
"""Climbs that begin together where there are many rounds; the better half goes on twice as long, and so on."""
SWEEPS = 100
"""Tries, at most, that move everything in the way at once."""
WORK = 1_500_000_000
"""Steps of the innermost loop, at most, that all tries may take."""
CLOSE_SHARE = 0.002
"""Packings this close to what is alive at once are not improved."""
EFFORTS = (1, 1, 1, 8, 8, 8)
"""Of the packings that are made until one is good enough, each with another seed: how many times as many tries."""

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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


def pack(
    lives: Sequence[Life],
    fixed: Sequence[Fixed],
    base: int,
    rounds: int = ROUNDS,
    seed: int = 0,
    effort: int = 1,
) -> Packing:
    """Place lives at `base` or above, around what is fixed. Another seed gives another packing that is as good.

    effort: how many times as many tries may be made.
    """
    if not lives:
        return Packing((), 0)
    field = _Field(lives, fixed, base)
    enough = _least_top(round((1 + CLOSE_SHARE) * most_alive(lives, fixed, base)), fixed, base)
    rounds = effort * min(rounds, WORK // len(lives) ** 2)
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
        starts = [greedy[LONGEST_FIRST]] * STARTS if rounds >= MANY_ROUNDS else [best]
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


def packed_bytes(step: Sequence[Allocation], enough_bytes: int = 0) -> int:
    """What the large blocks of a step need where each is sent to its place, in whole pages; the least that is found, or
    the first that is `enough_bytes` or less. What the step frees and did not allocate is not counted.
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
    least = NEVER
    enough_bytes = max(enough_bytes, whole_pages(round((1 + CLOSE_SHARE) * most_alive(lives, (), 0))))
    for seed, effort in enumerate(EFFORTS):
        least = min(least, whole_pages(pack(lives, (), 0, seed=seed, effort=effort).top))
        if least <= enough_bytes:
            break
    return least


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
    """What lies fixed and the lives that are placed around it, numbered in a row: the lives first."""

    def __init__(self, lives: Sequence[Life], fixed: Sequence[Fixed], base: int) -> None:
        self.base = base
        self.sizes = np.array([life.size_bytes for life in lives], np.int64)
        there = sorted((item for item in fixed if item.address + item.size_bytes > base), key=lambda f: f.address)
        low, high = (np.zeros(len(lives) + len(there), np.int64) for _ in range(2))
        low[len(lives) :] = [item.address for item in there]
        high[len(lives) :] = [item.address + item.size_bytes for item in there]
        self.ends = np.stack([low, high])
        starts, stops = (
            np.array([getattr(item, name) for item in (*lives, *there)], np.int64) for name in ("start", "stop")
        )
        mine = len(lives)
        self.meets = (starts[None, :] < stops[:mine, None]) & (stops[None, :] > starts[:mine, None])

    def climber(self, order: Sequence[int] | Ints) -> _Climber:
        """Each life in turn, at the lowest place that is free for all of it."""
        found, ends = np.array(order, np.int64), self.ends.copy()
        sequence = np.empty(ends.shape[1], np.int64)
        top = _place(found, 0, self.sizes, self.meets, ends, sequence, self.base, NEVER)
        return _Climber(found, ends[0, : len(found)], int(top))

    def climbed(self, climber: _Climber, rounds: int, seed: int, enough: int) -> _Climber:
        """After so many tries to place one of the lives that reach farthest, or one that meets it, earlier."""
        order, ends = climber.order.copy(), self.ends.copy()
        ends[0, : len(order)] = climber.addresses
        top = _climb(order, ends, climber.top, self.sizes, self.meets, self.base, rounds, seed, enough)
        return _Climber(order, ends[0, : len(order)], int(top))


@compiled()
def _place(
    order: Ints, known: int, sizes: Ints, meets: Flags, ends: Ints, sequence: Ints, base: int, limit: int
) -> int:
    """How far the lives reach; more than `limit` where one does, and the rest is not placed.

    ends: first address of each, and the one behind it; of the first `known` lives they are there already. meets: which
    others are there while a life lives. sequence: room for the numbers of all, by address.
    """
    count = ends.shape[1] - len(order)
    for k in range(count):
        sequence[k] = len(order) + k
    top = 0
    for number in range(len(order)):
        i = order[number]
        size = sizes[i]
        if number < known:
            reached = ends[0, i]
            at = count
        else:
            # The first gap of this size between what is met while it lives; `at`: where it stands among all.
            reached = base
            at = count
            met = meets[i]
            for k in range(count):
                other = sequence[k]
                if met[other]:
                    if ends[0, other] - reached >= size:
                        at = k
                        break
                    if ends[1, other] > reached:
                        reached = ends[1, other]
            ends[0, i] = reached
            ends[1, i] = reached + size
        top = max(top, reached + size)
        if top > limit:
            break
        # What is not met may stand higher up than the gap: one before it need not be before all that is met.
        while at > 0 and ends[0, sequence[at - 1]] > reached:
            at -= 1
        for k in range(count, at, -1):
            sequence[k] = sequence[k - 1]
        sequence[at] = i
        count += 1
    return top


@compiled()
def _climb(
    order: Ints, ends: Ints, top: int, sizes: Ints, meets: Flags, base: int, rounds: int, seed: int, enough: int
) -> int:
    """Change `order` and `ends` for the better, or at least not for the worse; how far they reach."""
    total = len(order)
    sequence = np.empty(ends.shape[1], np.int64)
    for i in order:
        ends[1, i] = ends[0, i] + sizes[i]
    tried, moved = order.copy(), ends.copy()
    chosen = np.empty(total, np.int64)
    state = np.uint64(seed)
    for _ in range(rounds):
        if top <= enough:
            break
        count = 0
        for i in order:
            if ends[1, i] == top:
                chosen[count] = i
                count += 1
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        met = meets[chosen[int(state >> np.uint64(33)) % count]]
        count = 0
        for k in range(1, total):
            if met[order[k]]:
                chosen[count] = k
                count += 1
        if count == 0:
            continue
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        at = chosen[int(state >> np.uint64(33)) % count]
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        to = int(state >> np.uint64(33)) % at
        for k in range(total):
            tried[k] = order[k - 1] if to < k <= at else order[k]
            moved[0, k], moved[1, k] = ends[0, k], ends[1, k]
        tried[to] = order[at]
        reached = _place(tried, to, sizes, meets, moved, sequence, base, top)
        if reached <= top:
            top = reached
            for k in range(total):
                order[k] = tried[k]
                ends[0, k], ends[1, k] = moved[0, k], moved[1, k]
    return top
