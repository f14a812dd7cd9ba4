"""Runs the Numba-CUDA kernels on a machine without a GPU: every lane is a Python generator, a warp collective is a
yield.

A kernel's source is rewritten so that each call to a warp collective (ballot, shuffle, warp_sync) becomes a `yield`,
and each call to a helper that contains one becomes a `yield from`. A warp then runs its 32 generators from collective
to collective, which also proves that all lanes reach the same one. Global memory is a set of buffers at made-up
64-bit addresses: an access that is out of bounds or misaligned raises. Shared memory starts poisoned. The order of
the lanes is an argument, because a missing warp_sync shows up as a result that depends on it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxhome.cuda_kernels import simt

POISON = 0xA5
MASK = 0xFFFFFFFF
Bytes = NDArray[np.uint8]


class EmulationError(Exception):
    """The kernel did what a GPU would not forgive."""


class Memory:
    """Buffers at made-up addresses far apart, so that an overrun never lands in a neighbour."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Bytes]] = []

    def add(self, buffer: Bytes, misalignment: int = 0) -> int:
        """Map a uint8 array; its address is `misalignment` past a multiple of 4096, above 2^32."""
        address = (len(self._buffers) + 7) * (1 << 36) + misalignment
        self._buffers.append((address, buffer))
        return address

    def span(self, address: int, size_bytes: int) -> Bytes:
        if address % size_bytes:
            raise EmulationError(f"misaligned access of {size_bytes} bytes at {address:#x}")
        for start, buffer in self._buffers:
            if start <= address and address + size_bytes <= start + buffer.size:
                return buffer[address - start : address - start + size_bytes]
        raise EmulationError(f"access of {size_bytes} bytes at {address:#x} is outside every buffer")


def _u32(value: Any) -> int:
    return int(value) & MASK


