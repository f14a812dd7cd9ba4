"""A linear program put together column by column and row by row, in arrays."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import sparse

from fxhome.passes.search.structure import Bool, Float64, Int64

Part = tuple[Int64, Float64 | float]


@dataclass
class LinearProgram:
    """Columns and rows of a linear program, collected: matrix @ x >= low, 0 <= x <= upper."""

    upper: list[Float64] = field(default_factory=list)
    integral: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    rows: list[Int64] = field(default_factory=list)
    cols: list[Int64] = field(default_factory=list)
    values: list[Float64] = field(default_factory=list)
    low: list[Float64] = field(default_factory=list)
    columns: int = 0
    height: int = 0

    def shares(self, wanted: Bool) -> Int64:
        """A column in [0, 1] for each place that is wanted; -1 elsewhere."""
        return self._new(wanted, 1.0, 1)

    def amounts(self, count: int) -> Int64:
        """Columns in [0, inf)."""
        return self._new(np.ones(count, np.bool_), np.inf, 0)

    def _new(self, wanted: Bool, upper: float, integral: int) -> Int64:
        count = int(wanted.sum())
        found = np.full(wanted.shape[0], -1, np.int64)
        found[wanted] = self.columns + np.arange(count)
        self.columns += count
        self.upper.append(np.full(count, upper))
        self.integral.append(np.full(count, integral, np.uint8))
        return found

    def add(self, columns: list[Int64], coefficients: list[float], bound: Float64) -> None:
        """One row per entry of `bound`; columns of -1 are left out."""
        table = np.stack(columns, 1)
        where = np.repeat(np.arange(table.shape[0]) + self.height, table.shape[1])
        flat, weight = table.ravel(), np.broadcast_to(np.array(coefficients), table.shape).ravel()
        good = flat >= 0
        self.rows.append(where[good])
        self.cols.append(flat[good])
        self.values.append(weight[good])
        self.low.append(bound)
        self.height += table.shape[0]

    def add_one(self, parts: list[Part], bound: float) -> None:
        """One row of several parts, each columns with their coefficients."""
        flat = np.concatenate([p[0] for p in parts])
        weight = np.concatenate([np.broadcast_to(np.asarray(p[1], float), p[0].shape) for p in parts])
        good = flat >= 0
        self.rows.append(np.full(int(good.sum()), self.height, np.int64))
        self.cols.append(flat[good])
        self.values.append(weight[good])
        self.low.append(np.array([bound]))
        self.height += 1

    def matrix(self) -> sparse.csr_matrix:
        """All rows added so far over all columns."""
        entries = (np.concatenate(self.values), (np.concatenate(self.rows), np.concatenate(self.cols)))
        return sparse.csr_matrix(entries, shape=(self.height, self.columns))
