"""Index narrowing: reference against emulated kernel, the ends of each range, values that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from tests.sim.codec_harness import (
    Launch,
    kernel_decode,
    kernel_encode,
    reference_decode,
    reference_encode,
    same_bits,
)

RANGES = {"narrow8": (0, 255), "narrow16": (0, 65535), "narrow32": (-(2**31), 2**31 - 1)}


def indices(name: str, numel: int) -> torch.Tensor:
    """Random indices in the range, with both its ends."""
    low, high = RANGES[name]
    values = np.random.default_rng(numel).integers(low, high, numel, dtype=np.int64, endpoint=True)
    values[:2] = [low, high][:numel]
    return torch.from_numpy(values)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("numel", [1, 2, 3, 511, 513, 2049])
@pytest.mark.parametrize("launch", [Launch(), Launch(1, 32, reverse=True), Launch(1, 64, False, 8)])
def test_kernel_writes_what_the_reference_writes(name: str, numel: int, launch: Launch) -> None:
    codec = codec_by_name(name)
    source = indices(name, numel)

    encoded = kernel_encode(codec, source, launch)

    used = (
        numel * codec.layout(1, torch.int64).tile_elements // 512 * {"narrow8": 1, "narrow16": 2, "narrow32": 4}[name]
    )
    assert encoded.status == 0
    assert np.array_equal(encoded.head[:used], reference_encode(codec, source).head[:used])
    assert same_bits(kernel_decode(codec, encoded, numel, torch.int64, launch)[0], source)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("offset", [-1, 1, 2**40, -(2**40)])
def test_value_outside_the_range_is_reported(name: str, offset: int) -> None:
    codec = codec_by_name(name)
    low, high = RANGES[name]
    source = torch.full((700,), low)
    source[600] = high + offset if offset > 0 else low + offset

    assert kernel_encode(codec, source).status == 3
    with pytest.raises(CodecError, match="indices span"):
        reference_encode(codec, source)


@given(values=st.lists(st.integers(0, 255), max_size=100), name=st.sampled_from(list(RANGES)))
@settings(max_examples=50, deadline=None)
def test_reference_round_trip(values: list[int], name: str) -> None:
    codec = codec_by_name(name)
    source = torch.tensor(values, dtype=torch.int64)

    assert same_bits(reference_decode(codec, reference_encode(codec, source), len(values), torch.int64), source)


def test_rates() -> None:
    assert [codec_by_name(name).encoded_bytes(1 << 20, torch.int64) >> 20 for name in RANGES] == [1, 2, 4]
