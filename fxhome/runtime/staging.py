"""The small device buffers through which encoded tensors pass on their way to the host and back.

    out    encode stream: chunk -> buffer, at full device speed     copy stream: buffer -> host slot, by the copy engine
    back   copy stream: host slot -> buffer                         decode stream: buffer -> chunk

Two buffers per direction, used in turn: while the copy engine carries one chunk, the next is encoded. A codec kernel
thus never waits for the link while it holds multiprocessors. The copy engine is told how many bytes the host believes
to be in use; what is beyond that a kernel moves behind it (see cuda_kernels.overflow). The host waits for nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch

from fxhome.cuda_kernels.chunks import BUFFERS, Chunk, buffer_bytes, chunks_of
from fxhome.cuda_kernels.codec import prepared_kernel
from fxhome.cuda_kernels.dispatch import PreparedKernel
from fxhome.cuda_kernels.launch import copy_to_device, copy_to_host
from fxhome.cuda_kernels.overflow import copy_overflow


class _Ring:
    """The buffers of one direction, and the stream of its codec kernels."""

    def __init__(self, device: torch.device) -> None:
        # Higher priority: a chunk takes microseconds, and the copy engine idles until it is there.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle = self.stream.cuda_stream
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.addresses: tuple[int, ...] = ()
        self.ready = tuple(torch.cuda.Event() for _ in range(BUFFERS))
        self.free = tuple(torch.cuda.Event() for _ in range(BUFFERS))
        self.turn = 0

    def take(self) -> int:
        self.turn = (self.turn + 1) % BUFFERS
        return self.turn

    def grow(self, size_bytes: int, device: torch.device) -> None:
        current = torch.cuda.current_stream(device)
        for event in self.free:  # the old buffers' memory goes back to this stream
            current.wait_event(event)
        self.buffers = ()
        self.buffers = tuple(torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS))
        self.addresses = tuple(buffer.data_ptr() for buffer in self.buffers)
        for event in self.free:  # and the new ones may still be in use by work queued on it
            event.record(current)


class Staging:
    """Both rings of one device. Copies of one direction are queued under that direction's lock (see transfer.py)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index
        self.size_bytes = 0
        self.out = _Ring(device)
        self.back = _Ring(device)
        self._lock = threading.Lock()

    def reserve(self, largest_storage_bytes: int) -> None:
        """Make the buffers large enough, on the current stream; in the steady state they are."""
        wanted = buffer_bytes(largest_storage_bytes)
        if wanted <= self.size_bytes:
            return
        with self._lock:
            if wanted > self.size_bytes:
                self.out.grow(wanted, self.device)
                self.back.grow(wanted, self.device)
                self.size_bytes = wanted

    def to_host(
        self,
        chunks: Sequence[tuple[Chunk, PreparedKernel]],
        bounds_bytes: Sequence[int],
        notes: Sequence[int],
        source: int,
        host: int,
        copies: torch.cuda.Stream,
        start: torch.cuda.Event,
    ) -> torch.cuda.Stream:
        """Queue the encoding and copying of a storage at `source` to a slot at `host`; see `copy_overflow` for notes.

        Gives the stream at whose present end the storage has been read.
        """
        ring, handle = self.out, copies.cuda_stream
        ring.stream.wait_event(start)
        for (chunk, encode), bound_bytes, note in zip(chunks, bounds_bytes, notes, strict=True):
            turn = ring.take()
            buffer, target = ring.addresses[turn], host + chunk.slot_offset
            ring.stream.wait_event(ring.free[turn])
            encode(ring.handle, source + chunk.start_bytes, buffer)
            ring.ready[turn].record(ring.stream)
            copies.wait_event(ring.ready[turn])
            copy_to_host(target, buffer, bound_bytes, handle)
            sizes = (chunk.head_bytes, chunk.worst_case_bytes)
            copy_overflow(self.index, handle, buffer, buffer, target, bound_bytes, sizes, note)
            ring.free[turn].record(copies)
        return ring.stream

    def from_host(
        self,
        chunks: Sequence[tuple[Chunk, PreparedKernel]],
        bounds_bytes: Sequence[int],
        is_exact: bool,
        host: int,
        target: int,
        copies: torch.cuda.Stream,
    ) -> torch.cuda.Stream:
        """Queue the way back; `is_exact`: the bounds are known to be the sizes.

        Gives the stream at whose present end the storage at `target` is complete.
        """
        ring, handle = self.back, copies.cuda_stream
        for (chunk, decode), bound_bytes in zip(chunks, bounds_bytes, strict=True):
            turn = ring.take()
            buffer, source = ring.addresses[turn], host + chunk.slot_offset
            copies.wait_event(ring.free[turn])
            copy_to_device(buffer, source, bound_bytes, handle)
            if not is_exact and bound_bytes < chunk.worst_case_bytes:
                sizes = (chunk.head_bytes, chunk.worst_case_bytes)
                copy_overflow(self.index, handle, buffer, source, buffer, bound_bytes, sizes)
            ring.ready[turn].record(copies)
            ring.stream.wait_event(ring.ready[turn])
            decode(ring.handle, target + chunk.start_bytes, buffer)
            ring.free[turn].record(ring.stream)
        return ring.stream


@functools.lru_cache(maxsize=8192)
def chunk_kernels(
    codec: str, direction: str, storage_bytes: int, dtype: torch.dtype, device_index: int
) -> tuple[tuple[Chunk, PreparedKernel], ...]:
    """The chunks of a storage with the kernel of each."""
    return tuple(
        (chunk, prepared_kernel(codec, direction, chunk.numel, dtype, device_index))
        for chunk in chunks_of(codec, storage_bytes, dtype)
    )


@functools.cache
def staging_of(device_index: int) -> Staging:
    """The staging of that CUDA device."""
    return Staging(torch.device("cuda", device_index))


def reserve_staging(device: torch.device, largest_storage_bytes: int) -> int:
    """Allocate a CUDA device's staging now, for storages up to that size (0: as it is).

    Returns the bytes that it holds; 0 on other devices.
    """
    if device.type != "cuda":
        return 0
    staging = staging_of(torch.cuda.current_device() if device.index is None else device.index)
    if largest_storage_bytes:
        staging.reserve(largest_storage_bytes)
    return 2 * BUFFERS * staging.size_bytes
