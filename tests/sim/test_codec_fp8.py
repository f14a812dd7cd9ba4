"""fp8 with block scales: reference against emulated kernel and torch's own fp8, error bound, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import codec_by_name
from tests.sim.codec_harness import (
    Launch,
    activations,
    kernel_decode,
    kernel_encode,
    raw,
    reference_decode,
    reference_encode,
    same_bits,
)

NAMES = ["fp8_e4m3", "fp8_e5m2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 9, 64, 65, 600])
@pytest.mark.parametrize("special", [0.0, 0.2])
def test_kernel_agrees_with_the_reference(name: str, dtype: torch.dtype, numel: int, special: float) -> None:
    codec = codec_by_name(name)
    source = activations(numel, dtype, special=special, seed=numel)

    encoded = kernel_encode(codec, source, Launch(2, 64, reverse=True))
    reference = reference_encode(codec, source)

    layout = codec.layout(numel, dtype)
    blocks = -(-numel // 64)
    assert np.array_equal(encoded.head[:numel], reference.head[:numel])
    scales = slice(layout.planes_offset, layout.planes_offset + blocks)
    assert np.array_equal(encoded.head[scales], reference.head[scales])
    decoded, status = kernel_decode(codec, encoded, numel, dtype)
    assert status == 0
    assert same_bits(decoded, reference_decode(codec, reference, numel, dtype))


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 500),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 60.0, 1e30]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_error_bound_holds(name: str, dtype: torch.dtype, numel: int, scale: float, seed: int) -> None:
    codec = codec_by_name(name)
    source = (activations(numel, torch.float32, seed=seed) * scale).clamp(-3e38, 3e38)
    if dtype == torch.float16:
        source = source.clamp(-65504, 65504)
    source = source.to(dtype)

    decoded = reference_decode(codec, reference_encode(codec, source), numel, dtype)

    error = (decoded.double() - source.double()).abs()
    assert bool((error <= codec.error_bound(source)).all())


@given(patterns=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=200), dtype=st.sampled_from(DTYPES[1:]))
@settings(max_examples=60, deadline=None)
def test_any_bit_pattern_keeps_its_kind(patterns: list[int], dtype: torch.dtype) -> None:
    """NaN stays NaN, finite stays finite within the bound, infinity stays infinity in e5m2 and is NaN in e4m3."""
    source = torch.from_numpy(np.array(patterns, np.uint16).view(np.int16)).view(dtype)
    for name in NAMES:
        codec = codec_by_name(name)

        decoded = reference_decode(codec, reference_encode(codec, source), len(patterns), dtype)

        infinite = source.isinf()
        finite = source.isfinite()
        assert bool(decoded[source.isnan()].isnan().all())
        assert bool((decoded[infinite].isinf() if name == "fp8_e5m2" else decoded[infinite].isnan()).all())
        error = (decoded.double() - source.double()).abs()
        assert bool((error <= codec.error_bound(source))[finite].all())


@pytest.mark.parametrize(("name", "fp8"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_codes_are_those_of_torch(name: str, fp8: torch.dtype) -> None:
    """A block whose largest value is the format's own needs no scaling, so its codes are torch's conversion."""
    codec = codec_by_name(name)
    source = activations(64, torch.float32) * 2.0 ** np.random.default_rng(0).integers(-9, 3)
    source[0] = torch.finfo(fp8).max

    encoded = reference_encode(codec, source)

    assert np.array_equal(encoded.head[:64], raw(source.to(fp8)))


def test_every_code_decodes_as_torch_does() -> None:
    for name, fp8 in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        codec = codec_by_name(name)
        layout = codec.layout(256, torch.float32)
        encoded = reference_encode(codec, torch.zeros(256))
        encoded.head[:256] = np.arange(256)
        encoded.head[layout.planes_offset : layout.planes_offset + 4] = 127

        expected = torch.arange(256, dtype=torch.uint8).view(fp8).float()

        decoded = reference_decode(codec, encoded, 256, torch.float32)
        by_kernel, _ = kernel_decode(codec, encoded, 256, torch.float32)
        assert torch.equal(decoded.nan_to_num(7e7), expected.nan_to_num(7e7))
        assert same_bits(decoded, by_kernel)


def test_rate_of_bf16() -> None:
    numel = 1 << 20

    assert 2 * numel / codec_by_name("fp8_e4m3").encoded_bytes(numel, torch.bfloat16) > 1.96


@pytest.mark.parametrize("factor", [1e-37, 1e-30, 1e-9, 1e6, 1e12, 1e30, 1e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_every_range_of_scales_takes_the_way_of_the_reference(name: str, dtype: torch.dtype, factor: float) -> None:
    """The kernels have a short way for middling scales and a long one for the rest."""
    codec = codec_by_name(name)
    source = (activations(640, torch.float32, special=0.02) * factor).to(dtype)
    expected = reference_encode(codec, source)

    encoded = kernel_encode(codec, source)
    decoded, _ = kernel_decode(codec, expected, 640, dtype)

    assert np.array_equal(encoded.head[:640], expected.head[:640])
    assert same_bits(decoded, reference_decode(codec, expected, 640, dtype))
