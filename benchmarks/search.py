"""The search, measured: quality against policies and the bound, convergence, ablation, scaling. No GPU needed.

    python -m benchmarks.search                 every section, on synthetic graphs and benchmarks/profiles/*.npz
    python -m benchmarks.search --sections quality,scaling --evaluations 5000

Writes search.md, search.json and search_convergence.png in benchmarks/results. Steps are relative to keep-all.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search_problems import chain, dense, residual, transformer
from fxhome.passes.search import POLICIES, SearchResult, lower_bound, search
from fxhome.passes.search.seeds import Ingredients
from fxhome.passes.simulate import Problem, evaluate

RESULTS = Path(__file__).parent / "results"
PROFILES = Path(__file__).parent / "profiles"
SHARES = (0.8, 0.6, 0.45, 0.3)
CLASS_POLICIES = ("vdnn_conv", "superneurons")
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
Case = tuple[str, Problem, list[str] | None]
Row = dict[str, Any]


def cases() -> Iterator[Case]:
    """Synthetic problems, then every saved profile."""
    for name, make in SYNTHETIC.items():
        problem, classes = make()
        yield name, problem, classes
    for path in sorted(PROFILES.glob("*.npz")):
        yield path.stem, Problem.load(path), None


def _row(name: str, share: float, step_us: float, result: SearchResult, bound_us: float) -> Row:
    return {
        "model": name,
        "budget": share,
        "policy": result.policy,
        "feasible": result.feasible,
        "step": result.step_us / step_us,
        "bound": bound_us / step_us,
        "gap": result.step_us / bound_us - 1 if result.feasible else None,
        "peak": result.peak_bytes,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "stopped_by": result.stopped_by,
    }


def quality(evaluations: int) -> list[Row]:
    """Every policy at every budget of every model; the published searches get as many evaluations as ours may use."""
    rows = []
    for name, problem, classes in cases():
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        for share in SHARES:
            budget = int(share * peak)
            bound = lower_bound(problem, budget).step_us
            for policy in POLICIES:
                if policy in CLASS_POLICIES and classes is None:
                    continue
                result = search(problem, budget, policy=policy, max_evaluations=evaluations, storage_class=classes)
                rows.append(_row(name, share, step, result, bound))
            print(f"quality {name} {share}", file=sys.stderr)
    return rows


def convergence(evaluations: int) -> list[Row]:
    """Best step against evaluations at 45 % of keep-all's peak."""
    rows = []
    for name, problem, classes in cases():
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        for policy in CURVES:
            result = search(
                problem, int(0.45 * peak), policy=policy, max_evaluations=evaluations, storage_class=classes
            )
            curve = [(at, us / step) for at, us in result.history]
            rows.append({"model": name, "policy": policy, "curve": curve, "evaluations": result.evaluations})
        print(f"convergence {name}", file=sys.stderr)
    return rows


