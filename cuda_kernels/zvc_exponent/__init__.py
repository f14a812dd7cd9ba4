"""Zero-value compression whose non-zero floats have their exponents coded besides (lossless, variable rate).

What a rectifier leaves is half zeros: zvc alone makes 1.8 of it. The other half is floats with few exponents and no
sign: per tile a window of seven exponents gets three-bit codes, others are listed, and where no element of the tile has
its sign bit set that bit's place carries a bit of the code. bf16 elements take 10 bits of 16 then, fp32 26 of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.layout import Layout, tiled_layout
from fxhome.cuda_kernels.tiled import Counts, TiledCodec
from fxhome.cuda_kernels.tiles import Elements
from fxhome.cuda_kernels.zvc_exponent import reference
from fxhome.cuda_kernels.zvc_exponent.format import CODEC_ID, FORMATS, TILE_BYTES, expected_share

ESCAPED_SHARE = 0.02
"""Assumed share of non-zero elements outside their tile's window: measured on half-normal values."""


@dataclass(frozen=True)
class ZvcExponent(TiledCodec):
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        tile_elements = TILE_BYTES // dtype.itemsize
        return tiled_layout(numel, tile_elements, tile_elements // 8, TILE_BYTES)

    def expected_bytes(self, numel: int, dtype: torch.dtype, tail_share: float) -> int:
        """`tail_share`: the share of non-zeros, without a sign among them."""
        layout = self.layout(numel, dtype)
        return layout.head_bytes + round(layout.tail_bytes * expected_share(FORMATS[dtype], tail_share, ESCAPED_SHARE))

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (FORMATS[dtype].name,)

    @property
    def max_registers(self) -> int:
        """Left free, the assembler takes 52 to 56, with which four blocks fit a multiprocessor in place of five; at 48
        nothing is spilled (fp32's decode: 4 bytes)."""
        return 48

    def used_bytes(self, words: Counts, dtype: torch.dtype) -> Counts:
        fields = reference.fields_of(words)
        packed = FORMATS[dtype].main_bytes(-(-fields.counts // 8), fields.signed) + 16 * fields.escape_vectors
        sizes: Counts = np.where(fields.raw > 0, fields.counts * dtype.itemsize, packed)
        return sizes

    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, slots: Bytes) -> None:
        reference.encode(elements, FORMATS[dtype], layout, head, slots)

    def restore(self, head: Bytes, slots: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        reference.decode(head, slots, FORMATS[dtype], layout, elements)


CODECS: dict[str, Codec] = {
    "zvc_exponent": ZvcExponent(
        name="zvc_exponent",
        lossless=True,
        fixed_rate=False,
        dtypes=tuple(FORMATS),
        error_bound_text="0",
        kernel_module="zvc_exponent.kernel",
        codec_id=CODEC_ID,
        max_threads=256,
    )
}
