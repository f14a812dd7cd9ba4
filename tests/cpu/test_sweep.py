"""`fxhome plan --sweep`: one front per model, monotone, honest about what fits, drawn with and without matplotlib."""

from __future__ import annotations

import io
import itertools
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fxhome
from fxhome import cli
from fxhome.budget import parse_budget
from fxhome.device import cached_profile
from fxhome.errors import OptionError
from fxhome.options import Options
from fxhome.passes import pipeline
from fxhome.sweep import Sweep, SweepPoint, sweep_offline
from fxhome.sweep_report import draw_sweep, drawing, front, render_sweep

GIB = 1 << 30
FACTORY = """
    import torch
    from torch import nn

    def factory(batch_size):
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        return nn.Sequential(*layers), (torch.empty(batch_size, 64),)
"""


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.GELU())])


def swept(*budgets: str) -> Sweep:
    options = Options(max_evaluations=200)
    asked = [parse_budget(text) for text in budgets]
    return sweep_offline(model(), (torch.empty(2048, 64, device="meta"),), options, cached_profile("cpu"), asked)


def test_by_default_every_tenth_down_to_the_smallest_budget() -> None:
    found = swept()
    names = [point.asked for point in found.points]
    assert names[0] == "100%"
    assert names[-1] == "smallest"
    assert names[:-1] == [f"{share}%" for share in range(100, 0, -10)][: len(names) - 1]
    assert all(point.fits and point.peak_bytes <= point.budget_bytes for point in found.points)
    assert found.points[-1].budget_bytes == found.minimum_bytes
    steps = [point.step_seconds for point in found.points]
    assert all(larger <= smaller for larger, smaller in itertools.pairwise(steps))
    peaks = [x for x, _ in front(found)]
    assert peaks == sorted(peaks)


class Doubling(nn.Module):
    """The gradient of each product with a constant reads it: such a graph gets nodes before it is planned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in (2.0, 3.0, 5.0, 7.0):
            x = torch.tanh(x * torch.full((), factor, device=x.device))
        return x


def test_a_graph_that_is_changed_before_it_is_planned_is_swept_as_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    classes_of = pipeline.storage_classes

    def counted(module: Any, facts: Any) -> list[str]:
        seen.append((sum(node.op != "output" for node in module.graph.nodes), len(facts.node_names)))
        return classes_of(module, facts)

    monkeypatch.setattr(pipeline, "storage_classes", counted)
    options = Options(max_evaluations=200)
    with torch.device("meta"):
        step = nn.Sequential(nn.Linear(64, 64), Doubling(), nn.Linear(64, 64))
    found = sweep_offline(step, (torch.empty(2048, 64, device="meta"),), options, cached_profile("cpu"))
    assert found.points
    assert seen
    assert all(nodes == known for nodes, known in seen)


def test_a_point_is_the_plan_for_its_budget() -> None:
    (point,) = swept("70%").points
    plan = fxhome.plan(model(), (torch.empty(2048, 64, device="meta"),), "70%", device="cpu", max_evaluations=200)
    assert point.budget_bytes == plan.budget_bytes
    assert point.peak_bytes <= plan.budget_bytes
    assert point.step_seconds <= plan.predicted_step_seconds * 1.02
    assert point.kept_bytes + point.swapped_bytes + point.recomputed_bytes + point.compressed_bytes > 0


def test_what_does_not_fit_is_told() -> None:
    small, enough = sorted(swept("2MiB", "90%").points, key=lambda point: point.budget_bytes)
    assert not small.fits
    assert small.peak_bytes > small.budget_bytes
    assert enough.fits


def point(peak_gib: float, step_ms: float, *, fits: bool = True) -> SweepPoint:
    size = int(peak_gib * GIB)
    return SweepPoint("60%", size, fits, size, step_ms / 1e3, 0.012, GIB, 2 * GIB, 3 * GIB, 4 * GIB, 2 * GIB, 100)


EXAMPLE = Sweep("a device", "inductor", 8 * GIB, 0.1, 2 * GIB, 3.0, (point(8, 100.0), point(4, 110.0), point(2, 150.0)))


def shown(sweep: Sweep) -> str:
    out = io.StringIO()
    render_sweep(sweep, Console(width=140, file=out))
    return out.getvalue()


def test_the_table_has_budget_peak_step_gap_and_bytes() -> None:
    text = shown(EXAMPLE)
    for cell in ("8.00 GiB", "150.00 ms", "1.500", "1.20 %", "1.00 GiB", "2.00 GiB", "3.00 GiB", "4.00 GiB"):
        assert cell in text
    assert f"smallest budget found: 2.00 GiB ({2 * GIB} bytes)" in text
    text = shown(replace(EXAMPLE, points=(point(4, 110.0), point(1, 90.0, fits=False))))
    assert "does not fit" in text
    assert "90.00 ms" not in text


def test_the_drawing_falls_to_the_right() -> None:
    lines = drawing(EXAMPLE)
    rows = [line.split("|", 1)[1] for line in lines if "|" in line]
    marks = [(row.index("*"), i) for i, row in enumerate(rows) if "*" in row]
    assert marks == sorted(marks)
    assert len(marks) == 2  # the third stands where the baseline does
    assert rows[-1].rstrip().endswith("o")
    assert lines[0].startswith("      150 ms")
    assert drawing(replace(EXAMPLE, points=(point(1, 90.0, fits=False),))) == ["no plan fits any of these budgets"]


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "front.png"
    draw_sweep(EXAMPLE, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"--plot 'front.png' needs matplotlib .*fxhome\[plot\]"):
        draw_sweep(EXAMPLE, "front.png")


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(FACTORY), encoding="utf-8")
    return f"{path}:factory"


def test_the_command_prints_json_and_writes_it(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "front.json"
    arguments = ["plan", spec, "--device", "cpu", "--batch-size", "4096", "--sweep", "--budgets", "90%", "70%"]
    assert cli.main([*arguments, "--max-evaluations", "100", "--json", "-o", str(output)]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document == json.loads(output.read_text())
    assert document["batch_size"] == 4096
    assert [point["asked"] for point in document["sweep"]["points"]] == ["90%", "70%"]


MISTAKES: list[tuple[list[str], str]] = [
    (["--budgets", "60%"], "--budgets is for many budgets; give --sweep with it"),
    (["--plot", "front.png"], "--plot is for many budgets; give --sweep with it"),
    (["--sweep", "--memory-budget", "60%"], "--memory-budget 60% and --sweep do not go together"),
    (["--sweep", "--policy", "capuchin"], "--policy capuchin and --sweep do not go together"),
    (["--sweep", "--budgets", "60%", "160%"], "--budgets='160%' is a share outside (0 %, 100 %]"),
    (["--sweep", "--plot", "none/front.png"], "--plot 'none/front.png' cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "none.py:factory", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_format_that_matplotlib_does_not_write(capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plan", "none.py:factory", "--device", "cpu", "--sweep", "--plot", "front.xyz"]) == 2
    assert "--plot 'front.xyz' has no format that matplotlib writes; end it with one of ." in capsys.readouterr().err
