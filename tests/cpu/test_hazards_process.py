"""More than one graph or more than one step: graph breaks, optimizer state, suppressed errors, DDP."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome.errors import InfeasibleBudgetError
from fxhome.passes.pipeline import plan_graph
from fxhome.passes.planned import Planned
from fxhome.passes.torch_compat import compile_lock
from fxhome.runtime.meter import StorageMeter
from tests.hazard_tools import (
    Record,
    Step,
    as_bytes,
    assert_no_host_memory_in_use,
    assert_promise,
    compile_step,
    fresh,
    in_bytes,
    warnings_of,
)

ROWS, WIDTH = 512, 64

# Dynamo itself asks the inputs of a resumed graph for their gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Net(nn.Module):
    """Three blocks; `broken` puts a graph break behind each of the first two."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(3))
        self.broken = broken

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        layers = self.blocks[index]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = F.gelu(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(0, x)
        if self.broken:  # not in a loop: Dynamo would run all of it eagerly
            torch._dynamo.graph_break()
        x = self.block(1, x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.block(2, x)


def step_of(model: nn.Module) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    return step


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def gradients(options: dict[str, Any] | None, *, broken: bool, steps: int = 4) -> tuple[Record, list[int], int]:
    """Gradients of the last step, the peak of each step, and what was resident before the last."""
    fresh()
    torch.manual_seed(0)
    model, found, peaks = Net(broken=broken), Record(), []
    step = compile_step(step_of(model), options)
    x = batch()
    for _ in range(steps):
        model.zero_grad()
        gc.collect()
        with StorageMeter(granule_bytes=1) as meter:
            meter.track_resident()
            resident = meter.current_bytes
            step(x).backward()
        peaks.append(meter.peak_bytes)
    for name, parameter in model.named_parameters():
        found.note(name, parameter.grad)
    return found, peaks, resident


def test_a_step_may_be_metered_from_outside_while_it_compiles() -> None:
    """The first step compiles, and a replan compiles later, under the user's own meter."""
    found, peaks, _ = gradients({"memory_budget": "70%"}, broken=False)
    expected, _, _ = gradients(None, broken=False)
    assert found.differences(expected) == []
    assert len(peaks) == 4


def test_graph_breaks_give_several_plans_and_the_stock_gradients() -> None:
    expected, _, _ = gradients(None, broken=True)
    found, _, _ = gradients({"memory_budget": "1GiB", "policy": "vdnn_all"}, broken=True)
    plans = fxhome.plans()
    assert found.differences(expected) == []
    assert len(plans) >= 3
    assert len({plan.graph_fingerprint for plan in plans}) >= 3
    assert_no_host_memory_in_use()


def test_graph_breaks_share_one_budget() -> None:
    """After the joint replanning that follows the first complete step, every step is within the one budget."""
    _, stock, resident = gradients({"memory_budget": "100%"}, broken=True)
    budget = resident + int(0.8 * (stock[-1] - resident))
    found, peaks, _ = gradients({"memory_budget": in_bytes(budget)}, broken=True)
    expected, _, _ = gradients(None, broken=True)
    assert found.differences(expected) == []
    assert max(peaks[2:]) <= budget
    for plan in fxhome.plans():
        assert plan.budget_bytes <= budget


def test_graph_breaks_never_get_the_budget_once_each() -> None:
    """A budget that one graph alone meets with everything kept, but all together do not."""
    _, stock, resident = gradients({"memory_budget": "100%"}, broken=True)
    budget = resident + int(0.6 * (stock[-1] - resident))
    _, peaks, _ = gradients({"memory_budget": in_bytes(budget)}, broken=True)
    assert max(peaks[2:]) <= budget


@pytest.mark.parametrize("share", ["80%", "60%"])
def test_a_share_is_one_of_the_whole_step_also_where_a_small_graph_comes_last(share: str) -> None:
    """What came before a small graph is most of what it finds: a share of that alone would leave it nothing."""
    wide = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())] * 12)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = wide(x)
        torch._dynamo.graph_break()
        return y.square().mean()

    x = torch.randn(4096, 16)
    peaks, found = [], []
    for options in (None, {"memory_budget": share}):
        fresh()
        compiled = compile_step(step, options)
        for _ in range(3):
            for parameter in wide.parameters():
                parameter.grad = None
            gc.collect()
            with StorageMeter(granule_bytes=1) as meter:
                meter.track_resident()
                compiled(x).backward()
        peaks.append(meter.peak_bytes)
        found.append([parameter.grad.clone() for parameter in wide.parameters() if parameter.grad is not None])
    budgets = {plan.budget_bytes for plan in fxhome.plans()}
    assert len(budgets) == 1
    assert max(budgets) == pytest.approx(float(share[:-1]) / 100 * peaks[0], rel=0.01)
    assert peaks[1] <= max(budgets)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def train(options: dict[str, Any] | None, caplog: pytest.LogCaptureFixture) -> tuple[Record, list[int], list[str]]:
    """Five steps of Adam: parameters afterwards, peak of each forward and backward, warnings."""
    fresh()
    torch.manual_seed(0)
    model, found, peaks = Net(), Record(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = compile_step(step_of(model), options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fxhome"):
        for _ in range(5):
            x = batch()
            gc.collect()
            with StorageMeter(granule_bytes=1) as meter:
                meter.track_resident()
                step(x).backward()
            peaks.append(meter.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        found.note(name, parameter)
    return found, peaks, warnings_of(caplog)


def test_optimizer_state_leads_to_one_replan_that_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    expected, _, _ = train(None, caplog)
    _, free, _ = train({"memory_budget": "100%"}, caplog)
    state_bytes = sum(2 * 4 * p.numel() + 4 for p in Net().parameters())
    budget = free[-1] - state_bytes // 2  # between what the first step needs and what the later ones would take
    found, peaks, messages = train({"memory_budget": in_bytes(budget)}, caplog)
    assert found.differences(expected) == []
    assert max(peaks) <= budget
    assert len(messages) == 1
    assert "optimizer state" in messages[0]
    (plan,) = fxhome.plans()
    assert_promise(plan, budget)


def train_compiled(options: dict[str, Any] | None) -> Record:
    """Steps compiled as a whole: forward, backward and optimizer in one function."""
    fresh()
    torch.manual_seed(0)
    model, found = Net(), Record()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, x = compile_step(train_step, options), batch()
    for number in range(3):
        found.note(f"loss {number}", step(x))
    for name, parameter in model.named_parameters():
        found.note(name, parameter)
    return found


def test_a_step_that_calls_backward_inside_the_compiled_function() -> None:
    """Dynamo breaks its graph there and looks at all Python that runs behind it, ours included."""
    expected = train_compiled(None)
    assert train_compiled({"memory_budget": "90%"}).differences(expected) == []
    (plan,) = fxhome.plans()
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes


def test_reserve_leaves_room_for_optimizer_state(caplog: pytest.LogCaptureFixture) -> None:
    """With the state reserved from the start nothing has to be planned again."""
    _, free, _ = train({"memory_budget": "100%"}, caplog)
    state_bytes = sum(2 * 4 * p.numel() + 4 for p in Net().parameters())
    budget = free[-1] - state_bytes // 2
    options = {"memory_budget": in_bytes(budget), "reserve": state_bytes + (1 << 16)}
    _, peaks, messages = train(options, caplog)
    assert messages == []
    assert max(peaks) <= budget


def test_suppressed_errors_do_not_suppress_a_refusal() -> None:
    """Dynamo would run the model eagerly, outside any budget, for an error met while compiling."""
    fresh()
    model = Net()
    step = compile_step(step_of(model), {"memory_budget": in_bytes(1)})
    with torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            with pytest.raises(InfeasibleBudgetError, match="cannot be met") as refused:
                step(batch())
            assert type(refused.value) is InfeasibleBudgetError
            assert refused.value.__cause__ is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_suppressed_errors_do_not_suppress_a_wrong_option() -> None:
    fresh()
    step = compile_step(step_of(Net()), {"memory_bugdet": "1GiB"})
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(ValueError, match="did you mean 'memory_budget'"),
    ):
        step(batch())


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.skipif(os.name != "posix", reason="gloo over a file")
def test_distributed_data_parallel_is_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)

    def run(options: dict[str, Any] | None) -> Record:
        fresh()
        torch.manual_seed(0)
        model, found = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1), Record()
        model.bucket_bytes_cap = 50_000  # three of the nine layers
        step = compile_step(model, options)
        for _ in range(2):
            model.zero_grad()
            step(batch()).square().mean().backward()
        for name, parameter in model.named_parameters():
            found.note(name, parameter.grad)
        return found

    expected = run(None)
    found = run({"memory_budget": "64MiB", "policy": "vdnn_all"})
    plans = fxhome.plans()
    assert found.differences(expected) == []
    assert len(plans) > 1
    for plan in plans:
        assert any("DistributedDataParallel" in note for note in plan.notes), plan.notes
    assert_no_host_memory_in_use()


