"""The exponent codec on the GPU: one warp per tile of 4 KiB, no work across tiles; format.py has the layout."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.device_floats import join_low_bytes
from fxhome.cuda_kernels.exponent.format import FORMATS_BY_NAME, HISTOGRAM_BINS, TILE_BYTES, WINDOW
from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    device,
    int64,
    load_u16,
    load_u32,
    popcount,
    shared_add_u32,
    shared_load_u8,
    shared_load_u16,
    shared_load_u32,
    shared_load_u32x2,
    shared_load_u32x4,
    shared_region,
    shared_store_u8,
    shared_store_u16,
    shared_store_u32,
    shared_store_u32x2,
    shared_store_u32x4,
    shuffle,
    shuffle_xor,
    store_u32,
    thread_index,
    uint32,
    warp_sync,
)
from fxhome.cuda_kernels.units import (
    LOAD_UNIT,
    STORE_UNIT,
    byte_of,
    fits,
    global_to_shared,
    header_is_valid,
    high_half,
    join_halves,
    low_half,
    note_place,
    reserve,
    shared_to_global,
    tile_word_and_place,
    vectors_in_use,
    warp_inclusive_sum,
    write_header,
)

CODEC_ID = 4
MAX_WARPS = 8
BAD_HEADER, BAD_TILE = 1, 2
TOP = WINDOW - 1


@device
def exponent_bf16(bits: int) -> int:
    return uint32(uint32(bits >> 7) & 0xFF)


@device
def exponent_fp16(bits: int) -> int:
    return uint32(uint32(bits >> 10) & 31)


@device
def exponent_fp32(bits: int) -> int:
    return uint32(uint32(bits >> 23) & 0xFF)


@device
def rest_bf16(bits: int) -> int:
    return uint32(uint32(uint32(bits & 0x7F) << 1) | uint32(bits >> 15))


@device
def rest_fp16(bits: int) -> int:
    return uint32(uint32(uint32(bits & 0x3FF) << 1) | uint32(bits >> 15))


@device
def rest_fp32(bits: int) -> int:
    return uint32(uint32(uint32(bits & 0x7FFFFF) << 1) | uint32(bits >> 31))


@device
def join_bf16(exponent: int, rest: int) -> int:
    return uint32(uint32(uint32(rest & 1) << 15) | uint32(exponent << 7) | uint32(rest >> 1))


@device
def join_fp16(exponent: int, rest: int) -> int:
    return uint32(uint32(uint32(rest & 1) << 15) | uint32(uint32(exponent & 31) << 10) | uint32(rest >> 1))


@device
def join_fp32(exponent: int, rest: int) -> int:
    return uint32(uint32(uint32(rest & 1) << 31) | uint32(exponent << 23) | uint32(rest >> 1))


EXPONENT = {"bf16": exponent_bf16, "fp16": exponent_fp16, "fp32": exponent_fp32}
REST = {"bf16": rest_bf16, "fp16": rest_fp16, "fp32": rest_fp32}
JOIN = {"bf16": join_bf16, "fp16": join_fp16, "fp32": join_fp32}


@device
def valid_mask(numel: int, first: int) -> int:
    """Bit k says whether element first + k exists, for k in 0..7."""
    remaining = numel - first
    if remaining >= 8:
        return uint32(0xFF)
    if remaining <= 0:
        return uint32(0)
    return uint32(uint32(1 << remaining) - 1)


@device
def escape_mask(code2: int, code1: int) -> int:
    """Bit k says whether code k of the unit is 7."""
    pairs = uint32(code2 & uint32(code2 >> 1) & 0x5555)
    pairs = uint32(uint32(pairs | uint32(pairs >> 1)) & 0x3333)
    pairs = uint32(uint32(pairs | uint32(pairs >> 2)) & 0x0F0F)
    return uint32(uint32(pairs | uint32(pairs >> 4)) & code1 & 0xFF)


@device
def low_pairs(nibbles: int) -> int:
    """The low two bits of eight nibbles as 16 bits."""
    pairs = uint32(nibbles & 0x33333333)
    pairs = uint32(uint32(pairs | uint32(pairs >> 2)) & 0x0F0F0F0F)
    pairs = uint32(uint32(pairs | uint32(pairs >> 4)) & 0x00FF00FF)
    return uint32(uint32(pairs | uint32(pairs >> 8)) & 0xFFFF)


@device
def top_bits(nibbles: int) -> int:
    """Bit 2 of eight nibbles as 8 bits."""
    bits = uint32(uint32(nibbles >> 2) & 0x11111111)
    bits = uint32(uint32(bits | uint32(bits >> 3)) & 0x03030303)
    bits = uint32(uint32(bits | uint32(bits >> 6)) & 0x000F000F)
    return uint32(uint32(bits | uint32(bits >> 12)) & 0xFF)


@device
def spread_codes(code2: int, code1: int) -> int:
    """Eight three-bit codes, one per nibble: the inverse of `low_pairs` and `top_bits`."""
    pairs = uint32(uint32(code2 | uint32(code2 << 8)) & 0x00FF00FF)
    pairs = uint32(uint32(pairs | uint32(pairs << 4)) & 0x0F0F0F0F)
    pairs = uint32(uint32(pairs | uint32(pairs << 2)) & 0x33333333)
    bits = uint32(uint32(code1 | uint32(code1 << 12)) & 0x000F000F)
    bits = uint32(uint32(bits | uint32(bits << 6)) & 0x03030303)
    bits = uint32(uint32(bits | uint32(bits << 3)) & 0x11111111)
    return uint32(pairs | uint32(bits << 2))


@device
def fullest_window(s0: int, s1: int, s2: int, s3: int, histogram: int, lane: int) -> int:
    """Lowest exponent of the fullest window within 32 of the largest of the warp's 128 samples, four per lane;
    `histogram` is the address of 128 bytes of shared memory."""
    shared_store_u32(uint32(histogram + lane * 4), uint32(0))
    largest = uint32(max(max(s0, s1), max(s2, s3)))
    for distance in (16, 8, 4, 2, 1):
        largest = uint32(max(largest, shuffle_xor(largest, uint32(distance))))
    warp_sync()
    if uint32(largest - s0) < HISTOGRAM_BINS:
        shared_add_u32(uint32(histogram + uint32(largest - s0) * 4), uint32(1))
    if uint32(largest - s1) < HISTOGRAM_BINS:
        shared_add_u32(uint32(histogram + uint32(largest - s1) * 4), uint32(1))
    if uint32(largest - s2) < HISTOGRAM_BINS:
        shared_add_u32(uint32(histogram + uint32(largest - s2) * 4), uint32(1))
    if uint32(largest - s3) < HISTOGRAM_BINS:
        shared_add_u32(uint32(histogram + uint32(largest - s3) * 4), uint32(1))
    warp_sync()
    upto = warp_inclusive_sum(shared_load_u32(uint32(histogram + lane * 4)), lane)
    window_end = shuffle(upto, uint32(min(uint32(lane + TOP), uint32(31))))
    before = shuffle(upto, uint32(lane - 1))
    if lane == 0:
        before = uint32(0)
    best = uint32(uint32(uint32(window_end - before) << 5) | uint32(31 - lane))
    for distance in (16, 8, 4, 2, 1):
        best = uint32(max(best, shuffle_xor(best, uint32(distance))))
    top = uint32(largest - uint32(31 - uint32(best & 31)))
    return uint32(top - TOP) if TOP <= top <= 0xFF else uint32(0)


def make_choose_window(name: str) -> Callable[[int, int, int, int, int], int]:
    """Device function (source, first element, numel, histogram, lane) -> lowest exponent of the tile's window."""
    float_format = FORMATS_BY_NAME[name]
    width = float_format.width
    stride = float_format.tile_elements // 128
    exponent_of = EXPONENT[name]
    load_element = {2: load_u16, 4: load_u32}[width]

    @device
    def choose_window(source: int, first: int, numel: int, histogram: int, lane: int) -> int:
        s0 = s1 = s2 = s3 = uint32(0)
        at = first + int64(lane * stride + (lane * 7) % stride)
        if at < numel:
            s0 = exponent_of(load_element(source + at * width))
        at = first + int64((lane + 32) * stride + ((lane + 32) * 7) % stride)
        if at < numel:
            s1 = exponent_of(load_element(source + at * width))
        at = first + int64((lane + 64) * stride + ((lane + 64) * 7) % stride)
        if at < numel:
            s2 = exponent_of(load_element(source + at * width))
        at = first + int64((lane + 96) * stride + ((lane + 96) * 7) % stride)
        if at < numel:
            s3 = exponent_of(load_element(source + at * width))
        return fullest_window(s0, s1, s2, s3, histogram, lane)

    return choose_window


