"""What a node costs: measured once and cached, by bytes elsewhere, nothing for views. No test of a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fxhome.device import DeviceProfile
from fxhome.passes import cost_model
from fxhome.passes.cost_model import TimingCache, estimate_us, node_costs, op_signature, tensor_bytes
from fxhome.passes.facts import extract_facts
from fxhome.passes.op_timing import OpTiming
from fxhome.passes.simulate_kernels import ALIAS, GETITEM
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

    def time_op(node: torch.fx.Node, _: torch.device) -> OpTiming:
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


def test_signatures_tell_layouts_and_constants_apart() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return (y.t().contiguous().clamp(min=0.5).sum() + y.clamp(min=0.25).sum()) * y.clamp(min=0.5).sum()

    module, _ = normalized(step, *LARGE)
    clamps = [op_signature(node) for node in module.graph.nodes if "clamp" in str(node.target)]
    assert len(clamps) == len(set(clamps)) == 3
