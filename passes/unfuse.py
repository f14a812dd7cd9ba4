"""Take apart a kernel that Inductor fused from loops that have nothing but an input in common.

    gelu(x) for a weight's gradient, gelu'(x) * g for the next   -> fused: both results and g are alive at once
    plan: gelu(x), its reader, then gelu'(x) * g                 -> apart: one result is gone before the other is made

A plan counts on its own order; such a fusion costs less time than it costs memory where memory is short.
"""

from collections.abc import Sequence
from typing import Any


def come_apart(nodes: Sequence[Any], worst: int) -> list[Any] | None:
    """The order with the kernel at `worst` in parts, each where the plan has it; None where it is in one piece.

    The parts and all that stands between them and their last reader follow the order of the graph again; the caller
    sees to dependencies.
    """
    parts = independent_parts(nodes[worst])
    if len(parts) < 2:
        return None
    scheduler = nodes[worst].scheduler
    pieces = [_joined(scheduler, part) for part in parts]
    made = {buffer.get_name() for piece in pieces for buffer in piece.get_outputs()}
    readers = [i for i, node in enumerate(nodes) if any(dep.name in made for dep in node.unmet_dependencies)]
    last = max(readers, default=worst)
    region = sorted([*pieces, *nodes[worst + 1 : last + 1]], key=lambda node: node.max_order)
    return [*nodes[:worst], *region, *nodes[last + 1 :]]


def independent_parts(node: Any) -> list[list[Any]]:
    """Groups of a fused kernel's loops between which nothing flows, in the graph's order; one for anything else."""
    if type(node).__name__ != "FusedSchedulerNode":
        return [[node]]
    loops = sorted(node.get_nodes(), key=lambda loop: loop.min_order)
    group = list(range(len(loops)))
    made = {buffer.get_name(): i for i, loop in enumerate(loops) for buffer in loop.get_outputs()}
    for i, loop in enumerate(loops):
        for dep in (*loop.read_writes.reads, *loop.unmet_dependencies):
            if dep.name in made and group[made[dep.name]] != group[i]:
                old, new = group[i], group[made[dep.name]]
                group = [new if g == old else g for g in group]
    return [[loop for loop, g in zip(loops, group, strict=True) if g == label] for label in dict.fromkeys(group)]


def _joined(scheduler: Any, loops: list[Any]) -> Any:
    """One scheduler node for some loops, known to the scheduler under their names."""
    from torch._inductor.scheduler import FusedSchedulerNode

    piece = loops[0] if len(loops) == 1 else FusedSchedulerNode(scheduler, loops)
    scheduler.name_to_fused_node.update({loop.get_name(): piece for loop in loops})
    return piece
