"""Benchmarks that share a device: none is timed while another gets ready."""

import fcntl
import threading
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.quiet import getting_ready, quiet, tuned_in_turn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))


def test_timing_is_alone_once_nobody_gets_ready() -> None:
    with getting_ready(CPU):
        pass
    with quiet(CPU, 0.0) as alone:
        assert alone


def test_timing_says_when_others_did_not_get_ready_in_time() -> None:
    with getting_ready(CPU), getting_ready(CPU), quiet(CPU, 0.0) as alone:
        assert not alone


def test_one_that_starts_later_waits_for_the_one_that_is_timed() -> None:
    order: list[str] = []
    started = threading.Event()

    def later() -> None:
        started.set()
        with getting_ready(CPU):
            order.append("ready")

    with quiet(CPU, 0.0) as alone:
        assert alone
        other = threading.Thread(target=later)
        other.start()
        assert started.wait(60)
        other.join(0.2)
        order.append("timed")
    other.join(60)
    assert order == ["timed", "ready"]


def test_variants_are_compared_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(self: object, *args: int) -> tuple[int, ...]:
        with (tmp_path / "tuning-cpu.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return args

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", compare)
    kernel = object.__new__(CachingAutotuner)
    with tuned_in_turn(CPU):
        assert kernel.benchmark_all_configs(1, 2) == (1, 2)
    assert CachingAutotuner.benchmark_all_configs is compare
