"""The host's costs on a CPU: figures that make sense, also in the middle of a compilation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

from fxhome.host_costs import HostCosts
from fxhome.runtime import host_probe
from fxhome.runtime.compile_apart import outside_of_compilation

CPU = torch.device("cpu")


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "LONG", 8)
    monkeypatch.setattr(host_probe, "FEW_AND_MANY", (2, 4))
    monkeypatch.setattr(host_probe, "TIMED_RUNS", 4)
    torch._dynamo.reset()


def checked(costs: HostCosts) -> None:
    figures = dataclasses.asdict(costs)
    assert (figures.pop("inner"), figures.pop("steps")) == ("aot_eager", ())
    assert all(0 <= figure < 1e6 for figure in figures.values())
    assert min(costs.swap_out_us, costs.swap_in_us, costs.wait_us, costs.encode_us, costs.decode_us) > 0


def test_every_figure_is_there(few_runs: None) -> None:
    checked(host_probe.measure_host_costs(CPU, "aot_eager"))


def test_it_is_measured_in_the_middle_of_a_compilation(few_runs: None) -> None:
    """As in a backend, with a tracing context and the compile lock: the step is compiled as if nothing had been."""
    found: list[HostCosts] = []
    inner = torch._dynamo.lookup_backend("aot_eager")

    def backend(module: Any, inputs: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        found.append(host_probe.measure_host_costs(CPU, "aot_eager"))
        assert torch._guards.TracingContext.try_get() is context is not None
        return inner(module, inputs)

    model = nn.Linear(3, 3)
    step = torch.compile(model, backend=backend)
    x = torch.ones(2, 3)
    step(x).sum().backward()
    assert torch.equal(step(x), model(x))
    assert len(found) == 1
    checked(found[0])


def test_what_is_compiled_apart_is_compiled(few_runs: None) -> None:
    calls: list[int] = []

    def spy(module: Any, _: Any) -> Any:
        calls.append(len(calls))
        return module.forward

    def backend(module: Any, _: Any) -> Any:
        def work() -> torch.Tensor:
            probe = host_probe._module("x", ["x = torch.relu(x)"], "x")
            result: torch.Tensor = torch.compile(probe, backend=spy)(torch.ones(2))
            return result

        assert torch.equal(outside_of_compilation(work), torch.ones(2))
        return module.forward

    torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    assert calls == [0]


def test_an_error_apart_is_the_callers(few_runs: None) -> None:
    def backend(module: Any, _: Any) -> Any:
        with pytest.raises(KeyError, match="apart"):
            outside_of_compilation(lambda: {}["apart"])
        return module.forward

    torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    with pytest.raises(KeyError, match="alone"):
        outside_of_compilation(lambda: {}["alone"])


@pytest.mark.slow
def test_a_generated_kernel_is_like_those_of_real_steps(few_runs: None) -> None:
    """One for each link of the chain, none of which writes where it reads, but for the last one."""
    from torch._inductor.utils import run_and_get_code

    links = 6
    _, (code,) = run_and_get_code(host_probe._chain(CPU, "inductor", links, ("kernel",)))
    body = code[code.index("def call(") : code.index("runner = ")]
    calls = re.findall(r"^ *cpp_fused_\w+\((.*)\)$", body, re.MULTILINE)
    assert len(calls) == links
    assert [len(call.split(",")) for call in calls[2:-1]] == [4] * (links - 3)
    assert body.count("empty_strided_cpu(") == 2 * links - 1
