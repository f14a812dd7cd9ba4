"""Freed buffers are kept for later ones of their size where the graph's peak has room for them, and nowhere else."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.lowered_buffers import LoweredBuffers
from fxhome.passes.reused_buffers import NEAR_KERNELS, Room, buffers_used_again
from tests.graph_tools import written_code

LARGE_BYTES = SMALL_BYTES + 1


@given(
    curve=st.lists(st.integers(0, 50), min_size=2, max_size=12),
    wishes=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 11), st.integers(0, 11)), max_size=20),
)
def test_what_is_kept_never_raises_the_peak(curve: list[int], wishes: list[tuple[int, int, int]]) -> None:
    room = Room(curve)
    alive = list(curve)
    for size, one, other in wishes:
        first, last = sorted((one % len(curve), other % len(curve)))
        fits = all(alive[kernel] + size <= max(curve) for kernel in range(first + 1, last))
        assert room.keep(size, first, last) is fits
        for kernel in range(first + 1, last) if fits else ():
            alive[kernel] += size
        assert max(alive) == max(curve)


def test_a_large_buffer_is_kept_for_a_near_heir_only() -> None:
    room = Room([10 * LARGE_BYTES] + [0] * 20)
    assert room.keep(SMALL_BYTES, 0, 20)
    assert room.keep(LARGE_BYTES, 0, NEAR_KERNELS)
    assert not room.keep(LARGE_BYTES, 0, NEAR_KERNELS + 1)


@dataclass
class Measured:
    """A scheduler pass that changes nothing and leaves the room that a graph has."""

    has_room: bool = True
    room_everywhere: bool = False
    knows_buffers: bool = True
    room: Room | None = None
    peak_bytes: int = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        buffers = LoweredBuffers(nodes, {})
        curve, _ = buffers.curve(nodes)
        self.peak_bytes = max(curve)
        counted = (
            [0, *curve] if not self.has_room else [0] * (len(curve) - 1) + [1 << 40] if self.room_everywhere else curve
        )
        self.room = Room(counted, V.graph, buffers.by_name if self.knows_buffers else ())
        return nodes

    def uuid(self) -> None:
        """Never cached."""
        return None


def code_of(function: Any, inputs: tuple[torch.Tensor, ...], measured: Measured) -> str:
    """The code that Inductor writes, buffers used again."""
    settings = {"allow_buffer_reuse": True, "reorder_for_peak_memory": False}
    with buffers_used_again(lambda: measured.room):
        return written_code(function, *inputs, scheduler_pass=measured, inplace=True, **settings)


def peak_of(code: str) -> int:
    """Bytes of float32 buffers alive at the worst moment of generated code."""
    alive: dict[str, int] = {}
    peak = 0
    for line in code.splitlines():
        if made := re.match(r"\s+(buf\d+) = empty_strided_cpu\((\(.*?\)), ", line):
            alive[made[1]] = 4 * math.prod(ast.literal_eval(made[2]))
        elif again := re.match(r"\s+(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)[,;].*del \2  # reuse", line):
            alive[again[1]] = alive.pop(again[2])
        elif dropped := re.match(r"\s+del (buf\d+)$", line):
            del alive[dropped[1]]
        peak = max(peak, sum(alive.values()))
    return peak


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(64, 64), torch.randn(64, 64) / 8, torch.randn(64, 512) / 8


def chained(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Products of one size, each freed as the next but one is made."""
    for _ in range(6):
        x = x @ w
    return x


def apart(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """A buffer of (64, 64) is freed before the worst moment, and another one is made behind it."""
    key = (x @ w).sum(1, keepdim=True)
    return (key * wide) @ (wide.t() @ wide) @ wide.t()


@pytest.mark.slow
def test_buffers_of_one_size_take_turns() -> None:
    measured = Measured()
    code = code_of(chained, inputs(), measured)
    assert code.count("# reuse") == 4
    assert code.count("= empty_strided_cpu(") == 2
    assert measured.peak_bytes == 2 * 64 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize("function", [chained, apart])
def test_what_is_written_holds_what_was_counted(function: Any) -> None:
    measured = Measured()
    code = code_of(function, inputs(), measured)
    assert peak_of(code) == measured.peak_bytes
    assert peak_of(code_of(function, inputs(), Measured(has_room=False))) == measured.peak_bytes


@pytest.mark.slow
def test_nothing_is_kept_through_the_worst_moment() -> None:
    tight, eager = Measured(), Measured(room_everywhere=True)
    kept, kept_eagerly = (code_of(apart, inputs(), measured) for measured in (tight, eager))
    assert kept.count("# reuse") < kept_eagerly.count("# reuse")
    assert peak_of(kept) == tight.peak_bytes < peak_of(kept_eagerly)


@pytest.mark.slow
def test_where_the_kernels_are_others_than_those_counted_nothing_is_kept() -> None:
    assert "# reuse" not in code_of(chained, inputs(), Measured(has_room=False))


@pytest.mark.slow
def test_what_was_not_counted_is_not_kept() -> None:
    assert "# reuse" not in code_of(chained, inputs(), Measured(knows_buffers=False))


@pytest.mark.slow
def test_inductor_is_left_as_it_was() -> None:
    from torch._inductor.codegen.wrapper import AllocateLine

    before = AllocateLine.should_reuse_buffer
    with contextlib.suppress(KeyError), buffers_used_again(lambda: None):
        assert AllocateLine.should_reuse_buffer is not before
        raise KeyError
    assert AllocateLine.should_reuse_buffer is before
