"""What Inductor takes apart on a GPU and leaves whole on a CPU, for graphs that are traced on one and planned for the
other.

    convolution_backward(gy, x, w) with a bias     its bias gradient is a sum over gy, which kernels around it take in
    mm, addmm over an inner size of 1              a product that broadcasts, and no call of a library
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.decomposition import decompositions

aten = torch.ops.aten


def gpu_decompositions() -> dict[Any, Callable[..., Any]]:
    """By operator, to be laid over Inductor's own table."""
    return {
        aten.convolution_backward.default: _convolution_backward,
        aten.mm.default: _mm,
        aten.addmm.default: _addmm,
    }


def _convolution_backward(
    output: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, *settings: Any
) -> Any:
    *others, (wants_input, wants_weight, wants_bias) = settings
    if not wants_bias:
        return NotImplemented
    bias = aten.sum(output, [0, *range(2, output.dim())])
    mask = [wants_input, wants_weight, False]
    of_input, of_weight, _ = aten.convolution_backward(output, source, weight, bias_sizes, *others, mask)
    return of_input, of_weight, bias


def _is_outer(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape[1] == 1 and left.shape[0] != 1 and right.shape[1] != 1


def _mm(left: torch.Tensor, right: torch.Tensor, *more: Any, **settings: Any) -> Any:
    if _is_outer(left, right) and not more and not settings:
        return left * right
    return _otherwise(aten.mm.default, left, right, *more, **settings)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **settings: Any) -> Any:
    if _is_outer(left, right) and settings.get("beta", 1) != 0:
        return settings.get("alpha", 1) * (left * right) + settings.get("beta", 1) * bias
    return _otherwise(aten.addmm.default, bias, left, right, **settings)


def _otherwise(target: Any, *args: Any, **settings: Any) -> Any:
    """As for a CPU."""
    return decompositions[target](*args, **settings) if target in decompositions else NotImplemented
