"""Where the blocks of a recorded step are to lie in what the allocator holds now, and the room that is made for them.

recorded step + what is in use  ->  free pages are given back, one extent is mapped behind what is left
                                ->  plugs for each state that a step may start from
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from fxhome.allocator_trace import RecordedStep, UnsteadyError
from fxhome.passes.lay_blocks import Extent, Laid, NoRoomError, lay, lay_anew
from fxhome.raw_allocator import Allocator
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

MORE_SHARE = 0.05
"""How much more than the recorded step took, which had to give back what did not fit, a layout may take."""
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

    def restore(self) -> None:
        """Map again what is to be mapped, where a step starts from what nobody frees. Raises UnsteadyError."""
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
    """Give back what is free, pack the step on what is left, and make room for it in one piece.

    recorded_bytes: what the recorded step had reserved. spare_bytes: see `lay`. Raises UnsteadyError, NoRoomError (also
    where nothing would be won), torch.OutOfMemoryError.
    """
    begin = time.perf_counter()
    allocator.empty_cache()
    shown = allocator.snapshot(stream)
    carried = {address for address, _ in state.values()}
    if any(shown.used.get(address) != size for address, size in state.values()):
        raise UnsteadyError("what a step leaves is not where it was left")
    if not shown.ranges:
        raise UnsteadyError("nothing is resident on its stream")
    kept: dict[Hashable, tuple[int, int]] = {
        ("kept", address): (address, size) for address, size in shown.used.items() if address not in carried
    }
    extent, laid = lay_anew(step.statements, shown.ranges, _together(kept, state), step.carried, spare_bytes)
    if laid.mapped_bytes >= recorded_bytes and not step.gives_back:
        raise NoRoomError
    if laid.mapped_bytes > recorded_bytes * (1 + MORE_SHARE):
        raise UnsteadyError(f"{format_bytes(laid.mapped_bytes)} would be needed with what happens between its steps")
    address = allocator.map(extent.size_bytes)
    ranges = allocator.snapshot(stream).ranges
    if (address, ranges) != (extent.address, extent.ranges):
        # There were unmapped addresses that nothing told of, below everything else.
        extent = Extent(extent.size_bytes, address, ranges)
        laid = lay(step.statements, ranges, _together(kept, state), step.carried, spare_bytes)
    log.debug("fxhome: blocks laid in %.2f s: %s", time.perf_counter() - begin, format_bytes(laid.mapped_bytes))
    tables = {frozenset(state.items()): laid}
    return Layout(allocator, stream, step, extent, kept, allocator.large_bytes(), spare_bytes, tables)
