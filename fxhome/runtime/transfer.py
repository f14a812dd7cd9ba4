"""Copies between a device and the host pool, ordered by events. The host never waits for the device.

    swap_out        d2h stream waits for the work queued so far, then copies; an event marks the end
    swap_out_wait   the current stream waits until the source has been read; it may be freed afterwards
    swap_in         buffer allocated on the current stream; h2d stream waits for the work queued so far, then copies
    swap_in_wait    the current stream waits for that copy; the host slot may be freed afterwards

A transfer's state hangs on its host slot, found by the host tensor's address while the slot lives: addresses are
recycled, live slots are not. One stream per direction and device: copies of one direction run in the order issued.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

import torch

from fxhome.errors import DeviceError
from fxhome.runtime import stand_in
from fxhome.runtime.free_space import Fence
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.slot import Contents, Geometry, HostSlot, IncomingCopy, OutgoingCopy
from fxhome.runtime.streams import OnStream, current_device, current_stream

_RING_LENGTH = 1024


class _CopyQueue:
    """One direction of one device: a stream and a ring of events.

    An event of the ring is recorded again after `_RING_LENGTH` copies. Whoever waits for it later waits for a later
    copy of the same stream, already issued: never too early, and no cycle is possible.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.stream = torch.cuda.Stream(device)
        self.handle = self.stream.cuda_stream
        self.key = (device.index, self.handle)
        self._lock = threading.Lock()
        self._orders = itertools.count()
        self._ends = [torch.cuda.Event() for _ in range(_RING_LENGTH)]
        self._starts = [torch.cuda.Event() for _ in range(_RING_LENGTH)]
        self._switch = OnStream(self.stream, device.index)

    def copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage, slot: HostSlot) -> torch.cuda.Event:
        """Copy `source` to `target` (equal sizes) after the work queued on the current stream; fence `slot`."""

        def work(_: int) -> None:
            target.copy_(source, True)

        return self.run(work, slot)

    def run(self, work: Callable[[int], None], slot: HostSlot) -> torch.cuda.Event:
        """Queue what `work` puts on this queue's stream, which is then the current one and whose raw handle it gets,
        behind the work queued on the caller's stream; fence `slot`. Gives the event that marks the end.
        """
        current = current_stream(self.index)
        with self._lock:  # orders must follow the queue, and only one caller at a time makes its stream the current one
            order = next(self._orders)
            start, end = self._starts[order % _RING_LENGTH], self._ends[order % _RING_LENGTH]
            start.record(current)
            self.stream.wait_event(start)
            for fence in slot.fences:
                if fence.queue != self.key:
                    self.stream.wait_event(fence.event)
            with self._switch:
                work(self.handle)
            end.record(self.stream)
        slot.add_fence(Fence(self.key, order, end))
        return end


class _CudaLink:
    """The two copy queues of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.out = _CopyQueue(device)
        self.back = _CopyQueue(device)


_links: dict[int, _CudaLink] = {}
_links_lock = threading.Lock()


def _link(device: torch.device) -> _CudaLink:
    link = _links.get(device.index)
    if link is None:
        with _links_lock:
            link = _links.get(device.index) or _links.setdefault(device.index, _CudaLink(device))
    return link


def swap_out(src: torch.Tensor) -> torch.Tensor:
    """Start copying the whole storage of `src` to a host slot; return that slot's uint8 tensor."""
    return swap_out_as(src, None, src.untyped_storage().nbytes())


def swap_out_as(src: torch.Tensor, contents: Contents | None, slot_bytes: int) -> torch.Tensor:
    """The same, with `contents` deciding how the storage lies in a slot of `slot_bytes`; None copies it as it is."""
    _check_device(src.device, "swap_out")
    storage = src.untyped_storage()
    is_cuda = src.device.type == "cuda"
    host, slot = host_pool().empty(slot_bytes, pinned=is_cuda)
    if slot is None:
        return host
    slot.contents, slot.geometry = contents, Geometry.of(src)
    if is_cuda:
        queue = _link(src.device).out
        if contents is None:
            done = queue.copy(host.untyped_storage(), storage, slot)
        else:
            contents.before_write(slot, storage.data_ptr(), queue.index)
            done = queue.run(functools.partial(contents.write, slot, storage.data_ptr()), slot)
        slot.outgoing = OutgoingCopy(functools.partial(_wait_for, done))
    else:
        slot.outgoing = OutgoingCopy(stand_in.start_out(slot, storage))
    return host


