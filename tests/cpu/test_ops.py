"""The operators as graphs see them: schema, fakes, FX, dead-code removal, AOTAutograd and Inductor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.runtime import ops
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in

CPU = torch.device("cpu")


def reload(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    moved = ops.swap_in(host, list(like.shape), list(like.stride()), like.storage_offset(), like.dtype, like.device)
    back: torch.Tensor = ops.swap_in_wait(moved, host)
    return back


def swapping(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A product, sent away during a sum and a sine, and used again."""
    product = x * 2
    host = ops.swap_out_wait(ops.swap_out(product), product)
    moved = ops.swap_in(host, list(product.shape), list(product.stride()), 0, product.dtype, product.device)
    sine = (x + 1).sin()
    return sine + ops.swap_in_wait(moved, host), host


def traced() -> torch.fx.GraphModule:
    return make_fx(swapping, tracing_mode="fake")(torch.empty(8, 8))


def expected(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).sin() + x * 2


def test_waits_alias_their_first_argument_in_the_schema() -> None:
    for wait in (ops.swap_out_wait, ops.swap_in_wait):
        first, second = wait._schema.arguments
        (result,) = wait._schema.returns
        assert first.alias_info is not None
        assert result.alias_info is not None
        assert first.alias_info.before_set == result.alias_info.after_set
        assert not first.alias_info.is_write
        assert second.alias_info is None
        assert torch.Tag.needs_exact_strides in wait.tags


def test_fakes_give_bytes_and_geometry() -> None:
    with FakeTensorMode() as mode:
        source = mode.from_tensor(torch.empty(6, 4).t()[1:])
        host = ops.swap_out(source)
        assert isinstance(host, FakeTensor)
        assert (host.numel(), host.dtype, host.device) == (6 * 4 * 4, torch.uint8, CPU)
        back = reload(ops.swap_out_wait(host, source), source)
        assert (back.shape, back.stride(), back.dtype) == (source.shape, source.stride(), source.dtype)
        assert back.storage_offset() == source.storage_offset()
        assert back.untyped_storage().nbytes() == source.untyped_storage().nbytes()


def test_fakes_take_a_cuda_device_where_there_is_none() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        host = torch.empty(64, dtype=torch.uint8)
        back = ops.swap_in(host, [4, 4], [4, 1], 0, torch.float32, torch.device("cuda", 0))
        assert back.device == torch.device("cuda", 0)
        assert ops.swap_out(back).device == CPU
        assert ops.swap_in_wait(back, host).device == torch.device("cuda", 0)


def test_meta_tensors_are_understood() -> None:
    assert ops.swap_out(torch.empty(3, device="meta")).numel() == 12


def test_torchs_own_checks_of_custom_operators_pass_for_swap_out() -> None:
    """The other three take a buffer's identity, and these checks clone every argument."""
    source = torch.randn(4, 6).t()[1:]
    torch.library.opcheck(ops.swap_out, (source,), test_utils=("test_schema", "test_faketensor"))


def test_dead_code_removal_keeps_waits() -> None:
    def unused(x: torch.Tensor) -> torch.Tensor:
        ops.swap_out_wait(ops.swap_out(x), x)
        return x + 1

    graph = make_fx(unused, tracing_mode="fake")(torch.empty(4))
    graph.graph.eliminate_dead_code()
    assert [n.target for n in graph.graph.nodes if n.target in (ops.swap_out, ops.swap_out_wait)] == [
        ops.swap_out,
        ops.swap_out_wait,
    ]


@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_fx_interpretation_and_generated_code_agree_with_eager(timing: CopyTiming) -> None:
    x = torch.randn(8, 8)
    graph = traced()
    with cpu_stand_in(copy_timing=timing), torch.no_grad():
        for run in (graph, torch.fx.Interpreter(graph).run):
            assert torch.equal(run(x)[0], expected(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_inductor_keeps_the_order_and_the_alias(timing: CopyTiming) -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    graph = traced()
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext(fakes[0].fake_mode)
    with torch._guards.tracing(context), torch.no_grad():
        compiled: Any = compile_fx_inner(copy.deepcopy(graph), fakes)
    x = torch.randn(8, 8)
    with cpu_stand_in(copy_timing=timing), torch.no_grad():
        result, host = compiled([x.clone()])
    torch.testing.assert_close(result, expected(x))
    assert host_pool().slot_of(host) is not None  # the slot itself came out, not a copy of it


def test_a_joint_backward_may_reload_what_its_forward_sent_away() -> None:
    """Swaps are put into AOTAutograd's two graphs by hand: the first saved activation travels."""
    hosts: list[torch.fx.Node] = []

    def send(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        saved = next(n for n in output.args[0] if n.target is torch.ops.aten.sin.default)
        with graph.graph.inserting_before(output):
            host = graph.graph.call_function(ops.swap_out, (saved,))
            waited = graph.graph.call_function(ops.swap_out_wait, (host, saved))
        output.args = (tuple(waited if n is saved else n for n in output.args[0]),)
        hosts.append(saved)
        graph.recompile()
        return make_boxed_func(graph.forward)

    def fetch(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        placeholder = next(n for n in graph.graph.nodes if n.name == hosts[0].name)
        value = placeholder.meta["val"]
        first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        with graph.graph.inserting_before(first):
            moved = graph.graph.call_function(
                ops.swap_in, (placeholder, list(value.shape), list(value.stride()), 0, value.dtype, value.device)
            )
            waited = graph.graph.call_function(ops.swap_in_wait, (moved, placeholder))
        placeholder.replace_all_uses_with(waited, delete_user_cb=lambda n: n not in (moved, waited))
        graph.recompile()
        return make_boxed_func(graph.forward)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(x) @ torch.sin(x)).sum()

    def gradient(function: Any, rounds: int) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        result = function(x)
        return [torch.autograd.grad(result, x, retain_graph=True)[0] for _ in range(rounds)]

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=send, bw_compiler=fetch)
    with cpu_stand_in(copy_timing="latest"), torch._functorch.config.patch(donated_buffer=False):
        swapped = gradient(torch.compile(loss, backend=backend), 2)
    plain = gradient(torch.compile(loss, backend="aot_eager"), 2)
    assert hosts
    for got, want in zip(swapped, plain, strict=True):
        assert torch.equal(got, want)
