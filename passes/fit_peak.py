"""Bring the peak of scheduled nodes under a limit: copies make way, then fused kernels come apart.

peak at kernel k, over the limit:   a reload in flight there starts behind it
                                    a source that is done by then is waited for before it
                                    each fused kernel stands where its last loop was
                                    what was fused across it is unfused (unfuse.py)
"""

import itertools
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
    nodes = _best_order(nodes, buffers, limit_bytes)
    for _ in range(MAX_SPLITS):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            break
        split = unfuse.come_apart(nodes, worst)
        if split is not None:
            nodes, buffers = _settled(split, buffers, limit_bytes)
            continue
        sizes = {buffer.name: buffer.size_bytes for buffer in buffers.buffers}
        ways = (unfuse.held_back(nodes, worst, sizes), unfuse.brought_forward(nodes, worst, sizes))
        for tried in itertools.chain(*ways):
            order, counted = _settled(tried, buffers, limit_bytes)
            if _worst(order, counted)[0] < peak_bytes:
                nodes, buffers = order, counted
                break
        else:
            break
    return nodes, buffers


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
    curve, _ = buffers.curve(nodes)
    worst = max(range(len(curve)), key=curve.__getitem__, default=0)
    return (curve[worst] if curve else 0), worst


def relieve(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """Move copies away from moments over `limit_bytes`: a reload starts later, a source is waited for earlier.

    Time is what this costs, never correctness: a reload still stands before its wait, a wait behind its copy and behind
    every reader of the source. Stops when the limit holds or no copy stands in the way.
    """
    moves = _Moves(nodes)
    for _ in range(MAX_MOVES):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            break
        moved = moves.reload_later(nodes, worst) or moves.release_earlier(nodes, worst)
        if moved is None:
            break
        nodes = moved
    return nodes


class _Moves:
    """What may be moved in one graph: which nodes a copy stands before and behind, in whatever order."""

    def __init__(self, nodes: list[Any]) -> None:
        self.follower = {source: node for node, source in unpackers(nodes).items()}
        self.followers = set(self.follower.values())
        self.readers = readers_of(nodes)
        self.maker = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
        self.kind = {node: operator for node in nodes if (operator := transfer_of(node)) is not None}

    def reload_later(self, nodes: list[Any], worst: int) -> list[Any] | None:
        """Start behind the worst moment the reload that is needed last of those in flight there."""
        index = {node: i for i, node in enumerate(nodes)}
        best: tuple[int, Any] | None = None
        for i, node in enumerate(nodes[: worst + 1]):
            if self.kind.get(node) not in RELOADS:
                continue
            named = self.follower.get(node, node)
            waits = [index[r] for buffer in named.get_outputs() for r in self.readers.get(buffer.get_name(), [])]
            first = min(waits, default=-1)
            # The node behind the worst one must still stand before the wait.
            if i <= worst < first - 1 and worst + 1 < len(nodes) and (best is None or first > best[0]):
                best = (first, node)
        if best is None:
            return None
        behind = worst + 1
        while nodes[behind] in self.followers:
            behind += 1
        if behind >= best[0]:
            return None
        return self._move(nodes, best[1], nodes[behind])

    def release_earlier(self, nodes: list[Any], worst: int) -> list[Any] | None:
        """Wait before the worst moment for the oldest copy whose source is otherwise done by then."""
        index = {node: i for i, node in enumerate(nodes)}
        for wait in nodes[worst + 1 :]:
            if self.kind.get(wait) is not ops.swap_out_wait:
                continue
            needed = [self.maker[dep.name] for dep in wait.unmet_dependencies if dep.name in self.maker]
            others = [r for dep in wait.read_writes.reads for r in self.readers.get(dep.name, []) if r is not wait]
            if all(index[node] < worst for node in (*needed, *others)):
                return self._move(nodes, wait, nodes[worst])
        return None

    def _move(self, nodes: list[Any], node: Any, before: Any) -> list[Any]:
        follower = self.follower.get(node)
        block = [node] if follower is None else [node, follower]
        rest = [other for other in nodes if other is not node and other is not follower]
        place = rest.index(before)
        return rest[:place] + block + rest[place:]
