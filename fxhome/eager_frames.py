"""Says so where Dynamo makes no graph: what runs eagerly asks our backend nothing, and no budget holds for it.

Dynamo itself says nothing: after a graph break that it cannot resume from (in a loop, in an LSTM) it runs the whole
function as plain Python. Functions that it calls may still be graphs, each planned by itself. Others it never looks at
(torch.nn's own modules inside DistributedDataParallel, what torch.compiler.disable marks): that no graph at all arrived
of what torch.compile was given is seen when an optimizer makes a step, or the next model is compiled.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from types import CodeType
from typing import Any

import torch

from fxhome.optimizer_state import at_optimizer_steps
from fxhome.passes.torch_compat import at_end_of_compilation, compiled_for, frame_given_up

log = logging.getLogger("fxhome")

_told: set[CodeType] = set()
_without_graph: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""What torch.compile was given and no graph has arrived of, by the name that a message calls it."""
_with_graph: weakref.WeakSet[Any] = weakref.WeakSet()
"""What needs no word any more: a graph of it arrived, or it was told of."""


def watch_frames() -> None:
    """Watch Dynamo's compilations from now on; called again, it changes nothing."""
    at_end_of_compilation(_tell)
    at_optimizer_steps(_tell_missing)
    atexit.unregister(_tell_missing)
    atexit.register(_tell_missing)


def forget_frames() -> None:
    """Tell of every function again."""
    _told.clear()
    _without_graph.clear()
    _with_graph.clear()


def note_graph() -> None:
    """A graph arrived of what Dynamo compiles just now."""
    found = compiled_for()
    if found is not None and _is_kept(found[1]):
        _with_graph.add(found[1])
        _without_graph.pop(found[1], None)


def _is_kept(given: object) -> bool:
    """Whether it can be remembered without being kept alive."""
    return type(given).__weakrefoffset__ != 0 and type(given).__hash__ is not None


def _note_asked() -> None:
    found = compiled_for() if torch.is_grad_enabled() else None
    if found is None or not getattr(found[0], "holds_budget", False) or not _is_kept(found[1]):
        return
    given = found[1]
    if given in _with_graph or given in _without_graph:
        return
    _tell_missing(but=given)
    name = getattr(given, "__qualname__", None) or type(given).__qualname__
    _without_graph[given] = name


def _tell_missing(*_: object, but: object = None) -> None:
    """Tell of models no graph of which has arrived, though their first call is over; of functions only where no graph
    of anything has: they may hold nothing to compile.
    """
    for given, name in list(_without_graph.items()):
        is_model = isinstance(given, torch.nn.Module) and any(weight.requires_grad for weight in given.parameters())
        if given is but or not (is_model or (but is None and not _with_graph)):
            continue
        del _without_graph[given]
        _with_graph.add(given)
        log.warning(
            "fxhome: torch.compile made no graph of %s: all of it runs eagerly, and memory_budget holds for nothing of "
            "it. Dynamo does not look into torch.nn's own modules inside DistributedDataParallel (compile the module "
            "first and wrap it then) nor into what torch.compiler.disable marks; TORCH_LOGS=graph_breaks tells more",
            name,
        )


def _tell(_: object) -> None:
    _note_asked()
    found = frame_given_up() if torch.is_grad_enabled() else None
    if found is None:
        return
    code, backend, error = found
    is_suppressed = torch._dynamo.config.suppress_errors or isinstance(error, torch._dynamo.exc.Unsupported)
    if not getattr(backend, "holds_budget", False) or not is_suppressed or code in _told:
        return
    _told.add(code)
    note_graph()  # said already
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
