"""What the host's clock makes of disturbed times, and what it sweeps."""

from __future__ import annotations

import pytest

from fxhome.host_clock import SWEPT_BYTES, Sweeper, undisturbed


def test_what_other_processes_add_is_left_out() -> None:
    assert undisturbed([5.0, 5.0, 5.0, 5.0, 900.0, 5.0, 70.0, 5.0]) == 5.0
    assert undisturbed([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert undisturbed([4.0, 8.0]) == 5.0


def test_one_time_alone_tells_nothing() -> None:
    with pytest.raises(ValueError, match="at least"):
        undisturbed([])


def test_a_sweep_writes_what_it_says() -> None:
    sweep = Sweeper()
    sweep._target[:] = b"x" * len(sweep._target)
    sweep()
    assert len(sweep._target) + len(sweep._source) == SWEPT_BYTES
    assert not any(sweep._target)
