"""Block quantisation on the GPU: a lane converts eight elements, eight lanes share a scale."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.device_floats import SHORTEN, WIDEN, WIDTH, block_largest, finite_product, mix
from fxhome.cuda_kernels.simt import (
    add_f32,
    block_count,
    block_index,
    block_size,
    device,
    div_f32,
    f32_bits,
    f32_from_bits,
    f32_from_i32,
    floor_to_i32,
    int64,
    load_u16,
    load_u32,
    load_u32x2,
    mul_f32,
    round_to_i32,
    store_u16,
    store_u32,
    store_u32x2,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import LOAD_UNIT, STORE_UNIT, byte_of, join_bytes

TINY_BITS = (127 - 100) << 23
NAN_SCALE = 0x7FC0
ONE_BITS = 0x3F800000
DRAW_BITS = (127 - 23) << 23


def _make_to_code(levels: int) -> Callable[[float, float, int, int], int]:
    @device
    def to_code(value: float, inverse: float, seed: int, index: int) -> int:
        """Code of one element as a 32-bit two's complement number."""
        scaled = mul_f32(value, inverse)
        if seed >= 0:
            draw = mul_f32(f32_from_i32(uint32(mix(seed, index) >> 9)), f32_from_bits(uint32(DRAW_BITS)))
            code = floor_to_i32(add_f32(scaled, draw))
        else:
            code = round_to_i32(scaled)
        # Two's complement compared as unsigned: above levels and below 2^31 is too large, the rest above is negative.
        if code < 0x80000000:
            code = uint32(min(code, uint32(levels)))
        else:
            code = uint32(max(code, uint32(0x100000000 - levels)))
        return code

    return to_code


def make_encode(bits: int, dtype_name: str) -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed); seed < 0 rounds to nearest."""
    levels = 2 ** (bits - 1) - 1
    levels_bits = {127: 0x42FE0000, 7: 0x40E00000}[levels]
    to_code = _make_to_code(levels)
    width = WIDTH[dtype_name]
    load_unit, widen = LOAD_UNIT[width], WIDEN[dtype_name]
    is_byte = bits == 8

    def block_int_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * 256 + int64(lane) * 8
            elements = load_unit(source, first * width, numel * width)
            largest = uint32(0)
            for index in range(8):
                largest = uint32(max(largest, uint32(f32_bits(widen(elements[index])) & 0x7FFFFFFF)))
            largest = block_largest(largest)
            quotient = div_f32(f32_from_bits(largest), f32_from_bits(uint32(levels_bits)))
            scale = uint32(uint32(f32_bits(quotient) + 0xFFFF) >> 16)
            inverse = div_f32(f32_from_bits(uint32(ONE_BITS)), f32_from_bits(uint32(scale << 16)))
            if largest < TINY_BITS:
                scale = uint32(0)
            if largest >= 0x7F800000:
                scale = uint32(NAN_SCALE)
            if scale == 0 or scale == NAN_SCALE:
                inverse = f32_from_bits(uint32(0))
                elements = (
                    uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), uint32(0),
                )  # fmt: skip
            c0, c1 = (
                to_code(widen(elements[0]), inverse, seed, first),
                to_code(widen(elements[1]), inverse, seed, first + 1),
            )
            c2, c3 = (
                to_code(widen(elements[2]), inverse, seed, first + 2),
                to_code(widen(elements[3]), inverse, seed, first + 3),
            )
            c4, c5 = (
                to_code(widen(elements[4]), inverse, seed, first + 4),
                to_code(widen(elements[5]), inverse, seed, first + 5),
            )
            c6, c7 = (
                to_code(widen(elements[6]), inverse, seed, first + 6),
                to_code(widen(elements[7]), inverse, seed, first + 7),
            )
            if first < numel:
                if is_byte:
                    low = join_bytes(uint32(c0 & 0xFF), uint32(c1 & 0xFF), uint32(c2 & 0xFF), uint32(c3 & 0xFF))
                    high = join_bytes(uint32(c4 & 0xFF), uint32(c5 & 0xFF), uint32(c6 & 0xFF), uint32(c7 & 0xFF))
                    store_u32x2(codes + first, low, high)
                else:
                    even = join_bytes(uint32(c0 & 15), uint32(c2 & 15), uint32(c4 & 15), uint32(c6 & 15))
                    odd = join_bytes(uint32(c1 & 15), uint32(c3 & 15), uint32(c5 & 15), uint32(c7 & 15))
                    store_u32(codes + (first >> 1), uint32(even | uint32(odd << 4)))
                if lane & 7 == 0:
                    store_u16(scales + (first >> 6) * 2, scale)

    return block_int_encode


@device
def signed_byte(word: int, index: int) -> float:
    byte = byte_of(word, index)
    return f32_from_i32(uint32(uint32(byte ^ 0x80) - 0x80))


@device
def signed_nibble(word: int, index: int) -> float:
    nibble = uint32(uint32(word >> (4 * index)) & 15)
    return f32_from_i32(uint32(uint32(nibble ^ 8) - 8))


def make_decode(bits: int, dtype_name: str) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    width = WIDTH[dtype_name]
    store_unit, shorten = STORE_UNIT[width], SHORTEN[dtype_name]

    def int8_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * 256 + int64(lane) * 8
            if first < numel:
                low, high = load_u32x2(codes + first)
                scale = f32_from_bits(uint32(load_u16(scales + (first >> 6) * 2) << 16))
                unit = (
                    shorten(finite_product(signed_byte(low, 0), scale)),
                    shorten(finite_product(signed_byte(low, 1), scale)),
                    shorten(finite_product(signed_byte(low, 2), scale)),
                    shorten(finite_product(signed_byte(low, 3), scale)),
                    shorten(finite_product(signed_byte(high, 0), scale)),
                    shorten(finite_product(signed_byte(high, 1), scale)),
                    shorten(finite_product(signed_byte(high, 2), scale)),
                    shorten(finite_product(signed_byte(high, 3), scale)),
                )
                store_unit(target, first * width, numel * width, unit)

    def int4_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * 256 + int64(lane) * 8
            if first < numel:
                word = load_u32(codes + (first >> 1))
                scale = f32_from_bits(uint32(load_u16(scales + (first >> 6) * 2) << 16))
                unit = (
                    shorten(finite_product(signed_nibble(word, 0), scale)),
                    shorten(finite_product(signed_nibble(word, 1), scale)),
                    shorten(finite_product(signed_nibble(word, 2), scale)),
                    shorten(finite_product(signed_nibble(word, 3), scale)),
                    shorten(finite_product(signed_nibble(word, 4), scale)),
                    shorten(finite_product(signed_nibble(word, 5), scale)),
                    shorten(finite_product(signed_nibble(word, 6), scale)),
                    shorten(finite_product(signed_nibble(word, 7), scale)),
                )
                store_unit(target, first * width, numel * width, unit)

    return int8_decode if bits == 8 else int4_decode
