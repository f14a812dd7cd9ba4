"""Where Dynamo gives a function up, it runs eagerly: that is said, once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

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


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "runs eagerly" in record.getMessage()]


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
