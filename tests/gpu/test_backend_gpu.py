"""Budgets enforced by the allocator on a GPU: what was promised is what is used, and the gradients are right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import fxhome
from fxhome import ledger
from fxhome.backend import fxhome as backend
from tests.gpu_tools import (
    MIB,
    Blocks,
    Record,
    convolutions,
    enforced,
    fresh_device,
    keep_all_peak,
    planned,
    run,
    transformer,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler stack warns about itself on import and while tracing.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Workload = Callable[[], tuple[nn.Module, torch.Tensor]]


@pytest.fixture(autouse=True)
def clean_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with an empty allocator and leaves no cap behind; cuDNN adds up in a fixed order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    fresh_device()
    yield
    fresh_device()


def assert_promise(found: Record, budget_bytes: int) -> fxhome.Plan:
    """One plan that is not the baseline; every step inside the budget; predicted within 5 % of measured."""
    (plan,) = fxhome.plans()
    print(f"asked {budget_bytes}, predicted {plan.predicted_peak_bytes}, measured {plan.measured_peak_bytes}")
    print(f"peaks {found.peaks}, reserved {plan.measured_reserved_bytes}")
    assert found.steady_peak <= budget_bytes
    assert plan.budget_bytes == budget_bytes
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= budget_bytes
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert abs(plan.predicted_peak_bytes - plan.measured_peak_bytes) <= 0.05 * plan.measured_peak_bytes
    return plan


@pytest.mark.parametrize("allow", [["swap"], ["recompute"], ["swap", "recompute"]])
@pytest.mark.parametrize("workload", [lambda: transformer(dropout=0.1), convolutions], ids=["transformer", "cnn"])
def test_aot_eager_is_bitwise_right_inside_its_budget(workload: Workload, allow: list[str]) -> None:
    model, x = workload()
    stock = run(model, x, backend="aot_eager")
    budget = int(keep_all_peak(model, x, "aot_eager") * 0.8)

    with enforced(budget):
        found = run(model, x, **planned(budget, "aot_eager", allow=allow, verify=True))
        assert_promise(found, budget)

    assert found.differences(stock) == []


@pytest.mark.parametrize("share", [0.75, 0.6])
@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_inductor_holds_an_enforced_budget(name: str, share: float) -> None:
    if name == "cnn":
        model, x = convolutions()
    else:
        torch.manual_seed(0)
        model = Blocks(1024, 8).cuda().bfloat16()
        x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    eager = run(model, x, steps=1)
    stock = run(model, x, backend="inductor")
    budget = int(stock.steady_peak * share)

    with enforced(budget):
        found = run(model, x, **planned(budget, "inductor"))
        plan = assert_promise(found, budget)

    placed = {kind.value: size for kind, size in plan.bytes_by_placement().items() if kind.value != "keep"}
    assert sum(placed.values()) > 0
    torch.testing.assert_close(found.loss, stock.loss, rtol=1e-2, atol=1e-3)
    # Recomputation changes what is fused, hence rounding: no further from eager than Inductor itself, or nearly so.
    assert found.distance(eager) <= 2 * stock.distance(eager) + 1e-3


@pytest.mark.parametrize("workload", [transformer, convolutions])
def test_with_slack_the_generated_code_is_that_of_torch_compile(workload: Workload) -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = workload()

    def code_of(**how: Any) -> tuple[Record, list[str]]:
        # A cached graph would generate nothing.
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            found, code = run_and_get_code(lambda: run(model, x, **how))
        # Graphs are numbered in the order of their traces, and the planning trace is one.
        return found, sorted(re.sub(r"AOT ID: \[.*\]", "", text) for text in code)

    expected, stock_code = code_of(backend="inductor")
    expected_bytes = expected.steady_peak - expected.start_bytes
    fresh_device()
    found, code = code_of(**planned(64 << 30, "inductor"))

    assert len(stock_code) == 2
    assert code == stock_code
    assert abs(found.steady_peak - found.start_bytes - expected_bytes) <= 8 * MIB  # libraries' workspaces
    (graph,) = ledger.graphs()
    assert graph.variants[-1].planned is not None
    assert graph.variants[-1].planned.is_baseline
    assert found.distance(expected) <= 1e-3


@pytest.mark.parametrize("workload", [transformer, convolutions])
def test_an_impossible_budget_is_refused_and_its_minimum_works(workload: Workload) -> None:
    model, x = workload()
    run(model, x, steps=1)  # libraries take their workspaces
    fresh_device()
    held = torch.cuda.memory_allocated()
    with pytest.raises(fxhome.InfeasibleBudgetError) as refused:
        run(model, x, **planned(1 << 20, "inductor"))
    minimum = refused.value.with_traceback(None).minimum_bytes
    del refused
    fresh_device()
    assert minimum is not None
    assert (
        torch.cuda.memory_allocated() <= held + 32 * MIB
    )  # of the refused step, weights of 70 MB too, nothing is kept

    # Without kernels of before: the first step tries their variants, on copies of what they overwrite.
    with fresh_cache(), enforced(minimum):
        found = run(model, x, **planned(minimum, "inductor"))
        assert_promise(found, minimum)


def test_no_drift_over_many_steps() -> None:
    torch.manual_seed(0)
    model = Blocks(512, 4).cuda().bfloat16()
    step = torch.compile(model, backend=backend, options={"memory_budget": "80%"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = []
    for index in range(40):
        x = torch.randn(32, 512, 512, device="cuda", dtype=torch.bfloat16)
        optimizer.zero_grad()
        step(x).backward()
        optimizer.step()
        if index >= 20:
            held.append(torch.cuda.memory_allocated())

    assert max(held) == min(held)
