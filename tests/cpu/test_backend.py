"""The torch.compile backend itself: options, refusals that are callables, notes, plan files, devices."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome import backend
from fxhome.errors import DeviceError, OptionError, PlanFileError, PlanMismatchError
from fxhome.options import Options
from fxhome.placement import save_plans
from tests.hazard_tools import assert_no_host_memory_in_use, compile_step, fresh, warnings_of

BATCH, WIDTH = 1024, 64


def build() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def step(options: dict[str, Any], model: nn.Module | None = None) -> None:
    compile_step(model or build(), options)(torch.randn(BATCH, WIDTH)).square().mean().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "150%"}, "outside"),
        ({"memory_budget": 0}, "below the least budget"),
        ({"memory_budget": "8GX"}, "unknown unit"),
        ({"memroy_budget": "60%"}, "did you mean 'memory_budget'"),
        ({"lossy": "yes"}, "lossy="),
        ({"allow": ("swap", "zip")}, "choose one of swap, recompute, compress"),
    ],
)
def test_a_wrong_option_is_one_error_from_the_call_and_nothing_ran(options: dict[str, Any], message: str) -> None:
    fresh()
    model = build()
    with pytest.raises(OptionError, match=message):
        step(options, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fxhome.plans() == []
    assert_no_host_memory_in_use()


def test_a_refused_option_keeps_no_input_alive() -> None:
    fresh()
    compiled, x = compile_step(build(), {"memory_budget": "150%"}), torch.randn(BATCH, WIDTH)
    held = weakref.ref(x)
    with pytest.raises(OptionError):
        compiled(x)
    del x
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("text", ["{", '{"schema": 99, "plans": []}', '{"schema": 1, "plans": [{}]}'])
def test_a_bad_plan_file_is_one_error_from_the_call(text: str, tmp_path: Path) -> None:
    fresh()
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError, match="plan"):
        step({"plan": str(path)})


def test_a_plan_file_of_another_graph_is_refused_and_its_own_replays(tmp_path: Path) -> None:
    fresh()
    path = str(tmp_path / "plan.json")
    step({"memory_budget": "85%"})
    (plan,) = fxhome.plans()
    save_plans(path, [plan])
    fresh()
    step({"plan": path})
    (again,) = fxhome.plans()
    assert again.program == plan.program
    assert again.fingerprint() == plan.fingerprint()
    fresh()
    with pytest.raises(PlanMismatchError, match="was made for this graph"):
        step({"plan": path}, nn.Sequential(nn.Linear(WIDTH, WIDTH)))


def test_the_environment_gives_the_budget_when_only_a_name_can_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setenv("FXHOME_MEMORY_BUDGET", "85%")
    torch.compile(build(), backend=backend.fxhome)(torch.randn(BATCH, WIDTH)).square().mean().backward()
    (plan,) = fxhome.plans()
    assert plan.asked == "85%"


def test_a_mode_is_noted_and_not_applied(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setenv("FXHOME_MEMORY_BUDGET", "100%")
    compiled = torch.compile(build(), backend=backend.fxhome, mode="reduce-overhead")
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        compiled(torch.randn(BATCH, WIDTH)).square().mean().backward()
    (plan,) = fxhome.plans()
    assert any("CUDA graphs" in note for note in plan.notes)
    (message,) = warnings_of(caplog)
    assert "reduce-overhead" in message


def test_tensors_elsewhere_are_refused() -> None:
    refusal = backend.fxhome(torch.fx.symbolic_trace(nn.Identity()), [torch.empty(2, device="meta")], options=Options())  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="tensors on meta; only cuda and cpu are supported"):
        refusal()


def test_a_graph_without_a_backward_runs_and_has_no_plan() -> None:
    fresh()
    model, x = build(), torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        found = compile_step(model, {"memory_budget": "50%"})(x)
        assert torch.equal(found, model(x))
    assert fxhome.plans() == []


def test_reset_forgets_the_plans() -> None:
    fresh()
    step({"memory_budget": "100%"})
    assert len(fxhome.plans()) == 1
    torch._dynamo.reset()
    assert fxhome.plans() == []


def test_the_recompile_limit_is_made_an_error() -> None:
    fresh()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        step({"memory_budget": "100%"})
        assert torch._dynamo.config.fail_on_recompile_limit_hit


def test_where_errors_are_suppressed_torch_compile_can_still_be_called(caplog: pytest.LogCaptureFixture) -> None:
    """torch.compile refuses both settings together; what is suppressed runs eagerly, and that is said once."""
    fresh()
    backend._warn_of_suppressed_errors.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, suppress_errors=True):
        for _ in range(2):
            step({"memory_budget": "100%"})
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
    (text,) = [entry.getMessage() for entry in caplog.records if "suppress_errors" in entry.getMessage()]
    assert "runs eagerly and without any budget" in text
