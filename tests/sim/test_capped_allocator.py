"""A step under a cap on what may be reserved: the fast model against the one that is written from its pages up."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.passes.allocator import PAGE_BYTES, STEPS, Allocation
from fxhome.passes.capped_allocator import runs_within
from tests.allocator_model import ModelAllocator

MIB = 1 << 20


@st.composite
def steps(draw: st.DrawFn) -> list[Allocation]:
    """Blocks of a few sizes, freed in any order; some are left to the end of the step."""
    found: list[Allocation] = []
    alive: list[str] = []
    for index in range(draw(st.integers(2, 40))):
        if alive and draw(st.booleans()):
            found.append(Allocation(alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        else:
            size_bytes = draw(st.sampled_from([3, 7, 16, 33, 64, 67, 128])) * MIB + 512 * draw(st.integers(0, 9))
            found.append(Allocation(f"buf{index}", size_bytes))
            alive.append(f"buf{index}")
    return found


def most_alive(step: list[Allocation]) -> int:
    sizes: dict[str, int] = {}
    most = 0
    for event in step:
        sizes[event.name] = event.size_bytes
        most = max(most, sum(sizes.values()))
    return most


def runs(step: list[Allocation], cap_bytes: int) -> bool:
    """The same by the slow model."""
    allocator = ModelAllocator(cap_bytes=cap_bytes)
    places: dict[str, int] = {}
    try:
        for _ in range(STEPS):
            for event in step:
                if event.size_bytes:
                    places[event.name] = allocator.take(event.size_bytes)
                else:
                    allocator.give(places.pop(event.name))
            for name in list(places):
                allocator.give(places.pop(name))
    except torch.OutOfMemoryError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(step=steps(), share=st.sampled_from([1.0, 1.02, 1.1, 1.2, 1.4]))
def test_it_says_what_the_slow_model_says(step: list[Allocation], share: float) -> None:
    cap_bytes = int(most_alive(step) * share)

    assert runs_within(step, cap_bytes) == runs(step, cap_bytes)


def test_there_may_be_enough_and_all_of_it_in_parts_of_pages() -> None:
    block, spacer = 15 * MIB, 6 * MIB
    names = [f"{i}" for i in range(8)]
    step = [event for name in names for event in (Allocation(name, block), Allocation(f"spacer {name}", spacer))]
    step += [Allocation(name, 0) for name in names]
    step += [Allocation("large", 40 * MIB)]

    assert most_alive(step) == 8 * (block + spacer)
    mapped = -(-8 * (block + spacer) // PAGE_BYTES) * PAGE_BYTES
    assert not runs_within(step, mapped + 20 * MIB)
    assert runs_within(step, mapped + 40 * MIB)


def test_whole_pages_of_free_blocks_are_mapped_elsewhere() -> None:
    step = [Allocation("first", 60 * MIB), Allocation("between", 20 * MIB), Allocation("last", 60 * MIB)]
    step += [Allocation("first", 0), Allocation("last", 0), Allocation("large", 120 * MIB)]

    assert runs_within(step, 140 * MIB)
    assert not runs_within(step, 139 * MIB)
