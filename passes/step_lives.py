"""The lives of one step's blocks: from which event to which, what lies where already, and a packing of the rest."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.laid_step import Statement, Used, in_use
from fxhome.passes.pack_blocks import Fixed, Life, Packing, pack
from fxhome.passes.ranges import Ranges


class StepLives:
    """The lives of one step. Event numbers are positions in the whole of it."""

    def __init__(self, step: Sequence[Statement], used: Used, carried: Mapping[int, int], spare_bytes: int) -> None:
        self.step = step
        self.used = used
        self.carried = carried
        self.total = sum(len(statement.events) for statement in step)
        self.most_bytes = max((peak for _, peak in in_use(step, used)), default=0) + spare_bytes
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

    def packing(self, ranges: Ranges, seed: int, effort: int = 1) -> Packing:
        """Places for all lives. What replaces a block that was carried in stays where that was, where that is free."""
        fixed = [*self.walls(ranges), *self.passing]
        pinned = self.pinned
        free = [i for i, block in enumerate(self.blocks) if block not in pinned]
        fixed += [
            Fixed(address, life.size_bytes, life.start, life.stop)
            for block, address in pinned.items()
            for life in (self.life_of[block],)
        ]
        packed = pack([self.lives[i] for i in free], fixed, ranges[0][0], seed=seed, effort=effort)
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

    def as_fixed(self, block: int, address: int) -> Fixed:
        """A block at an address, for as long as it lives."""
        life = self.life_of[block]
        return Fixed(address, life.size_bytes, life.start, life.stop)
