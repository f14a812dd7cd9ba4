"""CSR and RLE: reference against emulated kernel, round trips, tiles stored as they are, corrupted buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels import CodecError, codec_by_name
from fxhome.cuda_kernels.listed.format import RAW_FLAG, listed_bytes, most_listed
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

NAMES = ["csr", "rle"]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool]


def with_runs(numel: int, dtype: torch.dtype, density: float, seed: int) -> torch.Tensor:
    """Sparse values, each repeated a few times, so that both codecs have something to list."""
    repeated = activations(numel, dtype, density=density, seed=seed, special=0.0 if dtype == torch.bool else 0.1)
    return repeated.repeat_interleave(1 + seed % 4)[:numel].contiguous()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 9, 1024, 2500])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_kernel_writes_what_the_reference_writes(name: str, dtype: torch.dtype, numel: int, density: float) -> None:
    codec = codec_by_name(name)
    source = with_runs(numel, dtype, density, numel)

    encoded = kernel_encode(codec, source, Launch(2, 64, reverse=True))

    assert tiled_parts_agree(codec, encoded, reference_encode(codec, source), numel, dtype)
    decoded, status = kernel_decode(codec, encoded, numel, dtype)
    assert status == 0
    assert same_bits(decoded, source)


@given(
    name=st.sampled_from(NAMES),
    numel=st.integers(0, 12000),
    dtype=st.sampled_from(DTYPES),
    density=st.floats(0, 1),
    seed=st.integers(0, 100),
)
@settings(max_examples=80, deadline=None)
def test_reference_round_trip_is_bitwise(name: str, numel: int, dtype: torch.dtype, density: float, seed: int) -> None:
    codec = codec_by_name(name)
    source = with_runs(numel, dtype, density, seed)

    assert same_bits(reference_decode(codec, reference_encode(codec, source), numel, dtype), source)


@pytest.mark.parametrize("name", NAMES)
def test_dense_tiles_are_stored_as_they_are(name: str) -> None:
    codec = codec_by_name(name)
    source = activations(4096, torch.float32)
    encoded = reference_encode(codec, source)

    assert codec.observed_bytes(torch.from_numpy(encoded.head), 4096, torch.float32) == codec.worst_case_bytes(
        4096, torch.float32
    )


def test_longest_list_fits_exactly() -> None:
    for width in (1, 2, 4):
        most = most_listed(width)
        fits, exceeds = listed_bytes(np.array([most, most + 1]), width)

        assert fits <= 4096 < exceeds


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_corruption_is_reported_and_never_reaches_outside_its_buffers(name: str, data: st.DataObject) -> None:
    """The emulated memory raises on any access outside a buffer."""
    codec = codec_by_name(name)
    source = with_runs(3000, torch.float32, 0.2, 3)
    encoded = kernel_encode(codec, source)
    tiles = codec.layout(3000, torch.float32).tiles
    word = data.draw(st.sampled_from([0, 1, 2, 3, 4, *range(32, 32 + 2 * tiles, 2)]))
    head = encoded.head.copy()
    before = int(head.view(np.uint32)[word])
    impossible = st.integers(most_listed(4) + 1, 2**32 - 1).filter(lambda value: value not in (before, RAW_FLAG))
    head.view(np.uint32)[word] = data.draw(impossible)

    _, status = kernel_decode(codec, Encoded(head, encoded.tail), 3000, torch.float32)

    assert status in (1, 2)
    with pytest.raises(CodecError):
        reference_decode(codec, Encoded(head, encoded.tail), 3000, torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [0xFFFF, 1024])
def test_position_outside_the_tile_is_reported(name: str, position: int) -> None:
    codec = codec_by_name(name)
    source = with_runs(1024, torch.float32, 0.2, 3)
    encoded = kernel_encode(codec, source)
    count = int(encoded.head[128:132].view(np.uint32)[0])
    encoded.tail[-(-count * 4 // 16) * 16 :].view(np.uint16)[count - 1] = position

    _, status = kernel_decode(codec, encoded, 1024, torch.float32)

    assert status == 2
    with pytest.raises(CodecError, match="repeated or outside"):
        reference_decode(codec, encoded, 1024, torch.float32)
