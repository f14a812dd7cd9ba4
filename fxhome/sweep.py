"""The whole trade-off of a model, offline: one plan per budget, each search started from what its neighbours found.

    trace -> facts, costs -> the smallest feasible budget -> searches from the largest budget down -> a monotone front

Figures are predictions for a device's profile; nothing is run or timed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.fx.graph_module import GraphModule

from fxhome.budget import Budget
from fxhome.device import DeviceProfile
from fxhome.offline import inner_of, plan_joint
from fxhome.options import Options
from fxhome.passes.facts import GraphFacts
from fxhome.passes.plan_builder import placement_codes
from fxhome.passes.search import SearchResult, minimum_peak, sweep
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, SWAP, Problem, simulate
from fxhome.progress import progress
from fxhome.trace_offline import trace_joint

log = logging.getLogger("fxhome")

DEFAULT_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True)
class SweepPoint:
    """One budget. Sizes in bytes; `gap` is the distance of the step from its lower bound, as a fraction of the bound.

    What does not fit has `fits` False, and its peak is the least that was reached. A storage that is encoded on its way
    to the host counts as swapped and as compressed.
    """

    asked: str
    budget_bytes: int
    fits: bool
    peak_bytes: int
    step_seconds: float
    gap: float | None
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    compressed_bytes: int
    host_bytes: int
    evaluations: int


@dataclass(frozen=True)
class Sweep:
    """The front of one model on one device, largest budget first.

    From `baseline_peak_bytes` on, the inner backend's own result is used unchanged. `minimum_bytes`: the smallest
    budget that was found to be feasible.
    """

    device: str
    inner: str
    baseline_peak_bytes: int
    baseline_step_seconds: float
    minimum_bytes: int
    seconds: float
    points: tuple[SweepPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping ready for `json.dumps`."""
        return asdict(self)


def sweep_offline(
    model: nn.Module,
    example_args: tuple[Any, ...],
    options: Options,
    profile: DeviceProfile,
    budgets: Sequence[Budget] = (),
) -> Sweep:
    """Search many budgets for the (first) training graph of `model`; among those that fit, more bytes are never slower.

    budgets: what to ask for; by default every tenth of the baseline's peak down to the smallest feasible budget, and
    that one. `options.memory_budget` and `options.policy` play no part. Raises as planning one budget does.
    """

    def use(joint: GraphModule, inputs: object, num_fwd_outputs: int, static: list[int] | None) -> Sweep:
        began = time.perf_counter()
        everything = replace(options, memory_budget=Budget(bytes=None, share=1.0), policy="pso", plan=None)
        planned = plan_joint(joint, inputs, num_fwd_outputs, static, everything, profile)
        plan, facts, problem = planned.plan, planned.facts, planned.problem
        assert problem is not None, "a plan that was not replayed carries its problem"
        fixed = plan.resident_bytes
        minimum = fixed + minimum_peak(problem)[0]
        asked = list(budgets) or _default_budgets(plan.baseline_peak_bytes, minimum)
        sizes = [budget.resolve(plan.baseline_peak_bytes) for budget in asked]
        with progress("searching budgets", total=len(set(sizes))) as advance:
            results = sweep(
                problem,
                [size - fixed for size in sizes],
                seed=options.seed,
                max_evaluations=options.max_evaluations,
                search_seconds=options.search_seconds,
                storage_class=planned.storage_class,
                seeds=(placement_codes(plan, facts, problem),),
                progress=lambda *_: advance(1),
            )
        found = [
            _point(str(budget), size, fixed, facts, problem, result)
            for budget, size, result in zip(asked, sizes, results, strict=True)
        ]
        return Sweep(
            device=profile.name,
            inner=plan.inner,
            baseline_peak_bytes=plan.baseline_peak_bytes,
            baseline_step_seconds=plan.baseline_step_seconds,
            minimum_bytes=minimum,
            seconds=time.perf_counter() - began,
            points=tuple(sorted(found, key=lambda point: -point.budget_bytes)),
        )

    return trace_joint(
        model,
        example_args,
        inner_of(options, profile),
        use,
        functools.partial(log.warning, "fxhome: %s"),
        planned_for=profile.kind,
    )


def _default_budgets(baseline_bytes: int, minimum_bytes: int) -> list[Budget]:
    """Tenths of the baseline's peak above the smallest feasible budget, and that budget itself."""
    shares = [Budget(bytes=None, share=share) for share in DEFAULT_SHARES if share * baseline_bytes > minimum_bytes]
    return [*shares, Budget(bytes=minimum_bytes, share=None, text="smallest")]


def _point(
    asked: str, budget_bytes: int, fixed_bytes: int, facts: GraphFacts, problem: Problem, result: SearchResult
) -> SweepPoint:
    """A search's result with the bytes of each placement, counted as a plan counts them."""
    run = simulate(problem, result.placement, result.budget_bytes)
    roots = problem.arrays.root_storage[run.nodes[run.recomputed.astype(bool)]]
    rebuilt = np.zeros(problem.num_storages, np.bool_)
    rebuilt[roots[roots >= 0]] = True
    activation = np.array([storage.is_activation for storage in facts.storages], np.bool_)
    saved = activation & (run.saved == 1)
    sizes = np.array([storage.size_bytes for storage in facts.storages], np.int64)

    def saved_as(*codes: int) -> int:
        return int(sizes[saved & np.isin(result.placement, codes)].sum())

    return SweepPoint(
        asked=asked,
        budget_bytes=budget_bytes,
        fits=result.feasible,
        peak_bytes=fixed_bytes + result.peak_bytes,
        step_seconds=result.step_us / 1e6,
        gap=result.gap,
        kept_bytes=saved_as(KEEP),
        swapped_bytes=saved_as(SWAP, COMPRESS_SWAP),
        recomputed_bytes=int(sizes[activation & rebuilt & ~saved].sum()),
        compressed_bytes=saved_as(COMPRESS, COMPRESS_SWAP),
        host_bytes=run.host_bytes,
        evaluations=result.evaluations,
    )
