"""What the search reads off the graph: pruned decisions lose nothing, groups become units, readers go through views."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.search_problems import GraphBuilder, residual
from fxhome.passes.search.structure import read_storages, read_structure
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP, Link, Problem, evaluate
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, INPUT

LINK = Link(1e-3, 1e-3, 1.2, 2.0)


@st.composite
def partly_unread(draw: st.DrawFn) -> Problem:
    """A forward of which the backward reads only some storages, so that others may never be demanded."""
    b = GraphBuilder()
    nodes = [b.node(INPUT, [], 0, 0.0)]
    for _ in range(draw(st.integers(2, 5))):
        nodes.append(b.node(FORWARD, [draw(st.sampled_from(nodes))], draw(st.integers(1, 9)) * 1000, 5.0))
    loss = b.node(FORWARD, [nodes[-1]], 8, 1.0, movable=False)
    read = draw(st.lists(st.sampled_from(nodes[1:]), max_size=2, unique=True))
    gradient = b.node(BACKWARD, [loss, *read], 1000, 5.0)
    return b.problem([loss], [gradient], LINK)[0]


@settings(max_examples=40, deadline=None)
@given(partly_unread(), st.integers(1000, 40_000))
def test_a_pruned_decision_changes_nothing(problem: Problem, budget: int) -> None:
    structure = read_structure(problem)
    pruned = np.setdiff1d(problem.decisions(), structure.decisions)
    for row in itertools.product([KEEP, SWAP, RECOMPUTE], repeat=structure.decisions.shape[0]):
        base = problem.keep_all()
        base[structure.decisions] = row
        outcome = evaluate(problem, base, budget)
        for storage in pruned:
            for choice in np.flatnonzero(problem.allowed[storage]):
                other = base.copy()
                other[storage] = choice
                assert evaluate(problem, other, budget) == outcome


def test_identical_layers_move_together() -> None:
    problem, _ = residual(8)
    structure = read_structure(problem)
    assert structure.units
    for unit in structure.units:
        assert unit.shape[0] > 1
        assert len(set(problem.group[unit].tolist())) == 1
        assert len(set(problem.arrays.storage_bytes[unit].tolist())) == 1


def test_readers_are_found_through_views() -> None:
    b = GraphBuilder()
    image = b.node(INPUT, [], 0, 0.0)
    value = b.node(FORWARD, [image], 4000, 1.0)
    view = b.node(FORWARD, [value], 0, 0.0)
    other = b.node(FORWARD, [view], 4000, 1.0)
    loss = b.node(FORWARD, [other], 8, 1.0, movable=False)
    first = b.node(BACKWARD, [loss], 100, 1.0)
    last = b.node(BACKWARD, [first, view], 100, 1.0)
    problem, _ = b.problem([loss], [last], LINK)
    kind = problem.arrays.node_kind.copy()
    kind[view] = ALIAS
    viewed = Problem(problem.arrays._replace(node_kind=kind), problem.link, problem.allowed, problem.group)
    structure = read_structure(viewed)
    storage = int(problem.arrays.root_storage[value])
    assert structure.first_reader[storage] == last
    assert structure.last_reader[storage] == last
    assert read_storages(viewed.arrays, other) == [storage]
    assert structure.first_reader[problem.arrays.root_storage[other]] == -1
