"""A step under a cap on what may be reserved: the fast model against the one that is written from its pages up."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.passes.allocator import PAGE_BYTES, STEPS, Allocation, reserved_bytes
from fxhome.passes.capped_allocator import STARTS, least_cap, runs_within
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


def runs(step: list[Allocation], cap_bytes: int, start_bytes: int) -> bool:
    """The same by the slow model."""
    allocator = ModelAllocator(cap_bytes=cap_bytes + (PAGE_BYTES if start_bytes else 0))
    if start_bytes:
        allocator.take(start_bytes)
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
@given(step=steps(), share=st.sampled_from([1.0, 1.02, 1.1, 1.2, 1.4]), start_bytes=st.sampled_from(STARTS))
def test_it_says_what_the_slow_model_says(step: list[Allocation], share: float, start_bytes: int) -> None:
    cap_bytes = int(most_alive(step) * share)

    assert runs_within(step, cap_bytes, start_bytes) == runs(step, cap_bytes, start_bytes)


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_under_the_least_cap_a_step_runs_wherever_in_a_page_it_begins(step: list[Allocation]) -> None:
    reserved, alive_bytes = reserved_bytes(step)
    least = least_cap(step, alive_bytes, reserved)

    assert all(runs_within(step, least, start_bytes) for start_bytes in STARTS)
    assert not all(runs_within(step, least - PAGE_BYTES, start_bytes) for start_bytes in STARTS) or (
        least - PAGE_BYTES < alive_bytes
    )


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
