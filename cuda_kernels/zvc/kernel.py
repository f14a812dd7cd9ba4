"""Zero-value compression on the GPU: one warp per tile of 4 KiB, no work across tiles.

Encode: every lane loads one unit (eight elements), makes its mask byte, learns its place from a warp scan, and drops
its non-zero elements into shared memory; the warp then writes mask, values and count with 16-byte stores. Decode is
the mirror image.
"""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.layout import HEADER_BYTES
from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    int64,
    load_u32,
    popcount,
    shared_load_u8,
    shared_load_u32,
    shared_region,
    shared_store_u8,
    shuffle,
    shuffle_xor,
    store_u32,
    thread_index,
    uint32,
    warp_sync,
)
from fxhome.cuda_kernels.units import (
    LOAD_UNIT,
    SHARED_LOAD,
    SHARED_STORE,
    STORE_UNIT,
    global_to_shared,
    header_is_valid,
    shared_to_global,
    warp_inclusive_sum,
    write_header,
)

TILE_BYTES = 4096
CODEC_ID = 1
MAX_WARPS = 8
BAD_HEADER, BAD_TILE = 1, 2


def make_encode(width: int) -> Callable[..., None]:
    """Kernel (source, numel, head, planes_offset, tail, tiles) for elements of `width` bytes."""
    tile_elements = TILE_BYTES // width
    mask_bytes = tile_elements // 8
    warp_bytes = TILE_BYTES + 16 + mask_bytes
    region = shared_region(f"zvc_encode_{width}", MAX_WARPS * warp_bytes)
    load_unit, shared_store = LOAD_UNIT[width], SHARED_STORE[width]
    iterations = tile_elements // 256

    def zvc_encode(source: int, numel: int, head: int, planes_offset: int, tail: int, tiles: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        values = uint32(region() + warp * warp_bytes)
        mask = uint32(values + (TILE_BYTES + 16))
        total_bytes = numel * width
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        if first_tile == 0:
            write_header(head, CODEC_ID, width, numel, lane)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            count = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                elements = load_unit(source, tile * TILE_BYTES + int64(unit) * (8 * width), total_bytes)
                bits = uint32(0)
                for index in range(8):
                    if elements[index] != 0:
                        bits = uint32(bits | uint32(1 << index))
                present = popcount(bits)
                upto = warp_inclusive_sum(present, lane)
                place = uint32(values + uint32(count + upto - present) * width)
                for index in range(8):
                    if elements[index] != 0:
                        shared_store(place, elements[index])
                        place = uint32(place + width)
                shared_store_u8(uint32(mask + unit), bits)
                count = uint32(count + shuffle(upto, uint32(31)))
            if lane < 16:
                shared_store_u8(uint32(values + count * width + lane), uint32(0))
            warp_sync()
            vectors = uint32(uint32(count * width + 15) >> 4)
            shared_to_global(values, tail + tile * TILE_BYTES, vectors, lane)
            shared_to_global(mask, head + planes_offset + tile * mask_bytes, uint32(mask_bytes // 16), lane)
            if lane == 0:
                store_u32(head + HEADER_BYTES + tile * 4, count)
            warp_sync()

    return zvc_encode


def make_decode(width: int) -> Callable[..., None]:
    """Kernel (head, planes_offset, tail, target, numel, tiles, status) for elements of `width` bytes.

    A wrong header or a count that disagrees with its mask sets *status and gives zeros; nothing outside the slot is
    read.
    """
    tile_elements = TILE_BYTES // width
    mask_bytes = tile_elements // 8
    warp_bytes = TILE_BYTES + 16 + mask_bytes
    region = shared_region(f"zvc_decode_{width}", MAX_WARPS * warp_bytes)
    store_unit, shared_load = STORE_UNIT[width], SHARED_LOAD[width]
    iterations = tile_elements // 256
    mask_words_per_lane = mask_bytes // 128

    def zvc_decode(head: int, planes_offset: int, tail: int, target: int, numel: int, tiles: int, status: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        values = uint32(region() + warp * warp_bytes)
        mask = uint32(values + (TILE_BYTES + 16))
        total_bytes = numel * width
        trusted = header_is_valid(head, CODEC_ID, width, numel)
        if not trusted and lane == 0:
            store_u32(status, uint32(BAD_HEADER))
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            stored = load_u32(head + HEADER_BYTES + tile * 4)
            count = uint32(min(stored, uint32(tile_elements)))
            if not trusted:
                count = uint32(0)
            global_to_shared(head + planes_offset + tile * mask_bytes, mask, uint32(mask_bytes // 16), lane)
            global_to_shared(tail + tile * TILE_BYTES, values, uint32(uint32(count * width + 15) >> 4), lane)
            warp_sync()
            marked = uint32(0)
            for index in range(mask_words_per_lane):
                marked = uint32(marked + popcount(shared_load_u32(uint32(mask + lane * 4 + index * 128))))
            for distance in (16, 8, 4, 2, 1):
                marked = uint32(marked + shuffle_xor(marked, uint32(distance)))
            usable = trusted and marked == stored
            if trusted and not usable and lane == 0:
                store_u32(status, uint32(BAD_TILE))
            base = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                bits = shared_load_u8(uint32(mask + unit))
                if not usable:
                    bits = uint32(0)
                present = popcount(bits)
                upto = warp_inclusive_sum(present, lane)
                place = uint32(values + uint32(base + upto - present) * width)
                e0 = e1 = e2 = e3 = e4 = e5 = e6 = e7 = uint32(0)
                if bits & 1:
                    e0 = shared_load(place)
                if bits & 2:
                    e1 = shared_load(uint32(place + popcount(uint32(bits & 1)) * width))
                if bits & 4:
                    e2 = shared_load(uint32(place + popcount(uint32(bits & 3)) * width))
                if bits & 8:
                    e3 = shared_load(uint32(place + popcount(uint32(bits & 7)) * width))
                if bits & 16:
                    e4 = shared_load(uint32(place + popcount(uint32(bits & 15)) * width))
                if bits & 32:
                    e5 = shared_load(uint32(place + popcount(uint32(bits & 31)) * width))
                if bits & 64:
                    e6 = shared_load(uint32(place + popcount(uint32(bits & 63)) * width))
                if bits & 128:
                    e7 = shared_load(uint32(place + popcount(uint32(bits & 127)) * width))
                store_unit(
                    target,
                    tile * TILE_BYTES + int64(unit) * (8 * width),
                    total_bytes,
                    (e0, e1, e2, e3, e4, e5, e6, e7),
                )
                base = uint32(base + shuffle(upto, uint32(31)))
            warp_sync()

    return zvc_decode
