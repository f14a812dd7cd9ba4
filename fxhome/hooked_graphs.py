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


class CompiledGraphs:
    """Inductor's inner compiler that keeps what it made, by direction."""

    def __init__(self) -> None:
        self.forward: Any = None
        self.backward: Any = None

    def compile(self, graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Compile one graph as Inductor does."""
        from torch._inductor.compile_fx import compile_fx_inner

        compiled = compile_fx_inner(graph, inputs, **settings)
        if settings.get("is_backward"):
            self.backward = compiled
        elif not settings.get("is_inference"):
            self.forward = compiled
        return compiled


def place_blocks(compiled: CompiledGraphs, allocator: Allocator) -> PlacedBlocks | str:
    """Hook both graphs; or the reason why they stay as they are."""
    blocks = PlacedBlocks(allocator)
    changes: list[tuple[Callable[[Callable[..., Any]], None], Callable[..., Any]]] = []
    try:
        for graph, told in ((compiled.forward, blocks.forward), (compiled.backward, blocks.backward)):
            call, put = generated(graph)
            hooked, blocks.hooks = hook(call, blocks.at, blocks.hooks)
            changes.append((put, told(hooked)))
    except HookError as reason:
        log.warning("fxhome: blocks are left to the allocator: %s", reason)
        return str(reason)
    for put, call in changes:
        put(call)
    return blocks


def time_host(compiled: CompiledGraphs, timer: HostTimer) -> bool:
    """Let a timer time both graphs, until it has seen enough; False where they are called in a way that is not known,
    or where there are not two.
    """
    inside: list[tuple[Callable[[Callable[..., Any]], None], Callable[..., Any]]] = []
    if compiled.forward is None or compiled.backward is None:
        return False
    try:
        for graph in (compiled.forward, compiled.backward):
            call, put = generated(graph)
            inside.append((put, call))
    except HookError as reason:
        log.info("fxhome: what the host spends in real steps is not timed: %s", reason)
        return False
    for side, (put, call) in zip((FORWARD, BACKWARD), inside, strict=True):
        put(timer.timed(call, side))

    def release() -> None:
        for put, call in inside:
            put(call)

    timer.release = release
    return True
