"""The zvc_exponent codec in NumPy: the definition of the format, and the codec of CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.exponent.format import WINDOW
from fxhome.cuda_kernels.exponent.reference import window_bases
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.tiles import Bytes, Elements, pad_to_tiles, tile_planes, tile_words
from fxhome.cuda_kernels.zvc_exponent.format import (
    BASE_SHIFT,
    COUNT_BITS,
    ESCAPE_SHIFT,
    RAW_SHIFT,
    SIGNED_SHIFT,
    UNIT,
    PackedFormat,
)

Ints = NDArray[np.int64]
SAMPLES = 128


class Fields(NamedTuple):
    """The parts of tiles' words."""

    counts: Ints
    escape_vectors: Ints
    base: Ints
    signed: Ints
    raw: Ints
    rest: Ints


def fields_of(words: Ints) -> Fields:
    """Take words apart."""
    return Fields(
        words & ((1 << COUNT_BITS) - 1),
        words >> ESCAPE_SHIFT & 0xFF,
        words >> BASE_SHIFT & 0xFF,
        words >> SIGNED_SHIFT & 1,
        words >> RAW_SHIFT & 1,
        words >> (RAW_SHIFT + 1),
    )


class _Units:
    """Where the units of all tiles, one after the other, lie in the slots."""

    def __init__(self, counts: Ints, layout: Layout) -> None:
        self.counts = counts
        self.per_tile = -(-counts // UNIT)
        self.tile = np.repeat(np.arange(layout.tiles), self.per_tile)
        self.first = np.cumsum(self.per_tile) - self.per_tile
        self.number = np.arange(self.tile.size) - self.first[self.tile]
        self.slot_bytes = layout.slot_bytes

    def bytes_of(self, offset: int, size_bytes: int) -> Ints:
        """Indices (units, size_bytes) into the slots of the plane at `offset` bytes per unit."""
        start = self.tile * self.slot_bytes + offset * self.per_tile[self.tile] + self.number * size_bytes
        return np.asarray(start[:, None] + np.arange(size_bytes))

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which of the units' eight places hold an element."""
        return np.asarray(self.number[:, None] * UNIT + np.arange(UNIT) < self.counts[self.tile][:, None])


def _pack_bits(values: Ints, bits: int) -> Bytes:
    """The low `bits` bits (1 or 2) of eight numbers per row, little end first: `bits` bytes per row."""
    planes = np.stack([values >> bit & 1 for bit in range(bits)], axis=2).reshape(values.shape[0], UNIT * bits)
    return np.packbits(planes.astype(np.uint8), axis=1, bitorder="little")


def _unpack_bits(packed: Bytes, bits: int) -> Ints:
    planes = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64).reshape(packed.shape[0], UNIT, bits)
    return np.asarray((planes << np.arange(bits)).sum(axis=2))


