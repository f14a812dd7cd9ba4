"""Transfers on a GPU: right bits although copies and kernels are made to overlap badly, and no growth."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxhome.device import measure_profile
from fxhome.runtime import ops
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.meter import measure_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 1024 * 1024
LONG = 100_000_000  # clock cycles: some 50 ms, far longer than any copy here


def sleep() -> None:
    """Keep the current stream busy; the host goes on at once."""
    torch.cuda._sleep(LONG)


def send(x: torch.Tensor) -> torch.Tensor:
    host: torch.Tensor = ops.swap_out_wait(ops.swap_out(x), x)
    return host


def issue(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = ops.swap_in(
        host, list(like.shape), list(like.stride()), like.storage_offset(), like.dtype, like.device
    )
    return moved


def fetch(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    back: torch.Tensor = ops.swap_in_wait(issue(host, like), host)
    return back


def pattern(size: int, seed: int) -> torch.Tensor:
    return (torch.arange(size, device="cuda") * (seed + 1) % 8191).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_layouts_come_back_exactly(dtype: torch.dtype) -> None:
    base = (torch.arange(3 + 5 * 7 * 2, device="cuda") * 37 % 113).to(dtype)
    x = base[3:].view(5, 7, 2).permute(2, 0, 1)
    back = fetch(send(x), x)
    assert torch.equal(back, x)
    assert (back.stride(), back.storage_offset()) == (x.stride(), x.storage_offset())


def test_empty_tensors_pass_through() -> None:
    x = torch.empty(0, 4, device="cuda")
    assert fetch(send(x), x).shape == (0, 4)


def test_the_copy_waits_for_the_kernel_that_makes_the_source() -> None:
    x = torch.zeros(4 * MIB, device="cuda")
    want = pattern(4 * MIB, 1)
    torch.cuda.synchronize()
    sleep()
    x.copy_(want)
    host = send(x)
    x.zero_()  # after the wait the source may be overwritten
    assert torch.equal(fetch(host, x), want)


def test_the_source_may_be_freed_and_its_memory_reused_after_the_wait() -> None:
    want = pattern(16 * MIB, 2)
    x = want.clone()
    address = x.data_ptr()
    torch.cuda.synchronize()
    sleep()
    host, like = send(x), torch.empty(16 * MIB, device="meta")
    del x
    other = torch.full((16 * MIB,), -1.0, device="cuda")
    assert other.data_ptr() == address, "the allocator did not reuse the block: the test proves nothing"
    back = ops.swap_in(host, list(like.shape), list(like.stride()), 0, torch.float32, torch.device("cuda", 0))
    back = ops.swap_in_wait(back, host)
    assert torch.equal(back, want)
    assert bool((other == -1).all())


def test_the_reload_does_not_overwrite_memory_still_in_use() -> None:
    """The reload's buffer is memory that a delayed kernel still reads."""
    want = pattern(16 * MIB, 3)
    host = send(want)
    old = torch.full((16 * MIB,), 5.0, device="cuda")
    total = torch.zeros((), device="cuda")
    address = old.data_ptr()
    torch.cuda.synchronize()
    sleep()
    total.copy_(old.mean())
    del old
    back = issue(host, want)
    assert back.data_ptr() == address, "the allocator did not reuse the block: the test proves nothing"
    ops.swap_in_wait(back, host)
    assert float(total) == 5.0
    assert torch.equal(back, want)


def test_the_reader_waits_for_a_late_reload() -> None:
    want = pattern(4 * MIB, 4)
    host = send(want)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sleep()
        back = issue(host, want)  # starts only when the side stream wakes up
    doubled = ops.swap_in_wait(back, host) * 2  # on the main stream
    assert torch.equal(doubled, want * 2)


def test_a_slot_is_not_overwritten_while_a_copy_still_reads_it() -> None:
    want, other = pattern(4 * MIB, 5), pattern(4 * MIB, 6)
    host = send(want)
    address = host.data_ptr()
    torch.cuda.synchronize()
    sleep()
    back = fetch(host, want)  # queued behind the sleep
    del host
    with torch.cuda.stream(torch.cuda.Stream()):  # does not wait for the sleep
        second = send(other)
        assert second.data_ptr() == address, "the pool did not reuse the slot: the test proves nothing"
    assert torch.equal(back, want)
    torch.cuda.synchronize()
    assert torch.equal(fetch(second, other), other)


def test_a_reload_that_nobody_waits_for_does_not_write_into_reused_memory() -> None:
    """As when the user's own error ends a step between the two."""
    want = pattern(16 * MIB, 7)
    host = send(want)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep()
        back = issue(host, want)
        address = back.data_ptr()
        del back, host
        host_pool().status()  # does the bookkeeping for what died
        fresh = torch.full((16 * MIB,), 1.0, device="cuda")
        assert fresh.data_ptr() == address, "the allocator did not reuse the block: the test proves nothing"
    torch.cuda.synchronize()
    assert bool((fresh == 1).all())


