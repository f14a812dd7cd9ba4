"""Where one bit per element is all that the backward asks for, and that it is never offered elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxhome.cuda_kernels.codec import codec_by_name
from fxhome.errors import GraphRuleError
from fxhome.passes.mask_readers import MASK_CODECS, mask_codecs
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, RECOMPUTE
from fxhome.passes.verify import verify_codecs
from fxhome.runtime import codec_ops
from fxhome.runtime.stand_in import cpu_stand_in
from tests.codec_tools import Run, compile_with, place, run_step, stock_step

NO_RECOMPUTE = ("swap", "compress")
ALL = ("swap", "compress", "recompute")


class Tail(nn.Module):
    """A convolution, what a test puts behind it, and something with gradients behind that."""

    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.first(x)).square().mean()


def offered(behind: Callable[[torch.Tensor], torch.Tensor], allow: Collection[str] = NO_RECOMPUTE) -> dict[str, str]:
    """Storage -> mask codec."""
    compiled, runs = compile_with(Tail(behind), place(KEEP), allow=allow)
    compiled(torch.randn(4, 3, 32, 32))
    run = runs[-1]
    found = {fact.name: run.problem.codecs[s] for s, fact in enumerate(run.facts.storages)}
    assert all(on_device == moved for on_device, moved in found.values() if moved in MASK_CODECS)
    return {name: moved for name, (_, moved) in found.items() if moved in MASK_CODECS}


def pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.max_pool2d(torch.relu(x), 2)


@pytest.mark.parametrize(
    ("behind", "masks"),
    [
        (pooled, {"relu": "relu_mask"}),
        (lambda x: torch.relu(x) + 1, {"relu": "relu_mask"}),
        (lambda x: torch.cat([torch.relu(x), torch.relu(x - 1)], 1), {"relu": "relu_mask", "relu_1": "relu_mask"}),
        (lambda x: F.relu6(x) + 1, {"convolution": "relu6_mask"}),
        (lambda x: torch.max_pool2d(F.relu6(x), 2), {"convolution": "relu6_mask", "hardtanh": "relu_mask"}),
        (lambda x: torch.relu(x).view(-1, 32).t() + 1, {"relu": "relu_mask"}),
    ],
)
def test_only_the_mask_is_asked_for(behind: Callable[[torch.Tensor], torch.Tensor], masks: dict[str, str]) -> None:
    assert offered(behind) == masks


@pytest.mark.parametrize(
    "behind",
    [
        lambda x: torch.relu(x) * x,
        lambda x: torch.relu(x).square(),
        lambda x: torch.relu(x).view(-1, 32) @ x.view(-1, 32)[:32],
        lambda x: F.threshold(x, 0.5, 0.0) + 1,
        lambda x: F.hardtanh(x, -1.0, 1.0) + 1,
        lambda x: torch.relu(x).view(torch.int32).sum() * 0.0 + torch.relu(x).exp(),
        F.gelu,
    ],
)
def test_what_asks_for_values_gets_no_mask(behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "relu" not in offered(behind)
    assert "convolution" not in offered(behind)


def test_what_a_reader_may_be_rebuilt_from_gets_no_mask() -> None:
    """Rebuilding the pooling reads the values: with recomputation allowed a plan may do so."""
    assert offered(pooled, ALL) == {}


class Net(nn.Module):
    """Relu before pooling, concatenation and a convolution; relu6 behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.left = nn.Conv2d(16, 16, 1)
        self.right = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(32, 32, 3, padding=1)
        self.scale = nn.BatchNorm2d(32, track_running_stats=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        x = torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], 1)
        x = F.relu6(self.scale(self.last(x)))
        return self.head(F.adaptive_avg_pool2d(x, 2).mean((2, 3))).square().mean()


@pytest.mark.parametrize("code", [COMPRESS, COMPRESS_SWAP])
@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_gradients_are_bitwise_and_the_peak_exact(code: int, timing: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 3, 64, 64)
    loss, gradients = stock_step(model, x)

    with cpu_stand_in(copy_timing=timing, poison=True):  # type: ignore[arg-type]
        found = run_step(model, x, place(code), allow=NO_RECOMPUTE)

    used = [found.problem.codec_of(s, code) for s in map(int, np.flatnonzero(found.result.saved))]
    assert used.count("relu_mask") >= 3
    assert used.count("relu6_mask") == 1
    assert found.loss is not None
    assert torch.equal(found.loss, loss)
    assert all(map(torch.equal, found.gradients, gradients))
    assert found.measured_peak_bytes == found.result.peak_bytes == found.written_peak_bytes


