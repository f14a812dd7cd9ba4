"""Normalizing a joint graph: no symbols, one getitem per result, clones of overwritten inputs, values everywhere."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.capture import (
    is_backward_seed,
    is_tangent,
    joint_outputs,
    mutated_input,
    normalize,
)
from tests.graph_tools import chain, chain_inputs, joint_graph, normalized, targets
from tests.hazard_tools import compile_step


def test_normalizing_twice_changes_nothing_more() -> None:
    module, _ = normalized(chain, *chain_inputs())
    once = str(module.graph)
    assert str(normalize(module).graph) == once


def test_a_plain_graph_is_left_as_it_is() -> None:
    module, _ = joint_graph(chain, *chain_inputs())
    before = str(module.graph)
    assert str(normalize(module).graph) == before


def test_symbolic_sizes_become_numbers() -> None:
    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight).view(-1) * x.shape[0]
        return y.reshape(x.shape[0], -1).sin().sum() / x.numel()

    raw, _ = joint_graph(scaled, *chain_inputs(), dynamic=True)
    symbolic = [node for node in raw.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert symbolic  # otherwise this test shows nothing
    module = normalize(raw)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        assert not isinstance(node.meta["val"], torch.SymInt | torch.SymFloat)
        numbers = [
            leaf for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node)
        ]
        assert not [leaf for leaf in numbers if isinstance(leaf, torch.SymInt | torch.SymFloat)]


class Selected(nn.Module):
    """A result with as many rows as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y[y[:, 0] > 0].sin() * 2).sum()


class Ragged(nn.Module):
    """A nested tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).values().sin().sum()


def ragged_batch() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(rows, 8) for rows in (3, 5)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("model", "batch", "reason"),
    [
        (
            Selected,
            lambda: torch.randn(16, 8),
            r"at .*test_capture\.py:\d+ has a size or a number that depends on the data",
        ),
        (Ragged, ragged_batch, r"nested \(jagged\) tensor, whose bytes no plan can know before the step; pad it"),
    ],
)
def test_sizes_that_only_the_step_knows_are_refused_by_the_first_call(
    model: type[nn.Module], batch: Any, reason: str
) -> None:
    torch._dynamo.reset()
    step = compile_step(model(), {"memory_budget": "90%"})
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(UnsupportedGraphError, match=reason),
    ):
        step(batch())


def test_one_getitem_stands_behind_its_producer() -> None:
    def parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x @ weight, dim=1)
        return (variance.sin() * mean.cos()).sum()

    module, _ = joint_graph(parts, *chain_inputs())
    graph = module.graph
    producer = next(node for node in graph.nodes if "var_mean" in str(node.target))
    first = next(iter(producer.users))
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        twin = graph.call_function(operator.getitem, (producer, first.args[1]))
        twin.meta = dict(first.meta)
        reader = graph.call_function(torch.ops.aten.sin.default, (twin,))
        reader.meta = dict(first.meta)
    normalize(module)
    items = [node for node in graph.nodes if node.target is operator.getitem and node.args[0] is producer]
    assert len({node.args[1] for node in items}) == len(items)
    after = producer
    for item in sorted(items, key=lambda node: node.args[1]):
        assert after.next is item
        after = item
    assert reader.args[0] in items


def test_an_overwritten_input_is_cloned_before_anything_runs() -> None:
    scale = torch.ones(64, 32)

    def step(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = (x @ weight) * scale.cos()
        scale.mul_(2.0)
        return y.sin().sum()

    module, _ = normalized(step, *chain_inputs(), scale)
    written = [target for node in module.graph.nodes if (target := mutated_input(node)) is not None]
    assert len(written) == 1
    clones = [node for node in module.graph.nodes if node.meta.get("fxhome_clone_of") == written[0].name]
    assert len(clones) == 1
    assert clones[0].prev.op == "placeholder"
    assert clones[0].meta["val"].shape == scale.shape
    assert not clones[0].users  # read by nobody: costs nothing


def test_tangents_and_outputs_are_told_apart() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    tangents = [node for node in module.graph.nodes if is_tangent(node)]
    assert len(tangents) == outputs == 1
    assert not any(is_backward_seed(node) for node in module.graph.nodes)
    results = joint_outputs(module.graph)
    assert results[0] is not None
    assert results[1] is None  # x needs no gradient
    assert results[2] is not None


def test_a_missing_value_is_inferred_and_a_hopeless_one_is_an_error() -> None:
    module, _ = joint_graph(chain, *chain_inputs())
    node = next(node for node in module.graph.nodes if "tanh" in str(node.target))
    shape = node.meta.pop("val").shape
    normalize(module)
    assert node.meta["val"].shape == shape

    module, _ = joint_graph(chain, *chain_inputs())
    node = next(node for node in module.graph.nodes if "tanh" in str(node.target))
    del node.meta["val"]
    source = node.all_input_nodes[0]
    del source.meta["val"]
    source.target = torch.tanh  # not an operator overload: nothing can say its shape
    with pytest.raises(UnsupportedGraphError, match=f"node '{source.name}' .* has no recorded value"):
        normalize(module)


def test_the_example_has_the_operators_it_is_meant_to_have() -> None:
    module, _ = normalized(chain, *chain_inputs())
    names = targets(module.graph)
    assert sum("aten.mm" in name for name in names) == 3 + 5  # forward; backward without x's gradient
    assert names.count("aten.tanh.default") == 3
