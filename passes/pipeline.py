"""The ordered steps from a joint graph to a planned forward and backward, and the one runner that executes them.

    baseline -> normalize -> channels_last -> constants -> facts -> cost -> ease_backward -> facts -> cost
             -> search -> partition -> insert_codecs -> insert_transfers -> check

The first facts and cost are the baseline's, the second ones those of what is planned where that differs (on CUDA).
Each step is a named function; the runner times it, checks it and, when asked, dumps the graphs after it. Inspection is
this runner with dumping on.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch.fx.graph_module import GraphModule

from fxhome.budget import Budget
from fxhome.device import DeviceProfile
from fxhome.errors import InfeasibleBudgetError, OptionError, UnsupportedGraphError
from fxhome.options import ALLOWED, Options
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
from fxhome.passes.codec_choice import NO_CODEC, StorageCodecs, choose_codecs
from fxhome.passes.constants import separate_constants
from fxhome.passes.cost_model import node_costs
from fxhome.passes.ease_backward import MIN_BYTES, ease_backward, is_eased, is_eased_for_fusion
from fxhome.passes.facts import GraphFacts, extract_facts
from fxhome.passes.graph_peak import graph_peak
from fxhome.passes.host_calibration import HostedPlan, SimulatedRun
from fxhome.passes.host_times import HostTimes, host_notes, host_times
from fxhome.passes.insert_codecs import codecs_of, insert_codecs
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.op_class import storage_classes
from fxhome.passes.partition import partition
from fxhome.passes.plan_builder import build_plan, check_replay, find_replay, placement_codes
from fxhome.passes.pool_gradients import gathers_overlapping, scattered_pools
from fxhome.passes.problem import Costs, build_problem
from fxhome.passes.schedule import schedule
from fxhome.passes.search import minimum_peak, search
from fxhome.passes.simulate import Link, Placements, Problem, SimResult, holders, simulate
from fxhome.passes.verify import verify_boundary, verify_codecs, verify_partition, verify_transfers
from fxhome.placement import Instruction, Plan, SearchStats
from fxhome.progress import progress
from fxhome.units import format_bytes

log = logging.getLogger("fxhome.planner")

LEAVE_ROOM_TRIALS = 6
MAX_BOUND_DECISIONS = 4000
"""The linear program behind `gap` is solved up to this many decisions; beyond, it would take longer than the search."""
RESIDENT_SLACK_BYTES = {"cpu": 1 << 16, "cuda": 4 << 20}
"""What a named minimum is above what was found: it must still do when it is asked for, with whatever else the process
holds by then (a loss, a random state).
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Situation:
    """What the process looks like when a graph is planned. Bytes on the device of the graph."""

    resident_bytes: int | None
    """Held at the entry of the forward, this graph's inputs included; None offline: the graph's inputs are all there
    is.
    """
    outside_bytes: int = 0
    """Held during the backward by nothing in this graph; learned from a metered step."""
    between_bytes: int = 0
    """Needed by the graphs that run between this forward and its backward."""
    error_bound_bytes: int = 0
    """How far above its prediction a metered step was."""
    lowering_bytes: int = 0
    """How far above the model's peak the compiler's own buffers were; what is checked after lowering needs no such
    margin.
    """
    leave_room: bool = False
    """More graphs of the same step follow whose needs are not known yet: take as little as possible."""
    fixed_layouts: tuple[str, ...] = ()
    """Storages that the compiler lays out otherwise than the graph records: neither moved nor encoded."""
    smallest: bool = False
    """Do not search: the smallest plan that is known, whatever it costs and whether or not it fits."""
    tightest: bool = False
    """Schedule the copies of the smallest plan as if no byte more than its own peak were there."""
    settled_bytes: int | None = None
    """The budget in bytes that an earlier plan of this graph came to; None for the first."""
    observed_bytes: tuple[tuple[str, int], ...] = ()
    """Encoded bytes seen at run time by storage name: what the next plan of this graph assumes."""
    free_bytes: int = 0
    """What the device could still give: the budget when none was asked for is resident + free."""


