"""A progress bar for the slow parts: measuring, searching, training steps.

Drawn on stderr, and only when stderr is a terminal or a caller asked for it; stdout stays free for data.

    with progress("timing ops", total=120) as advance:
        for op in ops:
            ...
            advance()
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


class Advance(Protocol):
    """Moves the bar on."""

    def __call__(self, steps: int = 1) -> None:
        """Count `steps` more units of work as done."""


_wanted: ContextVar[bool | None] = ContextVar("wanted", default=None)
_active: ContextVar[Progress | None] = ContextVar("active", default=None)


@contextlib.contextmanager
def progress_shown(shown: bool | None) -> Iterator[None]:
    """Ask for bars (True), silence them (False) or leave it to whether stderr is a terminal (None) in this context."""
    token = _wanted.set(shown)
    try:
        yield
    finally:
        _wanted.reset(token)


def announce(message: str) -> None:
    """One line for those who see bars, where something long without a bar begins."""
    if not _is_shown():
        return
    if (display := _active.get()) is not None:
        display.console.print(message, markup=False, highlight=False)
    else:
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Advance]:
    """Show one bar while the block runs (`total` None: amount unknown); a bar inside a bar becomes a second line."""
    if not _is_shown():
        yield _ignore
        return
    if (outer := _active.get()) is not None:
        if not outer.console.is_terminal:
            announce(f"{description} ...")
        yield _add_task(outer, description, total)
        return
    # rich costs a tenth of a second to import: only those who see a bar pay for it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    # A terminal shows the bar while it moves; a file only gets its last state, so it is told the start as well.
    if not console.is_terminal:
        announce(f"{description} ...")
    with Progress(*columns, console=console, transient=console.is_terminal) as display:
        token = _active.set(display)
        try:
            yield _add_task(display, description, total)
        finally:
            _active.reset(token)


def _is_shown() -> bool:
    wanted = _wanted.get()
    return sys.stderr.isatty() if wanted is None else wanted


def _add_task(display: Progress, description: str, total: int | None) -> Advance:
    task = display.add_task(description, total=total)

    def advance(steps: int = 1) -> None:
        display.advance(task, steps)

    return advance


def _ignore(steps: int = 1) -> None:
    del steps
