"""Index narrowing on the GPU: a lane turns two int64 indices (16 bytes) into 2 x `width` bytes."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.simt import (
    ballot,
    block_count,
    block_index,
    block_size,
    device,
    int64,
    load_u16,
    load_u32,
    load_u32x2,
    store_u16,
    store_u32,
    store_u32x2,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import byte_of, high_half, join_halves, load_16_bytes, low_half, store_16_bytes

TILE_ELEMENTS = 512
BAD_VALUE = 3


@device
def pack_1(address: int, first: int, second: int) -> None:
    store_u16(address, uint32(uint32(first & 0xFF) | uint32(uint32(second & 0xFF) << 8)))


@device
def pack_2(address: int, first: int, second: int) -> None:
    store_u32(address, join_halves(low_half(first), low_half(second)))


@device
def pack_4(address: int, first: int, second: int) -> None:
    store_u32x2(address, first, second)


@device
def unpack_1(address: int) -> tuple[int, int]:
    pair = load_u16(address)
    return byte_of(pair, 0), byte_of(pair, 1)


@device
def unpack_2(address: int) -> tuple[int, int]:
    pair = load_u32(address)
    return low_half(pair), high_half(pair)


@device
def unpack_4(address: int) -> tuple[int, int]:
    return load_u32x2(address)


@device
def upper_unsigned(low: int) -> int:
    return uint32(0)


@device
def upper_signed(low: int) -> int:
    """Upper word of the sign extension of a 32-bit value."""
    return uint32(0xFFFFFFFF) if low >= uint32(0x80000000) else uint32(0)


PACK = {1: pack_1, 2: pack_2, 4: pack_4}
UNPACK = {1: unpack_1, 2: unpack_2, 4: unpack_4}
UPPER = {1: upper_unsigned, 2: upper_unsigned, 4: upper_signed}


def make_encode(width: int) -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed); sets *status if an index does not fit."""
    pack, upper = PACK[width], UPPER[width]
    limit = (1 << (8 * width)) - 1

    def narrow_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        outside = False
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            for iteration in range(8):
                first = tile * TILE_ELEMENTS + int64(uint32(iteration * 32 + lane)) * 2
                low0, high0, low1, high1 = load_16_bytes(source, first * 8, numel * 8)
                if low0 > limit or low1 > limit or high0 != upper(low0) or high1 != upper(low1):
                    outside = True
                if first < numel:
                    pack(codes + first * width, low0, low1)
        if ballot(outside) != 0 and lane == 0:
            store_u32(status, uint32(BAD_VALUE))

    return narrow_encode


def make_decode(width: int) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    unpack, upper = UNPACK[width], UPPER[width]

    def narrow_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            for iteration in range(8):
                first = tile * TILE_ELEMENTS + int64(uint32(iteration * 32 + lane)) * 2
                if first < numel:
                    low0, low1 = unpack(codes + first * width)
                    store_16_bytes(target, first * 8, numel * 8, (low0, upper(low0), low1, upper(low1)))

    return narrow_decode
