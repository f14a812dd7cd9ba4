"""The comparison of policies, end to end on a tiny network, and what its report says of made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import policies
from benchmarks.policy_models import MODELS, SHAPES, build
from benchmarks.policy_report import report, summary

COMMAND = ["--device", "cpu", "--models", "tiny", "--batch", "16", "--steps", "1", "--policies", "pso", "vdnn_conv"]


@pytest.mark.slow
def test_rows_keep_their_promise_and_are_not_measured_twice(tmp_path: Path) -> None:
    policies.main([*COMMAND, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "policies_cpu.json").read_text())
    assert list(found["rows"]) == [
        f"cifar/tiny/aot_eager/{budget}/{policy}" for budget in ("common", "60%") for policy in ("pso", "vdnn_conv")
    ]
    for row in found["rows"].values():
        assert row["measured_bytes"] == row["predicted_bytes"]
        assert row["fits"] == (row["predicted_bytes"] <= row["asked_bytes"])
    least = found["budgets"]["cifar/tiny/aot_eager"]["least"]
    assert found["rows"]["cifar/tiny/aot_eager/common/vdnn_conv"]["fits"]
    assert least["vdnn_conv"] <= found["budgets"]["cifar/tiny/aot_eager"]["common"]
    policies.main([*COMMAND, "--out", str(tmp_path)])
    again = json.loads((tmp_path / "policies_cpu.json").read_text())
    assert again["rows"] == found["rows"]
    assert "| tiny (cifar) | aot_eager | 60% | pso |" in (tmp_path / "policies_cpu.md").read_text()


def test_a_run_out_of_time_starts_no_row(tmp_path: Path) -> None:
    policies.main([*COMMAND, "--out", str(tmp_path), "--seconds", "-1"])
    assert json.loads((tmp_path / "policies_cpu.json").read_text())["rows"] == {}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "tiny"])
def test_every_model_takes_its_images(name: str, shapes: str) -> None:
    pytest.importorskip("torchvision")
    with FakeTensorMode():
        model, inputs = build(name, shapes, torch.device("cpu"), batch=2)
        loss = model(*inputs)
    assert loss.shape == ()
    assert inputs[0].shape == (2, 3, MODELS[name].pixels[shapes], MODELS[name].pixels[shapes])


def _row(policy: str, step_ms: float, *, budget: str = "common", fits: bool = True) -> dict[str, Any]:
    place = {"shapes": "cifar", "model": "vgg16", "inner": "aot_eager", "budget": budget, "policy": policy}
    sizes = {"asked_bytes": 10**9, "predicted_bytes": 10**9, "measured_bytes": None, "placed": {"swap": 5 * 10**8}}
    times = {"step_ms": step_ms, "fastest_ms": step_ms, "slowest_ms": step_ms, "predicted_ms": step_ms}
    return place | sizes | times | {"fits": fits}


def test_the_summary_has_best_mean_and_every_loss() -> None:
    rows = [_row("pso", 10.0), _row("capuchin", 20.0), _row("pso", 10.0, budget="60%")]
    rows += [_row("capuchin", 5.0, budget="60%"), _row("vdnn_conv", 1.0, fits=False)]
    text = summary(rows)
    assert (
        "**capuchin**: 1.00 times as long (geometric mean of 2), at most 2.00 (vgg16 (cifar, aot_eager) at common)"
        in text
    )
    assert "shorter than ours: vgg16 (cifar, aot_eager) at 60% 0.500" in text
    assert "vdnn_conv" not in text  # what does not fit the budget is no competitor at it


def test_a_failed_row_is_told_and_not_ranked() -> None:
    failed = {"shapes": "cifar", "model": "vgg16", "inner": "aot_eager", "budget": "60%", "policy": "home"}
    rows = {"a": _row("pso", 10.0), "b": failed | {"error": "RuntimeError: no memory"}}
    text = report(
        {"device": "d", "torch": "2", "python": "3", "rows": rows, "budgets": {}, "commands": ["python -m x"]}
    )
    assert "- vgg16 (cifar, aot_eager) at 60%, home: RuntimeError: no memory" in text
    assert "No policy was measured beside ours." in text
    assert "| common | pso | 10.00 (10.00, 10.00) | 1.000 | 10.00 | 1.000 | 1.000 | - | 0.500 |" in text
