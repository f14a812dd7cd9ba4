"""What a node costs: measured once and cached, by bytes elsewhere, nothing for views. No test of a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxhome.device import DeviceProfile
from fxhome.passes import cost_model
from fxhome.passes.cost_model import TimingCache, estimate_us, node_costs, op_signature, tensor_bytes
from fxhome.passes.facts import extract_facts
from fxhome.passes.op_timing import OpTiming
from fxhome.passes.simulate_kernels import ALIAS, GETITEM, OWNER
from tests.graph_tools import chain, chain_inputs, normalized

PROFILE = DeviceProfile(
    name="test",
    kind="cpu",
    d2h_bytes_per_s=1e9,
    h2d_bytes_per_s=1e9,
    duplex_bytes_per_s=1.5e9,
    copy_latency_us=1.0,
    memory_bytes_per_s=1e9,
    launch_us=2.0,
    flops_per_s=(("float32", 1e9), ("bfloat16", 2e9)),
    total_memory_bytes=1 << 30,
    host_memory_bytes=1 << 30,
    versions=(("torch", torch.__version__),),
)
LARGE = chain_inputs(rows=512, width=128)


def test_offline_everything_is_estimated_and_views_are_free() -> None:
    module, outputs = normalized(chain, *LARGE)
    facts = extract_facts(module, outputs)
    costs = node_costs(module, facts, PROFILE, measure=False)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    assert len(costs.time_us) == len(costs.workspace_bytes) == len(costs.estimated) == len(nodes)
    for node, kind, time_us, estimated in zip(nodes, facts.node_kind, costs.time_us, costs.estimated, strict=True):
        if kind in (ALIAS, GETITEM) or node.op != "call_function":
            assert time_us == 0.0
            assert not estimated
        else:
            assert time_us == estimate_us(node, PROFILE)
            assert estimated


def test_a_product_is_bound_by_operations_and_a_sine_by_bytes() -> None:
    module, _ = normalized(chain, *LARGE)
    product = next(node for node in module.graph.nodes if node.name == "mm")
    sine = next(node for node in module.graph.nodes if node.name == "sin")
    assert estimate_us(product, PROFILE) == pytest.approx(2.0 + 2 * 512 * 128 * 128 / 1e9 * 1e6)
    assert tensor_bytes(sine) == 2 * 512 * 128 * 4
    assert estimate_us(sine, PROFILE) == pytest.approx(2.0 + tensor_bytes(sine) / 1e9 * 1e6)


def test_an_expanded_tensor_is_read_once() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.sin() * weight.sum(0, keepdim=True).expand(512, 128)).sum()

    module, _ = normalized(step, *LARGE)
    product = next(node for node in module.graph.nodes if "mul.Tensor" in str(node.target))
    assert tensor_bytes(product) == 2 * 512 * 128 * 4 + 128 * 4


def test_each_distinct_operator_is_timed_once_and_then_read_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    timed: list[str] = []

    def time_op(node: torch.fx.Node, _: torch.device, args: tuple[Any, ...]) -> OpTiming:
        assert args == node.args
        timed.append(op_signature(node))
        return OpTiming(123.0, 7, 31.0)

    monkeypatch.setattr(cost_model, "time_op", time_op)
    module, outputs = normalized(chain, *LARGE)
    facts = extract_facts(module, outputs)
    first = node_costs(module, facts, PROFILE, measure=True)
    products = [node for node in module.graph.nodes if "aten.mm" in str(node.target)]
    assert len(timed) == len(set(timed)) < len(products)
    assert {op_signature(node) for node in products} <= set(timed)
    position = facts.index()["mm"]
    assert (first.time_us[position], first.workspace_bytes[position], first.estimated[position]) == (123.0, 7, False)
    assert first.host_us[position] == 31.0
    assert first.host_us[facts.index()["sin"]] is None
    again = node_costs(module, facts, PROFILE, measure=True)
    assert again == first
    assert len(timed) == len(set(timed))  # nothing was timed again


def test_an_operator_that_cannot_be_timed_is_costed_by_bytes_and_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))

    def refuse(*_: object) -> OpTiming:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cost_model, "time_op", refuse)
    module, outputs = normalized(chain, *LARGE)
    facts = extract_facts(module, outputs)
    costs = node_costs(module, facts, PROFILE, measure=True)
    product = next(node for node in module.graph.nodes if node.name == "mm")
    position = facts.index()["mm"]
    assert costs.estimated[position]
    assert costs.time_us[position] == estimate_us(product, PROFILE)


def test_a_damaged_cache_is_measured_again_and_another_device_has_its_own(tmp_path: Path) -> None:
    cache = TimingCache(PROFILE, tmp_path)
    cache.entries = {"op": OpTiming(1.5, 3), "launched": OpTiming(2.5, 4, 30.5)}
    cache.save()
    assert TimingCache(PROFILE, tmp_path).entries == cache.entries
    assert TimingCache(dataclasses.replace(PROFILE, name="other"), tmp_path).path != cache.path
    for text in ("{", json.dumps({"op": "x"}), json.dumps([1])):
        cache.path.write_text(text, encoding="utf-8")
        assert TimingCache(PROFILE, tmp_path).entries == {}


def test_two_processes_that_measure_at_a_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    first, second = TimingCache(PROFILE, tmp_path), TimingCache(PROFILE, tmp_path)
    first.entries["a"] = OpTiming(1.0, 2)
    first.save()
    second.read()
    second.entries["b"] = OpTiming(3.0, 4)
    second.save()
    assert TimingCache(PROFILE, tmp_path).entries == {"a": OpTiming(1.0, 2), "b": OpTiming(3.0, 4)}


def test_signatures_tell_layouts_and_constants_apart() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return (y.t().contiguous().clamp(min=0.5).sum() + y.clamp(min=0.25).sum()) * y.clamp(min=0.5).sum()

    module, _ = normalized(step, *LARGE)
    clamps = [op_signature(node) for node in module.graph.nodes if "clamp" in str(node.target)]
    assert len(clamps) == len(set(clamps)) == 3


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_gpus_convolution_is_timed_without_the_bias_that_inductor_adds_in_a_loop(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        first = torch.nn.functional.conv2d(x, weight, bias, padding=1)
        return torch.nn.functional.conv2d(first, weight, bias).relu().sum()

    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    biases: list[Any] = []

    def time_op(node: torch.fx.Node, _: torch.device, args: tuple[Any, ...]) -> OpTiming:
        if node.target is torch.ops.aten.convolution.default:
            biases.append(args[2])
        return OpTiming(100.0, 0)

    monkeypatch.setattr(cost_model, "time_op", time_op)
    values = [torch.randn(*size, requires_grad=True) for size in ((1, 16, 64, 64), (16, 16, 3, 3), (16,))]
    module, outputs = normalized(step, *values)
    facts = extract_facts(module, outputs, fusing=True)
    costs = node_costs(module, facts, dataclasses.replace(PROFILE, kind=kind), measure=True, fusing=True)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    times = [
        costs.time_us[nodes.index(n)]
        for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    ]
    if kind == "cpu":
        assert times == [100.0, 100.0]
        assert None not in biases
        return
    assert biases == [None, None]
    # The first one's result goes to a library: its bias takes a kernel of its own. The second one's is read by a loop.
    assert times == [pytest.approx(102.0 + 2 * 16 * 64 * 64 * 4 / 1e9 * 1e6), 100.0]


def test_pooling_windows_are_bound_by_operations_on_a_gpu() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(x.exp(), 3, 2).sum()

    module, outputs = normalized(step, torch.randn(1, 16, 65, 65, requires_grad=True))
    facts = extract_facts(module, outputs, fusing=True)
    slow = dataclasses.replace(PROFILE, kind="cuda", memory_bytes_per_s=1e12)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    backward = next(i for i, node in enumerate(nodes) if "max_pool2d_with_indices_backward" in str(node.target))
    reader = next(i for i in range(backward, len(nodes)) if facts.node_kind[i] == OWNER)
    costs = node_costs(module, facts, slow, measure=False, fusing=True)
    # Every element may lie in two times two windows.
    assert costs.time_us[reader] == pytest.approx(2.0 + 16 * 65 * 65 * 4 * 30 / (1e9 / 4) * 1e6)
    assert node_costs(module, facts, PROFILE, measure=False, fusing=True).time_us[reader] < costs.time_us[reader]