def test_a_mask_takes_precedence_over_a_lossy_codec() -> None:
    compiled, runs = compile_with(Tail(pooled), place(KEEP), lossy="int4", allow=NO_RECOMPUTE)
    compiled(torch.randn(4, 3, 32, 32))
    (run,) = runs
    s = [fact.name for fact in run.facts.storages].index("relu")

    assert run.problem.codecs[s] == ("relu_mask", "relu_mask")


def masked() -> Run:
    compiled, runs = compile_with(Tail(pooled), place(COMPRESS), allow=NO_RECOMPUTE)
    compiled(torch.randn(4, 3, 32, 32))
    return runs[-1]


def test_a_reader_of_values_behind_a_mask_breaks_a_graph_rule() -> None:
    run = masked()
    graph = run.backward.graph
    (decode,) = [node for node in graph.nodes if node.target is codec_ops.decode_op and node.args[6] == "relu_mask"]
    with graph.inserting_after(decode):
        view = graph.call_function(torch.ops.aten.view.default, (decode, [-1]))
    with decode.meta["val"].fake_mode:
        view.meta["val"] = decode.meta["val"].view(-1)
    with graph.inserting_after(view):
        graph.call_function(torch.ops.aten.exp.default, (view,)).name = "curious"

    with pytest.raises(GraphRuleError, match=r"what was kept as a mask is read as one.*'curious'"):
        verify_codecs(run.forward, run.backward)


@pytest.mark.parametrize(
    ("behind", "mask"),
    [
        (lambda x: torch.max_pool2d(torch.relu(x).split(8, 1)[0], 2), "relu_mask"),
        (lambda x: torch.max_pool2d(torch.relu(x).unbind(0)[0], 2), "relu_mask"),
        (lambda x: F.relu6((x * 1).chunk(2, 1)[0]) + 1, "relu6_mask"),
        (lambda x: F.relu6(x.transpose(2, 3).reshape(4, 16, 8, 128)) + 1, "relu6_mask"),
    ],
)
def test_views_without_a_view_s_schema_keep_a_graph_rule(
    behind: Callable[[torch.Tensor], torch.Tensor], mask: str
) -> None:
    """Several views at a time, and the one operator that makes a view and does not say so."""
    torch.manual_seed(0)
    model, x = Tail(behind), torch.randn(4, 3, 32, 32)
    loss, gradients = stock_step(model, x)

    found = run_step(model, x, place(COMPRESS), allow=NO_RECOMPUTE)

    used = [found.problem.codec_of(s, COMPRESS) for s in map(int, np.flatnonzero(found.result.saved))]
    assert used.count(mask) == 1
    assert found.loss is not None
    assert torch.equal(found.loss, loss)
    assert all(map(torch.equal, found.gradients, gradients))


def test_a_reader_of_values_behind_several_views_breaks_a_graph_rule() -> None:
    run = masked()
    graph = run.backward.graph
    (decode,) = [node for node in graph.nodes if node.target is codec_ops.decode_op and node.args[6] == "relu_mask"]
    with graph.inserting_after(decode):
        parts = graph.call_function(torch.ops.aten.split.Tensor, (decode, 8, 1))
    with decode.meta["val"].fake_mode:
        parts.meta["val"] = decode.meta["val"].split(8, 1)
    with graph.inserting_after(parts):
        part = graph.call_function(operator.getitem, (parts, 1))
    part.meta["val"] = parts.meta["val"][1]
    with graph.inserting_after(part):
        graph.call_function(torch.ops.aten.exp.default, (part,)).name = "curious"

    with pytest.raises(GraphRuleError, match=r"what was kept as a mask is read as one.*'curious'"):
        verify_codecs(run.forward, run.backward)


def test_what_is_pooled_for_a_mean_is_asked_for_its_shape() -> None:
    """Every reader in the backward of what adaptive pooling took: none, or the pooling's own gradient."""
    found = offered(lambda x: F.adaptive_avg_pool2d(torch.relu(x), 5))

    assert found == {"relu": "relu_mask"}


def test_a_recomputed_reader_is_really_refused_by_the_facts() -> None:
    """The same facts, asked with and without recomputation; a plan that recomputes keeps values."""
    compiled, runs = compile_with(Tail(pooled), place(RECOMPUTE), allow=ALL)
    compiled(torch.randn(4, 3, 32, 32))
    run = runs[-1]

    assert mask_codecs(run.forward.graph, run.facts, ALL) == {}


def test_names_of_mask_codecs_are_those_of_codecs() -> None:
    assert {codec_by_name(name).name for name in MASK_CODECS} == MASK_CODECS
    assert not any(codec_by_name(name).lossless for name in MASK_CODECS)
