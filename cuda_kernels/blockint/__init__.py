"""int8 and int4 block quantisation (lossy, fixed rate): signed codes and one scale per 64 elements.

scale = max|block| / 127 (or / 7), rounded up to 16 bits (a bf16), so that every element has a code. Rounding is to
nearest, or stochastic if `encode` gets a seed: then the expectation of the decoded value is the source (before the
output's own rounding), at twice the bound. A block with any NaN or infinity decodes to NaN throughout: visible, not
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.blockint import reference
from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.floats import BLOCK_ELEMENTS, FLOAT_NAMES, TILE_ELEMENTS, output_rounding, pad_to_blocks
from fxhome.cuda_kernels.layout import Layout, ceil_div, flat_layout


@dataclass(frozen=True)
class BlockInt(FlatCodec):
    bits: int

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return flat_layout(numel, TILE_ELEMENTS, self.bits * ceil_div(numel, 8), 2 * ceil_div(numel, BLOCK_ELEMENTS))

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (self.bits, FLOAT_NAMES[dtype])

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        reference.encode(source, dtype, self.bits, self.layout(source.size // dtype.itemsize, dtype), head, seed)

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        reference.decode(head, dtype, self.bits, self.layout(target.size // dtype.itemsize, dtype), target)

    def error_bound(self, source: torch.Tensor, stochastic: bool = False) -> torch.Tensor:
        values = source.detach().double().cpu().reshape(-1).numpy()
        largest = np.abs(pad_to_blocks(values.astype(np.float32))).astype(np.float64).max(axis=1)
        largest = np.repeat(largest, BLOCK_ELEMENTS)[: values.size]
        levels = 2 ** (self.bits - 1) - 1
        # 2^-7 covers the scale's rounding up, 2^-20 the three fp32 operations.
        step = largest / levels * (1 + 2.0**-7) + largest * 2.0**-20
        bound = step * (1.0 if stochastic else 0.5) + 2.0**-100
        return torch.from_numpy(bound + output_rounding(np.abs(values) + bound, source.dtype))


def _block_int(bits: int) -> BlockInt:
    levels = 2 ** (bits - 1) - 1
    return BlockInt(
        name=f"int{bits}",
        lossless=False,
        fixed_rate=True,
        dtypes=tuple(FLOAT_NAMES),
        error_bound_text=f"1.01 max|block| / {2 * levels} to nearest, 1.01 max|block| / {levels} stochastic",
        kernel_module="blockint.kernel",
        max_threads=256,
        bits=bits,
    )


CODECS: dict[str, Codec] = {codec.name: codec for codec in (_block_int(8), _block_int(4))}
