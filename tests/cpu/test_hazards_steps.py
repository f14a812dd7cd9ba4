"""Steps that are not one forward and one backward: retained graphs, accumulation, failures, other batches."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxhome
from fxhome import ledger
from fxhome.errors import InfeasibleBudgetError
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.meter import StorageMeter
from fxhome.runtime.stand_in import cpu_stand_in
from tests.hazard_tools import (
    Case,
    Record,
    Step,
    assert_no_host_memory_in_use,
    assert_promise,
    compile_step,
    fresh,
    in_bytes,
    smallest_budget,
    warnings_of,
)

ROWS, WIDTH = 512, 64
# Every activation goes to the host, whatever the budget: the hardest plan there is, without a search.
SWAP_ALL: dict[str, Any] = {"memory_budget": "100%", "policy": "vdnn_all"}
REBUILD: dict[str, Any] = {"memory_budget": "75%", "allow": ("recompute",), "on_infeasible": "best_effort"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1, self.training)
        result: torch.Tensor = self.norm(x)
        return result


def step_of(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    return step


CASE = Case(lambda: (Net(), (torch.randn(ROWS, WIDTH),)))
Scenario = Callable[[Step, nn.Module, Record], None]


def run(scenario: Scenario, options: dict[str, Any] | None) -> Record:
    """One scenario on a fresh model under a backend, with gradients and buffers noted at its end."""
    fresh()
    torch.manual_seed(0)
    model = Net()
    found = Record()
    with cpu_stand_in(copy_timing="latest"):
        # Stock graphs forbid a second backward through donated buffers, so eager says what is right.
        step = step_of(model)
        scenario(step if options is None else compile_step(step, options), model, found)
    for name, parameter in model.named_parameters():
        found.note(f"gradient {name}", parameter.grad)
    for name, buffer in model.named_buffers():
        found.note(f"buffer {name}", buffer)
    return found


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def forward_without_backward(step: Step, model: nn.Module, found: Record) -> None:
    for _ in range(3):
        found.note("loss", step(batch()))
    step(batch()).backward()


def backward_twice(step: Step, model: nn.Module, found: Record) -> None:
    step(batch()).backward()
    loss = step(batch())
    loss.backward(retain_graph=True)
    found.note("first", model.get_parameter("layers.0.weight").grad)
    loss.backward()
    step(batch()).backward()


def accumulate(step: Step, model: nn.Module, found: Record) -> None:
    for _ in range(3):
        losses = [step(batch()), step(batch())]
        for loss in reversed(losses):
            loss.backward()


def sum_of_two(step: Step, model: nn.Module, found: Record) -> None:
    for _ in range(2):
        (step(batch()) + step(batch()) * 2.0).backward()


def evaluation(step: Step, model: nn.Module, found: Record) -> None:
    step(batch()).backward()
    with torch.no_grad():
        found.note("no_grad", step(batch()))
    with torch.inference_mode():
        found.note("inference_mode", step(batch()).clone())
    model.eval()
    found.note("eval", step(batch()))
    with torch.no_grad():
        found.note("eval no_grad", step(batch()))
    model.train()
    step(batch()).backward()


def gradients_by_autograd_grad(step: Step, model: nn.Module, found: Record) -> None:
    step(batch()).backward()
    some = [model.get_parameter("layers.1.weight"), model.get_parameter("norm.bias")]
    for position, gradient in enumerate(torch.autograd.grad(step(batch()), some)):
        found.note(f"grad {position}", gradient)


def failing_backward(step: Step, model: nn.Module, found: Record) -> None:
    """A hook raises in the middle of the step; the next step must be as if it had not been."""
    step(batch()).backward()

    def explode(_: torch.Tensor) -> None:
        raise ArithmeticError("in the backward")

    loss = step(batch())
    handle = loss.register_hook(explode)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    del loss
    step(batch()).backward()


def checkpointed(step: Step, model: nn.Module, found: Record) -> None:
    """torch.utils.checkpoint around what is compiled: each forward runs again inside the backward, last call first."""
    for _ in range(3):
        x = batch().requires_grad_()
        (checkpoint(step, x, use_reentrant=False) * checkpoint(step, x.sin(), use_reentrant=False)).backward()
        found.note("input gradient", x.grad)


SCENARIOS = [
    checkpointed,
    forward_without_backward,
    backward_twice,
    accumulate,
    sum_of_two,
    evaluation,
    gradients_by_autograd_grad,
    failing_backward,
]


@pytest.mark.parametrize("options", [SWAP_ALL, REBUILD], ids=["swap", "recompute"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_unusual_steps(scenario: Scenario, options: dict[str, Any]) -> None:
    expected = run(scenario, None)
    found = run(scenario, options)
    assert found.differences(expected) == []
    assert fxhome.plans()
    assert_no_host_memory_in_use()


def test_a_forward_without_backward_gives_its_host_memory_back() -> None:
    fresh()
    model = Net()
    step = compile_step(step_of(model), SWAP_ALL)
    step(batch()).backward()
    loss = step(batch())
    assert host_pool().status().in_use_bytes > 0  # the pending backward's
    del loss
    assert_no_host_memory_in_use()


def test_an_exception_in_the_middle_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails while copies are under way; nothing leaks, and the next step is right."""
    from fxhome.runtime import stand_in

    def scenario(step: Step, model: nn.Module, found: Record) -> None:
        step(batch()).backward()
        model.zero_grad()
        fail_in_forward(step, model)
        found.note("loss after", loss := step(batch()))
        loss.backward()

    calls = 0

    def fail_in_forward(step: Step, model: nn.Module) -> None:
        state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        if host_pool().status().peak_bytes and not torch.is_inference_mode_enabled():
            original = stand_in.start_out

            def start_out(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise OSError("the copy engine failed")
                return original(*args)

            with monkeypatch.context() as patch:
                patch.setattr(stand_in, "start_out", start_out)
                x = batch()
                try:
                    step(x)
                except OSError:
                    assert calls == 3
        model.load_state_dict(state)
        torch.set_rng_state(rng)

    host_pool().reset_peak()
    expected = run(scenario, None)
    calls = 0
    found = run(scenario, SWAP_ALL)
    assert calls == 3
    assert found.differences(expected) == []
    assert_no_host_memory_in_use()


def test_the_same_module_compiled_twice() -> None:
    """Two compilations are two graphs with a plan each; both give the stock's gradients."""

    def both(options: dict[str, Any] | None) -> Record:
        fresh()
        torch.manual_seed(0)
        model, found = Net(), Record()
        first, second = (compile_step(step_of(model), options) for _ in range(2))
        x = batch()
        for step in (first, second, first):
            step(x).backward()
        for name, parameter in model.named_parameters():
            found.note(name, parameter.grad)
        return found

    expected = both(None)
    found = both(SWAP_ALL)
    assert found.differences(expected) == []
    assert_no_host_memory_in_use()


@pytest.mark.parametrize("dynamic", [None, True, False, "marked"])
def test_every_batch_size_has_a_plan_of_its_own(dynamic: bool | str | None) -> None:
    sizes = (256, 320, 384)

    def gradients(backend: dict[str, Any] | None) -> Record:
        fresh()
        torch.manual_seed(0)
        model, found = Net(), Record()
        marks = dynamic == "marked"
        step = compile_step(step_of(model), backend, dynamic=None if isinstance(dynamic, str) else dynamic)
        for rows in (*sizes, *reversed(sizes)):
            x = torch.randn(rows, WIDTH)
            if marks:
                torch._dynamo.mark_dynamic(x, 0)
            step(x).backward()
        for name, parameter in model.named_parameters():
            found.note(name, parameter.grad)
        return found

    expected = gradients(None)
    found = gradients(SWAP_ALL)
    plans = fxhome.plans()
    assert found.differences(expected) == []
    assert len(plans) == len(sizes)
    assert len({plan.graph_fingerprint for plan in plans}) == len(sizes)
    assert all(any("mark_dynamic" in note for note in plan.notes) == (dynamic == "marked") for plan in plans)


class Scaled(Net):
    """A number of the model's own: where sizes are dynamic, Dynamo passes it as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.75

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x * self.scale) * self.scale
        return result


def test_a_graph_that_is_given_a_number_can_be_planned_again() -> None:
    def gradients(options: dict[str, Any] | None) -> Record:
        fresh()
        torch.manual_seed(0)
        model, found = Scaled(), Record()
        step = compile_step(step_of(model), options, dynamic=True)
        held = []
        for rows, scale in ((512, 0.75), (256, 0.75), (512, 0.75), (512, 0.5)):
            model.scale = scale
            step(torch.randn(rows, WIDTH)).backward()
            held.append(torch.zeros(1 << 20))
        for name, parameter in model.named_parameters():
            found.note(name, parameter.grad)
        return found

    expected = gradients(None)
    found = gradients({"memory_budget": "75%", "on_infeasible": "best_effort"})
    graphs = ledger.graphs()
    assert found.differences(expected) == []
    assert len(graphs) == 2
    assert len(graphs[0].variants) > 1, "it was not planned again"


def test_at_the_recompile_limit_there_is_an_error_and_nothing_runs_eagerly() -> None:
    fresh()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=2):
        step = compile_step(step_of(Net()), {"memory_budget": "75%"}, dynamic=False)
        for rows in (256, 320):
            step(torch.randn(rows, WIDTH)).backward()
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit, match="recompile_limit"):
            step(torch.randn(384, WIDTH))


def test_each_new_batch_dies_with_its_step() -> None:
    """What the backend keeps for a replan must not be the first batch."""
    fresh()
    step = compile_step(step_of(Net()), {"memory_budget": "75%"})
    x = batch()
    first = weakref.ref(x)
    step(x).backward()
    del x
    gc.collect()
    assert first() is None


def test_a_refusal_keeps_nothing_of_the_step_alive() -> None:
    fresh()
    model = Net()
    step = compile_step(step_of(model), {"memory_budget": in_bytes(1)})
    x = batch()
    held = weakref.ref(x)
    for _ in range(2):  # the same refusal again
        with pytest.raises(InfeasibleBudgetError, match="cannot be met"):
            step(x)
    del x
    gc.collect()
    assert held() is None
    assert_no_host_memory_in_use()


def test_a_second_forward_is_planned_with_what_the_first_one_holds(caplog: pytest.LogCaptureFixture) -> None:
    fresh()
    compile_step(step_of(Net()), {"memory_budget": "100%"})(batch()).backward()
    (kept,) = fxhome.plans()
    budget = kept.resident_bytes + int(1.6 * (kept.baseline_peak_bytes - kept.resident_bytes))
    fresh()
    model = Net()
    step = compile_step(step_of(model), {"memory_budget": in_bytes(budget)})
    peaks = []
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        for _ in range(3):
            gc.collect()
            with StorageMeter(granule_bytes=1) as meter:
                meter.track_resident()
                losses = [step(batch()), step(batch())]
                for loss in losses:
                    loss.backward()
            peaks.append(meter.peak_bytes)
            del losses, loss
            model.zero_grad()
    assert max(peaks[1:]) <= budget  # the first round compiles in the middle
    grown, jointly = warnings_of(caplog)
    assert "another forward's activations" in grown
    assert "planning again" in grown
    assert "2 forwards of one step (graphs: 1) share one budget: planning them jointly" in jointly


def test_a_second_forward_that_cannot_fit_is_refused_and_the_first_one_still_ends() -> None:
    budget = smallest_budget(CASE, ("swap", "recompute"))
    fresh()
    torch.manual_seed(0)
    model = Net()
    step = compile_step(step_of(model), {"memory_budget": in_bytes(budget)})
    first = step(batch())
    with pytest.raises(InfeasibleBudgetError, match="cannot be met"):
        step(batch())
    first.backward()
    del first
    model.zero_grad()
    step(batch()).backward()
    for plan in fxhome.plans():
        assert_promise(plan, budget)
    assert_no_host_memory_in_use()
