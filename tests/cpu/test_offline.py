"""Planning without weights: nothing real is allocated or run, and the placement replays on the real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome.device import cached_profile
from fxhome.errors import InfeasibleBudgetError, OptionError, UnsupportedGraphError
from fxhome.runtime.meter import StorageMeter
from tests.hazard_tools import compile_step, fresh, in_bytes

BATCH, WIDTH = 512, 64


def build(device: str = "cpu") -> nn.Module:
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers).to(device)


def test_a_meta_model_is_planned_and_nothing_is_allocated_or_drawn() -> None:
    fresh()
    with torch.device("meta"):
        model, x = build("meta"), torch.empty(BATCH, WIDTH)
    cached_profile("cpu")
    state = torch.get_rng_state()
    with StorageMeter(granule_bytes=1) as meter:
        plan = fxhome.plan(model, (x,), "70%", device="cpu", max_evaluations=400)
    assert meter.peak_bytes < BATCH * WIDTH * 4  # not one activation
    assert torch.equal(torch.get_rng_state(), state)
    assert plan.estimated
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert plan.resident_bytes == weights + BATCH * WIDTH * 4


def test_a_real_model_is_not_touched() -> None:
    fresh()
    model = build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fxhome.plan(model, (torch.randn(BATCH, WIDTH),), "70%", device="cpu", max_evaluations=400)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fxhome.plans() == []


def test_meta_and_real_models_give_the_same_plan() -> None:
    fresh()
    plans = [
        fxhome.plan(
            build(device), (torch.empty(BATCH, WIDTH, device=device),), "70%", device="cpu", max_evaluations=400
        )
        for device in ("meta", "cpu")
    ]
    assert plans[0] == plans[1]


def test_the_estimate_replays_on_the_real_model() -> None:
    fresh()
    torch.manual_seed(0)
    model, x = build(), torch.randn(BATCH, WIDTH)
    plan = fxhome.plan(model, (x,), "70%", device="cpu", allow=("swap",), max_evaluations=400)
    assert plan.host_bytes > 0

    def gradients(options: dict[str, Any] | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        compile_step(model, options)(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(None)
    found = gradients({"plan": plan, "allow": ("swap",)})
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    (used,) = fxhome.plans()
    assert used.program == plan.program


def test_an_impossible_budget_is_refused_with_a_minimum_that_works() -> None:
    fresh()
    arguments = (build("meta"), (torch.empty(BATCH, WIDTH, device="meta"),))
    with pytest.raises(InfeasibleBudgetError) as refused:
        fxhome.plan(*arguments, "1%", device="cpu", max_evaluations=400)
    assert refused.value.minimum_bytes is not None
    plan = fxhome.plan(*arguments, in_bytes(refused.value.minimum_bytes), device="cpu", max_evaluations=400)
    assert plan.predicted_peak_bytes <= refused.value.minimum_bytes


def test_a_model_without_a_trainable_parameter_has_no_plan() -> None:
    fresh()
    with pytest.raises(UnsupportedGraphError, match="no training graph was found"):
        fxhome.plan(build().requires_grad_(False), (torch.randn(4, WIDTH),), "70%", device="cpu")


def test_tied_weights_stay_one_storage() -> None:
    fresh()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    loose = fxhome.plan(model, (torch.randn(8, WIDTH),), "100%", device="cpu").resident_bytes
    model[2].weight = model[0].weight
    tied = fxhome.plan(model, (torch.randn(8, WIDTH),), "100%", device="cpu").resident_bytes
    assert loose - tied == WIDTH * WIDTH * 4


def test_a_bare_tensor_in_place_of_a_tuple_is_named() -> None:
    with pytest.raises(OptionError, match=r"example_args is a Tensor; give a tuple .* for example \(x,\)"):
        fxhome.plan(nn.Linear(3, 3), torch.ones(2, 3), "60%", device="cpu")  # type: ignore[arg-type]
