"""Device helpers of the lossy codecs: unit elements to fp32 and back, block maxima, a counter-based random number."""

from __future__ import annotations

from collections.abc import Callable

from fxhome.cuda_kernels.floats import LARGEST_FINITE_BITS
from fxhome.cuda_kernels.simt import (
    byte_permute,
    device,
    f32_bits,
    f32_from_bits,
    f32_from_half,
    half_from_f32,
    mul_f32,
    shuffle_xor,
    uint32,
)

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


@device
def widen_fp32(bits: int) -> float:
    return f32_from_bits(bits)


@device
def widen_bf16(bits: int) -> float:
    return f32_from_bits(uint32(bits << 16))


@device
def widen_fp16(bits: int) -> float:
    return f32_from_half(bits)


def _make_clamp(largest: int) -> Callable[[int], int]:
    @device
    def clamp(bits: int) -> int:
        magnitude = uint32(bits & 0x7FFFFFFF)
        if magnitude > largest and magnitude < 0x7F800000:
            return uint32(uint32(bits & 0x80000000) | largest)
        return bits

    return clamp


_clamp_bf16 = _make_clamp(LARGEST_FINITE_BITS["bf16"])
_clamp_fp16 = _make_clamp(LARGEST_FINITE_BITS["fp16"])


@device
def shorten_fp32(value: float) -> int:
    return f32_bits(value)


@device
def shorten_bf16(value: float) -> int:
    """Bits of the nearest bf16, ties to even; finite stays finite."""
    bits = _clamp_bf16(f32_bits(value))
    if uint32(bits & 0x7FFFFFFF) > 0x7F800000:
        return uint32(uint32(bits >> 16) | 0x40)
    return uint32(uint32(bits + uint32(0x7FFF + uint32(uint32(bits >> 16) & 1))) >> 16)


@device
def shorten_fp16(value: float) -> int:
    """Bits of the nearest fp16, ties to even; finite stays finite."""
    return half_from_f32(f32_from_bits(_clamp_fp16(f32_bits(value))))


WIDEN: dict[str, Callable[[int], float]] = {"fp32": widen_fp32, "bf16": widen_bf16, "fp16": widen_fp16}
SHORTEN: dict[str, Callable[[float], int]] = {"fp32": shorten_fp32, "bf16": shorten_bf16, "fp16": shorten_fp16}


@device
def finite_product(value: float, scale: float) -> float:
    """value * scale, saturating at the largest fp32 instead of becoming infinite; a NaN scale gives NaN."""
    bits = f32_bits(mul_f32(value, scale))
    if uint32(bits & 0x7FFFFFFF) == 0x7F800000:
        bits = uint32(uint32(bits & 0x80000000) | 0x7F7FFFFF)
    return f32_from_bits(bits)


@device
def block_largest(largest: int) -> int:
    """Maximum over the four lanes that hold one block of 64 elements."""
    result = uint32(largest)
    for distance in (1, 2):
        result = uint32(max(result, shuffle_xor(result, uint32(distance))))
    return result


@device
def join_low_bytes(a: int, b: int, c: int, d: int) -> int:
    """The lowest bytes of four words as one word."""
    return byte_permute(byte_permute(a, b, uint32(0x0040)), byte_permute(c, d, uint32(0x0040)), uint32(0x5410))


@device
def join_upper_halves(low: int, high: int) -> int:
    """The upper halves of two words as one word: two bf16 from the bits of two fp32."""
    return byte_permute(low, high, uint32(0x7632))


@device
def round_to_upper_half(bits: int) -> int:
    """fp32 bits whose upper half is the nearest bf16, ties to even; for values that are finite as bf16."""
    return uint32(bits + uint32(0x7FFF + uint32(uint32(bits >> 16) & 1)))


@device
def mix(seed: int, index: int) -> int:
    """A 32-bit hash of (seed, element index): the same element gets the same draw whatever the launch geometry."""
    state = uint32(uint32(index) * 0x9E3779B1 + uint32(index >> 32) * 0x85EBCA77 + uint32(seed) * 0xC2B2AE3D)
    state = uint32(uint32(state ^ uint32(state >> 15)) * 0x2C1B3C6D)
    state = uint32(uint32(state ^ uint32(state >> 12)) * 0x297A2D39)
    return uint32(state ^ uint32(state >> 15))
