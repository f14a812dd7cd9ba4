"""Base of the tiled variable-rate codecs: header, launch arguments and observed sizes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec, as_unsigned
from fxhome.cuda_kernels.dispatch import KernelCall, KernelLaunch
from fxhome.cuda_kernels.launch import KernelKey
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.tiles import Elements, check_header, tile_words, write_header


@dataclass(frozen=True)
class TiledCodec(Codec):
    """A codec whose tiles own worst-case slots; `kernel_module` holds make_encode and make_decode."""

    kernel_module: str
    codec_id: int
    max_threads: int

    @abstractmethod
    def slot_unit_bytes(self, dtype: torch.dtype) -> int:
        """Slot bytes that one counted item takes."""

    @abstractmethod
    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, tail: Bytes) -> None:
        """Reference encode, header excepted."""

    @abstractmethod
    def restore(self, head: Bytes, tail: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        """Reference decode, header already checked."""

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Compile-time constants of the kernels."""
        return (dtype.itemsize,)

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        numel = source.size // dtype.itemsize
        layout = self.layout(numel, dtype)
        write_header(head, self.codec_id, dtype.itemsize, numel)
        self.fill(as_unsigned(source, dtype.itemsize), dtype, layout, head, tail)

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        numel = target.size // dtype.itemsize
        check_header(head, self.name, self.codec_id, dtype.itemsize, numel)
        self.restore(head, tail, dtype, self.layout(numel, dtype), as_unsigned(target, dtype.itemsize))

    def encode_launch(self, call: KernelCall, status: int, seed: int | None) -> KernelLaunch:
        tiles, planes_offset = call.layout.tiles, call.layout.planes_offset
        arguments = (call.plain, call.numel, call.head, planes_offset, call.tail, tiles)
        return KernelLaunch(self.kernel_key("encode", call.dtype), arguments, tiles, self.max_threads)

    def decode_launch(self, call: KernelCall, status: int) -> KernelLaunch:
        tiles, planes_offset = call.layout.tiles, call.layout.planes_offset
        arguments = (call.head, planes_offset, call.tail, call.plain, call.numel, tiles, status)
        return KernelLaunch(self.kernel_key("decode", call.dtype), arguments, tiles, self.max_threads)

    def kernel_key(self, direction: str, dtype: torch.dtype) -> KernelKey:
        return KernelKey(self.kernel_module, f"make_{direction}", self.constants(dtype))

    def counts(self, head: Bytes, layout: Layout) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Counted items per tile."""
        return tile_words(head, layout).astype(np.int64)

    def _observed_tail_bytes(self, head: Bytes, layout: Layout, dtype: torch.dtype) -> int:
        used = self.counts(head, layout) * self.slot_unit_bytes(dtype)
        return int((-(-used // 16) * 16).sum())
