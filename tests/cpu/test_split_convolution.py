"""Convolution backwards in two: numbers, graph text, what is left alone, the order that is written, and the peak."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph_module import GraphModule

from fxhome.passes.baseline import copy_joint
from fxhome.passes.ease_backward import is_eased
from fxhome.passes.facts import extract_facts
from fxhome.passes.partition import partition
from fxhome.passes.pipeline import rewrite
from fxhome.passes.planned import Planned
from fxhome.passes.problem import build_problem
from fxhome.passes.schedule import schedule
from fxhome.passes.search import minimum_peak
from fxhome.passes.simulate import simulate
from fxhome.passes.split_convolution import SUFFIX, split_convolutions, undoing
from fxhome.passes.verify import verify_partition
from fxhome.placement import Plan
from tests.graph_tools import EVERYTHING, LINK, joint_graph, normalized, planned_for_gpu, targets, unit_costs

aten = torch.ops.aten
PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
Extra = Callable[[Callable[..., fx.Node], fx.Node, list[fx.Node]], Sequence[fx.Node]]


def backward_of(
    tensors: Sequence[torch.Tensor],
    how: tuple[Any, ...] = PLAIN,
    mask: Sequence[bool] = (True,) * 3,
    extra: Extra | None = None,
) -> GraphModule:
    """The joint graph of a convolution of sin(x), without its forward. tensors: x, weight, gradient of the result.

    extra: adds nodes behind (given how to call, sin(x) and the gradients) and says what else is returned.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph = fx.Graph()

    def call(target: Any, *args: Any, tag: str = "is_backward") -> fx.Node:
        node = graph.call_function(target, args)
        if target is operator.getitem:
            node.meta["val"] = args[0].meta["val"][args[1]]
        else:
            with mode:
                node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]))
        node.meta["partitioner_tag"] = tag
        return node

    inputs = [graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1")]
    for node, value in zip(inputs, tensors, strict=True):
        node.meta["val"] = mode.from_tensor(value)
    x, weight, gradient = inputs
    activation = call(aten.sin.default, x, tag="is_forward")
    lists = [list(value) if isinstance(value, list) else value for value in how]
    bias = [weight.meta["val"].shape[0]] if mask[2] else [0]
    whole = call(aten.convolution_backward.default, gradient, activation, weight, bias, *lists, list(mask))
    results = [call(operator.getitem, whole, i) for i in range(3) if mask[i]]
    more = extra(call, activation, results) if extra is not None else ()
    graph.output((*results, *more))
    return GraphModule(nn.Module(), graph)


def image_tensors(*, channels: int = 8, format: torch.memory_format = torch.contiguous_format) -> list[torch.Tensor]:
    x = torch.randn(2, channels, 6, 6, dtype=torch.float64).to(memory_format=format)
    weight = torch.randn(channels, channels, 3, 3, dtype=torch.float64).to(memory_format=format)
    return [x, weight, torch.randn(2, channels, 6, 6, dtype=torch.float64).to(memory_format=format)]


def has_split(module: GraphModule) -> bool:
    return any(node.name.endswith(SUFFIX) for node in module.graph.nodes)


def run(module: GraphModule, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(fx.Interpreter(module).run(*tensors, enable_io_processing=False))


def is_like_whole(module: GraphModule, tensors: Sequence[torch.Tensor]) -> None:
    """The split graph computes what the graph did, and its values are laid out as they say."""
    expected = run(module, tensors)
    split = split_convolutions(copy_joint(module), min_bytes=0)
    assert has_split(split)
    for value, other in zip(run(split, tensors), expected, strict=True):
        torch.testing.assert_close(value, other)
        assert value.stride() == other.stride()
    (gradient,) = [node for node in split.graph.nodes if node.name.endswith(SUFFIX)]
    assert gradient.meta["val"].shape == tensors[0].shape


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[torch.Tensor], tuple[Any, ...], list[bool]]:
    dims = draw(st.integers(1, 3))

    def each(least: int, most: int) -> list[int]:
        return [draw(st.integers(least, most)) for _ in range(dims)]

    kernel, stride, padding, dilation, more = each(1, 3), each(1, 3), each(0, 2), each(1, 2), each(0, 4)
    groups, wide, deep = draw(st.sampled_from([1, 2])), draw(st.integers(2, 3)), draw(st.integers(1, 3))
    # The smallest input that the kernel fits in, and more.
    sizes = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) + more[i] for i in range(dims)]
    x = torch.randn(2, groups * wide, *sizes, dtype=torch.float64)
    weight = torch.randn(groups * deep, wide, *kernel, dtype=torch.float64)
    how = (stride, padding, dilation, False, [0] * dims, groups)
    result = aten.convolution(x, weight, None, *how)
    return [x, weight, torch.randn_like(result)], how, [True, True, draw(st.booleans())]


