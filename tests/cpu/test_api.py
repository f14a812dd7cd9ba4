"""What `fxhome.optimize` gives is a module like any other: it is saved, copied, pickled and moved on."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import fxhome
from fxhome.api import Optimized
from tests.hazard_tools import as_bytes, fresh

ROWS, WIDTH = 256, 32


def optimized() -> tuple[Optimized, torch.Tensor]:
    fresh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    return fxhome.optimize(model, (x,), memory_budget="100%", max_evaluations=50), x


def gradients(module: nn.Module, x: torch.Tensor) -> list[bytes]:
    module.zero_grad()
    module(x).square().mean().backward()
    found = [as_bytes(p.grad) for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def test_every_parameter_is_there_once() -> None:
    fast, _ = optimized()
    assert list(fast.state_dict()) == [f"model.{name}" for name in fast.model.state_dict()]
    assert [name for name, _ in fast.named_modules()][:2] == ["", "model"]


def test_a_copy_has_weights_and_plans_of_its_own() -> None:
    fast, x = optimized()
    expected, plans = gradients(fast, x), fast.all_plans
    other = copy.deepcopy(fast)
    assert other.all_plans == []
    assert gradients(other, x) == expected
    assert len(other.all_plans) == 1
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert gradients(other, x) != expected
    assert gradients(fast, x) == expected
    assert fast.all_plans == plans


def test_it_is_pickled_without_what_was_compiled() -> None:
    fast, x = optimized()
    other = pickle.loads(pickle.dumps(fast))
    assert gradients(other, x) == gradients(fast, x)
    assert len(other.all_plans) == 1
