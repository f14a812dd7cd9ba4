"""A slot of host memory and the copies that run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from fxhome.runtime.free_space import Block, Fence, latest_fences


class Start(NamedTuple):
    """Where a transfer begins on a CUDA device: the copy stream, which is the current one, and the event after which
    the device's side may be touched (the copy stream waits for it by itself)."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class Contents(Protocol):
    """How a storage lies in its slot, where that is not byte for byte. Both methods run as copies do: on a copy stream
    of the storage's device, or (start is None) on the CPU at the moment that the stand-in chooses. They return the
    stream at whose present end the storage's side is done, where that is not the copy stream."""

    def write(
        self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None
    ) -> torch.cuda.Stream | None:
        """Put `storage` into the slot's uint8 tensor."""

    def read(
        self, host: torch.Tensor, storage: torch.UntypedStorage, start: Start | None = None
    ) -> torch.cuda.Stream | None:
        """Restore `storage` from the slot's uint8 tensor."""


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

    __slots__ = ("block", "contents", "fences", "incoming", "outgoing")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.fences = block.fences
        self.contents: Contents | None = None
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
