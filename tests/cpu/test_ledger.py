"""One budget over all graphs of a step."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxhome
from fxhome import joint
from fxhome.backend import fxhome as backend
from fxhome.joint import Share, Step, joint_parts
from fxhome.runtime.meter import StorageMeter


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Broken(nn.Module):
    """Three graphs: Dynamo breaks between the parts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.b, self.c = Part(width), Part(width), Part(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        x = self.b(x)
        torch._dynamo.graph_break()
        return self.c(x).square().mean()


def metered_peak(step: object, model: nn.Module, x: torch.Tensor) -> int:
    for weight in model.parameters():
        weight.grad = None
    gc.collect()
    meter = StorageMeter(granule_bytes=1)
    meter.track_resident()
    with meter:
        step(x).backward()  # type: ignore[operator]
    return meter.peak_bytes


# Dynamo looks at .grad of what flows across its break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_three_graphs_hold_one_budget_from_the_first_step_on(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(2048, 32)
    stock = torch.compile(model, backend="aot_eager")
    stock(x).backward()
    budget = int(metered_peak(stock, model, x) * 0.65)
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, options={"memory_budget": budget, "max_evaluations": 400})

    peaks = [metered_peak(step, model, x) for _ in range(4)]

    assert len(fxhome.plans()) == 3
    assert max(peaks) <= budget
    assert sum("jointly" in record.getMessage() for record in caplog.records) == 1
    torch._dynamo.reset()


def share(wanted: int, least: int, **more: int) -> Share:
    fixed = {"entry_bytes": 0, "saved_bytes": 0, "outside_bytes": 0, "budget_bytes": 1000}
    return Share(**fixed | {"wanted_bytes": wanted, "least_bytes": least} | more)


def step_of(*graphs: str) -> Step:
    step = Step()
    for graph in graphs:
        step.note(graph)
    return step


def test_a_joint_plan_shares_what_is_left_by_what_each_graph_would_keep() -> None:
    shares = [share(300, 200), share(100, 250), share(50, 300)]

    parts = joint_parts(shares, step_of("a", "b", "c").calls(), held_bytes=100)

    # 1000 - 100 held - 300 needed by the last = 600 may be saved, more than the 400 that are wanted.
    assert parts == [joint.Part(100, 300), joint.Part(100 + 300, 100), joint.Part(100 + 300 + 100)]
    assert parts[0].between_bytes(1000, 100) == 1000 - 100 - 300
    assert parts[2].between_bytes(1000, 500) == 0


def test_graphs_that_want_more_than_there_is_share_in_proportion() -> None:
    shares = [share(wanted, 40, budget_bytes=100) for wanted in (90, 30, 10)]

    first, second, _ = joint_parts(shares, step_of("a", "b", "c").calls(), held_bytes=0)

    assert (first.may_save_bytes, second.may_save_bytes) == (45, 15)


def test_every_forward_of_a_graph_saves_its_part() -> None:
    """One plan for all of them, made for the last, which finds what all before it saved."""
    step = step_of("embedding", "block", "block", "block", "head")
    shares = [share(100, 100), share(400, 200, outside_bytes=50), share(0, 100)]

    parts = joint_parts(shares, step.calls(), held_bytes=50)

    assert step.num_forwards == 5
    room = 1000 - 50 - 250
    assert parts[1].may_save_bytes == room * 400 // 1300
    assert parts[1].entry_bytes == 50 + room * 100 // 1300 + 2 * (room * 400 // 1300)


def test_a_graph_that_runs_last_and_before_leaves_room_for_what_passes_beside_it() -> None:
    parts = joint_parts([share(400, 300, passing_bytes=150)], step_of("block", "block").calls(), held_bytes=50)

    # The first forward alone may save 1000 - 50 - 300; with the second, 1000 - 50 - 150 is for both.
    assert parts == [joint.Part(50 + 400, 400, earlier_forwards=1)]
    wide = joint_parts([share(600, 300, passing_bytes=150)], step_of("block", "block").calls(), held_bytes=50)
    assert wide == [joint.Part(50 + 400, 400, earlier_forwards=1)]


def test_what_later_backwards_leave_behind_is_beside_the_first_forwards_own() -> None:
    """Three forwards that save nothing: the first one's backward runs beside the gradients of the other two."""
    share_of_three = share(0, 100, outside_bytes=70, gradient_bytes=30)

    assert joint_parts([share_of_three], step_of("a", "a", "a").calls(), held_bytes=50) == [joint.Part(50, 0, 70, 2)]


def test_what_eager_code_keeps_between_two_graphs_is_held_beside_what_they_save() -> None:
    seen = [share(900, 100, entry_bytes=50, saved_bytes=30), share(0, 100, entry_bytes=50 + 30 + 200)]

    parts = joint_parts(seen, step_of("a", "b").calls(), held_bytes=60)

    assert parts == [joint.Part(60, 1000 - 60 - 200 - 100), joint.Part(1000 - 100)]


class Block(nn.Module):
    """Not a Sequential, whose own code Dynamo would run eagerly where it stands alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


# Dynamo looks at .grad of what flows from block to block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_identical_blocks_compiled_each_by_itself_hold_one_budget(caplog: pytest.LogCaptureFixture) -> None:
    """They are one graph, four forwards of which are outstanding; what Adam keeps appears after the first step."""
    torch.manual_seed(0)
    x = torch.randn(2048, 32)

    def peaks(blocks: list[Block], *, steps: int) -> list[int]:
        parameters = [weight for block in blocks for weight in block.parameters()]
        adam, found = torch.optim.Adam(parameters), []
        for _ in range(steps):
            gc.collect()
            meter = StorageMeter(granule_bytes=1)
            meter.track_resident()
            y = x
            with meter:
                for block in blocks:
                    y = block(y)
                y.square().mean().backward()
            del y
            found.append(meter.peak_bytes)
            adam.step()
            adam.zero_grad()
        return found

    def compiled(**how: object) -> list[Block]:
        torch._dynamo.reset()
        blocks = [Block(32) for _ in range(4)]
        for block in blocks:
            block.compile(**how)
        return blocks

    budget = int(peaks(compiled(backend="aot_eager"), steps=2)[-1] * 0.6)
    options = {"memory_budget": budget, "max_evaluations": 400}
    planned = peaks(compiled(backend=backend, options=options), steps=5)

    assert max(planned) <= budget
    assert max(planned[2:]) >= 0.7 * budget, "what may be saved is used"
    assert sum("jointly" in record.getMessage() for record in caplog.records) == 1
    torch._dynamo.reset()
