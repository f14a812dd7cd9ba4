"""Several benchmarks on one GPU, none timed while another compiles.

Compiling tries kernels on the device, and a plan's first steps run on it, so a step that is timed meanwhile is slowed.
A process holds the device's file shared while it gets ready and alone while it times; so all that started together
get ready first and are timed one after another. Even then Inductor must not compare a kernel's variants while others
do: what it mistakes for the fastest stays.
"""

from __future__ import annotations

import fcntl
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from fxhome.device import lock_path

_POLL_SECONDS = 0.02
_TURN_SECONDS = 60.0
"""For which a comparison of variants waits at most."""


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
    with _lock_file(device) as handle:
        yield _locked(handle, wait_seconds)


@contextmanager
def tuned_in_turn(device: torch.device) -> Iterator[None]:
    """In here Inductor compares the variants of its kernels while no other process does so."""
    tuner: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    original = tuner.benchmark_all_configs

    def compared(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock_file(device, "tuning") as handle:
            _locked(handle, _TURN_SECONDS)
            return original(self, *args, **kwargs)

    tuner.benchmark_all_configs = compared
    try:
        yield
    finally:
        tuner.benchmark_all_configs = original


def _locked(handle: IO[str], wait_seconds: float) -> bool:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def _lock_file(device: torch.device, what: str = "quiet") -> IO[str]:
    path = lock_path(what, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")
