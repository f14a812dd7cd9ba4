"""Send every block of a step to its place in the caching allocator, by plugging what it would otherwise take.

    a step (allocations and frees, each statement behind a hook) + what is mapped and in use at its start
        ->  for each hook, what to take before its statement, so that the whole step needs no more than is mapped

An allocation takes the hole that fits best. Whatever fits better than the planned one is taken just before, and held
until its place is needed; a spacer at the low end of a hole moves the allocation up. What is allocated where no hook
stands goes where best fit puts it. The result is what the model of the allocator (best_fit.py) really does, plugs
included: where a block cannot be sent to its place, the rest is packed again around the place that it gets.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from fxhome.passes.allocator import PAGE_BYTES, whole_pages
from fxhome.passes.extents import Extent, grown
from fxhome.passes.holes import ENDLESS
from fxhome.passes.laid_step import Laid, NoRoomError, Statement, Used
from fxhome.passes.pack_blocks import EFFORTS, Packing, most_alive
from fxhome.passes.ranges import Ranges, total_bytes
from fxhome.passes.steer_blocks import steer
from fxhome.passes.step_lives import StepLives
from fxhome.units import format_bytes

MAX_SEEDS = 6
"""Packings of what is mapped already that are tried, at most."""
ENOUGH_SHARE = 0.02
"""Packings are tried until one can be steered to within so much of what is alive at once, and fits. With more effort,
only where none fits.
"""
FEW_SEEDS = 3
HOPELESS_SHARE = 0.1
"""After so many, packings that are still farther from it than this are not followed by more: they differ by less."""
MAX_EXTENTS = 9
EXTENT_SHARE = 0.004
"""How much more is mapped where a step does not fit into what its packing needs; then twice that, and so on."""
CLOSE_SHARE = 0.004
"""Extents so close to one that is too small are not looked for."""


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
    lives = StepLives(step, used, carried, spare_bytes)
    least_bytes = whole_pages(max(PAGE_BYTES, most_alive(lives.lives, lives.passing, 0)))
    room_bytes = most_bytes - total_bytes(ranges)
    best: tuple[Extent, Laid] | None = None
    for seed, effort in enumerate(EFFORTS):
        if least_bytes > room_bytes or (effort > 1 and best is not None and best[0].size_bytes <= room_bytes):
            break
        found = _laid_anew(lives, ranges, least_bytes, seed, effort)
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
    lives = StepLives(step, used, carried, spare_bytes)
    for seed in range(MAX_SEEDS):
        with contextlib.suppress(NoRoomError):
            return steer(lives, ranges, lives.packing(ranges, seed))
    raise NoRoomError


def _laid_anew(
    lives: StepLives, ranges: Ranges, least_bytes: int, seed: int, effort: int
) -> tuple[Extent, Laid] | None:
    """With an extent of that size or of more, looked for between what is too small and what is not."""
    size_bytes = least_bytes
    step_bytes = max(PAGE_BYTES, int(EXTENT_SHARE * size_bytes))
    too_small = 0
    best: tuple[Extent, Laid] | None = None
    packings: dict[Ranges, Packing] = {}
    for _ in range(MAX_EXTENTS):
        extent = grown(ranges, lives.used, size_bytes)
        walls = (*extent.ranges[:-1], (extent.ranges[-1][0], ENDLESS))
        packing = packings.get(walls) or lives.packing(walls, seed, effort)
        packings[walls] = packing
        missing = packing.top - extent.ranges[-1][1]
        if missing <= 0:
            try:
                best = extent, steer(lives, extent.ranges, packing)
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