def make_encode(name: str) -> Callable[..., None]:
    """Kernel (source, numel, head, planes_offset, tail, tiles) for one float format."""
    float_format = FORMATS_BY_NAME[name]
    width = float_format.width
    tile_elements = float_format.tile_elements
    plane_bytes = float_format.plane_bytes
    rest1_offset, code2_offset = float_format.rest1_offset, float_format.code2_offset
    code1_offset = float_format.code1_offset
    extra2_offset, extra1_offset = float_format.extra2_offset, float_format.extra1_offset
    has_rest2, has_extra = float_format.has_rest2, float_format.has_extra
    escapes_offset = plane_bytes
    warp_bytes = plane_bytes + tile_elements + 16
    # The histogram is dead before the first escape is stored, so it shares their place.
    region = shared_region(f"exponent_encode_{name}", MAX_WARPS * warp_bytes)
    load_unit, exponent_of, rest_of = LOAD_UNIT[width], EXPONENT[name], REST[name]
    choose_window = make_choose_window(name)
    iterations = tile_elements // 256

    def exponent_encode(source: int, numel: int, head: int, planes_offset: int, tail: int, tiles: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        planes = uint32(region() + warp * warp_bytes)
        escapes = uint32(planes + escapes_offset)
        total_bytes = numel * width
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        if first_tile == 0:
            write_header(head, CODEC_ID, width, numel, lane)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            base = choose_window(source, tile * tile_elements, numel, escapes, lane)
            warp_sync()
            count = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                elements = load_unit(source, tile * TILE_BYTES + int64(unit) * (8 * width), total_bytes)
                codes = uint32(0)
                for index in range(8):
                    code = uint32(min(uint32(exponent_of(elements[index]) - base), uint32(WINDOW)))
                    codes = uint32(codes | uint32(code << (4 * index)))
                code2, code1 = low_pairs(codes), top_bits(codes)
                escaped = escape_mask(code2, code1)
                escaped = uint32(escaped & valid_mask(numel, tile * tile_elements + int64(unit) * 8))
                shared_store_u16(uint32(planes + code2_offset + unit * 2), code2)
                shared_store_u8(uint32(planes + code1_offset + unit), code1)
                r0, r1, r2, r3 = (
                    rest_of(elements[0]), rest_of(elements[1]), rest_of(elements[2]), rest_of(elements[3]),
                )  # fmt: skip
                r4, r5, r6, r7 = (
                    rest_of(elements[4]), rest_of(elements[5]), rest_of(elements[6]), rest_of(elements[7]),
                )  # fmt: skip
                if has_rest2:
                    shared_store_u32x4(
                        uint32(planes + unit * 16),
                        join_halves(low_half(r0), low_half(r1)),
                        join_halves(low_half(r2), low_half(r3)),
                        join_halves(low_half(r4), low_half(r5)),
                        join_halves(low_half(r6), low_half(r7)),
                    )
                    r0, r1, r2, r3 = high_half(r0), high_half(r1), high_half(r2), high_half(r3)
                    r4, r5, r6, r7 = high_half(r4), high_half(r5), high_half(r6), high_half(r7)
                shared_store_u32x2(
                    uint32(planes + rest1_offset + unit * 8),
                    join_low_bytes(r0, r1, r2, r3),
                    join_low_bytes(r4, r5, r6, r7),
                )
                if has_extra:
                    extras = uint32(0)
                    for index in range(8):
                        extras = uint32(extras | uint32(uint32(rest_of(elements[index]) >> 8) << (4 * index)))
                    shared_store_u16(uint32(planes + extra2_offset + unit * 2), low_pairs(extras))
                    shared_store_u8(uint32(planes + extra1_offset + unit), top_bits(extras))
                present = popcount(escaped)
                upto = warp_inclusive_sum(present, lane)
                place = uint32(escapes + uint32(count + upto - present))
                for index in range(8):
                    if uint32(escaped >> index) & 1:
                        shared_store_u8(place, exponent_of(elements[index]))
                        place = uint32(place + 1)
                count = uint32(count + shuffle(upto, uint32(31)))
            if lane < 16:
                shared_store_u8(uint32(escapes + count + lane), uint32(0))
            warp_sync()
            vectors = uint32(uint32(count + 15) >> 4)
            reserved = reserve(head, vectors, lane)
            shared_to_global(planes, head + planes_offset + tile * plane_bytes, uint32(plane_bytes // 16), lane)
            start = note_place(head, tile, uint32(base | uint32(count << 8)), reserved, lane)
            shared_to_global(escapes, tail + int64(start) * 16, vectors, lane)
            warp_sync()

    return exponent_encode


def make_decode(name: str) -> Callable[..., None]:
    """Kernel (head, planes_offset, tail, target, numel, tiles, status) for one float format.

    A wrong header, a place outside the part in use or a count that disagrees with the codes sets *status; nothing
    outside the buffers is read or written.
    """
    float_format = FORMATS_BY_NAME[name]
    width = float_format.width
    tile_elements = float_format.tile_elements
    plane_bytes = float_format.plane_bytes
    rest1_offset, code2_offset = float_format.rest1_offset, float_format.code2_offset
    code1_offset = float_format.code1_offset
    extra2_offset, extra1_offset = float_format.extra2_offset, float_format.extra1_offset
    has_rest2, has_extra = float_format.has_rest2, float_format.has_extra
    warp_bytes = plane_bytes + tile_elements + 16
    region = shared_region(f"exponent_decode_{name}", MAX_WARPS * warp_bytes)
    store_unit, join = STORE_UNIT[width], JOIN[name]
    iterations = tile_elements // 256

    def exponent_decode(
        head: int, planes_offset: int, tail: int, target: int, numel: int, tiles: int, status: int
    ) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        planes = uint32(region() + warp * warp_bytes)
        escapes = uint32(planes + plane_bytes)
        total_bytes = numel * width
        if not header_is_valid(head, CODEC_ID, width, numel) and lane == 0:
            store_u32(status, uint32(BAD_HEADER))
        used = vectors_in_use(head, tiles * (tile_elements // 16))
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            word, start = tile_word_and_place(head, tile)
            base = uint32(word & 0xFF)
            stored = uint32(word >> 8)
            vectors = uint32(uint32(uint32(min(stored, uint32(tile_elements))) + 15) >> 4)
            readable = fits(start, vectors, used)
            if not readable:
                vectors = uint32(0)
            global_to_shared(head + planes_offset + tile * plane_bytes, planes, uint32(plane_bytes // 16), lane)
            global_to_shared(tail + int64(start) * 16, escapes, vectors, lane)
            warp_sync()
            found = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                code2 = shared_load_u16(uint32(planes + code2_offset + unit * 2))
                code1 = shared_load_u8(uint32(planes + code1_offset + unit))
                valid = valid_mask(numel, tile * tile_elements + int64(unit) * 8)
                escaped = uint32(escape_mask(code2, code1) & valid)
                present = popcount(escaped)
                upto = warp_inclusive_sum(present, lane)
                place = uint32(escapes + uint32(found + upto - present))
                found = uint32(found + shuffle(upto, uint32(31)))
                low, high = shared_load_u32x2(uint32(planes + rest1_offset + unit * 8))
                r0, r1, r2, r3 = byte_of(low, 0), byte_of(low, 1), byte_of(low, 2), byte_of(low, 3)
                r4, r5, r6, r7 = byte_of(high, 0), byte_of(high, 1), byte_of(high, 2), byte_of(high, 3)
                if has_rest2:
                    a, b, c, d = shared_load_u32x4(uint32(planes + unit * 16))
                    r0, r1 = join_halves(low_half(a), r0), join_halves(high_half(a), r1)
                    r2, r3 = join_halves(low_half(b), r2), join_halves(high_half(b), r3)
                    r4, r5 = join_halves(low_half(c), r4), join_halves(high_half(c), r5)
                    r6, r7 = join_halves(low_half(d), r6), join_halves(high_half(d), r7)
                x0 = x1 = x2 = x3 = x4 = x5 = x6 = x7 = uint32(0)
                if escaped != 0:
                    if escaped & 1:
                        x0 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 2:
                        x1 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 4:
                        x2 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 8:
                        x3 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 16:
                        x4 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 32:
                        x5 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 64:
                        x6 = uint32(shared_load_u8(place) + 1)
                        place = uint32(place + 1)
                    if escaped & 128:
                        x7 = uint32(shared_load_u8(place) + 1)
                if has_extra:
                    extra2 = shared_load_u16(uint32(planes + extra2_offset + unit * 2))
                    extra1 = shared_load_u8(uint32(planes + extra1_offset + unit))
                    extras = spread_codes(extra2, extra1)
                    r0 = uint32(r0 | uint32(code_at(extras, 0) << 8))
                    r1 = uint32(r1 | uint32(code_at(extras, 1) << 8))
                    r2 = uint32(r2 | uint32(code_at(extras, 2) << 8))
                    r3 = uint32(r3 | uint32(code_at(extras, 3) << 8))
                    r4 = uint32(r4 | uint32(code_at(extras, 4) << 8))
                    r5 = uint32(r5 | uint32(code_at(extras, 5) << 8))
                    r6 = uint32(r6 | uint32(code_at(extras, 6) << 8))
                    r7 = uint32(r7 | uint32(code_at(extras, 7) << 8))
                codes = spread_codes(code2, code1)
                unit_elements = (
                    join(exponent_at(codes, 0, base, x0), r0),
                    join(exponent_at(codes, 1, base, x1), r1),
                    join(exponent_at(codes, 2, base, x2), r2),
                    join(exponent_at(codes, 3, base, x3), r3),
                    join(exponent_at(codes, 4, base, x4), r4),
                    join(exponent_at(codes, 5, base, x5), r5),
                    join(exponent_at(codes, 6, base, x6), r6),
                    join(exponent_at(codes, 7, base, x7), r7),
                )
                offset = tile * TILE_BYTES + int64(unit) * (8 * width)
                store_unit(target, offset, total_bytes, unit_elements)
            if (found != stored or not readable) and lane == 0:
                store_u32(status, uint32(BAD_TILE))
            warp_sync()

    return exponent_decode


@device
def code_at(codes: int, index: int) -> int:
    return uint32(uint32(codes >> (4 * index)) & 7)


@device
def exponent_at(codes: int, index: int, base: int, escape: int) -> int:
    """Exponent of element `index`; `escape` is its escaped exponent + 1, or 0."""
    if escape != 0:
        return uint32(escape - 1)
    return uint32(uint32(base + code_at(codes, index)) & 0xFF)
