"""The measured training loop that both columns of `fxhome run` come from."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fxhome.runtime.meter import resident_tensors
from fxhome.train_steps import Training, largest_difference, train

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


def run(path: Path, num_steps: int = 2, seed: int = 0) -> Training:
    torch.manual_seed(0)
    model = Dropped()
    inputs = (torch.arange(1024.0).reshape(4, 256),)
    return train(model, model, inputs, num_steps=num_steps, seed=seed, device=CPU, title="x", gradients_path=path)


def test_two_runs_are_bitwise_equal_random_ops_included(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first.pt"), run(tmp_path / "second.pt")

    assert first.losses == second.losses
    assert first.peak_bytes == second.peak_bytes
    assert largest_difference(tmp_path / "first.pt", tmp_path / "second.pt") == 0.0


def test_the_seed_reaches_the_random_ops(tmp_path: Path) -> None:
    assert run(tmp_path / "a.pt", seed=0).losses != run(tmp_path / "b.pt", seed=1).losses


def test_every_step_counts_a_loss_and_the_weights_move(tmp_path: Path) -> None:
    """One warm-up, the timed steps, one metered step."""
    training = run(tmp_path / "a.pt", num_steps=3)

    assert len(training.losses) == 1 + 3 + 1
    assert len(set(training.losses)) == len(training.losses)
    assert training.step_seconds > 0
    assert training.reserved_bytes is None


def test_gradients_are_those_of_the_first_step_and_skip_the_unused(tmp_path: Path) -> None:
    run(tmp_path / "a.pt")

    gradients = torch.load(tmp_path / "a.pt")
    assert sorted(gradients) == ["norm.bias", "norm.weight", "weight"]
    torch.manual_seed(0)
    model = Dropped()
    model(torch.arange(1024.0).reshape(4, 256)).backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(gradients["weight"], model.weight.grad, rtol=0, atol=0)


def test_the_peak_holds_weights_inputs_and_activations(tmp_path: Path) -> None:
    weights, buffers, batch = 3 * 1024 + 512, 2 * 1024 + 512, 4 * 1024
    peak = run(tmp_path / "a.pt").peak_bytes

    # The batch, and at least two activations of its size.
    assert weights + buffers + 3 * batch <= peak


def test_no_tensor_is_left_behind(tmp_path: Path) -> None:
    """On CPU fxhome counts every live tensor as resident: a kept gradient would make it plan again."""
    before = len(resident_tensors())
    run(tmp_path / "a.pt")
    gc.collect()

    assert len(resident_tensors()) <= before


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([], [], 0.0),
        ([1 + 1j], [1 + 2j], 1.0),
    ],
)
def test_largest_difference(tmp_path: Path, first: list[complex], second: list[complex], difference: float) -> None:
    assert differ(tmp_path, {"w": torch.tensor(first)}, {"w": torch.tensor(second)}) == difference


def differ(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    torch.save(first, folder / "first.pt")
    torch.save(second, folder / "second.pt")
    return largest_difference(folder / "first.pt", folder / "second.pt")


def test_a_nan_is_never_hidden_by_the_other_gradients(tmp_path: Path) -> None:
    wrong = {"a": torch.tensor([1.0]), "b": torch.tensor([math.nan]), "c": torch.tensor([2.0])}
    right = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "c": torch.tensor([1.0])}

    assert math.isnan(differ(tmp_path, wrong, right))


def test_no_parameters_differ_by_nothing(tmp_path: Path) -> None:
    assert differ(tmp_path, {}, {}) == 0.0
