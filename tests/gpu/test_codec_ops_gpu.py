"""The codec operators on a GPU: round trips through the host pool, streams, what is seen, whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxhome.cuda_kernels import raise_if_corrupt
from fxhome.cuda_kernels.codec import kernels_problem
from fxhome.runtime import codec_ops, codec_sites, ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def kernels() -> None:
    codec_sites.clear()
    if (problem := kernels_problem()) is not None:
        pytest.skip(problem)


Place = tuple[int, list[int], list[int], int, torch.dtype]


def geometry(x: torch.Tensor) -> Place:
    return x.untyped_storage().nbytes(), list(x.shape), list(x.stride()), int(x.storage_offset()), x.dtype


def out(source: torch.Tensor, codec: str = "zvc", site: str = "site") -> torch.Tensor:
    """Encode and move to the host."""
    encoded = codec_ops.encode_op(source, source.untyped_storage().nbytes(), codec, 1000, site)
    host: torch.Tensor = ops.swap_out_wait(codec_ops.swap_out_encoded_op(encoded), encoded)
    return host


def back(host: torch.Tensor, place: Place, codec: str = "zvc") -> torch.Tensor:
    """Move back and decode."""
    encoded = ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, torch.device("cuda")), host)
    decoded: torch.Tensor = codec_ops.decode_op(encoded, *place, codec)
    return decoded


def source_for(codec: str) -> torch.Tensor:
    values = torch.relu(torch.randn(300, 1000, device="cuda"))
    if codec == "bitpack":
        return (values > 0).t()
    if codec.startswith("narrow"):
        return torch.randint(0, 256, (300, 1000), device="cuda")
    return values.bfloat16() if codec.endswith("exponent") else values.t()


@pytest.mark.parametrize("codec", ["bitpack", "narrow8", "narrow16", "narrow32"])
def test_encode_and_decode_on_the_device(codec: str) -> None:
    source = source_for(codec)
    encoded = codec_ops.encode_op(source, source.untyped_storage().nbytes(), codec)
    restored = codec_ops.decode_op(encoded, *geometry(source), codec)

    assert encoded.is_cuda
    assert restored.stride() == source.stride()
    assert torch.equal(restored, source)
    torch.cuda.synchronize()
    raise_if_corrupt()


@pytest.mark.parametrize("codec", ["zvc", "csr", "rle", "exponent", "zvc_exponent"])
def test_to_the_host_and_back_with_other_work_on_the_stream(codec: str) -> None:
    device = torch.device("cuda")
    for _ in range(20):
        source = source_for(codec)
        expected = source.clone()
        place = geometry(source)
        encoded = codec_ops.encode_op(source, place[0], codec, 1000, "site")
        source.fill_(float("nan"))  # the next writer of this memory
        host = codec_ops.swap_out_encoded_op(encoded)
        busy = torch.randn(1000, 1000, device="cuda") @ torch.randn(1000, 1000, device="cuda")
        host = ops.swap_out_wait(host, encoded)
        encoded.fill_(255)
        here = codec_ops.swap_in_encoded_op(host, device)
        busy = busy @ busy
        found = codec_ops.decode_op(ops.swap_in_wait(here, host), *place, codec)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    raise_if_corrupt()


def test_the_size_is_seen_without_a_synchronisation_and_dense_data_is_copied_plainly() -> None:
    dense = torch.randn(1 << 20, device="cuda")
    for _ in range(4):
        host = out(dense)
        torch.cuda.synchronize()  # the user's own, say to read the loss
        assert torch.equal(back(host, geometry(dense)), dense)

    (report,) = codec_sites.reports()
    assert report.ratio_seen is not None
    assert report.ratio_seen < 1
    assert not report.is_encoding
    assert report.decisions_changed == 1


def test_sizes_are_seen_although_the_host_runs_ahead() -> None:
    sparse = torch.zeros(1 << 20, device="cuda")
    weight = torch.randn(4096, 4096, device="cuda")
    for _ in range(40):
        for _ in range(4):
            weight @ weight
        back(out(sparse), geometry(sparse))
    torch.cuda.synchronize()
    out(sparse)

    (report,) = codec_sites.reports()
    assert report.ratio_seen is not None
    assert report.ratio_seen > 10


@pytest.mark.parametrize("codec", ["zvc", "exponent", "zvc_exponent"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_bounds_that_turn_out_too_small(codec: str, is_ahead: bool) -> None:
    """A large odd size; the share of zeros jumps, so the copy engine is told too little again and again, with the host
    waiting for the device or far ahead of it."""
    numel = (12 << 20) + 1001
    noise = torch.randn(numel, device="cuda")
    weight = torch.randn(4096, 4096, device="cuda")
    for step, zeros in enumerate([0.9, 0.9, 0.5, 0.9, 0.6, 0.95, 0.5, 0.5]):
        source = torch.where(torch.rand(numel, device="cuda") < zeros, torch.zeros_like(noise), noise)
        if codec == "exponent":  # few exponents or many
            source = noise * torch.exp2((torch.rand(numel, device="cuda") * 20 * (1 - zeros)).floor())
        expected = source.clone()
        torch.cuda.synchronize()  # the last step's size is known
        if is_ahead:
            for _ in range(8):
                weight @ weight
        host = out(source, codec)
        source.fill_(float("nan"))
        if not is_ahead:
            torch.cuda.synchronize()  # this step's size is known on the way back
        assert torch.equal(back(host, geometry(source), codec), expected), f"step {step}"
    raise_if_corrupt()


def test_many_tensors_in_flight_from_two_streams() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sources = [torch.relu(torch.randn(300_000 + 1000 * number, device="cuda")) for number in range(24)]
    expected = [source.clone() for source in sources]
    torch.cuda.synchronize()
    for _ in range(3):
        hosts = []
        for number, source in enumerate(sources):
            with torch.cuda.stream(streams[number % 2]):
                hosts.append(out(source, "zvc", f"site {number}"))
        found = []
        for number in reversed(range(len(hosts))):
            with torch.cuda.stream(streams[(number // 2) % 2]):
                found.append(torch.equal(back(hosts[number], geometry(sources[number])), expected[number]))
        assert all(found)
    raise_if_corrupt()


def test_the_steady_state_allocates_only_results() -> None:
    source = torch.relu(torch.randn(1 << 20, device="cuda"))
    for _ in range(3):
        back(out(source), geometry(source))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(5):
        back(out(source), geometry(source))
    after = torch.cuda.memory_stats()

    # The encoded form there, the encoded form back, the decoded tensor.
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 15
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.first(x)), 2)
        return torch.relu(self.second(x)).square().mean()


def test_a_whole_step_with_compressed_placements_is_bitwise() -> None:
    from fxhome.passes.simulate import COMPRESS_SWAP
    from tests.codec_tools import compile_with, place

    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(16, 3, 64, 64, device="cuda")
    compiled, runs = compile_with(model, place(COMPRESS_SWAP))
    stock = torch.compile(model, backend="aot_eager")
    found = []
    for step in (stock, compiled, compiled):
        model.zero_grad(set_to_none=True)
        loss = step(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])

    used = {runs[-1].problem.codec_of(s, int(c)) for s, c in enumerate(runs[-1].placement)}
    assert {"zvc_exponent", "narrow16"} <= used
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    raise_if_corrupt()
