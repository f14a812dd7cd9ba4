"""One Dynamo graph through Inductor: traced up to its plan, or lowered with the plan and held to its limits.

plan_only          trace up to the partition, hand the joint graph to the planner, lower nothing
lower              the planned graphs, their transfers pinned; stock settings for a baseline
lower_and_check    the same, with the peak by the scheduler's buffers, from a store where a cache hit skips them
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.graph_module import GraphModule

from fxhome.generated_code import HookError
from fxhome.hooked_graphs import CompiledGraphs, place_blocks, time_host
from fxhome.host_timer import CudaDevice, HostTimer
from fxhome.lowered_store import Lowered, recall, remember
from fxhome.passes.allocator import PAGE_BYTES
from fxhome.passes.inductor_check import OverLimitError, ScatteredError, ScheduleCheck
from fxhome.passes.inlined_random import random_numbers_inlined
from fxhome.passes.insert_codecs import codecs_of
from fxhome.passes.pipeline import rewrite
from fxhome.passes.planned import Planned
from fxhome.passes.recorded_layouts import channels_last_kept, keep_recorded_layouts
from fxhome.passes.reused_buffers import buffers_used_again
from fxhome.passes.situation import Situation
from fxhome.passes.torch_compat import copy_dynamo_module, graph_caches_off
from fxhome.passes.whole_concatenations import concatenations_kept_whole
from fxhome.placed_blocks import PlacedBlocks
from fxhome.raw_allocator import CudaAllocator
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

RESERVED_SHARE = 0.02
RESERVED_SLACK_BYTES = 64 << 20
"""What the allocator may take above the budget: this share of it, or this much. Where it is short of memory, it gives
back what it holds and maps it elsewhere, and the step waits.
"""
CAP_SHARE = 0.03
CAP_SLACK_BYTES = 256 << 20
"""What the allocator has above a budget that is enforced, at least: in the first steps, before blocks are laid, it must
be enough for the holes between them.
"""
PARTS_BYTES = 3 * PAGE_BYTES
"""Parts of pages beside what is resident, and the pages of small blocks."""
PlanStep = Callable[[GraphModule, object, int, Situation, list[int] | None], Planned]


@dataclass(frozen=True)
class LoweredGraphs:
    """The two graphs as one callable, their peak in bytes, what lays their blocks where they are scattered, what times
    the host in them where there is one, what must be free beside their peak for graphs that run between the two, and
    whether their blocks find room under a cap before they are laid.
    """

    call: Callable[..., Any]
    predicted_bytes: int
    blocks: PlacedBlocks | None
    timer: HostTimer | None = None
    kept_free_bytes: int = 0
    is_enforceable: bool = True


class DecidedError(BaseException):
    """Ends the planning trace. Not an Exception: nothing on the way may swallow it."""


def plan_only(
    gm: GraphModule, example_inputs: Sequence[Any], plan_step: PlanStep, situation: Situation
) -> Planned | None:
    """The plan of a graph, made by `plan_step` where its joint graph is partitioned; None without a backward."""
    found: list[Planned] = []

    def decide(
        joint: GraphModule, inputs: object, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[GraphModule, GraphModule]:
        found.append(plan_step(joint, inputs, num_fwd_outputs, situation, static))
        raise DecidedError

    def never(*_: Any, **__: Any) -> Any:
        raise DecidedError

    with contextlib.suppress(DecidedError):
        _compile_fx(
            gm, example_inputs, {"custom_partitioner_fn": _Partitioner(decide, "planning")}, inner_compile=never
        )
    return found[0] if found else None


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    planned: Planned | None,
    check: ScheduleCheck | None,
    patches: dict[str, Any],
    **extra: Any,
) -> Callable[..., Any]:
    """Compile a graph with Inductor: as planned, or as it is where the plan is the baseline's."""
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
    # forbid backward(retain_graph=True).
    planned_here = planned is not None and not planned.is_baseline
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=check is not None):
        if not planned_here:
            return _compile_fx(gm, example_inputs, patches, **extra)
        assert check is not None, "a plan is checked"
        joined = concatenations_kept_whole() if check.keeps_concatenations_whole else contextlib.nullcontext()
        kept = buffers_used_again(lambda: check.room)
        laid_out, inlined = channels_last_kept(), random_numbers_inlined()
        with torch._functorch.config.patch(donated_buffer=False), laid_out, inlined, joined, kept:
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


def patches_of(planned: Planned) -> dict[str, Any]:
    """Inductor's settings under which a plan is true; none for a baseline."""
    if planned.is_baseline:
        return {}
    # Inductor would order kernels for its own estimate of the peak, behind the check: what runs is the order that was
    # checked.
    # Nor does a plan know of convolutions in another layout than its graph's: of their copies and their workspace. What
    # Inductor would choose is in that graph already (passes/channels_last.py).
    # Which buffers are kept for later ones is for passes/reused_buffers.py to say.
    return {"reorder_for_peak_memory": False, "allow_buffer_reuse": True, "layout_optimization": False}


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


