"""The layout pass: convolutions read channels-last, the graph's ends keep their strides, and no number changes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.graph_module import GraphModule

import fxhome
from fxhome.device import cached_profile
from fxhome.options import Options
from fxhome.passes.baseline import baseline_partition, copy_joint, saved_storages
from fxhome.passes.capture import joint_outputs, normalize
from fxhome.passes.channels_last import (
    Layouts,
    convolution_layouts,
    is_channels_last,
    is_convolution,
    operands,
    to_channels_last,
)
from fxhome.passes.facts import storage_key, storage_nbytes
from fxhome.passes.pipeline import plan_graph, rewrite
from fxhome.passes.situation import Situation
from fxhome.trace_offline import trace_joint
from tests.graph_tools import chain, chain_inputs, normalized, targets

CLONE = torch.ops.aten.clone.default


def joint_of(model: nn.Module, *inputs: torch.Tensor, inner: str = "inductor") -> tuple[GraphModule, int]:
    """The normalized joint graph of a model, through Inductor's decompositions or without them."""
    torch._dynamo.reset()

    def use(joint: GraphModule, _: object, outputs: int, __: list[int] | None) -> tuple[GraphModule, int]:
        return normalize(copy_joint(joint)), outputs

    return trace_joint(model, inputs, inner, use)


class Residual(nn.Module):
    """Group norm, SiLU, convolution, twice, beside a shortcut: the block of U-Nets."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inside), nn.GroupNorm(4, outside)
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(h)))


class SmallUNet(nn.Module):
    """One level down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.inner, self.outer = Residual(8, 16), Residual(24, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x)
        low = nn.functional.interpolate(self.inner(self.down(high)), scale_factor=2.0)
        return self.last(self.outer(torch.cat([low, high], dim=1))).square().mean()


