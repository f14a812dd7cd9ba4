"""int8 and int4: reference against emulated kernel, error bounds, unbiased stochastic rounding, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import codec_by_name
from fxhome.cuda_kernels.blockint import BlockInt
from tests.sim.codec_harness import (
    Launch,
    activations,
    kernel_decode,
    kernel_encode,
    reference_decode,
    reference_encode,
    same_bits,
)

NAMES = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 9, 64, 65, 600])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("special", [0.0, 0.01])
def test_kernel_agrees_with_the_reference(
    name: str, dtype: torch.dtype, numel: int, seed: int | None, special: float
) -> None:
    codec = codec_by_name(name)
    source = activations(numel, dtype, special=special, seed=numel)

    encoded = kernel_encode(codec, source, Launch(2, 64, reverse=True), seed)
    reference = reference_encode(codec, source, seed)

    layout = codec.layout(numel, dtype)
    codes = -(-numel // 8) * (8 if name == "int8" else 4)
    scales = slice(layout.planes_offset, layout.planes_offset + 2 * -(-numel // 64))
    assert np.array_equal(encoded.head[:codes], reference.head[:codes])
    assert np.array_equal(encoded.head[scales], reference.head[scales])
    decoded, status = kernel_decode(codec, encoded, numel, dtype)
    assert status == 0
    assert same_bits(decoded, reference_decode(codec, reference, numel, dtype))


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 500),
    scale=st.sampled_from([1e-38, 1e-31, 1e-6, 1.0, 60.0, 1e38]),
    seed=st.integers(0, 1000),
    stochastic=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_error_bound_holds(
    name: str, dtype: torch.dtype, numel: int, scale: float, seed: int, stochastic: bool
) -> None:
    codec = codec_by_name(name)
    assert isinstance(codec, BlockInt)
    source = (activations(numel, torch.float32, seed=seed) * scale).clamp(-3.38e38, 3.38e38)
    if dtype == torch.float16:
        source = source.clamp(-65504, 65504)
    source = source.to(dtype)

    decoded = reference_decode(codec, reference_encode(codec, source, seed if stochastic else None), numel, dtype)

    error = (decoded.double() - source.double()).abs()
    assert bool((error <= codec.error_bound(source, stochastic)).all())


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean over many seeds is far nearer to the source than one rounding step."""
    codec = codec_by_name(name)
    source = activations(64, torch.float32)
    step = float(source.abs().max()) / (127 if name == "int8" else 7)

    draws = [reference_decode(codec, reference_encode(codec, source, seed), 64, torch.float32) for seed in range(2000)]
    mean = torch.stack(draws).double().mean(0)

    # The mean of 2000 draws has a deviation of at most step / 2 / sqrt(2000); six of them over 64 elements never fail
    # by chance.
    assert float((mean - source.double()).abs().max()) < 6 * step / 2 / 2000**0.5
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_block_becomes_nan_and_others_do_not(name: str, value: float) -> None:
    codec = codec_by_name(name)
    source = activations(192, torch.bfloat16)
    source[70] = value

    decoded = reference_decode(codec, reference_encode(codec, source), 192, torch.bfloat16)

    assert bool(decoded[64:128].isnan().all())
    assert not bool(decoded[:64].isnan().any() or decoded[128:].isnan().any())


def test_rates_of_bf16() -> None:
    numel = 1 << 20

    assert 2 * numel / codec_by_name("int8").encoded_bytes(numel, torch.bfloat16) > 1.93
    assert 2 * numel / codec_by_name("int4").encoded_bytes(numel, torch.bfloat16) > 3.75


@pytest.mark.parametrize("factor", [1e-38, 1e-31, 1e-9, 1e9, 1e30, 1e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_every_range_of_scales_takes_the_way_of_the_reference(name: str, dtype: torch.dtype, factor: float) -> None:
    """The kernels have a short way for middling scales and a long one for the rest."""
    codec = codec_by_name(name)
    source = (activations(640, torch.float32, special=0.005) * factor).to(dtype)
    expected = reference_encode(codec, source)

    encoded = kernel_encode(codec, source)
    decoded, _ = kernel_decode(codec, expected, 640, dtype)

    codes = 640 if name == "int8" else 320
    assert np.array_equal(encoded.head[:codes], expected.head[:codes])
    assert same_bits(decoded, reference_decode(codec, expected, 640, dtype))
