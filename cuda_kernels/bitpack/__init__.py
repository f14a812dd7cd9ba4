"""Bit packing of bool masks: eight masks in a byte, bit i of byte j is element 8 j + i (lossless, fixed rate, 8x)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.layout import Layout, ceil_div, flat_layout

TILE_ELEMENTS = 4096


@dataclass(frozen=True)
class BitPack(FlatCodec):
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return flat_layout(numel, TILE_ELEMENTS, ceil_div(numel, 8), 0)

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        head[: ceil_div(source.size, 8)] = np.packbits(source & 1, bitorder="little")

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        target[:] = np.unpackbits(head[: ceil_div(target.size, 8)], bitorder="little", count=target.size)


CODECS: dict[str, Codec] = {
    "bitpack": BitPack(
        name="bitpack",
        lossless=True,
        fixed_rate=True,
        dtypes=(torch.bool,),
        error_bound_text="0",
        kernel_module="bitpack.kernel",
        max_threads=256,
    )
}
