"""NumPy views of the parts of an encoded buffer, shared by the references."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.layout import HEADER_MAGIC, USED_OFFSET, VECTOR_BYTES, WORD_BYTES, Layout

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]


def pad_to_tiles(elements: Elements, layout: Layout) -> Elements:
    """The elements as (tiles, tile_elements), zero-filled at the end."""
    padded = np.zeros(layout.tiles * layout.tile_elements, elements.dtype)
    padded[: elements.size] = elements
    return padded.reshape(layout.tiles, layout.tile_elements)


def tile_words(head: Bytes, layout: Layout) -> NDArray[np.uint32]:
    """The first 32-bit word of each tile: what the codec says about it."""
    return _word_pairs(head, layout)[:, 0]


def tile_places(head: Bytes, layout: Layout) -> NDArray[np.uint32]:
    """The second word of each tile: the vector of the tail at which it begins."""
    return _word_pairs(head, layout)[:, 1]


def _word_pairs(head: Bytes, layout: Layout) -> NDArray[np.uint32]:
    end = layout.words_offset + WORD_BYTES * layout.tiles
    return head[layout.words_offset : end].view(np.uint32).reshape(layout.tiles, 2)


def pack_slots(slots: Bytes, used_bytes: NDArray[np.int64], layout: Layout, head: Bytes, tail: Bytes) -> None:
    """Move the used fronts of worst-case slots to the tail, in order; note places and the total in the head."""
    vectors = -(-used_bytes // VECTOR_BYTES)
    tile_places(head, layout)[:] = np.cumsum(vectors) - vectors
    is_used = np.arange(layout.slot_bytes) < (vectors * VECTOR_BYTES)[:, None]
    packed = slots.reshape(layout.tiles, layout.slot_bytes)[is_used]
    tail[: packed.size] = packed
    head[USED_OFFSET : USED_OFFSET + 4].view(np.uint32)[0] = vectors.sum()


def unpack_slots(head: Bytes, tail: Bytes, used_bytes: NDArray[np.int64], layout: Layout, codec_name: str) -> Bytes:
    """The tiles' parts of the tail in worst-case slots again, zero-filled; a place outside the part in use is an
    error."""
    vectors = -(-used_bytes // VECTOR_BYTES)
    places = tile_places(head, layout).astype(np.int64)
    most = min(used_vectors(head), layout.tail_bytes // VECTOR_BYTES)
    wrong = (used_bytes > layout.slot_bytes) | (places + vectors > most)
    if bool(wrong.any()):
        tile = int(np.flatnonzero(wrong)[0])
        raise CodecError(
            f"{codec_name} decode: tile {tile} of {layout.tiles} is said to have {used_bytes[tile]} bytes at vector "
            f"{places[tile]}, {most} vectors are in use: the buffer is corrupted, truncated or was never written"
        )
    slots = np.zeros((layout.tiles, layout.slot_bytes), np.uint8)
    is_used = np.arange(layout.slot_bytes) < (vectors * VECTOR_BYTES)[:, None]
    tile_of, byte = np.nonzero(is_used)
    slots[is_used] = tail[places[tile_of] * VECTOR_BYTES + byte]
    return slots.reshape(-1)


def used_vectors(head: Bytes) -> int:
    """Vectors of the tail in use."""
    return int(head[USED_OFFSET : USED_OFFSET + 4].view(np.uint32)[0])


def tile_planes(head: Bytes, layout: Layout, dtype: Any) -> Elements:
    """The fixed-size planes as (tiles, plane elements)."""
    planes = head[layout.planes_offset : layout.planes_offset + layout.tiles * layout.plane_bytes]
    viewed: Elements = planes.view(dtype)
    return viewed.reshape(layout.tiles, layout.plane_bytes // np.dtype(dtype).itemsize)


def tile_slots(tail: Bytes, layout: Layout, dtype: Any) -> Elements:
    """The worst-case slots as (tiles, slot elements)."""
    slots: Elements = tail[: layout.tail_bytes].view(dtype)
    return slots.reshape(layout.tiles, layout.slot_bytes // np.dtype(dtype).itemsize)


def write_header(head: Bytes, codec_id: int, element_bytes: int, numel: int) -> None:
    words = [HEADER_MAGIC, codec_id, element_bytes, numel & 0xFFFFFFFF, numel >> 32]
    head[:20].view(np.uint32)[:] = words


def check_header(head: Bytes, codec_name: str, codec_id: int, element_bytes: int, numel: int) -> None:
    found = [int(word) for word in head[:20].view(np.uint32)]
    expected = [HEADER_MAGIC, codec_id, element_bytes, numel & 0xFFFFFFFF, numel >> 32]
    if found != expected:
        raise CodecError(
            f"{codec_name} decode: the buffer's header is {found}, expected {expected} (magic, codec, element bytes, "
            "element count): it was written by another codec, for another tensor, or is corrupted"
        )
