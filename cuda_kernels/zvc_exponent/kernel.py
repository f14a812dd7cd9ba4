"""The zvc_exponent codec on the GPU: one warp per tile of 4 KiB; format.py has the layout.

Encode: the non-zero elements are packed in shared memory as zvc does it, looked through once for the window, the number
of escapes and sign bits, and then written to their planes in units of eight. Decode is the mirror image.
"""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.device_floats import join_low_bytes
from fxhome.cuda_kernels.exponent.format import WINDOW
from fxhome.cuda_kernels.exponent.kernel import (
    code_at,
    escape_mask,
    fullest_window,
    low_pairs,
    spread_codes,
    top_bits,
)
from fxhome.cuda_kernels.simt import (
    ballot,
    block_count,
    block_index,
    block_size,
    device,
    int64,
    load_u8,
    load_u16,
    load_u32x2,
    load_u32x4,
    popcount,
    shared_load_u8,
    shared_load_u32,
    shared_region,
    shared_store_u8,
    shuffle,
    shuffle_xor,
    store_u8,
    store_u16,
    store_u32,
    store_u32x2,
    store_u32x4,
    thread_index,
    uint32,
    warp_sync,
)
from fxhome.cuda_kernels.units import (
    LOAD_UNIT,
    PUT_SHARED_UNIT,
    SHARED_LOAD,
    SHARED_STORE,
    SHARED_UNIT,
    STORE_UNIT,
    byte_of,
    fits,
    global_to_shared,
    header_is_valid,
    high_half,
    join_halves,
    low_half,
    make_pick,
    note_place,
    reserve,
    shared_to_global,
    tile_word_and_place,
    vectors_in_use,
    warp_inclusive_sum,
    write_header,
)
from fxhome.cuda_kernels.zvc_exponent.format import (
    BASE_SHIFT,
    CODEC_ID,
    COUNT_BITS,
    ESCAPE_SHIFT,
    FORMATS_BY_NAME,
    RAW_SHIFT,
    SIGNED_SHIFT,
    TILE_BYTES,
    PackedFormat,
)

MAX_WARPS = 8
BAD_HEADER, BAD_TILE = 1, 2


@device
def first_places(elements: int) -> int:
    """Bit k says whether place k of a unit holds one of the `elements` that are left."""
    if elements >= 8:
        return uint32(0xFF)
    return uint32(uint32(1 << elements) - 1)


def make_exponent_of(packed: PackedFormat) -> Callable[[int], int]:
    """Device function: the exponent of an element's bits."""
    shift, mask = packed.mantissa_bits, (1 << packed.exponent_bits) - 1

    @device
    def exponent_of(bits: int) -> int:
        return uint32(uint32(bits >> shift) & mask)

    return exponent_of


def make_rest_of(packed: PackedFormat) -> Callable[[int], int]:
    """Device function: mantissa << 1 | sign of an element's bits."""
    mask, sign = (1 << packed.mantissa_bits) - 1, 8 * packed.width - 1

    @device
    def rest_of(bits: int) -> int:
        return uint32(uint32(uint32(bits & mask) << 1) | uint32(bits >> sign))

    return rest_of


def make_join(packed: PackedFormat) -> Callable[[int, int], int]:
    """Device function: an element's bits from its exponent and rest."""
    shift, sign = packed.mantissa_bits, 8 * packed.width - 1

    @device
    def join(exponent: int, rest: int) -> int:
        return uint32(uint32(uint32(rest & 1) << sign) | uint32(uint32(exponent << shift) | uint32(rest >> 1)))

    return join


def make_codes(packed: PackedFormat) -> Callable[..., int]:
    """Device function: the codes of a unit, one per nibble."""
    exponent_of = make_exponent_of(packed)

    @device
    def codes_of(e0: int, e1: int, e2: int, e3: int, e4: int, e5: int, e6: int, e7: int, base: int) -> int:
        codes = uint32(0)
        codes = uint32(codes | uint32(min(uint32(exponent_of(e0) - base), uint32(WINDOW))))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e1) - base), uint32(WINDOW))) << 4))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e2) - base), uint32(WINDOW))) << 8))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e3) - base), uint32(WINDOW))) << 12))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e4) - base), uint32(WINDOW))) << 16))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e5) - base), uint32(WINDOW))) << 20))
        codes = uint32(codes | uint32(uint32(min(uint32(exponent_of(e6) - base), uint32(WINDOW))) << 24))
        return uint32(codes | uint32(uint32(min(uint32(exponent_of(e7) - base), uint32(WINDOW))) << 28))

    return codes_of