def test_a_module_moved_on_by_a_user_between_steps_is_seen() -> None:
    """Parameters replaced in place by the user between two steps are what the next step reads, rebuilds included."""
    fresh()
    torch.manual_seed(0)
    model = Net()
    step = compile_step(step_of(model), {"memory_budget": "75%", "allow": ("recompute",)})
    x = batch()
    step(x).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.zero_grad()
    step(x).backward()
    found = [as_bytes(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    step_of(model)(x).backward()
    assert found == [as_bytes(p.grad) for p in model.parameters() if p.grad is not None]


def test_forwards_from_several_threads_that_each_need_a_new_plan() -> None:
    """Every pending forward makes the next one plan again: two threads must not trace the same graph at once."""

    def losses(options: dict[str, Any] | None) -> list[bytes]:
        fresh()
        torch.manual_seed(0)
        model, x = Net(), batch()
        step = compile_step(step_of(model), options)
        step(x).backward()
        model.zero_grad()
        made: list[torch.Tensor] = []

        def work() -> None:
            made.extend(step(x) for _ in range(4))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.stack(made).sum().backward()
        gradients = [as_bytes(p.grad) for p in model.parameters() if p.grad is not None]
        return [as_bytes(loss) for loss in made] + gradients

    expected = losses(None)
    found = losses({"memory_budget": "70%", "on_infeasible": "best_effort"})
    assert found == expected
    assert_no_host_memory_in_use()


def test_a_new_plan_is_traced_while_no_other_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing patches torch for all threads, so torch compiles under a lock; a new plan between steps takes it too."""
    fresh()
    model, x, could_compile = Net(), batch(), []

    def try_to_compile() -> None:
        could_compile.append(compile_lock().acquire(blocking=False))  # type: ignore[attr-defined]

    def watched(*args: Any, **options: Any) -> Planned:
        other = threading.Thread(target=try_to_compile)
        other.start()
        other.join()
        return plan_graph(*args, **options)

    monkeypatch.setattr("fxhome.backend.plan_graph", watched)
    step = compile_step(step_of(model), {"memory_budget": "100%", "on_infeasible": "best_effort"})
    for _ in range(2):  # the second step has gradients beside it: it is planned again
        step(x).backward()
    assert could_compile == [False, False]


class Block(nn.Module):
    """Two layers; not a Sequential, whose own code Dynamo would run eagerly where it stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Looped(nn.Module):
    """Three blocks called in a loop with a graph break: every block is a graph, and none of them ends in the break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def looped_peaks(options: dict[str, Any] | None) -> tuple[Record, list[int]]:
    """Gradients of the last of four steps, and the peak of each."""
    fresh()
    torch.manual_seed(0)
    model, found, peaks = Looped(), Record(), []
    step = compile_step(step_of(model), options)
    x = batch()
    for _ in range(4):
        model.zero_grad()
        gc.collect()
        with StorageMeter(granule_bytes=1) as meter:
            meter.track_resident()
            step(x).backward()
        peaks.append(meter.peak_bytes)
    for name, parameter in model.named_parameters():
        found.note(name, parameter.grad)
    return found, peaks


def test_graphs_called_from_a_loop_that_breaks_leave_room_for_each_other() -> None:
    """The smallest budget that the last graph's refusal names works, although the first one could not know of it."""
    expected, stock = looped_peaks(None)
    budget = 1 << 19
    for _ in range(len(Looped().blocks) + 1):
        try:
            found, peaks = looped_peaks({"memory_budget": in_bytes(budget)})
            break
        except InfeasibleBudgetError as refused:
            minimum = refused.with_traceback(None).minimum_bytes
            assert minimum is not None
            assert minimum > budget
            budget = minimum
    else:
        pytest.fail(f"the budget of {budget} bytes that a refusal names is refused")
    assert found.differences(expected) == []
    assert max(peaks[2:]) <= budget < max(stock)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])  # what Inductor writes is not metered on a CPU
def test_a_graph_that_nothing_follows_gets_the_room_that_it_left(inner: str, caplog: pytest.LogCaptureFixture) -> None:
    """A break behind the last operator: planned as the first of several graphs once, then as the only one."""
    fresh()
    torch.manual_seed(0)
    model = Block()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        torch._dynamo.graph_break()
        return loss

    compiled = compile_step(step, {"memory_budget": "64MiB", "inner": inner})
    x = batch()
    for _ in range(3):
        compiled(x).backward()
    (plan,) = fxhome.plans()
    assert plan.search.stopped_by.startswith("nothing to do")
    assert warnings_of(caplog) == []
