"""The measured training loop that both columns of `fxhome run` come from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fxhome.train_steps import largest_difference, train

CPU = torch.device("cpu")


class Dropped(nn.Module):
    """Weights, a batch-norm buffer and a random op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), 0.5))
        self.unused = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.norm(x * self.weight), 0.5, train=True).square().mean()


def run(num_steps: int = 2, seed: int = 0) -> tuple[list[float], dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = Dropped()
    inputs = (torch.arange(1024.0).reshape(4, 256),)
    training, gradients = train(model, model, inputs, num_steps=num_steps, seed=seed, device=CPU, title="x")
    assert training.reserved_bytes is None
    assert training.step_seconds > 0
    return list(training.losses), gradients, training.peak_bytes


def test_two_runs_are_bitwise_equal_random_ops_included() -> None:
    (losses, gradients, peak), (losses_again, gradients_again, peak_again) = run(), run()

    assert losses == losses_again
    assert largest_difference(gradients, gradients_again) == 0.0
    assert peak == peak_again


def test_the_seed_reaches_the_random_ops() -> None:
    assert run(seed=0)[0] != run(seed=1)[0]


def test_every_step_counts_a_loss_and_the_weights_move() -> None:
    """One warm-up, the timed steps, one metered step."""
    losses, _, _ = run(num_steps=3)

    assert len(losses) == 1 + 3 + 1
    assert len(set(losses)) == len(losses)


def test_gradients_are_those_of_the_first_step_and_skip_the_unused() -> None:
    _, gradients, _ = run()

    assert sorted(gradients) == ["norm.bias", "norm.weight", "weight"]
    torch.manual_seed(0)
    model = Dropped()
    model(torch.arange(1024.0).reshape(4, 256)).backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(gradients["weight"], model.weight.grad, rtol=0, atol=0)


def test_the_peak_holds_weights_inputs_activations_and_gradients() -> None:
    resident = 4 * 1024 + 5 * 1024 + 512 * 2
    _, _, peak = run()

    assert peak > resident
    assert peak % 512 == 0


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([], [], 0.0),
        ([1 + 1j], [1 + 2j], 1.0),
    ],
)
def test_largest_difference(first: list[complex], second: list[complex], difference: float) -> None:
    assert largest_difference({"w": torch.tensor(first)}, {"w": torch.tensor(second)}) == difference


def test_a_nan_is_never_hidden_by_the_other_gradients() -> None:
    wrong = {"a": torch.tensor([1.0]), "b": torch.tensor([math.nan]), "c": torch.tensor([2.0])}
    right = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "c": torch.tensor([1.0])}

    assert math.isnan(largest_difference(wrong, right))


def test_no_parameters_differ_by_nothing() -> None:
    assert largest_difference({}, {}) == 0.0
