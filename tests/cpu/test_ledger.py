"""One budget over all graphs of a step."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome.backend import fxhome as backend
from fxhome.ledger import Share, joint_between
from fxhome.runtime.meter import StorageMeter


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Broken(nn.Module):
    """Three graphs: Dynamo breaks between the parts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.b, self.c = Part(width), Part(width), Part(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        x = self.b(x)
        torch._dynamo.graph_break()
        return self.c(x).square().mean()


def metered_peak(step: object, model: nn.Module, x: torch.Tensor) -> int:
    for weight in model.parameters():
        weight.grad = None
    gc.collect()
    meter = StorageMeter(granule_bytes=1)
    meter.track_resident()
    with meter:
        step(x).backward()  # type: ignore[operator]
    return meter.peak_bytes


# Dynamo looks at .grad of what flows across its break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_three_graphs_hold_one_budget_from_the_first_step_on(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(2048, 32)
    stock = torch.compile(model, backend="aot_eager")
    stock(x).backward()
    budget = int(metered_peak(stock, model, x) * 0.65)
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, options={"memory_budget": budget, "max_evaluations": 400})

    peaks = [metered_peak(step, model, x) for _ in range(4)]

    assert len(fxhome.plans()) == 3
    assert max(peaks) <= budget
    assert sum("jointly" in record.getMessage() for record in caplog.records) == 1
    torch._dynamo.reset()


def test_a_joint_plan_shares_what_is_left_by_what_each_graph_would_keep() -> None:
    def share(wanted: int, least: int) -> Share:
        return Share(
            entry_bytes=100, saved_bytes=0, wanted_bytes=wanted, least_bytes=least, outside_bytes=0, budget_bytes=1000
        )

    first, second, last = joint_between([share(300, 200), share(100, 250), share(50, 300)])

    # 1000 - 100 held - 300 needed by the last = 600 may be saved, more than the 400 that are wanted.
    assert 1000 - 100 - first == 300
    assert 1000 - 100 - 300 - second == 100
    assert last == 0


def test_graphs_that_want_more_than_there_is_share_in_proportion() -> None:
    shares = [
        Share(entry_bytes=0, saved_bytes=0, wanted_bytes=wanted, least_bytes=40, outside_bytes=0, budget_bytes=100)
        for wanted in (90, 30, 10)
    ]

    first, second, _ = joint_between(shares)

    assert 100 - first == 45
    assert 100 - 45 - second == 15