def lower_and_check(
    gm: GraphModule, example_inputs: Sequence[Any], planned: Planned, situation: Situation, *, closely: bool = True
) -> LoweredGraphs:
    """The compiled graphs and their checked peak; where a warm cache skipped the check and none is stored, compile
    anew. closely: blocks that could not be laid close enough raise ScatteredError.

    Where a concatenation that is allocated with its first part is too much, all of them are written at once.
    """
    check = check_for(planned, situation, closely=closely)
    try:
        return _lower_and_check(gm, example_inputs, planned, situation, check, closely=closely)
    except OverLimitError as over:
        if not check.has_parts:
            raise
        log.info(
            "fxhome: concatenations that are allocated with their first part take %s: written at once instead",
            format_bytes(over.peak.peak_bytes),
        )
        whole = check_for(planned, situation, closely=closely, keeps_concatenations_whole=True)
        return _lower_and_check(gm, example_inputs, planned, situation, whole, closely=closely)


def _lower_and_check(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    planned: Planned,
    situation: Situation,
    check: ScheduleCheck,
    *,
    closely: bool,
) -> LoweredGraphs:
    fingerprint = planned.plan.fingerprint()
    known = recall(fingerprint, planned.is_baseline)
    if closely and known is not None and known.packed_bytes is not None and known.least_cap_bytes is not None:
        check.stop_scattered(known.packed_bytes, known.least_cap_bytes)
    compiled = CompiledGraphs()
    try:
        call = lower(gm, example_inputs, planned, check, patches_of(planned), inner_compile=compiled.compile)
    except ScatteredError:
        _remember(planned, check, situation)
        raise
    predicted = checked_peak(planned, check, situation)
    if predicted is None:
        if known is not None:
            return _lowered_graphs(planned, situation, known, compiled, call)
        compiled = CompiledGraphs()
        with torch._inductor.config.patch(graph_caches_off()):
            call = lower(gm, example_inputs, planned, check, patches_of(planned), inner_compile=compiled.compile)
        predicted = checked_peak(planned, check, situation)
        assert predicted is not None, "without a cache the scheduler runs"
    known = _remember(planned, check, situation)
    log.debug(
        "model peak %d; lowered forward: %s; backward: %s",
        planned.plan.predicted_peak_bytes,
        check.forward,
        check.backward,
    )
    return _lowered_graphs(planned, situation, known, compiled, call)


def _lowered_graphs(
    planned: Planned, situation: Situation, known: Lowered, compiled: CompiledGraphs, call: Callable[..., Any]
) -> LoweredGraphs:
    planned.forward_bytes = known.forward_bytes
    return LoweredGraphs(
        call,
        planned.plan.resident_bytes + known.above_resident_bytes,
        _blocks(planned, situation, known, compiled),
        _timer(planned, compiled),
        kept_free_bytes(known, situation),
        is_enforceable(planned, situation, known),
    )


def _timer(planned: Planned, compiled: CompiledGraphs) -> HostTimer | None:
    """What times the host in both graphs, the hooks of their blocks included; None where there is no host to time."""
    if planned.hosted is None:
        return None
    timer = HostTimer(planned.hosted.launches, CudaDevice())
    return timer if time_host(compiled, timer) else None


def _blocks(planned: Planned, situation: Situation, known: Lowered, compiled: CompiledGraphs) -> PlacedBlocks | None:
    """What lays the blocks of a plan where the allocator scatters them, and a note where it is expected to."""
    plan = planned.plan
    if not keeps_freed_blocks(planned):
        return None
    is_expected, note = False, ""
    if known.least_cap_bytes is not None and not is_enforceable(planned, situation, known):
        outside = plan.resident_bytes + situation.error_bound_bytes
        least = format_bytes(known.least_cap_bytes + outside + PARTS_BYTES)
        first = f"until its blocks are laid, the allocator needs {least}: with less, a first step runs out of memory"
        plan = planned.plan = replace(plan, notes=(*plan.notes, first))
    if known.reserved_bytes is not None and known.packed_bytes is not None:
        scattered = known.reserved_bytes + plan.resident_bytes
        is_expected = is_scattered(scattered + situation.error_bound_bytes, plan.budget_bytes)
        laid = format_bytes(known.packed_bytes + plan.resident_bytes)
        note = f"left to the allocator, blocks would take {format_bytes(scattered)} of it: holes"
    try:
        blocks = place_blocks(
            compiled,
            CudaAllocator(torch.cuda.current_device()),
            limit_bytes=reserved_limit(plan.budget_bytes),
            is_expected=is_expected,
        )
    except HookError as reason:
        log.warning("fxhome: blocks are left to the allocator: %s", reason)
        if is_expected:
            planned.plan = replace(plan, notes=(*plan.notes, f"{note}; they are not laid: {reason}"))
        return None
    if is_expected:
        note += f"; laid where they fit, from the fourth step on, about {laid}"
        planned.plan = replace(plan, notes=(*plan.notes, note))
    return blocks


