"""The four codec operators, visible to FX, Dynamo's backends and Inductor.

    e  = encode(x, bytes, codec)                     x's storage, encoded on its device by one kernel
    x2 = decode(e, bytes, size, stride, ...)         a new storage with the same bytes (or within the error bound)

What a fixed-rate codec made is moved by `swap_out` and `swap_in`: its size is known. A variable-rate codec's encode
also gets an assumed size and the name of a site (see codec_sites); its result has room for the worst case, and

    h  = swap_out_encoded(e)                         moves what is in use, as far as the host knows it, to a host slot
    e2 = swap_in_encoded(h, device)                  moves it back

The waits of these two are `swap_out_wait` and `swap_in_wait`. Whole storages are handled, so strides come back exactly.
`bytes` is the storage's size as it was planned.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from fxhome.cuda_kernels.codec import codec_by_name, prepared_kernel
from fxhome.cuda_kernels.launch import copy_to_device, copy_to_host, raise_if_corrupt
from fxhome.cuda_kernels.layout import USED_OFFSET, VECTOR_BYTES
from fxhome.cuda_kernels.overflow import copy_overflow
from fxhome.runtime import transfer
from fxhome.runtime.codec_sites import CodecSite, add_site, site_name, site_of
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.slot import Geometry, HostSlot
from fxhome.runtime.streams import current_handle

__all__ = ["buffer_bytes", "decode_op", "encode_op", "site_name", "swap_in_encoded_op", "swap_out_encoded_op"]

log = logging.getLogger("fxhome.codecs")

_LIBRARY = torch.library.Library("fxhome", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides,)

_GEOMETRY = "int storage_bytes, int[] size, int[] stride, int storage_offset, ScalarType dtype"
_SCHEMAS = {
    "encode": (
        '(Tensor src, int storage_bytes, str codec, int assumed_bytes=0, str site="", int[]? stride=None, '
        "ScalarType? dtype=None) -> Tensor"
    ),
    "decode": f"(Tensor encoded, {_GEOMETRY}, str codec) -> Tensor",
    "swap_out_encoded": "(Tensor encoded) -> Tensor",
    "swap_in_encoded": "(Tensor host, Device device) -> Tensor",
}


class _Sizes(NamedTuple):
    """Sizes in bytes of an encoded storage, and its elements."""

    numel: int
    is_fixed: bool
    head: int
    worst_case: int
    buffer: int
    """Of the tensor that holds it: in either form, if the size depends on the data."""


@functools.lru_cache(maxsize=8192)
def _sizes(codec: str, storage_bytes: int, dtype: torch.dtype) -> _Sizes:
    chosen, numel = codec_by_name(codec), storage_bytes // dtype.itemsize
    layout = chosen.layout(numel, dtype)
    worst = layout.worst_case_bytes
    buffer = worst if chosen.fixed_rate else max(storage_bytes, worst)
    return _Sizes(numel, chosen.fixed_rate, layout.head_bytes, worst, buffer)


def buffer_bytes(codec: str, storage_bytes: int, dtype: torch.dtype) -> int:
    """Bytes of the tensor that `encode` gives, and of the host slot that it is moved to."""
    return _sizes(codec, storage_bytes, dtype).buffer


def encode(
    src: torch.Tensor,
    storage_bytes: int,
    codec: str,
    assumed_bytes: int = 0,
    site: str = "",
    stride: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Encode the storage of `src` into a new uint8 tensor of `buffer_bytes` on its device.

    assumed_bytes, site: what a variable-rate codec is expected to give, and under which name that is watched.
    stride, dtype: what tracing recorded and `decode` will restore. Raises RuntimeError where the kernel that made `src`
    has laid it out differently.
    """
    _check_layout(src, stride, dtype)
    is_cuda = src.is_cuda
    if is_cuda:
        raise_if_corrupt()
    storage = src.untyped_storage()
    _check_storage(storage.nbytes(), storage_bytes, "encode")
    sizes = _sizes(codec, storage_bytes, src.dtype)
    encoded = torch.empty(sizes.buffer, dtype=torch.uint8, device=src.device)
    moving = None
    if not sizes.is_fixed:
        moving = _Moving(site, codec, sizes, storage_bytes, assumed_bytes, is_cuda)
        _moving[encoded.data_ptr()] = moving
        if moving.is_raw:
            copy_raw(encoded[:storage_bytes], _elements(storage, torch.uint8))
            return encoded
    if not is_cuda:
        codec_by_name(codec).encode(_elements(storage, src.dtype), encoded)
        if moving is not None:
            moving.site.note.word.value = used_tail_bytes(encoded.data_ptr()) // VECTOR_BYTES + 1
    elif sizes.numel:
        index = src.get_device()
        kernel = prepared_kernel(codec, "encode", sizes.numel, src.dtype, index)
        kernel(current_handle(index), storage.data_ptr(), encoded.data_ptr())
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
    geometry = Geometry(tuple(size), tuple(stride), storage_offset, dtype)
    result = transfer.new_tensor(storage_bytes, geometry, encoded.device)
    storage = result.untyped_storage()
    address = encoded.data_ptr()
    moving = None if _sizes(codec, storage_bytes, dtype).is_fixed else _moving.pop(address, None)
    if moving is not None and moving.is_raw:
        copy_raw(_elements(storage, torch.uint8), encoded[:storage_bytes])
    elif not encoded.is_cuda:
        codec_by_name(codec).decode(encoded, _elements(storage, dtype))
    elif storage_bytes:
        index = encoded.get_device()
        kernel = prepared_kernel(codec, "decode", storage_bytes // dtype.itemsize, dtype, index)
        kernel(current_handle(index), storage.data_ptr(), address)
    return result


def swap_out_encoded(encoded: torch.Tensor) -> torch.Tensor:
    """Start moving what a variable-rate `encode` gave to a host slot; return that slot's uint8 tensor."""
    moving = _moving.pop(encoded.data_ptr(), None)
    if moving is None:
        raise RuntimeError(
            f"fxhome::swap_out_encoded: the tensor of {encoded.numel()} bytes on {encoded.device} does not come from "
            "an encode of a variable-rate codec; graph rule: its argument is the result of fxhome::encode, unchanged, "
            "once"
        )
    return transfer.swap_out_as(encoded, moving, encoded.numel())


def swap_in_encoded(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start moving a slot that `swap_out_encoded` filled back, into a new tensor for `decode`."""
    return transfer.swap_in(host, [host.numel()], [1], 0, torch.uint8, device)


_moving: dict[int, _Moving] = {}
"""What the buffers between an encode and its swap-out, or a swap-in and its decode, hold, by their address: live device
buffers have one each, and whoever fills one enters it here anew."""


class _Moving:
    """An encoded storage on its way to the host and back (see slot.Contents), or a storage as it is."""

    __slots__ = ("_bound_bytes", "_sizes", "_storage_bytes", "is_raw", "site")

    def __init__(
        self, site: str, codec: str, sizes: _Sizes, storage_bytes: int, assumed_bytes: int, is_cuda: bool
    ) -> None:
        state = site_of(site, codec, storage_bytes)
        if state is None:
            state = add_site(site, codec, storage_bytes, assumed_bytes, sizes.head, pinned=is_cuda)
        self.site: CodecSite = state
        encodes = state.next_step() and storage_bytes > 0
        self.is_raw = not encodes or (is_cuda and not _kernels_reach_the_pool())
        self._sizes = sizes
        self._storage_bytes = storage_bytes
        self._bound_bytes = storage_bytes if self.is_raw else sizes.worst_case

    def before_write(self, slot: HostSlot, address: int, device_index: int) -> None:
        """Choose how much the copy moves; a kernel moves what is beyond and notes the size."""
        if self.is_raw:
            return
        sizes = self._sizes
        self._bound_bytes = min(self.site.bound_bytes() or sizes.worst_case, sizes.worst_case)
        if self._bound_bytes < sizes.worst_case:
            transfer.prepare_host_write(slot, device_index)
        self._complete(address, address, slot.block.address, self._bound_bytes, device_index, self.site.note.address)

    def write(self, slot: HostSlot, address: int, stream: int | None) -> None:
        """Copy to the host."""
        if stream is None:
            ctypes.memmove(slot.block.address, address, self._bound_bytes)
        else:
            copy_to_host(slot.block.address, address, self._bound_bytes, stream)

    def before_read(self, slot: HostSlot) -> tuple[int, bool]:
        """The bytes in use, where they have arrived; else what the way out moved, or more where more is known."""
        if self.is_raw:
            return self._bound_bytes, True
        sizes = self._sizes
        if all(fence.event.query() for fence in slot.fences):
            return min(sizes.head + used_tail_bytes(slot.block.address), sizes.worst_case), True
        bound_bytes = min(max(self._bound_bytes, self.site.bound_bytes()), sizes.worst_case)
        return bound_bytes, bound_bytes == sizes.worst_case

    def read(self, slot: HostSlot, address: int, bound_bytes: int, stream: int | None) -> None:
        """Copy from the host."""
        if stream is None:
            ctypes.memmove(address, slot.block.address, bound_bytes)
        else:
            copy_to_device(address, slot.block.address, bound_bytes, stream)

    def after_read(self, slot: HostSlot, address: int, bound_bytes: int, device_index: int) -> None:
        """A kernel fetches what the copy has left out."""
        self._complete(address, slot.block.address, address, bound_bytes, device_index)

    def announce(self, address: int) -> None:
        """Tell `decode` what it gets."""
        _moving[address] = self

    def _complete(
        self, header: int, source: int, target: int, bound_bytes: int, device_index: int, note: int = 0
    ) -> None:
        sizes = (self._sizes.head, self._sizes.worst_case)
        copy_overflow(device_index, current_handle(device_index), header, source, target, bound_bytes, sizes, note)


def copy_raw(target: torch.Tensor, source: torch.Tensor) -> None:
    """Bytes of a storage that is not encoded, on its device."""
    target.copy_(source)


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


def _check_storage(found: int, storage_bytes: int, operator: str) -> None:
    if found != storage_bytes:
        raise RuntimeError(
            f"fxhome::{operator}: the storage has {found} bytes, {storage_bytes} were planned; graph rule: what is "
            "encoded is the tensor that was traced, in a storage of its own"
        )


def _check_layout(src: torch.Tensor, stride: list[int] | None, dtype: torch.dtype | None) -> None:
    found = Geometry.of(src)
    recorded = found._replace(
        stride=found.stride if stride is None else tuple(stride), dtype=found.dtype if dtype is None else dtype
    )
    if not found.agrees(recorded):
        raise RuntimeError(
            f"fxhome::encode: the tensor has stride {found.stride} and {found.dtype}, tracing recorded "
            f"{recorded.stride} and {recorded.dtype}: the operator that made it does not do what its shape function "
            "says. Compile with allow=('swap', 'recompute')"
        )


def _fake_encode(
    src: torch.Tensor,
    storage_bytes: int,
    codec: str,
    assumed_bytes: int = 0,
    site: str = "",
    stride: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return torch.empty(buffer_bytes(codec, storage_bytes, src.dtype), dtype=torch.uint8, device=src.device)


def _fake_decode(
    encoded: torch.Tensor,
    storage_bytes: int,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    codec: str,
) -> torch.Tensor:
    storage = torch.empty(storage_bytes, dtype=torch.uint8, device=encoded.device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=encoded.device).set_(storage, storage_offset, size, stride)


def _fake_swap_out(encoded: torch.Tensor) -> torch.Tensor:
    return torch.empty(encoded.numel(), dtype=torch.uint8, device="cpu")


def _fake_swap_in(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(host.numel(), dtype=torch.uint8, device=device)


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
