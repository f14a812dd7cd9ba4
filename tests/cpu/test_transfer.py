"""Transfers on the CPU stand-in: exact bytes back, and every broken wait rule shows as an error or as poison."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.errors import DeviceError
from fxhome.runtime import transfer
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in

TIMINGS: tuple[CopyTiming, ...] = ("earliest", "latest")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.fixture(params=TIMINGS)
def timing(request: pytest.FixtureRequest) -> Iterator[CopyTiming]:
    with cpu_stand_in(copy_timing=request.param):
        yield request.param


def swap_in_like(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return transfer.swap_in(host, list(like.shape), list(like.stride()), int(like.storage_offset()), like.dtype, CPU)


def in_use_bytes() -> int:
    gc.collect()
    return host_pool().status().in_use_bytes


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_round_trip_gives_the_same_bits_and_geometry(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4), label="shape")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    lead = data.draw(st.integers(0, 3), label="elements before the view")
    order = data.draw(st.permutations(range(len(shape))), label="dimension order")
    count = int(torch.Size(shape).numel())
    base = (torch.arange(count + lead) * 37 % 113).to(dtype)
    source = base[lead:].view(shape).permute(order)
    want = source.clone()
    for timing in TIMINGS:
        with cpu_stand_in(copy_timing=timing):
            held = base.clone()[lead:].view(shape).permute(order)
            host = transfer.swap_out_wait(transfer.swap_out(held), held)
            back = swap_in_like(host, source)
            back = transfer.swap_in_wait(back, host)
        assert torch.equal(back, want)
        assert (back.stride(), back.storage_offset()) == (source.stride(), source.storage_offset())
        assert back.untyped_storage().nbytes() == source.untyped_storage().nbytes()


def test_the_source_is_poisoned_at_its_wait_and_not_before(timing: CopyTiming) -> None:
    source = torch.ones(100)
    host = transfer.swap_out(source)
    assert bool((source == 1).all())
    transfer.swap_out_wait(host, source)
    assert bool(source.isnan().all())


def test_without_poison_the_source_keeps_its_values() -> None:
    with cpu_stand_in(copy_timing="latest", poison=False):
        source = torch.ones(100)
        transfer.swap_out_wait(transfer.swap_out(source), source)
    assert bool((source == 1).all())


def test_a_reload_holds_poison_until_its_wait(timing: CopyTiming) -> None:
    source = torch.ones(100)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    back = swap_in_like(host, source)
    assert bool(back.isnan().all())
    assert bool((transfer.swap_in_wait(back, host) == 1).all())


def test_a_write_to_the_source_before_the_wait_is_seen_with_late_copies() -> None:
    seen = {}
    for timing in TIMINGS:
        with cpu_stand_in(copy_timing=timing):
            source = torch.ones(4)
            host = transfer.swap_out(source)
            source.fill_(2)  # breaks the graph rules: the copy may not have run yet
            transfer.swap_out_wait(host, source)
            back = swap_in_like(host, source)
            seen[timing] = float(transfer.swap_in_wait(back, host)[0])
    assert seen == {"earliest": 1.0, "latest": 2.0}


def test_zero_bytes_pass_through_all_four(timing: CopyTiming) -> None:
    source = torch.empty(0, 3)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    back = transfer.swap_in_wait(swap_in_like(host, source), host)
    assert back.shape == (0, 3)


def test_a_wait_without_a_transfer_names_the_rule() -> None:
    empty, _ = host_pool().empty(16, pinned=False)
    with pytest.raises(RuntimeError, match="no swap_out ever filled this host buffer; graph rule"):
        transfer.swap_out_wait(empty, torch.zeros(4))
    with pytest.raises(RuntimeError, match="no swap_in into this buffer is pending; graph rule"):
        transfer.swap_in_wait(torch.zeros(4), empty)


def test_a_reload_is_waited_for_once() -> None:
    source = torch.ones(4)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    back = transfer.swap_in_wait(swap_in_like(host, source), host)
    with pytest.raises(RuntimeError, match="exactly one wait"):
        transfer.swap_in_wait(back, host)


def test_a_reload_before_the_wait_of_its_swap_out_names_the_rule() -> None:
    source = torch.ones(4)
    host = transfer.swap_out(source)
    with pytest.raises(RuntimeError, match="swap_in takes the result of swap_out_wait"):
        swap_in_like(host, source)


def test_a_copied_host_buffer_is_refused() -> None:
    source = torch.ones(4)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    with pytest.raises(RuntimeError, match="not a live buffer of the host pool"):
        swap_in_like(host.clone(), source)


def test_a_tensor_that_tracing_recorded_wrongly_comes_back_as_it_went() -> None:
    """Some kernels lay their results out as their shape functions do not say, or give another type."""
    source = torch.randn(2, 3, 4).permute(0, 2, 1)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    recorded = torch.empty(2, 4, 3, dtype=torch.bfloat16)
    back = transfer.swap_in_wait(swap_in_like(host, recorded), host)
    assert (back.dtype, back.stride()) == (source.dtype, source.stride())
    assert torch.equal(back, source)


def test_a_geometry_beyond_the_buffer_is_refused() -> None:
    source = torch.ones(4)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    with pytest.raises(RuntimeError, match="needs 20 bytes, the host buffer holds 16"):
        transfer.swap_in(host, [4], [1], 1, torch.float32, CPU)


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="cuda and cpu"):
        transfer.swap_out(torch.empty(4, device="meta"))


def test_a_retained_backward_may_run_everything_again(timing: CopyTiming) -> None:
    source = torch.ones(4)
    host = transfer.swap_out(source)
    for _ in range(3):
        transfer.swap_out_wait(host, source)  # a wait that stands in the backward
        back = swap_in_like(host, source)
        assert bool((transfer.swap_in_wait(back, host) == 1).all())


def test_several_reloads_of_one_buffer_may_be_in_flight(timing: CopyTiming) -> None:
    source = torch.arange(4.0)
    host = transfer.swap_out_wait(transfer.swap_out(source), source)
    first, second = swap_in_like(host, source), swap_in_like(host, source)
    assert torch.equal(transfer.swap_in_wait(second, host), torch.arange(4.0))
    assert torch.equal(transfer.swap_in_wait(first, host), torch.arange(4.0))


def test_a_forward_without_a_backward_returns_its_memory() -> None:
    before = in_use_bytes()
    for _ in range(10):
        source = torch.ones(1000)
        host = transfer.swap_out_wait(transfer.swap_out(source), source)
    del host
    assert in_use_bytes() == before


def test_a_step_that_fails_between_reload_and_wait_returns_its_memory() -> None:
    before = in_use_bytes()

    def failing_step() -> None:
        source = torch.ones(1000)
        host = transfer.swap_out_wait(transfer.swap_out(source), source)
        swap_in_like(host, source)
        raise ValueError("the user's own error")

    with pytest.raises(ValueError, match="own error"):
        failing_step()
    assert in_use_bytes() == before


def test_the_waits_return_their_first_argument_itself() -> None:
    source = torch.ones(4)
    host = transfer.swap_out(source)
    assert transfer.swap_out_wait(host, source) is host
    back = swap_in_like(host, source)
    assert transfer.swap_in_wait(back, host) is back


def test_threads_do_not_mix_up_their_transfers() -> None:
    failures: list[int] = []

    def work(seed: int) -> None:
        for step in range(200):
            source = torch.full((64 + step % 7,), float(seed * 1000 + step))
            want = source.clone()
            host = transfer.swap_out_wait(transfer.swap_out(source), source)
            back = transfer.swap_in_wait(swap_in_like(host, source), host)
            if not torch.equal(back, want):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
