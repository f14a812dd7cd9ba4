"""Ranges of addresses: joined where they touch or overlap, and counted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.ranges import joined, total_bytes

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda r: (r[0], r[0] + r[1])), max_size=12)


@given(RANGES)
def test_the_same_addresses_in_as_few_ranges_as_there_are(ranges: list[tuple[int, int]]) -> None:
    found = joined(ranges)
    addresses = {address for start, end in ranges for address in range(start, end)}
    assert {address for start, end in found for address in range(start, end)} == addresses
    assert total_bytes(found) == len(addresses)
    assert all(before[1] < behind[0] for before, behind in pairwise(found))
