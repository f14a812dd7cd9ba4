"""The host timed in real steps on a GPU: a plan whose step it binds is told, and the device's profile with it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome import ledger
from fxhome.backend import fxhome as backend
from fxhome.device import cached_profile
from fxhome.host_costs import TimedGraph
from fxhome.host_timer import MAX_CALLS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LAYERS, WIDTH, BATCH = 24, 64, 64


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_step_that_the_host_binds_is_predicted_by_what_it_takes(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[torch.device, str, TimedGraph]] = []
    monkeypatch.setattr("fxhome.variant.keep_timed_graph", lambda *told: kept.append(told))
    torch._dynamo.reset()
    cached_profile("cuda", inner)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(BATCH, WIDTH, device="cuda")
    options: Any = {"memory_budget": "100%", "inner": inner}
    step = torch.compile(lambda x: model(x).square().mean(), backend=backend, options=options)
    longest_us = 0.0
    first = None
    for _ in range(MAX_CALLS + 2):
        model.zero_grad()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(x).backward()
        torch.cuda.synchronize()
        longest_us = max(longest_us, (time.perf_counter() - begin) * 1e6)
        first = first if first is not None else fxhome.plans()[0]
    assert first is not None
    (graph,) = ledger.graphs()
    (variant,) = graph.variants
    assert variant.timer is not None
    assert variant.timer.is_complete
    ((_, told_inner, timed),) = kept
    assert told_inner == inner
    assert timed.graph == first.graph_fingerprint
    # What launches took is a part of the steps that it was seen in; the probe's figures are of the same kind.
    assert timed.taken_us < longest_us
    assert 0.3 < timed.taken_us / timed.alone_us < 20.0
    (plan,) = fxhome.plans()
    assert plan.predicted_step_seconds * 1e6 > timed.taken_us
    assert plan.fingerprint() == first.fingerprint()
    assert any(note.startswith("bound by the host") for note in plan.notes)
    torch._dynamo.reset()
