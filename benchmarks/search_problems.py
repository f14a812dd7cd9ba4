"""Synthetic search problems: chains, residual networks, transformers, dense blocks. Numbers only, no tensor.

Each function returns a `Problem` with the shape of a real joint graph: a forward, a loss, a backward that reads the
forward's values in reverse, and weight gradients that live to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, Link, Problem, SimArrays
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD, INPUT, OWNER

MIB = 1 << 20
PCIE = Link(d2h_us_per_byte=1 / 50e3, h2d_us_per_byte=1 / 50e3, duplex_slowdown=1.15, latency_us=8.0)


def save_case(path: Path, problem: Problem, classes: Sequence[str]) -> None:
    """Write a problem with the op class of each storage; `Problem.load` reads the file too."""
    problem.save(path)
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    np.savez_compressed(path, storage_class=np.array(classes, dtype=str), **arrays)


def load_case(path: Path) -> tuple[Problem, list[str]]:
    """Read what `save_case` wrote."""
    with np.load(path) as data:
        classes = [str(name) for name in data["storage_class"]]
    return Problem.load(path), classes


@dataclass
class GraphBuilder:
    """Collects nodes in program order; one storage per node that has bytes. Every forward storage is a decision."""

    phase: list[int] = field(default_factory=list)
    time_us: list[float] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    movable: list[bool] = field(default_factory=list)

    def node(
        self,
        phase: int,
        reads: Sequence[int],
        size_bytes: int,
        time_us: float,
        *,
        group: int = -1,
        kind: str = "other",
        held: bool = False,
        movable: bool = True,
    ) -> int:
        """Append a node and return its id."""
        self.phase.append(phase)
        self.reads.append(tuple(reads))
        self.size_bytes.append(size_bytes)
        self.time_us.append(time_us)
        self.group.append(group)
        self.kind.append(kind)
        self.held.append(held)
        self.movable.append(movable)
        return len(self.phase) - 1

    def problem(self, outputs: Sequence[int], gradients: Sequence[int], link: Link = PCIE) -> tuple[Problem, list[str]]:
        """(the problem, the op class of each storage). `outputs` are forward nodes that must run and are returned."""
        n = len(self.phase)
        owners = [v for v in range(n) if self.phase[v] != INPUT and self.size_bytes[v] > 0]
        storages = len(owners)
        root_storage = np.full(n, -1, np.int32)
        root_storage[owners] = np.arange(storages)
        read_start = np.zeros(n + 1, np.int32)
        read_start[1:] = np.cumsum([len(r) for r in self.reads])
        own_start = np.zeros(n + 1, np.int32)
        own_start[1:] = np.cumsum(root_storage >= 0)
        sizes = np.array([self.size_bytes[v] for v in owners], np.int64)
        must = np.zeros(n, np.int8)
        must[list(outputs)] = 1
        arrays = SimArrays(
            node_phase=np.array(self.phase, np.int8),
            node_kind=np.full(n, OWNER, np.int8),
            node_must_forward=must,
            node_time_us=np.array(self.time_us, np.float64),
            node_workspace=np.zeros(n, np.int64),
            read_start=read_start,
            read_node=np.array([u for r in self.reads for u in r], np.int32),
            own_start=own_start,
            own_storage=np.arange(storages, dtype=np.int32),
            backward_alias=np.arange(n, dtype=np.int32),
            root_storage=root_storage,
            storage_bytes=sizes,
            storage_owner=np.array(owners, np.int32),
            storage_root=np.array(owners, np.int32),
            storage_held=np.array([self.held[v] for v in owners], np.int8),
            storage_copy_bytes=sizes.copy(),
            storage_encoded_bytes=(sizes // 2).astype(np.int64),
            storage_encode_us=sizes / 500e3 + 5.0,
            storage_decode_us=sizes / 500e3 + 5.0,
            storage_link_bytes=(sizes // 2).astype(np.int64),
            storage_slot_bytes=(sizes // 2).astype(np.int64),
            forward_output=np.array(outputs, np.int32),
            backward_output=np.array(gradients, np.int32),
            tangent_storage=np.empty(0, np.int32),
        )
        allowed = np.zeros((storages, 6), np.bool_)
        allowed[:, KEEP] = True
        for s, v in enumerate(owners):
            if self.phase[v] == FORWARD and self.movable[v] and v not in outputs:
                allowed[s, [SWAP, RECOMPUTE, RECOMPUTE_EACH]] = True
        groups = np.array([self.group[v] for v in owners], np.int32)
        return Problem(arrays, link, allowed, groups), [self.kind[v] for v in owners]


def _backward(b: GraphBuilder, forward: Sequence[int], loss: int, inputs: set[int]) -> list[int]:
    """Append a reverse-mode backward: each node's backward reads its inputs (and its output for activations)."""
    gradient: dict[int, int] = {loss: b.node(BACKWARD, [loss], b.size_bytes[loss], 2.0)}
    weights: list[int] = []
    for v in reversed(forward):
        if v not in gradient:
            continue
        needed: list[int]
        if b.kind[v] in ("convolution", "matmul"):
            needed = [u for u in b.reads[v] if u not in inputs]
        elif b.kind[v] in ("activation", "softmax"):
            needed = [v]
        elif b.kind[v] in ("norm", "pool"):
            needed = [u for u in b.reads[v] if u not in inputs][:1]
        else:
            needed = []
        if b.kind[v] in ("convolution", "matmul") and any(u in inputs for u in b.reads[v]):
            reads = [gradient[v], *needed]
            weights.append(b.node(BACKWARD, reads, b.size_bytes[v] // 64 + 512, b.time_us[v], held=True))
        for u in b.reads[v]:
            if u in inputs:
                continue
            own = b.node(BACKWARD, [gradient[v], *needed], b.size_bytes[u], b.time_us[v])
            if u in gradient:
                gradient[u] = b.node(BACKWARD, [gradient[u], own], b.size_bytes[u], b.size_bytes[u] / 1.2e6 + 2.0)
            else:
                gradient[u] = own
    return weights


def _finish(b: GraphBuilder, last: int, inputs: set[int], link: Link) -> tuple[Problem, list[str]]:
    forward = [v for v in range(len(b.phase)) if b.phase[v] == FORWARD]
    loss = b.node(FORWARD, [last], 512, 3.0, movable=False)
    weights = _backward(b, [*forward, loss], loss, inputs)
    return b.problem([loss], weights, link)


def chain(layers: int, *, seed: int = 0, link: Link = PCIE) -> tuple[Problem, list[str]]:
    """A plain chain of convolution, norm and activation; sizes fall by stages as in VGG."""
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    image = b.node(INPUT, [], 0, 0.0)
    weight = b.node(INPUT, [], 0, 0.0)
    inputs = {image, weight}
    x = image
    for layer in range(layers):
        stage = min(4, 5 * layer // max(layers, 1))
        size = (64 * MIB) >> stage
        work = float(250.0 * rng.uniform(0.6, 1.6))
        g = 3 * stage
        x = b.node(FORWARD, [x, weight], size, work, group=g, kind="convolution")
        x = b.node(FORWARD, [x], size, size / 1.2e6 + 2.0, group=g + 1, kind="norm")
        x = b.node(FORWARD, [x], size, size / 1.5e6 + 2.0, group=g + 2, kind="activation")
    return _finish(b, x, inputs, link)


def residual(blocks: int, *, link: Link = PCIE) -> tuple[Problem, list[str]]:
    """Bottleneck blocks of ResNet: three convolutions with norm and activation, then an addition."""
    b = GraphBuilder()
    image = b.node(INPUT, [], 0, 0.0)
    weight = b.node(INPUT, [], 0, 0.0)
    inputs = {image, weight}
    x = b.node(FORWARD, [image, weight], 100 * MIB, 300.0, kind="convolution")
    for block in range(blocks):
        stage = min(3, 4 * block // max(blocks, 1))
        wide, narrow = (100 * MIB) >> stage, (25 * MIB) >> stage
        y = x
        for i, size in enumerate((narrow, narrow, wide)):
            g = 16 * stage + 3 * i
            y = b.node(FORWARD, [y, weight], size, (120.0, 220.0, 120.0)[i], group=g, kind="convolution")
            y = b.node(FORWARD, [y], size, size / 1.0e6 + 3.0, group=g + 1, kind="norm")
            if i < 2:
                y = b.node(FORWARD, [y], size, size / 1.5e6 + 2.0, group=g + 2, kind="activation")
        if b.size_bytes[x] != wide:
            x = b.node(FORWARD, [x, weight], wide, 150.0, kind="convolution")
        x = b.node(FORWARD, [x, y], wide, wide / 1.0e6 + 2.0, group=16 * stage + 10)
        x = b.node(FORWARD, [x], wide, wide / 1.5e6 + 2.0, group=16 * stage + 11, kind="activation")
    return _finish(b, x, inputs, link)


def transformer(layers: int, *, link: Link = PCIE) -> tuple[Problem, list[str]]:
    """Pre-norm decoder blocks: attention as explicit products, a four times wider feed-forward."""
    b = GraphBuilder()
    tokens = b.node(INPUT, [], 0, 0.0)
    weight = b.node(INPUT, [], 0, 0.0)
    inputs = {tokens, weight}
    hidden = 32 * MIB
    x = b.node(FORWARD, [tokens, weight], hidden, 20.0, kind="matmul")
    for _ in range(layers):
        g = iter(range(32))
        norm = b.node(FORWARD, [x], hidden, 40.0, group=next(g), kind="norm")
        q, k, v = (b.node(FORWARD, [norm, weight], hidden, 110.0, group=next(g), kind="matmul") for _ in range(3))
        scores = b.node(FORWARD, [q, k], 96 * MIB, 160.0, group=next(g), kind="matmul")
        soft = b.node(FORWARD, [scores], 96 * MIB, 150.0, group=next(g), kind="softmax")
        mixed = b.node(FORWARD, [soft, v], hidden, 160.0, group=next(g), kind="matmul")
        out = b.node(FORWARD, [mixed, weight], hidden, 110.0, group=next(g), kind="matmul")
        x = b.node(FORWARD, [x, out], hidden, 45.0, group=next(g))
        norm = b.node(FORWARD, [x], hidden, 40.0, group=next(g), kind="norm")
        up = b.node(FORWARD, [norm, weight], 4 * hidden, 440.0, group=next(g), kind="matmul")
        act = b.node(FORWARD, [up], 4 * hidden, 130.0, group=next(g), kind="activation")
        down = b.node(FORWARD, [act, weight], hidden, 440.0, group=next(g), kind="matmul")
        x = b.node(FORWARD, [x, down], hidden, 45.0, group=next(g))
    return _finish(b, x, inputs, link)


def dense(layers: int, *, block: int = 16, link: Link = PCIE) -> tuple[Problem, list[str]]:
    """Dense blocks: every layer reads a concatenation that grows by one slice, as in DenseNet."""
    b = GraphBuilder()
    image = b.node(INPUT, [], 0, 0.0)
    weight = b.node(INPUT, [], 0, 0.0)
    inputs = {image, weight}
    x = b.node(FORWARD, [image, weight], 50 * MIB, 300.0, kind="convolution")
    parts = [x]
    for layer in range(layers):
        stage = min(3, 4 * layer // max(layers, 1))
        slice_bytes = (12 * MIB) >> stage
        total = sum(b.size_bytes[p] for p in parts)
        joined = b.node(FORWARD, parts, total, total / 1.2e6 + 3.0)
        y = b.node(FORWARD, [joined], total, total / 1.0e6 + 3.0, kind="norm")
        y = b.node(FORWARD, [y], total, total / 1.5e6 + 3.0, kind="activation")
        y = b.node(FORWARD, [y, weight], 4 * slice_bytes, 90.0, kind="convolution")
        y = b.node(FORWARD, [y], 4 * slice_bytes, 10.0, kind="norm")
        y = b.node(FORWARD, [y], 4 * slice_bytes, 8.0, kind="activation")
        y = b.node(FORWARD, [y, weight], slice_bytes, 60.0, kind="convolution")
        parts.append(y)
        if (layer + 1) % block == 0:
            joined = b.node(FORWARD, parts, sum(b.size_bytes[p] for p in parts), 20.0)
            parts = [b.node(FORWARD, [joined, weight], b.size_bytes[joined] // 8, 80.0, kind="convolution")]
    return _finish(b, parts[-1], inputs, link)