@settings(deadline=None, max_examples=60)
@given(cases())
def test_gradients_stay_what_they_were(case: tuple[list[torch.Tensor], tuple[Any, ...], list[bool]]) -> None:
    tensors, how, mask = case
    is_like_whole(backward_of(tensors, how, mask), tensors)


def test_channels_last_stays_channels_last() -> None:
    tensors = image_tensors(format=torch.channels_last)
    is_like_whole(backward_of(tensors), tensors)
    split = split_convolutions(backward_of(tensors), min_bytes=0)
    (gradient,) = [node for node in split.graph.nodes if node.name.endswith(SUFFIX)]
    assert gradient.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_one_number_serves_all_dimensions() -> None:
    tensors = image_tensors()
    is_like_whole(backward_of(tensors, ([1], [1], [1], False, [0], 1)), tensors)


def test_output_padding_is_what_a_stride_left_out() -> None:
    # 7 -> 3 with kernel 2 and stride 2 reads 6 of 7 rows.
    assert undoing([3], [7], [2], settings=[[2], [0], [1]]) == ([2], [0], [1], [1])


def test_graph_before_and_after() -> None:
    module = backward_of(image_tensors(), mask=[True, True, False])
    assert targets(module.graph) == [
        "aten.sin.default",
        "aten.convolution_backward.default",
        str(operator.getitem),
        str(operator.getitem),
    ]
    split = split_convolutions(copy_joint(module), min_bytes=0)
    assert targets(split.graph) == [
        "aten.sin.default",
        "aten.convolution_backward.default",
        str(operator.getitem),
        "aten.convolution.default",
    ]
    _, whole, weight_gradient, gradient = [node for node in split.graph.nodes if node.op == "call_function"]
    assert whole.args[10] == [False, True, False]
    assert weight_gradient.args[1] == 1
    assert [node.name for node in gradient.all_input_nodes] == ["tangents_1", "primals_2"]
    assert gradient.meta["partitioner_tag"] == "is_backward"
    (output,) = split.graph.find_nodes(op="output")
    assert output.args[0] == (gradient, weight_gradient)
    assert str(split_convolutions(split, min_bytes=0).graph) == str(split.graph)


def reads_it_again(call: Callable[..., fx.Node], activation: fx.Node, results: list[fx.Node]) -> list[fx.Node]:
    return [call(aten.mul.Tensor, results[0], activation)]


@pytest.mark.parametrize(
    ("tensors", "how", "mask", "extra"),
    [
        pytest.param(image_tensors(), PLAIN, [False, True, True], None, id="no input gradient is wanted"),
        pytest.param(image_tensors(), PLAIN, [True, False, False], None, id="the weight is frozen"),
        pytest.param(image_tensors(), (*PLAIN[:3], True, *PLAIN[4:]), [True, True, False], None, id="transposed"),
        pytest.param(
            [torch.randn(2, 4, 5, 5), torch.randn(4, 1, 3, 3), torch.randn(2, 4, 5, 5)],
            (*PLAIN[:5], 4),
            [True, True, False],
            None,
            id="depthwise",
        ),
        pytest.param(image_tensors(), PLAIN, [True, True, False], reads_it_again, id="the input is read again"),
        pytest.param(
            image_tensors(), PLAIN, [True, True, False], lambda _, activation, __: [activation], id="it is returned"
        ),
    ],
)
def test_left_alone(tensors: list[torch.Tensor], how: tuple[Any, ...], mask: list[bool], extra: Extra | None) -> None:
    module = backward_of(tensors, how, mask, extra)
    before = str(module.graph)
    assert not has_split(split_convolutions(module, min_bytes=0))
    assert str(module.graph) == before


