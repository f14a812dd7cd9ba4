"""What the loops of one kernel read once: siblings of the backward, never across a whole pass, never in the forward."""

from __future__ import annotations

import torch
from torch import fx

from fxhome.passes.fusion import memory_sources
from fxhome.passes.kernel_reads import MAX_LOOPS_BETWEEN, unshared_reads
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD

aten = torch.ops.aten
SHAPE = (16, 16)


class Loops:
    """A graph of loops over one shape; every one of them is written."""

    def __init__(self, inputs: int = 2) -> None:
        self.graph = fx.Graph()
        self.x = [self._known(self.graph.placeholder(f"x{i}")) for i in range(inputs)]

    def _known(self, node: fx.Node, shape: tuple[int, ...] = SHAPE) -> fx.Node:
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def add(self, target: object, *args: object, shape: tuple[int, ...] = SHAPE) -> fx.Node:
        return self._known(self.graph.call_function(target, args), shape)  # type: ignore[arg-type]

    def reads(self, phase: int = BACKWARD, aliases: tuple[fx.Node, ...] = ()) -> dict[fx.Node, frozenset[fx.Node]]:
        nodes = list(self.graph.nodes)
        loops = {n for n in nodes if n.op == "call_function" and n.target is not aten.mm.default} - set(aliases)
        return unshared_reads(nodes, [phase] * len(nodes), memory_sources(nodes, set(aliases)), loops, aliases)


def test_two_sums_of_one_gradient_read_it_once() -> None:
    g = Loops()
    dy, x = g.x
    product = g.add(aten.mul.Tensor, dy, x)
    total = g.add(aten.sum.dim_IntList, dy, [0], shape=(16,))
    other = g.add(aten.sum.dim_IntList, product, [0], shape=(16,))
    reads = g.reads()
    assert reads[product] == {dy, x}
    # The product has dy at hand, and the second sum has the product.
    assert reads[total] == reads[other] == frozenset()
    assert g.reads(FORWARD)[total] == {dy}


def test_what_needs_a_whole_pass_first_reads_again() -> None:
    g = Loops()
    dy, _ = g.x
    total = g.add(aten.sum.dim_IntList, dy, [0], shape=(16,))
    centred = g.add(aten.sub.Tensor, dy, total)
    later = g.add(aten.cos.default, centred)
    reads = g.reads()
    assert reads[centred] == {dy, total}
    assert reads[later] == frozenset()


def test_a_library_call_between_ends_the_kernel_and_a_view_does_not() -> None:
    g = Loops()
    dy, x = g.x
    first = g.add(aten.sin.default, dy)
    product = g.add(aten.mm.default, first, x)
    second = g.add(aten.mul.Tensor, product, dy)
    view = g.add(aten.view.default, first, [16, 16])
    third = g.add(aten.mul.Tensor, view, dy)
    reads = g.reads(aliases=(view,))
    assert reads[second] == {product, dy}
    assert reads[third] == frozenset()


def test_other_iterations_and_far_loops_share_nothing() -> None:
    g = Loops()
    dy, x = g.x
    g.add(aten.sin.default, dy)
    small = g.add(aten.slice.Tensor, dy, 0, 0, 8, shape=(8, 16))
    for _ in range(MAX_LOOPS_BETWEEN):
        g.add(aten.cos.default, x)
    far = g.add(aten.tan.default, dy)
    reads = g.reads()
    assert reads[small] == {dy}
    assert reads[far] == {dy}
