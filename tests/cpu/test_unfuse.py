"""Kernels that only share an input come apart, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import custom_graph_pass

from fxhome.passes.inductor_check import _respect_dependencies, _unpackers
from fxhome.passes.unfuse import come_apart, independent_parts

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class Apart(_Pass):  # type: ignore[misc]
    """Takes every kernel apart that can be."""

    def __init__(self) -> None:
        self.kernels: list[int] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.kernels.append(len(nodes))
        while True:
            splittable = [i for i, node in enumerate(nodes) if len(independent_parts(node)) > 1]
            if not splittable:
                break
            split = come_apart(nodes, splittable[0])
            assert split is not None
            nodes = _respect_dependencies(split, split, _unpackers(split))
        self.kernels.append(len(nodes))
        return nodes

    def uuid(self) -> Any:
        return None


def compiled_apart(function: Any, *args: torch.Tensor) -> tuple[Any, list[int]]:
    apart = Apart()
    torch._dynamo.reset()
    with torch._inductor.config.patch(_post_fusion_custom_pass=apart, fx_graph_cache=False):
        found = torch.compile(function, dynamic=False)(*args)
    return found, apart.kernels


def test_loops_that_share_an_input_come_apart_and_compute_the_same() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = x @ w
        return torch.nn.functional.gelu(x) @ w, (torch.sin(x) * g) @ w

    x, w = torch.randn(64, 64), torch.randn(64, 64)

    found, (before, after) = compiled_apart(function, x, w)

    assert after > before
    torch.testing.assert_close(found, function(x, w))


def test_loops_between_which_something_flows_stay_together() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.exp(x)
        return y, torch.sin(y) + 1

    x = torch.randn(64, 64)

    found, (before, after) = compiled_apart(function, x)

    assert after == before
    torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize("node", [object()])
def test_what_is_no_fused_kernel_is_one_part(node: object) -> None:
    assert independent_parts(node) == [[node]]
