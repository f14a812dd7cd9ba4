"""The inner backend "inductor": plan first, then lower, then hold the plan to the scheduler's own buffers.

    trace 1   AOTAutograd up to the partition -> a plan, nothing lowered
    trace 2   stock Inductor where the baseline fits; else the planned graphs, lowered with their transfers pinned
    check     both graphs' peaks, from the scheduler, before anything runs; too high: plan again with the difference
              as margin, then the smallest plan that is known, then refuse, naming what that one needs
    reserve   what the caching allocator will take for the blocks of a step; more than RESERVED_SHARE above the budget:
              look for a plan whose blocks lie closer, else take the best one

Inductor's caches of compiled kernels stay on; AOTAutograd's own cache is off, because a hit there would skip the plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.graph_module import GraphModule

from fxhome.errors import InfeasibleBudgetError
from fxhome.lowered_store import Lowered, recall, remember
from fxhome.managed_graph import Variant
from fxhome.passes.inductor_check import MeasuredError, OverLimitError, ScatteredError, ScheduleCheck
from fxhome.passes.insert_codecs import codecs_of
from fxhome.passes.pipeline import RESIDENT_SLACK_BYTES, Planned, Situation, rewrite, with_lowering
from fxhome.passes.recorded_layouts import keep_recorded_layouts
from fxhome.passes.torch_compat import copy_dynamo_module
from fxhome.placement import Plan
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

MAX_REPLANS = 2
MAX_CLOSER = 3
"""Plans that are lowered, at most, to find one whose blocks lie close enough."""
RESERVED_SHARE = 0.02
RESERVED_SLACK_BYTES = 64 << 20
"""What the allocator may take above the budget: this share of it, or this much. Where it is short of memory, it gives
back what it holds and maps it elsewhere, and the step waits.
"""

PlanStep = Callable[[GraphModule, object, int, Situation, list[int] | None], Planned]


class _ScatteredPlanError(BaseException):
    """A plan that holds its budget, but for whose blocks the allocator would take too much more."""

    def __init__(self, planned: Planned, situation: Situation, reserved_bytes: int) -> None:
        super().__init__(reserved_bytes)
        self.planned, self.situation, self.reserved_bytes = planned, situation, reserved_bytes

    @property
    def over_bytes(self) -> int:
        """How much closer the blocks must lie."""
        return self.reserved_bytes - _reserved_limit(self.planned.plan.budget_bytes)


class _NothingCloserError(BaseException):
    """No faster plan than the smallest fits with the margin that closer blocks need."""


class _DecidedError(BaseException):
    """Ends the planning trace. Not an Exception: nothing on the way may swallow it."""


def compile_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation
) -> Variant:
    """Plan, lower and check one Dynamo graph. Raises what planning raises."""
    best: _ScatteredPlanError | None = None
    for _ in range(MAX_CLOSER):
        try:
            return _hold_budget(gm, example_inputs, plan_step, situation, fallback=best is not None)
        except _ScatteredPlanError as found:
            best = found if best is None or found.reserved_bytes < best.reserved_bytes else best
            log.warning(
                "fxhome: the blocks of this plan would take %s of the allocator, %s over the budget: "
                "planning again with that margin",
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
    call, predicted = _lower_and_check(gm, example_inputs, best.planned, best.situation, closely=False)
    note = f"the allocator is expected to take {format_bytes(best.reserved_bytes)} for it: blocks leave holes"
    plan = replace(best.planned.checked(predicted), notes=(*best.planned.plan.notes, note))
    best.planned.plan = plan
    return Variant(call, best.situation, best.planned, plan)


def _hold_budget(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation, *, fallback: bool
) -> Variant:
    """Plan until the lowered peak is in the budget. `fallback`: a plan is known, so the smallest one is not tried."""
    first = situation
    for attempt in range(MAX_REPLANS + 1):
        if attempt == MAX_REPLANS:
            # Nothing faster fits once lowered: the smallest plan does, if the budget can be met at all.
            situation = _for_the_smallest(first, situation)
        if situation.smallest and fallback:
            raise _NothingCloserError
        try:
            planned = _plan_only(gm, example_inputs, plan_step, situation)
        except InfeasibleBudgetError as refusal:
            if fallback:
                raise _NothingCloserError from None
            if attempt == 0:
                raise _with_lowered_minimum(refusal, gm, example_inputs, plan_step, situation) from None
            # With the margin that an earlier lowering asked for nothing fits by the model: only the smallest is left.
            situation = _for_the_smallest(first, situation)
            planned = _plan_only(gm, example_inputs, plan_step, situation)
        if planned is None:
            return Variant(_lower(gm, example_inputs, None, None, {}), situation, None, None)
        call: Callable[..., Any] | None
        try:
            call, predicted = _lower_and_check(gm, example_inputs, planned, situation, closely=not situation.smallest)
        except OverLimitError as found:
            call, predicted = None, _resident_peak(planned, situation, found)
        except ScatteredError as found:
            raise _ScatteredPlanError(planned, situation, found.reserved_bytes + planned.plan.resident_bytes) from None
        if planned.is_baseline and planned.plan.asked.endswith("%"):
            planned.plan = _share_of_lowered(planned.plan, predicted)
        over = predicted + situation.error_bound_bytes - planned.plan.budget_bytes
        missed = predicted - planned.plan.predicted_peak_bytes
        planned.plan = planned.checked(predicted)
        if call is not None and (over <= 0 or planned.is_best_effort):
            return Variant(call, situation, planned, planned.plan)
        log.warning(
            "fxhome: after lowering, the scheduler's buffers need %s, %s over the budget: %s",
            format_bytes(predicted),
            format_bytes(over),
            "nothing smaller is known" if situation.smallest else "planning again with that margin",
        )
        if situation.smallest:
            break
        more = missed + over // 8 if missed > 0 else situation.lowering_bytes + over
        situation = with_lowering(situation, more, planned.plan.budget_bytes)
    assert planned is not None
    raise planned.refuse(_lowered_minimum(gm, example_inputs, plan_step, situation))


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
    """What the smallest plan needs by the scheduler's buffers, its copies moved out of the way; nothing is compiled."""
    from torch._inductor.compile_fx import compile_fx_inner

    planned = _plan_only(gm, example_inputs, plan_step, replace(situation, smallest=True))
    assert planned is not None, "what was refused has a backward"
    check = ScheduleCheck(
        planned.plan.program, planned.workspace_by_node, 0, 0, stops_over_limit=False, only_measures=True
    )

    def measure(graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        with contextlib.suppress(MeasuredError):
            compile_fx_inner(graph, inputs, **settings)
        if check.backward is not None:
            raise _DecidedError
        return _never_run

    patches = _patches(planned) | {"fx_graph_cache": False}
    with contextlib.suppress(_DecidedError):
        _lower(gm, example_inputs, planned, check, patches, inner_compile=measure)
    predicted = _checked_peak(planned, check, situation)
    assert predicted is not None, "without a cache the scheduler runs"
    return predicted + situation.error_bound_bytes + RESIDENT_SLACK_BYTES[planned.facts.planned_for]


def _never_run(_: list[Any]) -> Any:
    raise AssertionError("a graph that was only measured is not run")


_never_run._boxed_call = True  # type: ignore[attr-defined]


def _lower_and_check(
    gm: GraphModule, example_inputs: Sequence[Any], planned: Planned, situation: Situation, *, closely: bool = True
) -> tuple[Callable[..., Any], int]:
    """The compiled graphs and their checked peak; where a warm cache skipped the check and none is stored, compile
    anew. closely: blocks that would not lie close enough raise ScatteredError.
    """
    fingerprint = planned.plan.fingerprint()
    check = _check_for(planned, situation, closely=closely)
    known = recall(fingerprint, planned.is_baseline)
    limit = check.reserved_limit_bytes
    if known is not None and known.reserved_bytes is not None and limit is not None and known.reserved_bytes > limit:
        raise ScatteredError(known.reserved_bytes)
    try:
        call = _lower(gm, example_inputs, planned, check, _patches(planned))
    except ScatteredError:
        _remember(planned, check, situation)
        raise
    predicted = _checked_peak(planned, check, situation)
    if predicted is None:
        if known is not None:
            return call, planned.plan.resident_bytes + known.above_resident_bytes
        with torch._inductor.config.patch(fx_graph_cache=False):
            call = _lower(gm, example_inputs, planned, check, _patches(planned))
        predicted = _checked_peak(planned, check, situation)
        assert predicted is not None, "without a cache the scheduler runs"
    _remember(planned, check, situation)
    log.debug(
        "model peak %d; lowered forward: %s; backward: %s",
        planned.plan.predicted_peak_bytes,
        check.forward,
        check.backward,
    )
    return call, predicted


def _remember(planned: Planned, check: ScheduleCheck, situation: Situation) -> None:
    predicted = _checked_peak(planned, check, situation)
    assert predicted is not None, "both graphs were seen"
    lowered = Lowered(predicted - planned.plan.resident_bytes, check.reserved_bytes)
    remember(planned.plan.fingerprint(), planned.is_baseline, lowered)


def _reserved_limit(budget_bytes: int) -> int:
    return budget_bytes + max(RESERVED_SLACK_BYTES, int(budget_bytes * RESERVED_SHARE))


def _check_for(planned: Planned, situation: Situation, *, closely: bool) -> ScheduleCheck:
    if planned.is_baseline or planned.is_best_effort:
        return ScheduleCheck(planned.plan.program if planned.is_best_effort else (), planned.workspace_by_node)
    room = planned.plan.budget_bytes - planned.plan.resident_bytes - situation.error_bound_bytes
    behind = _behind_bytes(planned, situation)
    # Only CUDA's allocator keeps what is freed.
    closely = closely and planned.facts.planned_for == "cuda"
    reserved = _reserved_limit(planned.plan.budget_bytes) - planned.plan.resident_bytes - situation.error_bound_bytes
    return ScheduleCheck(
        planned.plan.program,
        planned.workspace_by_node,
        room,
        room - behind,
        reserved_limit_bytes=reserved if closely else None,
    )


def _behind_bytes(planned: Planned, situation: Situation) -> int:
    """What the caller and others hold while the backward runs."""
    return planned.output_bytes + planned.tangent_bytes + situation.outside_bytes


def _resident_peak(planned: Planned, situation: Situation, found: OverLimitError) -> int:
    """The peak of the step as far as the graph that was over its limit tells."""
    behind = _behind_bytes(planned, situation) if found.is_backward else 0
    return planned.plan.resident_bytes + found.peak.peak_bytes + behind


def _plan_only(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation
) -> Planned | None:
    found: list[Planned] = []

    def decide(
        joint: GraphModule, inputs: object, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[GraphModule, GraphModule]:
        found.append(plan_step(joint, inputs, num_fwd_outputs, situation, static))
        raise _DecidedError

    def never(*_: Any, **__: Any) -> Any:
        raise _DecidedError

    with contextlib.suppress(_DecidedError):
        _compile_fx(
            gm, example_inputs, {"custom_partitioner_fn": _Partitioner(decide, "planning")}, inner_compile=never
        )
    return found[0] if found else None


def _lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    planned: Planned | None,
    check: ScheduleCheck | None,
    patches: dict[str, Any],
    **extra: Any,
) -> Callable[..., Any]:
    if planned is not None and not planned.is_baseline:
        keep_recorded_layouts()

        def follow(
            joint: GraphModule, _: object, num_fwd_outputs: int, __: list[int] | None
        ) -> tuple[GraphModule, GraphModule]:
            return rewrite(
                joint,
                planned.plan.program,
                num_fwd_outputs,
                codecs_of(planned.plan),
                planned.plan.graph_fingerprint,
                planned.layouts,
            )

        patches = patches | {"custom_partitioner_fn": _Partitioner(follow, planned.plan.fingerprint())}
    if check is not None:
        patches = patches | {"_post_fusion_custom_pass": check}
    # Lowering the backward now is what lets its peak be checked before anything runs; a donated buffer would then
    # forbid
    # backward(retain_graph=True).
    planned_here = planned is not None and not planned.is_baseline
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=check is not None):
        with torch._functorch.config.patch(donated_buffer=False) if planned_here else contextlib.nullcontext():
            return _compile_fx(gm, example_inputs, patches, **extra)


