"""Spans of buffers as arrays, against the rule written out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.buffer_spans import BufferSpans, LoweredBuffer
from fxhome.passes.in_place import Takeover

Graph = tuple[list[int], list[LoweredBuffer], list[Takeover], dict[int, int]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes, buffers, who may write over what, and workspace."""
    nodes = list(range(draw(st.integers(1, 8))))
    node = st.sampled_from(nodes)
    buffers = [
        LoweredBuffer(
            f"buf{i}",
            draw(st.integers(0, 100)),
            draw(st.none() | node),
            draw(st.sets(node, max_size=3)),
            draw(st.booleans()),
            draw(st.sets(node, max_size=2)),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    # Only what is read and stays inside can be written over.
    operands = [buffer for buffer in buffers if buffer.readers and not buffer.is_output]
    takeovers = [
        Takeover(draw(st.sampled_from(sorted(buffer.readers))), "result", buffer.name)
        for buffer in operands
        if draw(st.booleans())
    ]
    return nodes, buffers, takeovers, draw(st.dictionaries(node, st.integers(1, 50)))


def written_out(graph: Graph, order: list[int]) -> tuple[list[tuple[int, int]], list[int], int]:
    """Spans, bytes while each node runs, bytes at the end: one buffer at a time."""
    _, buffers, takeovers, workspace = graph
    step = {node: i for i, node in enumerate(order)}
    spans = []
    for buffer in buffers:
        start = 0 if buffer.maker is None else min(step[node] for node in (buffer.maker, *buffer.parts))
        last = max((step[reader] for reader in buffer.readers), default=start)
        if any(
            t.operand == buffer.name and all(r == t.kernel or step[r] < step[t.kernel] for r in buffer.readers)
            for t in takeovers
        ):
            last -= 1
        spans.append((start, len(order) if buffer.is_output else max(start, last)))

    def alive(at: int) -> int:
        sizes = zip(spans, buffers, strict=True)
        return sum(buffer.size_bytes for (start, stop), buffer in sizes if start <= at <= stop)

    return spans, [alive(i) + workspace.get(node, 0) for i, node in enumerate(order)], alive(len(order))


@given(graphs(), st.randoms(use_true_random=False))
def test_spans_are_those_of_the_rule_in_every_order(graph: Graph, random: Any) -> None:
    nodes, buffers, takeovers, workspace = graph
    spans = BufferSpans(nodes, buffers, takeovers, workspace)
    for _ in range(3):
        order = random.sample(nodes, len(nodes))
        expected, curve, end_bytes = written_out(graph, order)
        start, stop = spans.of(order)
        assert list(zip(start.tolist(), stop.tolist(), strict=True)) == expected
        assert spans.curve(order)[0].tolist() == curve
        assert spans.curve(order)[1] == end_bytes
