"""torch's caching allocator with one expandable segment, written down a second time, slowly, from its pages up.

What is mapped is a set of pages, what is in use a dict; holes are looked for each time. It stands in for the device in
tests of what lays blocks, and checks the faster model of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxhome.allocator_trace import Snapshot

PAGE = 20 << 20
SMALL = 1 << 20
STREAM = 7
SMALL_BASE = 1 << 50


class ModelAllocator:
    """The Allocator protocol of fxhome/raw_allocator.py. `cap_bytes`: what it may reserve."""

    def __init__(self, cap_bytes: int | None = None, base_page: int = 3) -> None:
        self.base_page = base_page
        self.cap_bytes = cap_bytes
        self.pages: set[int] = set()
        self.used: dict[int, int] = {}
        self.small: set[int] = set()
        self.remaps = 0
        self.most_reserved = 0
        self.most_allocated = 0
        self.entries: list[dict[str, Any]] | None = None
        self.others_record = False
        self.other_streams_bytes = 0
        self.looks = 0
        self.refusals = 0

    @property
    def reserved(self) -> int:
        return len(self.pages) * PAGE

    def map(self, size_bytes: int) -> int:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("refused")
        before = self.most_allocated
        address = self.take(size_bytes)
        self.give(address)
        self.most_allocated = before
        return address

    def ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for page in sorted(self.pages):
            if found and found[-1][1] == page * PAGE:
                found[-1] = (found[-1][0], (page + 1) * PAGE)
            else:
                found.append((page * PAGE, (page + 1) * PAGE))
        return found

    def holes(self) -> list[tuple[int, int]]:
        """(address, size), by address."""
        found = []
        for start, end in self.ranges():
            cursor = start
            for address in sorted(a for a in self.used if start <= a < end):
                if address > cursor:
                    found.append((cursor, address - cursor))
                cursor = address + self.used[address]
            if end > cursor:
                found.append((cursor, end - cursor))
        return found

    def take(self, size_bytes: int) -> int:
        size = max(512, -(-size_bytes // 512) * 512)
        if size <= SMALL:
            address = next(a for a in range(SMALL_BASE, SMALL_BASE + (1 << 30), SMALL) if a not in self.small)
            self.small.add(address)
        else:
            address = self._large(size)
            self.used[address] = size
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.most_allocated = max(self.most_allocated, sum(self.used.values()))
        self._note("alloc", address, size_bytes)
        return address

    def _large(self, size: int) -> int:
        fits = sorted((length, start) for start, length in self.holes() if length >= size)
        if fits:
            reach = [length + self._unmapped_behind(start + length) for length, start in fits]
            i = 0
            while i + 1 < len(fits) and reach[i + 1] < reach[i]:
                i += 1
            return fits[i][1]
        asked = PAGE if size < 10 << 20 else -(-size // (2 << 20)) * (2 << 20)
        if self.cap_bytes is not None and self.reserved + asked > self.cap_bytes:
            self.remaps += 1
            self.empty_cache()
            if self.reserved + asked > self.cap_bytes:
                raise torch.OutOfMemoryError("the model's cap")
        return self._grow(asked)

    def _unmapped_behind(self, end: int) -> int:
        if end % PAGE or end // PAGE in self.pages:
            return 0
        following = min((page for page in self.pages if page * PAGE >= end), default=1 << 40)
        return following * PAGE - end

    def _grow(self, size: int) -> int:
        """From the lowest unmapped page on: the first run of addresses without a block that is long enough."""
        page = self.base_page
        while True:
            while page in self.pages:
                page += 1
            ends = [address + length for address, length in self.used.items() if address + length <= page * PAGE]
            start = max([*ends, self.base_page * PAGE])
            # A hole that ends where the unmapped pages begin is part of it; anything in between is not.
            free = next((s for s, length in self.holes() if s + length == page * PAGE), page * PAGE)
            start = max(start, free)
            following = min((a for a in self.used if a >= page * PAGE), default=1 << 60)
            if following - start >= size:
                while page * PAGE < start + size:
                    self.pages.add(page)
                    page += 1
                return start
            page = following // PAGE

    def give(self, address: int) -> None:
        if address in self.small:
            self.small.remove(address)
            self._note("free_requested", address, 77)
            self._note("free_completed", address, 77)
            return
        size = self.used.pop(address)
        self._note("free_requested", address, size)
        self._note("free_completed", address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        if self.entries is not None:
            self.entries.append({"action": action, "addr": address, "size": size, "stream": STREAM})

    def empty_cache(self) -> None:
        needed: set[int] = set()
        for address, size in self.used.items():
            needed |= set(range(address // PAGE, (address + size - 1) // PAGE + 1))
        if self.pages - needed:
            self._note("segment_unmap", min(self.pages - needed) * PAGE, PAGE)
        self.pages &= needed

    def stream(self) -> int:
        return STREAM

    def large_bytes(self) -> tuple[int, int]:
        return sum(self.used.values()), self.reserved + self.other_streams_bytes

    def pressure(self) -> tuple[int, int]:
        self.looks += 1
        return self.reserved + self.other_streams_bytes, self.remaps

    def limit_bytes(self) -> int:
        return self.cap_bytes if self.cap_bytes is not None else 1 << 40

    def snapshot(self, stream: int) -> Snapshot:
        assert stream == STREAM
        return Snapshot(tuple(self.ranges()), dict(self.used), self.other_streams_bytes)

    def is_recorded(self) -> bool:
        return self.entries is not None or self.others_record

    def record(self) -> None:
        self.entries = []

    def history(self) -> Sequence[Mapping[str, Any]]:
        assert self.entries is not None
        return list(self.entries)

    def stop(self) -> None:
        self.entries = None
