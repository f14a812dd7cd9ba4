"""The results of `benchmarks.policies` as Markdown: every row, then per policy the best, the mean and every loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

OURS = "pso"
HEAD = tuple(
    "model,inner,budget,policy,step ms (fastest; slowest),/ pso,predicted ms,asked GB,predicted GB,measured GB,"
    "swapped GB,recomputed GB,compressed GB,fits".split(",")
)
Row = dict[str, Any]


def report(document: dict[str, Any]) -> str:
    """Tables of a results document; peaks in GB (1e9), times in ms, ratios against ours at the same budget."""
    rows = [row for row in document["rows"].values() if "step_ms" in row]
    failed = [row for row in document["rows"].values() if "error" in row]
    parts = [
        f"# Policies on one executor: {document['device']}",
        f"torch {document['torch']}, Python {document['python']}. Same model, batch, budget and run time; only the "
        "decisions differ. vDNN waits for its copies at the end of each layer, as published.",
        "## Against pso, measured step time at the same budget",
        summary(rows),
        "## All rows",
        _table(
            HEAD,
            [_cells(row, rows) for row in rows],
        ),
    ]
    if failed:
        parts += ["## Failed", *(f"- {_name(row)}, {row['policy']}: {row['error']}" for row in failed)]
    parts += ["## Budgets", *(_budget_text(name, found) for name, found in document["budgets"].items())]
    parts += ["\n".join(f"`{command}`" for command in document["commands"])]
    return "\n\n".join(parts) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """One line per policy: how many times slower than ours it is, at best and on average, and where it is faster."""
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        if policy == OURS:
            continue
        pairs = [(row, ours) for row in rows if row["policy"] == policy and row["fits"] and (ours := _ours(row, rows))]
        if not pairs:
            continue
        ratios = [row["step_ms"] / ours["step_ms"] for row, ours in pairs]
        best = max(range(len(pairs)), key=lambda i: ratios[i])
        losses = [f"{_name(row)} {ratio:.3f}" for (row, _), ratio in zip(pairs, ratios, strict=True) if ratio < 1]
        lines.append(
            f"- **{policy}**: {statistics.geometric_mean(ratios):.2f} times as long (geometric mean of {len(pairs)}), "
            f"at most {ratios[best]:.2f} ({_name(pairs[best][0])}); shorter than ours: {'; '.join(losses) or 'never'}"
        )
    return "\n".join(lines) if lines else "No policy was measured beside ours."


def _ours(row: Row, rows: Sequence[Row]) -> Row | None:
    """Our row for the same model and budget."""
    for other in rows:
        if other["policy"] == OURS and _place(other) == _place(row) and other["fits"]:
            return other
    return None


def _place(row: Row) -> tuple[str, ...]:
    return row["shapes"], row["model"], row["inner"], row["budget"]


def _name(row: Row) -> str:
    return f"{row['model']} ({row['shapes']}, {row['inner']}) at {row['budget']}"


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    ours = _ours(row, rows)
    placed = row["placed"]
    again = placed.get("recompute", 0) + placed.get("recompute_each", 0)
    return [
        f"{row['model']} ({row['shapes']})",
        row["inner"],
        row["budget"],
        row["policy"],
        f"{row['step_ms']:.2f} ({row['fastest_ms']:.2f}, {row['slowest_ms']:.2f})",
        f"{row['step_ms'] / ours['step_ms']:.3f}" if ours else "-",
        f"{row['predicted_ms']:.2f}",
        *(_gb(row[key]) for key in ("asked_bytes", "predicted_bytes", "measured_bytes")),
        *(_gb(size) for size in (placed.get("swap", 0), again)),
        _gb(placed.get("compress", 0) + placed.get("compress+swap", 0)),
        "yes" if row["fits"] else "no",
    ]


def _budget_text(name: str, found: dict[str, Any]) -> str:
    least = ", ".join(f"{policy} {_gb(size)}" for policy, size in found["least"].items())
    tight = f", tight {_gb(found['tight'])} GB ({found['tight'] / found['baseline']:.0%})" if "tight" in found else ""
    return (
        f"- {name}, batch {found['batch']}: baseline {_gb(found['baseline'])} GB; needs at least {least} GB; "
        f"common budget {_gb(found['common'])} GB ({found['common'] / found['baseline']:.0%}), the other one "
        f"{_gb(found['60%'])} GB ({found['60%'] / found['baseline']:.0%})" + tight
    )


def _gb(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e9:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
