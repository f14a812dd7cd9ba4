"""Placements rounded from the linear relaxation: where the swarm's best plans come from.

The relaxation holds memory at a few anchors, does not see what is rebuilt, and moves fractions of what can only move
whole, so the rounded program takes more than it says. It is solved again and again: at each anchor for as many bytes
fewer as the program exceeds the budget by around there, and without moving what the compute waits for.
"""

from concurrent.futures import Future

import numpy as np

from fxhome.passes.search.bound import Bound, anchor_behind, lower_bound, rounded
from fxhome.passes.search.evaluator import Evaluator
from fxhome.passes.search.flow import Flow
from fxhome.passes.search.relaxation import BOUNDARY
from fxhome.passes.search.repair import Prices, repair
from fxhome.passes.search.result import Fitness, Placements, fitness
from fxhome.passes.search.structure import Structure, instruction_times, own_runs
from fxhome.passes.simulate import COMPRESS_SWAP, KEEP, SWAP, SimResult

LARGE_DECISIONS = 4000  # above this many storages there is no relaxation: its cost grows faster than linearly
SLOW_DECISIONS, VERY_SLOW_DECISIONS = 600, 2500
RELAXATIONS, SLOW_RELAXATIONS, VERY_SLOW_RELAXATIONS = 8, 6, 3
IDLE_RELAXATIONS = 2  # solved in vain, one after the other, before they end
MORE_ANCHORS = 3  # in all the further relaxations of a large graph
NEAR_BUDGET = 0.01  # of the budget: a peak this near below it leaves nothing to a further relaxation ...
NEAR_STEP = 0.003  # ... and a step this near above the relaxation's
# The link may be full or idle where the rounded program is over the budget.
REPAIRS = (*(Prices(link=price, share=1.0) for price in (4.0, 0.3, 0.01)), Prices(link=0.01, share=1.0, hidden=True))
SHORT_WAIT = 1e-3  # of the step
MOST_WAITS = 24
UNLIMITED = 1 << 60


def first_bound(s: Structure, flow: Flow, budget_bytes: int) -> Bound:
    """The relaxation at the budget itself: a start for `relaxed_seeds`, and the bound that the result is told with."""
    return lower_bound(s.problem, budget_bytes, structure=s, flow=flow, held=False, rounds=1 if _is_slow(s) else 2)


def _is_slow(s: Structure) -> bool:
    """Whether the relaxation takes as long as hundreds of simulations, so that it is solved less often."""
    return int(s.reachable.sum()) > SLOW_DECISIONS


def _most(s: Structure) -> int:
    """How often the relaxation is solved."""
    if int(s.reachable.sum()) > VERY_SLOW_DECISIONS:
        return VERY_SLOW_RELAXATIONS
    return SLOW_RELAXATIONS if _is_slow(s) else RELAXATIONS


