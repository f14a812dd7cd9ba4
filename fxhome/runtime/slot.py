"""A slot of host memory and the copies that run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fxhome.runtime.free_space import Block, Fence, latest_fences


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

    __slots__ = ("block", "fences", "incoming", "outgoing")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.fences = block.fences
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
