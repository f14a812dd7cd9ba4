"""How a budget is refused: what the smallest plan needs, what holds the memory at its worst moment, and what to do."""

from collections.abc import Collection

from fxhome.errors import InfeasibleBudgetError
from fxhome.options import ALLOWED
from fxhome.passes.facts import GraphFacts
from fxhome.passes.simulate import Placements, Problem, SimResult, holders, simulate
from fxhome.units import format_bytes

RESIDENT_SLACK_BYTES = {"cpu": 1 << 16, "cuda": 4 << 20}
"""What a named minimum is above what was found: it must still do when it is asked for, with whatever else the process
holds by then (a loss, a random state).
"""


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