class SmallResNet(nn.Module):
    """Batch norm, pooling, a residual sum, and a classifier, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        x = torch.relu(self.body(x) + x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class SmallVgg(nn.Module):
    """Plain convolutions and a classifier that reads all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(12 * 64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Attention(nn.Module):
    """A projection by a 1x1 convolution, attention over the pixels, and its result among the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 24, 1), nn.Conv2d(16, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        q, k, v = self.qkv(x).flatten(2).view(x.shape[0], 3, 2, 4, -1).transpose(3, 4).unbind(1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        attended = attended.transpose(2, 3).reshape(x.shape)
        return self.last(torch.cat([attended, x.flip(3)], dim=1))


class Returning(nn.Module):
    """Returns images: slices, transposed ones, and what a convolution made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = self.first(x)
        b = self.second(torch.relu(a))
        low, high = b.split(4, dim=1)
        return a, torch.sin(b[:, ::2]), b.transpose(1, 3).cos(), low * high, b.chunk(2, dim=1)[1]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (SmallUNet, (2, 3, 8, 8)),
    "resnet": (SmallResNet, (2, 3, 16, 16)),
    "vgg": (SmallVgg, (2, 3, 16, 16)),
    "attention": (Attention, (2, 3, 10, 10)),
    "returning": (Returning, (2, 3, 8, 8)),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[GraphModule, int]:
    """Traced once for all tests: they rewrite copies."""
    build, shape = MODELS[request.param]
    torch.manual_seed(0)
    return joint_of(build(), torch.randn(shape))


def strides(values: list[fx.Node | None]) -> list[tuple[int, ...] | None]:
    return [None if value is None else value.meta["val"].stride() for value in values]


def convolutions(module: GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if is_convolution(node)]


def inserted(before: GraphModule, after: GraphModule) -> list[fx.Node]:
    known = {node.name for node in before.graph.nodes}
    return [node for node in after.graph.nodes if node.name not in known]


def converted(module: GraphModule, layouts: Layouts = Layouts.EVERYWHERE) -> GraphModule:
    return to_channels_last(copy_joint(module), layouts)


def real_inputs(module: GraphModule) -> list[Any]:
    """Random values for the placeholders, with their recorded strides."""
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        blank = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        found.append(blank.normal_(0, 0.3, generator=generator) if value.is_floating_point() else blank.zero_())
    return found


def results(module: GraphModule) -> list[torch.Tensor]:
    """Outputs and updated inputs of a joint graph run as it stands on the same random values."""
    given = real_inputs(module)
    torch.manual_seed(3)
    with torch.no_grad():
        outputs = fx.Interpreter(module).run(*given)
    leaves = torch.utils._pytree.tree_leaves((outputs, given))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_same_results(before: GraphModule, after: GraphModule) -> None:
    expected, found = results(before), results(after)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one.stride() == other.stride()
        # Sums are taken in another order.
        scale = float(one.abs().max()) if one.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


def assert_recorded_is_real(module: GraphModule) -> None:
    """Run the graph and hold every value's shape, type and strides to what is recorded of it."""

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            recorded = n.meta.get("val")
            if isinstance(result, torch.Tensor) and n.op == "call_function":
                assert (result.dtype, result.shape) == (recorded.dtype, recorded.shape), n
                real = [s for s, size in zip(result.stride(), result.shape, strict=True) if size > 1]
                said = [s for s, size in zip(recorded.stride(), recorded.shape, strict=True) if size > 1]
                assert real == said, (n.name, n.target)
            return result

    with torch.no_grad():
        Watching(module).run(*real_inputs(module))


def saved_bytes(module: GraphModule, outputs: int) -> int:
    """What Inductor's partition would save of a graph besides the step's inputs."""
    forward, _ = baseline_partition(module, None, outputs, None, "inductor")
    inputs = {storage_key(node.meta["val"]) for node in forward.graph.find_nodes(op="placeholder")}
    sizes = {
        storage_key(value): storage_nbytes(value)
        for node in forward.graph.nodes
        if node.op == "call_function" and isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    return sum(sizes[key] for key in saved_storages(forward, outputs) if key not in inputs)


def test_every_convolution_reads_and_writes_channels_last(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    assert not all(is_channels_last(value.meta["val"]) for node in convolutions(module) for value in operands(node))
    after = converted(module)
    assert len(convolutions(after)) == len(convolutions(module)) > 2
    for node in convolutions(after):
        assert all(is_channels_last(value.meta["val"]) for value in operands(node)), node
        images = node.meta["val"] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"][0]
        assert images is None or is_channels_last(images)


def test_the_ends_of_the_graph_keep_their_strides(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    after = converted(module)
    assert strides(joint_outputs(after.graph)) == strides(joint_outputs(module.graph))
    pairs = zip(*(graph.find_nodes(op="placeholder") for graph in (module.graph, after.graph)), strict=True)
    assert all(new.meta["val"] is old.meta["val"] for old, new in pairs)


def test_no_number_changes(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    assert_same_results(module, converted(module))


def test_what_is_recorded_is_what_runs(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    assert_recorded_is_real(converted(module))


@pytest.mark.parametrize("name", MODELS)
def test_graphs_without_decompositions_are_converted_as_well(name: str) -> None:
    build, shape = MODELS[name]
    module, _ = joint_of(build(), torch.randn(shape), inner="aot_eager")
    after = converted(module)
    assert all(is_channels_last(value.meta["val"]) for node in convolutions(after) for value in operands(node))
    assert_same_results(module, after)


@pytest.mark.parametrize("case", ["unet", "resnet", "vgg"], indirect=True)
def test_no_more_is_saved_than_before(case: tuple[GraphModule, int], request: pytest.FixtureRequest) -> None:
    build, shape = MODELS[request.node.callspec.params["case"]]
    model = build()
    module, outputs = case
    images = 4 * torch.Size(shape).numel()  # the one copy that nothing pointwise makes: of the batch itself
    weights = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 4)
    assert saved_bytes(converted(module), outputs) <= saved_bytes(module, outputs) + images + weights


def test_activations_are_copied_where_they_are_made() -> None:
    module, _ = joint_of(SmallResNet(), torch.randn(2, 3, 16, 16))
    new = inserted(module, converted(module))
    sources = [node.args[0] for node in new if node.target is CLONE and node.args[0].op != "placeholder"]  # type: ignore[union-attr]
    forward = [node for node in sources if isinstance(node, fx.Node) and node.meta["partitioner_tag"] == "is_forward"]
    # Nothing in this network makes another layout than its convolutions do.
    assert not [node for node in forward if node.meta["val"].is_floating_point()]


def test_a_second_time_changes_nothing(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    once = converted(module)
    again = converted(once)
    assert str(again.graph) == str(once.graph)


def test_the_same_graph_is_rewritten_the_same_way(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    assert str(converted(module).graph) == str(converted(module).graph)


@pytest.mark.parametrize("layouts", Layouts)
def test_a_graph_without_convolutions_is_left_alone(layouts: Layouts) -> None:
    module, _ = normalized(chain, *chain_inputs())
    before = str(module.graph)
    assert str(to_channels_last(module, layouts).graph) == before


@pytest.mark.parametrize("layouts", [Layouts.TRACED, Layouts.EXPLICIT])
def test_what_runs_as_traced_is_left_alone(case: tuple[GraphModule, int], layouts: Layouts) -> None:
    module = copy_joint(case[0])
    before = str(module.graph)
    values = [node.meta.get("val") for node in module.graph.nodes]
    to_channels_last(module, layouts)
    assert str(module.graph) == before
    assert all(node.meta.get("val") is value for node, value in zip(module.graph.nodes, values, strict=True))


@pytest.mark.parametrize("build", [SmallResNet, SmallVgg])
def test_a_channels_last_model_needs_no_copy_of_an_activation(build: Callable[[], nn.Module]) -> None:
    model = build().to(memory_format=torch.channels_last)
    module, _ = joint_of(model, torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))
    new = inserted(module, converted(module, Layouts.EXPLICIT))
    assert all(node.meta["partitioner_tag"] == "is_backward" for node in new)


def test_hidden_copies_become_explicit_where_a_weight_is_channels_last() -> None:
    model = SmallUNet().to(memory_format=torch.channels_last)
    module, _ = joint_of(model, torch.randn(2, 3, 8, 8))
    assert not all(is_channels_last(value.meta["val"]) for node in convolutions(module) for value in operands(node))
    after = converted(module, Layouts.EXPLICIT)
    assert all(is_channels_last(value.meta["val"]) for node in convolutions(after) for value in operands(node))
    assert_same_results(module, after)


def test_copies_belong_to_the_module_that_needs_them(case: tuple[GraphModule, int]) -> None:
    module, _ = case
    new = inserted(module, converted(module))
    assert new
    for node in new:
        assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
        assert node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or node.meta.get("stack_trace")


def decision(model: nn.Module, shape: tuple[int, ...], device_type: str = "cuda", fusing: bool = True) -> Layouts:
    module, outputs = joint_of(model, torch.randn(shape))
    forward, _ = baseline_partition(module, None, outputs, None, "inductor")
    return convolution_layouts(forward, device_type=device_type, fusing=fusing)


def test_the_decision_is_inductors_own() -> None:
    wide = nn.Sequential(nn.Conv2d(3, 96, 3), nn.ReLU(), nn.Conv2d(96, 96, 3))
    narrow = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    grouped = nn.Sequential(nn.Conv2d(4, 96, 3), nn.Conv2d(96, 96, 3, groups=2))
    assert decision(wide, (2, 3, 12, 12)) is Layouts.EVERYWHERE
    assert decision(narrow, (2, 3, 12, 12)) is Layouts.EXPLICIT
    assert decision(grouped, (2, 4, 12, 12)) is Layouts.EXPLICIT
    assert decision(wide, (2, 3, 12, 12), device_type="cpu") is Layouts.TRACED
    assert decision(wide, (2, 3, 12, 12), fusing=False) is Layouts.TRACED
    with torch._inductor.config.patch(layout_optimization=False):
        assert decision(wide, (2, 3, 12, 12)) is Layouts.TRACED


def wide_model() -> nn.Module:
    layers: list[nn.Module] = []
    for inside in (3, 96, 96, 96):
        layers += [nn.Conv2d(inside, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU()]
    return nn.Sequential(*layers)


def test_where_a_node_cannot_follow_the_graph_is_planned_as_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("strides of another kind")

    monkeypatch.setattr("fxhome.passes.channels_last._Rewriter._clone_where_wanted", fail)
    profile = dataclasses.replace(cached_profile("cpu"), kind="cuda")
    torch._dynamo.reset()
    plan = fxhome.plan(wide_model(), (torch.randn(16, 3, 32, 32),), 0.7, device=profile, max_evaluations=200)
    assert not [item for item in plan.program if "channels_last" in item.target]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fxhome.planner"]
    assert re.search(r"keep the layout .* channels_last: '\w+' \(.*\) does not run on the strides", message)


@pytest.mark.parametrize("budget", [0.7, 1.0])
def test_plans_are_made_of_what_runs_and_the_baseline_stays_stock(budget: float) -> None:
    profile = dataclasses.replace(cached_profile("cpu"), kind="cuda")
    options = Options.from_mapping({"memory_budget": budget, "max_evaluations": 200, "verify": True})
    seen: list[tuple[Any, ...]] = []

    def use(joint: GraphModule, inputs: object, outputs: int, static: list[int] | None) -> int:
        planned = plan_graph(
            joint,
            inputs,
            outputs,
            options=options,
            profile=profile,
            situation=Situation(resident_bytes=None),
            measure=False,
            inner="inductor",
            static_lifetime_input_indices=static,
        )
        stock = baseline_partition(joint, inputs, outputs, static, "inductor")
        again = rewrite(joint, planned.plan.program, outputs, layouts=planned.layouts)
        seen.append((planned, stock, again))
        return outputs

    torch._dynamo.reset()
    outputs = trace_joint(wide_model(), (torch.randn(16, 3, 32, 32),), "inductor", use)
    ((planned, stock, again),) = seen
    assert planned.layouts is Layouts.EVERYWHERE
    assert planned.is_baseline == (budget == 1.0)
    graphs = (planned.forward, planned.backward)
    if planned.is_baseline:
        assert [str(graph.graph) for graph in graphs] == [str(graph.graph) for graph in stock]
        assert not any(is_channels_last(node.args[0].meta["val"]) for node in convolutions(planned.forward))
    else:
        assert [str(graph.graph) for graph in graphs] == [str(graph.graph) for graph in again]
        for graph in graphs:
            assert convolutions(graph)
            assert all(is_channels_last(value.meta["val"]) for node in convolutions(graph) for value in operands(node))
    given, made = (graph.graph.find_nodes(op="output")[0].args[0][:outputs] for graph in (stock[0], planned.forward))
    assert strides(list(made)) == strides(list(given))


def test_plans_for_the_cpu_stay_as_traced() -> None:
    torch._dynamo.reset()
    plan = fxhome.plan(
        wide_model(), (torch.randn(16, 3, 32, 32),), 0.7, device="cpu", inner="inductor", max_evaluations=200
    )
    assert not [item for item in plan.program if "channels_last" in item.target]


# Random networks: each step maps a list of images to one more.
SIZE = 6


def _step(draw: st.DrawFn) -> Callable[[nn.ModuleList, list[torch.Tensor]], torch.Tensor]:
    kind = draw(st.sampled_from(KINDS))
    one, other = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    module = draw(st.integers(0, 3))

    def run(modules: nn.ModuleList, values: list[torch.Tensor]) -> torch.Tensor:
        return APPLY[kind](modules[module], values[-1 - one % len(values)], values[-1 - other % len(values)])

    return run


def _attend(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(2)
    weights = (flat.transpose(1, 2) @ flat).softmax(-1)
    return (flat @ weights).view(x.shape)


APPLY: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "convolution": lambda module, x, _: module(x),
    "pointwise": lambda _, x, __: torch.sin(x) * 0.5,
    "sum": lambda _, x, y: x + y,
    "product with channels": lambda _, x, y: x * y.mean((2, 3), keepdim=True),
    "concatenation": lambda module, x, y: module(torch.cat([x, y], 1)[:, 2:6]),
    "turned": lambda _, x, __: x.transpose(2, 3),
    "channels as pixels": lambda _, x, __: x.view(x.shape[0], 2, 2, SIZE, SIZE).transpose(1, 2).reshape(x.shape),
    "pool": lambda _, x, __: nn.functional.interpolate(nn.functional.max_pool2d(x, 2), scale_factor=2.0),
    "average": lambda _, x, __: nn.functional.avg_pool2d(x, 3, stride=1, padding=1),
    "group norm": lambda _, x, __: nn.functional.group_norm(x, 2),
    "softmax": lambda _, x, __: x.softmax(1),
    "attention": lambda _, x, __: _attend(x),
    "flip": lambda _, x, __: x.flip(2),
    "pad": lambda _, x, __: nn.functional.pad(x, (1, 1, 1, 1))[:, :, 1:-1, :-2],
    "strided": lambda _, x, __: (
        x.contiguous().as_strided(x.shape, (x.stride(0), SIZE * SIZE, 1, SIZE)) if x.is_contiguous() else x.roll(1, 3)
    ),
}
KINDS = sorted(APPLY)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    steps = [_step(draw) for _ in range(draw(st.integers(2, 7)))]
    returned = draw(st.lists(st.integers(0, len(steps)), min_size=1, max_size=3, unique=True))
    return steps, returned


class Random(nn.Module):
    """A drawn network over 4 channels."""

    def __init__(self, steps: list[Any], returned: list[int]) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(
            [
                nn.Conv2d(4, 4, 3, padding=1),
                nn.Conv2d(4, 4, 1),
                nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
                nn.ConvTranspose2d(4, 4, 3, padding=1),
            ]
        )
        self.steps, self.returned = steps, returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [self.modules_[0](x)]
        for step in self.steps:
            values.append(step(self.modules_, values))
        return tuple(values[i] for i in self.returned)


@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(network=networks(), inner=st.sampled_from(["inductor", "aot_eager"]), is_last=st.booleans())
def test_random_networks_keep_their_numbers_and_strides(
    network: tuple[list[Any], list[int]], inner: str, is_last: bool
) -> None:
    torch.manual_seed(0)
    model = Random(*network)
    if is_last:
        model = model.to(memory_format=torch.channels_last)
    module, _ = joint_of(model, torch.randn(2, 4, SIZE, SIZE), inner=inner)
    after = converted(module, Layouts.EXPLICIT if is_last else Layouts.EVERYWHERE)
    assert strides(joint_outputs(after.graph)) == strides(joint_outputs(module.graph))
    for node in convolutions(after):
        assert all(is_channels_last(value.meta["val"]) for value in operands(node)), node
    assert_same_results(module, after)


def test_the_step_is_the_same_graph_in_text() -> None:
    module, _ = joint_of(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), torch.randn(1, 2, 5, 5))
    assert [name for name in targets(module.graph) if "clone" in name] == []
    after = targets(converted(module).graph)
    assert after.count("aten.clone.default") == len(inserted(module, converted(module)))
    assert [name for name in after if name != "aten.clone.default"] == targets(module.graph)
