"""Device helpers shared by the codecs: eight-element units of 1-, 2- or 4-byte elements, warp scans, header checks.

A unit is eight consecutive elements, handled by one lane. Whatever the element width, a unit is a tuple of eight
uint32 bit patterns, so one kernel body serves every dtype. Accesses at the ragged end, or at an address that is not a
multiple of the vector size, go byte by byte through the slow path; nothing outside [base, base + total_bytes) is ever
touched.
"""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.layout import HEADER_BYTES, HEADER_MAGIC, USED_OFFSET, WORD_BYTES
from fxhome.cuda_kernels.simt import (
    Words2,
    Words4,
    ballot,
    device,
    global_add_u32,
    int64,
    load_u8,
    load_u32,
    load_u32x2,
    load_u32x4,
    popcount,
    shared_load_u8,
    shared_load_u16,
    shared_load_u32,
    shared_load_u32x4,
    shared_store_u8,
    shared_store_u16,
    shared_store_u32,
    shared_store_u32x4,
    shuffle,
    shuffle_up,
    store_u8,
    store_u32,
    store_u32x2,
    store_u32x4,
    uint32,
)

Unit = tuple[int, int, int, int, int, int, int, int]


@device
def load_word_bytewise(base: int, offset: int, total_bytes: int) -> int:
    word = uint32(0)
    for index in range(4):
        if offset + index < total_bytes:
            word = uint32(word | uint32(load_u8(base + offset + index) << (8 * index)))
    return word


@device
def store_word_bytewise(base: int, offset: int, total_bytes: int, word: int) -> None:
    for index in range(4):
        if offset + index < total_bytes:
            store_u8(base + offset + index, uint32(word >> (8 * index)))


@device
def load_16_bytes(base: int, offset: int, total_bytes: int) -> Words4:
    """Four words at base + offset; bytes at or beyond total_bytes read as zero."""
    address = base + offset
    if offset + 16 <= total_bytes and (address & 15) == 0:
        return load_u32x4(address)
    return (
        load_word_bytewise(base, offset, total_bytes),
        load_word_bytewise(base, offset + 4, total_bytes),
        load_word_bytewise(base, offset + 8, total_bytes),
        load_word_bytewise(base, offset + 12, total_bytes),
    )


@device
def load_8_bytes(base: int, offset: int, total_bytes: int) -> Words2:
    address = base + offset
    if offset + 8 <= total_bytes and (address & 7) == 0:
        return load_u32x2(address)
    return (load_word_bytewise(base, offset, total_bytes), load_word_bytewise(base, offset + 4, total_bytes))


@device
def store_16_bytes(base: int, offset: int, total_bytes: int, words: Words4) -> None:
    """Store four words at base + offset; bytes at or beyond total_bytes are dropped."""
    address = base + offset
    if offset + 16 <= total_bytes and (address & 15) == 0:
        store_u32x4(address, words[0], words[1], words[2], words[3])
    else:
        store_word_bytewise(base, offset, total_bytes, words[0])
        store_word_bytewise(base, offset + 4, total_bytes, words[1])
        store_word_bytewise(base, offset + 8, total_bytes, words[2])
        store_word_bytewise(base, offset + 12, total_bytes, words[3])


@device
def store_8_bytes(base: int, offset: int, total_bytes: int, words: Words2) -> None:
    address = base + offset
    if offset + 8 <= total_bytes and (address & 7) == 0:
        store_u32x2(address, words[0], words[1])
    else:
        store_word_bytewise(base, offset, total_bytes, words[0])
        store_word_bytewise(base, offset + 4, total_bytes, words[1])


@device
def low_half(word: int) -> int:
    return uint32(word & 0xFFFF)


@device
def high_half(word: int) -> int:
    return uint32(word >> 16)


@device
def byte_of(word: int, index: int) -> int:
    return uint32(uint32(word >> (8 * index)) & 0xFF)


@device
def join_halves(low: int, high: int) -> int:
    return uint32(low | uint32(high << 16))


@device
def join_bytes(b0: int, b1: int, b2: int, b3: int) -> int:
    return uint32(join_halves(b0, b2) | uint32(join_halves(b1, b3) << 8))


@device
def load_unit_1(base: int, offset: int, total_bytes: int) -> Unit:
    a, b = load_8_bytes(base, offset, total_bytes)
    return (
        byte_of(a, 0), byte_of(a, 1), byte_of(a, 2), byte_of(a, 3),
        byte_of(b, 0), byte_of(b, 1), byte_of(b, 2), byte_of(b, 3),
    )  # fmt: skip


