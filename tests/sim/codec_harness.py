"""Runs a codec's kernels under emulation through the same launch arguments that the GPU would get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.codec import Codec
from fxhome.cuda_kernels.dispatch import KernelCall, KernelLaunch
from fxhome.cuda_kernels.launch import build_kernel
from fxhome.cuda_kernels.layout import VECTOR_BYTES
from fxhome.cuda_kernels.tiled import TiledCodec
from fxhome.cuda_kernels.tiles import tile_places, tile_words, used_vectors
from tests.sim.emulation import POISON, Memory, run_kernel

Bytes = NDArray[np.uint8]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor and the status word that the kernel left."""

    head: Bytes
    tail: Bytes
    status: int = 0

    @property
    def whole(self) -> Bytes:
        """Head and tail in one buffer."""
        return np.concatenate([self.head, self.tail])


@dataclass(frozen=True)
class Launch:
    """How the emulated kernel is launched."""

    blocks: int = 2
    threads: int = 64
    reverse: bool = False
    misalignment: int = 0


DEFAULT = Launch()


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor, copied."""
    if tensor.numel() == 0:
        return np.zeros(0, np.uint8)
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize]).numpy().view(np.uint8).reshape(-1).copy()


def from_raw(data: Bytes, dtype: torch.dtype) -> torch.Tensor:
    if data.size == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(data.copy()).view(dtype)


def poisoned(size_bytes: int) -> Bytes:
    return np.full(size_bytes, POISON, np.uint8)


def kernel_encode(codec: Codec, source: torch.Tensor, launch: Launch = DEFAULT, seed: int | None = None) -> Encoded:
    layout = codec.layout(source.numel(), source.dtype)
    memory = Memory()
    data, encoded, status = raw(source), poisoned(layout.worst_case_bytes), np.zeros(4, np.uint8)
    plain_address, encoded_address = memory.add(data, launch.misalignment), memory.add(encoded)
    status_address = memory.add(status)
    if source.numel():
        prepared = codec.encode_launch(KernelCall(source.numel(), source.dtype, layout), status_address, seed)
        _run(prepared, memory, plain_address, encoded_address, launch)
    return Encoded(encoded[: layout.head_bytes], encoded[layout.head_bytes :], int(status.view(np.uint32)[0]))


def kernel_decode(
    codec: Codec, encoded: Encoded, numel: int, dtype: torch.dtype, launch: Launch = DEFAULT
) -> tuple[torch.Tensor, int]:
    """The decoded tensor (poisoned before) and the status word."""
    layout = codec.layout(numel, dtype)
    memory = Memory()
    target, status = poisoned(numel * dtype.itemsize), np.zeros(4, np.uint8)
    plain_address = memory.add(target, launch.misalignment)
    encoded_address, status_address = memory.add(encoded.whole), memory.add(status)
    if numel:
        prepared = codec.decode_launch(KernelCall(numel, dtype, layout), status_address)
        _run(prepared, memory, plain_address, encoded_address, launch)
    return from_raw(target, dtype), int(status.view(np.uint32)[0])


def _run(prepared: KernelLaunch, memory: Memory, plain: int, encoded: int, launch: Launch) -> None:
    """Run the kernel under emulation, after clearing what the real launch clears."""
    if prepared.clears_offset is not None:
        memory.span(encoded + prepared.clears_offset, 4)[:] = 0
    threads = min(launch.threads, prepared.max_threads)
    kernel = build_kernel(prepared.kernel)
    arguments = prepared.at(plain, encoded)
    run_kernel(kernel, memory, *arguments, blocks=launch.blocks, threads=threads, reverse=launch.reverse)


def reference_encode(codec: Codec, source: torch.Tensor, seed: int | None = None) -> Encoded:
    layout = codec.layout(source.numel(), source.dtype)
    encoded = torch.zeros(layout.worst_case_bytes, dtype=torch.uint8)
    codec.encode(source, encoded, seed=seed)
    return Encoded(encoded.numpy()[: layout.head_bytes], encoded.numpy()[layout.head_bytes :])


def reference_decode(codec: Codec, encoded: Encoded, numel: int, dtype: torch.dtype) -> torch.Tensor:
    target = from_raw(poisoned(numel * dtype.itemsize), dtype)
    codec.decode(torch.from_numpy(encoded.whole), target)
    return target


def in_tile_order(codec: TiledCodec, encoded: Encoded, numel: int, dtype: torch.dtype) -> list[tuple[int, bytes]]:
    """(word, part of the tail without padding) of every tile: what two encodings agree in, whatever their packing."""
    layout = codec.layout(numel, dtype)
    words, places = tile_words(encoded.head, layout), tile_places(encoded.head, layout)
    sizes = codec.used_bytes(words.astype(np.int64), dtype)
    starts = [int(place) * VECTOR_BYTES for place in places]
    spans = sorted(
        (start, start + -(-int(size) // VECTOR_BYTES) * VECTOR_BYTES) for start, size in zip(starts, sizes, strict=True)
    )
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]], "the parts of the tail do not adjoin"
    assert spans[0][0] == 0
    assert spans[-1][1] == used_vectors(encoded.head) * VECTOR_BYTES
    return [
        (int(word), encoded.tail[start : start + int(size)].tobytes())
        for word, start, size in zip(words, starts, sizes, strict=True)
    ]


def tiled_parts_agree(codec: Codec, kernel: Encoded, reference: Encoded, numel: int, dtype: torch.dtype) -> bool:
    """Whether headers, words, planes and tails agree, up to the order in which the tiles were packed."""
    assert isinstance(codec, TiledCodec)
    layout = codec.layout(numel, dtype)
    planes = slice(layout.planes_offset, layout.planes_offset + layout.tiles * layout.plane_bytes)
    return (
        np.array_equal(kernel.head[:24], reference.head[:24])
        and np.array_equal(kernel.head[planes], reference.head[planes])
        and in_tile_order(codec, kernel, numel, dtype) == in_tile_order(codec, reference, numel, dtype)
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and bool(np.array_equal(raw(left), raw(right)))


SPECIAL_PATTERNS: dict[int, list[int]] = {
    1: [0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7C],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7C00, 0xFC00, 0x7E01, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0080, 0x3F80],
    4: [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x00800000, 0x3F800000],
}
"""Bit patterns of zeros, -0.0, denormals, infinities and NaNs with payloads, by element size."""


def activations(
    numel: int, dtype: torch.dtype, *, density: float = 1.0, seed: int = 0, special: float = 0.0
) -> torch.Tensor:
    """Normal values in `dtype`, a share `density` of them kept, a share `special` replaced by special bit patterns."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(numel).astype(np.float32) * 3
    values[generator.random(numel) >= density] = 0.0
    if dtype == torch.bool:
        return torch.from_numpy(values != 0)
    tensor = torch.from_numpy(values).to(dtype)
    data: NDArray[Any] = raw(tensor).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize])
    if special and numel:
        chosen = generator.random(numel) < special
        patterns = np.array(SPECIAL_PATTERNS[dtype.itemsize], data.dtype)
        data[chosen] = generator.choice(patterns, int(chosen.sum()))
    return from_raw(data.view(np.uint8), dtype)
