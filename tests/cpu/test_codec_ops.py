"""The codec operators on CPU: round trips of raw storages, copy timing and poison, fakes, changing one's mind."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.cuda_kernels import codec_by_name
from fxhome.runtime import codec_ops, codec_sites, ops
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.meter import live_storage_bytes
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in


@pytest.fixture(autouse=True)
def no_sites() -> None:
    codec_sites.clear()


def geometry(x: torch.Tensor) -> tuple[int, list[int], list[int], int, torch.dtype]:
    return x.untyped_storage().nbytes(), list(x.shape), list(x.stride()), int(x.storage_offset()), x.dtype


def bits(x: torch.Tensor) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes(),), (1,))
    return flat.numpy().tobytes()


def half_zeros(*size: int) -> torch.Tensor:
    return torch.relu(torch.randn(*size, generator=torch.Generator().manual_seed(0)))


CPU = torch.device("cpu")


def out(source: torch.Tensor, codec: str, site: str = "site", assumed: int = 100) -> torch.Tensor:
    """Encode and move to the host; the encoded tensor is gone."""
    encoded = codec_ops.encode_op(source, source.untyped_storage().nbytes(), codec, assumed, site)
    host: torch.Tensor = ops.swap_out_wait(codec_ops.swap_out_encoded_op(encoded), encoded)
    return host


def back(host: torch.Tensor, place: tuple[int, list[int], list[int], int, torch.dtype], codec: str) -> torch.Tensor:
    """Move back and decode."""
    encoded = ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, CPU), host)
    decoded: torch.Tensor = codec_ops.decode_op(encoded, *place, codec)
    return decoded


SOURCES = [
    ("bitpack", torch.rand(33, 70) > 0.5),
    ("bitpack", (torch.rand(4, 6, 5, 3) > 0.5).to(memory_format=torch.channels_last)),
    ("narrow16", torch.arange(60_000).reshape(200, 300).t()),
    ("narrow8", torch.arange(256)[3:200:2]),
]


@pytest.mark.parametrize(("codec", "source"), SOURCES)
def test_fixed_rate_codecs_restore_the_whole_storage(codec: str, source: torch.Tensor) -> None:
    encoded = codec_ops.encode_op(source, source.untyped_storage().nbytes(), codec)
    restored = codec_ops.decode_op(encoded, *geometry(source), codec)

    numel = source.untyped_storage().nbytes() // source.dtype.itemsize
    assert encoded.numel() == codec_by_name(codec).encoded_bytes(numel, source.dtype)
    assert restored.stride() == source.stride()
    assert bits(restored) == bits(source)


@pytest.mark.parametrize("timing", ["earliest", "latest"])
@pytest.mark.parametrize("codec", ["zvc", "csr", "rle", "exponent"])
def test_variable_rate_codecs_go_to_the_host_and_back(codec: str, timing: CopyTiming) -> None:
    source = half_zeros(64, 300).t()
    source[0, 0] = float("nan")
    expected, place = bits(source), geometry(source)
    with cpu_stand_in(copy_timing=timing, poison=True):
        encoded = codec_ops.encode_op(source, place[0], codec, 100, "site")
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(encoded), encoded)
        assert bits(encoded) == b"\xff" * encoded.numel()
        here = codec_ops.swap_in_encoded_op(host, CPU)
        assert bits(here) == b"\xff" * encoded.numel()
        decoded = codec_ops.decode_op(ops.swap_in_wait(here, host), *place, codec)

    assert bits(decoded) == expected
    assert decoded.stride() == source.stride()


def test_a_retained_graph_reads_its_slot_twice() -> None:
    source = half_zeros(5000)
    host = out(source, "zvc")

    assert torch.equal(back(host, geometry(source), "zvc"), source)
    assert torch.equal(back(host, geometry(source), "zvc"), source)


def step(source: torch.Tensor, site: str = "site") -> torch.Tensor:
    """Out and back once."""
    return back(out(source, "zvc", site, source.untyped_storage().nbytes() // 2), geometry(source), "zvc")


def test_the_size_is_seen_and_reported() -> None:
    step(half_zeros(1 << 15), codec_sites.site_name("graph", "relu"))

    (report,) = codec_sites.reports("graph")
    assert report.ratio_assumed == 2.0
    assert report.ratio_seen == pytest.approx(1.9, abs=0.1)
    assert report.is_encoding
    assert codec_sites.observed_bytes("graph").keys() == {"relu"}
    (line,) = codec_sites.notes("graph")
    assert "ratio seen 1.8" in line or "ratio seen 1.9" in line
    assert codec_sites.notes("other") == ()


def margins(vectors: list[int]) -> list[int]:
    """What a copy is told to move beyond the tail last seen, step by step."""
    site = codec_sites.CodecSite("site", "zvc", 1 << 24, 1 << 23, 128)
    found = []
    for count in vectors:
        site.note.word.value = count + 1
        site.next_step()
        found.append(site.bound_bytes() - 128 - 16 * count)
    return found


def test_what_sites_note_down_is_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every live tensor counts: one made for the first encoded copy would break the promise of its step."""
    monkeypatch.setattr(codec_sites, "_boards", {False: [], True: []})
    before = live_storage_bytes(granule_bytes=1)
    codec_sites.add_site("site", "zvc", 1 << 24, 1 << 23)

    assert live_storage_bytes(granule_bytes=1) == before


