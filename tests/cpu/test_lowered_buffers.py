"""What the scheduler's buffers say is allocated, against the allocations of the code that Inductor then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.passes.lowered_buffers import LoweredBuffers, LoweredPeak, _extent_bytes
from fxhome.runtime import ops
from tests.graph_tools import written_code

N = 64


class Recorder:
    """A scheduler pass that changes nothing and keeps what is counted."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.peak = LoweredPeak(0, 0, "")

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        self.made |= {buffer.name for buffer in buffers.buffers if buffer.maker is not None}
        self.sizes |= {buffer.name: buffer.size_bytes for buffer in buffers.buffers}
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


def joined_late(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The first half of a concatenation is made before two large buffers, the second from them."""
    first = torch.sin(x @ w)
    second = torch.exp(first @ wide) @ wide.t()
    joined = torch.cat([first, torch.tanh(second)], 1)
    return joined @ joined.t()


def test_a_concatenation_is_allocated_with_its_first_part() -> None:
    counted, written, peak = lowered(joined_late, torch.randn(N, N), torch.randn(N, N), torch.randn(N, 8 * N))
    assert counted == written
    large_bytes, joined_bytes = 4 * N * 8 * N, 4 * N * 2 * N
    assert peak.peak_bytes == 2 * large_bytes + joined_bytes


def padded(x: torch.Tensor) -> torch.Tensor:
    """Rows of 1100 elements that are written, and read the other way round."""
    y = torch.exp(x) - x.sum(0, keepdim=True)
    return torch.cumsum(y, 0).sum(0) + torch.cumsum(y, 1).sum(0)


def test_padded_rows_are_counted_as_they_are_allocated() -> None:
    recorder = Recorder()
    with torch._inductor.config.patch(disable_padding_cpu=False):
        code = written_code(padded, torch.randn(512, 1100), scheduler_pass=recorder, inplace=False)
    extents = {}
    for name, size, stride in re.findall(
        r"^ *(buf\d+) = empty_strided_cpu\(\((.*?)\), \((.*?)\), ", code, re.MULTILINE
    ):
        lengths, steps = ([int(n) for n in text.split(",") if n.strip()] for text in (size, stride))
        extents[name] = 4 * (1 + sum((n - 1) * step for n, step in zip(lengths, steps, strict=True)))
    assert max(extents.values()) > 4 * 512 * 1100
    assert {name: recorder.sizes[name] for name in extents} == extents


def test_what_is_written_into_another_buffer_has_no_memory_of_its_own() -> None:
    """Its layout has the size of a view and the strides of what is viewed: no extent can be read from them."""
    layout = object.__new__(ir.MutationLayoutSHOULDREMOVE)
    layout.size, layout.stride, layout.dtype = [256, 1024], [1], torch.float32
    assert _extent_bytes(SimpleNamespace(get_output_spec=lambda: layout)) == 0
