"""A sweep for people: a table, a front drawn in the terminal, a picture by matplotlib."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fxhome.errors import OptionError
from fxhome.sweep import Sweep
from fxhome.units import format_bytes, format_seconds

GIB = 1 << 30
_WIDTH, _HEIGHT = 64, 14


def render_sweep(sweep: Sweep, console: Console) -> None:
    """Print the front as a table and as a drawing."""
    console.print(f"{sweep.device}, inner {sweep.inner}; predicted", markup=False, highlight=False)
    table = Table()
    for name in ("asked", "budget", "peak", "step", "/ baseline", "gap", "kept", "swapped", "recomputed", "compressed"):
        table.add_column(name, justify="right")
    for point in sweep.points:
        placed = (point.kept_bytes, point.swapped_bytes, point.recomputed_bytes, point.compressed_bytes)
        if point.fits:
            slower = f"{point.step_seconds / sweep.baseline_step_seconds:.3f}"
            gap = "-" if point.gap is None else f"{100 * point.gap:.2f} %"
            step = format_seconds(point.step_seconds)
        else:
            slower, gap, step = "-", "-", "does not fit"
        cells = (format_bytes(point.budget_bytes), format_bytes(point.peak_bytes), step, slower, gap)
        table.add_row(point.asked, *cells, *map(format_bytes, placed))
    console.print(table)
    console.print(
        f"baseline: peak {format_bytes(sweep.baseline_peak_bytes)}, "
        f"step {format_seconds(sweep.baseline_step_seconds)}; "
        f"smallest budget found: {format_bytes(sweep.minimum_bytes)} ({sweep.minimum_bytes} bytes); "
        f"{sweep.seconds:.1f} s",
        markup=False,
        highlight=False,
    )
    for line in drawing(sweep):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def front(sweep: Sweep) -> list[tuple[float, float]]:
    """(peak in GiB, step in ms) of every plan that fits, smallest peak first."""
    return sorted({(point.peak_bytes / GIB, 1e3 * point.step_seconds) for point in sweep.points if point.fits})


def drawing(sweep: Sweep) -> list[str]:
    """The front in characters: `*` a plan, `o` the baseline; step time upwards, peak to the right."""
    points = front(sweep)
    if not points:
        return ["no plan fits any of these budgets"]
    marks = [(x, y, "*") for x, y in points]
    marks.append((sweep.baseline_peak_bytes / GIB, 1e3 * sweep.baseline_step_seconds, "o"))
    low_x, high_x = min(x for x, _, _ in marks), max(x for x, _, _ in marks)
    low_y, high_y = min(y for _, y, _ in marks), max(y for _, y, _ in marks)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for x, y, mark in marks:
        column = round((x - low_x) / ((high_x - low_x) or 1.0) * (_WIDTH - 1))
        row = round((high_y - y) / ((high_y - low_y) or 1.0) * (_HEIGHT - 1))
        grid[row][column] = mark
    scale = [f"{high_y:.4g} ms", *[""] * (_HEIGHT - 2), f"{low_y:.4g} ms"]
    lines = [f"{text:>12} |{''.join(row)}".rstrip() for text, row in zip(scale, grid, strict=True)]
    left, right = f"{low_x:.4g} GiB", f"{high_x:.4g} GiB"
    gap = " " * max(1, _WIDTH - len(left) - len(right))
    return [*lines, f"{'':>12} +{'-' * _WIDTH}", f"{'':>12}  {left}{gap}{right}", f"{'':>12}  * plan   o baseline"]


def draw_sweep(sweep: Sweep, path: str) -> None:
    """Write the front as a picture. Raises OptionError where matplotlib is missing or the format is not known to it."""
    figure_class = check_plot(path)
    figure = figure_class(figsize=(6.4, 4.0))
    axis = figure.add_subplot()
    points = front(sweep)
    if points:
        axis.step(*zip(*points, strict=True), where="post", marker="o", label="fxhome")
    baseline = sweep.baseline_peak_bytes / GIB, 1e3 * sweep.baseline_step_seconds
    axis.plot(*baseline, "x", color="black", label=f"{sweep.inner} alone")
    axis.axvline(sweep.minimum_bytes / GIB, linestyle=":", color="grey", label="smallest budget found")
    axis.set(xlabel="peak, GiB", ylabel="step, ms", title=f"{sweep.device}, predicted")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check_plot(path: str) -> type:
    """matplotlib's Figure, which needs no display; raise OptionError where the picture could not be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f"--plot {path!r} needs matplotlib ({error}); pip install 'fxhome[plot]', or leave --plot out: "
            "the front is drawn in the terminal too"
        ) from error
    known = sorted(FigureCanvasAgg.filetypes)
    if path.rpartition(".")[2].lower() not in known:
        raise OptionError(
            f"--plot {path!r} has no format that matplotlib writes; end it with one of .{', .'.join(known)}"
        )
    figure: type = Figure
    return figure
