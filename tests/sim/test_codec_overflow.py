"""What a copy of an encoded buffer left out: moved in full, nothing else touched, the count noted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.cuda_kernels.launch import build_kernel
from fxhome.cuda_kernels.layout import USED_OFFSET
from fxhome.cuda_kernels.overflow import KERNEL
from tests.sim.emulation import Memory, run_kernel

HEAD, MOST = 8, 200
"""Vectors of the head, and of the tail at worst."""


def moved(used: int, copied: int, *, with_note: bool = True) -> tuple[np.ndarray, np.ndarray, int]:  # type: ignore[type-arg]
    """(source, target, note) after a copy of `copied` vectors was followed by the kernel."""
    source = np.random.default_rng(0).integers(0, 256, 16 * (HEAD + MOST), dtype=np.uint8)
    source[USED_OFFSET : USED_OFFSET + 4].view(np.uint32)[0] = used
    target, note = np.full_like(source, 0x5A), np.zeros(4, np.uint8)
    target[: 16 * copied] = source[: 16 * copied]
    memory = Memory()
    header, there, where = memory.add(source), memory.add(target), memory.add(note)
    arguments = (header, header, there, copied, HEAD, MOST, where if with_note else 0)
    run_kernel(build_kernel(KERNEL), memory, *arguments, blocks=2, threads=64)
    return source, target, int(note.view(np.uint32)[0])


@given(used=st.integers(0, MOST), copied=st.integers(HEAD, HEAD + MOST))
@settings(max_examples=40, deadline=None)
def test_exactly_the_rest_is_moved(used: int, copied: int) -> None:
    source, target, note = moved(used, copied)

    complete = 16 * (HEAD + used)
    assert np.array_equal(target[:complete], source[:complete])
    assert bool((target[max(complete, 16 * copied) :] == 0x5A).all())
    assert note == used + 1


@pytest.mark.parametrize("used", [MOST + 1, 0xFFFFFFFF])
def test_a_corrupted_count_stays_within_the_buffers(used: int) -> None:
    """The emulated memory raises on any access outside a buffer."""
    source, target, note = moved(used, HEAD)

    assert np.array_equal(target, source)
    assert note == MOST + 1


def test_no_note_is_written_where_none_is_asked_for() -> None:
    assert moved(10, HEAD, with_note=False)[2] == 0
