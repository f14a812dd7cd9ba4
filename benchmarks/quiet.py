"""Several benchmarks on one GPU, none timed while another compiles.

Compiling tries kernels on the device, and a plan's first steps run on it, so a step that is timed meanwhile is slowed.
A process holds the device's file shared while it gets ready and alone while it times; so all that started together
get ready first and are timed one after another.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import torch

from fxhome.device import cache_directory

_POLL_SECONDS = 0.1


@contextmanager
def getting_ready(device: torch.device) -> Iterator[None]:
    """Others wait with their timing (as long as they can) until this ends; waits while another is timed."""
    with _lock_file(device) as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


@contextmanager
def quiet(device: torch.device, wait_seconds: float) -> Iterator[bool]:
    """Wait until no other process gets ready or is timed, and keep them waiting meanwhile.

    Yields False where that did not come about within `wait_seconds`: what is timed then may be disturbed.
    """
    deadline = time.monotonic() + wait_seconds
    with _lock_file(device) as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(_POLL_SECONDS)
            else:
                yield True
                return


def _lock_file(device: torch.device) -> IO[str]:
    name = f"cuda-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    path = cache_directory() / f"quiet-{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")
