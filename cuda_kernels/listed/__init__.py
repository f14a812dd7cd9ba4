"""CSR and RLE: values with their positions in the tile (lossless, variable rate); the alternatives that ZVC is
measured against.

csr lists the elements that are not all zero bits; rle lists the first element of each run of equal bit patterns. A tile
whose list would be longer than the tile itself is stored as it is, so the worst case is the plain size plus the
per-tile words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.layout import Layout, tiled_layout
from fxhome.cuda_kernels.listed import reference
from fxhome.cuda_kernels.listed.format import RAW_FLAG, TILE_BYTES, listed_bytes
from fxhome.cuda_kernels.tiled import Counts, TiledCodec
from fxhome.cuda_kernels.tiles import Elements

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Listed(TiledCodec):
    runs: bool
    """Whether runs of equal elements are listed (rle), or elements that are not zero (csr)."""

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return tiled_layout(numel, TILE_BYTES // dtype.itemsize, 0, TILE_BYTES)

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (dtype.itemsize, self.runs)

    def used_bytes(self, words: Counts, dtype: torch.dtype) -> Counts:
        return np.where(words == RAW_FLAG, TILE_BYTES, listed_bytes(words, dtype.itemsize))

    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, slots: Bytes) -> None:
        reference.encode(elements, self.runs, layout, head, slots)

    def restore(self, head: Bytes, slots: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        reference.decode(head, slots, self.runs, layout, elements, self.name)


def _listed(name: str, codec_id: int, runs: bool) -> Listed:
    return Listed(
        name=name,
        lossless=True,
        fixed_rate=False,
        dtypes=_DTYPES,
        error_bound_text="0",
        kernel_module="listed.kernel",
        codec_id=codec_id,
        max_threads=128,
        runs=runs,
    )


CODECS: dict[str, Codec] = {codec.name: codec for codec in (_listed("csr", 2, False), _listed("rle", 3, True))}
