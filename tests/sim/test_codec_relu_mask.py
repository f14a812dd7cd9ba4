"""A rectifier's mask: reference against emulated kernel, and the gradients that are made from what it gives back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.launch import compile_ptx
from tests.sim.codec_harness import (
    BITS,
    Encoded,
    Launch,
    activations,
    from_raw,
    kernel_decode,
    kernel_encode,
    reference_decode,
    reference_encode,
    same_bits,
)

MASKS = ("relu_mask", "relu6_mask")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten


def passes(name: str, source: torch.Tensor) -> torch.Tensor:
    """Where the gradient passes, as CUDA's operators and the CPU's scalar ones define it."""
    return ~(source <= 0) if name == "relu_mask" else ~((source <= 0) | (source >= 6))


def gradient(name: str, upstream: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if name == "relu_mask":
        return aten.threshold_backward(upstream, source, 0)
    return aten.hardtanh_backward(upstream, source, 0.0, 6.0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [1, 7, 8, 129, 4096, 4097, 9001])
def test_kernel_writes_what_the_reference_writes(name: str, dtype: torch.dtype, numel: int) -> None:
    codec = codec_by_name(name)
    source = activations(numel, dtype, density=0.7, seed=numel, special=0.3)

    encoded, expected = kernel_encode(codec, source), reference_encode(codec, source)

    assert np.array_equal(encoded.head, expected.head)
    decoded, status = kernel_decode(codec, encoded, numel, dtype)
    assert status == 0
    assert torch.equal(decoded, passes(name, source).to(dtype))
    assert same_bits(decoded, reference_decode(codec, expected, numel, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("launch", [Launch(1, 32, reverse=True), Launch(1, 64, False, 4)])
def test_any_launch_gives_the_same(dtype: torch.dtype, launch: Launch) -> None:
    codec = codec_by_name("relu_mask")
    source = activations(9001, dtype, density=0.5, seed=3)

    encoded = kernel_encode(codec, source, launch)

    assert np.array_equal(encoded.head, reference_encode(codec, source).head)
    assert torch.equal(kernel_decode(codec, encoded, 9001, dtype, launch)[0], (source > 0).to(dtype))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(max_examples=50, deadline=None)
def test_gradients_are_the_same_bit_for_bit(name: str, dtype: torch.dtype, patterns: list[int]) -> None:
    """Whatever the bits. The CPU's hardtanh_backward treats a NaN now one way, now the other: it is left out there."""
    codec = codec_by_name(name)
    data = np.array(patterns, np.uint32)
    source = from_raw((data if dtype.itemsize == 4 else data.astype(np.uint16)).view(np.uint8), dtype)
    if name == "relu6_mask":
        source = torch.where(source.isnan(), torch.zeros_like(source), source)
    upstream = torch.arange(1, source.numel() + 1).to(dtype)

    decoded = reference_decode(codec, reference_encode(codec, source), source.numel(), dtype)

    assert same_bits(gradient(name, upstream, decoded), gradient(name, upstream, source))


@pytest.mark.parametrize("dtype", FLOATS)
def test_next_to_the_bounds(dtype: torch.dtype) -> None:
    """The neighbours of 0, 6 and infinity, with both signs."""
    codec = codec_by_name("relu6_mask")
    ends = torch.tensor([0.0, 6.0, float("inf"), 1.0], dtype=dtype).view(BITS[dtype.itemsize]).long()
    around = torch.cat([ends, ends + 1, (ends - 1).clamp_min(0)])
    source = around.to(BITS[dtype.itemsize]).view(dtype)
    source = torch.cat([source, -source])

    decoded, _ = kernel_decode(codec, kernel_encode(codec, source), source.numel(), dtype)

    assert torch.equal(decoded, passes("relu6_mask", source).to(dtype))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_buffer_decodes_to_zeros_and_ones(name: str, dtype: torch.dtype) -> None:
    """Nothing in the encoded form says where anything lies: a corrupted one gives another mask and reaches nothing."""
    codec, numel = codec_by_name(name), 5003
    head = np.random.default_rng(0).integers(0, 256, codec.head_bytes(numel, dtype), dtype=np.uint8)

    decoded, status = kernel_decode(codec, Encoded(head, np.zeros(0, np.uint8)), numel, dtype)

    assert status == 0
    assert set(decoded.tolist()) == {0.0, 1.0}
    assert same_bits(decoded, reference_decode(codec, Encoded(head, np.zeros(0, np.uint8)), numel, dtype))


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 32), (torch.bfloat16, 16), (torch.float16, 16)])
def test_rate(dtype: torch.dtype, ratio: int) -> None:
    codec = codec_by_name("relu_mask")

    assert codec.encoded_bytes(1 << 20, dtype) * ratio == (1 << 20) * dtype.itemsize
    assert codec.encoded_bytes((1 << 33) + 1, dtype) == (1 << 30) + 16


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_every_format_compiles_clean(name: str, dtype: torch.dtype, direction: str) -> None:
    codec = codec_by_name(name)
    assert isinstance(codec, FlatCodec)

    ptx = compile_ptx(codec.kernel_key(direction, dtype), (9, 0))

    assert ".f64" not in ptx
    assert ".local" not in ptx


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CodecError, match=r"cannot encode torch\.float64; it encodes torch\.float32, torch\.bfloat16"):
        codec_by_name("relu_mask").layout(8, torch.float64)
