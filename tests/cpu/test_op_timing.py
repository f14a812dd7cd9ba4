"""Timing runs real operators on tensors of its own: recorded layouts, nothing of the process is touched."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxhome.passes.op_timing import OpTiming, example, example_bytes, outside_tracing, time_op
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
