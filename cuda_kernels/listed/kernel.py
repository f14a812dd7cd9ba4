"""CSR and RLE on the GPU: one warp per tile of 4 KiB; format.py has the layout of a slot."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.layout import align_up
from fxhome.cuda_kernels.listed.format import CODEC_IDS, RAW_FLAG, TILE_BYTES, most_listed
from fxhome.cuda_kernels.simt import (
    ballot,
    block_count,
    block_index,
    block_size,
    device,
    int64,
    popcount,
    shared_load_u8,
    shared_load_u16,
    shared_load_u32,
    shared_or_u32,
    shared_region,
    shared_store_u8,
    shared_store_u16,
    shared_store_u32,
    shuffle,
    shuffle_up,
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
    Unit,
    fits,
    global_to_shared,
    header_is_valid,
    note_place,
    reserve,
    shared_to_global,
    tile_word_and_place,
    vectors_in_use,
    warp_inclusive_sum,
    write_header,
)

MAX_WARPS = 4
BAD_HEADER, BAD_TILE = 1, 2


@device
def bits_not_zero(elements: Unit, before: int, is_first: bool) -> int:
    bits = uint32(0)
    for index in range(8):
        if elements[index] != 0:
            bits = uint32(bits | uint32(1 << index))
    return bits


@device
def bits_run_start(elements: Unit, before: int, is_first: bool) -> int:
    bits = uint32(0)
    if is_first or elements[0] != before:
        bits = uint32(1)
    for index in range(1, 8):
        if elements[index] != elements[index - 1]:
            bits = uint32(bits | uint32(1 << index))
    return bits


LISTED_BITS = {False: bits_not_zero, True: bits_run_start}


def make_encode(width: int, runs: bool) -> Callable[..., None]:
    """Kernel (source, numel, head, planes_offset, tail, tiles)."""
    tile_elements = TILE_BYTES // width
    limit = most_listed(width)
    positions_offset = TILE_BYTES + 16
    warp_bytes = positions_offset + align_up(2 * limit + 16, 16)
    region = shared_region(f"listed_encode_{width}_{runs}", MAX_WARPS * warp_bytes)
    load_unit, store_unit, shared_store = LOAD_UNIT[width], STORE_UNIT[width], SHARED_STORE[width]
    listed_bits = LISTED_BITS[runs]
    codec_id = CODEC_IDS[runs]
    iterations = tile_elements // 256

    def listed_encode(source: int, numel: int, head: int, planes_offset: int, tail: int, tiles: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        values = uint32(region() + warp * warp_bytes)
        positions = uint32(values + positions_offset)
        total_bytes = numel * width
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        if first_tile == 0:
            write_header(head, codec_id, width, numel, lane)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            count = uint32(0)
            carried = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                elements = load_unit(source, tile * TILE_BYTES + int64(unit) * (8 * width), total_bytes)
                before = shuffle_up(elements[7], uint32(1))
                if lane == 0:
                    before = carried
                carried = shuffle(elements[7], uint32(31))
                bits = listed_bits(elements, before, unit == 0)
                present = popcount(bits)
                upto = warp_inclusive_sum(present, lane)
                rank = uint32(count + upto - present)
                for index in range(8):
                    if uint32(bits >> index) & 1:
                        if rank < limit:
                            shared_store(uint32(values + rank * width), elements[index])
                            shared_store_u16(uint32(positions + rank * 2), uint32(unit * 8 + index))
                        rank = uint32(rank + 1)
                count = uint32(count + shuffle(upto, uint32(31)))
            if count <= limit:
                if lane < 16:
                    shared_store_u8(uint32(values + count * width + lane), uint32(0))
                    shared_store_u8(uint32(positions + count * 2 + lane), uint32(0))
            warp_sync()
            vectors = uint32(uint32(count * width + 15) >> 4)
            more = uint32(uint32(count * 2 + 15) >> 4)
            word, total = count, uint32(vectors + more)
            if count > limit:
                word, total = uint32(RAW_FLAG), uint32(TILE_BYTES // 16)
            slot = tail + int64(note_place(head, tile, word, reserve(head, total, lane), lane)) * 16
            if count <= limit:
                shared_to_global(values, slot, vectors, lane)
                shared_to_global(positions, slot + int64(vectors) * 16, more, lane)
            else:
                for iteration in range(iterations):
                    offset = int64(uint32(iteration * 32 + lane)) * (8 * width)
                    store_unit(slot, offset, TILE_BYTES, load_unit(source, tile * TILE_BYTES + offset, total_bytes))
            warp_sync()

    return listed_encode


@device
def rank_of_value(before: int, bits: int, index: int) -> int:
    """csr: rank of element `index` among the listed ones, if it is listed itself."""
    return uint32(before + popcount(uint32(bits & ((1 << index) - 1))))


@device
def rank_of_run(before: int, bits: int, index: int) -> int:
    """rle: number of the run that element `index` belongs to."""
    return uint32(before + popcount(uint32(bits & ((2 << index) - 1))) - 1)


@device
def listed_only(bits: int, index: int) -> bool:
    return uint32(uint32(bits >> index) & 1) != 0


@device
def every_element(bits: int, index: int) -> bool:
    return True


def make_decode(width: int, runs: bool) -> Callable[..., None]:
    """Kernel (head, planes_offset, tail, target, numel, tiles, status).

    A wrong header, count, place or position sets *status and gives zeros; nothing outside the tail is read.
    """
    tile_elements = TILE_BYTES // width
    limit = most_listed(width)
    positions_offset = TILE_BYTES + 16
    mask_offset = positions_offset + align_up(2 * limit + 16, 16)
    mask_words_per_lane = tile_elements // 1024
    warp_bytes = mask_offset + tile_elements // 8
    region = shared_region(f"listed_decode_{width}_{runs}", MAX_WARPS * warp_bytes)
    load_unit, store_unit, shared_load = LOAD_UNIT[width], STORE_UNIT[width], SHARED_LOAD[width]
    rank_of = rank_of_run if runs else rank_of_value
    has_value = every_element if runs else listed_only
    codec_id = CODEC_IDS[runs]
    iterations = tile_elements // 256

    def listed_decode(
        head: int, planes_offset: int, tail: int, target: int, numel: int, tiles: int, status: int
    ) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        values = uint32(region() + warp * warp_bytes)
        positions = uint32(values + positions_offset)
        mask = uint32(values + mask_offset)
        total_bytes = numel * width
        trusted = header_is_valid(head, codec_id, width, numel)
        if not trusted and lane == 0:
            store_u32(status, uint32(BAD_HEADER))
        used = vectors_in_use(head, tiles * (TILE_BYTES // 16))
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            word, start = tile_word_and_place(head, tile)
            slot = tail + int64(start) * 16
            if trusted and word == uint32(RAW_FLAG) and fits(start, uint32(TILE_BYTES // 16), used):
                for iteration in range(iterations):
                    offset = int64(uint32(iteration * 32 + lane)) * (8 * width)
                    store_unit(target, tile * TILE_BYTES + offset, total_bytes, load_unit(slot, offset, TILE_BYTES))
            else:
                count = word if word <= uint32(limit) else uint32(0)
                vectors = uint32(uint32(count * width + 15) >> 4)
                more = uint32(uint32(count * 2 + 15) >> 4)
                usable = trusted and count == word and fits(start, uint32(vectors + more), used)
                if not usable:
                    count = vectors = more = uint32(0)
                global_to_shared(slot, values, vectors, lane)
                global_to_shared(slot + int64(vectors) * 16, positions, more, lane)
                for index in range(mask_words_per_lane):
                    shared_store_u32(uint32(mask + lane * 4 + index * 128), uint32(0))
                warp_sync()
                rank = uint32(lane)
                while rank < count:
                    position = shared_load_u16(uint32(positions + rank * 2))
                    if position < tile_elements:
                        bit = uint32(1 << uint32(position & 31))
                        shared_or_u32(uint32(mask + uint32(position >> 5) * 4), bit)
                    rank = uint32(rank + 32)
                warp_sync()
                marked = uint32(0)
                for index in range(mask_words_per_lane):
                    marked = uint32(marked + popcount(shared_load_u32(uint32(mask + lane * 4 + index * 128))))
                for distance in (16, 8, 4, 2, 1):
                    marked = uint32(marked + shuffle_xor(marked, uint32(distance)))
                usable = usable and marked == count
                if runs:
                    usable = usable and ballot(lane == 0 and shared_load_u8(mask) & 1 != 0) != 0
                if trusted and not usable and lane == 0:
                    store_u32(status, uint32(BAD_TILE))
                base = uint32(0)
                for iteration in range(iterations):
                    unit = uint32(iteration * 32 + lane)
                    bits = shared_load_u8(uint32(mask + unit))
                    present = popcount(bits)
                    upto = warp_inclusive_sum(present, lane)
                    before = uint32(base + upto - present)
                    e0 = e1 = e2 = e3 = e4 = e5 = e6 = e7 = uint32(0)
                    if usable:
                        if has_value(bits, 0):
                            e0 = shared_load(uint32(values + rank_of(before, bits, 0) * width))
                        if has_value(bits, 1):
                            e1 = shared_load(uint32(values + rank_of(before, bits, 1) * width))
                        if has_value(bits, 2):
                            e2 = shared_load(uint32(values + rank_of(before, bits, 2) * width))
                        if has_value(bits, 3):
                            e3 = shared_load(uint32(values + rank_of(before, bits, 3) * width))
                        if has_value(bits, 4):
                            e4 = shared_load(uint32(values + rank_of(before, bits, 4) * width))
                        if has_value(bits, 5):
                            e5 = shared_load(uint32(values + rank_of(before, bits, 5) * width))
                        if has_value(bits, 6):
                            e6 = shared_load(uint32(values + rank_of(before, bits, 6) * width))
                        if has_value(bits, 7):
                            e7 = shared_load(uint32(values + rank_of(before, bits, 7) * width))
                    store_unit(
                        target,
                        tile * TILE_BYTES + int64(unit) * (8 * width),
                        total_bytes,
                        (e0, e1, e2, e3, e4, e5, e6, e7),
                    )
                    base = uint32(base + shuffle(upto, uint32(31)))
            warp_sync()

    return listed_decode
