"""What the backward reads of large results: shapes and masks in their place, numbers unchanged, less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.graph_module import GraphModule

from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.ease_backward import SHAPE_SUFFIX, ease_backward, is_eased, is_eased_for_fusion
from fxhome.passes.facts import extract_facts
from fxhome.passes.pipeline import rewrite
from fxhome.passes.planned import Planned
from fxhome.passes.problem import build_problem
from fxhome.passes.search import minimum_peak
from fxhome.placement import Instruction, Placement
from tests.graph_tools import LINK, joint_graph, planned_for_gpu, targets, unit_costs

aten = torch.ops.aten


RELU = torch._decomp.get_decompositions([aten.threshold_backward])


def pooled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.relu(nn.functional.conv2d(x, weight, padding=1))
    return nn.functional.max_pool2d(y, 2).exp().sum()


def also_read(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.relu(nn.functional.conv2d(x, weight, padding=1))
    return (nn.functional.max_pool2d(y, 2).sum() + y.square()).sum()


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 3, 64, 64), torch.randn(32, 3, 3, 3, requires_grad=True)]


def joint(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[GraphModule, int]:
    """A joint graph as Inductor hands it over: a relu's backward is a mask and a choice, nothing is detached."""
    module, outputs = joint_graph(function, *inputs, decompositions=RELU)
    for node in module.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    return module, outputs


def traced(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[GraphModule, int]:
    module, outputs = joint(function, inputs)
    return normalize(module), outputs


def run(module: GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = fx.Interpreter(module).run(*inputs, torch.tensor(1.0), enable_io_processing=False)
    leaves, _ = torch.utils._pytree.tree_flatten(found)
    return [leaf for leaf in leaves if leaf is not None]


def test_graph_before_and_after(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(pooled, inputs)
    before = targets(module.graph)
    assert before.index("aten.le.Scalar") > before.index("aten.max_pool2d_with_indices_backward.default")
    eased = ease_backward(copy_joint(module), fusing=True)
    after = targets(eased.graph)
    assert after.index("aten.le.Scalar") == after.index("aten.relu.default") + 1
    assert len(after) == len(before) + 1
    (pool,) = eased.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default)
    assert pool.args[1].name == pool.name + SHAPE_SUFFIX
    assert pool.args[1].meta["partitioner_tag"] == "is_backward"
    (mask,) = eased.graph.find_nodes(op="call_function", target=aten.le.Scalar)
    assert "partitioner_tag" not in mask.meta
    assert str(ease_backward(eased, fusing=True).graph) == str(eased.graph)


@pytest.mark.parametrize("fusing", [True, False])
def test_numbers_stay_bitwise(inputs: list[torch.Tensor], fusing: bool) -> None:
    module, _ = traced(pooled, inputs)
    expected = run(module, inputs)
    for value, other in zip(run(ease_backward(module, fusing=fusing), inputs), expected, strict=True):
        assert torch.equal(value, other)


def test_what_the_backward_reads_anyway_keeps_its_mask_where_it_was(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(also_read, inputs)
    eased = targets(ease_backward(module, fusing=True).graph)
    assert eased.index("aten.le.Scalar") > eased.index("aten.max_pool2d_with_indices_backward.default")


def test_a_compiler_that_does_not_fuse_is_given_no_constant(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(pooled, inputs)
    assert "aten.full.default" not in targets(ease_backward(module, fusing=False).graph)


def test_small_results_are_left_alone(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(pooled, inputs)
    before = str(module.graph)
    assert str(ease_backward(module, fusing=True, min_bytes=1 << 30).graph) == before


def test_large_windows_are_left_alone(inputs: list[torch.Tensor]) -> None:
    def wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(nn.functional.conv2d(x, weight)), 7, 1).exp().sum()

    module, _ = traced(wide, inputs)
    assert not any(node.name.endswith(SHAPE_SUFFIX) for node in ease_backward(module, fusing=True).graph.nodes)


def test_the_smallest_peak_is_lower(inputs: list[torch.Tensor]) -> None:
    module, outputs = traced(pooled, inputs)

    def smallest(graph: GraphModule) -> int:
        facts = extract_facts(graph, outputs, "cuda", fusing=True)
        return minimum_peak(build_problem(facts, unit_costs(facts), LINK, ("recompute",)))[0]

    assert smallest(ease_backward(copy_joint(module), fusing=True)) < smallest(module)


def test_what_a_program_tells() -> None:
    whole, split, shape = (Instruction("op", name) for name in ("conv", "conv_input_gradient", "pool_shape"))
    assert not is_eased([whole])
    assert is_eased([whole, split])
    assert not is_eased_for_fusion([whole, split])
    assert is_eased([shape])
    assert is_eased_for_fusion([shape])


def planned(inputs: list[torch.Tensor], budget: str = "90%", **how: Any) -> Planned:
    return planned_for_gpu(joint(pooled, inputs), inputs, budget, inner="inductor", **how)


def test_a_kept_mask_is_planned_replayed_and_rewritten(inputs: list[torch.Tensor]) -> None:
    result = planned(inputs)
    placed = {entry.name: entry.placement for entry in result.plan.placements}
    assert placed["le"] is Placement.KEEP
    assert "relu" not in placed  # nothing of the backward asks for it
    again = planned(inputs, replays=(result.plan,))
    assert str(again.backward.graph) == str(result.backward.graph)
    module, outputs = joint(pooled, inputs)
    _, backward = rewrite(module, result.plan.program, outputs)
    assert str(backward.graph) == str(result.backward.graph)


def test_published_policies_get_the_graph_as_it_was_traced(inputs: list[torch.Tensor]) -> None:
    assert "ease_backward" not in planned(inputs, "100%", policy="greedy").step_seconds
