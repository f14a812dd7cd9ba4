"""Hooks in code that Inductor really generated: each statement that may allocate is announced, nothing else changes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import align_inputs_from_check_idxs
from torch.utils._ordered_set import OrderedSet

from fxhome.generated_code import HookError, generated, hook, may_allocate
from fxhome.hooked_graphs import CompiledGraphs, place_blocks, time_host
from fxhome.host_timer import SAMPLES, SKIPPED_CALLS, HostTimer
from fxhome.placed_blocks import SETTLED_STEPS
from tests.allocator_model import ModelAllocator
from tests.host_tools import Machine


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("buf0 = empty_strided_cuda((2, 3), (3, 1), torch.float32)", True),
        ("buf0 = extern_kernels.convolution(a, b, stride=(1, 1), bias=None)", True),
        ("extern_kernels.addmm(a, reinterpret_tensor(b, (2, 3), (3, 1), 0), c, alpha=1, beta=1, out=buf1)", True),
        ("buf1 = torch.ops.aten.convolution_backward.default(a, b, c, [64])", True),
        ("triton_poi_fused_add_0.run(a, buf0, 12, stream=stream0)", False),
        ("cpp_fused_add_0(a, buf0)", False),
        ("stream0 = get_raw_stream(0)", False),
        ("assert_size_stride(buf0, (2, 3), (3, 1), 'torch.ops.aten.mm.default')", False),
        ("buf2 = reinterpret_tensor(buf0, (6, ), (1, ), 0)", False),
        ("buf2 = buf1[1]", False),
        ("del buf0", False),
        ("(buf3,) = self.partitions[0](partition0_args)", False),
        ("buf4 = something_new(buf0)", True),
    ],
)
def test_what_may_allocate(statement: str, expected: bool) -> None:
    assert may_allocate(ast.parse(statement).body[0]) is expected


MODULE = '''
"""A generated module."""
made = []

def empty(name):
    made.append(name)
    return name

def partition_0(args):
    a, = args
    b = empty("b")
    return (b,)

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        a, = args
        args.clear()
        with context():
            c = empty("c")
            del a
            (b,) = self.partitions[0]([c])
        return (b, c)

class context:
    def __enter__(self):
        pass
    def __exit__(self, *_):
        pass

runner = Runner(partitions=[partition_0])
call = runner.call
'''


def test_partitions_and_blocks_under_with_are_hooked_and_the_module_stays(tmp_path: Path) -> None:
    path = tmp_path / "generated.py"
    path.write_text(MODULE, encoding="utf-8")
    module: dict[str, Any] = {"__name__": "generated"}
    exec(compile(MODULE, str(path), "exec"), module)
    before = dict(module)
    met: list[Any] = module["made"]

    call, behind = hook(module["call"], met.append, 10)

    assert call(["a"]) == ("b", "c")
    # Numbers of a partition come first; it is met where it is called.
    assert met == [12, "c", 10, "b", 11, 13]
    assert behind == 14
    assert module == before
    met.clear()
    thinned, behind = hook(module["call"], met.append, 10, only={10, 13})
    assert thinned(["a"]) == ("b", "c")
    assert met == ["c", 10, "b", 13]
    assert behind == 14
    assert module == before
    met.clear()
    assert module["call"](["a"]) == ("b", "c")
    assert met == ["c", "b"]


def test_what_is_not_generated_code_is_not_hooked(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="called through builtin_function_or_method"):
        hook(len, print, 0)
    source = "def call(args):\n    return args\n"
    module: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "gone.py"), "exec"), module)
    with pytest.raises(HookError, match="cannot be read again"):
        hook(module["call"], print, 0)
    (tmp_path / "gone.py").write_text("\n\n" + source, encoding="utf-8")
    with pytest.raises(HookError, match="no function call at line 1"):
        hook(module["call"], print, 0)


class Compiled:
    """What Inductor hands over, as far as it is looked at."""

    def __init__(self, call: Any) -> None:
        self.current_callable = call


def test_the_closure_that_aligns_inputs_is_kept() -> None:
    compiled = Compiled(align_inputs_from_check_idxs(lambda args: [*args, 1], [0], OrderedSet()))
    around = compiled.current_callable
    call, put = generated(compiled)
    put(lambda args: [*call(args), 2])
    assert compiled.current_callable is around
    x = torch.zeros(4)
    assert around([x]) == [x, 1, 2]


def test_another_closure_is_refused() -> None:
    other = 3
    with pytest.raises(HookError, match="which is not known"):
        generated(Compiled(lambda args: [*args, other]))


def small_net() -> tuple[CompiledGraphs, Callable[[], list[torch.Tensor]]]:
    """The two graphs of a network that Inductor compiles, and a step that gives its gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    x = torch.randn(4, 3, 8, 8)
    compiled = CompiledGraphs()

    def backend(gm: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            return compile_fx(gm, inputs, inner_compile=compiled.compile)

    step: Any = torch.compile(net, backend=backend)

    def gradients() -> list[torch.Tensor]:
        net.zero_grad()
        step(x).square().sum().backward()
        return [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]

    return compiled, gradients


@pytest.mark.slow
@pytest.mark.parametrize("are_placed", [True, False])
def test_graphs_are_timed_with_their_hooks_until_enough_was_seen(are_placed: bool) -> None:
    compiled, gradients = small_net()
    machine = Machine()
    timer = HostTimer((1, 1), machine, machine.clock)
    assert not time_host(compiled, timer)  # nothing is compiled yet
    plain = gradients()
    if are_placed:
        place_blocks(compiled, ModelAllocator(), limit_bytes=1 << 40, is_expected=True)
    inside = [each.call for each in compiled.insides]
    assert time_host(compiled, timer)
    for _ in range(SKIPPED_CALLS + SAMPLES):
        assert timer.finish() is None
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    asked = machine.asked
    assert asked == 2 * 2 * SAMPLES
    assert timer.finish() is not None
    assert [each.call for each in compiled.insides] == inside
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert machine.asked == asked
    torch._dynamo.reset()


@pytest.mark.slow
def test_hooked_graphs_of_inductor_compute_the_same() -> None:
    compiled, gradients = small_net()
    plain = gradients()
    blocks = place_blocks(compiled, ModelAllocator(), limit_bytes=1 << 40, is_expected=True)
    for _ in range(SETTLED_STEPS + 1):
        hooked = gradients()
        assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))

    # The last step was recorded: every hook was met once, in order.
    assert blocks._marks is not None
    assert [mark for mark in blocks._marks if mark is not None] == list(range(blocks.hooks))
    assert blocks.hooks > 10
    torch._dynamo.reset()
