"""A concatenation of what is written already is written at once, and computes the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fxhome import inductor_graphs
from fxhome.passes.inductor_check import OverLimitError, ScheduleCheck
from fxhome.passes.lowered_buffers import LoweredBuffers, LoweredPeak
from fxhome.passes.whole_concatenations import MAX_PARTS, concatenations_kept_whole
from tests.graph_tools import written_code

N = 64
LARGE_BYTES, PART_BYTES = 4 * N * 8 * N, 4 * N * N


class Recorder:
    """A scheduler pass that changes nothing and keeps what is counted."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.peak = LoweredPeak(0, 0, "")
        self.whole_of: dict[str, str] = {}

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        self.made = {buffer.name for buffer in buffers.buffers if buffer.maker is not None}
        self.peak, self.whole_of = buffers.peak(nodes), buffers.whole_of
        return nodes

    def uuid(self) -> None:
        """Never cached."""
        return None


def lowered(function: Callable[..., Any], *inputs: torch.Tensor, whole: bool) -> tuple[Recorder, str]:
    """What is counted and the code that is written."""
    recorder = Recorder()
    with concatenations_kept_whole() if whole else contextlib.nullcontext():
        return recorder, written_code(function, *inputs, scheduler_pass=recorder, inplace=False)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, N), torch.randn(N, N) / N, torch.randn(N, 8 * N) / N


def joined_late(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The first half is made before two large buffers, the second from them."""
    first = torch.sin(x @ w)
    second = torch.exp(first @ wide) @ wide.t()
    joined = torch.cat([first, torch.tanh(second)], 1)
    return joined @ joined.t()


def joined_twice(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The inner concatenation is a part of the outer one."""
    first = torch.sin(x @ w)
    inner = torch.cat([first, torch.tanh(first @ w)], 1)
    joined = torch.cat([inner, torch.exp(inner @ wide[:, : 2 * N].t())], 1)
    return joined @ joined.t()


def joined_fresh(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """No part is in memory before the concatenation is."""
    joined = torch.cat([torch.sin(x), torch.cos(x * 2)], 1)
    return joined @ joined.t()


def joined_many(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """More parts than one kernel is given, the first one written early."""
    first = torch.sin(x @ w)
    joined = torch.cat([first, *(torch.cos(x * i + (first @ w)) for i in range(MAX_PARTS))], 1)
    return joined @ joined.t()


def test_a_part_is_a_buffer_of_its_own_and_the_whole_is_there_once_it_is_complete() -> None:
    early, _ = lowered(joined_late, *inputs(), whole=False)
    late, code = lowered(joined_late, *inputs(), whole=True)
    assert early.peak.peak_bytes == 2 * LARGE_BYTES + 2 * PART_BYTES
    assert late.peak.peak_bytes == 2 * LARGE_BYTES + PART_BYTES
    assert early.whole_of
    assert not late.whole_of
    assert late.made == set(re.findall(r"^\s*(buf\d+) = empty_strided", code, re.MULTILINE))


@pytest.mark.parametrize("function", [joined_late, joined_twice])
def test_it_computes_the_same(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    with concatenations_kept_whole(), torch._inductor.config.patch(fx_graph_cache=False):
        found = torch.compile(function, backend="inductor")(*inputs())
    torch.testing.assert_close(found, function(*inputs()))


def test_a_concatenation_that_is_a_part_is_read_whole_too() -> None:
    assert not lowered(joined_twice, *inputs(), whole=True)[0].whole_of


@pytest.mark.parametrize("function", [joined_fresh, joined_many])
def test_what_has_no_part_yet_or_too_many_is_left_to_inductor(function: Callable[..., Any]) -> None:
    left, code = lowered(function, *inputs(), whole=True)
    stock, stock_code = lowered(function, *inputs(), whole=False)
    assert left.whole_of == stock.whole_of != {}
    assert left.peak.peak_bytes == stock.peak.peak_bytes
    assert code.count("cpp_fused") == stock_code.count("cpp_fused")


def test_the_hook_is_gone_behind_it() -> None:
    from torch._inductor import ir

    before = ir.ConcatKernel.__dict__["create"]
    with concatenations_kept_whole():
        assert ir.ConcatKernel.__dict__["create"] is not before
    assert ir.ConcatKernel.__dict__["create"] is before


@pytest.mark.parametrize("has_parts", [True, False])
def test_a_plan_over_its_limit_is_lowered_once_more_where_a_concatenation_is_allocated_early(
    has_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ScheduleCheck] = []

    def lower(*given: Any, closely: bool) -> str:
        seen.append(given[-1])
        if not seen[-1].keeps_concatenations_whole:
            seen[-1].has_parts = has_parts
            raise OverLimitError(LoweredPeak(1 << 20, 0, "op1"), is_backward=True)
        return "lowered"

    def check_for(*_: Any, closely: bool, keeps_concatenations_whole: bool = False) -> ScheduleCheck:
        return ScheduleCheck((), {}, 0, 0, keeps_concatenations_whole=keeps_concatenations_whole)

    monkeypatch.setattr(inductor_graphs, "_lower_and_check", lower)
    monkeypatch.setattr(inductor_graphs, "check_for", check_for)
    graph, plan, situation = (cast(Any, None) for _ in range(3))
    if has_parts:
        assert cast(Any, inductor_graphs.lower_and_check(graph, [], plan, situation)) == "lowered"
    else:
        with pytest.raises(OverLimitError):
            inductor_graphs.lower_and_check(graph, [], plan, situation)
    assert [check.keeps_concatenations_whole for check in seen] == [False, True][: 1 + has_parts]
    assert len({check.uuid() for check in seen}) == len(seen)
