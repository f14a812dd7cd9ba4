"""The host pool: exact slots, reuse only after the fences, limits checked before anything is allocated."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.errors import HostMemoryError
from fxhome.runtime import host_pool as host_pool_module
from fxhome.runtime.free_space import ALIGNMENT_BYTES, Block, Fence, FreeSpace, latest_fences, round_up
from fxhome.runtime.host_memory import HostLimits
from fxhome.runtime.host_pool import POISON, HostPool

MIB = 1024 * 1024


def limited_to(monkeypatch: pytest.MonkeyPatch, machine: int, cgroup: int | None = None) -> None:
    monkeypatch.setattr(host_pool_module, "read_host_limits", lambda: HostLimits(machine, cgroup, None))


def test_a_slot_is_exact_and_writable() -> None:
    pool = HostPool()
    tensor, slot = pool.empty(1000, pinned=False)
    assert tensor.untyped_storage().nbytes() == 1000
    assert slot is not None
    assert slot.block.size_bytes == 1024  # 512-byte steps, no power-of-two classes
    assert pool.slot_of(tensor) is slot
    assert pool.owns(tensor.data_ptr())
    assert not pool.owns(torch.zeros(4).data_ptr())
    tensor.copy_(torch.arange(1000) % 251)
    assert torch.equal(tensor, (torch.arange(1000) % 251).to(torch.uint8))


def test_zero_bytes_need_no_slot() -> None:
    pool = HostPool()
    tensor, slot = pool.empty(0, pinned=False)
    assert tensor.numel() == 0
    assert slot is None
    assert pool.slot_of(tensor) is None
    assert pool.status().reserved_bytes == 0


def test_a_slot_returns_when_its_last_view_dies() -> None:
    pool = HostPool()
    tensor, _ = pool.empty(3 * 512, pinned=False)
    view, address = tensor[512:], tensor.data_ptr()
    del tensor
    assert pool.status().in_use_bytes == 3 * 512
    del view
    status = pool.status()
    assert (status.in_use_bytes, status.live_slots, status.peak_bytes) == (0, 0, 3 * 512)
    again, _ = pool.empty(3 * 512, pinned=False)
    assert again.data_ptr() == address


def test_neighbours_merge_so_that_a_larger_slot_fits() -> None:
    pool = HostPool()
    pool.reserve(2 * MIB, pinned=False)
    halves = [pool.empty(MIB, pinned=False)[0] for _ in range(2)]
    halves.clear()
    whole, _ = pool.empty(2 * MIB, pinned=False)
    assert whole.numel() == 2 * MIB
    assert pool.status().slab_count == 1


def test_a_reused_slot_carries_the_fences_of_its_last_user() -> None:
    pool = HostPool()
    tensor, slot = pool.empty(MIB, pinned=False)
    assert slot is not None
    slot.add_fence(Fence("h2d", 3, "event"))
    del tensor
    _, again = pool.empty(512, pinned=False)
    assert again is not None
    assert again.fences == (Fence("h2d", 3, "event"),)


def test_the_latest_fence_of_each_queue_is_enough() -> None:
    first, second, other = Fence("a", 1, "x"), Fence("a", 2, "y"), Fence("b", 0, "z")
    assert set(latest_fences((second, other), (first,))) == {second, other}


def test_freed_slots_are_poisoned_on_request() -> None:
    pool = HostPool()
    pool.poison_on_release = True
    tensor, _ = pool.empty(512, pinned=False)
    tensor.zero_()
    del tensor
    pool.poison_on_release = False
    again, _ = pool.empty(512, pinned=False)
    assert bool((again == POISON).all())


def test_tensors_dying_in_many_threads_leave_nothing_behind() -> None:
    pool = HostPool()
    failures: list[str] = []

    def work(seed: int) -> None:
        held: list[torch.Tensor] = []
        for step in range(300):
            tensor, _ = pool.empty(512 * (1 + (seed * 7 + step) % 13), pinned=False)
            tensor.fill_(seed)
            held.append(tensor)
            if len(held) > 5 and bool((held.pop(step % 5) != seed).any()):
                failures.append(f"thread {seed}: another thread wrote into its slot")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert failures == []
    assert pool.status().in_use_bytes == 0
    assert pool.status().live_slots == 0


def test_a_budget_above_what_the_host_has_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited_to(monkeypatch, machine=8 * 1024 * MIB, cgroup=100 * MIB)
    pool = HostPool()
    with pytest.raises(HostMemoryError, match=r"host_budget needs .* cgroup: 104857600.*raise"):
        pool.set_budget(200 * MIB)
    pool.set_budget(100 * MIB)
    assert pool.status().reserved_bytes == 0


def test_the_budget_holds_for_reserving_and_for_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    limited_to(monkeypatch, machine=8 * 1024 * MIB)
    pool = HostPool()
    pool.set_budget(8 * MIB)
    with pytest.raises(HostMemoryError, match="host_budget: 8388608"):
        pool.reserve(10 * MIB, pinned=False)
    assert pool.status().reserved_bytes == 0
    kept, _ = pool.empty(6 * MIB, pinned=False)  # the usual growth is more than the budget: take what is left
    assert pool.status().reserved_bytes == 8 * MIB
    with pytest.raises(HostMemoryError):
        pool.empty(4 * MIB, pinned=False)
    assert kept.numel() == 6 * MIB


def test_without_a_budget_a_margin_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limited_to(monkeypatch, machine=512 * MIB + 4 * MIB)
    pool = HostPool()
    pool.reserve(4 * MIB, pinned=False)
    with pytest.raises(HostMemoryError):
        pool.reserve(10 * MIB, pinned=False)


def test_reserve_makes_one_slab_and_is_idempotent() -> None:
    pool = HostPool()
    pool.reserve(10 * MIB, pinned=False)
    pool.reserve(10 * MIB, pinned=False)
    assert (pool.status().slab_count, pool.status().reserved_bytes) == (1, 10 * MIB)


def test_close_refuses_while_a_tensor_lives() -> None:
    pool = HostPool()
    tensor, _ = pool.empty(512, pinned=False)
    with pytest.raises(RuntimeError, match="1 tensors still live"):
        pool.close()
    del tensor
    pool.close()
    assert pool.status().reserved_bytes == 0


class FakeRuntime:
    """Stands for torch.cuda.cudart(): page-locks up to `limit` slabs."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 1  # portable
        if len(self.locked) >= self.limit:
            return 2
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def with_runtime(monkeypatch: pytest.MonkeyPatch, limit: int) -> FakeRuntime:
    runtime = FakeRuntime(limit)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("fxhome.runtime.slab._clear_pending_cuda_error", lambda: None)
    return runtime


