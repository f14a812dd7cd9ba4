"""Whether settled steps were seen to be scattered, where no prediction said so.

    looks:  where settled steps number 0 to 5 begin, 8 and 9, 16 and 17, 32 and 33 ...
    seen:   more is reserved for large blocks than the limit, or the allocator had to give memory back in between

Rarely, but for ever: a cap on the allocator or another user of memory may come later. A look reads the allocator's
counters once; the steps in between pay for two comparisons.
"""

from __future__ import annotations

from fxhome.raw_allocator import Allocator
from fxhome.units import format_bytes


class ScatterWatch:
    """Looks at what the allocator holds for large blocks where a step begins. limit_bytes: what it may hold."""

    def __init__(self, allocator: Allocator, limit_bytes: int) -> None:
        self.allocator = allocator
        self.limit_bytes = limit_bytes
        self._number = -1
        self._looked_at = -1
        self._retries = 0

    def seen(self) -> str | None:
        """Called where each settled step begins: why the ones before are taken for scattered, or None."""
        self._number += 1
        if not is_looked_at(self._number):
            return None
        reserved_bytes, retries = self.allocator.pressure()
        has_retried = self._looked_at == self._number - 1 >= 0 and retries > self._retries
        self._looked_at, self._retries = self._number, retries
        if has_retried:
            return "the allocator gave memory back and mapped it anew in a step"
        if reserved_bytes > self.limit_bytes:
            return f"the allocator took {format_bytes(reserved_bytes)} for large blocks"
        return None


def is_looked_at(number: int) -> bool:
    """Whether a number is a power of two, or one more."""
    return number & (number - 1) == 0 or (number - 1) & (number - 2) == 0
