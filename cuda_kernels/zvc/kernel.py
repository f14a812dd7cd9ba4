"""Zero-value compression on the GPU: one warp per tile of 4 KiB, no work across tiles.

Encode: every lane loads one unit (eight elements), makes its mask byte, learns its place from a warp scan, and drops
its non-zero elements into shared memory; the warp then writes mask, values and count with 16-byte stores. Decode is
the mirror image.
"""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    int64,
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
    SHARED_STORE,
    STORE_UNIT,
    fits,
    global_to_shared,
    header_is_valid,
    make_pick,
    note_place,
    reserve,
    shared_to_global,
    tile_word_and_place,
    vectors_in_use,
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
                position = uint32(values + uint32(count + upto - present) * width)
                for index in range(8):
                    if elements[index] != 0:
                        shared_store(position, elements[index])
                        position = uint32(position + width)
                shared_store_u8(uint32(mask + unit), bits)
                count = uint32(count + shuffle(upto, uint32(31)))
            if lane < 16:
                shared_store_u8(uint32(values + count * width + lane), uint32(0))
            warp_sync()
            vectors = uint32(uint32(count * width + 15) >> 4)
            reserved = reserve(head, vectors, lane)
            shared_to_global(mask, head + planes_offset + tile * mask_bytes, uint32(mask_bytes // 16), lane)
            place = note_place(head, tile, count, reserved, lane)
            shared_to_global(values, tail + int64(place) * 16, vectors, lane)
            warp_sync()

    return zvc_encode


def make_decode(width: int) -> Callable[..., None]:
    """Kernel (head, planes_offset, tail, target, numel, tiles, status) for elements of `width` bytes.

    A wrong header, a place outside the part in use or a count that disagrees with its mask sets *status and gives
    zeros; nothing outside the tail is read.
    """
    tile_elements = TILE_BYTES // width
    mask_bytes = tile_elements // 8
    warp_bytes = TILE_BYTES + 16 + mask_bytes
    region = shared_region(f"zvc_decode_{width}", MAX_WARPS * warp_bytes)
    store_unit, pick = STORE_UNIT[width], make_pick(width)
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
        used = vectors_in_use(head, tiles * (TILE_BYTES // 16))
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            stored, start = tile_word_and_place(head, tile)
            vectors = uint32(uint32(uint32(min(stored, uint32(tile_elements))) * width + 15) >> 4)
            readable = trusted and fits(start, vectors, used)
            if not readable:
                vectors = uint32(0)
            global_to_shared(head + planes_offset + tile * mask_bytes, mask, uint32(mask_bytes // 16), lane)
            global_to_shared(tail + int64(start) * 16, values, vectors, lane)
            warp_sync()
            marked = uint32(0)
            for index in range(mask_words_per_lane):
                marked = uint32(marked + popcount(shared_load_u32(uint32(mask + lane * 4 + index * 128))))
            for distance in (16, 8, 4, 2, 1):
                marked = uint32(marked + shuffle_xor(marked, uint32(distance)))
            usable = readable and marked == stored
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
                elements = pick(uint32(values + uint32(base + upto - present) * width), bits)
                store_unit(
                    target,
                    tile * TILE_BYTES + int64(unit) * (8 * width),
                    total_bytes,
                    elements,
                )
                base = uint32(base + shuffle(upto, uint32(31)))
            warp_sync()

    return zvc_decode
