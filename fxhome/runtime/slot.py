"""A slot of host memory and the copies that run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from fxhome.runtime.free_space import Block, Fence, latest_fences


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def agrees(self, other: Geometry) -> bool:
        """Whether the same bytes are the same tensor; the stride of a dimension of size one says nothing."""
        steps = zip(self.size, self.stride, other.stride, strict=False)
        return (self.size, self.storage_offset, self.dtype) == (other.size, other.storage_offset, other.dtype) and (
            0 in self.size or all(extent == 1 or mine == theirs for extent, mine, theirs in steps)
        )


class Contents(Protocol):
    """How a device buffer is moved to a slot and back, where that is not byte for byte in one copy.

    `write` and `read` run as copies do: on a copy stream, whose raw handle they get, or (stream None) on the CPU at the
    moment that the stand-in chooses. The other methods run at the call, on the device's current stream, and only
    `announce` also on the CPU. Addresses are those of the device buffer.
    """

    def before_write(self, slot: HostSlot, address: int, device_index: int) -> None:
        """Queue what must be done before the copy begins."""

    def write(self, slot: HostSlot, address: int, stream: int | None) -> None:
        """Fill the slot."""

    def before_read(self, slot: HostSlot) -> tuple[int, bool]:
        """How many bytes the copy back moves, and whether these are known to be all."""

    def read(self, slot: HostSlot, address: int, bound_bytes: int, stream: int | None) -> None:
        """Move that many bytes back."""

    def after_read(self, slot: HostSlot, address: int, bound_bytes: int, device_index: int) -> None:
        """Queue, behind a copy that may not have moved all, what fetches the rest from the slot."""

    def announce(self, address: int) -> None:
        """Note that the buffer at that address will hold this."""


@dataclasses.dataclass
class OutgoingCopy:
    """The copy that fills a slot. `finish` orders the caller after it; `is_waited` once a wait was asked for."""

    finish: Callable[[torch.Tensor], None]
    is_waited: bool = False


@dataclasses.dataclass(frozen=True)
class IncomingCopy:
    """A copy from a slot into `buffer`, which stays alive here until its wait.

    Without this reference a step that fails between a reload and its wait would free the buffer under a running copy,
    and the copy would overwrite whatever is allocated there next.
    """

    buffer: torch.Tensor
    finish: Callable[[], None]


class HostSlot:
    """A live range of the pool: its bytes, the fences of the work on it and its unfinished copies."""

    __slots__ = ("block", "contents", "fences", "geometry", "incoming", "outgoing")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.fences = block.fences
        self.contents: Contents | None = None
        self.geometry: Geometry | None = None  # of the tensor whose storage was copied here
        self.outgoing: OutgoingCopy | None = None
        self.incoming: dict[int, IncomingCopy] = {}  # by the buffer's address

    def add_fence(self, fence: Fence) -> None:
        """Whoever gets these bytes next waits for `fence` too."""
        self.fences = latest_fences(self.fences, (fence,))

    def abandon_incoming(self) -> None:
        """The slot is dead: finish the copies nobody waited for, so that their buffers may be freed."""
        while self.incoming:
            _, copy = self.incoming.popitem()
            copy.finish()
