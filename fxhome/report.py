"""Plans and runs as tables for people; `fxhome.plan_text` says the same of one plan without a terminal library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fxhome.placement import Placement, Plan
from fxhome.plan_text import largest, promise_rows, search_line
from fxhome.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from fxhome.cli_run import RunReport
    from fxhome.train_steps import Training

_MODULE_DEPTH = 2
_NUM_MODULES = 12


def render(plans: Plan | Iterable[Plan], console: Console) -> None:
    """Print one plan, or several (one per graph): the promise, the bytes per placement, the holders, the modules."""
    every = (plans,) if isinstance(plans, Plan) else tuple(plans)
    for index, plan in enumerate(every):
        title = "plan" if len(every) == 1 else f"plan {index + 1} of {len(every)}"
        _render_plan(plan, title, console)


def render_run(report: RunReport, console: Console) -> None:
    """Print the plain and the planned run side by side."""
    # Headings stand above the tables: a title inside would be broken at the table's width.
    heading = f"{report.spec}, batch {report.batch_size}, {report.device}, inner {report.inner}"
    console.print(heading, markup=False, highlight=False)
    table = Table()
    table.add_column("")
    table.add_column("without fxhome", justify="right")
    table.add_column("with fxhome", justify="right")
    plan, plain, planned = report.plan, report.plain, report.planned
    table.add_row("peak asked", "-", f"{format_bytes(plan.budget_bytes)} ({plan.asked})")
    table.add_row("peak predicted", format_bytes(plan.baseline_peak_bytes), format_bytes(plan.predicted_peak_bytes))
    if plain is None:
        table.add_row("peak measured", "does not fit", format_bytes(planned.peak_bytes))
    else:
        table.add_row("peak measured", format_bytes(plain.peak_bytes), format_bytes(planned.peak_bytes))
    if planned.reserved_bytes is not None:
        table.add_row("reserved", _reserved(plain), _reserved(planned))
    table.add_row("step time (median)", _step(plain), _step(planned))
    table.add_row("step time predicted", "-", format_seconds(plan.predicted_step_seconds))
    table.add_row("loss (last step)", _loss(plain), _loss(planned))
    table.add_row("largest gradient difference", "-", _difference(report.largest_gradient_difference))
    for name, size in placed_bytes(plan).items():
        table.add_row(name, "-", format_bytes(size))
    console.print(table)
    if report.plain_failure is not None:
        console.print(f"without fxhome: {report.plain_failure}", markup=False, highlight=False)
    _print_notes(plan, console)
    kept = "kept" if planned.peak_bytes <= plan.budget_bytes else "BROKEN"
    console.print(f"budget {kept}: measured {format_bytes(planned.peak_bytes)} of {format_bytes(plan.budget_bytes)}")


def render_profile(profile: Mapping[str, object], console: Console) -> None:
    """Print a device profile given as {field: value}; lists take one row per pair, or per figure of each entry."""
    table = Table(title="device profile")
    table.add_column("")
    table.add_column("value", justify="right", overflow="fold")
    for name, value in profile.items():
        for key, entry in _profile_rows(value):
            shown = f"{entry:.4g}" if isinstance(entry, float) else str(entry)
            table.add_row(f"{name} {key}".rstrip(), Text(shown))
    console.print(table)


def _profile_rows(value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, list):
        yield "", value
        return
    for entry in value:
        if isinstance(entry, dict):
            figures = ((name, len(figure) if name == "steps" else figure) for name, figure in entry.items())
            yield from ((f"{entry['inner']} {name}", figure) for name, figure in figures if name != "inner")
        else:
            yield entry


def placed_bytes(plan: Plan) -> dict[str, int]:
    """Bytes kept, swapped, recomputed, compressed; a storage that is encoded on its way to the host counts as both."""
    totals = plan.bytes_by_placement()
    both = totals[Placement.COMPRESS_SWAP]
    return {
        "kept": totals[Placement.KEEP],
        "swapped": totals[Placement.SWAP] + both,
        "recomputed": totals[Placement.RECOMPUTE] + totals[Placement.RECOMPUTE_EACH],
        "compressed": totals[Placement.COMPRESS] + both,
    }


def _render_plan(plan: Plan, title: str, console: Console) -> None:
    kind = f"estimated {title}" if plan.estimated else title
    heading = f"{kind}: graph {plan.graph_fingerprint[:12]}, inner {plan.inner}, asked {plan.asked}"
    console.print(heading, markup=False, highlight=False)
    promise = Table()
    for column in ("", "asked", "predicted", "measured"):
        promise.add_column(column, justify="left" if not column else "right")
    for row in promise_rows(plan):
        promise.add_row(*row)
    console.print(promise)

    peak = Table(title="what the peak is made of")
    peak.add_column("")
    peak.add_column("bytes", justify="right")
    baseline = f"{format_bytes(plan.baseline_peak_bytes)}, {format_seconds(plan.baseline_step_seconds)}"
    for name, value in (
        ("baseline (keep everything)", baseline),
        ("resident (weights, inputs, state)", format_bytes(plan.resident_bytes)),
        ("outside the graphs", format_bytes(plan.outside_bytes)),
        ("op workspace", format_bytes(plan.workspace_bytes)),
        ("error bound of the prediction", format_bytes(plan.error_bound_bytes)),
        ("host memory", format_bytes(plan.host_bytes)),
        *((name, format_bytes(size)) for name, size in placed_bytes(plan).items()),
        ("must stay", format_bytes(sum(size for _, size, _ in plan.ineligible))),
    ):
        peak.add_row(name, value)
    console.print(peak)
    console.print(_holders_table(plan))
    console.print(_modules_table(plan))
    console.print(search_line(plan), markup=False, highlight=False)
    _print_notes(plan, console)


def _holders_table(plan: Plan) -> Table:
    table = Table(title="largest storages")
    table.add_column("bytes", justify="right")
    for column in ("placement", "node", "module", "why"):
        table.add_column(column, overflow="fold")
    for entry in largest(plan):
        placement = entry.placement if entry.codec is None else f"{entry.placement} ({entry.codec})"
        # Text, because a str would lose everything in brackets: rich reads it as markup.
        texts = (Text(text) for text in (placement, entry.name, entry.module_path, entry.reason))
        table.add_row(format_bytes(entry.size_bytes), *texts)
    for name, size_bytes, why in sorted(plan.ineligible, key=lambda entry: -entry[1])[:3]:
        table.add_row(format_bytes(size_bytes), "must stay", Text(name), "", Text(why))
    return table


def _modules_table(plan: Plan) -> Table:
    """Sum the placements by the first parts of the module path, largest module first."""
    sums: dict[str, dict[Placement, int]] = defaultdict(lambda: dict.fromkeys(Placement, 0))
    for entry in plan.placements:
        module = ".".join(entry.module_path.split(".")[:_MODULE_DEPTH]) or "(no module)"
        sums[module][entry.placement] += entry.size_bytes
    used = [kind for kind in Placement if any(row[kind] for row in sums.values())]
    table = Table(title="placements by module")
    table.add_column("module", overflow="fold")
    for kind in used:
        table.add_column(kind.value, justify="right")
    ordered = sorted(sums.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    for module, row in ordered[:_NUM_MODULES]:
        table.add_row(Text(module), *(format_bytes(row[kind]) for kind in used))
    if len(ordered) > _NUM_MODULES:
        rest = [sum(row[kind] for _, row in ordered[_NUM_MODULES:]) for kind in used]
        table.add_row(f"{len(ordered) - _NUM_MODULES} more", *map(format_bytes, rest))
    return table


def _print_notes(plan: Plan, console: Console) -> None:
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _reserved(training: Training | None) -> str:
    if training is None or training.reserved_bytes is None:
        return "-"
    return format_bytes(training.reserved_bytes)


def _step(training: Training | None) -> str:
    return "-" if training is None else format_seconds(training.step_seconds)


def _loss(training: Training | None) -> str:
    return "-" if training is None else f"{training.losses[-1]:.6f}"


def _difference(difference: float | None) -> str:
    if difference is None:
        return "nothing to compare with"
    return "0 (bitwise equal)" if difference == 0.0 else f"{difference:.3g}"