def ablation(evaluations: int) -> list[Row]:
    """Each ingredient of the swarm left out, three seeds, equal evaluations, 45 % of keep-all's peak."""
    rows = []
    for name, problem, classes in cases():
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        budget = int(0.45 * peak)
        bound = lower_bound(problem, budget).step_us
        for label, ingredients in ABLATION.items():
            results = [
                search(
                    problem,
                    budget,
                    seed=seed,
                    max_evaluations=evaluations,
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


def scaling(evaluations: int) -> list[Row]:
    """10, 100 and 1,000 transformer layers at half of keep-all's peak."""
    rows = []
    for layers in (10, 100, 1000):
        problem, classes = transformer(layers)
        peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
        started = time.perf_counter()
        for _ in range(5):
            evaluate(problem, problem.keep_all(), peak // 2)
        each = (time.perf_counter() - started) / 5
        result = search(problem, peak // 2, max_evaluations=evaluations, storage_class=classes)
        rows.append(
            {
                "layers": layers,
                "nodes": int(problem.arrays.node_phase.shape[0]),
                "evaluation_ms": 1e3 * each,
                "seconds": result.seconds,
                "evaluations": result.evaluations,
                "step": result.step_us / step,
                "process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
        print(f"scaling {layers}", file=sys.stderr)
    return rows


SECTIONS: dict[str, Callable[[int], list[Row]]] = {
    "quality": quality,
    "convergence": convergence,
    "ablation": ablation,
    "scaling": scaling,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['step']:.4f}" if row["feasible"] else "does not fit"


def _quality_text(rows: list[Row]) -> str:
    ours = [r for r in rows if r["policy"] == "pso"]
    gaps = [r["gap"] for r in ours if r["gap"] is not None]
    policies = [p for p in POLICIES if any(r["policy"] == p for r in rows)]
    body = []
    for mine in ours:
        cell = {r["policy"]: r for r in rows if (r["model"], r["budget"]) == (mine["model"], mine["budget"])}
        steps = [
            "" if p not in cell else f"{cell[p]['step']:.4f}" if cell[p]["feasible"] else "does not fit"
            for p in policies
        ]
        figures = [_percent(mine["gap"]), str(mine["evaluations"]), f"{mine['seconds']:.1f}"]
        body.append([mine["model"], f"{mine['budget']:.0%}", f"{mine['bound']:.4f}", *figures, *steps])
    losses = [
        f"{r['model']} at {r['budget']:.0%}: {r['policy']} {r['step']:.4f}"
        for r in rows
        for mine in ours
        if (r["model"], r["budget"]) == (mine["model"], mine["budget"])
        and r["feasible"]
        and not r["policy"].startswith("vdnn_a")
        and (r["step"] < mine["step"] * (1 - 1e-6) or not mine["feasible"])
    ]
    summary = f"Gap of `pso`: median {_percent(statistics.median(gaps))}, worst {_percent(max(gaps))}." if gaps else ""
    lost = "Losses of `pso`: " + ("; ".join(losses) if losses else "none") + "."
    head = ["model", "budget", "bound", "pso gap", "evaluations", "s", *policies]
    return "\n\n".join(["## Quality (step relative to keep-all)", summary, lost, _table(head, body)])


def _ablation_text(rows: list[Row]) -> str:
    models = list(dict.fromkeys(r["model"] for r in rows))
    cell = {(r["variant"], r["model"]): r for r in rows}
    body = [
        [v, *(f"{_percent(cell[v, m]['gap'])} ({cell[v, m]['fits']}/3 fit)" for m in models)]
        for v in dict.fromkeys(r["variant"] for r in rows)
    ]
    return "## Ablation (mean gap of three seeds at 45 %)\n\n" + _table(["variant", *models], body)


def _scaling_text(rows: list[Row]) -> str:
    keys = ("layers", "nodes", "evaluation_ms", "seconds", "evaluations", "step", "process_peak_mib")
    body = [[f"{r[k]:.3f}" if isinstance(r[k], float) else str(r[k]) for k in keys] for r in rows]
    return "## Scaling\n\n" + _table(keys, body)


def _convergence_text(rows: list[Row]) -> str:
    marks = (50, 200, 500, 1000, 2000, 5000)
    body = []
    for r in rows:
        best = [min((s for at, s in r["curve"] if at <= mark), default=None) for mark in marks]
        body.append([r["model"], r["policy"], *("-" if b is None else f"{b:.4f}" for b in best)])
    head = ["model", "policy", *(f"after {m}" for m in marks)]
    return "## Convergence (best step that fits, at 45 %)\n\n![curves](search_convergence.png)\n\n" + _table(head, body)


def _draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(r["model"] for r in rows))
    columns = min(2 if len(models) <= 4 else 3, len(models))
    lines = -(-len(models) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.5 * lines), squeeze=False)
    for axis, model in zip(axes.flat, models, strict=False):
        for r in rows:
            if r["model"] == model and r["curve"]:
                at, steps = zip(*[*r["curve"], (r["evaluations"], r["curve"][-1][1])], strict=True)
                axis.step(at, steps, where="post", label=r["policy"])
        axis.set(title=model, xscale="log", xlabel="evaluations", ylabel="step / keep-all")
        axis.set_ylim(top=min(axis.get_ylim()[1], 1.6))
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


TEXT: dict[str, Callable[[list[Row]], str]] = {
    "quality": _quality_text,
    "convergence": _convergence_text,
    "ablation": _ablation_text,
    "scaling": _scaling_text,
}


def main() -> None:
    """Run the sections asked for and write the results; sections not asked for keep what the JSON holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated: " + ", ".join(SECTIONS))
    parser.add_argument("--evaluations", type=int, default=5000, help="most evaluations of each search")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {unknown}; allowed are {list(SECTIONS)}")
    RESULTS.mkdir(exist_ok=True)
    saved = RESULTS / "search.json"
    found: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {}
    for name in wanted:
        found[name] = SECTIONS[name](options.evaluations)
        commands = found.setdefault("commands", {})
        commands[name] = f"python -m benchmarks.search --sections {name} --evaluations {options.evaluations}"
        found["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
        saved.write_text(json.dumps(found, indent=1) + "\n")
    if "convergence" in found:
        _draw(found["convergence"], RESULTS / "search_convergence.png")
    parts = ["# Search", f"Seed 0, {found['machine']}. Figures are the simulator's, not a GPU's."]
    for name in SECTIONS:
        if name in found:
            parts += [TEXT[name](found[name]), f"`{found['commands'][name]}`"]
    (RESULTS / "search.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
