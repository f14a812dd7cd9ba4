"""What the scheduler's buffers say is allocated, against the allocations of the code that Inductor then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.passes.lowered_buffers import LoweredBuffers, LoweredPeak
from fxhome.runtime import ops
from tests.graph_tools import written_code

N = 64


class Recorder:
    """A scheduler pass that changes nothing and keeps what is counted."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.peak = LoweredPeak(0, 0, "")

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        self.made |= {buffer.name for buffer in buffers.buffers if buffer.maker is not None}
        self.peak = buffers.peak(nodes)
        return nodes

    def uuid(self) -> None:
        """Never cached."""
        return None


def lowered(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[set[str], set[str], LoweredPeak]:
    """(buffers counted, buffers that the written code allocates, counted peak)."""
    recorder = Recorder()
    code = written_code(function, *inputs, scheduler_pass=recorder, inplace=False)
    written = set(re.findall(r"^\s*(buf\d+) = empty_strided", code, re.MULTILINE))
    return recorder.made, written, recorder.peak


def two_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is made between two products is written once, by one kernel."""
    return torch.sin(torch.relu(x @ w) * 2.0) @ w


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A reduction whose result is needed by a second pass over what the first one made."""
    y = torch.exp(x @ w)
    z = (y - y.mean(1, keepdim=True)) * torch.rsqrt(y.var(1, keepdim=True) + 1e-5)
    return z @ w


def read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An exponential with two readers is a loop of its own, fused with both readers and read by nothing else."""
    y = torch.exp(x + w)
    return (torch.sin(y) + y.abs()) @ w


@pytest.mark.parametrize("function", [two_products, normalized])
def test_what_is_counted_is_what_is_allocated(function: Callable[..., Any]) -> None:
    counted, written, _ = lowered(function, torch.randn(N, N), torch.randn(N, N))
    assert written <= counted
    if function is not normalized:
        assert counted - written == set()


def test_what_one_fused_kernel_makes_for_itself_takes_no_memory() -> None:
    counted, written, peak = lowered(read_twice, torch.randn(N, N), torch.randn(N, N))
    assert counted == written
    # Its readers' result and the product: the exponential itself is nowhere.
    assert [size for name, size in peak.holders if name.startswith("buf")] == [4 * N * N] * 2


def reloaded(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    """A product that goes to the host, comes back and is read."""
    y = x @ w
    host = ops.swap_out_wait(ops.swap_out(y), y)
    back = ops.swap_in(host, [N, N], [N, 1], 0, torch.float32, torch.device("cpu"))
    return (ops.swap_in_wait(back, host) @ w,)


def test_what_comes_back_is_not_counted_again_as_what_its_wait_returns() -> None:
    inputs, recorder = [torch.randn(N, N), torch.randn(N, N)], Recorder()
    # Transfers are inserted behind functionalization: so is this graph.
    module = make_fx(reloaded, tracing_mode="fake")(*inputs)
    with torch._inductor.config.patch(_post_fusion_custom_pass=recorder, fx_graph_cache=False), torch.no_grad():
        compile_fx_inner(module, inputs)
    # The product, what came back, and the product with that.
    assert len(recorder.made) == 3
