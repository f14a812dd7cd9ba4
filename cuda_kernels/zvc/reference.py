"""Zero-value compression in NumPy: the definition of the format, and the codec of CPU tensors.

Per tile of 4 KiB: a bit mask in the head (bit i of the tile's mask: element i is not all zero bits), the non-zero
elements in order in the tile's slot, and their number in the tile's word. -0.0 has a non-zero bit and is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.tiles import pad_to_tiles, tile_planes, tile_slots, tile_words

Bytes = NDArray[np.uint8]


def encode(elements: NDArray[np.unsignedinteger], layout: Layout, head: Bytes, slots: Bytes) -> None:
    """Fill head (its header excepted) and the used front of each slot."""
    tiles = pad_to_tiles(elements, layout)
    present = tiles != 0
    counts = present.sum(axis=1)
    tile_words(head, layout)[:] = counts
    tile_planes(head, layout, np.uint8)[:] = np.packbits(present, axis=1, bitorder="little")
    tile, _ = np.nonzero(present)
    starts = np.cumsum(counts) - counts
    rank = np.arange(tile.size) - starts[tile]
    tile_slots(slots, layout, elements.dtype)[tile, rank] = tiles[present]


def decode(head: Bytes, slots: Bytes, layout: Layout, elements: NDArray[np.unsignedinteger]) -> None:
    """Fill `elements`; a count that disagrees with its mask is an error."""
    masks = np.unpackbits(tile_planes(head, layout, np.uint8), axis=1, bitorder="little").astype(bool)
    counts = tile_words(head, layout).astype(np.int64)
    found = masks.sum(axis=1)
    if not np.array_equal(counts, found):
        tile = int(np.flatnonzero(counts != found)[0])
        raise CodecError(
            f"zvc decode: tile {tile} of {layout.tiles} says {counts[tile]} values but its mask marks {found[tile]}: "
            "the encoded buffer is corrupted or was never written"
        )
    tiles = np.zeros(masks.shape, elements.dtype)
    owners, _ = np.nonzero(masks)
    rank = np.arange(owners.size) - (np.cumsum(found) - found)[owners]
    tiles[masks] = tile_slots(slots, layout, elements.dtype)[owners, rank]
    elements[:] = tiles.reshape(-1)[: elements.size]
