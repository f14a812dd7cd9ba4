"""Variants and replans: what a metered step teaches, when another variant is chosen, how often that is said."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxhome
from fxhome import ledger
from fxhome.managed_graph import ManagedGraph
from fxhome.passes.torch_compat import is_inside_backward
from fxhome.runtime.meter import StorageMeter
from fxhome.session import Session
from tests.hazard_tools import Step, assert_promise, compile_step, fresh, in_bytes, warnings_of

BATCH, WIDTH = 1024, 64


def build() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def step_of(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    return step


def run(compiled: Step, model: nn.Module) -> int:
    """One step on a new batch; the peak seen from outside."""
    model.zero_grad()
    x = torch.randn(BATCH, WIDTH)
    gc.collect()
    with StorageMeter(granule_bytes=1) as meter:
        meter.track_resident()
        compiled(x).backward()
    return int(meter.peak_bytes)


def the_graph() -> ManagedGraph:
    (graph,) = ledger.graphs()
    return graph


def started(budget: Any, **options: Any) -> tuple[Step, nn.Module]:
    fresh()
    torch.manual_seed(0)
    model = build()
    compiled = compile_step(step_of(model), {"memory_budget": budget, **options})
    run(compiled, model)
    return compiled, model


def test_the_first_step_is_metered_and_the_promise_recorded() -> None:
    compiled, model = started("85%")
    (plan,) = fxhome.plans()
    assert_promise(plan, plan.budget_bytes)
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes  # every node is run as it stands
    assert plan.measured_step_seconds is None or plan.measured_step_seconds > 0
    run(compiled, model)
    assert len(the_graph().variants) == 1
    assert fxhome.plans()[0] == plan


def test_a_steady_run_never_plans_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        compiled, model = started("85%")
        peaks = [run(compiled, model) for _ in range(8)]
    (plan,) = fxhome.plans()
    assert len(the_graph().variants) == 1
    assert warnings_of(caplog) == []
    assert max(peaks) <= plan.budget_bytes


def test_growth_adds_a_variant_and_shrinking_plans_nothing_new(caplog: pytest.LogCaptureFixture) -> None:
    compiled, model = started("100%")
    (kept,) = fxhome.plans()
    grown = (kept.baseline_peak_bytes - kept.resident_bytes) // 4
    fresh()
    model = build()
    compiled = compile_step(step_of(model), {"memory_budget": in_bytes(kept.budget_bytes)})
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        run(compiled, model)
        ballast = torch.zeros(grown // 4)
        run(compiled, model)
        assert len(the_graph().variants) == 2
        assert run(compiled, model) <= kept.budget_bytes
        del ballast
        run(compiled, model)
        assert len(the_graph().variants) == 2
    assert len([message for message in warnings_of(caplog) if "grew by" in message]) == 1


def test_a_share_is_settled_once() -> None:
    """60 % of the first baseline stays that many bytes; memory that appears later does not raise the budget."""
    compiled, model = started("85%")
    (first,) = fxhome.plans()
    ballast = torch.zeros(first.budget_bytes // 16)
    run(compiled, model)
    (second,) = fxhome.plans()
    assert second.resident_bytes > first.resident_bytes
    assert second.budget_bytes == first.budget_bytes
    assert ballast.numel()


def test_an_eager_loss_is_learned_as_outside_and_planned_again_once(caplog: pytest.LogCaptureFixture) -> None:
    fresh()
    torch.manual_seed(0)
    model = build()
    x = torch.randn(BATCH, WIDTH)

    def step(compiled: Step) -> int:
        model.zero_grad()
        gc.collect()
        with StorageMeter(granule_bytes=1) as meter:
            meter.track_resident()
            y = compiled(x)
            logged = [y.detach().exp(), y.detach().cos()]  # what a user's own code keeps through the backward
            # The loss itself makes nothing large: on CPU, what eager code takes and frees in between is not metered.
            y.mean().backward()
            del logged
        return int(meter.peak_bytes)

    stock = compile_step(model, {"memory_budget": "100%"})
    step(stock)
    free = step(stock)
    fresh()
    compiled = compile_step(model, {"memory_budget": in_bytes(free - BATCH * WIDTH * 2)})
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        peaks = [step(compiled) for _ in range(4)]
    (plan,) = fxhome.plans()
    assert max(peaks[2:]) <= plan.budget_bytes
    assert len([m for m in warnings_of(caplog) if "planning again" in m]) <= 1
    assert plan.outside_bytes > 0


def test_what_a_plan_missed_is_kept_free_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan stays far below its budget and misses by a little more: the same plan would miss again."""
    compiled, _ = started("100%")
    baseline = the_graph().plan
    assert baseline is not None
    del compiled
    spare, missed = 1 << 19, (1 << 19) + 4096
    budget = baseline.predicted_peak_bytes + spare
    note_backward_end = Session.note_backward_end

    def unforeseen(session: Session, device: torch.device) -> bool:
        is_metered = note_backward_end(session, device)
        session.peak_bytes += missed
        return is_metered

    monkeypatch.setattr(Session, "note_backward_end", unforeseen)
    compiled, model = started(in_bytes(budget))
    run(compiled, model)
    plan = the_graph().plan

    assert plan is not None
    assert plan.predicted_peak_bytes + missed <= budget
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= budget


def test_backwards_already_pending_keep_their_variant() -> None:
    started("100%")
    (free,) = fxhome.plans()
    # Room for one forward with everything kept, and for a second one beside it only if that keeps less.
    compiled, model = started(in_bytes(int(free.budget_bytes * 1.35)))
    x = torch.randn(BATCH, WIDTH)
    model.zero_grad()
    loss = compiled(x)
    ballast = torch.zeros(BATCH * WIDTH)  # makes the next forward plan again
    compiled(x).backward()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain = step_of(model)
    (plain(x)).backward()
    plain(x).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert ballast.numel()


def test_what_a_forward_finds_is_never_looked_for_inside_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint runs its forward again beside gradients and what the backward holds: the next step's finds less."""
    fresh()
    looks: list[bool] = []
    held_bytes = ledger.held_bytes

    def watched(device: torch.device) -> int:
        looks.append(is_inside_backward())
        return held_bytes(device)

    monkeypatch.setattr(ledger, "held_bytes", watched)
    model = build()
    compiled = compile_step(step_of(model), {"memory_budget": "90%"})
    for _ in range(4):
        model.zero_grad()
        checkpoint(compiled, torch.randn(BATCH, WIDTH), use_reentrant=False).backward()

    assert looks
    assert not any(looks)


def test_the_graph_dies_with_its_compiled_function() -> None:
    compiled, model = started("85%")
    own = weakref.ref(the_graph())
    del compiled, model
    torch._dynamo.reset()
    gc.collect()
    assert own() is None
