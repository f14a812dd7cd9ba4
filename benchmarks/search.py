"""The search, measured: quality against policies and the bound, convergence, ablation, scaling. No GPU needed.

    python -m benchmarks.search                 every section, on synthetic graphs and benchmarks/profiles/*.npz
    python -m benchmarks.search --sections quality,scaling --evaluations 5000
    python -m benchmarks.search --sections speed --models densenet121_h200 --shares 0.6 --long-seconds 600 --out part
    python -m benchmarks.search --merge part another_part     what was run apart, made into one report

The profiles are training steps with operator times measured on an NVIDIA H200 (see `benchmarks.search_profiles`).
Writes search.md, search.json and search_convergence.png in --out, after each section. Steps are relative to keep-all.
"""

import argparse
import itertools
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.search_problems import chain, dense, load_case, residual, transformer
from benchmarks.search_report import PROBLEMS, TEXT, Row, draw
from fxhome.passes.search import POLICIES, SearchResult, lower_bound, minimum_peak, search
from fxhome.passes.search.bound import SEEN_DECISIONS
from fxhome.passes.search.seeds import Ingredients
from fxhome.passes.simulate import Problem, evaluate

RESULTS = Path(__file__).parent / "results"
PROFILES = Path(__file__).parent / "profiles"
SHARES = (0.8, 0.6, 0.45, 0.3)
SEARCHED_NODES = 6000
"""Curves and ablation are made on graphs up to this size: beyond, they take longer than they tell."""
SPEED_MODELS = {"resnet50_h200": 2.0, "densenet121_h200": 5.0, "gpt2_xl_h200": 5.0}
"""Seconds that the default search may take, on two cores."""
SPEED_SHARES = (0.6, 0.45, 0.3)
SPEED_RUNS = 3
WIDE_GAP, MILP_SECONDS = 0.02, 20.0
"""Of a small graph, a gap from which on the integer program has a try at the bound, and for how long."""
CURVES = ("pso", "home", "home_literal", "genetic", "annealing", "random")
SYNTHETIC: dict[str, Callable[[], tuple[Problem, list[str]]]] = {
    "chain-20": lambda: chain(20),
    "residual-16": lambda: residual(16),
    "transformer-12": lambda: transformer(12),
    "dense-64": lambda: dense(64),
}
ABLATION = {
    "full": Ingredients(),
    "no relaxation": Ingredients(relaxation=False),
    "no greedy seeds": Ingredients(seeds=False),
    "no groups": Ingredients(groups=False),
    "no mutation": Ingredients(mutation=False),
    "no repair": Ingredients(repair=False),
    "no seeds at all": Ingredients(seeds=False, relaxation=False),
    "uniform, no repair, no mutation": Ingredients(seeds=False, relaxation=False, repair=False, mutation=False),
}
Case = tuple[str, Problem, list[str]]


@dataclass(frozen=True)
class Asked:
    """What to run: most evaluations of a search, the models and shares (all unless given), a long search's seconds."""

    evaluations: int
    names: tuple[str, ...]
    shares: tuple[float, ...]
    long_seconds: float


def cases(names: Sequence[str] = ()) -> Iterator[Case]:
    """Synthetic problems, then every saved profile; only those named, if any are."""
    for name, make in SYNTHETIC.items():
        if not names or name in names:
            yield name, *make()
    for path in sorted(PROFILES.glob("*.npz")):
        if not names or path.stem in names:
            yield path.stem, *load_case(path)


def _small_cases(names: Sequence[str]) -> Iterator[Case]:
    """Those on which the published searches run too."""
    for case in cases(names):
        if case[1].arrays.node_phase.shape[0] <= SEARCHED_NODES:
            yield case


def _row(name: str, share: float, step_us: float, result: SearchResult, bound_us: float) -> Row:
    """bound_us is infinite where nothing fits."""
    provable = math.isfinite(bound_us)
    return {
        "model": name,
        "budget": share,
        "policy": result.policy,
        "feasible": result.feasible,
        "step": result.step_us / step_us,
        "bound": bound_us / step_us if provable else None,
        "gap": result.step_us / bound_us - 1 if result.feasible and provable else None,
        "peak": result.peak_bytes,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "stopped_by": result.stopped_by,
    }


