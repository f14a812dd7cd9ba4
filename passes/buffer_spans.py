"""When each buffer of a lowered graph begins and ends under an order of its kernels, as arrays.

Thousands of orders of one graph are compared where its copies make way for one another (passes/fit_peak.py): who makes
and who reads a buffer is laid out flat once, and an order is no more than a place for each kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxhome.passes.in_place import Takeover

Places = NDArray[np.int64]


@dataclass(eq=False)
class LoweredBuffer:
    """One allocation. `maker` is None for an input; `parts` write into it, perhaps before it is complete; `readers` are
    the nodes that need it; outputs stay.
    """

    name: str
    size_bytes: int
    maker: Any
    readers: set[Any]
    is_output: bool
    parts: set[Any] = field(default_factory=set)


class BufferSpans:
    """Spans of all buffers, for any order of the same kernels."""

    def __init__(
        self,
        nodes: Sequence[Any],
        buffers: Sequence[LoweredBuffer],
        takeovers: Sequence[Takeover],
        workspace: Mapping[Any, int],
    ) -> None:
        self._number = {node: i for i, node in enumerate(nodes)}
        number = {buffer.name: i for i, buffer in enumerate(buffers)}
        self._size = np.array([buffer.size_bytes for buffer in buffers], np.int64)
        self._is_input = np.array([buffer.maker is None for buffer in buffers], bool)
        self._is_output = np.array([buffer.is_output for buffer in buffers], bool)
        self._is_read = np.array([bool(buffer.readers) for buffer in buffers], bool)
        self._makers = self._flat([] if b.maker is None else [b.maker, *b.parts] for b in buffers)
        self._readers = self._flat(buffer.readers for buffer in buffers)
        self._workspace = np.array([workspace.get(node, 0) for node in nodes], np.int64)
        self._takeovers = list(takeovers)
        operands = [number[takeover.operand] for takeover in takeovers]
        self._operands = np.array(operands, np.int64)
        self._kernels = np.array([self._number[takeover.kernel] for takeover in takeovers], np.int64)
        others = [buffers[i].readers - {takeover.kernel} for i, takeover in zip(operands, takeovers, strict=True)]
        self._other_readers = self._flat(others)

    def _flat(self, groups: Iterable[Iterable[Any]]) -> tuple[Places, Places]:
        """(numbers of all nodes, group by group; where each group begins). None is -1: it stands before all."""
        numbers: list[int] = []
        begins: list[int] = []
        for group in groups:
            begins.append(len(numbers))
            numbers += [self._number[node] for node in group] or [-1]
        return np.array(numbers, np.int64), np.array(begins, np.int64)

    def of(self, order: Sequence[Any]) -> tuple[Places, Places]:
        """(first step, last step) of every buffer, as `LoweredBuffers.lives` says."""
        return self._of(self._numbers(order))

    def curve(self, order: Sequence[Any]) -> tuple[Places, int]:
        """Bytes alive while each node of the order runs, its own workspace included; and the bytes alive at the end."""
        numbers = self._numbers(order)
        start, stop = self._of(numbers)
        total = len(order)
        change = np.zeros(total + 2, np.int64)
        np.add.at(change, start, self._size)
        np.subtract.at(change, stop + 1, self._size)
        alive = np.cumsum(change)
        return alive[:total] + self._workspace[numbers], int(alive[total])

    def taken(self, order: Sequence[Any]) -> list[Takeover]:
        """What is written over its operand, which has no other reader left when the kernel runs; in order."""
        place = self._places(self._numbers(order))
        found = np.flatnonzero(self._is_taken(place))
        return [self._takeovers[i] for i in sorted(found.tolist(), key=lambda i: int(place[self._kernels[i]]))]

    def _numbers(self, order: Sequence[Any]) -> Places:
        return np.array([self._number[node] for node in order], np.int64)

    def _places(self, numbers: Places) -> Places:
        """The step of every node, by its number; last, that of none."""
        place = np.empty(len(self._number) + 1, np.int64)
        place[-1] = -1
        place[numbers] = np.arange(len(numbers))
        return place

    def _is_taken(self, place: Places) -> NDArray[np.bool_]:
        if not self._takeovers:
            return np.zeros(0, bool)
        others = np.maximum.reduceat(place[self._other_readers[0]], self._other_readers[1])
        return np.asarray(others < place[self._kernels])

    def _of(self, numbers: Places) -> tuple[Places, Places]:
        place = self._places(numbers)
        if not len(self._size):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        start = np.where(self._is_input, 0, np.minimum.reduceat(place[self._makers[0]], self._makers[1]))
        last = np.where(self._is_read, np.maximum.reduceat(place[self._readers[0]], self._readers[1]), start)
        last[np.unique(self._operands[self._is_taken(place)])] -= 1
        return start, np.where(self._is_output, len(numbers), np.maximum(start, last))
