"""Constants are made where they are read: the backward takes none of them from the forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxhome.passes.classify import split_sides
from fxhome.passes.constants import is_constant, separate_constants
from fxhome.passes.facts import extract_facts
from tests.graph_tools import chain_inputs, joint_graph, normalized


def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a product with a constant reads that constant."""
    return torch.tanh((x @ weight) * torch.full((), 2.0)).sum()


def crossing(module: Any, outputs: int) -> list[str]:
    """Constants that one side makes and the other reads."""
    sides = split_sides(module.graph, outputs)
    return [
        node.name
        for node in module.graph.nodes
        if is_constant(node) and any(sides[user] not in (sides[node], "output") for user in node.users)
    ]


def test_a_constant_that_both_sides_read_is_made_on_both() -> None:
    module, outputs = normalized(scaled, *chain_inputs())
    assert crossing(module, outputs)
    names = {node.name for node in module.graph.nodes}
    separate_constants(module, outputs)
    module.graph.lint()
    assert not crossing(module, outputs)
    added = [node for node in module.graph.nodes if node.name not in names]
    assert added
    assert all(node.meta["partitioner_tag"] == "is_backward" for node in added)
    assert all(is_constant(node) and node.meta["val"] is not None for node in added)


def test_the_constant_of_the_backward_has_a_storage_of_its_own() -> None:
    """Else it passes for a view of the forward's, and its bytes are not counted while it lives in the backward."""
    module, outputs = normalized(scaled, *chain_inputs())
    before = {node.name for node in module.graph.nodes}
    separate_constants(module, outputs)
    facts = extract_facts(module, outputs)
    added = [node.name for node in module.graph.nodes if node.name not in before]
    assert added
    assert set(added) <= {storage.owner for storage in facts.storages}


def test_a_constant_that_only_the_backward_reads_moves_there_without_a_copy() -> None:
    module, outputs = joint_graph(lambda x, w: torch.where((x @ w) > 0, x @ w, -x @ w).sum(), *chain_inputs())
    for node in module.graph.nodes:
        if is_constant(node):
            node.meta.pop("partitioner_tag", None)
    before = len(module.graph.nodes)
    assert crossing(module, outputs)
    separate_constants(module, outputs)
    assert len(module.graph.nodes) == before
    assert not crossing(module, outputs)


def test_results_are_what_they_were() -> None:
    module, outputs = normalized(scaled, *chain_inputs())
    separated = separate_constants(copy.deepcopy(module), outputs)
    assert len(separated.graph.nodes) > len(module.graph.nodes)
    arguments = [torch.randn(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
    expected, got = (torch.fx.Interpreter(one).run(*arguments) for one in (module, separated))
    leaves = list(zip(tree_leaves(expected), tree_leaves(got), strict=True))
    assert any(isinstance(a, torch.Tensor) for a, _ in leaves)
    assert all(a is b is None or torch.equal(a, b) for a, b in leaves)


def test_nothing_changes_where_no_constant_crosses() -> None:
    module, outputs = normalized(lambda x, w: torch.tanh(x @ w).sum(), *chain_inputs())
    separate_constants(module, outputs)
    text = str(module.graph)
    separate_constants(module, outputs)
    assert str(module.graph) == text


def test_random_numbers_are_no_constants() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.rand.default, ([4],))
    node.meta["val"] = torch.empty(4)
    assert not is_constant(node)