def _bound(problem: Problem, budget: int, ours: SearchResult) -> float:
    """The lower bound; of a small graph with a wide gap, what the integer program raises it to in its seconds."""
    below = lower_bound(problem, budget).step_us
    small = problem.decisions().shape[0] <= SEEN_DECISIONS
    if small and ours.feasible and ours.step_us > below * (1 + WIDE_GAP):
        below = max(below, lower_bound(problem, budget, milp_seconds=MILP_SECONDS).step_us)
    return below


def quality(asked: Asked) -> list[Row]:
    """Every policy at every budget of every model; the published searches get as many evaluations as ours may use."""
    rows = []
    for name, problem, classes in cases(asked.names):
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        least = minimum_peak(problem)[0] / peak
        for share in asked.shares or SHARES:
            budget = int(share * peak)
            results = [
                search(problem, budget, policy=policy, max_evaluations=asked.evaluations, storage_class=classes)
                for policy in POLICIES
            ]
            bound = _bound(problem, budget, results[0])
            rows += [_row(name, share, step, result, bound) | {"least": least} for result in results]
            print(f"quality {name} {share}", file=sys.stderr)
    return rows


def convergence(asked: Asked) -> list[Row]:
    """Best step against evaluations at 45 % of keep-all's peak."""
    rows = []
    for name, problem, classes in _small_cases(asked.names):
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        for policy in CURVES:
            result = search(
                problem, int(0.45 * peak), policy=policy, max_evaluations=asked.evaluations, storage_class=classes
            )
            curve = [(at, us / step) for at, us in result.history]
            rows.append({"model": name, "policy": policy, "curve": curve, "evaluations": result.evaluations})
        print(f"convergence {name}", file=sys.stderr)
    return rows


def ablation(asked: Asked) -> list[Row]:
    """Each ingredient of the swarm left out, three seeds, equal evaluations, 45 % of keep-all's peak."""
    rows = []
    for name, problem, classes in _small_cases(asked.names):
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        budget = int(0.45 * peak)
        bound = lower_bound(problem, budget).step_us
        if not math.isfinite(bound):
            continue
        for label, ingredients in ABLATION.items():
            results = [
                search(
                    problem,
                    budget,
                    seed=seed,
                    max_evaluations=asked.evaluations,
                    storage_class=classes,
                    ingredients=ingredients,
                )
                for seed in range(3)
            ]
            fits = [r.step_us for r in results if r.feasible]
            gap = statistics.mean(fits) / bound - 1 if fits else None
            rows.append({"model": name, "variant": label, "fits": len(fits), "gap": gap, "bound": bound / step})
        print(f"ablation {name}", file=sys.stderr)
    return rows