@dataclass(eq=False)
class Planned:
    """A plan and the two graphs that carry it out."""

    plan: Plan
    forward: GraphModule
    backward: GraphModule
    facts: GraphFacts
    is_baseline: bool
    boundary_bytes: int
    """Graph storages alive between forward and backward, tangents not counted."""
    is_best_effort: bool = False
    """The budget could not be met and the user asked to go on (on_infeasible="best_effort")."""
    output_bytes: int = 0
    """Outputs of the forward that are not saved: the caller holds them during the backward."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """How long each planning step took."""

    workspace_by_node: dict[str, int] = field(default_factory=dict)
    """Device bytes that an operator takes besides its results, by joint graph node."""

    stock_boundary_bytes: int = 0
    """What the baseline would save for the backward."""
    problem: Problem | None = None
    """The graph's own problem, with nothing asked for between its forward and its backward."""
    storage_class: tuple[str, ...] = ()
    """The class of the operator behind each storage of `facts`."""
    layouts: Layouts = Layouts.TRACED
    """What was done to the convolutions of the graph before it was planned: `rewrite` does it again."""
    hosted: HostedPlan | None = None
    """The plan as it was simulated, where it has a host to wait for."""

    def smallest_peak_bytes(self) -> int:
        """The least graph bytes that a plan of this graph can do with."""
        assert self.problem is not None
        return minimum_peak(self.problem)[0]

    def checked(self, predicted_bytes: int) -> Plan:
        """The plan with the peak that the compiler's own buffers give in place of the model's."""
        return replace(self.plan, predicted_peak_bytes=predicted_bytes)

    def refuse(self, predicted_bytes: int) -> InfeasibleBudgetError:
        """The refusal after the compiler's buffers did not fit however often it was planned again."""
        return InfeasibleBudgetError(
            f"memory_budget={format_bytes(self.plan.budget_bytes)} ({self.plan.budget_bytes} bytes): every plan "
            "that fits by "
            f"the model needs more once lowered; the last one needs {predicted_bytes} bytes "
            f"({format_bytes(predicted_bytes)}). "
            f"Ask for at least {predicted_bytes}, or use a smaller batch",
            minimum_bytes=predicted_bytes,
            budget_bytes=self.plan.budget_bytes,
        )

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the gradients that the backward is given."""
        return sum(self.facts.storages[s].size_bytes for s in self.facts.tangent_storages)


def link_of(profile: DeviceProfile) -> Link:
    """The copy engines of a device as the simulator wants them."""
    alone = profile.d2h_bytes_per_s + profile.h2d_bytes_per_s
    return Link(
        d2h_us_per_byte=1e6 / profile.d2h_bytes_per_s,
        h2d_us_per_byte=1e6 / profile.h2d_bytes_per_s,
        duplex_slowdown=max(1.0, alone / profile.duplex_bytes_per_s),
        latency_us=profile.copy_latency_us,
        compute_slowdown=profile.copy_slowdown,
    )


class Runner:
    """Names, times and checks every step, and dumps the graphs after it where `dump_dir` is set."""

    def __init__(self, dump_dir: str | None) -> None:
        self.seconds: dict[str, float] = {}
        self._folder = Path(dump_dir) if dump_dir is not None else None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OptionError(
                    f"dump_dir={dump_dir!r} cannot be made ({error.strerror}); give a folder that exists or can be made"
                ) from error

    def run(self, name: str, step: Callable[[], T]) -> T:
        """Run one step."""
        begin = time.perf_counter()
        result = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        log.debug("%s took %.3f s", name, self.seconds[name])
        self._dump(name, result)
        return result

    def _dump(self, name: str, result: object) -> None:
        if self._folder is None:
            return
        modules = result if isinstance(result, tuple) else (result,)
        for side, module in zip(("forward", "backward"), modules, strict=False):
            if isinstance(module, GraphModule):
                label = side if isinstance(result, tuple) else "joint"
                number = len(self.seconds)
                text = module.print_readable(print_output=False, include_stride=True, include_device=True)
                (self._folder / f"{number:02d}_{name}_{label}.py").write_text(text, encoding="utf-8")


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
    seen = {} if replays else dict(situation.observed_bytes)

    def model(module: GraphModule) -> tuple[GraphFacts, Costs, HostTimes | None, tuple[StorageCodecs, ...]]:
        facts = runner.run(
            "facts", lambda: extract_facts(module, num_fwd_outputs, profile.kind, fusing=fusing, saved=saved)
        )
        costs = runner.run("cost", lambda: node_costs(module, facts, profile, measure=measure, fusing=fusing))
        launches = host_times(module, facts, host_costs, costs.host_us) if host_costs is not None else None
        offers = choose_codecs(module, facts, profile, options.allow, lossy=options.lossy, observed=seen)
        return facts, costs, launches, tuple(offers)

    host_costs = profile.host_costs(inner)
    facts, costs, launches, codecs = model(work)
    resident = facts.input_bytes if situation.resident_bytes is None else situation.resident_bytes
    replay = find_replay(replays, facts)
    tangent_bytes = sum(facts.storages[s].size_bytes for s in facts.tangent_storages)

    def assemble(between_bytes: int) -> Problem:
        return build_problem(
            facts,
            costs,
            link_of(profile),
            options.allow,
            codecs=[
                NO_CODEC if storage.name in situation.fixed_layouts else offer
                for storage, offer in zip(facts.storages, codecs, strict=True)
            ],
            outside_bytes=situation.outside_bytes,
            between_bytes=between_bytes,
            off_host={*off_host, *situation.fixed_layouts},
            host=launches,
        )

    # The backward's tangents are not there yet in between.
    between_bytes = max(0, situation.between_bytes - tangent_bytes)
    problem = assemble(between_bytes)
    alone = assemble(0) if between_bytes else problem
    fixed = resident + situation.error_bound_bytes + situation.lowering_bytes
    workspace = max(costs.workspace_bytes, default=0)
    by_node = {name: size for name, size in zip(facts.node_names, costs.workspace_bytes, strict=True) if size}
    stock_peak = graph_peak(*stock, num_fwd_outputs, facts.device_type, facts.planned_for, by_node)
    stock_placement = baseline_placement(work, facts, problem, split[0], num_fwd_outputs)
    stock_run = simulate(problem, stock_placement, np.iinfo(np.int64).max)
    baseline_run = SimulatedRun(stock_placement, stock_run, problem.link)
    if fusing:
        # The graphs say what is computed, not what a fusing compiler writes to memory: its model does.
        stock_bytes = stock_run.peak_bytes
    else:
        stock_bytes = max(
            stock_peak.forward_bytes,
            stock_peak.backward_bytes + situation.outside_bytes,
            stock_peak.boundary_bytes + situation.outside_bytes + situation.between_bytes,
        )
    baseline_bytes = fixed + stock_bytes
    budget, asked = _budget_bytes(options.memory_budget, baseline_bytes, resident, situation.free_bytes)
    budget = budget if situation.settled_bytes is None else situation.settled_bytes

    def hosted(placement: Placements, result: SimResult) -> HostedPlan | None:
        if host_costs is None:
            return None
        return HostedPlan(host_costs, facts.fingerprint, SimulatedRun(placement, result, problem.link), baseline_run)

    def finish(
        result: SimResult,
        placement: Placements,
        predicted: int,
        stats: SearchStats,
        gap: float | None,
        notes: tuple[str, ...],
    ) -> Plan:
        return build_plan(
            facts=facts,
            problem=problem,
            placement=placement,
            result=result,
            program=schedule(facts, placement, result),
            budget_bytes=budget,
            asked=asked,
            baseline_bytes=baseline_bytes,
            baseline_us=stock_run.step_us,
            predicted_bytes=predicted,
            situation_resident=resident,
            outside_bytes=situation.outside_bytes,
            error_bound_bytes=situation.error_bound_bytes,
            workspace_bytes=workspace,
            profile=profile,
            inner=inner,
            stats=stats,
            gap=gap,
            estimated=not measure,
            notes=(*notes, *host_notes(result.idle_us, result.step_us)),
        )

    stale = overwritten_saved(stock[0], num_fwd_outputs)
    fits = baseline_bytes <= budget and not situation.leave_room and not situation.smallest
    if replay is None and fits and options.policy == "pso" and not stale:
        stats = SearchStats("keep_all", options.seed, 0, 0.0, "nothing to do: the baseline fits")
        plan = finish(stock_run, stock_placement, resident + stock_bytes, stats, 0.0, ())
        return Planned(
            plan,
            *stock,
            facts,
            True,
            stock_peak.boundary_bytes,
            output_bytes=stock_peak.output_bytes,
            workspace_by_node=by_node,
            stock_boundary_bytes=stock_peak.boundary_bytes,
            problem=alone,
            step_seconds=runner.seconds,
            storage_class=tuple(storage_classes(work, facts)),
            layouts=layouts,
            hosted=hosted(stock_placement, stock_run),
        )

    if _eases(facts, options, replay):
        before = [node.name for node in work.graph.nodes]
        fingerprint = facts.fingerprint
        for_fusion = fusing and (replay is None or is_eased_for_fusion(replay.program))
        for overlapping in _window_choices(situation, replay):
            work = runner.run(
                "ease_backward", partial(ease_backward, copy_joint(traced), fusing=for_fusion, overlapping=overlapping)
            )
            take_saved_early(work, saved)
            if [node.name for node in work.graph.nodes] != before:
                facts, costs, launches, codecs = model(work)
                facts = replace(facts, fingerprint=fingerprint)
                problem = assemble(between_bytes)
                alone = assemble(0) if between_bytes else problem
                workspace = max(costs.workspace_bytes, default=0)
                sizes = zip(facts.node_names, costs.workspace_bytes, strict=True)
                by_node = {name: size for name, size in sizes if size}
                stock_placement = baseline_placement(work, facts, problem, split[0], num_fwd_outputs)
            if not scattered_pools(work.graph, MIN_BYTES) or minimum_peak(problem, options.seed)[0] <= budget - fixed:
                break
    if situation.leave_room:
        problem = _saving_least(problem, assemble, budget - fixed)

    classes = storage_classes(work, facts)
    if replay is not None:
        check_replay(replay, facts, profile, inner)
        placement = placement_codes(replay, facts, problem)
        result = simulate(problem, placement, replay.budget_bytes - fixed)
        plan = replay
        program = replay.program
    else:
        placement, result, stats, gap = runner.run(
            "search",
            lambda: (
                _smallest(problem, options, 0 if situation.tightest else budget - fixed)
                if situation.smallest
                else _search(problem, facts, options, budget, fixed, stock_placement, resident, classes)
            ),
        )
        notes: tuple[str, ...] = (
            () if result.peak_bytes + fixed <= budget else (f"best effort: {format_bytes(budget)} cannot be met",)
        )
        if stale:
            notes += (
                f"the inner backend's own partition would rebuild from {', '.join(stale)}, which the step overwrites: "
                "fxhome's is used although the baseline fits",
            )
        # What is kept free for graphs to come is no need of this one: theirs are planned with what is left.
        own_bytes = result.peak_bytes - (_spared_bytes(result) if situation.leave_room else 0)
        plan = finish(result, placement, resident + own_bytes, stats, gap, notes)
        program = plan.program

    graphs = runner.run("partition", lambda: partition(work, program, num_fwd_outputs))
    if options.verify:
        verify_partition(work, *graphs, program, num_fwd_outputs)
    encodings = codecs_of(plan)
    graphs = runner.run(
        "insert_codecs", lambda: insert_codecs(*graphs, program, num_fwd_outputs, encodings, facts.fingerprint)
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
        "check", lambda: graph_peak(forward, backward, num_fwd_outputs, facts.device_type, facts.planned_for, by_node)
    )
    short = plan.predicted_peak_bytes > plan.budget_bytes
    return Planned(
        plan,
        forward,
        backward,
        facts,
        False,
        written.boundary_bytes,
        is_best_effort=short,
        output_bytes=written.output_bytes,
        workspace_by_node=by_node,
        stock_boundary_bytes=stock_peak.boundary_bytes,
        problem=alone,
        step_seconds=runner.seconds,
        storage_class=tuple(classes),
        layouts=layouts,
        hosted=hosted(placement, result),
    )


def _eases(facts: GraphFacts, options: Options, replay: Plan | None) -> bool:
    """Whether what is planned is the graph of which the backward reads less.

    Published policies are run on the graph that they know.
    """
    if facts.planned_for != "cuda":
        return False
    if replay is None:
        return options.policy == "pso"
    known = {storage.name for storage in facts.storages if storage.is_activation}
    return is_eased(replay.program) or any(entry.name not in known for entry in replay.placements)


def _window_choices(situation: Situation, replay: Plan | None) -> tuple[bool, ...]:
    """Whether the gradients of overlapping pools are gathered: what to try, until a plan fits."""
    if replay is not None:
        return (gathers_overlapping(replay.program),)
    return (True,) if situation.smallest or situation.leave_room else (False, True)


def _saving_least(problem: Problem, assemble: Callable[[int], Problem], room: int) -> Problem:
    """The same problem with as much as can be kept free between its forward and its backward, found by bisection."""
    least, most = 0, max(0, room)
    for _ in range(LEAVE_ROOM_TRIALS):
        middle = (least + most) // 2
        tried = assemble(middle)
        if minimum_peak(tried)[0] <= room:
            least, problem = middle, tried
        else:
            most = middle
    return problem


def _spared_bytes(result: SimResult) -> int:
    """How much lower the peak would be without what is kept free between forward and backward."""
    curve = result.curve.copy()
    curve[result.forward_length] -= result.arrays.outside_bytes[1]
    return result.peak_bytes - int(curve.max())


def _budget_bytes(budget: Budget | None, baseline_bytes: int, resident_bytes: int, free_bytes: int) -> tuple[int, str]:
    if budget is None:
        margin = max(free_bytes // 50, 1 << 20)
        return resident_bytes + free_bytes - margin, f"all that is free, less a margin of {format_bytes(margin)}"
    return budget.resolve(baseline_bytes), str(budget)


def _smallest(problem: Problem, options: Options, room: int) -> tuple[Placements, SimResult, SearchStats, float | None]:
    """The smallest plan that is known, with its copies scheduled for the room or, over it, for its own peak."""
    begin = time.perf_counter()
    peak, placement = minimum_peak(problem, options.seed)
    result = simulate(problem, placement, max(peak, room))
    stats = SearchStats("smallest", options.seed, 0, time.perf_counter() - begin, "nothing faster fits once lowered")
    return placement, result, stats, None


def _search(
    problem: Problem,
    facts: GraphFacts,
    options: Options,
    budget: int,
    fixed: int,
    stock: Placements,
    resident: int,
    classes: Sequence[str],
) -> tuple[Placements, SimResult, SearchStats, float | None]:
    room = budget - fixed
    with progress("searching placements", total=options.max_evaluations) as advance:
        counted = 0

        def report(evaluations: int, *_: object) -> None:
            nonlocal counted
            advance(evaluations - counted)
            counted = evaluations

        found = search(
            problem,
            room,
            policy=options.policy,
            seed=options.seed,
            max_evaluations=options.max_evaluations,
            search_seconds=options.search_seconds,
            progress=report,
            seeds=(stock,),
            storage_class=classes,
            bound=len(problem.decisions()) <= MAX_BOUND_DECISIONS,
        )
    placement = found.placement
    if not found.feasible:
        smallest, minimal = minimum_peak(problem, options.seed)
        if smallest > room and options.on_infeasible == "error":
            raise infeasible(problem, facts, minimal, smallest, budget, fixed, resident, options.allow)
        if options.policy == "pso":
            placement = minimal
        elif options.on_infeasible == "error":
            raise policy_infeasible(options.policy, found.peak_bytes + fixed, budget, smallest + fixed)
    result = simulate(problem, placement, room, synchronous=found.sync_transfers)
    stats = SearchStats(options.policy, options.seed, found.evaluations, found.seconds, found.stopped_by)
    return placement, result, stats, found.gap


def infeasible(
    problem: Problem,
    facts: GraphFacts,
    placement: Placements,
    smallest: int,
    budget: int,
    fixed: int,
    resident: int,
    allow: Collection[str],
) -> InfeasibleBudgetError:
    """The refusal: what the smallest plan needs, what holds the memory at its worst moment, and what to do."""
    result = simulate(problem, placement, smallest)
    minimum = fixed + smallest + RESIDENT_SLACK_BYTES[facts.planned_for]
    held = (
        ("resident before the step (weights, inputs, optimizer state, gradients)", resident),
        *largest_holders(facts, problem, placement, result),
    )
    top = ", ".join(f"{name} {format_bytes(size)}" for name, size in held[:4])
    position = result.peak_position
    where = "forward" if position < result.forward_length else "backward"
    node = facts.node_names[result.nodes[min(position, len(result.program) - 1)]]
    refused = [kind for kind in ALLOWED if kind not in allow]
    instead = f", use a smaller batch, or allow {' and '.join(refused)} too" if refused else " or use a smaller batch"
    return InfeasibleBudgetError(
        f"memory_budget={format_bytes(budget)} ({budget} bytes) cannot be met: the smallest plan found needs "
        f"{minimum} bytes "
        f"({format_bytes(minimum)}). Its worst moment is '{node}' in the {where}, held by: {top}. "
        f"Ask for at least {minimum}{instead}",
        minimum_bytes=minimum,
        budget_bytes=budget,
        holders=held,
    )


def policy_infeasible(policy: str, reached: int, budget: int, smallest: int) -> InfeasibleBudgetError:
    """The refusal where some plan fits and the policy that was asked for does not find it."""
    return InfeasibleBudgetError(
        f"policy={policy!r} reaches {reached} bytes ({format_bytes(reached)}) and not memory_budget="
        f"{format_bytes(budget)} ({budget} bytes), which policy='pso' can meet down to {smallest} bytes "
        f"({format_bytes(smallest)}). Ask for at least {reached}, use policy='pso', or on_infeasible='best_effort'",
        minimum_bytes=reached,
        budget_bytes=budget,
    )


def largest_holders(
    facts: GraphFacts, problem: Problem, placement: Placements, result: SimResult, count: int = 6
) -> tuple[tuple[str, int], ...]:
    """Graph storages alive at the peak, largest first."""
    return tuple((facts.storages[s].name, size) for s, size in holders(problem, placement, result)[:count])


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


def with_lowering(situation: Situation, missed_bytes: int, budget_bytes: int) -> Situation:
    """The same situation after lowering needed `missed_bytes` more than the model said; the budget stays what it was,
    also where it was a share of the baseline.
    """
    lowering_bytes = max(situation.lowering_bytes, missed_bytes)
    return replace(situation, lowering_bytes=lowering_bytes, settled_bytes=budget_bytes)
