"""The two compiled graphs of a plan, with hooks at every statement that may allocate (placed_blocks.py), and timed
(host_timer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx.graph_module import GraphModule

from fxhome.generated_code import HookError, generated, hook
from fxhome.host_timer import BACKWARD, FORWARD, HostTimer
from fxhome.placed_blocks import PlacedBlocks
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


def place_blocks(compiled: CompiledGraphs, allocator: Allocator) -> PlacedBlocks | str:
    """Hook both graphs; or the reason why they stay as they are."""
    blocks = PlacedBlocks(allocator)
    hooked: list[Callable[..., Any]] = []
    try:
        for inside in compiled.insides:
            call, blocks.hooks = hook(inside.call, blocks.at, blocks.hooks)
            hooked.append(call)
    except HookError as reason:
        log.warning("fxhome: blocks are left to the allocator: %s", reason)
        return str(reason)
    ahead, back = compiled.insides
    ahead.put(blocks.forward(hooked[0]))
    back.put(blocks.backward(hooked[1]))
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
