"""What optimizers will hold, before any of them has made a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fxhome.optimizer_state import (
    arrived_bytes,
    has_stepped,
    missing_gradient_bytes,
    num_stepped,
    optimizers_of,
    state_bytes,
    watch_optimizers,
)

CPU = torch.device("cpu")


class Unsteppable(Optimizer):
    """Looks into its gradients, as nobody can who has only their shapes."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            if weight.grad.abs().max().item() > 0:
                self.state[weight]["moment"] = torch.zeros_like(weight)


KINDS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights),
    "fused adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "amsgrad": lambda weights: torch.optim.Adam(weights, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, centered=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_known_before_the_first_step(kind: str) -> None:
    watch_optimizers()
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    model[1].bias.requires_grad_(False)
    optimizer = KINDS[kind](model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps its step
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    weights = [weight.detach().clone() for weight in model.parameters()]
    before = num_stepped()

    said = state_bytes(optimizer, CPU)

    assert not called
    assert not has_stepped(optimizer)
    assert all(map(torch.equal, weights, model.parameters()))
    assert missing_gradient_bytes(optimizer, CPU) == sum(w.nbytes for w in model.parameters() if w.requires_grad)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    assert said == state_bytes(optimizer, CPU) == arrived_bytes(before, CPU)
    assert has_stepped(optimizer)
    assert num_stepped() == before + 1
    assert missing_gradient_bytes(optimizer, CPU) == 0


def test_what_a_trial_does_not_tell_is_unknown() -> None:
    assert state_bytes(Unsteppable(nn.Linear(4, 4).parameters()), CPU) is None


def test_only_optimizers_of_these_weights_are_found() -> None:
    ours, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mine, _ = torch.optim.SGD(ours.parameters()), torch.optim.SGD(other.parameters())
    assert optimizers_of([ours.weight]) == [mine]
