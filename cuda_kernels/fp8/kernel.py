"""fp8 block encoding on the GPU: a lane converts eight elements, eight lanes share a scale; plain integer arithmetic,
any GPU."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.device_floats import SHORTEN, WIDEN, WIDTH, block_largest, finite_product
from fxhome.cuda_kernels.fp8.format import FP8_FORMATS, SCALE_BIAS, SMALLEST_EXPONENT
from fxhome.cuda_kernels.simt import (
    block_count,
    block_index,
    block_size,
    device,
    f32_bits,
    f32_from_bits,
    int64,
    load_u8,
    load_u32x2,
    mul_f32,
    round_to_i32,
    store_u8,
    store_u32x2,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import LOAD_UNIT, STORE_UNIT, byte_of, join_bytes


def _make_to_code(format_name: str) -> Callable[[float, float], int]:
    fp8_format = FP8_FORMATS[format_name]
    shift, mantissa_bits = fp8_format.shift, fp8_format.mantissa_bits
    nan_code, infinity_code = fp8_format.nan_code, fp8_format.infinity_code
    half_less_one = (1 << (shift - 1)) - 1
    rebias = (127 - fp8_format.bias) << mantissa_bits
    smallest_normal = (128 - fp8_format.bias) << 23
    steps_per_unit_bits = (127 - fp8_format.smallest_step_exponent) << 23

    @device
    def to_code(value: float, inverse_scale: float) -> int:
        bits = f32_bits(mul_f32(value, inverse_scale))
        magnitude = uint32(bits & 0x7FFFFFFF)
        code = uint32(
            uint32(uint32(magnitude + uint32(half_less_one + uint32(uint32(magnitude >> shift) & 1))) >> shift) - rebias
        )
        if magnitude < smallest_normal:
            code = round_to_i32(mul_f32(f32_from_bits(magnitude), f32_from_bits(uint32(steps_per_unit_bits))))
        if magnitude == 0x7F800000:
            code = uint32(infinity_code)
        if magnitude > 0x7F800000:
            code = uint32(nan_code)
        return uint32(code | uint32(uint32(bits >> 24) & 0x80))

    return to_code


def _make_from_code(format_name: str) -> Callable[[int, float], float]:
    fp8_format = FP8_FORMATS[format_name]
    shift = fp8_format.shift
    rebias_bits = (127 + 127 - fp8_format.bias) << 23
    first_special = 0x7C if fp8_format.has_infinity else fp8_format.nan_code
    first_nan = 0x7D if fp8_format.has_infinity else fp8_format.nan_code

    @device
    def from_code(code: int, scale: float) -> float:
        magnitude = uint32(code & 0x7F)
        plain = mul_f32(f32_from_bits(uint32(magnitude << shift)), f32_from_bits(uint32(rebias_bits)))
        bits = f32_bits(finite_product(plain, scale))
        if magnitude >= first_special:
            bits = uint32(0x7F800000)
        if magnitude >= first_nan:
            bits = uint32(0x7FC00000)
        return f32_from_bits(uint32(bits | uint32(uint32(code & 0x80) << 24)))

    return from_code


def make_encode(format_name: str, dtype_name: str) -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed)."""
    largest_exponent = FP8_FORMATS[format_name].largest_exponent
    to_code = _make_to_code(format_name)
    width = WIDTH[dtype_name]
    load_unit, widen = LOAD_UNIT[width], WIDEN[dtype_name]

    def fp8_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * 256 + int64(lane) * 8
            elements = load_unit(source, first * width, numel * width)
            largest = uint32(0)
            for index in range(8):
                magnitude = uint32(f32_bits(widen(elements[index])) & 0x7FFFFFFF)
                if magnitude < 0x7F800000:
                    largest = uint32(max(largest, magnitude))
            largest = block_largest(largest)
            exponent = int64(uint32(largest >> 23)) - (127 + largest_exponent)
            if uint32(largest & 0x7FFFFF) > 0x600000:
                exponent += 1
            exponent = max(exponent, SMALLEST_EXPONENT)
            inverse = f32_from_bits(uint32((127 - exponent) << 23))
            if first < numel:
                store_u32x2(
                    codes + first,
                    join_bytes(
                        to_code(widen(elements[0]), inverse),
                        to_code(widen(elements[1]), inverse),
                        to_code(widen(elements[2]), inverse),
                        to_code(widen(elements[3]), inverse),
                    ),
                    join_bytes(
                        to_code(widen(elements[4]), inverse),
                        to_code(widen(elements[5]), inverse),
                        to_code(widen(elements[6]), inverse),
                        to_code(widen(elements[7]), inverse),
                    ),
                )
                if lane & 7 == 0:
                    store_u8(scales + (first >> 6), uint32(exponent + SCALE_BIAS))

    return fp8_encode


def make_decode(format_name: str, dtype_name: str) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    from_code = _make_from_code(format_name)
    width = WIDTH[dtype_name]
    store_unit, shorten = STORE_UNIT[width], SHORTEN[dtype_name]

    def fp8_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * 256 + int64(lane) * 8
            if first < numel:
                low, high = load_u32x2(codes + first)
                stored = uint32(min(load_u8(scales + (first >> 6)), uint32(254)))
                # The byte 0 would be 2^-127, which fp32 writes as a subnormal; no encoder makes it.
                scale = f32_from_bits(uint32(stored << 23) if stored != 0 else uint32(0x00400000))
                unit = (
                    shorten(from_code(byte_of(low, 0), scale)),
                    shorten(from_code(byte_of(low, 1), scale)),
                    shorten(from_code(byte_of(low, 2), scale)),
                    shorten(from_code(byte_of(low, 3), scale)),
                    shorten(from_code(byte_of(high, 0), scale)),
                    shorten(from_code(byte_of(high, 1), scale)),
                    shorten(from_code(byte_of(high, 2), scale)),
                    shorten(from_code(byte_of(high, 3), scale)),
                )
                store_unit(target, first * width, numel * width, unit)

    return fp8_decode
