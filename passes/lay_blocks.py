"""Send every block of a step to its place in the caching allocator, by plugging what it would otherwise take.

    a step (allocations and frees, each statement behind a hook) + what is mapped and in use at its start
        ->  for each hook, what to take before its statement, so that the whole step needs no more than is mapped

An allocation takes the hole that fits best. Whatever fits better than the planned one is taken just before, and given
back just behind; a spacer at the low end of a hole moves the allocation up. What is allocated where no hook stands goes
where best fit puts it. The result is what the model of the allocator (best_fit.py) really does, plugs included: where
a block cannot be sent to its place, the rest is packed again around the place that it gets.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, whole_pages
from fxhome.passes.best_fit import GRANULE_BYTES, Heap
from fxhome.passes.holes import ENDLESS
from fxhome.passes.pack_blocks import Fixed, Life, Packing, gaps, most_alive, pack
from fxhome.passes.ranges import Ranges, joined, total_bytes
from fxhome.units import format_bytes

MAX_AGAIN = 200
"""How often the rest of a step is packed again, at most."""
AGAIN_ROUNDS = 50
MAX_SEEDS = 6
ENOUGH_SHARE = 0.02
"""Packings that are tried, at most, until one can be steered to within so much of what is alive at once, and fits."""
FEW_SEEDS = 3
HOPELESS_SHARE = 0.1
"""After so many, packings that are still farther from it than this are not followed by more: they differ by less."""
MAX_EXTENTS = 9
EXTENT_SHARE = 0.004
"""How much more is mapped where a step does not fit into what its packing needs; then twice that, and so on."""
CLOSE_SHARE = 0.004
"""Extents so close to one that is too small are not looked for."""

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
    """Raw allocations before a statement, in order, with the addresses that they must get.

    takes: (size in bytes, address). stand_ins: which of them are given back before the statement runs, for it takes
    their place; the others go back behind it.
    """

    takes: tuple[tuple[int, int], ...]
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


def lay_anew(
    step: Sequence[Statement],
    ranges: Iterable[tuple[int, int]],
    used: Used,
    carried: Mapping[int, int],
    spare_bytes: int = 0,
    most_bytes: int = ENDLESS,
) -> tuple[Extent, Laid]:
    """Lay a step on what is in use, with one extent behind it that is as small as this finds.

    ranges: what stays mapped once all free pages are given back. carried, spare_bytes: see `lay`. most_bytes: what may
    be mapped in all while the extent is taken. Raises NoRoomError.
    """
    ranges = tuple(ranges)
    problem = _Problem(step, used, carried, spare_bytes)
    least_bytes = whole_pages(max(PAGE_BYTES, most_alive(problem.lives, problem.passing, 0)))
    room_bytes = most_bytes - total_bytes(ranges)
    best: tuple[Extent, Laid] | None = None
    for seed in range(MAX_SEEDS):
        if least_bytes > room_bytes:
            break
        found = problem.laid_anew(ranges, least_bytes, seed)
        if found is not None and (best is None or found[0].size_bytes < best[0].size_bytes):
            best = found
        if best is not None and best[0].size_bytes <= min(room_bytes, least_bytes * (1 + ENOUGH_SHARE)):
            break
        if seed + 1 == FEW_SEEDS and (best is None or best[0].size_bytes > least_bytes * (1 + HOPELESS_SHARE)):
            break
    if best is None or best[0].size_bytes > room_bytes:
        raise NoRoomError(f"no packing of its blocks was found that fits into {format_bytes(most_bytes)}")
    return best


def lay(
    step: Sequence[Statement],
    ranges: Iterable[tuple[int, int]],
    used: Used,
    carried: Mapping[int, int],
    spare_bytes: int = 0,
) -> Laid:
    """Lay a step on what is in use and mapped at its start.

    carried: of blocks that the step frees and did not allocate, those that took their place, by their names; what is
    carried lies as far as possible where it lay before. spare_bytes: how much more than at the step's own worst moment
    may be in use at once, plugs included. Raises NoRoomError.
    """
    ranges = tuple(sorted(ranges))
    problem = _Problem(step, used, carried, spare_bytes)
    for seed in range(MAX_SEEDS):
        with contextlib.suppress(NoRoomError):
            return problem.laid(ranges, problem.packing(ranges, seed))
    raise NoRoomError


class _Problem:
    """The lives of one step. Event numbers are positions in the whole of it."""

    def __init__(self, step: Sequence[Statement], used: Used, carried: Mapping[int, int], spare_bytes: int) -> None:
        self.step = step
        self.used = used
        self.carried = carried
        self.total = sum(len(statement.events) for statement in step)
        self.most_bytes = max((peak for _, peak in _in_use(step, used)), default=0) + spare_bytes
        """What may be in use at once, plugs included: the allocator's counters do not tell them from tensors."""
        starts: dict[int, tuple[int, int]] = {}
        self.stops: dict[int, int] = {}
        self.steered: set[int] = set()
        number = 0
        for statement in step:
            for event in statement.events:
                if event.size_bytes:
                    assert event.size_bytes > SMALL_BYTES, "small allocations live elsewhere"
                    starts[event.block] = (number, event.size_bytes)
                    if statement.hook is not None:
                        self.steered.add(event.block)
                else:
                    self.stops[event.block] = number
                number += 1
        self.blocks = list(starts)
        self.life_of = {
            block: Life(size, start, self.stops.get(block, self.total)) for block, (start, size) in starts.items()
        }
        self.lives = list(self.life_of.values())
        self.table = np.array([(life.size_bytes, life.start) for life in self.lives], np.int64).reshape(-1, 2).T
        """Sizes and starts, in two rows."""
        self.pinned = self._pinned()
        self.passing = [
            Fixed(address, size, -1, self.stops[key])
            for key, (address, size) in used.items()
            if isinstance(key, int) and key in self.stops
        ]
        """What is in use at the start and freed on the way."""

    def walls(self, ranges: Ranges) -> list[Fixed]:
        """Addresses that are not to be had: unmapped ones, and what is in use all the time."""
        found = [Fixed(end, start - end) for (_, end), (start, _) in pairwise(ranges)]
        kept = [place for key, place in self.used.items() if not isinstance(key, int) or key not in self.stops]
        return [*found, *(Fixed(address, size) for address, size in kept)]

    def laid_anew(self, ranges: Ranges, least_bytes: int, seed: int) -> tuple[Extent, Laid] | None:
        """With an extent of that size or of more, looked for between what is too small and what is not."""
        size_bytes = least_bytes
        step_bytes = max(PAGE_BYTES, int(EXTENT_SHARE * size_bytes))
        too_small = 0
        best: tuple[Extent, Laid] | None = None
        packings: dict[Ranges, Packing] = {}
        for _ in range(MAX_EXTENTS):
            extent = grown(ranges, self.used, size_bytes)
            walls = (*extent.ranges[:-1], (extent.ranges[-1][0], ENDLESS))
            packing = packings.get(walls) or self.packing(walls, seed)
            packings[walls] = packing
            missing = packing.top - extent.ranges[-1][1]
            if missing <= 0:
                try:
                    best = extent, self.laid(extent.ranges, packing)
                except NoRoomError:
                    missing = step_bytes
                    step_bytes *= 2
            if missing > 0:
                too_small = size_bytes
            if best is None:
                size_bytes += whole_pages(missing)
                continue
            size_bytes = whole_pages((too_small + best[0].size_bytes) // 2)
            if not too_small or best[0].size_bytes - too_small <= max(PAGE_BYTES, CLOSE_SHARE * size_bytes):
                break
        return best

    def packing(self, ranges: Ranges, seed: int) -> Packing:
        """Places for all lives. What replaces a block that was carried in stays where that was, where that is free."""
        fixed = [*self.walls(ranges), *self.passing]
        pinned = self.pinned
        free = [i for i, block in enumerate(self.blocks) if block not in pinned]
        fixed += [
            Fixed(address, life.size_bytes, life.start, life.stop)
            for block, address in pinned.items()
            for life in (self.life_of[block],)
        ]
        packed = pack([self.lives[i] for i in free], fixed, ranges[0][0], seed=seed)
        found = dict(pinned) | {self.blocks[i]: a for i, a in zip(free, packed.addresses, strict=True)}
        tops = (found[block] + self.life_of[block].size_bytes for block in self.blocks)
        return Packing(tuple(found[block] for block in self.blocks), max(tops, default=0))

    def _pinned(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for before, after in self.carried.items():
            if before not in self.used or after not in self.steered:
                continue
            address, size = self.used[before]
            life = self.life_of[after]
            if size == life.size_bytes and self.stops[before] < life.start:
                found[after] = address
        return found

    def laid(self, ranges: Ranges, packing: Packing) -> Laid:
        """Run the step in the model, steering each block to its place."""
        heap = Heap(ranges, self.used)
        targets = dict(zip(self.blocks, packing.addresses, strict=True))
        plugs: dict[int, Plugs] = {}
        again = 0
        number = 0
        for statement, (in_use, peak) in zip(self.step, _in_use(self.step, self.used), strict=True):
            made = [event for event in statement.events if event.size_bytes]
            taken: Plugs | None = None
            if made and statement.hook is not None:
                if len(made) == 1:
                    self._let_be(heap, targets, made[0].block)
                for event in made:
                    if not _is_reachable(heap, targets[event.block], event.size_bytes):
                        self._place_elsewhere(heap, ranges, targets, event.block, number)
                room = self.most_bytes - in_use, self.most_bytes - peak
                taken = _plug(heap, [(event, targets[event.block]) for event in made], *room)
                if taken.takes:
                    plugs[statement.hook] = taken
            deviating: list[int] = []
            for event in statement.events:
                number += 1
                if not event.size_bytes:
                    heap.give(event.block)
                    continue
                address = heap.take(event.block, event.size_bytes)
                if address is None:
                    raise NoRoomError
                if address != targets[event.block]:
                    targets[event.block] = address
                    deviating.append(event.block)
            if taken is not None:
                for i in range(len(taken.takes)):
                    if i not in taken.stand_ins:
                        heap.give(_plug_key(i))
            if deviating and again < MAX_AGAIN:
                again += self._pack_rest(heap, ranges, targets, number, deviating)
        end = {key: place for key, place in heap.used.items() if not isinstance(key, int) or key not in self.life_of}
        names = {after: before for before, after in self.carried.items()}
        end |= {names.get(key, key): heap.used[key] for key in self.life_of if key in heap.used}
        return Laid(ranges, plugs, {block: targets[block] for block in self.blocks}, end)

    def _let_be(self, heap: Heap, targets: dict[int, int], block: int) -> None:
        """Where it would go by itself, where nobody else is to lie meanwhile: that takes no plug."""
        life = self.life_of[block]
        hole = heap.best(life.size_bytes)
        if hole is None or block in self.pinned:
            return
        address = hole[0]
        planned = np.array([targets[other] for other in self.blocks], np.int64)
        sizes, starts = self.table
        meets = (planned < address + life.size_bytes) & (planned + sizes > address)
        meets &= (starts < life.stop) & (starts > life.start)
        if not meets.any():
            targets[block] = address

    def _place_elsewhere(self, heap: Heap, ranges: Ranges, targets: dict[int, int], block: int, number: int) -> None:
        """A place that can be reached now and that nobody else needs, where there is one."""
        life = self.life_of[block]
        fixed = self._there(heap, ranges)
        fixed += [self._as_fixed(b, targets[b]) for b in self.blocks if b != block and self.life_of[b].start >= number]
        holes = sorted((address, size) for size, address in heap.holes if size >= life.size_bytes)
        for low, high in gaps(life, fixed, ranges[0][0]):
            for start, size in holes:
                address = max(low, start)
                if 0 < address - start <= SMALL_BYTES:
                    address = start + SMALL_BYTES + GRANULE_BYTES
                if address + life.size_bytes <= min(high, start + size):
                    targets[block] = address
                    return

    def _there(self, heap: Heap, ranges: Ranges) -> list[Fixed]:
        """What lies where it is: addresses that are not to be had, and what is in use now."""
        found = self.walls(ranges)
        for key, (address, size) in heap.used.items():
            if isinstance(key, int) and (key in self.stops or key in self.life_of):
                found.append(Fixed(address, size, -1, self.stops.get(key, self.total)))
        return found

    def _pack_rest(
        self, heap: Heap, ranges: Ranges, targets: dict[int, int], number: int, deviating: Sequence[int]
    ) -> bool:
        """New places for what is not allocated yet: for what lies where a block went that was to lie elsewhere, or for
        all of it. False where nothing was in the way.
        """
        rest = [block for block in self.blocks if self.life_of[block].start >= number]
        planned = {block: self._as_fixed(block, targets[block]) for block in rest}
        intruders = [self._as_fixed(block, targets[block]) for block in deviating]
        moved = {block for block in rest if any(_meet(planned[block], other) for other in intruders)}
        if not moved:
            return False
        there = self._there(heap, ranges)
        others = [fixed for block, fixed in planned.items() if block not in moved]
        order = list(moved)
        packed = pack([self.life_of[block] for block in order], [*there, *others], ranges[0][0], 0)
        if packed.top > ranges[-1][1]:
            order = rest
            packed = pack([self.life_of[block] for block in order], there, ranges[0][0], AGAIN_ROUNDS)
        targets.update(zip(order, packed.addresses, strict=True))
        return True

    def _as_fixed(self, block: int, address: int) -> Fixed:
        life = self.life_of[block]
        return Fixed(address, life.size_bytes, life.start, life.stop)


def _meet(one: Fixed, other: Fixed) -> bool:
    return (
        one.address < other.address + other.size_bytes
        and other.address < one.address + one.size_bytes
        and one.start < other.stop
        and other.start < one.stop
    )


def _is_reachable(heap: Heap, target: int, size_bytes: int) -> bool:
    for size, start in heap.holes:
        if start <= target and target + size_bytes <= start + size:
            return target == start or target - start > SMALL_BYTES
    return False


def _plug_key(i: int) -> tuple[str, int]:
    return ("plug", i)


def _in_use(step: Sequence[Statement], used: Used) -> list[tuple[int, int]]:
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


def _plug(heap: Heap, made: Sequence[tuple[Event, int]], before_bytes: int, during_bytes: int) -> Plugs:
    """What to take so that each allocation goes to its place, as far as that can be done; the plugs are left taken.

    before_bytes, during_bytes: what may be taken in all before the statement, and held while it runs.
    """
    takes: list[tuple[int, int]] = []
    stand_ins: list[int] = []

    def take(size_bytes: int, is_stand_in: bool = False) -> bool:
        taken_bytes = sum(size for size, _ in takes)
        held_bytes = taken_bytes - sum(takes[i][0] for i in stand_ins)
        if taken_bytes + size_bytes > before_bytes or (not is_stand_in and held_bytes + size_bytes > during_bytes):
            return False
        address = heap.take(_plug_key(len(takes)), size_bytes)
        if address is None:
            return False
        takes.append((size_bytes, address))
        return True

    for k, (event, target) in enumerate(made):
        before = len(takes)
        if not _clear(heap, event.size_bytes, target, take):
            for i in reversed(range(before, len(takes))):
                heap.give(_plug_key(i))
            del takes[before:]
        if k + 1 < len(made) and take(event.size_bytes, True):
            stand_ins.append(len(takes) - 1)
    for i in stand_ins:
        heap.give(_plug_key(i))
    return Plugs(tuple(takes), frozenset(stand_ins))


def _clear(heap: Heap, size_bytes: int, target: int, take: Callable[[int], bool]) -> bool:
    """Plug until an allocation would go to its place; False where that cannot be done."""
    for _ in range(len(heap.holes) + 2):
        hole = heap.best(size_bytes)
        if hole is None:
            return False
        start, size = hole
        if start == target:
            return True
        wanted = _least_plug(heap, size, size_bytes)
        if start < target and target + size_bytes <= start + size:
            spacer = target - start
            if spacer <= SMALL_BYTES:
                return False
            lies = heap.best(spacer)
            assert lies is not None, "the hole itself has room"
            wanted = spacer if lies[0] == start else _least_plug(heap, lies[1], spacer)
        if not take(wanted):
            return False
    return False


def _least_plug(heap: Heap, hole_bytes: int, refused_bytes: int) -> int:
    """The smallest plug that goes to the hole of a size and leaves less of it than would be refused."""
    i = bisect_left(heap.holes, (hole_bytes, 0))
    smaller = heap.holes[i - 1][0] if i else 0
    return min(hole_bytes, max(hole_bytes - refused_bytes, smaller, SMALL_BYTES) + GRANULE_BYTES)
