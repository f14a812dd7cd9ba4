"""A rectifier's mask on the GPU: a warp turns 4096 elements into 512 bytes, eight elements into a byte per lane."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.relu_mask.format import FORMATS_BY_NAME, TILE_ELEMENTS
from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    int64,
    shared_load_u8,
    shared_load_u32x4,
    shared_region,
    shared_store_u8,
    shared_store_u32x4,
    thread_index,
    uint32,
    warp_sync,
)
from fxhome.cuda_kernels.units import LOAD_UNIT, STORE_UNIT, load_16_bytes, store_16_bytes

PACKED_BYTES = TILE_ELEMENTS // 8
MAX_WARPS = 8
ITERATIONS = TILE_ELEMENTS // 256


def make_encode(name: str, has_upper: bool) -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed) for one float format."""
    form = FORMATS_BY_NAME[name]
    width, magnitude, infinity = form.width, form.magnitude, form.infinity
    # Bits b of a positive value below the limit have b - 1 below this; zero and what has a sign do not.
    span = form.six - 1 if has_upper else form.infinity
    load_unit = LOAD_UNIT[width]
    region = shared_region(f"relu_mask_encode_{name}_{has_upper}", MAX_WARPS * PACKED_BYTES)

    def relu_mask_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        packed = uint32(region() + warp * PACKED_BYTES)
        total_bytes = numel * width
        packed_total = ((numel + 7) >> 3) + 15 & -16
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            for iteration in range(ITERATIONS):
                unit = uint32(iteration * 32 + lane)
                offset = (tile * PACKED_BYTES + int64(unit)) * (8 * width)
                elements = load_unit(source, offset, total_bytes)
                bits = uint32(0)
                for index in range(8):
                    element = elements[index]
                    if uint32(element - 1) < span or uint32(element & magnitude) > infinity:
                        bits = uint32(bits | uint32(1 << index))
                shared_store_u8(uint32(packed + unit), bits)
            warp_sync()
            words = shared_load_u32x4(uint32(packed + lane * 16))
            store_16_bytes(codes, tile * PACKED_BYTES + int64(lane) * 16, packed_total, words)
            warp_sync()

    return relu_mask_encode


def make_decode(name: str, has_upper: bool) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed) for one float format."""
    form = FORMATS_BY_NAME[name]
    width, one = form.width, form.one
    store_unit = STORE_UNIT[width]
    region = shared_region(f"relu_mask_decode_{name}_{has_upper}", MAX_WARPS * PACKED_BYTES)

    def relu_mask_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        packed = uint32(region() + warp * PACKED_BYTES)
        total_bytes = numel * width
        packed_total = ((numel + 7) >> 3) + 15 & -16
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            a, b, c, d = load_16_bytes(codes, tile * PACKED_BYTES + int64(lane) * 16, packed_total)
            shared_store_u32x4(uint32(packed + lane * 16), a, b, c, d)
            warp_sync()
            for iteration in range(ITERATIONS):
                unit = uint32(iteration * 32 + lane)
                bits = shared_load_u8(uint32(packed + unit))
                elements = (
                    uint32(uint32(bits & 1) * one),
                    uint32(uint32(uint32(bits >> 1) & 1) * one),
                    uint32(uint32(uint32(bits >> 2) & 1) * one),
                    uint32(uint32(uint32(bits >> 3) & 1) * one),
                    uint32(uint32(uint32(bits >> 4) & 1) * one),
                    uint32(uint32(uint32(bits >> 5) & 1) * one),
                    uint32(uint32(uint32(bits >> 6) & 1) * one),
                    uint32(uint32(uint32(bits >> 7) & 1) * one),
                )
                offset = (tile * PACKED_BYTES + int64(unit)) * (8 * width)
                store_unit(target, offset, total_bytes, elements)
            warp_sync()

    return relu_mask_decode
