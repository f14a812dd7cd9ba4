"""A plan as plain text, with no dependency on a terminal library; `fxhome.report` draws the same facts as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxhome.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from fxhome.placement import Plan, StoragePlacement

_NUM_HOLDERS = 8


def describe(plan: Plan) -> str:
    """Lay out one plan in a dozen lines."""
    return "\n".join(
        line for block in (_promise(plan), _placement(plan), _holders(plan), _search(plan)) for line in block
    )


def promise_rows(plan: Plan) -> tuple[tuple[str, str, str, str], ...]:
    """Rows of (quantity, asked, predicted, measured); the three stand together wherever a plan is shown."""
    measured_peak = "not measured" if plan.measured_peak_bytes is None else format_bytes(plan.measured_peak_bytes)
    measured_step = "not measured" if plan.measured_step_seconds is None else format_seconds(plan.measured_step_seconds)
    rows = [
        ("peak memory", format_bytes(plan.budget_bytes), format_bytes(plan.predicted_peak_bytes), measured_peak),
        ("step time", "-", format_seconds(plan.predicted_step_seconds), measured_step),
    ]
    if plan.measured_reserved_bytes is not None:
        rows.append(("reserved memory", "-", "-", format_bytes(plan.measured_reserved_bytes)))
    return tuple(rows)


def largest(plan: Plan) -> tuple[StoragePlacement, ...]:
    """The largest planned storages, largest first, ties by name."""
    return tuple(sorted(plan.placements, key=lambda entry: (-entry.size_bytes, entry.name))[:_NUM_HOLDERS])


def search_line(plan: Plan) -> str:
    """One line about the search: policy, seed, evaluations, why it stopped, gap to the bound."""
    search = plan.search
    gap = "no bound computed" if plan.gap is None else f"{plan.gap:.1%} above the lower bound"
    return (
        f"search: {search.policy}, seed {search.seed}, {search.evaluations} evaluations in "
        f"{format_seconds(search.seconds)}, stopped by {search.stopped_by}, {gap}"
    )


def _promise(plan: Plan) -> list[str]:
    kind = "estimated plan" if plan.estimated else "plan"
    lines = [f"fxhome {kind} for graph {plan.graph_fingerprint[:12]} (inner {plan.inner}, asked {plan.asked})"]
    lines.append(f"  {'':16}{'asked':>14}{'predicted':>14}{'measured':>14}")
    lines += [f"  {name:16}{asked:>14}{predicted:>14}{seen:>14}" for name, asked, predicted, seen in promise_rows(plan)]
    lines.append(
        f"  baseline (keep everything): {format_bytes(plan.baseline_peak_bytes)}, "
        f"{format_seconds(plan.baseline_step_seconds)}; error bound {format_bytes(plan.error_bound_bytes)}"
    )
    lines.append(
        f"  of the peak: resident {format_bytes(plan.resident_bytes)}, outside {format_bytes(plan.outside_bytes)}, "
        f"workspace {format_bytes(plan.workspace_bytes)}; host memory {format_bytes(plan.host_bytes)}"
    )
    return lines


def _placement(plan: Plan) -> list[str]:
    parts = [f"{kind.value} {format_bytes(size)}" for kind, size in plan.bytes_by_placement().items() if size]
    return [f"  placements: {', '.join(parts) if parts else 'none'} ({len(plan.placements)} storages)"]


def _holders(plan: Plan) -> list[str]:
    lines = [
        f"    {format_bytes(entry.size_bytes):>12}  {entry.placement:14}  {entry.name}  {entry.module_path}".rstrip()
        for entry in largest(plan)
    ]
    if lines:
        lines.insert(0, "  largest storages:")
    if plan.ineligible:
        stay = sum(size for _, size, _ in plan.ineligible)
        lines.append(f"  must stay: {len(plan.ineligible)} storages, {format_bytes(stay)}")
    return lines


def _search(plan: Plan) -> list[str]:
    return [f"  {search_line(plan)}", *(f"  note: {note}" for note in plan.notes)]
