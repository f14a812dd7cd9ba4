"""Mutation and aliasing under swap and recompute: in-place operators, written inputs and buffers, outputs that alias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.hazard_tools import BOTH, Case, Mode, Record, all_modes, check, compile_step, fresh, in_bytes, record

ROWS, WIDTH = 512, 64


def linears(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class InPlace(nn.Module):
    """In-place activations, updates through a view, and a copy into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x[:, : WIDTH // 2].mul_(2.0)
            x = F.relu_(x) + 0.25
            x.mul_(1.5)
            x[:, 0] = x[:, 1] * 3.0
        return torch.sigmoid_(x)


class WrittenBuffer(nn.Module):
    """A buffer that the step reads, writes, and reads again; the backward needs what it was before."""

    scale: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.register_buffer("scale", torch.ones(ROWS, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale.cos()))
            self.scale.mul_(1.25).add_(x.detach() * 0.5)
            self.count.add_(1)
            x = x * self.scale.exp()
        return x * self.count


class WrittenInput(nn.Module):
    """A batch that is normalised in place after the backward's needs were read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(self.layers[0](x.cos())) * x.exp()
        x.mul_(0.5).sub_(0.125)
        for layer in self.layers[1:]:
            y = torch.sin(layer(y) * x.cos())
        x.clamp_(-1.0, 1.0)
        return y


class WrittenParameterView(nn.Module):
    """A buffer overwritten through a view and by copy_, half of it after its use."""

    memory: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.register_buffer("memory", torch.randn(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) * self.memory.cos())
            self.memory.view(-1)[index::4].copy_(x.detach().reshape(-1)[index::4])
        return x


class Aliases(nn.Module):
    """Outputs that are an input, a view of an input, a view of an activation, and the same activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first))
        third = torch.tanh(self.layers[2](second).sin().exp())
        return third, x, x.view(-1), second.t(), second, first[: ROWS // 2]


class SavedOutputs(nn.Module):
    """Every output is also what the backward needs (exp, tanh and softmax save their results)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = []
        for layer in self.layers:
            x = torch.softmax(torch.tanh(layer(x)).exp(), dim=-1)
            outputs.append(x)
        return tuple(outputs)


def inputs() -> tuple[torch.Tensor]:
    return (torch.randn(ROWS, WIDTH),)


CASES = {
    "in-place operators": Case(lambda: (InPlace(), inputs())),
    "a buffer written between its readers": Case(lambda: (WrittenBuffer(), inputs()), reference="eager"),
    "an input written after it was read": Case(lambda: (WrittenInput(), inputs()), reference="eager"),
    "a buffer written through a view": Case(lambda: (WrittenParameterView(), inputs()), reference="eager"),
    "outputs that alias": Case(lambda: (Aliases(), inputs())),
    "saved activations that are outputs": Case(lambda: (SavedOutputs(), inputs())),
}


@all_modes
@pytest.mark.parametrize("name", CASES)
def test_mutation_and_aliases_in_one_graph(name: str, mode: Mode) -> None:
    check(CASES[name], mode)


@pytest.mark.parametrize("model", [Aliases, SavedOutputs])
def test_outputs_returned_to_the_caller_alias_as_in_the_stock_backend(model: type[nn.Module]) -> None:
    """With the loss outside, outputs are the user's: same values, same storages shared, same gradients."""

    def run(options: dict[str, Any] | None) -> tuple[Record, list[tuple[int, int]]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, arguments = model(), inputs()
        outputs = compile_step(module, options)(*arguments)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in (*outputs, *arguments)]
        shared = [(i, j) for i, a in enumerate(addresses) for j, b in enumerate(addresses) if i < j and a == b]
        sum((tensor.square().mean() for tensor in outputs), torch.zeros(())).backward()
        found = Record()
        for position, output in enumerate(outputs):
            found.note(f"output {position}", output)
        for name, parameter in module.named_parameters():
            found.note(name, parameter.grad)
        return found, shared

    expected, expected_shared = run(None)
    found, shared = run({"memory_budget": "100%", "policy": "vdnn_all"})
    assert found.differences(expected) == []
    assert shared == expected_shared


def test_a_written_input_ends_as_in_eager_when_the_step_fails_to_fit_later() -> None:
    """A refused step must not have touched the inputs or buffers."""
    case = CASES["a buffer written between its readers"]
    torch.manual_seed(0)
    model, arguments = case.build()
    step = compile_step(case.step(model, case), {"memory_budget": in_bytes(1)})
    before = Record()
    for name, buffer in model.named_buffers():
        before.note(name, buffer)
    with pytest.raises(ValueError, match="cannot be met"):
        step(*arguments)
    after = Record()
    for name, buffer in model.named_buffers():
        after.note(name, buffer)
    assert after.differences(before) == []


@pytest.mark.parametrize("budget", ["100%", 0.7])
def test_a_budget_that_changes_nothing_else_changes_no_gradient(budget: object) -> None:
    """The stock partition rebuilds from inputs that the step has overwritten; where it fits, it must not be taken as it is."""
    case = CASES["a buffer written between its readers"]
    expected = record(case)
    found = record(case, {"memory_budget": budget})
    assert found.differences(expected) == []


def test_an_input_that_is_written_outside_the_graph() -> None:
    """AOTAutograd carries out some mutations itself, after the forward: a rebuild must not read what they wrote."""

    def run(options: dict[str, Any] | None, *, eager: bool = False) -> Record:
        fresh()
        torch.manual_seed(0)
        layers = linears()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = layers[0](x.exp()).tanh()
            x.mul_(0.5)
            y = layers[1](y * x.exp()).tanh()
            x.add_(y)
            return layers[2](x.exp()).tanh().square().mean()

        leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
        x = leaf * 1.0
        loss = (step if eager else compile_step(step, options))(x)
        found = Record()
        found.note("input after", x)
        loss.backward()
        found.note("loss", loss)
        found.note("leaf", leaf.grad)
        for name, parameter in layers.named_parameters():
            found.note(name, parameter.grad)
        return found

    expected = run(None, eager=True)
    for policy in ("vdnn_all", "checkpoint", "pso"):
        for budget in ("100%", 0.75):
            found = run({"memory_budget": budget, "policy": policy, "on_infeasible": "best_effort"})
            assert found.differences(expected) == [], (policy, budget)


def test_mutations_are_seen_by_the_next_step() -> None:
    """The buffer of step n is what step n + 1 reads: three steps change it three times."""
    case = CASES["a buffer written between its readers"]
    plain = record(case)
    values = {name: value for name, value in plain.values.items() if "buffer scale" in name}
    assert len(set(values.values())) == case.steps
    check(case, BOTH)
