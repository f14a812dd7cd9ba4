"""The two compiled graphs of a plan, in the hands of what lays their blocks (placed_blocks.py) and of what times the
host in them (host_timer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch.fx.graph_module import GraphModule

from fxhome.generated_code import HookError, generated, hook
from fxhome.host_timer import BACKWARD, FORWARD, HostTimer
from fxhome.placed_blocks import Calls, PlacedBlocks
from fxhome.raw_allocator import Allocator

log = logging.getLogger("fxhome")


class Inside:
    """What runs inside a graph that Inductor compiled; `put` something else there. Raises HookError where not known."""

    def __init__(self, compiled: Any) -> None:
        self.call, self._put = generated(compiled)

    def put(self, call: Callable[..., Any]) -> None:
        """Run this instead."""
        self._put(call)
        self.call = call


class CompiledGraphs:
    """Inductor's inner compiler that keeps what it made, by direction."""

    def __init__(self) -> None:
        self.forward: Any = None
        self.backward: Any = None
        self._insides: tuple[Inside, Inside] | None = None

    def compile(self, graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Compile one graph as Inductor does."""
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(graph, inputs, **settings)
        if settings.get("is_backward"):
            self.backward = compiled
        elif not settings.get("is_inference"):
            self.forward = compiled
        return compiled

    @property
    def insides(self) -> tuple[Inside, Inside]:
        """Of the forward and the backward, the same two each time. Raises HookError where one is not there or not known
        as Inductor's.
        """
        if self.forward is None or self.backward is None:
            raise HookError("there is no forward and backward")
        if self._insides is None:
            self._insides = Inside(self.forward), Inside(self.backward)
        return self._insides


def place_blocks(
    compiled: CompiledGraphs, allocator: Allocator, *, limit_bytes: int, is_expected: bool
) -> PlacedBlocks:
    """Put what lays their blocks around both graphs; see PlacedBlocks. Raises HookError, and nothing is changed."""
    ahead, back = compiled.insides
    forward, backward = ahead.call, back.call

    def hooked(at: Callable[[int], None], only: Container[int] | None) -> Calls:
        hooked_forward, behind = hook(forward, at, 0, only)
        hooked_backward, behind = hook(backward, at, behind, only)
        return Calls(hooked_forward, hooked_backward, behind)

    blocks = PlacedBlocks(allocator, Calls(forward, backward), hooked, limit_bytes=limit_bytes, is_expected=is_expected)
    ahead.put(blocks.forward)
    back.put(blocks.backward)
    return blocks


def time_host(compiled: CompiledGraphs, timer: HostTimer) -> bool:
    """Let a timer time both graphs, hooks included, until it has seen enough; False where they are not known."""
    try:
        insides = compiled.insides
    except HookError as reason:
        log.info("fxhome: what the host spends in real steps is not timed: %s", reason)
        return False
    before = [inside.call for inside in insides]

    def release() -> None:
        for inside, call in zip(insides, before, strict=True):
            inside.put(call)

    for side, inside in zip((FORWARD, BACKWARD), insides, strict=True):
        inside.put(timer.timed(inside.call, side))
    timer.release = release
    return True