def encode(elements: Elements, packed: PackedFormat, layout: Layout, head: Bytes, slots: Bytes) -> None:
    """Fill head (its header excepted) and the used front of each slot."""
    if layout.tiles == 0:
        return
    tiles = pad_to_tiles(elements, layout)
    present = tiles != 0
    counts = present.sum(axis=1)
    tile_planes(head, layout, np.uint8)[:] = np.packbits(present, axis=1, bitorder="little")
    units = _Units(counts, layout)
    flat = np.zeros(units.tile.size * UNIT, np.int64)
    owner, _ = np.nonzero(present)
    rank = np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]
    flat[units.first[owner] * UNIT + rank] = tiles[present]
    values = flat.reshape(-1, UNIT)
    exponents = values >> packed.mantissa_bits & ((1 << packed.exponent_bits) - 1)
    rests = (values & ((1 << packed.mantissa_bits) - 1)) << 1 | values >> (8 * packed.width - 1)
    bases = _bases(exponents, units)
    codes = np.minimum((exponents - bases[units.tile][:, None]) & 0xFFFFFFFF, WINDOW)
    escaped = (codes == WINDOW) & units.valid
    escapes = np.bincount(units.tile, escaped.sum(axis=1), layout.tiles).astype(np.int64)
    signed = (np.bincount(units.tile, (rests & 1).sum(axis=1), layout.tiles) > 0).astype(np.int64)
    escape_vectors = -(-escapes // 16)
    main_bytes = packed.main_bytes(units.per_tile, signed)
    raw = main_bytes + 16 * escape_vectors > (counts * packed.width + 15) // 16 * 16
    tile_words(head, layout)[:] = np.where(
        raw,
        counts | 1 << RAW_SHIFT,
        counts | escape_vectors << ESCAPE_SHIFT | bases << BASE_SHIFT | signed << SIGNED_SHIFT,
    )
    is_signed = signed[units.tile][:, None] > 0
    rests = np.where(is_signed, rests, rests & ~1 | codes >> 2)
    planes = _planes(rests, codes, packed)
    if is_signed.any():
        planes.append((packed.code1, _pack_bits(codes >> 2, 1)))
    kept = ~raw[units.tile]
    for offset, data in planes:
        chosen = kept & is_signed[:, 0] if offset == packed.code1 else kept
        slots[units.bytes_of(offset, data.shape[1])[chosen]] = data[chosen]
    escaped &= kept[:, None]
    owner = np.broadcast_to(units.tile[:, None], escaped.shape)[escaped]
    listed = np.where(raw, 0, escapes)
    rank = np.arange(owner.size) - (np.cumsum(listed) - listed)[owner]
    slots[owner * layout.slot_bytes + main_bytes[owner] + rank] = exponents[escaped]
    for tile in np.flatnonzero(raw):
        data = tiles[tile][present[tile]].view(np.uint8)
        slots[tile * layout.slot_bytes : tile * layout.slot_bytes + data.size] = data


def _bases(exponents: Ints, units: _Units) -> Ints:
    """Lowest exponent of each tile's window, from SAMPLES of its non-zero elements; 0 for a tile without any."""
    flat = np.append(exponents.reshape(-1), 0)
    index = (np.arange(SAMPLES) * units.counts[:, None]) // SAMPLES
    samples = flat[np.minimum(units.first[:, None] * UNIT + index, flat.size - 1)]
    return np.asarray(np.where(units.counts > 0, window_bases(samples), 0))


def _planes(rests: Ints, codes: Ints, packed: PackedFormat) -> list[tuple[int, Bytes]]:
    """(offset, bytes per unit) of every plane but code1."""
    planes: list[tuple[int, Bytes]] = [(packed.code2, _pack_bits(codes, 2))]
    if packed.has_rest2:
        planes.append((0, (rests & 0xFFFF).astype(np.uint16).view(np.uint8)))
        rests = rests >> 16
    planes.append((packed.rest1, (rests & 0xFF).astype(np.uint8)))
    if packed.has_extra:
        planes.append((packed.extra2, _pack_bits(rests >> 8, 2)))
        planes.append((packed.extra1, _pack_bits(rests >> 10, 1)))
    return planes


def decode(head: Bytes, slots: Bytes, packed: PackedFormat, layout: Layout, elements: Elements) -> None:
    """Fill `elements`; words that disagree with masks or codes are an error."""
    if layout.tiles == 0:
        return
    fields = fields_of(tile_words(head, layout).astype(np.int64))
    masks = np.unpackbits(tile_planes(head, layout, np.uint8), axis=1, bitorder="little").astype(bool)
    _require((fields.counts == masks.sum(axis=1)) & (fields.rest == 0), layout, "disagrees with its mask")
    units = _Units(fields.counts, layout)
    raw = fields.raw > 0
    signed = fields.signed[units.tile][:, None]

    def plane(offset: int, size_bytes: int) -> Bytes:
        index = units.bytes_of(offset, size_bytes)
        # Tiles stored as they are, and code1 where there is none, are read from anywhere and not used.
        return slots[np.minimum(index, slots.size - 1)]

    rests = plane(packed.rest1, 8).astype(np.int64)
    if packed.has_rest2:
        rests = rests << 16 | plane(0, 16).view(np.uint16)
    if packed.has_extra:
        rests |= _unpack_bits(plane(packed.extra2, 2), 2) << 8 | _unpack_bits(plane(packed.extra1, 1), 1) << 10
    top = np.where(signed > 0, _unpack_bits(plane(packed.code1, 1), 1), rests & 1)
    rests = np.where(signed > 0, rests, rests & ~1)
    codes = _unpack_bits(plane(packed.code2, 2), 2) | top << 2
    escaped = (codes == WINDOW) & units.valid & ~raw[units.tile][:, None]
    found = np.bincount(units.tile, escaped.sum(axis=1), layout.tiles).astype(np.int64)
    _require(
        raw | (-(-found // 16) == fields.escape_vectors), layout, "has another number of escapes than its codes mark"
    )
    exponents = fields.base[units.tile][:, None] + codes & ((1 << packed.exponent_bits) - 1)
    owner = np.broadcast_to(units.tile[:, None], escaped.shape)[escaped]
    rank = np.arange(owner.size) - (np.cumsum(found) - found)[owner]
    main_bytes = packed.main_bytes(units.per_tile, fields.signed)
    exponents[escaped] = slots[owner * layout.slot_bytes + main_bytes[owner] + rank]
    values = (rests & 1) << (8 * packed.width - 1) | exponents << packed.mantissa_bits | rests >> 1
    tiles = np.zeros(masks.shape, elements.dtype)
    owner, _ = np.nonzero(masks)
    rank = np.arange(owner.size) - (np.cumsum(fields.counts) - fields.counts)[owner]
    tiles[masks] = values.reshape(-1)[units.first[owner] * UNIT + rank]
    for tile in np.flatnonzero(raw):
        start, size = tile * layout.slot_bytes, int(fields.counts[tile]) * packed.width
        tiles[tile][masks[tile]] = slots[start : start + size].view(elements.dtype)
    elements[:] = tiles.reshape(-1)[: elements.size]


def _require(right: NDArray[np.bool_], layout: Layout, what: str) -> None:
    if not right.all():
        tile = int(np.flatnonzero(~right)[0])
        raise CodecError(
            f"zvc_exponent decode: the word of tile {tile} of {layout.tiles} {what}: the encoded buffer is corrupted "
            "or was never written"
        )