@device
def load_unit_2(base: int, offset: int, total_bytes: int) -> Unit:
    a, b, c, d = load_16_bytes(base, offset, total_bytes)
    return (
        low_half(a), high_half(a), low_half(b), high_half(b),
        low_half(c), high_half(c), low_half(d), high_half(d),
    )  # fmt: skip


@device
def load_unit_4(base: int, offset: int, total_bytes: int) -> Unit:
    a, b, c, d = load_16_bytes(base, offset, total_bytes)
    e, f, g, h = load_16_bytes(base, offset + 16, total_bytes)
    return a, b, c, d, e, f, g, h


@device
def store_unit_1(base: int, offset: int, total_bytes: int, unit: Unit) -> None:
    words = (join_bytes(unit[0], unit[1], unit[2], unit[3]), join_bytes(unit[4], unit[5], unit[6], unit[7]))
    store_8_bytes(base, offset, total_bytes, words)


@device
def store_unit_2(base: int, offset: int, total_bytes: int, unit: Unit) -> None:
    words = (
        join_halves(unit[0], unit[1]),
        join_halves(unit[2], unit[3]),
        join_halves(unit[4], unit[5]),
        join_halves(unit[6], unit[7]),
    )
    store_16_bytes(base, offset, total_bytes, words)


@device
def store_unit_4(base: int, offset: int, total_bytes: int, unit: Unit) -> None:
    store_16_bytes(base, offset, total_bytes, (unit[0], unit[1], unit[2], unit[3]))
    store_16_bytes(base, offset + 16, total_bytes, (unit[4], unit[5], unit[6], unit[7]))


LOAD_UNIT: dict[int, Callable[[int, int, int], Unit]] = {1: load_unit_1, 2: load_unit_2, 4: load_unit_4}
STORE_UNIT: dict[int, Callable[[int, int, int, Unit], None]] = {1: store_unit_1, 2: store_unit_2, 4: store_unit_4}
SHARED_LOAD: dict[int, Callable[[int], int]] = {1: shared_load_u8, 2: shared_load_u16, 4: shared_load_u32}
SHARED_STORE: dict[int, Callable[[int, int], None]] = {1: shared_store_u8, 2: shared_store_u16, 4: shared_store_u32}


@device
def warp_inclusive_sum(value: int, lane: int) -> int:
    """Sum of `value` over lanes 0..lane of the warp."""
    total = uint32(value)
    for step in (1, 2, 4, 8, 16):
        below = shuffle_up(total, uint32(step))
        if lane >= step:
            total = uint32(total + below)
    return total


@device
def shared_to_global(shared: int, address: int, vectors: int, lane: int) -> None:
    """The warp copies `vectors` 16-byte vectors; both addresses are multiples of 16."""
    index = uint32(lane)
    while index < vectors:
        a, b, c, d = shared_load_u32x4(uint32(shared + index * 16))
        store_u32x4(address + int64(index) * 16, a, b, c, d)
        index = uint32(index + 32)


@device
def global_to_shared(address: int, shared: int, vectors: int, lane: int) -> None:
    """The warp copies `vectors` 16-byte vectors, four loads in flight per lane (host memory answers in
    microseconds)."""
    index = uint32(lane)
    while uint32(index + 96) < vectors:
        a, b, c, d = load_u32x4(address + int64(index) * 16)
        e, f, g, h = load_u32x4(address + int64(index) * 16 + 512)
        i, j, k, m = load_u32x4(address + int64(index) * 16 + 1024)
        n, o, p, q = load_u32x4(address + int64(index) * 16 + 1536)
        shared_store_u32x4(uint32(shared + index * 16), a, b, c, d)
        shared_store_u32x4(uint32(shared + index * 16 + 512), e, f, g, h)
        shared_store_u32x4(uint32(shared + index * 16 + 1024), i, j, k, m)
        shared_store_u32x4(uint32(shared + index * 16 + 1536), n, o, p, q)
        index = uint32(index + 128)
    if uint32(index + 32) < vectors:
        a, b, c, d = load_u32x4(address + int64(index) * 16)
        e, f, g, h = load_u32x4(address + int64(index) * 16 + 512)
        shared_store_u32x4(uint32(shared + index * 16), a, b, c, d)
        shared_store_u32x4(uint32(shared + index * 16 + 512), e, f, g, h)
        index = uint32(index + 64)
    while index < vectors:
        a, b, c, d = load_u32x4(address + int64(index) * 16)
        shared_store_u32x4(uint32(shared + index * 16), a, b, c, d)
        index = uint32(index + 32)


