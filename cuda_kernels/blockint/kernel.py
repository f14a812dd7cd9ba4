"""Block quantisation on the GPU.

Encode: a lane converts 16 elements, four lanes share a scale. Decode: a lane converts two units of eight, a warp's
width apart, so that its stores are contiguous. Conversion instructions run at an eighth of the rate of an addition, so
whole numbers are made and read by adding and subtracting 2^23.
"""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.device_floats import (
    SHORTEN,
    WIDEN,
    WIDTH,
    block_largest,
    finite_product,
    join_low_bytes,
    join_upper_halves,
    mix,
    round_to_upper_half,
)
from fxhome.cuda_kernels.floats import TILE_ELEMENTS
from fxhome.cuda_kernels.simt import (
    add_f32,
    block_count,
    block_index,
    block_size,
    byte_permute,
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
    store_u32x4,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import LOAD_UNIT, STORE_UNIT, Unit, store_16_bytes

TINY_BITS = (127 - 100) << 23
NAN_SCALE = 0x7FC0
ONE_BITS = 0x3F800000
DRAW_BITS = (127 - 23) << 23
WHOLE_BITS = 0x4B400000
LARGE_SCALE = 0x7800
"""bf16 bits of 2^113: below it, 127 times the scale is finite as bf16."""


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

    @device
    def nearest(element: int, kept: int, inverse: float) -> int:
        """A word whose low byte is the code: adding 1.5 * 2^23 rounds to a whole number, ties to even."""
        scaled = mul_f32(widen(uint32(element & kept)), inverse)
        return f32_bits(add_f32(scaled, f32_from_bits(uint32(WHOLE_BITS))))

    @device
    def drawn(element: int, kept: int, inverse: float, seed: int, index: int) -> int:
        return to_code(widen(uint32(element & kept)), inverse, seed, index)

    @device
    def unit_codes(unit: Unit, kept: int, inverse: float, seed: int, first: int) -> Unit:
        if seed >= 0:
            return (
                drawn(unit[0], kept, inverse, seed, first),
                drawn(unit[1], kept, inverse, seed, first + 1),
                drawn(unit[2], kept, inverse, seed, first + 2),
                drawn(unit[3], kept, inverse, seed, first + 3),
                drawn(unit[4], kept, inverse, seed, first + 4),
                drawn(unit[5], kept, inverse, seed, first + 5),
                drawn(unit[6], kept, inverse, seed, first + 6),
                drawn(unit[7], kept, inverse, seed, first + 7),
            )
        return (
            nearest(unit[0], kept, inverse),
            nearest(unit[1], kept, inverse),
            nearest(unit[2], kept, inverse),
            nearest(unit[3], kept, inverse),
            nearest(unit[4], kept, inverse),
            nearest(unit[5], kept, inverse),
            nearest(unit[6], kept, inverse),
            nearest(unit[7], kept, inverse),
        )

    @device
    def nibbles(c: Unit) -> int:
        even = uint32(join_low_bytes(c[0], c[2], c[4], c[6]) & 0x0F0F0F0F)
        odd = uint32(join_low_bytes(c[1], c[3], c[5], c[7]) & 0x0F0F0F0F)
        return uint32(even | uint32(odd << 4))

    def block_int_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * TILE_ELEMENTS + int64(lane) * 16
            lower = load_unit(source, first * width, numel * width)
            upper = load_unit(source, (first + 8) * width, numel * width)
            largest = uint32(0)
            for index in range(8):
                largest = uint32(max(largest, uint32(f32_bits(widen(lower[index])) & 0x7FFFFFFF)))
                largest = uint32(max(largest, uint32(f32_bits(widen(upper[index])) & 0x7FFFFFFF)))
            largest = block_largest(largest)
            quotient = div_f32(f32_from_bits(largest), f32_from_bits(uint32(levels_bits)))
            scale = uint32(uint32(f32_bits(quotient) + 0xFFFF) >> 16)
            # Elements of a block without a usable scale are taken as zeros.
            kept = uint32(0xFFFFFFFF)
            if largest < TINY_BITS:
                scale = uint32(0)
                kept = uint32(0)
            if largest >= 0x7F800000:
                scale = uint32(NAN_SCALE)
                kept = uint32(0)
            usable = uint32(scale << 16) if kept != 0 else uint32(ONE_BITS)
            inverse = div_f32(f32_from_bits(uint32(ONE_BITS)), f32_from_bits(usable))
            if first < numel:
                c = unit_codes(lower, kept, inverse, seed, first)
                d = unit_codes(upper, kept, inverse, seed, first + 8)
                if is_byte:
                    i, j = join_low_bytes(c[0], c[1], c[2], c[3]), join_low_bytes(c[4], c[5], c[6], c[7])
                    k, m = join_low_bytes(d[0], d[1], d[2], d[3]), join_low_bytes(d[4], d[5], d[6], d[7])
                    if first + 8 < numel:
                        store_u32x4(codes + first, i, j, k, m)
                    else:
                        store_u32x2(codes + first, i, j)
                elif first + 8 < numel:
                    store_u32x2(codes + (first >> 1), nibbles(c), nibbles(d))
                else:
                    store_u32(codes + (first >> 1), nibbles(c))
                if lane & 3 == 0:
                    store_u16(scales + (first >> 6) * 2, scale)

    return block_int_encode


def _make_eight_values(bits: int) -> Callable[[int, int], Unit]:
    """Device function (first code word, second code word) -> eight words (biased code) | (exponent of 2^23)."""

    @device
    def eight_bytes(low: int, high: int) -> Unit:
        a, b = uint32(low ^ 0x80808080), uint32(high ^ 0x80808080)
        whole = uint32(0x4B000000)
        return (
            byte_permute(a, whole, uint32(0x7440)),
            byte_permute(a, whole, uint32(0x7441)),
            byte_permute(a, whole, uint32(0x7442)),
            byte_permute(a, whole, uint32(0x7443)),
            byte_permute(b, whole, uint32(0x7440)),
            byte_permute(b, whole, uint32(0x7441)),
            byte_permute(b, whole, uint32(0x7442)),
            byte_permute(b, whole, uint32(0x7443)),
        )

    @device
    def eight_nibbles(low: int, high: int) -> Unit:
        biased = uint32(low ^ 0x88888888)
        even, odd = uint32(biased & 0x0F0F0F0F), uint32(uint32(biased >> 4) & 0x0F0F0F0F)
        whole = uint32(0x4B000000)
        return (
            byte_permute(even, whole, uint32(0x7440)),
            byte_permute(odd, whole, uint32(0x7440)),
            byte_permute(even, whole, uint32(0x7441)),
            byte_permute(odd, whole, uint32(0x7441)),
            byte_permute(even, whole, uint32(0x7442)),
            byte_permute(odd, whole, uint32(0x7442)),
            byte_permute(even, whole, uint32(0x7443)),
            byte_permute(odd, whole, uint32(0x7443)),
        )

    return eight_bytes if bits == 8 else eight_nibbles


def make_decode(bits: int, dtype_name: str) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    width = WIDTH[dtype_name]
    store_unit, shorten = STORE_UNIT[width], SHORTEN[dtype_name]
    eight_values = _make_eight_values(bits)
    # 2^23 + bias: what the words of `eight_values` stand above their codes.
    bias_bits = 0xCB000000 | (1 << (bits - 1))
    is_byte, is_pair = bits == 8, dtype_name == "bf16"

    @device
    def product(word: int, scale: float) -> float:
        return mul_f32(add_f32(f32_from_bits(word), f32_from_bits(uint32(bias_bits))), scale)

    @device
    def pair(low: int, high: int, scale: float) -> int:
        """Two bf16; the scale leaves room for them."""
        return join_upper_halves(
            round_to_upper_half(f32_bits(product(low, scale))), round_to_upper_half(f32_bits(product(high, scale)))
        )

    @device
    def any_value(word: int, scale: float) -> int:
        code = add_f32(f32_from_bits(word), f32_from_bits(uint32(bias_bits)))
        return shorten(finite_product(code, scale))

    @device
    def decode_unit(target: int, at: int, numel: int, low: int, high: int, stored: int) -> None:
        scale = f32_from_bits(uint32(stored << 16))
        u = eight_values(low, high)
        if is_pair and uint32(stored & 0x7FFF) < LARGE_SCALE:
            words = (
                pair(u[0], u[1], scale), pair(u[2], u[3], scale), pair(u[4], u[5], scale), pair(u[6], u[7], scale),
            )  # fmt: skip
            store_16_bytes(target, at * 2, numel * 2, words)
        else:
            unit = (
                any_value(u[0], scale),
                any_value(u[1], scale),
                any_value(u[2], scale),
                any_value(u[3], scale),
                any_value(u[4], scale),
                any_value(u[5], scale),
                any_value(u[6], scale),
                any_value(u[7], scale),
            )
            store_unit(target, at * width, numel * width, unit)

    def block_int_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * TILE_ELEMENTS + int64(lane) * 8
            low0 = high0 = stored0 = low1 = high1 = stored1 = uint32(0)
            # Both units are loaded before either is decoded: twice the bytes in flight.
            if first < numel:
                stored0 = load_u16(scales + (first >> 6) * 2)
                if is_byte:
                    low0, high0 = load_u32x2(codes + first)
                else:
                    low0 = load_u32(codes + (first >> 1))
            if first + 256 < numel:
                stored1 = load_u16(scales + ((first + 256) >> 6) * 2)
                if is_byte:
                    low1, high1 = load_u32x2(codes + first + 256)
                else:
                    low1 = load_u32(codes + ((first + 256) >> 1))
            for half in range(2):
                at = first + half * 256
                low, high, stored = (low0, high0, stored0) if half == 0 else (low1, high1, stored1)
                if at < numel:
                    decode_unit(target, at, numel, low, high, stored)

    def block_int_decode_fp32(
        target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int
    ) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            # Four codes a lane and turn, so that 16-byte stores are contiguous.
            for turn in range(4):
                at = tile * TILE_ELEMENTS + int64(uint32(turn * 32 + lane)) * 4
                if at < numel:
                    word = load_u32(codes + at) if is_byte else load_u16(codes + (at >> 1))
                    scale = f32_from_bits(uint32(load_u16(scales + (at >> 6) * 2) << 16))
                    u = eight_values(word, word)
                    words = (
                        any_value(u[0], scale), any_value(u[1], scale), any_value(u[2], scale), any_value(u[3], scale),
                    )  # fmt: skip
                    store_16_bytes(target, at * 4, numel * 4, words)

    return block_int_decode_fp32 if dtype_name == "fp32" else block_int_decode
