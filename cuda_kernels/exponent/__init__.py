"""Lossless codec for dense floats: exponents take three bits, in a window chosen per tile, and escapes are listed
(variable rate).

Trained activations use few exponents: the exponent byte of bf16 activations carries about 2.6 bits. Per tile a window
of seven exponents gets the codes 0..6; code 7 says that the exponent is in the escape list of the tile's slot. Sign
and mantissa are kept as they are. Every plane has a fixed place, so decoding is parallel, and all but a few per cent
of the bytes lie in the fixed-size head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.exponent import reference
from fxhome.cuda_kernels.exponent.format import FORMATS, TILE_BYTES
from fxhome.cuda_kernels.layout import Layout, tiled_layout
from fxhome.cuda_kernels.tiled import TiledCodec
from fxhome.cuda_kernels.tiles import Elements, tile_words


@dataclass(frozen=True)
class Exponent(TiledCodec):
    tail_dominates: ClassVar[bool] = False
    link_efficiency: ClassVar[float] = 0.91

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        tile_elements = TILE_BYTES // dtype.itemsize
        return tiled_layout(numel, tile_elements, FORMATS[dtype].plane_bytes, tile_elements)

    def slot_unit_bytes(self, dtype: torch.dtype) -> int:
        return 1

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (FORMATS[dtype].name,)

    def counts(self, head: Bytes, layout: Layout) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return (tile_words(head, layout) >> 8).astype(np.int64)

    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, tail: Bytes) -> None:
        reference.encode(elements, FORMATS[dtype], layout, head, tail)

    def restore(self, head: Bytes, tail: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        reference.decode(head, tail, FORMATS[dtype], layout, elements)


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
