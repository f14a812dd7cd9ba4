"""Says so where Dynamo gives a function up: it then runs eagerly, our backend is never asked, and no budget holds.

Dynamo itself says nothing: after a graph break that it cannot resume from (in a loop, in an LSTM) it runs the whole
function as plain Python. Functions that it calls may still be graphs, each planned by itself.
"""

from __future__ import annotations

import logging
import os
from types import CodeType

import torch

from fxhome.passes.torch_compat import at_end_of_compilation, frame_given_up

log = logging.getLogger("fxhome")

_told: set[CodeType] = set()


def watch_frames() -> None:
    """Watch Dynamo's compilations from now on; called again, it changes nothing."""
    at_end_of_compilation(_tell)


def forget_frames() -> None:
    """Tell of every function again."""
    _told.clear()


def _tell(_: object) -> None:
    found = frame_given_up() if torch.is_grad_enabled() else None
    if found is None:
        return
    code, backend, error = found
    is_suppressed = torch._dynamo.config.suppress_errors or isinstance(error, torch._dynamo.exc.Unsupported)
    if not getattr(backend, "holds_budget", False) or not is_suppressed or code in _told:
        return
    _told.add(code)
    log.warning(
        "fxhome: torch.compile could not make graphs of %s (%s:%d), which now runs eagerly: memory_budget holds for "
        "nothing that it does itself, only for the graphs among the functions that it calls. The reason: %s. Take what "
        "breaks the graph out of its loop or out of the model; fullgraph=True makes this an error with the whole story",
        code.co_qualname,
        os.path.basename(code.co_filename),
        code.co_firstlineno,
        _reason(error),
    )


def _reason(error: BaseException) -> str:
    """What Dynamo says, its explanation and its first hint, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[:1]
    for kind in ("Explanation: ", "Hint: "):
        told += [line.removeprefix(kind) for line in lines if line.startswith(kind)][:1]
    return "; ".join(line.rstrip(".") for line in told) or type(error).__name__
