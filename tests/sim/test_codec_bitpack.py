"""Bit packing: reference against emulated kernel, round trips, ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from tests.sim.codec_harness import (
    Launch,
    activations,
    kernel_decode,
    kernel_encode,
    reference_decode,
    reference_encode,
    same_bits,
)

BITPACK = codec_by_name("bitpack")


@pytest.mark.parametrize("numel", [1, 8, 15, 16, 127, 4096, 4097, 9001])
@pytest.mark.parametrize("launch", [Launch(), Launch(1, 32, reverse=True), Launch(1, 64, False, 1)])
def test_kernel_writes_what_the_reference_writes(numel: int, launch: Launch) -> None:
    source = activations(numel, torch.bool, density=0.5, seed=numel)

    encoded = kernel_encode(BITPACK, source, launch)

    assert np.array_equal(encoded.head, reference_encode(BITPACK, source).head)
    assert same_bits(kernel_decode(BITPACK, encoded, numel, torch.bool, launch)[0], source)


@given(bits=st.lists(st.booleans(), max_size=300))
@settings(max_examples=50, deadline=None)
def test_reference_round_trip(bits: list[bool]) -> None:
    source = torch.tensor(bits, dtype=torch.bool)

    assert same_bits(reference_decode(BITPACK, reference_encode(BITPACK, source), len(bits), torch.bool), source)


def test_rate_is_eight() -> None:
    assert BITPACK.encoded_bytes(1 << 20, torch.bool) == 1 << 17
    assert BITPACK.tail_bytes(1 << 20, torch.bool) == 0


def test_sizes_beyond_32_bits() -> None:
    assert BITPACK.encoded_bytes((1 << 33) + 1, torch.bool) == (1 << 30) + 16


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CodecError, match=r"cannot encode torch\.float32; it encodes torch\.bool"):
        BITPACK.layout(8, torch.float32)
