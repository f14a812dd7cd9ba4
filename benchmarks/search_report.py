"""The results of `benchmarks.search` as Markdown tables and a picture."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fxhome.passes.search import POLICIES

MEASURED = "_h200"
"""How the names of problems with measured times end."""

PROBLEMS = (
    "The H200 problems are training steps planned offline under torch 2.11, with operator times of that GPU "
    "(`python -m benchmarks.search_profiles --device benchmarks/profiles/h200_device.json "
    "--ops benchmarks/profiles/h200_ops.json WORKLOAD`). What was not measured is estimated from the device's rates: "
    "36 % of GPT-2 XL's compute time (its attention, of which a CPU traces other operators, and the products with its "
    "vocabulary), 21 % of the U-Net's and 7 % of SqueezeNet's (backward convolutions, whose gradient of the bias the "
    "GPU computes apart). Four backward convolutions of VGG-16 are derived from others. Of the rest, everything was "
    "measured."
)

Row = dict[str, Any]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


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
        bound = "nothing fits" if mine["bound"] is None else f"{mine['bound']:.4f}"
        body.append([mine["model"], f"{mine['budget']:.0%}", bound, *figures, *steps])
    losses = [
        f"{r['model']} at {r['budget']:.0%}: {r['policy']} {r['step']:.4f}"
        for r in rows
        for mine in ours
        if (r["model"], r["budget"]) == (mine["model"], mine["budget"])
        and r["feasible"]
        and (r["step"] < mine["step"] * (1 - 1e-6) or not mine["feasible"])
    ]
    measured = [r["gap"] for r in ours if r["gap"] is not None and r["model"].endswith(MEASURED)]
    told = (("all models", gaps), ("those with times of an H200", measured))
    summary = " ".join(
        f"Gap of `pso` over {what}: median {_percent(statistics.median(some))}, worst {_percent(max(some))}."
        for what, some in told
        if some
    )
    wide = [
        f"{r['model']} at {r['budget']:.0%} ({_percent(r['gap'])}; the smallest plan found needs {r['least']:.1%})"
        for r in ours
        if (r["gap"] or 0) > 0.1
    ]
    summary += f" Above 10 %: {'; '.join(wide) or 'none'}."
    if wide:
        summary += (
            " In graphs of up to 300 storages the bound sees what a recomputation holds, and where the gap is wide, an "
            "integer program has 20 s to raise it. Above 10 % that is not enough: tensors there are a fifth of the "
            "budget each, a program keeps or moves them whole at every instruction, and the integer program that says "
            "so of every instruction is not solved in its time. Most of such a gap is the bound's: of a chain of three "
            "layers at 80 %, where that program is solved to its end, the relaxation says 1.0955, the integer program "
            "1.1464, and the plan found takes 1.1465. Not all of it: annealing from many starts, 4,000 evaluations "
            "each, has found 1.2147 for chain-20 at 30 %. On graphs of up to 12 storages, where brute force can tell, "
            "the plans are optimal (tests)."
        )
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
    keys = ("layers", "nodes", "evaluation_ms", "seconds", "cpu_seconds", "evaluations", "step", "process_peak_mib")
    body = [[f"{r[k]:.3f}" if isinstance(r[k], float) else str(r[k]) for k in keys] for r in rows]
    return "## Scaling\n\n" + _table(keys, body)


def _speed_text(rows: list[Row]) -> str:
    body = [
        [
            r["model"],
            f"{r['budget']:.0%}",
            str(r["nodes"]),
            str(r["decisions"]),
            f"{r['seconds']:.1f} ({r['slowest']:.1f})",
            f"{r['cpu_seconds']:.1f}",
            f"{r['limit']:.0f}",
            str(r["evaluations"]),
            f"{r['step']:.4f}",
            _percent(r["gap"]),
            f"{r['long_step']:.4f} ({r['long_evaluations']} in {r['long_seconds']:.0f} s)",
            _percent(r["step"] / r["long_step"] - 1),
        ]
        for r in rows
    ]
    head = ["model", "budget", "nodes", "decisions", "s (worst run)", "CPU s", "aim", "evaluations", "step"]
    head += ["gap", "long search", "further off by"]
    return "## Speed of the default search\n\n" + _table(head, body)


def _convergence_text(rows: list[Row]) -> str:
    marks = (50, 200, 500, 1000, 2000, 5000)
    body = []
    for r in rows:
        best = [min((s for at, s in r["curve"] if at <= mark), default=None) for mark in marks]
        body.append([r["model"], r["policy"], *("-" if b is None else f"{b:.4f}" for b in best)])
    head = ["model", "policy", *(f"after {m}" for m in marks)]
    return "## Convergence (best step that fits, at 45 %)\n\n![curves](search_convergence.png)\n\n" + _table(head, body)


def draw(rows: list[Row], path: Path) -> None:
    """Write the convergence curves as a picture."""
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
    "speed": _speed_text,
}
