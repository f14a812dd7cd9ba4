"""Timing runs real operators on tensors of its own: recorded layouts, nothing of the process is touched."""

from __future__ import annotations

import importlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxhome.passes.op_timing import OpTiming, example, example_bytes, outside_tracing, time_op, wants_unit_values
from tests.graph_tools import chain, chain_inputs, normalized


def test_examples_have_the_recorded_layout_and_safe_values() -> None:
    with FakeTensorMode():
        recorded = [
            torch.empty(4, 6).t(),
            torch.empty(1, 5).expand(3, 5),
            torch.empty(0, 7),
            torch.empty(3, dtype=torch.complex64),
            torch.empty(5, dtype=torch.int64),
            torch.empty(5, dtype=torch.bool),
        ]
    made = example(recorded)
    for value, real in zip(recorded, made, strict=True):
        assert not isinstance(real, FakeTensor)
        assert (real.shape, real.stride(), real.dtype) == (value.shape, value.stride(), value.dtype)
    assert not made[4].any()  # a random index would end a CUDA context
    assert not made[5].any()
    assert made[0].std() > 0
    assert example((1, None, "text")) == (1, None, "text")


def test_values_that_may_be_probabilities_or_indices_are_from_0_to_1() -> None:
    """torchvision reads the number of an image from each box and checks it nowhere: another one is written far off."""
    importlib.import_module("torchvision")
    roi_align = torch.ops.torchvision.roi_align.default
    with FakeTensorMode():
        images, boxes = torch.empty(2, 4, 32, 32), torch.empty(600, 5)
    seen: list[torch.Tensor] = []

    def target(*args: torch.Tensor) -> None:
        seen.extend(args)

    target.namespace = roi_align.namespace  # type: ignore[attr-defined]
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("images", "boxes")]
    for node, value in zip(inputs, (images, boxes), strict=True):
        node.meta["val"] = value
    with outside_tracing(torch.device("cpu")):
        time_op(graph.call_function(target, tuple(inputs)), torch.device("cpu"))

        loss = graph.call_function(torch.ops.aten.binary_cross_entropy.default, (inputs[1], inputs[1]))
        time_op(loss, torch.device("cpu"))  # refuses what is no probability

    assert all(0 <= value.min() < value.max() <= 1 for value in seen)
    assert wants_unit_values(roi_align)
    assert not wants_unit_values(torch.ops.aten.mm.default)


def test_nothing_of_the_process_is_changed() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module, _ = normalized(chain, *chain_inputs())
    torch.set_rng_state(before)
    node = next(node for node in module.graph.nodes if node.name == "mm")
    with FakeTensorMode(), torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with outside_tracing(torch.device("cpu")):
            assert not torch.is_grad_enabled()
            real = torch.ones(2, 2) @ torch.ones(2, 2)
            assert not isinstance(real, FakeTensor)
            assert real.dtype == torch.float32
            timing = time_op(node, torch.device("cpu"))
        assert isinstance(torch.ones(2), FakeTensor)
    assert isinstance(timing, OpTiming)
    assert timing.time_us > 0
    assert timing.workspace_bytes == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_example_bytes_are_inputs_and_results() -> None:
    module, _ = normalized(chain, *chain_inputs())
    node = next(node for node in module.graph.nodes if node.name == "mm")
    assert example_bytes(node) == 4 * (64 * 32 + 32 * 32 + 64 * 32)
