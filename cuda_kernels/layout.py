"""Byte layout of encoded buffers: what is where, and how large it can get. No CUDA, no Numba.

A variable-rate codec writes two parts, one behind the other:

    head  header (128 bytes) | two 32-bit words per tile | fixed-size planes     size known before the data is
    tail  the variable parts of the tiles, packed in the order in which they were finished

The header's sixth word counts the 16-byte vectors of the tail in use; a tile takes its place there by adding to it, and
notes in its second word where it begins. So no scan runs across tiles, the bytes in use are one prefix of the buffer,
which a copy engine can move, and their number stands at its front. Fixed-rate codecs have a head and no tail.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_BYTES = 128
HEADER_MAGIC = 0x46584332
USED_OFFSET = 20
"""Where in the header the number of tail vectors in use stands."""
VECTOR_BYTES = 16
WORD_BYTES = 8
"""Per tile: what the codec says about it, and its first vector in the tail."""
LINE_BYTES = 128
"""One memory line and one link packet: parts start on a line so that no packet is partly filled."""


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    return ceil_div(size_bytes, alignment_bytes) * alignment_bytes


@dataclass(frozen=True)
class Layout:
    """Sizes of one encoded tensor, in bytes."""

    numel: int
    tile_elements: int
    """Elements per tile; one warp encodes one tile."""
    tiles: int
    words_offset: int
    """Where in the head the per-tile words start."""
    planes_offset: int
    """Where in the head the fixed-size planes start."""
    plane_bytes: int
    """Bytes of fixed-size planes per tile."""
    head_bytes: int
    slot_bytes: int
    """Worst-case bytes of one tile in the tail, a multiple of 16; 0 for fixed-rate codecs."""

    @property
    def tail_bytes(self) -> int:
        return self.tiles * self.slot_bytes

    @property
    def worst_case_bytes(self) -> int:
        return self.head_bytes + self.tail_bytes


def tiled_layout(numel: int, tile_elements: int, plane_bytes_per_tile: int, slot_bytes: int) -> Layout:
    """Layout of a variable-rate codec; `plane_bytes_per_tile` and `slot_bytes` are multiples of 16."""
    tiles = ceil_div(numel, tile_elements)
    planes_offset = HEADER_BYTES + align_up(WORD_BYTES * tiles, LINE_BYTES)
    head_bytes = align_up(planes_offset + tiles * plane_bytes_per_tile, LINE_BYTES)
    return Layout(
        numel, tile_elements, tiles, HEADER_BYTES, planes_offset, plane_bytes_per_tile, head_bytes, slot_bytes
    )


def flat_layout(numel: int, tile_elements: int, code_bytes: int, scale_bytes: int) -> Layout:
    """Layout of a fixed-rate codec: a plane of codes, then a plane of block scales at `planes_offset` (which may be
    empty)."""
    planes_offset = align_up(code_bytes, LINE_BYTES) if scale_bytes else align_up(code_bytes, 16)
    head_bytes = planes_offset + align_up(scale_bytes, 16)
    return Layout(numel, tile_elements, ceil_div(numel, tile_elements), 0, planes_offset, 0, head_bytes, 0)
