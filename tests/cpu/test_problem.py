"""Facts and costs as numbers: which placements each storage may take, and that nothing is lost on the way."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

from fxhome.passes.facts import StorageFacts, extract_facts
from fxhome.passes.problem import SMALL_BYTES, allowed_placements, build_problem
from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP
from tests.graph_tools import LINK, chain, chain_inputs, normalized, problem_of, unit_costs

STORAGE = StorageFacts("relu", 1 << 20, 1 << 20, "relu", True, True, True, False, "", "", "", "float32")
ALL = ("swap", "recompute", "compress")


def choices(storage: StorageFacts, allow: tuple[str, ...] = ALL) -> set[int]:
    return set(np.flatnonzero(allowed_placements(storage, allow)).tolist())


def test_placements_follow_facts_and_what_the_user_allows() -> None:
    assert choices(STORAGE) == {KEEP, SWAP, RECOMPUTE, RECOMPUTE_EACH}
    assert choices(STORAGE, ("swap",)) == {KEEP, SWAP}
    assert choices(STORAGE, ("recompute",)) == {KEEP, RECOMPUTE, RECOMPUTE_EACH}
    assert choices(STORAGE, ()) == {KEEP}
    assert choices(dataclasses.replace(STORAGE, is_activation=False)) == {KEEP}
    assert choices(dataclasses.replace(STORAGE, may_recompute=False)) == {KEEP, SWAP}
    assert choices(dataclasses.replace(STORAGE, may_move=False)) == {KEEP, RECOMPUTE, RECOMPUTE_EACH}
    assert KEEP not in choices(dataclasses.replace(STORAGE, must_recompute=True), ())
    small = dataclasses.replace(STORAGE, size_bytes=SMALL_BYTES - 1)
    assert choices(small) == {KEEP, RECOMPUTE, RECOMPUTE_EACH}


def test_arrays_are_the_facts() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    g = problem.arrays
    assert g.storage_bytes.tolist() == [s.size_bytes for s in facts.storages]
    assert g.storage_copy_bytes.tolist() == [s.copy_bytes for s in facts.storages]
    for node in range(len(facts.node_names)):
        assert tuple(g.read_node[g.read_start[node] : g.read_start[node + 1]]) == facts.reads[node]
        assert tuple(g.own_storage[g.own_start[node] : g.own_start[node + 1]]) == facts.owns[node]
    for storage, root in enumerate(facts.storage_root):
        assert root < 0 or g.root_storage[root] == storage
    assert set(problem.decisions().tolist()) == set(np.flatnonzero(problem.allowed.sum(axis=1) > 1).tolist())
    owners = g.storage_owner[problem.decisions()].tolist()
    assert owners == sorted(owners)


def test_a_small_sibling_is_not_rebuilt_alone() -> None:
    """Rebuilding batch norm's statistics would allocate its output once more."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x @ weight, (weight.shape[1],)).tanh().sum()

    module, outputs = normalized(step, *chain_inputs(rows=64, width=256))
    facts, problem = problem_of(module, outputs)
    norm = next(node for node in module.graph.nodes if "native_layer_norm.default" in str(node.target))
    owned = facts.owns[facts.index()[norm.name]]
    sizes = {facts.storages[s].size_bytes: s for s in owned}
    assert problem.allowed[sizes[max(sizes)], RECOMPUTE]
    assert not problem.allowed[sizes[min(sizes)], RECOMPUTE]


def test_outside_and_between_are_kept_apart() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    facts = extract_facts(module, outputs)
    problem = build_problem(facts, unit_costs(facts), LINK, ALL, outside_bytes=5, between_bytes=7)
    assert problem.arrays.outside_bytes.tolist() == [5, 7]
