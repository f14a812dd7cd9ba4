"""Packing: no two blocks meet, and nothing reaches farther than it must where that is known."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.passes.allocator import PAGE_BYTES, Allocation, reserved_bytes
from fxhome.passes.pack_blocks import NEVER, Fixed, Life, gaps, most_alive, pack, packed_bytes

MIB = 1 << 20

lives_of = st.lists(st.builds(lambda size, start, long: Life(size, start, start + long), st.integers(1, 40),
                              st.integers(0, 30), st.integers(1, 20)), max_size=30)  # fmt: skip
fixed_of = st.lists(
    st.builds(lambda address, size, start, long: Fixed(address, size, start, start + long), st.integers(0, 60),
              st.integers(1, 30), st.integers(-1, 30), st.integers(1, 30)), max_size=4)  # fmt: skip


def meet(one: Fixed, other: Fixed) -> bool:
    in_space = one.address < other.address + other.size_bytes and other.address < one.address + one.size_bytes
    return in_space and one.start < other.stop and other.start < one.stop


@settings(deadline=None)
@given(lives_of, fixed_of, st.integers(0, 50))
def test_no_two_meet_and_all_lie_above_the_base(lives: list[Life], fixed: list[Fixed], base: int) -> None:
    packing = pack(lives, fixed, base, rounds=40)
    placed = [Fixed(a, e.size_bytes, e.start, e.stop) for a, e in zip(packing.addresses, lives, strict=True)]
    assert not any(meet(one, other) for one, other in itertools.combinations(placed, 2))
    assert not any(meet(one, other) for one in placed for other in fixed)
    assert all(address >= base for address in packing.addresses)
    assert packing.top == max((p.address + p.size_bytes for p in placed), default=0)
    if lives and not fixed:
        assert packing.top >= base + most_alive(lives, [], base)


def test_a_small_tenant_does_not_stand_in_the_way() -> None:
    # Best fit needs 220 for these, see test_allocator.py.
    lives = [Life(100, 0, 2), Life(20, 1, 6), Life(20, 3, 6), Life(100, 4, 5)]
    assert pack(lives, [], 0).top == most_alive(lives, [], 0) == 140


def test_more_rounds_are_never_worse() -> None:
    draw = random.Random(54)
    lives = [Life(draw.choice([3, 5, 8, 40]), s, s + draw.choice([1, 3, 9, 30])) for s in draw.choices(range(90), k=60)]
    tops = [pack(lives, [], 0, rounds).top for rounds in (0, 30, 400)]
    assert tops[0] > tops[1] > tops[2]


def test_the_same_lives_give_the_same_packing() -> None:
    lives = [Life(3 + i % 7, i, i + 1 + i % 5) for i in range(40)]
    assert pack(lives, [], 0) == pack(lives, [], 0)


def test_gaps_are_what_nobody_needs_meanwhile() -> None:
    fixed = [Fixed(10, 10, 0, 5), Fixed(30, 10, 4, NEVER), Fixed(15, 25, 9, 10)]
    assert gaps(Life(10, 2, 6), fixed, 0) == [(0, 10), (20, 30), (40, NEVER)]
    assert gaps(Life(11, 2, 6), fixed, 0) == [(40, NEVER)]
    assert gaps(Life(5, 5, 6), fixed, 25) == [(25, 30), (40, NEVER)]


def test_whole_pages_for_large_blocks_only() -> None:
    def sized(text: str) -> list[Allocation]:
        return [Allocation(w[0], int(w[2:]) * MIB if w[1] == "+" else 0) for w in text.split()]

    tenant = sized("a+100 b+20 a- c+20 d+100 d-")
    assert (packed_bytes(tenant), reserved_bytes(tenant)[0]) == (140 * MIB, 220 * MIB)
    assert packed_bytes(sized("a+1 b+1 a- x-")) == 0
    assert packed_bytes(sized("a+21")) == 2 * PAGE_BYTES
