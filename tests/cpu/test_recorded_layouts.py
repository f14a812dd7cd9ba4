"""Inductor lays out what is moved as the graph records it, where it is free to choose."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import ir, lowering
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode

from fxhome.passes.inductor_check import laid_out_otherwise
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.recorded_layouts import channels_last_kept, keep_recorded_layouts
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import SWAP, simulate
from fxhome.passes.torch_compat import NOT_PADDED
from fxhome.runtime import ops
from tests.graph_tools import normalized, placed, problem_of

SHAPE = (2, 8, 8, 8)
CHANNELS_LAST = (512, 1, 64, 8)


class Seen(BaseException):
    """Ends the lowering with the strides of what is moved."""


class Recorder:
    """A scheduler pass that stops at the moved buffer's layout."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if getattr(node.node, "op_overload", None) is ops.swap_out:
                raise Seen(tuple(int(step) for step in node.node.inputs[0].get_stride()))
        raise AssertionError("nothing is moved")

    def uuid(self) -> None:
        """Never cached."""
        return None


def added(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call at the end of a graph, with its fake value."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda argument: argument.meta["val"]))
    return node


def moved_late(*, is_marked: bool) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A mask with rows of 1100 bytes that the backward still holds while it is moved."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 3, 1100)
        mask = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0.0))
        mask.meta["val"] = torch.ops.aten.gt.Scalar(x.meta["val"], 0.0)
        if is_marked:
            mask.meta[NOT_PADDED] = True
        host = graph.call_function(ops.swap_out, (mask,))
        host.meta["val"] = ops.swap_out(mask.meta["val"])
        graph.output((host, mask))
        return fx.GraphModule({}, graph), [x.meta["val"]]


