"""The four codec operators, visible to FX, Dynamo's backends and Inductor.

    e  = encode(x, bytes, codec)                x's storage, encoded on its device (fixed-rate codecs)
    x2 = decode(e, bytes, size, stride, ...)    a new storage with the same bytes (or within the codec's error bound)
    h  = swap_out_encoded(x, bytes, ...)        like swap_out, encoding on the way into a worst-case sized host slot
    x2 = swap_in_encoded(h, bytes, size, ...)   like swap_in, decoding on the way

The waits of the last two are `swap_out_wait` and `swap_in_wait`. Whole storages are handled, so strides come back
exactly. `bytes` is the storage's size as it was planned.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from fxhome.cuda_kernels.codec import Codec, codec_by_name
from fxhome.cuda_kernels.launch import raise_if_corrupt
from fxhome.runtime import transfer
from fxhome.runtime.codec_sites import CodecSite, site_name, site_of
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.slot import HostSlot

__all__ = ["decode_op", "encode_op", "site_name", "swap_in_encoded_op", "swap_out_encoded_op"]

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
    if src.is_cuda:
        raise_if_corrupt()
    _check_storage(src, storage_bytes, "swap_out_encoded")
    chosen = codec_by_name(codec)
    slot_bytes = _slot_bytes(codec, storage_bytes, src.dtype)
    state = site_of(site, codec, storage_bytes, assumed_bytes, chosen.link_efficiency)
    _observe_waiting()
    if state.next_step() and storage_bytes and (src.is_cpu or _kernels_reach_the_pool()):
        return transfer.swap_out_as(src, _Encoded(chosen, src.dtype, state), slot_bytes)
    return transfer.swap_out_as(src, _PLAIN, slot_bytes)


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
    slot = host_pool().slot_of(host)
    if slot is not None and isinstance(slot.contents, _Encoded):
        _observe(_Sight(host, slot, slot.contents, storage_bytes))
    return transfer.swap_in_as(host, storage_bytes, size, stride, storage_offset, dtype, device)


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """A slot that holds an encoded storage."""

    codec: Codec
    dtype: torch.dtype
    site: CodecSite

    def write(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.codec.encode(_elements(storage, self.dtype), host)

    def read(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.codec.decode(host, _elements(storage, self.dtype))


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A slot that holds a storage as it is, at its front."""

    def write(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        host[: storage.nbytes()].copy_(_elements(storage, torch.uint8), non_blocking=True)

    def read(self, host: torch.Tensor, storage: torch.UntypedStorage) -> None:
        _elements(storage, torch.uint8).copy_(host[: storage.nbytes()], non_blocking=True)


_PLAIN = _Plain()


class _Sight(NamedTuple):
    """An encoded slot whose size is to be read once its bytes have arrived."""

    host: torch.Tensor
    slot: HostSlot
    contents: _Encoded
    storage_bytes: int


# At most one slot is kept past its life for this, and only a small one: see `_observe`.
_waiting: list[_Sight] = []
_WAITING_BYTES = 64 << 20
_PATIENCE_STEPS = 8


def _observe(sight: _Sight) -> None:
    """Read an encoded size if it has arrived. Where the host always runs ahead of the device, so that it never has by
    now, one slot at a time is kept until a later step finds it complete."""
    if all(fence.event.query() for fence in sight.slot.fences):
        numel = sight.storage_bytes // sight.contents.dtype.itemsize
        sight.contents.site.observe(sight.contents.codec.observed_bytes(sight.host, numel, sight.contents.dtype))
    elif (
        not _waiting
        and sight.storage_bytes <= _WAITING_BYTES
        and sight.contents.site.steps_since_seen >= _PATIENCE_STEPS
    ):
        _waiting.append(sight)


def _observe_waiting() -> None:
    if _waiting and all(fence.event.query() for fence in _waiting[0].slot.fences):
        _observe(_waiting.pop())


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


@functools.lru_cache(maxsize=4096)
def _slot_bytes(codec: str, storage_bytes: int, dtype: torch.dtype) -> int:
    return max(codec_by_name(codec).worst_case_bytes(storage_bytes // dtype.itemsize, dtype), storage_bytes)


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
    return torch.empty(_slot_bytes(codec, storage_bytes, src.dtype), dtype=torch.uint8, device="cpu")


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
