"""Ranges of addresses, as (start, end)."""

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same addresses in as few (start, end) as there are, lowest first."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def total_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """How many addresses there are in ranges that do not overlap."""
    return sum(end - start for start, end in ranges)
