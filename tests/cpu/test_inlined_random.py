"""Random numbers in planned graphs: computed where they are read, the same as those that would be written."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.lowering import lowerings

import fxhome
from fxhome.backend import fxhome as backend
from fxhome.passes.inlined_random import random_numbers_inlined
from fxhome.passes.lowered_buffers import LoweredBuffers

pytestmark = pytest.mark.slow  # each case compiles C++

ROWS, WIDTH = 64, 32


class Recorder:
    """A scheduler pass that changes nothing and keeps what is counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.sizes = [b.size_bytes for b in LoweredBuffers(nodes, {}).buffers if b.maker is not None]
        return nodes

    def uuid(self) -> None:
        """Never cached."""
        return None


def used_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Masks are used at once and again when much else was made: something must be kept, or made again."""
    masks = [torch.rand_like(x) > 0.5 for _ in range(2)]
    for mask in masks:
        x = torch.tanh((x * mask) @ w)
    for mask in reversed(masks):
        x = torch.tanh((x * mask) @ w)
    return x


def lowered(inlined: bool) -> tuple[torch.Tensor, list[int]]:
    """The result, and the bytes of every buffer."""
    recorder = Recorder()
    patches = {"_post_fusion_custom_pass": recorder, "fx_graph_cache": False}
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    context = random_numbers_inlined() if inlined else contextlib.nullcontext()
    with context, torch._inductor.config.patch(patches), torch.no_grad():
        result = torch.compile(used_twice, dynamic=False)(x, w)
    return result, recorder.sizes


def test_the_same_numbers_without_their_buffers() -> None:
    written, sizes = lowered(inlined=False)
    inlined, fewer = lowered(inlined=True)

    assert torch.equal(written, inlined)
    assert len(sizes) - len(fewer) >= 2  # both masks' numbers
    assert sum(sizes) - sum(fewer) >= 2 * 4 * ROWS * WIDTH


def test_inductor_is_left_as_it_was() -> None:
    random = torch._inductor.inductor_prims.random
    before = lowerings[random]

    with random_numbers_inlined():
        assert lowerings[random] is not before

    assert lowerings[random] is before


class Dropped(nn.Module):
    """Blocks with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + F.dropout(down(F.dropout(F.relu(up(x)), 0.5)), 0.25)
        return x.square().mean()


def gradients(model: nn.Module, x: torch.Tensor, **how: Any) -> dict[str, torch.Tensor]:
    """Of one step from the same random state."""
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    torch.manual_seed(3)
    torch.compile(own, **how)(x).backward()
    return {name: weight.grad for name, weight in own.named_parameters() if weight.grad is not None}


def test_masks_made_again_in_the_backward_are_those_of_the_forward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(512, 64)
    stock = gradients(model, x, backend="inductor")

    options = {"memory_budget": "80%", "inner": "inductor", "allow": ["recompute"]}
    planned = gradients(model, x, backend=backend, options=options)

    plan = fxhome.plans()[0]
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    for name, gradient in stock.items():
        torch.testing.assert_close(planned[name], gradient, rtol=1e-4, atol=1e-5)
