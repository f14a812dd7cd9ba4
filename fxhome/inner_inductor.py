"""The inner backend "inductor": plan first, then lower, then hold the plan to the scheduler's own buffers.

    trace 1   AOTAutograd up to the partition -> a plan, nothing lowered
    trace 2   stock Inductor where the baseline fits; else the planned graphs, lowered with their transfers pinned
    check     both graphs' peaks, from the scheduler, before anything runs; too high: plan again with the difference
              as margin, then with a generous one, then the smallest plan that is known, then refuse, naming what
              that one needs
    reserve   what the caching allocator will take for the blocks of a step: more than RESERVED_SHARE above the budget,
              they are laid where they fit (placed_blocks.py), and so are those that are seen to be scattered; still
              more: look for a plan whose blocks lie closer, else take the best one; where that one does not run under
              a cap, the smallest plan, if it does

Inductor's caches of compiled kernels stay on; AOTAutograd's own cache is off, because a hit there would skip the plan.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx.graph_module import GraphModule

from fxhome.errors import InfeasibleBudgetError
from fxhome.inductor_graphs import (
    RESERVED_SHARE,
    DecidedError,
    LoweredGraphs,
    PlanStep,
    boundary_peak,
    budget_for,
    checked_peak,
    lower,
    lower_and_check,
    patches_of,
    plan_only,
    reserved_limit,
    resident_peak,
)
from fxhome.passes.inductor_check import (
    LayoutError,
    MeasuredError,
    OverLimitError,
    ScatteredError,
    ScheduleCheck,
)
from fxhome.passes.planned import Planned
from fxhome.passes.refusal import RESIDENT_SLACK_BYTES
from fxhome.passes.situation import Situation, with_lowering
from fxhome.passes.torch_compat import graph_caches_off
from fxhome.placement import Plan
from fxhome.units import format_bytes
from fxhome.variant import Variant

log = logging.getLogger("fxhome")

MAX_REPLANS = 3
"""The last one is the smallest plan that is known; the ones before ask for a margin, and then for a generous one."""
GENEROUS = 200
"""The part of the budget that the generous margin is at least larger."""
HALVINGS = 2
"""Margins that are tried between one that is too large and the one before."""
MAX_CLOSER = 3
"""Plans that are lowered, at most, to find one whose blocks lie close enough."""


class _ScatteredPlanError(BaseException):
    """A plan that holds its budget, but for whose blocks the allocator would take too much more."""

    def __init__(
        self, planned: Planned, situation: Situation, reserved_bytes: int, is_enforceable: bool = True
    ) -> None:
        super().__init__(reserved_bytes)
        self.planned, self.situation, self.reserved_bytes = planned, situation, reserved_bytes
        self.is_enforceable = is_enforceable

    @property
    def badness(self) -> tuple[bool, int]:
        """What the best of several has least of."""
        return not self.is_enforceable, self.reserved_bytes

    @property
    def over_bytes(self) -> int:
        """How much closer the blocks must lie."""
        return self.reserved_bytes - reserved_limit(self.planned.plan.budget_bytes)


class _NothingCloserError(BaseException):
    """No faster plan than the smallest fits with the margin that closer blocks need."""


def compile_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation
) -> Variant:
    """Plan, lower and check one Dynamo graph. Raises what planning raises."""
    best: _ScatteredPlanError | None = None
    margin_bytes = situation.lowering_bytes
    for _ in range(MAX_CLOSER):
        try:
            return _hold_budget(gm, example_inputs, plan_step, situation, fallback=best is not None)
        except _ScatteredPlanError as found:
            best = found if best is None or found.badness < best.badness else best
            log.warning(
                "fxhome: the blocks of this plan would take %s of the allocator, %s over the budget: "
                "looking for one that lies closer",
                format_bytes(found.reserved_bytes),
                format_bytes(found.reserved_bytes - found.planned.plan.budget_bytes),
            )
            # How blocks fall has little to do with how much there is: another plan may do much better or worse.
            step = min(found.over_bytes, int(found.planned.plan.budget_bytes * RESERVED_SHARE))
            more = found.situation.lowering_bytes + step
            situation = with_lowering(found.situation, more, found.planned.plan.budget_bytes)
        except _NothingCloserError:
            break
    assert best is not None, "the first plan is returned, refused or found scattered"
    if not best.is_enforceable:
        smallest = _smallest_enforceable(gm, example_inputs, plan_step, best.situation, margin_bytes)
        if smallest is not None:
            return smallest
    lowered = lower_and_check(gm, example_inputs, best.planned, best.situation, closely=False)
    plan = best.planned.plan = best.planned.checked(lowered.predicted_bytes)
    best.planned.kept_free_bytes = lowered.kept_free_bytes
    return Variant(lowered.call, best.situation, best.planned, plan, blocks=lowered.blocks, timer=lowered.timer)


def _smallest_enforceable(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation, margin_bytes: int
) -> Variant | None:
    """The smallest plan of all, by which a minimum is named, where it runs under a cap; else None."""
    smallest = replace(situation, lowering_bytes=margin_bytes, smallest=True, tightest=True)
    try:
        planned = plan_only(gm, example_inputs, plan_step, smallest)
        assert planned is not None, "what was scattered has a backward"
        lowered = lower_and_check(gm, example_inputs, planned, smallest, closely=False)
    except (InfeasibleBudgetError, OverLimitError, LayoutError):
        return None
    needed = lowered.predicted_bytes + lowered.kept_free_bytes + smallest.error_bound_bytes
    if needed > planned.plan.budget_bytes or not lowered.is_enforceable:
        return None
    planned.plan, planned.kept_free_bytes = planned.checked(lowered.predicted_bytes), lowered.kept_free_bytes
    return Variant(lowered.call, smallest, planned, planned.plan, blocks=lowered.blocks, timer=lowered.timer)


def _hold_budget(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation, *, fallback: bool
) -> Variant:
    """Plan until the lowered peak is in the budget. `fallback`: a plan is known, so the smallest one is not tried."""
    first = situation
    held_bytes = situation.lowering_bytes
    for attempt in itertools.count():
        if attempt == MAX_REPLANS and not situation.smallest:
            # Nothing faster fits once lowered: the smallest plan does, if the budget can be met at all.
            situation = _for_the_smallest(first, situation)
        if situation.smallest and fallback:
            raise _NothingCloserError
        try:
            planned = plan_only(gm, example_inputs, plan_step, situation)
        except InfeasibleBudgetError as refusal:
            if fallback:
                raise _NothingCloserError from None
            if attempt == 0:
                raise _with_lowered_minimum(refusal, gm, example_inputs, plan_step, situation) from None
            # With the margin that a lowering asked for nothing fits by the model. The next plan may miss by less; where
            # nothing fits with a larger margin than the last one had, only the smallest plan is left.
            less = _with_less_margin(gm, example_inputs, plan_step, held_bytes, situation)
            if less is None:
                situation = _for_the_smallest(first, situation)
                less = situation, plan_only(gm, example_inputs, plan_step, situation)
            situation, planned = less
        if planned is None:
            return Variant(lower(gm, example_inputs, None, None, {}), situation, None, None)
        held_bytes = situation.lowering_bytes
        lowered: LoweredGraphs | None = None
        try:
            lowered = lower_and_check(gm, example_inputs, planned, situation, closely=not situation.smallest)
            predicted = lowered.predicted_bytes
            kept_free = lowered.kept_free_bytes
        except OverLimitError as found:
            predicted, kept_free = resident_peak(planned, situation, found), 0
        except LayoutError as found:
            log.info("fxhome: Inductor fixes the layout of %s: not moved", ", ".join(sorted(found.names)))
            fixed = tuple(sorted({*first.fixed_layouts, *found.names}))
            assert fixed != first.fixed_layouts, "what is not moved is not checked"
            again = replace(first, fixed_layouts=fixed, settled_bytes=planned.plan.budget_bytes)
            return _hold_budget(gm, example_inputs, plan_step, again, fallback=fallback)
        except ScatteredError as found:
            reserved_bytes = found.reserved_bytes + planned.plan.resident_bytes
            raise _ScatteredPlanError(planned, situation, reserved_bytes, found.is_enforceable) from None
        if planned.is_baseline and planned.plan.asked.endswith("%"):
            planned.plan = _share_of_lowered(planned.plan, predicted)
        over = predicted + kept_free + situation.error_bound_bytes - planned.plan.budget_bytes
        missed = predicted + kept_free - planned.plan.predicted_peak_bytes - planned.kept_free_bytes
        planned.plan, planned.kept_free_bytes = planned.checked(predicted), kept_free
        if lowered is not None and (over <= 0 or planned.is_best_effort):
            blocks, timer = lowered.blocks, lowered.timer
            return Variant(lowered.call, situation, planned, planned.plan, blocks=blocks, timer=timer)
        log.warning(
            "fxhome: after lowering, the scheduler's buffers need %s, %s over the budget: %s",
            format_bytes(predicted + kept_free),
            format_bytes(over),
            "nothing smaller is known"
            if situation.tightest
            else "planning again with its copies out of the way"
            if situation.smallest
            else "planning again with that margin",
        )
        if situation.tightest:
            break
        if situation.smallest:
            # A copy that ends late makes no difference by the model, and may once lowered.
            situation = replace(situation, tightest=True)
            continue
        more = missed + over // 8 if missed > 0 else situation.lowering_bytes + over
        if attempt:
            more = max(more, situation.lowering_bytes + 2 * over + planned.plan.budget_bytes // GENEROUS)
        situation = with_lowering(situation, more, planned.plan.budget_bytes)
    assert planned is not None
    if first.leave_room:
        # What saves least need not be what needs least once lowered: this graph's own promise comes first.
        own = replace(first, leave_room=False, settled_bytes=situation.settled_bytes)
        return _hold_budget(gm, example_inputs, plan_step, own, fallback=fallback)
    raise planned.refuse(_lowered_minimum(gm, example_inputs, plan_step, situation))


def _with_less_margin(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, held_bytes: int, situation: Situation
) -> tuple[Situation, Planned | None] | None:
    """What fits by the model with more margin than `held_bytes` and less than the situation's, with as much as a few
    tries find; None where nothing does.
    """
    found: tuple[Situation, Planned | None] | None = None
    low, high = held_bytes, situation.lowering_bytes
    for _ in range(HALVINGS):
        less = replace(situation, lowering_bytes=(low + high) // 2)
        try:
            found = less, plan_only(gm, example_inputs, plan_step, less)
            low = less.lowering_bytes
        except InfeasibleBudgetError:
            high = less.lowering_bytes
    return found


def _for_the_smallest(first: Situation, latest: Situation) -> Situation:
    """The first situation, without the margins that lowerings asked for, and the budget that the latest came to."""
    return replace(first, smallest=True, settled_bytes=latest.settled_bytes)


def _share_of_lowered(plan: Plan, lowered_bytes: int) -> Plan:
    """The baseline's plan with a budget that is a share of what the baseline turned out to need, not of the model's."""
    if lowered_bytes <= plan.baseline_peak_bytes:
        return plan
    budget_bytes = plan.budget_bytes * lowered_bytes // plan.baseline_peak_bytes + 1
    return replace(plan, budget_bytes=budget_bytes, baseline_peak_bytes=lowered_bytes)


def _with_lowered_minimum(
    refusal: InfeasibleBudgetError,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan_step: PlanStep,
    situation: Situation,
) -> InfeasibleBudgetError:
    """The same refusal, naming what the smallest plan needs once lowered where that is more than the model says."""
    if refusal.minimum_bytes is None or refusal.budget_bytes is None:
        return refusal
    settled = replace(situation, settled_bytes=refusal.budget_bytes)
    lowered = _lowered_minimum(gm, example_inputs, plan_step, settled)
    if lowered <= refusal.minimum_bytes:
        return refusal
    text = str(refusal).replace(format_bytes(refusal.minimum_bytes), format_bytes(lowered))
    return InfeasibleBudgetError(
        text.replace(str(refusal.minimum_bytes), str(lowered)),
        minimum_bytes=lowered,
        budget_bytes=refusal.budget_bytes,
        holders=refusal.holders,
    )


def _lowered_minimum(gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation) -> int:
    """What the smallest plan needs by the scheduler's buffers, its copies moved out of the way, lowered in the manner
    that takes least (as `lower_and_check` would); nothing is compiled.
    """
    planned = plan_only(gm, example_inputs, plan_step, replace(situation, smallest=True, tightest=True))
    assert planned is not None, "what was refused has a backward"
    check = _measured(gm, example_inputs, planned)
    least = _needed_bytes(planned, check, situation)
    if not check.has_parts:
        return least
    whole = _measured(gm, example_inputs, planned, keeps_concatenations_whole=True)
    return min(least, _needed_bytes(planned, whole, situation))


def _measured(
    gm: GraphModule, example_inputs: Sequence[Any], planned: Planned, *, keeps_concatenations_whole: bool = False
) -> ScheduleCheck:
    """What the scheduler says of a plan's two graphs, whatever that is; nothing is compiled."""
    from torch._inductor.compile_fx import compile_fx_inner

    check = ScheduleCheck(
        planned.plan.program,
        planned.workspace_by_node,
        0,
        0,
        stops_over_limit=False,
        only_measures=True,
        keeps_concatenations_whole=keeps_concatenations_whole,
        held_inputs=planned.held_inputs,
    )

    def measure(graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        with contextlib.suppress(MeasuredError):
            compile_fx_inner(graph, inputs, **settings)
        if check.backward is not None:
            raise DecidedError
        return _never_run

    patches = patches_of(planned) | graph_caches_off()
    with contextlib.suppress(DecidedError):
        lower(gm, example_inputs, planned, check, patches, inner_compile=measure)
    return check


def _needed_bytes(planned: Planned, check: ScheduleCheck, situation: Situation) -> int:
    predicted = checked_peak(planned, check, situation)
    assert predicted is not None, "without a cache the scheduler runs"
    between = boundary_peak(check, situation) + situation.between_bytes
    predicted = max(predicted, planned.plan.resident_bytes + between)
    return enforceable_minimum(planned, situation, predicted, check.least_cap_bytes)


def enforceable_minimum(
    planned: Planned, situation: Situation, predicted_bytes: int, least_cap_bytes: int | None
) -> int:
    """The budget to ask for where the smallest plan, which may be over the budget that was asked, needs that."""
    more = situation.error_bound_bytes + RESIDENT_SLACK_BYTES[planned.facts.planned_for]
    if planned.facts.planned_for != "cuda":
        return predicted_bytes + more
    # Enforced, it must be enough for the holes between its blocks as well, until these are laid.
    assert least_cap_bytes is not None, "both graphs were seen"
    return max(predicted_bytes + more, budget_for(least_cap_bytes, planned.plan.resident_bytes + more))


def _never_run(_: list[Any]) -> Any:
    raise AssertionError("a graph that was only measured is not run")


_never_run._boxed_call = True  # type: ignore[attr-defined]
