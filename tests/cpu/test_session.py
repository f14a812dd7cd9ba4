"""What a metered step shows of one graph, beside others of the same step."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fxhome.passes.situation import Situation
from fxhome.session import Session
from fxhome.variant import Variant

CUDA = torch.device("cuda")


class Counters:
    """torch.cuda's peak counter: what was allocated at the worst moment since it was reset."""

    def __init__(self) -> None:
        self.peak = 0

    def see(self, size: int) -> None:
        self.peak = max(self.peak, size)

    def reset(self, *_: object) -> None:
        self.peak = 0

    def read(self, *_: object) -> int:
        return self.peak


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found = Counters()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", found.read)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", found.read)
    monkeypatch.setattr(torch.cuda, "memory_allocated", found.read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    return found


def session(place: int) -> Session:
    variant = Variant(cast(Any, None), Situation(0), None, None)
    found = Session(variant, 0, None, True)
    found.place = place
    return found


def two_forwards(counters: Counters) -> tuple[Session, Session]:
    first, second = session(1), session(2)
    counters.see(100)
    first.note_forward_end(CUDA)
    counters.see(300)
    second.note_forward_end(CUDA)
    return first, second


def test_each_graph_of_a_step_measures_its_own_worst_moment(counters: Counters) -> None:
    first, second = two_forwards(counters)
    second.is_last = True
    second.note_backward_entry(CUDA)
    counters.see(400)
    second.note_backward_end(CUDA)
    first.note_backward_entry(CUDA)
    counters.see(200)
    first.note_backward_end(CUDA)

    assert (first.peak_bytes, second.peak_bytes) == (200, 400)


def test_what_was_seen_before_an_earlier_backward_is_kept_for_the_later_one(counters: Counters) -> None:
    first, second = two_forwards(counters)
    counters.see(350)  # an eager loss behind both
    first.note_backward_entry(CUDA, [second])
    counters.see(200)
    first.note_backward_end(CUDA)
    second.is_last = True
    second.note_backward_entry(CUDA)
    second.note_backward_end(CUDA)

    assert (first.peak_bytes, second.peak_bytes) == (200, 350)


def test_several_forwards_of_one_graph_are_measured_together(counters: Counters) -> None:
    first = session(1)
    first.num_later = 1
    counters.see(300)
    first.note_backward_entry(CUDA)
    first.note_backward_end(CUDA)

    assert first.peak_bytes == 300
