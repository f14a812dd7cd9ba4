"""fp8 block encoding on the GPU, in plain integer and fp32 arithmetic, for any GPU.

Encode: a lane converts 16 elements, four lanes share a scale. Decode: a lane converts two units of eight, a warp's
width apart, so that its stores are contiguous. Multiprocessors do half as many integer operations as fp32 ones per
clock, and a conversion instruction costs eight of them: the common case is therefore one multiplication and a few
integer operations per element, and everything unusual takes a longer way.
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
)
from fxhome.cuda_kernels.floats import TILE_ELEMENTS
from fxhome.cuda_kernels.fp8.format import FP8_FORMATS, SCALE_BIAS, SMALLEST_EXPONENT
from fxhome.cuda_kernels.simt import (
    Words2,
    Words4,
    add_f32,
    ballot,
    block_count,
    block_index,
    block_size,
    byte_permute,
    device,
    f32_bits,
    f32_from_bits,
    f32_from_half,
    int64,
    load_u8,
    load_u32,
    load_u32x2,
    mul_f32,
    store_u8,
    store_u32x2,
    store_u32x4,
    thread_index,
    uint32,
)
from fxhome.cuda_kernels.units import LOAD_UNIT, STORE_UNIT, Unit, byte_of, load_16_bytes, store_16_bytes


def _make_to_code(format_name: str) -> Callable[[float, float], int]:
    fp8_format = FP8_FORMATS[format_name]
    shift, mantissa_bits = fp8_format.shift, fp8_format.mantissa_bits
    nan_code, infinity_code = fp8_format.nan_code, fp8_format.infinity_code
    half_less_one = (1 << (shift - 1)) - 1
    rebias = (127 - fp8_format.bias) << mantissa_bits
    smallest_normal = (128 - fp8_format.bias) << 23
    # Adding 2^23 steps rounds to a whole number of steps, ties to even, and leaves it in the low bits.
    magic = (127 + 23 + fp8_format.smallest_step_exponent) << 23

    @device
    def to_code(value: float, inverse_scale: float) -> int:
        bits = f32_bits(mul_f32(value, inverse_scale))
        magnitude = uint32(bits & 0x7FFFFFFF)
        code = uint32(
            uint32(uint32(magnitude + uint32(half_less_one + uint32(uint32(magnitude >> shift) & 1))) >> shift) - rebias
        )
        if magnitude < smallest_normal:
            code = uint32(f32_bits(add_f32(f32_from_bits(magnitude), f32_from_bits(uint32(magic)))) - magic)
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


def _make_to_code_scaled_down(format_name: str) -> Callable[[float, float], int]:
    shift = FP8_FORMATS[format_name].shift
    half_less_one = (1 << (shift - 1)) - 1

    @device
    def to_code(magnitude: float, inverse_scale: float) -> int:
        """Code of |x|, for a scale that moves fp8's exponents onto fp32's: its subnormals are then fp32's too."""
        bits = f32_bits(mul_f32(magnitude, inverse_scale))
        return uint32(uint32(bits + uint32(half_less_one + uint32(uint32(bits >> shift) & 1))) >> shift)

    return to_code


@device
def _low_bf16(pair: int) -> float:
    return f32_from_bits(uint32(pair << 16))


@device
def _high_bf16(pair: int) -> float:
    return f32_from_bits(uint32(pair & 0xFFFF0000))


@device
def _low_fp16(pair: int) -> float:
    return f32_from_half(pair)


@device
def _high_fp16(pair: int) -> float:
    return f32_from_half(uint32(pair >> 16))


@device
def _larger_halves(largest: int, pair: int) -> int:
    """Running maximum, in the upper half, over two 16-bit magnitudes."""
    return uint32(max(uint32(max(largest, uint32(pair << 16))), pair))


LOW = {"bf16": _low_bf16, "fp16": _low_fp16}
HIGH = {"bf16": _high_bf16, "fp16": _high_fp16}


