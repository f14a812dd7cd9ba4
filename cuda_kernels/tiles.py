"""NumPy views of the parts of an encoded buffer, shared by the references."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.layout import HEADER_MAGIC, Layout

Bytes = NDArray[np.uint8]
Elements = NDArray[Any]


def pad_to_tiles(elements: Elements, layout: Layout) -> Elements:
    """The elements as (tiles, tile_elements), zero-filled at the end."""
    padded = np.zeros(layout.tiles * layout.tile_elements, elements.dtype)
    padded[: elements.size] = elements
    return padded.reshape(layout.tiles, layout.tile_elements)


def tile_words(head: Bytes, layout: Layout) -> NDArray[np.uint32]:
    """The 32-bit word of each tile."""
    return head[layout.words_offset : layout.words_offset + 4 * layout.tiles].view(np.uint32)


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
