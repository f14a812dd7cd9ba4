"""Where the blocks of a recorded step are to lie in what the allocator holds now, and the room that is made for them.

recorded step + what is in use  ->  a packing that fits into what may be reserved, before anything is touched
                                ->  free pages are given back, one extent is mapped behind what is left
                                ->  plugs for each state that a step may start from
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from fxhome.allocator_trace import RecordedStep, UnsteadyError
from fxhome.passes.extents import Extent, without_free_pages
from fxhome.passes.laid_step import Laid, NoRoomError
from fxhome.passes.lay_blocks import lay, lay_anew
from fxhome.passes.ranges import total_bytes
from fxhome.raw_allocator import Allocator
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

MORE_SHARE = 0.05
"""How much more than the recorded step took, which had to give back what did not fit, a layout may take."""
LESS_SHARE = 0.005
"""By how much less is asked for where room that should be there was not to be had."""
MAX_STATES = 4
"""Different starts of a step (batches that take turns, say) that are laid out."""

State = Mapping[int, tuple[int, int]]
"""(address, size in bytes) of what a step finds and frees, by the names of the recorded step."""


@dataclass
class Layout:
    """What steering follows. kept: blocks that no step frees. expected_bytes: allocated and reserved where a step
    begins, all streams together.
    """

    allocator: Allocator
    stream: int
    step: RecordedStep
    extent: Extent
    kept: Mapping[Hashable, tuple[int, int]]
    expected_bytes: tuple[int, int]
    spare_bytes: int
    tables: dict[frozenset[tuple[int, tuple[int, int]]], Laid] = field(default_factory=dict)

    def laid(self, state: State) -> Laid:
        """The plugs for a step that starts from a state. Raises UnsteadyError, NoRoomError."""
        key = frozenset(state.items())
        known = self.tables.get(key)
        if known is None:
            if len(self.tables) == MAX_STATES:
                raise UnsteadyError("what a step leaves lies elsewhere every time")
            known = lay(
                self.step.statements,
                self.extent.ranges,
                _together(self.kept, state),
                self.step.carried,
                self.spare_bytes,
            )
            self.tables[key] = known
        return known

    def is_mapped(self) -> bool:
        """Whether exactly what is to be mapped is, whatever other streams' segments have grown to."""
        if self.allocator.snapshot(self.stream).ranges != self.extent.ranges:
            return False
        self.expected_bytes = self.allocator.large_bytes()
        return True

    def has_room(self) -> bool:
        """Whether what is to be mapped may be, once all free pages are given back."""
        shown = self.allocator.snapshot(self.stream)
        resident = without_free_pages(shown.ranges, {("kept", a): (a, size) for a, size in shown.used.items()})
        held_bytes = total_bytes(resident) + shown.elsewhere_bytes
        return held_bytes + self.extent.size_bytes <= self.allocator.limit_bytes()

    def restore(self) -> None:
        """Map again what is to be mapped, where a step starts from what nobody frees. Raises UnsteadyError,
        torch.OutOfMemoryError.
        """
        self.allocator.empty_cache()
        address = self.allocator.map(self.extent.size_bytes)
        if address != self.extent.address or not self.is_mapped():
            raise UnsteadyError("what is mapped is not what was mapped before")


def _together(kept: Mapping[Hashable, tuple[int, int]], state: State) -> dict[Hashable, tuple[int, int]]:
    found = dict(kept)
    for name, place in state.items():
        found[name] = place
    return found


def establish(
    allocator: Allocator, stream: int, step: RecordedStep, state: State, recorded_bytes: int, spare_bytes: int
) -> Layout:
    """Pack the step on what is in use; only then give back what is free, and make room in one piece.

    recorded_bytes: what the recorded step had reserved. spare_bytes: see `lay`. Raises UnsteadyError, NoRoomError (also
    where nothing would be won; nothing was touched then, unless memory was refused).
    """
    begin = time.perf_counter()
    shown = allocator.snapshot(stream)
    carried = {address for address, _ in state.values()}
    if any(shown.used.get(address) != size for address, size in state.values()):
        raise UnsteadyError("what a step leaves is not where it was left")
    kept: dict[Hashable, tuple[int, int]] = {
        ("kept", address): (address, size) for address, size in shown.used.items() if address not in carried
    }
    used = _together(kept, state)
    ranges = without_free_pages(shown.ranges, used)
    if not ranges:
        raise UnsteadyError("nothing is resident on its stream")
    most_bytes = allocator.limit_bytes() - shown.elsewhere_bytes
    address: int | None = None
    while address is None:
        extent, laid = lay_anew(step.statements, ranges, used, step.carried, spare_bytes, most_bytes)
        if laid.mapped_bytes >= recorded_bytes and not step.gives_back:
            raise NoRoomError("no packing of its blocks was found that takes less")
        if laid.mapped_bytes > recorded_bytes * (1 + MORE_SHARE):
            raise UnsteadyError(f"{format_bytes(laid.mapped_bytes)} would be needed with what happens between steps")
        allocator.empty_cache()
        try:
            address = allocator.map(extent.size_bytes)
        except torch.OutOfMemoryError:
            # Another process took it, or not all that is free can be had: with less, until no packing fits.
            most_bytes = laid.mapped_bytes - int(LESS_SHARE * laid.mapped_bytes)
    found = allocator.snapshot(stream).ranges
    if (address, found) != (extent.address, extent.ranges):
        # There were unmapped addresses that nothing told of, below everything else.
        extent = Extent(extent.size_bytes, address, found)
        laid = lay(step.statements, found, used, step.carried, spare_bytes)
    log.debug("fxhome: blocks laid in %.2f s: %s", time.perf_counter() - begin, format_bytes(laid.mapped_bytes))
    tables = {frozenset(state.items()): laid}
    return Layout(allocator, stream, step, extent, kept, allocator.large_bytes(), spare_bytes, tables)
