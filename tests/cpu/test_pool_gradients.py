"""Gradients of max pooling that torch 2.14 traces as scatters: gathered in what is planned, numbers unchanged."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.graph_module import GraphModule

from fxhome.errors import InfeasibleBudgetError
from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.channels_last import Layouts, to_channels_last
from fxhome.passes.ease_backward import ease_backward, is_eased_for_fusion
from fxhome.passes.facts import extract_facts
from fxhome.passes.pipeline import rewrite
from fxhome.passes.planned import Planned
from fxhome.passes.pool_gradients import OVERLAPPING_SUFFIX, gathers_overlapping
from fxhome.passes.problem import build_problem
from fxhome.passes.refusal import RESIDENT_SLACK_BYTES
from fxhome.passes.search import minimum_peak
from tests.graph_tools import LINK, joint_graph, planned_for_gpu, targets, unit_costs

aten = torch.ops.aten
POOL_BACKWARD = "aten.max_pool2d_with_indices_backward.default"
SCATTER = "aten.scatter_add.default"

pytestmark = pytest.mark.skipif(
    aten.max_pool2d_with_indices_backward.default not in torch._decomp.decomposition_table,
    reason="this torch traces no scatter",
)


def step(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, pool: Callable[..., Any], half: bool = False
) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        x = pool(torch.relu(nn.functional.conv2d(x, first, padding=1)))
        return nn.functional.conv2d(x, second, padding=1).float().square().sum()


def pooling(kernel: int, stride: int, padding: int = 0, **how: Any) -> Callable[..., Any]:
    return functools.partial(nn.functional.max_pool2d, kernel_size=kernel, stride=stride, padding=padding, **how)


WINDOWS = {
    "apart": pooling(2, 2),
    "overlapping": pooling(3, 2, 1),
    "dense": pooling(3, 1, 1),
    "ceil": pooling(3, 2, ceil_mode=True),
    "gaps": pooling(2, 3),
}


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(32, 3, 3, 3), torch.randn(8, 32, 3, 3)]
    return [torch.randn(4, 3, 48, 48), *(weight.requires_grad_() for weight in weights)]


def traced(function: Callable[..., Any], inputs: list[torch.Tensor], **how: Any) -> tuple[GraphModule, int]:
    """The joint graph through Inductor's decompositions."""
    # The decompositions of pools ask it.
    importlib.import_module("torch._inductor.lowering")
    from torch._inductor.decomposition import select_decomp_table

    module, outputs = joint_graph(functools.partial(function, **how), *inputs, decompositions=select_decomp_table())
    for node in module.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    return module, outputs


def eased(module: GraphModule) -> GraphModule:
    return ease_backward(normalize(copy_joint(module)), fusing=True, min_bytes=1 << 16)


