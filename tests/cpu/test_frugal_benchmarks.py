"""What Inductor copies to try the variants of a kernel: on the device where there is room, on the host where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime import benchmarking, triton_heuristics

from fxhome.passes.torch_compat import frugal_benchmarks

SIZE_BYTES = 8 << 20
SLACK_BYTES = 1 << 20


class Kernel:
    """As much of an Inductor kernel as says what it overwrites. `chosen`: what Inductor itself would copy."""

    def __init__(self, is_forward: bool) -> None:
        self.fn = SimpleNamespace(arg_names=["in_out_ptr0", "in_ptr0", "xnumel"])
        self.mutated_arg_names = ["in_out_ptr0"]
        self.optimize_mem = not is_forward
        self.asked: list[bool] = []


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Inductor's class, whose choice is written down: where it is asked at all, everything goes to the host."""

    def choose(self: Kernel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.asked.append(self.optimize_mem)
        return {"in_out_ptr0": args[0]} if self.optimize_mem else {}

    monkeypatch.setattr(triton_heuristics.CachingAutotuner, "copy_args_to_cpu_if_needed", choose)
    return triton_heuristics.CachingAutotuner


def copies(tuner: Any, kernel: Kernel) -> dict[str, Any]:
    tensor = torch.empty(SIZE_BYTES // 4)
    found: dict[str, Any] = tuner.copy_args_to_cpu_if_needed(kernel, tensor, torch.empty(4 * SIZE_BYTES // 4), 7)
    return found


def allocated(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: size_bytes)


def test_what_is_overwritten_is_copied_on_the_device_where_there_is_room(
    tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated(monkeypatch, 100 << 20)
    kernel = Kernel(is_forward=True)
    with frugal_benchmarks((100 << 20) + SIZE_BYTES + SLACK_BYTES):
        assert copies(tuner, kernel) == {}
    assert kernel.asked == []


@pytest.mark.parametrize("is_forward", [True, False])
def test_it_goes_to_the_host_where_there_is_none(tuner: Any, monkeypatch: pytest.MonkeyPatch, is_forward: bool) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(1))
    allocated(monkeypatch, 100 << 20)
    kernel = Kernel(is_forward)
    with frugal_benchmarks((100 << 20) + SIZE_BYTES):
        assert list(copies(tuner, kernel)) == ["in_out_ptr0"]
        assert kernel.asked == [True]
        assert emptied == []
    assert kernel.optimize_mem is not is_forward
    assert emptied == [1], "pinned copies are given back"


def test_without_a_limit_inductor_copies_as_it_does(tuner: Any) -> None:
    kernel = Kernel(is_forward=True)
    with frugal_benchmarks():
        assert copies(tuner, kernel) == {}
    assert kernel.asked == [False]


def test_all_is_put_back_even_after_an_error(tuner: Any) -> None:
    before = tuner.copy_args_to_cpu_if_needed
    cache = vars(benchmarking.benchmarker).get("L2_cache_size")

    def fails() -> None:
        with frugal_benchmarks(1):
            assert vars(benchmarking.benchmarker)["L2_cache_size"] == 512
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        fails()
    assert tuner.copy_args_to_cpu_if_needed is before
    assert vars(benchmarking.benchmarker).get("L2_cache_size") == cache


def test_inductor_still_decides_by_what_is_patched() -> None:
    tuner = triton_heuristics.CachingAutotuner
    assert "copy_args_to_cpu_if_needed" in tuner.bench.__code__.co_names
    assert "optimize_mem" in tuner.copy_args_to_cpu_if_needed.__code__.co_names
