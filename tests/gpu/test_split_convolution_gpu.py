"""The two gradients of a convolution, each by a call of its own: cuDNN computes the same bits."""

from __future__ import annotations

import pytest
import torch

from fxhome.passes.split_convolution import undoing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("side", "kernel", "stride", "padding", "dilation", "groups"),
    [(56, 3, 1, 1, 1, 1), (56, 1, 1, 0, 1, 1), (57, 3, 2, 1, 1, 1), (56, 3, 1, 2, 2, 1), (28, 3, 1, 1, 1, 4)],
)
def test_gradients_are_bitwise_what_one_call_gives(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    layout: torch.memory_format,
    side: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = torch.randn(16, 64, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
    weight = torch.randn(128, 64 // groups, kernel, kernel, device="cuda", dtype=dtype).to(memory_format=layout)
    how = ([stride] * 2, [padding] * 2, [dilation] * 2)
    result = torch.ops.aten.convolution(x, weight, None, *how, False, [0, 0], groups)
    gradient = torch.randn_like(result)
    whole = (gradient, x, weight, [0], *how, False, [0, 0], groups)
    of_input, of_weight, _ = torch.ops.aten.convolution_backward(*whole, [True, True, False])
    _, weight_alone, _ = torch.ops.aten.convolution_backward(*whole, [False, True, False])
    back = undoing(result.shape[2:], x.shape[2:], [kernel] * 2, settings=how)
    input_alone = torch.ops.aten.convolution(gradient, weight, None, *back[:3], True, back[3], groups)
    assert torch.equal(weight_alone, of_weight)
    assert torch.equal(input_alone, of_input)
    assert input_alone.stride() == of_input.stride()
