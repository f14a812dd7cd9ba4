"""One simulator for search, schedule, report and baselines: placements in, peak and time out.

    problem = Problem(arrays, link, allowed)      numbers only: no graph, no tensor
    evaluate(problem, placement, budget)          (peak bytes, step us): the search's inner loop
    simulate(problem, placement, budget)          the same plus program, transfers, curve and holders

`placement` is one int8 per storage (`KEEP`, `SWAP`, ...). `budget` is what graph storages may take: the user's bytes
less what is resident. The budget steers where copies are waited for and started; the peak returned is the peak of the
program that results, feasible or not. All byte figures are exact for the program; times are estimates and never change
the peak.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fxhome.passes import simulate_kernels as kernels
from fxhome.passes import simulate_timeline as timing
from fxhome.passes.simulate_kernels import (
    COMPRESS,
    COMPRESS_SWAP,
    KEEP,
    RECOMPUTE,
    RECOMPUTE_EACH,
    SWAP,
    Link,
    SimArrays,
)

__all__ = [
    "COMPRESS",
    "COMPRESS_SWAP",
    "KEEP",
    "RECOMPUTE",
    "RECOMPUTE_EACH",
    "SWAP",
    "Link",
    "Problem",
    "SimArrays",
    "SimResult",
    "evaluate",
    "simulate",
]

PLACEMENTS = 6
Placements = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Problem:
    """What the search may decide, in numbers.

    allowed: bool[storages, 6], which placements each storage may take; a row with only KEEP is no decision.
    group: int32[storages], storages of one group are the same tensor of structurally identical layers; -1 for none.
    """

    arrays: SimArrays
    link: Link
    allowed: npt.NDArray[np.bool_]
    group: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    codecs: tuple[tuple[str, str], ...] = ()
    """Per storage, the codec names under COMPRESS and under COMPRESS_SWAP; empty where there is none."""

    def codec_of(self, storage: int, placement: int) -> str | None:
        """Name of the codec that `placement` uses for `storage`; None where it uses none."""
        if placement not in (COMPRESS, COMPRESS_SWAP) or not self.codecs:
            return None
        return self.codecs[storage][placement - COMPRESS] or None

    @property
    def num_storages(self) -> int:
        return int(self.arrays.storage_bytes.shape[0])

    def decisions(self) -> npt.NDArray[np.int64]:
        """Storages with more than one allowed placement, in order of production."""
        chosen = np.flatnonzero(self.allowed.sum(axis=1) > 1)
        return chosen[np.argsort(self.arrays.storage_owner[chosen], kind="stable")]

    def keep_all(self) -> Placements:
        """Every storage kept that may be (a storage that may not be kept is recomputed)."""
        return np.where(self.allowed[:, KEEP], KEEP, RECOMPUTE).astype(np.int8)

    def save(self, path: str | Path) -> None:
        """Write the numbers as an .npz, so that searches can be compared on any machine."""
        np.savez_compressed(
            path,
            allowed=self.allowed,
            group=self.group,
            codecs=np.array(self.codecs, dtype=str).reshape(-1, 2),
            link=np.array(self.link, np.float64),
            **self.arrays._asdict(),
        )

    @classmethod
    def load(cls, path: str | Path) -> "Problem":
        """Read what `save` wrote; what a file of an earlier version does not tell has the default of `SimArrays`."""
        with np.load(path) as data:
            told = [name for name in SimArrays._fields if name in data]
            arrays = SimArrays(**{name: data[name] for name in told})
            codecs = tuple((str(compress), str(swap)) for compress, swap in data["codecs"])
            return cls(arrays, Link(*(float(x) for x in data["link"])), data["allowed"], data["group"], codecs)


@dataclass(frozen=True, eq=False)
class SimResult:
    """One placement, run. Positions index `program`; `curve[p]` is the bytes alive while instruction p runs.

    An entry of `program` is a node, or n + s / n + storages + s for the encode / decode of storage s (n nodes).
    forward_length: instructions before the backward. produced, and the places of copies (see `simulate_transfers`): per
    storage, -1 where none. host_us: when the host has launched everything; idle_us: per instruction, and at the end,
    how long the device waits for it before that.
    """

    peak_bytes: int
    peak_position: int
    step_us: float
    stall_us: float
    d2h_busy_us: float
    h2d_busy_us: float
    host_bytes: int
    program: npt.NDArray[np.int32]
    recomputed: npt.NDArray[np.int8]
    forward_length: int
    saved: npt.NDArray[np.int8]
    produced: npt.NDArray[np.int32]
    last_forward: npt.NDArray[np.int32]
    first_backward: npt.NDArray[np.int32]
    last_backward: npt.NDArray[np.int32]
    issue_out: npt.NDArray[np.int32]
    wait_out: npt.NDArray[np.int32]
    issue_in: npt.NDArray[np.int32]
    wait_in: npt.NDArray[np.int32]
    curve: npt.NDArray[np.int64]
    start_us: npt.NDArray[np.float64]
    idle_us: npt.NDArray[np.float64]
    host_us: float
    arrays: SimArrays

    @cached_property
    def nodes(self) -> npt.NDArray[np.int32]:
        """`program` in nodes alone: an encode or decode stands as the node whose result it handles."""
        g = self.arrays
        of = np.concatenate([np.arange(g.node_phase.shape[0]), g.storage_root, g.storage_root])
        found: npt.NDArray[np.int32] = of[self.program].astype(np.int32)
        return found


def simulate(problem: Problem, placement: Placements, budget: int, *, synchronous: bool = False) -> SimResult:
    """Build and run the program of `placement` under `budget` bytes for graph storages.

    synchronous: each copy runs beside one layer and is waited for at its end, as vDNN as published does; the budget
    then steers nothing, and no storage may be encoded on its way (KEEP, SWAP and recomputation only).
    """
    placement = np.ascontiguousarray(placement, np.int8)
    rows = np.arange(problem.num_storages)
    assert problem.allowed[rows, placement].all(), "a placement that the facts do not allow"
    assert not synchronous or not np.isin(placement, (COMPRESS, COMPRESS_SWAP)).any(), "vDNN encodes nothing"
    g = problem.arrays
    program, recomputed, forward, saved, at, curve, start_us, idle_us, times, sizes = timing.run_program(
        g, problem.link, placement, budget, synchronous
    )
    produced, last_forward, first_backward, last_backward, issue_out, wait_out, issue_in, wait_in = at
    step, stall, out_busy, in_busy, host_us = times.tolist()
    peak, position, host = sizes.tolist()
    return SimResult(
        peak_bytes=peak,
        peak_position=position,
        step_us=step,
        stall_us=stall,
        d2h_busy_us=out_busy,
        h2d_busy_us=in_busy,
        host_bytes=host,
        program=program,
        recomputed=recomputed,
        forward_length=int(forward[0]),
        saved=saved,
        produced=produced,
        last_forward=last_forward,
        first_backward=first_backward,
        last_backward=last_backward,
        issue_out=issue_out,
        wait_out=wait_out,
        issue_in=issue_in,
        wait_in=wait_in,
        curve=curve,
        start_us=start_us,
        idle_us=idle_us,
        host_us=host_us,
        arrays=g,
    )


def evaluate(problem: Problem, placement: Placements, budget: int) -> tuple[int, float]:
    """(peak bytes, step us) of `placement` under `budget`; the same figures as `simulate`, with nothing kept."""
    peak, step = timing.peak_and_step(problem.arrays, problem.link, np.ascontiguousarray(placement, np.int8), budget)
    return int(peak), float(step)


def holders(problem: Problem, placement: Placements, result: SimResult) -> list[tuple[int, int]]:
    """(storage, bytes) of everything alive at the peak, largest first, copies in flight included."""
    g = problem.arrays
    held = np.zeros(problem.num_storages, np.int8)
    first, second, third, fourth = (np.empty(problem.num_storages, np.int32) for _ in range(4))
    total = len(result.program)
    curve = np.zeros(total + 2, np.int64)
    position = min(result.peak_position, total)
    kernels.liveness(
        g,
        placement,
        result.saved,
        result.program,
        result.forward_length,
        total,
        curve,
        first,
        second,
        third,
        fourth,
        position,
        held,
    )
    moved = (result.saved == 1) & ((placement == SWAP) | (placement == COMPRESS_SWAP))
    leaving = (result.produced <= position) & (position < result.wait_out)
    back = (result.issue_in <= position) & (position <= result.last_backward)
    squeezed = moved & (placement == COMPRESS_SWAP)
    held[moved & ~squeezed & (leaving | back)] = 1
    sizes = np.where(held == 1, g.storage_bytes, 0)
    # Encoded bytes on the device: from the encode to the decode, or while they wait for the link.
    encoding = (result.produced >= 0) & (result.last_forward <= position)
    waiting = (position < result.wait_out) | ((result.issue_in <= position) & (position <= result.first_backward))
    small = (result.saved == 1) & (placement == COMPRESS) & encoding & (position <= result.first_backward)
    small |= squeezed & encoding & waiting
    sizes[small] += g.storage_encoded_bytes[small]
    storages = np.flatnonzero(sizes)
    order = np.argsort(-sizes[storages], kind="stable")
    return [(int(s), int(sizes[s])) for s in storages[order]]


def instruction(problem: Problem, entry: int) -> tuple[str, int]:
    """("node", node), ("encode", storage) or ("decode", storage): what a program entry stands for."""
    nodes = problem.arrays.node_phase.shape[0]
    if entry < nodes:
        return "node", entry
    if entry < nodes + problem.num_storages:
        return "encode", entry - nodes
    return "decode", entry - nodes - problem.num_storages
