"""The exponent codec in NumPy: the definition of the format, and the codec of CPU tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.exponent.format import HISTOGRAM_BINS, SAMPLES, WINDOW, FloatFormat, sample_offset
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.tiles import Bytes, Elements, pad_to_tiles, tile_planes, tile_slots, tile_words

Ints = NDArray[np.int64]


def _split(elements: Elements, float_format: FloatFormat) -> tuple[Ints, Ints]:
    """(exponent, everything else) of each element."""
    bits = elements.astype(np.int64)
    if float_format.name == "fp16":
        return (bits >> 10) & 31, (bits & 0x3FF) << 1 | bits >> 15
    mantissa_bits = 7 if float_format.name == "bf16" else 23
    mantissa = bits & ((1 << mantissa_bits) - 1)
    sign = bits >> (mantissa_bits + 8)
    return (bits >> mantissa_bits) & 0xFF, mantissa << 1 | sign


def _join(exponent: Ints, rest: Ints, float_format: FloatFormat) -> Ints:
    if float_format.name == "fp16":
        return (rest & 1) << 15 | (exponent & 31) << 10 | rest >> 1
    mantissa_bits = 7 if float_format.name == "bf16" else 23
    return (rest & 1) << (mantissa_bits + 8) | exponent << mantissa_bits | rest >> 1


def choose_window_bases(exponents: Ints) -> Ints:
    """Lowest exponent of the window of each tile, from SAMPLES of its elements."""
    stride = exponents.shape[1] // SAMPLES
    return window_bases(exponents[:, [sample_offset(sample, stride) for sample in range(SAMPLES)]])


def window_bases(samples: Ints) -> Ints:
    """Lowest exponent of the fullest window within 32 of the largest sample, per row."""
    largest = samples.max(axis=1)
    below = largest[:, None] - samples
    histogram = np.stack([(below == value).sum(axis=1) for value in range(HISTOGRAM_BINS)], axis=1)
    sums = np.cumsum(np.pad(histogram, ((0, 0), (1, WINDOW - 1))), axis=1)
    window_sums = sums[:, WINDOW : HISTOGRAM_BINS + WINDOW] - sums[:, :HISTOGRAM_BINS]
    best = window_sums.argmax(axis=1)
    lowest: NDArray[np.int64] = np.maximum(largest - best - (WINDOW - 1), 0)
    return lowest


def _pack3(values: Ints) -> tuple[Bytes, Bytes]:
    """3-bit numbers as (2-bit plane, 1-bit plane), little end first."""
    tiles = values.shape[0]
    pairs = np.stack([values & 1, (values >> 1) & 1], axis=2).reshape(tiles, -1)
    return (
        np.packbits(pairs.astype(np.uint8), axis=1, bitorder="little"),
        np.packbits((values >> 2).astype(np.uint8), axis=1, bitorder="little"),
    )


def _unpack3(plane2: Bytes, plane1: Bytes) -> Ints:
    pairs = np.unpackbits(plane2, axis=1, bitorder="little").astype(np.int64)
    top = np.unpackbits(plane1, axis=1, bitorder="little").astype(np.int64)
    return pairs[:, 0::2] | pairs[:, 1::2] << 1 | top << 2


def _valid(layout: Layout) -> NDArray[np.bool_]:
    return (np.arange(layout.tiles * layout.tile_elements) < layout.numel).reshape(layout.tiles, layout.tile_elements)


def encode(elements: Elements, float_format: FloatFormat, layout: Layout, head: Bytes, slots: Bytes) -> None:
    """Fill head (its header excepted) and the used front of each slot."""
    if layout.tiles == 0:
        return
    exponents, rest = _split(pad_to_tiles(elements, layout), float_format)
    bases = choose_window_bases(exponents)
    offsets = exponents - bases[:, None]
    escaped = ((offsets < 0) | (offsets >= WINDOW)) & _valid(layout)
    codes = np.where((offsets < 0) | (offsets >= WINDOW), WINDOW, offsets)
    counts = escaped.sum(axis=1)
    tile_words(head, layout)[:] = bases | counts << 8
    planes = tile_planes(head, layout, np.uint8)
    size = float_format.tile_elements
    if float_format.has_rest2:
        planes[:, : 2 * size] = (rest & 0xFFFF).astype(np.uint16).view(np.uint8).reshape(layout.tiles, -1)
        rest = rest >> 16
    planes[:, float_format.rest1_offset : float_format.code2_offset] = rest & 0xFF
    code2, code1 = _pack3(codes)
    planes[:, float_format.code2_offset : float_format.code1_offset] = code2
    planes[:, float_format.code1_offset : float_format.extra2_offset] = code1
    if float_format.has_extra:
        extra2, extra1 = _pack3(rest >> 8)
        planes[:, float_format.extra2_offset : float_format.extra1_offset] = extra2
        planes[:, float_format.extra1_offset :] = extra1
    tile, _ = np.nonzero(escaped)
    rank = np.arange(tile.size) - (np.cumsum(counts) - counts)[tile]
    tile_slots(slots, layout, np.uint8)[tile, rank] = exponents[escaped]


def decode(head: Bytes, slots: Bytes, float_format: FloatFormat, layout: Layout, elements: Elements) -> None:
    """Fill `elements`; a count that disagrees with the codes is an error."""
    if layout.tiles == 0:
        return
    words = tile_words(head, layout).astype(np.int64)
    planes = tile_planes(head, layout, np.uint8)
    codes = _unpack3(
        planes[:, float_format.code2_offset : float_format.code1_offset],
        planes[:, float_format.code1_offset : float_format.extra2_offset],
    )
    escaped = (codes == WINDOW) & _valid(layout)
    found = escaped.sum(axis=1)
    if not np.array_equal(found, words >> 8):
        tile = int(np.flatnonzero(found != words >> 8)[0])
        raise CodecError(
            f"exponent decode: tile {tile} of {layout.tiles} says {words[tile] >> 8} escapes but its codes mark "
            f"{found[tile]}: the encoded buffer is corrupted or was never written"
        )
    exponents = (codes + (words & 0xFF)[:, None]) & 0xFF
    owners, _ = np.nonzero(escaped)
    rank = np.arange(owners.size) - (np.cumsum(found) - found)[owners]
    exponents[escaped] = tile_slots(slots, layout, np.uint8)[owners, rank]
    rest = planes[:, float_format.rest1_offset : float_format.code2_offset].astype(np.int64)
    if float_format.has_rest2:
        low = np.ascontiguousarray(planes[:, : float_format.rest1_offset]).view(np.uint16)
        rest = rest << 16 | low
    if float_format.has_extra:
        extra = _unpack3(
            planes[:, float_format.extra2_offset : float_format.extra1_offset], planes[:, float_format.extra1_offset :]
        )
        rest = rest | extra << 8
    elements[:] = _join(exponents, rest, float_format).reshape(-1)[: elements.size]
