"""Inductor as the inner compiler, on CPU: same results, a checked peak, transfers where the plan wants them."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import memory
from torch._inductor.utils import run_and_get_code

import fxhome
from fxhome import inductor_graphs, inner_inductor, ledger
from fxhome.backend import fxhome as backend
from fxhome.passes.inductor_check import OverLimitError, ScheduleCheck
from fxhome.passes.lowered_buffers import LoweredPeak

pytestmark = pytest.mark.slow  # each case compiles C++

SHARED_TOLERANCE = 1e-5
"""Recomputation changes what is fused, hence rounding; Inductor itself differs from eager by as much."""


class Blocks(nn.Module):
    """Three pre-norm MLP blocks and a loss."""

    def __init__(self, width: int = 64, count: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x.square().mean()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[ScheduleCheck]]:
    """Every check made, with Inductor's caches off, so that the scheduler always runs."""
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    made: list[ScheduleCheck] = []
    original = inductor_graphs.check_for

    def keep(planned: Any, situation: Any, **how: Any) -> ScheduleCheck:
        made.append(original(planned, situation, **how))
        return made[-1]

    monkeypatch.setattr(inductor_graphs, "check_for", keep)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield made
    torch._dynamo.reset()


def step(model: nn.Module, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a copy of `model`."""
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    loss = torch.compile(own, **how)(x)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in own.named_parameters() if weight.grad is not None}


def test_a_tight_budget_swaps_and_changes_nothing_but_rounding(checks: list[ScheduleCheck]) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 64)
    loss, gradients = step(model, x, backend="inductor")

    found, planned = step(
        model,
        x,
        backend=backend,
        options={
            "memory_budget": "65%",
            "inner": "inductor",
            "max_evaluations": 400,
            "allow": ["swap"],
            "verify": True,
        },
    )

    plan = fxhome.plans()[0]
    assert plan.host_bytes > 0
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    torch.testing.assert_close(found, loss, rtol=SHARED_TOLERANCE, atol=SHARED_TOLERANCE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(planned[name], gradient, rtol=1e-4, atol=SHARED_TOLERANCE)


def test_where_the_environment_switches_the_cache_of_graphs_on_the_peak_is_checked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inductor knows the graphs already, and what was checked of them is not known here."""
    from torch._inductor import config

    monkeypatch.setattr(config._config["fx_graph_cache"], "env_value_force", True)  # TORCHINDUCTOR_FX_GRAPH_CACHE=1
    model, x = Blocks(count=1), torch.randn(512, 64)
    for folder in ("first", "second"):
        monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path / folder))
        step(model, x, backend=backend, options={"memory_budget": "1GB", "inner": "inductor"})
        (plan,) = fxhome.plans()
        assert plan.predicted_peak_bytes > plan.resident_bytes
    with pytest.raises(fxhome.InfeasibleBudgetError) as refusal:
        step(model, x, backend=backend, options={"memory_budget": 1 << 20, "inner": "inductor"})
    assert refusal.value.minimum_bytes is not None
    torch._dynamo.reset()


def test_the_generated_order_has_every_copy_before_its_wait_and_its_wait_before_its_reader(
    checks: list[ScheduleCheck],
) -> None:
    torch.manual_seed(0)
    step(
        Blocks(),
        torch.randn(512, 64),
        backend=backend,
        options={"memory_budget": "65%", "inner": "inductor", "max_evaluations": 400, "allow": ["swap"]},
    )

    order = checks[-1].order

    reloads = [i for i, name in enumerate(order) if name == "swap_in"]
    waits = [i for i, name in enumerate(order) if name == "swap_in_wait"]
    assert len(reloads) == len(waits) > 0
    assert all(start < wait for start, wait in zip(reloads, waits, strict=True))
    # At least one reload runs beside compute: something stands between its start and its wait.
    assert any(
        any(not name.startswith("swap") for name in order[start:wait])
        for start, wait in zip(reloads, waits, strict=True)
    )