def _remember(planned: Planned, check: ScheduleCheck, situation: Situation) -> Lowered:
    predicted = checked_peak(planned, check, situation)
    assert predicted is not None, "both graphs were seen"
    above = predicted - planned.plan.resident_bytes
    boundary = boundary_peak(check, situation)
    assert check.forward is not None
    forward = check.forward.peak_bytes
    lowered = Lowered(above, check.reserved_bytes, check.packed_bytes, check.least_cap_bytes, boundary, forward)
    remember(planned.plan.fingerprint(), planned.is_baseline, lowered)
    return lowered


def keeps_freed_blocks(planned: Planned) -> bool:
    """Whether a plan's blocks can leave holes: only CUDA's allocator keeps what is freed. A baseline is left alone."""
    return planned.facts.planned_for == "cuda" and not planned.is_baseline and not planned.is_best_effort


def is_enforceable(planned: Planned, situation: Situation, known: Lowered) -> bool:
    """Whether a plan runs where its budget is enforced, in the steps before its blocks are laid as well."""
    if known.least_cap_bytes is None or not keeps_freed_blocks(planned):
        return True
    outside = planned.plan.resident_bytes + situation.error_bound_bytes
    return known.least_cap_bytes <= room_under(cap_of(planned.plan.budget_bytes), outside)


def is_scattered(reserved_bytes: int, budget_bytes: int) -> bool:
    """Whether blocks are worth laying: left to itself, the allocator would take so much for them."""
    return reserved_bytes > reserved_limit(budget_bytes)


def reserved_limit(budget_bytes: int) -> int:
    """What the allocator may take for a budget, in bytes."""
    return budget_bytes + max(RESERVED_SLACK_BYTES, int(budget_bytes * RESERVED_SHARE))


def cap_of(budget_bytes: int) -> int:
    """What the allocator is expected to have for a budget where that is enforced, in bytes."""
    return budget_bytes + max(CAP_SLACK_BYTES, int(budget_bytes * CAP_SHARE))


def room_under(cap_bytes: int, outside_bytes: int) -> int:
    """What a cap leaves for a step's large blocks, above what is resident."""
    return cap_bytes - outside_bytes - PARTS_BYTES


def budget_for(least_cap_bytes: int, outside_bytes: int) -> int:
    """The least budget that, where it is enforced, leaves that room."""
    cap_bytes = least_cap_bytes + outside_bytes + PARTS_BYTES
    return min(cap_bytes - CAP_SLACK_BYTES, int(cap_bytes / (1 + CAP_SHARE)) + 1)


def check_for(
    planned: Planned, situation: Situation, *, closely: bool, keeps_concatenations_whole: bool = False
) -> ScheduleCheck:
    """The scheduler pass that holds a plan to its budget; `closely`: to what the allocator may take as well."""
    if planned.is_baseline or planned.is_best_effort:
        program = planned.plan.program if planned.is_best_effort else ()
        return ScheduleCheck(program, planned.workspace_by_node, held_inputs=planned.held_inputs)
    room = planned.plan.budget_bytes - planned.plan.resident_bytes - situation.error_bound_bytes
    behind = behind_bytes(planned, situation)
    outside = planned.plan.resident_bytes + situation.error_bound_bytes
    keeps = keeps_freed_blocks(planned)
    return ScheduleCheck(
        planned.plan.program,
        planned.workspace_by_node,
        room,
        room - behind,
        reserved_limit_bytes=reserved_limit(planned.plan.budget_bytes) - outside if keeps else None,
        cap_bytes=room_under(cap_of(planned.plan.budget_bytes), outside) if keeps else None,
        stops_scattered=closely,
        keeps_concatenations_whole=keeps_concatenations_whole,
        held_inputs=planned.held_inputs,
    )


def behind_bytes(planned: Planned, situation: Situation) -> int:
    """What the caller and others hold while the backward runs."""
    return planned.output_bytes + planned.tangent_bytes + situation.outside_bytes


def resident_peak(planned: Planned, situation: Situation, found: OverLimitError) -> int:
    """The peak of the step as far as the graph that was over its limit tells."""
    behind = behind_bytes(planned, situation) if found.is_backward else 0
    return planned.plan.resident_bytes + found.peak.peak_bytes + behind


def checked_peak(planned: Planned, check: ScheduleCheck, situation: Situation) -> int | None:
    """Peak of both lowered graphs over what is resident; None where a warm cache skipped the scheduler."""
    if check.forward is None or check.backward is None:
        return None
    resident = planned.plan.resident_bytes
    forward = check.forward.peak_bytes
    backward = check.backward.peak_bytes + behind_bytes(planned, situation)
    return resident + max(forward, backward, boundary_peak(check, situation))


def boundary_peak(check: ScheduleCheck, situation: Situation) -> int:
    """What is held between the two lowered graphs over what is resident, but for graphs that run there."""
    assert check.forward is not None
    return check.forward.end_bytes + situation.outside_bytes


def kept_free_bytes(lowered: Lowered, situation: Situation) -> int:
    """How much more than the graphs' own peak there must be for what runs between them."""
    return max(0, lowered.boundary_bytes + situation.between_bytes - lowered.above_resident_bytes)
