"""CSR and RLE in NumPy: the definition of the format, and the codec of CPU tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.listed.format import RAW_FLAG, most_listed
from fxhome.cuda_kernels.tiles import Bytes, Elements, pad_to_tiles, tile_slots, tile_words


def listed_mask(tiles: Elements, runs: bool) -> NDArray[np.bool_]:
    """Which elements are listed."""
    if not runs:
        nonzero: NDArray[np.bool_] = tiles != 0
        return nonzero
    starts = np.ones(tiles.shape, bool)
    starts[:, 1:] = tiles[:, 1:] != tiles[:, :-1]
    return starts


def encode(elements: Elements, runs: bool, layout: Layout, head: Bytes, slots: Bytes) -> None:
    """Fill head (its header excepted) and the used front of each slot."""
    width = elements.dtype.itemsize
    tiles = pad_to_tiles(elements, layout)
    listed = listed_mask(tiles, runs)
    counts = listed.sum(axis=1)
    is_raw = counts > most_listed(width)
    tile_words(head, layout)[:] = np.where(is_raw, RAW_FLAG, counts)
    values = tile_slots(slots, layout, elements.dtype)
    values[is_raw] = tiles[is_raw]
    listed[is_raw] = False
    tile, position = np.nonzero(listed)
    counts = np.where(is_raw, 0, counts)
    rank = np.arange(tile.size) - (np.cumsum(counts) - counts)[tile]
    values[tile, rank] = tiles[listed]
    positions_start = (counts * width + 15) // 16 * 8
    tile_slots(slots, layout, np.uint16)[tile, positions_start[tile] + rank] = position


def decode(head: Bytes, slots: Bytes, runs: bool, layout: Layout, elements: Elements, name: str) -> None:
    """Fill `elements`; counts or positions that cannot be are an error."""
    width = elements.dtype.itemsize
    words = tile_words(head, layout).astype(np.int64)
    is_raw = words == RAW_FLAG
    counts = np.where(is_raw, 0, words)
    if bool((counts > most_listed(width)).any()):
        tile_number = int(np.flatnonzero(counts > most_listed(width))[0])
        what = f"says {counts[tile_number]} elements, at most {most_listed(width)} fit"
        raise _corrupted(name, tile_number, layout, what)
    values = tile_slots(slots, layout, elements.dtype)
    tile = np.repeat(np.arange(layout.tiles), counts)
    rank = np.arange(tile.size) - (np.cumsum(counts) - counts)[tile]
    positions_start = (counts * width + 15) // 16 * 8
    positions = tile_slots(slots, layout, np.uint16)[tile, positions_start[tile] + rank].astype(np.int64)
    listed = np.zeros((layout.tiles, layout.tile_elements), bool)
    listed[tile[positions < layout.tile_elements], positions[positions < layout.tile_elements]] = True
    wrong = listed.sum(axis=1) != counts
    if runs:
        wrong |= ~is_raw & ~listed[:, 0]
    if bool(wrong.any()):
        what = "has positions that are repeated or outside the tile"
        raise _corrupted(name, int(np.flatnonzero(wrong)[0]), layout, what)
    tiles = np.zeros(listed.shape, elements.dtype)
    if runs:
        run = np.maximum(np.cumsum(listed, axis=1) - 1, 0)
        tiles[:] = np.take_along_axis(values, run, axis=1)
    else:
        tiles[listed] = values[tile, rank]
    tiles[is_raw] = values[is_raw]
    elements[:] = tiles.reshape(-1)[: elements.size]


def _corrupted(name: str, tile: int, layout: Layout, what: str) -> CodecError:
    return CodecError(
        f"{name} decode: tile {tile} of {layout.tiles} {what}: the encoded buffer is corrupted or was never written"
    )
