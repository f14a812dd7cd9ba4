"""Random state and statistics under swap and recompute: dropout, attention dropout, batch norm, random tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.hazard_tools import BOTH, REBUILD, SWAP, Case, Mode, all_modes, check


def dropout_net() -> tuple[nn.Module, tuple[Any, ...]]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3))]
    return nn.Sequential(*layers), (torch.randn(1024, 64),)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix in self.mix:
            q, k, v = mix(x).view(4, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
            x = x + y.transpose(1, 2).reshape(4, 64, 32)
        return x


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return x


class SharedNorm(nn.Module):
    """One norm layer applied three times: its statistics are read, overwritten and read again in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.relu(self.norm(self.conv(x)))
        return x


class Noise(nn.Module):
    """Random tensors that the backward needs, by several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * torch.randn_like(x)
        x = torch.tanh(self.second(x)) * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand(x.shape).exp() * x
        return F.rrelu(x.sin(), training=True)


CASES = {
    "dropout": Case(dropout_net),
    "batch norm": Case(lambda: (NormNet(), (torch.randn(8, 8, 16, 16),))),
    "one batch norm used three times": Case(lambda: (SharedNorm(), (torch.randn(8, 8, 16, 16),))),
    "attention without dropout": Case(lambda: (Attention(0.0), (torch.randn(4, 64, 32),))),
    "attention with dropout": Case(lambda: (Attention(0.2), (torch.randn(4, 64, 32),))),
    "noise": Case(lambda: (Noise(), (torch.randn(1024, 64),))),
}


@all_modes
@pytest.mark.parametrize("name", CASES)
def test_random_state_and_statistics(name: str, mode: Mode) -> None:
    check(CASES[name], mode)


def test_statistics_of_a_rebuilt_batch_norm_move_once() -> None:
    """Rebuilding runs the operator twice; its running statistics must not be updated twice."""
    plan = check(CASES["batch norm"], REBUILD)

    recomputed = [step.target for step in plan.program if step.kind == "recompute"]
    assert any("batch_norm" in name or "getitem" in name for name in recomputed)


def test_a_dropout_mask_is_never_drawn_again() -> None:
    plan = check(CASES["dropout"], BOTH)

    forward_end = [step.kind for step in plan.program].index("forward_end")
    drawn = [step.target for step in plan.program if "dropout" in step.target or "bernoulli" in step.target]
    again = [step.target for step in plan.program[forward_end:] if step.kind == "recompute" and step.target in drawn]
    assert drawn
    assert again == []


def test_masks_may_be_swapped() -> None:
    plan = check(CASES["dropout"], SWAP)

    assert plan.host_bytes > 0
