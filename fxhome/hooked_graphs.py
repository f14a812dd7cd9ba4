"""The two compiled graphs of a plan, in the hands of what lays their blocks: see placed_blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx.graph_module import GraphModule

from fxhome.generated_code import generated, hook
from fxhome.placed_blocks import Calls, PlacedBlocks
from fxhome.raw_allocator import Allocator


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


def place_blocks(
    compiled: CompiledGraphs, allocator: Allocator, *, limit_bytes: int, is_expected: bool
) -> PlacedBlocks:
    """Put what lays their blocks around both graphs; see PlacedBlocks. Raises HookError, and nothing is changed."""
    forward, put_forward = generated(compiled.forward)
    backward, put_backward = generated(compiled.backward)

    def hooked(at: Callable[[int], None]) -> Calls:
        hooked_forward, behind = hook(forward, at, 0)
        hooked_backward, behind = hook(backward, at, behind)
        return Calls(hooked_forward, hooked_backward, behind)

    blocks = PlacedBlocks(allocator, Calls(forward, backward), hooked, limit_bytes=limit_bytes, is_expected=is_expected)
    put_forward(blocks.forward)
    put_backward(blocks.backward)
    return blocks