@pytest.mark.parametrize(("budget", "orders"), [("70%", 0), ("1GiB", 2)])
def test_no_kernel_is_moved_behind_the_check(
    checks: list[ScheduleCheck], budget: str, orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor orders the kernels of stock graphs for its own estimate of the peak, those of planned ones nobody."""
    ordered = []
    original = memory.reorder_for_peak_memory

    def order(nodes: Any, *rest: Any) -> Any:
        ordered.append(nodes)
        return original(nodes, *rest)

    monkeypatch.setattr(memory, "reorder_for_peak_memory", order)
    torch.manual_seed(0)
    step(
        Blocks(),
        torch.randn(512, 64),
        backend=backend,
        options={"memory_budget": budget, "inner": "inductor", "max_evaluations": 400, "allow": ["recompute"]},
    )
    assert len(ordered) == orders


def test_with_slack_inductor_gets_exactly_the_stock_graphs(checks: list[ScheduleCheck]) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(64, 64)
    loss, gradients = step(model, x, backend="inductor")

    found, planned = step(
        model, x, backend=backend, options={"memory_budget": "1GiB", "inner": "inductor", "max_evaluations": 400}
    )

    assert torch.equal(found, loss)
    assert all(torch.equal(planned[name], gradient) for name, gradient in gradients.items())
    variant = ledger.graphs()[0].variants[-1]
    assert variant.planned is not None
    assert variant.planned.is_baseline
    assert not checks[-1].has_transfers


def test_with_slack_the_generated_code_is_that_of_torch_compile(checks: list[ScheduleCheck]) -> None:
    """Also what AOTAutograd is told of the graph's inputs must be the same: parameters are free to save."""
    torch.manual_seed(0)
    model, x = Blocks(count=1), torch.randn(64, 64)

    def code_of(**how: Any) -> list[str]:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            _, code = run_and_get_code(lambda: step(model, x, **how))
        # Graphs are numbered in the order of their traces, and the planning trace is one.
        return sorted(re.sub(r"AOT ID: \[.*\]", "", text) for text in code)

    expected = code_of(backend="inductor")

    assert len(expected) == 2
    assert (
        code_of(backend=backend, options={"memory_budget": "1GiB", "inner": "inductor", "max_evaluations": 400})
        == expected
    )


def test_an_impossible_budget_is_refused_by_the_first_call(checks: list[ScheduleCheck]) -> None:
    with pytest.raises(fxhome.InfeasibleBudgetError) as refused:
        step(
            Blocks(),
            torch.randn(64, 64),
            backend=backend,
            options={"memory_budget": "1MiB", "inner": "inductor", "max_evaluations": 400},
        )

    assert refused.value.minimum_bytes is not None
    assert refused.value.minimum_bytes > 1 << 20


def test_the_minimum_that_a_refusal_names_holds_once_lowered(checks: list[ScheduleCheck]) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 64)
    minimum = None
    # Not pytest.raises: it would keep the refused step's frames, and its copy of the model is resident memory.
    try:
        step(model, x, backend=backend, options={"memory_budget": "1MiB", "inner": "inductor", "max_evaluations": 400})
    except fxhome.InfeasibleBudgetError as refusal:
        minimum = refusal.minimum_bytes
    torch._dynamo.reset()
    assert minimum is not None

    step(model, x, backend=backend, options={"memory_budget": minimum, "inner": "inductor", "max_evaluations": 400})

    (plan,) = fxhome.plans()
    assert plan.budget_bytes == minimum
    assert plan.predicted_peak_bytes <= minimum
    # Nor is it far more than what is needed: a small model's minimum must not exceed its baseline.
    assert minimum - plan.predicted_peak_bytes < 1 << 20


