"""A refused budget names what the whole step needs: asked for, it works, at the second time at the latest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome.backend import fxhome as backend
from fxhome.errors import InfeasibleBudgetError

Step = Callable[[], None]
Compile = Callable[[nn.Module], Any]
ROWS = 512


class Layers(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        sizes = [inputs, 128, 128, 128, outputs]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layers(64, 64), Layers(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def adversaries(compiled: Compile) -> Step:
    """Two models, two optimizers, three forwards of one of them with two kinds of inputs, two backwards."""
    maker, judge = Layers(32, 64), Layers(64, 1)
    make, judged = compiled(maker), compiled(judge)
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())

    def step() -> None:
        of_judge.zero_grad()
        made = make(torch.randn(ROWS, 32))
        (judged(made.detach()).mean() - judged(torch.randn(ROWS, 64)).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judged(made).mean()).backward()
        of_maker.step()

    return step


def two_forwards(compiled: Compile) -> Step:
    """Two forwards, a loss outside, two backwards."""
    model = Layers(64, 64)
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(ROWS, 64)
        first, second = (run(x) - x).square().mean(), (run(-x) - x).square().mean()
        first.backward()
        second.backward()
        optimizer.step()

    return step


def accumulated(compiled: Compile) -> Step:
    """Three backwards before the optimizer's step."""
    model = Layers(64, 64)
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            run(torch.randn(ROWS, 64)).square().mean().backward()
        optimizer.step()

    return step


def broken(compiled: Compile) -> Step:
    """A graph break, a loss outside."""
    model = Broken()
    run = compiled(model)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(ROWS, 64)
        (run(x) - x).square().mean().backward()
        optimizer.step()

    return step


def run_within(build: Callable[[Compile], Step], budget: int, steps: int = 4) -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    options = {"memory_budget": budget, "inner": "aot_eager", "max_evaluations": 200}
    step = build(lambda model: torch.compile(model, backend=backend, options=options))
    for _ in range(steps):
        step()


def refusal_of(build: Callable[[Compile], Step], budget: int) -> InfeasibleBudgetError | None:
    try:
        run_within(build, budget)
    except InfeasibleBudgetError as refusal:
        return refusal.with_traceback(None)
    return None


# Dynamo looks at .grad of what flows across its break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("build", [adversaries, two_forwards, accumulated, broken])
def test_what_is_named_works_at_the_second_time_at_the_latest(build: Callable[[Compile], Step]) -> None:
    budget, refused = 1 << 20, refusal_of(build, 1 << 20)
    assert refused is not None
    for _ in range(2):
        assert refused.minimum_bytes is not None
        assert refused.minimum_bytes > budget
        assert f"Ask for at least {refused.minimum_bytes}" in str(refused)
        budget = refused.minimum_bytes
        if (refused := refusal_of(build, budget)) is None:
            break
    assert refused is None
    for plan in fxhome.plans():
        assert plan.budget_bytes == budget
        assert plan.measured_peak_bytes is not None
        # What is kept free for other graphs of the step is no part of what a graph is said to need.
        assert abs(plan.predicted_peak_bytes - plan.measured_peak_bytes) < plan.measured_peak_bytes // 10
    torch._dynamo.reset()


def test_a_first_refusal_counts_the_optimizer_that_has_not_made_a_step() -> None:
    named = {}
    for kind in (torch.optim.SGD, torch.optim.Adam):
        torch._dynamo.reset()
        gc.collect()
        model = Layers(64, 64)
        optimizer = kind(model.parameters(), lr=0.1)
        run = torch.compile(model, backend=backend, options={"memory_budget": 1 << 20, "max_evaluations": 200})
        with pytest.raises(InfeasibleBudgetError) as refused:
            run(torch.randn(ROWS, 64))
        named[kind] = refused.value.with_traceback(None).minimum_bytes
        del optimizer, refused, run
    counters = 4 * len(list(model.parameters()))
    moments = 2 * sum(weight.nbytes for weight in model.parameters())
    assert named[torch.optim.Adam] == named[torch.optim.SGD] + moments + counters
    torch._dynamo.reset()
