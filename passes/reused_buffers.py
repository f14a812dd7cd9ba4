"""Let Inductor use a buffer again for a later one of its size, where that holds no more than the plan's peak.

    del a                                  a is small, or its heir is made soon; what is alive in between and a
    ...                                    together stay within the graph's own peak
    c = empty_strided(...)           ->    c = a

What the allocator is asked for costs the host some 5 us with its return, in every step; torch.compile's own graphs
spare half of that. A large buffer that lies unused for long is a hole that nothing knows of when blocks are laid, hence
NEAR_KERNELS; small ones come from a pool of their own.
"""

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from fxhome.passes.allocator import SMALL_BYTES

NEAR_KERNELS = 4
"""How many kernels behind its last reader a large buffer is still kept for its heir."""


class Room:
    """What every kernel of a lowered graph leaves below the worst one.

    curve: bytes alive while each of them runs. graph: Inductor's, which they belong to. names: the buffers that were
    counted. Others are not on the device (a copy on its way back from the host may still read what is dead there) or
    not of their own.
    """

    def __init__(self, curve: Sequence[int], graph: Any = None, names: Container[str] = ()) -> None:
        self._alive = list(curve)
        self._most = max(curve, default=0)
        self._graph = graph
        self._names = names

    def knows(self, graph: Any, *buffers: Any) -> bool:
        """Whether these were counted, and the kernels are still those that were: a scheduler may join or split some."""
        if graph is not self._graph or len(graph.scheduler.nodes) != len(self._alive):
            return False
        return all(buffer.get_name() in self._names for buffer in buffers)

    def keep(self, size_bytes: int, freed_behind: int, wanted_by: int) -> bool:
        """Keep a buffer alive between two kernels (their numbers), if there is room; False, and nothing is kept."""
        if size_bytes > SMALL_BYTES and wanted_by - freed_behind > NEAR_KERNELS:
            return False
        between = range(freed_behind + 1, wanted_by)
        if any(self._alive[kernel] + size_bytes > self._most for kernel in between):
            return False
        for kernel in between:
            self._alive[kernel] += size_bytes
        return True


@contextlib.contextmanager
def buffers_used_again(room_of_graph: Callable[[], Room | None]) -> Iterator[None]:
    """While a graph is lowered in here, with `allow_buffer_reuse`, buffers are kept where there is room and only there.

    room_of_graph: asked when code is written; None, and nothing is kept. Lowerings must not run at the same time in
    other threads (passes/torch_compat.py, compile_lock).
    """
    from torch._inductor.codegen.wrapper import AllocateLine
    from torch._inductor.virtualized import V

    original = AllocateLine.should_reuse_buffer

    def is_kept(self: Any, free_line: Any, size: int) -> bool:
        room = room_of_graph()
        if room is None or not room.knows(V.graph, free_line.node, self.node):
            return False
        return room.keep(int(size), free_line.scheduler_node_index, self.scheduler_node_index)

    AllocateLine.should_reuse_buffer = is_kept  # type: ignore[method-assign]
    try:
        yield
    finally:
        AllocateLine.should_reuse_buffer = original  # type: ignore[method-assign]
