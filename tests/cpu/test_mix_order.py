"""The workspace of kernels with reductions in two orders, for the sizes that a trace of a real device showed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import scheduler
from torch._inductor.runtime import hints

from fxhome.passes.mix_order import mix_order_workspace, rows_of_a_part


class Reduction:
    """A scheduler node that is one reduction, or pointwise."""

    def __init__(self, is_one: bool) -> None:
        self.is_one = is_one

    def is_reduction(self) -> bool:
        return self.is_one

    def get_device(self) -> torch.device:
        return torch.device("cuda", 0)


class FusedMixOrderReductions:
    """What Inductor's class of that name has, as far as its workspace goes."""

    def __init__(self, reductions: int) -> None:
        self.node1 = Reduction(True)
        self.node2 = SimpleNamespace(get_nodes=lambda: [Reduction(True)] * reductions + [Reduction(False)])


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hints.DeviceProperties, "create", classmethod(lambda *_: SimpleNamespace(multi_processor_count=132))
    )


@pytest.mark.usefixtures("h200")
def test_a_layer_norms_backward_keeps_a_part_of_each_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = staticmethod(lambda _: (16384, 4096))
    monkeypatch.setattr(scheduler.MixOrderReduction, "get_numel_rnumel", sizes)
    # Weight and bias, 1024 parts of 16 rows, 4096 columns of float32.
    assert mix_order_workspace(FusedMixOrderReductions(2)) == 2 * 1024 * 4096 * 4
    assert mix_order_workspace(FusedMixOrderReductions(1)) == 1024 * 4096 * 4
    assert mix_order_workspace(Reduction(True)) == 0


@pytest.mark.usefixtures("h200")
def test_the_parts_are_as_many_as_torch_makes() -> None:
    device = torch.device("cuda", 0)
    assert [rows_of_a_part(rows, device) for rows in (1, 16384, 40_000, 100_000, 1 << 20)] == [16, 16, 32, 64, 128]
    with torch._inductor.config.patch({"triton.mix_order_reduction_split_size": 24}):
        assert rows_of_a_part(16384, device) == 24
