"""Exponent codec: reference against emulated kernel, round trips, special values, ratio, corrupted buffers."""

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

EXPONENT = codec_by_name("exponent")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [1, 9, 255, 1024, 2049, 4100]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("special", [0.0, 0.1])
def test_kernel_writes_what_the_reference_writes(dtype: torch.dtype, numel: int, special: float) -> None:
    source = activations(numel, dtype, special=special, seed=numel)

    encoded = kernel_encode(EXPONENT, source)

    assert tiled_parts_agree(EXPONENT, encoded, reference_encode(EXPONENT, source), numel, dtype)
    decoded, status = kernel_decode(EXPONENT, encoded, numel, dtype)
    assert status == 0
    assert same_bits(decoded, source)


@pytest.mark.parametrize(
    "launch", [Launch(1, 32), Launch(3, 256), Launch(2, 64, reverse=True), Launch(1, 64, False, 4)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_does_not_depend_on_geometry_lane_order_or_alignment(launch: Launch, dtype: torch.dtype) -> None:
    source = activations(2500, dtype, density=0.9)

    encoded = kernel_encode(EXPONENT, source, launch)

    assert tiled_parts_agree(EXPONENT, encoded, reference_encode(EXPONENT, source), 2500, dtype)
    assert same_bits(kernel_decode(EXPONENT, encoded, 2500, dtype, launch)[0], source)


@given(
    numel=st.integers(0, 20000),
    dtype=st.sampled_from(DTYPES),
    density=st.floats(0, 1),
    special=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_reference_round_trip_is_bitwise(
    numel: int, dtype: torch.dtype, density: float, special: float, seed: int
) -> None:
    source = activations(numel, dtype, density=density, special=special, seed=seed)

    encoded = reference_encode(EXPONENT, source)

    assert same_bits(reference_decode(EXPONENT, encoded, numel, dtype), source)


@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300), dtype=st.sampled_from(DTYPES[:2]))
@settings(max_examples=20, deadline=None)
def test_kernel_round_trips_arbitrary_bit_patterns(bits: list[int], dtype: torch.dtype) -> None:
    source = torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(dtype)

    encoded = kernel_encode(EXPONENT, source)

    assert same_bits(kernel_decode(EXPONENT, encoded, len(bits), dtype)[0], source)


def test_normal_bf16_compresses_by_more_than_1_38() -> None:
    source = activations(1 << 20, torch.bfloat16)
    encoded = reference_encode(EXPONENT, source)

    observed = EXPONENT.observed_bytes(torch.from_numpy(encoded.head), source.numel(), source.dtype)

    assert 2 * source.numel() / observed > 1.38


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_corrupted_head_is_reported_and_never_reaches_outside_its_buffers(data: st.DataObject) -> None:
    """The emulated memory raises on any access outside a buffer; a changed count or header must set the status word."""
    source = activations(5000, torch.bfloat16, special=0.1)
    encoded = kernel_encode(EXPONENT, source)
    layout = EXPONENT.layout(5000, torch.bfloat16)
    word = data.draw(st.sampled_from([0, 1, 2, 3, 4, *range(32, 32 + 2 * layout.tiles, 2)]))
    head = encoded.head.copy()
    before = int(head.view(np.uint32)[word])
    changed = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value >> 8 != before >> 8))
    head.view(np.uint32)[word] = changed

    decoded, status = kernel_decode(EXPONENT, Encoded(head, encoded.tail), 5000, torch.bfloat16)

    assert status in (1, 2)
    assert decoded.numel() == 5000
    with pytest.raises(CodecError):
        reference_decode(EXPONENT, Encoded(head, encoded.tail), 5000, torch.bfloat16)