def make_encode(name: str) -> Callable[..., None]:
    """Kernel (source, numel, head, planes_offset, tail, tiles) for one float format."""
    packed = FORMATS_BY_NAME[name]
    width, tile_elements = packed.width, packed.tile_elements
    mask_bytes = tile_elements // 8
    warp_bytes = TILE_BYTES + 16 + mask_bytes + 128
    region = shared_region(f"zvc_exponent_encode_{name}", MAX_WARPS * warp_bytes)
    load_unit, shared_load, shared_store = LOAD_UNIT[width], SHARED_LOAD[width], SHARED_STORE[width]
    shared_unit = SHARED_UNIT[width]
    exponent_of, rest_of, codes_of = make_exponent_of(packed), make_rest_of(packed), make_codes(packed)
    rest1_at, extra2_at, code2_at = packed.rest1, packed.extra2, packed.code2
    extra1_at, code1_at = packed.extra1, packed.code1
    has_rest2, has_extra = packed.has_rest2, packed.has_extra
    iterations = tile_elements // 256
    top_sign = 1 << (8 * width - 1)

    def zvc_exponent_encode(source: int, numel: int, head: int, planes_offset: int, tail: int, tiles: int) -> None:
        lane = uint32(thread_index() & 31)
        warp = uint32(thread_index() >> 5)
        warps = uint32(block_size() >> 5)
        values = uint32(region() + warp * warp_bytes)
        mask = uint32(values + (TILE_BYTES + 16))
        histogram = uint32(mask + mask_bytes)
        total_bytes = numel * width
        first_tile = int64(block_index()) * int64(warps) + int64(warp)
        if first_tile == 0:
            write_header(head, CODEC_ID, width, numel, lane)
        for tile in range(first_tile, tiles, int64(block_count()) * int64(warps)):
            count = uint32(0)
            signs = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                elements = load_unit(source, tile * TILE_BYTES + int64(unit) * (8 * width), total_bytes)
                bits = uint32(0)
                for index in range(8):
                    signs = uint32(signs | elements[index])
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
            signed = uint32(0)
            if ballot(uint32(signs & top_sign) != 0) != 0:
                signed = uint32(1)
            s0 = exponent_of(shared_load(uint32(values + uint32(uint32(lane * count) >> 7) * width)))
            s1 = exponent_of(shared_load(uint32(values + uint32(uint32(uint32(lane + 32) * count) >> 7) * width)))
            s2 = exponent_of(shared_load(uint32(values + uint32(uint32(uint32(lane + 64) * count) >> 7) * width)))
            s3 = exponent_of(shared_load(uint32(values + uint32(uint32(uint32(lane + 96) * count) >> 7) * width)))
            base = fullest_window(s0, s1, s2, s3, histogram, lane)
            if count == 0:
                base = uint32(0)
            units = uint32(uint32(count + 7) >> 3)
            rounds = uint32(uint32(units + 31) >> 5)
            escapes = uint32(0)
            for iteration in range(rounds):
                unit = uint32(uint32(iteration) * 32 + lane)
                if unit < units:
                    e0, e1, e2, e3, e4, e5, e6, e7 = shared_unit(uint32(values + unit * (8 * width)))
                    codes = codes_of(e0, e1, e2, e3, e4, e5, e6, e7, base)
                    escaped = escape_mask(low_pairs(codes), top_bits(codes))
                    escapes = uint32(escapes + popcount(uint32(escaped & first_places(uint32(count - unit * 8)))))
            for distance in (16, 8, 4, 2, 1):
                escapes = uint32(escapes + shuffle_xor(escapes, uint32(distance)))
            escape_vectors = uint32(uint32(escapes + 15) >> 4)
            main_vectors = uint32(uint32(units * uint32(code1_at + signed) + 15) >> 4)
            vectors = uint32(main_vectors + escape_vectors)
            raw_vectors = uint32(uint32(count * width + 15) >> 4)
            word = uint32(
                count
                | uint32(escape_vectors << ESCAPE_SHIFT)
                | uint32(base << BASE_SHIFT)
                | uint32(signed << SIGNED_SHIFT)
            )
            is_raw = vectors > raw_vectors
            if is_raw:
                vectors = raw_vectors
                word = uint32(count | uint32(1 << RAW_SHIFT))
            reserved = reserve(head, vectors, lane)
            shared_to_global(mask, head + planes_offset + tile * mask_bytes, uint32(mask_bytes // 16), lane)
            start = tail + int64(note_place(head, tile, word, reserved, lane)) * 16
            if is_raw:
                shared_to_global(values, start, vectors, lane)
            else:
                listed = start + int64(main_vectors) * 16
                before = uint32(0)
                for iteration in range(rounds):
                    unit = uint32(uint32(iteration) * 32 + lane)
                    escaped = uint32(0)
                    e0 = e1 = e2 = e3 = e4 = e5 = e6 = e7 = uint32(0)
                    if unit < units:
                        e0, e1, e2, e3, e4, e5, e6, e7 = shared_unit(uint32(values + unit * (8 * width)))
                        codes = codes_of(e0, e1, e2, e3, e4, e5, e6, e7, base)
                        code2, code1 = low_pairs(codes), top_bits(codes)
                        escaped = uint32(escape_mask(code2, code1) & first_places(uint32(count - unit * 8)))
                        r0, r1, r2, r3 = rest_of(e0), rest_of(e1), rest_of(e2), rest_of(e3)
                        r4, r5, r6, r7 = rest_of(e4), rest_of(e5), rest_of(e6), rest_of(e7)
                        if signed == 0:
                            r0, r1 = uint32(r0 | uint32(code1 & 1)), uint32(r1 | uint32(uint32(code1 >> 1) & 1))
                            r2 = uint32(r2 | uint32(uint32(code1 >> 2) & 1))
                            r3 = uint32(r3 | uint32(uint32(code1 >> 3) & 1))
                            r4 = uint32(r4 | uint32(uint32(code1 >> 4) & 1))
                            r5 = uint32(r5 | uint32(uint32(code1 >> 5) & 1))
                            r6 = uint32(r6 | uint32(uint32(code1 >> 6) & 1))
                            r7 = uint32(r7 | uint32(uint32(code1 >> 7) & 1))
                        else:
                            store_u8(start + int64(uint32(units * code1_at + unit)), code1)
                        store_u16(start + int64(uint32(units * code2_at + unit * 2)), code2)
                        if has_rest2:
                            store_u32x4(
                                start + int64(unit) * 16,
                                join_halves(low_half(r0), low_half(r1)),
                                join_halves(low_half(r2), low_half(r3)),
                                join_halves(low_half(r4), low_half(r5)),
                                join_halves(low_half(r6), low_half(r7)),
                            )
                            r0, r1, r2, r3 = high_half(r0), high_half(r1), high_half(r2), high_half(r3)
                            r4, r5, r6, r7 = high_half(r4), high_half(r5), high_half(r6), high_half(r7)
                        store_u32x2(
                            start + int64(uint32(units * rest1_at + unit * 8)),
                            join_low_bytes(r0, r1, r2, r3),
                            join_low_bytes(r4, r5, r6, r7),
                        )
                        if has_extra:
                            low = uint32(uint32(r0 >> 8) | uint32(uint32(r1 >> 8) << 4))
                            low = uint32(low | uint32(uint32(r2 >> 8) << 8) | uint32(uint32(r3 >> 8) << 12))
                            upper = uint32(uint32(r4 >> 8) | uint32(uint32(r5 >> 8) << 4))
                            upper = uint32(upper | uint32(uint32(r6 >> 8) << 8) | uint32(uint32(r7 >> 8) << 12))
                            extras = uint32(low | uint32(upper << 16))
                            store_u16(start + int64(uint32(units * extra2_at + unit * 2)), low_pairs(extras))
                            store_u8(start + int64(uint32(units * extra1_at + unit)), top_bits(extras))
                    present = popcount(escaped)
                    upto = warp_inclusive_sum(present, lane)
                    place = listed + int64(uint32(before + upto - present))
                    if escaped != 0:
                        if escaped & 1:
                            store_u8(place, exponent_of(e0))
                            place = place + 1
                        if escaped & 2:
                            store_u8(place, exponent_of(e1))
                            place = place + 1
                        if escaped & 4:
                            store_u8(place, exponent_of(e2))
                            place = place + 1
                        if escaped & 8:
                            store_u8(place, exponent_of(e3))
                            place = place + 1
                        if escaped & 16:
                            store_u8(place, exponent_of(e4))
                            place = place + 1
                        if escaped & 32:
                            store_u8(place, exponent_of(e5))
                            place = place + 1
                        if escaped & 64:
                            store_u8(place, exponent_of(e6))
                            place = place + 1
                        if escaped & 128:
                            store_u8(place, exponent_of(e7))
                    before = uint32(before + shuffle(upto, uint32(31)))
            warp_sync()

    return zvc_exponent_encode


@device
def escape_at(listed: int, rank: int, limit: int) -> int:
    """The listed exponent + 1; 1 beyond the list (whose length is then wrong, and reported)."""
    if rank < limit:
        return uint32(load_u8(listed + int64(rank)) + 1)
    return uint32(1)


@device
def exponent_or(codes: int, index: int, base: int, escape: int) -> int:
    """Exponent of the unit's element `index`; `escape` is its listed exponent + 1, or 0."""
    if escape != 0:
        return uint32(escape - 1)
    return uint32(base + code_at(codes, index))


def make_decode(name: str) -> Callable[..., None]:
    """Kernel (head, planes_offset, tail, target, numel, tiles, status) for one float format.

    A wrong header, a place outside the part in use or a word that disagrees with mask or codes sets *status; nothing
    outside the buffers is read or written.
    """
    packed = FORMATS_BY_NAME[name]
    width, tile_elements = packed.width, packed.tile_elements
    mask_bytes = tile_elements // 8
    mask_words_per_lane = mask_bytes // 128
    warp_bytes = TILE_BYTES + 16 + mask_bytes
    region = shared_region(f"zvc_exponent_decode_{name}", MAX_WARPS * warp_bytes)
    store_unit, pick, put_shared_unit = STORE_UNIT[width], make_pick(width), PUT_SHARED_UNIT[width]
    join = make_join(packed)
    exponent_mask = (1 << packed.exponent_bits) - 1
    rest1_at, extra2_at, code2_at = packed.rest1, packed.extra2, packed.code2
    extra1_at, code1_at = packed.extra1, packed.code1
    has_rest2, has_extra = packed.has_rest2, packed.has_extra
    iterations = tile_elements // 256

    def zvc_exponent_decode(
        head: int, planes_offset: int, tail: int, target: int, numel: int, tiles: int, status: int
    ) -> None:
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
            word, first_vector = tile_word_and_place(head, tile)
            start = tail + int64(first_vector) * 16
            count = uint32(word & ((1 << COUNT_BITS) - 1))
            escape_vectors = uint32(uint32(word >> ESCAPE_SHIFT) & 0xFF)
            base = uint32(uint32(word >> BASE_SHIFT) & 0xFF)
            signed = uint32(uint32(word >> SIGNED_SHIFT) & 1)
            is_raw = uint32(word >> RAW_SHIFT) == 1
            units = uint32(uint32(count + 7) >> 3)
            main_vectors = uint32(uint32(units * uint32(code1_at + signed) + 15) >> 4)
            vectors = uint32(main_vectors + escape_vectors)
            if is_raw:
                vectors = uint32(uint32(count * width + 15) >> 4)
            global_to_shared(head + planes_offset + tile * mask_bytes, mask, uint32(mask_bytes // 16), lane)
            warp_sync()
            marked = uint32(0)
            for index in range(mask_words_per_lane):
                marked = uint32(marked + popcount(shared_load_u32(uint32(mask + lane * 4 + index * 128))))
            for distance in (16, 8, 4, 2, 1):
                marked = uint32(marked + shuffle_xor(marked, uint32(distance)))
            usable = trusted and marked == count and fits(first_vector, vectors, used)
            if uint32(word >> RAW_SHIFT) > 1:
                usable = False
            is_good = usable
            if usable and is_raw:
                global_to_shared(start, values, vectors, lane)
            elif usable:
                listed = start + int64(main_vectors) * 16
                limit = uint32(escape_vectors * 16)
                found = uint32(0)
                for iteration in range(uint32(uint32(units + 31) >> 5)):
                    unit = uint32(uint32(iteration) * 32 + lane)
                    code2 = code1 = escaped = uint32(0)
                    r0 = r1 = r2 = r3 = r4 = r5 = r6 = r7 = uint32(0)
                    if unit < units:
                        code2 = load_u16(start + int64(uint32(units * code2_at + unit * 2)))
                        low, high = load_u32x2(start + int64(uint32(units * rest1_at + unit * 8)))
                        r0, r1, r2, r3 = byte_of(low, 0), byte_of(low, 1), byte_of(low, 2), byte_of(low, 3)
                        r4, r5, r6, r7 = byte_of(high, 0), byte_of(high, 1), byte_of(high, 2), byte_of(high, 3)
                        if has_rest2:
                            a, b, c, d = load_u32x4(start + int64(unit) * 16)
                            r0, r1 = join_halves(low_half(a), r0), join_halves(high_half(a), r1)
                            r2, r3 = join_halves(low_half(b), r2), join_halves(high_half(b), r3)
                            r4, r5 = join_halves(low_half(c), r4), join_halves(high_half(c), r5)
                            r6, r7 = join_halves(low_half(d), r6), join_halves(high_half(d), r7)
                        if has_extra:
                            extra2 = load_u16(start + int64(uint32(units * extra2_at + unit * 2)))
                            extra1 = load_u8(start + int64(uint32(units * extra1_at + unit)))
                            extras = spread_codes(extra2, extra1)
                            r0 = uint32(r0 | uint32(code_at(extras, 0) << 8))
                            r1 = uint32(r1 | uint32(code_at(extras, 1) << 8))
                            r2 = uint32(r2 | uint32(code_at(extras, 2) << 8))
                            r3 = uint32(r3 | uint32(code_at(extras, 3) << 8))
                            r4 = uint32(r4 | uint32(code_at(extras, 4) << 8))
                            r5 = uint32(r5 | uint32(code_at(extras, 5) << 8))
                            r6 = uint32(r6 | uint32(code_at(extras, 6) << 8))
                            r7 = uint32(r7 | uint32(code_at(extras, 7) << 8))
                        if signed == 0:
                            code1 = uint32(uint32(r0 & 1) | uint32(uint32(r1 & 1) << 1))
                            code1 = uint32(code1 | uint32(uint32(r2 & 1) << 2) | uint32(uint32(r3 & 1) << 3))
                            code1 = uint32(code1 | uint32(uint32(r4 & 1) << 4) | uint32(uint32(r5 & 1) << 5))
                            code1 = uint32(code1 | uint32(uint32(r6 & 1) << 6) | uint32(uint32(r7 & 1) << 7))
                            r0, r1 = uint32(r0 & 0xFFFFFFFE), uint32(r1 & 0xFFFFFFFE)
                            r2, r3 = uint32(r2 & 0xFFFFFFFE), uint32(r3 & 0xFFFFFFFE)
                            r4, r5 = uint32(r4 & 0xFFFFFFFE), uint32(r5 & 0xFFFFFFFE)
                            r6, r7 = uint32(r6 & 0xFFFFFFFE), uint32(r7 & 0xFFFFFFFE)
                        else:
                            code1 = load_u8(start + int64(uint32(units * code1_at + unit)))
                        escaped = uint32(escape_mask(code2, code1) & first_places(uint32(count - unit * 8)))
                    present = popcount(escaped)
                    upto = warp_inclusive_sum(present, lane)
                    rank = uint32(found + upto - present)
                    found = uint32(found + shuffle(upto, uint32(31)))
                    x0 = x1 = x2 = x3 = x4 = x5 = x6 = x7 = uint32(0)
                    if escaped != 0:
                        if escaped & 1:
                            x0 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 2:
                            x1 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 4:
                            x2 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 8:
                            x3 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 16:
                            x4 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 32:
                            x5 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 64:
                            x6 = escape_at(listed, rank, limit)
                            rank = uint32(rank + 1)
                        if escaped & 128:
                            x7 = escape_at(listed, rank, limit)
                    if unit < units:
                        codes = spread_codes(code2, code1)
                        put_shared_unit(
                            uint32(values + unit * (8 * width)),
                            (
                                join(uint32(exponent_or(codes, 0, base, x0) & exponent_mask), r0),
                                join(uint32(exponent_or(codes, 1, base, x1) & exponent_mask), r1),
                                join(uint32(exponent_or(codes, 2, base, x2) & exponent_mask), r2),
                                join(uint32(exponent_or(codes, 3, base, x3) & exponent_mask), r3),
                                join(uint32(exponent_or(codes, 4, base, x4) & exponent_mask), r4),
                                join(uint32(exponent_or(codes, 5, base, x5) & exponent_mask), r5),
                                join(uint32(exponent_or(codes, 6, base, x6) & exponent_mask), r6),
                                join(uint32(exponent_or(codes, 7, base, x7) & exponent_mask), r7),
                            ),
                        )
                if uint32(uint32(found + 15) >> 4) != escape_vectors:
                    is_good = False
            if trusted and not is_good and lane == 0:
                store_u32(status, uint32(BAD_TILE))
            warp_sync()
            before = uint32(0)
            for iteration in range(iterations):
                unit = uint32(iteration * 32 + lane)
                bits = shared_load_u8(uint32(mask + unit))
                if not usable:
                    bits = uint32(0)
                present = popcount(bits)
                upto = warp_inclusive_sum(present, lane)
                elements = pick(uint32(values + uint32(before + upto - present) * width), bits)
                store_unit(target, tile * TILE_BYTES + int64(unit) * (8 * width), total_bytes, elements)
                before = uint32(before + shuffle(upto, uint32(31)))
            warp_sync()

    return zvc_exponent_decode
