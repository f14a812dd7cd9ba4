"""A lower bound on the step time within a budget: the relaxation of `relaxation.py`, solved by HiGHS.

The bound is true: no placement that fits is faster by the simulator's own clock. Where the integer program finishes (or
raises its own dual bound) in the seconds given, that is used; a dual bound of a program cut short is still a bound.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from fxhome.passes.search.relaxation import Relaxation, choose_anchors, relax_problem
from fxhome.passes.search.structure import Float64, Structure, read_structure
from fxhome.passes.simulate import Problem, simulate

# HiGHS meets rows to 1e-7 of their scale; the bound gives that away so that it stays one.
_SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Bound:
    """step_us: no placement that fits is faster (inf: none fits). exact: the integer program was solved to its end.

    kept, swapped, again: float64[storages], the solution's shares (again: the root is rebuilt), or None where unsolved.
    """

    step_us: float
    exact: bool
    kept: Float64 | None
    swapped: Float64 | None
    again: Float64 | None


def lower_bound(
    problem: Problem,
    budget_bytes: int,
    *,
    structure: Structure | None = None,
    milp_seconds: float = 0.0,
    max_anchors: int | None = None,
) -> Bound:
    """Bound the step time of any placement whose peak is within `budget_bytes`.

    milp_seconds: 0 solves the linear relaxation alone, deterministically; above it the integer program may raise it.
    """
    s = structure or read_structure(problem)
    base = simulate(problem, problem.keep_all(), budget_bytes)
    most = max_anchors if max_anchors is not None else max(2, min(9, 6000 // max(1, int(s.reachable.sum()))))
    anchors = choose_anchors(s, budget_bytes, base.curve, base.program, base.forward_length, most)
    relaxation = relax_problem(s, budget_bytes, anchors)
    step, x = _solve(relaxation, 0.0)
    exact = False
    if milp_seconds > 0 and np.isfinite(step):
        better, solution = _solve(relaxation, milp_seconds)
        exact = solution is not None
        step = max(step, better)
    if x is None:
        return Bound(step, exact, None, None, None)
    count = relaxation.storages.shape[0]
    shares = np.zeros((3, problem.num_storages))
    shares[0, relaxation.storages] = x[:count]
    shares[1, relaxation.storages] = x[count : 2 * count]
    at = relaxation.again_root
    shares[2, relaxation.storages] = np.where(at >= 0, x[np.maximum(at, 0)], 0.0)
    return Bound(step, exact, shares[0], shares[1], shares[2])


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
    return max(0.0, value * (1 - _SLACK)), solution
