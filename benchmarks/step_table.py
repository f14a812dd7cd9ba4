"""Rows of benchmarks.train_step as a Markdown table and as a picture: peak memory against step time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEADINGS = (
    "method",
    "step ms (fastest, slowest)",
    "ratio",
    "ratio without a cap",
    "asked GB",
    "predicted GB",
    "measured GB",
    "reserved GB",
    "reserved GB without a cap",
    "predicted ms",
    "kept / swapped / compressed / recomputed GB",
    "first step s",
)


BYTES = ("asked_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes", "uncapped_reserved_bytes")


def table(document: dict[str, Any]) -> str:
    """The rows as Markdown; peaks in GB (1e9), times in ms, ratios to torch.compile in the same run."""
    lines = [
        f"# {document['workload']}, batch {document['batch']}, {document['device']}",
        "",
        f"torch {document['torch']}, Python {document['python']}; `{document['command']}`",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
    ]
    for name, row in document["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} " + "| " * (len(HEADINGS) - 2) + "|")
            continue
        times = [row.get(key) for key in ("step_seconds", "fastest_seconds", "slowest_seconds")]
        cells = [
            name,
            "not timed" if None in times else "{:.1f} ({:.1f}, {:.1f})".format(*(t * 1e3 for t in times)),
            *(f"{row[key]:.3f}" if key in row else "" for key in ("ratio", "uncapped_ratio")),
            *(_gb(row.get(key)) for key in BYTES),
            f"{row['predicted_seconds'] * 1e3:.1f}" if "predicted_seconds" in row else "",
            _shares(row.get("placed", {})),
            f"{row['first_step_seconds']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def picture(document: dict[str, Any], path: Path) -> None:
    """Peak on one axis, step time on the other, one line per method; nothing to draw without measured peaks."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, row in document["rows"].items():
        if "peak_bytes" in row and "step_seconds" in row:
            series.setdefault(name.split()[0], []).append((row["peak_bytes"] / 1e9, row["step_seconds"] * 1e3))
    if not series:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for method, points in series.items():
        peaks, times = zip(*sorted(points), strict=True)
        axes.plot(peaks, times, marker="o", label=method)
    axes.set_xlabel("measured peak, GB")
    axes.set_ylabel("step, ms")
    axes.set_title(f"{document['workload']}, batch {document['batch']}, {document['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shares(placed: dict[str, int]) -> str:
    if not placed:
        return ""
    again = placed.get("recompute", 0) + placed.get("recompute_each", 0)
    encoded = placed.get("compress", 0) + placed.get("compress+swap", 0)
    return " / ".join(_gb(size) for size in (placed.get("keep", 0), placed.get("swap", 0), encoded, again))


def _gb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"
