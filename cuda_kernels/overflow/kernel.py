"""Copies the part of an encoded buffer that a copy engine was not told about."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    int64,
    load_u32x4,
    store_u32,
    store_u32x4,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import vectors_in_use


def make_copy_overflow() -> Callable[..., None]:
    """Kernel (header, source, target, copied, head_vectors, most_vectors, note); all counts in 16-byte vectors."""

    def copy_overflow(
        header: int, source: int, target: int, copied: int, head_vectors: int, most_vectors: int, note: int
    ) -> None:
        used = vectors_in_use(header, most_vectors)
        vector = int64(block_index()) * int64(block_size()) + int64(thread_index())
        if vector == 0 and note != 0:
            store_u32(note, uint32(used + 1))
        end = head_vectors + int64(used)
        vector = vector + copied
        while vector < end:
            a, b, c, d = load_u32x4(source + vector * 16)
            store_u32x4(target + vector * 16, a, b, c, d)
            vector = vector + int64(block_count()) * int64(block_size())

    return copy_overflow
