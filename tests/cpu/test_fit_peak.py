"""Copies that make way: as few as a limit wants, and all of them where nothing less will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.buffer_spans import BufferSpans, LoweredBuffer
from fxhome.passes.fit_peak import _Moves, relieve
from fxhome.runtime import ops


@dataclass(eq=False)
class Node:
    """A scheduler node that makes one buffer of its own name."""

    name: str
    reads: tuple[str, ...] = ()
    op_overload: Any = None

    @property
    def node(self) -> Node:
        return self

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.reads]

    @property
    def read_writes(self) -> Any:
        return SimpleNamespace(reads=self.unmet_dependencies)

    def get_nodes(self) -> list[Node]:
        return [self]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(get_name=lambda: self.name)]


def graph(draw: Any) -> tuple[list[Node], BufferSpans]:
    """A chain of kernels; some bring something back for a later one, some send their result away when it was read."""
    count = draw(st.integers(3, 8))
    kernels = [Node("k0"), *(Node(f"k{i}", (f"k{i - 1}",)) for i in range(1, count))]
    nodes: list[Node] = list(kernels)
    size = {kernel.name: draw(st.integers(1, 20)) for kernel in kernels}
    for i in draw(st.sets(st.integers(1, count - 1), max_size=3)):
        reload = Node(f"in{i}", (), ops.swap_in)
        wait = Node(f"in_wait{i}", (reload.name,), ops.swap_in_wait)
        kernels[i].reads += (wait.name,)
        size[reload.name] = draw(st.integers(1, 30))
        first = draw(st.integers(0, nodes.index(kernels[i])))
        nodes.insert(first, reload)
        nodes.insert(nodes.index(kernels[i]), wait)
    for i in draw(st.sets(st.integers(0, count - 2), max_size=3)):
        out = Node(f"out{i}", (f"k{i}",), ops.swap_out)
        nodes.insert(nodes.index(kernels[i]) + 1, out)
        # Waited for at the end, or anywhere behind the copy.
        place = draw(st.integers(nodes.index(out) + 1, len(nodes)))
        nodes.insert(place, Node(f"out_wait{i}", (out.name, f"k{i}"), ops.swap_out_wait))
    maker = {node.name: node for node in nodes}
    alias = {wait.name: wait.reads[0] for wait in nodes if wait.op_overload is ops.swap_in_wait}
    buffers = []
    for name, size_bytes in size.items():
        names = {name, *(wait for wait, source in alias.items() if source == name)}
        readers = {node for node in nodes if names & set(node.reads)}
        buffers.append(LoweredBuffer(name, size_bytes, maker[name], readers, is_output=False))
    return nodes, BufferSpans(nodes, buffers, [], {})


def is_valid(order: Sequence[Node], nodes: Sequence[Node]) -> bool:
    place = {node.name: i for i, node in enumerate(order)}
    return len(order) == len(nodes) and all(place[name] < place[node.name] for node in order for name in node.reads)


@given(st.data())
def test_no_copy_holds_less_anywhere_than_out_of_the_way(data: st.DataObject) -> None:
    nodes, spans = graph(data.draw)
    assert is_valid(nodes, nodes)
    given_bytes = int(spans.curve(nodes)[0].max())
    order = _Moves(nodes).out_of_the_way(nodes)
    least_bytes = int(spans.curve(order)[0].max())
    assert is_valid(order, nodes)
    assert least_bytes <= given_bytes

    buffers = cast(Any, SimpleNamespace(spans=spans))
    assert relieve(nodes, buffers, given_bytes) == nodes
    for limit in {least_bytes, (least_bytes + given_bytes) // 2}:
        fitted = relieve(nodes, buffers, limit)
        assert is_valid(fitted, nodes)
        assert int(spans.curve(fitted)[0].max()) <= limit
    # With a limit that nothing meets, everything was tried.
    assert int(spans.curve(relieve(nodes, buffers, 0))[0].max()) == least_bytes
