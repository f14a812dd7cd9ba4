"""One bit of a rectifier's values: whether the gradient passes there (fixed rate, 16x and 32x).

relu_mask     !(x <= 0)               what threshold_backward asks of a relu's result
relu6_mask    !(x <= 0 or x >= 6)     what hardtanh_backward asks of a relu6's argument

A NaN has its bit set, as both operators have it (only the CPU's vectorised hardtanh_backward does not, nor agrees with
its own scalar remainder there). Decoded is 1 where the bit is set and 0 elsewhere: another tensor, from which those two
operators make the same gradients bit for bit. Element 8 j + i is bit i of byte j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.codec import Bytes, Codec, as_unsigned
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.layout import Layout, ceil_div, flat_layout
from fxhome.cuda_kernels.relu_mask.format import FORMATS, TILE_ELEMENTS


@dataclass(frozen=True)
class ReluMask(FlatCodec):
    upper: float | None
    """From where on no gradient passes; None: it passes everywhere above zero."""

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return flat_layout(numel, TILE_ELEMENTS, ceil_div(numel, 8), 0)

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (FORMATS[dtype].name, self.upper is not None)

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        form = FORMATS[dtype]
        bits = as_unsigned(source, dtype.itemsize).astype(np.int64)
        limit = form.infinity + 1 if self.upper is None else form.six
        passes: NDArray[np.bool_] = (bits > 0) & (bits < limit) | (bits & form.magnitude > form.infinity)
        head[: ceil_div(bits.size, 8)] = np.packbits(passes, bitorder="little")

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        values = as_unsigned(target, dtype.itemsize)
        passes = np.unpackbits(head[: ceil_div(values.size, 8)], bitorder="little", count=values.size)
        values[:] = passes.astype(values.dtype) * values.dtype.type(FORMATS[dtype].one)

    def error_bound(self, source: torch.Tensor) -> torch.Tensor:
        return source.reshape(-1).double().abs() + 1.0


def _relu_mask(name: str, upper: float | None) -> ReluMask:
    return ReluMask(
        name=name,
        lossless=False,
        fixed_rate=True,
        dtypes=tuple(FORMATS),
        error_bound_text="|x| + 1: the values are lost, only whether the gradient passes is kept",
        kernel_module="relu_mask.kernel",
        max_threads=256,
        upper=upper,
    )


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (_relu_mask("relu_mask", None), _relu_mask("relu6_mask", 6.0))
}