def swap_out_wait(host: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """Order the current stream after the copy that `swap_out` started; return `host`.

    May be asked for again (a retained graph runs its backward twice). Raises RuntimeError without a `swap_out`.
    """
    if host.numel() == 0:
        return host
    slot = _slot(host, "swap_out_wait")
    if slot.outgoing is None:
        raise RuntimeError(
            "fxhome::swap_out_wait: no swap_out ever filled this host buffer; graph rule: each wait follows exactly "
            "one swap_out and takes its result unchanged"
        )
    slot.outgoing.finish(src)
    slot.outgoing.is_waited = True
    return host


def swap_in(
    host: torch.Tensor,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Start copying a host slot back; return a tensor of that geometry on a new storage of `host.numel()` bytes.

    The geometry is what tracing recorded. Some kernels lay their result out differently (roll and group_norm of
    channels-last tensors do): the tensor comes back as it went.

    Raises RuntimeError when the slot's own swap_out was not waited for, or the geometry needs more bytes.
    """
    _check_device(device, "swap_in")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", current_device())
    given = Geometry(tuple(size), tuple(stride), storage_offset, dtype)
    if host.numel() == 0:
        return new_tensor(0, given, device)
    slot = _slot(host, "swap_in")
    if slot.outgoing is not None and not slot.outgoing.is_waited:
        raise RuntimeError(
            "fxhome::swap_in: the swap_out of this host buffer was not waited for; graph rule: swap_in takes the "
            "result of swap_out_wait"
        )
    seen = slot.geometry
    if seen is not None and (seen.size, seen.storage_offset) == (given.size, given.storage_offset):
        given = given if seen.agrees(given) else seen
    buffer = new_tensor(host.numel(), given, device)
    storage, contents = buffer.untyped_storage(), slot.contents
    address = storage.data_ptr()
    if device.type == "cuda":
        queue = _link(device).back
        stream = current_stream(queue.index)
        if contents is None:
            finish: Callable[[], None] = functools.partial(
                _wait_on_both, queue.copy(storage, host.untyped_storage(), slot), stream
            )
        else:
            bound_bytes, is_all = contents.before_read(slot)
            done = queue.run(functools.partial(contents.read, slot, address, bound_bytes), slot)
            if is_all:
                finish = functools.partial(_wait_on_both, done, stream)
            else:
                finish = functools.partial(_wait_and_complete, done, stream, slot, address, bound_bytes)
    else:
        finish = stand_in.start_in(slot, storage)
    if contents is not None:
        contents.announce(address)
    slot.incoming[address] = IncomingCopy(buffer, finish)
    return buffer


def swap_in_wait(dev: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Order the current stream after the copy that `swap_in` started; return `dev`. Raises RuntimeError without one."""
    if host.numel() == 0:
        return dev
    copy = _slot(host, "swap_in_wait").incoming.pop(dev.untyped_storage().data_ptr(), None)
    if copy is None:
        raise RuntimeError(
            "fxhome::swap_in_wait: no swap_in into this buffer is pending; graph rule: each swap_in has exactly one "
            "wait, which takes its result and its host buffer unchanged"
        )
    copy.finish()
    return dev


def prepare_host_write(slot: HostSlot, device_index: int) -> None:
    """Make the device's current stream wait until no earlier copy uses the slot: for kernels that write to the host."""
    stream = current_stream(device_index)
    for fence in slot.fences:
        stream.wait_event(fence.event)


def note_host_use(slot: HostSlot, device_index: int) -> None:
    """Guard the slot until the work queued so far on the device's current stream is done: for kernels that use it."""
    stream = current_stream(device_index)
    event = torch.cuda.Event()
    event.record(stream)
    slot.add_fence(Fence((device_index, stream.cuda_stream), next(_use_orders), event))


_use_orders = itertools.count()


def new_tensor(storage_bytes: int, geometry: Geometry, device: torch.device) -> torch.Tensor:
    """A tensor of that geometry on a new storage of exactly `storage_bytes`."""
    size, stride, storage_offset, dtype = geometry
    last = storage_offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    needed_bytes = (last + 1) * dtype.itemsize if all(size) else 0
    if needed_bytes == storage_bytes and storage_offset == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    if needed_bytes > storage_bytes:  # set_ would silently enlarge a storage that is too small
        raise RuntimeError(
            f"fxhome::swap_in: size {list(size)}, stride {list(stride)}, offset {storage_offset}, {dtype} needs "
            f"{needed_bytes} bytes, the host buffer holds {storage_bytes}; graph rule: swap_in repeats its "
            "source's geometry"
        )
    storage = torch.empty(storage_bytes, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, storage_offset, size, stride)


def _wait_for(done: torch.cuda.Event, src: torch.Tensor) -> None:
    current_stream(src.get_device()).wait_event(done)


def _wait_on_both(done: torch.cuda.Event, allocated_on: torch.cuda.Stream) -> None:
    """The reader's stream waits, and so does the stream that will get the buffer's memory back."""
    current = current_stream(allocated_on.device_index)
    current.wait_event(done)
    if current.cuda_stream != allocated_on.cuda_stream:
        allocated_on.wait_event(done)


def _wait_and_complete(
    done: torch.cuda.Event, allocated_on: torch.cuda.Stream, slot: HostSlot, address: int, bound_bytes: int
) -> None:
    """The same, and the reader's stream fetches what the copy left out."""
    _wait_on_both(done, allocated_on)
    assert slot.contents is not None
    slot.contents.after_read(slot, address, bound_bytes, allocated_on.device_index)
    note_host_use(slot, allocated_on.device_index)


def _slot(host: torch.Tensor, operator: str) -> HostSlot:
    slot = host_pool().slot_of(host)
    if slot is None:
        raise RuntimeError(
            f"fxhome::{operator}: the host buffer ({host.numel()} bytes on {host.device}) is not a live buffer of the "
            "host pool; graph rule: host buffers are passed on unchanged (a saved-tensors hook that copies them breaks "
            "this: run the backward outside of it)"
        )
    return slot


def _check_device(device: torch.device, operator: str) -> None:
    if device.type not in ("cuda", "cpu"):
        raise DeviceError(f"fxhome::{operator}: got a tensor on {device}; cuda and cpu are supported")