def moved_mask(*, first_is_last: bool) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A comparison of a contiguous and a channels-last image, moved: recorded in the layout of its first operand."""
    graph = fx.Graph()
    call = functools.partial(added, graph)
    with FakeTensorMode():
        plain, last = graph.placeholder("plain"), graph.placeholder("last")
        plain.meta["val"] = torch.empty(SHAPE)
        last.meta["val"] = torch.empty(SHAPE).to(memory_format=torch.channels_last)
        pair = (last, plain) if first_is_last else (plain, last)
        mask = call(torch.ops.aten.le.Tensor, *pair)
        graph.output((call(ops.swap_out_wait, call(ops.swap_out, mask), mask),))
        return fx.GraphModule({}, graph), [plain.meta["val"], last.meta["val"]]


class Checked(Recorder):
    """Stops with what the check finds, the mask's recorded strides being `recorded`."""

    def __init__(self, recorded: tuple[int, ...]) -> None:
        self.recorded = recorded

    def __call__(self, nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if getattr(node.node, "op_overload", None) is ops.swap_out:
                (origin,) = [one for one in node.node.get_origins() if one.target is ops.swap_out]
                origin.meta["fxhome_source"] = "mask"
                origin.args[0].meta["val"] = torch.empty_strided(SHAPE, self.recorded, device="meta")
        raise Seen(laid_out_otherwise(nodes))


@pytest.mark.parametrize(("recorded", "expected"), [(CHANNELS_LAST, set()), ((512, 64, 8, 1), {"mask"})])
def test_what_lies_otherwise_is_named(recorded: tuple[int, ...], expected: set[str]) -> None:
    keep_recorded_layouts()
    module, inputs = moved_mask(first_is_last=True)
    patches = {"_post_fusion_custom_pass": Checked(recorded), "fx_graph_cache": False, "layout_optimization": False}
    with torch._inductor.config.patch(patches), pytest.raises(Seen) as found:
        compile_fx_inner(module, inputs)
    assert found.value.args[0] == expected


def moved_strides(module: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """The strides in which Inductor writes the mask."""
    patches = {
        "_post_fusion_custom_pass": Recorder(),
        "fx_graph_cache": False,
        "layout_optimization": False,
        "disable_padding_cpu": False,
    }
    with torch._inductor.config.patch(patches), pytest.raises(Seen) as found:
        compile_fx_inner(module, inputs)
    strides: tuple[int, ...] = found.value.args[0]
    return strides


def test_an_open_layout_is_closed_as_recorded() -> None:
    keep_recorded_layouts()
    closed = lowering.lowerings[ops.swap_out]
    keep_recorded_layouts()
    assert lowering.lowerings[ops.swap_out] is closed
    assert moved_strides(*moved_mask(first_is_last=True)) == CHANNELS_LAST
    assert moved_strides(*moved_mask(first_is_last=False)) == (512, 64, 8, 1)


class Layouts:
    """A scheduler pass that stops with the strides of all buffers of four dimensions."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        layouts = [node.node.get_layout() for node in nodes]
        raise Seen([tuple(int(step) for step in layout.stride) for layout in layouts if len(layout.size) == 4])

    def uuid(self) -> None:
        """Never cached."""
        return None


def joined_strides(*, are_parts_made: bool, is_kept: bool) -> list[tuple[int, ...]]:
    """Strides of what Inductor writes for a pooled concatenation of channels-last images, the pooled one last.

    are_parts_made: the parts are images that are pooled as well, and what that gives; else they are computed for it.
    """
    graph = fx.Graph()
    call = functools.partial(added, graph)

    def pooled(image: fx.Node, stride: int, padding: int) -> fx.Node:
        both = call(torch.ops.aten.max_pool2d_with_indices.default, image, [3, 3], [stride] * 2, [padding] * 2)
        return call(operator.getitem, both, 0)

    with FakeTensorMode():
        images = [graph.placeholder("a"), graph.placeholder("b")]
        for image in images:
            image.meta["val"] = torch.empty(SHAPE).to(memory_format=torch.channels_last)
        parts = [call(torch.ops.aten.relu.default, image) for image in images]
        if are_parts_made:
            parts += [pooled(part, 1, 1) for part in parts]
        graph.output((pooled(call(torch.ops.aten.cat.default, parts, 1), 2, 0),))
    patches = {
        "_post_fusion_custom_pass": Layouts(),
        "fx_graph_cache": False,
        "layout_optimization": False,
        "force_pointwise_cat": not are_parts_made,
    }
    kept = channels_last_kept() if is_kept else contextlib.nullcontext()
    with torch._inductor.config.patch(patches), kept, pytest.raises(Seen) as found:
        compile_fx_inner(fx.GraphModule({}, graph), [image.meta["val"] for image in images])
    strides: list[tuple[int, ...]] = found.value.args[0]
    return strides


def test_what_its_reads_tell_nothing_of_stays_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concatenated row by row, channels-last images are written across, and read across by what pools them."""
    # Torch 2.11 cannot see through a concatenation's reads; later versions can.
    monkeypatch.setattr(ir.ComputedBuffer, "get_fill_order", lambda buffer: [3, 2, 1, 0])
    assert joined_strides(are_parts_made=False, is_kept=False)[0] == (1024, 64, 8, 1)
    assert joined_strides(are_parts_made=False, is_kept=True)[0] == (1024, 1, 128, 16)


def test_parts_lie_in_their_concatenation_channels_last() -> None:
    """Parts that are made already, in no layout yet, are bound to the concatenation's: nothing is copied once more."""
    before = ir.FlexibleLayout.contiguous_strides
    across = joined_strides(are_parts_made=True, is_kept=False)
    assert across[:-1] == [(2048, 64, 8, 1)] * 5
    kept = joined_strides(are_parts_made=True, is_kept=True)
    assert kept[:-1] == [(2048, 1, 256, 32)] * 5
    assert ir.FlexibleLayout.contiguous_strides is before


@pytest.mark.parametrize(("is_marked", "strides"), [(False, (3456, 1152, 1)), (True, (3300, 1100, 1))])
def test_rows_of_what_is_moved_are_not_padded(is_marked: bool, strides: tuple[int, ...]) -> None:
    keep_recorded_layouts()
    assert moved_strides(*moved_late(is_marked=is_marked)) == strides


def test_what_a_plan_moves_or_encodes_is_marked() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin().exp().sum()

    module, outputs = normalized(step, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)))
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, SWAP)
    program = schedule(facts, placement, simulate(problem, placement, 1 << 40))
    moved = {item.target for item in program if item.kind == "swap_out"}
    forward, _ = insert_transfers(*partition(module, program, outputs), program, outputs, {})
    assert moved
    assert {
        node.name for node in forward.graph.nodes if NOT_PADDED in node.meta and not node.meta.get("fxhome_host")
    } >= moved