def test_the_margin_of_a_copy_follows_what_sizes_do() -> None:
    steady = margins([100_000] * 12)
    rising = margins([100_000] * 11 + [100_400] * 2)

    assert steady[0] == pytest.approx(4096 + 1_600_000 / 128, abs=16)
    assert all(earlier >= later for earlier, later in pairwise(steady))
    assert steady[-1] == 4096
    assert rising[11] == pytest.approx(4096 + 400 * 16, abs=64)  # the same rise again would still be within
    assert rising[12] == pytest.approx(4096 + 200 * 16, abs=64)
    assert margins([100_000, 200_000])[1] == pytest.approx(4096 + 3_200_000 / 64, abs=16)  # never more than at first
    assert all(margin % 16 == 0 for margin in steady + rising)


def test_dense_data_is_copied_plainly_from_the_next_step_on_and_tried_again_later() -> None:
    dense, sparse = torch.ones(1 << 14), torch.zeros(1 << 14)
    assert torch.equal(step(dense), dense)
    (report,) = codec_sites.reports()
    assert not report.is_encoding

    for _ in range(codec_sites.RETRY_STEPS - 1):
        assert torch.equal(step(sparse), sparse)
    assert not codec_sites.reports()[0].is_encoding
    assert torch.equal(step(sparse), sparse)

    assert codec_sites.reports()[0].is_encoding
    assert codec_sites.reports()[0].decisions_changed == 2


def test_a_change_of_mind_between_the_directions_is_harmless() -> None:
    """The slot knows what it holds: two steps may overlap."""
    dense = torch.ones(1 << 14)
    hosts = [out(dense, "zvc")]
    site = codec_sites.site_of("site", "zvc", dense.untyped_storage().nbytes())
    assert site is not None
    site.is_encoding = False
    site.note.word.value = 0
    hosts.append(out(dense, "zvc"))
    assert bits(hosts[1])[: 4 << 14] == bits(dense)
    assert bits(hosts[0])[: 4 << 14] != bits(dense)
    for host in hosts:
        assert torch.equal(back(host, geometry(dense), "zvc"), dense)


def test_only_an_encoded_tensor_is_moved_as_one() -> None:
    with pytest.raises(RuntimeError, match="does not come from an encode"):
        codec_ops.swap_out_encoded_op(torch.zeros(100, dtype=torch.uint8))


def test_slots_are_large_enough_for_the_worst_case_and_come_back() -> None:
    before = host_pool().status().in_use_bytes
    noise = torch.randn(1 << 14)
    restored = step(noise)

    assert torch.equal(restored, noise)
    assert host_pool().status().in_use_bytes == before


def test_another_storage_than_planned_is_refused() -> None:
    with pytest.raises(RuntimeError, match="400 bytes, 1000 were planned"):
        codec_ops.encode_op(torch.zeros(100), 1000, "int8")


@pytest.mark.parametrize("recorded", [((1, 8), torch.float32), ((8, 1), torch.int32)], ids=["stride", "type"])
def test_another_layout_than_recorded_is_refused(recorded: tuple[tuple[int, int], torch.dtype]) -> None:
    with pytest.raises(RuntimeError, match=r"tracing recorded .* allow=\('swap', 'recompute'\)"):
        codec_ops.encode_op(torch.zeros(8, 8), 256, "int8", 0, "", *recorded)


def test_fakes_have_the_real_sizes() -> None:
    source = half_zeros(100, 130)
    size_bytes = source.untyped_storage().nbytes()
    encoded = codec_ops.encode_op(source, size_bytes, "int8")
    host = out(source, "zvc")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(100, 130)
        fake_encoded = codec_ops.encode_op(fake, size_bytes, "int8")
        fake_host = codec_ops.swap_out_encoded_op(codec_ops.encode_op(fake, size_bytes, "zvc", 1, "site"))
        decoded = codec_ops.decode_op(fake_encoded, *geometry(source), "int8")
        here = codec_ops.decode_op(codec_ops.swap_in_encoded_op(fake_host, CPU), *geometry(source), "zvc")

    assert fake_encoded.shape == encoded.shape
    assert fake_host.shape == host.shape
    assert decoded.shape == here.shape == source.shape
    assert decoded.untyped_storage().nbytes() == here.untyped_storage().nbytes() == size_bytes


def test_inductor_keeps_layouts_and_values() -> None:
    """The operators are opaque calls to it; a transposed mask must come back with its own strides."""

    def through(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (x.permute(1, 0) > 0).clone(memory_format=torch.contiguous_format).permute(1, 0)
        encoded = codec_ops.encode_op(mask, 5000, "bitpack")
        values = torch.relu(x) + 0.0
        packed = codec_ops.encode_op(values, 20_000, "zvc", 100, "inductor")
        host = ops.swap_out_wait(codec_ops.swap_out_encoded_op(packed), packed)
        packed = ops.swap_in_wait(codec_ops.swap_in_encoded_op(host, CPU), host)
        back = codec_ops.decode_op(packed, 20_000, [50, 100], [100, 1], 0, torch.float32, "zvc")
        decoded = codec_ops.decode_op(encoded, 5000, [50, 100], [1, 50], 0, torch.bool, "bitpack")
        return torch.where(decoded, back * 2, back - 1), decoded

    from torch._inductor.compile_fx import compile_fx_inner

    x = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    graph = make_fx(through, tracing_mode="fake")(x)
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(fakes[0].fake_mode)), torch.no_grad():
        compiled: Any = compile_fx_inner(graph, fakes)
    with cpu_stand_in(copy_timing="latest", poison=True), torch.no_grad():
        found, decoded = compiled([x.clone()])

    assert decoded.stride() == (1, 50)
    assert torch.equal(decoded, x > 0)
    assert torch.equal(found, torch.where(x > 0, torch.relu(x) * 2, torch.relu(x) - 1))
