"""Tables for people: everything that was promised is on them, as it was written."""

from __future__ import annotations

import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from fxhome.cli_run import RunReport
from fxhome.placement import Plan
from fxhome.report import placed_bytes, render, render_profile, render_run
from fxhome.train_steps import Training
from tests.plan_strategies import EXAMPLE, MEASURED, MIB

PLAIN = Training(peak_bytes=1001 * MIB, reserved_bytes=None, step_seconds=0.1, losses=(3.0, 2.5))
PLANNED = Training(peak_bytes=588 * MIB, reserved_bytes=620 * MIB, step_seconds=0.12, losses=(3.0, 2.5))
REPORT = RunReport(
    spec="nets[1].py:factory",
    device="cpu",
    inner="aot_eager",
    batch_size=4,
    plan=MEASURED,
    plain=PLAIN,
    plain_failure=None,
    planned=PLANNED,
    largest_gradient_difference=0.0,
)


def rendered(*plans: Plan) -> str:
    console = Console(file=StringIO(), width=160)
    render(plans if len(plans) > 1 else plans[0], console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def rendered_run(report: RunReport) -> dict[str, list[str]]:
    """Cells of each row by the row's first cell; lines outside the table under their whole text."""
    console = Console(file=StringIO(), width=160)
    render_run(report, console)
    assert isinstance(console.file, StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
    cells = [[cell.strip() for cell in line.replace("│", "┃").strip("┃").split("┃")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_a_plan_shows_its_promise_its_bytes_and_its_modules() -> None:
    text = rendered(MEASURED)

    (peak,) = [line for line in text.splitlines() if "peak memory" in line]
    assert [cell.strip() for cell in peak.strip("│").split("│")] == [
        "peak memory",
        "600.00 MiB",
        "590.00 MiB",
        "588.00 MiB",
    ]
    for part in ("swapped", "recomputed", "must stay", "written by a user kernel", "layer1.0", "bitmask", "stopped by"):
        assert part in text
    assert "note: the search was seeded from the baselines" in text


def test_brackets_in_names_are_not_read_as_markup() -> None:
    entry = dataclasses.replace(EXAMPLE.placements[0], module_path="[red]x[/red]", reason="[bold]")
    text = rendered(dataclasses.replace(EXAMPLE, placements=(entry,)))

    assert "[red]x[/red]" in text
    assert "[bold]" in text


def test_several_plans_are_numbered() -> None:
    text = rendered(EXAMPLE, dataclasses.replace(EXAMPLE, estimated=True))

    assert "plan 1 of 2: graph a1b2c3d4e5f6" in text
    assert "estimated plan 2 of 2: graph a1b2c3d4e5f6" in text


def test_many_modules_are_summed_into_one_row() -> None:
    entries = tuple(
        dataclasses.replace(EXAMPLE.placements[0], name=f"n{index}", module_path=f"block{index}.a", size_bytes=MIB)
        for index in range(20)
    )
    text = rendered(dataclasses.replace(EXAMPLE, placements=entries))

    (rest,) = [line for line in text.splitlines() if "8 more" in line]
    assert "8.00 MiB" in rest


def test_a_plan_without_storages_renders() -> None:
    assert "largest storages" in rendered(dataclasses.replace(EXAMPLE, placements=(), ineligible=()))


def test_placed_bytes_counts_compressed_swaps_as_both() -> None:
    assert placed_bytes(EXAMPLE) == {
        "kept": 96 * MIB,
        "swapped": (256 + 8) * MIB,
        "recomputed": (64 + 32) * MIB,
        "compressed": (16 + 8) * MIB,
    }


def test_a_run_stands_side_by_side() -> None:
    rows = rendered_run(REPORT)

    assert "nets[1].py:factory, batch 4, cpu, inner aot_eager" in rows
    assert rows["peak asked"] == ["-", "600.00 MiB (60%)"]
    assert rows["peak predicted"] == ["1000.00 MiB", "590.00 MiB"]
    assert rows["peak measured"] == ["1001.00 MiB", "588.00 MiB"]
    assert rows["reserved"] == ["-", "620.00 MiB"]
    assert rows["step time (median)"] == ["100.00 ms", "120.00 ms"]
    assert rows["loss (last step)"] == ["2.500000", "2.500000"]
    assert rows["largest gradient difference"] == ["-", "0 (bitwise equal)"]
    assert rows["swapped"] == ["-", "264.00 MiB"]
    assert "budget kept: measured 588.00 MiB of 600.00 MiB" in rows


def test_a_plain_step_that_does_not_fit_is_a_row() -> None:
    report = dataclasses.replace(
        REPORT, plain=None, plain_failure="does not fit: CUDA out of memory", largest_gradient_difference=None
    )
    rows = rendered_run(report)

    assert rows["peak measured"] == ["does not fit", "588.00 MiB"]
    assert rows["largest gradient difference"] == ["-", "nothing to compare with"]
    assert "without fxhome: does not fit: CUDA out of memory" in rows


@pytest.mark.parametrize(("difference", "text"), [(1.25e-6, "1.25e-06"), (float("nan"), "nan")])
def test_a_gradient_difference_is_shown(difference: float, text: str) -> None:
    rows = rendered_run(dataclasses.replace(REPORT, largest_gradient_difference=difference))

    assert rows["largest gradient difference"] == ["-", text]


def test_a_broken_budget_is_called_broken() -> None:
    rows = rendered_run(dataclasses.replace(REPORT, planned=dataclasses.replace(PLANNED, peak_bytes=601 * MIB)))

    assert "budget BROKEN: measured 601.00 MiB of 600.00 MiB" in rows


def test_a_profile_takes_one_row_per_number() -> None:
    console = Console(file=StringIO(), width=100)
    render_profile({"name": "H[2]", "d2h_bytes_per_s": 5.4e10, "flops_per_s": [["bfloat16", 7e14]]}, console)

    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "H[2]" in text
    assert "5.4e+10" in text
    assert "flops_per_s bfloat16" in text
