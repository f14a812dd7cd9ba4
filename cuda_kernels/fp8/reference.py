"""fp8 block encoding in NumPy: the definition of the format, and the codec of CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.codec import Bytes
from fxhome.cuda_kernels.floats import BLOCK_ELEMENTS, Floats, finite_product, from_fp32, pad_to_blocks, to_fp32
from fxhome.cuda_kernels.fp8.format import SCALE_BIAS, SMALLEST_EXPONENT, Fp8Format
from fxhome.cuda_kernels.layout import Layout, ceil_div


def block_exponents(values: Floats, fp8_format: Fp8Format) -> NDArray[np.int64]:
    """s of each block: the least s with max|finite| <= largest * 2^s, but not below SMALLEST_EXPONENT."""
    bits = pad_to_blocks(values).view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    largest = np.where(bits < 0x7F800000, bits, 0).max(axis=1)
    exponent = (largest >> 23) - 127 - fp8_format.largest_exponent + ((largest & 0x7FFFFF) > 0x600000)
    bounded: NDArray[np.int64] = np.maximum(exponent, SMALLEST_EXPONENT)
    return bounded


def _power_of_two(exponents: NDArray[np.int64]) -> Floats:
    return ((exponents + 127) << 23).astype(np.uint32).view(np.float32)


def encode(source: Bytes, dtype: torch.dtype, fp8_format: Fp8Format, layout: Layout, head: Bytes) -> None:
    values = to_fp32(source, dtype)
    exponents = block_exponents(values, fp8_format)
    blocks = pad_to_blocks(values)
    with np.errstate(all="ignore"):
        scaled = (blocks * _power_of_two(-exponents)[:, None]).astype(np.float32)
    bits = scaled.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    shift, bias = fp8_format.shift, fp8_format.bias
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    normal = (rounded >> shift) - ((127 - bias) << fp8_format.mantissa_bits)
    finite = magnitude < 0x7F800000
    steps = np.rint(np.where(finite, np.abs(scaled), 0) * np.float32(1 / fp8_format.smallest_step)).astype(np.int64)
    codes = np.where(magnitude < (128 - bias) << 23, steps, normal)
    codes = np.where(magnitude == 0x7F800000, fp8_format.infinity_code, codes)
    codes = np.where(magnitude > 0x7F800000, fp8_format.nan_code, codes) | (bits >> 24) & 0x80
    used = 8 * ceil_div(layout.numel, 8)
    head[:used] = codes.reshape(-1)[:used]
    head[layout.planes_offset : layout.planes_offset + exponents.size] = exponents + SCALE_BIAS


def decode(head: Bytes, dtype: torch.dtype, fp8_format: Fp8Format, layout: Layout, target: Bytes) -> None:
    block_count = ceil_div(layout.numel, BLOCK_ELEMENTS)
    stored = head[layout.planes_offset : layout.planes_offset + block_count].astype(np.int64)
    scales = np.where(stored == 0, np.float32(2.0**-127), _power_of_two(np.minimum(stored, 254) - SCALE_BIAS))
    codes = head[: layout.numel].astype(np.int64)
    magnitude = codes & 0x7F
    # An fp32 whose exponent field is the code's, times 2^(127 - bias): exact, subnormals included.
    plain = (magnitude << fp8_format.shift).astype(np.uint32).view(np.float32) * np.float32(
        2.0 ** (127 - fp8_format.bias)
    )
    values = finite_product(plain, np.repeat(scales.astype(np.float32), BLOCK_ELEMENTS)[: layout.numel])
    infinite = (magnitude == fp8_format.infinity_code) & fp8_format.has_infinity
    is_nan = magnitude > 0x7C if fp8_format.has_infinity else magnitude == fp8_format.nan_code
    finite: NDArray[np.uint32] = values.view(np.uint32)
    unsigned = np.where(is_nan, np.uint32(0x7FC00000), np.where(infinite, np.uint32(0x7F800000), finite))
    bits = unsigned | ((codes & 0x80) << 24).astype(np.uint32)
    from_fp32(bits.astype(np.uint32).view(np.float32), dtype, target)
