"""Published policies as placements: what each moves, that it is honest, and that the swarm is never worse."""

import numpy as np
import pytest

from benchmarks.search_problems import chain, dense, residual, transformer
from fxhome.errors import OptionError
from fxhome.passes.search import search
from fxhome.passes.search.front import POLICIES
from fxhome.passes.simulate import COMPRESS, KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, Problem, evaluate, simulate

MODELS = {
    "chain": lambda: chain(10),
    "residual": lambda: residual(6),
    "transformer": lambda: transformer(3),
    "dense": lambda: dense(12),
}


def keep_all_peak(problem: Problem) -> int:
    """The peak without any policy."""
    return evaluate(problem, problem.keep_all(), 1 << 60)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_the_swarm_is_never_worse_than_any_policy(model: str, share: float) -> None:
    problem, classes = MODELS[model]()
    budget = int(share * keep_all_peak(problem))
    ours = search(problem, budget, storage_class=classes)
    assert ours.feasible
    for policy in POLICIES:
        other = search(problem, budget, policy=policy, storage_class=classes, max_evaluations=2500)
        rows = np.arange(problem.num_storages)
        assert problem.allowed[rows, other.placement].all()
        assert other.feasible == (other.peak_bytes <= budget)
        if other.feasible:
            assert ours.step_us <= other.step_us * (1 + 1e-9), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_repeat(policy: str) -> None:
    problem, classes = residual(4)
    budget = int(0.6 * keep_all_peak(problem))
    first, again = (
        search(problem, budget, policy=policy, seed=3, storage_class=classes, max_evaluations=700) for _ in range(2)
    )
    assert np.array_equal(first.placement, again.placement)
    assert (first.peak_bytes, first.step_us) == (again.peak_bytes, again.step_us)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_cannot_meet_the_budget_says_what_it_reached(policy: str) -> None:
    problem, classes = chain(6)
    found = search(problem, 1000, policy=policy, storage_class=classes, max_evaluations=600)
    assert not found.feasible
    assert found.peak_bytes == simulate(problem, found.placement, 1000, synchronous=found.sync_transfers).peak_bytes
    assert found.peak_bytes > 1000


def test_vdnn_moves_what_its_paper_moves() -> None:
    problem, classes = residual(4)
    budget = int(0.6 * keep_all_peak(problem))
    everything = search(problem, budget, policy="vdnn_all", storage_class=classes)
    convolutions = search(problem, budget, policy="vdnn_conv", storage_class=classes)
    ours = search(problem, budget, policy="vdnn_async", storage_class=classes)
    assert everything.sync_transfers
    assert convolutions.sync_transfers
    assert not ours.sync_transfers
    assert np.array_equal(everything.placement, ours.placement)
    assert everything.step_us >= problem.arrays.node_time_us.sum()
    assert everything.step_us >= ours.step_us
    moved = np.flatnonzero(convolutions.placement == SWAP)
    assert 0 < moved.shape[0] < (everything.placement == SWAP).sum()
    g = problem.arrays
    for storage in moved:
        readers = [
            v
            for v in range(g.node_phase.shape[0])
            if storage in g.root_storage[g.read_node[g.read_start[v] : g.read_start[v + 1]]]
        ]
        assert any(classes[g.root_storage[v]] == "convolution" for v in readers)


def test_superneurons_swaps_only_convolutions_and_recomputes_only_cheap_layers() -> None:
    problem, classes = chain(8)
    found = search(problem, int(0.45 * keep_all_peak(problem)), policy="superneurons", storage_class=classes)
    demanded = found.placement != KEEP
    for storage in np.flatnonzero(demanded & (found.placement == SWAP)):
        assert classes[storage] == "convolution"
    again = (found.placement == RECOMPUTE) | (found.placement == RECOMPUTE_EACH)
    assert {classes[x] for x in np.flatnonzero(again)} <= {"norm", "activation"}
    assert (
        search(problem, keep_all_peak(problem), policy="superneurons", storage_class=classes).step_us
        == evaluate(problem, problem.keep_all(), 1 << 60)[1]
    )


@pytest.mark.parametrize("policy", ["vdnn_conv", "superneurons"])
def test_policies_by_op_class_refuse_a_graph_without_classes(policy: str) -> None:
    problem, _ = chain(4)
    with pytest.raises(OptionError, match=f"policy '{policy}' decides by op class.*use policy"):
        search(problem, 1000, policy=policy)


def test_capuchin_swaps_first_and_recomputes_when_the_link_is_full() -> None:
    problem, classes = transformer(6)
    peak = keep_all_peak(problem)
    loose = search(problem, int(0.95 * peak), policy="capuchin", storage_class=classes)
    tight = search(problem, int(0.5 * peak), policy="capuchin", storage_class=classes)
    assert loose.feasible
    assert tight.feasible
    assert (loose.placement == SWAP).any()
    demanded = search(problem, peak, policy="capuchin").placement == KEEP
    assert not (loose.placement[demanded] == RECOMPUTE).any()
    assert (tight.placement[demanded] == RECOMPUTE).any()


def test_checkpointing_drops_only_as_many_blocks_as_it_must() -> None:
    problem, _ = transformer(6)
    peak = keep_all_peak(problem)
    some = search(problem, int(0.8 * peak), policy="checkpoint")
    more = search(problem, int(0.4 * peak), policy="checkpoint")
    assert some.feasible
    assert more.feasible
    assert some.step_us < more.step_us
    assert set(np.unique(more.placement)) <= {KEEP, RECOMPUTE}


def test_compression_is_used_where_it_is_allowed_and_cheap() -> None:
    problem, _ = residual(4)
    allowed = problem.allowed.copy()
    allowed[:, [SWAP, RECOMPUTE, RECOMPUTE_EACH]] = False
    allowed[problem.allowed[:, SWAP], COMPRESS] = True
    squeezed = Problem(problem.arrays, problem.link, allowed, problem.group)
    budget = int(0.85 * keep_all_peak(problem))
    found = search(squeezed, budget, max_evaluations=800)
    assert found.feasible
    assert (found.placement == COMPRESS).any()


def test_an_unknown_policy_is_one_clear_error() -> None:
    problem, _ = chain(2)
    with pytest.raises(OptionError, match="policy 'best' is unknown; allowed are pso, keep_all"):
        search(problem, 1000, policy="best")
