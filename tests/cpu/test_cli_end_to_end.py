"""The command line with nothing replaced: plan, show, run, replay, and a refused budget whose minimum then works.

What runs a model has a process of its own, as users have: tensors that other tests leave behind would count as
resident.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from fxhome import cli

FACTORY = """
    import torch
    from torch import nn

    def factory(batch_size):
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        return nn.Sequential(*layers), (torch.randn(batch_size, 64),)
"""

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(FACTORY), encoding="utf-8")
    return f"{path}:factory"


def fxhome(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxhome", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def result(*arguments: str) -> Any:
    done = fxhome(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model_arguments(spec: str, budget: str) -> list[str]:
    shared = ["--batch-size", "2048", "--device", "cpu", "--max-evaluations", "400"]
    return [spec, "--memory-budget", budget, *shared]


def test_a_plan_is_written_shown_replayed_and_refused_for_another_batch(
    spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the run is a process of its own: the other commands run nothing, so nothing is resident in them."""

    def here(*arguments: str) -> tuple[int, str, str]:
        torch._dynamo.reset()
        return cli.main([*arguments]), *capfd.readouterr()

    output = str(tmp_path / "plan.json")
    status, out, err = here("plan", *model_arguments(spec, "60%"), "-o", output, "--json")
    assert status == 0, err
    written = json.loads(out)
    (plan,) = written["plans"]
    assert plan["budget_bytes"] == pytest.approx(0.6 * plan["baseline_peak_bytes"], rel=1e-6)

    status, out, _ = here("show", output, "--json")
    assert (status, json.loads(out)) == (0, written)
    replay = [spec, "--batch-size", "2048", "--device", "cpu", "--steps", "1", "--plan", output]
    report = result("run", *replay)
    assert report["measured_peak_bytes"] <= plan["budget_bytes"]
    assert report["largest_gradient_difference"] == 0.0

    status, out, err = here("run", spec, "--batch-size", "1024", "--device", "cpu", "--plan", output)
    assert (status, out) == (2, "")
    assert re.search(r"^fxhome run: error: .* was made for this graph", err, flags=re.MULTILINE)
    assert "Traceback" not in err


def test_the_smallest_budget_of_a_refusal_works_and_changes_no_gradient(spec: str) -> None:
    done = fxhome("run", *model_arguments(spec, "10%"), "--steps", "1")
    assert done.returncode == 2
    found = re.search(r"Ask for at least (\d+)", done.stderr)
    assert found is not None, done.stderr

    report = result("run", *model_arguments(spec, found[1]), "--steps", "2")
    assert report["budget_bytes"] == int(found[1])
    assert report["measured_peak_bytes"] <= report["budget_bytes"] < report["plain"]["peak_bytes"]
    assert report["largest_gradient_difference"] == 0.0
    assert report["planned"]["losses"] == report["plain"]["losses"]
    assert report["placed_bytes"]["swapped"] + report["placed_bytes"]["recomputed"] > 0
