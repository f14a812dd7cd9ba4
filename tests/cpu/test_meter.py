"""The CPU meter counts storages that really exist: by hand-made examples whose bytes are known."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from fxhome.runtime import ops
from fxhome.runtime.meter import StorageMeter, live_storage_bytes, resident_tensors

KIB = 1024


def test_counts_a_chain_and_its_peak() -> None:
    with StorageMeter(granule_bytes=1) as meter:
        a = torch.zeros(KIB)  # 4 KiB
        b = a + 1
        del a
        c = b.view(32, 32)  # a view adds nothing
        d = c * 2
        del b, c
        assert meter.current_bytes == 4 * KIB
    assert meter.peak_bytes == 8 * KIB
    assert meter.peak_operator == "aten.add.Tensor"
    assert d.numel() == KIB


def test_rounds_each_storage_to_the_granule() -> None:
    with StorageMeter() as meter:
        tensors = [torch.zeros(1), torch.zeros(129)]
        assert meter.current_bytes == 512 + 1024
    assert len(tensors) == 2


def test_counts_a_storage_that_only_autograd_holds() -> None:
    leaf = torch.zeros(KIB, requires_grad=True)
    with StorageMeter(granule_bytes=1) as meter:
        loss = leaf.exp().sum()  # exp saves its own result, which no Python name holds
        gc.collect()
        assert meter.current_bytes == 4 * KIB + 4 * KIB + 4  # leaf (seen as an input), exp, loss
        loss.backward()
        assert leaf.grad is not None
        assert meter.current_bytes == 4 * KIB + 4 * KIB + 4  # exp freed, .grad there


def test_tracked_tensors_count_from_the_start_and_are_not_kept_alive() -> None:
    old = torch.zeros(KIB)
    with StorageMeter(granule_bytes=1) as meter:
        meter.track([old, old.view(-1), torch.empty(4, device="meta")])
        assert meter.current_bytes == 4 * KIB
        del old
        assert meter.current_bytes == 0


def test_a_resized_storage_counts_with_its_new_size() -> None:
    with StorageMeter(granule_bytes=1) as meter:
        a = torch.zeros(KIB)
        a.resize_(2 * KIB)
        assert meter.current_bytes == 8 * KIB
        a.untyped_storage().resize_(0)
        a.detach()
        assert meter.current_bytes == 0


def test_host_pool_slots_do_not_count() -> None:
    with StorageMeter(granule_bytes=1) as meter:
        a = torch.zeros(KIB)
        host = ops.swap_out_wait(ops.swap_out(a), a)
        del a
        assert meter.current_bytes == 0
        b = ops.swap_in(host, [KIB], [1], 0, torch.float32, torch.device("cpu"))
        b = ops.swap_in_wait(b, host)
        assert meter.current_bytes == 4 * KIB
    assert host.numel() == 4 * KIB


def _step(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()


@pytest.mark.parametrize("compiled_inside", [False, True], ids=["compiled-before", "compiled-inside"])
def test_a_compiled_callable_stays_compiled_and_is_counted(compiled_inside: bool) -> None:
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def compiler(name: str) -> Any:
            def compile_graph(inner: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
                def boxed(args: list[Any]) -> Any:
                    runs.append(name)
                    return torch.fx.Interpreter(inner).boxed_run(args)

                boxed._boxed_call = True  # type: ignore[attr-defined]
                return boxed

            return compile_graph

        return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))(graph, inputs)

    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    x = torch.randn(512, 64)
    compiled = torch.compile(model, backend=backend)
    if not compiled_inside:
        _step(compiled, x)
    model.zero_grad()
    with StorageMeter(granule_bytes=1) as meter:
        _step(compiled, x)  # the first call inside a meter may compile
        model.zero_grad()
        runs.clear()
        before_bytes = meter.current_bytes
        meter.reset_peak()
        _step(compiled, x)
        assert runs == ["forward", "backward"]
        gradients_bytes = sum(4 * p.numel() for p in model.parameters())
        assert meter.current_bytes == before_bytes + gradients_bytes
        # At least the hidden activation and its gradient were alive together.
        assert meter.peak_bytes >= before_bytes + 2 * 512 * 256 * 4


def test_a_compiled_chain_is_measured_with_its_own_lifetimes() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.cos()
        return (z * 2).sum()

    torch._dynamo.reset()
    peaks = []
    for function in (chain, torch.compile(chain, backend="aot_eager")):
        x = torch.randn(KIB)
        function(x)
        with StorageMeter(granule_bytes=1) as meter:
            meter.track([x])
            function(x)
        peaks.append(meter.peak_bytes)
    assert peaks[0] == 4 * 4 * KIB + 4  # x, y, z, z * 2 and the sum: eager's names live to the end
    assert peaks[1] == 3 * 4 * KIB  # the graph drops each at its last use


def test_live_storage_bytes_follows_allocation_and_counts_gradients_once() -> None:
    gc.collect()
    before = live_storage_bytes(granule_bytes=1)
    a = torch.zeros(KIB, requires_grad=True)
    a.grad = torch.zeros(KIB)
    views = [a.detach(), a.grad.view(32, 32)]
    assert live_storage_bytes(granule_bytes=1) - before == 8 * KIB
    host = ops.swap_out(a.detach())
    assert live_storage_bytes(granule_bytes=1) - before == 8 * KIB
    del views, a
    gc.collect()
    assert live_storage_bytes(granule_bytes=1) == before
    assert host.numel() == 4 * KIB


def test_resident_tensors_gives_one_tensor_per_storage() -> None:
    a = torch.zeros(7)
    twin = a.view(7, 1)
    found = [t for t in resident_tensors() if t.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()]
    assert len(found) == 1
    assert twin.numel() == 7


def test_tensors_of_a_trace_are_passed_over() -> None:
    """A failed trace leaves functional and fake tensors alive; they must not end every later step."""
    with FakeTensorMode():
        fake = torch.zeros(KIB)
    functional = torch._to_functional_tensor(torch.zeros(KIB, device="meta"))
    before = live_storage_bytes(granule_bytes=1)
    with StorageMeter(granule_bytes=1) as meter:
        meter.track([fake, functional])
        assert meter.current_bytes == 0
    real = torch.zeros(KIB)
    assert live_storage_bytes(granule_bytes=1) - before == 4 * KIB
    assert real.numel() == KIB


def test_a_sparse_gradient_is_resident_by_its_indices_and_values() -> None:
    weight = torch.zeros(100, 8, requires_grad=True)
    rows = torch.arange(10)
    gc.collect()
    before = live_storage_bytes(granule_bytes=1)
    torch.nn.functional.embedding(rows, weight, sparse=True).square().sum().backward()

    assert weight.grad is not None
    assert weight.grad.layout is torch.sparse_coo
    assert live_storage_bytes(granule_bytes=1) - before == 10 * 8 * 4  # the indices are a view of the rows
