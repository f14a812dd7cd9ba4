"""Compile and run something else in the middle of a compilation, and leave that one as it was.

A backend is called with torch's compile lock held, a tracing context, fake tensors and metrics, all of them of its
thread.
What is compiled there would count as part of the step. So it is done in a thread of its own, which the caller waits
for, its lock given up meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


def outside_of_compilation(work: Callable[[], T]) -> T:
    """What `work` gives; in a thread of its own where the caller is in the middle of a compilation.

    Only then: where torch 2.11 compiles for the first time in a process, it is undone by the end of that thread.
    """
    if not _compile_lock()._is_owned():
        with _disable_current_modes():
            return work()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below, where it belongs
            failed.append(error)

    with _lock_given_up():
        thread = threading.Thread(target=run, name="fxhome-compile-apart")
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _compile_lock() -> Any:
    """Held by torch whenever it compiles."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def _lock_given_up() -> Iterator[None]:
    lock = _compile_lock()
    # What threading.Condition does with a lock that is held several times over.
    state = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(state)
