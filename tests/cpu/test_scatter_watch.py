"""What is seen of scattered steps, by looks that become rare."""

from __future__ import annotations

from fxhome.scatter_watch import ScatterWatch, is_looked_at
from tests.allocator_model import PAGE, ModelAllocator

MIB = 1 << 20


def test_looks_come_in_pairs_and_become_rare() -> None:
    looks = [number for number in range(100) if is_looked_at(number)]
    assert looks == [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65]


def test_more_than_the_limit_is_seen_at_once_and_told_in_bytes() -> None:
    allocator = ModelAllocator()
    watch = ScatterWatch(allocator, 2 * PAGE)
    assert watch.seen() is None
    kept = allocator.take(2 * PAGE)
    assert watch.seen() is None
    allocator.take(2 * MIB)
    allocator.give(kept)
    assert watch.seen() == "the allocator took 60.00 MiB for large blocks"


def test_memory_given_back_between_two_looks_is_seen_and_older_is_not() -> None:
    allocator = ModelAllocator()
    allocator.remaps = 5
    watch = ScatterWatch(allocator, 1 << 40)
    seen = []
    for number in range(18):
        # Between steps 6 and 7 nobody looks; between 16 and 17 somebody does.
        allocator.remaps += number in (7, 17)
        seen.append(watch.seen())
    assert seen[:17] == [None] * 17
    assert seen[17] == "the allocator gave memory back and mapped it anew in a step"
    assert allocator.looks == 10
