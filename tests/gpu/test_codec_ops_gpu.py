"""The codec operators on a GPU: round trips through the host pool, streams, what is seen, whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxhome.cuda_kernels import raise_if_corrupt
from fxhome.cuda_kernels.chunks import CHUNK_BYTES
from fxhome.cuda_kernels.codec import kernels_problem
from fxhome.runtime import codec_ops, codec_sites, ops
from fxhome.runtime.staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def kernels() -> None:
    codec_sites.clear()
    if (problem := kernels_problem()) is not None:
        pytest.skip(problem)


def geometry(x: torch.Tensor) -> tuple[int, list[int], list[int], int, torch.dtype]:
    return x.untyped_storage().nbytes(), list(x.shape), list(x.stride()), int(x.storage_offset()), x.dtype


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
    for _ in range(20):
        source = source_for(codec)
        expected = source.clone()
        place = geometry(source)
        host = codec_ops.swap_out_encoded_op(source, place[0], codec, 1000, "site")
        busy = torch.randn(1000, 1000, device="cuda") @ torch.randn(1000, 1000, device="cuda")
        host = ops.swap_out_wait(host, source)
        source.fill_(float("nan"))  # the next writer of this memory
        back = codec_ops.swap_in_encoded_op(host, *place, torch.device("cuda"))
        busy = busy @ busy
        back = ops.swap_in_wait(back, host)
        assert torch.equal(back, expected)
        assert back.stride() == expected.stride()
    raise_if_corrupt()


def test_the_size_is_seen_without_a_synchronisation_and_dense_data_is_copied_plainly() -> None:
    dense = torch.randn(1 << 20, device="cuda")
    place = geometry(dense)
    for _ in range(4):
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(dense, place[0], "zvc", 1000, "site"), dense)
        torch.cuda.synchronize()  # the user's own, say to read the loss
        back = ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, *place, torch.device("cuda")), host)
        assert torch.equal(back, dense)

    (report,) = codec_sites.reports()
    assert report.ratio_seen is not None
    assert report.ratio_seen < 1
    assert not report.is_encoding
    assert report.decisions_changed == 1


def test_sizes_are_seen_although_the_host_runs_ahead() -> None:
    sparse = torch.zeros(1 << 20, device="cuda")
    place = geometry(sparse)
    weight = torch.randn(4096, 4096, device="cuda")
    for _ in range(40):
        for _ in range(4):
            weight @ weight
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(sparse, place[0], "zvc", 1000, "site"), sparse)
        ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, *place, torch.device("cuda")), host)
    torch.cuda.synchronize()
    host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(sparse, place[0], "zvc", 1000, "site"), sparse)

    (report,) = codec_sites.reports()
    assert report.ratio_seen is not None
    assert report.ratio_seen > 10


def test_many_chunks_and_bounds_that_turn_out_too_small() -> None:
    """Three chunks and a bit; the share of zeros jumps, so the copy engine is told too little again and again."""
    numel = 3 * CHUNK_BYTES // 4 + 1001
    noise = torch.randn(numel, device="cuda")
    place = geometry(noise)
    for step, zeros in enumerate([0.9, 0.9, 0.5, 0.9, 0.6, 0.95, 0.5, 0.5]):
        source = torch.where(torch.rand(numel, device="cuda") < zeros, torch.zeros_like(noise), noise)
        expected = source.clone()
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(source, place[0], "zvc", 1000, "site"), source)
        source.fill_(float("nan"))
        if step % 2:
            torch.cuda.synchronize()  # the sizes are then known on the way back
        back = ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, *place, torch.device("cuda")), host)
        assert torch.equal(back, expected), f"step {step}"
        torch.cuda.synchronize()
    raise_if_corrupt()
    assert codec_sites.reports()[0].is_encoding


def test_many_tensors_in_flight_from_two_streams() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sources = [torch.relu(torch.randn(300_000 + 1000 * number, device="cuda")) for number in range(24)]
    expected = [source.clone() for source in sources]
    torch.cuda.synchronize()
    hosts = []
    for number, source in enumerate(sources):
        with torch.cuda.stream(streams[number % 2]):
            size_bytes = source.untyped_storage().nbytes()
            host = codec_ops.swap_out_encoded_op(source, size_bytes, "zvc", 1000, f"site {number}")
            hosts.append(ops.swap_out_wait(host, source))
            source.fill_(-1)
    found = []
    for number in reversed(range(len(hosts))):
        with torch.cuda.stream(streams[(number // 2) % 2]):
            back = codec_ops.swap_in_encoded_op(hosts[number], *geometry(sources[number]), torch.device("cuda"))
            found.append(torch.equal(ops.swap_in_wait(back, hosts[number]), expected[number]))
    raise_if_corrupt()
    assert all(found)


def test_the_steady_state_allocates_only_what_is_reloaded() -> None:
    source = torch.relu(torch.randn(1 << 20, device="cuda"))
    place = geometry(source)

    def step() -> None:
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(source, place[0], "zvc", 1000, "site"), source)
        ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, *place, torch.device("cuda")), host)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(5):
        step()
    after = torch.cuda.memory_stats()

    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 5
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]


def test_the_staging_takes_what_it_announces() -> None:
    largest = 3 << 20
    staging = Staging(torch.device("cuda", torch.cuda.current_device()))
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]

    staging.reserve(largest)

    taken = torch.cuda.memory_stats()["allocated_bytes.all.current"] - before
    assert taken == codec_ops.staging_bytes(largest)
    staging.reserve(largest // 2)
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] - before == taken


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
