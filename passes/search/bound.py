"""A lower bound on the step time within a budget: the relaxation of `relaxation.py`, solved by HiGHS.

The bound is true: no placement that fits is faster by the simulator's own clock. Where the integer program finishes (or
raises its own dual bound) in the seconds given, that is used; a dual bound of a program cut short is still a bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from fxhome.passes.search.evaluator import base_placement
from fxhome.passes.search.flow import Flow, read_flow
from fxhome.passes.search.relaxation import Relaxation, relax_problem
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Bool, Float64, Int32, Int64, Structure, instruction_times, read_structure
from fxhome.passes.simulate import (
    COMPRESS,
    COMPRESS_SWAP,
    KEEP,
    PLACEMENTS,
    RECOMPUTE,
    SWAP,
    Problem,
    SimResult,
    simulate,
)
from fxhome.passes.simulate_kernels import BACKWARD, ENTER_FORWARD

# HiGHS meets rows to 1e-7 of their scale; the bound gives that away so that it stays one.
_SLACK = 1e-6
SEEN_DECISIONS = 300


@dataclass(frozen=True, eq=False)
class Bound:
    """step_us: no placement that fits is faster (inf: none fits). exact: the integer program was solved to its end.

    shares: float64[storages, 6], how much of each placement the solution takes, -1 where not allowed; None if unsolved.
    """

    step_us: float
    exact: bool
    shares: Float64 | None
    anchors: tuple[int, ...]


def lower_bound(
    problem: Problem,
    budget_bytes: int,
    *,
    structure: Structure | None = None,
    flow: Flow | None = None,
    milp_seconds: float = 0.0,
    rounds: int = 3,
    max_anchors: int | None = None,
    start_anchors: tuple[int, ...] = (),
    held: bool | None = None,
    no_swap: Bool | None = None,
    targets: Mapping[int, int] | None = None,
) -> Bound:
    """Bound the step time of any placement whose peak is within `budget_bytes`.

    start_anchors: node ids to hold the budget at, such as an earlier bound's `anchors`; found where none are given.
    rounds: how often anchors are added where the rounded solution fails, and the relaxation solved again.
    held: whether anchors see what is rebuilt; None: they do in graphs so small that this takes about a second at most.
    targets: bytes for single anchors in place of the budget; less of them, and the result is no bound any more.
    milp_seconds: 0 solves the linear relaxation alone, deterministically; above it the integer program may raise it.
    """
    s = structure or read_structure(problem)
    flow = flow or read_flow(s)
    reachable = int(s.reachable.sum())
    base = simulate(problem, problem.keep_all(), budget_bytes)
    room = max_anchors if max_anchors is not None else max(3, min(12, 5000 // max(1, reachable)))
    anchors = list(start_anchors)
    if not anchors:
        anchors = _choose_anchors(s, flow, budget_bytes, base.curve, base.program, base.forward_length, room // 2)
    best = 0.0
    entry_us = float(problem.arrays.host_us[ENTER_FORWARD])
    phases = [False, True] if held is None and reachable <= SEEN_DECISIONS else [bool(held)]
    for see_held in phases:
        for _ in range(rounds):
            relaxation = relax_problem(s, flow, budget_bytes, anchors, held=see_held, no_swap=no_swap, targets=targets)
            step, x = _solve(relaxation, 0.0)
            best = max(best, step)
            if x is None:
                return Bound(best + entry_us, False, None, tuple(anchors))
            more = _tight_places(s, flow, budget_bytes, rounded(s, _shares(relaxation, problem, x)), anchors)
            if not more or len(anchors) >= room:
                break
            anchors = sorted({*anchors, *more[: room - len(anchors)]})
    exact = False
    if milp_seconds > 0:
        better, solution = _solve(relaxation, milp_seconds)
        exact = solution is not None
        best = max(best, better)
    assert x is not None, "there is at least one round"
    return Bound(best + entry_us, exact, _shares(relaxation, problem, x), tuple(anchors))


def _shares(r: Relaxation, problem: Problem, x: Float64) -> Float64:
    shares = np.zeros((problem.num_storages, PLACEMENTS))
    rows = r.storages
    ways = ((KEEP, r.kept), (SWAP, r.swapped), (COMPRESS, r.encoded), (COMPRESS_SWAP, r.packed))
    for choice, columns in (*ways, (RECOMPUTE, r.again_root)):
        shares[rows, choice] = _values(x, columns)
    shares[r.free, KEEP] = 1.0
    return np.where(problem.allowed, shares, -1.0)


def _values(x: Float64, columns: Int64) -> Float64:
    """x at the columns; 0 where there is none."""
    return np.where(columns >= 0, x[columns], 0.0)


def rounded(s: Structure, shares: Float64, rng: np.random.Generator | None = None) -> Placements:
    """The placement nearest to the shares; with `rng`, one drawn around them."""
    odds = shares.copy()
    odds[~s.demanded, RECOMPUTE] += 1e-6
    odds = np.where(s.problem.allowed, odds, -1.0)
    if rng is not None:
        odds += rng.uniform(-0.4, 0.4, odds.shape) * (odds > 0)
    placement = base_placement(s.problem, s.demanded)
    placement[s.decisions] = np.argmax(odds, axis=1)[s.decisions]
    return placement


def _choose_anchors(
    s: Structure, flow: Flow, budget: int, curve: Int64, program: Int32, forward: int, most: int
) -> list[int]:
    """Backward and forward node ids to hold the budget at: spread over where keep-all is over the budget.

    The place between forward and backward is always held and is not listed.
    """
    over = np.flatnonzero(curve[: program.shape[0]] > budget)
    over = over[_every_program_runs(s, flow, program[over])]
    if over.shape[0] == 0 or most == 0:
        return []
    inside = over[(over != forward)]
    behind, ahead = inside[inside > forward], inside[inside < forward]
    picked: list[int] = []
    for part, count in ((behind, most - most // 3), (ahead, most // 3)):
        if part.shape[0] and count:
            at = np.linspace(0, part.shape[0] - 1, count + 2)[1:-1].astype(int)
            picked += [int(program[p]) for p in part[at]]
    if inside.shape[0]:
        picked.append(int(program[inside[np.argmax(curve[inside])]]))
    return sorted(set(picked))


def _every_program_runs(s: Structure, flow: Flow, nodes: Int32) -> Bool:
    """Which of the nodes may be anchors: those of the backward, and of the forward those that nothing lets it skip."""
    found: Bool = flow.certain[nodes] | (s.problem.arrays.node_phase[nodes] == BACKWARD)
    return found


def _tight_places(s: Structure, flow: Flow, budget: int, placement: Placements, known: list[int]) -> list[int]:
    """Where the rounded solution is over the budget or waits for memory: node ids for further anchors, worst first."""
    result = simulate(s.problem, placement, budget)
    program, total = result.program, result.program.shape[0]
    busy = instruction_times(s.problem.arrays, program)
    wait = np.diff(result.start_us, prepend=0.0)
    wait[1:] -= busy
    wait -= result.idle_us
    over = np.maximum(0, result.curve[:total] - budget)
    places = [int(p) for p in np.argsort(-over, kind="stable")[:2] if over[p] > 0]
    places += [int(p) for p in np.argsort(-wait[:total], kind="stable")[:3] if wait[p] > 1.0]
    found: list[int] = []
    for p in places:
        anchor = anchor_behind(s, flow, result, p)
        if anchor is not None and anchor not in known and anchor not in found:
            found.append(anchor)
    return found


def anchor_behind(s: Structure, flow: Flow, result: SimResult, position: int) -> int | None:
    """The first node from a place in the program on that may be an anchor, or None."""
    rest = slice(position, result.program.shape[0])
    own = (result.recomputed[rest] == 0) & (result.program[rest] < s.problem.arrays.node_phase.shape[0])
    nodes = result.program[rest][own]
    nodes = nodes[_every_program_runs(s, flow, nodes)]
    return int(nodes[0]) if nodes.shape[0] else None


def _solve(r: Relaxation, milp_seconds: float) -> tuple[float, Float64 | None]:
    """(bound, solution): the linear optimum, or with seconds the integer program's dual bound."""
    options: dict[str, float] = {"time_limit": milp_seconds} if milp_seconds > 0 else {}
    found = milp(
        r.cost,
        integrality=r.integral if milp_seconds > 0 else None,
        bounds=Bounds(np.zeros_like(r.upper), r.upper),
        constraints=LinearConstraint(r.matrix, r.low, np.inf),
        options=options,
    )
    if found.status == 2:
        return float("inf"), None
    if found.status == 0:
        value = float(found.fun)
        solution: Float64 | None = np.asarray(found.x, np.float64)
    else:
        value = float(found.mip_dual_bound) if found.mip_dual_bound is not None else 0.0
        solution = None
    if milp_seconds > 0 and found.mip_dual_bound is not None:
        value = float(found.mip_dual_bound)
    return max(0.0, (value - r.slack) * (1 - _SLACK)), solution
