"""ZVC: reference against emulated kernel, round trips, special values, corrupted buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from tests.sim.codec_harness import (
    Encoded,
    Launch,
    activations,
    kernel_decode,
    kernel_encode,
    reference_decode,
    reference_encode,
    same_bits,
    tiled_parts_agree,
)

ZVC = codec_by_name("zvc")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool]
SIZES = [1, 7, 255, 1024, 1025, 4099]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_kernel_writes_what_the_reference_writes(dtype: torch.dtype, numel: int) -> None:
    source = activations(numel, dtype, density=0.4, special=0.1)

    encoded = kernel_encode(ZVC, source)

    assert tiled_parts_agree(ZVC, encoded, reference_encode(ZVC, source), numel, dtype)
    decoded, status = kernel_decode(ZVC, encoded, numel, dtype)
    assert status == 0
    assert same_bits(decoded, source)


@pytest.mark.parametrize(
    "launch", [Launch(1, 32), Launch(3, 256), Launch(2, 64, reverse=True), Launch(1, 64, False, 4)]
)
def test_result_does_not_depend_on_geometry_lane_order_or_alignment(launch: Launch) -> None:
    source = activations(2500, torch.float32, density=0.5)

    encoded = kernel_encode(ZVC, source, launch)

    assert tiled_parts_agree(ZVC, encoded, reference_encode(ZVC, source), 2500, torch.float32)
    assert same_bits(kernel_decode(ZVC, encoded, 2500, torch.float32, launch)[0], source)


@given(
    numel=st.integers(0, 20000),
    dtype=st.sampled_from(ZVC.dtypes),
    density=st.floats(0, 1),
    special=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_reference_round_trip_is_bitwise(
    numel: int, dtype: torch.dtype, density: float, special: float, seed: int
) -> None:
    special = 0.0 if dtype == torch.bool else special
    source = activations(numel, dtype, density=density, special=special, seed=seed)

    encoded = reference_encode(ZVC, source)

    assert same_bits(reference_decode(ZVC, encoded, numel, dtype), source)


def test_channels_last_storage_round_trips() -> None:
    source = activations(2 * 3 * 5 * 7, torch.float32, density=0.5).reshape(2, 3, 5, 7)
    source = source.to(memory_format=torch.channels_last)
    buffer = torch.zeros(ZVC.worst_case_bytes(source.numel(), source.dtype), dtype=torch.uint8)
    target = torch.empty_like(source)

    ZVC.encode(source, buffer)
    ZVC.decode(buffer, target)

    assert target.stride() == source.stride()
    assert torch.equal(target, source)


def test_strides_with_gaps_are_refused() -> None:
    source = torch.zeros(4, 8)[:, :5]
    buffer = torch.zeros(ZVC.worst_case_bytes(20, torch.float32), dtype=torch.uint8)

    with pytest.raises(CodecError, match="gaps or overlaps"):
        ZVC.encode(source, buffer)


def test_truncated_buffer_is_refused() -> None:
    buffer = torch.zeros(ZVC.worst_case_bytes(100, torch.float32) - 16, dtype=torch.uint8)

    with pytest.raises(CodecError, match="truncated"):
        ZVC.decode(buffer, torch.zeros(100))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_corrupted_head_never_reaches_outside_its_buffers(data: st.DataObject) -> None:
    """The emulated memory raises on any access outside a buffer; a changed count or header must set the status word."""
    source = activations(3000, torch.float32, density=0.5)
    encoded = kernel_encode(ZVC, source)
    layout = ZVC.layout(3000, torch.float32)
    word = data.draw(st.sampled_from([0, 1, 2, 3, 4, *range(32, 32 + 2 * layout.tiles, 2)]))
    head = encoded.head.copy()
    before = int(head.view(np.uint32)[word])
    changed = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value != before))
    head.view(np.uint32)[word] = changed

    decoded, status = kernel_decode(ZVC, Encoded(head, encoded.tail), 3000, torch.float32)

    assert status in (1, 2)
    assert decoded.numel() == 3000
    with pytest.raises(CodecError):
        reference_decode(ZVC, Encoded(head, encoded.tail), 3000, torch.float32)


def test_observed_bytes_follow_the_density() -> None:
    source = activations(1 << 16, torch.float32, density=0.25)
    encoded = reference_encode(ZVC, source)

    observed = ZVC.observed_bytes(torch.from_numpy(encoded.head), source.numel(), source.dtype)

    expected = ZVC.expected_bytes(source.numel(), source.dtype, int((source != 0).sum()) / source.numel())
    assert abs(observed - expected) <= 16 * ZVC.layout(source.numel(), source.dtype).tiles
