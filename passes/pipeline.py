"""The ordered steps from a joint graph to a planned forward and backward.

    baseline -> normalize -> channels_last -> constants -> facts -> cost -> ease_backward -> facts -> cost
             -> search -> partition -> insert_codecs -> insert_transfers -> check

The first facts and cost are the baseline's, the second ones those of what is planned where that differs (on CUDA).
Each step is a named function; the runner times it, checks it and, when asked, dumps the graphs after it. Inspection is
this runner with dumping on.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch.fx.graph_module import GraphModule

from fxhome.budget import Budget
from fxhome.device import DeviceProfile
from fxhome.errors import UnsupportedGraphError
from fxhome.options import Options
from fxhome.passes.baseline import (
    baseline_partition,
    baseline_placement,
    copy_joint,
    overwritten_saved,
    saved_storages,
    take_saved_early,
)
from fxhome.passes.capture import normalize
from fxhome.passes.channels_last import Layouts, convolution_layouts, is_converted, to_channels_last
from fxhome.passes.choose_placement import Choice, choose_placement, choose_smallest, saving_least, spared_bytes
from fxhome.passes.constants import separate_constants
from fxhome.passes.ease_backward import ease_backward, is_eased, is_eased_for_fusion
from fxhome.passes.easing import eased, is_to_be_eased
from fxhome.passes.graph_model import Modeler
from fxhome.passes.graph_peak import graph_peak
from fxhome.passes.host_calibration import HostedPlan, SimulatedRun
from fxhome.passes.host_times import host_notes
from fxhome.passes.insert_codecs import codecs_of, insert_codecs
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.op_class import storage_classes
from fxhome.passes.partition import partition
from fxhome.passes.plan_builder import build_plan, check_replay, find_replay, placement_codes
from fxhome.passes.planned import Planned
from fxhome.passes.pool_gradients import gathers_overlapping
from fxhome.passes.runner import Runner
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import simulate
from fxhome.passes.situation import Situation
from fxhome.passes.verify import verify_boundary, verify_codecs, verify_partition, verify_transfers
from fxhome.placement import Instruction, Plan, SearchStats
from fxhome.units import format_bytes

log = logging.getLogger("fxhome.planner")


def plan_graph(
    joint: GraphModule,
    inputs: object,
    num_fwd_outputs: int,
    *,
    options: Options,
    profile: DeviceProfile,
    situation: Situation,
    measure: bool,
    inner: str,
    static_lifetime_input_indices: list[int] | None = None,
    replays: Sequence[Plan] = (),
    off_host: Collection[str] = (),
) -> Planned:
    """Plan one joint graph and write its two graphs. Storages named in `off_host` are not moved there.

    Raises InfeasibleBudgetError (unless on_infeasible="best_effort"), PlanMismatchError for a foreign plan, and
    UnsupportedGraphError. `joint` itself is not changed.
    """
    runner = Runner(options.dump_dir)
    fusing = inner == "inductor"
    compiler = "inductor" if fusing else None
    stock = runner.run(
        "baseline", lambda: baseline_partition(joint, inputs, num_fwd_outputs, static_lifetime_input_indices, compiler)
    )
    traced = runner.run("normalize", lambda: normalize(copy_joint(joint)))
    layouts = convolution_layouts(stock[0], device_type=profile.kind, fusing=fusing)
    try:
        runner.run("channels_last", lambda: to_channels_last(traced, layouts))
    except UnsupportedGraphError as refusal:
        log.warning("fxhome: convolutions keep the layout that they were traced with: %s", refusal)
        layouts, traced = Layouts.TRACED, normalize(copy_joint(joint))
    split = stock
    if is_converted(traced):
        # What the inner compiler saves, in the layout that it would have chosen while lowering.
        split = runner.run(
            "baseline",
            lambda: baseline_partition(traced, inputs, num_fwd_outputs, static_lifetime_input_indices, compiler),
        )
    saved = saved_storages(split[0], num_fwd_outputs) if fusing else frozenset()
    runner.run("constants", lambda: separate_constants(traced, num_fwd_outputs))
    work = copy_joint(traced)
    take_saved_early(work, saved)

    modeler = Modeler(
        runner=runner,
        num_fwd_outputs=num_fwd_outputs,
        options=options,
        profile=profile,
        situation=situation,
        measure=measure,
        fusing=fusing,
        saved=saved,
        observed={} if replays else dict(situation.observed_bytes),
        host_costs=profile.host_costs(inner),
        off_host=off_host,
    )
    model = modeler.model(work)
    resident = model.facts.input_bytes if situation.resident_bytes is None else situation.resident_bytes
    replay = find_replay(replays, model.facts)
    fixed = resident + situation.error_bound_bytes + situation.lowering_bytes
    stock_peak = graph_peak(
        *stock, num_fwd_outputs, model.facts.device_type, model.facts.planned_for, model.workspace_by_node
    )
    stock_placement = baseline_placement(work, model.facts, model.problem, split[0], num_fwd_outputs)
    stock_run = simulate(model.problem, stock_placement, np.iinfo(np.int64).max)
    baseline_run = SimulatedRun(stock_placement, stock_run, model.problem.link)
    if fusing:
        # The graphs say what is computed, not what a fusing compiler writes to memory: its model does.
        stock_free_bytes = spared_bytes(stock_run)
        stock_bytes = stock_run.peak_bytes - stock_free_bytes
    else:
        boundary_bytes = stock_peak.boundary_bytes + situation.outside_bytes
        stock_bytes = max(stock_peak.forward_bytes, stock_peak.backward_bytes + situation.outside_bytes, boundary_bytes)
        stock_free_bytes = max(0, boundary_bytes + situation.between_bytes - stock_bytes)
    baseline_bytes = fixed + stock_bytes
    budget, asked = _budget_bytes(options.memory_budget, baseline_bytes, resident, situation)
    budget = budget if situation.settled_bytes is None else situation.settled_bytes

    def hosted(run: SimulatedRun) -> HostedPlan | None:
        costs = modeler.host_costs
        return HostedPlan(costs, model.facts.fingerprint, run, baseline_run) if costs is not None else None

    def finish(choice: Choice, graph_bytes: int, notes: tuple[str, ...]) -> Plan:
        result = choice.result
        return build_plan(
            facts=model.facts,
            problem=problem,
            placement=choice.placement,
            result=result,
            program=schedule(model.facts, choice.placement, result),
            budget_bytes=budget,
            asked=asked,
            baseline_bytes=baseline_bytes,
            baseline_us=stock_run.step_us,
            predicted_bytes=resident + graph_bytes,
            situation_resident=resident,
            outside_bytes=situation.outside_bytes,
            error_bound_bytes=situation.error_bound_bytes,
            workspace_bytes=model.most_workspace_bytes,
            profile=profile,
            inner=inner,
            stats=choice.stats,
            gap=choice.gap,
            estimated=not measure,
            notes=(*notes, *host_notes(result.idle_us, result.step_us)),
        )

    stale = overwritten_saved(stock[0], num_fwd_outputs)
    fits = baseline_bytes + stock_free_bytes <= budget and not situation.leave_room and not situation.smallest
    problem = model.problem
    if replay is None and fits and options.policy == "pso" and not stale:
        stats = SearchStats("keep_all", options.seed, 0, 0.0, "nothing to do: the baseline fits")
        plan = finish(Choice(stock_placement, stock_run, stats, 0.0), stock_bytes, ())
        return Planned(
            plan,
            *stock,
            model.facts,
            True,
            stock_peak.boundary_bytes,
            stock_peak.forward_bytes,
            kept_free_bytes=stock_free_bytes,
            output_bytes=stock_peak.output_bytes,
            held_inputs=stock_peak.held_inputs,
            workspace_by_node=model.workspace_by_node,
            stock_boundary_bytes=stock_peak.boundary_bytes,
            problem=model.alone,
            step_seconds=runner.seconds,
            storage_class=tuple(storage_classes(work, model.facts)),
            layouts=layouts,
            hosted=hosted(baseline_run),
        )

    if is_to_be_eased(model.facts, options, replay):
        model = eased(traced, model, modeler, replay, budget - fixed)
        work, problem = model.module, model.problem
        stock_placement = baseline_placement(work, model.facts, problem, split[0], num_fwd_outputs)
    if situation.leave_room:
        problem = saving_least(model, budget - fixed)

    classes = storage_classes(work, model.facts)
    if replay is not None:
        check_replay(replay, model.facts, profile, inner)
        placement = placement_codes(replay, model.facts, problem)
        run = SimulatedRun(placement, simulate(problem, placement, replay.budget_bytes - fixed), problem.link)
        plan, kept_free_bytes = replay, 0
    else:
        choice = runner.run(
            "search",
            lambda: (
                choose_smallest(problem, options, 0 if situation.tightest else budget - fixed)
                if situation.smallest
                else choose_placement(
                    problem,
                    model.facts,
                    options,
                    budget_bytes=budget,
                    fixed_bytes=fixed,
                    resident_bytes=resident,
                    stock=stock_placement,
                    storage_class=classes,
                )
            ),
        )
        run = SimulatedRun(choice.placement, choice.result, problem.link)
        graph_bytes = choice.result.peak_bytes
        notes: tuple[str, ...] = (
            () if graph_bytes + fixed <= budget else (f"best effort: {format_bytes(budget)} cannot be met",)
        )
        if stale:
            notes += (
                f"the inner backend's own partition would rebuild from {', '.join(stale)}, which the step overwrites: "
                "fxhome's is used although the baseline fits",
            )
        # What is kept free for other graphs is no need of this one: theirs are planned with what is left.
        kept_free_bytes = spared_bytes(choice.result)
        plan = finish(choice, graph_bytes - kept_free_bytes, notes)
        if situation.leave_room:
            kept_free_bytes = 0  # as much as there was, wanted by nobody yet

    program = plan.program
    graphs = runner.run("partition", lambda: partition(work, program, num_fwd_outputs))
    if options.verify:
        verify_partition(work, *graphs, program, num_fwd_outputs)
    encodings = codecs_of(plan)
    graphs = runner.run(
        "insert_codecs", lambda: insert_codecs(*graphs, program, num_fwd_outputs, encodings, model.facts.fingerprint)
    )
    forward, backward = runner.run(
        "insert_transfers",
        lambda: insert_transfers(*graphs, program, num_fwd_outputs, encodings),
    )
    if options.verify:
        verify_boundary(forward, backward, num_fwd_outputs)
        verify_transfers(forward, backward)
        verify_codecs(forward, backward)
    written = runner.run(
        "check",
        lambda: graph_peak(
            forward,
            backward,
            num_fwd_outputs,
            model.facts.device_type,
            model.facts.planned_for,
            model.workspace_by_node,
        ),
    )
    return Planned(
        plan,
        forward,
        backward,
        model.facts,
        False,
        written.boundary_bytes,
        written.forward_bytes,
        kept_free_bytes=kept_free_bytes,
        is_best_effort=plan.predicted_peak_bytes + kept_free_bytes > plan.budget_bytes,
        output_bytes=written.output_bytes,
        held_inputs=written.held_inputs,
        workspace_by_node=model.workspace_by_node,
        stock_boundary_bytes=stock_peak.boundary_bytes,
        problem=model.alone,
        step_seconds=runner.seconds,
        storage_class=tuple(classes),
        layouts=layouts,
        hosted=hosted(run),
    )


def rewrite(
    joint: GraphModule,
    program: Sequence[Instruction],
    num_fwd_outputs: int,
    codecs: Mapping[str, str] | None = None,
    graph_key: str = "",
    layouts: Layouts = Layouts.TRACED,
) -> tuple[GraphModule, GraphModule]:
    """Carry out a program on a freshly traced joint graph: the same graph and program give the same two graphs."""
    work = separate_constants(to_channels_last(normalize(copy_joint(joint)), layouts), num_fwd_outputs)
    if is_eased(program):
        overlapping = gathers_overlapping(program)
        work = ease_backward(work, fusing=is_eased_for_fusion(program), overlapping=overlapping)
    named = codecs or {}
    graphs = insert_codecs(*partition(work, program, num_fwd_outputs), program, num_fwd_outputs, named, graph_key)
    return insert_transfers(*graphs, program, num_fwd_outputs, named)


def _budget_bytes(
    budget: Budget | None, baseline_bytes: int, resident_bytes: int, situation: Situation
) -> tuple[int, str]:
    if budget is None:
        free_bytes = situation.free_bytes
        margin = max(free_bytes // 50, 1 << 20)
        return resident_bytes + free_bytes - margin, f"all that is free, less a margin of {format_bytes(margin)}"
    if budget.bytes is not None:
        return budget.bytes, str(budget)
    return max(budget.resolve(baseline_bytes + situation.unsaved_bytes), situation.step_budget_bytes), str(budget)
