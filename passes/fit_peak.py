"""Bring the peak of scheduled nodes under a limit: copies make way, then fused kernels come apart.

peak at kernel k, over the limit:   a reload in flight there starts behind it
                                    a source that is done by then is waited for before it
                                    each fused kernel stands where its last loop was
                                    what was fused across it is unfused (unfuse.py)
"""

from collections.abc import Mapping
from typing import Any

from fxhome.passes import unfuse
from fxhome.passes.lowered_buffers import LoweredBuffers
from fxhome.passes.transfer_order import (
    RELOADS,
    place_transfers,
    readers_of,
    respect_dependencies,
    transfer_of,
    unpackers,
)
from fxhome.runtime import ops

MAX_SPLITS = 100
MAX_MOVES = 1000
"""Copies moved away from worst moments per graph, at most."""


def fit(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> tuple[list[Any], LoweredBuffers]:
    """Bring the peak under `limit_bytes`: copies make way, fused kernels wait for their last loop, then those that are
    fused across the worst moment come apart.
    """
    whole = nodes = _best_order(nodes, buffers, limit_bytes)
    for _ in range(MAX_SPLITS):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            break
        split = unfuse.come_apart(nodes, worst)
        if split is not None:
            nodes, buffers = _settled(split, buffers, limit_bytes)
            continue
        sizes = {buffer.name: buffer.size_bytes for buffer in buffers.buffers}
        for way in unfuse.ways(nodes, worst, sizes):
            order, counted = _settled(way.order(), buffers, limit_bytes)
            if _worst(order, counted)[0] < peak_bytes:
                nodes, buffers = order, counted
                break
            way.undo()
        else:
            break
    return (nodes if nodes is whole else _as_planned(nodes, buffers, limit_bytes)), buffers


def _as_planned(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """The same kernels with each copy where the plan has it, moved no further than the limit wants: on the way here all
    of them may have been moved.
    """
    if not any(transfer_of(node) is not None for node in nodes):
        return nodes
    order = relieve(place_transfers(nodes), buffers, limit_bytes)
    return order if _worst(order, buffers)[0] <= limit_bytes else nodes


def _best_order(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """The order as it is, or that by last loops where it is over the limit and needs more; copies out of the way."""
    given = relieve(nodes, buffers, limit_bytes)
    peak_bytes, _ = _worst(given, buffers)
    if peak_bytes <= limit_bytes:
        return given
    late = relieve(by_last_loop(nodes), buffers, limit_bytes)
    return late if _worst(late, buffers)[0] < peak_bytes else given


def by_last_loop(nodes: list[Any]) -> list[Any]:
    """The order in which each fused kernel stands where its last loop was lowered, not its first one.

    Inductor puts it where its first loop was, and all that the others need before it: of a gradient that is the sum of
    several branches, the gradients of all branches, and whatever else reads what they are made from waits.
    """
    nodes = respect_dependencies(sorted(nodes, key=lambda node: node.max_order), nodes, unpackers(nodes))
    return place_transfers(nodes) if any(transfer_of(node) is not None for node in nodes) else nodes


def _settled(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> tuple[list[Any], LoweredBuffers]:
    """An order with other kernels: dependencies first, then copies out of the way."""
    nodes = respect_dependencies(nodes, nodes, unpackers(nodes))
    counted = LoweredBuffers(nodes, buffers.workspace_by_name, buffers.held)
    return _best_order(nodes, counted, limit_bytes), counted


def _worst(nodes: list[Any], buffers: LoweredBuffers) -> tuple[int, int]:
    """(bytes at the worst moment, its index)."""
    curve, _ = buffers.spans.curve(nodes)
    worst = int(curve.argmax()) if len(curve) else 0
    return (int(curve[worst]) if len(curve) else 0), worst


def relieve(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """Move copies away from moments over `limit_bytes`: a reload starts later, a source is waited for earlier.

    Time is what this costs, never correctness: a reload still stands before its wait, a wait behind its copy and behind
    every reader of the source. As few are moved as the limit wants; all of them where no less will do.
    """
    if _worst(nodes, buffers)[0] <= limit_bytes:
        return nodes
    moves = _Moves(nodes)
    least = moves.out_of_the_way(nodes)
    if _worst(least, buffers)[0] > limit_bytes:
        return least
    for _ in range(MAX_MOVES):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            return nodes
        index = {node: i for i, node in enumerate(nodes)}
        moved = moves.reload_later(nodes, worst, index) or moves.release_earlier(nodes, worst, index)
        if moved is None:
            break
        nodes = moved
    return least


class _Moves:
    """What may be moved in one graph: which nodes a copy stands before and behind, in whatever order."""

    def __init__(self, nodes: list[Any]) -> None:
        self.follower = {source: node for node, source in unpackers(nodes).items()}
        self.followers = set(self.follower.values())
        readers = readers_of(nodes)
        maker = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
        self.waits: dict[Any, list[Any]] = {}
        """Of every reload, the nodes that need what it brings."""
        self.needed: dict[Any, list[Any]] = {}
        """Of every wait for a copy out, the nodes that it stands behind: what makes its source, and other readers."""
        for node in nodes:
            kind = transfer_of(node)
            if kind in RELOADS:
                named = self.follower.get(node, node)
                self.waits[node] = [r for buffer in named.get_outputs() for r in readers.get(buffer.get_name(), [])]
            elif kind is ops.swap_out_wait:
                makers = [maker[dep.name] for dep in node.unmet_dependencies if dep.name in maker]
                others = [r for dep in node.read_writes.reads for r in readers.get(dep.name, []) if r is not node]
                self.needed[node] = [*makers, *others]

    def out_of_the_way(self, nodes: list[Any]) -> list[Any]:
        """The order in which every reload starts just before what needs it, and every source is waited for as soon as
        it is done: in no other does a copy hold less at any moment.
        """
        reloads = {node for node, waits in self.waits.items() if waits}
        moved = reloads | {self.follower[node] for node in reloads if node in self.follower}
        moved |= {wait for wait, needed in self.needed.items() if needed and not moved.intersection(needed)}
        rest = [node for node in nodes if node not in moved]
        index = {node: i for i, node in enumerate(rest)}
        before: dict[int, list[Any]] = {}
        behind: dict[int, list[Any]] = {}
        for node in nodes:
            if node in reloads:
                block = [node, self.follower[node]] if node in self.follower else [node]
                before.setdefault(min(index[wait] for wait in self.waits[node]), []).extend(block)
            elif node in moved and node in self.needed:
                behind.setdefault(max(index[one] for one in self.needed[node]), []).append(node)
        return [one for i, node in enumerate(rest) for one in (*before.get(i, ()), node, *behind.get(i, ()))]

    def reload_later(self, nodes: list[Any], worst: int, index: Mapping[Any, int]) -> list[Any] | None:
        """Start behind the worst moment the reload that is needed last of those in flight there."""
        best: tuple[int, int, Any] | None = None
        for node, waits in self.waits.items():
            i, first = index[node], min((index[wait] for wait in waits), default=-1)
            # The node behind the worst one must still stand before the wait.
            if i <= worst < first - 1 and worst + 1 < len(nodes) and (best is None or (first, -i) > best[:2]):
                best = (first, -i, node)
        if best is None:
            return None
        behind = worst + 1
        while nodes[behind] in self.followers:
            behind += 1
        if behind >= best[0]:
            return None
        return self._move(nodes, best[2], nodes[behind])

    def release_earlier(self, nodes: list[Any], worst: int, index: Mapping[Any, int]) -> list[Any] | None:
        """Wait before the worst moment for the oldest copy whose source is otherwise done by then."""
        behind = [
            (index[wait], wait)
            for wait, needed in self.needed.items()
            if index[wait] > worst and all(index[node] < worst for node in needed)
        ]
        if not behind:
            return None
        _, wait = min(behind, key=lambda item: item[0])
        return self._move(nodes, wait, nodes[worst])

    def _move(self, nodes: list[Any], node: Any, before: Any) -> list[Any]:
        follower = self.follower.get(node)
        block = [node] if follower is None else [node, follower]
        rest = [other for other in nodes if other is not node and other is not follower]
        place = rest.index(before)
        return rest[:place] + block + rest[place:]
