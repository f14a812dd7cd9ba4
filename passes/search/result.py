"""What a search returns, and the order in which two placements are compared."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Placements = npt.NDArray[np.int8]
StoppedBy = Literal["evaluations", "converged", "seconds", "exhausted", "no choice"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best placement found, what it costs, and how the search ended.

    placement: int8[storages]. feasible: `peak_bytes` is within the budget; if not, this is the least overflow seen.
    stopped_by: "no choice" (one placement only), "exhausted" (the policy has no further move), "converged",
    "evaluations", or "seconds" (the safety cap: a longer search may find another plan).
    budget_bytes: what the copies were steered by in these figures; the same simulation with it gives them again.
    minimum_peak_bytes: the smallest peak seen, reached by `minimum_placement` at a budget of just that many bytes.
    lower_bound_us: no placement within the budget is faster; None where none was asked for; inf where it proves that
    nothing fits. gap: (step - bound) / bound.
    sync_transfers: the policy waits for every copy at the layer that starts it (vDNN as published): the figures are
    those of `simulate(..., synchronous=True)`, and so must the program be.
    history: (evaluations, step us) each time the best feasible step improved.
    """

    placement: Placements
    peak_bytes: int
    step_us: float
    feasible: bool
    evaluations: int
    seconds: float
    stopped_by: StoppedBy
    minimum_peak_bytes: int
    minimum_placement: Placements
    budget_bytes: int
    policy: str = "pso"
    seed: int = 0
    lower_bound_us: float | None = None
    gap: float | None = None
    sync_transfers: bool = False
    history: tuple[tuple[int, float], ...] = field(default=())


Fitness = tuple[int, float]


def fitness(peak_bytes: int, step_us: float, budget_bytes: int) -> Fitness:
    """Feasible first: (overflow bytes, step us), smaller is better. HOME leaves what does not fit unranked."""
    return max(0, peak_bytes - budget_bytes), step_us
