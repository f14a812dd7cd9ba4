"""Which results a fusing compiler is expected not to write, and what its kernels read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxhome.passes.facts import extract_facts
from fxhome.passes.fusion import (
    MAX_READS,
    is_generated_loop,
    is_pointwise,
    is_reduction,
    memory_sources,
    operator_name,
    virtual_nodes,
)
from fxhome.passes.simulate_kernels import ALIAS, VIRTUAL
from tests.graph_tools import normalized


def graph_of(build: Callable[[fx.Graph, list[fx.Node]], None], inputs: int = 2) -> list[fx.Node]:
    graph = fx.Graph()
    build(graph, [graph.placeholder(f"x{i}") for i in range(inputs)])
    return list(graph.nodes)


aten = torch.ops.aten


def test_a_pointwise_chain_into_a_reduction_is_never_written() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        y = graph.call_function(aten.sin.default, (x[0],))
        z = graph.call_function(aten.mul.Tensor, (y, x[1]))
        graph.call_function(aten.sum.default, (z,))

    nodes = graph_of(build)
    names = {operator_name(node) for node in virtual_nodes(nodes, set())}
    assert names == {"aten::sin", "aten::mul"}


def test_the_operand_of_a_product_is_written() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        y = graph.call_function(aten.sin.default, (x[0],))
        graph.call_function(aten.mm.default, (y, x[1]))
        z = graph.call_function(aten.cos.default, (x[0],))
        view = graph.call_function(aten.t.default, (z,))
        graph.call_function(aten.mm.default, (view, x[1]))

    nodes = graph_of(build)
    views = {node for node in nodes if node.target is aten.t.default}
    assert virtual_nodes(nodes, views) == set()


def test_a_result_that_nobody_reads_is_written() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        graph.call_function(aten.sin.default, (x[0],))

    nodes = graph_of(build)
    assert virtual_nodes(nodes, set()) == set()


def summed(count: int, shape: tuple[int, ...], *readers: Callable[..., object]) -> list[fx.Node]:
    """A sum of `count` tensors and what reads it, with values as a traced graph has them."""

    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        total = graph.call_function(aten.sin.default, (x[0],))
        for other in x[1:]:
            total = graph.call_function(aten.add.Tensor, (total, other))
        for reader in readers:
            graph.call_function(reader, (total, *([torch.empty(2, *shape)] if reader is aten.mul.Tensor else ())))

    nodes = graph_of(build, count)
    for node in nodes:
        node.meta["val"] = torch.empty(shape, device="meta")
        if node.target is aten.mul.Tensor:
            node.meta["val"] = torch.empty(2, *shape, device="meta")
    return nodes


def test_too_many_reads_end_a_fusion_with_several_readers_or_another_loop() -> None:
    def written(nodes: list[fx.Node]) -> int:
        virtual = virtual_nodes(nodes, set())
        return sum(is_pointwise(node) and node not in virtual and bool(node.users) for node in nodes)

    many = MAX_READS + 4
    assert written(summed(4, (8, 8), aten.sum.default, aten.amax.default)) == 0
    assert written(summed(many, (8, 8), aten.sum.default, aten.amax.default)) == 1
    # One reader over the same elements is in the same kernel, one over more elements would repeat the work.
    assert written(summed(many, (8, 8), aten.sum.default)) == 0
    assert written(summed(many, (8, 8), aten.mul.Tensor)) == 1


def joined(count: int, parts: int, *, as_product: bool = False) -> list[fx.Node]:
    """A sum of `count` tensors, converted by its only reader, which is read in `parts` parts or as a whole."""

    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        total = graph.call_function(aten.sin.default, (x[0],))
        for other in x[1:]:
            total = graph.call_function(aten.add.Tensor, (total, other))
        converted = graph.call_function(torch.ops.prims.convert_element_type.default, (total, torch.bfloat16))
        for part in range(parts):
            piece = graph.call_function(aten.slice.Tensor, (converted, 0, part * 8 // parts, (part + 1) * 8 // parts))
            graph.call_function(aten.mm.default if as_product else aten.relu.default, (piece,))

    nodes = graph_of(build, count)
    for node in nodes:
        rows = 8 // parts if node.target in (aten.slice.Tensor, aten.relu.default, aten.mm.default) else 8
        node.meta["val"] = torch.empty(rows, 8, device="meta")
    return nodes


@pytest.mark.parametrize(
    ("count", "parts", "as_product", "written"),
    [
        (MAX_READS + 4, 2, False, {"aten::add"}),  # each part's kernel converts what is there
        (MAX_READS + 4, 1, False, set()),  # one kernel
        (MAX_READS + 4, 2, True, {"prims::convert_element_type"}),  # converted in the kernel that sums up
        (4, 2, False, set()),  # summed up again in each part's kernel
    ],
)
def test_what_is_made_of_much_and_read_in_parts_is_written(
    count: int, parts: int, as_product: bool, written: set[str]
) -> None:
    nodes = joined(count, parts, as_product=as_product)
    views = {node for node in nodes if node.target is aten.slice.Tensor}
    virtual = virtual_nodes(nodes, views)
    found = [node for node in nodes if is_pointwise(node) and node not in virtual and node.users]
    assert {operator_name(node) for node in found} == written
    assert len(found) == len(written)


def test_a_window_is_inlined_only_where_that_ends_in_one_kernel() -> None:
    def pooled(readers: int) -> list[fx.Node]:
        def build(graph: fx.Graph, x: list[fx.Node]) -> None:
            extra = ([3, 3], [2, 2], [0, 0], [1, 1], False, x[2])
            grad = graph.call_function(aten.max_pool2d_with_indices_backward.default, (x[0], x[1], *extra))
            mask = graph.call_function(aten.threshold_backward.default, (grad, x[1], 0))
            for _ in range(readers):
                graph.call_function(aten.sum.dim_IntList, (mask, [0]))

        nodes = graph_of(build, 3)
        for node in nodes:
            node.meta["val"] = torch.empty(8, 8, device="meta")
        return nodes

    def names(nodes: list[fx.Node]) -> set[str]:
        return {operator_name(node) for node in virtual_nodes(nodes, set())}

    window = "aten::max_pool2d_with_indices_backward"
    assert names(pooled(1)) == {window, "aten::threshold_backward"}
    assert names(pooled(2)) == {"aten::threshold_backward"}
    # What is masked is written: the kernel that writes it has the window inside.
    assert names(pooled(0)) == {window}


def test_kinds_of_operators() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        graph.call_function(aten.add.Tensor, tuple(x))
        graph.call_function(aten.mm.default, tuple(x))

    nodes = graph_of(build)
    add, product = nodes[-2:]
    assert is_pointwise(add)
    assert is_generated_loop(add)
    assert not is_reduction(add)
    assert not is_generated_loop(product)
    assert operator_name(nodes[0]) == ""


def test_what_a_kernel_reads_through_views_and_virtual_results() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        y = graph.call_function(aten.sin.default, (x[0],))
        view = graph.call_function(aten.view.default, (y, [-1]))
        graph.call_function(aten.add.Tensor, (view, x[1]))

    nodes = graph_of(build)
    sources = memory_sources(nodes, set(nodes[2:4]))
    assert sources[nodes[-1]] == {nodes[0], nodes[1]}
    assert memory_sources(nodes, {nodes[3]})[nodes[-1]] == {nodes[2], nodes[1]}


def test_facts_under_fusion_keep_outputs_written() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ weight).sin()
        return y, (y.cos() * 2).sum()

    module, outputs = normalized(step, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    plain, fused = extract_facts(module, outputs), extract_facts(module, outputs, fusing=True)
    index = fused.index()
    assert VIRTUAL not in plain.node_kind
    assert fused.node_kind[index["sin"]] != VIRTUAL
    assert fused.node_kind[index["cos"]] == VIRTUAL
    assert [k == ALIAS for k in plain.node_kind] == [k == ALIAS for k in fused.node_kind]
