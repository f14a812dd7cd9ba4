"""Lossless codec for dense floats: exponents take three bits, in a window chosen per tile, and escapes are listed
(variable rate).

Trained activations use few exponents: the exponent byte of bf16 activations carries about 2.6 bits. Per tile a window
of seven exponents gets the codes 0..6; code 7 says that the exponent is in the tile's escape list. Sign
and mantissa are kept as they are. Every plane has a fixed place, so decoding is parallel, and all but a few per cent
of the bytes lie in the fixed-size head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.exponent import reference
from fxhome.cuda_kernels.exponent.format import FORMATS, TILE_BYTES
from fxhome.cuda_kernels.layout import Layout, tiled_layout
from fxhome.cuda_kernels.tiled import Counts, TiledCodec
from fxhome.cuda_kernels.tiles import Elements


@dataclass(frozen=True)
class Exponent(TiledCodec):
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        tile_elements = TILE_BYTES // dtype.itemsize
        return tiled_layout(numel, tile_elements, FORMATS[dtype].plane_bytes, tile_elements)

    def used_bytes(self, words: Counts, dtype: torch.dtype) -> Counts:
        return words >> 8

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (FORMATS[dtype].name,)

    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, slots: Bytes) -> None:
        reference.encode(elements, FORMATS[dtype], layout, head, slots)

    def restore(self, head: Bytes, slots: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        reference.decode(head, slots, FORMATS[dtype], layout, elements)


CODECS: dict[str, Codec] = {
    "exponent": Exponent(
        name="exponent",
        lossless=True,
        fixed_rate=False,
        dtypes=tuple(FORMATS),
        error_bound_text="0",
        kernel_module="exponent.kernel",
        codec_id=4,
        max_threads=256,
    )
}
