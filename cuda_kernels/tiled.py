"""Base of the tiled variable-rate codecs: header, packing of the tiles, launch arguments and observed sizes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec, as_unsigned
from fxhome.cuda_kernels.dispatch import ENCODED, FIXED, PLAIN, KernelCall, KernelLaunch
from fxhome.cuda_kernels.launch import KernelKey
from fxhome.cuda_kernels.layout import USED_OFFSET, VECTOR_BYTES, Layout
from fxhome.cuda_kernels.tiles import (
    Elements,
    check_header,
    pack_slots,
    tile_words,
    unpack_slots,
    used_vectors,
    write_header,
)

Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class TiledCodec(Codec):
    """A codec whose tiles differ in size; `kernel_module` holds make_encode and make_decode."""

    kernel_module: str
    codec_id: int
    max_threads: int

    @abstractmethod
    def used_bytes(self, words: Counts, dtype: torch.dtype) -> Counts:
        """Tail bytes of tiles, from their words, before rounding up to vectors; whatever the words, no error."""

    @abstractmethod
    def fill(self, elements: Elements, dtype: torch.dtype, layout: Layout, head: Bytes, slots: Bytes) -> None:
        """Reference encode into head and worst-case slots, one per tile; header excepted."""

    @abstractmethod
    def restore(self, head: Bytes, slots: Bytes, dtype: torch.dtype, layout: Layout, elements: Elements) -> None:
        """Reference decode, header already checked."""

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Compile-time constants of the kernels."""
        return (dtype.itemsize,)

    @property
    def max_registers(self) -> int:
        """See KernelKey."""
        return 0

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        numel = source.size // dtype.itemsize
        layout = self.layout(numel, dtype)
        write_header(head, self.codec_id, dtype.itemsize, numel)
        slots = np.zeros(layout.tail_bytes, np.uint8)
        self.fill(as_unsigned(source, dtype.itemsize), dtype, layout, head, slots)
        pack_slots(slots, self.used_bytes(tile_words(head, layout).astype(np.int64), dtype), layout, head, tail)

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        numel = target.size // dtype.itemsize
        layout = self.layout(numel, dtype)
        check_header(head, self.name, self.codec_id, dtype.itemsize, numel)
        used_bytes = self.used_bytes(tile_words(head, layout).astype(np.int64), dtype)
        slots = unpack_slots(head, tail, used_bytes, layout, self.name)
        self.restore(head, slots, dtype, layout, as_unsigned(target, dtype.itemsize))

    def encode_launch(self, call: KernelCall, status: int, seed: int | None) -> KernelLaunch:
        tiles, planes_offset = call.layout.tiles, call.layout.planes_offset
        arguments = (
            (PLAIN, 0), (FIXED, call.numel), (ENCODED, 0), (FIXED, planes_offset), (ENCODED, call.layout.head_bytes),
            (FIXED, tiles),
        )  # fmt: skip
        return KernelLaunch(
            self.kernel_key("encode", call.dtype), arguments, tiles, self.max_threads, clears_offset=USED_OFFSET
        )

    def decode_launch(self, call: KernelCall, status: int) -> KernelLaunch:
        tiles, planes_offset = call.layout.tiles, call.layout.planes_offset
        arguments = (
            (ENCODED, 0), (FIXED, planes_offset), (ENCODED, call.layout.head_bytes), (PLAIN, 0), (FIXED, call.numel),
            (FIXED, tiles), (FIXED, status),
        )  # fmt: skip
        return KernelLaunch(self.kernel_key("decode", call.dtype), arguments, tiles, self.max_threads)

    def kernel_key(self, direction: str, dtype: torch.dtype) -> KernelKey:
        return KernelKey(self.kernel_module, f"make_{direction}", self.constants(dtype), self.max_registers)

    def _observed_tail_bytes(self, head: Bytes, layout: Layout, dtype: torch.dtype) -> int:
        return VECTOR_BYTES * min(used_vectors(head), layout.tail_bytes // VECTOR_BYTES)