def _make_scale_exponent(largest_exponent: int) -> Callable[[int], int]:
    @device
    def scale_exponent(largest: int) -> int:
        """s of a block, from the fp32 bits of its largest finite magnitude."""
        exponent = int64(uint32(largest >> 23)) - (127 + largest_exponent)
        if uint32(largest & 0x7FFFFF) > 0x600000:
            exponent += 1
        return max(exponent, SMALLEST_EXPONENT)

    return scale_exponent


def _make_encode_block(format_name: str, dtype_name: str) -> Callable[..., None]:
    """Device function (source, numel, codes, scales, first, lane): the lane's 16 elements, whatever they are."""
    to_code = _make_to_code(format_name)
    scale_exponent = _make_scale_exponent(FP8_FORMATS[format_name].largest_exponent)
    width = WIDTH[dtype_name]
    load_unit, widen = LOAD_UNIT[width], WIDEN[dtype_name]

    @device
    def eight_codes(unit: Unit, inverse: float) -> Words2:
        return (
            join_low_bytes(
                to_code(widen(unit[0]), inverse),
                to_code(widen(unit[1]), inverse),
                to_code(widen(unit[2]), inverse),
                to_code(widen(unit[3]), inverse),
            ),
            join_low_bytes(
                to_code(widen(unit[4]), inverse),
                to_code(widen(unit[5]), inverse),
                to_code(widen(unit[6]), inverse),
                to_code(widen(unit[7]), inverse),
            ),
        )

    @device
    def encode_block(source: int, numel: int, codes: int, scales: int, first: int, lane: int) -> None:
        lower = load_unit(source, first * width, numel * width)
        upper = load_unit(source, (first + 8) * width, numel * width)
        largest = uint32(0)
        for index in range(8):
            magnitude = uint32(f32_bits(widen(lower[index])) & 0x7FFFFFFF)
            if magnitude < 0x7F800000:
                largest = uint32(max(largest, magnitude))
            magnitude = uint32(f32_bits(widen(upper[index])) & 0x7FFFFFFF)
            if magnitude < 0x7F800000:
                largest = uint32(max(largest, magnitude))
        exponent = scale_exponent(block_largest(largest))
        inverse = f32_from_bits(uint32((127 - exponent) << 23))
        i, j = eight_codes(lower, inverse)
        k, m = eight_codes(upper, inverse)
        if first + 8 < numel:
            store_u32x4(codes + first, i, j, k, m)
        elif first < numel:
            store_u32x2(codes + first, i, j)
        if first < numel and lane & 3 == 0:
            store_u8(scales + (first >> 6), uint32(exponent + SCALE_BIAS))

    return encode_block


def make_encode(format_name: str, dtype_name: str) -> Callable[..., None]:
    """Kernel (source, numel, codes, scales, tiles, status, seed)."""
    encode_block = _make_encode_block(format_name, dtype_name)
    if dtype_name != "fp32":
        return _make_encode_pairs(format_name, dtype_name, encode_block)

    def fp8_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            encode_block(source, numel, codes, scales, tile * TILE_ELEMENTS + int64(lane) * 16, lane)

    return fp8_encode


