"""Train a few steps and measure them: what `fxhome run` does both with and without a plan."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxhome.progress import progress
from fxhome.runtime.meter import StorageMeter, measure_cuda

_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Training:
    """What a few training steps showed."""

    peak_bytes: int
    """Allocated bytes at the worst moment of forward and backward."""
    reserved_bytes: int | None
    """What the caching allocator held for it; None where there is none (CPU)."""
    step_seconds: float
    """Median over the timed steps, forward and backward."""
    losses: tuple[float, ...]
    """One per step, the untimed first one included."""


def train(
    step: Callable[..., torch.Tensor],
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    num_steps: int,
    seed: int,
    device: torch.device,
    title: str,
    gradients_path: Path,
) -> Training:
    """Run one warm-up, `num_steps` timed steps and one metered step; write the first step's gradients to a file.

    They go to a file because tensors that were kept would count as resident memory in every step after the first.

    `step(*inputs)` gives the scalar loss of `model`, or of what was compiled from it. The optimizer is plain SGD, which
    holds no state; it runs outside the timed and metered part, as in the promise of a plan. Random ops see the same
    seeds in every run.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    losses: list[float] = []
    seconds: list[float] = []

    def forward_backward() -> None:
        torch.manual_seed(seed + len(losses))
        loss = step(*inputs)
        loss.backward()
        losses.append(loss.item())

    with progress(title, total=num_steps + 2) as advance:
        for index in range(num_steps + 1):
            optimizer.zero_grad(set_to_none=True)
            started = _now(device)
            forward_backward()
            if index:
                seconds.append(_now(device) - started)
            else:
                _save_gradients(model, gradients_path)
            optimizer.step()
            advance()
        optimizer.zero_grad(set_to_none=True)
        peak_bytes, reserved_bytes = _measure(forward_backward, model, inputs, device)
        advance()
    return Training(
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        step_seconds=statistics.median(seconds),
        losses=tuple(losses),
    )


def largest_difference(first_path: Path, second_path: Path) -> float:
    """The largest absolute difference between two files of gradients with the same names; nan when one holds a nan."""
    first, second = (torch.load(path, mmap=True, map_location="cpu") for path in (first_path, second_path))
    assert first.keys() == second.keys()
    differences = [_difference(first[name], second[name]) for name in first]
    # max() would drop a nan that is not the first value.
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    # Complex gradients compare by modulus; half precision is subtracted in a type that can hold the difference.
    wide = torch.complex128 if first.is_complex() else torch.float64
    return (first.to(wide) - second.to(wide)).abs().max().item() if first.numel() else 0.0


def _save_gradients(model: nn.Module, path: Path) -> None:
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    torch.save({name: gradient for name, gradient in named if gradient is not None}, path)


def _measure(
    forward_backward: Callable[[], None], model: nn.Module, inputs: tuple[Any, ...], device: torch.device
) -> tuple[int, int | None]:
    """Peak of one step in allocated bytes, and in reserved bytes where an allocator reserves any."""
    if device.type == "cuda":
        with measure_cuda(device) as peak:
            forward_backward()
        return peak.allocated_bytes, peak.reserved_bytes
    # Exact bytes, as a plan for a CPU counts them.
    with StorageMeter(granule_bytes=1) as meter:
        meter.track([*model.parameters(), *model.buffers()])
        meter.track(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        forward_backward()
    return meter.peak_bytes, None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
