"""Time work on the host as a step would find it: other work lies between two runs, and other processes disturb."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SWEPT_BYTES = 8 << 20
"""More than a core has of caches of its own, and less than cores share: as in a step of some hundred kernels."""


class Sweeper:
    """Puts other bytes into the caches of the core that calls it: what is repeated at once takes half the time."""

    def __init__(self) -> None:
        self._target, self._source = bytearray(SWEPT_BYTES // 2), bytes(SWEPT_BYTES // 2)

    def __call__(self) -> None:
        """Read and write `SWEPT_BYTES`."""
        self._target[:] = self._source


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile of at least two times: other processes on the same cores or device only ever add."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]
