"""The four codec operators, visible to FX, Dynamo's backends and Inductor.

    e  = encode(x, bytes, codec)                x's storage, encoded on its device (fixed-rate codecs)
    x2 = decode(e, bytes, size, stride, ...)    a new storage with the same bytes (or within the codec's error bound)
    h  = swap_out_encoded(x, bytes, ...)        like swap_out, encoding on the way into a worst-case sized host slot
    x2 = swap_in_encoded(h, bytes, size, ...)   like swap_in, decoding on the way

The waits of the last two are `swap_out_wait` and `swap_in_wait`. Whole storages are handled, so strides come back
exactly. `bytes` is the storage's size as it was planned.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence

import torch

from fxhome.cuda_kernels.chunks import chunks_of, slot_bytes, staging_bytes
from fxhome.cuda_kernels.codec import codec_by_name
from fxhome.cuda_kernels.launch import raise_if_corrupt
from fxhome.cuda_kernels.layout import USED_OFFSET, VECTOR_BYTES
from fxhome.runtime import transfer
from fxhome.runtime.codec_sites import CodecSite, add_site, site_name, site_of
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.slot import Start
from fxhome.runtime.staging import chunk_kernels, reserve_staging, staging_of

__all__ = [
    "decode_op",
    "encode_op",
    "reserve_staging",
    "site_name",
    "slot_bytes",
    "staging_bytes",
    "swap_in_encoded_op",
    "swap_out_encoded_op",
]

log = logging.getLogger("fxhome.codecs")

_LIBRARY = torch.library.Library("fxhome", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides,)

_GEOMETRY = "int storage_bytes, int[] size, int[] stride, int storage_offset, ScalarType dtype"
_SCHEMAS = {
    "encode": "(Tensor src, int storage_bytes, str codec) -> Tensor",
    "decode": f"(Tensor encoded, {_GEOMETRY}, str codec) -> Tensor",
    "swap_out_encoded": "(Tensor src, int storage_bytes, str codec, int assumed_bytes, str site) -> Tensor",
    "swap_in_encoded": f"(Tensor host, {_GEOMETRY}, Device device) -> Tensor",
}


def encode(src: torch.Tensor, storage_bytes: int, codec: str) -> torch.Tensor:
    """Encode the storage of `src` into a new uint8 tensor on its device, of exactly the codec's encoded size."""
    if src.is_cuda:
        raise_if_corrupt()
    _check_storage(src, storage_bytes, "encode")
    chosen = codec_by_name(codec)
    numel = storage_bytes // src.dtype.itemsize
    encoded = torch.empty(chosen.encoded_bytes(numel, src.dtype), dtype=torch.uint8, device=src.device)
    chosen.encode(_elements(src.untyped_storage(), src.dtype), encoded)
    return encoded


def decode(
    encoded: torch.Tensor,
    storage_bytes: int,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    codec: str,
) -> torch.Tensor:
    """Decode into a new storage of `storage_bytes`; return a tensor of that geometry on it."""
    storage = torch.empty(storage_bytes, dtype=torch.uint8, device=encoded.device).untyped_storage()
    codec_by_name(codec).decode(encoded, _elements(storage, dtype))
    return torch.empty(0, dtype=dtype, device=encoded.device).set_(storage, storage_offset, size, stride)


def swap_out_encoded(src: torch.Tensor, storage_bytes: int, codec: str, assumed_bytes: int, site: str) -> torch.Tensor:
    """Start encoding the storage of `src` into a host slot, or copying it there where that is known to be faster."""
    is_cuda = src.is_cuda
    if is_cuda:
        raise_if_corrupt()
    _check_storage(src, storage_bytes, "swap_out_encoded")
    dtype = src.dtype
    state = site_of(site, codec, storage_bytes) or _new_site(site, codec, storage_bytes, assumed_bytes, src)
    size_bytes = slot_bytes(codec, storage_bytes, dtype)
    if not state.next_step() or not storage_bytes or (is_cuda and not _kernels_reach_the_pool()):
        return transfer.swap_out_as(src, _PLAIN, size_bytes)
    if is_cuda:
        staging_of(src.device.index).reserve(storage_bytes)
    return transfer.swap_out_as(src, _Encoded(codec, dtype, state), size_bytes)


