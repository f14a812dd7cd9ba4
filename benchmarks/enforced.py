"""A budget that is enforced: the smallest one that fxhome names, and the cap under which the allocator is put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fxhome
from fxhome.backend import fxhome as backend


def smallest_budget(model: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """The smallest budget in bytes that fxhome names when it refuses an impossible one. options: all others."""
    try:
        torch.compile(model, backend=backend, options={**options, "memory_budget": "1MiB"})(*inputs)
    except fxhome.InfeasibleBudgetError as error:
        return error.minimum_bytes or 0
    raise AssertionError("a budget of 1 MiB was accepted")


def cap_allocator(cap_bytes: int | None) -> None:
    """Give everything cached back, and set what the allocator of a CUDA device may take from here on; None: all."""
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap_bytes is None else min(1.0, cap_bytes / total_bytes))