class _Machine:
    """Emulated intrinsics of one thread block at a time."""

    def __init__(self, memory: Memory, blocks: int, threads: int) -> None:
        self.memory = memory
        self.blocks = blocks
        self.threads = threads
        self.block = 0
        self.thread = 0
        self.shared = Memory()
        self.regions: dict[str, int] = {}

    def start_block(self, block: int) -> None:
        self.block = block
        self.shared = Memory()
        self.regions = {}

    def region(self, name: str, size_bytes: int) -> int:
        # The made-up addresses exceed 32 bits; shared addresses are uint32, so map them low.
        if name not in self.regions:
            base = 4096 + 65536 * len(self.regions)
            self.shared._buffers.append((base, np.full(size_bytes, POISON, np.uint8)))
            self.regions[name] = base
        return self.regions[name]

    def intrinsics(self) -> dict[Any, Callable[..., Any]]:
        table: dict[Any, Callable[..., Any]] = {}
        for prefix, memory in (("", lambda: self.memory), ("shared_", lambda: self.shared)):
            for bits in (8, 16, 32):
                table[getattr(simt, f"{prefix}load_u{bits}")] = _loader(memory, bits // 8)
                table[getattr(simt, f"{prefix}store_u{bits}")] = _storer(memory, bits // 8)
            for count in (2, 4):
                table[getattr(simt, f"{prefix}load_u32x{count}")] = _vector_loader(memory, count)
                table[getattr(simt, f"{prefix}store_u32x{count}")] = _vector_storer(memory, count)

        def combine(operation: Callable[[int, int], int]) -> Callable[[int, int], None]:
            def apply(address: int, value: int) -> None:
                span = self.shared.span(address, 4).view(np.uint32)
                span[0] = _u32(operation(int(span[0]), value))

            return apply

        def global_add(address: int, value: int) -> int:
            span = self.memory.span(address, 4).view(np.uint32)
            before = int(span[0])
            span[0] = _u32(before + value)
            return before

        table[simt.global_add_u32] = global_add
        table[simt.shared_add_u32] = combine(lambda old, value: old + value)
        table[simt.shared_or_u32] = combine(lambda old, value: old | value)
        table[simt.thread_index] = lambda: self.thread
        table[simt.block_size] = lambda: self.threads
        table[simt.block_index] = lambda: self.block
        table[simt.block_count] = lambda: self.blocks
        table[simt.popcount] = lambda value: _u32(value).bit_count()
        table[simt.f32_from_bits] = lambda bits: np.uint32(_u32(bits)).view(np.float32)
        table[simt.f32_bits] = lambda value: int(np.float32(value).view(np.uint32))
        table[simt.mul_f32] = _quiet(lambda a, b: np.float32(a) * np.float32(b))
        table[simt.add_f32] = _quiet(lambda a, b: np.float32(a) + np.float32(b))
        table[simt.div_f32] = _quiet(lambda a, b: np.float32(a) / np.float32(b))
        table[simt.byte_permute] = _byte_permute
        table[simt.round_to_i32] = lambda value: _to_i32(np.rint(value))
        table[simt.floor_to_i32] = lambda value: _to_i32(np.floor(value))
        table[simt.f32_from_i32] = lambda bits: np.float32(np.uint32(_u32(bits)).view(np.int32))
        table[simt.f32_from_half] = lambda bits: np.float32(np.uint16(bits & 0xFFFF).view(np.float16))
        table[simt.half_from_f32] = _quiet(lambda value: int(np.float16(value).view(np.uint16)))
        for intrinsic, (name, size_bytes) in simt.SHARED_REGIONS.items():
            table[intrinsic] = lambda name=name, size_bytes=size_bytes: self.region(name, size_bytes)
        table[simt.uint32] = _u32
        table[simt.int64] = int
        return table


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments)

    return call


def _byte_permute(a: int, b: int, selector: int) -> int:
    pool = _u32(a).to_bytes(4, "little") + _u32(b).to_bytes(4, "little")
    return int.from_bytes(bytes(pool[selector >> (4 * index) & 7] for index in range(4)), "little")


def _to_i32(value: Any) -> int:
    if np.isnan(value):
        return 0
    return _u32(max(-(2**31), min(2**31 - 1, int(value) if np.isfinite(value) else int(np.sign(value)) * 2**40)))


def _loader(memory: Callable[[], Memory], size_bytes: int) -> Callable[[int], int]:
    return lambda address: int.from_bytes(memory().span(address, size_bytes).tobytes(), "little")


def _storer(memory: Callable[[], Memory], size_bytes: int) -> Callable[[int, int], None]:
    def store(address: int, value: int) -> None:
        truncated = _u32(value) & ((1 << (8 * size_bytes)) - 1)
        memory().span(address, size_bytes)[:] = np.frombuffer(truncated.to_bytes(size_bytes, "little"), np.uint8)

    return store


def _vector_loader(memory: Callable[[], Memory], count: int) -> Callable[[int], tuple[int, ...]]:
    return lambda address: tuple(memory().span(address, 4 * count).view(np.uint32).tolist())


def _vector_storer(memory: Callable[[], Memory], count: int) -> Callable[..., None]:
    def store(address: int, *words: int) -> None:
        memory().span(address, 4 * count)[:] = np.array([_u32(word) for word in words], np.uint32).view(np.uint8)

    return store


_COLLECTIVES: dict[Any, str] = {
    simt.ballot: "ballot",
    simt.shuffle: "shuffle",
    simt.shuffle_up: "shuffle_up",
    simt.shuffle_xor: "shuffle_xor",
    simt.warp_sync: "warp_sync",
}


def _collect(kind: str, operands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of one collective, lane by lane."""
    if kind == "warp_sync":
        return [None] * 32
    if kind == "ballot":
        mask = sum(1 << lane for lane, (predicate,) in enumerate(operands) if predicate)
        return [mask] * 32
    values = [_u32(value) for value, _ in operands]
    steps = [int(step) for _, step in operands]
    if kind == "shuffle":
        return [values[step & 31] for step in steps]
    if kind == "shuffle_xor":
        return [values[lane ^ step] for lane, step in enumerate(steps)]
    return [values[lane - step] if lane >= step else values[lane] for lane, step in enumerate(steps)]


class _Rewriter(ast.NodeTransformer):
    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.is_collective = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name):
            return node
        target = self.names.get(node.func.id)
        if isinstance(target, str):
            self.is_collective = True
            return ast.Yield(ast.Tuple([ast.Constant(target), *node.args], ast.Load()))
        if getattr(target, "is_collective", False):
            self.is_collective = True
            return ast.YieldFrom(node)
        return node


def _emulated(function: Any, table: dict[Any, Callable[..., Any]], done: dict[Any, Any]) -> Any:
    """The function rewritten over the emulated vocabulary."""
    if function in done:
        return done[function]
    python = getattr(function, "py_func", function)
    variables = inspect.getclosurevars(python)
    namespace: dict[str, Any] = {}
    for name, value in {**variables.globals, **variables.nonlocals, **variables.builtins}.items():
        try:
            if value in _COLLECTIVES:
                namespace[name] = _COLLECTIVES[value]
                continue
            if value in table:
                namespace[name] = table[value]
                continue
        except TypeError:
            pass
        is_helper = hasattr(value, "py_func") or inspect.isfunction(value)
        namespace[name] = _emulated(value, table, done) if is_helper else value
    tree = ast.parse(textwrap.dedent(inspect.getsource(python)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    rewriter = _Rewriter(namespace)
    rewriter.visit(definition)
    ast.fix_missing_locations(tree)
    exec(compile(tree, inspect.getsourcefile(python) or "<kernel>", "exec"), namespace)
    result = namespace[definition.name]
    result.is_collective = rewriter.is_collective
    done[function] = result
    return result


def run_kernel(
    kernel: Callable[..., None],
    memory: Memory,
    *arguments: int,
    blocks: int = 2,
    threads: int = 64,
    reverse: bool = False,
) -> None:
    """Run `kernel` over `blocks` x `threads` lanes; `reverse` steps the lanes of a warp in the opposite order."""
    machine = _Machine(memory, blocks, threads)
    function = _emulated(kernel, machine.intrinsics(), {})
    for block in range(blocks):
        machine.start_block(block)
        for warp in range(threads // 32):
            _run_warp(machine, function, arguments, warp, reverse)


def _run_warp(
    machine: _Machine, function: Callable[..., Any], arguments: tuple[int, ...], warp: int, reverse: bool
) -> None:
    order = list(range(31, -1, -1) if reverse else range(32))
    if not function.is_collective:  # type: ignore[attr-defined]
        for lane in order:
            machine.thread = warp * 32 + lane
            function(*arguments)
        return
    lanes: list[Generator[Any, Any, None]] = [function(*arguments) for _ in range(32)]
    results: list[Any] = [None] * 32
    while True:
        requests: list[Any] = [None] * 32
        finished = 0
        for lane in order:
            machine.thread = warp * 32 + lane
            try:
                requests[lane] = lanes[lane].send(results[lane])
            except StopIteration:
                finished += 1
        if finished == 32:
            return
        kinds = {request[0] if request else "returned" for request in requests}
        if len(kinds) != 1:
            raise EmulationError(f"lanes of one warp diverged at a collective: {sorted(kinds)}")
        results = _collect(kinds.pop(), [request[1:] for request in requests])
