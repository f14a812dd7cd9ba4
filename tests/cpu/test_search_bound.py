"""The lower bound against brute force: on small graphs it is never above the fastest placement that fits."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.search_problems import GraphBuilder, chain, dense, residual, transformer
from fxhome.passes.search import search
from fxhome.passes.search.bound import lower_bound
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, RECOMPUTE, RECOMPUTE_EACH, SWAP, Link, Problem, evaluate
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, GETITEM, HOST_FIGURES, INPUT, OWNER, VIRTUAL


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """A random forward and backward with views, fused nodes, workspaces and any set of placements."""
    count = draw(st.integers(1, 5))
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    nodes = [source]
    kinds: dict[int, int] = {}
    for _ in range(count):
        reads = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True))
        kind = draw(st.sampled_from(["op", "op", "op", "view", "fused"]))
        size = 0 if kind == "view" else draw(st.integers(1, 64)) * 10_000
        if kind == "view":
            reads = reads[:1]
        node = b.node(FORWARD, reads, size, 0.0 if kind == "view" else draw(st.integers(1, 90)) * 1.0)
        if kind != "op":
            kinds[node] = ALIAS if kind == "view" else VIRTUAL
        nodes.append(node)
    loss = b.node(FORWARD, [nodes[-1]], 8, 1.0, movable=False)
    outputs = [loss]
    gradient = b.node(BACKWARD, [loss], draw(st.integers(1, 16)) * 10_000, 1.0)
    gradients = []
    for _ in range(draw(st.integers(1, 5))):
        needed = draw(st.lists(st.sampled_from(nodes[1:]), max_size=2, unique=True))
        gradient = b.node(
            BACKWARD, [gradient, *needed], draw(st.integers(1, 32)) * 10_000, draw(st.integers(1, 90)) * 1.0
        )
        if draw(st.booleans()):
            gradients.append(gradient)
    link = Link(draw(st.sampled_from([1e-5, 1e-4, 1e-3])), draw(st.sampled_from([1e-5, 1e-4, 1e-3])), 1.3, 2.0)
    problem, _ = b.problem(outputs, [*gradients, gradient], link)
    g = problem.arrays
    kind_of = g.node_kind.copy()
    for node, kind_code in kinds.items():
        kind_of[node] = kind_code
    workspace = np.array([draw(st.integers(0, 3)) * 5_000 for _ in range(g.node_phase.shape[0])], np.int64)
    takers: list[list[int]] = [[] for _ in range(problem.num_storages)]
    sizes = g.storage_bytes.copy()
    for node in range(g.node_phase.shape[0]):
        if g.root_storage[node] < 0 or kind_of[node] != OWNER:
            continue
        for read in g.read_node[g.read_start[node] : g.read_start[node + 1]].tolist():
            operand = g.root_storage[read]
            if operand >= 0 and draw(st.booleans()):
                takers[operand].append(node)
                # What is written over an operand is as large.
                sizes[g.root_storage[node]] = sizes[operand]
    arrays = g._replace(
        node_kind=kind_of,
        storage_bytes=sizes,
        taker_start=np.cumsum([0, *map(len, takers)]).astype(np.int32),
        taker_node=np.array([node for row in takers for node in row], np.int32),
        node_workspace=workspace,
        outside_bytes=np.array([draw(st.integers(0, 2)) * 1000, draw(st.integers(0, 2)) * 1000], np.int64),
    )
    if draw(st.booleans()):
        figures = st.sampled_from([0.0, 3.0, 20.0, 70.0])
        arrays = arrays._replace(
            node_host_us=np.array([0.0 if p == INPUT else draw(figures) for p in g.node_phase], np.float64),
            host_us=np.array([draw(figures) for _ in range(HOST_FIGURES)], np.float64),
        )
    allowed = problem.allowed.copy()
    for s in np.flatnonzero(allowed.sum(axis=1) > 1):
        pick = draw(st.sets(st.sampled_from([SWAP, RECOMPUTE, RECOMPUTE_EACH, COMPRESS, COMPRESS_SWAP]), max_size=3))
        allowed[s, 1:] = False
        allowed[s, list(pick)] = True
        if kind_of[g.storage_root[s]] == VIRTUAL:
            allowed[s, [SWAP, COMPRESS, COMPRESS_SWAP]] = False
    return Problem(arrays, link, allowed, problem.group)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(small_problems(), st.just(1.0) | st.floats(0.15, 1.05))
def test_the_bound_is_never_above_the_optimum(problem: Problem, share: float) -> None:
    budget = int(share * evaluate(problem, problem.keep_all(), 1 << 60)[0])
    options = [np.flatnonzero(row) for row in problem.allowed]
    fits = []
    for row in itertools.product(*options):
        peak, step = evaluate(problem, np.array(row, np.int8), budget)
        if peak <= budget:
            fits.append(step)
    if fits:
        backward = tuple(int(v) for v in np.flatnonzero(problem.arrays.node_phase == BACKWARD))
        assert lower_bound(problem, budget).step_us <= min(fits) * (1 + 1e-9)
        assert lower_bound(problem, budget, milp_seconds=1.0).step_us <= min(fits) * (1 + 1e-9)
        everywhere = lower_bound(problem, budget, start_anchors=backward, held=True, milp_seconds=1.0)
        assert everywhere.step_us <= min(fits) * (1 + 1e-9)


def test_what_the_forward_runs_last_may_stand_behind_the_backward() -> None:
    """As the update of an input does: the host launches it before the backward all the same."""
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    kept = b.node(FORWARD, [source], 1_000_000, 1.0)
    loss = b.node(FORWARD, [kept], 8, 1.0, movable=False)
    gradient = b.node(BACKWARD, [loss, kept], 8, 1.0)
    update = b.node(FORWARD, [kept], 8, 1.0, movable=False)
    problem, _ = b.problem([loss, update], [gradient], Link(1e-3, 1e-3, 1.2, 2.0))
    host = np.array([0.0, 10.0, 10.0, 100.0, 1000.0])
    entries = np.array([5.0, 50.0, 500.0, *[0.0] * (HOST_FIGURES - 3)])
    hosted = Problem(
        problem.arrays._replace(node_host_us=host, host_us=entries), problem.link, problem.allowed, problem.group
    )
    peak, step = evaluate(hosted, hosted.keep_all(), 1 << 40)
    assert step == 5.0 + 1020.0 + 50.0 + 100.0 + 500.0
    assert lower_bound(hosted, peak).step_us == pytest.approx(step, rel=1e-4)
    assert lower_bound(hosted, peak).step_us <= step


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_an_anchor_may_be_written_over_its_operand(phase: int) -> None:
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    made = [b.node(FORWARD, [source], 8, 1.0)]
    if phase == BACKWARD:
        made.append(b.node(BACKWARD, made, 8, 1.0))
    operand = b.node(phase, [made[-1]], 1_000_000, 10.0)
    over = b.node(phase, [operand], 1_000_000, 10.0)
    last = b.node(phase, [over], 8, 10.0)
    outputs, gradients = ([last], [b.node(BACKWARD, [last], 8, 1.0)]) if phase == FORWARD else (made[:1], [last])
    problem, _ = b.problem(outputs, gradients, Link(1e-3, 1e-3, 1.2, 2.0))
    g = problem.arrays
    taken = g.root_storage[operand]
    start = np.zeros(problem.num_storages + 1, np.int32)
    start[taken + 1 :] = 1
    must = np.maximum(g.node_must_forward, (g.node_phase == FORWARD).astype(np.int8))
    arrays = g._replace(taker_start=start, taker_node=np.array([over], np.int32), node_must_forward=must)
    problem = Problem(arrays, problem.link, problem.allowed, problem.group)
    peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
    assert peak < 2_000_000
    assert 0 < lower_bound(problem, peak, start_anchors=(over,), held=True).step_us <= step * (1 + 1e-9)


@pytest.mark.parametrize("make", [lambda: chain(14), lambda: residual(6), lambda: transformer(4), lambda: dense(16)])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_the_gap_is_small_and_never_negative(make, share: float) -> None:  # type: ignore[no-untyped-def]
    problem, classes = make()
    budget = int(share * evaluate(problem, problem.keep_all(), 1 << 60)[0])
    found = search(problem, budget, storage_class=classes, max_evaluations=4000, bound=True)
    assert found.lower_bound_us is not None
    assert found.gap is not None
    assert found.gap == pytest.approx((found.step_us - found.lower_bound_us) / found.lower_bound_us)
    assert 0 <= found.gap < 0.05


def test_what_a_codec_computes_on_the_way_to_the_host_is_in_the_bound() -> None:
    problem, _ = chain(8)
    budget = int(0.5 * evaluate(problem, problem.keep_all(), 1 << 60)[0])
    g = problem.arrays
    allowed = problem.allowed.copy()
    allowed[:, COMPRESS_SWAP] = allowed[:, SWAP]
    nothing = np.full_like(g.storage_link_bytes, 1)
    slow = g._replace(storage_link_bytes=nothing, storage_encode_us=g.storage_encode_us + 1e6)
    packed = Problem(slow, problem.link, allowed, problem.group)
    # Nearly nothing goes over the link, and each codec takes longer than the step: nobody gains by it.
    assert lower_bound(packed, budget).step_us == pytest.approx(lower_bound(problem, budget).step_us, rel=1e-3)


def test_a_generous_budget_is_bounded_by_the_compute() -> None:
    problem, _ = residual(4)
    peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
    assert lower_bound(problem, peak).step_us == pytest.approx(step, rel=1e-3)


def test_a_budget_that_nothing_meets_is_infinitely_slow() -> None:
    problem, classes = chain(4)
    assert lower_bound(problem, 1000).step_us == float("inf")
    found = search(problem, 1000, storage_class=classes, max_evaluations=50, bound=True)
    assert not found.feasible
    assert found.lower_bound_us == float("inf")
    assert found.gap is None


def test_the_bound_rises_as_the_budget_falls() -> None:
    problem, _ = transformer(3)
    peak = evaluate(problem, problem.keep_all(), 1 << 60)[0]
    steps = [lower_bound(problem, int(share * peak)).step_us for share in (1.0, 0.7, 0.5, 0.3)]
    assert all(a <= b * (1 + 1e-3) for a, b in itertools.pairwise(steps))
    assert steps[0] < steps[-1]


def tuple_of_results() -> Problem:
    """Two storages that one node of the forward makes, and that the backward reads."""
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    both = b.node(FORWARD, [source], 0, 40.0)
    left = b.node(FORWARD, [both], 100_000, 0.0)
    right = b.node(FORWARD, [both], 50_000, 0.0)
    loss = b.node(FORWARD, [left], 8, 1.0, movable=False)
    first = b.node(BACKWARD, [loss, right], 10_000, 30.0)
    second = b.node(BACKWARD, [first, left], 10_000, 30.0)
    problem, _ = b.problem([loss], [second], Link(1e-3, 1e-3, 1.2, 2.0))
    g = problem.arrays
    kind = g.node_kind.copy()
    kind[[left, right]] = GETITEM
    owner = g.storage_owner.copy()
    owner[g.root_storage[[left, right]]] = both
    own_start = np.zeros_like(g.own_start)
    per_node = np.bincount(owner, minlength=kind.shape[0])
    own_start[1:] = np.cumsum(per_node)
    arrays = g._replace(
        node_kind=kind,
        storage_owner=owner,
        own_start=own_start,
        own_storage=np.argsort(owner, kind="stable").astype(np.int32),
    )
    return Problem(arrays, problem.link, problem.allowed, problem.group)


def test_a_tuple_of_results_is_bounded_too() -> None:
    tuple_problem = tuple_of_results()
    peak = evaluate(tuple_problem, tuple_problem.keep_all(), 1 << 60)[0]
    for budget in range(peak // 3, peak, peak // 12):
        options = [np.flatnonzero(row) for row in tuple_problem.allowed]
        results = [evaluate(tuple_problem, np.array(row, np.int8), budget) for row in itertools.product(*options)]
        fits = [step for size, step in results if size <= budget]
        if fits:
            assert lower_bound(tuple_problem, budget).step_us <= min(fits) * (1 + 1e-9)


def test_a_budget_beside_which_every_storage_is_tiny() -> None:
    """Storages that take next to nothing of the budget are left out of the program: here none is left in it."""
    problem = tuple_of_results()
    _, step = evaluate(problem, problem.keep_all(), 1 << 60)

    assert lower_bound(problem, 1 << 50).step_us == pytest.approx(step, rel=1e-3)
