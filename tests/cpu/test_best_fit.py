"""Best fit without growth, and where growth goes: the same as the allocator that is written down page by page."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.passes.best_fit import Heap, rounded
from fxhome.passes.extents import grown
from tests.allocator_model import PAGE, ModelAllocator

MIB = 1 << 20


def test_sizes_are_rounded_up() -> None:
    assert [rounded(size) for size in (1, 512, 513, MIB)] == [512, 512, 1024, MIB]


def test_the_lowest_of_the_smallest_holes_is_taken() -> None:
    heap = Heap([(0, 100 * MIB)], {"w": (10 * MIB, 5 * MIB), "x": (25 * MIB, 5 * MIB), "y": (60 * MIB, 5 * MIB)})
    assert [address // MIB for _, address in heap.holes] == [0, 15, 30, 65]
    assert heap.take("a", 8 * MIB) == 0
    assert heap.take("b", 8 * MIB) == 15 * MIB
    heap.give("a")
    assert heap.take("c", 10 * MIB) == 0


def test_a_hole_that_could_grow_is_taken_last() -> None:
    heap = Heap([(0, 40 * MIB), (80 * MIB, 100 * MIB)], {"w": (0, 20 * MIB), "x": (80 * MIB, 15 * MIB)})
    # 20 MiB before 40 unmapped ones; 5 MiB before endlessly many.
    assert heap.take("a", 4 * MIB) == 20 * MIB
    assert heap.best(21 * MIB) is None


def test_nothing_grows() -> None:
    heap = Heap([(0, 40 * MIB)], {})
    assert heap.take("a", 41 * MIB) is None
    assert heap.take("a", 40 * MIB) == 0
    assert heap.holes == ()


def test_small_blocks_and_blocks_that_are_taken_already_are_no_questions() -> None:
    heap = Heap([(0, 40 * MIB)], {})
    with pytest.raises(AssertionError):
        heap.take("a", MIB)
    heap.take("a", 2 * MIB)
    with pytest.raises(AssertionError):
        heap.take("a", 2 * MIB)


def crowded(draw: random.Random) -> ModelAllocator:
    """An allocator with some blocks, the lowest among them, of which the pages in between were given back."""
    model = ModelAllocator()
    blocks = [model.take(draw.choice([2, 7, 19, 20, 33, 70]) * MIB + 512 * draw.randrange(9)) for _ in range(12)]
    for address in draw.sample(blocks[1:], draw.randrange(6, 11)):
        model.give(address)
    model.empty_cache()
    return model


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_every_block_goes_where_the_allocator_puts_it(seed: int) -> None:
    draw = random.Random(seed)
    model = crowded(draw)
    first = model.take(draw.choice([100, 300]) * MIB)
    model.give(first)
    heap = Heap(model.ranges(), {address: (address, size) for address, size in model.used.items()})
    for key in range(60):
        if draw.random() < 0.45 and len(model.used) > 1:
            address = draw.choice(sorted(model.used))
            model.give(address)
            heap.give(address)
            continue
        size = draw.choice([MIB + 512, 2 * MIB, 5 * MIB, 20 * MIB, 31 * MIB + 512 * draw.randrange(5)])
        expected = heap.best(size)
        reserved = model.reserved
        got = model.take(size)
        if expected is None:
            assert model.reserved > reserved
            return
        assert model.reserved == reserved
        assert heap.take(("k", key), size) == got
        heap.used[got] = heap.used.pop(("k", key))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_what_fits_nowhere_is_mapped_where_the_allocator_maps_it(seed: int) -> None:
    draw = random.Random(seed)
    model = crowded(draw)
    largest = max((size for _, size in model.holes()), default=0)
    size = max(draw.randrange(1, 12) * PAGE, -(-(largest + 1) // PAGE) * PAGE)
    extent = grown(model.ranges(), {address: (address, length) for address, length in model.used.items()}, size)
    assert model.take(size) == extent.address
    assert tuple(model.ranges()) == extent.ranges


def test_the_allocator_of_the_tests_gives_back_before_it_gives_up() -> None:
    model = ModelAllocator(cap_bytes=100 * MIB)
    model.give(model.take(80 * MIB))
    assert model.take(90 * MIB) == model.base_page * PAGE
    assert model.remaps == 1
    with pytest.raises(torch.OutOfMemoryError):
        model.take(30 * MIB)