def _make_encode_pairs(format_name: str, dtype_name: str, encode_block: Callable[..., None]) -> Callable[..., None]:
    """Two-byte elements, two at a time; what is not finite or very large goes through `encode_block`."""
    fp8_format = FP8_FORMATS[format_name]
    to_code = _make_to_code_scaled_down(format_name)
    scale_exponent = _make_scale_exponent(fp8_format.largest_exponent)
    rebias = 127 - fp8_format.bias
    largest_exponent = 149 - rebias
    low, high = LOW[dtype_name], HIGH[dtype_name]
    is_half = dtype_name == "fp16"

    @device
    def four_codes(a: int, b: int, inverse: float) -> int:
        first, second = uint32(a & 0x7FFF7FFF), uint32(b & 0x7FFF7FFF)
        codes = join_low_bytes(
            to_code(low(first), inverse),
            to_code(high(first), inverse),
            to_code(low(second), inverse),
            to_code(high(second), inverse),
        )
        return uint32(codes | uint32(byte_permute(a, b, uint32(0x7531)) & 0x80808080))

    def fp8_encode(source: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * TILE_ELEMENTS + int64(lane) * 16
            a, b, c, d = load_16_bytes(source, first * 2, numel * 2)
            e, f, g, h = load_16_bytes(source, first * 2 + 16, numel * 2)
            largest = _larger_halves(uint32(0), uint32(a & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(b & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(c & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(d & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(e & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(f & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(g & 0x7FFF7FFF))
            largest = _larger_halves(largest, uint32(h & 0x7FFF7FFF))
            largest = uint32(block_largest(largest) & 0xFFFF0000)
            if is_half:
                largest = f32_bits(f32_from_half(uint32(largest >> 16)))
            exponent = scale_exponent(largest)
            if ballot(largest >= 0x7F800000 or exponent > largest_exponent) != 0:
                encode_block(source, numel, codes, scales, first, lane)
            elif first < numel:
                power = -exponent - rebias
                inverse = f32_from_bits(uint32((power + 127) << 23 if power >= -126 else 1 << (power + 149)))
                i, j = four_codes(a, b, inverse), four_codes(c, d, inverse)
                k, m = four_codes(e, f, inverse), four_codes(g, h, inverse)
                if first + 8 < numel:
                    store_u32x4(codes + first, i, j, k, m)
                else:
                    store_u32x2(codes + first, i, j)
                if lane & 3 == 0:
                    store_u8(scales + (first >> 6), uint32(exponent + SCALE_BIAS))

    return fp8_encode


def _make_decode_unit(format_name: str, dtype_name: str) -> Callable[[int, int, int], Unit]:
    """Device function (codes 0..3, codes 4..7, stored scale) -> the eight elements' bits, whatever the codes are."""
    from_code = _make_from_code(format_name)
    shorten = SHORTEN[dtype_name]

    @device
    def decode_unit(low: int, high: int, stored: int) -> Unit:
        # The byte 0 would be 2^-127, which fp32 writes as a subnormal; no encoder makes it.
        scale = f32_from_bits(uint32(stored << 23) if stored != 0 else uint32(0x00400000))
        return (
            shorten(from_code(byte_of(low, 0), scale)),
            shorten(from_code(byte_of(low, 1), scale)),
            shorten(from_code(byte_of(low, 2), scale)),
            shorten(from_code(byte_of(low, 3), scale)),
            shorten(from_code(byte_of(high, 0), scale)),
            shorten(from_code(byte_of(high, 1), scale)),
            shorten(from_code(byte_of(high, 2), scale)),
            shorten(from_code(byte_of(high, 3), scale)),
        )

    return decode_unit


def make_decode(format_name: str, dtype_name: str) -> Callable[..., None]:
    """Kernel (target, numel, codes, scales, tiles, status, seed)."""
    fp8_format = FP8_FORMATS[format_name]
    decode_unit = _make_decode_unit(format_name, dtype_name)
    width = WIDTH[dtype_name]
    store_unit = STORE_UNIT[width]
    shift = fp8_format.shift
    rebias = 127 - fp8_format.bias
    # Scales for which a code's value is a normal number of the element type, and 2^(scale + rebias) one of fp32.
    lowest, span = 127 - 100, 100 + 127 - rebias
    first_special = 0x7C if fp8_format.has_infinity else fp8_format.nan_code
    carry = (0x80 - first_special) * 0x01010101
    is_pair = dtype_name == "bf16"

    @device
    def value_bits(magnitudes: int, index: int, scale: float) -> int:
        """fp32 bits of one magnitude: its code, where fp32's exponent is, times the scale."""
        return f32_bits(mul_f32(f32_from_bits(uint32(byte_of(magnitudes, index) << shift)), scale))

    @device
    def four_values(codes: int, scale: float) -> Words4:
        magnitudes = uint32(codes & 0x7F7F7F7F)
        return (
            uint32(value_bits(magnitudes, 0, scale) | uint32(uint32(codes << 24) & 0x80000000)),
            uint32(value_bits(magnitudes, 1, scale) | uint32(uint32(codes << 16) & 0x80000000)),
            uint32(value_bits(magnitudes, 2, scale) | uint32(uint32(codes << 8) & 0x80000000)),
            uint32(value_bits(magnitudes, 3, scale) | uint32(codes & 0x80000000)),
        )

    @device
    def two_pairs(codes: int, scale: float) -> Words2:
        """Four bf16, exactly: a code has no more significant bits than a bf16."""
        magnitudes = uint32(codes & 0x7F7F7F7F)
        first = join_upper_halves(value_bits(magnitudes, 0, scale), value_bits(magnitudes, 1, scale))
        second = join_upper_halves(value_bits(magnitudes, 2, scale), value_bits(magnitudes, 3, scale))
        return (
            uint32(first | uint32(byte_permute(codes, uint32(0), uint32(0x1404)) & 0x80008000)),
            uint32(second | uint32(byte_permute(codes, uint32(0), uint32(0x3424)) & 0x80008000)),
        )

    @device
    def is_plain(low: int, high: int, stored: int) -> bool:
        """Whether the short way holds: a middling scale, and neither infinity nor NaN among the codes."""
        special = uint32(uint32(uint32(low & 0x7F7F7F7F) + carry) | uint32(uint32(high & 0x7F7F7F7F) + carry))
        return uint32(stored - lowest) <= span and uint32(special & 0x80808080) == 0

    def fp8_decode_fp32(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            # Four codes a lane and turn, so that 16-byte stores are contiguous.
            for turn in range(4):
                at = tile * TILE_ELEMENTS + int64(uint32(turn * 32 + lane)) * 4
                if at < numel:
                    word = load_u32(codes + at)
                    stored = load_u8(scales + (at >> 6))
                    if is_plain(word, word, stored):
                        scale = f32_from_bits(uint32(uint32(stored + rebias) << 23))
                        store_16_bytes(target, at * 4, numel * 4, four_values(word, scale))
                    else:
                        unit = decode_unit(word, word, uint32(min(stored, uint32(254))))
                        store_16_bytes(target, at * 4, numel * 4, (unit[0], unit[1], unit[2], unit[3]))

    def fp8_decode(target: int, numel: int, codes: int, scales: int, tiles: int, status: int, seed: int) -> None:
        lane = uint32(thread_index() & 31)
        warps = int64(uint32(block_size() >> 5))
        first_tile = int64(block_index()) * warps + int64(uint32(thread_index() >> 5))
        for tile in range(first_tile, tiles, int64(block_count()) * warps):
            first = tile * TILE_ELEMENTS + int64(lane) * 8
            low0 = high0 = stored0 = low1 = high1 = stored1 = uint32(0)
            # Both units are loaded before either is decoded: twice the bytes in flight.
            if first < numel:
                low0, high0 = load_u32x2(codes + first)
                stored0 = load_u8(scales + (first >> 6))
            if first + 256 < numel:
                low1, high1 = load_u32x2(codes + first + 256)
                stored1 = load_u8(scales + ((first + 256) >> 6))
            for half in range(2):
                at = first + half * 256
                low, high, stored = (low0, high0, stored0) if half == 0 else (low1, high1, stored1)
                if at < numel:
                    scale = f32_from_bits(uint32(uint32(stored + rebias) << 23))
                    if is_pair and is_plain(low, high, stored):
                        a, b = two_pairs(low, scale)
                        c, d = two_pairs(high, scale)
                        store_16_bytes(target, at * 2, numel * 2, (a, b, c, d))
                    else:
                        store_unit(
                            target, at * width, numel * width, decode_unit(low, high, uint32(min(stored, uint32(254))))
                        )

    return fp8_decode_fp32 if dtype_name == "fp32" else fp8_decode
