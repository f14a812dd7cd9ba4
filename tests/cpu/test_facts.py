"""Facts per storage: bytes, owners, aliases, what may be done, where it came from. By graphs whose facts are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.facts import StorageFacts, allocated_bytes, extract_facts, graph_fingerprint, storage_key
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, GETITEM, INPUT
from tests.graph_tools import chain, chain_inputs, joint_graph, normalized

ROWS, WIDTH = 64, 32
ACTIVATION_BYTES = ROWS * WIDTH * 4


def activations(function: Any, *args: Any) -> dict[str, StorageFacts]:
    module, outputs = normalized(function, *args)
    return {s.name: s for s in extract_facts(module, outputs).storages if s.is_activation}


def test_bytes_phases_and_inputs_of_a_chain() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    facts = extract_facts(module, outputs)
    assert facts.input_bytes == ACTIVATION_BYTES + WIDTH * WIDTH * 4
    assert facts.gradient_bytes == WIDTH * WIDTH * 4
    assert facts.device_type == facts.planned_for == "cpu"
    assert len(facts.tangent_storages) == 1
    index = facts.index()
    by_phase = {node.name: facts.node_phase[index[node.name]] for node in module.graph.nodes if node.op != "output"}
    assert by_phase["tanh"] == FORWARD
    assert by_phase["primals_1"] == by_phase["tangents_1"] == INPUT
    assert all(by_phase[name] == BACKWARD for name in by_phase if "backward" in name)
    activation = [s for s in facts.storages if s.is_activation and s.size_bytes == ACTIVATION_BYTES]
    assert {"tanh", "tanh_1", "tanh_2", "sin", "sin_1", "sin_2"} <= {s.name for s in activation}
    assert all(s.may_recompute and s.may_move and not s.must_recompute for s in activation)


def test_cuda_rounds_every_storage_to_its_granule() -> None:
    module, outputs = normalized(chain, *chain_inputs(rows=65, width=33))
    small, large = extract_facts(module, outputs), extract_facts(module, outputs, "cuda")
    assert [s.size_bytes for s in large.storages] == [-(-s.size_bytes // 512) * 512 for s in small.storages]
    assert [s.copy_bytes for s in large.storages] == [s.copy_bytes for s in small.storages]
    assert allocated_bytes(1, "cuda") == 512
    assert allocated_bytes(1, "cpu") == 1


def test_views_share_their_base_and_own_nothing() -> None:
    def viewed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        return (y.view(-1).unsqueeze(0) * y.t().reshape(1, -1)).sin().sum()

    module, outputs = normalized(viewed, *chain_inputs())
    facts = extract_facts(module, outputs)
    index = facts.index()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        bases = [source for source in node.all_input_nodes if storage_key(source.meta["val"]) == storage_key(value)]
        assert (facts.node_kind[index[node.name]] == ALIAS) == bool(bases), node.name
        assert bool(facts.owns[index[node.name]]) != bool(bases)


def test_each_result_of_a_multi_output_operator_is_a_storage_with_its_getitem_as_root() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x.sin(), 2).cos().sum()

    module, outputs = normalized(pooled, torch.randn(2, 3, 8, 8, requires_grad=True))
    facts = extract_facts(module, outputs)
    index = facts.index()
    (owner,) = [node for node in module.graph.nodes if "max_pool2d_with_indices.default" in str(node.target)]
    owned = facts.owns[index[owner.name]]
    assert len(owned) == 2
    roots = [facts.node_names[facts.storage_root[s]] for s in owned]
    assert {facts.node_kind[index[name]] for name in roots} == {GETITEM}
    assert {facts.storages[s].dtype for s in owned} == {"float32", "int64"}


def test_outputs_stay_and_random_results_run_once() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x @ weight)
        return y, F.dropout(y.sin(), 0.5).cos().sum()

    found = activations(step, *chain_inputs())
    assert not found["tanh"].may_move
    assert not found["tanh"].may_recompute
    assert "output" in found["tanh"].keep_reason
    random = [s for s in found.values() if "random" in s.keep_reason]
    assert random
    assert all(s.may_move and not s.may_recompute for s in random)


def test_a_clone_of_an_overwritten_input_is_a_decision_of_its_own() -> None:
    scale = torch.ones(ROWS, WIDTH)

    def step(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight) * scale.cos()
        scale.mul_(2.0)
        return y.sin().sum()

    module, outputs = normalized(step, *chain_inputs(), scale)
    facts = extract_facts(module, outputs)
    (clone,) = [s for s in facts.storages if s.name.startswith("fxhome_before_")]
    assert clone.is_activation
    assert not clone.may_recompute
    assert "overwrites" in clone.keep_reason
    index = facts.index()
    original = next(node.meta["fxhome_clone_of"] for node in module.graph.nodes if "fxhome_clone_of" in node.meta)
    assert facts.backward_alias[index[original]] == index[clone.name]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(torch.tanh(self.first(x))))


def test_module_path_source_line_and_layers_of_one_kind() -> None:
    model = nn.Sequential(*(Block() for _ in range(5)))
    module, outputs = normalized(lambda x: model(x).square().sum(), torch.randn(ROWS, WIDTH))
    facts = extract_facts(module, outputs)
    pairs = zip(facts.storages, facts.group, strict=True)
    named = {s.name: (s, g) for s, g in pairs if s.name.startswith(("tanh", "sin")) and s.is_activation}
    assert all(s.source_line.rpartition(":")[0].endswith("test_facts.py") for s, _ in named.values())
    # Blocks 3 and 4 look alike to the depth that is compared; the first reads an input.
    assert named["tanh_3"][1] == named["tanh_4"][1] >= 0
    assert named["sin_3"][1] == named["sin_4"][1]
    assert len({named[name][1] for name in ("tanh", "tanh_3", "sin_3")}) == 3


def test_the_fingerprint_follows_graph_shapes_and_outputs() -> None:
    def fingerprint(rows: int, function: Any = chain) -> str:
        module, outputs = normalized(function, *chain_inputs(rows))
        return graph_fingerprint(module, outputs)

    assert fingerprint(64) == fingerprint(64)
    assert fingerprint(64) != fingerprint(65)
    assert fingerprint(64) != fingerprint(64, lambda x, w: chain(x, w) * 2)


def test_an_unknown_size_is_an_error() -> None:
    def sparse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin().sum()

    module, outputs = normalized(sparse, *chain_inputs())
    node = next(node for node in module.graph.nodes if node.name == "mm")
    node.meta["val"] = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedGraphError, match=r"torch\.sparse_coo tensor, whose bytes are unknown"):
        extract_facts(module, outputs)


def test_a_sparse_gradient_that_is_a_sum_is_refused_with_its_layer_and_line() -> None:
    """The sum of two sparse tensors has bytes that nothing says; one that is put together from tensors has theirs."""

    def twice(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(tokens, weight, sparse=True)
        return (rows * F.embedding(tokens + 1, weight, sparse=True)).sum()

    module, outputs = normalized(twice, torch.randn(16, 4, requires_grad=True), torch.arange(8))
    with pytest.raises(UnsupportedGraphError, match=r"at .*test_facts\.py:\d+ makes a torch\.sparse_coo tensor"):
        extract_facts(module, outputs)


def test_nothing_is_changed_by_reading() -> None:
    module, outputs = joint_graph(chain, *chain_inputs())
    before = str(module.graph)
    extract_facts(module, outputs)
    assert str(module.graph) == before