def test_slabs_are_page_locked_once_and_those_made_without_cuda_are_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = with_runtime(monkeypatch, limit=99)
    pool = HostPool()
    early, _ = pool.empty(512, pinned=False)
    early.fill_(7)
    assert pool.status().registered_bytes == 0
    pool.reserve(pool.status().reserved_bytes + 8 * MIB, pinned=True)
    late, _ = pool.empty(512, pinned=True)
    status = pool.status()
    assert status.registered_bytes == status.reserved_bytes == sum(runtime.locked.values())
    assert bool((early == 7).all())  # locking a slab in use keeps what is in it
    assert late.numel() == 512
    del early, late
    pool.close()
    assert runtime.locked == {}


def test_refused_page_locking_is_announced_once_and_the_pool_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, limit=0)
    pool = HostPool()
    with pytest.warns(RuntimeWarning, match=r"refused to page-lock .*out of memory.*RLIMIT_MEMLOCK"):
        kept, _ = pool.empty(512, pinned=True)
    again, _ = pool.empty(512, pinned=True)  # a second warning would be an error here
    assert kept.numel() + again.numel() == 1024
    (fallback,) = pool.status().fallbacks
    assert "do not overlap" in fallback


def test_missing_huge_pages_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    with_runtime(monkeypatch, limit=99)
    monkeypatch.setattr(host_pool_module, "_huge_pages_disabled", lambda: True)
    pool = HostPool()
    with pytest.warns(RuntimeWarning, match="no huge pages"):
        pool.reserve(MIB, pinned=True)
    assert len(pool.status().fallbacks) == 1


def test_a_forked_child_starts_with_an_empty_pool() -> None:
    code = """
import os, torch
from fxhome.runtime.host_pool import host_pool
kept, _ = host_pool().empty(4096, pinned=False)
child = os.fork()
if child == 0:
    fresh, _ = host_pool().empty(4096, pinned=False)
    fresh.fill_(1)
    del kept
    os._exit(0 if host_pool().status().live_slots == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kept.fill_(2)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.integers(0, 30)), max_size=60))
def test_free_space_never_overlaps_and_never_loses_a_byte(steps: list[tuple[bool, int, int]]) -> None:
    space = FreeSpace()
    space.add_slab(0, 64 * ALIGNMENT_BYTES)
    space.add_slab(64 * ALIGNMENT_BYTES, 64 * ALIGNMENT_BYTES)  # adjacent by chance: must not merge
    taken: list[Block] = []
    for is_take, size, pick in steps:
        if is_take:
            block = space.take(round_up(size))
            if block is not None:
                taken.append(block)
        elif taken:
            space.give(taken.pop(pick % len(taken)))
        ranges = sorted((block.address, block.address + block.size_bytes) for block in taken)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
        assert space.free_bytes + sum(block.size_bytes for block in taken) == 128 * ALIGNMENT_BYTES
    for block in taken:
        space.give(block)
    assert space.largest_bytes == 64 * ALIGNMENT_BYTES