def test_small_inputs_and_inputs_of_the_step_are_left_alone() -> None:
    assert not has_split(split_convolutions(backward_of(image_tensors()), min_bytes=1 << 20))
    module = backward_of(image_tensors())
    (activation,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    activation.replace_all_uses_with(activation.all_input_nodes[0])
    assert not has_split(split_convolutions(module, min_bytes=0))


def test_a_mask_of_the_input_is_no_reader_once_it_is_taken_early() -> None:
    def masked(call: Callable[..., fx.Node], activation: fx.Node, results: list[fx.Node]) -> list[fx.Node]:
        mask = call(aten.le.Scalar, activation, 0)
        return [call(aten.where.ScalarSelf, mask, 0.0, results[0])]

    tensors = image_tensors()
    module = backward_of(tensors, extra=masked)
    assert not has_split(split_convolutions(copy_joint(module), min_bytes=0))
    (mask,) = module.graph.find_nodes(op="call_function", target=aten.le.Scalar)
    mask.all_input_nodes[0].append(mask)
    is_like_whole(module, tensors)


def test_both_readers_of_one_input_are_split() -> None:
    def twice(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return torch.cat([nn.functional.conv2d(y, first), nn.functional.conv2d(y, second)]).exp().sum()

    weights = [torch.randn(4, 4, 1, 1, requires_grad=True) for _ in range(2)]
    module, _ = normalized(twice, torch.randn(1, 4, 8, 8, requires_grad=True), *weights)
    split_convolutions(module, min_bytes=0)
    assert sum(node.name.endswith(SUFFIX) for node in module.graph.nodes) == 2


def step(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.conv2d(x, first, padding=1)
    return nn.functional.conv2d(hidden, second, padding=1).exp().sum()


@pytest.fixture
def written() -> tuple[GraphModule, int, list[torch.Tensor]]:
    inputs = [torch.randn(2, 3, 32, 32), torch.randn(64, 3, 3, 3) / 9, torch.randn(64, 64, 3, 3) / 99]
    module, outputs = normalized(step, inputs[0], *(value.requires_grad_() for value in inputs[1:]))
    return module, outputs, inputs


def test_the_smallest_peak_is_lower(written: tuple[GraphModule, int, list[torch.Tensor]]) -> None:
    module, outputs, _ = written

    def smallest(graph: GraphModule) -> int:
        facts = extract_facts(graph, outputs)
        return minimum_peak(build_problem(facts, unit_costs(facts), LINK, ("swap", "recompute")))[0]

    whole = smallest(copy_joint(module))
    # Three results of half a MiB at once, weights and their gradients aside; split, there are two.
    assert whole > 3 << 19
    assert smallest(split_convolutions(copy_joint(module), min_bytes=0)) <= whole - (3 << 17)


def test_a_plan_writes_the_weight_gradient_first_and_computes_the_same(
    written: tuple[GraphModule, int, list[torch.Tensor]],
) -> None:
    module, outputs, inputs = written
    split_convolutions(module, min_bytes=0)
    facts = extract_facts(module, outputs)
    problem = build_problem(facts, unit_costs(facts), LINK, ("swap", "recompute"))
    _, placement = minimum_peak(problem)
    program = schedule(facts, placement, simulate(problem, placement, EVERYTHING))
    assert is_eased(program)
    forward, backward = partition(module, [item for item in program if "swap" not in item.kind], outputs)
    names = [node.name for node in backward.graph.nodes]
    (gradient,) = [name for name in names if name.endswith(SUFFIX)]
    assert names.index(gradient.removesuffix(SUFFIX)) < names.index(gradient)
    verify_partition(module, forward, backward, program, outputs)
    with torch.no_grad():
        loss, *saved = forward(*inputs)
        gradients = backward(*saved, torch.ones_like(loss))
    expected = step(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for value, got in zip(inputs[1:], [g for g in gradients if g is not None], strict=True):
        torch.testing.assert_close(got, value.grad)


def planned(budget: str, replays: Sequence[Plan] = ()) -> tuple[Planned, GraphModule, int]:
    inputs = [torch.randn(8, 3, 64, 64), torch.randn(64, 3, 3, 3), torch.randn(64, 64, 3, 3)]
    module, outputs = joint_graph(step, inputs[0], *(value.requires_grad_() for value in inputs[1:]))
    return planned_for_gpu((module, outputs), inputs, budget, inner="aot_eager", replays=replays), module, outputs


def test_a_baseline_that_fits_is_not_split() -> None:
    result, _, _ = planned("100%")
    assert result.is_baseline
    assert not has_split(result.backward)
    assert "ease_backward" not in result.step_seconds


def test_what_is_planned_for_a_gpu_is_split_and_replayed() -> None:
    whole, _, _ = planned("100%")
    result, module, outputs = planned("70%")
    assert has_split(result.backward)
    assert result.plan.baseline_peak_bytes == whole.plan.baseline_peak_bytes
    assert result.plan.predicted_peak_bytes <= result.plan.budget_bytes
    assert result.plan.graph_fingerprint == whole.plan.graph_fingerprint
    forward, backward = rewrite(module, result.plan.program, outputs)
    assert str(forward.graph) == str(result.forward.graph)
    assert str(backward.graph) == str(result.backward.graph)
    assert str(planned("70%", [result.plan])[0].backward.graph) == str(result.backward.graph)


def test_a_plan_that_was_not_split_is_replayed_as_it_is() -> None:
    whole, _, _ = planned("100%")
    result, _, _ = planned("100%", [whole.plan])
    assert not has_split(result.backward)
