"""zvc_exponent: reference against emulated kernel, round trips, special values, ratio, corrupted buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from fxhome.cuda_kernels.tiles import tile_words
from tests.sim.codec_harness import (
    Encoded,
    Launch,
    activations,
    from_raw,
    kernel_decode,
    kernel_encode,
    raw,
    reference_decode,
    reference_encode,
    same_bits,
)

CODEC = codec_by_name("zvc_exponent")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def source_of(kind: str, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rectified, signed, full of special values, or random bits (stored as they are)."""
    if kind == "bits":
        data = np.random.default_rng(seed).integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
        return from_raw(data, dtype)
    special = 0.2 if kind == "special" else 0.0
    values = activations(numel, dtype, density=0.8, special=special, seed=seed)
    return torch.relu(values) if kind == "rectified" else values


def words(encoded: Encoded, numel: int, dtype: torch.dtype) -> list[int]:
    return [int(word) for word in tile_words(encoded.head, CODEC.layout(numel, dtype))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 1024, 2049, 4100])
@pytest.mark.parametrize("kind", ["rectified", "signed", "special", "bits"])
def test_kernel_and_reference_read_each_other(kind: str, numel: int, dtype: torch.dtype) -> None:
    source = source_of(kind, numel, dtype, seed=numel)

    kernel, reference = kernel_encode(CODEC, source), reference_encode(CODEC, source)

    assert words(kernel, numel, dtype) == words(reference, numel, dtype)
    assert np.array_equal(kernel.head[:24], reference.head[:24])
    assert same_bits(reference_decode(CODEC, kernel, numel, dtype), source)
    for encoded in (kernel, reference):
        decoded, status = kernel_decode(CODEC, encoded, numel, dtype)
        assert status == 0
        assert same_bits(decoded, source)


@pytest.mark.parametrize(
    "launch", [Launch(1, 32), Launch(3, 256), Launch(2, 64, reverse=True), Launch(1, 64, False, 4)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_does_not_depend_on_geometry_lane_order_or_alignment(launch: Launch, dtype: torch.dtype) -> None:
    source = source_of("rectified", 5000, dtype)

    encoded = kernel_encode(CODEC, source, launch)

    assert words(encoded, 5000, dtype) == words(reference_encode(CODEC, source), 5000, dtype)
    assert same_bits(kernel_decode(CODEC, encoded, 5000, dtype, launch)[0], source)


@given(
    numel=st.integers(0, 20000),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["rectified", "signed", "special", "bits"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_reference_round_trip_is_bitwise(numel: int, dtype: torch.dtype, kind: str, seed: int) -> None:
    source = source_of(kind, numel, dtype, seed)

    encoded = reference_encode(CODEC, source)

    assert same_bits(reference_decode(CODEC, encoded, numel, dtype), source)


@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300), dtype=st.sampled_from(DTYPES[1:]))
@settings(max_examples=20, deadline=None)
def test_kernel_round_trips_arbitrary_bit_patterns(bits: list[int], dtype: torch.dtype) -> None:
    source = torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(dtype)

    encoded = kernel_encode(CODEC, source)

    assert same_bits(kernel_decode(CODEC, encoded, len(bits), dtype)[0], source)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 2.2), (torch.bfloat16, 2.5), (torch.float16, 2.0)])
def test_rectified_normal_values_take_less_than_under_zvc(dtype: torch.dtype, ratio: float) -> None:
    source = torch.relu(activations(1 << 19, dtype))
    plain_bytes, share = source.numel() * dtype.itemsize, float((source != 0).float().mean())

    encoded = reference_encode(CODEC, source)

    found = CODEC.observed_bytes(torch.from_numpy(encoded.whole), source.numel(), dtype)
    assert plain_bytes / found > ratio
    assert CODEC.expected_bytes(source.numel(), dtype, share) == pytest.approx(found, rel=0.03)


def test_worst_case_is_little_more_than_the_tensor() -> None:
    source = source_of("bits", 1 << 14, torch.bfloat16)
    encoded = reference_encode(CODEC, source)

    found = CODEC.observed_bytes(torch.from_numpy(encoded.whole), source.numel(), source.dtype)

    assert found <= CODEC.worst_case_bytes(source.numel(), source.dtype) < len(raw(source)) * 1.08


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_corrupted_head_is_reported_and_never_reaches_outside_its_buffers(data: st.DataObject) -> None:
    """The emulated memory raises on any access outside a buffer. Fields on which the decoder relies must be noticed;
    the base of the window and the flags are values like any other."""
    numel, dtype = 3000, torch.bfloat16
    source = source_of("special", numel, dtype)
    encoded = kernel_encode(CODEC, source)
    layout = CODEC.layout(numel, dtype)
    word = data.draw(st.sampled_from([0, 1, 2, 3, 4, *range(32, 32 + 2 * layout.tiles)]))
    head = encoded.head.copy()
    before = int(head.view(np.uint32)[word])
    head.view(np.uint32)[word] = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value != before))
    changed = Encoded(head, encoded.tail)

    decoded, status = kernel_decode(CODEC, changed, numel, dtype)

    assert decoded.numel() == numel
    count_differs = (before ^ int(head.view(np.uint32)[word])) & 0xFFF != 0
    if word < 5 or (word % 2 == 0 and count_differs):
        assert status in (1, 2)
        with pytest.raises(CodecError):
            reference_decode(CODEC, changed, numel, dtype)