def scaling(asked: Asked) -> list[Row]:
    """10, 100 and 1,000 transformer layers at half of keep-all's peak."""
    rows = []
    for layers in (10, 100, 1000):
        problem, classes = transformer(layers)
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        started = time.perf_counter()
        for _ in range(5):
            evaluate(problem, problem.keep_all(), peak // 2)
        each = (time.perf_counter() - started) / 5
        endless = Ingredients(patience=1 << 30)
        spent = time.process_time()
        result = search(
            problem, peak // 2, max_evaluations=asked.evaluations, storage_class=classes, ingredients=endless
        )
        rows.append(
            {
                "layers": layers,
                "nodes": int(problem.arrays.node_phase.shape[0]),
                "evaluation_ms": 1e3 * each,
                "seconds": result.seconds,
                "cpu_seconds": time.process_time() - spent,
                "evaluations": result.evaluations,
                "step": result.step_us / step,
                "process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
        print(f"scaling {layers}", file=sys.stderr)
    return rows


def speed(asked: Asked) -> list[Row]:
    """Wall time of the default search (the best of several runs) and how close it comes to a long one."""
    rows = []
    for name, limit in SPEED_MODELS.items():
        if asked.names and name not in asked.names:
            continue
        problem, classes = load_case(PROFILES / f"{name}.npz")
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        for share in asked.shares or SPEED_SHARES:
            budget = int(share * peak)
            spent = [time.process_time()]
            runs = []
            for _ in range(SPEED_RUNS):
                runs.append(search(problem, budget, storage_class=classes))
                spent.append(time.process_time())
            endless = Ingredients(patience=1 << 30)
            long = search(
                problem,
                budget,
                max_evaluations=1 << 40,
                search_seconds=asked.long_seconds,
                storage_class=classes,
                ingredients=endless,
            )
            rows.append(
                {
                    "model": name,
                    "budget": share,
                    "nodes": int(problem.arrays.node_phase.shape[0]),
                    "decisions": int(problem.decisions().shape[0]),
                    "seconds": min(run.seconds for run in runs),
                    "slowest": max(run.seconds for run in runs),
                    "cpu_seconds": min(after - before for before, after in itertools.pairwise(spent)),
                    "limit": limit,
                    "evaluations": runs[0].evaluations,
                    "step": runs[0].step_us / step,
                    "gap": runs[0].gap,
                    "long_step": long.step_us / step,
                    "long_seconds": long.seconds,
                    "long_evaluations": long.evaluations,
                }
            )
            print(f"speed {name} {share}", file=sys.stderr)
    return rows


SECTIONS: dict[str, Callable[[Asked], list[Row]]] = {
    "quality": quality,
    "convergence": convergence,
    "ablation": ablation,
    "scaling": scaling,
    "speed": speed,
}


def main() -> None:
    """Run the sections asked for and write the results; sections not asked for keep what the JSON holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated: " + ", ".join(SECTIONS))
    parser.add_argument("--evaluations", type=int, default=5000, help="most evaluations of each search")
    parser.add_argument("--models", default="", help="comma-separated; all unless given (scaling has its own)")
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="budgets of quality and speed")
    parser.add_argument("--long-seconds", type=float, default=60.0, help="what speed gives its long search")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, nargs="*", help="run nothing: add the rows that these folders hold")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {unknown}; allowed are {list(SECTIONS)}")
    names = tuple(name for name in options.models.split(",") if name)
    asked = Asked(options.evaluations, names, tuple(options.shares), options.long_seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    saved = options.out / "search.json"
    found: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {}
    if options.merge is not None:
        for part in options.merge:
            merge(found, json.loads((part / "search.json").read_text()))
        saved.write_text(json.dumps(found, indent=1) + "\n")
    for name in wanted if options.merge is None else ():
        found[name] = SECTIONS[name](asked)
        commands = found.setdefault("commands", {})
        commands[name] = f"python -m benchmarks.search --sections {name} --evaluations {options.evaluations}"
        commands[name] += f" --long-seconds {options.long_seconds:.0f}" if name == "speed" else ""
        commands[name] += f" --models {options.models}" if names else ""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        found["machine"] = f"{cores} cores, {platform.machine()}, Python {platform.python_version()}"
        saved.write_text(json.dumps(found, indent=1) + "\n")
    write(found, options.out)


def merge(found: dict[str, Any], part: dict[str, Any]) -> None:
    """Put a part's rows in place of those of the same model, budget, policy and variant, in the order of the models."""
    order = [*SYNTHETIC, *(path.stem for path in sorted(PROFILES.glob("*.npz")))]
    for section in part.get("commands", {}):
        found.setdefault("commands", {})[section] = part["commands"][section].partition(" --models")[0]
        rows = {_key(row): row for row in found.get(section, [])} | {_key(row): row for row in part.get(section, [])}
        found[section] = list(rows.values())
        if section != "scaling":
            found[section].sort(key=lambda row: (order.index(row["model"]), -row.get("budget", 0)))
    found["machine"] = part.get("machine", found.get("machine"))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "layers", "budget", "policy", "variant"))


def write(found: dict[str, Any], folder: Path) -> None:
    """The text and the picture of all sections found."""
    if "convergence" in found:
        draw(found["convergence"], folder / "search_convergence.png")
    parts = ["# Search", f"Seed 0, {found['machine']}. Figures are the simulator's, not a GPU's.", PROBLEMS]
    parts += [note for name, note in found.get("notes", {}).items() if name in found]
    for name in SECTIONS:
        if name in found:
            parts += [TEXT[name](found[name]), f"`{found['commands'][name]}`"]
    (folder / "search.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
