"""Where Dynamo gives a function up, it runs eagerly: that is said, once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fxhome
from fxhome.backend import fxhome as backend
from fxhome.errors import UnsupportedGraphError


class Looped(nn.Module):
    """A graph break in a loop: nothing of its forward becomes a graph, and linear layers alone are not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x.sum()


class Aside(nn.Module):
    """Dynamo is told not to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def missing(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "made no graph of" in record.getMessage()]


def train(step: Any, weights: Any, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(weights)
    for _ in range(steps):
        step(torch.ones(3, 8)).sum().backward()
        optimizer.step()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "now runs eagerly" in record.getMessage()]


def test_a_function_that_dynamo_gives_up_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()  # a backend that was imported before, and is not asked before Dynamo gives up, still sees it
    step = torch.compile(Looped(), backend=backend, options={"memory_budget": "1GiB"})

    for rows in (3, 4):
        step(torch.ones(rows, 8)).backward()

    (text,) = said(caplog)
    assert "Looped.forward (test_eager_frames.py:" in text
    assert "memory_budget holds for nothing that it does itself" in text
    assert "graph_break()" in text
    assert fxhome.plans() == []


def test_other_backends_functions_without_operators_and_inference_are_not_spoken_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    options = {"memory_budget": "1GiB"}
    torch.compile(nn.ReLU(), backend=backend, options=options)(torch.ones(3))

    torch.compile(Looped(), backend="aot_eager")(torch.ones(3, 8))
    torch.compile(lambda: 3, backend=backend, options=options)()
    with torch.no_grad():
        torch.compile(Looped(), backend=backend, options=options)(torch.ones(3, 8))

    assert said(caplog) == []


def test_optimize_refuses_a_model_of_which_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING), pytest.raises(UnsupportedGraphError, match="could make no graph of Looped"):
        fxhome.optimize(Looped(), (torch.ones(3, 8),), memory_budget="1GiB")
    assert len(said(caplog)) == 1


def test_a_model_of_which_no_graph_arrives_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    options = {"memory_budget": "1GiB"}
    model = Aside()
    train(torch.compile(model, backend=backend, options=options), model.parameters())

    (text,) = missing(caplog)
    assert "made no graph of Aside: all of it runs eagerly" in text
    model = Aside()
    train(torch.compile(model, backend="aot_eager"), model.parameters())
    seen = nn.Sequential(nn.Linear(8, 8))
    train(torch.compile(seen, backend=backend, options=options), seen.parameters())

    class GivenUp(Looped):  # Dynamo remembers the code that it gave up once
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x.sum()

    given_up = GivenUp()
    train(torch.compile(given_up, backend=backend, options=options), given_up.parameters())
    assert len(missing(caplog)) == len(said(caplog)) == 1


def test_torch_nns_own_module_inside_a_distributed_one_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    options = {"memory_budget": "1GiB"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/found", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        outside = torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend, options=options)
        train(outside, model.parameters())
        assert fxhome.plans() == []
        (text,) = missing(caplog)
        assert "made no graph of DistributedDataParallel" in text
        assert "compile the module first" in text

        inside = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=backend, options=options)
        train(nn.parallel.DistributedDataParallel(inside), inside.parameters())
        assert len(fxhome.plans()) == 1
        assert len(missing(caplog)) == 1
    finally:
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_is_compiled_itself_is_left_alone(kind: Any) -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    before = model.weight.detach().clone()
    counter = CompileCounter()
    torch.compile(optimizer.step, backend=counter)()
    assert not torch.equal(before, model.weight)
    assert counter.frame_count == 1
    torch._dynamo.reset()
