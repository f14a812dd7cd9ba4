"""Bit packing on the GPU: a warp packs 4096 bools into 512 bytes, so that every access is 16 bytes wide on both
sides."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    device,
    int64,
    shared_load_u16,
    shared_load_u32x4,
    shared_region,
    shared_store_u16,
    shared_store_u32x4,
    thread_index,
    uint32,
    warp_sync,
)
from fxhome.cuda_kernels.units import load_16_bytes, store_16_bytes

TILE_ELEMENTS = 4096
PACKED_BYTES = 512
MAX_WARPS = 8


@device
def gather_nibble(word: int) -> int:
    """Bit 0 of each of four bytes, as a 4-bit number: the multiplier moves byte i's bit to bit 24 + i, without
    carries."""
    return uint32(uint32(uint32(uint32(word & 0x01010101) * 0x01020408) >> 24) & 15)


@device
def spread_nibble(nibble: int) -> int:
    """A 4-bit number as four bytes of 0 or 1."""
    return uint32(uint32(uint32(nibble & 15) * 0x00204081) & 0x01010101)


def make_encode() -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed)."""
    region = shared_region("bitpack_encode", MAX_WARPS * PACKED_BYTES)

    def bitpack_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        packed = uint32(region() + warp * PACKED_BYTES)
        packed_total = ((numel + 7) >> 3) + 15 & -16
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            for iteration in range(8):
                vector = uint32(iteration * 32 + lane)
                a, b, c, d = load_16_bytes(source, tile * TILE_ELEMENTS + int64(vector) * 16, numel)
                low = uint32(gather_nibble(a) | uint32(gather_nibble(b) << 4))
                high = uint32(gather_nibble(c) | uint32(gather_nibble(d) << 4))
                shared_store_u16(uint32(packed + vector * 2), uint32(low | uint32(high << 8)))
            warp_sync()
            words = shared_load_u32x4(uint32(packed + lane * 16))
            store_16_bytes(codes, tile * PACKED_BYTES + int64(lane) * 16, packed_total, words)
            warp_sync()

    return bitpack_encode


def make_decode() -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    region = shared_region("bitpack_decode", MAX_WARPS * PACKED_BYTES)

    def bitpack_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        packed = uint32(region() + warp * PACKED_BYTES)
        packed_total = ((numel + 7) >> 3) + 15 & -16
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            a, b, c, d = load_16_bytes(codes, tile * PACKED_BYTES + int64(lane) * 16, packed_total)
            shared_store_u32x4(uint32(packed + lane * 16), a, b, c, d)
            warp_sync()
            for iteration in range(8):
                vector = uint32(iteration * 32 + lane)
                bits = shared_load_u16(uint32(packed + vector * 2))
                words = (
                    spread_nibble(bits),
                    spread_nibble(uint32(bits >> 4)),
                    spread_nibble(uint32(bits >> 8)),
                    spread_nibble(uint32(bits >> 12)),
                )
                store_16_bytes(target, tile * TILE_ELEMENTS + int64(vector) * 16, numel, words)
            warp_sync()

    return bitpack_decode
