"""A host with too little memory for the swaps: fewer of them, said once, or one error before anything runs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome import cli
from fxhome.device import cached_profile
from fxhome.errors import HostMemoryError
from fxhome.placement import save_plans
from fxhome.runtime import host_pool as pool_module
from fxhome.runtime.host_memory import HostLimits
from fxhome.runtime.host_pool import host_pool
from tests.hazard_tools import (
    Step,
    as_bytes,
    assert_no_host_memory_in_use,
    assert_promise,
    compile_step,
    fresh,
    warnings_of,
)

BATCH, WIDTH = 8192, 64
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    """No slab of an earlier test, and no budget left behind."""
    fresh()
    host_pool().close()
    yield
    fresh()
    host_pool().set_budget(None)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def step_of(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    return step


def gradients(options: dict[str, Any] | None, steps: int = 2) -> list[bytes]:
    model = build()
    compiled = compile_step(step_of(model), options)
    for _ in range(steps):
        model.zero_grad()
        compiled(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))).backward()
    return [as_bytes(p.grad) for p in model.parameters() if p.grad is not None]


def host_of_60_percent(allow: tuple[str, ...]) -> int:
    """What the plan for 60 % moves when the host has room for anything."""
    gradients({"memory_budget": "60%", "allow": allow})
    (plan,) = fxhome.plans()
    fresh()
    return plan.host_bytes


def test_a_small_host_budget_moves_less_says_so_and_keeps_every_promise(caplog: pytest.LogCaptureFixture) -> None:
    free = host_of_60_percent(("swap", "recompute"))
    expected = gradients(None)
    budget = free // 2 // (2 * MIB) * 2 * MIB
    assert budget >= 2 * MIB
    fresh()
    host_pool().close()
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        found = gradients({"memory_budget": "60%", "allow": ("swap", "recompute"), "host_budget": budget}, steps=3)
    (plan,) = fxhome.plans()
    assert found == expected
    assert 0 < plan.host_bytes <= budget
    assert_promise(plan, plan.budget_bytes)
    assert host_pool().status().reserved_bytes <= budget
    (message,) = warnings_of(caplog)
    assert "planning with fewer copies" in message
    assert any("fewer copies" in note for note in plan.notes)
    assert_no_host_memory_in_use()


def test_no_host_memory_at_all_leaves_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = HostLimits(machine_available_bytes=64 << 30, cgroup_available_bytes=100 * MIB, memlock_bytes=None)
    monkeypatch.setattr(pool_module, "read_host_limits", lambda: limits)  # a full container on a large machine
    expected = gradients(None)
    found = gradients({"memory_budget": "60%", "allow": ("swap", "recompute")})
    (plan,) = fxhome.plans()
    assert found == expected
    assert plan.host_bytes == 0
    assert_promise(plan, plan.budget_bytes)
    assert host_pool().status().reserved_bytes == 0


@pytest.mark.parametrize("suppress", [False, True])
def test_where_only_swapping_would_do_there_is_one_error_and_nothing_ran(suppress: bool) -> None:
    model, x = build(), torch.randn(BATCH, WIDTH)
    compiled = compile_step(step_of(model), {"memory_budget": "60%", "allow": ("swap",), "host_budget": 2 * MIB})
    for _ in range(2):
        with (
            torch._dynamo.config.patch(suppress_errors=suppress),
            pytest.raises(HostMemoryError, match=r"the plan moves .* to the host, which has room for 2\.00 MiB") as bad,
        ):
            compiled(x)
        assert type(bad.value) is HostMemoryError
        assert bad.value.__cause__ is None
        assert "Raise host_budget" in str(bad.value)
        del bad
    assert all(parameter.grad is None for parameter in model.parameters())
    # What is remembered of the refusal, and of the one that it replaced, holds neither model nor batch.
    batch = weakref.ref(x)
    del model, x, compiled
    torch._dynamo.reset()
    gc.collect()
    assert batch() is None
    assert host_pool().status().reserved_bytes == 0


def test_a_host_budget_above_the_machine_is_refused() -> None:
    with pytest.raises(HostMemoryError, match=r"host_budget needs \d+ bytes .* can be given"):
        gradients({"memory_budget": "60%", "host_budget": "100000GiB"})
    assert fxhome.plans() == []
    assert host_pool().status().reserved_bytes == 0


def test_a_host_that_refuses_the_memory_after_all_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers promised room; the kernel says no (overcommit off, an address space limit)."""

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pool_module, "Slab", refuse)
    model = build()
    with pytest.raises(HostMemoryError, match="raise host_budget or the container's memory limit"):
        compile_step(step_of(model), {"memory_budget": "60%", "allow": ("swap",)})(torch.randn(BATCH, WIDTH))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_no_host_memory_in_use()


def test_a_replayed_plan_that_does_not_fit_the_host_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    gradients({"memory_budget": "60%", "allow": ("swap",)})
    (plan,) = fxhome.plans()
    save_plans(path, [plan])
    fresh()
    host_pool().close()
    with pytest.raises(HostMemoryError, match="plan this model again"):
        gradients({"plan": path, "host_budget": 2 * MIB})
    assert host_pool().status().reserved_bytes == 0


def test_the_plan_takes_its_host_memory_before_its_first_step() -> None:
    gradients({"memory_budget": "60%", "allow": ("swap",)}, steps=4)
    (plan,) = fxhome.plans()
    status = host_pool().status()
    assert status.slab_count == 1
    assert plan.host_bytes <= status.reserved_bytes
    assert status.peak_bytes <= status.reserved_bytes


def test_an_offline_plan_knows_the_host_it_is_for(caplog: pytest.LogCaptureFixture) -> None:
    profile = cached_profile("cpu")
    x = torch.randn(BATCH, WIDTH)
    free = fxhome.plan(build(), (x,), "60%", device=profile, max_evaluations=400)
    assert free.host_bytes > 4 * MIB
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        small = fxhome.plan(
            build(), (x,), "60%", device=replace(profile, host_memory_bytes=4 * MIB), max_evaluations=400
        )
    assert small.host_bytes <= 4 * MIB
    assert small.predicted_peak_bytes <= small.budget_bytes
    assert "planning with fewer copies" in warnings_of(caplog)[0]


def test_the_command_line_says_it_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def factory(n):\n"
        "    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), (torch.randn(n, 64),)\n",
        encoding="utf-8",
    )
    command = ["run", f"{path}:factory", "--batch-size", "64", "--device", "cpu", "--memory-budget", "60%"]
    assert cli.main([*command, "--host-budget", "100000GiB"]) == 2
    stderr = capsys.readouterr().err
    assert "fxhome run: error: host pool: host_budget needs" in stderr
    assert "Traceback" not in stderr