def relaxed_seeds(
    s: Structure, flow: Flow, evaluator: Evaluator, rng: np.random.Generator, first: "Future[Bound]"
) -> list[Placements]:
    """Placements rounded from the linear relaxation, whose shares are read as the odds of each choice.

    first: the relaxation at the budget, perhaps still being solved on another core.
    """
    problem, budget = s.problem, evaluator.budget_bytes
    made: list[Placements] = []
    targets: dict[int, int] = {}
    no_swap = np.zeros(problem.num_storages, np.bool_)
    bound = first.result()
    evaluator.lower_bound_us = bound.step_us
    anchors = bound.anchors
    best: Fitness | None = None
    idle = 0
    for turn in range(_most(s)):
        if turn and evaluator.late:
            break
        if turn:
            bound = lower_bound(
                problem,
                budget,
                structure=s,
                flow=flow,
                start_anchors=anchors,
                rounds=1,
                held=False,
                no_swap=no_swap,
                targets=targets,
            )
        if bound.shares is None:
            if not turn:
                break
            # That much less is not to be had: half of it.
            targets = {anchor: (target + budget) // 2 for anchor, target in targets.items()}
            continue
        start, waits, result = without_waits(s, evaluator, rounded(s, bound.shares))
        repairs = [repair(s, evaluator, start, price) for price in REPAIRS]
        made += [fixed for fixed, _ in repairs]
        scored = [(fitness(run.peak_bytes, run.step_us, budget), run) for _, run in repairs]
        value, repaired = min(scored, key=lambda pair: pair[0])
        if not _is_slow(s):
            drawn = rounded(s, bound.shares, rng)
            made.append(repair(s, evaluator, drawn, Prices(link=0.6, share=1.0))[0])
        near = (1 - NEAR_BUDGET) * budget < repaired.peak_bytes <= budget
        if near and repaired.step_us <= bound.step_us * (1 + NEAR_STEP):
            break
        idle = 0 if best is None or value < best else idle + 1
        best = value if best is None else min(best, value)
        if idle >= IDLE_RELAXATIONS:
            break
        anchors = retarget(s, flow, result, budget, anchors, targets, most=len(bound.anchors) + MORE_ANCHORS)
        no_swap[waits] = True
        if int(s.reachable.sum()) > VERY_SLOW_DECISIONS:
            # Swaps that this solution does not use are most of the next program's size.
            no_swap |= np.maximum(bound.shares[:, SWAP], bound.shares[:, COMPRESS_SWAP]) <= 0
    return made


def retarget(
    s: Structure,
    flow: Flow,
    result: SimResult,
    budget: int,
    anchors: tuple[int, ...],
    targets: dict[int, int],
    most: int,
) -> tuple[int, ...]:
    """The anchors, one more where the program is most over the budget; `targets` changes in place.

    The program is divided among the anchors, each instruction to the nearest. What an anchor's part exceeds the budget
    by is taken from its target; what it falls short by is given back, up to the budget.
    """
    position, total = own_runs(s.problem.arrays, result), result.program.shape[0]
    places = sorted([(int(position[a]), a) for a in anchors if position[a] >= 0] + [(result.forward_length, BOUNDARY)])
    at = np.array([p for p, _ in places])
    edges = [0, *((at[1:] + at[:-1]) // 2 + 1).tolist(), total]
    worst, over = 0, 0
    for (_, anchor), low, high in zip(places, edges[:-1], edges[1:], strict=True):
        if low >= high:
            continue
        peak = low + int(np.argmax(result.curve[low:high]))
        excess = int(result.curve[peak]) - budget
        targets[anchor] = min(budget, targets.get(anchor, budget) - excess)
        if excess > over:
            worst, over = peak, excess
    further = anchor_behind(s, flow, result, worst) if over and len(anchors) < most else None
    if further is None or further in anchors:
        return anchors
    unseen = int(result.curve[worst]) - int(result.curve[position[further]])
    targets[further] = budget - max(0, unseen)
    return tuple(sorted((*anchors, further)))


def without_waits(s: Structure, evaluator: Evaluator, placement: Placements) -> tuple[Placements, list[int], SimResult]:
    """(placement, storages, its program): keep, one after the other, what the compute waits longest for.

    Simulated without a budget, so that memory makes nothing wait. The storages are those that were kept.
    """
    problem, g = s.problem, s.problem.arrays
    current, waits = placement.copy(), list[int]()
    while True:
        result = evaluator.run(current, UNLIMITED)
        busy = instruction_times(g, result.program)
        wait = np.diff(result.start_us) - busy
        longest = int(np.argmax(wait))
        if wait[longest] < SHORT_WAIT * result.step_us or len(waits) >= MOST_WAITS:
            return current, waits, result
        here = (result.wait_out == longest + 1) | (result.wait_in == longest + 1)
        waited = np.flatnonzero(here & (result.saved == 1) & problem.allowed[:, KEEP])
        if waited.shape[0] == 0:
            return current, waits, result
        storage = int(waited[np.argmax(g.storage_bytes[waited])])
        current[storage] = KEEP
        waits.append(storage)
