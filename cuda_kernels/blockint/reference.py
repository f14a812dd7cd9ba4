"""Block quantisation in NumPy: the definition of the format, and the codec of CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.codec import Bytes
from fxhome.cuda_kernels.floats import BLOCK_ELEMENTS, Floats, finite_product, from_fp32, pad_to_blocks, to_fp32
from fxhome.cuda_kernels.layout import Layout, ceil_div

TINY_BITS = (127 - 100) << 23
"""Blocks whose largest magnitude is below 2^-100 become zero: their scale's inverse would overflow."""
NAN_SCALE = 0x7FC0


def scale_bits(blocks: Floats, levels: int) -> NDArray[np.int64]:
    """bf16 bit pattern of each block's scale: max|block| / levels rounded up; 0 for tiny blocks, NaN for non-finite
    ones."""
    largest = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=1)
    with np.errstate(all="ignore"):
        quotient = (largest.view(np.float32) / np.float32(levels)).astype(np.float32)
    rounded_up = (quotient.view(np.uint32).astype(np.int64) + 0xFFFF) >> 16
    usable = np.where(largest < TINY_BITS, 0, rounded_up)
    return np.where(largest >= 0x7F800000, NAN_SCALE, usable)


def uniform_draws(seed: int, count: int) -> Floats:
    """One number in [0, 1) per element, a multiple of 2^-23: a hash of (seed, index), so it does not depend on launch
    order."""
    index = np.arange(count, dtype=np.uint64)
    wrap = np.uint64(0xFFFFFFFF)
    state = (
        (index & wrap) * np.uint64(0x9E3779B1) + (index >> np.uint64(32)) * np.uint64(0x85EBCA77)
        + np.uint64(seed * 0xC2B2AE3D & 0xFFFFFFFF)
    ) & wrap  # fmt: skip
    state = ((state ^ (state >> np.uint64(15))) * np.uint64(0x2C1B3C6D)) & wrap
    state = ((state ^ (state >> np.uint64(12))) * np.uint64(0x297A2D39)) & wrap
    state = state ^ (state >> np.uint64(15))
    return (state >> np.uint64(9)).astype(np.float32) * np.float32(2.0**-23)


def encode(source: Bytes, dtype: torch.dtype, bits: int, layout: Layout, head: Bytes, seed: int | None) -> None:
    levels = 2 ** (bits - 1) - 1
    blocks = pad_to_blocks(to_fp32(source, dtype))
    scales = scale_bits(blocks, levels)
    usable = (scales != 0) & (scales != NAN_SCALE)
    with np.errstate(all="ignore"):
        inverse = (np.float32(1) / (scales << 16).astype(np.uint32).view(np.float32)).astype(np.float32)
        scaled = np.where(usable[:, None], blocks * np.where(usable, inverse, 0)[:, None], 0).astype(np.float32)
    if seed is None:
        rounded = np.rint(scaled)
    else:
        draws = uniform_draws(seed & 0x7FFFFFFF, blocks.size).reshape(blocks.shape)
        rounded = np.floor((scaled + draws).astype(np.float32))
    codes = np.clip(rounded, -levels, levels).astype(np.int64).reshape(-1)[: 8 * ceil_div(layout.numel, 8)]
    if bits == 8:
        head[: codes.size] = codes & 0xFF
    else:
        head[: codes.size // 2] = (codes[0::2] & 15) | (codes[1::2] & 15) << 4
    stored = head[layout.planes_offset : layout.planes_offset + 2 * scales.size]
    stored.view(np.uint16)[:] = scales


def decode(head: Bytes, dtype: torch.dtype, bits: int, layout: Layout, target: Bytes) -> None:
    block_count = ceil_div(layout.numel, BLOCK_ELEMENTS)
    stored = head[layout.planes_offset : layout.planes_offset + 2 * block_count].view(np.uint16)
    scales = np.repeat((stored.astype(np.uint32) << 16).view(np.float32), BLOCK_ELEMENTS)[: layout.numel]
    if bits == 8:
        codes = head[: layout.numel].view(np.int8).astype(np.float32)
    else:
        packed = head[: 4 * ceil_div(layout.numel, 8)]
        nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[: layout.numel].astype(np.int64)
        codes = (nibbles - 16 * (nibbles >= 8)).astype(np.float32)
    from_fp32(finite_product(codes, scales), dtype, target)
