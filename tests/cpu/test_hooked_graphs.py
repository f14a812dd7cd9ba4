"""From a plan to hooks in its two compiled graphs: on CPU, with a model in place of CUDA's allocator."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome import inductor_graphs, ledger
from fxhome.backend import fxhome as backend
from fxhome.passes.planned import Planned
from fxhome.placed_blocks import SETTLED_STEPS
from tests.allocator_model import ModelAllocator

pytestmark = pytest.mark.slow  # compiles C++


class Blocks(nn.Module):
    """Three pre-norm MLP blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x.square().mean()


def test_a_scattered_plan_is_hooked_and_a_settled_step_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_laid(planned: Planned) -> bool:
        return not planned.is_baseline

    allocator = ModelAllocator()
    weights = allocator.take(30 << 20)
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_graphs, "CudaAllocator", lambda _: allocator)
    monkeypatch.setattr(inductor_graphs, "keeps_freed_blocks", is_laid)
    monkeypatch.setattr(inductor_graphs, "is_scattered", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 64)
    expected = copy.deepcopy(model)
    torch.compile(expected, backend="inductor")(x).backward()

    step: Any = torch.compile(
        model, backend=backend, options={"memory_budget": "65%", "inner": "inductor", "max_evaluations": 400}
    )
    losses: list[float] = []
    recorded: list[bool] = []
    for _ in range(SETTLED_STEPS + 3):
        model.zero_grad()
        loss = step(x)
        loss.backward()
        losses.append(float(loss.detach()))
        recorded.append(allocator.is_recorded())

    (graph,) = ledger.graphs()
    blocks = graph.variants[-1].blocks
    assert blocks is not None
    assert recorded == [False] * SETTLED_STEPS + [True, False, False]
    # No step takes anything of the model, so there is nothing to win.
    assert "no packing of its blocks was found that takes less" in fxhome.plans()[0].notes[-1]
    (plan,) = fxhome.plans()
    assert any("laid where they fit" in note for note in plan.notes)
    assert len(set(losses)) == 1
    assert set(allocator.used) == {weights}
    assert not blocks._held
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert float((found.grad - wanted.grad).norm()) <= 1e-5 * float(wanted.grad.norm())
    torch._dynamo.reset()
