"""The CPU stand-in for the copy engines: what the hardware may do at any moment, done at a chosen moment.

On CPU there is no second queue, so a schedule that forgets a wait would still compute the right numbers. Here each copy
is made at the earliest or at the latest moment that the waits allow, and bytes that must not be read hold 0xFF: a
missing, misplaced or doubled wait becomes a wrong result on every run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from fxhome.runtime.host_pool import POISON, host_pool
from fxhome.runtime.slot import HostSlot

CopyTiming = Literal["earliest", "latest"]


@dataclasses.dataclass(frozen=True)
class StandIn:
    """How the stand-in behaves. `poison` covers a source after its wait, a reload before its wait, a freed slot.

    Only for graphs that run node by node: a compiler that orders kernels anew may read a source behind its wait, which
    is right, since the source lives until its last reader.
    """

    copy_timing: CopyTiming = "earliest"
    poison: bool = False


_settings = StandIn()


@contextlib.contextmanager
def cpu_stand_in(*, copy_timing: CopyTiming = "earliest", poison: bool = True) -> Iterator[None]:
    """Use these settings inside the block (for the whole process; meant for tests)."""
    global _settings
    previous, pool = _settings, host_pool()
    _settings, pool.poison_on_release = StandIn(copy_timing, poison), poison
    try:
        yield
    finally:
        _settings, pool.poison_on_release = previous, previous.poison


def start_out(slot: HostSlot, source: torch.UntypedStorage) -> Callable[[torch.Tensor], None]:
    """Begin copying `source` to `slot`; the returned function ends it and may be called again to no effect."""
    settings, size_bytes, is_done = _settings, source.nbytes(), False
    if settings.copy_timing == "earliest":
        _write(slot, source)

    def finish(src: torch.Tensor) -> None:
        nonlocal is_done
        if is_done:  # a retained graph waits again, on a source that is poisoned by now
            return
        is_done = True
        address = src.untyped_storage().data_ptr()
        if settings.copy_timing == "latest":
            _write(slot, src.untyped_storage())
        if settings.poison:
            ctypes.memset(address, POISON, size_bytes)

    return finish


def start_in(slot: HostSlot, target: torch.UntypedStorage) -> Callable[[], None]:
    """Begin copying `slot` to `target`; the returned function ends it."""
    settings, size_bytes = _settings, target.nbytes()
    early = settings.copy_timing == "earliest"
    if early:
        _read(slot, target)
    # Not a tensor: it must not show in a measurement of tensor storages.
    arrived = ctypes.string_at(target.data_ptr(), size_bytes) if early and settings.poison else b""
    if settings.poison:
        ctypes.memset(target.data_ptr(), POISON, size_bytes)

    def finish() -> None:
        if not early:
            _read(slot, target)
        elif settings.poison:
            ctypes.memmove(target.data_ptr(), arrived, size_bytes)

    return finish


def _write(slot: HostSlot, source: torch.UntypedStorage) -> None:
    if slot.contents is None:
        ctypes.memmove(slot.block.address, source.data_ptr(), source.nbytes())
    else:
        slot.contents.write(slot, source.data_ptr(), None)


def _read(slot: HostSlot, target: torch.UntypedStorage) -> None:
    if slot.contents is None:
        ctypes.memmove(target.data_ptr(), slot.block.address, target.nbytes())
    else:
        slot.contents.read(slot, target.data_ptr(), slot.contents.before_read(slot)[0], None)