def swap_in_encoded(
    host: torch.Tensor,
    storage_bytes: int,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Start restoring a slot that `swap_out_encoded` filled, in whichever form it did."""
    return transfer.swap_in_as(host, storage_bytes, size, stride, storage_offset, dtype, device)


def _new_site(site: str, codec: str, storage_bytes: int, assumed_bytes: int, src: torch.Tensor) -> CodecSite:
    chosen = codec_by_name(codec)
    # A fixed-rate codec's chunks say nothing about their size, so nobody notes it.
    heads = () if chosen.fixed_rate else tuple(c.head_bytes for c in chunks_of(codec, storage_bytes, src.dtype))
    return add_site(site, codec, storage_bytes, assumed_bytes, chosen.link_efficiency, heads, pinned=src.is_cuda)


class _Encoded:
    """A slot that holds an encoded storage. It is as good as its slot: one object per swap."""

    __slots__ = ("_bounds_bytes", "_codec", "_dtype", "_site")

    def __init__(self, codec: str, dtype: torch.dtype, site: CodecSite) -> None:
        self._codec = codec
        self._dtype = dtype
        self._site = site
        self._bounds_bytes: list[int] = []

    def write(
        self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None
    ) -> torch.cuda.Stream | None:
        """Encode; note the sizes."""
        if start is None:
            self._write_on_cpu(host, storage)
            return None
        index = start.stream.device.index
        chunks = chunk_kernels(self._codec, "encode", storage.nbytes(), self._dtype, index)
        site = self._site
        likely: Sequence[int] = site.bounds_bytes() if site.heads_bytes else (0,) * len(chunks)
        self._bounds_bytes = [
            min(bound, chunk.worst_case_bytes) or chunk.worst_case_bytes
            for bound, (chunk, _) in zip(likely, chunks, strict=True)
        ]
        notes = [site.notes.address + 4 * number if site.heads_bytes else 0 for number in range(len(chunks))]
        return staging_of(index).to_host(
            chunks, self._bounds_bytes, notes, storage.data_ptr(), host.data_ptr(), start.stream, start.event
        )

    def read(
        self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None
    ) -> torch.cuda.Stream | None:
        """Decode."""
        if start is None:
            self._read_on_cpu(host, storage)
            return None
        index = start.stream.device.index
        chunks = chunk_kernels(self._codec, "decode", storage.nbytes(), self._dtype, index)
        address = host.data_ptr()
        has_arrived, bounds_bytes = self._has_arrived(host), self._bounds_bytes
        if has_arrived:
            bounds_bytes = [
                min(chunk.head_bytes + used_tail_bytes(address + chunk.slot_offset), chunk.worst_case_bytes)
                for chunk, _ in chunks
            ]
        return staging_of(index).from_host(chunks, bounds_bytes, has_arrived, address, storage.data_ptr(), start.stream)

    def _has_arrived(self, host: torch.Tensor) -> bool:
        slot = host_pool().slot_of(host)
        return slot is not None and all(fence.event.query() for fence in slot.fences)

    def _write_on_cpu(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        codec, words = codec_by_name(self._codec), self._site.notes.words
        elements = _elements(storage, self._dtype)
        for number, chunk in enumerate(chunks_of(self._codec, storage.nbytes(), self._dtype)):
            encoded = host[chunk.slot_offset : chunk.slot_offset + chunk.worst_case_bytes]
            first = chunk.start_bytes // self._dtype.itemsize
            codec.encode(elements[first : first + chunk.numel], encoded)
            if words:
                words[number] = used_tail_bytes(encoded.data_ptr()) // VECTOR_BYTES + 1

    def _read_on_cpu(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        codec, elements = codec_by_name(self._codec), _elements(storage, self._dtype)
        for chunk in chunks_of(self._codec, storage.nbytes(), self._dtype):
            encoded = host[chunk.slot_offset : chunk.slot_offset + chunk.worst_case_bytes]
            first = chunk.start_bytes // self._dtype.itemsize
            codec.decode(encoded, elements[first : first + chunk.numel])


class _Plain:
    """A slot that holds a storage as it is, at its front."""

    def write(self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None) -> None:
        """Copy."""
        host[: storage.nbytes()].copy_(_elements(storage, torch.uint8), non_blocking=True)

    def read(self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None) -> None:
        """Copy."""
        _elements(storage, torch.uint8).copy_(host[: storage.nbytes()], non_blocking=True)


_PLAIN = _Plain()


def used_tail_bytes(address: int) -> int:
    """Tail bytes in use according to the header at a host address."""
    return VECTOR_BYTES * ctypes.c_uint32.from_address(address + USED_OFFSET).value


@functools.cache
def _kernels_reach_the_pool() -> bool:
    """Whether the host pool's memory is page-locked; where it is not, everything is copied plainly."""
    host, _ = host_pool().empty(1, pinned=True)
    if not host.is_pinned():
        log.warning(
            "the host pool is not page-locked, so no kernel can write to it: nothing is encoded on its way there"
        )
    return host.is_pinned()


def _elements(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A whole storage as one flat tensor."""
    numel = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))


def _check_storage(src: torch.Tensor, storage_bytes: int, operator: str) -> None:
    found = src.untyped_storage().nbytes()
    if found != storage_bytes:
        raise RuntimeError(
            f"fxhome::{operator}: the storage has {found} bytes, {storage_bytes} were planned; graph rule: what is "
            "encoded is the tensor that was traced, in a storage of its own"
        )


def _fake_encode(src: torch.Tensor, storage_bytes: int, codec: str) -> torch.Tensor:
    size_bytes = codec_by_name(codec).encoded_bytes(storage_bytes // src.dtype.itemsize, src.dtype)
    return torch.empty(size_bytes, dtype=torch.uint8, device=src.device)


def _fake_restore(
    device: torch.device, storage_bytes: int, size: list[int], stride: list[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    storage = torch.empty(storage_bytes, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def _fake_decode(
    encoded: torch.Tensor,
    storage_bytes: int,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    codec: str,
) -> torch.Tensor:
    return _fake_restore(encoded.device, storage_bytes, size, stride, storage_offset, dtype)


def _fake_swap_out(src: torch.Tensor, storage_bytes: int, codec: str, assumed_bytes: int, site: str) -> torch.Tensor:
    return torch.empty(slot_bytes(codec, storage_bytes, src.dtype), dtype=torch.uint8, device="cpu")


def _fake_swap_in(
    host: torch.Tensor,
    storage_bytes: int,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return _fake_restore(device, storage_bytes, size, stride, storage_offset, dtype)


_KERNELS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "encode": (encode, _fake_encode),
    "decode": (decode, _fake_decode),
    "swap_out_encoded": (swap_out_encoded, _fake_swap_out),
    "swap_in_encoded": (swap_in_encoded, _fake_swap_in),
}

for _name, _schema in _SCHEMAS.items():
    _kernel, _fake = _KERNELS[_name]
    _LIBRARY.define(_name + _schema, tags=_TAGS)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxhome::{_name}", _fake, lib=_LIBRARY)

encode_op = torch.ops.fxhome.encode.default
decode_op = torch.ops.fxhome.decode.default
swap_out_encoded_op = torch.ops.fxhome.swap_out_encoded.default
swap_in_encoded_op = torch.ops.fxhome.swap_in_encoded.default
