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


def test_what_is_on_the_host_comes_back_behind_all_trials_of_a_variant(
    tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within each trial the way back would be most of what is compared; only indices need it there."""
    order: list[str] = []
    overwritten, indices = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    copies_made = {"in_out_ptr0": (overwritten, torch.ones(4)), "in_out_ptr1": (indices, torch.ones(4).long())}

    def bench(self: Any, fails: bool) -> float:
        for _ in range(3):
            order.append(f"trial on {int(overwritten[0])} {int(indices[0])}")
            overwritten.add_(5)
            indices.add_(5)
            self.restore_args_from_cpu(copies_made)
        if fails:
            raise RuntimeError("in a trial")
        return 1.0

    monkeypatch.setattr(tuner, "bench", bench)
    kernel: Any = object.__new__(tuner)
    kernel.fn = SimpleNamespace(src='tmp1 = tmp0 < 9\ntl.device_assert(tmp1, "out of bounds")')
    with frugal_benchmarks(1):
        assert tuner.bench(kernel, False) == 1.0
        assert order == ["trial on 0 0", "trial on 5 1", "trial on 10 1"]
        assert (overwritten.tolist(), indices.tolist()) == ([1.0] * 4, [1] * 4)
        with pytest.raises(RuntimeError, match="in a trial"):
            tuner.bench(kernel, True)
        assert overwritten.tolist() == [1.0] * 4
    assert tuner.bench is bench


@pytest.mark.parametrize("source", [None, 'tmp1 = tmp0.to(tl.int64)\ntl.device_assert(tmp1 < 9, "out of bounds")'])
def test_values_that_may_become_indices_come_back_within_each_trial(
    tuner: Any, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    overwritten, seen = torch.zeros(4), []

    def bench(self: Any) -> float:
        for _ in range(2):
            overwritten.add_(5)
            self.restore_args_from_cpu({"in_out_ptr0": (overwritten, torch.ones(4))})
            seen.append(overwritten.tolist())
        return 1.0

    monkeypatch.setattr(tuner, "bench", bench)
    kernel: Any = object.__new__(tuner)
    kernel.fn = SimpleNamespace(src=source)
    with frugal_benchmarks(1):
        tuner.bench(kernel)
    assert seen == [[1.0] * 4] * 2


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
    trials = [code for code in tuner.bench.__code__.co_consts if hasattr(code, "co_names")]
    assert any("restore_args_from_cpu" in code.co_names for code in trials)
    assert "optimize_mem" in tuner.copy_args_to_cpu_if_needed.__code__.co_names
