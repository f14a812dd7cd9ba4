"""Run a step in the model of the allocator, sending each block to its place, and say what that takes.

    lives + a packing of them  ->  for each hook, the plugs before its statement; where every block really went

Where a block cannot be sent to its place, the rest is packed again around the place that it gets.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.best_fit import GRANULE_BYTES, Heap
from fxhome.passes.laid_step import Event, Laid, NoRoomError, Plugs, Statement, in_use
from fxhome.passes.pack_blocks import Fixed, Packing, gaps, pack
from fxhome.passes.plug_holes import Plug, Plugged, is_reachable, plug
from fxhome.passes.ranges import Ranges
from fxhome.passes.step_lives import StepLives

MAX_AGAIN = 200
"""How often the rest of a step is packed again, at most."""
AGAIN_ROUNDS = 50


def steer(lives: StepLives, ranges: Ranges, packing: Packing) -> Laid:
    """The step as it runs where `ranges` are mapped. Raises NoRoomError."""
    return _Steering(lives, ranges, packing).run()


class _Steering:
    """A step on its way through the model. targets: where each block lies or is to lie."""

    def __init__(self, lives: StepLives, ranges: Ranges, packing: Packing) -> None:
        self.lives = lives
        self.ranges = ranges
        self.heap = Heap(ranges, lives.used)
        self.targets = dict(zip(lives.blocks, packing.addresses, strict=True))
        self.plugs: dict[int, Plugs] = {}
        self.held: dict[Plug, tuple[int, int]] = {}
        """Plugs that are taken, with their addresses and sizes in bytes."""
        self.taken = 0

    def run(self) -> Laid:
        """Steer each block to its place."""
        lives, heap = self.lives, self.heap
        again = 0
        number = 0
        for statement, bytes_in_use in zip(lives.step, in_use(lives.step, lives.used), strict=True):
            self._plug(statement, number, *bytes_in_use)
            deviating: list[int] = []
            for event in statement.events:
                number += 1
                if not event.size_bytes:
                    heap.give(event.block)
                    continue
                address = heap.take(event.block, event.size_bytes)
                if address is None:
                    raise NoRoomError
                if address != self.targets[event.block]:
                    self.targets[event.block] = address
                    deviating.append(event.block)
            if deviating and again < MAX_AGAIN:
                again += self._pack_rest(number, deviating)
        self._give_back(list(self.held))
        life_of = lives.life_of
        end = {key: place for key, place in heap.used.items() if not isinstance(key, int) or key not in life_of}
        names = {after: before for before, after in lives.carried.items()}
        end |= {names.get(key, key): heap.used[key] for key in life_of if key in heap.used}
        return Laid(self.ranges, self.plugs, {block: self.targets[block] for block in lives.blocks}, end)

    def _plug(self, statement: Statement, number: int, before_bytes: int, peak_bytes: int) -> None:
        """Before a statement whose first event has that number; the bytes are what is in use by then, and at its worst
        moment.

        What is held stays held as long as it is in nobody's way: the holes that must not be taken now are those that
        must not be taken next.
        """
        if statement.hook is None:
            self._give_back(list(self.held))  # the call before it has ended
            return
        made = [event for event in statement.events if event.size_bytes]
        if not made:
            return
        given = self._give_back(self._too_many(peak_bytes))
        if len(made) == 1:
            self._let_be(made[0].block)
        given += self._give_back(self._in_the_way(made))
        if not all(self._is_reachable(event) for event in made):
            given += self._give_back(list(self.held))
        for event in made:
            if not self._is_reachable(event):
                self._place_elsewhere(event.block, number)
        plugged = self._sent(made, before_bytes, peak_bytes)
        if not plugged.is_clear and self.held:
            for key in plugged.held:
                self.heap.give(key)
            given += self._give_back(list(self.held))
            plugged = self._sent(made, before_bytes, peak_bytes)
        self.held |= plugged.held
        self.taken += len(plugged.takes)
        if given or plugged.takes:
            takes = tuple((size, address) for _, size, address in plugged.takes)
            self.plugs[statement.hook] = Plugs(tuple(given), takes, plugged.stand_ins)

    def _sent(self, made: Sequence[Event], before_bytes: int, peak_bytes: int) -> Plugged:
        room_bytes = self.lives.most_bytes - sum(size for _, size in self.held.values())
        aims = [(event, self.targets[event.block]) for event in made]
        return plug(self.heap, aims, room_bytes - before_bytes, room_bytes - peak_bytes, self.taken)

    def _is_reachable(self, event: Event) -> bool:
        return is_reachable(self.heap, self.targets[event.block], event.size_bytes)

    def _give_back(self, keys: Iterable[Plug]) -> list[int]:
        """Give plugs back; their addresses."""
        given = []
        for key in keys:
            self.heap.give(key)
            given.append(self.held.pop(key)[0])
        return given

    def _too_many(self, peak_bytes: int) -> list[Plug]:
        """Plugs for which there is no room beside that, the largest ones."""
        over_bytes = peak_bytes + sum(size for _, size in self.held.values()) - self.lives.most_bytes
        found = []
        for key in sorted(self.held, key=lambda key: self.held[key][1], reverse=True):
            if over_bytes <= 0:
                break
            over_bytes -= self.held[key][1]
            found.append(key)
        return found

    def _in_the_way(self, made: Iterable[Event]) -> list[Plug]:
        """Plugs that lie where something is to go."""
        aims = [(self.targets[event.block], self.targets[event.block] + event.size_bytes) for event in made]
        return [
            key
            for key, (address, size) in self.held.items()
            if any(address < end and start < address + size for start, end in aims)
        ]

    def _let_be(self, block: int) -> None:
        """Where it would go by itself, where nobody else is to lie meanwhile: that takes no plug."""
        lives = self.lives
        life = lives.life_of[block]
        hole = self.heap.best(life.size_bytes)
        if hole is None or block in lives.pinned:
            return
        address = hole[0]
        planned = np.array([self.targets[other] for other in lives.blocks], np.int64)
        sizes, starts = lives.table
        meets = (planned < address + life.size_bytes) & (planned + sizes > address)
        meets &= (starts < life.stop) & (starts > life.start)
        if not meets.any():
            self.targets[block] = address

    def _place_elsewhere(self, block: int, number: int) -> None:
        """A place that can be reached now and that nobody else needs, where there is one."""
        lives = self.lives
        life = lives.life_of[block]
        fixed = self._there()
        fixed += [
            lives.as_fixed(b, self.targets[b]) for b in lives.blocks if b != block and lives.life_of[b].start >= number
        ]
        holes = sorted((address, size) for size, address in self.heap.holes if size >= life.size_bytes)
        for low, high in gaps(life, fixed, self.ranges[0][0]):
            for start, size in holes:
                address = max(low, start)
                if 0 < address - start <= SMALL_BYTES:
                    address = start + SMALL_BYTES + GRANULE_BYTES
                if address + life.size_bytes <= min(high, start + size):
                    self.targets[block] = address
                    return

    def _there(self) -> list[Fixed]:
        """What lies where it is: addresses that are not to be had, and what is in use now."""
        lives = self.lives
        found = lives.walls(self.ranges)
        for key, (address, size) in self.heap.used.items():
            if isinstance(key, int) and (key in lives.stops or key in lives.life_of):
                found.append(Fixed(address, size, -1, lives.stops.get(key, lives.total)))
        return found

    def _pack_rest(self, number: int, deviating: Sequence[int]) -> bool:
        """New places for what is not allocated yet: for what lies where a block went that was to lie elsewhere, or for
        all of it. False where nothing was in the way.
        """
        lives, targets = self.lives, self.targets
        rest = [block for block in lives.blocks if lives.life_of[block].start >= number]
        planned = {block: lives.as_fixed(block, targets[block]) for block in rest}
        intruders = [lives.as_fixed(block, targets[block]) for block in deviating]
        moved = {block for block in rest if any(_meet(planned[block], other) for other in intruders)}
        if not moved:
            return False
        there = self._there()
        others = [fixed for block, fixed in planned.items() if block not in moved]
        order = list(moved)
        packed = pack([lives.life_of[block] for block in order], [*there, *others], self.ranges[0][0], 0)
        if packed.top > self.ranges[-1][1]:
            order = rest
            packed = pack([lives.life_of[block] for block in order], there, self.ranges[0][0], AGAIN_ROUNDS)
        targets.update(zip(order, packed.addresses, strict=True))
        return True


def _meet(one: Fixed, other: Fixed) -> bool:
    return (
        one.address < other.address + other.size_bytes
        and other.address < one.address + one.size_bytes
        and one.start < other.stop
        and other.start < one.stop
    )
