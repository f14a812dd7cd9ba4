"""Results that a loop's variable holds through the next forward are counted there, and not in its backward."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome import ledger
from fxhome.errors import InfeasibleBudgetError
from fxhome.returned import Returned
from fxhome.runtime.meter import StorageMeter
from tests.hazard_tools import compile_step, fresh, in_bytes

ROWS, WIDTH, CLASSES = 512, 64, 256


class Classifier(nn.Module):
    """Returns its loss and what it made it from, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = F.gelu(layer(x))
        logits = self.head(x)
        return logits.logsumexp(-1).square().mean(), logits, logits[:8]


def test_views_are_counted_once_and_nothing_is_kept_alive() -> None:
    x = torch.zeros(100)
    results = (x, x[3:], {"other": torch.zeros(10, dtype=torch.int64)}, None, 3)
    returned = Returned(results, x.device)
    assert returned.alive_bytes() == 400 + 80
    view = results[1]
    del x, results
    assert returned.alive_bytes() == 400
    del view
    assert returned.alive_bytes() == 0


def train(budget: Any, *, deletes: bool) -> list[int]:
    """Five steps of an ordinary loop; the measured peaks of all but the first."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    step = compile_step(model, {"memory_budget": budget})
    peaks = []
    for i in range(5):
        x = torch.randn(ROWS, WIDTH)
        meter = StorageMeter(granule_bytes=1)
        meter.track_resident()
        with meter:
            out = step(x)
            out[0].backward()
        if i:
            peaks.append(meter.peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
        if deletes:
            del out
    return peaks


@pytest.mark.parametrize("deletes", [False, True])
def test_the_prediction_is_exact_whether_results_are_held_or_not(deletes: bool) -> None:
    fresh()
    gc.collect()
    # What other tests left behind is resident here as well.
    peaks = train(in_bytes(3_300_000 + ledger.held_bytes(torch.device("cpu"))), deletes=deletes)
    (plan,) = fxhome.plans()
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes
    assert max(peaks) <= plan.budget_bytes
    assert any("del outputs" in note for note in plan.notes) is not deletes


def refused(budget: int, text: str) -> int:
    """The minimum that the refusal of a budget names."""
    fresh()
    with pytest.raises(InfeasibleBudgetError, match=text) as refusal:
        train(in_bytes(budget), deletes=False)
    # The frames of the traceback hold the model and its inputs, which would be resident in the next run.
    minimum = refusal.value.with_traceback(None).minimum_bytes
    assert minimum is not None
    return minimum


def test_a_refusal_names_the_results_that_are_held() -> None:
    budget = refused(1, "cannot be met")
    second = refused(budget, r"returned and that is still held \(del outputs\)")
    assert second > budget
    fresh()
    assert max(train(in_bytes(second), deletes=False)) <= second
    fresh()
    assert max(train(in_bytes(budget), deletes=True)) <= budget
