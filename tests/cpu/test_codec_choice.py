"""Which codec is offered for which saved tensor: by dtype, by what made it, by proven ranges, by size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.cuda_kernels import codec
from fxhome.passes import codec_choice
from fxhome.passes.codec_choice import MIN_CODEC_BYTES, choose_codecs, zero_share
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP
from tests.codec_tools import PROFILE, Run, compile_with, place

CUDA = dataclasses.replace(PROFILE, kind="cuda", d2h_bytes_per_s=5e10, h2d_bytes_per_s=5e10, memory_bytes_per_s=4e12)


def traced(function: object, *args: torch.Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*args).graph  # type: ignore[arg-type]


def zeros_of_result(function: object, *args: torch.Tensor) -> float:
    (output,) = traced(function, *args).find_nodes(op="output")
    result = output.args[0]
    assert isinstance(result, fx.Node)
    return zero_share(result, {})


X = torch.randn(2, 4, 8, 8)


@pytest.mark.parametrize(
    ("function", "share"),
    [
        (torch.relu, 0.5),
        (lambda x: torch.relu(x).view(-1).clone(), 0.5),
        (lambda x: x + 1, 0.0),
        (torch.nn.functional.gelu, 0.0),
        (lambda x: torch.relu(x) * x, 0.5),
        (lambda x: torch.nn.functional.relu6(x), 0.5),
        (lambda x: torch.cat([torch.relu(x), x]), 0.25),
        (lambda x: torch.max_pool2d(torch.relu(x), 2), 0.3),
        (lambda x: torch.ops.aten.native_dropout(torch.relu(x), 0.5, True)[0], 0.75),
    ],
)
def test_zeros_to_expect(function: object, share: float) -> None:
    assert zeros_of_result(function, X) == pytest.approx(share)


class Pooled(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, dtype=dtype)
        self.second = nn.Conv2d(16, 8, 3, padding=1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.first(x)), 2)
        return nn.functional.gelu(self.second(x)).square().mean()


def offers(run: Run) -> dict[str, tuple[str, str]]:
    """(compress, swap) codec by operator of the producer."""
    return {
        fact.owner: run.problem.codecs[s] for s, fact in enumerate(run.facts.storages) if any(run.problem.codecs[s])
    }


def planned(size: int, dtype: torch.dtype = torch.float32, lossy: bool | str = False) -> Run:
    model = Pooled(dtype)
    compiled, runs = compile_with(model, place(KEEP), lossy=lossy)
    compiled(torch.randn(4, 3, size, size, dtype=dtype))
    return runs[-1]


@pytest.mark.parametrize(("size", "codec"), [(16, "narrow8"), (64, "narrow16"), (258, "narrow32")])
def test_pooling_indices_by_the_range_of_the_image(size: int, codec: str) -> None:
    found = offers(planned(size))

    wanted = {"max_pool2d_with_indices": (codec, codec)} if size > 16 else {}
    assert {name: both for name, both in found.items() if name.startswith("max_pool")} == wanted


def test_rectified_values_move_encoded_and_stay_as_they_are() -> None:
    run = planned(64)

    assert offers(run)["relu"] == ("", "zvc_exponent")
    s = [fact.owner for fact in run.facts.storages].index("relu")
    assert not run.problem.allowed[s, COMPRESS]
    assert run.problem.allowed[s, COMPRESS_SWAP]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_floats_move_with_their_exponents_coded(dtype: torch.dtype) -> None:
    assert offers(planned(64, dtype))["convolution_1"] == ("", "exponent")


@pytest.mark.parametrize("lossy", [True, "int4", "fp8_e4m3"])
def test_lossy_is_offered_when_asked_for(lossy: bool | str) -> None:
    name = codec_choice.DEFAULT_LOSSY if lossy is True else lossy

    assert offers(planned(64, lossy=lossy))["convolution_1"] == (name, name)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(nn.functional.gelu(x * self.head.weight.sum()))
        return nn.functional.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize(("lossy", "codec"), [("int4", "int8"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3")])
def test_what_the_backward_exponentiates_takes_no_coarse_codec(lossy: str, codec: str) -> None:
    compiled, runs = compile_with(Scored(), place(KEEP), lossy=lossy)
    compiled(torch.randn(512, 64))
    found = offers(runs[-1])

    assert found["_log_softmax"] == (codec, codec)
    assert (lossy, lossy) in [both for name, both in found.items() if name != "_log_softmax"]


def test_small_storages_are_left_alone() -> None:
    run = planned(64)

    for s, fact in enumerate(run.facts.storages):
        assert fact.size_bytes >= MIN_CODEC_BYTES or not any(run.problem.codecs[s])


def graph_and_facts() -> Run:
    return planned(64)


def test_nothing_is_offered_without_compress() -> None:
    run = graph_and_facts()

    codecs = choose_codecs(run.forward, run.facts, CUDA, {"swap"})

    assert not any(codec.swap or codec.compress for codec in codecs)


def test_what_was_seen_replaces_what_was_assumed_and_may_end_the_offer() -> None:
    run = graph_and_facts()
    s = [fact.owner for fact in run.facts.storages].index("relu")
    plain = run.facts.storages[s].copy_bytes

    assumed, seen, dense = (
        choose_codecs(run.forward, run.facts, CUDA, {"swap", "compress"}, observed=observed)[s]
        for observed in ({}, {run.facts.storages[s].name: plain // 8}, {run.facts.storages[s].name: plain})
    )

    assert plain // 8 < seen.link_bytes < assumed.link_bytes < plain
    assert seen.swap == assumed.swap
    assert assumed.slot_bytes >= plain
    assert dense.swap == ""


def test_missing_kernels_are_announced_once_and_nothing_is_compressed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = graph_and_facts()
    facts = dataclasses.replace(run.facts, device_type="cuda")
    monkeypatch.setattr(codec_choice, "kernels_problem", lambda: "install it with: pip install numba-cuda")

    codecs = choose_codecs(run.forward, facts, CUDA, {"swap", "compress"})

    assert not any(codec.swap or codec.compress for codec in codecs)
    assert "pip install numba-cuda" in caplog.text


def test_a_variable_rate_codec_counts_with_its_worst_case_on_the_device() -> None:
    run = graph_and_facts()
    s = [fact.owner for fact in run.facts.storages].index("relu")
    plain = run.facts.storages[s].copy_bytes

    offer = choose_codecs(run.forward, run.facts, CUDA, {"swap", "compress"})[s]

    assert offer.compress == ""
    assert offer.encoded_bytes >= offer.slot_bytes >= plain
    assert offer.link_bytes < plain
    assert offer.encode_us > 0 < offer.decode_us


@pytest.mark.parametrize("link_bytes_per_s", [5e9, 5e10, 2e11, 1e12])
def test_what_takes_longer_than_a_plain_copy_is_not_offered(link_bytes_per_s: float) -> None:
    """Two kernels and two shorter copies against two plain copies; at some speed of the link nothing pays any more."""
    run = graph_and_facts()
    profile = dataclasses.replace(CUDA, d2h_bytes_per_s=link_bytes_per_s, h2d_bytes_per_s=link_bytes_per_s)

    offers = choose_codecs(run.forward, run.facts, profile, {"swap", "compress"})

    for fact, offer in zip(run.facts.storages, offers, strict=True):
        if offer.swap and not offer.compress:
            spent_us = offer.encode_us + offer.decode_us + 2e6 * offer.link_bytes / link_bytes_per_s
            assert spent_us < 2e6 * fact.copy_bytes / link_bytes_per_s
    varying = [offer for offer in offers if offer.swap and not offer.compress]
    assert bool(varying) == (link_bytes_per_s < 1e11)


@pytest.mark.parametrize(("slow", "wanted"), [((), "zvc_exponent"), (("zvc_exponent",), "zvc")])
def test_the_codec_with_the_shortest_round_trip_is_offered(
    slow: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller encoded form is no use where its kernels cost more than it saves on the link."""
    run = graph_and_facts()
    rate_share = codec.rate_share
    monkeypatch.setattr(codec, "rate_share", lambda name, *rest: rate_share(name, *rest) / (100 if name in slow else 1))
    s = [fact.owner for fact in run.facts.storages].index("relu")

    profile = dataclasses.replace(CUDA, launch_us=0.5)

    assert choose_codecs(run.forward, run.facts, profile, {"swap", "compress"})[s].swap == wanted
