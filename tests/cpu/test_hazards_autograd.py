"""What users do with autograd: several outputs, frozen weights, autocast, custom functions, their own checkpointing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxhome
from fxhome.placement import Placement
from tests.hazard_tools import BOTH, Case, Mode, all_modes, check, compile_step, fresh

ROWS, WIDTH = 512, 64

# Dynamo of torch 2.11 makes an instance of a custom function's class.
pytestmark = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")


def linears(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Heads(nn.Module):
    """Three outputs of which the loss uses one; one is an integer, one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.heads = linears(2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.heads[0](x).sin(), self.heads[1](x).exp(), x.argmax(dim=1), x.detach() * 2


class Frozen(nn.Module):
    """Frozen first and middle layers, as in fine-tuning; their activations are partly needed, partly not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)
        for index in (0, 1, 3):
            self.layers[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


class Cube(torch.autograd.Function):
    """Saves its input and its output, and hands on a gradient of its own making."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * (3.0 * x * x + y.sin() * 0.125)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(Cube.apply(layer(x)))
        return x


class Checkpointed(nn.Module):
    """The user's own checkpointing around each block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.layer_norm(F.gelu(layer(x)), (WIDTH,))
        return x


def inputs(*, gradient: bool = False) -> tuple[torch.Tensor]:
    return (torch.randn(ROWS, WIDTH).requires_grad_(gradient),)


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def first_output(outputs: Any) -> torch.Tensor:
    result: torch.Tensor = outputs[0].square().mean()
    return result


CASES = {
    "several outputs, one used": Case(lambda: (Heads(), inputs()), loss=first_output),
    "several outputs, all used": Case(lambda: (Heads(), inputs())),
    "frozen layers": Case(lambda: (Frozen(), inputs())),
    "frozen layers and an input with a gradient": Case(lambda: (Frozen(), inputs(gradient=True))),
    "autocast": Case(lambda: (Plain(), inputs(gradient=True)), around=autocast),
    "a custom function": Case(lambda: (Custom(), inputs())),
    "checkpoint": Case(lambda: (Checkpointed(0.0), inputs())),
    "checkpoint with dropout": Case(lambda: (Checkpointed(0.25), inputs())),
}


@all_modes
@pytest.mark.parametrize("name", CASES)
def test_autograd_features(name: str, mode: Mode) -> None:
    check(CASES[name], mode)


class Norms(nn.Module):
    """Norms whose CPU kernels, under autocast, save statistics of another type than tracing says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.batch, self.group, self.layer = nn.BatchNorm1d(WIDTH), nn.GroupNorm(16, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, (self.batch, self.group, self.layer), strict=True):
            x = norm(layer(x))
        return x


class Spare(nn.Module):
    """A large second output that no loss reads: its gradient is made of zeros, and the backward reads it last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spare = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = F.gelu(layer(y))
        return y.sum(), spare


@all_modes
def test_norms_under_autocast_are_predicted_exactly(mode: Mode) -> None:
    plan = check(Case(lambda: (Norms(), inputs()), around=autocast), mode)

    assert plan.measured_peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss])
def test_losses_that_shrink_their_buffer_are_predicted_exactly(loss: Any) -> None:
    """The loss itself is one number in a storage of as many bytes as the model's output."""
    plan = check(Case(lambda: (Plain(), inputs()), lambda y: loss(y, torch.ones_like(y))), BOTH)

    assert plan.measured_peak_bytes == plan.predicted_peak_bytes


def test_the_gradient_of_an_output_that_no_loss_reads_is_metered() -> None:
    fresh()
    model, (x,) = Spare(), inputs()
    y, _spare = compile_step(model, {"memory_budget": "100%"})(x)
    y.backward()

    (plan,) = fxhome.plans()
    assert plan.measured_peak_bytes == plan.predicted_peak_bytes


def keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.MUST_RECOMPUTE


class Selective(nn.Module):
    """Checkpointing with the user's own policy: products are saved, everything else is rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


@all_modes
def test_a_users_checkpoint_policy_is_honoured(mode: Mode) -> None:
    plan = check(Case(lambda: (Selective(), inputs())), dataclasses.replace(mode, must_rebuild=False))

    rebuilt = {step.target for step in plan.program if step.kind == "recompute"}
    assert not any("mm" in name for name in rebuilt), rebuilt
    saved = {entry.name for entry in plan.placements if entry.placement in (Placement.KEEP, Placement.SWAP)}
    assert any("mm" in name for name in saved)
    kept = {entry.name for entry in plan.placements if entry.placement == Placement.KEEP}
    assert not any("gelu" in name for name in kept), kept
