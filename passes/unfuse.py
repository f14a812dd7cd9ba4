"""Take apart kernels that Inductor fused for time where memory is short.

    gelu(x) for a weight's gradient, gelu'(x) * g for the next   -> fused: both results and g are alive at once
    plan: gelu(x), its reader, then gelu'(x) * g                 -> apart: one result is gone before the other is made

    mean(x) for now, x - mean(x) for later                       -> fused: the second waits in memory
    plan: the second is made when it is read                     -> held back

    sum(g1) + sum(g2) + ..., each when it is there     -> fused: all of g1, g2, ... wait for the last one
    plan: sum(g1), then g2                             -> brought forward: one of them is alive at a time

A plan counts on its own order; such a fusion costs less time than it costs memory where memory is short.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxhome.passes.transfer_order import ARRIVALS, RELOADS, transfer_of, unpackers

MAX_CANDIDATES = 4
LIGHT_BYTES = 1 << 20
"""A kernel that makes no more than this may be brought forward for what needs it."""


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


@dataclass(frozen=True)
class Way:
    """A kernel in two parts: about how many bytes that leaves free at the worst moment, the order with both, and how to
    take it back where that order is not kept.
    """

    gain_bytes: int
    order: Callable[[], list[Any]]
    undo: Callable[[], None]


def ways(nodes: Sequence[Any], worst: int, size_bytes: Mapping[str, int]) -> list[Way]:
    """What may be tried at a worst moment, the most promising first. size_bytes: of every buffer."""
    kinds = (held_back(nodes, worst, size_bytes), brought_forward(nodes, worst, size_bytes))
    return _most_promising([way for kind in kinds for way in _most_promising(kind)[:MAX_CANDIDATES]])


def _most_promising(found: Sequence[Way]) -> list[Way]:
    return sorted(found, key=lambda way: -way.gain_bytes)


def held_back(nodes: Sequence[Any], worst: int, size_bytes: Mapping[str, int]) -> list[Way]:
    """Orders in which a kernel before `worst` leaves to a second kernel what is read only behind `worst`."""
    index = {node: i for i, node in enumerate(nodes)}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for dep in node.unmet_dependencies:
            readers.setdefault(dep.name, []).append(i)
    found = []
    for node in nodes[:worst]:
        if type(node).__name__ not in ("FusedSchedulerNode", "SchedulerNode"):
            continue
        late = _read_late(node, index[node], worst, readers)
        made = [buffer.get_name() for loop in late for buffer in loop.get_outputs()]
        outside = [name for name in made if any(i != index[node] for i in readers.get(name, [len(nodes)]))]
        gain = sum(size_bytes.get(name, 0) for name in outside)
        if gain:
            first = min((i for name in made for i in readers.get(name, []) if i > worst), default=len(nodes))
            order = functools.partial(_with_a_late_part, nodes, index[node], late, first)
            found.append(Way(gain, order, functools.partial(_make_whole, node)))
    return found


def _with_a_late_part(nodes: Sequence[Any], i: int, late: list[Any], first: int) -> list[Any]:
    """The order in which some loops of the i-th kernel stand before the node that was `first` to need them."""
    node = nodes[i]
    early = [loop for loop in node.get_nodes() if loop not in late]
    pieces = [_joined(node.scheduler, early)] if early else []
    back = _joined(node.scheduler, late) if early else node
    return [*nodes[:i], *pieces, *nodes[i + 1 : first], back, *nodes[first:]]


def brought_forward(nodes: Sequence[Any], worst: int, size_bytes: Mapping[str, int]) -> list[Way]:
    """Orders in which a kernel behind `worst` makes before it, in a kernel of its own, what it can: what it reads for
    that need not wait. The small results that it needs for that follow by their dependencies.
    """
    index = {node: i for i, node in enumerate(nodes)}
    made_at = {buffer.get_name(): index[node] for node in nodes for buffer in node.get_outputs()}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in _needs(node):
            readers.setdefault(name, []).append(i)
    light = _light(nodes, worst, made_at, size_bytes)
    found = []
    for node in nodes[worst + 1 :]:
        if type(node).__name__ != "FusedSchedulerNode":
            continue
        early = _made_early(node, worst, made_at, light)
        rest = [loop for loop in node.get_nodes() if loop not in early]
        if not early or not rest:
            continue
        needed = {name for loop in rest for name in _needs(loop)}
        made = [buffer for loop in early for buffer in loop.get_outputs()]
        # What one loop reads of another is not among what the kernel reads.
        read = {dep.name for loop in early for dep in loop.read_writes.reads if dep.name in readers} - needed
        freed = [name for name in read if all(i < worst or i == index[node] for i in readers[name])]
        waits = [b for b in made if b.get_name() in needed or len(readers.get(b.get_name(), [])) > 1]
        gain = sum(size_bytes.get(name, 0) for name in freed) - sum(_size_bytes(buffer) for buffer in waits)
        if gain > 0:
            order = functools.partial(_with_an_early_part, nodes, worst, index[node], (early, rest))
            found.append(Way(gain, order, functools.partial(_make_whole, node)))
    return found


def _with_an_early_part(nodes: Sequence[Any], worst: int, i: int, parts: tuple[list[Any], list[Any]]) -> list[Any]:
    """The order in which the first of two parts of the i-th kernel stands before the worst moment."""
    early, rest = (_joined(nodes[i].scheduler, loops) for loops in parts)
    return [*nodes[:worst], early, *nodes[worst:i], rest, *nodes[i + 1 :]]


def _light(nodes: Sequence[Any], worst: int, made_at: Mapping[str, int], size_bytes: Mapping[str, int]) -> set[str]:
    """Small results made behind `worst`, by kernels and reloads, that could as well be made before it."""
    unpacking = unpackers(list(nodes))
    found: set[str] = set()
    for node in nodes[worst:]:
        is_kernel = type(node).__name__ in ("FusedSchedulerNode", "SchedulerNode")
        if not (is_kernel or transfer_of(node) in (*RELOADS, *ARRIVALS) or node in unpacking):
            continue
        names = [buffer.get_name() for buffer in node.get_outputs()]
        if sum(size_bytes.get(name, 0) for name in names) <= LIGHT_BYTES and all(
            dep.name in found or made_at.get(dep.name, -1) < worst for dep in node.unmet_dependencies
        ):
            found.update(names)
    return found


def _made_early(node: Any, worst: int, made_at: Mapping[str, int], light: set[str]) -> list[Any]:
    """The loops of a kernel for which all is there before `worst`, or may be."""
    early: list[Any] = []
    names: set[str] = set()
    inside = {buffer.get_name() for loop in node.get_nodes() for buffer in loop.get_outputs()}
    for loop in sorted(node.get_nodes(), key=lambda loop: loop.min_order):
        if all(
            dep.name in names if dep.name in inside else dep.name in light or made_at.get(dep.name, -1) < worst
            for dep in loop.unmet_dependencies
        ):
            early.append(loop)
            names |= {buffer.get_name() for buffer in loop.get_outputs()}
    return early


def _needs(node: Any) -> set[str]:
    """The buffers that must be there before a node runs, and all others that it reads."""
    return {dep.name for dep in (*node.unmet_dependencies, *node.read_writes.reads)}


def _size_bytes(buffer: Any) -> int:
    """Of a result, written or not."""
    return math.prod(int(length) for length in buffer.node.get_size()) * int(buffer.node.get_dtype().itemsize)


def _read_late(node: Any, place: int, worst: int, readers: Mapping[str, Sequence[int]]) -> list[Any]:
    """The loops of a kernel whose results nobody needs before `worst`; outputs of the graph are needed at its end."""
    late: list[Any] = []
    needed_inside: set[str] = set()
    for loop in reversed(node.get_nodes()):
        names = [buffer.get_name() for buffer in loop.get_outputs()]
        outside = [i for name in names for i in readers.get(name, []) if i != place]
        if all(i > worst for i in outside) and not any(name in needed_inside for name in names):
            late.insert(0, loop)
        else:
            needed_inside |= {dep.name for dep in loop.unmet_dependencies}
    return late


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
    _make_known(piece, loops)
    return piece


def _make_whole(node: Any) -> None:
    """Take back that a kernel came in parts."""
    _make_known(node, node.get_nodes())


def _make_known(node: Any, loops: Sequence[Any]) -> None:
    """Have the scheduler find a node under the names of its loops."""
    node.scheduler.name_to_fused_node.update({loop.get_name(): node for loop in loops})
