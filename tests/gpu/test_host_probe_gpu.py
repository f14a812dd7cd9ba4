"""The host's costs on a GPU: measured by themselves and from within a compilation, with nothing left behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fxhome.host_costs import HostCosts
from fxhome.runtime.host_probe import measure_host_costs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plausible(costs: HostCosts) -> None:
    figures = dataclasses.asdict(costs)
    del figures["inner"], figures["steps"]
    assert all(0 <= figure < 1e5 for figure in figures.values())
    assert 1.0 < costs.kernel_us < 500.0
    assert 1.0 < costs.library_us < 500.0
    assert costs.convolution_us > 1.0
    assert min(costs.swap_out_us, costs.swap_in_us, costs.wait_us) > 1.0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_figures_are_plausible_and_nothing_stays(inner: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    plausible(measure_host_costs(device, inner))
    before = torch.cuda.memory_allocated()
    plausible(measure_host_costs(device, inner))
    assert torch.cuda.memory_allocated() == before


def test_from_within_a_compilation() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found: list[HostCosts] = []

    def backend(module: Any, _: Any) -> Any:
        found.append(measure_host_costs(device, "inductor"))
        return module.forward

    model = nn.Linear(8, 8, device=device)
    x = torch.ones(2, 8, device=device)
    assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    plausible(found[0])
