"""ZVC, zero-value compression: a bit per element and the elements that are not zero (lossless, variable rate)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.layout import Layout, tiled_layout
from fxhome.cuda_kernels.tiled import Counts, TiledCodec
from fxhome.cuda_kernels.tiles import Elements
from fxhome.cuda_kernels.zvc import reference

TILE_BYTES = 4096

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@dataclass(frozen=True)
class Zvc(TiledCodec):
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        tile_elements = TILE_BYTES // dtype.itemsize
        return tiled_layout(numel, tile_elements, tile_elements // 8, TILE_BYTES)

    def used_bytes(self, words: Counts, dtype: torch.dtype) -> Counts:
        return words * dtype.itemsize

    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, slots: Bytes) -> None:
        reference.encode(elements, layout, head, slots)

    def restore(self, head: Bytes, slots: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        reference.decode(head, slots, layout, elements)


CODECS: dict[str, Codec] = {
    "zvc": Zvc(
        name="zvc",
        lossless=True,
        fixed_rate=False,
        dtypes=_DTYPES,
        error_bound_text="0",
        kernel_module="zvc.kernel",
        codec_id=1,
        max_threads=256,
    )
}
