"""What is said to be written over its operand, against the code that Inductor then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxhome.passes.lowered_buffers import LoweredBuffers
from tests.graph_tools import written_code

N = 64


class Recorder:
    """A scheduler pass that changes nothing and keeps what is written in place, and the peak."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self.peak_bytes = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        self.pairs |= {(t.result, t.operand) for t in buffers.spans.taken(nodes)}
        self.peak_bytes = max(self.peak_bytes, buffers.peak(nodes).peak_bytes)
        return nodes

    def uuid(self) -> None:
        """Never cached."""
        return None


def lowered(
    function: Callable[..., Any], *inputs: torch.Tensor, inplace: bool = True
) -> tuple[set[tuple[str, str]], set[tuple[str, str]], int]:
    """((result, operand) pairs found, pairs in the written code, peak bytes)."""
    recorder = Recorder()
    code = written_code(function, *inputs, scheduler_pass=recorder, inplace=inplace)
    written = re.findall(r"(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b.*# reuse", code)
    return recorder.pairs, set(written), recorder.peak_bytes


def between_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Each result of a product is read by one loop, which is read by the next product."""
    return torch.sin(torch.exp(x @ w) @ w) @ w


def read_again(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The first product is read by the loop and, later, by another product."""
    y = x @ w
    return torch.sin(y) @ w + y @ w


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The loop reads its operand at two places."""
    y = x @ w
    return (y + y.t()) @ w


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Reductions of the kernel read the operand before it is written over."""
    y = x @ w
    return ((y - y.mean(1, keepdim=True)) * y.var(1, keepdim=True)) @ w


def other_type(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The result has another size."""
    return torch.sin(x @ w).double() @ w.double()


FUNCTIONS = [between_products, read_again, transposed, normalized, other_type]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_found_is_what_the_code_does(function: Callable[..., Any]) -> None:
    found, written, _ = lowered(function, torch.randn(N, N), torch.randn(N, N))
    assert found <= written
    if function is not normalized:
        assert found == written


def test_what_is_written_over_its_operand_counts_once() -> None:
    def loop_behind_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ w)

    inputs = torch.randn(N, N), torch.randn(N, N)
    found, _, peak_bytes = lowered(loop_behind_product, *inputs)
    assert len(found) == 1
    assert peak_bytes == N * N * 4
    _, _, apart_bytes = lowered(loop_behind_product, *inputs, inplace=False)
    assert apart_bytes == 2 * N * N * 4


def test_an_operand_that_is_read_later_is_not_written_over() -> None:
    found, _, _ = lowered(read_again, torch.randn(N, N), torch.randn(N, N))
    assert not any(operand == "buf0" for _, operand in found)


def test_without_inductors_setting_nothing_is_found() -> None:
    found, written, _ = lowered(between_products, torch.randn(N, N), torch.randn(N, N), inplace=False)
    assert found == written == set()
