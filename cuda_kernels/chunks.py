"""How an encoded storage is cut into chunks, and what that takes in host and device memory. No CUDA, no Numba."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fxhome.cuda_kernels.codec import codec_by_name, codec_names
from fxhome.cuda_kernels.layout import align_up

CHUNK_BYTES = 16 << 20
"""Bytes of a tensor that are encoded at a time: tens of microseconds of link time, so that hand-overs do not show."""
BUFFERS = 2
"""Staging buffers per direction, used in turn."""
ALIGNMENT_BYTES = 512


class Chunk(NamedTuple):
    """A stretch of a storage, and the part of the host slot that holds its encoded form."""

    start_bytes: int
    numel: int
    slot_offset: int
    head_bytes: int
    worst_case_bytes: int


@functools.lru_cache(maxsize=4096)
def chunks_of(codec: str, storage_bytes: int, dtype: torch.dtype) -> tuple[Chunk, ...]:
    """How a storage is cut up; every chunk is an encoded tensor of its own."""
    step, chosen = CHUNK_BYTES // dtype.itemsize, codec_by_name(codec)
    found: list[Chunk] = []
    offset = 0
    for start in range(0, storage_bytes // dtype.itemsize, step):
        numel = min(step, storage_bytes // dtype.itemsize - start)
        layout = chosen.layout(numel, dtype)
        found.append(Chunk(start * dtype.itemsize, numel, offset, layout.head_bytes, layout.worst_case_bytes))
        offset += align_up(layout.worst_case_bytes, ALIGNMENT_BYTES)
    return tuple(found)


def slot_bytes(codec: str, storage_bytes: int, dtype: torch.dtype) -> int:
    """Host bytes that hold the storage in either form."""
    chunks = chunks_of(codec, storage_bytes, dtype)
    return max(storage_bytes, chunks[-1].slot_offset + chunks[-1].worst_case_bytes if chunks else 0)


@functools.lru_cache(maxsize=256)
def buffer_bytes(largest_storage_bytes: int) -> int:
    """Bytes of one staging buffer: the worst case of a chunk under any variable-rate codec and dtype."""
    chunk_bytes = min(CHUNK_BYTES, largest_storage_bytes)
    codecs = [codec for codec in map(codec_by_name, codec_names()) if not codec.fixed_rate]
    worst = (codec.worst_case_bytes(-(-chunk_bytes // d.itemsize), d) for codec in codecs for d in codec.dtypes)
    return align_up(max(worst), ALIGNMENT_BYTES)


def staging_bytes(largest_storage_bytes: int = CHUNK_BYTES) -> int:
    """Device bytes that encoded swaps keep for themselves, where no encoded storage is larger than that."""
    return 2 * BUFFERS * buffer_bytes(largest_storage_bytes)
