"""What the caching allocator reserves: the model against the rules it is made of, and against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.allocator import PAGE_BYTES, SMALL_BYTES, Allocation, events, reserved_bytes

MIB = 1 << 20


def step(text: str) -> list[Allocation]:
    """`a+40 b+20 a-`: sizes in MiB."""
    found = []
    for word in text.split():
        name, size = word[0], word[2:]
        found.append(Allocation(name, int(size) * MIB if word[1] == "+" else 0))
    return found


def reserved_mib(text: str) -> tuple[float, float]:
    reserved, peak = reserved_bytes(step(text))
    return reserved / MIB, peak / MIB


def test_blocks_of_one_size_take_each_others_place() -> None:
    assert reserved_mib("a+40 a- b+40 b- c+40") == (40, 40)


def test_a_small_tenant_of_a_large_hole_makes_the_next_large_block_extend_the_end() -> None:
    # Free: 100 at the bottom. The tenant takes its first 20; the second 100 no longer fits there.
    assert reserved_mib("a+100 b+20 a- c+20 d+100") == (220, 140)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    # Holes of 60 (below) and 40: the block of 40 takes the second, so that 60 still fits in the first.
    assert reserved_mib("a+60 x+20 b+40 y+20 a- b- c+40 d+60") == (140, 140)


def test_neighbours_that_are_free_are_one_block() -> None:
    assert reserved_mib("a+40 b+40 c+20 a- b- d+80") == (100, 100)


def test_the_block_at_the_end_is_taken_last_since_it_can_grow() -> None:
    # The end (30 free of its page of 40) would fit best; the hole of 40 is taken.
    assert reserved_mib("a+40 b+30 a- c+10 d+30") == (80, 70)


def test_small_allocations_live_elsewhere() -> None:
    assert reserved_bytes([Allocation("a", SMALL_BYTES), Allocation("b", SMALL_BYTES + 1)])[1] == SMALL_BYTES + 1


def test_what_a_step_leaves_is_gone_before_the_next_one() -> None:
    assert reserved_mib("a+40 b+20") == (60, 60)


def test_events_are_in_the_order_of_a_run() -> None:
    lives = [("saved", 4, -1, 1), ("made", 8, 0, 1), ("kept", 2, 1, 3), ("nothing", 0, 0, 1)]
    assert [(e.name, e.size_bytes) for e in events(lives, 3)] == [
        ("made", 8), ("kept", 2), ("saved", 0), ("made", 0),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(2, 90)), max_size=60))
def test_reserved_covers_what_is_allocated_and_no_two_blocks_overlap(drawn: list[tuple[int, int]]) -> None:
    alive: set[int] = set()
    found = []
    for name, size in drawn:
        found.append(Allocation(str(name), 0 if name in alive else size * MIB))
        alive ^= {name}
    reserved, peak = reserved_bytes(found)
    total = sum(event.size_bytes for event in found)
    assert peak <= reserved <= total + PAGE_BYTES * max(len(found), 1)
    assert reserved % PAGE_BYTES == 0
