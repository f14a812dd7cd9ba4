"""Codec kernels on a GPU: agreement with the references, streams, corruption, determinism."""

from __future__ import annotations

import pytest
import torch

from fxhome.cuda_kernels import Codec, CodecError, codec_by_name, codec_names, raise_if_corrupt
from fxhome.cuda_kernels.overflow import copy_overflow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CASES = [
    (name, dtype)
    for name in codec_names()
    for dtype in codec_by_name(name).dtypes
    if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8)
]


def make_source(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    """Half zeros; floats also hold NaN, infinities, -0.0 and a denormal if there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 3
    values[torch.rand(numel, generator=generator) < 0.5] = 0
    if dtype in (torch.bool, torch.uint8):
        return (values > 0).to(dtype).cuda()
    if dtype == torch.int64:
        return (values.abs() * 20).long().clamp(0, 255).cuda()
    return values.to(dtype).cuda()


def with_special_values(source: torch.Tensor) -> torch.Tensor:
    if source.dtype.is_floating_point and source.numel() > 10:
        special = [float("nan"), float("inf"), float("-inf"), -0.0, 1e-42]
        source[3:8] = torch.tensor(special, device=source.device).to(source.dtype)
    return source


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(BITS[tensor.dtype.itemsize]).cpu()


def buffer_for(codec: Codec, source: torch.Tensor) -> torch.Tensor:
    size_bytes = codec.worst_case_bytes(source.numel(), source.dtype)
    return torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 4097, 100_003])
def test_kernel_agrees_with_the_reference(name: str, dtype: torch.dtype, numel: int) -> None:
    codec = codec_by_name(name)
    source = make_source(dtype, numel)
    if codec.lossless or name.endswith("_mask"):
        source = with_special_values(source)
    encoded = buffer_for(codec, source)
    target = torch.full_like(source, 1)
    reference = torch.zeros(encoded.numel(), dtype=torch.uint8)
    expected = torch.zeros(numel, dtype=dtype)

    codec.encode(source, encoded)
    codec.decode(encoded, target)
    codec.encode(source.cpu(), reference)
    codec.decode(reference, expected)
    torch.cuda.synchronize()

    raise_if_corrupt()
    assert torch.equal(bits(target), bits(expected))
    if codec.lossless:
        assert torch.equal(bits(target), bits(source))
    crossed = torch.zeros(numel, dtype=dtype)
    codec.decode(encoded.cpu(), crossed)
    assert torch.equal(bits(crossed), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_from_a_mask_have_the_same_bits(dtype: torch.dtype) -> None:
    """Of a relu, of a relu6, and of what reads no more than a shape: pooling without overlap adds in one order only."""
    source = with_special_values(make_source(dtype, 2 * 3 * 34 * 34))
    shape, upstream = (2, 3, 34, 34), torch.arange(2 * 3 * 34 * 34, device="cuda").to(dtype)
    decoded = {}
    for name in ("relu_mask", "relu6_mask"):
        codec = codec_by_name(name)
        encoded = buffer_for(codec, source)
        codec.encode(source, encoded)
        codec.decode(encoded, decoded.setdefault(name, torch.empty_like(source)))
    aten = torch.ops.aten
    pooled, where = aten.max_pool2d_with_indices(source.view(shape), [2, 2], [2, 2])

    def pool_gradient(x: torch.Tensor) -> torch.Tensor:
        upstream = torch.ones_like(pooled)
        return aten.max_pool2d_with_indices_backward(upstream, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where)

    for layout in (torch.contiguous_format, torch.channels_last):
        exact = source.view(shape).contiguous(memory_format=layout)
        stand_in = decoded["relu_mask"].view(shape).contiguous(memory_format=layout)
        assert torch.equal(bits(pool_gradient(stand_in)), bits(pool_gradient(exact)))
    relu, relu6 = decoded["relu_mask"], decoded["relu6_mask"]
    by_relu = [aten.threshold_backward(upstream, x, 0) for x in (relu, source)]
    by_relu6 = [aten.hardtanh_backward(upstream, x, 0.0, 6.0) for x in (relu6, source)]
    assert torch.equal(bits(by_relu[0]), bits(by_relu[1]))
    assert torch.equal(bits(by_relu6[0]), bits(by_relu6[1]))


@pytest.mark.parametrize("name", ["zvc", "exponent", "csr", "rle"])
def test_unaligned_source_is_encoded_in_place(name: str) -> None:
    codec = codec_by_name(name)
    source = make_source(torch.bfloat16, 10_001)[1:]
    encoded = buffer_for(codec, source)
    target = torch.zeros(10_001, dtype=torch.bfloat16, device="cuda")[1:]

    codec.encode(source, encoded)
    codec.decode(encoded, target)

    assert torch.equal(bits(target), bits(source))


def test_two_streams_and_many_in_flight() -> None:
    """Each stream keeps its own order; nothing is shared between calls but the status flag."""
    codec = codec_by_name("zvc")
    sources = [make_source(torch.float32, 200_000 + index, seed=index) for index in range(16)]
    buffers = [buffer_for(codec, source) for source in sources]
    targets = [torch.ones_like(source) for source in sources]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()

    for index, (source, buffer, target) in enumerate(zip(sources, buffers, targets, strict=True)):
        with torch.cuda.stream(streams[index % 2]):
            codec.encode(source, buffer)
            codec.decode(buffer, target)
    torch.cuda.synchronize()

    raise_if_corrupt()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"), [("exponent", torch.bfloat16), ("int8", torch.float32), ("fp8_e4m3", torch.float16)]
)
def test_encoding_twice_gives_the_same_decoded_bits(name: str, dtype: torch.dtype) -> None:
    codec = codec_by_name(name)
    source = make_source(dtype, 50_001)
    decoded = []
    for _ in range(2):
        encoded = buffer_for(codec, source)
        target = torch.empty_like(source)
        codec.encode(source, encoded, seed=3)
        codec.decode(encoded, target)
        decoded.append(bits(target))

    assert torch.equal(decoded[0], decoded[1])


@pytest.mark.parametrize("name", ["zvc", "csr", "rle", "exponent", "zvc_exponent"])
@pytest.mark.parametrize("offset", [0, 128])
def test_corrupted_buffer_is_reported(name: str, offset: int) -> None:
    """Offset 0 is the header, 128 the first tile's word."""
    codec = codec_by_name(name)
    source = make_source(torch.bfloat16, 50_000)
    encoded = buffer_for(codec, source)
    codec.encode(source, encoded)
    encoded[offset : offset + 4] = 0x7E

    codec.decode(encoded, torch.empty_like(source))
    torch.cuda.synchronize()

    with pytest.raises(CodecError, match="bad buffer or value"):
        raise_if_corrupt()
    raise_if_corrupt()


def test_index_that_does_not_fit_is_reported() -> None:
    codec = codec_by_name("narrow8")
    source = torch.full((1000,), 256, device="cuda")
    encoded = buffer_for(codec, source)

    codec.encode(source, encoded)
    torch.cuda.synchronize()

    with pytest.raises(CodecError, match="does not fit"):
        raise_if_corrupt()


def test_host_and_truncated_buffers_are_refused() -> None:
    codec = codec_by_name("zvc")
    source = make_source(torch.float32, 1000)
    size_bytes = codec.worst_case_bytes(1000, torch.float32)

    with pytest.raises(CodecError, match="copy engine"):
        codec.encode(source, torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
    with pytest.raises(CodecError, match="truncated"):
        codec.decode(torch.empty(size_bytes - 16, dtype=torch.uint8, device="cuda"), source)


@pytest.mark.parametrize("name", ["zvc", "csr", "rle", "exponent", "zvc_exponent"])
def test_buffer_cut_short_is_reported(name: str) -> None:
    """Only a part of the bytes in use arrived, and the header says so: an error, and no access beyond them."""
    codec = codec_by_name(name)
    source = with_special_values(make_source(torch.bfloat16, 50_000))
    encoded = buffer_for(codec, source)
    codec.encode(source, encoded)
    used = encoded[20:24].view(torch.int32)
    used -= 1

    codec.decode(encoded, torch.empty_like(source))
    torch.cuda.synchronize()

    with pytest.raises(CodecError, match="bad buffer or value"):
        raise_if_corrupt()


@pytest.mark.parametrize("missing_bytes", [0, 16, 4096, 100_000])
def test_what_a_copy_left_out_is_moved_and_the_count_is_noted(missing_bytes: int) -> None:
    codec = codec_by_name("zvc")
    source = make_source(torch.float32, 200_000)
    encoded = buffer_for(codec, source)
    codec.encode(source, encoded)
    torch.cuda.synchronize()
    head_bytes, used = codec.head_bytes(200_000, torch.float32), 16 * int(encoded[20:24].view(torch.int32))
    host = torch.full((encoded.numel(),), 0x5A, dtype=torch.uint8, pin_memory=True)
    note = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    copied_bytes = head_bytes + used - missing_bytes
    host[:copied_bytes].copy_(encoded[:copied_bytes])

    sizes = (head_bytes, encoded.numel())
    stream, address = torch.cuda.current_stream().cuda_stream, encoded.data_ptr()
    copy_overflow(
        torch.cuda.current_device(), stream, address, address, host.data_ptr(), copied_bytes, sizes, note.data_ptr()
    )
    torch.cuda.synchronize()

    assert torch.equal(host[: head_bytes + used], encoded[: head_bytes + used].cpu())
    assert bool((host[head_bytes + used :] == 0x5A).all())
    assert int(note) == used // 16 + 1


def test_no_allocation_in_the_steady_state() -> None:
    codec = codec_by_name("zvc")
    source = make_source(torch.float32, 100_000)
    encoded, target = buffer_for(codec, source), torch.empty_like(source)
    codec.encode(source, encoded)
    codec.decode(encoded, target)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    for _ in range(10):
        codec.encode(source, encoded)
        codec.decode(encoded, target)

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_more_than_two_to_the_31_elements() -> None:
    numel = (1 << 31) + 4099
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free device memory")
    mask = torch.zeros(numel, dtype=torch.bool, device="cuda")
    mask[-5000::3] = True
    for name in ("bitpack", "zvc"):
        codec = codec_by_name(name)
        encoded = torch.empty(codec.worst_case_bytes(numel, torch.bool), dtype=torch.uint8, device="cuda")
        target = torch.ones_like(mask)

        codec.encode(mask, encoded)
        codec.decode(encoded, target)

        assert torch.equal(mask, target)
