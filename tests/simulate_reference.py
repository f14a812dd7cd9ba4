"""Random joint graphs as numbers, and a slow, obvious model of what the simulator's kernels compute.

The model executes a program like an interpreter: it keeps a set of live storage instances with what still reads them,
adds what copies hold, and runs three clocks. It takes from the kernels only what is a decision of theirs (the order of
the program and the places of waits and issues), never a lifetime, a byte or a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from fxhome.passes.simulate import (
    KEEP,
    PLACEMENTS,
    RECOMPUTE,
    RECOMPUTE_EACH,
    SWAP,
    Link,
    Placements,
    Problem,
    SimArrays,
    SimResult,
)
from fxhome.passes.simulate_kernels import (
    ALIAS,
    BACKWARD,
    ENTER_BACKWARD,
    ENTER_FORWARD,
    FORWARD,
    GETITEM,
    HOST_FIGURES,
    INPUT,
    LEAVE,
    OWNER,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
)


@dataclass
class Draft:
    """A joint graph while it is drawn."""

    phase: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    owns: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)

    def node(self, phase: int, kind: int, reads: list[int]) -> int:
        self.phase.append(phase)
        self.kind.append(kind)
        self.reads.append(sorted(set(reads)))
        self.owns.append([])
        return len(self.phase) - 1

    def storage(self, size: int, owner: int, root: int) -> int:
        self.sizes.append(size)
        self.owner.append(owner)
        self.root.append(root)
        self.owns[owner].append(len(self.sizes) - 1)
        return len(self.sizes) - 1


@st.composite
def problems(draw: st.DrawFn, *, with_host: bool = False) -> Problem:
    """A forward of operators, views and operators with several results; a backward that reads it about in reverse.

    with_host: launching takes time too, in some of them.
    """
    draft, sizes = Draft(), st.integers(1, 40)
    inputs = [draft.node(INPUT, OWNER, []) for _ in range(draw(st.integers(1, 2)))]
    readable = list(inputs)
    for _ in range(draw(st.integers(2, 9))):
        reads = draw(st.lists(st.sampled_from(readable[-5:]), min_size=1, max_size=2))
        shape = draw(st.sampled_from(["owner", "owner", "owner", "view", "several"]))
        if shape == "view" and draft.phase[reads[0]] == FORWARD:
            readable.append(draft.node(FORWARD, ALIAS, reads[:1]))
        elif shape == "several":
            node = draft.node(FORWARD, OWNER, reads)
            for _ in range(draw(st.integers(1, 3))):
                item = draft.node(FORWARD, GETITEM, [node])
                draft.storage(draw(sizes), node, item)
                readable.append(item)
        else:
            node = draft.node(FORWARD, OWNER, reads)
            draft.storage(draw(sizes), node, node)
            readable.append(node)
    forward = [node for node in readable if draft.phase[node] == FORWARD]
    output = forward[-1]
    tangent = draft.node(INPUT, OWNER, [])
    tangent_storage = draft.storage(draw(sizes), tangent, tangent)
    gradients, previous = [], tangent
    for _ in range(draw(st.integers(1, 8))):
        saved = draw(st.lists(st.sampled_from(forward + inputs), min_size=0, max_size=2))
        node = draft.node(BACKWARD, OWNER, [previous, *saved])
        draft.storage(draw(sizes), node, node)
        if draw(st.booleans()):
            gradients.append(node)
        previous = node
    gradients.append(previous)
    problem = _problem(draft, output, tangent_storage, gradients, draw)
    if not with_host or draw(st.booleans()):
        return problem
    figures = st.sampled_from([0.0, 1.0, 4.0, 11.0])
    arrays = problem.arrays._replace(
        node_host_us=np.array([0.0 if p == INPUT else draw(figures) for p in draft.phase], np.float64),
        host_us=np.array([draw(figures) for _ in range(HOST_FIGURES)], np.float64),
    )
    return replace(problem, arrays=arrays)


def _problem(draft: Draft, output: int, tangent: int, gradients: list[int], draw: st.DrawFn) -> Problem:
    nodes, storages = len(draft.phase), len(draft.sizes)

    def csr(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        start = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
        return start, np.array([x for row in rows for x in row], np.int32)

    required = {output}
    for node in range(nodes - 1, -1, -1):
        if node in required:
            required |= set(draft.reads[node])
    root_storage = np.full(nodes, -1, np.int32)
    for storage, root in enumerate(draft.root):
        root_storage[root] = storage
    base = output
    while draft.kind[base] == ALIAS:
        base = draft.reads[base][0]
    times = [draw(st.integers(0, 50)) if phase != INPUT else 0 for phase in draft.phase]
    size = np.array(draft.sizes, np.int64)
    read_start, read_node = csr(draft.reads)
    own_start, own_storage = csr(draft.owns)
    zeros = np.zeros(storages)
    taker_start, taker_node = csr(_takers(draft, draw))
    arrays = SimArrays(
        node_phase=np.array(draft.phase, np.int8),
        node_kind=np.array(draft.kind, np.int8),
        node_must_forward=np.array([n in required and draft.phase[n] == FORWARD for n in range(nodes)], np.int8),
        node_time_us=np.array(times, np.float64),
        node_workspace=np.array([draw(st.integers(0, 5)) if p != INPUT else 0 for p in draft.phase], np.int64),
        read_start=read_start,
        read_node=read_node,
        own_start=own_start,
        own_storage=own_storage,
        backward_alias=np.arange(nodes, dtype=np.int32),
        root_storage=root_storage,
        storage_bytes=size,
        storage_owner=np.array(draft.owner, np.int32),
        storage_root=np.array(draft.root, np.int32),
        storage_held=np.array([s == tangent for s in range(storages)], np.int8),
        storage_copy_bytes=size.copy(),
        storage_encoded_bytes=size.copy(),
        storage_encode_us=zeros,
        storage_decode_us=zeros.copy(),
        storage_link_bytes=size.copy(),
        storage_slot_bytes=size.copy(),
        forward_output=np.array([output], np.int32),
        backward_output=np.array(gradients, np.int32),
        tangent_storage=np.array([tangent], np.int32),
        outside_bytes=np.array([draw(st.integers(0, 9)), draw(st.integers(0, 9))], np.int64),
        taker_start=taker_start,
        taker_node=taker_node,
    )
    allowed = np.zeros((storages, PLACEMENTS), bool)
    allowed[:, KEEP] = True
    for storage, owner in enumerate(draft.owner):
        if draft.phase[owner] == FORWARD and draft.root[storage] != base:
            allowed[storage, [SWAP, RECOMPUTE, RECOMPUTE_EACH]] = True
    rates = st.sampled_from([0.0, 0.5, 2.0, 10.0])
    link = Link(
        draw(rates),
        draw(rates),
        draw(st.sampled_from([1.0, 1.5, 2.0])),
        draw(st.sampled_from([0.0, 3.0])),
        draw(st.sampled_from([1.0, 1.06])),
    )
    return Problem(arrays, link, allowed, np.full(storages, -1, np.int32), (("", ""),) * storages)


def _takers(draft: Draft, draw: st.DrawFn) -> list[list[int]]:
    """Per storage, some of the operators with one result that read it, directly or through views."""
    found: list[list[int]] = [[] for _ in draft.sizes]
    for node, owned in enumerate(draft.owns):
        if draft.phase[node] == INPUT or len(owned) != 1 or draft.root[owned[0]] != node:
            continue
        for source in draft.reads[node]:
            while draft.kind[source] == ALIAS:
                source = draft.reads[source][0]
            if source in draft.root and draft.phase[source] != INPUT and draw(st.booleans()):
                found[draft.root.index(source)].append(node)
    return found


@st.composite
def placements(draw: st.DrawFn, problem: Problem) -> Placements:
    """Any allowed placement."""
    return np.array([draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in problem.allowed], np.int8)


class Model:
    """One program executed instruction by instruction."""

    def __init__(self, problem: Problem, placement: Placements, result: SimResult) -> None:
        self.g, self.placement, self.result = problem.arrays, placement, result
        self.link = problem.link
        self.total, self.end = len(result.program), result.forward_length

    def sources(self, node: int) -> list[int]:
        found: list[int] = self.g.read_node[self.g.read_start[node] : self.g.read_start[node + 1]].tolist()
        return found

    def behind(self, node: int) -> int:
        """The node whose storage a view shows."""
        while self.g.node_kind[node] == ALIAS:
            node = self.sources(node)[0]
        return node

    def swapped(self, storage: int) -> bool:
        return bool(storage >= 0 and self.result.saved[storage] and self.placement[storage] == SWAP)

    def lifetimes(self) -> list[tuple[int, int, int]]:
        """(storage, first position, last position) of every instance, copies to the host left out."""
        g = self.g
        current: dict[int, list[int]] = {}  # node -> indices of the instances it now stands for
        spans: list[list[int]] = []
        program = self.result.program.tolist()

        def new(storage: int, position: int) -> int:
            spans.append([storage, position, position])
            return len(spans) - 1

        def use(node: int, position: int) -> None:
            for instance in current.get(node, []):
                spans[instance][2] = max(spans[instance][2], position)

        for position, node in enumerate(program):
            if position == self.end:
                for output in g.forward_output.tolist():
                    use(output, self.total)
                # Into the backward go what is saved and the inputs; a swapped tensor comes back as another instance.
                survivors = {n for n in current if g.root_storage[n] >= 0 and self.result.saved[g.root_storage[n]]}
                current = {n: current[n] for n in survivors if not self.swapped(int(g.root_storage[n]))}
                for s in g.tangent_storage.tolist():
                    instance = new(s, position)
                    spans[instance][2] = self.total if g.storage_held[s] else position
                    current[int(g.storage_owner[s])] = [instance]
            for source in self.sources(node):
                assert (
                    source in current or g.node_phase[source] == INPUT or self.swapped(int(g.root_storage[source]))
                ), f"instruction {position} reads node {source}, which is not there"
                use(source, position)
            kind = g.node_kind[node]
            owned = g.own_storage[g.own_start[node] : g.own_start[node + 1]].tolist()
            if kind == OWNER:
                made = {s: new(s, position) for s in owned}
                current[node] = [made[s] for s in owned if g.storage_root[s] == node]
                for s in owned:
                    if g.storage_root[s] != node:
                        current[-1 - s] = [made[s]]  # for the getitem that will bind it
            elif kind == GETITEM:
                storage = int(g.root_storage[node])
                current[node] = current.get(-1 - storage, [])
                use(node, position)
            else:
                current[node] = list(current.get(self.sources(node)[0], []))
        for gradient in g.backward_output.tolist():
            use(gradient, self.total)
        return self.written_over(spans)

    def written_over(self, spans: list[list[int]]) -> list[tuple[int, int, int]]:
        """The same spans, less the last position of those that their last reader is written over: the latest made
        operand of each, and nothing that both graphs know.
        """
        g, program = self.g, self.result.program.tolist()
        taken: set[int] = set()
        found = []
        for s, begin, end in sorted(spans, key=lambda span: (-span[1], span[0])):
            takers = g.taker_node[g.taker_start[s] : g.taker_start[s + 1]].tolist()
            here = begin < end < self.total and program[end] in takers and end not in taken
            if here and not self.result.saved[s] and not (begin < self.end <= end):
                taken.add(end)
                found.append((s, begin, end - 1))
            else:
                found.append((s, begin, end))
        return found

    def curve(self) -> list[int]:
        """Bytes alive at each position, the end of the step last."""
        g, result = self.g, self.result
        bytes_at = [0] * (self.total + 1)

        def add(size: int, begin: int, end: int) -> None:
            for position in range(begin, min(end, self.total) + 1):
                bytes_at[position] += size

        for storage, begin, end in self.lifetimes():
            size = int(g.storage_bytes[storage])
            if begin < self.end and self.swapped(storage):
                end = max(end, int(result.wait_out[storage]) - 1)
            add(size, begin, end)
        for storage in range(len(g.storage_bytes)):
            if self.swapped(storage):
                readers = [
                    p for p in range(self.end, self.total) if self.reads_storage(int(result.program[p]), storage)
                ]
                add(int(g.storage_bytes[storage]), int(result.issue_in[storage]), self.last_use(storage, readers))
        for position, node in enumerate(result.program.tolist()):
            bytes_at[position] += int(g.node_workspace[node])
            if position >= self.end:
                bytes_at[position] += int(g.outside_bytes[0])
        if self.end < self.total:
            bytes_at[self.end] += int(g.outside_bytes[1])
        return bytes_at

    def reads_storage(self, node: int, storage: int) -> bool:
        return int(self.g.storage_root[storage]) in self.sources(node)

    def last_use(self, storage: int, direct: list[int]) -> int:
        """The last reader of what came back, views of it included."""
        last = max(direct)
        showing = {int(self.g.storage_root[storage])}
        for position in range(self.end, self.total):
            node = int(self.result.program[position])
            reads = set(self.sources(node)) & showing
            if reads:
                last = max(last, position)
            if self.g.node_kind[node] == ALIAS:
                (showing.add if reads else showing.discard)(node)
            elif node in showing and node != int(self.g.storage_root[storage]):
                showing.discard(node)
        return last

    def step_us(self) -> float:
        """Four clocks in small steps: compute waits for copies, copies of one direction run one after the other."""
        g, result, link = self.g, self.result, self.link
        queues: tuple[list[list[float]], list[list[float]]] = ([], [])  # [work left, end]
        clock = [0.0]

        def run_to(until: float, goal: list[float] | None = None) -> None:
            while clock[0] < until:
                heads = [next((copy for copy in queue if copy[0] > 0), None) for queue in queues]
                if heads == [None, None] or (goal is not None and goal[0] <= 0):
                    break
                factor = link.duplex_slowdown if None not in heads else 1.0
                step = min([until - clock[0], *(copy[0] * factor for copy in heads if copy is not None)])
                clock[0] += step
                for copy in heads:
                    if copy is not None:
                        copy[0] -= step / factor
                        if copy[0] <= 1e-9:
                            copy[0], copy[1] = 0.0, clock[0]
            if until != np.inf:
                clock[0] = max(clock[0], until)

        def start(direction: int, size: int, now: float) -> list[float]:
            run_to(now)
            rate = link.h2d_us_per_byte if direction else link.d2h_us_per_byte
            copy = [link.latency_us + size * rate, now]
            queues[direction].append(copy)
            return copy

        moved = [s for s in range(len(g.storage_bytes)) if self.swapped(s)]
        out: dict[int, list[float]] = {}
        into: dict[int, list[float]] = {}
        now = 0.0
        # A fourth clock: when the host has launched what comes next. Nothing starts before that.
        host = float(g.host_us[ENTER_FORWARD])
        launch = g.node_host_us if len(g.node_host_us) else np.zeros(len(g.node_phase))
        beside = link.compute_slowdown - 1.0
        for position in range(self.total + 1):
            host += float(g.host_us[ENTER_BACKWARD]) if position == self.end else 0.0
            for s in moved:
                if result.issue_out[s] == position:
                    host += float(g.host_us[SWAP_OUT])
                    out[s] = start(0, int(g.storage_copy_bytes[s]), max(now, host))
                    now += beside * out[s][0]
            for s in moved:
                if result.wait_out[s] == position:
                    host += float(g.host_us[WAIT])
                    run_to(np.inf, out[s])
                    now = max(now, out[s][1])
            if position == self.total:
                break
            for s in moved:
                if result.issue_in[s] == position:
                    host += float(g.host_us[SWAP_IN])
                    into[s] = start(1, int(g.storage_copy_bytes[s]), max(now, host))
                    now += beside * into[s][0]
            for s in moved:
                if result.wait_in[s] == position:
                    host += float(g.host_us[WAIT])
                    run_to(np.inf, into[s])
                    now = max(now, into[s][1])
            node = int(result.program[position])
            host += float(launch[node])
            now = max(now, host) + float(g.node_time_us[node])
        return max(now, host + float(g.host_us[LEAVE]))
