"""Search baselines at equal evaluations: HOME's swarm in two readings, random, annealing, a genetic algorithm."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fxhome.passes.search.evaluator import Evaluator, OutOfBudgetError
from fxhome.passes.search.result import Fitness, Placements, StoppedBy
from fxhome.passes.search.structure import Structure

HOME_PARTICLES = 500
HOME_ITERATIONS = 500
GENETIC_POPULATION = 144  # SwapAdvisor (Huang, ASPLOS'20)
GENETIC_MUTATION = 0.1


class _Genes:
    """Uniform draws over what each deciding storage may take; a vector of genes <-> a placement."""

    def __init__(self, s: Structure, rng: np.random.Generator) -> None:
        self.s = s
        self.rng = rng
        self.base = s.problem.keep_all()
        allowed = s.problem.allowed[s.decisions]
        self.count = allowed.sum(axis=1)
        self.options = np.argsort(~allowed, axis=1, kind="stable").astype(np.int8)

    def draw(self, chosen: slice | npt.NDArray[np.int64] = slice(None)) -> Placements:
        """A uniform gene for each of the chosen decisions."""
        count = self.count[chosen]
        pick = (self.rng.random(count.shape[0]) * count).astype(np.int64)
        drawn: Placements = self.options[chosen][np.arange(count.shape[0]), pick]
        return drawn

    def placement(self, genes: Placements) -> Placements:
        """The whole placement of a gene vector."""
        made = self.base.copy()
        made[self.s.decisions] = genes
        return made


Loop = Callable[[_Genes, Callable[[Placements], Fitness], Evaluator], StoppedBy]


def run_baseline(loop: Loop, s: Structure, evaluator: Evaluator, seed: int) -> StoppedBy:
    """Run a baseline to its end or to the evaluator's limits."""
    genes = _Genes(s, np.random.default_rng(seed))
    try:
        return loop(genes, lambda x: evaluator.score(genes.placement(x)), evaluator)
    except OutOfBudgetError as stop:
        return "seconds" if stop.reason == "seconds" else "evaluations"


def home(genes: _Genes, score: Callable[[Placements], Fitness], evaluator: Evaluator) -> StoppedBy:
    """HOME (He et al., IEEE TC 2023), the reading its published times match: one evaluation per particle and iteration.

    Each gene comes from the previous iteration's best particle or from the particle's own best, at even odds. There is
    no velocity and no mutation, as in the paper.
    """
    swarm = [genes.draw() for _ in range(HOME_PARTICLES)]
    values = [score(x) for x in swarm]
    own, own_values = [x.copy() for x in swarm], list(values)
    for _ in range(HOME_ITERATIONS):
        lead = swarm[min(range(len(values)), key=lambda i: (values[i], i))].copy()
        moved = False
        for i in range(len(swarm)):
            x = np.where(genes.rng.random(lead.shape[0]) < 0.5, lead, own[i])
            moved = moved or not np.array_equal(x, swarm[i])
            swarm[i], values[i] = x, score(x)
            if values[i] < own_values[i]:
                own[i], own_values[i] = x.copy(), values[i]
        if not moved:
            return "converged"
    return "exhausted"


def home_literal(genes: _Genes, score: Callable[[Placements], Fitness], evaluator: Evaluator) -> StoppedBy:
    """HOME's algorithm 3 as printed: gene by gene, the cheaper of two trials is committed (a tie takes the own best's).

    500 x 500 x 2n evaluations in full, so it ends by the evaluator's limits.
    """
    swarm = [genes.draw() for _ in range(HOME_PARTICLES)]
    values = [score(x) for x in swarm]
    own, own_values = [x.copy() for x in swarm], list(values)
    for _ in range(HOME_ITERATIONS):
        lead = swarm[min(range(len(values)), key=lambda i: (values[i], i))].copy()
        before = [x.copy() for x in swarm]
        for i in range(len(swarm)):
            x, mine = swarm[i], own[i].copy()
            for j in range(x.shape[0]):
                if lead[j] == mine[j]:
                    x[j] = lead[j]
                    continue
                x[j] = lead[j]
                by_lead = score(x)
                x[j] = mine[j]
                by_own = score(x)
                if by_lead < by_own:
                    x[j] = lead[j]
            values[i] = score(x)
            if values[i] < own_values[i]:
                own[i], own_values[i] = x.copy(), values[i]
        if all(np.array_equal(a, b) for a, b in zip(before, swarm, strict=True)):
            return "converged"
    return "exhausted"


def random_search(genes: _Genes, score: Callable[[Placements], Fitness], evaluator: Evaluator) -> StoppedBy:
    """Uniform placements until the evaluations are spent; a share of storages is left kept, drawn anew each time."""
    repeats = 0
    while repeats < 1000:
        before = evaluator.evaluations
        x = genes.draw()
        kept = genes.rng.random(x.shape[0]) < genes.rng.random()
        x[kept] = genes.base[genes.s.decisions][kept]
        score(x)
        repeats = repeats + 1 if evaluator.evaluations == before else 0
    return "exhausted"


def annealing(genes: _Genes, score: Callable[[Placements], Fitness], evaluator: Evaluator) -> StoppedBy:
    """Simulated annealing over single genes; overflow is priced at ten times its transfer."""
    x = genes.base[genes.s.decisions].copy()
    rate = 10 * (genes.s.problem.link.d2h_us_per_byte + genes.s.problem.link.h2d_us_per_byte)

    def energy(value: Fitness) -> float:
        return value[1] + rate * value[0]

    now = energy(score(x))
    start = 0.02 * now
    repeats = 0
    while repeats < 1000:
        before = evaluator.evaluations
        done = evaluator.evaluations / max(1, evaluator.max_evaluations)
        temperature = max(1e-9, start * (1e-4**done))
        j = np.array([int(genes.rng.integers(x.shape[0]))])
        trial = x.copy()
        trial[j] = genes.draw(j)
        got = energy(score(trial))
        if got <= now or genes.rng.random() < np.exp((now - got) / temperature):
            x, now = trial, got
        repeats = repeats + 1 if evaluator.evaluations == before else 0
    return "exhausted"


def genetic(genes: _Genes, score: Callable[[Placements], Fitness], evaluator: Evaluator) -> StoppedBy:
    """A genetic algorithm with SwapAdvisor's sizes: 144 individuals, 10 % mutation, the best survive."""
    population = [genes.draw() for _ in range(GENETIC_POPULATION)]
    values = [score(x) for x in population]
    stale = 0
    while stale < 200:
        best = min(values)
        children = []
        for _ in range(GENETIC_POPULATION):
            parents = []
            for _ in range(2):
                a, b = genes.rng.integers(GENETIC_POPULATION, size=2).tolist()
                parents.append(population[a if values[a] <= values[b] else b])
            child = np.where(genes.rng.random(parents[0].shape[0]) < 0.5, parents[0], parents[1])
            if genes.rng.random() < GENETIC_MUTATION:
                j = genes.rng.integers(child.shape[0], size=max(1, child.shape[0] // 50))
                child[j] = genes.draw(j)
            children.append(child)
        both = population + children
        both_values = values + [score(x) for x in children]
        keep = sorted(range(len(both)), key=lambda i: (both_values[i], i))[:GENETIC_POPULATION]
        population, values = [both[i] for i in keep], [both_values[i] for i in keep]
        stale = stale + 1 if min(values) >= best else 0
    return "converged"