def run(module: GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = fx.Interpreter(module).run(*inputs, torch.tensor(1.0), enable_io_processing=False)
    leaves, _ = torch.utils._pytree.tree_flatten(found)
    return [leaf for leaf in leaves if leaf is not None]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_gathered_and_bitwise_what_eager_computes(window: str, half: bool, inputs: list[torch.Tensor]) -> None:
    how = {"pool": WINDOWS[window], "half": half}
    module, _ = traced(step, inputs, **how)
    assert SCATTER in targets(module.graph)
    gathered = eased(module)
    assert SCATTER not in targets(gathered.graph)
    assert targets(gathered.graph).count(POOL_BACKWARD) == 1

    expected = step(*inputs, **how)
    expected.backward()
    loss, *gradients = run(gathered, inputs)
    assert torch.equal(loss, expected)
    for value, weight in zip(gradients, inputs[1:], strict=True):
        assert torch.equal(value, weight.grad)


def test_recorded_values_are_those_of_the_scatter(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(step, inputs, pool=WINDOWS["overlapping"], half=True)
    before = normalize(copy_joint(module))
    after = eased(module)
    (pool,) = [node for node in after.graph.nodes if node.name.endswith(OVERLAPPING_SUFFIX)]
    (result,) = [node for node in before.graph.nodes if node.name + OVERLAPPING_SUFFIX == pool.name]
    for name in ("shape", "dtype", "device"):
        assert getattr(pool.meta["val"], name) == getattr(result.meta["val"], name)
    assert pool.meta["val"].stride() == result.meta["val"].stride()
    assert pool.meta["partitioner_tag"] == "is_backward"
    assert str(eased(module).graph) == str(after.graph)


@pytest.mark.parametrize("layouts", [Layouts.TRACED, Layouts.EVERYWHERE])
@pytest.mark.parametrize("half", [False, True])
def test_channels_last_images_are_gathered_without_copies(
    layouts: Layouts, half: bool, inputs: list[torch.Tensor]
) -> None:
    how = {"pool": WINDOWS["overlapping"], "half": half}
    if layouts is Layouts.TRACED:
        inputs = [value.detach().contiguous(memory_format=torch.channels_last) for value in inputs]
        inputs = [inputs[0], *(weight.requires_grad_() for weight in inputs[1:])]
    module, _ = traced(step, inputs, **how)
    before = to_channels_last(normalize(copy_joint(module)), layouts)
    after = ease_backward(copy_joint(before), fusing=True, min_bytes=1 << 16)
    assert SCATTER not in targets(after.graph)
    (pool,) = [node for node in after.graph.nodes if node.name.endswith(OVERLAPPING_SUFFIX)]
    assert pool.meta["val"].is_contiguous(memory_format=torch.channels_last)
    if layouts is Layouts.EVERYWHERE:
        assert targets(after.graph).count("aten.clone.default") < targets(before.graph).count("aten.clone.default")
    for value, other in zip(run(after, inputs), run(before, inputs), strict=True):
        # Without a scatter half-precision windows that overlap are added up in half precision here.
        torch.testing.assert_close(value, other, rtol=1e-5, atol=float(other.abs().max()) * (0.02 if half else 1e-6))
        assert value.stride() == other.stride()


def large_window(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return step(x, *weights, pool=pooling(6, 1))


def with_gaps_inside(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return step(x, *weights, pool=pooling(2, 2, dilation=2))


def a_scatter_of_the_users_own(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    index = torch.zeros(4, 3 * 48 * 48, dtype=torch.int64)
    return (torch.zeros(4, 32).scatter_add(1, index, x.flatten(1)) * first.sum() * second.sum()).sum()


@pytest.mark.parametrize("function", [large_window, with_gaps_inside, a_scatter_of_the_users_own])
def test_other_scatters_are_left_alone(function: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    module, _ = traced(function, inputs)
    assert targets(eased(module).graph).count(SCATTER) == targets(module.graph).count(SCATTER) == 1


def test_small_images_are_left_alone(inputs: list[torch.Tensor]) -> None:
    module, _ = traced(step, inputs, pool=WINDOWS["apart"])
    assert SCATTER in targets(ease_backward(normalize(module), fusing=True, min_bytes=1 << 30).graph)


def test_the_smallest_peak_is_lower(inputs: list[torch.Tensor]) -> None:
    module, outputs = traced(step, inputs, pool=WINDOWS["apart"], half=True)

    def smallest(graph: GraphModule) -> int:
        facts = extract_facts(graph, outputs, "cuda", fusing=True)
        return minimum_peak(build_problem(facts, unit_costs(facts), LINK, ("swap", "recompute")))[0]

    scattered = 4 * 4 * 32 * 48 * 48
    assert smallest(eased(module)) <= smallest(normalize(copy_joint(module))) - scattered


def planned(
    inputs: list[torch.Tensor], budget: int | str, *, window: str = "apart", **how: Any
) -> tuple[Planned, GraphModule, int]:
    module, outputs = traced(step, inputs, pool=WINDOWS[window])
    return planned_for_gpu((module, outputs), inputs, budget, inner="inductor", **how), module, outputs


def test_what_is_planned_is_gathered_and_replayed_and_a_baseline_is_not(inputs: list[torch.Tensor]) -> None:
    inputs = [torch.randn(8, 3, 64, 64), *inputs[1:]]
    whole, _, _ = planned(inputs, "100%")
    assert whole.is_baseline
    assert SCATTER in targets(whole.backward.graph)
    result, module, outputs = planned(inputs, "90%")
    assert SCATTER not in targets(result.backward.graph)
    assert POOL_BACKWARD in targets(result.backward.graph)
    assert result.plan.graph_fingerprint == whole.plan.graph_fingerprint
    assert is_eased_for_fusion(result.plan.program)
    again, _, _ = planned(inputs, "90%", replays=(result.plan,))
    assert str(again.backward.graph) == str(result.backward.graph)
    _, backward = rewrite(module, result.plan.program, outputs, layouts=result.layouts)
    assert str(backward.graph) == str(result.backward.graph)


def test_overlapping_windows_are_gathered_where_the_budget_is_not_met_without(inputs: list[torch.Tensor]) -> None:
    inputs = [torch.randn(8, 3, 64, 64), *inputs[1:]]
    with pytest.raises(InfeasibleBudgetError) as refused:
        planned(inputs, 1 << 20, window="overlapping")
    assert refused.value.minimum_bytes is not None
    smallest = refused.value.minimum_bytes - RESIDENT_SLACK_BYTES["cuda"]
    result, module, outputs = planned(inputs, smallest, window="overlapping")
    assert gathers_overlapping(result.plan.program)
    assert SCATTER not in targets(result.backward.graph)
    again, _, _ = planned(inputs, smallest, replays=(result.plan,), window="overlapping")
    assert str(again.backward.graph) == str(result.backward.graph)
    _, backward = rewrite(module, result.plan.program, outputs, layouts=result.layouts)
    assert str(backward.graph) == str(result.backward.graph)

    ample, module, outputs = planned(inputs, result.plan.baseline_peak_bytes - 1, window="overlapping")
    assert not ample.is_baseline
    assert SCATTER in targets(ample.backward.graph)
    _, backward = rewrite(module, ample.plan.program, outputs, layouts=ample.layouts)
    assert str(backward.graph) == str(ample.backward.graph)


def test_published_policies_get_the_scatter_and_their_plans_keep_it(inputs: list[torch.Tensor]) -> None:
    inputs = [torch.randn(8, 3, 64, 64), *inputs[1:]]
    result, module, outputs = planned(inputs, "100%", policy="greedy")
    assert SCATTER in targets(result.backward.graph)
    _, backward = rewrite(module, result.plan.program, outputs, layouts=result.layouts)
    assert str(backward.graph) == str(result.backward.graph)
