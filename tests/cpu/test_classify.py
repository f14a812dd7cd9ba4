"""Sides and refusals: what is forward, what is backward, and what must not run twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.classify import checkpoint_policy, forward_required, is_effectful, recompute_refusal, split_sides
from fxhome.passes.capture import joint_outputs
from tests.graph_tools import chain, chain_inputs, normalized


def node_named(module: Any, text: str) -> Any:
    return next(node for node in module.graph.nodes if node.op == "call_function" and text in str(node.target))


def test_every_node_has_one_side_and_readers_of_the_backward_are_backward() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    sides = split_sides(module.graph, outputs)
    assert set(sides) == set(module.graph.nodes)
    assert {"input", "tangent", "forward", "backward", "output"} == set(sides.values())
    for node in module.graph.nodes:
        sources = {sides[source] for source in node.all_input_nodes}
        if sides[node] == "forward":
            assert not sources & {"backward", "tangent"}
    assert all(sides[n] == "forward" for n in joint_outputs(module.graph)[:outputs] if n is not None)


def test_required_by_the_forward_is_what_outputs_and_effects_need() -> None:
    counter = torch.zeros(32)

    def step(x: torch.Tensor, weight: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        counter.add_(y.detach().sum(0))
        return y.sin().sum()

    module, outputs = normalized(step, *chain_inputs(), counter)
    required = forward_required(module.graph, outputs)
    copies = [node for node in module.graph.nodes if "copy_" in str(node.target)]
    assert copies
    assert set(copies) <= required
    assert node_named(module, "tanh") in required
    assert not any("cos" in str(node.target) for node in required)


def test_a_forward_output_that_reads_the_backward_is_refused() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    tangent = next(node for node in module.graph.nodes if "tangents" in str(node.target))
    product = node_named(module, "aten.mm")
    product.args = (product.args[0], tangent)
    with pytest.raises(UnsupportedGraphError, match="needed by the forward but reads the backward"):
        split_sides(module.graph, outputs)


def test_random_operators_run_once_and_repeatable_ones_may_run_again() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x @ weight, 0.5)
        return (y * torch.rand_like(y)).sin().sum()

    module, _ = normalized(step, *chain_inputs())
    for text in ("dropout", "rand_like"):
        assert recompute_refusal(node_named(module, text)) == "random, and its state is not kept"
    for text in ("aten.mm", "aten.sin"):
        assert recompute_refusal(node_named(module, text)) is None


@pytest.mark.parametrize(("dropout", "refused"), [(0.0, False), (0.5, True)])
def test_attention_is_random_only_with_dropout(dropout: float, refused: bool) -> None:
    def step(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum()

    module, _ = normalized(step, torch.randn(1, 2, 16, 8, requires_grad=True))
    refusals = [
        recompute_refusal(node)
        for node in module.graph.nodes
        if node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"
    ]
    assert any(refusal is not None for refusal in refusals) == refused


def test_writes_and_assertions_are_effects() -> None:
    counter = torch.zeros(())

    def step(x: torch.Tensor, weight: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return (x @ weight).sum()

    module, _ = normalized(step, *chain_inputs(), counter)
    write = node_named(module, "copy_")
    assert is_effectful(write)
    assert "effect" in (recompute_refusal(write) or "")
    assert not is_effectful(node_named(module, "aten.mm"))


def test_a_users_own_operator_runs_once() -> None:
    library = torch.library.Library("fxhome_test_classify", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.fxhome_test_classify.twice.default, (x,))
    assert "user's own operator library" in (recompute_refusal(node) or "")
    collective = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    assert recompute_refusal(collective) == "a collective runs once"
    assert "not a plain operator" in (recompute_refusal(graph.call_function(torch.tanh, (x,))) or "")


def test_the_users_checkpoint_tag_is_read() -> None:
    node = torch.fx.Graph().placeholder("x")
    assert checkpoint_policy(node) is None
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert checkpoint_policy(node) == CheckpointPolicy.MUST_SAVE