def test_many_tensors_in_flight_on_two_streams() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sources = [pattern(MIB + 1000 * index, index) for index in range(40)]
    torch.cuda.synchronize()
    flights: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for index, source in enumerate(sources):
        with torch.cuda.stream(streams[index % 2]):
            x = source.clone()
            if index % 5 == 0:
                torch.cuda._sleep(LONG // 20)
            host = ops.swap_out(x)
            flights.append((index, host, x))
    reloads = []
    for index, host, x in reversed(flights):
        with torch.cuda.stream(streams[index % 2]):
            ops.swap_out_wait(host, x)
            x.fill_(-1)
            reloads.append((index, host, issue(host, x)))
    for index, host, back in reloads:
        with torch.cuda.stream(streams[index % 2]):
            ops.swap_in_wait(back, host)
            same = torch.equal(back, sources[index])
        assert same, f"tensor {index} came back wrong"


def test_a_wait_in_the_backward_may_run_twice() -> None:
    want = pattern(MIB, 8)
    x = want.clone()
    host = ops.swap_out(x)
    for _ in range(2):
        ops.swap_out_wait(host, x)
        assert torch.equal(fetch(host, want), want)


class _Swapped(torch.autograd.Function):
    """x -> x * x, keeping x on the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        own = x.clone()
        ctx.save_for_backward(send(own))
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (host,) = ctx.saved_tensors
        moved = ops.swap_in(host, list(ctx.like.shape), list(ctx.like.stride()), 0, ctx.like.dtype, gradients[0].device)
        back: torch.Tensor = ops.swap_in_wait(moved, host)
        return 2 * gradients[0] * back


def test_the_backward_runs_on_another_thread_and_is_right() -> None:
    x = pattern(MIB, 9).div_(8191).requires_grad_()
    _Swapped.apply(_Swapped.apply(x)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * x.detach() ** 3)


def test_two_hundred_rounds_grow_nothing() -> None:
    x = pattern(MIB, 10)

    def rounds(count: int) -> None:
        for index in range(count):
            hosts = [send(x[: (index % 7 + 1) * 1000].clone()) for _ in range(3)]
            for host in hosts:
                fetch(host, x[: host.numel() // 4])

    rounds(20)
    torch.cuda.synchronize()
    gc.collect()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_pool().status())
    rounds(200)
    torch.cuda.synchronize()
    gc.collect()
    after = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_pool().status())
    assert after == before


def test_host_memory_is_page_locked_and_nothing_fell_back() -> None:
    host = send(pattern(MIB, 11))
    assert host.is_pinned()
    status = host_pool().status()
    assert status.fallbacks == ()
    assert status.registered_bytes == status.reserved_bytes


def test_the_host_never_waits_for_the_device() -> None:
    """If an operator synchronised, the sleep would be over when the last one returns."""
    x = pattern(4 * MIB, 12)
    fetch(send(x), x)  # streams, events and slots exist now
    torch.cuda.synchronize()
    sleep()
    done = torch.cuda.Event()
    done.record()
    fetch(send(x), x)
    assert not done.query()


def test_inductor_keeps_transfers_right() -> None:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        product = x * 2
        host = send(product)
        moved = issue(host, product)
        sine = (x + 1).sin()
        return (sine + ops.swap_in_wait(moved, host),)

    x = torch.randn(1024, 1024, device="cuda")
    graph = make_fx(function, tracing_mode="fake")(x)
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(fakes[0].fake_mode)), torch.no_grad():
        compiled: Any = compile_fx_inner(graph, fakes)
        (result,) = compiled([x.clone()])
    torch.testing.assert_close(result, (x + 1).sin() + x * 2)


def test_the_allocators_peak_is_measured() -> None:
    with measure_cuda() as peak:
        x = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del x
    assert peak.allocated_bytes - peak.start_allocated_bytes == 32 * MIB
    assert peak.reserved_bytes >= peak.allocated_bytes


def test_a_profile_of_this_device() -> None:
    start = time.perf_counter()
    profile = measure_profile("cuda")
    print(f"\nmeasured in {time.perf_counter() - start:.2f} s\n{profile.to_json()}")
    assert profile.kind == "cuda"
    assert profile.d2h_bytes_per_s > 1e9
    assert profile.memory_bytes_per_s > profile.d2h_bytes_per_s


def _microseconds(work: Callable[[], object], rounds: int = 300) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    return (time.perf_counter() - start) / rounds * 1e6


def test_report_host_overhead() -> None:
    """Prints what a call costs the host; asserts only that the calls work."""
    x = torch.empty(1024, device="cuda")
    host = ops.swap_out(x)
    hosts = [send(x) for _ in range(301)]
    torch.cuda.synchronize()
    print(f"\nswap_out {_microseconds(lambda: ops.swap_out(x)):.1f} us")
    print(f"swap_out_wait {_microseconds(lambda: ops.swap_out_wait(host, x)):.1f} us")
    moved: list[torch.Tensor] = []
    print(f"swap_in {_microseconds(lambda: moved.append(issue(hosts[len(moved)], x))):.1f} us")
    waits = iter(list(zip(moved, hosts, strict=False)))
    print(f"swap_in_wait {_microseconds(lambda: ops.swap_in_wait(*next(waits))):.1f} us")
    big = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    kept = send(big)
    torch.cuda.synchronize()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    kept = send(big)
    middle.record()
    back = fetch(kept, big)
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
    print(f"256 MiB: out {big.numel() / seconds[0] / 1e9:.1f} GB/s, in {big.numel() / seconds[1] / 1e9:.1f} GB/s")
    assert torch.equal(back, big)
