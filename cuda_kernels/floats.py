"""What the lossy codecs share on the CPU: float dtypes as fp32, their largest finite values, conversion back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.codec import Bytes

BLOCK_ELEMENTS = 64
"""Elements that share one scale."""
TILE_ELEMENTS = 512
"""Elements that one warp handles at a time."""

FLOAT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LARGEST_FINITE_BITS = {"fp32": 0x7F7FFFFF, "bf16": 0x7F7F0000, "fp16": 0x477FE000}
"""fp32 bit pattern of the largest finite value of each dtype."""

Floats = NDArray[np.float32]


def to_fp32(raw: Bytes, dtype: torch.dtype) -> Floats:
    """Raw bytes of `dtype` as fp32, exactly."""
    if dtype == torch.float32:
        return raw.view(np.float32).copy()
    if dtype == torch.float16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def from_fp32(values: Floats, dtype: torch.dtype, raw: Bytes) -> None:
    """Store fp32 values as `dtype`, rounded to nearest even; finite values beyond the dtype's range become its
    largest."""
    bits = values.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    largest = LARGEST_FINITE_BITS[FLOAT_NAMES[dtype]]
    too_large = (magnitude > largest) & (magnitude < 0x7F800000)
    bits = np.where(too_large, (bits & 0x80000000) | largest, bits).astype(np.uint32)
    if dtype == torch.float32:
        raw.view(np.uint32)[:] = bits
    elif dtype == torch.float16:
        with np.errstate(all="ignore"):
            raw.view(np.float16)[:] = bits.view(np.float32).astype(np.float16)
    else:
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        quiet_nan = (bits >> 16) | 0x40
        raw.view(np.uint16)[:] = np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).astype(np.uint16)


def finite_product(values: Floats, scales: Floats) -> Floats:
    """values * scales, saturating at the largest fp32 instead of becoming infinite; a NaN scale gives NaN."""
    with np.errstate(all="ignore"):
        product = (values * scales).astype(np.float32)
    return np.where(np.isinf(product), np.copysign(np.float32(np.finfo(np.float32).max), product), product)


def pad_to_blocks(values: Floats) -> Floats:
    """The values as (blocks, BLOCK_ELEMENTS), zero-filled at the end."""
    padded = np.zeros(-(-values.size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK_ELEMENTS)


def output_rounding(largest: NDArray[np.float64], dtype: torch.dtype) -> NDArray[np.float64]:
    """Bound on the error of rounding a value of at most `largest` into `dtype`."""
    if dtype == torch.float32:
        return largest * 2.0**-24 + 2.0**-149
    if dtype == torch.bfloat16:
        return largest * 2.0**-8 + 2.0**-134
    return largest * 2.0**-11 + 2.0**-25
