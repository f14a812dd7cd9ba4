"""Which results a fusing compiler is expected not to write, and what its kernels read."""

from __future__ import annotations

from collections.abc import Callable

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


def test_too_many_reads_end_a_fusion() -> None:
    def build(graph: fx.Graph, x: list[fx.Node]) -> None:
        total = graph.call_function(aten.sin.default, (x[0],))
        for other in x[1:]:
            total = graph.call_function(aten.add.Tensor, (total, other))
        graph.call_function(aten.sum.default, (total,))

    few, many = graph_of(build, 4), graph_of(build, MAX_READS + 4)
    assert len(virtual_nodes(few, set())) == 4
    written = [node for node in many if is_pointwise(node) and node not in virtual_nodes(many, set())]
    assert written


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