@device
def write_header(head: int, codec_id: int, element_bytes: int, numel: int, lane: int) -> None:
    """Lane 0 of one warp writes the five header words that `header_is_valid` checks."""
    if lane == 0:
        store_u32x4(head, uint32(HEADER_MAGIC), uint32(codec_id), uint32(element_bytes), uint32(numel & 0xFFFFFFFF))
        store_u32(head + 16, uint32(numel >> 32))


@device
def header_is_valid(head: int, codec_id: int, element_bytes: int, numel: int) -> bool:
    """Whether the header names this codec, element width and element count; the same answer in every lane."""
    magic, codec, width, low = load_u32x4(head)
    high = load_u32(head + 16)
    agrees = (
        magic == uint32(HEADER_MAGIC)
        and codec == uint32(codec_id)
        and width == uint32(element_bytes)
        and low == uint32(numel & 0xFFFFFFFF)
        and high == uint32(numel >> 32)
    )
    return ballot(agrees) == uint32(0xFFFFFFFF)


@device
def reserve(head: int, vectors: int, lane: int) -> int:
    """Take the next `vectors` vectors of the tail; only lane 0 learns where. Whatever needs no place is best done
    before `note_place`, while the answer is on its way."""
    place = uint32(0)
    if lane == 0:
        place = global_add_u32(head + USED_OFFSET, vectors)
    return place


@device
def note_place(head: int, tile: int, word: int, reserved: int, lane: int) -> int:
    """Note the tile's two words; gives its first vector, in every lane. `reserved`: what `reserve` gave."""
    if lane == 0:
        store_u32x2(head + HEADER_BYTES + tile * WORD_BYTES, word, reserved)
    return shuffle(reserved, uint32(0))


@device
def tile_word_and_place(head: int, tile: int) -> Words2:
    """What `note_place` noted."""
    return load_u32x2(head + HEADER_BYTES + tile * WORD_BYTES)


@device
def fits(place: int, vectors: int, used: int) -> bool:
    """Whether `vectors` vectors at `place` lie in the part of the tail in use."""
    return vectors <= used and place <= uint32(used - vectors)


@device
def vectors_in_use(head: int, most: int) -> int:
    """The header's count of tail vectors, never more than `most`."""
    used = load_u32(head + USED_OFFSET)
    if int64(used) > most:
        used = uint32(most)
    return used


def make_pick(width: int) -> Callable[[int, int], Unit]:
    """Device function (shared address, bits) -> eight elements: those whose bit is set, taken in order from the address
    on; zero for the others."""
    shared_load = SHARED_LOAD[width]

    @device
    def pick(place: int, bits: int) -> Unit:
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
        return e0, e1, e2, e3, e4, e5, e6, e7

    return pick


@device
def shared_unit_2(address: int) -> Unit:
    """Eight 2-byte elements at a shared address that is a multiple of 16."""
    a, b, c, d = shared_load_u32x4(address)
    return (
        low_half(a), high_half(a), low_half(b), high_half(b),
        low_half(c), high_half(c), low_half(d), high_half(d),
    )  # fmt: skip


@device
def shared_unit_4(address: int) -> Unit:
    a, b, c, d = shared_load_u32x4(address)
    e, f, g, h = shared_load_u32x4(uint32(address + 16))
    return a, b, c, d, e, f, g, h


@device
def put_shared_unit_2(address: int, unit: Unit) -> None:
    shared_store_u32x4(
        address,
        join_halves(unit[0], unit[1]),
        join_halves(unit[2], unit[3]),
        join_halves(unit[4], unit[5]),
        join_halves(unit[6], unit[7]),
    )


@device
def put_shared_unit_4(address: int, unit: Unit) -> None:
    shared_store_u32x4(address, unit[0], unit[1], unit[2], unit[3])
    shared_store_u32x4(uint32(address + 16), unit[4], unit[5], unit[6], unit[7])


SHARED_UNIT: dict[int, Callable[[int], Unit]] = {2: shared_unit_2, 4: shared_unit_4}
PUT_SHARED_UNIT: dict[int, Callable[[int, Unit], None]] = {2: put_shared_unit_2, 4: put_shared_unit_4}