def _compile_fx(
    gm: GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any], **extra: Any
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    # compile_fx owns what it is given and may change it; a later plan starts from the same graph again.
    own = copy_dynamo_module(gm)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(own, list(example_inputs), config_patches=patches, **extra)
    result: Callable[..., Any] = compiled
    return result


def _patches(planned: Planned) -> dict[str, Any]:
    if planned.is_baseline:
        return {}
    moves = any(item.kind.startswith("swap") or item.kind in ("encode", "decode") for item in planned.plan.program)
    # Inductor may order compute for its own peak, but copies stand where the plan wants them.
    pinned = {"reorder_for_peak_memory": False} if moves else {}
    # A buffer kept for a later one of its size is memory that nothing in the plan knows of; the allocator's own cache
    # serves as well.
    # Nor does a plan know of convolutions in another layout than its graph's: of their copies and their workspace. What
    # Inductor would choose is in that graph already (passes/channels_last.py).
    return pinned | {"allow_buffer_reuse": False, "layout_optimization": False}


class _Partitioner(CustomPartitionerFn):
    """Hands the joint graph to `function`; in Inductor's cache keys it stands for the plan."""

    def __init__(self, function: Callable[..., tuple[GraphModule, GraphModule]], identity: str) -> None:
        self.function = function
        self.identity = identity

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return self.function(gm, joint_inputs, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices"))

    def uuid(self) -> str:
        return self.identity

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.identity,)


def _checked_peak(planned: Planned, check: ScheduleCheck, situation: Situation) -> int | None:
    """Peak of both lowered graphs over what is resident; None where a warm cache skipped the scheduler."""
    if check.forward is None or check.backward is None:
        return None
    resident = planned.plan.resident_bytes
    forward = check.forward.peak_bytes
    backward = check.backward.peak_bytes + _behind_bytes(planned, situation)
    between = check.forward.end_bytes + situation.outside_bytes + situation.between_bytes
    return resident + max(forward, backward, between)
