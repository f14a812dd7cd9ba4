"""The benchmark of the promise on a model of its own: one row that is kept, one that is refused, and the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import promise
from tests.hazard_tools import fresh


class Squared(nn.Module):
    """A few layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, 32)."""
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def test_rows_say_what_was_kept_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(promise.MODELS, "squared", lambda _: (Squared(), (torch.randn(4096, 32),)))
    rows = {}
    for budget in ("70%", "min", "1%"):
        fresh()
        rows[f"squared {budget}"] = promise.measure("squared", budget, "aot_eager")
    for budget in ("70%", "min"):
        row = rows[f"squared {budget}"]
        assert row["measured_bytes"] == row["predicted_bytes"] <= row["asked_bytes"]
        assert row["losses"] == pytest.approx(row["eager"], abs=1e-5)
    assert rows["squared min"]["asked_bytes"] == rows["squared 1%"]["minimum_bytes"]
    table = promise.table(rows, "cpu")
    assert table.count("| yes |") == 2
    assert "| squared 1% | InfeasibleBudgetError: " in table
