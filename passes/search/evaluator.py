"""The only door from the search to the simulator: counts, remembers, and keeps the best.

Every policy spends from one `Evaluator`, so that equal evaluations mean equal work.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fxhome.passes.search.result import Fitness, Placements, fitness
from fxhome.passes.simulate import RECOMPUTE, Problem, SimResult, evaluate, simulate

Progress = Callable[[int, int, float, bool], None]

# Bytes of placements that are remembered, so that memory does not grow with the number of evaluations.
_MEMORY_BYTES = 64 << 20

# Simulations of graphs with fewer nodes are over before a thread could be told about them.
_PARALLEL_NODES = 500
MAX_WORKERS = 8


class OutOfBudgetError(Exception):
    """Raised inside a search when its evaluations or its seconds are spent; never leaves the search."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Evaluator:
    """Evaluates placements at one budget and keeps the best of them.

    `spend` counts simulator runs; a remembered placement costs nothing. While `protected` is positive (finding a first
    plan that fits), limits are not enforced.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        max_evaluations: int,
        search_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.max_evaluations = max_evaluations
        self.evaluations = 0
        self.protected = 0
        self.started = time.perf_counter()
        self.deadline = None if search_seconds is None else self.started + search_seconds
        self.progress = progress
        self.best: Placements | None = None
        self.best_fitness: Fitness = (1 << 62, float("inf"))
        self.best_peak = 0
        self.minimum_peak = 1 << 62
        self.minimum_placement: Placements | None = None
        self.history: list[tuple[int, float]] = []
        self.lower_bound_us: float | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._seen: dict[bytes, tuple[int, float]] = {}
        self._seen_limit = max(256, _MEMORY_BYTES // max(1, problem.num_storages + 120))

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.started

    @property
    def late(self) -> bool:
        """Whether the search's seconds are spent."""
        return self.deadline is not None and time.perf_counter() >= self.deadline

    def _spend(self) -> None:
        if not self.protected:
            if self.evaluations >= self.max_evaluations:
                raise OutOfBudgetError("evaluations")
            if self.late:
                raise OutOfBudgetError("seconds")
        self.evaluations += 1

    def left(self) -> int:
        """Evaluations that may still be spent."""
        return max(0, self.max_evaluations - self.evaluations)

    def _note(self, placement: Placements, peak: int, step: float) -> Fitness:
        value = fitness(peak, step, self.budget_bytes)
        if peak < self.minimum_peak:
            self.minimum_peak = peak
            self.minimum_placement = placement.copy()
        if value < self.best_fitness:
            self.best_fitness = value
            self.best = placement.copy()
            self.best_peak = peak
            if value[0] == 0:
                self.history.append((self.evaluations, step))
                if self.progress is not None:
                    self.progress(self.evaluations, peak, step, True)
        return value

    def _remember(self, key: bytes, figures: tuple[int, float]) -> None:
        if len(self._seen) >= self._seen_limit:
            self._seen.clear()
        self._seen[key] = figures

    def score(self, placement: Placements) -> Fitness:
        """Fitness of a placement at the budget."""
        key = placement.tobytes()
        known = self._seen.get(key)
        if known is None:
            self._spend()
            known = evaluate(self.problem, placement, self.budget_bytes)
            self._remember(key, known)
        return self._note(placement, *known)

    @contextlib.contextmanager
    def parallel(self) -> Iterator[ThreadPoolExecutor]:
        """While open, `probe_all` simulates on several cores; what it returns does not depend on how many."""
        cores = available_cores()
        with ThreadPoolExecutor(min(MAX_WORKERS, cores), thread_name_prefix="fxhome-search") as pool:
            if cores > 1 and self.problem.arrays.node_phase.shape[0] >= _PARALLEL_NODES:
                self._pool = pool
            try:
                yield pool
            finally:
                self._pool = None

    def probe_all(self, placements: Sequence[Placements]) -> list[tuple[Fitness, SimResult | None]]:
        """What `probe` says of each in turn; where the limits are reached in between, those before it still count."""
        fresh: dict[bytes, Placements] = {}
        keys: list[bytes] = []
        stopped: OutOfBudgetError | None = None
        for placement in placements:
            key = placement.tobytes()
            if key not in self._seen and key not in fresh:
                try:
                    self._spend()
                except OutOfBudgetError as stop:
                    stopped = stop
                    break
                fresh[key] = placement
            keys.append(key)

        def run(placement: Placements) -> SimResult:
            return simulate(self.problem, placement, self.budget_bytes)

        apply = map if self._pool is None or len(fresh) < 2 else self._pool.map
        results = dict(zip(fresh, apply(run, fresh.values()), strict=True))
        found: list[tuple[Fitness, SimResult | None]] = []
        known = {key: self._seen[key] for key in keys if key not in results}
        for key, placement in zip(keys, placements, strict=False):
            result = results.get(key)
            if result is not None:
                known[key] = (result.peak_bytes, result.step_us)
                self._remember(key, known[key])
            found.append((self._note(placement, *known[key]), result))
        if stopped is not None:
            raise stopped
        return found

    def probe(self, placement: Placements) -> tuple[Fitness, SimResult | None]:
        """Fitness, and the full result where it had to be simulated (None: it was remembered)."""
        known = self._seen.get(placement.tobytes())
        if known is not None:
            return self._note(placement, *known), None
        result = self.run(placement)
        return fitness(result.peak_bytes, result.step_us, self.budget_bytes), result

    def run(self, placement: Placements, budget_bytes: int | None = None) -> SimResult:
        """The full result, at the search's budget or at another one (whose step is then not compared)."""
        self._spend()
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        result = simulate(self.problem, placement, budget)
        if budget == self.budget_bytes:
            self._remember(placement.tobytes(), (result.peak_bytes, result.step_us))
            self._note(placement, result.peak_bytes, result.step_us)
        elif result.peak_bytes < self.minimum_peak:
            self.minimum_peak = result.peak_bytes
            self.minimum_placement = placement.copy()
        return result


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def base_placement(problem: Problem, demanded: npt.NDArray[np.bool_]) -> Placements:
    """Keep what the backward reads itself; recompute the rest, so that a recomputation keeps nothing extra."""
    placement = problem.keep_all()
    idle = ~demanded & problem.allowed[:, RECOMPUTE]
    placement[idle] = RECOMPUTE
    return placement