def test_the_smallest_plan_is_tried_again_with_its_copies_out_of_the_way(
    checks: list[ScheduleCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that ends late makes no difference by the model, and may once lowered: minima are named without."""
    original, tried = inner_inductor.lower_and_check, []

    def over(gm: Any, inputs: Any, planned: Any, situation: Any, *, closely: bool = True) -> Any:
        tried.append((situation.smallest, situation.tightest))
        if not situation.tightest:
            raise OverLimitError(LoweredPeak(planned.plan.budget_bytes + 1, 0, "buf0"), is_backward=False)
        return original(gm, inputs, planned, situation, closely=closely)

    monkeypatch.setattr(inner_inductor, "lower_and_check", over)
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 64)

    step(model, x, backend=backend, options={"memory_budget": "70%", "inner": "inductor", "max_evaluations": 400})

    assert tried[0] == (False, False)
    assert tried[-2:] == [(True, False), (True, True)]
    (plan,) = fxhome.plans()
    assert plan.predicted_peak_bytes <= plan.budget_bytes


class Broken(Blocks):
    """With a graph break before the loss: the first graph leaves room for the second one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, width)."""
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        torch._dynamo.graph_break()
        return torch.tanh(x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_graph_that_cannot_leave_room_once_lowered_keeps_its_own_promise(
    checks: list[ScheduleCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saves least for the backward is not always what needs least: it is no reason to refuse the budget."""
    original, tried = inner_inductor.lower_and_check, []

    def over(gm: Any, inputs: Any, planned: Any, situation: Any, *, closely: bool = True) -> Any:
        tried.append(situation.leave_room)
        if situation.leave_room:
            raise OverLimitError(LoweredPeak(planned.plan.budget_bytes + 1, 0, "buf0"), is_backward=False)
        return original(gm, inputs, planned, situation, closely=closely)

    monkeypatch.setattr(inner_inductor, "lower_and_check", over)
    monkeypatch.setattr(inner_inductor, "MAX_REPLANS", 1)
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(512, 64)

    step(model, x, backend=backend, options={"memory_budget": "1GiB", "inner": "inductor", "max_evaluations": 400})

    assert tried[0]
    assert not tried[-1]
    assert len(fxhome.plans()) == 2
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in fxhome.plans())


def test_a_warm_cache_shows_the_same_plan_and_the_same_promise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path / "fxhome"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    caplog.set_level(logging.WARNING, "fxhome")
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 64)
    options = {"memory_budget": "65%", "inner": "inductor", "max_evaluations": 400}
    step(model, x, backend=backend, options=options)
    first = fxhome.plans()[0]
    torch._dynamo.reset()

    step(model, x, backend=backend, options=options)

    second = fxhome.plans()[0]
    assert second.program == first.program
    assert second.predicted_peak_bytes - second.resident_bytes == first.predicted_peak_bytes - first.resident_bytes


class Head(nn.Module):
    """Returns its logits, which it also saves, beside the loss: as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)]
        self.body, self.head = nn.Sequential(*wide, *copy.deepcopy(wide)), nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64)), logits


@pytest.mark.parametrize("budget", ["100%", "92%"])
def test_an_output_that_is_saved_is_counted_once(
    checks: list[ScheduleCheck], budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller holds it, and the backward must not count it, nor think that it frees it."""
    peaks = []
    original = inner_inductor.lower_and_check

    def keep(gm: Any, inputs: Any, planned: Any, *rest: Any, **how: Any) -> Any:
        lowered = original(gm, inputs, planned, *rest, **how)
        peaks.append((planned.plan.predicted_peak_bytes, lowered.predicted_bytes))
        return lowered

    monkeypatch.setattr(inner_inductor, "lower_and_check", keep)
    torch.manual_seed(0)
    model, x = Head(), torch.randn(512, 64)
    logits_bytes = 512 * 1000 * 4

    loss, logits = torch.compile(model, backend=backend, options={"memory_budget": budget, "inner": "inductor"})(x)
    loss.backward()

    assert logits.shape == (512, 1000)
    ((by_model, lowered),) = peaks
    assert abs(lowered - by_model) < logits_bytes // 4
    assert lowered > 2 * logits_bytes  # the logits and their gradients
